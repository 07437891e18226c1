"""MURPHY: GRPO on rollout trees, where a failure whose feedback led to a success earns credit.

    python murphy.py                                        a tiny model learns to use feedback
    python murphy.py --problems my.jsonl --model Qwen/Qwen3-0.6B
                                            your problems (README.md has their form), a real model
    python murphy.py --output runs/x --resume               go on with a run that was stopped

`loop` is the method, step by step; `choose` and `update` are its core.

In: settings (`Config` in support/settings.py). Out: a folder with the model, settings.json,
metrics.jsonl, trees.jsonl, evaluation.json, curves.png and a checkpoint.
`--turns 1` without budgets is plain GRPO. --help marks defaults [paper], [reported] or [ours].
"""

import signal
import sys

if __name__ == "__main__":  # so that Ctrl-C during the slow imports prints one line

    def stop(*_: object) -> None:
        print("\nmurphy.py: stopped", file=sys.stderr)
        sys.exit(130)

    signal.signal(signal.SIGINT, stop)

import math
import shlex
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

import executor
from evaluate import attempt_rows, summarise, table
from grpo import grpo_loss, mean_stats
from propagate import group_advantages, inter_prune, intra_prune, propagate
from support import ranks, toy
from support.metrics import describe, plot, timed
from support.packing import micro_batches, rows_logprobs
from support.run import Signals, check_folder, check_hub, claim
from support.sampling import autocast, check_model, pick_device
from support.settings import FITTING, Config, flag, parse
from support.state import State, listed_data, toy_data, trees_of_all
from tree import Node, build_trees, groups, to_dict, walk

STATS = ("loss", "tokens", "ratio", "kl", "clipped", "entropy")  # 0 if nothing could be learned


def loop(state: State, signals: Signals) -> None:
    """All steps of a run: the method."""
    evaluate_and_save(state, signals)
    while state.step < state.config.steps:
        # 1. Sample G programs for each problem of the step.
        # 2. Run each against the problem's tests: its reward, and feedback on it.
        # 3. Pair every failure with its feedback and sample again, for S turns: rollout trees.
        trees = signals.interruptible(grow, state)  # tree.build_trees; Ctrl-C ends it at once
        # 4. Credit: send the rewards of later attempts back to the earlier ones.
        # 5. Prune: keep the groups, and in them the attempts, whose credits differ most.
        # 6. Advantages: compare each attempt with its siblings.
        kept = choose(trees, state.config)
        # 7. Optimise every kept attempt under the prompt that it was sampled from.
        numbers = learn(state, kept)  # Ctrl-C waits for its end
        report(state, trees, numbers)
        state.step += 1
        evaluate_and_save(state, signals)


def grow(state: State) -> list[Node]:
    """The rollout trees of a step; several processes share its problems."""
    state.seed()  # by the step's number: a resumed run draws what an unbroken one would
    state.seconds = dict.fromkeys(("sampling", "executing", "updating"), 0.0)
    sample = timed(state.seconds, "sampling")(state.sample)  # the same, but adds up its time
    execute = timed(state.seconds, "executing")(state.execute)
    problems = state.problems_of(state.step)[ranks.rank() :: ranks.count()]
    return build_trees(problems, sample, execute, state.config.turns, state.config.group_size)


def choose(trees: list[Node], config: Config) -> list[Node]:
    """Credit, pruning and advantages, in this order; returns the attempts that are kept.

    Writes .credit and .advantage, and .kept = False on what is pruned. A pruned attempt has given
    its credit to its ancestors before. Advantages are taken within what is kept of a group.
    """
    kept = []
    for tree in trees:
        propagate(tree, config.credit, turns=config.turns, gamma=config.gamma)
        for node in walk(tree):
            node.kept = False
        for group in inter_prune(groups(tree), config.inter_budget):
            members = intra_prune(group, config.intra_budget)
            credits = [node.credit for node in members]
            advantages = group_advantages(credits, scale=config.scale_advantages)
            for node, advantage in zip(members, advantages, strict=True):
                node.kept = True
                node.advantage = advantage
            kept += members
    return kept


def learn(state: State, kept: list[Node]) -> dict[str, float]:
    """Set the learning rate, optimise, and hand the new weights to the model that samples.

    (A copy samples on CUDA and with several processes; else it is the model itself.)
    """
    config, step = state.config, state.step
    rise = (step + 1) / max(config.warmup, 1)
    fall = 1 - 0.8 * step / config.steps  # linear decay towards a fifth
    rate = config.learning_rate * min(rise, fall)
    for parameter_group in state.optimizer.param_groups:
        parameter_group["lr"] = rate
    with timed(state.seconds, "updating"):
        numbers = update(state.model, state.optimizer, kept, config, state.reference)
        ranks.refresh(state.sampling_model, state.model)
    return {**numbers, "lr": rate}


def update(
    model: Any, optimizer: Any, kept: list[Node], config: Config, reference: Any = None
) -> dict[str, float]:
    """Optimise the kept attempts in `minibatches` optimizer steps; returns numbers to log.

    The attempts are dealt to the optimizer steps at random. One without a gradient is not computed
    but counts in the denominator, so skipping it changes nothing. --mask-truncated leaves truncated
    ones out of the loss and its denominator. Of several processes each computes its own attempts,
    but all divide by the denominator of all attempts: their gradients add up to that of one process
    (ours).
    FloatingPointError: a gradient that is not finite.
    """
    counted = [node for node in kept if not (config.mask_truncated and node.truncated)]
    facts = [[len(node.completion_ids), has_gradient(node, config)] for node in counted]
    optimizer_steps = []  # the micro-batches of each, and the denominator of its loss
    # All optimizer steps are prepared now, while the model is still the one that sampled.
    # ranks.share deals the attempts to them. facts_of_all: the facts of one optimizer step's
    # attempts on all ranks. mine: the places in `counted` of those that this rank has.
    for facts_of_all, mine in ranks.share(facts, config.minibatches):
        if any(learns for _, learns in facts_of_all):  # else no rank makes this optimizer step
            nodes = [counted[i] for i in mine if has_gradient(counted[i], config)]
            will_move = len(optimizer_steps) > 0  # an earlier one changes the model first
            batches = prepare(nodes, model, reference, will_move, config)
            optimizer_steps.append((batches, denominator_of(facts_of_all, config)))

    stats, grad_norms = [], [0.0]  # without a gradient the norm is 0
    for batches, denominator in optimizer_steps:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            stats.append(backward(model, batch, denominator, config))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        grad_norms.append(float(ranks.whole(norm)))
        if not math.isfinite(grad_norms[-1]):
            raise FloatingPointError(f"the gradient is not finite (norm {grad_norms[-1]})")
        optimizer.step()
    of_all = list(chain.from_iterable(ranks.gather(stats)))
    means = mean_stats(of_all) if of_all else dict.fromkeys(STATS, 0.0)
    return {**means, "grad_norm": max(grad_norms), "optimizer_steps": len(optimizer_steps)}


def denominator_of(facts: list, config: Config) -> int:
    """The denominator of a loss, by [tokens, has_gradient] of each of its attempts on all ranks."""
    if config.loss_norm == "sequence":
        return len(facts)
    if config.loss_norm == "token":
        return sum(tokens for tokens, _ in facts)
    return len(facts) * config.max_new_tokens


def has_gradient(node: Node, config: Config) -> bool:
    """Whether an attempt changes the model: its advantage is not 0, or the KL acts on it."""
    return node.advantage != 0 or config.beta > 0


@dataclass
class MicroBatch:
    """What one forward and backward takes: attempts, and log-probabilities (B, C) of two models."""

    nodes: list[Node]
    old_logp: torch.Tensor | None  # of the model before the update; None: it has not moved yet
    ref_logp: torch.Tensor | None  # of the reference; None: beta is 0


@torch.no_grad()
def prepare(
    nodes: list[Node], model: Any, reference: Any, will_move: bool, config: Config
) -> list[MicroBatch]:
    """The attempts of one optimizer step as micro-batches.

    will_move: another optimizer step will change the model before this one runs. So the old
    log-probabilities are computed now.
    Each process must make the same number of forward passes: else they wait for each other for
    ever. So one with fewer micro-batches adds empty ones. An empty one is computed as one fake
    token, which is masked out.
    """
    rows = [(node.prompt_ids, node.completion_ids) for node in nodes]
    batches = micro_batches(model, rows, config.micro_tokens)  # lists of places in `rows`
    missing = max(ranks.gather(len(batches))) - len(batches)
    micro = []
    for places in batches + [[]] * missing:
        batch = [nodes[i] for i in places]
        old = completion_logprobs(model, batch, config)[0] if will_move else None
        ref = completion_logprobs(reference, batch, config)[0] if reference is not None else None
        micro.append(MicroBatch(batch, old, ref))
    return micro


def completion_logprobs(
    model: Any, nodes: list[Node], config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and mask (B, C) of completions; without nodes, of the fake token."""
    rows = [(node.prompt_ids, node.completion_ids) for node in nodes] or [([0], [0])]
    with autocast(next(model.parameters()).device):
        logp, mask = rows_logprobs(model, rows, config.temperature)
    if not nodes:
        mask = torch.zeros_like(mask)
    return logp, mask


def backward(model: Any, batch: MicroBatch, denominator: float, config: Config) -> dict[str, float]:
    """Add one micro-batch's gradient; returns its sums for `mean_stats`."""
    logp, mask = completion_logprobs(model, batch.nodes, config)
    advantages = [node.advantage for node in batch.nodes] or [0.0]  # of the fake token
    loss, stats = grpo_loss(
        logp,
        batch.old_logp,
        torch.tensor(advantages, device=logp.device),
        mask,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        beta=config.beta,
        ref_logp=batch.ref_logp,
        norm=config.loss_norm,
        denominator=denominator,
    )
    (loss * ranks.count()).backward()  # FSDP takes the mean over the ranks; the sum is wanted
    return {name: float(value) for name, value in stats.items()}


def report(state: State, trees: list[Node], numbers: dict[str, float]) -> None:
    """Log a step and print its line."""
    config, step = state.config, state.step
    log_trees = config.log_trees_every > 0 and step % config.log_trees_every == 0
    trees = trees_of_all(trees)
    nodes = [node for tree in trees for node in walk(tree)]
    kept = [node for node in nodes if node.kept]
    line = {"step": step, **describe(trees, kept, config.turns), **numbers, **state.seconds}
    state.log("metrics.jsonl", [line])
    if log_trees:
        state.log("trees.jsonl", [{"step": step, **to_dict(tree)} for tree in trees])

    rewards = [line[f"reward_{turn}"] for turn in range(1, config.turns + 1)]
    shown = " ".join(f"{reward:.2f}" for reward in rewards if reward is not None)
    seconds = sum(state.seconds.values())
    print(f"step {step + 1}/{config.steps}  reward by turn {shown}  {seconds:.1f} s", flush=True)
    if (line["truncated"] or 0) > 0.5 and not state.warned:
        state.warned = True
        most = f"most completions found no end within {config.max_new_tokens} tokens"
        print(f"{most}: raise --max-new-tokens", file=sys.stderr)


def evaluate_and_save(state: State, signals: Signals) -> None:
    """What is due between two steps: Iter-k on the held-out problems, and a checkpoint."""
    config, step = state.config, state.step
    due = step in (0, config.steps) or (config.eval_every > 0 and step % config.eval_every == 0)
    if due and step not in state.evaluations:
        torch.manual_seed(config.seed + ranks.rank())  # every evaluation draws alike
        mine = state.held_out[ranks.rank() :: ranks.count()]
        k = config.eval_iterations
        rows = signals.interruptible(attempt_rows, mine, state.eval_sample, state.execute, k)
        rows_of_all = list(chain.from_iterable(ranks.gather(rows)))
        summary = summarise(state.held_out, rows_of_all, k)
        state.evaluations[step] = summary
        state.write("evaluation.json", state.evaluations)
        solved = [100 * at_k["value"] for at_k in summary["Iter-k"]["all"]]
        shown = "  ".join(f"Iter-{i} {percent:.1f}%" for i, percent in enumerate(solved, 1))
        print(f"after {step} steps  {shown}", flush=True)
        state.keep_best()
    if due or (config.save_every > 0 and step % config.save_every == 0):
        state.checkpoint()


def finish(state: State) -> None:
    """The model, and what it has learned: tables before and after, and the curves."""
    state.save_model(state.folder)  # of the last step; best/ has the one that solved most
    if ranks.rank() > 0:
        return
    steps = state.config.steps
    print(f"\nBefore: {len(state.held_out)} held-out problems, percent solved, 95% interval")
    print(table(state.evaluations[0]))
    print(f"\nAfter {steps} steps\n{table(state.evaluations[steps])}")
    try:
        if steps:
            print(f"\n{plot(state.folder)}")
    except Exception as error:  # the logs may hold what this run did not write
        print(f"\nThe run is whole, but its curves cannot be drawn: {error!r:.200}")
    print(f"\nEverything is in {state.folder}; its trees: python -m support.page {state.folder}")


def train(config: Config) -> Path:
    """A whole run; returns its folder. All cheap checks come before anything is made."""
    device = pick_device(config.device)
    folder = check_folder(config)
    if config.model:
        check_model(config.model)
        check_hub(config.model, "model")
    ranks.join(device)
    folder = Path(ranks.gather(str(folder))[0])  # rank 0's: others may have found another free name
    executor.self_check()
    with ranks.rank_0_first():
        data = toy_data(config) if config.problems in toy.WORLDS else listed_data(config)
    names = ("problems", "credit", "turns", "group_size", "temperature", "seed", *FITTING)
    chosen = ", ".join(f"{flag(name)} {getattr(config, name)}" for name in names)
    where = f"device {device}, processes {ranks.count()}, output in {folder}"
    print(f"{chosen}\n{len(data.held_out)} held-out problems, {where}", flush=True)
    state = State(config, folder, device, data)

    lock = claim(folder) if ranks.rank() == 0 else nullcontext()
    with lock, closing(executor), Signals() as signals:  # closing: executor.close() at the end
        if config.resume:
            state.go_on()
        state.write("settings.json", asdict(config))
        try:
            loop(state, signals)
            finish(state)
            signals.check()  # raises now, if a signal came while `finish` was at work
        except KeyboardInterrupt as signalled:  # its argument is the number of the signal
            state.checkpoint()
            command = f"python murphy.py --output {shlex.quote(str(folder))} --resume"
            print(f"stopped after {state.step} of {config.steps} steps; to go on: {command}")
            raise SystemExit(128 + signalled.args[0]) from None
    return folder


def main(arguments: list[str] | None = None) -> None:
    """The command line: a sentence and no traceback for what a user can do wrong."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        train(parse(Config, arguments, __doc__))
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        sys.exit(f"murphy.py: {error}")


if __name__ == "__main__":
    main()
