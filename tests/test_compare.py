"""Facts about comparing two evaluations, and about what the official graders are given."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import executor
from support import compare
from support.compare import export, mcnemar
from support.problems import Problem
from support.run import json_lines

LATE, RIGHT, WRONG = [2], [1], [None]  # the turn that solved a problem


def summary(difficulty=None, **chains):
    levels = difficulty or {}
    problems = {p: {"difficulty": levels.get(p), "chain": chain} for p, chain in chains.items()}
    return {"iterations": 2, "problems": problems}


@settings(max_examples=40)
@given(st.integers(0, 7), st.integers(0, 7))
def test_mcnemar_equals_enumerating_every_outcome(gained, lost):
    outcomes = list(itertools.product((-1, 1), repeat=gained + lost))
    extreme = [signs for signs in outcomes if abs(sum(signs)) >= abs(gained - lost)]
    assert mcnemar(gained, lost) == pytest.approx(len(extreme) / len(outcomes))


def test_compare_pairs_by_problem():
    a = summary({"p": "easy", "q": "hard"}, p=WRONG, q=WRONG, r=RIGHT, s=WRONG, only_a=RIGHT)
    b = summary(s=WRONG, r=LATE, q=LATE, p=RIGHT, only_b=RIGHT, also_b=RIGHT)
    rows = compare.compare(a, b)
    names = ("n", "k", "A", "B", "B - A", "gained", "lost", "p")
    # Of p, q, r, s, A solves r; B solves p at once, and q and r in its second attempt.
    first, second = [row for row in rows if row["problems"] == "all"]
    assert [first[name] for name in names] == [4, 1, 0.25, 0.25, 0.0, 1, 1, 1.0]
    assert [second[name] for name in names] == [4, 2, 0.25, 0.75, 0.5, 2, 0, 0.5]
    assert first["low"] < 0 < first["high"]
    assert (second["low"], second["high"]) == (0.0, 1.0)
    assert [row["B - A"] for row in rows if row["problems"] == "easy"] == [1.0, 1.0]
    assert "left out: 1 problems only in A, 2 only in B" in compare.text(a, b)
    with pytest.raises(ValueError, match="no problem in common"):
        compare.compare(a, summary(elsewhere=RIGHT))


def test_equal_results_differ_in_nothing_and_several_chains_give_no_p():
    one, many = summary(p=RIGHT, q=WRONG), summary(p=[1, None], q=[None, None])
    for row in compare.compare(one, one):
        assert [row[name] for name in ("B - A", "low", "high", "gained", "lost")] == [0] * 5
        assert row["p"] == 1.0
    assert all(math.isnan(row["p"]) for row in compare.compare(one, many))


# What the official graders are given


def passes(program):
    try:
        exec(program, {})
        return True
    except BaseException:
        return False


def human_eval(sample):
    """What openai/human-eval runs: prompt + completion + test + check(entry_point)."""
    return passes(f"{STUB}{sample['completion']}\n{TEST}\ncheck(f)")


def evalplus(sample):
    """What evalplus runs: the solution alone, then the entry point taken from its globals."""
    return passes(f"g = {{}}\nexec({sample['solution']!r}, g)\nf = g['f']\n{TEST}\ncheck(f)")


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


@pytest.mark.parametrize("form, grade", [("human-eval", human_eval), ("evalplus", evalplus)])
def test_official_graders_grade_what_we_executed(tmp_path, capsys, form, grade):
    problem = Problem("HumanEval/0", "", [TEST], [], "f", context=CONTEXT)
    row = {"kind": "chain", "task_id": "HumanEval/0", "turn": 1}
    rows = [row | {"sample": i, "code": code} for i, code in enumerate(ANSWERS)]
    result = summary(**{"HumanEval/0": RIGHT}) | {"iterations": 1}
    result["problems"]["HumanEval/0"] |= {"entry_point": "f", "context": CONTEXT}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "samples.jsonl").write_text(json_lines(rows))
    compare.main(["--export", form, str(tmp_path)])
    assert f"{form}-1.jsonl: 11 answers" in capsys.readouterr().out
    lines = (tmp_path / f"{form}-1.jsonl").read_text().splitlines()
    assert [grade(json.loads(line)) for line in lines] == list(ANSWERS.values())
    results = executor.run_many([(problem, code) for code in ANSWERS])
    assert [result.reward == 1 for result in results] == list(ANSWERS.values())


def test_export_writes_what_stands_after_k_attempts(tmp_path):
    rows = []
    for sample, turn, code in ((0, 1, "one"), (0, 2, "two"), (0, 3, "three"), (1, 1, "a")):
        rows.append({"task_id": "p", "kind": "chain", "sample": sample, "turn": turn, "code": code})
    rows.append(rows[0] | {"kind": "control", "code": "control"})
    for k, expected in ((1, ["one", "a"]), (2, ["two", "a"]), (5, ["three", "a"])):
        assert export(rows, {"p": {"context": ""}}, "evalplus", k, tmp_path / "x") == 2
        lines = (tmp_path / "x").read_text().splitlines()
        assert [json.loads(line)["solution"].strip() for line in lines] == expected


# The command


def test_a_file_that_is_no_result_costs_a_sentence_that_names_it(tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "result.json"
    good.write_text(json.dumps(summary(p=RIGHT)))
    (tmp_path / "samples.jsonl").write_text("{}\n{")
    empty, zero = summary(p=[]), summary(p=RIGHT) | {"iterations": 0}
    wrong = ["half a li", "\x00" * 9000, "[]", "{}", "[" * 200_000]
    for content in (*wrong, json.dumps(empty), json.dumps(zero)):
        bad.write_text(content)
        for name, *arguments in (
            (bad, good, bad),
            (tmp_path, tmp_path, good),
            (tmp_path, "--export", "evalplus", tmp_path),
        ):
            sentence = f"^compare: {name} is no result of evaluate.py .*"
            with pytest.raises(SystemExit, match=sentence) as stopped:
                compare.main([str(argument) for argument in arguments])
            assert len(str(stopped.value)) < 300 + len(str(name))
    bad.write_text(good.read_text())
    samples = ["--export", "evalplus", str(tmp_path)]  # it has a damaged samples.jsonl
    for arguments, why in (
        (samples, "is no result .*JSONDecodeError"),
        ([str(good), "no/file"], "cannot be used: No such file or directory"),
    ):
        with pytest.raises(SystemExit, match=f"^compare: {arguments[-1]} {why}"):
            compare.main(arguments)


def test_folders_are_compared_and_a_wrong_call_is_told_the_usage(tmp_path, capsys):
    (tmp_path / "result.json").write_text(json.dumps(summary(p=RIGHT)))
    compare.main([str(tmp_path), str(tmp_path / "result.json")])
    assert "left out: 0 problems only in A, 0 only in B" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected two results(.|\n)*compare BEFORE AFTER"):
        compare.main([str(tmp_path)])
    (tmp_path / "other.json").write_text(json.dumps(summary(q=RIGHT)))
    with pytest.raises(SystemExit, match="^compare: the two results have no problem in common,"):
        compare.main([str(tmp_path), str(tmp_path / "other.json")])
