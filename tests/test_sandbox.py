"""What a program does when it is asked."""

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import executor
from support.sandbox import Program, run_named


@pytest.fixture(autouse=True, scope="module")
def workers_end():
    yield
    executor.close()


def returned(code, value):
    """The result of a program whose f() must return a value."""
    p = SimpleNamespace(kind="functional", tests=[[[], value]], public_tests=[], entry_point="f")
    return executor.run(p, code)


def program(classes=()):
    made = Program(None)
    made.named = set(classes)
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


# ---------------------------------------------------------------------- as in plain Python

CHANGES = [
    "import json\njson.dumps = json.loads = None",
    "import json\njson.JSONEncoder.iterencode = json.JSONDecoder.decode = None",
    "import builtins\nbuiltins.list = builtins.map = builtins.set = builtins.isinstance = None",
    "import collections, operator, time\noperator.is_not = time.monotonic = None\n"
    "collections.deque = collections.OrderedDict = None",
    "import os\nos._exit = None",
    "__builtins__ = None",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_may_change_modules_without_breaking_its_messages(change):
    assert returned(f"{change}\ndef f(): return [1, [2]]", [1, [2]]).status == "passed"


def test_what_a_program_changes_in_builtins_it_sees_itself():
    code = "import builtins\nbuiltins.len = lambda x: 7\ndef f(): return [len([]), max(1, 2)]"
    assert returned(code, [7, 2]).status == "passed"


def test_a_program_knows_its_file_and_its_source():
    head = "import inspect, os, traceback\n"
    assert returned(head + "def f(): return os.path.dirname(__file__)", "").status == "passed"
    source = "def f(): return inspect.getsource(f)"
    assert returned(head + source, source).status == "passed"
    own_class = "class A:\n    x = 1\n"
    code = head + own_class + "def f(): return inspect.getsource(A)"
    assert returned(code, own_class).status == "passed"


@pytest.mark.parametrize(
    "code, feedback",
    [
        ("def f(): return 1\0", "source code string cannot contain null bytes"),
        ("def f(): raise SyntaxError('odd')", "f() raised SyntaxError: odd (line 1"),
        ("def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", "too deeply"),
        (
            "import sys\nsys.setrecursionlimit(10**6)\n"
            "def f():\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
            "too deeply",
        ),
        ("def f(): return 1 << (1 << 22)", "an integer of absurd size"),
    ],
)
def test_what_is_wrong_is_said(code, feedback):
    result = returned(code, 0)
    assert result.status == "error" and feedback in result.feedback


def test_values_may_be_nested_deeply():
    code = "def f():\n    x = None\n    for _ in range(900): x = {'next': x}\n    return x"
    tests = ["x, n = f(), 0\nwhile x:\n    x, n = x['next'], n + 1\nassert n == 900"]
    p = SimpleNamespace(kind="assert", tests=tests, public_tests=[], entry_point="f")
    assert executor.run(p, code).status == "passed"


def test_threads_and_files_that_a_usual_program_needs():
    threads = (
        "import threading\ndef f():\n    go = threading.Event()\n"
        "    many = [threading.Thread(target=go.wait) for _ in range(150)]\n"
        "    for t in many: t.start()\n    go.set()\n    for t in many: t.join()\n    return 1"
    )
    assert returned(threads, 1).status == "passed"
    files = "import tempfile\ndef f(): return len([tempfile.TemporaryFile() for _ in range(200)])"
    assert returned(files, 200).status == "passed"
    recursion = (
        "import threading\ndef depth(n): return n and max([n], key=lambda n: depth(n - 1))\n"
        "def f():\n    found = []\n"
        "    t = threading.Thread(target=lambda: found.append(depth(300)))\n"
        "    t.start()\n    t.join()\n    return found"
    )
    assert returned(recursion, [300]).status == "passed"  # its stack is smaller than the usual one


ENDINGS = [
    *(f"print(1)\nsys.exit({code})" for code in ("", "0", "256", "0.0", "1", "'text'", "''")),
    *(f"print(1)\nsys.exit({code})" for code in ("None", "False", "True", "[]", "-1")),
    "print(1, flush=True)\nos._exit(0)",
    "print(1, flush=True)\nos._exit(1)",
    "print(1)\nos._exit(0)",
    "print(1)\nraise SystemExit",
    "print(1)\nraise KeyboardInterrupt",
    "threading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
    "threading.Thread(target=lambda: (time.sleep(9), print(2)), daemon=True).start()\nprint(1)",
    "threading.Thread(target=lambda: 1 / 0).start()\nprint(1)",
    "atexit.register(print, 1)",
    "atexit.register(lambda: 1 / 0)\nprint(1)",
    "atexit.register(print, 1)\nsys.exit(1)",
    "sys.stdout.write('1')",
    "print(1)\nsys.stdout.close()",
    "print(1, flush=True)\nos.close(1)",
    "print(1)\nos.close(1)",
    "sys.stdout = open(1, 'w')\nprint(1)",
    "file = open(1, 'w', closefd=False)\nfile.write('1')",
    "sys.stdout = io.StringIO()\nprint(1)",
    "sys.stdout = 5",
    # Programs of contests print so; its flush() needs a global name.
    "class Fast(io.StringIO):\n    def flush(self): os.write(1, self.getvalue().encode())\n"
    "sys.stdout = Fast()\nprint(1)",
    "class Late:\n    def __del__(self): print(1)\nlate = Late()",
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_main_program_ends_as_python_ends_it(ending):
    code = f"import atexit, io, os, sys, threading, time\n{ending}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    p = SimpleNamespace(kind="stdin", tests=[["", "1"]], public_tests=[])
    right = done.returncode == 0 and done.stdout.strip() == "1"
    assert executor.run(p, code).reward == right


def test_the_number_of_a_process_does_not_tell_what_ran_before():
    seen = SimpleNamespace(kind="functional", tests=[[[], 0]], entry_point="f")
    threads = (
        "import threading\ndef f():\n    for _ in range(9):\n        threading.Thread().start()\n"
    )
    look = "import os\ndef f(): return os.getpid()"
    first, _, second = executor.run_many(
        [(seen, look), (seen, threads), (seen, look + "\n")], workers=1
    )
    assert first.feedback == second.feedback
