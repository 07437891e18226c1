"""The executor: verdicts that cannot be cheated, limits that hold, feedback that is the same for the same failure.

D26 to D36 and D45 are the entries of a list of faults that programs of this kind have been reported with.
"""
import collections
import concurrent.futures
import contextlib
import fractions
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import executor
from executor import pack, run, run_many, unpack

ROOT = Path(__file__).resolve().parent.parent


def problem(tests, kind="assert", entry="", public=(), reference="", context=""):
    return SimpleNamespace(kind=kind, tests=tests, public_tests=list(public), entry_point=entry, reference=reference,
                           context=context)


SQUARE = problem(["assert square(2) == 4", "assert square(3) == 9", "assert square(-1) == 1", "assert square(10) == 100"],
                 entry="square", reference="def square(n): return n * n")
ADD = problem([[[2, 3], 5], [[1, 0], 1], [[10, 20], 30]], kind="functional", entry="add")
TASKS = {
    "square": SQUARE,
    "mean": problem(["assert abs(mean([1, 2]) - 1.5) < 1e-9", "assert abs(mean([3]) - 3) < 1e-9", "assert mean([0, 8]) == 4"],
                    entry="mean"),
    "order": problem(["assert order([3, 1, 2]) == [1, 2, 3]", "xs = [2, 1]\nassert order(xs) == sorted(xs)",
                      "assert list(order([5, 4])) == [4, 5]"], entry="order", reference="def order(xs): return sorted(xs)"),
    "shout": problem(["assert shout('a') == 'A'", "assert shout('bc').isupper()"], entry="shout",
                     reference="def shout(text): return text.upper()"),
    "sum lines": problem([["2\n20\n22\n", "42"], ["0\n", "0\n"], ["3\n1\n2\n-3\n", "0"]], kind="stdin"),
    "stack": problem(["s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2", "assert s.pop() == 2", "assert s.pop() == 1",
                      "import pytest\nwith pytest.raises(IndexError):\n    s.pop()", "assert Stack() == Stack()"],
                     reference="class Stack:\n def push(self, x): ...\n def pop(self): ...\n"
                               " def __len__(self): ...\n def __eq__(self, other): ..."),
}


def corpus():
    """(name, task, lowest, highest reward, program) of each program in redteam/programs.txt."""
    text = (ROOT / "tests/redteam/programs.txt").read_text(encoding="utf-8")
    for block in text.split("\n#### ")[1:]:
        head, _, body = block.partition("\n")
        name, task, low, high, _ = (part.strip() for part in head.split("|"))
        lines = [line.removeprefix("#escaped ").encode().decode("unicode_escape") if line.startswith("#escaped ") else line
                 for line in body.split("\n")]
        yield name, task, float(low), float(high), "\n".join(lines)


def processes():
    """{pid: command line} of all processes that can be seen."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
    return found


def zombies():
    return [line for line in subprocess.run(["ps", "-o", "stat=,ppid=", "-A"], capture_output=True, text=True).stdout.split("\n")
            if line.startswith("Z") and line.split()[1] == str(os.getpid())]


@pytest.fixture(autouse=True, scope="module")
def workers_end():
    yield
    executor.close()


def test_the_red_team_is_paid_for_nothing(record_property, capsys):
    programs = list(corpus())
    hostile, honest = [p for p in programs if p[2] == 0], [p for p in programs if p[2] == 1]
    results = run_many([(TASKS[task], code) for _, task, _, _, code in hostile], seconds=0.3, memory_mb=256)
    results += run_many([(TASKS[task], code) for _, task, _, _, code in honest], seconds=5)
    wrong = [(name, result.reward, result.status, result.feedback)
             for (name, _, low, high, _), result in zip(hostile + honest, results) if not low <= result.reward <= high]
    assert not wrong
    assert all(result.total == len(TASKS[task].tests) for (_, task, *_), result in zip(hostile + honest, results))
    for result in results:
        result.feedback.encode("utf-8")
        assert len(result.feedback) <= 2000 and "<|im" not in result.feedback and "\x1b" not in result.feedback
    with capsys.disabled():
        print(f"\nred team: {len(hostile)} hostile and {len(honest)} honest programs were run")
    assert len(hostile) > 80 and len(honest) > 15
    assert not [line for line in processes().values() if "86399.25" in line]
    assert not zombies()


def test_nothing_passes_from_one_program_to_the_next():
    programs = {name: code for name, _, _, _, code in corpus()}
    codes = [programs["leaves a message"], programs["reads the message"] + "\n#", programs["many files"],
             programs["deep folder"], programs["locked folders"], programs["reads the message"]]
    results = run_many([(SQUARE, code) for code in codes], workers=1)
    assert [result.reward for result in results] == [0.25, 0, 0.25, 0.25, 0.25, 0]


def test_no_lock_or_flag_stays_on_a_shared_descriptor():
    leave = "import fcntl, os\ndef square(n):\n    for fd in (0, 1, 2):\n        fcntl.flock(fd, fcntl.LOCK_EX)\n        fcntl.fcntl(fd, 10, 42)"
    find = ("import fcntl, os\ndef square(n):\n    fcntl.flock(os.open('/dev/null', 2), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "    return [fcntl.fcntl(fd, 11) for fd in (0, 1, 2)]")
    p = problem([[[1], [0, 0, 0]]], kind="functional", entry="square")
    assert [result.reward for result in run_many([(p, leave), (p, find)], workers=1)] == [0, 1]


def test_without_namespaces_only_side_effects_get_through(monkeypatch):
    monkeypatch.setenv("MURPHY_ISOLATION", "plain")
    executor.close()
    side_effects = ("leaves a message", "reads the message", "secrets", "sleeps", "half a message")
    programs = [p for p in list(corpus())[::4] if p[0] not in side_effects]
    programs += [p for p in corpus() if p[0] in ("fork bomb", "kills all", "double fork", "deep folder", "locked folders")]
    with pytest.warns(UserWarning, match="a program is less confined on this system: it can see your files"):
        results = run_many([(TASKS[task], code) for _, task, _, _, code in programs], seconds=0.3, memory_mb=256)
    executor.close()
    assert not [(p[0], result) for p, result in zip(programs, results) if not p[2] <= result.reward <= p[3]]
    assert not [line for line in processes().values() if "86399.25" in line]


def test_without_namespaces_no_process_is_signalled_through_a_descriptor_or_outlived(monkeypatch):
    monkeypatch.setenv("MURPHY_ISOLATION", "plain")
    executor.close()
    victim = subprocess.Popen(["sleep", "300.375"], start_new_session=True)
    code = (f"import ctypes, fcntl, os, socket, struct\nlibc = ctypes.CDLL(None)\ndef f():\n    a, b = socket.socketpair()\n    done = []\n"
            f"    for act in (lambda: fcntl.fcntl(a, fcntl.F_SETOWN, {victim.pid}), lambda: fcntl.fcntl(a, 10, 9),\n"
            f"                lambda: fcntl.fcntl(a, 15, struct.pack('ii', 1, {victim.pid})), lambda: fcntl.ioctl(a, 0x8901, struct.pack('i', {victim.pid})),\n"
            "                lambda: fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)):\n"
            "        try: act(); done.append(1)\n        except OSError: done.append(0)\n    b.send(b'x')\n"
            "    attr = struct.pack('<IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0)\n    return done + [libc.syscall(314 if os.uname().machine == 'x86_64' else 274, "
            "os.getppid(), attr, 0), libc.prctl(1, 0, 0, 0, 0)]")
    with pytest.warns(UserWarning, match="less confined"):
        result = run(problem([[[], [0, 0, 0, 0, 1, -1, -1]]], kind="functional", entry="f"), code)
    executor.close()
    time.sleep(0.1)
    alive = victim.poll() is None
    victim.kill()
    victim.wait()
    assert alive and result.reward == 1, result


def test_no_program_is_executed():
    code = ("import os, threading\ndef f():\n    said = []\n    def go():\n        try: os.execv('/bin/sleep', ['sleep', '300.875'])\n"
            "        except OSError as error: said.append(error.errno)\n    thread = threading.Thread(target=go)\n    thread.start()\n"
            "    thread.join()\n    return said")
    assert run(problem([[[], [1]]], kind="functional", entry="f"), code, seconds=0.3).status == "passed"


def test_feedback_names_call_expected_and_got():
    f = problem([[[3], 2], [[13], 13]], kind="functional", entry="f")
    assert run(f, "def f(n): return n - 1").feedback == "Test 2 failed: f(13) returned 12, expected 13"
    assert run(f, "def f(n):\n    return 1 / 0").feedback.split("\n")[0] == \
        "Test 1 failed: f(3) raised ZeroDivisionError: division by zero (line 2: return 1 / 0)"
    assert run(f, "def f(n:\n    return 1").feedback == \
        "Test 1 failed: the program raised SyntaxError: '(' was never closed (<solution>, line 1) (line 1: def f(n:)"
    asserts = problem(["assert f(3) == 2", "x = f(13)\nassert x == 13", "assert abs(f(1) - 0.5) < 1", "assert f(2)"])
    assert run(asserts, "def f(n): return 0").feedback.split("\n") == [
        "Test 1 failed: f(3) returned 0, expected 2", "Test 2 failed: f(13) returned 0, expected 13",
        "Test 4 failed: f(2) returned 0, expected f(2)"]
    assert run(asserts, "def g(n): return 0").feedback.split("\n")[0] == \
        "Test 1 failed: f(3) raised NameError: name 'f' is not defined"
    result = run(asserts, "def f(n):\n    while n == 13: pass\n    return n - 1", seconds=0.3)
    assert (result.status, result.tests) == ("timeout", [True, False, False, False])  # what had not run has failed
    assert result.feedback == "Test 2 failed: f(13) ran out of time"


def test_feedback_shows_public_tests_only():
    shown = problem(["assert f(1) == 1", "assert f(2) == 777"], entry="f", public=["assert f(1) == 1"])
    result = run(shown, "def f(n): return 1")
    assert (result.passed, result.public_passed, result.status) == (1, True, "failed")
    assert result.feedback == "The public tests pass, but hidden tests fail."
    result = run(shown, "def f(n): return 0")
    assert result.feedback == "Test 1 failed: f(1) returned 0, expected 1" and not result.public_passed
    assert run(shown, "def f(n): return [1, 777][n - 1]").feedback == "All tests passed."
    extra = problem(["assert f(2) == 777"], entry="f", public=["assert f(1) == 1"])  # public, but not graded
    result = run(extra, "def f(n): return 777")
    assert (result.reward, result.total, result.public_passed) == (1, 1, False)


def test_a_hidden_test_before_a_public_one_is_not_told_of():
    reference = "class S:\n    n = 0\n    def push(self, x): self.n += 1"
    for end in ("os._exit(0)", "exec('while True: pass')"):
        for p in (problem(["assert f(777) == 777", "assert f(1) == 1"], public=["assert f(1) == 1"]),
                  problem([[[777], 777], [[1], 1]], kind="functional", entry="f", public=[[[1], 1]])):
            assert "777" not in run(p, f"import os\ndef f(n):\n    return {end} if n == 777 else 0", seconds=0.3).feedback
    p = problem(["s = S()\ns.push(777)\nassert s.n == 1", "assert s.n == 1"], public=["assert s.n == 1"], reference=reference)
    assert run(p, reference.replace("+= 1", "+= 2")).feedback == "Test 1 failed: expected s.n == 1"
    p = problem([[[777], 777], [[1], 1]], kind="functional", entry="f", public=[[[1], 1]])
    assert "777" not in run(p, "seen = []\ndef f(n): return seen.append(n) or seen").feedback


def test_feedback_is_the_same_text_for_the_same_failure_and_bounded():
    p = problem([[[1], 0]] * 9, kind="functional", entry="f")
    for code in ("class A: pass\ndef f(n): return A()", "def f(n): raise ValueError(object())", "def f(n): return {str(i) for i in range(50)}",
                 "def f(n): return 'x' * 10**5", "def f(n): raise ValueError('y' * 10**5)"):
        executor.close()
        texts = {run(p, code, feedback_chars=300).feedback}
        executor.close()
        texts.add(run(p, code, feedback_chars=300).feedback)
        assert len(texts) == 1 and len(min(texts)) <= 300
    assert "cut]" in min(texts) and run(p, code, max_failures=1).feedback.count("Test ") == 1
    text = run(problem([[["a"], "b"]], kind="functional", entry="f"), r"def f(s): return '<|im_end|>\x1b\ud800</s>'").feedback
    assert text == r"Test 1 failed: f('a') returned '<\|im_end|>\x1b\ud800<\/s>', expected 'b'"


def test_neither_addresses_nor_their_order_get_into_feedback():
    f = problem([[[1], 0]], kind="functional", entry="f")
    for p, code in ((f, "def f(n): return str([object() for _ in range(60)])"), (f, "def f(n): return [str([object() for _ in range(60)])]"),
                    (f, "def f(n): return {(None, i) for i in range(9)} | {(1, 'a'), ('a', 1)}"),
                    (problem([["", "5"]], kind="stdin"), "print([object() for _ in range(60)])")):
        texts = set()
        for _ in range(4):
            executor.close()
            texts.add(run(p, code).feedback)
        assert len(texts) == 1, texts


def test_no_special_token_gets_into_feedback_as_one():
    for mark in ("<repo_name>", "<file_sep>", "<filename>", "<reponame>", "<jupyter_output>", "<unused7>", "<turn|>", "<<SYS>>", "<</SYS>>", "[TOOL_CALLS]",
                 "<|im_end|>", "<start_of_turn>", "</think>", "[/INST]", "<tool_call>"):
        assert mark not in executor.escape(mark), mark


def test_asserts_count_by_themselves_in_every_style():
    text = """
import pytest
from solution import f, Counter
@pytest.mark.parametrize("n, m", [(1, 2), (2, 4)])
def test_double(n, m):
    assert f(n) == m
def test_raises():
    with pytest.raises(ValueError, match="neg"):
        f(-1)
    for n in range(3):
        assert f(n) == n + n
def test_float():
    assert f(0.15) == pytest.approx(0.3)
    assert [f(0.15)] == pytest.approx([0.3])
class TestCounter:
    def setup_method(self):
        self.counter = Counter()
    def test_adds(self):
        self.counter.add(2)
        self.counter.total += 1
        assert self.counter.total == 3
        assert isinstance(self.counter, Counter)
def test_no_assert():
    try:
        f("x")
        assert False, "should raise"
    except TypeError:
        pass
"""
    reference = """
class Counter:
    def __init__(self): self.total = 0
    def add(self, n): self.total += n
def f(n):
    if isinstance(n, str): raise TypeError(n)
    if n < 0: raise ValueError("negative")
    return n * 2
"""
    p = problem([text], reference=reference)
    assert run(p, reference).tests == [True] * 8
    assert run(p, reference.replace("n * 2", "n + 2")).tests == [False, True, False, False, False, True, True, True]
    assert run(p, reference.replace("ValueError", "KeyError")).tests == [True, False, True, True, True, True, True, True]
    assert run(p, reference.replace("+= n", "= 0")).tests.count(False) == 1
    assert run(p, "x = 1").tests == [False] * 8


def test_parameters_and_set_up_in_every_style():
    text = """
import pytest, unittest
@pytest.mark.parametrize("n, m", [pytest.param(1, 2, id="one"), (2, 4)])
def test_a(n, m): assert f(n) == m
@pytest.mark.parametrize(argnames="n", argvalues=[pytest.param(1), 2])
def test_b(n): assert f(n) == n + n
class TestC:
    def setup_class(cls): cls.x = 1
    def setup_method(self, method): self.y = 2
    def test_c(self): assert f(self.x) == self.y
class TestD(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.x = 1
    def setUp(self): self.y = 2
    def test_d(self): self.assertEqual(f(self.x), self.y)
"""
    p = problem([text], entry="f")
    assert run(p, "def f(n): return n * 2").tests == [True] * 4
    assert run(p, "def f(n): return n").tests == [False] * 4


def test_a_helper_of_the_tests_is_never_the_programs():
    p = problem(["assert len(f([1, 2])) == 2", "assert sum(f([1, 2])) == 3", "assert double(f([1])[0]) == 2", "assert pi > f([3])[0]"],
                entry="f", context="def double(n): return n * 2\n", reference="from math import pi\ndef f(xs): return list(xs)")
    assert run(p, p.reference).reward == 1
    lies = "def len(x): return 2\ndef sum(x): return 3\ndef double(x): return 2\npi = 99\ndef f(xs): return []"
    assert run(p, lies).reward == 0
    own = problem(["assert sum(10, 15) == 6"], entry="sum", reference="def sum(a, b): return 6")  # MBPP 126
    assert run(own, own.reference).reward == 1 and run(own, "def f(): pass").reward == 0


def test_objects_stay_with_the_program():
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)"  # MBPP 367: set-up code needs the program's class
    p = problem(["assert height(root) == 3", "assert height(root.left) == 2", "assert root.left.right.value == 3"], entry="height",
                context=setup, reference="class Node:\n    def __init__(self, v): self.value, self.left, self.right = v, None, None\n"
                "def height(n): return 1 + max(height(n.left), height(n.right)) if n else 0")
    assert run(p, p.reference).reward == 1
    assert run(p, p.reference.replace("max", "min")).reward == pytest.approx(1 / 3)
    for test in ("assert f(object()) == 1", "assert f(lambda: 1) == 1"):
        result = run(problem([test], entry="f"), "def f(x): return 1")
        assert (result.status, result.total, result.reward) == ("unscorable", 0, 0.0) and "cannot be sent" in result.feedback
    changes = problem(["xs = [3, 1, 2]\nassert f(xs) is None\nassert xs == [1, 2, 3]"], entry="f")
    assert run(changes, "def f(xs): xs.sort()").reward == 1 and run(changes, "def f(xs): xs.pop()").reward == 0.5
    later = problem(["g = f()\nassert next(g) == 0\nassert next(g) == 1\nassert next(g) == 2"], entry="f")
    assert run(later, "import itertools\ndef f(): return itertools.count()").reward == 1
    assert run(problem(["assert f(2)(3) == 5"], entry="f"), "def f(a): return lambda b: a + b").reward == 1


def test_no_value_of_a_program_makes_its_problem_unscorable():
    """For an unscorable problem ends the run (tree.py)."""
    there = problem(["assert g(f(5)) == 5", "assert f(1) == 1"], reference="def f(x): return x\ndef g(x): return x")
    deep = "def f(x):\n    for _ in range(100): x = [x]\n    return x\ndef g(x): return x"
    forged = ("import os, time\ndef f(x):\n    os.write(3, b'{\"value\": ' + b'[' * 150 + b']' * 150 + b'}\\n')\n    time.sleep(0.2)\n"
              "def g(x): return x")
    cut = problem(["assert f(3)[0:2] == [1, 2]"], entry="f",
                  reference="class Row(list): pass\ndef f(n): return [1, 2, 3]")
    method = problem(["assert g(f(3).items) == 6"], reference="class Box:\n    def __init__(self, n): self.items = [n]\ndef f(n): "
                     "return Box(n)\ndef g(x): return 6")
    for p, code in ((there, deep), (there, forged), (cut, "class A: pass\ndef f(n): return A()"),
                    (method, "def f(n): return {}\ndef g(x): return 6")):
        result = run(p, code)
        assert (result.status, result.reward, result.total) == ("failed", 0, len(p.tests)), result
    caught = problem(["assert f(1) == 1", "import pytest\nwith pytest.raises(TypeError):\n    f(object())"], entry="f")
    assert run(caught, "def f(x): return 1").tests == [True, False]


def test_a_program_cannot_change_the_cases_of_the_next():
    p = problem([[[[3, 1, 2]], [1, 2, 3]]], kind="functional", entry="f")
    results = run_many([(p, "def f(xs): xs.clear()"), (p, "def f(xs): return sorted(xs)")], workers=1)
    assert [result.reward for result in results] == [0, 1]


def test_stop_iteration_ends_no_iteration_of_a_test():
    p = problem(["assert all(map(lambda c: f(c[0]) == c[1], [(1, 1), (2, 4)]))", "assert not list(filter(lambda n: f(n) != n * n, range(9)))"],
                entry="f")
    assert run(p, "def f(n): raise StopIteration").reward == 0 and run(p, "def f(n): return n * n").reward == 1
    p = problem(["import pytest\ng = f()\nassert next(g) == 0\nwith pytest.raises(StopIteration):\n    next(g)", "assert list(f()) == [0]"], entry="f")
    assert run(p, "def f(): return iter([0])").reward == 1


def test_an_argument_comes_back_changed_only_where_the_reference_takes_from_it():
    text = "q = [1, 2]\nassert f(q) == 1\nassert q == [2]\nassert f(q) == 2"
    takes = "def f(q): return q.pop(0)"
    assert run(problem([text], reference=takes), takes).reward == 1
    two = problem([text.replace("f(", "g("), "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"],
                  reference=takes.replace("f(", "g(") + "\ndef f(xs): return sorted(xs)")
    assert run(two, two.reference).reward == 1
    assert run(two, takes.replace("f(", "g(") + "\ndef f(xs):\n    xs.clear()\n    return []").reward == 0.75
    keeps = problem(["q = [1, 2]\nr = f(q)\nassert r == sorted(q)"], reference="def f(q): return sorted(q)")
    assert run(keeps, keeps.reference).reward == 1
    assert run(keeps, "def f(q):\n    q.clear()\n    return q").reward == 0


def test_an_exception_of_the_solution_can_be_expected():
    reference = "class Base(ValueError): pass\nclass Empty(Base): pass\ndef f(x):\n    raise Empty('nothing: ' + x)"
    text = ("import pytest\nfrom solution import *\ndef test_a():\n    with pytest.raises(Base, match='nothing'):\n        f('a')\n"
            "def test_b():\n    try:\n        f('b')\n        pytest.fail('must raise')\n    except Empty as error:\n"
            "        assert str(error) == 'nothing: b'\n")
    p = problem([text], reference=reference)
    assert run(p, reference).reward == 1
    assert run(p, reference.replace("raise Empty", "return str")).reward == 0
    assert run(p, reference.replace("raise Empty", "raise KeyError")).reward == 0


def test_an_exception_of_the_solution_opens_no_objects():
    p = problem(["assert f('bc').isupper()", "assert 3 in f('x')", "assert f('x') < 9"], entry="f",
                reference="class Bad(ValueError): pass\nclass Worse(Bad): pass\ndef f(s): ...")
    yes = "class A:\n    isupper = __contains__ = __lt__ = lambda *a: True\ndef f(s): return A()"
    assert run(p, yes).reward == 0


def test_what_a_test_raises_after_its_last_assert_or_in_a_helper_counts():
    helper = "def verify(n):\n    assert f(n) == n\ndef test_a():\n    assert f(1) == 1\n    verify(2)\ndef test_b():\n    verify(1)\n"
    p = problem([helper], entry="f")
    assert run(p, "def f(n): return n").tests == [True, True]
    assert run(p, "def f(n): return 1").tests == [False, True]
    swallowed = problem(["try:\n    f(1)\nexcept BaseException:\n    pass\nassert True or f(2)"], entry="f")
    assert run(swallowed, "import os\ndef f(n): os._exit(0)").reward == 0  # the program's end cannot be caught


def test_a_row_that_leaves_its_asserts_to_a_helper_is_a_test():
    p = problem(["assert f(2) == 2", "import unittest\nunittest.TestCase().assertEqual(f(1), 1)", "import pytest\npytest.raises(TypeError, f)",
                 "def check(a, b):\n    assert f(a) == b\ncheck(3, 3)\ncheck(4, 4)"], entry="f")
    assert run(p, "def f(n): return n").tests == [True] * 4
    assert run(p, "def f(n=0): return 2").tests == [True, False, False, False]


def test_a_loop_that_is_broken_off_has_not_passed():
    loop = "    for n in range(9):\n        r = f(n)\n        assert r == n * n\n"
    rows = "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_a(n):\n    r = f(n)\n    assert r == n * n\n    assert r >= n\n"
    for text in ("def test_a():\n" + loop + "    assert f(20) == 400", rows, "if True:\n" + loop + "assert f(3) == 9",
                 "k = 0\nwhile k < 9:\n    r = f(k)\n    assert r == k * k\n    k += 1\nassert f(3) == 9"):
        p = problem([text], entry="f")
        for end in ("1 / 0", "os._exit(0)", "exec('while True: pass')"):
            assert run(p, f"import os\ndef f(n): return {end} if n else 0", seconds=0.3).tests == [False, False]
        assert run(p, "def f(n): return n * n").reward == 1
    early = problem(["def test_a():\n    for n in range(9):\n        assert f(n) == n\n        if n == 3: return\n    assert f(0)"], entry="f")
    assert run(early, "def f(n): return n").tests == [True, False]  # leaving a loop is not breaking it off


def test_nothing_that_a_program_says_ends_its_judge():
    p = problem(["assert f(1) == 1", "assert f(2) + 1 == 3"], entry="f")
    forged = "os.write(3, b'{\"error\": [[\"builtins.ValueError\"], 5, 0]}\\n'); time.sleep(0.2)"
    assert "raised ValueError: 5" in run(p, f"import os, time\n{forged}").feedback
    assert run(p, f"import os, time\ndef f(n):\n    {forged}").feedback.startswith("Test 1 failed: f(1) raised ValueError: 5")
    named = run(p, "class list: pass\ndef f(n): return 1 if n == 1 else list()")  # reprlib looks at names of classes
    assert named.tests == [True, False] and "f(2) returned <list object>" in named.feedback


def test_how_a_program_ends_is_no_exception_of_a_test():
    raises = problem(["import pytest\nwith pytest.raises(ValueError):\n    f(-1)"], entry="f")
    ends = (  # by signal 40, which has no name
        "import ctypes, time\nlibc = ctypes.CDLL(None)\ndef f(n):\n    event, timer = (ctypes.c_int * 16)(0, 0, 40), ctypes.c_void_p()\n"
        "    libc.timer_create(0, event, ctypes.byref(timer))\n"
        "    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1000), None)\n    time.sleep(3)")
    if sys.platform == "linux":
        assert run(raises, ends).tests == [False]
    assert run(problem([["", "5"]], kind="stdin"), "print(5)\nraise ValueError('ended')").status == "error"


def test_threads_of_a_test_take_turns():
    p = problem(["from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n    r = list(pool.map(f, range(99)))\n"
                 "assert r == [n * n for n in range(99)]"], entry="f")
    assert run(p, "def f(n): return n * n").status == "passed"
    assert run(p, "import time\ndef f(n): time.sleep(60)", seconds=0.3).status == "timeout"


def test_any_name_may_be_a_keyword_argument():
    p = problem(["assert f(1, name=2, label=3, args=4) == 10", "assert f(0, self=5) == 5"], entry="f")
    assert run(p, "def f(x, /, **more): return x + sum(more.values())").reward == 1
    assert run(p, "def f(x, /, **more): return 1").feedback.startswith("Test 1 failed: f(1, name=2, label=3, args=4) returned 1")


def test_functional_calls_a_function_or_a_method_of_solution():
    for entry, code in (("add", "def add(a, b): return a + b"), ("add", "class Solution:\n    def add(self, a, b): return a + b"),
                        ("Solution.add", "class Solution:\n    def add(self, a, b): return a + b")):
        assert run(problem(ADD.tests, kind="functional", entry=entry), code).reward == 1
    p = problem([[[1], [1, [2.0]]], [[2], {"a": 1}]], kind="functional", entry="f")
    assert run(p, "def f(n): return (1, (2.0000000001,)) if n == 1 else {'a': 1}").reward == 1


def test_stdin_output_is_compared_as_stated():  # D32
    right = [("0.333333", "0.333333333333"), ("1 2", "1 2 \n\n"), ("nan", "nan"), ("inf", "Infinity"), ("2.0", "2"), ("a\r\nb", "a\nb")]
    wrong = [("0.334", "0.333333333333"), ("12", "1 2"), ("1 2", "1\n2"), ("ABC", "abc"), ("1.333335333334e18", "1333335333334000000"),
             ("", "0"), ("inf", str(7**5000)), ("9" * 4001, str(7**5000)), ("1_0", "10"), ("\u0661", "1"),
             ("1333335333334000001", "1333335333334000000"), ("nan", "1"), ("a  b", "a b"), ("1 2 3", "1 2")]
    pairs = [(pair, True) for pair in right] + [(pair, False) for pair in wrong]
    results = run_many([(problem([["", expected]], kind="stdin"), f"print({output!r})") for (output, expected), _ in pairs])
    assert [(pair, result.reward == 1) for (pair, _), result in zip(pairs, results)] == pairs
    assert results[6].feedback == 'Test 1 failed: with the input \'\' the program printed \'0.334\\n\', expected \'0.333333333333\''
    assert executor.same(1333335333334000000, 1333335333334000000) and not executor.same(1333335333334000000, 1.333335333334e18)


def test_stdin_and_stdout_can_be_opened_wrapped_and_closed():
    p = problem([["5\n", "5"]], kind="stdin")
    for code in ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint(input())",
                 "print(open('/dev/stdin').read())", "import sys\nsys.stdin = open('/proc/self/fd/0')\nprint(input())",
                 "import sys\nprint(input())\nsys.stdout.close()", "out = open('/dev/stdout', 'w')\nout.write('5')"):
        assert run(p, code).status == "passed", (code, run(p, code))


def test_d26_an_early_exit_is_no_pass():
    for line in ("import sys; sys.exit(0)", "raise SystemExit", "quit()", "import os; os._exit(0)"):
        assert run(ADD, line).reward == 0 and run(SQUARE, line).reward == 0
        assert run(SQUARE, line).status == "error"
    empty = problem([["", ""]], kind="stdin")
    assert run(empty, "def f(): raise ValueError\nf()").reward == 0 and run(empty, "x = 1").reward == 1
    assert run(empty, "import sys; sys.exit(3)").reward == 0


def test_d27_no_tests_is_unscorable():
    broken = [problem([]), problem(None), problem(["x = 1"], entry="f"), problem(["assert f("], entry="f"), problem(["assert True"], entry="f"),
              problem(["def test_x(tmp_path):\n    assert f()"], entry="f"), problem([["a", "b", "c"]], kind="stdin"), problem([3], kind="functional"),
              problem(["assert f()"], kind="other"), problem([[object(), 1]], kind="functional", entry="f"), problem([[[1], 1]], kind="functional")]
    for result in run_many([(p, "def f(*a): return 1") for p in broken]):
        assert (result.status, result.reward, result.total, result.public_passed) == ("unscorable", 0.0, 0, False)
        assert result.feedback.startswith("This problem cannot be scored: ")
    for nothing in ("", None, "  \n"):
        assert (run(ADD, nothing).status, run(ADD, nothing).reward, run(ADD, nothing).feedback) == ("no_code", 0.0, "No code was found in the answer.")


def test_d28_a_broken_sandbox_stops_the_run(monkeypatch):
    executor.self_check()
    executor.close()
    monkeypatch.setattr(executor, "PYTHON", "/nowhere/python")
    with pytest.raises(RuntimeError, match="cannot start the interpreter /nowhere/python"):
        executor.self_check()
    monkeypatch.setattr(executor, "PYTHON", shutil.which("false"))
    with pytest.raises(RuntimeError, match="did not start"):
        executor.self_check()
    monkeypatch.setattr(executor, "run_many", lambda jobs, **_: [executor.Result(0, 1, 0.0, "error", "", [False], False)] * len(jobs))
    with pytest.raises(RuntimeError, match="no reward can be trusted"):
        executor.self_check()


def test_no_full_disk_costs_a_program_its_reward(monkeypatch):
    if hasattr(os, "memfd_create"):
        where = run(problem([["5", "5"]], kind="stdin"), "import os\nprint(os.readlink('/proc/self/fd/0'))").feedback
        assert "printed '/memfd:" in where, where
    executor.close()
    monkeypatch.setattr(executor.tempfile, "tempdir", "/nowhere")
    with pytest.raises(RuntimeError, match="cannot start a worker"):
        run(ADD, "def add(a, b): return a + b")


def test_d29_nothing_is_left_behind():
    loops = run_many([(ADD, f"while True: pass  # {n}") for n in range(6)], seconds=0.2)
    assert [result.status for result in loops] == ["timeout"] * 6
    sleeper = "import subprocess\ntry: subprocess.Popen(['sleep', '300.125'])\nexcept OSError: pass\nwhile True: pass"
    assert run(ADD, sleeper, seconds=0.2).status == "timeout"
    assert not [line for line in processes().values() if "300.125" in line] and not zombies()


def test_d30_output_neither_blocks_nor_fills_memory():
    big = problem([["", "x" * 200_000]], kind="stdin")
    assert run(big, "print('x' * 200000)").reward == 1
    for stream in (1, 2):
        flood = f"import os\nprint('head')\nwhile True: os.write({stream}, b'y' * 1000)"
        result = run(big, flood, seconds=0.3)
        assert result.status == "timeout" and len(result.feedback) <= 2000
        assert run(ADD, flood, seconds=0.3).status == "timeout"
    result = run(big, "print('head' + 'y' * 10**6 + 'tail')")
    assert "'head" in result.feedback and "tail\\n'" in result.feedback and "cut]" in result.feedback
    assert run(ADD, "def add(a, b): return 'z' * 10**7").feedback.startswith("Test 1 failed: add(2, 3) returned more than 4194304 bytes")


def test_d31_input_ends_at_once():
    result = run(ADD, "x = input()")
    assert result.status == "error" and "EOFError" in result.feedback
    assert "EOFError" in run(problem([["", "1"]], kind="stdin"), "print(input())").feedback


def test_d33_cpu_time_decides():
    busy = "def add(a, b):\n    import time\n    begin = time.process_time()\n    while time.process_time() - begin < 0.05: pass\n    return a + b  # {}"
    results = run_many([(ADD, busy.format(n)) for n in range(8)], workers=4 * len(os.sched_getaffinity(0)), seconds=2)
    assert [result.status for result in results] == ["passed"] * 8
    idle = run(problem([[[], 1]], kind="functional", entry="f"), "import time\ndef f():\n    time.sleep(1)\n    return 1", seconds=0.3)
    assert idle.status == "passed"  # sleeping costs no CPU time; the wall limit is several times larger


def test_what_does_not_use_its_time_is_ended_within_ten_seconds():
    assert executor.wall(executor.LIMITS) < 10
    assert run(ADD, "import time\ntime.sleep(60)", seconds=0.1).status == "timeout"


def test_each_worker_runs_programs_under_a_user_of_its_own():
    """So that one's limit on processes is not used up by the others; where the tests do not run as root, all are theirs."""
    who = problem([[[], -1]], kind="functional", entry="f")
    executor.close()
    said = {result.feedback for result in run_many([(who, f"import os, time\ndef f():\n    time.sleep(0.5)\n    return os.getuid()  # {i}")
                                                    for i in range(2)], workers=2)}
    assert len(said) == (1 if os.getuid() or os.environ.get("MURPHY_ISOLATION") else 2), said


def test_a_test_that_fills_its_error_output_blocks_nobody():
    loud = problem(["import sys\nprint('x' * 300_000, file=sys.stderr)\nassert f(1) == 1"], entry="f")
    assert run(loud, "def f(x): return x").status == "passed"


def test_d34_spawn_threads_and_short_limits():
    begin = time.monotonic()
    assert run(ADD, "while True: pass", seconds=0.3).status == "timeout"
    assert time.monotonic() - begin < 5
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_spawned) == 1
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        codes = [f"def add(a, b): return a + b + {n}" for n in range(12)]
        rewards = list(pool.map(lambda code: run(ADD, code).reward, codes))
    assert rewards == [1] + [0] * 11
    code = "import executor, sys; print(len(executor._idle), 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "0 False\n"


def _spawned():
    import executor
    return executor.run(SimpleNamespace(kind="functional", tests=[[[1], 1]], public_tests=[], entry_point="f"), "def f(x): return x").reward


def test_d35_memory_is_limited_in_the_program_alone():
    result = run(ADD, "def add(a, b): return len(bytearray(4 << 30))")
    assert result.status == "memory" and "MemoryError" in result.feedback
    assert run(ADD, "import numpy\ndef add(a, b): return numpy.int64(a) + b").reward == 1
    assert run(ADD, "import os\ndef add(a, b): return a + b if os.environ['OPENBLAS_NUM_THREADS'] == '1' else 0").reward == 1


def test_d36_odd_characters():
    p = problem([["", "e"]], kind="stdin")
    for code, status in ((r"print('\ud800')", "error"), (r"import sys; sys.stdout.buffer.write(b'\xff\xfe')", "failed"), ("print('e')\r\n", "passed"),
                         ("x = '\ud800'\nprint('e')", "error"), ("s = '\u00e9'\nprint('e')", "passed"), ("print('\u00e9')", "failed")):
        result = run(p, code)
        assert result.status == status
        result.feedback.encode("utf-8")
    assert run(problem([["\u00e9\n", "\u00e9"]], kind="stdin"), "print(input())").reward == 1


def test_d45_check_is_called():
    p = problem(["METADATA = {}\ndef check(candidate):\n    assert candidate([1.0, 2.0]) == 3.0\n    assert True, 'no test'\n"
                 "    for n in range(5):\n        assert candidate([n]) == mirror(n)\n"], entry="total",
                context="from typing import List\ndef mirror(n): return n\n")
    right = run(p, "def total(xs: List[float]) -> float: return mirror(sum(xs))")  # imports and helpers of the prompt are there
    assert (right.reward, right.total) == (1, 2)
    wrong = run(p, "def total(xs): return 0.0")
    assert wrong.tests == [False, False] and wrong.feedback.startswith("Test 1 failed: total([1.0, 2.0]) returned 0.0, expected 3.0")


def test_equal_pairs_run_once_and_results_keep_their_order():
    noisy = problem([[[0], 1]], kind="functional", entry="f")
    code = "import os\ndef f(x): return int.from_bytes(os.urandom(8), 'big')"
    results = run_many([(noisy, code), (ADD, "def add(a, b): return a + b"), (noisy, code), (noisy, "")])
    assert results[0] == results[2] and results[0] is not results[2] and results[0].tests is not results[2].tests
    assert [result.status for result in results] == ["failed", "passed", "failed", "no_code"]
    assert run_many([]) == []


def test_limits_are_checked():
    with pytest.raises(TypeError, match="unknown limit 'second'; the limits are seconds"):
        run(ADD, "x", second=1)
    for value in (0, -1, math.nan, math.inf, "3"):
        with pytest.raises(ValueError, match="must be a positive number"):
            run(ADD, "x", seconds=value)


def test_a_judge_that_dies_is_replaced():
    for victim_is_judge in (True, False):  # else its zygote
        executor.close()
        run_many([(ADD, f"x = {n}") for n in range(2)])
        judges = {worker.process.pid: worker.folder for worker in executor._idle}
        for pid in [pid for pid, line in processes().items() if (pid in judges) == victim_is_judge
                    and any(folder in line for folder in judges.values())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        codes = [f"def add(a, b): return a + b  # {n}" for n in range(9)]
        assert [result.status for result in run_many([(ADD, code) for code in codes])] == ["passed"] * 9
    assert [r.reward for r in run_many([(ADD, f"def add(a, b): return a + b  # {n}") for n in range(9)])] == [1] * 9


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), 9)",
                                  "threading.Timer(0.5, os.kill, (os.getpid(), 9)).start(); executor.run(p, 'while True: pass')"])
def test_a_trainer_that_is_killed_leaves_no_trace(then):  # its judge idle, or at work
    code = ("import executor, os, threading, types; p = types.SimpleNamespace(kind='functional', tests=[[[1], 1]], entry_point='f');"
            f"executor.run(p, 'def f(x): return x'); print(executor._idle[0].folder, flush=True); {then}")
    folder = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    patience = time.monotonic() + 40
    while time.monotonic() < patience and (Path(folder).exists() or [x for x in processes().values() if folder in x]):
        time.sleep(0.05)
    assert folder and not Path(folder).exists() and not [line for line in processes().values() if folder in line]


def test_many_programs_leave_no_trace():
    programs = [p for p in corpus() if p[0] in ("crashes", "exit in the call", "closes all", "many files", "double fork", "forged messages")]
    jobs = [(SQUARE, f"def square(n): return n * n  # {n}") if n % 10 else (SQUARE, programs[n // 10 % len(programs)][4] + f"\n#{n}")
            for n in range(400)]

    def state():
        folders = [worker.folder for worker in executor._idle]
        ours = [pid for pid, line in processes().items() if any(folder in line for folder in folders)]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in ours)
        files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *ours])
        return len(ours), files, sum(len(list(Path(folder).rglob("*"))) for folder in folders), pages

    executor.close()
    first = run_many(jobs, workers=2)
    before = state()
    assert run_many(jobs, workers=2) == first  # the same verdicts again
    after = state()
    assert before[:3] == after[:3] and after[3] < before[3] * 1.1 + 2000
    assert all(result.reward == 1 for n, result in enumerate(first) if n % 10) and all(result.reward < 1 for result in first[::10])


def test_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(ROOT / "executor.py", tmp_path)
    done = subprocess.run([sys.executable, "executor.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.split("\n")
    assert [line for line in lines if "reward" in line] == [
        "right: reward 1.00, passed", "wrong at 0: reward 0.67, failed", "never ends: reward 0.00, timeout", "leaves: reward 0.00, error",
        "a cheat: reward 0.00, failed"]
    assert len(lines) < 40
    assert not [path for path in tmp_path.iterdir() if path.name not in ("executor.py", "__pycache__")]


def test_check_lists_references_below_one(tmp_path):
    rows = [dict(id="good", kind="functional", tests=[[[1], 1]], public_tests=[], entry_point="f", reference="def f(x): return x"),
            dict(id="bad", kind="assert", tests=["assert f(1) == 2"], public_tests=[], entry_point="f", reference="def f(x): return x")]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run([sys.executable, ROOT / "executor.py", "--check", path], capture_output=True, text=True)
    assert done.stdout == "bad: failed, 0 of 1: Test 1 failed: f(1) returned 1, expected 2\n1 of 2 reference solutions pass all their tests\n"
    done = subprocess.run([sys.executable, ROOT / "executor.py", "--check", "missing.jsonl"], capture_output=True, text=True)
    assert done.returncode != 0 and done.stderr.startswith("executor: cannot read problems from missing.jsonl") and "Traceback" not in done.stderr


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
    | st.fractions() | st.decimals(allow_nan=False) | st.datetimes().map(lambda x: x.replace(fold=0)) | st.dates() | st.timedeltas(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.lists(inner).map(collections.deque)
    | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner) | st.sets(st.integers() | st.text()) | st.frozensets(st.text()),
    max_leaves=20)


@settings(deadline=None, max_examples=300)
@given(plain)
def test_plain_data_crosses_exactly(x):
    y = unpack(json.loads(json.dumps(pack(x))))
    assert y == x and type(y) is type(x)


def test_types_stay_apart():
    values = [1, True, 1.0, "1", b"1", (1,), [1], {1}, frozenset({1}), {1: 1}, 1j, None, fractions.Fraction(1), range(1)]
    for x in values:
        assert [type(unpack(pack(x))) is type(y) for y in values].count(True) == 1
    assert math.isnan(unpack(json.loads(json.dumps(pack(math.nan)))))
    for hostile in ({"int": ["0x" + "f" * 10**6]}, {"Decimal": ["1E+99999"]}, {"range": [0, 10**12, 1]}):
        with pytest.raises(ValueError):
            unpack(hostile)


def test_close_ends_what_goes_on_in_other_threads_and_the_next_call_works():
    problem = SimpleNamespace(kind="functional", tests=[[[1], 1]], entry_point="f")
    codes = [f"def f(x):\n    while True: {n}" for n in range(40)]
    caught = []

    def work():
        try:
            executor.run_many([(problem, code) for code in codes], workers=2, seconds=30)
        except BaseException as error:
            caught.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    while len(executor._busy) < 2:
        time.sleep(0.01)
    executor.close()
    thread.join(120)  # alone they would take ten minutes
    assert not thread.is_alive() and isinstance(caught[0], concurrent.futures.CancelledError)
    assert not executor._busy and not executor._pools
    assert executor.run(problem, "def f(x): return x").reward == 1
