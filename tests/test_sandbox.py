"""What a program does when it is asked."""

import itertools
import json

import pytest

from support.sandbox import Program, run_named
from support.wire import Wire


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


def program(classes=()):
    made = Program(None)
    made.classes = set(classes)
    return made


def test_an_iterator_says_what_ended_it_after_its_last_item():
    def numbers():
        yield from (1, 2, 3)
        raise KeyError("end")

    made, source = program(), numbers()
    assert made.take(source, 2) == [1, 2] and made.take(source, 5) == [3]
    with pytest.raises(KeyError, match="end"):
        made.take(source, 5)
    with pytest.raises(StopIteration):
        made.take(source, 5)
    assert made.take(itertools.count(), 3) == [0, 1, 2]


def test_a_subclass_crosses_as_its_base_and_cannot_lie_about_it():
    class Liar(int):
        def __index__(self):
            return 7

        __int__ = __eq__ = __index__

    made = program()
    assert json.loads(made.wire.write(Liar(3)))[2] == 3
    assert json.loads(program(["Liar"]).wire.write(Liar(3)))[2][0] == "object"  # the tests name it


def test_objects_stay_and_are_known_by_a_number():
    class Stack:
        def push(self, x): ...

    made, stack = program(), Stack()
    assert json.loads(made.wire.write(stack, Stack))[2:] == [
        ["object", 0, "Stack"],
        ["object", 1, "class Stack"],
    ]
    assert json.loads(made.wire.write(stack.push))[2] == ["method", "push", 0, "Stack"]
    error = json.loads(made.wire.write(KeyError("x")))[2]
    assert error[0] == "error" and error[1][:2] == [
        ["builtins", "KeyError"],
        ["builtins", "LookupError"],
    ]


def test_an_operator_is_done_as_python_does_it():
    class Bag:
        def __getitem__(self, place):
            return [3, 4][place]

        def add(self, x):
            return x + 1

    bag = Bag()
    assert run_named("__getitem__", bag, 1) == 4 and list(run_named("__iter__", bag)) == [3, 4]
    assert run_named("__contains__", bag, 3) and not run_named("__contains__", bag, 5)
    assert run_named("__bool__", bag) is True and run_named("add", bag, x=1) == 2
    assert run_named("__str__", 5) == "5" and run_named("__add__", 2, 3) == 5
    with pytest.raises(TypeError):
        run_named("__len__", bag)
