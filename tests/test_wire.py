"""Values and messages between judge and program."""

import collections
import json
import socket
import sys
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from support.wire import Wire, receive, send

Pair = collections.namedtuple("Pair", "left right")
keys = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.booleans())
numbers = st.integers() | st.integers(min_value=2**62) | st.floats(allow_nan=False)
ranges = st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
others = st.sampled_from([np.int64(1), np.float64(1), np.bool_(True), 1j])
leaves = st.none() | st.booleans() | numbers | ranges | st.text() | st.binary() | others


def containers(inner):
    many, table, flat = st.lists(inner), st.dictionaries(keys, inner), st.lists(keys)
    found = [many, table, table.map(lambda x: collections.defaultdict(list, x))]
    found += [many.map(tuple), many.map(lambda x: collections.deque(x, 5 if x else None))]
    found += [flat.map(kind) for kind in (set, frozenset, collections.Counter)]
    return st.one_of(*found, table.map(collections.OrderedDict))


def kinds(x):
    """The types of a value and of all in it, in order: 1 == 1.0 == True."""
    if isinstance(x, dict):
        return type(x), [(kinds(key), kinds(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple, collections.deque)):
        return type(x), getattr(x, "maxlen", None), [kinds(value) for value in x]
    return type(x)


class Shared:
    """The other side of a wire that knows builtins only."""

    def export(self, x, wire):
        return ["shared", x.__name__]

    def load(self, kind, parts, wire):
        return {"list": list, "int": int}[parts[0]]

    def may_change(self, x):
        return True


def ends():
    return Wire(Shared()), Wire(Shared())


@settings(max_examples=60)
@given(st.recursive(leaves, containers, max_leaves=8))
def test_data_crosses_exactly(x):
    """Also its way back, on which the other side takes the part of the first."""
    one, other = ends()
    (y,) = other.read(one.write(x))
    (z,) = Wire(Shared()).read(Wire(Shared()).write(y))
    for copy in (y, z):
        assert copy == x and kinds(copy) == kinds(x)


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1), st.data())
def test_what_one_side_changes_the_other_side_sees(rows, draw):
    one, other = ends()
    rows = [*rows, rows[0]]  # one list twice
    (copy,) = other.read(one.write(rows))
    assert copy[-1] is copy[0]
    for here, there, mine, theirs in ((one, other, rows, copy), (other, one, copy, rows)):
        place = draw.draw(st.integers(0, len(rows) - 1))
        mine[place].append(draw.draw(st.integers()))
        mine.append(mine[place])
        there.read(here.write())
        assert theirs == mine and theirs[-1] is theirs[place]


def test_an_array_is_changed_in_place():
    """As all containers are: tests/cases/arguments.jsonl has the others."""
    one, other = ends()
    array = np.zeros((2, 2))
    (copy,) = other.read(one.write(array))
    copy.fill(7)
    one.read(other.write())
    assert array.tolist() == [[7, 7], [7, 7]]


def test_only_what_changed_is_told():
    one, _ = ends()
    a, b = [1], [2]
    one.write(a, b)
    b.append(3)
    # What is gone, what changed (number 1 is [2, 3] now), then the values: the same number 0.
    assert json.loads(one.write(a)) == [[], [[1, [2, 3]]], ["same", 0]]
    assert json.loads(one.write(5)) == [[], [], 5]


def test_equal_named_tuples_have_one_class():
    one, other = ends()
    pairs = [Pair(n, n) for n in range(1000)]
    (copies,) = other.read(one.write(pairs))
    assert copies == pairs and len({type(x) for x in copies}) == 1
    fields = json.dumps([f"a{n}" for n in range(1000)])[1:-1]
    for text in (f'"x", 1000, {fields}', f'"{"x" * 5000}", 0', f'"x", 1, "{"a" * 5000}", 1'):
        with pytest.raises(ValueError, match="absurd"):
            one.read(f'[[], [], ["namedtuple", {text}]]')


@pytest.mark.parametrize("kind", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_values_nest_to_a_depth_that_both_sides_know(kind, request):
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    limit = 1000  # Python's own; what other tests import may have raised it
    sys.setrecursionlimit(limit)
    one, other = ends()
    deep = [1]
    for _ in range(1000):
        deep = kind(deep)
    (copy,) = other.read(one.write(deep))
    assert Wire(Shared()).write(copy) == Wire(Shared()).write(deep)
    with pytest.raises(ValueError, match="nested too deeply"):
        Wire().write(deep)  # the trainer, with all its threads, keeps its limit
    for _ in range(10_000):
        deep = kind(deep)
    with pytest.raises(ValueError, match="nested too deeply"):
        one.write(deep)
    assert sys.getrecursionlimit() == limit


def test_a_message_that_fails_leaves_no_trace():
    """Its changes and new objects are told later, and what was to go with it is still known."""
    one, other = ends()
    x, new = [1], [4]
    (copy,) = other.read(one.write(x))
    x.append(2)
    with pytest.raises(ValueError, match="absurd"):
        one.write([3], 1 << (1 << 22), gone=[0])
    y, z = other.read(one.write(x, new))
    assert y is copy and (y, z) == ([1, 2], [4])
    y.append(3)
    z.append(5)
    one.read(other.write())
    assert x == [1, 2, 3] and new == [4, 5]


def test_what_is_gone_is_a_new_object_when_it_comes_again():
    one, other = ends()
    x = [1]
    (y,) = other.read(one.write(x))
    x.append(2)
    other.read(one.write(gone=[0]))  # its last change is told
    assert y == [1, 2] and not one.objects and not other.objects
    (z,) = other.read(one.write(x))
    assert z == [1, 2] and z is not y


def test_a_forged_message_raises_an_exception():
    large = '["int", "0x' + "f" * 10**6 + '"]'
    values = """["range", 0, 9, 0]
        ["numpy", "<i8", null, ["range", 0, 9, 1]]
        ["items", ["range", 0, 2, 1]]
        ["numpy", "O", null, 1]
        ["numpy", "<U99999", null]
        ["same", 7]
        ["no such kind", 7]"""
    for value in (large, "[" * 100_000 + "]" * 100_000, *values.split("\n")):
        with pytest.raises(Exception):  # noqa: B017
            Wire(Shared()).read(f"[[], [], {value}]")


def test_a_message_that_is_late_too_long_or_cut_has_an_exception_of_its_own():
    mine, theirs = socket.socketpair()
    send(theirs, "one")
    assert receive(mine) == "one"
    theirs.sendall(b"half")
    with pytest.raises(TimeoutError):
        receive(mine, seconds=0.01)
    theirs.sendall(b"x" * 1000)
    with pytest.raises(OverflowError):
        receive(mine, limit=100, seconds=5)
    theirs.close()
    with pytest.raises(EOFError):
        receive(mine, seconds=5)
