"""A dataclass as a command line, and the settings of a run: what is refused, what help shows."""

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from support.settings import Config, option, parse


@dataclass
class Small:
    count: int = option(3, "how many", "numbers")
    rate: float | None = option(None, "how fast, in %", "numbers")
    loud: bool = option(True, "say more", "speech")
    word: Literal["yes", "no"] = option("yes", "what to say", "speech")


def test_only_what_was_given_is_answered_with_its_type():
    assert parse(Small, [], "") == {}
    given = ["--count", "5", "--rate=0.5", "--no-loud", "--word", "no"]
    assert parse(Small, given, "") == {"count": 5, "rate": 0.5, "loud": False, "word": "no"}


@pytest.mark.parametrize(
    "given, sentence",
    [
        (["--cout", "5"], "unrecognized arguments: --cout 5. --help lists the options."),
        (["--coun", "5"], "unrecognized arguments: --coun 5"),  # no guessing
        (["--count", "many"], "argument --count: invalid int value: 'many'"),
        (["--word", "maybe"], "invalid choice: 'maybe'"),
        (["--rate"], "expected one argument"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(capsys, given, sentence):
    with pytest.raises(SystemExit) as stopped:
        parse(Small, given, "")
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert sentence in said and said.count("\n") == 1


def test_help_groups_the_options_and_says_what_each_is(capsys):
    with pytest.raises(SystemExit):
        parse(Config, ["--help"], "What it is.")
    said = capsys.readouterr().out
    for heading in ("method:", "model and problems:", "sampling and executing:", "update:", "run:"):
        assert said.count(f"\n{heading}\n") == 1
    assert said.count("  --group-size ") == 1 and "(default: 8)" in said
    assert "(default: 0.0006 with a toy model, else 1e-06)" in " ".join(said.split())
    assert len(fields(Config)) <= 45
    for setting in fields(Config):
        assert len(setting.metadata["help"]) > 10, setting.name


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"turns": 0}, "--turns must be at least 1, got 0"),
        ({"group_size": 1}, "--group-size must be at least 2"),
        ({"learning_rate": float("nan")}, "--learning-rate must be above 0"),
        ({"credit": "mers", "gamma": 1.5}, r"--gamma must lie in \[0, 1\]"),
        ({"gamma": 0.9}, "--gamma has no effect with --credit mars"),
        ({"limit": 5}, "--limit has no effect with the toy world doctest"),
        ({"intra_budget": 8}, "--intra-budget must be below --group-size"),
        ({"eval_problems": "mbpp"}, "--eval-problems has no effect with the toy world doctest"),
        ({"seed": 2 * 10**9}, "--seed must be at most 1000000000, got 2000000000"),
        ({"temperature": 0.0}, "--temperature must be at least 0.001, got 0.0"),
        ({"inter_budget": 0}, "--inter-budget must be at least 1"),
        ({"intra_budget": 1}, "--intra-budget must be at least 2"),
        ({"clip_low": -0.1}, r"--clip-low must lie in \[0, 1\]"),
        ({"problems": "doctst"}, "--model is missing: only doctest and cutoff bring one"),
    ],
)
def test_settings_that_cannot_work_are_named(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**given)


def test_settings_fit_what_is_trained_unless_they_are_given():
    tiny, real = Config(), Config(model="some/model", problems="mbpp")
    assert (tiny.learning_rate, tiny.max_new_tokens, tiny.feedback_tests) == (6e-4, 16, 1)
    assert (real.learning_rate, real.max_new_tokens, real.feedback_tests) == (1e-6, 1024, 3)
    assert Config(model="some/model", learning_rate=3e-6).learning_rate == 3e-6
