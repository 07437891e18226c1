"""Values and messages between judge and program."""

import json
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from support.wire import Wire, receive, send

keys = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.booleans())
numbers = st.integers() | st.integers(min_value=2**62) | st.floats(allow_nan=False)
ranges = st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
others = st.sampled_from([np.int64(1), np.float64(1), np.bool_(True), 1j])
leaves = st.none() | st.booleans() | numbers | ranges | st.text() | st.binary() | others


def containers(inner):
    many, table, flat = st.lists(inner), st.dictionaries(keys, inner), st.lists(keys)
    found = [many, many.map(tuple), many.map(lambda x: deque(x, 5 if x else None))]
    found += [flat.map(kind) for kind in (set, frozenset, Counter)]
    found += [table, table.map(OrderedDict), table.map(lambda x: defaultdict(list, x))]
    return st.one_of(*found)


def kinds(x):
    """The types of a value and of all in it, in order: 1 == 1.0 == True."""
    if isinstance(x, dict):
        return type(x), [(kinds(key), kinds(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple, deque)):
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
    for _ in range(2):
        (copy,) = Wire(Shared()).read(Wire(Shared()).write(x))
        assert copy == x and kinds(copy) == kinds(x)
        x = copy


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
    b[0] = 2.0  # equal, but not the same
    assert one.write() == "[[], [[1, [2.0, 3]]]]"


def test_equal_named_tuples_have_one_class():
    one, other = ends()
    pair = namedtuple("pair", "left right")
    pairs = [pair(n, n) for n in range(1000)]
    (copies,) = other.read(one.write(pairs))
    assert copies == pairs and len({type(x) for x in copies}) == 1


@pytest.mark.parametrize("kind", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_values_nest_to_a_depth_that_both_sides_know(kind, request):
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's own; what other tests import may have raised it
    one, other = ends()
    deep = [1]
    for depth in range(11_000):
        deep = kind(deep)
        if depth == 1000:
            (copy,) = other.read(one.write(deep))
            assert Wire(Shared()).write(copy) == Wire(Shared()).write(deep)
            with pytest.raises(ValueError, match="nested too deeply"):
                Wire().write(deep)  # the trainer, with all its threads, keeps its limit
    with pytest.raises(ValueError, match="nested too deeply"):
        one.write(deep)
    assert sys.getrecursionlimit() == 1000


def test_a_message_that_fails_leaves_no_trace():
    """Its changes, its new objects and what is gone are told later."""
    one, other = ends()
    x, new = [1], [4]
    (copy,) = other.read(one.write(x))
    x.append(2)
    with pytest.raises(ValueError, match="absurd"):
        one.write([3], 1 << (1 << 22), gone=[0])
    y, z = other.read(one.write(x, new))
    assert (y, z) == ([1, 2], [4]) and copy not in other.objects.values()
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
    absurd = [["int", "0x" + "f" * 10**6], ["namedtuple", "x" * 5000, 0]]
    absurd.append(["namedtuple", "x", 1, "a" * 5000])
    absurd.append(["namedtuple", "x", 1000, *(f"a{n}" for n in range(1000))])
    for value in absurd:
        with pytest.raises(ValueError, match="absurd"):
            Wire(Shared()).read(json.dumps([[], [], value]))
    forged = [["range", 0, 9, 0], ["items", ["range", 0, 2, 1]], ["same", 7], ["no such kind", 7]]
    forged += [["numpy", "<i8", None, ["range", 0, 9, 1]], ["numpy", "O", None, 1]]
    forged.append(["numpy", "<U99999", None, "x"])
    for text in ("[" * 100_000 + "]" * 100_000, *map(json.dumps, forged)):
        with pytest.raises(Exception):  # noqa: B017
            Wire(Shared()).read(f"[[], [], {text}]")


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
