"""Values on the wire between the judge and a program.

A message is one line of JSON: [gone, changes, value, ...]. A number, a text, true, false and null
stand for themselves. All else is a list that begins with its kind: ["tuple", 1, 2].

Lists, dicts and the like exist twice, here and there, and are kept equal. Both sides count all that
goes as a list as they meet it, so both know ["same", 0] as the first one. `changes` tells the new
contents of those that the sender has changed since its last message, `gone` the numbers that both
forget after it. An example: the judge calls f(xs) with xs = [3, 1]. Number 0 was the dict that held
f, 1 is xs. f itself is no data: 7 is its place in a list of the program's own. null: no keyword
arguments. false: it did not raise.

    judge                                        [[0], [], ["object", 7], null, ["list", 3, 1]]
    program, which sorted xs and returns it      [[], [[1, [1, 3]]], false, ["same", 1]]

In: values of either side. Out: messages, and what is read of them. Standard library only.
"""

import functools
import importlib
import json
import re
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from itertools import chain
from operator import is_not
from time import monotonic  # taken by name: a program may change what modules hold
from typing import Any

ATOMS = {str, bool, float, type(None)}
BUILTINS = """int float complex str bool bytes list tuple dict set frozenset range object type len
    sum min max abs round sorted reversed repr all any ord chr hex bin oct divmod pow hash
    isinstance issubclass callable map filter zip enumerate"""
SHARED = set(BUILTINS.split())  # they cross by name: the judge calls them, so none does harm
CHANGEABLE = (list, dict, set, bytearray, deque)
LARGEST_INT = 1 << 21  # bits; an operation on two such numbers takes about a second
DEEPEST = 2500  # calls within calls, enough for 1,200 values within values


def contents(x: Any) -> list:
    """The parts of a container; the keys and values of a dict in turn."""
    if isinstance(x, dict):
        return list(chain.from_iterable(x.items()))
    if hasattr(x, "tolist"):  # of numpy
        return x.ravel().tolist()
    return list(x)


def fill(x: Any, parts: list) -> Any:
    """Give a container new contents, in place."""
    if isinstance(x, (list, bytearray)):
        x[:] = parts
    elif hasattr(x, "tolist"):
        x.flat = parts
    else:
        x.clear()
        if isinstance(x, dict):
            for key, value in zip(parts[::2], parts[1::2], strict=True):
                x[key] = value  # not update(): a Counter would add
        elif isinstance(x, deque):
            x.extend(parts)
        else:
            x.update(parts)
    return x


def checked(x: int) -> int:
    """Refuse an integer whose next operation could take for ever."""
    if x.bit_length() > LARGEST_INT:
        raise ValueError(f"an integer of absurd size ({x.bit_length():,} bits) cannot cross")
    return x


def numpy_parts(x: Any) -> list:
    if x.dtype.kind not in "biufcU":
        raise TypeError(f"numpy values of type {x.dtype} cannot cross")
    shape = x.shape if type(x).__name__ == "ndarray" else None
    return [x.dtype.str, shape, *contents(x)]


def make_numpy(kind: str, shape: Any, *values: Any) -> Any:
    numpy = importlib.import_module("numpy")
    plain = set(map(type, values)) <= {bool, int, float, complex, str}  # numpy would copy a range
    if not plain or not re.fullmatch(r"[<>|=]?[biufcU]\d{1,4}", kind):
        raise ValueError(f"no numpy value of type {kind}")
    array = numpy.array(values, numpy.dtype(kind))
    return array[0] if shape is None else array.reshape(shape)


def make_namedtuple(name: str, size: int, *parts: Any) -> tuple:
    fields = parts[:size]
    if sum(map(len, fields), len(name)) > 2000:
        raise ValueError("the names of a named tuple are of absurd size")
    return namedtuple_class(name, *fields)(*parts[size:])


@functools.lru_cache(100)
def namedtuple_class(name: str, *fields: str) -> type:
    """To make a class is slow: a list of many such tuples makes it once."""
    return namedtuple(name, fields)


KINDS = {  # kind: (type, the parts of a value, the value from its parts; None: see Wire.unpack)
    "list": (list, contents, None),
    "dict": (dict, contents, None),
    "set": (set, list, None),
    "bytearray": (bytearray, list, None),
    "Counter": (Counter, contents, None),
    "OrderedDict": (OrderedDict, contents, None),
    "defaultdict": (
        defaultdict,
        lambda x: [x.default_factory, *contents(x)],
        lambda factory, *parts: fill(defaultdict(factory), parts),
    ),
    "deque": (deque, lambda x: [x.maxlen, *x], lambda size, *parts: deque(parts, size)),
    "tuple": (tuple, list, lambda *parts: parts),
    "frozenset": (frozenset, list, lambda *parts: frozenset(parts)),
    "bytes": (bytes, lambda x: [x.decode("latin-1")], lambda text: text.encode("latin-1")),
    "int": (int, lambda x: [hex(checked(x))], lambda text: checked(int(text, 16))),
    "range": (range, lambda x: [x.start, x.stop, x.step], range),
    "complex": (complex, lambda x: [x.real, x.imag], complex),
    "keys": (type({}.keys()), list, lambda *parts: dict.fromkeys(parts).keys()),
    "values": (type({}.values()), list, lambda *parts: dict(enumerate(parts)).values()),
    "items": (
        type({}.items()),
        lambda x: list(chain.from_iterable(x)),
        lambda *parts: fill({}, parts).items(),
    ),
    "namedtuple": (None, lambda x: [type(x).__name__, len(x), *x._fields, *x], make_namedtuple),
    "numpy": (None, numpy_parts, make_numpy),
}
NAMES = {row[0]: name for name, row in KINDS.items()}
for name in ("keys", "values", "items"):
    NAMES[type(getattr(OrderedDict(), name)())] = name


def kind_of(x: Any) -> str | None:
    """Which row of KINDS a value goes by."""
    kind = type(x)
    if kind in NAMES:
        return NAMES[kind]
    if isinstance(x, tuple) and hasattr(kind, "_fields"):
        return "namedtuple"
    return "numpy" if kind.__module__ == "numpy" and hasattr(x, "tolist") else None


def nested_deeply(calls: int) -> Any:
    """Decorate a method of Wire: it runs under a recursion limit of its own, `calls`.

    So the depth of values that cross does not depend on the limit that a program has set.
    """

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def deeper(wire: "Wire", *args: Any, **kwargs: Any) -> Any:
            usual = sys.getrecursionlimit()
            if wire.owner:  # not in the trainer: the limit holds for all of its threads
                sys.setrecursionlimit(calls)
            try:
                return method(wire, *args, **kwargs)
            except RecursionError:
                raise ValueError("a value is nested too deeply to cross") from None
            finally:
                if wire.owner:
                    sys.setrecursionlimit(usual)

        return deeper

    return decorate


class Wire:
    """Values as JSON, and the containers that both sides hold, kept equal.

    owner: the Program or the Values whose wire this is. What is no data goes through
    owner.export(x, wire), and comes through owner.load(kind, parts, wire). No change comes to what
    owner.may_change(x) forbids. A problem is data: the wire that carries it has no owner.

    >>> wire, a = Wire(), [3, 1]
    >>> wire.write((a, {"k": b"x"}), 2.5)
    '[[], [], ["tuple", ["list", 3, 1], ["dict", "k", ["bytes", "x"]]], 2.5]'
    >>> a.append(2)
    >>> wire.write(a)
    '[[], [[1, [3, 1, 2]]], ["same", 1]]'
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self.objects: dict = {}  # what both sides hold, by number
        self.numbers: dict = {}  # the numbers, by id
        self.before: dict = {}  # the contents when both sides were last equal, by number
        self.count = 0  # the next number

    @nested_deeply(DEEPEST)
    def write(self, *values: Any, gone: Any = (), tell_changes: bool = True) -> str:
        """A message. Raises TypeError for what cannot cross, ValueError for absurd sizes."""
        first, changed = self.count, {}
        forgotten = [(number, self.objects[number], self.before.get(number)) for number in gone]
        for number, old in self.before.items() if tell_changes else ():
            new = contents(self.objects[number])
            if len(new) != len(old) or any(map(is_not, new, old)):
                changed[number] = new
        try:
            changes = [(number, self.pack_all(new)) for number, new in changed.items()]
            for number in gone:  # before the values: the other side forgets them there, too
                self.forget(number)
            text = json.dumps([gone, changes, *map(self.pack, values)])
        except BaseException:
            for number in range(first, self.count):  # the other side never met them
                self.forget(number)
            self.count = first
            for number, x, old in forgotten:  # nor was it told of these
                self.objects[number], self.numbers[id(x)] = x, number
                if old is not None:
                    self.before[number] = old
            raise
        self.before |= {number: new for number, new in changed.items() if number in self.objects}
        self.remember(first)
        return text

    @nested_deeply(DEEPEST + 500)  # more than the writer's: what could be written can be read
    def read(self, text: str) -> list:
        """The values of a message. From a hostile program any exception may follow."""
        first = self.count
        gone, changes, *values = json.loads(text)
        for number, parts in changes:
            x = self.objects[number]
            new = self.unpack_all(parts)
            if self.owner.may_change(x):
                fill(x, new)
            self.before[number] = contents(x)
        for number in gone:
            self.forget(number)
        values = self.unpack_all(values)
        self.remember(first)
        return values

    def note(self, x: Any) -> int:
        """Give a container that is met the next number."""
        number = self.count
        self.count += 1
        self.numbers[id(x)], self.objects[number] = number, x
        return number

    def remember(self, first: int) -> None:
        """Take down the contents of what was met since a number."""
        for number in range(first, self.count):
            x = self.objects[number]
            if isinstance(x, CHANGEABLE) or type(x).__name__ == "ndarray":
                self.before[number] = contents(x)

    def forget(self, number: int) -> None:
        self.before.pop(number, None)
        self.numbers.pop(id(self.objects.pop(number, None)), None)

    def pack(self, x: Any) -> Any:
        """A value as JSON has it."""
        kind = type(x)
        if kind in ATOMS or (kind is int and -(2**63) < x < 2**63):
            return x
        if id(x) in self.numbers:
            return ["same", self.numbers[id(x)]]
        name = kind_of(x)
        if name is None and self.owner is None:
            raise TypeError(f"a value of type {kind.__name__} cannot cross")
        if name is None:
            return self.owner.export(x, self)
        self.note(x)
        return [name, *self.pack_all(KINDS[name][1](x))]

    def pack_all(self, parts: list) -> list:
        kinds = set(map(type, parts))
        if kinds <= ATOMS or (kinds == {int} and min(parts) > -(2**63) and max(parts) < 2**63):
            return parts
        return list(map(self.pack, parts))

    def unpack(self, x: Any) -> Any:
        """A value from JSON."""
        if type(x) is not list:
            return x
        kind, *parts = x
        if kind == "same":
            return self.objects[parts[0]]
        if kind not in KINDS:
            return self.owner.load(kind, parts, self)
        plain, _, make = KINDS[kind]
        if make is None:  # first noted, then filled: it may hold itself
            value = plain()
            self.note(value)
            return fill(value, self.unpack_all(parts))
        number = self.note(None)
        value = make(*self.unpack_all(parts))
        self.objects[number], self.numbers[id(value)] = value, number
        return value

    def unpack_all(self, parts: list) -> list:
        return list(map(self.unpack, parts)) if list in set(map(type, parts)) else parts


def send(connection: socket.socket, text: str) -> None:
    """Send one message: a line."""
    connection.sendall(text.encode() + b"\n")


def receive(connection: socket.socket, limit: float = 1e9, seconds: float | None = None) -> str:
    """One message. Raises EOFError (the other is gone), TimeoutError, OverflowError (bytes)."""
    end = monotonic() + (seconds or 0)
    line = bytearray()
    while not line.endswith(b"\n"):
        if seconds is not None:
            connection.settimeout(max(0.001, end - monotonic()))
        part = connection.recv(1 << 16)
        if not part:
            raise EOFError("the other side is gone")
        line += part
        if len(line) > limit:
            raise OverflowError("the message is too long")
    return line[:-1].decode()


def without_addresses(text: str) -> str:
    """A text in which no object tells its address: it is another one in each run."""
    return re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", text)


def shorten(text: str, room: int) -> str:
    """At most `room` characters of a text: its head and its tail, with the cut marked."""
    text = without_addresses(text)
    if len(text) <= room:
        return text
    half = max(0, room - 26) // 2
    return f"{text[:half]}...[{len(text) - 2 * half} cut]...{text[len(text) - half :]}"
