"""Facts about evaluation: the numbers, the chains, what is written, and what a user's mistake is told.

Most samplers here are scripted: an answer is a word, and `execute` knows what each word is worth.
"""

import base64
import doctest
import functools
import json
import math
import pickle
import subprocess
import sys
import zlib
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluate
import executor
import toy
from evaluate import EvalConfig, attempts, bootstrap, compare, iterate, mcnemar, pass_at_k, table, wilson
from problems import Problem
from tree import Completion, make_sampler

torch.set_num_threads(1)  # a model this small gains nothing from more
RESULTS = {  # what an answer's text is worth: (reward, public_passed)
    "right": (1.0, True), "wrong": (0.0, False), "wrong2": (0.5, False), "overfit": (0.5, True), "lucky": (1.0, False)}


def problem(name, public=("t1",), hidden=("t1", "t2"), difficulty=None):
    return Problem(name, f"Solve {name}.", list(hidden), list(public), "f", "assert", difficulty)


def execute(jobs):
    results = []
    for _, code in jobs:
        reward, public_passed = RESULTS[code.strip()]
        results.append(SimpleNamespace(reward=reward, status="passed" if reward == 1 else "failed", feedback=f"{code.strip()} failed t1",
                                       public_passed=public_passed))
    return results


def scripted(script, seen=None):
    """A sampler that plays script[problem id] by turn; if that holds lists, the copies of a problem play one each."""
    def sample(prompts, n):
        answers, copies = [], Counter()
        for prompt in prompts:
            if seen is not None:
                seen.append(prompt)
            said = [message["content"] for message in prompt]
            name = said[0].removeprefix("Solve ").removesuffix(".")
            lines = script[name] if isinstance(script[name][0], list) else [script[name]]
            lines = [line for line in lines if line[:len(said[1::2])] == said[1::2]] or lines
            line = lines[copies[name] % len(lines)]
            copies[name] += 1
            text = line[min(len(said) // 2, len(line) - 1)]
            answers.append(None if text is None else [Completion(text, [1, 2], [3, 4, 5])] * n)
        return answers
    return sample


# Numbers


@pytest.mark.parametrize("n, c, k, expected", [(5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 3, 0.9), (5, 2, 4, 1.0), (10, 0, 5, 0.0),
                                               (200, 1, 100, 0.5), (1000, 3, 10, 0.0297305)])
def test_pass_at_k_of_the_known_table(n, c, k, expected):  # D43
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=5e-8)


def test_pass_at_k_is_averaged_over_problems_and_is_no_yes_or_no():  # D43: 0.75, not 1.0
    assert np.mean([pass_at_k(2, c, 1) for c in (1, 2)]) == 0.75


@pytest.mark.parametrize("n, c, k", [(5, 2, 6), (5, 6, 1), (5, -1, 1), (5, 2, 0), (0, 0, 1), (5, 2, -1)])
def test_pass_at_k_refuses_what_has_no_meaning(n, c, k):
    with pytest.raises(ValueError, match=f"n={n} samples, c={c} right, k={k}"):
        pass_at_k(n, c, k)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_counting_all_subsets(case):
    from itertools import combinations
    n, c, k = case
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize("successes, n, low, high", [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                                     (1, 29, 0.0061, 0.1718), (20, 20, 0.8389, 1.0)])
def test_wilson_of_published_values(successes, n, low, high):  # Newcombe 1998, table I
    assert wilson(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@settings(deadline=None)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_own_equation_and_holds_the_share(case):
    successes, n = case
    p, (low, high) = successes / n, wilson(successes, n)
    assert 0 <= low <= p <= high <= 1
    for end in {low, high} - {0.0, 1.0}:  # the ends are where the score test is at its limit
        assert abs(p - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / n), abs=1e-9)


def test_mcnemar_of_known_values():
    assert mcnemar(1, 9) == mcnemar(9, 1) == 22 / 1024
    assert mcnemar(0, 5) == 0.0625 and mcnemar(5, 5) == mcnemar(0, 0) == mcnemar(1, 0) == 1.0


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(0, 9))
def test_mcnemar_equals_enumerating_every_outcome(gained, lost):
    n = gained + lost
    extreme = sum(abs(2 * sum(signs) - n) >= abs(gained - lost) for signs in product((0, 1), repeat=n))
    assert mcnemar(gained, lost) == pytest.approx(extreme / 2**n)


def test_bootstrap_is_seeded_exact_where_nothing_varies_and_covers():
    assert bootstrap([0.25] * 7) == (0.25, 0.25)
    assert bootstrap([0, 0.5, 1]) == bootstrap([0, 0.5, 1])
    assert bootstrap([0.0, 1.0], draws=4000) == (0.0, 1.0)
    rng = np.random.default_rng(1)
    covered = sum(low <= 0.4 <= high for low, high in (bootstrap(rng.beta(2, 3, 60), draws=400) for _ in range(200)))
    assert 180 <= covered <= 199  # 95% nominal of 200, and not an interval that always covers


def test_the_examples_in_the_docstrings():
    results = doctest.testmod(evaluate)
    assert results.failed == 0 and results.attempted >= 2


# Chains


def test_a_chain_that_fails_twice_and_passes():  # D44
    seen = []
    chains = iterate([problem("p")], scripted({"p": ["wrong", "wrong2", "right"]}, seen), execute, 5)
    assert len(chains) == 1 and [node.code for node in chains[0]] == ["wrong", "wrong2", "right"]
    summary = evaluate.evaluate([problem("p")], scripted({"p": ["wrong", "wrong2", "right"]}), execute, 5)
    assert [s["value"] for s in summary["Iter-k"]["all"]] == [0, 0, 1, 1, 1]
    assert "wrong2 failed t1" in seen[2][-1]["content"] and "wrong failed t1" in seen[2][2]["content"]


def test_a_chain_ends_when_the_public_tests_pass_and_the_hidden_ones_give_the_verdict():  # D44, decision 9
    chains = iterate([problem("p"), problem("q")], scripted({"p": ["overfit", "right"], "q": ["wrong", "right"]}), execute, 5)
    assert [[node.code for node in chain] for chain in chains] == [["overfit"], ["wrong", "right"]]
    summary = evaluate.evaluate([problem("p"), problem("q")], scripted({"p": ["overfit"], "q": ["wrong", "right"]}), execute, 5)
    assert [s["value"] for s in summary["Iter-k"]["all"]] == [0, 0.5, 0.5, 0.5, 0.5]
    counts = evaluate.evaluate([problem("p")], scripted({"p": ["overfit"]}), execute, 2)["counts"]["chain"]
    assert counts["public only"] == 1 and counts["attempts"] == 1


def test_one_sample_call_and_one_execute_call_a_turn_for_all_problems():
    sizes = {"sample": [], "execute": []}
    script = scripted({"a": ["right"], "b": ["wrong", "right"], "c": ["wrong"]})
    def sample(prompts, n):
        sizes["sample"].append((len(prompts), n))
        return script(prompts, n)
    def run(jobs):
        sizes["execute"].append(len(jobs))
        return execute(jobs)
    chains = iterate([problem(name) for name in "abc"], sample, run, 3)
    # c repeats its first program, which is not run again.
    assert sizes == {"sample": [(3, 1), (2, 1), (1, 1)], "execute": [3, 1]} and [len(chain) for chain in chains] == [1, 2, 3]


def test_no_hidden_test_is_in_any_prompt():  # D44, with the real executor
    public, hidden = "assert f(1) == 1", "assert f(76543) == 98765"
    seen = []
    texts = ["def f(x): return 0", "def f(x): return 1 / 0", "def f(x): return x"]
    p = Problem("p", "Write f. For example:\n" + public, [public, hidden], [public], "f", "assert")
    def sample(prompts, n):
        seen.extend(prompts)
        return [[Completion(texts[len(prompt) // 2])] for prompt in prompts]
    chains = iterate([p], sample, executor.run_many, 5)
    assert [node.status for node in chains[0]] == ["failed", "error", "failed"] and not chains[0][-1].solved
    assert len(seen) == 3 and "f(1)" in seen[1][-1]["content"]
    assert not [word for prompt in seen for word in ("76543", "98765") if word in json.dumps(prompt)]
    assert not [word for node in chains[0] for word in ("76543", "98765") if word in node.feedback]


def test_a_test_that_only_defines_check_is_called():  # D45, with the real executor
    p = Problem("HumanEval/x", "Write f.", ["def check(candidate):\n    assert candidate(2) == 8\n"], [], "f", "assert",
                reference="from typing import List\n\ndef cube(x):\n    return x ** 3\n\ndef f(x: List):\n    return cube(x)",
                context="from typing import List\n\ndef cube(x):\n    return x ** 3")
    answers = iter(["def f(x: List) -> int:\n    return 7", "def f(x: List) -> int:\n    return cube(x)"])
    chains = iterate([p], lambda prompts, n: [[Completion(next(answers))] for _ in prompts], executor.run_many, 3)
    assert [node.solved for node in chains[0]] == [False, True]  # and the prompt's helper and import stand before the answer


def test_a_problem_without_tests_is_never_counted_as_solved():  # D27, with the real executor
    p = Problem("p", "Write f.", [], [], "f", "assert")
    with pytest.raises(ValueError, match="cannot be scored"):
        evaluate.evaluate([p], lambda prompts, n: [[Completion("def f(): return 1")] for _ in prompts], executor.run_many, 2)


OUTCOME = st.sampled_from(list(RESULTS))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(OUTCOME, min_size=4, max_size=4), min_size=1, max_size=6), st.integers(1, 4))
def test_iter_k_never_falls_and_a_naive_loop_agrees(scripts, iterations):
    script = {str(i): line for i, line in enumerate(scripts)}
    summary = evaluate.evaluate([problem(name) for name in script], scripted(script), execute, iterations)
    solved_at = []
    for line in scripts:
        turns = []
        for turn, word in enumerate(line[:iterations], 1):
            turns += [turn] if RESULTS[word][0] == 1 else []
            if RESULTS[word][1]:
                break
        solved_at.append(min(turns, default=99))
    values = [s["value"] for s in summary["Iter-k"]["all"]]
    assert values == [pytest.approx(np.mean([turn <= k for turn in solved_at])) for k in range(1, iterations + 1)]
    assert values == sorted(values)
    assert all(s["low"] <= s["value"] <= s["high"] for s in summary["Iter-k"]["all"])


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(ValueError, match="no problem"):
        evaluate.evaluate([], scripted({}), execute, 2)


def test_samples_are_independent_chains_with_a_bootstrap_interval_and_a_control():
    script = {"p": [["wrong", "right"], ["wrong", "wrong"]], "q": [["right"], ["wrong", "overfit"]]}
    control = scripted({"p": [["wrong"], ["wrong"], ["right"], ["wrong"]], "q": ["wrong"]})
    summary = evaluate.evaluate([problem("p"), problem("q")], scripted(script), execute, 2, samples=2, control=control)
    assert summary["problems"]["p"]["chain"] == [2, None] and summary["problems"]["q"]["chain"] == [1, None]
    assert [s["value"] for s in summary["Iter-k"]["all"]] == [0.25, 0.5]
    assert summary["Iter-k"]["all"][0]["low"] == 0.0 and summary["Iter-k"]["all"][0]["high"] == 0.5  # of the two problems' means
    assert summary["problems"]["p"]["control"] == [None, None, 1, None]  # 2 samples * 2 iterations
    assert [s["value"] for s in summary["pass@k"]["all"]] == [pass_at_k(4, 1, 1) / 2, pass_at_k(4, 1, 2) / 2]
    assert summary["counts"]["control"]["attempts"] == 8
    assert "pass@k" in table(summary)


def test_one_sample_a_problem_has_wilsons_interval():
    summary = summary_of({"p": ["right"], "q": ["wrong"], "r": ["wrong", "right"], "s": ["wrong"]})
    assert [(s["low"], s["high"]) for s in summary["Iter-k"]["all"]] == [wilson(1, 4), wilson(2, 4)]


def test_the_control_does_not_see_feedback():
    seen = []
    attempts([problem("p")], scripted({"p": ["wrong"]}), execute, 3, control=scripted({"p": ["wrong"]}, seen))
    assert seen == [[{"role": "user", "content": "Solve p."}]] * 3


def test_counts_and_groups():
    problems = [problem("e", difficulty="easy"), problem("h", difficulty="hard"), problem("m", public=(), difficulty="medium"),
                problem("long", difficulty="hard")]
    script = {"e": ["wrong", "wrong", "wrong2"], "h": ["wrong", None], "m": ["lucky", "right"], "long": [None]}
    summary = evaluate.evaluate(problems, scripted(script), execute, 3)
    assert list(summary["Iter-k"]) == ["easy", "medium", "hard", "feedback public", "feedback oracle", "all"]
    assert [s["n"] for s, *_ in summary["Iter-k"].values()] == [1, 1, 2, 3, 1, 4]
    assert summary["feedback"] == {"public": 3, "oracle": 1}
    counts = summary["counts"]["chain"]
    assert counts["attempts"] == 6 and counts["later"] == 3 and counts["repeated"] == 1 and counts["too long"] == 2
    assert counts["hidden only"] == 1 and counts["passed"] == 2 and counts["failed"] == 4 and counts["tokens"] == 18
    assert summary["Iter-k"]["all"][2]["value"] == 0.25  # prompts too long are unsolved problems, not left out
    assert summary["rates"] == {"repeated": 1 / 3, "truncated": 0, "timeout": 0, "no_code": 0}
    assert "feedback: public 3, oracle 1" in table(summary) and "repeated 33.3%" in table(summary)


def test_truncated_answers_are_counted():
    sample = lambda prompts, n: [[Completion("wrong", truncated=True)] for _ in prompts]
    assert evaluate.evaluate([problem("p")], sample, execute, 2)["counts"]["chain"]["truncated"] == 2


def test_problems_with_one_id_are_kept_apart():
    summary = evaluate.evaluate([problem("p"), problem("p"), problem("q")], scripted({"p": [["right"], ["wrong"]], "q": ["wrong"]}),
                                execute, 1)
    assert {name: entry["chain"] for name, entry in summary["problems"].items()} == {"p": [1], "p#2": [None], "q": [None]}


# Comparison


def summary_of(script, iterations=2, samples=1, difficulty=None):
    problems = [problem(name, difficulty=(difficulty or {}).get(name)) for name in script]
    return evaluate.evaluate(problems, scripted(script), execute, iterations, samples=samples)


def test_compare_pairs_by_problem():
    right, late, wrong = ["right"], ["wrong", "right"], ["wrong"]
    a = summary_of({"p": wrong, "q": wrong, "r": right, "s": wrong, "only a": right}, difficulty={"p": "easy", "q": "hard"})
    b = summary_of({"s": wrong, "r": late, "q": late, "p": right, "only b": right, "also b": right})
    frame = compare(a, b)
    assert frame.attrs["unpaired"] == (1, 2)
    whole = frame[frame["problems"] == "all"].to_dict("records")
    assert [(r["n"], r["k"], r["A"], r["B"], r["B - A"], r["gained"], r["lost"], r["p"]) for r in whole] == [
        (4, 1, 0.25, 0.25, 0.0, 1, 1, 1.0), (4, 2, 0.25, 0.75, 0.5, 2, 0, 0.5)]
    assert (whole[1]["low"], whole[1]["high"]) == (0.0, 1.0) and whole[0]["low"] < 0 < whole[0]["high"]
    assert frame[frame["problems"] == "easy"]["B - A"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no problem in common"):
        compare(a, summary_of({"elsewhere": right}))


def test_compare_of_equal_results_is_no_difference_and_of_many_samples_gives_no_p():
    a = summary_of({"p": ["right"], "q": ["wrong"]})
    assert compare(a, a)[["B - A", "low", "high", "gained", "lost"]].to_numpy().any() == False  # noqa: E712
    many = summary_of({"p": [["right"], ["wrong"]], "q": ["wrong"]}, samples=2)
    assert compare(a, many)["p"].isna().all() and compare(many, many)["p"].isna().all() and compare(a, a)["p"].eq(1).all()


# Export


def official_human_eval(row, sample):
    """What openai/human-eval runs: prompt + completion + test + check(entry_point)."""
    program = row["prompt"] + sample["completion"] + "\n" + row["test"] + "\n" + f"check({row['entry_point']})"
    return runs(program)


def official_evalplus(row, sample):
    """What evalplus runs: the solution alone, then the entry point taken from its globals."""
    return runs(f"g = {{}}\nexec({sample['solution']!r}, g)\nf = g[{row['entry_point']!r}]\n{row['test']}\ncheck(f)")


def runs(program):
    code = "import sys\ntry:\n    exec(sys.stdin.read(), {})\nexcept BaseException:\n    sys.exit(1)\n"
    return subprocess.run([sys.executable, "-c", code], input=program.encode("utf-8", "surrogatepass"), capture_output=True).returncode == 0


STUB = {"entry_point": "f", "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 4\n",
        "prompt": "from typing import List\n\n\ndef helper(x):\n    return x + 1\n\n\ndef f(xs: List) -> int:\n    \"\"\" Add.\n    \"\"\"\n"}
CONTEXT = "from typing import List\n\n\ndef helper(x):\n    return x + 1"
ANSWERS = {
    "def f(xs: List) -> int:\n    return helper(sum(xs))": True,
    "def f(xs):\n    return helper(sum(xs))  # a comment at the end": True,
    "import functools\n\n@functools.cache\ndef g(x):\n    return x + 1\n\ndef f(xs):\n    return g(sum(xs))\n": True,
    "def f(xs):\n    return sum(xs)": False,
    "    return helper(sum(xs))": False,  # a body alone: we ran it after the context, where it is no program
    "def g(xs):\n    return helper(sum(xs))": False,  # the prompt's own stub must not stand in for what is not there
    "from __future__ import annotations\n\ndef f(xs: Unknown) -> int:\n    return helper(sum(xs))": True,
    "s = '\ud800'\n\ndef f(xs):\n    return helper(sum(xs))": False,  # no Python source, there or here
    "": False,
    "def f(xs):\n    return helper(sum(xs)": False,
    "def f(xs: List) -> int:\n\treturn helper(sum(xs))": True,
}


def row_of(code, sample=0, turn=1, kind="chain", task_id="HumanEval/0"):
    return {"task_id": task_id, "kind": kind, "sample": sample, "turn": turn, "code": code}


@pytest.mark.parametrize("form, grade", [("human-eval", official_human_eval), ("evalplus", official_evalplus)])
def test_official_graders_grade_what_we_executed(tmp_path, form, grade):
    reference = STUB["prompt"] + "    return helper(sum(xs))"
    p = Problem("HumanEval/0", "", [STUB["test"]], [], "f", "assert", reference=reference, context=CONTEXT)
    rows = [row_of(code, i) for i, code in enumerate(ANSWERS)]
    assert evaluate.export(rows, [p], form, 1, tmp_path / "x.jsonl") == len(ANSWERS)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert {line["task_id"] for line in lines} == {"HumanEval/0"}
    assert [grade(STUB, line) for line in lines] == list(ANSWERS.values())
    assert [result.reward == 1 for result in executor.run_many([(p, code) for code in ANSWERS])] == list(ANSWERS.values())


def test_the_stub_of_the_prompt_takes_no_part(tmp_path):
    p = problem("HumanEval/0")  # no context, so nothing but the `del` stands between the stub and the answer
    evaluate.export([row_of("    return 4"), row_of("x = 4", 1), row_of("def f(xs):\n    return 4", 2)], [p], "human-eval", 1, tmp_path / "x")
    lines = [json.loads(line) for line in (tmp_path / "x").open()]
    assert [official_human_eval(STUB, line) for line in lines] == [False, False, True]
    lazy = STUB | {"test": "def check(candidate):\n    assert candidate(1) is None\n"}
    assert not official_human_eval(lazy, lines[1])  # the stub alone would pass


def test_a_prompt_without_docstring_takes_the_completion_too():  # HumanEval/115: its body begins with an import
    row = STUB | {"prompt": "\ndef f(xs):\n    import math\n    \"\"\"\n    Add.\n    \"\"\"\n"}
    assert official_human_eval(row, {"completion": "\ndel f\n\ndef f(xs):\n    return 4\n"})


def test_export_writes_what_stands_after_k_attempts(tmp_path):
    p = problem("HumanEval/0")
    rows = [row_of("one"), row_of("two", turn=2), row_of("three", turn=3), row_of("a", 1), row_of("control", kind="control")]
    for k, expected in ((1, ["one", "a"]), (2, ["two", "a"]), (5, ["three", "a"])):
        evaluate.export(rows, [p], "evalplus", k, tmp_path / "x.jsonl")
        assert [json.loads(line)["solution"].strip() for line in (tmp_path / "x.jsonl").open()] == expected


def test_code_is_kept_whole():  # D46: no stop words are searched for in it
    code = "def f(a, b):\n    s = '<|endoftext|>'\n    return a > b | len(s)"
    rows = attempts([problem("p")], lambda prompts, n: [[Completion(f"```python\n{code}\n```")]], lambda jobs: execute([(0, "wrong")]), 1)
    assert rows[0]["code"] == code and rows[0]["text"] == f"```python\n{code}\n```"


# Files


def test_any_text_can_be_written_and_read_back(tmp_path):  # D36
    row = {"text": "\ud800 \x00 é \u2028 \U0001f600", "n": 1}
    evaluate.write(tmp_path / "x.jsonl", [row, row])
    assert [json.loads(line) for line in (tmp_path / "x.jsonl").read_bytes().split(b"\n")[:-1]] == [row, row]


def test_a_write_that_ends_half_way_leaves_what_was_there(tmp_path):
    evaluate.write(tmp_path / "x.jsonl", [{"n": 1}])
    with pytest.raises(TypeError):
        evaluate.write(tmp_path / "x.jsonl", [{"n": 1}, {"n": 2}, {"n": object()}])
    assert (tmp_path / "x.jsonl").read_bytes() == b'{"n": 1}\n'


def saved(folder, script, settings=None, iterations=3):
    rows = attempts([problem(name) for name in script], scripted(script), execute, iterations)
    evaluate.resume(folder, settings or {"seed": 0})
    evaluate.write(folder / "samples.jsonl", rows)
    return rows


def test_resume_gives_back_what_was_written_and_names_a_damaged_file(tmp_path):
    rows = saved(tmp_path, {"p": ["wrong", "right"], "q": ["wrong"], "long": [None], "cut": ["wrong", None]})
    assert evaluate.resume(tmp_path, {"seed": 0}) == rows and len(rows) == 7
    (tmp_path / "samples.jsonl").write_bytes((tmp_path / "samples.jsonl").read_bytes()[:-25])
    with pytest.raises(ValueError, match="samples.jsonl is damaged .* give another --output"):
        evaluate.resume(tmp_path, {"seed": 0})


def test_other_settings_are_refused_by_name(tmp_path):
    saved(tmp_path, {"p": ["right"]}, {"seed": 0, "temperature": 0.0, "limit": None})
    with pytest.raises(ValueError, match=r"other settings: temperature \(0.0 there, 0.7 now\), limit \(None there, 3 now\); give another"):
        evaluate.resume(tmp_path, {"seed": 0, "temperature": 0.7, "limit": 3})
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match="other settings: seed"):
        evaluate.resume(tmp_path, {"seed": 0})


# The program


@pytest.fixture(scope="module", autouse=True)
def one_self_check():  # it takes half a second, and every main() here would run it again
    real, executor.self_check = executor.self_check, functools.cache(executor.self_check)
    yield
    executor.self_check = real


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = toy.make_tokenizer()
    toy.make_model(len(tokenizer), seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def command(model, folder, *more):
    evaluate.main(["--model", model, "--limit", "6", "--iterations", "2", "--chunk", "2", "--output", str(folder), *more])


def test_the_whole_program_and_its_result(model, tmp_path, capsys):
    command(model, tmp_path, "--temperature", "1", "--samples", "2", "--control", "--export", "evalplus")
    out, result = capsys.readouterr().out, json.loads((tmp_path / "result.json").read_text())
    assert "Iter-k" in out and "pass@k" in out and "oracle" in out
    assert result["counts"]["chain"]["attempts"] >= 12 and result["counts"]["control"]["attempts"] == 24
    assert result["settings"]["max_new_tokens"] == 16 and result["settings"]["seed"] == 0 and result["settings"]["start_date"] is None
    assert set(result["libraries"]) == {"python", "torch", "transformers", "datasets", "numpy"} and result["context"] == 256
    assert set(result["seconds"]) == {"sampling", "executing"} and result["feedback"] == {"oracle": 6}
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert {"task_id", "turn", "prompt", "text", "code", "status", "feedback", "public_passed", "truncated"} <= set(rows[0])
    assert len((tmp_path / "evalplus.jsonl").read_text().splitlines()) == 12


def test_interrupted_and_resumed_equals_one_whole_run(model, tmp_path, monkeypatch):
    for temperature in ("0", "1"):
        whole, parts = tmp_path / f"whole{temperature}", tmp_path / f"parts{temperature}"
        command(model, whole, "--temperature", temperature)
        calls, real = [], evaluate.attempts
        def interrupted(problems, *rest, **options):
            calls.append([p.id for p in problems])
            if len(calls) == 2:
                raise KeyboardInterrupt
            return real(problems, *rest, **options)
        monkeypatch.setattr(evaluate, "attempts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command(model, parts, "--temperature", temperature)
        assert len((parts / "samples.jsonl").read_text().splitlines()) >= 2 and not (parts / "result.json").exists()
        command(model, parts, "--temperature", temperature)
        monkeypatch.setattr(evaluate, "attempts", real)
        assert not set(calls[0]) & {name for call in calls[2:] for name in call}  # the first chunk is not sampled again
        assert (parts / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
        results = [json.loads((folder / "result.json").read_text()) for folder in (whole, parts)]
        assert results[0]["problems"] == results[1]["problems"] and [r["resumed"] for r in results] == [0, 2]


def test_interrupted_in_the_middle_of_a_write_equals_one_whole_run(model, tmp_path, monkeypatch):
    command(model, tmp_path / "whole", "--temperature", "1")
    seen = []
    def dumps(value):
        seen.extend([value["task_id"]] if isinstance(value, dict) and "task_id" in value else [])
        if len(set(seen)) == 4:  # the last problem of the second chunk: the chunk is half in the file
            raise OSError("no space left on device")
        return json.dumps(value)
    monkeypatch.setattr(evaluate, "json", SimpleNamespace(dumps=dumps, loads=json.loads))
    with pytest.raises(SystemExit, match="evaluate.py: no space left on device"):
        command(model, tmp_path / "parts", "--temperature", "1")
    monkeypatch.setattr(evaluate, "json", json)
    assert (tmp_path / "parts" / "samples.jsonl.new").exists()
    command(model, tmp_path / "parts", "--temperature", "1")
    files = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1] and json.loads((tmp_path / "parts" / "result.json").read_text())["resumed"] == 2


def test_a_greedy_model_that_repeats_itself_is_warned_of(model, tmp_path, capsys, monkeypatch):
    for temperature, text, warned in (("0", "def f(x): return 77", True), ("1", "def f(x): return 77", False), ("0", None, False)):
        sample = lambda prompts, n: [[Completion(text or f"def f(x): return {77 + len(prompt)}")] for prompt in prompts]
        monkeypatch.setattr(evaluate, "make_sampler", lambda *model, **settings: sample)
        command(model, tmp_path / f"{temperature} {text}", "--temperature", temperature)
        assert ("Warning: most later attempts repeat" in capsys.readouterr().out) == warned


def test_changed_settings_or_another_model_in_the_same_folder_are_refused(model, tmp_path):
    command(model, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"evaluate.py: .*other settings: seed \(0 there, 1 now\); give another --output"):
        command(model, tmp_path / "out", "--seed", "1")
    other = tmp_path / "model"
    toy.make_model(len(toy.make_tokenizer()), seed=1).save_pretrained(other)
    toy.make_tokenizer().save_pretrained(other)
    with pytest.raises(SystemExit, match=r"other settings: model .*weights \(\d+ there, \d+ now\)"):
        command(str(other), tmp_path / "out")


def test_changed_problems_under_the_same_name_are_refused(model, tmp_path):
    row = {"id": "p", "prompt": "Write f.", "tests": ["assert f(1) == 1"], "public_tests": [], "entry_point": "f", "kind": "assert"}
    for expected in ("1", "2"):
        (tmp_path / "p.jsonl").write_text(json.dumps(row | {"tests": [f"assert f(1) == {expected}"]}) + "\n")
        more = ("--benchmark", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8")
        if expected == "1":
            command(model, tmp_path / "out", *more)
    with pytest.raises(SystemExit, match=r"other settings: problems \(\d+ there, \d+ now\)"):
        command(model, tmp_path / "out", *more)


def test_the_control_of_greedy_chains_is_sampled(model, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(evaluate, "make_sampler", lambda *model, **settings: asked.append(settings) or (
        lambda prompts, n: [[Completion("def f(x): return 77")] for _ in prompts]))
    command(model, tmp_path / "a", "--control", "--top-p", "0.9", "--enable-thinking")
    command(model, tmp_path / "b", "--control", "--temperature", "0.5")
    assert sorted(s["temperature"] for s in asked) == [0, 0.5, 0.5, 0.8]
    assert all((s["top_p"], s["enable_thinking"], s["max_new_tokens"]) in ((0.9, True, 16), (1.0, False, 16)) for s in asked)


def test_compare_reads_two_results(model, tmp_path, capsys):
    for seed in "01":
        command(model, tmp_path / seed, "--temperature", "1", "--seed", seed)
    capsys.readouterr()
    evaluate.main(["--compare", str(tmp_path / "0" / "result.json"), str(tmp_path / "1" / "result.json")])
    out = capsys.readouterr().out
    assert "B - A" in out and "gained" in out and "only in A: 0" in out


@pytest.mark.parametrize("arguments, sentence", [
    ([], "--model is missing"),
    (["--model", "no/such/model/anywhere"], "cannot load a model from 'no/such/model/anywhere'"),
    (["--model", "x", "--benchmark", "no_such_file.jsonl"], "no_such_file.jsonl"),
    (["--model", "x", "--benchmark", "humanevil"], "humanevil"),
    (["--model", "x", "--iterations", "0"], "--iterations must be at least 1, got 0"),
    (["--model", "x", "--temperature", "-1"], "--temperature must be at least 0"),
    (["--model", "x", "--temperature", "nan"], "--temperature must be at least 0"),
    (["--model", "x", "--top-p", "1.5"], "--top-p must lie in"),
    (["--model", "x", "--limit", "0"], "--limit must be at least 1"),
    (["--model", "x", "--samples", "4"], "greedy chains are all equal"),
    (["--model", "x", "--export-attempt", "6"], "--export-attempt 6 is above --iterations"),
    (["--model", "x", "--no-such-option", "1"], "no-such-option"),
    (["--model", "x", "--difficulty", "impossible"], "no problem to evaluate"),
    (["--compare", "a.json"], "--compare takes two files, got 1"),
    (["--compare", "a.json", "b.json"], "a.json"),
])
def test_a_mistake_gets_one_sentence_and_no_traceback(arguments, sentence, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stop:
        evaluate.main(arguments)
    assert str(stop.value.code).startswith("evaluate.py: ") and sentence in str(stop.value.code)
    assert "\n" not in str(stop.value.code).strip()


@pytest.mark.parametrize("arguments, sentence", [(["--iterations", "many"], "invalid int value: 'many'"), (["--export", "xml"], "xml")])
def test_what_is_no_value_at_all_is_refused_by_the_parser(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--model", "x", *arguments])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


def test_a_file_that_is_no_result_is_named(tmp_path):
    for text in ("not json", "[]", "{}"):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(SystemExit, match="a.json"):
            evaluate.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")])


def test_help_says_what_every_option_is(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in out for name in EvalConfig.__dataclass_fields__)
    assert "python evaluate.py --model" in out and "(default: 5)" in out


def test_oracle_takes_the_public_tests_away_from_the_loop(model, tmp_path, capsys):
    row = {"id": "p", "prompt": "Write f.", "tests": ["assert f(1) == 1", "assert f(2) == 2"], "public_tests": ["assert f(1) == 1"],
           "entry_point": "f", "kind": "assert"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    for more, expected in (((), {"public": 1}), (("--oracle",), {"oracle": 1})):
        folder = tmp_path / f"out{len(more)}"
        command(model, folder, "--benchmark", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8", *more)
        assert json.loads((folder / "result.json").read_text())["feedback"] == expected


def test_remote_pickles_run_nothing(model, tmp_path):  # D47
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    def row(name, private):
        case = [{"input": "1", "output": "1", "testtype": "stdin"}]
        return {"question_id": name, "question_content": "Print it.", "starter_code": "", "difficulty": "easy", "platform": "x",
                "contest_date": "2025-01-01T00:00:00", "public_test_cases": json.dumps(case), "metadata": "{}",
                "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(private))).decode()}
    good = json.dumps([{"input": "2", "output": "2", "testtype": "stdin"}])
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row(n, p)) + "\n" for n, p in (("good", good), ("bad", Payload()))))
    command(model, tmp_path / "out", "--benchmark", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert list(result["problems"]) == ["good"] and [name for name, _ in result["left out"]] == ["bad"] and not canary.exists()


def test_one_bos_in_every_prompt(model):  # D40
    from tree import load_model
    loaded, tokenizer = load_model(model, "cpu")
    chains = iterate(toy.problems("doctest", "test", 2, 0), make_sampler(loaded, tokenizer, max_new_tokens=6, temperature=0),
                     executor.run_many, 2)
    nodes = [node for chain in chains for node in chain]
    assert len(nodes) == 4 and all(node.prompt_ids.count(tokenizer.bos_token_id) == 1 for node in nodes)
    assert all(node.prompt_ids[0] == tokenizer.bos_token_id for node in nodes)
