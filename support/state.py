"""What the steps of a run share: problems, models, samplers, and how far the run has come.

    toy_data, listed_data    the problems of a run: for each step, and held out
    State                    made once; `checkpoint` writes it down, `go_on` brings it back

Needs torch, transformers and the files of support/.
"""

import copy
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

import executor
from support import ranks, toy
from support.packing import FASTEST
from support.problems import distinct, fingerprint, load_problems
from support.run import cut_log, json_lines, load, save, write
from support.sampling import Sampler, encode, load_model
from support.settings import flag
from tree import Node, first_messages, from_dict, to_dict

# What may be changed when a run goes on. Any other change would make it another run.
MAY_CHANGE = {"output", "resume", "device", "save_every", "eval_every", "log_trees_every", "steps"}
MAY_CHANGE |= {"micro_tokens", "sample_tokens", "gradient_checkpointing"}  # what memory asks for


class Data(NamedTuple):
    """The problems of a run."""

    problems_of: Callable[[int], list]  # the number of a step -> the problems that it trains on
    held_out: list  # evaluated; trained on only if --eval-problems names the same, or in "cutoff"
    training: list  # all that is trained on; for a toy world, which never ends, a sample of 1,000


def toy_data(config: Any) -> Data:
    """The problems of a toy world: new ones for each step."""

    def problems_of(step: int) -> list:
        seed = f"{config.seed}-{step}"
        return toy.problems(config.problems, "train", config.problems_per_step, seed)

    held_out = toy.problems(config.problems, "test", config.eval_count or 120, config.seed)
    return Data(problems_of, held_out, toy.problems(config.problems, "train", 1000, config.seed))


def listed_data(config: Any) -> Data:
    """The problems of a known set or a file: shuffled, and a part of them held out.

    Each epoch goes through all of them in a new order. ValueError: nothing is left to train on.
    """
    load_some = partial(load_problems, seed=config.seed, execute=executor.run_many)
    training = load_some(config.problems, limit=config.limit)
    random.Random(config.seed).shuffle(training)
    if config.eval_problems:
        held_out = load_some(config.eval_problems, limit=config.eval_count)
    else:
        count = config.eval_count or min(100, max(1, len(training) // 10))
        if len(training) <= count:
            raise ValueError(
                f"{config.problems} has {len(training)} problems and {count} are held out: nothing "
                "is left to train on; name --eval-problems (the same file will do)"
            )
        held_out, training = training[:count], training[count:]

    def problems_of(step: int) -> list:
        epoch, first = divmod(step * config.problems_per_step, len(training))
        upcoming = []
        while len(upcoming) < first + config.problems_per_step:  # the next epochs, too, if needed
            rng = random.Random(f"{config.seed} {epoch}")
            upcoming += rng.sample(training, len(training))
            epoch += 1
        return upcoming[first : first + config.problems_per_step]

    return Data(problems_of, held_out, training)


class State:
    """All that a run needs from one step to the next."""

    def __init__(self, config: Any, folder: Path, device: torch.device, data: Data) -> None:
        """Load the model and make what belongs to it. ValueError: no prompt fits the model, or
        the processes have loaded different problems."""
        self.config, self.folder = config, folder
        self.problems_of, self.held_out = data.problems_of, distinct(data.held_out)
        self.step = 0  # how many steps are made, so also the number of the next one
        self.evaluations: dict[int, dict] = {}  # after how many steps -> what was measured
        self.seconds: dict[str, float] = {}  # of the step that is made now, by phase
        self.warned = False  # whether the user knows that most completions are cut

        with ranks.rank_0_first():  # it makes the tiny model
            path = config.model or str(toy.base_model(config.problems, config.seed, folder.parent))
        attention = FASTEST.get(device.type, "sdpa")
        self.model, self.tokenizer = load_model(path, device, attention)

        self.sampling_model = ranks.sampling_copy(self.model)
        names = ("max_new_tokens", "temperature", "sample_tokens", "enable_thinking")
        options = {name: getattr(config, name) for name in names}
        self.sample = Sampler(self.sampling_model, self.tokenizer, **options)
        self.eval_sample = replace(self.sample, temperature=config.eval_temperature)
        check_fit(self.sample, data.training)
        workers = max(1, (os.cpu_count() or 1) // ranks.count())
        limits = {"feedback_tests": config.feedback_tests, "timeout": config.timeout}
        self.execute = partial(executor.run_many, workers=workers, **limits)

        self.reference = None  # the first model, for the KL
        if config.beta > 0:
            self.reference = ranks.shard(copy.deepcopy(self.model).requires_grad_(False))
        if config.gradient_checkpointing:
            recompute_layers(self.model)
        ranks.shard(self.model)  # only now: the copies above are made of whole weights
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0)
        # A checkpoint holds this, too: a run goes on only with the same settings and problems.
        data_number = fingerprint(data.training + self.held_out)
        if len(set(ranks.gather(data_number))) > 1:  # such as: a reference ran out of time in one
            raise ValueError("the processes have loaded different problems: start the run again")
        self.made_of = {"settings": asdict(config), "data": data_number}

    def seed(self) -> None:
        """Seed torch for the next step, by the run's seed, the step's number and the rank.

        So a checkpoint needs no random states, and a step that was left draws the same again.
        """
        name = f"{self.config.seed} {self.step} {ranks.rank()}"
        torch.manual_seed(zlib.crc32(name.encode()))

    def log(self, name: str, rows: list[dict]) -> None:
        """Add rows to a log of the run. The file is closed each time, so no row waits in memory."""
        if ranks.rank() == 0:
            with open(self.folder / name, "a", encoding="ascii") as file:
                file.write(json_lines(rows))

    def write(self, name: str, value: Any) -> None:
        """Replace a JSON file of the run at once: nobody ever sees a half of it."""
        if ranks.rank() == 0:
            write(self.folder / name, json.dumps(value, indent=1) + "\n")

    def checkpoint(self) -> None:
        """Replace the checkpoint by what the run is now."""
        state = ranks.training_state(self.model, self.optimizer) | self.made_of
        if ranks.rank() == 0:
            save(self.folder, state | {"step": self.step, "evaluations": self.evaluations})

    def go_on(self) -> None:
        """Continue from the checkpoint, if there is one. ValueError: it is of another run."""
        saved = load(self.folder)
        if saved is None:
            print(f"{self.folder} has no checkpoint yet: the run begins at step 1")
            return
        self.refuse_another_run(saved)
        self.step, self.evaluations = saved["step"], saved["evaluations"]
        ranks.restore(self.model, self.optimizer, saved)
        ranks.refresh(self.sampling_model, self.model)
        if ranks.rank() == 0:  # what was logged after the checkpoint will be made again
            cut_log(self.folder / "metrics.jsonl", self.step, every=True)
            cut_log(self.folder / "trees.jsonl", self.step)
        steps, steps_before = self.config.steps, saved["settings"]["steps"]
        print(f"going on after {self.step} of {steps} steps")
        if self.step == steps:
            print("nothing is left to do; a larger --steps would make the run longer")
        if steps != steps_before:
            print(f"--steps was {steps_before}: the learning rate now falls until step {steps}")

    def refuse_another_run(self, saved: dict[str, Any]) -> None:
        """ValueError, with what differs, if this run cannot go on from a checkpoint."""
        missing = {"settings", "data", "evaluations", "model", "optimizer"} - set(saved)
        if missing:
            raise ValueError(f"--resume: checkpoint.pt in {self.folder} lacks {sorted(missing)}")
        old, new = saved["settings"], self.made_of["settings"]
        changed = []
        for name in old | new:
            if name not in MAY_CHANGE and old.get(name) != new.get(name):
                changed.append(f"{flag(name)} was {old.get(name)!r}, is {new.get(name)!r}")
        if saved["data"] != self.made_of["data"]:
            changed.append("the problems are not those of the run")
        if changed:
            raise ValueError(f"--resume: {self.folder} is another run: {'; '.join(changed)}")
        if self.config.steps < saved["step"]:
            raise ValueError(f"--steps {self.config.steps}: the run already has {saved['step']}")

    def save_model(self, folder: Path) -> None:
        """Write the model and its tokenizer as an ordinary Hugging Face folder."""
        weights = ranks.whole_weights(self.model)
        if ranks.rank() == 0:
            self.model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)

    def keep_best(self) -> None:
        """Keep the model in best/ if it solves more than each trained one before, at the last k."""
        solved = {}
        for step, summary in self.evaluations.items():
            solved[step] = summary["Iter-k"]["all"][-1]["value"]
        earlier = [solved[step] for step in solved if 0 < step < self.step]
        if self.step == 0 or solved[self.step] <= max(earlier, default=-1.0):
            return
        self.save_model(self.folder / "best.new")
        if ranks.rank() == 0:
            shutil.rmtree(self.folder / "best", ignore_errors=True)
            (self.folder / "best.new").rename(self.folder / "best")


def check_fit(sample: Sampler, problems: list) -> None:
    """ValueError if no first prompt leaves room for an answer."""
    sizes = []
    for problem in problems:
        ids = encode(sample.tokenizer, first_messages(problem), sample.enable_thinking)
        sizes.append(len(ids))
        if len(ids) + sample.max_new_tokens <= sample.context:
            return
    raise ValueError(
        f"none of {len(sizes)} prompts fits: the shortest has {min(sizes)} tokens, the model's "
        f"context holds {sample.context}, --max-new-tokens asks for {sample.max_new_tokens}"
    )


def trees_of_all(trees: list[Node]) -> list[Node]:
    """The trees of every rank, for the logs; of other ranks' problems only the id is left."""
    if ranks.count() == 1:
        return trees
    gathered = ranks.gather([to_dict(tree, ids=True) for tree in trees])
    return [from_dict(plain) for plain in chain.from_iterable(gathered)]


def recompute_layers(model: Any) -> None:
    """Gradient checkpointing: the backward pass computes each layer again. Less memory, more time.

    transformers does it only in training mode, in which dropout is on. But sampling has no dropout,
    and the ratio of an update must begin at 1. So every dropout is set to 0.
    """
    # Later versions of transformers 5 have the first name, and warn of the second.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "attn_dropout_p", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
