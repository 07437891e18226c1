"""Values as messages between the judge and a program, and back. Standard library only.

A message is one line of JSON: [gone, changes, value, ...]. A number, a text, true, false and null
stand for themselves. Other data is a list that begins with its kind: (1, 2) is ["tuple", 1, 2].
Each side numbers these lists as it writes or reads them: 0, 1, 2, ... So both have the same
numbers, and data that crosses again is only ["same", its number].

A list or a dict that crossed exists twice, once on each side, and the two are kept equal. `changes`
are pairs of a number and the new contents: what the sender changed since its last message. Then
both sides forget the numbers in `gone`.

An example: the judge calls f(xs) with xs = [3, 1]. The program sorts xs and returns it.

    judge     [[0], [], ["object", 7], null, ["list", 3, 1]]
    program   [[], [[1, [1, 3]]], false, ["same", 1]]

The judge says: forget number 0, a dict that held f. Call f: it is no data, but the program's object
7. There are no keyword arguments. xs is the next data, so its number is 1. The program says: number
1 is [1, 3] now; f did not raise an exception; it returned number 1.
"""

import functools
import json
import re
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from itertools import chain
from operator import is_not  # a name of our own, as monotonic: a program may replace the module's
from time import monotonic
from typing import Any

ATOMS = {str, bool, float, type(None)}  # JSON has them
INT_LIMIT = 2**63  # smaller integers are numbers in JSON, others are of kind "int"
BUILTINS = """int float complex str bool bytes list tuple dict set frozenset range object type len
    sum min max abs round sorted reversed repr all any ord chr hex bin oct divmod pow hash
    isinstance issubclass callable map filter zip enumerate"""
SHARED = set(BUILTINS.split())  # they cross by name; all are harmless when the judge calls them
CHANGEABLE = (list, dict, set, bytearray, deque)
LARGEST_INT = 1 << 21  # bits; to multiply or print such numbers takes about a second
namedtuple_class = functools.lru_cache(100)(namedtuple)  # to make the same class again is slow
DEEPEST = 2500  # calls within calls: about 1,200 nested values. A reader gets 500 more


def contents(x: Any) -> list:
    """The parts of a container: ["a", 1, "b", 2] of {"a": 1, "b": 2}."""
    if isinstance(x, dict):
        return list(chain.from_iterable(x.items()))
    if hasattr(x, "tolist"):  # of numpy
        return x.ravel().tolist()
    return list(x)


def fill(x: Any, parts: list) -> Any:
    """Give a container new contents, in place."""
    if hasattr(x, "tolist"):
        if x.flags.writeable:  # else the program changed its copy only
            x.flat = parts
        return x
    x.clear()
    if isinstance(x, dict):
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            x[key] = value  # not update(): a Counter would add
    elif isinstance(x, set):
        x.update(parts)
    else:
        x.extend(parts)
    return x


def checked_int(x: int) -> int:
    """The integer. Raises ValueError if it is so large that the next operation could take ages."""
    if x.bit_length() > LARGEST_INT:
        raise ValueError(f"an integer of absurd size ({x.bit_length():,} bits) cannot cross")
    return x


def numpy_parts(x: Any) -> list:
    """The dtype, the shape (None for a number) and the elements."""
    if x.dtype.kind not in "biufcU":  # bool, integers, float, complex, text; no objects
        raise TypeError(f"numpy values of type {x.dtype} cannot cross")
    shape = x.shape if type(x).__name__ == "ndarray" else None
    return [x.dtype.str, shape, *contents(x)]


def make_numpy(dtype: str, shape: Any, *elements: Any) -> Any:
    import numpy  # here, because few programs need it

    # A range in a forged message is refused: numpy would write out all of its numbers.
    plain = set(map(type, elements)) <= {bool, int, float, complex, str}
    if not plain or not re.fullmatch(r"[<>|=]?[biufcU]\d{1,4}", dtype):
        raise ValueError(f"no numpy value of type {dtype}")
    array = numpy.array(elements, numpy.dtype(dtype))
    return array[0] if shape is None else array.reshape(shape)


def make_namedtuple(name: str, size: int, *parts: Any) -> tuple:
    """Parts: the names of the `size` fields, then their values."""
    fields = parts[:size]
    if len(name) + sum(map(len, fields)) > 2000:
        raise ValueError("the names of a named tuple are of absurd size")
    return namedtuple_class(name, fields)(*parts[size:])


# kind: (type, a function that takes a value apart, a function that makes it from its parts).
# None: an empty container is made first and filled later, because it may contain itself.
KINDS = {
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
    "int": (int, lambda x: [hex(checked_int(x))], lambda text: checked_int(int(text, 16))),
    "range": (range, lambda x: [x.start, x.stop, x.step], range),
    "complex": (complex, lambda x: [x.real, x.imag], complex),
    "keys": (type({}.keys()), lambda x: [dict.fromkeys(x)], dict.keys),
    "values": (type({}.values()), lambda x: [dict(enumerate(x))], dict.values),
    "items": (type({}.items()), lambda x: [dict(x)], dict.items),
    "namedtuple": (None, lambda x: [type(x).__name__, len(x), *x._fields, *x], make_namedtuple),
    "numpy": (None, numpy_parts, make_numpy),
}
KIND_OF_TYPE = {row[0]: kind for kind, row in KINDS.items()}
for view in ("keys", "values", "items"):
    KIND_OF_TYPE[type(getattr(OrderedDict(), view)())] = view


def kind_of(x: Any) -> str | None:
    """The kind of a value, a key of KINDS. None: it is no data."""
    cls = type(x)
    if cls in KIND_OF_TYPE:
        return KIND_OF_TYPE[cls]
    if isinstance(x, tuple) and hasattr(cls, "_fields"):
        return "namedtuple"
    is_numpy = cls.__module__ == "numpy" and hasattr(x, "tolist")
    return "numpy" if is_numpy else None


class Wire:
    """Values as JSON, and the containers that both sides hold, kept equal.

    owner: takes care of values that are no data. owner.export(x, wire) makes a list for JSON,
    owner.load(kind, parts, wire) a value of such a list. owner.may_change(x): whether the other
    side may change a container. A wire without owner carries data only.

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
        self.gone: list = []  # numbers that this side has forgotten and the other not yet

    def write(self, *values: Any, gone: Any = (), tell_changes: bool = True) -> str:
        """A message. Raises TypeError for what cannot cross, ValueError for absurd sizes."""
        first, usual = self.count, sys.getrecursionlimit()
        changed = self.find_changes() if tell_changes else {}
        self.limit_depth(DEEPEST)
        try:
            changes = [(number, self.pack_all(new)) for number, new in changed.items()]
            self.forget(gone)
            self.gone += gone
            text = json.dumps([self.gone, changes, *map(self.pack, values)])
        except BaseException as error:  # nothing is sent: the new numbers were never given
            self.forget(range(first, self.count))
            self.count = first
            if isinstance(error, RecursionError):
                raise ValueError("a value is nested too deeply to cross") from None
            raise
        finally:
            self.limit_depth(usual)
        self.gone = []
        self.before |= {number: new for number, new in changed.items() if number in self.objects}
        self.remember_contents(first)
        return text

    def read(self, text: str) -> list:
        """The values of a message. If a hostile program wrote it, any exception may be raised."""
        first, usual = self.count, sys.getrecursionlimit()
        self.limit_depth(DEEPEST + 500)
        try:
            gone, changes, *values = json.loads(text)
            for number, parts in changes:
                x = self.objects[number]
                new = self.unpack_all(parts)
                if self.owner.may_change(x):
                    fill(x, new)
                self.before[number] = contents(x)
            self.forget(gone)
            values = self.unpack_all(values)
        finally:
            self.limit_depth(usual)
        self.remember_contents(first)
        return values

    def limit_depth(self, calls: int) -> None:
        """Set the recursion limit, which a program may have changed."""
        if self.owner:  # not in the trainer: there the limit holds for all of its threads
            sys.setrecursionlimit(calls)

    def find_changes(self) -> dict:
        """The new contents of each container that this side changed, by number."""
        changed = {}
        for number, old in self.before.items():
            new = contents(self.objects[number])
            # By identity: to compare with == would run methods of the program, and 1 == True.
            if len(new) != len(old) or any(map(is_not, new, old)):
                changed[number] = new
        return changed

    def give_number(self, x: Any) -> int:
        number = self.count
        self.count += 1
        self.objects[number] = x
        self.numbers[id(x)] = number
        return number

    def remember_contents(self, first: int) -> None:
        """Both sides are equal now: remember the contents of containers from number `first` on."""
        for number in range(first, self.count):
            x = self.objects[number]
            if isinstance(x, CHANGEABLE) or type(x).__name__ == "ndarray":
                self.before[number] = contents(x)

    def forget(self, gone: Any) -> None:
        for number in gone:
            x = self.objects.pop(number, None)
            self.numbers.pop(id(x), None)
            self.before.pop(number, None)

    def pack(self, x: Any) -> Any:
        """A value in the form in which JSON can write it."""
        cls = type(x)
        if cls in ATOMS or (cls is int and -INT_LIMIT < x < INT_LIMIT):
            return x
        if id(x) in self.numbers:
            return ["same", self.numbers[id(x)]]
        kind = kind_of(x)
        if kind is None and self.owner is None:
            raise TypeError(f"a value of type {cls.__name__} cannot cross")
        if kind is None:
            return self.owner.export(x, self)
        self.give_number(x)
        _, take_apart, _ = KINDS[kind]
        return [kind, *self.pack_all(take_apart(x))]

    def pack_all(self, parts: list) -> list:
        """Pack each part. A list of plain numbers or texts is returned as it is: this is fast."""
        types = set(map(type, parts))
        if types <= ATOMS or (types == {int} and -INT_LIMIT < min(parts) <= max(parts) < INT_LIMIT):
            return parts
        return list(map(self.pack, parts))

    def unpack(self, x: Any) -> Any:
        """A value from its form in JSON."""
        if type(x) is not list:
            return x
        kind, *parts = x
        if kind == "same":
            return self.objects[parts[0]]
        if kind not in KINDS:
            return self.owner.load(kind, parts, self)
        cls, _, make = KINDS[kind]
        if make is None:
            value = cls()
            self.give_number(value)
            return fill(value, self.unpack_all(parts))
        number = self.give_number(None)  # the writer, too, numbers a value before its parts
        value = make(*self.unpack_all(parts))
        self.objects[number] = value
        self.numbers[id(value)] = number
        return value

    def unpack_all(self, parts: list) -> list:
        return list(map(self.unpack, parts)) if list in set(map(type, parts)) else parts


def send(connection: socket.socket, text: str) -> None:
    """Send one message: a line."""
    connection.sendall(text.encode() + b"\n")


def receive(connection: socket.socket, limit: float = 1e9, seconds: float | None = None) -> str:
    """Wait for one message. Raises EOFError (the other is gone), TimeoutError or OverflowError."""
    end = monotonic() + (seconds or 0)
    line = bytearray()
    while not line.endswith(b"\n"):  # nothing follows a message before it is answered
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
    """A text with "at 0x..." for each address of an object: addresses differ from run to run."""
    return re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", text)


def shorten(text: str, room: int) -> str:
    """At most `room` characters of a text, without addresses: its head, a mark and its tail."""
    text = without_addresses(text)
    if len(text) <= room:
        return text
    half = max(0, room - 26) // 2  # the mark takes at most 26
    return f"{text[:half]}...[{len(text) - 2 * half} cut]...{text[len(text) - half :]}"
