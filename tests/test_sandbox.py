"""What a program does when it is asked."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import executor
from support.sandbox import Program


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
        "import threading\ndef f():\n    go, many = threading.Event(), []\n    try:\n"
        "        while len(many) < 5000:\n"
        "            many.append(threading.Thread(target=go.wait))\n"
        "            many[-1].start()\n    except RuntimeError: many.pop()\n"
        "    go.set()\n    for t in many: t.join()\n    return 150 < len(many) < 5000"
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


# Last lines of a main program, each of which ends it in a way of its own.
ENDINGS = json.loads((Path(__file__).parent / "cases" / "endings.json").read_text())


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
