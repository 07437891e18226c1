"""Facts about benchmarks: hidden tests stay hidden, no field is ignored, no pickle runs code."""

import base64
import json
import pickle
import sys
import zlib
from datetime import datetime
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import run_many
from support.benchmarks import convert_row, docstring_examples, private_tests
from support.problems import load_problems, read_rows
from tests.test_problems import left_out, write

HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": """from typing import List

def half(x: int) -> int:
    return x // 2

def halves(xs: List[int]) -> List[int]:
    '''Halve every number.
    >>> halves([2, 5])
    [1, 2]
    >>> halves([1])
    [7]
    '''
    import math
""",
    "canonical_solution": "    return [half(x) for x in xs]\n",
    "entry_point": "halves",
    "test": "def check(candidate):\n    assert candidate([4, 9]) == [2, 4]\n",
}
MBPP = {
    "task_id": 401,
    "prompt": "Write a function to double a number.",  # the full set says "text"
    "code": "def helper(x):\r\n    return 2 * x\r\ndef twice(x):\r\n    return helper(x)",
    "test_list": ["assert int(twice(2)) == 4", "assert twice(-3) == -6"],
}
STDIN = [{"input": f"{n}\n", "output": f"{n + 1}\n", "testtype": "stdin"} for n in (1, 41, 70001)]
LIVE = {
    "question_content": "Print the number after n.",
    "question_id": "abc999_a",
    "contest_date": "2025-01-04T00:00:00",
    "difficulty": "easy",
    "public_test_cases": json.dumps(STDIN[:1]),
    "private_test_cases": json.dumps(STDIN[1:]),
}
LIVE_V6 = "hf://datasets/livecodebench/code_generation_lite/test6.jsonl"
KODCODE = {
    "question_id": "Prefill_1_I",
    "question": "Write a function that adds two numbers.",
    "solution": "def add(a, b):\n    return a + b",
    "test": "from solution import add\n\ndef test_add():\n    assert add(40, 2) == 42\n",
    "test_info": [{"function_name": "add", "function_declaration": "def add(a, b):"}],
    "gpt_difficulty": "easy",
}


@pytest.fixture(autouse=True)
def hub_in_reach(monkeypatch):
    monkeypatch.setattr("support.run.check_hub", lambda name, kind: None)


def packed(value, protocol: int | None = None) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def load(folder: Path, *rows: dict, **how) -> list:
    return load_problems(write(folder, *rows), cache=None, **how)


def test_humaneval_has_context_and_only_examples_that_the_reference_passes(tmp_path, capsys):
    [problem] = load(tmp_path, HUMANEVAL, execute=run_many)
    assert problem.public_tests == ["assert halves([2, 5]) == [1, 2]"]
    assert "assert halves([1]) == [7]" in capsys.readouterr().err
    assert problem.tests == [HUMANEVAL["test"]] and problem.entry_point == "halves"
    names = {}
    exec(problem.context, names)
    assert names["half"](9) == 4 and "List" in names and "math" in names and "halves" not in names
    assert "def halves(xs: List[int])" in problem.prompt and "fenced" in problem.prompt
    assert "candidate" not in problem.prompt and "[4, 9]" not in problem.prompt


NOTATIONS = [
    (">>> f(0)\n\n    >>> f(1)\n    2", ["f(0) == None", "f(1) == 2"]),
    (">>> f(1) == 2\n", ["f(1) == 2"]),
    (">>> round(f(1), 2) # why\n    0.5\n", ["round(f(1), 2) == 0.5"]),
    ("f(1) => 2, f(2) ==> 3\n f(3) = 4", ["f(1) == 2", "f(2) == 3", "f(3) == 4"]),
    ("f('Hi') returns 'Hi'. f(2) should return 3.", ["f('Hi') == 'Hi'", "f(2) == 3"]),
    ("f(\"a.txt\") # => 'Yes' (it is valid)", ["f('a.txt') == 'Yes'"]),
    ("f([\n      [1],\n    ], 1) == [(0, 0)]", ["f([[1]], 1) == [(0, 0)]"]),
    (r">>> f('a\nb')" + "\n" + r"    'b\na'", [r"f('a\nb') == 'b\na'"]),
    ("f(a) => False, f(n) == f(n - 1), f(1", []),  # names, not values
    ("f(3) -> 19 - 5 = 14, f(2) = 1 + 1 = 2", []),  # a formula's first number is no result
    ('f(["a"]) == ""aaaa". g(1) == 2, my.f(1) == 2, of(1) == 2', []),  # not f
]


@pytest.mark.parametrize(("docstring", "expected"), NOTATIONS)
def test_examples_are_found_in_the_docstring_in_each_notation(docstring, expected):
    head, body = "def f(x):\n", f'    """What f does.\n    {docstring}\n    """\n'
    assert docstring_examples(head + body, "f") == [f"assert {call}" for call in expected]
    no_docstring = f"{head}    import math\n{body}"  # the text is not the first statement
    assert docstring_examples(no_docstring, "f") == []


texts = st.text(st.characters(codec="ascii", exclude_characters='"\\'), max_size=5)
constants = st.none() | st.booleans() | st.integers() | texts
values = st.recursive(constants, lambda inner: st.lists(inner) | st.tuples(inner), max_leaves=5)
signs = st.sampled_from(["=>", "==>", "->", "==", "=", "returns", "\u279e"])


@settings(max_examples=40)
@given(st.lists(values, max_size=3), values, signs)
def test_any_constant_survives_any_notation(arguments, result, sign):
    call = f"f({', '.join(map(repr, arguments))})"
    prompt = f'def f(*x):\n    """See:\n    {call} {sign} {result!r}\n    """\n'
    assert docstring_examples(prompt, "f") == [f"assert {call} == {result!r}"]


def test_mbpp_shows_its_first_test_and_hides_all_others(tmp_path):  # D44
    row = MBPP | {"test_imports": ["import math"]}
    row["challenge_test_list"] = ["assert math.isclose(twice(50), 100)"]
    [problem] = load(tmp_path, row, execute=run_many)
    assert (problem.id, problem.entry_point) == ("Mbpp/401", "twice")  # inside int(...)
    first = MBPP["test_list"][0]
    assert len(problem.tests) == 3 and problem.public_tests == problem.tests[:1] == [first]
    assert problem.context == "import math" and "\r" not in problem.reference
    for shown in (first, "`twice`", MBPP["prompt"]):
        assert shown in problem.prompt
    for hidden in ("-3", "helper", "50"):
        assert hidden not in problem.prompt


def test_mbpp_setup_code_runs_behind_the_answer_whose_class_it_uses(tmp_path):
    row = MBPP | {
        "code": "class Node(int):\r\n    pass\r\ndef test_value(n):\r\n    return int(n)",
        "test_setup_code": "root = Node(3) \r\nother = Node(4)",
        "test_list": ["assert test_value(root) == 3", "assert test_value(other) == 4"],
    }
    [problem] = load(tmp_path, row, execute=run_many)  # the reference passes
    assert problem.tests[1].endswith("other = Node(4)\nassert test_value(other) == 4")
    assert problem.entry_point == "test_value" and problem.context == ""
    assert "Node(3)" in problem.prompt and "`Node`" in problem.prompt


def test_of_mbpp_the_test_split_is_taken(tmp_path):
    rows = [MBPP | {"task_id": n, "text": "x", "prompt": None} for n in (10, 11, 510, 511)]
    assert [p.id for p in load(tmp_path, *rows)] == ["Mbpp/11", "Mbpp/510"]


def test_livecodebench_shows_public_pairs_and_hides_private_ones(tmp_path):
    [problem] = load(tmp_path, LIVE)
    assert (problem.kind, problem.entry_point, problem.difficulty) == ("stdin", "", "easy")
    assert problem.public_tests == [["1\n", "2\n"]] == problem.tests[:1]
    assert problem.tests[1:] == [["41\n", "42\n"], ["70001\n", "70002\n"]]
    assert "standard input" in problem.prompt and "```\n1\n```" in problem.prompt
    assert "70001" not in problem.prompt
    names = {}
    exec(problem.context, names)
    assert {"List", "deque", "heapq", "sqrt", "Counter", "lru_cache", "bisect"} <= names.keys()
    assert names["pow"](2, 10, 1000) == 24  # the builtin one, put back after math's


def test_livecodebench_functional_arguments_are_json_lines(tmp_path):
    case = {"input": '["a\\nb", "c"]\n3\n{"k": null}', "output": "[1.5, true]"}
    cases = json.dumps([case | {"testtype": "functional"}])
    row = LIVE | {"public_test_cases": cases, "private_test_cases": packed(cases)}
    row |= {"starter_code": "class Solution:", "metadata": '{"func_name": "join"}'}
    [problem] = load(tmp_path, row)
    assert (problem.kind, problem.entry_point) == ("functional", "join")
    assert problem.tests == [[[["a\nb", "c"], 3, {"k": None}], [1.5, True]]] * 2
    assert "class Solution:" in problem.prompt
    assert r"join(['a\nb', 'c'], 3, {'k': None}) == [1.5, True]" in problem.prompt


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_both_encodings_of_private_tests_say_the_same(protocol):  # D47
    tests = [*STDIN, {"input": "\u00e9\ud800", "output": "", "testtype": "x"}]
    assert private_tests(packed(json.dumps(tests), protocol)) == tests
    assert private_tests(json.dumps(tests)) == tests


class Payload:
    def __reduce__(self):
        return sys.exit, ("it has run",)


def test_a_pickle_that_names_code_runs_nothing_and_leaves_its_problem_out(tmp_path, capsys):  # D47
    bad = LIVE | {"question_id": "evil", "private_test_cases": packed(Payload())}
    assert [p.id for p in load(tmp_path, bad, LIVE)] == ["abc999_a"]
    reason = "the private tests are a pickle that names sys.exit"
    assert left_out(capsys.readouterr().err) == [("row 1 (evil)", reason)]


def test_undecodable_or_empty_tests_leave_the_problem_out(tmp_path, capsys):  # D27
    reasons = {
        "": "incomplete",
        "[]": "0 private tests",
        "not base64!": "base64",
        base64.b64encode(b"not zlib").decode(): "decompressing",
        packed(["a", "list"]): "not list",
        packed("[{]"): "property name",
        json.dumps([STDIN[0] | {"testtype": "functional"}]): "types",
        "[" * 100_000: "recursion",
    }
    rows = [LIVE | {"question_id": why, "private_test_cases": x} for x, why in reasons.items()]
    assert len(load(tmp_path, LIVE, *rows)) == 1
    dropped = left_out(capsys.readouterr().err)
    for (label, why), reason in zip(dropped, reasons.values(), strict=True):
        assert f"({reason})" in label and reason in why


def test_a_date_window_includes_its_ends_and_reads_datetimes(monkeypatch):
    days = ["2024-12-31T23:00:00", datetime(2025, 1, 1, 18, 30), "2025-01-31", datetime(2025, 2, 1)]
    rows = [LIVE | {"question_id": str(n), "contest_date": day} for n, day in enumerate(days)]
    monkeypatch.setattr("datasets.load_dataset", lambda **request: rows)
    window = {"start_date": "2025-01-01", "end_date": "2025-01-31"}
    assert [p.id for p in load_problems("livecodebench", **window)] == ["1", "2"]
    assert [p.id for p in load_problems("livecodebench", start_date="2025-02-01")] == ["3"]


def test_a_row_without_a_date_is_named_where_a_window_is_asked_for(tmp_path, capsys):
    undated = {name: value for name, value in LIVE.items() if name != "contest_date"}
    assert len(load(tmp_path, undated, LIVE | {"contest_date": "May 2024"})) == 2
    assert len(load(tmp_path, undated, LIVE, start_date="2025-01-01")) == 1
    reason = "the field 'contest_date' is missing"
    assert left_out(capsys.readouterr().err) == [("row 1 (abc999_a)", reason)]


def test_kodcode_has_no_public_tests_and_says_so(tmp_path, capsys):
    [problem] = load(tmp_path, KODCODE, execute=run_many)
    assert (problem.public_tests, problem.entry_point, problem.difficulty) == ([], "add", "easy")
    assert "1 without public tests" in capsys.readouterr().err
    assert "def add(a, b):" in problem.prompt and "42" not in problem.prompt


def test_kodcode_style_complete_names_classes_and_functions_that_the_tests_use(tmp_path):
    test = (
        "def own(): pass\ndef test_it():\n    own()\n    fill(Stack)\n    assert Stack.all == [pi]"
    )
    code = "from math import pi\nclass Stack: all = []\ndef unused(): pass\ndef own(): pass\n"
    code += "def fill(s): s.all.append(pi)"
    row = {"question_id": "C", "style": "complete", "question": "def fill(s):\n    'Fill it.'"}
    [problem] = load(tmp_path, row | {"solution": code, "test_code": test}, execute=run_many)
    assert problem.tests == [test] and problem.entry_point == "Stack"
    assert "must define `Stack`, `fill`." in problem.prompt  # not pi, unused or own
    assert "```python\ndef fill(s):" in problem.prompt


UNREAD = [
    (HUMANEVAL, "task_id", "entry_point"),
    (MBPP, "task_id", "code"),
    (LIVE, "question_id", "private_test_cases"),
    (KODCODE, "question_id", "question"),
]


@pytest.mark.parametrize(("row", "key", "field"), UNREAD)
def test_a_field_that_nobody_reads_and_a_missing_one_are_named(tmp_path, capsys, row, key, field):
    rows = [row, row | {"plus_input": [[1]], key: "402"}, row | {"plus_input": [], key: "403"}]
    rows.append({name: value for name, value in row.items() if name != field} | {key: "404"})
    assert len(load(tmp_path, *rows)) == 2  # an empty field is fine
    missing = f"the field '{field}' is missing"
    dropped = left_out(capsys.readouterr().err)
    assert dropped == [("row 2 (402)", "unknown field plus_input"), ("row 4 (404)", missing)]


NAMED = [
    ("humaneval", {}, HUMANEVAL, {"path": "openai/openai_humaneval", "split": "test"}),
    ("mbpp", {}, MBPP, {"name": "full"}),
    ("kodcode", {}, KODCODE, {"path": "KodCode/KodCode-V1", "split": "train"}),
    ("livecodebench", {"version": "v6"}, LIVE, {"path": "json", "data_files": [LIVE_V6]}),
]


@pytest.mark.parametrize(("name", "how", "row", "asked"), NAMED)
def test_a_named_set_and_a_file_of_its_rows_are_one(tmp_path, monkeypatch, name, how, row, asked):
    hub = Mock(return_value=[row])
    monkeypatch.setattr("datasets.load_dataset", hub)
    assert load_problems(name, **how) == load(tmp_path, row)
    assert asked.items() <= hub.call_args.kwargs.items()


def test_the_hub_out_of_reach_and_wrong_names_get_one_sentence(monkeypatch):
    offline = ConnectionError("no route\nto the hub")
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=offline))
    for source, how, sentence in (
        ("humaneval", {}, r"cannot load humaneval from openai.*local JSON file"),
        ("livecodebench", {"version": "v9"}, "livecodebench has no version 'v9': expected v1, "),
        ("livecodebench", {"start_date": "January"}, "'January' is no date"),
    ):
        with pytest.raises(ValueError, match=f"^.*{sentence}.*$"):
            load_problems(source, **how)


DATA = Path(__file__).parents[2] / "shared" / "data"
if DATA.is_dir():  # the sets themselves belong in no repository

    @pytest.mark.filterwarnings("ignore:.*invalid escape")  # in strings of a data set
    def test_the_real_sets_load_and_their_references_score():
        sizes = [("mbpp.jsonl", 974, 500), ("sanitized-mbpp.json", 427, 257)]
        for file, rows, test_split in sizes:
            problems = [convert_row("mbpp", row) for row in read_rows(DATA / file)]
            assert len({problem.id for problem in problems}) == rows
            assert len(load_problems(DATA / file)) == test_split
        kodcode = load_problems(DATA / "kodcode_light_rl_format.jsonl")
        assert len(kodcode) == 228  # four of 232 test themselves
        slow = partial(run_many, timeout=2.0)  # half of the default: a machine twice as slow
        humaneval = load_problems(DATA / "HumanEval.jsonl.gz", execute=slow, cache=None)
        assert len(humaneval) == 164 and sum(bool(p.public_tests) for p in humaneval) == 138
        assert all(result.reward == 1 for result in slow([(p, p.reference) for p in humaneval]))
        solutions = json.loads((DATA / "livecodebench_sample.SOLUTIONS.json").read_text())
        live = load_problems(DATA / "livecodebench_sample.jsonl")
        results = run_many([(p, solutions[p.id]) for p in live])
        assert [result.reward for result in results] == [1] * 5
