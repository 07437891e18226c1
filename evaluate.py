"""Evaluate a model by self-correction: Iter-k with intervals, and a pass@k control beside it.

    python evaluate.py --model runs/x --benchmark doctest --control

A chain is one problem's attempts; each one after the first is told what failed in those before it.
It ends when the public tests pass; the verdict is by all tests. With --oracle, or if no test is
public, all tests also give the feedback and end the chain. Iter-k (paper): the share of chains that
are solved within k attempts, one chain a problem by default.
In: a model, and problems. Out: result.json, a table, and samples.jsonl: a row for each attempt, in
which `sample` is the number of its chain.
Needs torch, transformers, numpy, tree.py, executor.py and support/.
"""

import signal
import sys

if __name__ == "__main__":  # Ctrl-C prints one line, in the slow imports and later
    stopped = "\nevaluate.py: stopped; the same command continues"
    signal.signal(signal.SIGINT, lambda *_: sys.exit(stopped))

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

import executor
from support import toy
from support.problems import Problem, distinct, fingerprint, load_problems
from support.ranks import gather, join, rank_0_first
from support.run import check_hub, check_writable, json_lines, read_settings, write
from support.sampling import Sampler, check_model, load_model, pick_device
from support.settings import EvalConfig, parse
from support.state import check_fit
from tree import build_trees, walk

Rows = list[dict[str, Any]]  # one per attempt
FROM_NODE = ("turn", "prompt", "text", "code", "status", "reward", "solved", "public_passed")
FROM_NODE += ("truncated", "unexpanded", "feedback")


def iterate(problems: list, sample: Callable, execute: Callable, iterations: int) -> list[list]:
    """One chain (list of Nodes) per problem: a tree with groups of one.

    If not even the first prompt fits the model, the chain is [root].
    """
    trees = build_trees(problems, sample, execute, iterations, 1, stop=attrgetter("public_passed"))
    return [list(walk(tree)) or [tree] for tree in trees]


def attempt_rows(
    problems: list, sample: Callable, execute: Callable, iterations: int, samples=1, control=None
) -> Rows:
    """Rows of `samples` independent chains per problem, each node of a chain a row.

    control: a sampler. It makes samples * iterations independent first attempts per problem: as
    many as the chains make if none ends early, but without feedback (ours).
    """
    kinds = [("chain", sample, iterations, samples)]
    if control is not None:
        kinds.append(("control", control, 1, samples * iterations))
    rows = []
    for kind, sampler, turns, n in kinds:
        copies = [problem for problem in problems for _ in range(n)]
        for i, nodes in enumerate(iterate(copies, sampler, execute, turns)):
            for node in nodes:
                row = {"task_id": copies[i].id, "kind": kind, "sample": i % n}
                row |= {name: getattr(node, name) for name in FROM_NODE}
                rows.append(row | {"tokens": len(node.completion_ids)})
    return rows


def evaluate(problems: list, sample: Callable, execute: Callable, iterations: int, **more) -> dict:
    """A whole evaluation in memory: its summary. `more`: samples and control, as above."""
    problems = distinct(problems)
    rows = attempt_rows(problems, sample, execute, iterations, **more)
    return summarise(problems, rows, iterations)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k of one problem with n samples, c of them right (Chen et al. 2021).

    1 - C(n - c, k) / C(n, k): the share of all draws of k samples that hold a right one.

    >>> pass_at_k(5, 2, 2), pass_at_k(200, 1, 100)
    (0.7, 0.5)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got {n=} samples, {c=}, {k=}")
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share p = successes / n, with z = 1.96.

    (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    z = 1.959963984540054
    p = successes / n
    shift = z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + shift / (2 * n))
    low = (p + shift - half) / (1 + 2 * shift)
    high = (p + shift + half) / (1 + 2 * shift)
    return (low if successes > 0 else 0.0), (high if successes < n else 1.0)  # 0 and 1 exactly


def bootstrap(values: list[float], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean of values (one per problem), redrawn with replacement."""
    redrawn = np.random.default_rng(seed).choice(values, (draws, len(values)))
    low, high = np.quantile(redrawn.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def mean_with_interval(values: list[float]) -> dict[str, float]:
    """Mean over problems and its 95% interval: Wilson's if each is 0 or 1, else a bootstrap."""
    if set(values) <= {0.0, 1.0}:
        low, high = wilson(round(sum(values)), len(values))
    else:
        low, high = bootstrap(values)
    return {"n": len(values), "value": sum(values) / len(values), "low": low, "high": high}


def iter_k(entry: dict[str, Any], k: int) -> float:
    """Iter-k of one problem, an entry of `outcomes`: the share of its chains solved within k."""
    solved = [turn is not None and turn <= k for turn in entry["chain"]]
    return sum(solved) / len(solved)


def summarise(problems: list[Problem], rows: Rows, iterations: int) -> dict[str, Any]:
    """What is reported of some rows: Iter-k, the control's pass@k, counts, and each problem."""
    entries = outcomes(problems, rows)
    ks = range(1, iterations + 1)
    iter_scores, pass_scores = {}, {}
    for name, group in grouped(entries).items():
        iter_scores[name] = [mean_with_interval([iter_k(x, k) for x in group]) for k in ks]
        n = len(group[0]["control"])
        if n > 0:
            right = [n - entry["control"].count(None) for entry in group]
            pass_scores[name] = [
                mean_with_interval([pass_at_k(n, c, k) for c in right]) for k in ks
            ]
    return {
        "iterations": iterations,
        "Iter-k": iter_scores,
        "pass@k": pass_scores,
        "chain": count([row for row in rows if row["kind"] == "chain"]),
        "control": count([row for row in rows if row["kind"] == "control"]),
        "feedback": Counter(entry["feedback"] for entry in entries.values()),
        "problems": entries,
    }


def outcomes(problems: list[Problem], rows: Rows) -> dict[str, dict[str, Any]]:
    """Each problem's facts for compare.py, and for each of its samples the turn that solved it.

    A sample is a chain, or an attempt of the control; None: it was not solved. The rows of a sample
    come turn by turn.
    """
    entries = {}
    for problem in problems:
        entry = {name: getattr(problem, name) for name in ("difficulty", "entry_point", "context")}
        entry["feedback"] = "public" if problem.public_tests else "oracle"
        entries[problem.id] = entry | {"chain": [], "control": []}
    for row in rows:
        solved_at = entries[row["task_id"]][row["kind"]]
        if row["turn"] <= 1:
            solved_at.append(None)  # turn 1, or 0 if the prompt did not fit: a new sample begins
        if row["solved"] and solved_at[-1] is None:
            solved_at[-1] = row["turn"]
    return entries


def grouped(entries: dict[str, dict]) -> dict[str, list[dict]]:
    """Problems by difficulty, if there are several, and all together."""
    groups = {}
    for level in ("easy", "medium", "hard"):
        group = [entry for entry in entries.values() if entry["difficulty"] == level]
        if 0 < len(group) < len(entries):
            groups[level] = group
    return groups | {"all": list(entries.values())}


def count(rows: Rows) -> dict[str, int]:
    """How many attempts there are, and what became of them; last, the executor's statuses."""
    made = [row for row in rows if row["turn"] > 0]
    programs = {(row["task_id"], row["sample"], row["code"] or row["text"]) for row in made}
    return {
        "attempts": len(made),
        "repeated": len(made) - len(programs),  # programs that the same chain had made before
        "truncated": sum(row["truncated"] for row in made),
        "too long": sum(row["unexpanded"] == "too long" for row in rows),
        "public only": sum(row["public_passed"] and not row["solved"] for row in made),
        "tokens": sum(row["tokens"] for row in made),
        **Counter(row["status"] for row in made),
    }


def table(summary: dict[str, Any]) -> str:
    """Scores in percent with their 95% intervals, then what was counted."""
    rows = [["", "problems", "n", *map(str, range(1, summary["iterations"] + 1))]]
    for measure in ("Iter-k", "pass@k"):
        for name, scores in summary[measure].items():
            row = [measure, name, str(scores[0]["n"])]
            for s in scores:
                row.append(f"{100 * s['value']:.1f} [{100 * s['low']:.1f}, {100 * s['high']:.1f}]")
            rows.append(row)
    lines = [align(rows)]
    for kind in ("chain", "control", "feedback"):
        counted = [f"{name} {n}" for name, n in summary[kind].items() if n > 0]
        if counted:
            lines.append(f"{kind}: {', '.join(counted)}")
    return "\n".join(lines)


def align(rows: list[list[str]]) -> str:
    """The rows of a table as text, each column aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def run(config: EvalConfig) -> None:
    """Check what can fail, sample the missing chunks, write the result and print it.

    A chunk of problems has its own seed and is sampled as a whole. So neither an interruption nor
    the number of processes (torchrun) changes the table.
    """
    rank, processes = join(pick_device(config.device))  # from here on, only rank 0 prints
    folder = Path(config.output)
    settings = {k: v for k, v in asdict(config).items() if k not in ("device", "output")}
    check_output(folder, settings)  # now, because all that follows is slow
    check_model(config.model)
    check_hub(config.model, "model")
    executor.self_check()
    with rank_0_first():
        problems = find_problems(config)
    sample, control = load_samplers(config, problems)
    # The same path may hold another model the next time: every 1000th weight tells.
    some_weights = repr([w.flatten()[::1000].tolist() for w in sample.model.parameters()])
    settings["weights"] = zlib.crc32(some_weights.encode())
    settings["problems"] = fingerprint(problems)
    check_output(folder, settings)  # again, with the weights and the problems
    rows = read_samples(folder / "samples.jsonl", problems)
    done = gather(len({row["task_id"] for row in rows}))[0]  # as rank 0 read it
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "settings.json", json.dumps(settings, indent=2) + "\n")
    print(", ".join(f"{name} {value}" for name, value in settings.items()), flush=True)
    limits = {"timeout": config.timeout, "feedback_tests": config.feedback_tests}
    execute = partial(executor.run_many, **limits)
    for first in range(done, len(problems), processes * config.chunk):
        start = first + rank * config.chunk
        torch.manual_seed(zlib.crc32(f"{config.seed} {start}".encode()))
        chunk = problems[start : start + config.chunk]  # the last one may be empty
        mine = attempt_rows(chunk, sample, execute, config.iterations, config.samples, control)
        rows += chain.from_iterable(gather(mine))
        if rank == 0:
            write(folder / "samples.jsonl", json_lines(rows))  # whole chunks only
        done = min(first + processes * config.chunk, len(problems))
        print(f"{done} of {len(problems)} problems", flush=True)

    if rank == 0:
        summary = summarise(problems, rows, config.iterations) | {"settings": settings}
        write(folder / "result.json", json.dumps(summary, indent=2) + "\n")
        print(f"{table(summary)}\n{folder / 'result.json'}")


def check_output(folder: Path, settings: dict[str, Any]) -> None:
    """ValueError unless the folder is new or empty, or holds a run with these settings."""
    check_writable(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        old = read_settings(str(folder))
    except ValueError:
        raise ValueError(f"{folder} holds no evaluation: name a new --output") from None
    changed = [f"{k} ({old.get(k)} there, {v} now)" for k, v in settings.items() if old.get(k) != v]
    if changed:
        raise ValueError(f"{folder} has other settings: {', '.join(changed)}; name a new --output")


def find_problems(config: EvalConfig) -> list[Problem]:
    """The problems that the settings ask for; `load_problems` says which were left out, and why."""
    if config.benchmark in toy.WORLDS:
        return distinct(toy.problems(config.benchmark, "test", config.limit or 200))
    asked = ("limit", "version", "start_date", "end_date")
    request = {name: getattr(config, name) for name in asked}
    found = load_problems(config.benchmark, **request, execute=executor.run_many)
    return [replace(problem, public_tests=[]) for problem in found] if config.oracle else found


def load_samplers(config: EvalConfig, problems: list[Problem]) -> tuple:
    """What samples chains, and what samples the control, or None."""
    model, tokenizer = load_model(config.model, pick_device(config.device))
    names = ("max_new_tokens", "sample_tokens", "enable_thinking")
    options = {name: getattr(config, name) for name in names}
    sample = Sampler(model, tokenizer, temperature=config.temperature, **options)
    check_fit(sample, problems)
    # Greedy attempts would all be equal: then the control is sampled at 0.8.
    control = replace(sample, temperature=config.temperature or 0.8) if config.control else None
    return sample, control


def read_samples(path: Path, problems: list[Problem]) -> Rows:
    """The rows of an evaluation that was stopped. ValueError: the file is damaged."""
    try:
        text = path.read_text() if path.exists() else ""
        rows = [json.loads(line) for line in text.splitlines()]
        count(rows)
        outcomes(problems, rows)  # what can be counted is not damaged
        return rows
    except Exception as error:  # a file may hold anything
        raise ValueError(f"{path} is damaged ({error!r:.200}): name a new --output") from None


def main(arguments: list[str] | None = None) -> None:
    """The command line: a sentence and no traceback for what a user can do wrong."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with closing(executor):  # also at Ctrl-C: else a program under way is waited for
            run(parse(EvalConfig, arguments, __doc__))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"evaluate.py: {error}")


if __name__ == "__main__":
    main()
