"""MURPHY: GRPO on rollout trees, where an early failure whose feedback led to a later success earns credit for it.

    python murphy.py                                           a tiny model learns to use feedback, on a laptop
    python murphy.py --problems cutoff --turns 4 ...           what only retrospective credit can teach
    python murphy.py --model Qwen/Qwen3-0.6B --problems kodcode-light ...          the real thing (see the README)

Each step: sample problems, grow a rollout tree on each (tree.py, executor.py), send the rewards backwards, prune, take
advantages within sibling groups (propagate.py), and optimise every kept attempt under its own prompt (grpo.py).
In: a Config. Out: a folder with the model, metrics.jsonl, trees.jsonl, evaluation.json, curves.png and checkpoints, from
which `--output FOLDER --resume` goes on. `--turns 1` is GRPO. `torchrun --nproc-per-node N murphy.py ...` shares the work.
"""

import copy
import fcntl
import hashlib
import json
import math
import os
import random
import shlex
import shutil
import signal
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pandas
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

import executor
import toy
from evaluate import at_least, attempts, distinct, gather, join, option, summarise, table, timed, write
from grpo import grpo_loss, mean_stats, micro_batches, rows_logprobs, why_padded
from problems import load_problems
from propagate import group_advantages, inter_prune, intra_prune, propagate
from tree import Node, autocast, build_trees, draw, from_dict, groups, load_model, make_sampler, pick_device, to_dict, walk


@dataclass
class Config:
    """Settings of one run. Defaults are for the toy world "doctest"; [paper], [reported] and [ours] say whose they are."""

    model: str = option("", "folder or Hugging Face id of a chat model; empty: the toy world's own tiny base model")
    problems: str = option("doctest", "training set: doctest | cutoff (toy worlds), a name that problems.py knows, or a file")
    eval_problems: str = option("", "held-out set; empty: a toy world's test split, else eval_count problems set apart")
    split: str | None = option(None, "split of a named training set")
    limit: int | None = option(None, "use a seeded sample of this many training problems")
    difficulty: str | None = option(None, "train on one difficulty only")
    turns: int = option(2, "S: attempts on a path of the rollout tree; 1 is GRPO [paper: 2]")
    group_size: int = option(8, "G: completions sampled from one prompt [reported: 8]")
    credit: Literal["mars", "mers", "none"] = option(
        "mars", "credit rule: best of own and below [paper], discounted mean [reported], own reward: no propagation")
    gamma: float = option(1.0, "gamma: discount of MERS [ours]; MARS has none")
    inter_budget: int | None = option(None, "InterP: groups kept per tree, those of largest credit spread [reported]; none: all")
    intra_budget: int | None = option(None, "IntraP: members kept per group, of largest credit variance [reported]; none: all")
    problems_per_step: int = option(8, "rollout trees per step [ours]")
    steps: int = option(150, "steps of the run [ours]")
    temperature: float = option(1.0, "sampling temperature, applied to the log-probabilities too [ours]")
    max_new_tokens: int = option(16, "cap on a completion, in tokens; one without an end token by then is counted as truncated")
    enable_thinking: bool = option(False, "ask the chat template for the model's thinking mode")
    feedback_tests: int = option(1, "failing tests that the feedback names [ours]")
    timeout: float = option(4.0, "CPU seconds that a program may use on its tests [ours]")
    learning_rate: float = option(6e-4, "AdamW's peak rate; 1e-6 suits real models [ours]")
    warmup: int = option(5, "steps of linear warm-up, then linear decay to a fifth [ours]")
    grad_clip: float = option(1.0, "largest gradient norm [ours]")
    minibatches: int = option(2, "optimizer steps per batch of trees; with 1 the ratio is 1 and nothing is clipped [ours]")
    packed: bool = option(True, "compute tokens that attempts share once, where the model allows it (grpo.rows_logprobs)")
    micro_tokens: int = option(1_024, "tokens of one forward and backward; the gradient does not depend on it, memory does")
    sample_tokens: int | None = option(None, "tokens, padding and cap included, of one batch that is sampled; none: what fits")
    clip_low: float = option(0.2, "epsilon below [paper: GRPO]")
    clip_high: float = option(0.2, "epsilon above [paper: GRPO]")
    beta: float = option(0.0, "weight of the KL to the initial model; 0 loads no reference [ours]")
    loss_norm: Literal["sequence", "token", "constant"] = option("sequence", "what the loss is a mean over [paper: GRPO's]")
    scale_advantages: bool = option(True, "divide advantages by the group's std; --no_scale_advantages is Dr. GRPO")
    equal_turns: bool = option(False, "give every turn of an update the same total weight [ours]; else every attempt")
    mask_truncated: bool = option(False, "leave truncated completions out of the loss [ours]")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    lora_rank: int = option(0, "train LoRA adapters of this rank through peft (install it yourself); 0: all weights")
    eval_every: int = option(75, "steps between evaluations, besides the one before and the one after; 0: only those two")
    eval_count: int = option(120, "held-out problems")
    eval_iterations: int = option(5, "k of Iter-1..k [paper: 5]")
    eval_temperature: float = option(1.0, "temperature of evaluation; 0 is greedy")
    log_trees_every: int = option(10, "write every tree of every Nth step to trees.jsonl; 0: never")
    save_every: int = option(25, "steps between checkpoints; 0: only at the end, or when a signal ends the run")
    resume: str = field(default="", metadata={"nargs": "?", "const": "latest", "help": "go on from the newest good checkpoint "
                                              "of --output, or from the one named; settings not given are that run's"})
    output: str = option("", "output folder; empty: a new one under runs/")
    plot: str = option("", "draw the curves of the run in this folder, and do nothing else")
    device: str = option("auto", "auto, cpu, cuda, mps")
    seed: int = option(0, "seed of everything random")

    def __post_init__(self) -> None:
        """Refuse settings that cannot work, by name and with what would."""
        at_least(self, turns=1, group_size=2, problems_per_step=1, steps=0, max_new_tokens=1, minibatches=1, micro_tokens=1,
                 sample_tokens=1, eval_count=1, eval_iterations=1, eval_every=0, warmup=0, inter_budget=1, intra_budget=2,
                 feedback_tests=1, log_trees_every=0, save_every=0, lora_rank=0, limit=1, beta=0, clip_high=0,
                 eval_temperature=0, temperature=1e-3, learning_rate=1e-12, grad_clip=1e-6, timeout=1e-3)
        for name in ("gamma", "clip_low"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} must lie in [0, 1], got {getattr(self, name)}")
        if not self.model and self.problems not in toy.WORLDS:
            raise ValueError(f"--model is missing: only the toy worlds ({', '.join(toy.WORLDS)}) bring a model of their own")


def choose(trees: list[Node], config: Config) -> list[Node]:
    """Credit, pruning and advantages, in this order; returns the kept attempts of all trees (README, steps 4 to 6).

    Writes .credit and .advantage, and .kept = False on what was pruned. Pruned attempts have given their credit to
    their ancestors before; advantages are taken within what is kept of a group.
    """
    kept = []
    for tree in trees:
        propagate(tree, config.credit, turns=config.turns, gamma=config.gamma)
        for node in walk(tree):
            node.kept = False
        for group in inter_prune(groups(tree), config.inter_budget):
            members = intra_prune(group, config.intra_budget)
            advantages = group_advantages([node.credit for node in members], scale=config.scale_advantages)
            for node, advantage in zip(members, advantages, strict=True):
                node.kept, node.advantage = True, advantage
            kept += members
    return kept


def update(model: Any, optimizer: Any, kept: list[Node], config: Config, reference: Any = None,
           mine: set[int] | None = None) -> dict[str, float]:
    """Optimise the kept attempts, `minibatches` optimizer steps; returns means over their tokens (README, step 7).

    Attempts of advantage 0 carry no gradient unless the KL acts: they never reach the forward pass, but stay in the
    denominator, so leaving them out changes nothing. Raises FloatingPointError on a loss or gradient that is not finite.
    Of several ranks each computes the attempts whose id() is in `mine`. `kept`, and with it the parts and denominators, is
    the same on all of them, so that the sum of their gradients is that of one process (ours).
    """
    device = next(model.parameters()).device
    packed = config.packed and not why_padded(model)
    learns = lambda node: (node.advantage != 0 or config.beta > 0) and not (config.mask_truncated and node.truncated)

    def score(nodes: list[Node], net: Any = model) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast(device):
            rows = [(n.prompt_ids, n.completion_ids) for n in nodes]
            return rows_logprobs(net, rows, 0, config.temperature, packed)  # any id pads: masks are made from lengths

    order = gather(torch.randperm(len(kept)).tolist())[0]
    parts = [[kept[i] for i in order[start::config.minibatches]] for start in range(config.minibatches)]
    parts = [part for part in parts if any(map(learns, part))]  # the others are no step, and that on every rank alike
    batches = []  # per part its micro-batches: attempts, their log-probabilities before any step, the reference's
    for part in parts:
        learn = [node for node in part if learns(node) and (mine is None or id(node) in mine)]
        rows = [(node.prompt_ids, node.completion_ids) for node in learn]
        micro = [[learn[i] for i in chosen] for chosen in micro_batches(rows, config.micro_tokens, packed)]
        with torch.no_grad():
            batches.append([(nodes, score(nodes)[0] if batches else None,  # before the first optimizer step old is new
                             reference(partial(score, nodes))[0] if reference else None) for nodes in micro])
    stats, norms = [], []
    for part, micro in zip(parts, batches, strict=True):
        denominator = {"sequence": len(part), "token": sum(len(n.completion_ids) for n in part),
                       "constant": len(part) * config.max_new_tokens}[config.loss_norm]
        at_turn = Counter(node.turn for node in part)
        weight = {t: len(part) / (len(at_turn) * n) if config.equal_turns else 1.0 for t, n in at_turn.items()}
        optimizer.zero_grad(set_to_none=True)
        for nodes, old, ref in micro:
            logp, mask = score(nodes)
            loss, stat = grpo_loss(
                logp, old, torch.tensor([n.advantage for n in nodes], device=device), mask, clip_low=config.clip_low,
                clip_high=config.clip_high, beta=config.beta, ref_logp=ref, norm=config.loss_norm, denominator=denominator,
                weights=torch.tensor([weight[n.turn] for n in nodes], device=device))
            loss.backward()
            stats.append({name: float(value) for name, value in stat.items()})
        sum_gradients(model)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).item())
        if not math.isfinite(norms[-1] + sum(stat["loss"] for stat in stats)):
            raise FloatingPointError(f"in optimizer step {len(norms)} of {len(parts)} the loss or its gradient is not finite "
                                     f"(losses {[stat['loss'] for stat in stats]}, gradient norm {norms[-1]})")
        optimizer.step()
    stats = sum(gather(stats), [])
    means = mean_stats(stats) if stats else dict.fromkeys(("loss", "tokens", "ratio", "kl", "clipped", "entropy"), 0.0)
    return means | {"grad_norm": max(norms, default=0.0), "optimizer_steps": len(parts)}


def describe(trees: list[Node], kept: list[Node], turns: int) -> dict[str, Any]:
    """What a step's trees looked like: the part of a metrics line that does not depend on the update."""
    nodes = [node for tree in trees for node in walk(tree)]
    made = [group for tree in trees for group in groups(tree)]
    mean = lambda values: sum(values) / len(values) if values else None  # no attempt at that turn: no number
    spread = lambda group: max(n.credit for n in group) - min(n.credit for n in group) > 1e-9  # else it teaches nothing
    return {
        "programs": len(nodes), "kept": len(kept), "learning": sum(n.advantage != 0 for n in kept),
        **{f"{name}_{turn}": mean([getattr(n, name) for n in nodes if n.turn == turn])
           for turn in range(1, turns + 1) for name in ("reward", "solved")},
        "problems_solved": mean([any(n.solved for n in walk(tree)) for tree in trees]),
        "repaired": mean([any(c.solved for c in n.children) for n in nodes if n.children]),  # feedback to solved
        "groups_with_spread": mean([spread(group) for group in made]),
        "spread_1": mean([spread(group) for group in made if group[0].turn == 1]),
        "truncated": mean([n.truncated for n in nodes]), "completion_tokens": mean([len(n.completion_ids) for n in nodes]),
        "timeouts": sum(n.status == "timeout" for n in nodes), "no_code": sum(n.status == "no_code" for n in nodes),
        "too_long": sum(n.unexpanded != "" for tree in trees for n in (tree, *walk(tree)))}


def recompute_layers(model: Any) -> None:
    """Gradient checkpointing. transformers does it in training mode alone; dropout stays off, or no ratio would begin at 1."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def reference_model(model: Any, config: Config) -> Callable | None:
    """A function that scores with the initial model, or None where beta is 0 and no copy is worth its memory."""
    if config.beta == 0:
        return None
    if config.lora_rank:  # the initial model is the one with its adapter off
        def without_adapter(score: Callable) -> torch.Tensor:
            with model.disable_adapter():
                return score(model)
        return without_adapter
    frozen = copy.deepcopy(model).eval().requires_grad_(False)
    return lambda score: score(frozen)


def data(config: Config) -> tuple[Callable[[int], list], list]:
    """(step -> its training problems, held-out problems). Both depend on seed and step alone, so a run can be resumed."""
    if config.problems in toy.WORLDS:
        train = lambda step: toy.problems(config.problems, "train", config.problems_per_step, f"{config.seed}-{step}")
        held_out = toy.problems(config.problems, "test", config.eval_count, config.seed) if not config.eval_problems else []
    else:
        listed = load_problems(config.problems, split=config.split, limit=config.limit, difficulty=config.difficulty,
                               seed=config.seed, execute=executor.run_many)
        apart = 0 if config.eval_problems else config.eval_count
        if len(listed) <= apart:
            raise ValueError(f"{config.problems} has {len(listed)} problems, of which --eval-count sets {apart} apart: "
                             "nothing is left to train on")
        random.Random(config.seed).shuffle(listed)
        held_out, listed = listed[:apart], listed[apart:]

        def train(step: int) -> list:
            wanted = range(step * config.problems_per_step, (step + 1) * config.problems_per_step)
            shuffled = lambda epoch: random.Random(f"{config.seed} {epoch}").sample(listed, len(listed))
            return [shuffled(i // len(listed))[i % len(listed)] for i in wanted]  # a new order each epoch
    if config.eval_problems:
        held_out = load_problems(config.eval_problems, limit=config.eval_count, seed=config.seed, execute=executor.run_many)
    return train, distinct(held_out)


def train(config: Config) -> Path:
    """The whole of a run; returns its output folder. SystemExit (128 + the signal's number) if a signal ended it."""
    executor.self_check()
    device = pick_device(config.device)
    rank, ranks = join(device)
    folder, lock = output_folder(config) if rank == 0 else ("", open(os.devnull))
    folder = Path(gather(str(folder))[0])
    with lock, closing(executor):  # at its end programs may be running, beside a step that was left
        loop(Run(config, folder, device, rank, ranks))
    return folder


def loop(run: "Run") -> None:
    """All steps. A signal abandons what is sampled, executed or evaluated; what is learned is learned to the end."""
    steps = run.config.steps
    with Signals() as stop, tqdm(total=steps, initial=run.step, desc="MURPHY", unit="step", disable=run.rank > 0 or None) as bar:
        try:
            run.evaluate_and_save(stop, bar)
            while run.step < steps:
                trees = run.grow(stop)
                kept = choose(trees, run.config)
                line = run.learn(trees, kept)
                run.report(trees, line, bar)
                run.evaluate_and_save(stop, bar)
        except KeyboardInterrupt as signalled:
            run.stopped(*signalled.args)
    if run.rank == 0:
        run.finish()


class Run:
    """What the steps of a run share. Of `ranks` processes each grows, executes and learns its share of a step's trees, and
    rank 0 writes."""

    def __init__(self, config: Config, folder: Path, device: torch.device, rank: int, ranks: int) -> None:
        """All as it is before the first step, or as the checkpoint that the run goes on from has it."""
        self.config, self.folder, self.device, self.rank, self.ranks = config, folder, device, rank, ranks
        print(f"MURPHY: {config.problems}, credit {config.credit}, S={config.turns}, G={config.group_size}, seed {config.seed}, "
              f"on {device}{f' x {ranks}' if ranks > 1 else ''}; output in {folder}", flush=True)
        self.problems_of, self.held_out = data(config)
        seen = zlib.crc32(repr((self.problems_of(0), self.held_out)).encode("utf-8", "replace"))
        self.fixed = asdict(config) | {"ranks": ranks, "data": seen}
        self.versions = {"python": sys.version.split()[0], "torch": str(torch.__version__), "device": device.type,
                         "transformers": transformers.__version__, "threads": torch.get_num_threads()}  # these order sums
        found = gather(str(checkpoint(folder, config.resume) or "") if config.resume and rank == 0 else "")[0]
        begin = {"step": 0, "evaluations": {}, "sizes": [0, 0]}
        state = resume(Path(found), self.fixed, self.versions) if found else begin
        self.step, self.evaluations = state["step"], state["evaluations"]  # evaluations by the number of steps made before
        if rank == 0:  # what the run left after the checkpoint it goes on from is made again
            for path in checkpoints(folder) if found else ():
                if path.name > Path(found).name:
                    shutil.rmtree(path.with_suffix(".aside"), ignore_errors=True)
                    path.rename(path.with_suffix(".aside"))
            for name, size in zip(LOGS, state["sizes"], strict=True):
                with open(folder / name, "a") as log:
                    log.truncate(size)
            write(folder / "settings.json", [asdict(config)])
        base = config.model or (toy.base_model(config.problems, config.seed, folder.parent) if rank == 0 else "")
        self.model, self.tokenizer = load_model(gather(str(base))[0], device)
        self.prepare_model()
        self.reference = reference_model(self.model, config)  # the initial one, also where the run goes on from a checkpoint
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=config.learning_rate,
                                           weight_decay=0.0)
        if found:
            self.restore(Path(found), state["optimizer"])
        sampler = partial(make_sampler, self.model, self.tokenizer, max_new_tokens=config.max_new_tokens,
                          token_budget=config.sample_tokens, enable_thinking=config.enable_thinking)
        self.sample, self.eval_sample = sampler(temperature=config.temperature), sampler(temperature=config.eval_temperature)
        self.execute = partial(executor.run_many, max_failures=config.feedback_tests, seconds=config.timeout,
                               workers=max(1, (os.cpu_count() or 1) // ranks) if ranks > 1 else None)

    def prepare_model(self) -> None:
        if self.config.gradient_checkpointing:
            recompute_layers(self.model)
        if self.config.lora_rank:
            from peft import LoraConfig, get_peft_model  # the user's to install: one option does not justify a dependency
            torch.manual_seed(self.config.seed)
            self.model = get_peft_model(self.model, LoraConfig(
                r=self.config.lora_rank, lora_alpha=2 * self.config.lora_rank, target_modules="all-linear"))

    def restore(self, path: Path, optimizer: dict) -> None:
        if self.config.lora_rank:
            self.model.load_adapter(path, "default", is_trainable=True)
        else:
            self.model.load_state_dict(load_model(str(path), self.device)[0].state_dict())
        self.optimizer.load_state_dict(optimizer)

    def evaluate_and_save(self, stop: "Signals", bar: tqdm) -> None:
        """What is due between two steps."""
        config, step = self.config, self.step
        due = step in (0, config.steps) or config.eval_every and step % config.eval_every == 0
        if due and step not in self.evaluations:
            torch.manual_seed(config.seed + self.rank)
            mine = self.held_out[self.rank::self.ranks]
            rows = stop.unless(attempts, mine, self.eval_sample, self.execute, config.eval_iterations)
            self.evaluations[step] = summarise(self.held_out, sum(gather(rows), []), config.eval_iterations)
            bar.write(f"step {step}: " + "  ".join(
                f"Iter-{k} {100 * score['value']:.1f}%" for k, score in enumerate(self.evaluations[step]["Iter-k"]["all"], 1)))
        if step == config.steps or config.save_every and step and (due or step % config.save_every == 0):
            self.save()

    def save(self) -> None:
        if self.rank == 0:
            for name in LOGS:
                seal(self.folder / name)
            save(self.folder, {"step": self.step, "evaluations": self.evaluations, "config": self.fixed, "versions": self.versions,
                               "sizes": [(self.folder / name).stat().st_size for name in LOGS],
                               "optimizer": self.optimizer.state_dict()}, (self.model, self.tokenizer))

    def grow(self, stop: "Signals") -> list[Node]:
        """The trees of a step: sample, execute, refine.

        All that is random in a step is drawn from its seed: a checkpoint holds every random state by holding the step, a step
        that was abandoned begins from it again, and an evaluation in between changes nothing.
        """
        torch.manual_seed(zlib.crc32(f"{self.config.seed} {self.step} {self.rank}".encode()))
        self.seconds = {"sampling": 0.0, "executing": 0.0, "updating": 0.0}
        with timed(self.seconds, "executing"):
            self.mine = stop.unless(
                partial(build_trees, overlap=True), self.problems_of(self.step)[self.rank::self.ranks],
                timed(self.seconds, "sampling")(self.sample), self.execute, self.config.turns, self.config.group_size)
        self.seconds["executing"] -= self.seconds["sampling"]  # what was not done beside it
        shares = gather([to_dict(tree, ids=True) for tree in self.mine])  # of all ranks; this one's own stay as they are
        return [tree for rank, share in enumerate(shares)
                for tree in (self.mine if rank == self.rank else map(from_dict, share))]

    def learn(self, trees: list[Node], kept: list[Node]) -> dict[str, Any]:
        """Optimise what is kept; returns the step's line of metrics.jsonl."""
        config, step = self.config, self.step
        rate = config.learning_rate * min((step + 1) / max(config.warmup, 1), 1 - 0.8 * step / config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            with timed(self.seconds, "updating"):
                stats = update(self.model, self.optimizer, kept, config, self.reference,
                               {id(node) for tree in self.mine for node in walk(tree)})
        except FloatingPointError as error:
            write(self.folder / "nonfinite.json", [to_dict(tree, ids=True) for tree in trees])
            raise ValueError(f"step {step}: {error}; its trees are in {self.folder / 'nonfinite.json'}") from error
        return {"step": step, **describe(trees, kept, config.turns), **stats, "lr": rate, **self.seconds}

    def report(self, trees: list[Node], line: dict[str, Any], bar: tqdm) -> None:
        """Write and say what a step was, and count it: from here on it is made."""
        config = self.config
        self.log("metrics.jsonl", [line])
        if config.log_trees_every and self.step % config.log_trees_every == 0:
            self.log("trees.jsonl", [{"step": self.step} | to_dict(tree) for tree in trees])
        if (line["truncated"] or 0) > 0.5:
            warnings.warn("more than half of a step's completions found no end within --max-new-tokens "
                          f"{config.max_new_tokens}: what is cut seldom passes, and then nothing can be learned")
        self.step += 1
        rewards = [line[f"reward_{turn}"] for turn in range(1, config.turns + 1)]
        news = "reward by turn " + " ".join(f"{reward:.2f}" for reward in rewards if reward is not None)
        bar.set_postfix_str(news, refresh=False)
        bar.update()
        if bar.disable and self.step % 10 == 0:
            print(f"step {self.step}/{config.steps}: {news}, {sum(self.seconds.values()):.1f} s a step", flush=True)

    def log(self, name: str, lines: list[dict]) -> None:
        if self.rank == 0:
            with open(self.folder / name, "a") as file:  # closed, and with that flushed, at each step
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def stopped(self, number: int) -> None:
        """Save, say how to go on, and leave: a signal came, and what was begun of a step is forgotten."""
        self.save()
        command = f"torchrun --nproc-per-node {self.ranks}" if self.ranks > 1 else "python"
        print(f"stopped after {self.step} of {self.config.steps} steps. To go on: {command} murphy.py --output "
              f"{shlex.quote(str(self.folder))} --resume", flush=True)
        raise SystemExit(128 + number)

    def finish(self) -> None:
        """The model, the evaluations before and after, a tree in which feedback helped, the curves."""
        steps = self.config.steps
        try:
            self.model.save_pretrained(self.folder)
            self.tokenizer.save_pretrained(self.folder)
        except Exception as error:  # as in `save`
            raise OSError(f"the model could not be written into {self.folder} ({error}); the last checkpoint holds it: make room, "
                          "then --resume") from error
        write(self.folder / "evaluation.json", [self.evaluations])
        example = None  # the last of those that were logged
        for line in open(self.folder / "trees.jsonl"):
            example = tree if helped(tree := from_dict(json.loads(line))) else example
        if example:
            print("\nA tree in which the feedback helped: the attempt failed, and its credit is what came of it.\n")
            print(draw(example, width=3))
        print(f"\nBefore ({len(self.held_out)} held-out problems, percent solved, 95% interval)\n{table(self.evaluations[0])}")
        print(f"\nAfter {steps} steps\n{table(self.evaluations[steps])}")
        if steps:
            print("\n" + plot(self.folder))
        print(f"\nThe model, metrics.jsonl, trees.jsonl, evaluation.json and curves.png are in {self.folder}")


def output_folder(config: Config) -> tuple[Path, Any]:
    """A folder of this run's own (the one asked for, if nothing is in it, or a new one under runs/), and the lock that
    keeps other runs out of it until it is closed or its process is dead."""
    name = f"runs/{Path(config.problems).stem}-{config.credit}-turns{config.turns}-seed{config.seed}"
    free = (path for i in count() if not (path := Path(f"{name}-{i}" if i else name)).exists())
    folder = Path(config.output) if config.output else next(free)
    if config.resume and not (folder / "settings.json").exists():
        raise ValueError(f"--resume needs the --output of a run to go on with: {config.output!r} has no settings.json")
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--output {folder}: another run is writing into it; name another folder") from None
    if not config.resume and {path.name for path in folder.iterdir()} - {"lock"}:
        raise ValueError(f"--output {folder} holds something already: name a new or empty folder, or go on with it by --resume")
    return folder, lock


LOGS = "metrics.jsonl", "trees.jsonl"
HARMLESS = {"output", "resume", "plot", "device", "save_every", "eval_every", "log_trees_every"}  # may differ at a resume


def save(folder: Path, state: dict, pretrained: tuple) -> None:
    """Write checkpoints/step-N under another name, flush it to the disk, then rename it: what has the name is whole.

    Kept are the newest two and the best: of those with an evaluation, the first that solved most within all iterations.
    """
    place = folder / "checkpoints" / f"step-{state['step']:06d}"
    if place.exists():
        return
    unfinished = place.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for part in pretrained:
            part.save_pretrained(unfinished)
        torch.save(state, unfinished / "training.pt")
        write(unfinished / "manifest.json", [{path.name: seal(path) for path in unfinished.iterdir()}])
        seal(unfinished / "manifest.json")
        flush(unfinished)  # the names of its files; after the rename, its own
        unfinished.rename(place)
        flush(place.parent)
    except Exception as error:  # a full disk is an OSError, a RuntimeError or a SafetensorError: it depends on who was writing
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(f"{place} could not be written ({error}); the checkpoints before it stay good: --resume") from error
    solved = {f"step-{step:06d}": summary["Iter-k"]["all"][-1]["value"] for step, summary in state["evaluations"].items()}
    there = sorted(folder.glob("checkpoints/step-*[0-9]"))
    for path in set(there) - {*there[-2:], max(there, key=lambda path: solved.get(path.name, -1.0))}:
        shutil.rmtree(path)


def flush(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def seal(path: Path) -> str:
    """Flush a file to the disk; returns its digest."""
    flush(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, or "": every file is held against its digest."""
    if path.suffix:
        return "half-written"
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        return ", ".join(f"{name} is not what was written" for name in manifest if seal(path / name) != manifest[name])
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoints/step-*") if path.suffix != ".aside")


def checkpoint(folder: Path, name: str) -> Path | None:
    """The checkpoint to go on from: the newest good one ("latest"), or the one named; None if none was made so far."""
    for path in (listed := checkpoints(folder)[::-1]):
        why = damage(path) if name in ("latest", path.name) else f"{name} was asked for"
        if not why:
            return path
        print(f"{path} is passed over: {why}", flush=True)
    if name == "latest" and all(path.suffix for path in listed):
        return None
    raise ValueError(f"--resume {name}: {folder} has no such checkpoint that is good; start anew in another folder")


def resume(path: Path, fixed: dict, versions: dict) -> dict:
    """A checkpoint's state, if the settings of its run still stand and its logs are whole; else ValueError."""
    state = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
    if changed := [f"{name} ({state['config'].get(name)!r} there, {fixed.get(name)!r} now)" for name in fixed | state["config"]
                   if name not in HARMLESS and state["config"].get(name) != fixed.get(name)]:
        raise ValueError(f"--resume: {path} was made with other settings: {', '.join(changed)}")
    for name, size in zip(LOGS, state["sizes"], strict=True):
        if os.path.getsize(path.parent.parent / name) < size:
            raise ValueError(f"--resume: {path.parent.parent / name} has lost lines since {path} was made; an earlier checkpoint, "
                             "named, may go on from what is left of it")
    other = "" if state["versions"] == versions else f", made with {state['versions']}: not the same run bit for bit"
    print(f"going on from {path}{other}", flush=True)
    return state


class Signals:
    """Ctrl-C and SIGTERM while a run is in its loop: the first is seen to by `unless`, a second one leaves at once."""

    number, abandoning = 0, False

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: Any) -> None:
        if self.number:
            raise SystemExit(128 + number)  # on its way out it passes `train`, which ends the executor's workers
        self.number = number
        os.write(2, b"\nstopping: the checkpoint is written first (once more: at once)\n")  # a print must not be entered twice
        if self.abandoning:
            raise KeyboardInterrupt

    def unless(self, function: Callable, *args: Any) -> Any:
        """function(*args), abandoned when a signal comes, or has come: then KeyboardInterrupt, on every rank."""
        with suppress(KeyboardInterrupt):
            self.abandoning = True
            answer = None if self.number else function(*args)
            self.abandoning = False
        if number := max(gather(self.number)):
            raise KeyboardInterrupt(number)
        return answer


def sum_gradients(model: Any) -> None:
    """Make every gradient the sum over the ranks; a rank that had nothing to learn adds zeros."""
    for p in model.parameters() if dist.is_initialized() else ():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)


def helped(tree: Node) -> bool:
    """Whether a failed first attempt was repaired and earned credit for it."""
    return any(n.children and n.credit > n.reward and any(c.solved for c in n.children) for n in tree.children)


def plot(folder: Path) -> str:
    """Draw a run's curves into curves.png; returns them as a table, a line for each tenth of the steps."""
    from matplotlib.figure import Figure  # not to be waited for by every run
    lines = open(folder / "metrics.jsonl").readlines() if (folder / "metrics.jsonl").exists() else []
    frame = pandas.DataFrame([json.loads(line) for line in lines if line.endswith("\n")])  # the last may be half-written
    if frame.empty:
        raise ValueError(f"{folder} holds no step of a run: metrics.jsonl is missing or empty")
    panels = {title: [name for name in frame if name.startswith(start)] for title, start in {
        "reward by turn": "reward_", "share solved by turn": "solved_", "groups with spread": "groups_with_spread",
        "completion length, tokens": "completion_tokens", "share truncated": "truncated",
        "seconds a step": ("sampling", "executing", "updating")}.items()}
    tenth = -(-len(frame) // 10)
    means = frame.astype(float).rolling(tenth, min_periods=1).mean().assign(step=frame["step"])
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        means.plot(x="step", y=names, ax=axes, title=title)
    figure.savefig(folder / "curves.png")
    short = means[::-tenth][::-1][sum(panels.values(), ["step"])].round(3)
    idle = (frame["optimizer_steps"] == 0).sum()
    return (f"Curves are in {folder / 'curves.png'}; a line here is the mean of {tenth} of the steps\n"
            + short.to_string(index=False)
            + f"\nIn {idle} of {len(frame)} steps nothing could be learned: no group had any spread of credit." * bool(idle))


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # a log file has each line at once: kill -9 and SIGTERM flush nothing
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    parser = HfArgumentParser(Config, description=__doc__.split("\n")[0])
    try:
        given = parser.parse_args()  # no Config yet: what was given may only fit together with that run's settings
        saved = Path(given.output) / "settings.json"
        if given.resume and saved.exists():
            old = json.loads(saved.read_bytes())
            parser.set_defaults(**{name: old[name] for name in old if name not in ("output", "resume", "plot")})
        (config,) = parser.parse_args_into_dataclasses()
        print(plot(Path(config.plot))) if config.plot else train(config)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        sys.exit(f"murphy.py: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
