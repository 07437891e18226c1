"""Values on the wire between the judge and a program.

A message is one line of JSON. A plain value is itself; all else is a list that begins with its
kind. Both sides count the containers as they first meet them, so ["same", 0] means the same list
to both. A message begins with what its sender has changed since the last one. An example, as the
judge calls f(xs) with xs = [3, 1]:

    judge    the call                        [[], [], ["object", 7], null, ["list", 3, 1]]
    program  sorts xs and returns it         [[], [[0, [1, 3]]], false, ["same", 0]]

In: values of either side. Out: messages, and what is read of them. Standard library only.
"""

import collections
import importlib
import itertools
import json
import operator
import re
import socket
import time
from typing import Any

ATOMS = {str, bool, float, type(None)}
SHARED = """int float complex str bool bytes list tuple dict set frozenset range object type len
    sum min max abs round sorted reversed repr all any ord chr hex bin oct divmod pow hash
    isinstance issubclass callable map filter zip enumerate"""
SHARED = set(SHARED.split())  # builtins that cross by name: the judge calls them, so none does harm


def contents(x: Any) -> list:
    """The parts of a container; the keys and values of a dict in turn."""
    if isinstance(x, dict):
        return list(itertools.chain.from_iterable(x.items()))
    if hasattr(x, "tolist"):  # of numpy
        return x.ravel().tolist()
    return list(x)


def fill(x: Any, parts: Any) -> Any:
    """Give a container new contents, in place."""
    if isinstance(x, dict):
        x.clear()
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            x[key] = value
    elif isinstance(x, (list, bytearray)):
        x[:] = parts
    elif hasattr(x, "tolist"):
        x.flat = parts
    else:
        x.clear()
        x.extend(parts) if isinstance(x, collections.deque) else x.update(parts)
    return x


def checked(x: Any) -> Any:
    """Refuse an integer or a range whose next operation could take for ever."""
    size = x.bit_length() if isinstance(x, int) else abs(x.stop - x.start)
    if size > (1 << 21 if isinstance(x, int) else 10**7):
        raise ValueError(f"a {type(x).__name__} of absurd size")
    return x


def numpy_parts(x: Any) -> list:
    if x.dtype.kind not in "biufcU":
        raise TypeError(f"numpy values of type {x.dtype} cannot cross")
    shape = x.shape if type(x).__name__ == "ndarray" else None
    return [x.dtype.str, shape, *contents(x)]


def make_numpy(kind: str, shape: Any, *values: Any) -> Any:
    numpy = importlib.import_module("numpy")
    if not re.fullmatch(r"[<>|=]?[biufcU]\d{1,4}", kind):
        raise ValueError(kind)
    array = numpy.array(values, numpy.dtype(kind))
    return array[0] if shape is None else array.reshape(shape)


def make_namedtuple(name: str, size: int, *parts: Any) -> tuple:
    return collections.namedtuple(name, parts[:size])(*parts[size:])


KINDS = {  # kind: (type, the parts of a value, the value from its parts; None: filled, see unpack)
    "list": (list, contents, None),
    "dict": (dict, contents, None),
    "set": (set, list, None),
    "bytearray": (bytearray, list, None),
    "Counter": (collections.Counter, contents, None),
    "OrderedDict": (collections.OrderedDict, contents, None),
    "defaultdict": (
        collections.defaultdict,
        lambda x: [x.default_factory, *contents(x)],
        lambda factory, *parts: fill(collections.defaultdict(factory), parts),
    ),
    "deque": (
        collections.deque,
        lambda x: [x.maxlen, *x],
        lambda size, *parts: collections.deque(parts, size),
    ),
    "tuple": (tuple, list, lambda *parts: parts),
    "frozenset": (frozenset, list, lambda *parts: frozenset(parts)),
    "bytes": (bytes, lambda x: [x.decode("latin-1")], lambda text: text.encode("latin-1")),
    "int": (int, lambda x: [hex(checked(x))], lambda text: checked(int(text, 16))),
    "range": (
        range,
        lambda x: [checked(x).start, x.stop, x.step],
        lambda *parts: checked(range(*parts)),
    ),
    "complex": (complex, lambda x: [x.real, x.imag], complex),
    "keys": (type({}.keys()), list, lambda *parts: dict.fromkeys(parts).keys()),
    "values": (type({}.values()), list, lambda *parts: dict(enumerate(parts)).values()),
    "items": (type({}.items()), list, lambda *parts: dict(parts).items()),
    "namedtuple": (None, lambda x: [type(x).__name__, len(x), *x._fields, *x], make_namedtuple),
    "numpy": (None, numpy_parts, make_numpy),
}
NAMES = {row[0]: name for name, row in KINDS.items()}
CHANGEABLE = (list, dict, set, bytearray, collections.deque)


def kind_of(x: Any) -> str | None:
    """Which row of KINDS a value goes by."""
    kind = type(x)
    if kind in NAMES:
        return NAMES[kind]
    if isinstance(x, tuple) and hasattr(kind, "_fields"):
        return "namedtuple"
    return "numpy" if kind.__module__ == "numpy" and hasattr(x, "tolist") else None


class Wire:
    """Values as JSON, and the containers that both sides hold, kept equal.

    A message is [gone, changes, value, ...]: numbers that both sides forget after the changes, the
    new contents of what this side changed since the last message, and values. What is no data goes
    through other.export(x, wire), and comes through other.load(kind, parts, wire).

    >>> wire, a = Wire(), [3, 1]
    >>> wire.write((a, {"k": b"x"}), 2.5)
    '[[], [], ["tuple", ["list", 3, 1], ["dict", "k", ["bytes", "x"]]], 2.5]'
    >>> a.append(2)
    >>> wire.write(a)
    '[[], [[1, [3, 1, 2]]], ["same", 1]]'
    """

    def __init__(self, other: Any = None) -> None:
        self.other = other
        self.objects: dict = {}  # what both sides hold, by number
        self.numbers: dict = {}  # the numbers, by id
        self.before: dict = {}  # the contents when both sides were last equal, by number
        self.count = 0

    def write(self, *values: Any, gone: Any = (), tell_changes: bool = True) -> str:
        """A message. Raises TypeError for what cannot cross, ValueError for absurd sizes."""
        first, changed = self.count, {}
        for number, old in self.before.items() if tell_changes else ():
            new = contents(self.objects[number])
            if len(new) != len(old) or any(map(operator.is_not, new, old)):
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
            raise
        self.before |= {number: new for number, new in changed.items() if number in self.objects}
        self.remember(first)
        return text

    def read(self, text: str) -> list:
        """The values of a message. From a hostile program any exception may follow."""
        gone, changes, *values = json.loads(text)
        first = self.count
        for number, parts in changes:
            x = self.objects[number]
            new = self.unpack_all(parts)
            if self.other.may_change(x):
                fill(x, new)
            self.before[number] = contents(x)
        for number in gone:
            self.forget(number)
        values = self.unpack_all(values)
        self.remember(first)
        return values

    def note(self, x: Any) -> int:
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
        kind = type(x)
        if kind in ATOMS or (kind is int and -(2**63) < x < 2**63):
            return x
        if id(x) in self.numbers:
            return ["same", self.numbers[id(x)]]
        name = kind_of(x)
        if name is None and self.other is None:
            raise TypeError(f"a value of type {kind.__name__} cannot cross")
        if name is None:
            return self.other.export(x, self)
        self.note(x)
        return [name, *self.pack_all(KINDS[name][1](x))]

    def pack_all(self, parts: list) -> list:
        kinds = set(map(type, parts))
        if kinds <= ATOMS or (kinds == {int} and min(parts) > -(2**63) and max(parts) < 2**63):
            return parts
        return list(map(self.pack, parts))

    def unpack(self, x: Any) -> Any:
        if type(x) is not list:
            return x
        kind, *parts = x
        if kind == "same":
            return self.objects[parts[0]]
        if kind not in KINDS:
            return self.other.load(kind, parts, self)
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
    end = time.monotonic() + (seconds or 0)
    line = bytearray()
    while not line.endswith(b"\n"):
        if seconds is not None:
            connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(1 << 16)
        if not part:
            raise EOFError("the other side is gone")
        line += part
        if len(line) > limit:
            raise OverflowError("the message is too long")
    return line[:-1].decode()


def shorten(text: str, room: int) -> str:
    """At most `room` characters of a text: its head and its tail, with the cut marked."""
    text = re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", text)  # another address in each run
    if len(text) <= room:
        return text
    half = max(0, room - 26) // 2
    return f"{text[:half]}...[{len(text) - 2 * half} cut]...{text[len(text) - half :]}"
