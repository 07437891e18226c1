"""The paper's claims on two toy worlds, with seeds and spread.

    python results/study.py                            seeds 1 to 5, about two hours on two cores
    python results/study.py --seeds 1                  one seed, without ablations: 15 minutes
    python results/study.py --seeds 10 --worlds cutoff

For each seed one base model is warm-started, and each method trains from it with the same number of
executed programs a step. Seed 0 was used to choose the settings and is never reported.
World A ("doctest"): does training on feedback beat GRPO with as many programs?
World B ("cutoff"): what does propagation add where an attempt's own reward says nothing?
Out: study.csv (a row for each score), curves.csv (a row for each step of each run), and what
report.py makes of them. The same command goes on where it was stopped. A run that is in the CSV
already is made again only if the code that it measured has changed since.
"""

# ruff: noqa: E402  the number of threads must be known before torch is imported
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two runs of one thread beat one run of two

import argparse
import contextlib
import json
import math
import random
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import record
import report
import torch
from transformers.utils import logging

import executor
import murphy
from evaluate import evaluate
from support import toy
from support.metrics import plot
from support.run import Signals
from support.sampling import Sampler, load_model
from support.state import State, toy_data

A = {"problems": "doctest", "steps": 100}
B = {
    "problems": "cutoff",
    "steps": 100,
    "turns": 4,
    "group_size": 3,
    "problems_per_step": 12,
    "learning_rate": 1e-3,
}
GRPO = {"turns": 1, "credit": "none", "group_size": 2}  # its group size is found in `matched`
MAIN, REST, ABLATION = 1, 2, 3  # the main claims come first: a study that is stopped early has them


@dataclass(frozen=True)
class Method:
    """A line of the study: so many seeds at most, and when they have their turn."""

    world: str
    name: str
    seeds: int
    wave: int
    settings: dict = field(default_factory=dict, hash=False)


METHODS = [  # in the order of running: `base` first, the matched method before its GRPO
    Method("doctest", "base", 5, MAIN),
    Method("doctest", "mars", 5, MAIN, A | {"credit": "mars"}),
    Method("doctest", "grpo", 5, MAIN, A | GRPO),
    Method("doctest", "none", 5, MAIN, A | {"credit": "none"}),
    Method("doctest", "mers", 5, REST, A | {"credit": "mers"}),
    Method("doctest", "mars-interp", 5, REST, A | {"inter_budget": 5}),
    Method("doctest", "mars-intrap", 5, REST, A | {"intra_budget": 4}),
    Method("doctest", "mars-shuffled", 3, ABLATION, A),
    Method("doctest", "mers-gamma0.5", 3, ABLATION, A | {"credit": "mers", "gamma": 0.5}),
    Method("doctest", "mers-gamma0.9", 3, ABLATION, A | {"credit": "mers", "gamma": 0.9}),
    Method("doctest", "mars-g4", 3, ABLATION, A | {"group_size": 4, "problems_per_step": 28}),
    Method("doctest", "mars-g16", 3, ABLATION, A | {"group_size": 16, "problems_per_step": 2}),
    Method(
        "doctest", "mars-s3", 3, ABLATION,
        A | {"turns": 3, "group_size": 4, "problems_per_step": 7},
    ),
    Method("cutoff", "base", 10, MAIN),
    Method("cutoff", "mers", 10, MAIN, B | {"credit": "mers"}),
    Method("cutoff", "grpo", 10, MAIN, B | GRPO),
    Method("cutoff", "none", 10, MAIN, B | {"credit": "none"}),
    Method("cutoff", "mars", 10, REST, B | {"credit": "mars"}),
    Method("cutoff", "mers-300", 5, ABLATION, B | {"credit": "mers", "steps": 300}),
    Method("cutoff", "none-300", 5, ABLATION, B | {"credit": "none", "steps": 300}),
    Method(
        "cutoff", "mars-g8-s3", 3, ABLATION,
        B | {"turns": 3, "group_size": 8, "problems_per_step": 3},
    ),
]  # fmt: skip
MATCHED = {"doctest": "mars", "cutoff": "mers"}  # GRPO gets as many programs as this method
PROBLEMS, ITERATIONS = 360, 5
CURVES = (
    "programs", "tokens", "sampling", "executing", "updating", "groups_with_spread", "spread_1",
    "reward_1", "reward_2", "solved_1", "solved_2", "problems_solved", "repaired", "entropy",
)  # fmt: skip
CPU = torch.device("cpu")


# ---------------------------------------------------------------------- one run


def run(method: Method, seed: int, output: Path) -> list[dict]:
    """Train one method from the seed's base, evaluate it, and put both into the CSV files."""
    torch.set_num_threads(1)
    name = {"world": method.world, "seed": seed, "method": method.name}
    if method.name == "base":
        folder = toy.base_model(method.world, seed, output / "runs")
    else:
        folder = output / "runs" / f"{method.world}-{method.name}-seed{seed}"
        train(matched(method, seed, output), seed, folder)
        curve = [name | row for row in steps(folder)]
        record.replace(output / "curves.csv", curve, ["world", "seed", "method", "step"])
    rows = [name | row | {"commit": record.commit()} for row in scores(folder, method, seed)]
    # These rows come last: they are what says that the run is done.
    key = ["world", "seed", "method", "decoding", "difficulty", "k"]
    record.replace(output / "study.csv", rows, key)
    return rows


def matched(method: Method, seed: int, output: Path) -> Method:
    """GRPO with as many programs a step as its peer had, on average; other methods as they are."""
    if method.name != "grpo":
        return method
    peer = (method.world, str(seed), MATCHED[method.world])
    programs = []
    for row in record.read(output / "curves.csv"):
        if (row["world"], row["seed"], row["method"]) == peer:
            programs.append(int(row["programs"]))
    problems = method.settings.get("problems_per_step", 8)
    group_size = math.ceil(mean(programs) / problems)
    return replace(method, settings=method.settings | {"group_size": group_size})


def train(method: Method, seed: int, folder: Path) -> None:
    """What murphy.train does, with verdicts remembered and without its tables at the end."""
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run has left
    folder.mkdir(parents=True)
    config = murphy.Config(
        **method.settings,
        seed=seed,
        output=str(folder),
        eval_every=0,
        eval_count=8,
        eval_iterations=1,
        save_every=0,
        log_trees_every=1 if method.world == "cutoff" else 0,  # for the first guesses
    )
    rule = shuffled if method.name == "mars-shuffled" else murphy.propagate
    with quiet(folder / "log.txt"), patch.object(murphy, "propagate", rule):
        state = State(config, folder, CPU, toy_data(config))
        state.execute = always_fails if method.name == "always-failed" else remembered
        with Signals() as signals:
            murphy.loop(state, signals)
        state.save_model(folder)


def quiet(path: Path) -> contextlib.ExitStack:
    """What is printed and warned of inside goes to a file."""
    stack = contextlib.ExitStack()
    log = stack.enter_context(open(path, "w"))  # noqa: SIM115  the stack closes it
    stack.enter_context(contextlib.redirect_stdout(log))
    stack.enter_context(contextlib.redirect_stderr(log))
    return stack


def steps(folder: Path) -> list[dict]:
    """The rows of curves.csv of a run, with what its first attempts guessed, in world "cutoff"."""
    guesses: dict[int, list[str]] = {}
    trees = folder / "trees.jsonl"
    if trees.exists():
        with open(trees) as lines:
            for tree in map(json.loads, lines):
                codes = [node["code"] for node in tree["children"] if node["code"]]
                guesses.setdefault(tree["step"], []).extend(code.split()[-1] for code in codes)
        trees.unlink()  # it is large, and what is shown of it is known by now

    rows = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        row = {"step": line["step"]}
        for name in CURVES:
            value = line.get(name)
            row[name] = value if value is None or isinstance(value, int) else f"{value:.4g}"
        made = guesses.get(line["step"], [])
        distinct = sorted(set(made), key=lambda guess: (len(guess), guess))
        row["first_guesses"] = " ".join(f"{guess}:{made.count(guess)}" for guess in distinct)
        rows.append(row)
    return rows


def scores(folder: Path, method: Method, seed: int) -> list[dict]:
    """Iter-1 to Iter-5 of a saved model, sampled and greedy; for MARS without feedback, too."""
    model, tokenizer = load_model(str(folder), CPU)
    problems = toy.problems(method.world, "test", PROBLEMS, f"study {seed}")
    ways = [("sampled", 1.0, remembered), ("greedy", 0.0, remembered)]
    if (method.world, method.name) == ("doctest", "mars"):
        ways.append(("no feedback", 1.0, without_feedback))
    rows = []
    for decoding, temperature, execute in ways:
        torch.manual_seed(seed)
        sample = Sampler(model, tokenizer, max_new_tokens=16, temperature=temperature)
        summary = evaluate(problems, sample, execute, ITERATIONS)
        for difficulty, at_k in summary["Iter-k"].items():
            for k, score in enumerate(at_k, 1):
                row = {"decoding": decoding, "difficulty": difficulty, "k": k}
                row |= {"problems": score["n"], "value": round(score["value"], 4)}
                rows.append(row)
    return rows


# ---------------------------------------------------------------------- executors and controls

VERDICTS: dict = {}  # (problem, program) -> result: a tiny model repeats itself


def remembered(jobs: list) -> list:
    """The executor, which runs only what it has not judged before. Programs are counted alike."""
    keys = [(problem.id.split("#")[0], code) for problem, code in jobs]
    new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in VERDICTS}
    results = executor.run_many(list(new.values()), feedback_tests=1, workers=1)
    VERDICTS.update(zip(new, results, strict=True))
    return [VERDICTS[key] for key in keys]


def without_feedback(jobs: list) -> list:
    """Verdicts without their text: the chain goes on, but the model is told nothing."""
    return [replace(result, feedback="") for result in remembered(jobs)]


def always_fails(jobs: list) -> list:
    """A control that must not learn: no program passes a test."""
    return [executor.verdict("failed", "failed", [False]) for _ in jobs]


def shuffled(tree: murphy.Node, *arguments: object, **options: object) -> None:
    """A control that must not learn: each credit is right, but belongs to a random sibling."""
    PROPAGATE(tree, *arguments, **options)
    for group in murphy.groups(tree):
        credits = [node.credit for node in group]
        random.shuffle(credits)
        for node, credit in zip(group, credits, strict=True):
            node.credit = credit


PROPAGATE = murphy.propagate


def check_always_fails(output: Path) -> str:
    """Where every program fails, the model must stay as it was, and the run must say so."""
    folder = output / "runs" / "always-failed"
    train(Method("doctest", "always-failed", 1, MAIN, A | {"steps": 3}), 1, folder)
    base = load_model(str(toy.base_model("doctest", 1, output / "runs")), CPU)[0].state_dict()
    after = load_model(str(folder), CPU)[0].state_dict()
    same = all(torch.equal(base[name], after[name]) for name in base)
    said = [line for line in plot(folder).splitlines() if "nothing could be learned" in line]
    state = "unchanged" if same else "CHANGED"
    words = "; ".join(said)
    return f"an executor that fails everything leaves the model {state}; the run says: {words}"


# ---------------------------------------------------------------------- all runs


def done(output: Path) -> set[tuple[str, int, str]]:
    """The runs in the CSV whose code is still the present one."""
    rows = record.read(output / "study.csv")
    current = {since for since in {row["commit"] for row in rows} if record.is_current(since)}
    return {(r["world"], int(r["seed"]), r["method"]) for r in rows if r["commit"] in current}


def run_seed(methods: list[Method], seed: int, output: Path) -> None:
    """The runs of one world and seed, one after another, in a process of their own."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for method in methods:
        start = time.time()
        rows = run(method, seed, output)
        score = next(row for row in rows if row["k"] == ITERATIONS and row["difficulty"] == "all")
        minutes = (time.time() - start) / 60
        found = f"Iter-{ITERATIONS} {100 * score['value']:.1f}%, {minutes:.1f} minutes"
        print(f"{method.world} seed {seed} {method.name}: {found}", flush=True)
    executor.close()


def plan(seeds: range, worlds: list[str], finished: set) -> list[tuple[list[Method], int]]:
    """What is still to be run, as lists for `run_seed`, the main claims first."""
    parts = []
    waves = [MAIN, REST] if len(seeds) == 1 else [MAIN, REST, ABLATION]
    for wave in waves:
        for number, seed in enumerate(seeds):
            for world in worlds:
                listed = [m for m in METHODS if (m.world, m.wave) == (world, wave)]
                listed = [m for m in listed if number < m.seeds]
                missing = [m for m in listed if (world, seed, m.name) not in finished]
                if missing:
                    parts.append((missing, seed))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="at most so many of each method")
    parser.add_argument("--first-seed", type=int, default=1, help="1 is the first reported one")
    parser.add_argument("--worlds", nargs="+", default=list(MATCHED), choices=list(MATCHED))
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--output", type=Path, default=record.HERE, help="folder of the CSV files")
    args = parser.parse_args()
    if args.seeds < 1 or args.workers < 1:
        sys.exit("study.py: --seeds and --workers must be at least 1")
    args.output.mkdir(parents=True, exist_ok=True)

    seeds = range(args.first_seed, args.first_seed + args.seeds)
    parts = plan(seeds, args.worlds, done(args.output))
    print(f"{sum(len(methods) for methods, _ in parts)} runs to make", flush=True)
    try:
        with ProcessPoolExecutor(args.workers) as pool:
            running = [pool.submit(run_seed, *part, args.output) for part in parts]
            for future in running:
                future.result()
        if "doctest" in args.worlds:
            print(check_always_fails(args.output), flush=True)
    except KeyboardInterrupt:
        sys.exit("study.py: stopped; the same command goes on")
    report.main(args.output)


if __name__ == "__main__":
    main()
