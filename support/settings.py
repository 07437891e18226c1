"""All settings, and how a dataclass of settings becomes a command line.

    Config               the settings of murphy.py, with their defaults and where they come from
    EvalConfig           those of evaluate.py
    parse                a command line as one of these

Needs transformers, which makes the command line out of a dataclass, and support/toy.py.
"""

from argparse import (
    Action,
    ArgumentDefaultsHelpFormatter,
    BooleanOptionalAction,
    RawDescriptionHelpFormatter,
)
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser

from support import toy
from support.run import read_settings

HUGE = 10**9  # no setting has a use for more


def option(default: Any, help: str) -> Any:
    """A field of a settings dataclass, with its help text."""
    return field(default=default, metadata={"help": help})


def flag(name: str) -> str:
    """The command-line name of a setting.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.replace("_", "-")


def at_least(settings: Any, **least: float) -> None:
    """ValueError if a setting is below its least value, or absurdly large.

    None is fine. The error names the option. A least value below 0.001 stands for "above 0".
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= HUGE:  # this refuses NaN, too
            bound = "above 0" if 0 < low < 1e-3 else f"at least {low}"
            if value > HUGE:
                bound = f"at most {HUGE}"
            raise ValueError(f"{flag(name)} must be {bound}, got {value}")


class Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """--help shows the defaults, if there are any, and the description as it was written."""

    def _get_help_string(self, action: Action) -> str | None:
        return action.help if action.default in (None, "") else super()._get_help_string(action)


class OneLineParser(HfArgumentParser):
    def add_argument(self, *names: str, **how: Any) -> Any:
        """Only --group-size, not also --group_size; a flag is switched off by --no-FLAG."""
        if how.get("action") == "store_false":
            return None  # a --no-FLAG of HfArgumentParser, which makes one for some flags only
        if how.get("nargs") == "?":
            how = {"action": BooleanOptionalAction, "default": how["default"], "help": how["help"]}
        hyphened = [name for name in names if "_" not in name]
        return super().add_argument(*hyphened, **how)

    def error(self, message: str) -> Any:
        """One line in place of argparse's whole usage text."""
        self.exit(2, f"{self.prog}: {message}. --help lists the options.\n")


def parse(kind: type, arguments: list[str] | None, description: str) -> Any:
    """The settings that a command line asks for, an object of the dataclass `kind`.

    --resume takes what is not given from the run in --output. A wrong option ends the program with
    one line and exit status 2. ValueError: the values cannot work.
    """
    parser = OneLineParser(
        kind,
        usage="%(prog)s [options]",
        description=description,
        formatter_class=Help,
        allow_abbrev=False,
    )
    given = parser.parse_args(arguments)  # refuses wrong options, and tells of --resume
    if getattr(given, "resume", False):
        parser.set_defaults(**read_settings(given.output))  # what is given now still wins
    strange = ValueError("--resume: settings.json in --output is not of this program")
    try:
        settings, *unknown = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except TypeError:  # a setting in it has a value of the wrong type
        raise strange from None
    if unknown:  # a name in it is no setting
        raise strange
    return settings


def fill_in(settings: Any, fitting: dict[str, Any]) -> None:
    """Put the values that fit in place of None."""
    for name, value in fitting.items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)


# What None stands for in these settings: (with the tiny model of a toy world, with any other).
FITTING = {
    "problems_per_step": (8, 4),
    "steps": (150, 250),
    "max_new_tokens": (16, 1024),
    "feedback_tests": (1, 3),
    "learning_rate": (6e-4, 1e-6),
    "micro_tokens": (1024, 16_384),
    "eval_temperature": (1.0, 0.7),
}


@dataclass
class Config:
    """Settings of a run. [paper], [reported] and [ours] say where a default comes from.

    None: see the help of the setting.
    """

    # The method
    turns: int = option(2, "S: attempts on a path of the tree; 1 is GRPO [paper: 2]")
    group_size: int = option(8, "G: completions sampled from one prompt [reported: 8]")
    credit: Literal["mars", "mers", "none"] = option(
        "mars", "mars: best below [paper]; mers: discounted mean [reported]; none: own reward"
    )
    gamma: float | None = option(None, "gamma: discount of MERS; not given: 1 [ours]")
    inter_budget: int | None = option(
        None, "InterP: groups kept per tree; not given: all [reported]"
    )
    intra_budget: int | None = option(
        None, "IntraP: attempts kept per group; not given: all [reported]"
    )
    scale_advantages: bool = option(True, "divide by the group's std; without: Dr. GRPO")

    # Model and problems
    model: str = option("", "folder or Hugging Face id of a chat model; empty: a tiny one")
    problems: str = option("doctest", "toy world doctest or cutoff, a known set, or a file")
    limit: int | None = option(None, "use a seeded sample of so many problems; not given: all")
    eval_problems: str = option("", "held-out set; empty: part of the problems is held out")
    eval_count: int | None = option(None, "not given: toy 120, else a tenth (<= 100) or all")

    # Sampling and executing
    problems_per_step: int | None = option(None, "trees per step (tiny model 8, else 4) [ours]")
    temperature: float = option(1.0, "of sampling, and of the log-probabilities")
    max_new_tokens: int | None = option(None, "longest completion (tiny model 16, else 1024)")
    sample_tokens: int = option(65_536, "tokens of one batch that is sampled; memory decides")
    enable_thinking: bool = option(False, "ask the chat template for the thinking mode")
    feedback_tests: int | None = option(None, "failures named (tiny model 1, else 3) [ours]")
    timeout: float = option(4.0, "CPU seconds of a program on its tests [ours]")

    # The update
    steps: int | None = option(None, "steps of the run (tiny model 150, else 250) [ours]")
    learning_rate: float | None = option(None, "AdamW's rate (tiny model 6e-4, else 1e-6) [ours]")
    warmup: int = option(5, "steps of linear warm-up; then linear decay to a fifth [ours]")
    minibatches: int = option(2, "optimizer steps per step; with 1 nothing is ever clipped")
    micro_tokens: int | None = option(None, "tokens of a forward (tiny model 1024, else 16384)")
    clip_low: float = option(0.2, "epsilon below [paper: GRPO]")
    clip_high: float = option(0.2, "epsilon above [paper: GRPO]")
    beta: float = option(0.0, "weight of the KL to the first model; 0: no reference [ours]")
    loss_norm: Literal["sequence", "token", "constant"] = option(
        "sequence", "what the loss is a mean over [paper: GRPO]"
    )
    mask_truncated: bool = option(False, "leave truncated completions out of the loss [ours]")
    grad_clip: float = option(1.0, "largest gradient norm [ours]")
    gradient_checkpointing: bool = option(False, "less memory, a third more time")

    # The run
    eval_every: int = option(75, "steps between evaluations; 0: only the first and the last")
    eval_iterations: int = option(5, "k of Iter-1..k [paper: 5]")
    eval_temperature: float | None = option(None, "0: greedy (tiny model 1.0, else 0.7)")
    log_trees_every: int = option(10, "steps between trees in trees.jsonl; 0: never")
    save_every: int = option(25, "steps between checkpoints; 0: at evaluations and signals")
    output: str = option("", "output folder; empty: a new one under runs/")
    resume: bool = option(False, "go on with the run in --output, with its settings")
    device: str = option("auto", "auto, cpu, cuda, mps")
    seed: int = option(0, "seed of everything random")

    def __post_init__(self) -> None:
        """Put the value that fits in place of None, and refuse what is out of bounds."""
        for setting in fields(self):  # a settings.json may hold anything
            if setting.type is str and not isinstance(getattr(self, setting.name), str):
                raise TypeError(f"{flag(setting.name)} must be a text")
        place = 1 if self.model else 0
        fill_in(self, {name: values[place] for name, values in FITTING.items()})
        at_least(self, turns=1, group_size=2, inter_budget=1, intra_budget=2, limit=1, eval_count=1)
        at_least(self, problems_per_step=1, temperature=1e-3, max_new_tokens=1, sample_tokens=1)
        at_least(self, feedback_tests=1, timeout=1e-3, steps=0, learning_rate=1e-12, warmup=0)
        at_least(self, minibatches=1, micro_tokens=1, clip_high=0, beta=0, grad_clip=1e-6)
        at_least(self, eval_every=0, eval_iterations=1, eval_temperature=0, log_trees_every=0)
        at_least(self, save_every=0, seed=-HUGE)
        if self.credit == "mers" and self.gamma is None:
            self.gamma = 1.0
        self.refuse_contradictions()

    def refuse_contradictions(self) -> None:
        """ValueError for settings that cannot work, or have no effect, with the others."""
        is_toy = self.problems in toy.WORLDS
        if self.credit != "mers" and self.gamma is not None:
            raise ValueError(f"--gamma has no effect with --credit {self.credit}: mers reads it")
        if self.gamma is not None and not 0 <= self.gamma <= 1:
            raise ValueError(f"--gamma must lie in [0, 1], got {self.gamma}")
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"--clip-low must lie in [0, 1], got {self.clip_low}")
        if self.intra_budget and self.intra_budget >= self.group_size:
            raise ValueError("--intra-budget must be below --group-size: else it has no effect")
        for name in ("limit", "eval_problems"):
            if is_toy and getattr(self, name):
                raise ValueError(f"{flag(name)} has no effect with the toy world {self.problems}")
        if not self.model and not is_toy:
            worlds = " and ".join(toy.WORLDS)
            raise ValueError(
                f"--model is missing: only {worlds} bring one, --problems {self.problems} does not"
            )


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
    limit: int | None = option(None, "only the first N problems (toy worlds: 200)")
    oracle: bool = option(False, "all tests give feedback, not the public ones only")
    iterations: int = option(5, "attempts in a chain at most: the k of Iter-k")
    samples: int = option(1, "independent chains per problem")
    control: bool = option(False, "also pass@k: as many first attempts (greedy: at 0.8)")
    temperature: float | None = option(None, "0: greedy (toy worlds: 1, else 0)")
    max_new_tokens: int | None = option(None, "per answer (toy worlds: 16, else 1024)")
    sample_tokens: int = option(32_768, "per batch: fewer need less memory")
    seed: int = option(0, "seed of the sampling")
    feedback_tests: int | None = option(None, "named by feedback (toy worlds: 1, else 3)")
    timeout: float = option(4.0, "CPU seconds that a program may use")
    chunk: int = option(16, "problems between two writes of samples.jsonl")
    output: str = option("", "folder; empty: runs/eval-MODEL-BENCHMARK")

    def __post_init__(self) -> None:
        """Fill in what was not given; refuse what cannot work or has no effect."""
        is_toy = self.benchmark in toy.WORLDS
        fitting = {"temperature": 0.0, "max_new_tokens": 1024, "feedback_tests": 3}
        if is_toy:
            fitting = {"temperature": 1.0, "max_new_tokens": 16, "feedback_tests": 1, "limit": 200}
        fill_in(self, fitting)
        if not self.output:
            self.output = f"runs/eval-{Path(self.model).name}-{Path(self.benchmark).stem}"
        at_least(self, iterations=1, samples=1, max_new_tokens=1, sample_tokens=1, limit=1)
        at_least(self, feedback_tests=1, chunk=1, temperature=0, timeout=1e-3)
        if not self.model:
            raise ValueError("--model is missing: give a folder or a Hugging Face id")
        if is_toy and (self.version or self.start_date or self.end_date or self.oracle):
            raise ValueError("--version, dates and --oracle have no effect in a toy world")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("greedy chains are all equal: --samples needs a --temperature above 0")
        if self.temperature == 0 and self.seed and not self.control:
            raise ValueError("--seed has no effect on greedy chains (--temperature 0)")
