"""Facts about comparing two evaluations, and about what the official graders are given."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import executor
from support import compare
from support.compare import export, mcnemar
from support.problems import Problem
from support.run import json_lines

LATE, RIGHT, WRONG = [2], [1], [None]  # the turn that solved a problem


def summary(iterations=2, **chains):
    entries = {name: {"chain": chain} for name, chain in chains.items()}
    return {"iterations": iterations, "problems": entries}


@settings(max_examples=40)
@given(st.integers(0, 7), st.integers(0, 7))
def test_mcnemar_equals_enumerating_every_outcome(gained, lost):
    outcomes = list(itertools.product((-1, 1), repeat=gained + lost))
    extreme = [signs for signs in outcomes if abs(sum(signs)) >= abs(gained - lost)]
    assert mcnemar(gained, lost) == pytest.approx(len(extreme) / len(outcomes))


def test_compare_pairs_by_problem():
    a = summary(p=WRONG, q=WRONG, r=RIGHT, s=WRONG, only_a=RIGHT)
    b = summary(s=WRONG, r=LATE, q=LATE, p=RIGHT, only_b=RIGHT, also_b=RIGHT)
    first, second = compare.compare(a, b)
    names = ("n", "k", "A", "B", "B - A", "gained", "lost", "p")
    # Of p, q, r, s, A solves r; B solves p at once, and q and r in its second attempt.
    assert [first[name] for name in names] == [4, 1, 0.25, 0.25, 0.0, 1, 1, 1.0]
    assert [second[name] for name in names] == [4, 2, 0.25, 0.75, 0.5, 2, 0, 0.5]
    assert first["low"] < 0 < first["high"]
    assert (second["low"], second["high"]) == (0.0, 1.0)
    assert "left out: 1 problems only in A, 2 only in B" in compare.text(a, b)


def test_equal_results_differ_in_nothing_and_of_several_chains_a_part_may_be_lost():
    one, many = summary(p=RIGHT, q=WRONG), summary(p=[1, None], q=[None, None])
    for row in compare.compare(one, one):
        assert [row[name] for name in ("B - A", "low", "high", "gained", "lost")] == [0] * 5
        assert row["p"] == 1.0
    for row in compare.compare(one, many):
        assert [row[name] for name in ("B - A", "gained", "lost", "p")] == [-0.25, 0, 1, 1.0]


# What the official graders are given


def human_eval(sample):
    """What openai/human-eval runs: prompt + completion + test + check(entry_point)."""
    return f"{STUB}{sample['completion']}\n{TEST}\ncheck(f)"


def evalplus(sample):
    """What evalplus runs: the solution alone, then the entry point taken from its globals."""
    return f"g = {{}}\nexec({sample['solution']!r}, g)\nf = g['f']\n{TEST}\ncheck(f)"


def passes(program):
    try:
        exec(program, {})
        return True
    except BaseException:
        return False


# The prompt's stub alone, which returns None, would pass. It takes no part.
TEST = "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) in (4, None)\n"
CONTEXT = "from typing import List\n\n\ndef helper(x):\n    return x + 1"
# Imports in the stub, as in HumanEval/115.
STUB = f'{CONTEXT}\n\n\ndef f(xs: List) -> int:\n    import math\n    """ Add.\n    """\n'
ANSWERS = {
    "def f(xs: List) -> int:\n    return helper(sum(xs))": True,
    "def f(xs):\n    return helper(sum(xs))  # a comment at the end": True,
    "def g(x):\n    return x + 1\n\ndef f(xs):\n    return g(sum(xs))\n": True,
    "def f(xs: List) -> int:\n\treturn helper(sum(xs))": True,
    "from __future__ import annotations\n\ndef f(xs: Unknown):\n    return 4": True,
    "def f(xs):\n    return sum(xs)": False,
    "    return helper(sum(xs))": False,  # a body alone: after the context, it is no program
    "def g(xs):\n    return helper(sum(xs))": False,
    "s = '\ud800'\n\ndef f(xs):\n    return helper(sum(xs))": False,  # no Python source anywhere
    "": False,
    "def f(xs):\n    return helper(sum(xs)": False,
}


def test_official_graders_grade_what_we_executed(tmp_path, capsys):
    problem = Problem("HumanEval/0", "", [TEST], [], "f", context=CONTEXT)
    row = {"kind": "chain", "task_id": "HumanEval/0", "turn": 1}
    rows = [row | {"sample": i, "code": code} for i, code in enumerate(ANSWERS)]
    result = summary(iterations=1, **{"HumanEval/0": RIGHT})
    result["problems"]["HumanEval/0"] |= {"entry_point": "f", "context": CONTEXT}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "samples.jsonl").write_text(json_lines(rows))
    compare.main(["--export", str(tmp_path)])
    assert "answers-1.jsonl: 11 answers" in capsys.readouterr().out
    samples = [json.loads(line) for line in (tmp_path / "answers-1.jsonl").open()]
    for graded in (human_eval, evalplus):
        assert [passes(graded(sample)) for sample in samples] == list(ANSWERS.values())
    results = executor.run_many([(problem, code) for code in ANSWERS])
    assert [result.reward == 1 for result in results] == list(ANSWERS.values())


def test_export_writes_what_stands_after_k_attempts(tmp_path):
    chain = {"task_id": "p", "kind": "chain", "sample": 0}
    rows = [chain | {"turn": i, "code": code} for i, code in enumerate(["one", "two", "three"], 1)]
    rows.append(rows[0] | {"sample": 1, "code": "a"})
    rows.append(rows[0] | {"kind": "control", "code": "control"})
    for k, expected in ((1, ["one", "a"]), (2, ["two", "a"]), (5, ["three", "a"])):
        assert export(rows, {"p": {"context": "", "entry_point": "f"}}, k, tmp_path / "x") == 2
        lines = (tmp_path / "x").read_text().splitlines()
        assert [json.loads(line)["solution"].strip() for line in lines] == expected


# The command


def refused(sentence, *arguments):
    with pytest.raises(SystemExit, match=f"^compare: {sentence}") as stopped:
        compare.main([str(argument) for argument in arguments])
    assert len(str(stopped.value)) < 1000  # the usage is the longest


def test_a_file_that_is_no_result_costs_a_sentence_that_names_it(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "result.json"
    good.write_text(json.dumps(summary(p=RIGHT)))
    (tmp_path / "samples.jsonl").write_text("")
    wrong = ["half a li", "\x00" * 9000, "[]", "{}", "[" * 200_000]
    wrong.append(json.dumps(summary(p=[])))
    for content in wrong:
        bad.write_text(content)
        refused(f"{bad} is no result of evaluate.py ", good, bad)
        refused(f"{bad} is no result of evaluate.py ", tmp_path, good)
        refused(f"{bad} is no result of evaluate.py ", "--export", tmp_path)


def test_folders_are_compared_and_what_cannot_be_costs_a_sentence(tmp_path, capsys):
    good, other = tmp_path / "result.json", tmp_path / "other.json"
    good.write_text(json.dumps(summary(p=RIGHT)))
    other.write_text(json.dumps(summary(q=RIGHT)))
    compare.main([str(tmp_path), str(good)])
    assert "left out: 0 problems only in A, 0 only in B" in capsys.readouterr().out
    refused("expected two results(.|\n)*compare BEFORE AFTER", tmp_path)
    refused("the two results have no problem in common,", good, other)
    refused("(.*)No such file or directory: 'no/file'", good, "no/file")
    (tmp_path / "samples.jsonl").write_text("{}\n{")
    refused("Expecting property name", "--export", tmp_path)
