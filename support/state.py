"""What the steps of a run share: data, models, samplers, and how far it has come.

    State               made once; `checkpoint` and `go_on` keep it and bring it back
    toy_data, listed_data    training problems for each step, and held-out ones

Needs torch, transformers and the files of support/.
"""

import copy
import json
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers

import executor
from support import ranks, toy
from support.problems import distinct, fingerprint, load_problems
from support.run import cut_log, json_lines, load, save, write
from support.sampling import Sampler, encode, load_model
from support.settings import flag
from tree import Node, first_messages, from_dict, to_dict

HARMLESS = {"output", "resume", "device", "save_every", "eval_every", "log_trees_every", "steps"}


def toy_data(config: Any) -> tuple[Callable[[int], list], list, list]:
    """A toy world's problems: of a step, held out, and a sample that stands for all of them."""

    def of_step(step: int) -> list:
        seed = f"{config.seed}-{step}"
        return toy.problems(config.problems, "train", config.problems_per_step, seed)

    held_out = toy.problems(config.problems, "test", config.eval_count or 120, config.seed)
    return of_step, held_out, toy.problems(config.problems, "train", 1000, config.seed)


def listed_data(config: Any) -> tuple[Callable[[int], list], list, list]:
    """The same of a set or a file. It is shuffled, a part held out; each epoch has a new order."""
    execute = executor.run_many
    listed = load_problems(config.problems, limit=config.limit, seed=config.seed, execute=execute)
    random.Random(config.seed).shuffle(listed)
    if config.eval_problems:
        held_out = load_problems(
            config.eval_problems, limit=config.eval_count, seed=config.seed, execute=execute
        )
    else:
        apart = config.eval_count or min(100, max(1, len(listed) // 10))
        if len(listed) <= apart:
            raise ValueError(
                f"{config.problems} has {len(listed)} problems and {apart} would be held out: "
                "nothing is left to train on; name --eval-problems (the same file will do)"
            )
        held_out, listed = listed[:apart], listed[apart:]

    @lru_cache(maxsize=2)  # a step may reach into the next epoch
    def order_of(epoch: int) -> list[int]:
        return random.Random(f"{config.seed} {epoch}").sample(range(len(listed)), len(listed))

    def of_step(step: int) -> list:
        first = step * config.problems_per_step
        chosen = []
        for i in range(first, first + config.problems_per_step):
            epoch, place = divmod(i, len(listed))
            chosen.append(listed[order_of(epoch)[place]])
        return chosen

    return of_step, held_out, listed


class State:
    """What the steps of a run share: data, models, samplers, and how far it has come."""

    def __init__(self, config: Any, folder: Path, device: torch.device, data: tuple) -> None:
        """data: (step -> its training problems, held-out problems, training problems to check)."""
        self.config, self.folder, self.device = config, folder, device
        self.problems_of, held_out, training = data
        self.held_out = distinct(held_out)
        self.step = 0  # steps made
        self.evaluations: dict[int, dict] = {}  # by the number of steps made before
        self.seconds: dict[str, float] = {}  # of a step, by phase
        self.warned = False  # that completions are cut

        base = config.model
        if not base and ranks.rank() == 0:
            base = str(toy.base_model(config.problems, config.seed, folder.parent))
        attention = "flex_attention" if device.type == "cuda" else "sdpa"  # see support/packing.py
        self.model, self.tokenizer = load_model(ranks.gather(base)[0], device, attention)
        self.sampling_model = ranks.sampling_copy(self.model)
        self.sample = self.sampler(config.temperature)
        self.eval_sample = self.sampler(config.eval_temperature)
        self.check_fit(training)
        self.execute = partial(
            executor.run_many,
            feedback_tests=config.feedback_tests,
            timeout=config.timeout,
            workers=max(1, (os.cpu_count() or 1) // ranks.count()),
        )
        self.reference = None
        if config.beta > 0:
            self.reference = ranks.shard(copy.deepcopy(self.model).requires_grad_(False))
        if config.gradient_checkpointing:
            recompute_layers(self.model)
        ranks.shard(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=0.0
        )
        self.made_of = {"settings": asdict(config), "data": fingerprint(training + self.held_out)}

    def sampler(self, temperature: float) -> Sampler:
        """A `sample` for tree.py at this temperature."""
        config = self.config
        return Sampler(
            self.sampling_model,
            self.tokenizer,
            max_new_tokens=config.max_new_tokens,
            temperature=temperature,
            sample_tokens=config.sample_tokens,
            enable_thinking=config.enable_thinking,
        )

    def check_fit(self, problems: list) -> None:
        """ValueError if no first prompt leaves room for an answer: nothing could be sampled."""
        thinking = self.config.enable_thinking
        prompts = [first_messages(problem) for problem in problems[:200]]
        shortest = min(len(encode(self.tokenizer, prompt, thinking)) for prompt in prompts)
        if shortest + self.config.max_new_tokens > self.sample.context:
            raise ValueError(
                f"no prompt fits: the shortest has {shortest} tokens, --max-new-tokens asks for "
                f"{self.config.max_new_tokens}, the model's context holds {self.sample.context}"
            )

    def seed(self) -> None:
        """Draw what is random in a step from its own seed.

        So a checkpoint holds every random state by holding the step, a step that was left begins
        from its seed again, and an evaluation in between changes nothing.
        """
        name = f"{self.config.seed} {self.step} {ranks.rank()}"
        torch.manual_seed(zlib.crc32(name.encode()))

    def log(self, name: str, rows: list[dict]) -> None:
        """Add rows to a log; the file is closed, and with that written, at each call."""
        if ranks.rank() == 0:
            with open(self.folder / name, "a", encoding="ascii") as file:
                file.write(json_lines(rows))

    def write(self, name: str, value: Any) -> None:
        """Replace a JSON file of the run in one step."""
        if ranks.rank() == 0:
            write(self.folder / name, json.dumps(value, indent=1) + "\n")

    def checkpoint(self) -> None:
        """Replace the checkpoint by what the run is now."""
        state = ranks.training_state(self.model, self.optimizer)
        if ranks.rank() == 0:
            now = {
                "step": self.step,
                "evaluations": self.evaluations,
                "versions": versions(self.device),
            }
            save(self.folder, {**state, **self.made_of, **now})

    def go_on(self) -> None:
        """Continue from the checkpoint, if there is one. ValueError: it is of another run."""
        state = load(self.folder)
        if state is None:
            return
        missing = {"settings", "data", "versions", "evaluations", "model", "optimizer"} - set(state)
        if missing:
            raise ValueError(f"--resume: checkpoint.pt in {self.folder} lacks {sorted(missing)}")
        config = self.config
        changed = differences(state["settings"], self.made_of["settings"])
        if state["data"] != self.made_of["data"]:
            changed.append("the problems are not those of the run")
        if changed:
            raise ValueError(f"--resume: {self.folder} is another run: {'; '.join(changed)}")
        if config.steps < state["step"]:
            raise ValueError(f"--steps {config.steps}: the run has made {state['step']} already")
        if state["versions"] != versions(self.device):
            print(f"made with {state['versions']}: it goes on, but not bit for bit the same")
        if state["step"] == state["settings"]["steps"] == config.steps:
            print(f"already finished; --resume --steps {2 * config.steps} would go on")
        elif state["settings"]["steps"] != config.steps:
            print(f"{config.steps} steps: from here on the learning rate falls over all of them")

        self.step, self.evaluations = state["step"], state["evaluations"]
        ranks.restore(self.model, self.optimizer, state)
        ranks.refresh(self.sampling_model, self.model)
        if ranks.rank() == 0:
            cut_log(self.folder / "metrics.jsonl", self.step, every=True)
            cut_log(self.folder / "trees.jsonl", self.step)
        print(f"going on after step {self.step} of {self.folder}")

    def save_model(self, folder: Path) -> None:
        """Write the model and its tokenizer as an ordinary Hugging Face folder."""
        weights = ranks.whole_weights(self.model)
        if ranks.rank() == 0:
            self.model.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)

    def keep_best(self) -> None:
        """Keep the model in best/ if no evaluation of this run has solved more."""
        scores = {n: s["Iter-k"]["all"][-1]["value"] for n, s in self.evaluations.items() if n > 0}
        now = scores.pop(self.step, None)
        if now is not None and now > max(scores.values(), default=-1.0):
            self.save_model(self.folder / "best.new")
            if ranks.rank() == 0:
                shutil.rmtree(self.folder / "best", ignore_errors=True)
                (self.folder / "best.new").rename(self.folder / "best")


def trees_of_all(trees: list[Node], with_texts: bool) -> list[Node]:
    """The trees of every rank, for the logs; texts travel only where they will be written down."""
    if ranks.count() == 1:
        return trees
    mine = [to_dict(tree, ids=True) for tree in trees]
    for plain in mine if not with_texts else []:
        strip(plain)
    return [from_dict(plain) for share in ranks.gather(mine) for plain in share]


def strip(plain: dict) -> None:
    """Empty the texts of a tree that is plain data."""
    plain.update(prompt=[], prompt_ids=[], text="", code="", feedback="")
    for child in plain["children"]:
        strip(child)


def versions(device: torch.device) -> dict[str, Any]:
    """What may change the last bits of a run: libraries, device, threads and processes."""
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),  # they change the order of float sums
        "ranks": ranks.count(),
    }


def differences(old: dict, new: dict) -> list[str]:
    """The settings that changed and must not, in words."""
    names = [name for name in old | new if name not in HARMLESS and old.get(name) != new.get(name)]
    return [f"{flag(name)} was {old.get(name)!r}, is {new.get(name)!r}" for name in names]


def recompute_layers(model: Any) -> None:
    """Gradient checkpointing: less memory, more time.

    transformers does it in training mode only. Dropout stays off, or no ratio would begin at 1.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
