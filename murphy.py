"""MURPHY: GRPO on rollout trees, where an early failure whose feedback led to a later success earns credit for it.

    python murphy.py                                           a tiny model learns to use feedback, on a laptop
    python murphy.py --problems cutoff --turns 4 ...           what only retrospective credit can teach
    python murphy.py --model Qwen/Qwen3-0.6B --problems kodcode-light ...          the real thing (see the README)

Each step: sample problems, grow a rollout tree on each (tree.py, executor.py), send the rewards backwards, prune, take
advantages within sibling groups (propagate.py), and optimise every kept attempt under its own prompt (grpo.py).
In: a Config. Out: a folder with the model, metrics.jsonl, trees.jsonl and evaluation.json. `--turns 1` is GRPO.
"""

import copy
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import HfArgumentParser
from transformers.utils import logging as transformers_logging

import executor
import toy
from evaluate import distinct, evaluate, option, share, table
from grpo import grpo_loss, mean_stats, micro_batches, rows_logprobs, why_padded
from problems import load_problems
from propagate import group_advantages, inter_prune, intra_prune, propagate
from tree import Node, autocast, build_trees, draw, groups, load_model, make_sampler, pick_device, to_dict, walk


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
    credit: Literal["mars", "mers", "none"] = option("mars", "credit rule: best below, discounted mean, own reward [paper]")
    gamma: float = option(1.0, "gamma: discount of MERS [ours]; MARS has none")
    inter_budget: int | None = option(None, "InterP: groups kept per tree, those of largest credit spread [paper]; none: all")
    intra_budget: int | None = option(None, "IntraP: members kept per group, of largest credit variance [paper]; none: all")
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
    sample_tokens: int = option(65_536, "tokens, padding and cap included, of one call of generate: memory")
    clip_low: float = option(0.2, "epsilon below [paper: GRPO]")
    clip_high: float = option(0.2, "epsilon above [paper: GRPO]")
    beta: float = option(0.0, "weight of the KL to the initial model; 0 loads no reference [ours]")
    loss_norm: Literal["sequence", "token", "constant"] = option("sequence", "what the loss is a mean over [paper: GRPO's]")
    scale_advantages: bool = option(True, "divide advantages by the group's std; --no-scale-advantages is Dr. GRPO")
    equal_turns: bool = option(False, "give every turn of an update the same total weight [ours]; else every attempt")
    mask_truncated: bool = option(False, "leave truncated completions out of the loss [ours]")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    lora_rank: int = option(0, "train LoRA adapters of this rank through peft (install it yourself); 0: all weights")
    eval_every: int = option(75, "steps between evaluations, besides the one before and the one after; 0: only those two")
    eval_count: int = option(120, "held-out problems")
    eval_iterations: int = option(5, "k of Iter-1..k [paper: 5]")
    eval_temperature: float = option(1.0, "temperature of evaluation; 0 is greedy")
    log_trees_every: int = option(10, "write every tree of every Nth step to trees.jsonl; 0: never")
    output: str = option("", "output folder; empty: a new one under runs/")
    device: str = option("auto", "auto, cpu, cuda, mps")
    seed: int = option(0, "seed of everything random")


def check(config: Config) -> None:
    """Refuse settings that cannot work, by name and with what would."""
    rules = {"turns": 1, "group_size": 2, "problems_per_step": 1, "steps": 0, "max_new_tokens": 1, "minibatches": 1,
             "micro_tokens": 1, "sample_tokens": 1, "eval_count": 1, "eval_iterations": 1, "eval_every": 0, "warmup": 0,
             "inter_budget": 1, "intra_budget": 2, "feedback_tests": 1, "log_trees_every": 0, "lora_rank": 0, "limit": 1,
             "beta": 0, "clip_low": 0, "clip_high": 0, "eval_temperature": 0}
    for name, least in rules.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("temperature", "learning_rate", "grad_clip", "timeout"):
        if not getattr(config, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(config, name)}")
    if not 0 <= config.gamma <= 1:
        raise ValueError(f"--gamma must lie in [0, 1], got {config.gamma}")
    if config.clip_low > 1:
        raise ValueError(f"--clip-low must lie in [0, 1], got {config.clip_low}")
    if not config.model and config.problems not in toy.WORLDS:
        raise ValueError(f"--model is missing: only the toy worlds ({', '.join(toy.WORLDS)}) bring a model of their own")


def choose(trees: list[Node], config: Config) -> list[Node]:
    """Credit, pruning and advantages, in this order; returns the kept attempts of all trees (spec, sections 2 to 4).

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


def update(model: Any, optimizer: Any, kept: list[Node], config: Config, reference: Any = None, pad: int = 0) -> dict[str, float]:
    """Optimise the kept attempts, `minibatches` optimizer steps; returns means over their tokens (spec, section 5).

    Attempts of advantage 0 carry no gradient unless the KL acts: they never reach the forward pass, but stay in the
    denominator, so leaving them out changes nothing. Raises FloatingPointError on a loss or gradient that is not finite.
    """
    device = next(model.parameters()).device
    packed = config.packed and not why_padded(model)
    order = torch.randperm(len(kept)).tolist()
    parts = [[kept[i] for i in order[start::config.minibatches]] for start in range(config.minibatches)]
    rounds = []  # per optimizer step: its micro-batches, each with its attempts and log-probabilities before any step
    for part in parts:
        learn = [node for node in part if (node.advantage != 0 or config.beta > 0) and not (config.mask_truncated and node.truncated)]
        rows = [(node.prompt_ids, node.completion_ids) for node in learn]
        micro = []
        for chosen in micro_batches(rows, config.micro_tokens, packed):
            score = lambda net, batch=[rows[i] for i in chosen]: rows_logprobs(net, batch, pad, config.temperature, packed)
            with torch.no_grad(), autocast(device):
                old = score(model)[0] if rounds else None  # before the first optimizer step old is new
                ref = reference(score)[0] if reference else None
            micro.append(([learn[i] for i in chosen], score, old, ref))
        rounds.append((part, micro))
    stats, norms = [], []
    for part, micro in rounds:
        if not micro:
            continue  # nothing to learn in this part: counted by the caller through "optimizer_steps"
        denominator = {"sequence": len(part), "token": sum(len(n.completion_ids) for n in part),
                       "constant": len(part) * config.max_new_tokens}[config.loss_norm]
        turns = [node.turn for node in part]
        weight = {t: len(part) / (len(set(turns)) * turns.count(t)) if config.equal_turns else 1.0 for t in set(turns)}
        optimizer.zero_grad(set_to_none=True)
        for nodes, score, old, ref in micro:
            with autocast(device):
                logp, mask = score(model)
            loss, stat = grpo_loss(
                logp, old, torch.tensor([n.advantage for n in nodes], device=device), mask, clip_low=config.clip_low,
                clip_high=config.clip_high, beta=config.beta, ref_logp=ref, norm=config.loss_norm, denominator=denominator,
                weights=torch.tensor([weight[n.turn] for n in nodes], device=device))
            loss.backward()
            stats.append(stat)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        if not torch.isfinite(norm) or not torch.isfinite(stats[-1]["loss"]):
            raise FloatingPointError(f"the loss or its gradient is not finite (gradient norm {norm.item()})")
        optimizer.step()
        norms.append(norm.item())
    means = mean_stats(stats) if stats else dict.fromkeys(("loss", "tokens", "ratio", "kl", "clipped", "entropy"), 0.0)
    return means | {"grad_norm": max(norms, default=0.0), "optimizer_steps": len(norms)}


def describe(trees: list[Node], kept: list[Node], turns: int) -> dict[str, Any]:
    """What a step's trees looked like: the part of a metrics line that does not depend on the update."""
    nodes = [node for tree in trees for node in walk(tree)]
    mean = lambda values: sum(values) / len(values) if values else None  # no attempt at that turn: no number
    line: dict[str, Any] = {"programs": len(nodes)}
    for turn in range(1, turns + 1):
        mine = [node for node in nodes if node.turn == turn]
        line |= {f"reward_{turn}": mean([n.reward for n in mine]), f"solved_{turn}": mean([n.solved for n in mine])}
    made = [group for tree in trees for group in groups(tree)]
    spread = lambda group: max(n.credit for n in group) - min(n.credit for n in group) > 1e-9  # else it teaches nothing
    return line | {
        "problems_solved": mean([any(n.solved for n in walk(tree)) for tree in trees]),
        "repaired": mean([any(c.solved for c in n.children) for n in nodes if n.children]),  # feedback to solved
        "groups_with_spread": mean([spread(group) for group in made]),
        "spread_1": mean([spread(group) for group in made if group[0].turn == 1]),
        "kept": len(kept), "learning": sum(n.advantage != 0 for n in kept),
        "truncated": mean([n.truncated for n in nodes]), "timeouts": sum(n.status == "timeout" for n in nodes),
        "no_code": sum(n.status == "no_code" for n in nodes),
        "too_long": sum(n.unexpanded != "" for tree in trees for n in (tree, *walk(tree))),
        "completion_tokens": mean([len(n.completion_ids) for n in nodes]),
        "sampled_tokens": sum(len(n.completion_ids) for n in nodes)}


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


def output_folder(config: Config) -> Path:
    """A folder of this run's own: the one asked for, if nothing is in it, or a new one under runs/."""
    if config.output:
        folder = Path(config.output)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--output {config.output} holds something already: name a new or empty folder")
    else:
        name = f"{Path(config.problems).stem}-{config.credit}-turns{config.turns}-seed{config.seed}"
        taken = (Path("runs") / (name + (f"-{i}" if i else "")) for i in range(10_000))
        folder = next(path for path in taken if not path.exists())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def train(config: Config) -> Path:
    """The whole of a run; returns its output folder."""
    check(config)
    executor.self_check()
    folder, device = output_folder(config), pick_device(config.device)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    print(f"MURPHY: {config.problems}, credit {config.credit}, S={config.turns}, G={config.group_size}, seed {config.seed}, "
          f"on {device}; output in {folder}", flush=True)
    base = config.model or toy.base_model(config.problems, config.seed, folder.parent)
    problems_of, held_out = data(config)
    model, tokenizer = load_model(str(base), device)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if config.lora_rank:
        from peft import LoraConfig, get_peft_model  # the user's to install: one option does not justify a dependency
        model = get_peft_model(model, LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear"))
    reference = reference_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate, weight_decay=0.0)
    sampler = partial(make_sampler, model, tokenizer, max_new_tokens=config.max_new_tokens, token_budget=config.sample_tokens,
                      enable_thinking=config.enable_thinking)
    sample, eval_sample = sampler(temperature=config.temperature), sampler(temperature=config.eval_temperature)
    execute = partial(executor.run_many, max_failures=config.feedback_tests, seconds=config.timeout)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def evaluation() -> dict:
        with torch.random.fork_rng():  # evaluating more or less often does not change the training
            torch.manual_seed(config.seed)
            return evaluate(held_out, eval_sample, execute, config.eval_iterations)

    torch.manual_seed(config.seed)
    evaluations, nothing_learned, example = {0: evaluation()}, 0, None
    print(f"step 0: " + iterations_line(evaluations[0]), flush=True)
    bar = tqdm(range(config.steps), desc="MURPHY", unit="step", disable=None)
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "trees.jsonl", "w") as forest:
        for step in bar:
            clock = Clock()
            trees = build_trees(problems_of(step), clock.timed("sampling", sample), clock.timed("executing", execute),
                                config.turns, config.group_size)
            kept = choose(trees, config)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * min((step + 1) / max(config.warmup, 1), 1 - 0.8 * step / config.steps)
            try:
                stats = clock.timed("updating", update)(model, optimizer, kept, config, reference, pad)
            except FloatingPointError as error:
                (folder / "nonfinite.json").write_text(json.dumps([to_dict(tree) for tree in trees]))
                raise ValueError(f"step {step}: {error}; the step's trees are in {folder / 'nonfinite.json'}") from error
            line = {"step": step, **describe(trees, kept, config.turns), **stats, "lr": optimizer.param_groups[0]["lr"], **clock.seconds}
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            if config.log_trees_every and step % config.log_trees_every == 0:
                forest.writelines(json.dumps({"step": step} | to_dict(tree)) + "\n" for tree in trees)
                forest.flush()
            nothing_learned += stats["optimizer_steps"] == 0
            example = helped(trees) or example
            news = [f"reward {line['reward_1']:.2f}"] + [f"turn {t} {line[f'reward_{t}']:.2f}" for t in range(2, config.turns + 1)
                                                        if line[f"reward_{t}"] is not None]
            bar.set_postfix_str(", ".join(news), refresh=False)
            if bar.disable and step % 10 == 9:
                print(f"step {step + 1}/{config.steps}: " + ", ".join(news) + f", {sum(clock.seconds.values()):.1f} s a step", flush=True)
            if config.eval_every and (step + 1) % config.eval_every == 0 and step + 1 < config.steps:
                evaluations[step + 1] = evaluation()
                bar.write(f"step {step + 1}: " + iterations_line(evaluations[step + 1]))
    evaluations[config.steps] = evaluation()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "evaluation.json").write_text(json.dumps(evaluations) + "\n")
    if example is not None:
        print("\nA tree in which the feedback helped: the attempt failed, and its credit is what came of it.\n")
        print(draw(example, width=3))
    print(f"\nBefore ({len(held_out)} held-out problems, percent solved, 95% interval)\n{table(evaluations[0])}")
    print(f"\nAfter {config.steps} steps\n{table(evaluations[config.steps])}")
    if nothing_learned:
        print(f"\nIn {nothing_learned} of {config.steps} steps nothing could be learned: no group had any spread of credit.")
    print(f"\nThe model, metrics.jsonl, trees.jsonl and evaluation.json are in {folder}")
    return folder


class Clock:
    """Seconds spent in named parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"sampling": 0.0, "executing": 0.0, "updating": 0.0}

    def timed(self, name: str, function: Callable) -> Callable:
        def wrapped(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[name] += time.perf_counter() - start
        return wrapped


def iterations_line(summary: dict) -> str:
    listed = list(summary["problems"].values())
    means = [sum(share(entry, k) for entry in listed) / len(listed) for k in range(1, summary["iterations"] + 1)]
    return "  ".join(f"Iter-{k} {100 * mean:.1f}%" for k, mean in enumerate(means, 1))


def helped(trees: list[Node]) -> Node | None:
    """A tree in which a failed first attempt was repaired and earned credit for it, if there is one."""
    return next((tree for tree in trees if any(n.children and n.credit > n.reward and any(c.solved for c in n.children)
                                               for n in tree.children)), None)


def main() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    parser = HfArgumentParser(Config, description=__doc__.split("\n")[0])
    try:
        (config,) = parser.parse_args_into_dataclasses()
        train(config)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        sys.exit(f"murphy.py: {error}")


if __name__ == "__main__":
    main()
