"""The settings of a training run, and how a dataclass of settings becomes a command line.

    Config               all settings of murphy.py, with their defaults and where they come from
    option               a field of such a dataclass, with its help
    at_least             refuses a value that is out of bounds, by the name of its option
    parse                the options that were given on the command line

Needs support/toy.py for the names of the toy worlds. evaluate.py has settings of its own.
"""

import argparse
import types
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args, get_origin

from support import toy

HUGE = 10**9  # no setting has a use for more


def option(default: Any, help: str, group: str = "options") -> Any:
    """A field of a settings dataclass, with its help text and the heading it stands under."""
    return field(default=default, metadata={"help": help, "group": group})


def flag(name: str) -> str:
    """The command-line name of a setting.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.replace("_", "-")


def at_least(settings: Any, **least: float) -> None:
    """ValueError if a setting is below its least value, or absurdly large.

    None is fine. The error names the option.
    """
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not low <= value <= HUGE:  # this refuses NaN, too
            bound = "above 0" if 0 < low < 1e-3 else f"at least {low}"
            if value > HUGE:
                bound = f"at most {HUGE}"
            raise ValueError(f"{flag(name)} must be {bound}, got {value}")


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line in place of argparse's whole usage text."""
        self.exit(2, f"{self.prog}: {message}. --help lists the options.\n")


def parse(kind: type, arguments: list[str] | None, description: str) -> dict[str, Any]:
    """The options that were given on the command line, and no others.

    kind: a dataclass whose fields are `option`s. A wrong option ends the program with one line and
    exit status 2.
    """
    parser = OneLineParser(
        usage="%(prog)s [options]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what was not given is not in the answer
        allow_abbrev=False,
    )
    headings: dict[str, Any] = {}
    for setting in fields(kind):
        heading = setting.metadata["group"]
        if heading not in headings:
            headings[heading] = parser.add_argument_group(heading)
        text = setting.metadata["help"].replace("%", "%%")
        if setting.default not in (None, ""):
            text += f" (default: {setting.default})"
        if setting.name in getattr(kind, "fitting", {}):
            with_toy, with_real = kind.fitting[setting.name]
            text += f" (default: {with_toy} with a toy model, else {with_real})"
        how = reader(setting.type)
        headings[heading].add_argument(flag(setting.name), dest=setting.name, help=text, **how)
    return vars(parser.parse_args(arguments))


def reader(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type: int, float, str, bool, Literal, or `int | None`."""
    if isinstance(kind, types.UnionType):
        kind = get_args(kind)[0]  # `int | None`: None means that the option is not given
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind, "metavar": kind.__name__.upper()}


# `method(...)` is a field under the heading "method" of --help; the others likewise.
method = partial(option, group="method")
material = partial(option, group="model and problems")
sampling = partial(option, group="sampling and executing")
updating = partial(option, group="update")
running = partial(option, group="run")

# What None stands for in these settings: (with the tiny model of a toy world, with any other).
FITTING = {
    "problems_per_step": (8, 4),
    "steps": (150, 250),
    "temperature": (1.0, 1.0),
    "max_new_tokens": (16, 1024),
    "feedback_tests": (1, 3),
    "learning_rate": (6e-4, 1e-6),
    "micro_tokens": (1024, 16_384),
    "eval_temperature": (1.0, 0.7),
}


@dataclass
class Config:
    """Settings of a run. [paper], [reported] and [ours] say where a default comes from.

    None: the value of FITTING; for others see their help.
    """

    fitting = FITTING  # no field: it has no annotation; `parse` shows it in --help

    turns: int = method(2, "S: attempts on a path of the tree; 1 is GRPO [paper: 2]")
    group_size: int = method(8, "G: completions sampled from one prompt [reported: 8]")
    credit: Literal["mars", "mers", "none"] = method(
        "mars",
        "mars: best reward below [paper]; mers: discounted mean [reported]; none: own reward",
    )
    gamma: float | None = method(None, "gamma: discount of MERS; none: 1 [ours]")
    inter_budget: int | None = method(None, "InterP: groups kept per tree [reported]; none: all")
    intra_budget: int | None = method(None, "IntraP: attempts kept per group [reported]; none: all")
    scale_advantages: bool = method(True, "divide by the group's std; without: Dr. GRPO")

    model: str = material("", "folder or Hugging Face id of a chat model; empty: a tiny one")
    problems: str = material("doctest", "toy world doctest or cutoff, a known set, or a file")
    limit: int | None = material(None, "use a seeded sample of so many problems; none: all")
    eval_problems: str = material("", "held-out set; empty: part of the problems is held out")
    eval_count: int | None = material(
        None, "none: toy 120, else a tenth (at most 100), or all of --eval-problems"
    )

    problems_per_step: int | None = sampling(None, "rollout trees per step [ours]")
    temperature: float | None = sampling(None, "of sampling, and of the log-probabilities")
    max_new_tokens: int | None = sampling(None, "longest completion; a longer one is truncated")
    sample_tokens: int = sampling(65_536, "tokens of one batch that is sampled; memory decides")
    enable_thinking: bool = sampling(False, "ask the chat template for the thinking mode")
    feedback_tests: int | None = sampling(None, "failing tests that the feedback names [ours]")
    timeout: float = sampling(4.0, "CPU seconds of a program on its tests [ours]")

    steps: int | None = updating(None, "steps of the run [ours]")
    learning_rate: float | None = updating(None, "AdamW's highest rate [ours]")
    warmup: int = updating(5, "steps of linear warm-up; then linear decay to a fifth [ours]")
    minibatches: int = updating(2, "optimizer steps per step; with 1 nothing is ever clipped")
    micro_tokens: int | None = updating(None, "tokens of one forward and backward; memory decides")
    clip_low: float = updating(0.2, "epsilon below [paper: GRPO]")
    clip_high: float = updating(0.2, "epsilon above [paper: GRPO]")
    beta: float = updating(0.0, "weight of the KL to the first model; 0: no reference [ours]")
    loss_norm: Literal["sequence", "token", "constant"] = updating(
        "sequence", "what the loss is a mean over [paper: GRPO's]"
    )
    mask_truncated: bool = updating(False, "leave truncated completions out of the loss [ours]")
    grad_clip: float = updating(1.0, "largest gradient norm [ours]")
    gradient_checkpointing: bool = updating(False, "less memory, a third more time")

    eval_every: int = running(75, "steps between evaluations; 0: only the first and the last")
    eval_iterations: int = running(5, "k of Iter-1..k [paper: 5]")
    eval_temperature: float | None = running(None, "temperature of evaluation; 0 is greedy")
    log_trees_every: int = running(10, "steps between trees in trees.jsonl; 0: never")
    save_every: int = running(25, "steps between checkpoints; 0: only at the end and at a signal")
    output: str = running("", "output folder; empty: a new one under runs/")
    resume: bool = running(False, "go on with the run in --output, with its settings")
    device: str = running("auto", "auto, cpu, cuda, mps")
    seed: int = running(0, "seed of everything random")

    def __post_init__(self) -> None:
        """Put the value that fits in place of None, and refuse what is out of bounds."""
        for setting in fields(self):  # a settings.json may hold anything
            if setting.type is str and not isinstance(getattr(self, setting.name), str):
                raise TypeError(f"{flag(setting.name)} must be a text")
        for name, (with_toy, with_real) in FITTING.items():
            if getattr(self, name) is None:
                setattr(self, name, with_real if self.model else with_toy)
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
