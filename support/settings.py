"""All settings, and how a dataclass of settings becomes a command line.

    Config               the settings of murphy.py, with their defaults and where they come from
    EvalConfig           those of evaluate.py
    parse                a command line as one of these

Needs support/toy.py and support/run.py.
"""

import argparse
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from support import toy
from support.run import read_settings

HUGE = 10**9  # no setting has a use for more


def option(default: Any, help: str, low: Any = None, high: Any = HUGE, fits: Any = None) -> Any:
    """A field of a settings dataclass: its default, its help text, and the bounds of a number."""
    return field(default=default, metadata={"help": help, "bounds": (low, high), "fits": fits})


def fitting(tiny: float, other: float, help: str, low: float) -> Any:
    """An option whose default depends on the model. Until `complete` puts it in, it is None."""
    return option(None, f"{help} (tiny model {tiny:g}, else {other:g})", low, fits=(tiny, other))


def flag(name: str) -> str:
    """The command-line name of a setting.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.replace("_", "-")


def complete(settings: Any, is_tiny: bool) -> None:
    """Put in the defaults that fit the model. ValueError: an option is out of its bounds."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        if value is None and setting.metadata["fits"]:
            tiny, other = setting.metadata["fits"]
            value = tiny if is_tiny else other
            setattr(settings, setting.name, value)
        if setting.type is str and not isinstance(value, str):
            raise TypeError(f"{flag(setting.name)} must be a text")  # settings.json may hold 3
        low, high = setting.metadata["bounds"]
        if low is None or value is None:
            continue
        if not low <= value <= high:  # this refuses NaN, too
            raise ValueError(f"{flag(setting.name)} must be from {low} to {high}, got {value}")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help shows the defaults, if there are any, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "") else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Tells of a mistake in one line, in place of argparse's whole usage text."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}. --help lists the options.\n")


def parse(kind: type, arguments: list[str] | None, description: str) -> Any:
    """The settings that a command line asks for, an object of the dataclass `kind`.

    --resume takes what is not given from the run in --output. A wrong option ends the program with
    one line and exit status 2. ValueError: the values cannot work.
    """
    usage = "%(prog)s [options]"
    parser = Parser(usage=usage, description=description, formatter_class=Help, allow_abbrev=False)
    for setting in fields(kind):
        how = {"default": setting.default, "help": setting.metadata["help"]}
        types = get_args(setting.type) or [setting.type]
        if setting.type is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(setting.type) is Literal:
            how["choices"] = types
        else:
            how["type"] = types[0]  # of `int | None`: int
        parser.add_argument(flag(setting.name), **how)

    given = parser.parse_args(arguments)
    old = read_settings(given.output) if getattr(given, "resume", False) else {}
    parser.set_defaults(**old)
    given = parser.parse_args(arguments)  # what is given now still wins
    values = old | {setting.name: getattr(given, setting.name) for setting in fields(kind)}
    try:
        return kind(**values)
    except TypeError:  # an unknown setting, or a value of the wrong type
        raise ValueError("--resume: settings.json in --output is not of this program") from None


@dataclass
class Config:
    """Settings of a run. [paper], [reported] and [ours] say where a default comes from."""

    # The method
    turns: int = option(2, "S: attempts on a path of the tree; 1 is GRPO [paper: 2]", low=1)
    group_size: int = option(8, "G: completions sampled from one prompt [reported: 8]", low=2)
    credit: Literal["mars", "mers", "none"] = option(
        "mars", "mars: best below [paper]; mers: discounted mean [reported]; none: own reward"
    )
    gamma: float | None = option(None, "discount of MERS; not given: 1 [ours]", low=0, high=1)
    inter_budget: int | None = option(
        None, "InterP: groups kept per tree; not given: all [reported]", low=1
    )
    intra_budget: int | None = option(
        None, "IntraP: attempts kept per group; not given: all [reported]", low=2
    )
    scale_advantages: bool = option(True, "divide by the group's std; without: Dr. GRPO")

    # Model and problems
    model: str = option("", "folder or Hugging Face id of a chat model; empty: a tiny one")
    problems: str = option("doctest", "toy world doctest or cutoff, a known set, or a file")
    limit: int | None = option(None, "a seeded sample of so many problems; not given: all", low=1)
    eval_problems: str = option("", "held-out set; empty: part of the problems is held out")
    eval_count: int | None = option(None, "not given: toy 120, else a tenth (<= 100) or all", low=1)

    # Sampling and executing
    problems_per_step: int | None = fitting(8, 4, "trees per step [ours]", low=1)
    temperature: float = option(1.0, "of sampling, and of the log-probabilities", low=1e-3)
    max_new_tokens: int | None = fitting(16, 1024, "longest completion", low=1)
    sample_tokens: int = option(65_536, "tokens of one sampled batch; memory decides", low=1)
    enable_thinking: bool = option(False, "ask the chat template for the thinking mode")
    feedback_tests: int | None = fitting(1, 3, "failures named [ours]", low=1)
    timeout: float = option(4.0, "CPU seconds of a program on its tests [ours]", low=1e-3)

    # The update
    steps: int | None = fitting(150, 250, "steps of the run [ours]", low=0)
    learning_rate: float | None = fitting(6e-4, 1e-6, "AdamW's rate [ours]", low=1e-12)
    warmup: int = option(5, "steps of linear warm-up; then linear decay to a fifth [ours]", low=0)
    minibatches: int = option(2, "optimizer steps per step; with 1 nothing is ever clipped", low=1)
    micro_tokens: int | None = fitting(1024, 16_384, "tokens of a forward", low=1)
    clip_low: float = option(0.2, "epsilon below [paper: GRPO]", low=0, high=1)
    clip_high: float = option(0.2, "epsilon above [paper: GRPO]", low=0)
    beta: float = option(0.0, "weight of the KL to the first model; 0: no reference [ours]", low=0)
    loss_norm: Literal["sequence", "token", "constant"] = option(
        "sequence", "what the loss is a mean over [paper: GRPO]"
    )
    mask_truncated: bool = option(False, "leave truncated completions out of the loss [ours]")
    grad_clip: float = option(1.0, "largest gradient norm [ours]", low=1e-6)
    gradient_checkpointing: bool = option(False, "less memory, a third more time")

    # The run
    eval_every: int = option(75, "steps between evaluations; 0: only the first and the last", low=0)
    eval_iterations: int = option(5, "k of Iter-1..k [paper: 5]", low=1)
    eval_temperature: float | None = fitting(1.0, 0.7, "0: greedy", low=0)
    log_trees_every: int = option(10, "steps between trees in trees.jsonl; 0: never", low=0)
    save_every: int = option(25, "steps between checkpoints; 0: at evaluations and signals", low=0)
    output: str = option("", "output folder; empty: a new one under runs/")
    resume: bool = option(False, "go on with the run in --output, with its settings")
    device: str = option("auto", "auto, cpu, cuda, mps")
    seed: int = option(0, "seed of everything random", low=-HUGE)

    def __post_init__(self) -> None:
        """Put in what was not given, and refuse what cannot work."""
        complete(self, is_tiny=not self.model)
        if self.credit == "mers" and self.gamma is None:
            self.gamma = 1.0
        self.refuse_contradictions()

    def refuse_contradictions(self) -> None:
        """ValueError for settings that cannot work, or have no effect, with the others."""
        is_toy = self.problems in toy.WORLDS
        if self.credit != "mers" and self.gamma is not None:
            raise ValueError(f"--gamma has no effect with --credit {self.credit}: mers reads it")
        if self.intra_budget and self.intra_budget >= self.group_size:
            raise ValueError("--intra-budget must be below --group-size: else it has no effect")
        for name in ("limit", "eval_problems"):
            if is_toy and getattr(self, name):
                raise ValueError(f"{flag(name)} has no effect with the toy world {self.problems}")
        if not self.model and not is_toy:
            worlds = " and ".join(toy.WORLDS)
            raise ValueError(f"--model is missing: only {worlds} bring one, not {self.problems}")


FITTING = [setting.name for setting in fields(Config) if setting.metadata["fits"]]


def is_tiny(model: str) -> bool:
    """Whether a folder holds a tiny model of support/toy.py: no other has so short a context."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return config["max_position_embeddings"] <= 256
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass
class EvalConfig:
    """Settings of evaluate.py. In a folder all but device and output stay the same."""

    model: str = option("", "folder made by save_pretrained, or a Hugging Face id")
    enable_thinking: bool = option(False, "ask the chat template for thinking")
    device: str = option("auto", "auto, cpu, cuda, mps")
    benchmark: str = option("doctest", "doctest, cutoff, humaneval, ... or a file")
    version: str | None = option(None, "LiveCodeBench: v6 (that part), release_v6 (all up to it)")
    start_date: str | None = option(None, "LiveCodeBench: first contest date")
    end_date: str | None = option(None, "LiveCodeBench: last contest date, YYYY-MM-DD")
    limit: int | None = option(None, "only the first N problems (toy worlds: 200)", low=1)
    oracle: bool = option(False, "all tests give feedback, not the public ones only")
    iterations: int = option(5, "attempts in a chain at most: the k of Iter-k", low=1)
    samples: int = option(1, "independent chains per problem", low=1)
    control: bool = option(False, "also pass@k: as many first attempts (greedy: at 0.8)")
    temperature: float | None = fitting(1.0, 0.0, "0: greedy", low=0)
    max_new_tokens: int | None = fitting(16, 1024, "longest answer", low=1)
    sample_tokens: int = option(32_768, "per batch: fewer need less memory", low=1)
    seed: int = option(0, "seed of the sampling")
    feedback_tests: int | None = fitting(1, 3, "failures named", low=1)
    timeout: float = option(4.0, "CPU seconds that a program may use", low=1e-3)
    chunk: int = option(16, "problems between two writes of samples.jsonl", low=1)
    output: str = option("", "folder; empty: runs/eval-MODEL-BENCHMARK")

    def __post_init__(self) -> None:
        """Put in what was not given, and refuse what cannot work or has no effect."""
        complete(self, is_tiny=is_tiny(self.model))
        if not self.output:
            self.output = f"runs/eval-{Path(self.model).name}-{Path(self.benchmark).stem}"
        if not self.model:
            raise ValueError("--model is missing: give a folder or a Hugging Face id")
        is_toy = self.benchmark in toy.WORLDS
        if is_toy and (self.version or self.start_date or self.end_date or self.oracle):
            raise ValueError("--version, dates and --oracle have no effect in a toy world")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("greedy chains are all equal: --samples needs a --temperature above 0")
        if self.temperature == 0 and self.seed and not self.control:
            raise ValueError("--seed has no effect on greedy chains (--temperature 0)")
