"""A dataclass as a command line: what was given, what is said of mistakes, what help shows."""

from dataclasses import dataclass
from typing import Literal

import pytest

from support.settings import Config, at_least, option, parse


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
    assert Small(**{"count": 9, **parse(Small, ["--rate", "1"], "")}).count == 9


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
    assert stopped.value.code == 2 and sentence in said and said.count("\n") == 1


def test_help_groups_the_options_and_names_each_once(capsys):
    with pytest.raises(SystemExit):
        parse(Config, ["--help"], "What it is.")
    said = capsys.readouterr().out
    for heading in ("method:", "model and problems:", "sampling and executing:", "update:", "run:"):
        assert said.count(f"\n{heading}\n") == 1
    assert said.count("  --group-size ") == 1 and "(default: 8)" in said
    assert "(default: 0.0006 with a toy model, else 1e-06)" in " ".join(said.split())


def test_bounds_name_the_option():
    at_least(Small(), count=3, rate=1)  # None is never refused
    with pytest.raises(ValueError, match="--count must be at least 4, got 3"):
        at_least(Small(), count=4)
