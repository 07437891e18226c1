"""A dataclass as a command line, and the settings of a run: what is refused, what help shows."""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import pytest

from support.settings import Config, EvalConfig, option, parse


@dataclass
class Small:
    count_all: int = option(3, "how many")
    rate: float | None = option(None, "how fast")
    loud: bool = option(True, "say more")
    word: Literal["yes", "no"] = option("yes", "what to say")


def test_options_have_the_type_of_their_field_and_its_default():
    assert parse(Small, [], "") == Small()
    given = ["--count-all", "5", "--rate=0.5", "--no-loud", "--word", "no"]
    assert parse(Small, given, "") == Small(5, 0.5, False, "no")


@pytest.mark.parametrize(
    "given, sentence",
    [
        (["--cout", "5"], "unrecognized arguments: --cout 5. --help lists the options."),
        (["--count", "5"], "unrecognized arguments: --count 5"),  # no guessing
        (["--count-all", "many"], "argument --count-all: invalid int value: 'many'"),
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


def test_help_says_of_each_option_what_it_is_and_its_default(capsys):
    with pytest.raises(SystemExit):
        parse(Config, ["--help"], "What it\nis.")
    said = capsys.readouterr().out
    assert "What it\nis." in said and "--group_size" not in said
    assert said.count("  --group-size ") == 1 and "(default: 8)" in said and "--no-resume" in said
    assert len(fields(Config)) <= 45
    for setting in fields(Config):
        text = setting.metadata["help"]
        assert len(text) > 10, setting.name
    assert "AdamW's rate [ours] (tiny model 0.0006, else 1e-06)" in " ".join(said.split())


def test_a_resumed_run_takes_its_settings_and_what_is_given_now(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    file, given = folder / "settings.json", ["--output", str(folder), "--resume"]
    was = Config(credit="mers", turns=3, scale_advantages=False, output="elsewhere")
    file.write_text(json.dumps(asdict(was)))
    now = parse(Config, [*given, "--steps", "7"], "")
    assert now == replace(was, output=str(folder), resume=True, steps=7)
    assert now.gamma == 1.0
    for foreign in ({"turns": [2]}, {"benchmark": "doctest"}):
        file.write_text(json.dumps(foreign))
        with pytest.raises(ValueError, match="settings.json in --output is not of this program"):
            parse(Config, given, "")
    file.write_text(json.dumps({"steps": "many"}))
    with pytest.raises(SystemExit):
        parse(Config, given, "")


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"turns": 0}, "--turns must be from 1 to 1000000000, got 0"),
        ({"group_size": 1}, "--group-size must be from 2 to"),
        ({"learning_rate": float("nan")}, "--learning-rate must be from 1e-12 to"),
        ({"credit": "mers", "gamma": 1.5}, "--gamma must be from 0 to 1, got 1.5"),
        ({"gamma": 0.9}, "--gamma has no effect with --credit mars"),
        ({"limit": 5}, "--limit has no effect with the toy world doctest"),
        ({"intra_budget": 8}, "--intra-budget must be below --group-size"),
        ({"eval_problems": "mbpp"}, "--eval-problems has no effect with the toy world doctest"),
        ({"seed": 2 * 10**9}, "--seed must be .* to 1000000000, got 2000000000"),
        ({"temperature": 0.0}, "--temperature must be from 0.001 to .*, got 0.0"),
        ({"inter_budget": 0}, "--inter-budget must be from 1 to"),
        ({"intra_budget": 1}, "--intra-budget must be from 2 to"),
        ({"clip_low": -0.1}, "--clip-low must be from 0 to 1, got -0.1"),
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
    assert EvalConfig("some/model").max_new_tokens == 1024  # also in a toy world
