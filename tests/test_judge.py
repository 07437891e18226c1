"""What tests mean: for a program that does not attack, the verdict is the one that pytest gives.

The cases in tests/cases/*.jsonl are files of tests with right and wrong programs; check.py in that
folder holds their verdicts against pytest. Here the judge is held against them, and against plain
Python on tests made by hypothesis.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

import executor
from executor import run, run_many

CASES = Path(__file__).parent / "cases"
LEFT_OUT = [line.partition(":")[0] for line in (CASES / "left_out.txt").read_text().splitlines()]
# An example is a list of programs that run together. To make it smaller costs more than to read it.
RANDOM = settings(deadline=None, max_examples=12, phases=[Phase.generate])
EMPTY = "pass"  # the program that every problem meets when it is loaded


def problem(tests, kind="assert", entry="", public=(), **more):
    fields = {"kind": kind, "tests": tests, "public_tests": list(public), "entry_point": entry}
    return SimpleNamespace(**fields, **more)


def functional(*pairs, entry="f", **more):
    return problem([list(pair) for pair in pairs], kind="functional", entry=entry, **more)


@pytest.fixture(autouse=True, scope="module")
def workers_end():
    yield
    executor.close()


# ---------------------------------------------------------------------- as pytest


@pytest.mark.parametrize("name", ["arguments", "types", "styles", "objects", "test_files"])
def test_verdicts_are_those_of_pytest(name):
    lines = (CASES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    problems = {c["name"]: problem([c["test"]], reference=c["solution"]) for c in cases}
    loaded = [(c["name"], code) for c in cases for code in (EMPTY, c["solution"])]
    first = run_many([(problems[name], code) for name, code in loaded])
    left_out = {
        name: result.feedback
        for (name, _), result in zip(loaded, first, strict=True)
        if result.status == "unscorable"
    }
    assert set(left_out) <= set(LEFT_OUT), left_out
    assert not [why for why in left_out.values() if "reference" in why]  # it is the judge's limit

    jobs = []
    for case in cases:
        if case["name"] in left_out:
            continue
        right = [case["solution"], *case["right"]]
        jobs += [(case["name"], program, "passed") for program in right]
        jobs += [(case["name"], program, "not passed") for program in case["wrong"]]
    results = run_many([(problems[name], program) for name, program, _ in jobs])
    faults = []
    for (name, program, verdict), result in zip(jobs, results, strict=True):
        assert result.total > 0, (name, program, result)  # never unscorable at run time
        if verdict != ("passed" if result.status == "passed" else "not passed"):
            faults.append(f"{name} ({verdict} in pytest)\n{program}{result.feedback}\n")
    assert not faults, "\n".join(faults)


def plain(test: str, program: str) -> bool:
    """Whether the program passes a test function `test_it` in plain Python, to its end."""
    ended = []

    def leave():
        ended.append(True)
        raise KeyboardInterrupt  # which no test of ours catches

    space: dict = {"leave": leave}
    exec(program.replace("os._exit(0)", "leave()") + "\n" + test, space)
    try:
        space["test_it"]()
    except (Exception, KeyboardInterrupt, pytest.fail.Exception):
        return False
    return not ended


def indented(lines):
    return ["    " + line for line in lines]


number = st.integers(0, 4)
simple = st.one_of(
    number.map("assert f({0}) == {0}".format).map(lambda line: [line]),
    number.map("assert f({0}) in (1, 3, 7)".format).map(lambda line: [line]),
    number.map("r = f({0})".format).map(lambda line: [line]),
    number.map(lambda n: ["with pytest.raises(ValueError):", f"    f({n})"]),
    st.just(["return"]),
    st.just(["for n in range(3):", "    assert f(n) == n", "    if f(n) == 1: break"]),
)


def larger(inner):
    blocks = st.lists(inner, min_size=1, max_size=3).map(lambda parts: sum(parts, []))
    return st.one_of(
        st.tuples(number, blocks, blocks).map(
            lambda x: [f"if f({x[0]}) > 1:", *indented(x[1]), "else:", *indented(x[2])]
        ),
        st.tuples(number, blocks).map(lambda x: [f"for i in range({x[0]}):", *indented(x[1])]),
        st.tuples(st.sampled_from(["ValueError", "Exception"]), blocks, blocks).map(
            lambda x: ["try:", *indented(x[1]), f"except {x[0]}:", *indented(x[2])]
        ),
        st.tuples(blocks, blocks).map(
            lambda x: ["try:", *indented(x[0]), "finally:", *indented(x[1])]
        ),
    )


flows = st.lists(st.recursive(simple, larger, max_leaves=5), min_size=1, max_size=4)
values = st.sampled_from(["n", "n", "n", "n", "n", "7", "int('x')", "{}[n]", "os._exit(0)"])
answers = st.lists(values, min_size=5, max_size=5)


@RANDOM
@given(st.lists(st.tuples(flows, answers), min_size=10, max_size=10))
def test_control_flow_is_pythons(pairs):
    """Loops, branches, try, return and raises around calls that are right, wrong, raise or end."""
    jobs = []
    for flow, values in pairs:
        test = "\n".join(
            ["import pytest", "def test_it():", *indented(sum(flow, [])), "    assert f(0) == 0"]
        )
        branches = "".join(f"    if n == {n}: return {value}\n" for n, value in enumerate(values))
        jobs.append((test, f"import os\ndef f(n):\n{branches}"))
    results = run_many([(problem([test], entry="f"), program) for test, program in jobs])
    for (test, program), result in zip(jobs, results, strict=True):
        case = f"{test}\n\n{program}\n{result}"
        assert (result.status == "passed") == plain(test, program), case


STARTS = """a, b = [3, 1, 2], [4] | a = b = [2, 1] | a = [[1], [2]]; b = a[0] |
    b = [0]; a = [b, b] | b = [5]; a = [b, (b, [6])] | a = []; b = [a, 1]"""
CALLS = (
    """r = f(a, b) | r = f(x=a, y=b) | r = f(y=a, x=b) | r = f(*[a, b]) | f(a, b); r = f(b, a)"""
)
STEPS = """x.append(5) | x.pop() | x.clear() | x.reverse() | y.append(6) | y.pop(0) |
    x.sort(key=repr) | x.extend([7, 8]) | x[:1] = [] | x[0] = [9] | x = list(x) | y = x |
    x[0].append(1) | x[:] = x * 2"""
VALUES = "None | x | y | list(x) | [x, y] | (y, x) | x[0] | len(x) | [y, [y]] | x[:1]"
LOOKS = """r is a | r is b | r == a | a == b | a is b | a[0] is b | r[0] is a | r[1] is a |
    r[0] is b | r is a[0] | len(r) == 2"""


def parts(text):
    return [part.strip() for part in text.split("|")]


shapes = st.tuples(
    st.sampled_from(parts(STARTS)),
    st.sampled_from(parts(CALLS)),
    st.lists(st.sampled_from(parts(STEPS)), max_size=4),
    st.sampled_from(parts(VALUES)),
)


@RANDOM
@given(st.lists(shapes, min_size=10, max_size=10))
def test_arguments_and_identity_are_pythons(shapes):
    """What a program changes in its arguments, and which of them its value is or holds."""
    jobs = []
    for start, call, steps, value in shapes:
        lines = ["def f(x, y):"]
        for step in steps:
            lines += ["    try:", f"        {step}", "    except Exception: pass"]
        program = "\n".join([*lines, f"    return {value} if x else None"])
        space = {}
        exec(f"{program}\n{start}\n{call}", space)
        looks = [*parts(LOOKS), *(f"repr({name}) == {repr(space[name])!r}" for name in "abr")]
        more = "\nif type(r) is list: r.append(0)\n"
        exec(more, space)
        last = [f"repr({name}) == {repr(space[name])!r}" for name in "abr"]
        space = {}
        exec(f"{program}\n{start}\n{call}", space)
        wanted = [holds(look, space) for look in looks]
        test = f"{start}\n{call}\n" + "\n".join(f"assert {look}" for look in looks) + more
        test += "\n".join(f"assert {look}" for look in last)
        jobs.append((problem([test], entry="f"), program, wanted + [True] * 3))
    results = run_many([(p, program) for p, program, _ in jobs])
    for (p, program, wanted), result in zip(jobs, results, strict=True):
        assert result.tests == wanted, f"{p.tests[0]}\n\n{program}\n{wanted}\n{result}"


def holds(expression, space):
    try:
        return bool(eval(expression, space))
    except Exception:
        return False


KINDS = """
from collections import *
def kinds(x):
    if isinstance(x, dict):
        return type(x).__name__, [(kinds(key), kinds(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple, deque)):
        return type(x).__name__, [kinds(value) for value in x]
    return type(x).__name__
"""
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(-1e9, 1e9), st.text(), st.binary()
)
hashable = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.booleans())).map(repr)


def containers(inner):
    items = st.lists(inner, max_size=3).map(", ".join)
    pairs = st.lists(st.tuples(hashable, inner).map(": ".join), max_size=3).map(", ".join)
    keys = st.lists(hashable, max_size=3).map(", ".join)
    forms = [items.map(form.format) for form in ("[{}]", "tuple([{}])", "deque([{}], 9)")]
    for form in ("{{{}}}", "OrderedDict({{{}}})", "defaultdict(list, {{{}}})"):
        forms.append(pairs.map(form.format))
    for form in ("Counter([{}])", "set([{}])", "frozenset([{}])", "dict.fromkeys([{}]).keys()"):
        forms.append(keys.map(form.format))
    return st.one_of(forms)


@RANDOM
@given(st.lists(st.recursive(leaves.map(repr), containers, max_leaves=8), min_size=8, max_size=8))
def test_values_keep_their_types_on_both_ways(texts):
    """A value that the program makes, and one that a test hands over and gets back."""
    program = "from collections import *\ndef f(): return {}\ndef g(x): return x"
    jobs = []
    for text in texts:
        test = (
            f"{KINDS}x = {text}\nassert f() == x\nassert kinds(f()) == kinds(x)\nassert g(x) == x\n"
        )
        jobs.append((problem([test + "assert kinds(g(x)) == kinds(x)"]), program.format(text)))
    for (p, program), result in zip(jobs, run_many(jobs), strict=True):
        assert result.status == "passed", f"{p.tests[0]}\n\n{program}\n{result}"


# ---------------------------------------------------------------------- what a test is


def test_each_assert_is_a_test_and_a_failed_one_ends_nothing():
    text = (
        "x = f(1)\nassert x == 1\nassert f(2) == 2\nfor n in range(3): assert f(n) == n\n"
        "assert f(3) == 3"
    )
    p = problem([text, "assert f(4) == 4"], entry="f")
    assert run(p, "def f(n): return n").tests == [True] * 5
    result = run(p, "def f(n): return n if n != 2 else 9")
    assert (result.tests, result.passed, result.total) == ([True, False, False, True, True], 3, 5)
    assert (result.reward, result.status) == (0.6, "failed")
    ends = run(p, "import os\ndef f(n): return n if n != 2 else os._exit(0)")
    assert (ends.tests, ends.status) == ([True, False, False, False, False], "error")
    assert run(p, "x = 1").tests == [False] * 5


def test_every_text_that_can_fail_is_counted():
    p = problem(["assert f([1])[0]", "assert f([0]) == [0]"], entry="f")
    assert run(p, "def f(x): return [0]").tests == [False, True]
    for text in ("if f(2) != 2: raise ValueError", "x = f(2)[0]", "assert (m := f(2) == 2)"):
        p = problem([text, "assert f(7) == 7"], entry="f")
        assert run(p, "def f(x): return 7").tests == [False, True], text
    below_an_if = "if True:\n    def test_a():\n        assert f(1) == 1"
    generator = "def test_a():\n    yield\n    assert f(1) == 1"
    for text in (below_an_if, generator):  # pytest runs the one, and refuses the other
        assert run(problem([text], entry="f"), EMPTY).status == "unscorable"


def test_a_program_cannot_hand_over_a_name_that_is_not_its_own():
    code = (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'start' in frame.f_locals:\n"
        "        frame.f_locals['start']['names'] += ['__equal__', 'abs']\n"
        "    frame = frame.f_back\n"
        "def __equal__(a, b): return None\ndef abs(x): return 0\ndef f(n): return None"
    )
    assert (
        run(problem(["assert f(1) == 1", "assert abs(f(2) - 2) < 1"], entry="f"), code).reward == 0
    )


def test_the_side_of_the_answer_may_need_what_the_call_does():
    p = problem(["d = {}\nassert f(d) == int(d['k'])"], entry="f")
    assert run(p, "def f(d):\n    d['k'] = 5\n    return 5").reward == 1


def test_what_breaks_off_fails_what_it_did_not_reach():
    text = (
        "def test_a():\n    assert f(1) == 1\n    r = f(2)\n    assert r == 2\n"
        "def test_b():\n    assert f(3) == 3"
    )
    p = problem([text], entry="f")
    assert run(p, "def f(n): return n if n != 2 else 1 / 0").tests == [True, False, True]
    rows = (
        "import pytest\n@pytest.mark.parametrize('n', range(5))\n"
        "def test_a(n):\n    r = f(n)\n    assert r == n"
    )
    after = "def test_a():\n    assert f(1) == 1\n    f(2)"
    for text in (
        rows,
        after,
        rows.replace("r = f(n)\n    assert r", "assert f(n)"),
        "assert f(1) == 1\nf(2)",
    ):
        for end in ("1 / 0", "os._exit(0)", "exec('while True: pass')"):
            program = f"import os\ndef f(n): return {end} if n > 1 else n"
            assert run(problem([text], entry="f"), program, timeout=0.3).reward == 0, (text, end)


def test_the_end_of_a_program_is_no_exception_that_a_test_can_expect():
    texts = [
        "try:\n    f(1)\nexcept BaseException:\n    pass\nassert True or f(2)",
        "import pytest\nwith pytest.raises(BaseException):\n    f(1)",
        "def test_a():\n    try: assert f(1) == 2\n    except BaseException: return",
    ]
    for text in texts:
        for end in ("os._exit(0)", "os.abort()", "exec('while True: pass')"):
            result = run(problem([text], entry="f"), f"import os\ndef f(n): {end}", timeout=0.3)
            assert not any(result.tests) and result.status in ("error", "timeout"), (text, result)


EMPTIES = """
def f(xs):
    empty = type(xs)()
    xs.clear()
    return empty
"""
BUYS = (CASES / "emptied.txt").read_text().splitlines()


@pytest.mark.parametrize("text", [line.replace("\\n", "\n") for line in BUYS])
def test_emptying_an_argument_buys_nothing(text):
    """In an assert, the side that does not use the program is evaluated first."""
    assert run(problem([text], entry="f"), EMPTIES).reward == 0


def test_nothing_of_the_judge_is_changed_for_the_next_program():
    words = problem(["import keyword\nassert f(keyword.kwlist)[0] == 'False'"], entry="f")
    cases = functional(([[3, 1, 2]], [1, 2, 3]), ([{"a": [1]}], ["a"]))
    default = problem(["def given(xs=[2, 1]): return xs\nassert f(given()) == [1, 2]"], entry="f")
    takes = "def f(xs):\n    xs.clear()\n    return ['False']"
    kinds = "import http.server\nkinds = http.server.SimpleHTTPRequestHandler.extensions_map\n"
    deeper = problem([kinds + "assert len(f(kinds)) > 3"], entry="f")  # held by a class
    for p in (words, cases, default, deeper):
        results = run_many([(p, takes), (p, "def f(xs): return sorted(xs)")], workers=1)
        assert results[1].status == "passed", results[1]


def test_a_helper_of_the_tests_is_never_the_programs():
    texts = ["assert len(f([1, 2])) == 2", "assert double(f([1])[0]) == 2", "assert pi > f([3])[0]"]
    reference = "from math import pi\ndef f(xs): return list(xs)"
    p = problem(texts, entry="f", context="def double(n): return n * 2\n", reference=reference)
    assert run(p, reference).reward == 1
    lies = "def len(x): return 2\ndef double(x): return 2\npi = 99\ndef f(xs): return []"
    assert run(p, lies).reward == 0
    own = problem(["assert sum(10, 15) == 6"], entry="sum", reference="def sum(a, b): return 6")
    assert run(own, own.reference).reward == 1 and run(own, "x = 1").reward == 0


def test_no_object_of_a_program_is_equal_to_the_answer():
    anything = (
        "class A:\n    __eq__ = __lt__ = __gt__ = __contains__ = __bool__ = lambda *a: True\n"
        "    __hash__ = lambda self: 1\n    __sub__ = __abs__ = isupper = lambda self, *a: self\n"
        "    __len__ = lambda self: 2\ndef f(*a): return A()"
    )
    texts = ["f(1) == 1", "1 == f(1)", "abs(f(1) - 2) < 1", "3 in f(1)", "f('x').isupper()"]
    texts += ["f(1) in [1]", "len(f(1)) == 2", "not f(1) != 1", "{f(1): 1} == {1: 1}", "f(1) > 0"]
    p = problem([f"assert {text}" for text in texts], entry="f", reference="def f(x): return x")
    assert run(p, anything).tests == [False] * len(texts)


def test_what_was_handed_out_opens_no_object():
    """Neither a method of an object, nor the module, which tests may import."""
    text = "import solution\nf('a')\nassert f('x').isupper()"
    method = (
        "class A:\n    def isupper(self): return True\n"
        "def f(x): return A().isupper if x == 'a' else A()"
    )
    module = "import sys\ndef isupper(): return True\ndef f(x): return sys.modules[__name__]"
    p = problem([text], entry="f", reference="def f(x): return x.upper()")
    assert run(p, p.reference).reward == 1
    for program in (method, module):
        assert run(p, program).reward == 0


def test_d45_check_is_called():
    text = (
        "METADATA = {}\ndef check(candidate):\n    assert candidate([1.0, 2.0]) == 3.0\n"
        "    assert True, 'no test'\n"
        "    for n in range(5):\n        assert candidate([n]) == mirror(n)\n"
    )
    context = "from typing import List\ndef mirror(n): return n\n"
    p = problem([text], entry="total", context=context)
    right = run(p, "def total(xs: List[float]) -> float: return mirror(sum(xs))")
    assert (right.reward, right.total) == (1, 2)
    wrong = run(p, "def total(xs): return 0.0")
    assert wrong.tests == [False, False]
    assert wrong.feedback.startswith("Test 1 failed: total([1.0, 2.0]) returned 0.0, expected 3.0")


# ---------------------------------------------------------------------- what cannot be scored


def test_d27_unscorable_is_found_with_an_empty_program():
    """It is the problem's fault alone, and the reason says which."""
    rows = [json.loads(line) for line in (CASES / "unscorable.jsonl").open()]
    for row in [*rows, {"tests": [[[object()], 1]], "kind": "functional", "why": "plain data"}]:
        why, p = row.pop("why"), problem(**row)
        for program in (EMPTY, "def f(*a): return 1"):
            result = run(p, program)
            assert (result.status, result.reward, result.tests) == ("unscorable", 0.0, []), row
            assert not result.public_passed
            assert re.match(f"This problem cannot be scored: .*{why}", result.feedback), result


HARD = """return {}
return lambda: 1
return open('/dev/null')
return type
return (x for x in [1])
return 10 ** 600000
return type('int', (), {})()
raise Exception(f)
return __import__('functools').reduce(lambda x, _: [x], range(3000))
x = []; x.append(x); return x
import numpy; return numpy.array([object()])
from decimal import Decimal; return {Decimal('NaN'), Decimal(1)}"""


def test_no_program_makes_its_problem_unscorable():
    texts = ["assert g(f(5)) == 5", "assert f(1)[0:2] == [1, 2]", "assert g(f(3).items) == 6"]
    reference = "class Row(list): pass\nclass Box: pass\ndef f(n): return Box()\ndef g(x): return 6"
    p = problem(texts, reference=reference)
    programs = [f"def g(x): return 6\ndef f(n):\n    {body}" for body in HARD.split("\n")]
    for program, result in zip(programs, run_many([(p, x) for x in programs]), strict=True):
        assert result.status in ("failed", "error", "memory", "timeout"), (program, result)
        assert result.total == 3 and result.reward < 1, (program, result)


# ---------------------------------------------------------------------- public and hidden tests


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", ["assert", "functional", "stdin"])
def test_public_tests_run_first_and_nothing_hidden_is_told(kind, order):
    rows = {
        "assert": ["assert f(777) == 777", "assert f(1) == 1"],
        "functional": [[[777], 777], [[1], 1]],
        "stdin": [["777\n", "777"], ["1\n", "1"]],
    }
    hidden, public = rows[kind]
    p = problem([hidden, public][::order], kind=kind, entry="f", public=[public])
    hide = "import os, sys\nseen = []\ndef f(n):\n    seen.append(n)\n    return {}\n"
    main = "print(f(int(input())))" if kind == "stdin" else ""
    ends = ["os._exit(n == 777) or 0", "1 / (n - 777) and 0", "exec('while n == 777: pass') or 0"]
    for value in ["seen", *ends]:
        result = run(p, hide.format(value) + main, timeout=0.3)
        assert "777" not in result.feedback and not result.public_passed, result
    result = run(p, hide.format("1") + main)
    assert result.feedback == "The public tests pass, but hidden tests fail."
    assert (result.tests, result.public_passed) == ([False, True][::order], True)
    assert run(p, hide.format("n") + main).feedback == "All tests passed."


def test_a_public_text_may_use_what_a_hidden_one_defines():
    hidden = "import math\ntwo = math.floor(2.5)\ndef same(a, b): assert a == b\nsame(f(777), 777)"
    public = "same(f(two), 2)"
    p = problem([hidden, public], entry="f", public=[public])
    assert run(p, "def f(n): return n").tests == [True, True]
    result = run(p, "seen = []\ndef f(n):\n    seen.append(n)\n    return seen")
    assert result.feedback == "Test 1 failed: f(2) returned [2], expected 2"


def test_a_public_test_that_is_not_graded():
    p = problem(["assert f(2) == 777"], entry="f", public=["assert f(1) == 1"])
    result = run(p, "def f(n): return 777")
    assert (result.reward, result.total, result.public_passed) == (1, 1, False)


# ---------------------------------------------------------------------- stdin and functional


STDIN = json.loads((CASES / "stdin.json").read_text())  # what is printed, expected, if it is right


def test_d32_stdin_output_is_compared_as_stated():
    jobs = [(problem([["", want]], kind="stdin"), f"print({out!r})") for out, want, _ in STDIN]
    results = run_many(jobs)
    judged = [[*row[:2], result.reward == 1] for row, result in zip(STDIN, results, strict=True)]
    assert judged == STDIN
    assert results[1].feedback == (
        "Test 1 failed: with the input '' the program printed '0.334\\n', expected '0.333333333333'"
    )


def test_each_stdin_case_has_the_time_limit_to_itself():
    p = problem([[f"{n}\n", f"{n}"] for n in range(4)], kind="stdin")
    busy = "import time\nn = int(input())\nwhile time.process_time() < 0.3: pass\nprint(n)"
    assert run(p, busy, timeout=0.6).status == "passed"
    late = run(p, busy.replace("0.3", "(9 if n == 1 else 0.1)"), timeout=0.6)
    assert (late.status, late.tests) == ("timeout", [True, False, False, False])
    dies = run(p, "n = int(input())\nprint(n if n != 1 else 1 / 0)")
    assert (dies.status, dies.tests) == ("error", [True, False, True, True])


def test_stdin_programs_may_use_their_streams_as_they_like():
    p = problem([["5\n", "5"]], kind="stdin")
    for program in (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint(input())",
        "print(open('/dev/stdin').read())",
        "print(open(0).read())",
        "import sys\nsys.stdin = open('/proc/self/fd/0')\nprint(input())",
        "import sys\nprint(input())\nsys.stdout.close()",
        "import atexit\natexit.register(print, input())",
        "import threading\nthreading.Timer(0.05, print, [input()]).start()",
        "import sys\nprint(input())\nsys.exit(0)",
        "import sys\nprint(input())\nsys.exit(256)",  # of the code the system sees 8 bits
        "print(input())\nexit(False)",
        "open('/dev/stdout', 'w').write('5')",
    ):
        assert run(p, program).status == "passed", (program, run(p, program))
    for end in ("raise ValueError", "exit(3)", "exit(0.0)", "exit('')"):
        assert run(p, f"print(input())\n{end}").status == "error"
    assert run(problem([["", ""]], kind="stdin"), "raise SystemExit").reward == 1


def test_functional_values_are_jsons():
    for entry, program in (
        ("add", "def add(a, b): return a + b"),
        ("add", "class Solution:\n    def add(self, a, b): return a + b"),
        ("Solution.add", "class Solution:\n    def add(self, a, b): return a + b"),
    ):
        assert run(functional(([2, 3], 5), ([1, 0], 1), entry=entry), program).reward == 1
    pairs = [("(1, (2.0000000001,))", [1, [2.0]]), ("{'a': 1}", {"a": 1}), ("None", None)]
    for value, expected in pairs:
        assert run(functional(([], expected)), f"def f(): return {value}").reward == 1
    for value, expected in [("2.001", 2.0), ("1.333335333334e18", 1333335333334000000), ("'1'", 1)]:
        assert run(functional(([], expected)), f"def f(): return {value}").reward == 0
    counter = (
        "n = 0\nclass Solution:\n    def __init__(self): self.n = 0\n"
        "    def f(self):\n        self.n += 1\n        return self.n"
    )
    assert run(functional(([], 1), ([], 1)), counter).reward == 1  # each case has a new object


# ---------------------------------------------------------------------- feedback


def test_feedback_names_call_value_and_expected():
    p = problem(["assert f(3) == 2", "x = f(13)\nassert x == 13", "assert f(2)"])
    for line in (CASES / "feedback.jsonl").open():
        row = json.loads(line)
        lines = run(p, row["program"], timeout=0.3).feedback.split("\n")
        assert lines[0] == f"Test 1 failed: {row['feedback']}"
    lines = run(p, "def f(n): return 0").feedback.split("\n")
    assert lines[1] == "Test 2 failed: f(13) returned 0, expected 13"
    assert lines[2].startswith("Test 3 failed: f(2) returned 0, expected f(2)")


def test_feedback_is_the_same_text_for_the_same_failure():
    """No addresses, no order of addresses or hashes; judges that never saw the program agree."""
    p = functional(*[([1], 0)] * 9)
    programs = [
        "class A: pass\ndef f(n): return A()",
        "def f(n): raise ValueError(object())",
        "def f(n): return {str(i) for i in range(50)}",
        "def f(n): return {(None, i) for i in range(9)} | {(1, 'a'), ('a', 1)}",
        "def f(n): return str([object() for _ in range(60)])",
        "def f(n): return 'x' * 10**5",
        "def f(n): raise ValueError('y' * 10**5)",
    ]
    texts = []
    for _ in range(3):
        executor.close()
        texts.append([r.feedback for r in run_many([(p, x) for x in programs], feedback_chars=300)])
    assert texts[0] == texts[1] == texts[2]
    assert max(map(len, texts[0])) <= 300 and "cut]" in texts[0][-1]
    odd = run(p, "def f(n): return n * 5", feedback_tests=1)
    assert odd.feedback.count("Test ") == 1


# ---------------------------------------------------------------------- time


def test_only_the_programs_own_time_counts():
    slow_test = "total = 0\nfor i in range(2_000_000): total += i\nassert f(total) == total"
    result = run(problem([slow_test], entry="f"), "def f(x): return x", timeout=0.1)
    assert result.status == "passed" and result.cpu_seconds < 0.1, result
    sleeps = "import time\ndef f():\n    time.sleep(0.5)\n    return 1"
    assert run(functional(([], 1)), sleeps, timeout=0.3).status == "passed"  # it uses no CPU


def test_the_limit_follows_the_reference():
    """A problem's own limit counts where it is larger than the run's."""
    busy = "import time\ndef f():\n    while time.process_time() < 0.6: pass\n    return 1"
    slow, fast = functional(([], 1), timeout=3.0), functional(([], 1), timeout=0.01)
    results = run_many([(slow, busy), (functional(([], 1)), busy), (fast, busy)], timeout=0.3)
    assert [result.status for result in results] == ["passed", "timeout", "timeout"]
    assert 0.4 < results[0].cpu_seconds < 3 and results[1].cpu_seconds < 1
    assert run(fast, busy, timeout=3).status == "passed"


def test_a_flood_of_containers_is_refused_before_it_is_read():
    flood = "def f(): return [[] for _ in range(100_000)]"
    result = run(functional(([], 1)), flood, output_bytes=10**6)
    assert result.feedback == "Test 1 failed: f() returned more than 1000000 bytes"
    assert run(functional(([], [[]] * 10**5)), flood).status == "passed"


def test_many_calls_are_cheap():
    """Each call costs the same, also with much that both sides hold."""
    tests = [
        "for n in range(20_000): assert f(n) == [n]",
        "xs = list(range(100_000))\nfor n in range(100): assert f(xs)[0] is xs",
        "held = []\nfor n in range(4000): held.append(f([n]))\nassert held[9] == [[9]]",
    ]
    results = run_many([(problem([text], entry="f"), "def f(x): return [x]") for text in tests])
    assert [result.status for result in results] == ["passed"] * 3, results
    counter = "class A:\n    n = 0\n    def add(self, n): self.n += n"
    methods = "a = A()\nfor n in range(5000): a.add(n)\nassert a.n == 12497500"
    assert run(problem([methods], reference=counter), counter).status == "passed"


ABSURD = {  # what a test does with a value -> values that make it take for ever
    "sum(range(f(3))) == 1": ["10**13"],
    "f(3) * 2 == 1": ["10**3000000", "[0] * 10**9"],
    "list(f(3)) == [1]": ["__import__('itertools').count()", "range(10**12)"],
    "int(f(3)) == 1": ["__import__('decimal').Decimal('1E+999999999')"],
    "f(3) == 1": ["__import__('fractions').Fraction(10**2000000, 3)"],
}


def test_a_value_of_absurd_cost_ends_its_program_and_not_the_judge():
    """Ten such tests take no longer than one: the first that runs out of time ends them all."""
    jobs = []
    for test, values in ABSURD.items():
        p = problem([f"assert {test}"] * 10, entry="f", reference="def f(x): return x")
        jobs += [(p, f"def f(x): return {value}") for value in values]
    for (p, program), result in zip(jobs, run_many(jobs, timeout=0.3), strict=True):
        assert result.reward == 0 and result.total == 10, (p.tests[0], program, result)
        assert result.status in ("failed", "error", "timeout", "memory"), (program, result)


RAW = """
import json, os, time
def say(value, raised):
    os.write(3, json.dumps([[], [], raised, value]).encode() + b"\\n")
    time.sleep(9)
"""


@pytest.mark.parametrize(
    "program",
    [
        RAW + "def f(x): say(['shared', 'StopIteration'], True)",  # a class, not an exception
        "class A:\n    def __next__(self, *x): raise StopIteration\n"
        "def f(x): return A().__next__(x)",
        RAW + "def f(x): say(['method', '__next__', 0, 'x'], False)",
    ],
)
def test_no_program_ends_an_iteration_of_the_tests(program):
    assert run(problem(["assert all(map(f, [2, 4]))"], entry="f"), program).reward == 0
    made = program.replace("A().__next__(x)", "A().__next__")
    tests = ["assert all(map(f(2), [2, 4]))"]
    assert run(problem(tests, entry="f", reference="def f(x): ..."), made).reward == 0


def test_the_memory_of_the_judge_is_limited():
    """What is small on the wire and large in the judge: 10**8 numbers of a range."""
    result = run(
        problem(["assert sorted(f(1)) == [0]"], entry="f"), "def f(n): return range(10**8)"
    )
    assert "MemoryError" in result.feedback
    assert run(problem(["assert f(1) == 1"], entry="f"), "def f(n): return n").reward == 1


def test_a_reference_that_meets_a_limit_of_the_judge_makes_its_problem_unscorable():
    right = "class V:\n    def __eq__(self, o): return tuple(o) == (1,)\n"
    p = problem(["assert V() == (1,)"], reference=right)
    assert run(p, right).feedback.endswith("compares an object of the program with plain data")
    assert run(p, right + "#").status == "failed"  # at run time nothing is unscorable
    assert run(problem(["assert f() == 1"], reference="def f(): 1"), "def f(): 1").reward == 0


def test_a_missing_name_as_an_argument_breaks_no_later_call():
    p = problem(
        ["assert apply(g, [1, 2]) == 3", "xs = [2, 1]\nassert ordered(xs) == [1, 2]"],
        reference="def apply(h, xs): return h(xs)\ndef g(xs): return sum(xs)\n"
        "def ordered(xs):\n    xs.sort()\n    return xs",
    )
    assert run(p, p.reference).reward == 1
    result = run(p, p.reference.replace("def g", "def other"))
    assert result.tests == [False, True] and "name 'g' is not defined" in result.feedback


def test_what_is_evaluated_first_keeps_its_own_order():
    counter = "n = [0]\ndef count(x):\n    n[0] += 1\n    return n[0]\n"
    p = problem([counter + "assert max(f(1), count('a'), 10 * count('b')) == 20"])
    assert run(p, "def f(x): return x").reward == 1
