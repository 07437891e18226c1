"""Facts about evaluation: the numbers, the chains, what is written, what a mistake is told.

Most samplers here are scripted: an answer is a word, and `execute` knows what each word is worth.
"""

import itertools
import json
import math
import shutil
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluate
import executor
from evaluate import attempt_rows, bootstrap, iterate, mean_with_interval, pass_at_k, table, wilson
from support import toy
from support.problems import Problem
from tests.test_ranks import finish, start
from tree import Completion

WORTH = {"right": (1.0, True), "wrong": (0.0, False), "wrong2": (0.5, False)}
WORTH |= {"overfit": (0.5, True), "lucky": (1.0, False)}  # answer: (reward, public_passed)


def problem(name, public=("t1",), difficulty=None):
    return Problem(name, name, ["t1", "t2"], list(public), "f", difficulty=difficulty)


def result(word):
    reward, passed = WORTH[word]
    told = {"feedback": f"{word} failed t1", "status": "passed" if reward == 1 else "failed"}
    return SimpleNamespace(reward=reward, public_passed=passed, **told)


def execute(jobs):
    return [result(word) for _, word in jobs]


def answers(words):
    """A sampler's answer to each prompt, a program of one word; None: the prompt is too long."""
    programs = [word and f"```python\n{word}\n```" for word in words]
    return [text and [Completion(text, [1, 2], [3, 4, 5])] for text in programs]


def scripted(script):
    """A sampler: at turn t it answers problem p with script[p][t - 1]; it fails after the last."""

    def sample(prompts, n):
        return answers(script[prompt[0]["content"]][len(prompt) // 2] for prompt in prompts)

    return sample


def in_order(words):
    """A sampler that answers with these words, one after the other; it records its calls."""
    rest = iter(words)
    return Mock(side_effect=lambda prompts, n: answers([next(rest) for _ in prompts]))


def summary_of(script, iterations):
    problems = [problem(name) for name in script]
    return evaluate.evaluate(problems, scripted(script), execute, iterations)


def values(scores):
    return [entry["value"] for entry in scores["all"]]


def test_pass_at_k_of_the_known_table():  # D43
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4)] == [0.4, 0.7, 0.9, 1.0]
    assert [pass_at_k(10, 0, 5), pass_at_k(200, 1, 100)] == [0.0, 0.5]
    assert pass_at_k(1000, 3, 10) == pytest.approx(0.0297305, abs=5e-8)
    for n, c, k in [(5, 2, 6), (5, 6, 1), (5, -1, 1), (5, 2, 0), (0, 0, 1)]:
        with pytest.raises(ValueError, match=f"n={n} samples, c={c}, k={k}"):
            pass_at_k(n, c, k)


@settings(max_examples=60)
@given(st.integers(1, 9), st.data())
def test_pass_at_k_equals_counting_all_subsets(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_wilson_of_published_values():  # Newcombe 1998, table I
    table_1 = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611)}
    table_1 |= {(1, 29): (0.0061, 0.1718), (20, 20): (0.8389, 1.0)}
    for case, interval in table_1.items():
        assert wilson(*case) == pytest.approx(interval, abs=5e-5)


@given(st.integers(1, 500), st.data())
def test_wilson_solves_its_own_equation_and_holds_the_share(n, data):
    successes = data.draw(st.integers(0, n))
    p, (low, high) = successes / n, wilson(successes, n)
    assert 0 <= low <= p <= high <= 1
    for end in {low, high} - {0.0, 1.0}:  # from here p is 1.96 standard deviations away
        limit = 1.959963984540054 * math.sqrt(end * (1 - end) / n)
        assert abs(p - end) == pytest.approx(limit, abs=1e-9)


def test_the_bootstrap_repeats_itself_and_holds_the_mean_in_19_of_20_samples():
    assert bootstrap([0.25] * 7) == (0.25, 0.25)
    assert bootstrap([0, 0.5, 1]) == bootstrap([0, 0.5, 1])
    assert bootstrap([0.0, 1.0], draws=4000) == (0.0, 1.0)
    rng = np.random.default_rng(1)
    intervals = [bootstrap(rng.beta(2, 3, 60), draws=400) for _ in range(200)]
    held = sum(low <= 0.4 <= high for low, high in intervals)  # the mean of beta(2, 3) is 2/5
    assert 180 <= held <= 199  # 190 are expected


def test_a_score_has_wilsons_interval_for_yes_or_no_and_else_that_of_the_bootstrap():
    assert list(mean_with_interval([1.0, 0.0]).values()) == [2, 0.5, *wilson(1, 2)]
    assert list(mean_with_interval([0.5, 1.0]).values()) == [2, 0.75, *bootstrap([0.5, 1.0])]


def test_a_chain_ends_when_the_public_tests_pass_and_all_tests_give_the_verdict():  # D44
    script = {"p": ["wrong", "wrong2", "right"], "q": ["overfit", "right"], "r": ["right"]}
    chains = iterate([problem(name) for name in script], scripted(script), execute, 5)
    assert [[node.code for node in c] for c in chains] == [script["p"], ["overfit"], ["right"]]
    _, _, first, _, second = [message["content"] for message in chains[0][-1].prompt]
    assert "wrong failed t1" in first and "wrong2 failed t1" in second
    summary = summary_of(script, 5)
    assert values(summary["Iter-k"]) == [1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3]
    assert summary["chain"]["public only"] == 1


def test_no_hidden_test_is_in_any_prompt_unless_oracle_is_asked_for(tmp_path):  # D44, D46
    """With the real executor. Decision 9: with oracle all tests feed the loop, and it is said."""
    tests = ["assert f(1) == 1", "assert f(76543) == 98765"]
    row = {"prompt": "Write f.", "tests": tests, "public_tests": tests[:1], "entry_point": "f"}
    mine = tmp_path / "p.jsonl"
    mine.write_text(json.dumps(row))
    third = "def f(x):\n    return x if x > 0 | 1 or x == 1 else '<|endoftext|>'"
    programs = ["def f(x): return 0", "def f(x): return 1 / 0", third, third]
    for oracle, kind, count in ((False, "public", 3), (True, "oracle", 4)):
        problems = evaluate.find_problems(
            evaluate.EvalConfig("m", benchmark=str(mine), oracle=oracle)
        )
        rows = attempt_rows(problems, in_order(programs), executor.run_many, 4)
        assert [row["status"] for row in rows] == ["failed", "error", "failed", "failed"][:count]
        assert rows[2]["code"] == third  # as it was written
        told = json.dumps([[row["prompt"], row["feedback"]] for row in rows])
        assert "f(1) returned 0, expected 1" in told
        assert ("f(76543) returned 76543, expected 98765" in told) == ("76543" in told) == oracle
        assert f"feedback: {kind} 1" in table(evaluate.summarise(problems, rows, 4))


WORDS = st.lists(st.sampled_from(list(WORTH)), min_size=4, max_size=4)


@settings(max_examples=50)
@given(st.lists(WORDS, min_size=1, max_size=6), st.integers(1, 4))
def test_iter_k_never_falls_and_a_naive_loop_agrees(scripts, iterations):
    summary = summary_of({str(i): line for i, line in enumerate(scripts)}, iterations)
    solved = [0] * iterations  # how many chains are solved at each turn
    for line in scripts:
        for turn, word in enumerate(line[:iterations]):
            reward, public_passed = WORTH[word]
            solved[turn] += reward == 1
            if reward == 1 or public_passed:
                break
    shares = [count / len(scripts) for count in itertools.accumulate(solved)]
    got = values(summary["Iter-k"])
    assert got == pytest.approx(shares) and got == sorted(got)
    assert all(s["low"] <= s["value"] <= s["high"] for s in summary["Iter-k"]["all"])


def test_samples_are_independent_chains_and_the_control_has_as_many_attempts():
    # Two chains of p and two of q: their first turns, then the second ones of the three failures.
    sample = in_order(["wrong", "wrong", "right", "wrong"] + ["right", "wrong", "overfit"])
    control = in_order(["wrong", "wrong", "right", "wrong"] + ["wrong"] * 4)
    problems = [problem("p"), problem("q")]
    summary = evaluate.evaluate(problems, sample, execute, 2, samples=2, control=control)
    p, q = summary["problems"].values()
    assert [p["chain"], q["chain"]] == [[2, None], [1, None]]
    assert values(summary["Iter-k"]) == [0.25, 0.5]
    first = summary["Iter-k"]["all"][0]
    assert (first["low"], first["high"]) == (0.0, 0.5)  # of the means of two problems
    assert p["control"] == [None, None, 1, None]  # 2 samples * 2 iterations
    assert values(summary["pass@k"]) == [pass_at_k(4, 1, 1) / 2, pass_at_k(4, 1, 2) / 2]
    assert summary["control"]["attempts"] == 8 and "pass@k" in table(summary)
    for call in control.call_args_list:
        assert all(len(prompt) == 1 for prompt in call.args[0])  # it never sees feedback


def test_a_summary_counts_attempts_and_groups_problems_by_difficulty():
    # Attempts: three at e, one at h, two at m (without public tests all tests count), none at long.
    problems = [problem("e", difficulty="easy"), problem("h", difficulty="hard")]
    problems += [problem("m", (), "medium"), problem("long", difficulty="hard")]
    script = {"e": ["wrong", "wrong", "wrong2"], "h": ["wrong", None], "m": ["lucky", "right"]}
    script["long"] = [None]
    summary = evaluate.evaluate(problems, scripted(script), execute, 3)
    groups = {name: scores[0]["n"] for name, scores in summary["Iter-k"].items()}
    assert groups == {"easy": 1, "medium": 1, "hard": 2, "all": 4}
    assert summary["feedback"] == {"public": 3, "oracle": 1}
    expected = {"attempts": 6, "repeated": 1, "truncated": 0, "too long": 2}
    expected |= {"public only": 0, "tokens": 6 * 3, "passed": 2, "failed": 4}
    assert summary["chain"] == expected
    assert values(summary["Iter-k"])[2] == 0.25  # a prompt that is too long is an unsolved problem


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The executor's check of itself takes seconds, and has tests of its own."""
    monkeypatch.setattr(executor, "self_check", lambda: None)


def command(model, output, *more):
    sizes = ["--limit=5", "--iterations=2", "--chunk=2"]
    return [f"--model={model}", f"--output={output}", *sizes, *map(str, more)]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shared_by_two_processes_is_one_whole_run(base, tmp_path, capsys, monkeypatch):
    more = ("--samples", "2", "--control")
    evaluate.main(command(base, tmp_path / "whole", *more))
    out = capsys.readouterr().out
    for text in ("temperature 1.0", "max_new_tokens 16", "2 of 5 problems", "5 of 5", "pass@k"):
        assert text in out
    whole = files(tmp_path / "whole")
    assert set(whole) == {"settings.json", "samples.jsonl", "result.json"}
    result = json.loads(whole["result.json"])
    assert result["chain"]["attempts"] >= 10 and result["control"]["attempts"] == 20
    assert result["settings"] == json.loads(whole["settings.json"])

    arguments = command(base, tmp_path / "parts", *more)
    work = Mock(wraps=attempt_rows, side_effect=[DEFAULT, SystemExit(130)])  # Ctrl-C in chunk 2
    monkeypatch.setattr(evaluate, "attempt_rows", work)
    with pytest.raises(SystemExit, match="130"):
        evaluate.main(arguments)
    rows = files(tmp_path / "parts")["samples.jsonl"]
    assert whole["samples.jsonl"].startswith(rows) and rows.count(b"\n") >= 12

    finish(start(2, evaluate.main, arguments))  # two processes go on with what one began
    assert files(tmp_path / "parts") == whole

    evaluate.main(arguments)  # and one that is finished is only shown
    assert work.call_count == 2 and files(tmp_path / "parts") == whole


def refused(sentence, arguments):
    with pytest.raises(SystemExit) as stop:
        evaluate.main(arguments)
    text = str(stop.value.code)
    assert text.startswith("evaluate.py: ") and sentence in text and "\n" not in text


def test_a_folder_with_other_settings_or_a_damaged_file_is_refused(base, tmp_path):
    row = {"id": "p", "prompt": "Write f.", "tests": ["assert f(1) == 1"]}
    mine, out, model = tmp_path / "p.jsonl", tmp_path / "out", tmp_path / "model"
    mine.write_text(json.dumps(row))
    shutil.copytree(base, model)
    arguments = command(model, out, "--benchmark", mine, "--max-new-tokens", "8")
    evaluate.main(arguments)
    assert json.loads((out / "settings.json").read_text())["temperature"] == 1  # a tiny model
    refused("other settings: chunk (2 there, 3 now)", [*arguments, "--chunk", "3"])

    half = (out / "samples.jsonl").read_text()[:-25]
    for text in (half, "[1]", '{"task_id": "x"}', '{"task_id": "p", "kind": "chain"}', "[" * 9999):
        (out / "samples.jsonl").write_text(text)
        refused("samples.jsonl is damaged (", arguments)
    mine.write_text(json.dumps(row | {"tests": ["assert f(1) == 2"]}))
    other = toy.make_model(len(toy.make_tokenizer()), seed=1)
    other.save_pretrained(model)  # under the same name
    refused("other settings: weights (", arguments)
    refused("now), problems (", arguments)

    (out / "settings.json").write_text('{"seed": 0}')  # of something else
    refused("other settings: model (None there, ", arguments)
    (out / "settings.json").write_text("[1]")
    refused("out holds no evaluation: name a new --output", arguments)
    for inside in (mine, mine / "sub"):
        refused(f"{inside} cannot be used: {mine} is no folder to write", command(model, inside))


@pytest.mark.parametrize(
    "mistake, sentence",
    [
        ("--model=", "--model is missing"),
        ("--model=no/such/model --benchmark=humanevil", "no folder with a config.json"),
        ("--benchmark=no_such_file.jsonl", "no_such_file.jsonl is neither a file nor a known set"),
        ("--iterations=0", "--iterations must be from 1 to 1000000000, got 0"),
        ("--temperature=nan", "--temperature must be from 0 to"),
        ("--samples=4 --temperature=0", "greedy chains are all equal"),
        ("--seed=4 --temperature=0", "--seed has no effect"),
        ("--version=v6", "no effect in a toy world"),
        ("--oracle", "no effect in a toy world"),
        ("--max-new-tokens=300", "the model's context holds 256"),
    ],
)
def test_a_mistake_costs_a_sentence_and_leaves_no_folder(mistake, sentence, base, tmp_path):
    refused(sentence, command(base, tmp_path / "out", *mistake.split()))
    assert not (tmp_path / "out").exists()


def test_the_control_of_greedy_chains_is_sampled(base):
    greedy = evaluate.EvalConfig(base, temperature=0.0, control=True)
    sample, control = evaluate.load_samplers(greedy, evaluate.find_problems(greedy))
    assert (sample.temperature, control.temperature) == (0, 0.8)
