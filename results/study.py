"""The paper's claims on two toy worlds, with seeds and spread: python results/study.py --seeds 5   (about 90 minutes, 2 cores)

Per seed one base model is warm-started, and each method trains from it with the same number of executed programs a step.
World A ("doctest"): does training on feedback beat compute-matched GRPO, what does pruning cost, do the controls fail?
World B ("cutoff"): what does propagation add where an attempt's own reward says nothing of its worth?
In: seeds 1 to N. Seed 0 was used to choose every setting and is never reported. Out, beside this file: study.csv (a line
per world, seed, method, decoding, difficulty and Iter-k), curves.csv (a line per step of each run), three pictures, and the
tables on the screen. Interrupted, the same command goes on where it stopped. `--seeds 1` leaves the ablations out and takes
about 10 minutes.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a run a core: one thread each beats two runs that share two

import torch  # noqa: E402

import executor  # noqa: E402
import murphy  # noqa: E402
import toy  # noqa: E402
from evaluate import distinct, evaluate, iter_k  # noqa: E402
from tree import load_model, make_sampler  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()

A = {"problems": "doctest", "steps": 100}
B = {"problems": "cutoff", "steps": 100, "turns": 4, "group_size": 3, "problems_per_step": 12, "learning_rate": 1e-3}
GRPO = {"turns": 1, "credit": "none", "group_size": 0}  # 0: as many programs as the world's matched method executed
# world -> method -> settings. The ablations and the shuffled control run on the first seed only, and not where it is the only one.
METHODS = {
    "doctest": {
        "mars": A | {"credit": "mars"}, "grpo": A | GRPO, "none": A | {"credit": "none"}, "mers": A | {"credit": "mers"},
        "mars-interp": A | {"inter_budget": 5}, "mars-intrap": A | {"intra_budget": 4}},
    "cutoff": {
        "mers": B | {"credit": "mers"}, "grpo": B | GRPO, "none": B | {"credit": "none"}, "mars": B | {"credit": "mars"}},
}
ABLATIONS = {
    "doctest": {
        "mers-gamma0.5": A | {"credit": "mers", "gamma": 0.5}, "mers-gamma0.9": A | {"credit": "mers", "gamma": 0.9},
        "mars-g4": A | {"group_size": 4, "problems_per_step": 28}, "mars-g16": A | {"group_size": 16, "problems_per_step": 2},
        "mars-s3": A | {"turns": 3, "group_size": 4, "problems_per_step": 7}, "mars-shuffled": A},
    "cutoff": {"mars-g8-s3": B | {"turns": 3, "group_size": 8, "problems_per_step": 3}},
}
MATCHED = {"doctest": "mars", "cutoff": "mers"}  # the method that GRPO is given as many programs as
FIELDS = ["world", "seed", "method", "decoding", "difficulty", "k", "problems", "value"]
CURVES = ["world", "seed", "method", "step", "programs", "tokens", "sampling", "executing", "updating", "groups_with_spread", "spread_1",
          "reward_1", "reward_2", "solved_1", "solved_2", "problems_solved", "repaired", "first_guesses"]
PROBLEMS, ITERATIONS = 360, 5


def run(world: str, seed: int, method: str, settings: dict, folder: Path) -> tuple[list[dict], list[dict]]:
    """Train one method from the seed's base and evaluate it; returns lines for study.csv and curves.csv."""
    torch.set_num_threads(1)
    where = folder / f"{world}-{method}-seed{seed}"
    held_out = distinct(toy.problems(world, "test", PROBLEMS, f"study {seed}"))
    if method == "base":
        return scores(toy.base_model(world, seed, folder), held_out, world, seed, method), []
    if settings.get("group_size") == 0:
        peer = [json.loads(line) for line in (folder / f"{world}-{MATCHED[world]}-seed{seed}" / "metrics.jsonl").open()]
        problems = settings.get("problems_per_step", 8)
        settings = settings | {"group_size": math.ceil(mean(line["programs"] for line in peer) / problems)}
    if where.exists():  # left by an interrupted run: its lines are not in the CSV, so it is run again, in a new folder
        where.rename(where.with_name(f"{where.name}.interrupted-{time.time_ns()}"))
    guesses = []
    executor.run_many = remembered  # programs are counted all the same
    murphy.propagate = shuffled if method == "mars-shuffled" else PROPAGATE
    config = murphy.Config(**settings, seed=seed, output=str(where), eval_every=0, eval_count=8, eval_iterations=1, log_trees_every=1)
    with open(folder / f"{where.name}.log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        murphy.train(config)
    with open(where / "trees.jsonl") as forest:
        for line in forest if world == "cutoff" else ():
            tree = json.loads(line)
            guesses += [(tree["step"], node["code"].split()[-1]) for node in tree["children"] if node["code"]]
    (where / "trees.jsonl").unlink()  # large, and everything that is shown is in the CSV by now
    curves = []
    for line in map(json.loads, (where / "metrics.jsonl").open()):
        first = [guess for step, guess in guesses if step == line["step"]]
        count = {g: first.count(g) for g in sorted(set(first), key=lambda g: (len(g), g))}
        curves.append({name: line.get(name) for name in CURVES} | {"world": world, "seed": seed, "method": method,
                                                                  "first_guesses": " ".join(f"{g}:{n}" for g, n in count.items())})
    return scores(where, held_out, world, seed, method), curves


PROPAGATE, RUN_MANY, VERDICTS = murphy.propagate, executor.run_many, {}


def remembered(jobs: list, **limits) -> list:
    """run_many that knows what it has judged: a tiny policy repeats itself, and an id names one toy problem."""
    if not all(hasattr(problem, "id") for problem, _ in jobs):
        return RUN_MANY(jobs, **limits)  # the self-check's own
    new = {(problem.id.split("#")[0], code): (problem, code) for problem, code in jobs}
    new = {key: job for key, job in new.items() if key not in VERDICTS}
    VERDICTS.update(zip(new, RUN_MANY(list(new.values()), max_failures=1, workers=1), strict=True))
    return [VERDICTS[problem.id.split("#")[0], code] for problem, code in jobs]


def shuffled(tree, *args, **kwargs) -> None:
    """A control that must not learn: every credit is right, but belongs to a sibling drawn at random."""
    PROPAGATE(tree, *args, **kwargs)
    for group in murphy.groups(tree):
        credits = [node.credit for node in group]
        random.shuffle(credits)
        for node, credit in zip(group, credits, strict=True):
            node.credit = credit


def scores(path: Path, held_out: list, world: str, seed: int, method: str) -> list[dict]:
    """Iter-1..5 of a saved model, sampled and greedy, in all and by difficulty; for MARS in world A without feedback too."""
    model, tokenizer = load_model(str(path), torch.device("cpu"))
    execute = remembered
    lines = []
    for decoding, temperature, run_tests in (("sampled", 1.0, execute), ("greedy", 0.0, execute), ("no feedback", 1.0, blind)):
        if decoding == "no feedback" and (world, method) != ("doctest", "mars"):
            continue
        torch.manual_seed(seed)
        sample = make_sampler(model, tokenizer, max_new_tokens=16, temperature=temperature)
        entries = evaluate(held_out, sample, run_tests, ITERATIONS)["problems"].values()
        for name in ("all", *sorted({str(e["difficulty"]) for e in entries} - {"None"})):
            mine = [e for e in entries if name in ("all", e["difficulty"])]
            lines += [{"world": world, "seed": seed, "method": method, "decoding": decoding, "difficulty": name, "k": k,
                       "problems": len(mine), "value": round(mean(iter_k(e, k) for e in mine), 4)} for k in range(1, ITERATIONS + 1)]
    return lines


def blind(jobs: list) -> list:
    """Verdicts without their text: the chain goes on, but the model is told nothing."""
    return [SimpleNamespace(**vars(result) | {"feedback": ""}) for result in remembered(jobs)]


def always_failed(folder: Path) -> str:
    """The third control: an executor that fails everything must leave the model as it was, and say so."""
    where = folder / f"always-failed-{time.time_ns()}"
    real, base = (executor.run_many, executor.self_check), toy.base_model("doctest", 1, folder)
    executor.self_check = lambda: None  # it would notice, and stop the run before the first step
    executor.run_many = lambda jobs, **limits: [SimpleNamespace(reward=0.0, status="failed", feedback="failed", public_passed=False)
                                               for _ in jobs]
    try:
        with open(folder / "always-failed.log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            murphy.train(murphy.Config(steps=3, output=str(where), eval_count=8, eval_iterations=1, eval_every=0, seed=1))
    finally:
        executor.run_many, executor.self_check = real
    before, after = (load_model(str(path), torch.device("cpu"))[0].state_dict() for path in (base, where))
    same = all(torch.equal(before[name], after[name]) for name in before)
    said = next(line for line in (folder / "always-failed.log").read_text().splitlines() if "nothing could be learned" in line)
    return f"{'unchanged' if same else 'CHANGED'}; it said: {said}"


def append(path: Path, fields: list[str], lines: list[dict]) -> None:
    """Add lines to a CSV, the heading first if it is new; flushed as one write, so a kill leaves whole runs."""
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to N")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("--worlds", nargs="+", default=list(METHODS), choices=list(METHODS), help="which worlds")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the CSV files and pictures; runs go to its runs/")
    parser.add_argument("--report", action="store_true", help="only tables and pictures of what is there")
    args = parser.parse_args()
    if args.seeds < 1 or args.workers < 1:
        sys.exit(f"study.py: --seeds and --workers must be at least 1, got {args.seeds} and {args.workers}")
    folder, study, curves = args.output / "runs", args.output / "study.csv", args.output / "curves.csv"
    folder.mkdir(parents=True, exist_ok=True)
    if not args.report:
        done = {(row["world"], int(row["seed"]), row["method"]) for row in csv.DictReader(study.open())} if study.exists() else set()
        jobs = [(world, seed, method, settings) for seed in range(1, args.seeds + 1) for world in args.worlds for method, settings in
                ({"base": {}} | METHODS[world] | (ABLATIONS[world] if seed == 1 < args.seeds else {})).items()]
        # What the main claims need comes first, for every seed: a study that is stopped early has them.
        jobs.sort(key=lambda job: job[2] not in ("base", *list(METHODS[job[0]])[:3]) and 1 + (job[2] in ABLATIONS[job[0]]))
        todo = [job for job in jobs if job[:3] not in done]
        print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them done before", flush=True)
        finished, waiting, start = set(done), list(todo), time.time()
        with ProcessPoolExecutor(args.workers) as pool:
            running = {}
            while waiting or running:
                for job in list(waiting):  # a base comes before its methods, the matched method before its GRPO
                    world, seed, method, _ = job
                    needs = {"base"} - {method} | ({MATCHED[world]} if method == "grpo" else set())
                    if len(running) < args.workers and all((world, seed, need) in finished for need in needs):
                        waiting.remove(job)
                        running[pool.submit(run, *job, folder)] = job
                future = next(as_completed(running))
                world, seed, method, _ = running.pop(future)
                lines, steps = future.result()
                append(curves, CURVES, steps)
                append(study, FIELDS, lines)  # last: its line is what says that a run is done
                finished.add((world, seed, method))
                value = next(line["value"] for line in lines if line["k"] == ITERATIONS and line["difficulty"] == "all")
                print(f"{(time.time() - start) / 60:5.1f} min  {world} seed {seed} {method}: Iter-{ITERATIONS} {100 * value:.1f}%, "
                      f"{len(waiting) + len(running)} to go", flush=True)
        print("an executor that fails everything leaves the model " + always_failed(folder), flush=True)
    import report  # pictures and tables: a file of their own, so that this one stays what was run
    report.main(args.output)


if __name__ == "__main__":
    main()
