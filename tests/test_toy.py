"""toy.py: the worlds are what their docstrings say, and every text of theirs survives the tiny tokenizer."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import executor
import toy
from tree import encode, load_model


@pytest.mark.parametrize("world", toy.WORLDS)
def test_references_pass_and_the_demonstrations_feedback_is_the_executors(world):
    rng, jobs, said = random.Random(1), [], []
    for i in range(60):
        (problem,) = toy.problems(world, "train", 1, i)
        program = rng.choice(list(toy.VALUES)) if world == "doctest" else f"x < {rng.randint(1, 16)}"
        jobs += [(problem, problem.reference), (problem, toy.DEF + program)]
        said += ["", toy.feedback_on(problem, program)]
    for result, feedback in zip(executor.run_many(jobs, max_failures=1), said, strict=True):
        assert result.feedback == (feedback or "All tests passed.")
        assert (result.reward == 1.0) == (feedback == "")
    assert "" in said and any(said)


def test_doctest_problems_show_one_of_their_six_tests_and_splits_share_no_program_and_example():
    seen = {}
    for split in ("train", "test"):
        listed = toy.problems("doctest", split, 400, 7)
        for problem in listed:
            xs = [x for [x], _ in problem.tests]
            assert len(set(xs)) == 6 and f">>> f({xs[0]})\n{problem.tests[0][1]}\n" in problem.prompt
        seen[split] = {(p.reference, p.tests[0][0][0], p.tests[1][0][0] if p.difficulty == "easy" else None) for p in listed}
        assert {p.difficulty for p in listed} == set(toy.LEVELS)
    assert not seen["train"] & seen["test"]


def test_a_vague_docstring_leaves_a_choice_that_only_feedback_can_settle():
    """For most medium and hard problems several programs behind the docstring agree with the example."""
    open_choices = []
    for problem in toy.problems("doctest", "train", 200, 3):
        listed = toy.PROGRAMS[problem.difficulty][problem.prompt.split("\n")[0].removeprefix("# ")]
        [x], y = problem.tests[0]
        agree = sum(toy.VALUES[program][x] == y for program in listed)
        if problem.difficulty == "easy":
            assert agree == 1
        else:
            open_choices.append(agree > 1)
    assert sum(open_choices) > 0.8 * len(open_choices)


@pytest.mark.parametrize("k", range(1, 17))
def test_cutoff_feedback_says_too_low_or_too_high_next_to_the_guess(k):
    problem = toy.cutoff_problem(k)
    results = executor.run_many([(problem, f"{toy.DEF}x < {guess}") for guess in range(1, 17)])
    for guess, result in enumerate(results, 1):
        assert result.total == 1 and result.reward == (guess == k)  # all or nothing
        if guess != k:
            near = guess - 1 if guess > k else guess
            assert result.feedback == f"Test 1 failed: f({near}) returned {guess > k}, expected {guess < k}"


def test_cutoff_cannot_be_passed_by_a_program_that_is_right_only_next_to_its_guess():
    problem = toy.cutoff_problem(5)
    lazy = "def f(x): return x < 5 if x in (4, 5) else x < 9"
    assert executor.run(problem, lazy).reward == 0.0


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(toy.WORLDS), st.integers(0, 10**9))
def test_every_demonstration_is_spelt_exactly_and_imitates_a_consistent_chat(world, seed):
    tokenizer = toy.make_tokenizer()
    messages, program = toy.demonstration(world, random.Random(seed))
    ids = encode(tokenizer, messages)
    answer = tokenizer(program, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids + answer and tokenizer.decode(answer) == program
    assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
    for attempt, reply in zip(messages[1::2], messages[2::2], strict=True):
        assert attempt["content"].startswith(toy.DEF) and "Test " in reply["content"]
    if world == "cutoff":  # the imitated guess is one that the feedback leaves open
        low, high = 1, 16
        for attempt, reply in zip(messages[1::2], messages[2::2], strict=True):
            guess = int(attempt["content"].split()[-1])
            too_low = "expected True" in reply["content"]
            low, high = (max(low, guess + 1), high) if too_low else (low, min(high, guess - 1))
        assert low <= int(program.split()[-1]) <= high


def test_the_demonstrator_repeats_itself_as_often_as_the_docstring_says():
    rng, repeats, later = random.Random(0), 0, 0
    for _ in range(3000):
        messages, program = toy.demonstration("doctest", rng)
        if len(messages) > 1:
            later += 1
            repeats += program == messages[-2]["content"]
    assert 0.45 < later / 3000 < 0.55 and 0.45 < repeats / later < 0.60


def test_unknown_text_is_unknown_not_lost():
    tokenizer = toy.make_tokenizer()
    assert tokenizer.unk_token_id in encode(tokenizer, [{"role": "user", "content": "# clamp x\nSyntaxError: invalid \ud7ff"}])


def test_base_model_is_made_once_loads_and_depends_on_its_seed(tmp_path):
    path = toy.base_model("doctest", 0, tmp_path, steps=3, batch=4)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert toy.base_model("doctest", 0, tmp_path, steps=3, batch=4) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    model, tokenizer = load_model(str(path), torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) < 150_000
    other, _ = load_model(str(toy.base_model("doctest", 1, tmp_path, steps=3, batch=4)), torch.device("cpu"))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in tmp_path.glob("base-*[0-9a-f]"))  # nothing half-made


def test_an_unknown_world_is_named():
    with pytest.raises(ValueError, match="unknown toy world 'maze': expected one of doctest, cutoff"):
        toy.problems("maze")
