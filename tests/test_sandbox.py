"""What a program does when it is asked."""

import itertools
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


def returns(value):
    """A problem whose f() must return a value."""
    return SimpleNamespace(kind="functional", tests=[[[], value]], entry_point="f")


def passes(code, value):
    return executor.run(returns(value), code).status == "passed"


def test_an_iterator_says_what_ended_it_after_its_last_item():
    def numbers():
        yield from (1, 2, 3)
        raise KeyError("end")

    made, source = Program(None), numbers()
    assert made.take(source, 2) == [1, 2] and made.take(source, 5) == [3]
    with pytest.raises(KeyError, match="end"):
        made.take(source, 5)
    with pytest.raises(StopIteration):
        made.take(source, 5)
    assert made.take(itertools.count(), 3) == [0, 1, 2]


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


@pytest.mark.parametrize(
    "change",
    [
        "import json\njson.dumps = json.loads = None",
        "import json\njson.JSONEncoder.iterencode = json.JSONDecoder.decode = None",
        "import builtins\nbuiltins.list = builtins.map = builtins.set = builtins.isinstance = None",
        "import collections, operator, time\noperator.is_not = time.monotonic = None\n"
        "collections.deque = collections.OrderedDict = None",
        "import os\nos._exit = None",
        "__builtins__ = None",
    ],
)
def test_a_program_may_change_modules_without_breaking_its_messages(change):
    assert passes(f"{change}\ndef f(): return [1, [2]]", [1, [2]])


def test_a_program_sees_what_it_changes_in_builtins_and_its_own_source():
    changed = "import builtins\nbuiltins.len = lambda x: 7\ndef f(): return [len([]), max(1, 2)]"
    assert passes(changed, [7, 2])
    head = "import inspect, os, traceback\n"
    assert passes(head + "def f(): return os.path.dirname(__file__)", "")
    source = "def f(): return inspect.getsource(f)"
    assert passes(head + source, source)
    own_class = "class A:\n    x = 1\n"
    assert passes(head + own_class + "def f(): return inspect.getsource(A)", own_class)


DEEP = "def f():\n    x = []\n    for _ in range(5000): x = [x]\n    return x"


@pytest.mark.parametrize(
    "code, feedback",
    [
        ("def f(): return 1\0", "source code string cannot contain null bytes"),
        ("def f(): raise SyntaxError('odd')", "f() raised SyntaxError: odd (line 1"),
        (DEEP, "too deeply"),
        (f"import sys\nsys.setrecursionlimit(10**6)\n{DEEP}", "too deeply"),
        ("def f(): return 1 << (1 << 22)", "an integer of absurd size"),
    ],
)
def test_feedback_says_what_is_wrong_with_an_odd_program_or_value(code, feedback):
    result = executor.run(returns(0), code)
    assert result.status == "error" and feedback in result.feedback


def test_threads_and_files_that_a_usual_program_needs_and_not_many_more():
    threads = (
        "import threading\ndef f():\n    go = threading.Event()\n    n = 0\n    many = []\n"
        "    try:\n        while n < 5000:\n"
        "            many.append(threading.Thread(target=go.wait))\n"
        "            many[-1].start()\n            n += 1\n    except RuntimeError: many.pop()\n"
        "    go.set()\n    for t in many: t.join()\n    return 150 < n < 5000"
    )
    assert executor.run(returns(True), threads, memory_mb=4000).status == "passed"
    files = "import tempfile\ndef f(): return len([tempfile.TemporaryFile() for _ in range(200)])"
    assert passes(files, 200)
    recursion = (
        "import threading\ndef depth(n): return n and max([n], key=lambda n: depth(n - 1))\n"
        "def f():\n    found = []\n"
        "    t = threading.Thread(target=lambda: found.append(depth(300)))\n"
        "    t.start()\n    t.join()\n    return found"
    )
    assert passes(recursion, [300])  # its stack is smaller than the usual one


ENDINGS = [
    *(f"print(1)\nsys.exit({code})" for code in ("", "0", "256", "0.0", "1", "'text'", "''")),
    *(f"print(1)\nsys.exit({code})" for code in ("None", "False", "True", "[]", "-1")),
    "print(1, flush=True)\nos._exit(0)",
    "print(1, flush=True)\nos._exit(1)",
    "print(1)\nos._exit(0)",
    "print(1)\nraise SystemExit",
    "print(1)\nraise KeyboardInterrupt",
    "print(1)\nraise ValueError",
    "threading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
    "threading.Thread(target=lambda: (time.sleep(9), print(2)), daemon=True).start()\nprint(1)",
    "threading.Thread(target=lambda: 1 / 0).start()\nprint(1)",
    "atexit.register(print, input())",
    "atexit.register(lambda: 1 / 0)\nprint(1)",
    "atexit.register(print, 1)\nsys.exit(1)",
    "sys.stdout.write('1')",
    "print(1)\nsys.stdout.close()",
    "print(1, flush=True)\nos.close(1)",
    "print(1)\nos.close(1)",
    "sys.stdout = open(1, 'w')\nprint(1)",
    "file = open(1, 'w', closefd=False)\nfile.write('1')",
    "open('/dev/stdout', 'w').write('1')",
    "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint(input())",
    "sys.stdout = io.StringIO()\nprint(1)",
    "sys.stdout = s = io.StringIO()\nprint(1)\nsys.__stdout__.write(s.getvalue())",
    "print(1, flush=True)\nsys.stdout = None",
    "sys.stdout = 5",
    "print(open('/dev/stdin').read())",
    "print(open(0).read())",
    "sys.stdin = open('/proc/self/fd/0')\nprint(input())",
    # Programs of contests print so; its flush() needs a global name.
    "class Fast(io.StringIO):\n    def flush(self): os.write(1, self.getvalue().encode())\n"
    "sys.stdout = Fast()\nprint(1)",
    "class Late:\n    def __del__(self): print(1)\nlate = Late()",
]


def test_a_main_program_ends_as_python_ends_it():
    p = SimpleNamespace(kind="stdin", tests=[["1\n", "1"]])
    codes = [f"import atexit, io, os, sys, threading, time\n{ending}" for ending in ENDINGS]
    for code, result in zip(codes, executor.run_many([(p, x) for x in codes]), strict=True):
        command = [sys.executable, "-I", "-c", code]
        done = subprocess.run(command, input="1\n", capture_output=True, text=True)
        right = done.returncode == 0 and done.stdout.strip() == "1"
        assert result.reward == right, (code, result)
        assert done.returncode == 0 or result.status in ("error", "failed"), (code, result)


def test_a_programs_process_id_does_not_tell_what_ran_before():
    threads = "import threading\ndef f():\n    for _ in range(9): threading.Thread().start()\n"
    look = "import os\ndef f(): return os.getpid()"
    jobs = [(returns(0), code) for code in (look, threads, look + "\n")]
    first, _, second = executor.run_many(jobs, workers=1)
    assert first.feedback == second.feedback
