"""What problems.py promises: public and hidden tests apart, bad rows named, private tests never run as code."""

import ast
import base64
import gzip
import json
import pickle
import sys
import zlib
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
import problems
from problems import Problem, docstring_examples, livecodebench_files, load_problems, private_tests

HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'from typing import List\n\ndef half(x: int) -> int:\n    """Half of x, rounded down."""\n    return x // 2\n\n'
    'def halves(xs: List[int]) -> List[int]:\n    """Halve every number.\n    >>> halves([2, 5])\n    [1, 2]\n'
    '    >>> halves([1])\n    [7]\n    """\n    import math\n',
    "canonical_solution": "    return [half(x) for x in xs]\n",
    "entry_point": "halves",
    "test": "def check(candidate):\n    assert candidate([4, 9]) == [2, 4]\n    assert candidate([]) == []\n",
}
MBPP = {
    "task_id": 601,
    "text": "Write a function to double a number.",
    "code": "def helper(x):\r\n    return 2 * x\r\ndef twice(x):\r\n    return helper(x)",
    "test_setup_code": "",
    "test_list": ["assert int(twice(2)) == 4", "assert twice(-3) == -6", "assert twice(1000) == 2000"],
    "challenge_test_list": [],
}
STDIN = [{"input": f"{n}\n", "output": f"{n + 1}\n", "testtype": "stdin"} for n in (1, 41, 70001)]
LIVE = {
    "question_title": "Next",
    "question_content": "Print the number after n.",
    "platform": "atcoder",
    "question_id": "abc999_a",
    "contest_date": "2025-01-04T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps(STDIN[:1]),
    "private_test_cases": json.dumps(STDIN[1:]),
    "metadata": "{}",
}
KODCODE = {
    "question_id": "Prefill_1_I",
    "style": "instruct",
    "question": "Write a function that adds two numbers.",
    "solution": "def add(a, b):\n    return a + b",
    "test": "from solution import add\n\ndef test_add():\n    assert add(40, 2) == 42\n    assert add(0, 0) == 0\n",
    "test_info": [{"function_name": "add", "function_declaration": "def add(a, b):"}],
    "gpt_difficulty": "easy",
}
OWN = Problem("own/1", "Write inc(x).", ["assert inc(1) == 2"], ["assert inc(1) == 2"], "inc", "assert", "easy", "inc = lambda x: x + 1")


def write(folder: Path, *rows, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def naive(jobs: list) -> list:
    """An executor for this file's own trusted programs: every test counts once, no limits, no isolation."""
    results = []
    for problem, code in jobs:
        passed = 0
        for test in problem.tests:
            names = {}
            try:
                exec(f"{problem.context}\n{code}", names)
                own = set(names)
                exec(test.replace("from solution import", "#"), names)
                if "check" in names:
                    names["check"](names[problem.entry_point])
                for name in [name for name in names if name.startswith("test_") and name not in own]:
                    names[name]()
                passed += 1
            except Exception as error:
                message = repr(error)
        ok = passed == len(problem.tests)
        text = "" if ok else message
        results.append(SimpleNamespace(reward=passed / len(problem.tests), status="passed" if ok else "failed", feedback=text))
    return results


def packed(value) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


# HumanEval


def test_humaneval_context_has_what_the_prompt_defines_and_only_passed_examples_are_public(tmp_path, capsys):
    [problem] = load_problems(write(tmp_path, HUMANEVAL), execute=naive, cache=None)
    assert problem.public_tests == ["assert halves([2, 5]) == [1, 2]"]
    assert "HumanEval/900: assert halves([1]) == [7]" in capsys.readouterr().err  # the reference fails this example
    assert problem.tests == [HUMANEVAL["test"]] and problem.entry_point == "halves" and problem.kind == "assert"
    names = {}
    exec(problem.context, names)
    assert names["half"](9) == 4 and "List" in names and "math" in names and "halves" not in names
    assert "def halves(xs: List[int])" in problem.prompt and "fenced" in problem.prompt
    assert "candidate" not in problem.prompt and "[4, 9]" not in problem.prompt


def test_humaneval_examples_are_no_tests_while_nothing_has_run_them(tmp_path, capsys):
    [problem] = load_problems(write(tmp_path, HUMANEVAL))
    assert problem.public_tests == []
    assert capsys.readouterr().err.count("docstring examples do not serve as public tests") == 1


def test_check_is_called_and_helpers_are_there_under_the_real_executor(tmp_path):  # D45
    from executor import run_many

    [problem] = load_problems(write(tmp_path, HUMANEVAL), execute=run_many, cache=None)
    right, wrong = "def halves(xs: List[int]):\n    return [half(x) for x in xs]", "def halves(xs):\n    return 0"
    assert [result.reward for result in run_many([(problem, right), (problem, wrong)])] == [1, 0]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (">>> f(1)\n    2\n", ["f(1) == 2"]),
        (">>> f(0)\n\n    >>> f(1)\n    2", ["f(0) == None", "f(1) == 2"]),
        (">>> f(1) == 2\n", ["f(1) == 2"]),
        (">>> round(f(1), 2) # why\n    0.5\n", ["round(f(1), 2) == 0.5"]),
        (">>> f(1)\n    [1,\n     2]\n", ["f(1) == [1, 2]"]),
        ("f(1) == 2\n f(3) = 4", ["f(1) == 2", "f(3) == 4"]),
        ("f(1) => 2, f(2) ==> 3", ["f(1) == 2", "f(2) == 3"]),
        ("f([1, 2], 'a)') -> (1, 2)", ["f([1, 2], 'a)') == (1, 2)"]),
        ("f(1) \u279e True", ["f(1) == True"]),
        ("f('Hi') returns 'Hi'. f(2) should return 3.", ["f('Hi') == 'Hi'", "f(2) == 3"]),
        ("f(2) should return 16.", ["f(2) == 16"]),
        ('f("a.txt") # => \'Yes\' (it is valid)', ["f('a.txt') == 'Yes'"]),
        ("f([\n      [1],\n    ], 1) == [(0, 0)]", ["f([[1]], 1) == [(0, 0)]"]),
        (r">>> f('a\nb')" + "\n" + r"    'b\na'", [r"f('a\nb') == 'b\na'"]),
        ("f(a) => False, f(n) == f(n - 1)", []),  # names, not values
        ("f(3) -> 19 - 5 = 14, f(2) = 1 + 1 = 2", []),  # a formula's first number is no result
        ('f(["a"]) == ""aaaa"', []),
        ("g(1) == 2, my.f(1) == 2, of(1) == 2", []),  # another function
        ("call f(1", []),
        ("  >>> f(1)\n 2\n f(4) == 5", ["f(4) == 5"]),  # badly indented doctest
    ],
)
def test_docstring_notations(docstring, expected):
    prompt = f'def f(x):\n    """What f does.\n    {docstring}\n    """\n'
    assert docstring_examples(prompt, "f") == [f"assert {call}" for call in expected]


def test_no_docstring_no_examples():
    assert docstring_examples('def f(x):\n    import math\n    """f(1) == 2"""\n', "f") == []
    with pytest.raises(ValueError, match="does not define g"):
        docstring_examples("def f(x):\n    pass\n", "g")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii", exclude_characters='"\\'), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(values, max_size=3), values, st.sampled_from(["=>", "==>", "->", "==", "=", "returns", "\u279e"]))
def test_any_constant_survives_any_notation(arguments, result, sign):
    call = f"f({', '.join(map(repr, arguments))})"
    [test] = docstring_examples(f'def f(*x):\n    """See:\n    {call} {sign} {result!r}\n    """\n', "f")
    comparison = ast.parse(test).body[0].test
    assert [ast.literal_eval(argument) for argument in comparison.left.args] == arguments
    assert ast.literal_eval(comparison.comparators[0]) == result


# MBPP


def test_mbpp_first_test_is_public_and_the_others_are_in_no_prompt(tmp_path):  # D44
    [problem] = load_problems(write(tmp_path, MBPP), split="train", execute=naive, cache=None)
    assert problem.id == "Mbpp/601" and problem.entry_point == "twice"  # inside int(...)
    assert problem.public_tests == MBPP["test_list"][:1] and problem.tests == MBPP["test_list"]
    assert MBPP["test_list"][0] in problem.prompt and MBPP["text"] in problem.prompt and "`twice`" in problem.prompt
    assert "-3" not in problem.prompt and "1000" not in problem.prompt and "helper" not in problem.prompt
    assert "\r" not in problem.reference


def test_mbpp_setup_code_runs_behind_the_answer_whose_class_it_uses(tmp_path):
    row = MBPP | {
        "code": "class Node:\r\n    def __init__(self, v):\r\n        self.v = v\r\ndef test_value(n):\r\n    return n.v",
        "test_setup_code": "root = Node(3) \r\nother = Node(4)",
        "test_list": ["assert test_value(root) == 3", "assert test_value(other) == 4"],
    }
    [problem] = load_problems(write(tmp_path, row), split="train", execute=naive, cache=None)  # naive: the reference passes
    assert problem.tests[1].endswith("other = Node(4)\nassert test_value(other) == 4") and problem.context == ""
    assert problem.entry_point == "test_value" and "Node(3)" in problem.prompt and "`Node`" in problem.prompt


def test_mbpp_sanitized_has_prompt_and_imports(tmp_path):
    row = {key: value for key, value in MBPP.items() if key != "text"}
    row |= {"prompt": "Write twice.", "test_imports": ["import math"], "test_list": ["assert math.isclose(twice(1), 2)"]}
    [problem] = load_problems(write(tmp_path, [row], name="sanitized.json"), split="train", execute=naive, cache=None)
    assert problem.context == "import math" and problem.entry_point == "twice" and "Write twice." in problem.prompt


def test_mbpp_splits_go_by_id(tmp_path):
    path = write(tmp_path, *[MBPP | {"task_id": n} for n in (1, 10, 11, 510, 511, 600, 601, 974)])
    ids = {split: [p.id.split("/")[1] for p in load_problems(path, split=split)] for split in problems.MBPP_IDS}
    assert ids["prompt"] == ["1", "10"] and ids["test"] == ["11", "510"] and ids["validation"] == ["511", "600"]
    assert ids["train"] == ["601", "974"] and len(ids["all"]) == 8
    assert [p.id for p in load_problems(path)] == ["Mbpp/11", "Mbpp/510"]  # test is the default


# LiveCodeBench


def test_livecodebench_stdin(tmp_path):
    [problem] = load_problems(write(tmp_path, LIVE))
    assert problem.kind == "stdin" and problem.entry_point == "" and problem.difficulty == "easy"
    assert problem.public_tests == [["1\n", "2\n"]] and problem.tests == [["1\n", "2\n"], ["41\n", "42\n"], ["70001\n", "70002\n"]]
    assert "standard input" in problem.prompt and "```\n1\n```" in problem.prompt and "70001" not in problem.prompt
    names = {}
    exec(problem.context, names)
    assert {"List", "deque", "heapq", "sqrt", "Counter", "lru_cache", "bisect"} <= names.keys()
    assert names["pow"](2, 10, 1000) == 24  # the builtin one, which the block puts back after math's


@pytest.mark.parametrize("metadata", ['{"func_name": "join"}', {"func_name": "join"}])
def test_livecodebench_functional_arguments_are_json_lines(tmp_path, metadata):
    cases = [{"input": '["a\\nb", "c"]\n3\n{"k": null}', "output": "[1.5, true]", "testtype": "functional"}]
    row = LIVE | {"starter_code": "class Solution:\n    def join(self, a: List[str]):\n        ", "metadata": metadata}
    row |= {"public_test_cases": json.dumps(cases), "private_test_cases": packed(json.dumps(cases * 2))}
    [problem] = load_problems(write(tmp_path, row))
    assert problem.kind == "functional" and problem.entry_point == "join" and len(problem.tests) == 3
    assert problem.tests[2] == [[["a\nb", "c"], 3, {"k": None}], [1.5, True]]
    assert "class Solution:" in problem.prompt and r"join(['a\nb', 'c'], 3, {'k': None}) == [1.5, True]" in problem.prompt


@given(st.lists(st.fixed_dictionaries({"input": st.text(), "output": st.text(), "testtype": st.just("stdin")})))
def test_both_encodings_of_private_tests_say_the_same(cases):  # D47
    assert private_tests(packed(json.dumps(cases))) == private_tests(json.dumps(cases)) == cases


class Payload:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def test_a_pickle_that_names_code_runs_nothing_and_leaves_the_problem_out_by_name(tmp_path, capsys):  # D47
    canary, dropped = tmp_path / "canary", []
    bad = LIVE | {"question_id": "evil", "private_test_cases": packed(Payload(canary))}
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()  # the payload works where a pickle is trusted
    canary.unlink()
    assert [p.id for p in load_problems(write(tmp_path, bad, LIVE), dropped=dropped)] == ["abc999_a"]
    assert not canary.exists()
    assert [label for label, _ in dropped] == ["evil"] and "nothing but a string" in dropped[0][1]
    assert "evil" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("private", "reason"),
    [
        ("", "Error"),
        ("[]", "0 private tests"),
        ("not base64!", "Error"),
        (base64.b64encode(b"not zlib").decode(), "error"),
        (packed(["a", "list"]), "pickled list"),
        (packed("[{]"), "JSONDecodeError"),
        (packed(json.dumps(STDIN))[:60], "cut short"),
        (packed("[]" + " " * 5000), "larger than"),
        (json.dumps([STDIN[0] | {"testtype": "functional"}]), "types"),
        (json.dumps([{"input": "1"}]), "field 'testtype'"),
        ("[" * 100_000, "RecursionError"),
    ],
)
def test_undecodable_or_empty_tests_leave_the_problem_out(tmp_path, monkeypatch, private, reason):  # D27
    monkeypatch.setattr(problems, "MAX_PRIVATE_BYTES", 1000)
    dropped = []
    load_problems(write(tmp_path, LIVE, LIVE | {"question_id": "bad", "private_test_cases": private}), dropped=dropped)
    [(label, why)] = dropped
    assert label == "bad" and reason in why


def test_date_window_includes_its_ends_and_reads_datetimes(tmp_path, monkeypatch):
    days = ["2024-12-31T23:00:00", datetime(2025, 1, 1, 18, 30), "2025-01-31", datetime(2025, 2, 1)]
    rows = [LIVE | {"question_id": str(n), "contest_date": day} for n, day in enumerate(days)]
    monkeypatch.setattr("datasets.load_dataset", lambda **request: rows)
    loaded = load_problems("livecodebench", start_date="2025-01-01", end_date="2025-01-31")
    assert [p.id for p in loaded] == ["1", "2"]
    assert [p.id for p in load_problems("livecodebench", start_date="2025-02-01")] == ["3"]


def test_versions_say_which_files():
    assert livecodebench_files("release_v1") == ["test.jsonl"] and livecodebench_files("v6") == ["test6.jsonl"]
    assert livecodebench_files("v4_v6") == ["test4.jsonl", "test5.jsonl", "test6.jsonl"]
    for bad in ("v7", "6", "release_v6x", "release_v1_v2"):
        with pytest.raises(ValueError, match="version"):
            livecodebench_files(bad)


# KodCode


def test_kodcode_has_no_public_tests_and_says_so(tmp_path, capsys):
    [problem] = load_problems(write(tmp_path, KODCODE), execute=naive, cache=None)
    assert (problem.public_tests, problem.entry_point, problem.difficulty) == ([], "add", "easy")
    assert "oracle feedback" in capsys.readouterr().err
    assert "def add(a, b):" in problem.prompt and "42" not in problem.prompt and "test_add" not in problem.prompt


def test_kodcode_test_column_classes_and_stubs(tmp_path):
    test = "import pytest\n\ndef test_stack():\n    s = Stack()\n    fill(s)\n    assert s.items == [1]\n"  # no import line
    solution = "class Stack:\n    def __init__(self):\n        self.items = []\ndef unused():\n    pass\ndef fill(s):\n    s.items.append(1)"
    row = {"question_id": "C", "style": "complete", "question": "def fill(s):\n    'Fill it.'", "solution": solution, "test_code": test}
    [problem] = load_problems(write(tmp_path, row | {"test_info": None}), execute=naive, cache=None)
    assert problem.entry_point == "fill" and problem.tests == [test]
    assert "`Stack`, `fill`" in problem.prompt and "unused" not in problem.prompt
    assert "```python\ndef fill(s):" in problem.prompt


def test_tests_that_test_themselves_or_pass_for_nothing_are_left_out(tmp_path):
    own = KODCODE | {"question_id": "own", "test": KODCODE["solution"] + "\n\ndef test_add():\n    assert add(1, 1) == 2\n"}
    void = KODCODE | {"question_id": "void", "test": "def test_add():\n    if False:\n        add(1, 1)\n"}
    dropped = []
    assert len(load_problems(write(tmp_path, own, KODCODE, void), execute=naive, cache=None, dropped=dropped)) == 1
    assert [(label, reason.split(": ")[-1]) for label, reason in dropped] == [
        ("own", "the tests use nothing that the solution defines"),
        ("void", "an empty program passes its tests"),
    ]


# Our own rows, files, and what is wrong with them


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.json.gz"])
def test_our_own_rows_come_back_as_they_were_written(tmp_path, name):
    cases = [
        OWN,
        Problem("two", "Add.\u2028\u00e9", [["1 2", "3"]], [], "", "stdin"),
        Problem("3", "f", [[[1, [2]], {"a": None}]], [[[0, []], {}]], "f", "functional", "hard", None, "import re"),
    ]
    rows = [asdict(problem) for problem in cases]
    text = json.dumps(rows) if ".json." in name + "." else "\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert load_problems(tmp_path / name) == cases


def test_parquet(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list([MBPP, MBPP | {"task_id": 602}]).to_parquet(str(tmp_path / "rows.parquet"))
    from_json = load_problems(write(tmp_path, MBPP, MBPP | {"task_id": 602}), split="train")
    assert load_problems(tmp_path / "rows.parquet", split="train") == from_json


BAD_ROWS = [
    ("{not json", "row 2", "expected a JSON object"),
    ("[1, 2]", "row 2", "expected a JSON object"),
    (asdict(OWN), "own/1", "another problem has this id"),
    (asdict(OWN) | {"id": "b", "tests": []}, "b", "no tests"),
    (asdict(OWN) | {"id": "b", "kind": "essay"}, "b", "essay"),
    (asdict(OWN) | {"id": "b", "tests": ["assert inc(("]}, "b", "SyntaxError"),
    (asdict(OWN) | {"id": "b", "tests": [7]}, "b", "TypeError"),
    (asdict(OWN) | {"id": "b", "kind": "stdin"}, "b", "expected [input, output]"),
    (asdict(OWN) | {"id": "b", "kind": "functional", "entry_point": ""}, "b", "entry_point"),
    (asdict(OWN) | {"id": "b", "prompt": " "}, "b", "prompt"),
    (asdict(OWN) | {"id": "b", "prompt": "\ud800"}, "b", "surrogates not allowed"),  # D36
    (asdict(OWN) | {"id": "b", "public_test": []}, "b", "public_test"),
    ({"id": "b", "kind": "assert", "tests": ["assert 1"]}, "b", "prompt"),
]


@pytest.mark.parametrize(("row", "label", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_and_the_others_load(tmp_path, capsys, row, label, reason):  # D27
    dropped, last = [], asdict(OWN) | {"id": "last"}
    assert [p.id for p in load_problems(write(tmp_path, asdict(OWN), row, last), dropped=dropped)] == ["own/1", "last"]
    [(where, why)] = dropped
    assert where == label and reason in why
    told = capsys.readouterr().err
    assert f"left out: {label}: {why}" in told and "2 problems; of 3 rows 1 left out" in told


def test_a_bad_byte_costs_one_row(tmp_path):
    path = write(tmp_path, asdict(OWN), asdict(OWN) | {"id": "b", "prompt": "MARK"}, asdict(OWN) | {"id": "c"})
    path.write_bytes(path.read_bytes().replace(b"MARK", b"\xff\xfe"))
    dropped = []
    assert [p.id for p in load_problems(path, dropped=dropped)] == ["own/1", "c"] and dropped[0][0] == "b"


@pytest.mark.parametrize("field", ["prompt", "entry_point", "test"])
def test_a_missing_field_is_named(tmp_path, field):
    row = {key: value for key, value in HUMANEVAL.items() if key != field} | {"task_id": "X/1"}
    dropped = []
    load_problems(write(tmp_path, row, HUMANEVAL), dropped=dropped)
    assert dropped == [("X/1", f"the field '{field}' is missing")]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"source": "humanevil"}, "humanevil: unknown problems"),
        ({"source": "mbpp", "split": "dev"}, "no split 'dev'"),
        ({"source": "mbpp", "version": "v6"}, "version v6"),
        ({"source": "livecodebench", "version": "v9"}, "unknown LiveCodeBench version 'v9'"),
        ({"source": "livecodebench", "start_date": "January"}, "'January' is no date"),
        ({"limit": 0}, "limit is 0"),
        ({"split": "train"}, "no split 'train'"),
        ({"difficulty": "impossible"}, "1 are outside"),
        ({"start_date": "2025-01-01"}, "'contest_date' is missing"),
    ],
)
def test_a_bad_request_gets_one_sentence(tmp_path, request_, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        load_problems(**{"source": write(tmp_path, asdict(OWN)), **request_})
    assert "\n" not in str(raised.value)


def test_a_missing_unknown_or_empty_file_gets_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl: no such file"):
        load_problems(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="none of its 1 rows has one of the fields"):
        load_problems(write(tmp_path, {"a": 1}))
    with pytest.raises(ValueError, match="none of its 0 rows"):
        load_problems(write(tmp_path))


# Samples, references, the hub


def test_a_sample_is_shuffled_by_its_seed_and_without_one_the_first_come(tmp_path):
    path = write(tmp_path, *[asdict(OWN) | {"id": str(n), "difficulty": "easy" if n % 2 else "hard"} for n in range(40)])

    def ids(**how):
        return [p.id for p in load_problems(path, **how)]

    assert ids(limit=5) == ["0", "1", "2", "3", "4"] and ids(limit=3, difficulty="easy") == ["1", "3", "5"]
    assert ids(seed=1) != ids(seed=2) and sorted(ids(seed=1)) == sorted(ids())
    assert ids(seed=1, limit=5) == ids(seed=1)[:5] == ids(seed=1, limit=5)
    assert len(ids(difficulty="easy,hard")) == 40


def test_a_row_left_out_of_a_sample_is_not_made_up_for(tmp_path):
    path = write(tmp_path, asdict(OWN), "{broken", *[asdict(OWN) | {"id": str(n)} for n in range(5)])
    assert [p.id for p in load_problems(path, limit=3)] == ["own/1", "0"]


def test_references_run_once_in_one_call_and_their_verdicts_are_kept(tmp_path):
    wrong = MBPP | {"task_id": 602, "code": "def twice(x):\n    return x"}
    path, calls = write(tmp_path, MBPP, wrong), []

    def counting(jobs):
        calls.append(len(jobs))
        return naive(jobs)

    for _ in range(2):  # the second time nothing runs, and what was left out is told again
        dropped = []
        loaded = load_problems(path, split="train", execute=counting, cache=tmp_path / "cache", dropped=dropped)
        assert [p.id for p in loaded] == ["Mbpp/601"] and calls == [4]
        assert [label for label, _ in dropped] == ["Mbpp/602"]
        assert "its reference fails its own tests (failed)" in dropped[0][1]
    path = write(tmp_path, MBPP | {"test_list": MBPP["test_list"][:2]})
    load_problems(path, split="train", execute=counting, cache=tmp_path / "cache")
    assert calls == [4, 2]  # other tests: another verdict


def test_our_own_public_tests_are_checked_too(tmp_path):
    row = asdict(OWN) | {"public_tests": ["assert inc(1) == 2", "assert inc(5) == 6", "assert inc(5) == 7"]}
    [problem] = load_problems(write(tmp_path, row), execute=naive, cache=tmp_path)
    [cached] = load_problems(write(tmp_path, row), execute=lambda jobs: 1 / 0, cache=tmp_path)
    assert problem.public_tests == ["assert inc(1) == 2", "assert inc(5) == 6"] and cached == problem


@pytest.mark.parametrize(
    ("name", "how", "row", "request_"),
    [
        ("humaneval", {}, HUMANEVAL, {"path": "openai/openai_humaneval", "name": None, "split": "test"}),
        ("mbpp", {"split": "train"}, MBPP, {"path": "google-research-datasets/mbpp", "name": "full"}),
        ("mbpp-sanitized", {"split": "train"}, MBPP, {"path": "google-research-datasets/mbpp", "name": "sanitized"}),
        ("kodcode", {"split": "use_with_caution"}, KODCODE, {"path": "KodCode/KodCode-V1", "split": "use_with_caution"}),
        ("kodcode-light", {}, KODCODE, {"path": "KodCode/KodCode-Light-RL-10K", "split": "train"}),
        ("livecodebench", {"version": "v6"}, LIVE, {"path": "json", "split": "train"}),
    ],
)
def test_a_named_set_and_a_file_of_its_rows_give_the_same(tmp_path, monkeypatch, capsys, name, how, row, request_):
    seen = {}
    monkeypatch.setattr("datasets.load_dataset", lambda **request: seen.update(request) or [row])
    from_hub = load_problems(name, **how)
    assert request_.items() <= seen.items()
    if name == "livecodebench":  # which is a loading script, refused by datasets 5: only its files are read
        assert seen["data_files"] == ["hf://datasets/livecodebench/code_generation_lite/test6.jsonl"]
        assert "v6 is test6.jsonl" in capsys.readouterr().err
    split = how.get("split") if name.startswith("mbpp") else None
    assert from_hub == load_problems(write(tmp_path, row), split=split)


def test_no_network_gets_one_sentence(monkeypatch):
    def offline(**request):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ValueError, match=r"cannot load openai/openai_humaneval from the hub .*local file") as raised:
        load_problems("humaneval")
    assert "\n" not in str(raised.value)


DATA = Path(__file__).parents[2] / "shared" / "data"
if DATA.is_dir():  # the sets themselves belong in no repository

    def test_the_real_sets_load_and_their_references_score(tmp_path, capsys):
        from executor import run_many

        counts = {"HumanEval.jsonl.gz": 164, "mbpp.jsonl": 974, "sanitized-mbpp.json": 427, "livecodebench_sample.jsonl": 5}
        counts["kodcode_light_rl_format.jsonl"] = 228  # four of 232 rows test a solution of their own
        loaded = {file: load_problems(DATA / file, split="all" if "mbpp" in file else None) for file in counts}
        assert {file: len(found) for file, found in loaded.items()} == counts
        humaneval = load_problems(DATA / "HumanEval.jsonl.gz", execute=run_many, cache=None)
        assert len(humaneval) == 164 and sum(bool(p.public_tests) for p in humaneval) == 138
        solutions = json.loads((DATA / "livecodebench_sample.SOLUTIONS.json").read_text())
        results = run_many([(p, solutions[p.id]) for p in loaded["livecodebench_sample.jsonl"]])
        assert [result.reward for result in results] == [1] * 5
        with capsys.disabled():
            print(f" [{sum(counts.values())} real rows loaded, {len(humaneval) + len(results)} references run] ", end="")
