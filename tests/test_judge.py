"""What tests mean: for a program that does not attack, the verdict is the one that pytest gives.

The cases in tests/cases/*.jsonl are files of tests with right and wrong programs; check.py in that
folder holds their verdicts against pytest. Here the judge is held against them, and against plain
Python on tests made by hypothesis.
"""

import contextlib
import json
import re
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

import executor
from executor import run, run_many

CASES = Path(__file__).parent / "cases"
LEFT_OUT = [line.partition(":")[0] for line in (CASES / "left_out.txt").read_text().splitlines()]
# An example is ten programs that run together. They are small: hypothesis need not shrink them.
RANDOM = settings(max_examples=8, phases=[Phase.generate])


def problem(tests, kind="assert", entry="f", public=(), **more):
    return SimpleNamespace(kind=kind, tests=tests, public_tests=public, entry_point=entry, **more)


def functional(*pairs, **more):
    return problem(list(pairs), kind="functional", **more)


@pytest.mark.parametrize("name", ["arguments", "types", "styles", "objects", "test_files"])
def test_verdicts_are_those_of_pytest(name):
    for line in (CASES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        p = problem([case["test"]], entry="", reference=case["solution"])
        right, wrong = [case["solution"], *case["right"]], case["wrong"]
        results = run_many([(p, program) for program in right + wrong])
        statuses = [result.status for result in results]
        if "unscorable" in statuses:
            assert case["name"] in LEFT_OUT, results
        else:
            passed = [status == "passed" for status in statuses]
            assert passed == [True] * len(right) + [False] * len(wrong), (case, results)


# ---------------------------------------------------------------------- against plain Python


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


SIMPLE = [
    "assert f({n}) == {n}",
    "assert f({n}) in (1, 3, 7)",
    "r = f({n})",
    "with pytest.raises(ValueError): f({n})",
    "return",
    "for n in range(3):\n    assert f(n) == n\n    if f(n) == 1: break",
]
LARGER = [
    "if f({n}) > 1:\n{x}\nelse:\n{y}",
    "for i in range({n}):\n{x}",
    "try:\n{x}\nexcept ValueError:\n{y}",
    "try:\n{x}\nexcept Exception:\n{y}",
    "try:\n{x}\nfinally:\n{y}",
]
number = st.integers(0, 4)


def block(statements):
    return indent("\n".join(statements), "    ")


def larger(inner):
    body = st.lists(inner, min_size=1, max_size=3).map(block)
    return st.builds(str.format, st.sampled_from(LARGER), n=number, x=body, y=body)


simple = st.builds(str.format, st.sampled_from(SIMPLE), n=number)
flows = st.lists(st.recursive(simple, larger, max_leaves=5), min_size=1, max_size=4)
values = st.sampled_from(["n", "n", "n", "n", "n", "7", "int('x')", "{}[n]", "os._exit(0)"])
answers = st.lists(values, min_size=5, max_size=5)


@RANDOM
@given(st.lists(st.tuples(flows, answers), min_size=10, max_size=10))
def test_control_flow_is_pythons(pairs):
    """Loops, branches, try, return and raises around calls that are right, wrong, raise or end."""
    jobs = []
    for flow, values in pairs:
        test = "import pytest\ndef test_it():\n" + block([*flow, "assert f(0) == 0"])
        branches = "".join(f"    if n == {n}: return {value}\n" for n, value in enumerate(values))
        jobs.append((test, f"import os\ndef f(n):\n{branches}"))
    results = run_many([(problem([test]), program) for test, program in jobs])
    for (test, program), result in zip(jobs, results, strict=True):
        case = f"{test}\n\n{program}\n{result}"
        assert (result.status == "passed") == plain(test, program), case


def one_of(text):
    return st.sampled_from(re.split(r"\s*\|\s*", text))


STARTS = one_of("""a, b = [3, 1, 2], [4] | a = b = [2, 1] | a = [[1], [2]]; b = a[0] |
    b = [0]; a = [b, b] | b = [5]; a = [b, (b, [6])] | a = []; b = [a, 1]""")
CALLS = one_of("""r = f(a, b) | r = f(x=a, y=b) | r = f(y=a, x=b) | r = f(*[a, b]) |
    f(a, b); r = f(b, a)""")
STEPS = one_of("""x.append(5) | x.pop() | x.clear() | x.reverse() | y.append(6) | y.pop(0) |
    x.sort(key=repr) | x.extend([7, 8]) | x[:1] = [] | x[0] = [9] | x = list(x) | y = x |
    x[0].append(1) | x[:] = x * 2""")
VALUES = one_of("None | x | y | list(x) | [x, y] | (y, x) | x[0] | len(x) | [y, [y]] | x[:1]")
LOOKS = ["r is a", "r is b", "r == a", "a == b", "a is b", "a[0] is b", "r[0] is a", "r[1] is a"]
LOOKS += ["r[0] is b", "r is a[0]", "len(r) == 2"]
shapes = st.tuples(STARTS, CALLS, st.lists(STEPS, max_size=4), VALUES)


@RANDOM
@given(st.lists(shapes, min_size=10, max_size=10))
def test_arguments_and_identity_are_pythons(shapes):
    """What a program changes in its arguments, and which of them its value is or holds."""
    jobs, wanted = [], []
    for start, call, steps, value in shapes:
        lines = ["def f(x, y):"]
        for step in steps:
            lines += ["    try:", f"        {step}", "    except Exception: pass"]
        program = "\n".join([*lines, f"    return {value} if x else None"])
        change = "if type(r) is list: r.append(0)"
        space: dict = {}
        exec(f"{program}\n{start}\n{call}\n{change}", space)
        test = [start, call, change, *(f"assert {look}" for look in LOOKS)]
        test += [f"assert repr({name}) == {repr(space[name])!r}" for name in "abr"]
        facts = dict.fromkeys(LOOKS, False)
        for look in LOOKS:
            with contextlib.suppress(Exception):  # r may be None
                facts[look] = eval(look, space)
        wanted.append([*facts.values(), True, True, True])
        jobs.append((problem(["\n".join(test)]), program))
    for (p, program), right, result in zip(jobs, wanted, run_many(jobs), strict=True):
        assert result.tests == right, f"{p.tests[0]}\n\n{program}\n{right}\n{result}"


# ---------------------------------------------------------------------- what a test is


def outcomes(p, program):
    """+ for each test that the program passes, - for each that it fails."""
    return "".join("+" if passed else "-" for passed in run(p, program).tests)


def test_each_assert_is_a_test_and_a_failed_one_ends_nothing():
    text = "x = f(1)\nassert x == 1\nassert f(2) == 2\nfor n in range(3): assert f(n) == n\n"
    p = problem([text + "assert f(3) == 3", "assert f(4) == 4"])
    assert outcomes(p, "def f(n): return n") == "+++++"
    assert outcomes(p, "def f(n): return n if n != 2 else 9") == "+--++"
    result = run(p, "import os\ndef f(n): return n if n != 2 else os._exit(0)")
    assert result.tests == [True, False, False, False, False]
    assert (result.passed, result.total, result.reward, result.status) == (1, 5, 0.2, "error")
    assert outcomes(p, "x = 1") == "-----"


def test_every_text_that_can_fail_is_counted_and_what_breaks_off_fails_the_rest():
    texts = ["assert f(0)", "if f(2) != 2: raise ValueError", "x = f(2)[0]"]
    texts += ["assert (m := f(2) == 2)", "assert f(7) == 0"]
    assert outcomes(problem(texts), "def f(x): return 0") == "----+"
    first = "def test_a():\n    assert f(1) == 1\n    r = f(2)\n    assert r == 2\n"
    p = problem([first + "def test_b():\n    assert f(3) == 3"])
    assert outcomes(p, "def f(n): return n if n != 2 else 1 / 0") == "+-+"


def test_a_side_waits_for_the_call_where_it_must():
    """It needs what the call does; or it is counted in Python's order."""
    p = problem(["d = {}\nassert f(d) == int(d['k'])"])
    assert outcomes(p, "def f(d):\n    d['k'] = 5\n    return 5") == "+"
    counter = "n = [0]\ndef count(x):\n    n[0] += 1\n    return n[0]\n"
    p = problem([counter + "assert max(f(1), count('a'), 10 * count('b')) == 20"], entry="")
    assert outcomes(p, "def f(x): return x") == "+"


def test_a_method_may_have_arguments_of_any_name_and_an_eq_any_signature():
    program = "class A:\n    def m(self, name, owner): return name + owner\ndef f(n): return A()"
    test = "assert f(1).m(name='a', owner='b') == 'ab'"
    assert outcomes(problem([test], reference=program), program) == "+"
    program = "class A:\n    def __eq__(*sides): return sides[0] is sides[1]\ndef f(n): return n"
    assert outcomes(problem(["assert f(1) == 1"], reference=program), program) == "+"


def test_an_iterator_raises_in_its_place():
    """Also behind its first items, which cross singly."""
    p = problem(["import pytest\nwith pytest.raises(ValueError): list(f())"])
    assert outcomes(p, "def f():\n    yield from range(9)\n    raise ValueError") == "+"


def test_an_iterator_of_the_tests_may_ask_the_program_for_its_items():
    program = "def f(xs, it): return xs + [len(x) for x in it]\ndef g(x): return x * 2"
    tests = ["xs = [1]\nassert f(xs, map(g, [[2], [3, 4]])) == [1, 2, 4]"]
    tests.append("assert f([], map(g, [None])) == []")
    result = run(problem(tests, reference=program), program + "#")
    assert result.tests == [True, False]
    assert "g(None) raised TypeError: unsupported operand" in result.feedback


def test_a_missing_name_is_of_no_use_to_a_test_and_breaks_no_later_call():
    tests = ["assert g", "assert g != 3", "assert f(1) == 1"]
    p = problem(tests, reference="def f(x): return x\ndef g(): pass")
    assert outcomes(p, p.reference) == "+++"
    assert outcomes(p, "def f(x): return x") == "--+"
    sort = "def apply(h, xs): return h(xs)\ndef ordered(xs):\n    xs.sort()\n    return xs\n"
    tests = ["assert apply(g, [1, 2]) == 3", "xs = [2, 1]\nassert ordered(xs) == [1, 2]"]
    p = problem(tests, reference=sort + "def g(xs): return sum(xs)")
    assert outcomes(p, p.reference) == "++"
    result = run(p, sort)
    assert result.tests == [False, True] and "name 'g' is not defined" in result.feedback


def test_an_annotated_constant_is_the_programs_and_object_brings_no_operators():
    program = "MOST: int = 3\nclass Solution(object):\n    def f(self): return {}"
    tests = ["assert MOST == 3", "assert abs(Solution().f() - 1.5) < 1e-6"]
    p = problem(tests, entry="Solution.f", reference=program.format(1.5))
    assert outcomes(p, p.reference) == "++"
    cheat = "type('T', (), {'__sub__': lambda a, b: 0})()"
    assert outcomes(p, program.format(cheat)) == "+-"


def test_no_test_passes_in_which_the_program_breaks_off_or_ends():
    """Its end is no exception that a test could expect."""
    rows = "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_a(n):\n    "
    texts = [
        rows + "r = f(n)\n    assert r == n",
        rows + "assert f(n) == n",
        "def test_a():\n    assert f(1) == 1\n    f(2)",
        "assert f(1) == 1\nf(2)",
        "try:\n    f(2)\nexcept BaseException:\n    pass\nassert True or f(2)",
        "import pytest\nwith pytest.raises(BaseException):\n    f(2)",
        "def test_a():\n    try: assert f(2) == 3\n    except BaseException: return",
    ]
    pairs = [(text, "1 / 0") for text in texts[:4]]
    for end in ("os.abort()", "os._exit(0)", "exec('while True: pass')"):
        pairs += [(text, end) for text in texts]
    program = "import os\ndef f(n): return {} if n > 1 else n"
    jobs = [(problem([text]), program.format(end)) for text, end in pairs]
    for pair, result in zip(pairs, run_many(jobs, timeout=0.3), strict=True):
        assert not any(result.tests), pair
        assert result.status in ("error", "timeout"), (pair, result)


def test_emptying_an_argument_buys_nothing():
    """In an assert, the side that does not use the program is evaluated first."""
    lines = (CASES / "emptied.txt").read_text().splitlines()
    program = "def f(xs):\n    empty = type(xs)()\n    xs.clear()\n    return empty"
    results = run_many([(problem([line.replace("\\n", "\n")]), program) for line in lines])
    assert [(result.status, result.reward) for result in results] == [("failed", 0)] * 29


def test_nothing_of_the_judge_is_changed_for_the_next_program():
    words = problem(["import keyword\nassert f(keyword.kwlist)[0] == 'False'"])
    cases = functional(([[3, 1, 2]], [1, 2, 3]), ([{"a": [1]}], ["a"]))
    default = problem(["def given(xs=[2, 1]): return xs\nassert f(given()) == [1, 2]"])
    kinds = "import http.server\nkinds = http.server.SimpleHTTPRequestHandler.extensions_map\n"
    deeper = problem([kinds + "assert len(f(kinds)) > 3"])  # held by a class
    takes = "def f(xs):\n    xs.clear()\n    return ['False']"
    for p in (words, cases, default, deeper):
        results = run_many([(p, takes), (p, "def f(xs): return sorted(xs)")], workers=1)
        assert results[1].status == "passed", results[1]


def test_a_helper_of_the_tests_is_never_the_programs():
    texts = ["assert len(f([1, 2])) == 2", "assert double(f([1])[0]) == 2", "assert pi > f([3])[0]"]
    reference = "from math import pi\ndef f(xs): return list(xs)"
    p = problem(texts, context="def double(n): return n * 2\n", reference=reference)
    assert outcomes(p, reference) == "+++"
    lies = "def len(x): return 2\ndef double(x): return 2\npi = 99\ndef f(xs): return [5]"
    assert outcomes(p, lies) == "---"
    own = problem(["assert sum(10, 15) == 6"], entry="sum", reference="def sum(a, b): return 6")
    assert outcomes(own, own.reference) == "+" and outcomes(own, "x = 1") == "-"


def test_a_helper_of_the_prompt_that_the_program_defines_anew_is_the_programs():
    """As in Python, and as HumanEval's own grader judges HumanEval/50."""
    text = "def check(candidate):\n    assert candidate(code(1)) == 1\n"
    code, decode = "def code(n): return n + {}\n", "def decode(n): return n - {}"
    p = problem([text], entry="decode", context=code.format(5))
    both_wrong = code.format(6) + decode.format(6)
    assert outcomes(p, both_wrong) == "-"  # nothing says that it is the program's
    p.reference = code.format(5) + decode.format(5)
    for program in (p.reference, decode.format(5), both_wrong):
        assert outcomes(p, program) == "+", program
    assert outcomes(p, code.format(6) + decode.format(5)) == "-"


def test_no_object_of_a_program_is_equal_to_the_answer():
    """More forms than the red team has. What was handed out before opens no object, either:
    neither a method of an object, nor the module, which tests may import."""
    anything = (
        "class A:\n    __eq__ = __lt__ = __gt__ = __contains__ = __bool__ = lambda *a: True\n"
        "    __hash__ = lambda self: 1\n    __len__ = lambda self: 2\ndef f(*a): return A()"
    )
    texts = ["1 == f(1)", "f(1) > 0", "not f(1) != 1", "3 in f(1)", "f(1) in [1]"]
    texts += ["{f(1): 1} == {1: 1}", "len(f(1)) == 2"]
    p = problem([f"assert {text}" for text in texts], reference="def f(x): return x")
    assert outcomes(p, anything) == "-------"
    text = "import solution\nf('a')\nassert f('x').isupper()"
    p = problem([text], reference="def f(x): return x.upper()")
    assert outcomes(p, p.reference) == "+"
    method = "class A:\n    def isupper(self): return True\ndef f(x): return {}"
    assert outcomes(p, method.format("A().isupper if x == 'a' else A()")) == "-"
    module = "import sys\ndef isupper(): return True\ndef f(x): return sys.modules[__name__]"
    assert outcomes(p, module) == "-"


def test_no_program_ends_an_iteration_of_the_tests():
    called = problem(["assert all(map(f, [2, 4]))"])
    made = problem(["assert all(map(f(2), [2, 4]))"], reference="def f(x): ...")
    ends = "class A:\n    def __next__(self, *x): raise StopIteration\ndef f(x): return "
    forges = (
        "import json, os, time\ndef say(value, raised):\n"
        "    os.write(3, json.dumps([[], [], raised, value]).encode() + b'\\n')\n"
        "    time.sleep(0.2)\ndef f(x): "
    )
    method = "say(['method', '__next__', 0, 'x'], False)"
    its_end = "say(['error', [['builtins', 'StopIteration']], '', ['tuple'], 0], True)"
    assert outcomes(called, ends + "A().__next__(x)") == "-"
    assert outcomes(called, forges + "say(['shared', 'StopIteration'], True)") == "-"  # a class
    assert outcomes(made, ends + "A().__next__") == "-"
    assert outcomes(made, forges + f"{method}, {its_end}") == "-"


def test_d45_check_is_called():
    text = (
        "METADATA = {}\ndef check(candidate):\n    assert candidate([1.0, 2.0]) == 3.0\n"
        "    assert True, 'no test'\n"
        "    for n in range(5):\n        assert candidate([n]) == mirror(n)\n"
    )
    context = "from typing import List\ndef mirror(n): return n\n"
    p = problem([text], entry="total", context=context)
    right = "def total(xs: List[float]) -> float: return mirror(sum(xs))"
    assert outcomes(p, right) == "++"
    wrong = run(p, "def total(xs): return 0.0")
    assert wrong.tests == [False, False]
    assert wrong.feedback.startswith("Test 1 failed: total([1.0, 2.0]) returned 0.0, expected 3.0")


# ---------------------------------------------------------------------- what cannot be scored


def test_d27_unscorable_is_found_with_an_empty_program():
    """It is the problem's fault alone, and the reason says which."""
    rows = [{"entry": "", **json.loads(line)} for line in (CASES / "unscorable.jsonl").open()]
    rows += [
        {"tests": [[[object()], 1]], "kind": "functional", "why": "plain data"},
        # pytest runs the first of these and refuses the second.
        {"tests": ["if True:\n    def test_a():\n        assert f(1) == 1"], "why": "below an if"},
        {"tests": ["def test_a():\n    yield\n    assert f(1) == 1"], "why": "yields"},
        {"tests": ["assert " + "-" * 100_000 + "1"], "why": "too deep"},
        {"tests": ["x = 1", "assert f(x)"], "public": ["assert f(x)"], "why": "x, which a hidden"},
    ]
    for row in rows:
        p = problem(**row)
        for result in run_many([(p, "pass"), (p, "def f(*a): return 1")]):
            assert (result.status, result.reward, result.tests) == ("unscorable", 0.0, []), row
            assert not result.public_passed
            assert re.match(f"This problem cannot be scored: .*{p.why}", result.feedback), result


def test_a_reference_that_meets_a_limit_of_the_judge_makes_its_problem_unscorable():
    takes = "def f(it): return next(it)"
    p = problem(["it = iter([1, 2])\nassert f(it) == 1\nassert next(it) == 2"], reference=takes)
    assert "a test hands over an iterator" in run(p, takes).feedback
    right = "class V:\n    def __eq__(self, o): return tuple(o) == (1,)\n"
    p = problem(["assert V() == (1,)"], reference=right)
    assert run(p, right).feedback.endswith("compares an object of the program with plain data")
    assert run(p, right + "#").status == "failed"  # at run time nothing is unscorable
    assert run(problem(["assert f() == 1"], reference="def f(): 1"), "def f(): 1").reward == 0


HARD = """return {}
return lambda: 1
return type
return (x for x in [1])
return 10 ** 600000
return type('int', (), {})()
raise Exception(f)
x = []; x.append(x); return x
import numpy; return numpy.array([object()])"""


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
    hidden_and_public = {
        "assert": ["assert f(777) == 777", "assert f(1) == 1"],
        "functional": [[[777], 777], [[1], 1]],
        "stdin": [["777\n", "777"], ["1\n", "1"]],
    }
    tests = hidden_and_public[kind]
    p = problem(tests[::order], kind=kind, public=tests[1:])
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


def test_a_public_test_that_is_no_test_of_the_problem_is_not_graded():
    p = problem(["assert f(2) == 777"], public=["assert f(1) == 1"])
    result = run(p, "def f(n): return 777")
    assert (result.reward, result.total, result.public_passed) == (1, 1, False)


# ---------------------------------------------------------------------- stdin and functional


def test_d32_stdin_output_is_compared_line_by_line_and_number_by_number():
    rows = json.loads((CASES / "stdin.json").read_text())  # printed, expected, whether it is right
    jobs = [(problem([["", want]], kind="stdin"), f"print({out!r})") for out, want, _ in rows]
    results = run_many(jobs)
    judged = [[*row[:2], result.reward == 1] for row, result in zip(rows, results, strict=True)]
    assert judged == rows
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


def test_a_functional_entry_is_a_function_or_a_method_of_a_new_object():
    method = "class Solution:\n    def f(self, a=2, b=3): return a + b"
    function = "def f(a, b): return a + b"
    for entry, program in [("f", method), ("Solution.f", method), ("f", function)]:
        assert outcomes(functional(([2, 3], 5), ([1, 0], 1), entry=entry), program) == "++"
    counter = "    n = 0\n    def f(self):\n        self.n += 1\n        return self.n"
    assert outcomes(functional(([], 1), ([], 1)), "class Solution:\n" + counter) == "++"


def test_functional_values_are_compared_as_json_values():
    """A tuple is as good as a list, floats are equal within 1e-6, and integers are exact."""
    program = (
        "def f(n): return [(1, (2.0000000001,)), {'a': 1}, None, 2.001, 1.333335333334e18, '1'][n]"
    )
    expected = [[1, [2.0]], {"a": 1}, None, 2.0, 1333335333334000000, 1]
    p = functional(*[([n], value) for n, value in enumerate(expected)])
    assert outcomes(p, program) == "+++---"


# ---------------------------------------------------------------------- feedback


def test_feedback_names_call_value_and_expected():
    p = problem(["assert f(3) == 2", "x = f(13)\nassert x == 13", "assert f(2)"])
    for line in (CASES / "feedback.jsonl").open():
        row = json.loads(line)
        lines = run(p, row["program"], timeout=0.3).feedback.split("\n")
        assert lines[0] == f"Test 1 failed: {row['feedback']}"
    lines = run(p, "def f(n): return 0").feedback.split("\n")
    assert run(p, "def f(n): return 0", feedback_tests=1).feedback == lines[0]
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
    assert texts[0][0].count("Test ") == 1  # equal failures are told once


# ---------------------------------------------------------------------- time


def test_only_the_programs_own_time_counts():
    slow_test = "total = 0\nfor i in range(2_000_000): total += i\nassert f(total) == total"
    result = run(problem([slow_test]), "def f(x): return x", timeout=0.1)
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
    flood = "def f(): return [[] for _ in range(80_000)]"  # in fewer bytes than the limit
    result = run(functional(([], 1)), flood, output_bytes=10**6)
    assert result.feedback == "Test 1 failed: f() returned more than 1000000 bytes"
    assert run(functional(([], [[]] * 80_000)), flood).status == "passed"


def test_many_calls_are_cheap():
    """Each call costs the same, also with much that both sides hold."""
    texts = [
        "for n in range(20_000): assert f(n) == [n]",
        "xs = list(range(100_000))\nfor n in range(100): assert f(xs)[0] is xs",
        "held = []\nfor n in range(4000): held.append(f([n]))\nassert held[9] == [[9]]",
    ]
    results = run_many([(problem([text]), "def f(x): return [x]") for text in texts])
    assert [result.status for result in results] == ["passed"] * 3, results


def test_a_value_of_absurd_cost_ends_its_program_and_not_the_judge():
    """More than the red team has."""
    for test, value, said in (
        ("sum(range(f(3))) == 1", "10**13", ""),  # what a test does with it takes for ever
        ("sorted(f(3)) == [0]", "range(10**8)", "MemoryError"),  # small on the wire, large here
        ("int(f(3)) == 1", "__import__('decimal').Decimal('1E+999999999')", ""),
    ):
        p = problem([f"assert {test}"] * 10, reference="def f(x): return x")
        result = run(p, f"def f(x): return {value}", timeout=0.3)
        assert (result.reward, result.total) == (0, 10)
        assert result.status in ("failed", "error", "timeout", "memory")
        assert said in result.feedback, result
