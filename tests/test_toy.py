"""toy.py: the worlds are as described, the tokenizer spells their texts, a killed base goes on."""

import random
from functools import partial
from itertools import product
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector

import executor
from support import toy
from support.sampling import encode, load_model


def programs_behind(problem):
    docstring = problem.prompt.split("\n")[0].removeprefix("# ")
    return toy.PROGRAMS[problem.difficulty][docstring]


def assert_executor_says(cases, **options):
    """A case: a problem, a program, and the feedback on it; "" if it passes."""
    results = executor.run_many([case[:2] for case in cases], **options)
    for result, (_, _, feedback) in zip(results, cases, strict=True):
        assert result.feedback == (feedback or "All tests passed.")
        assert (result.reward == 1.0) == (feedback == "")


def test_feedback_in_demonstrations_is_the_executors_and_references_pass():
    rng, cases = random.Random(1), []
    for problem in toy.problems("doctest", "train", 40):
        program = rng.choice(programs_behind(problem))
        cases.append((problem, problem.reference, ""))
        cases.append((problem, toy.DEF + program, toy.feedback_on(problem, program)))
    assert_executor_says(cases, feedback_tests=1)


def test_cutoff_feedback_says_too_low_or_too_high_next_to_the_guess():
    cases = []
    for k, guess in product((1, 5, 16), range(1, 17)):
        problem, near = toy.cutoff_problem(k), guess - 1 if guess > k else guess
        wrong = f"Test 1 failed: f({near}) returned {guess > k}, expected {guess < k}"
        cases.append((problem, f"{toy.DEF}x < {guess}", "" if guess == k else wrong))
        assert toy.feedback_on(problem, f"x < {guess}") == cases[-1][2]
        assert (cases[-1][1] == problem.reference) == (guess == k)
    assert_executor_says(cases)
    lazy = "def f(x): return x < 5 if x in (4, 5) else x < 9"  # right next to its guess alone
    (result,) = executor.run_many([(toy.cutoff_problem(5), lazy)])
    assert (result.total, result.reward) == (1, 0)


def test_doctest_problems_show_one_of_six_tests_and_the_splits_are_apart():
    seen = {"train": set(), "test": set()}
    for split, found in seen.items():
        for problem in toy.problems("doctest", split, 300, 7):
            xs = [x for [x], _ in problem.tests]
            assert len(set(xs)) == 6
            assert f">>> f({xs[0]})\n{problem.tests[0][1]}\n" in problem.prompt
            decides = 2 if problem.difficulty == "easy" else 1
            found.add((problem.reference, str(problem.tests[:decides])))
    assert not seen["train"] & seen["test"]


def test_a_vague_docstring_leaves_a_choice_that_only_feedback_can_settle():
    choices = {"easy": [], "medium": [], "hard": []}
    for problem in toy.problems("doctest", "train", 200, 3):
        [x], y = problem.tests[0]
        agree = [text for text in programs_behind(problem) if toy.values(text)[x] == y]
        choices[problem.difficulty].append(len(agree))
    harder = choices["medium"] + choices["hard"]
    assert set(choices["easy"]) == {1}
    assert sum(count > 1 for count in harder) > 0.8 * len(harder)


@settings(max_examples=30)
@given(st.sampled_from(toy.WORLDS), st.integers(0, 10**9))
def test_every_demonstration_is_spelt_exactly_and_imitates_a_consistent_chat(world, seed):
    tokenizer = toy.make_tokenizer()
    messages, program = toy.DEMONSTRATION[world](random.Random(seed))
    ids = encode(tokenizer, messages)
    answer = tokenizer(program, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids + answer
    assert tokenizer.decode(answer) == program
    assert world == "doctest" or 1 <= int(program.split()[-1]) <= 16
    for attempt, reply in zip(messages[1::2], messages[2::2], strict=True):
        assert attempt["content"].startswith(toy.DEF) and "Test " in reply["content"]
        if world == "cutoff":  # the imitated guess is one that the feedback leaves open
            problem = toy.cutoff_problem(int(program.split()[-1]))
            feedback = toy.feedback_on(problem, attempt["content"])
            assert feedback != "" and feedback in reply["content"]


def test_the_demonstrator_repeats_itself_as_often_as_its_docstring_says():
    rng = random.Random(0)
    chats = [toy.doctest_demonstration(rng) for _ in range(1500)]
    repeated = [program == chat[-2]["content"] for chat, program in chats if len(chat) > 1]
    assert 0.45 < len(repeated) / 1500 < 0.55  # half of all chats have a failed attempt
    assert 0.45 < sum(repeated) / len(repeated) < 0.60  # half repeat it; some draw it by chance


def test_text_that_the_tokenizer_does_not_know_becomes_unk_and_is_not_lost():
    tokenizer = toy.make_tokenizer()
    message = {"role": "user", "content": "# clamp x\nSyntaxError: invalid \ud7ff"}
    assert tokenizer.unk_token_id in encode(tokenizer, [message])


def weights(path):
    return parameters_to_vector(load_model(str(path), torch.device("cpu"))[0].parameters())


def test_a_base_model_is_made_once_and_depends_on_its_seed(tmp_path, monkeypatch, capsys):
    earlier = tmp_path / "base-cutoff-seed7-1500x64-ada03c44"  # of an earlier version of the code
    earlier.mkdir()
    assert toy.base_model("cutoff", 7, tmp_path) == earlier
    make = partial(toy.base_model, "doctest", folder=tmp_path, steps=2, batch=4)
    path = make(seed=0)
    assert "making a tiny model for world 'doctest'" in capsys.readouterr().out
    assert len(weights(path)) < 150_000
    assert set(tmp_path.iterdir()) == {earlier, path}  # nothing is left over
    assert not torch.equal(weights(path), weights(make(seed=1)))
    monkeypatch.setattr(toy, "warm_start", None)  # a second one would fail
    assert make(seed=0) == path


def test_a_warm_start_that_is_killed_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    make, threads = partial(toy.base_model, "cutoff", 0, steps=5, batch=4), []
    monkeypatch.setattr(toy, "SAVE_EVERY", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)  # seven would be slow
    whole = weights(make(tmp_path / "whole"))
    save = Mock(wraps=toy.save, side_effect=[DEFAULT, KeyboardInterrupt, DEFAULT])
    monkeypatch.setattr(toy, "save", save)
    with pytest.raises(KeyboardInterrupt):  # in the second save
        make(tmp_path / "killed")
    assert threads == [1, 7, 1]  # one is used, and the caller's come back
    assert [path.suffix for path in (tmp_path / "killed").iterdir()] == [".unfinished"]
    path = make(tmp_path / "killed")
    assert [call.args[1]["step"] for call in save.call_args_list] == [2, 4, 4]
    assert [*path.parent.iterdir()] == [path]
    assert torch.equal(weights(path), whole)


@pytest.mark.parametrize("arguments", [("maze",), ("doctest", "validation")])
def test_a_world_or_a_split_that_does_not_exist_is_named(arguments):
    with pytest.raises(ValueError, match=arguments[-1]):
        toy.problems(*arguments)
