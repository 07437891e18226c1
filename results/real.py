"""A real pretrained model on a CPU: does it learn to correct itself? SmolLM2-135M-Instruct.

    python results/real.py --model FOLDER --output FOLDER                               all of it
    python results/real.py --model FOLDER --output FOLDER --methods mars --seeds 1      a part

The problems are those of world A, in the model's own chat template. (On MBPP a model of this size
solves too little to learn from: see README.md.)

1. Start (start.py): the model is trained on right answers, and on repairs: a program with a planted
   fault, what the executor says of it, and the right program. So it learns to end its answers. All
   methods begin from it.
2. Train with MARS, MERS, none, and GRPO with as many programs a step as MARS had.
3. Evaluate all by chains of three attempts. Beside this file: real.csv has a row for each model.
   real_paired.csv has a method's gain minus that of a peer; the gain is Iter-3 minus Iter-1.

Each stage leaves its files in --output, and the same command goes on where it was stopped.
"""

# ruff: noqa: E402
import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import record
import report
from start import make_start

import executor
from evaluate import bootstrap, iter_k
from support import toy
from support.run import write

K = 3  # attempts in a chain
METHODS = ("mars", "mers", "none", "grpo")
PEERS = ("start", "none", "grpo")  # what a method is compared with
# The same in training and evaluation; start.py shows feedback of this kind, too.
SAMPLING = {"temperature": 1.0, "max_new_tokens": 80, "feedback_tests": 3}
TRAINING = {  # options of murphy.py
    "problems": "doctest", "problems_per_step": 4, "minibatches": 1, "learning_rate": 2e-5,
    "warmup": 3, "micro_tokens": 4096, "eval_every": 0, "eval_iterations": 1, "eval_count": 1,
    "save_every": 5,
}  # fmt: skip


def python(script: str, *flags: str, **options: object) -> None:
    """Run a script of the project; its options are named with _ for -."""
    command = [sys.executable, str(record.ROOT / script), *flags]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"real.py: {script} did not end well; the same command goes on")


def train(args: argparse.Namespace, start: Path, method: str, seed: int) -> Path:
    """Train one method from the start; a stopped run goes on from its checkpoint."""
    folder = args.output / f"{method}-seed{seed}"
    if (folder / "done").exists():
        return folder
    if (folder / "settings.json").exists():
        python("murphy.py", "--resume", output=folder)
    else:
        rule = {"turns": 2, "credit": method, "group_size": 4}
        if method == "grpo":
            rule = {"turns": 1, "credit": "none", "group_size": matched(args, seed)}
        run = {"model": start, "steps": args.steps, "seed": seed, "output": folder}
        python("murphy.py", **rule, **run, **TRAINING, **SAMPLING)
    write(folder / "done", "")
    return folder


def matched(args: argparse.Namespace, seed: int) -> int:
    """The group size with which GRPO gets as many programs a step as MARS had on average."""
    peer = args.output / f"mars-seed{seed}"
    if not (peer / "done").exists():
        sys.exit("real.py: grpo gets as many programs as mars had, so train mars first")
    lines = (peer / "metrics.jsonl").read_text().splitlines()
    programs = mean(json.loads(line)["programs"] for line in lines)
    return round(programs / TRAINING["problems_per_step"])


def evaluate(args: argparse.Namespace, model: Path, name: str, seed: int) -> None:
    """Chains of three attempts at each held-out problem; the result stays in a folder."""
    folder = args.output / f"eval-{name}-seed{seed}"
    if not (folder / "result.json").exists():
        what = {"model": model, "benchmark": "doctest", "limit": args.held_out}
        how = {"iterations": K, "seed": seed, "chunk": 64}
        python("evaluate.py", output=folder, **what, **how, **SAMPLING)


def results(output: Path) -> dict[tuple[str, int], dict]:
    """The evaluations in a folder: (method, seed) -> summary."""
    found = {}
    for path in sorted(output.glob("eval-*-seed*/result.json")):
        method, seed = path.parent.name.removeprefix("eval-").split("-seed")
        found[method, int(seed)] = json.loads(path.read_text())
    return found


def gains(summary: dict) -> dict[str, float]:
    """Problem -> what the later attempts of its chain add to the first, in points: 0 or 100."""
    entries = summary["problems"].items()
    return {name: 100 * (iter_k(entry, K) - iter_k(entry, 1)) for name, entry in entries}


def scores(found: dict, commit: str) -> list[dict]:
    """A row for each evaluation, in percent.

    gain: Iter-3 minus Iter-1, with its interval. repaired: of the chains that failed at first, how
    many were solved later. repeated: of all attempts, how many their chain had made before.
    """
    rows = []
    for (method, seed), summary in found.items():
        entries = summary["problems"].values()
        row = {"commit": commit, "method": method, "seed": seed, "problems": len(entries)}
        at = [100 * mean(iter_k(entry, k) for entry in entries) for k in range(1, K + 1)]
        row |= {f"iter_{k}": round(score, 1) for k, score in enumerate(at, 1)}
        row |= interval("gain", [*gains(summary).values()])
        row["repaired"] = round(100 * (at[-1] - at[0]) / (100 - at[0]), 1) if at[0] < 100 else ""
        made = summary["chain"]
        row["repeated"] = round(100 * made["repeated"] / made["attempts"], 1)
        row["truncated"] = round(100 * made["truncated"] / made["attempts"], 1)
        rows.append(row)
    return rows


def interval(name: str, values: list[float]) -> dict[str, float]:
    """The mean of some values, one for each problem, and its 95% bootstrap interval."""
    low, high = bootstrap(values)
    return {name: round(mean(values), 1), "low": round(low, 1), "high": round(high, 1)}


def paired(found: dict, commit: str) -> list[dict]:
    """How much more a method gains than its peers, problem by problem.

    For each problem the difference is averaged over the seeds that both have. The interval is over
    problems: it says nothing of other seeds, or of another start. seeds_low and seeds_high are the
    smallest and the largest mean of one seed.
    """
    rows = []
    for method in METHODS:
        for peer in PEERS:
            seeds = [seed for name, seed in found if name == method and (peer, seed) in found]
            if method == peer or not seeds:
                continue
            by_seed = [differences(found[method, seed], found[peer, seed]) for seed in seeds]
            values = [mean(differ[name] for differ in by_seed) for name in by_seed[0]]
            of_seeds = [round(mean(differ.values()), 1) for differ in by_seed]
            row = {"commit": commit, "method": method, "peer": peer, "seeds": len(seeds)}
            row |= interval("more_gain", values)
            row |= {"seeds_low": min(of_seeds), "seeds_high": max(of_seeds)}
            rows.append(row)
    return rows


def differences(ours: dict, theirs: dict) -> dict[str, float]:
    """Problem -> by how much our gain is larger than theirs."""
    theirs = gains(theirs)
    return {name: gain - theirs[name] for name, gain in gains(ours).items()}


def draw(rows: list[dict], path: Path) -> None:
    """Iter-1 to Iter-3 of each method: thin lines for the seeds, a thick one for their mean."""
    report.plt.rcParams.update(report.STYLE)
    _, axes = report.plt.subplots(figsize=(5, 3.6))
    ks = range(1, K + 1)
    for method in ("start", *METHODS):
        lines = [[row[f"iter_{k}"] for k in ks] for row in rows if row["method"] == method]
        if not lines:
            continue
        colour = report.COLOURS["base" if method == "start" else method]
        for line in lines:
            axes.plot(ks, line, color=colour, linewidth=0.7, alpha=0.4)
        means = [mean(at_k) for at_k in zip(*lines, strict=True)]
        axes.plot(ks, means, color=colour, linewidth=2.5, label=f"{method}, mean of {len(lines)}")
    axes.set(xlabel="attempts (k)", ylabel="held-out problems solved, %", xticks=ks)
    axes.legend()
    report.plt.savefig(path, dpi=130, bbox_inches="tight", metadata={"Software": ""})


def write_tables(args: argparse.Namespace) -> None:
    """real.csv, real_paired.csv and real.png, of all evaluations in --output and of no others."""
    found, commit = results(args.output), (args.output / "commit").read_text()
    of_models = scores(found, commit)
    for name, rows in (("real", of_models), ("real_paired", paired(found, commit))):
        path = args.table / f"{name}.csv"
        record.replace(path, rows, [])  # all rows agree in no column: the file is made anew
        print(report.csv_table(path))
    draw(of_models, args.table / "real.png")


def check_same(args: argparse.Namespace) -> None:
    """All stages in a folder are of the same options; else the program ends.

    The commit that began the folder is written down with them, for the tables.
    """
    fixed = {"model": args.model, "shown": args.shown, "epochs": args.epochs, "steps": args.steps}
    fixed |= {"start_rate": args.start_rate, "held_out": args.held_out}
    fixed |= {"training": TRAINING, "sampling": SAMPLING}
    path = args.output / "options.json"
    if not path.exists():
        write(path, json.dumps(fixed))
        write(args.output / "commit", record.commit())
    before = json.loads(path.read_text())
    changed = [name for name in fixed if before[name] != fixed[name]]
    if changed:
        sys.exit(
            f"real.py: {args.output} was begun with other {', '.join(changed)}: name a new one"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--output", required=True, type=Path, help="folder of all stages")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--shown", type=int, default=120, help="problems that the start imitates")
    parser.add_argument("--epochs", type=int, default=1, help="of the start")
    parser.add_argument("--start-rate", type=float, default=5e-5, help="learning rate of the start")
    parser.add_argument("--steps", type=int, default=20, help="of each method")
    parser.add_argument("--held-out", type=int, default=120, help="problems to evaluate")
    parser.add_argument("--table", type=Path, default=record.HERE, help="folder of real.csv")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    check_same(args)

    shown = toy.problems("doctest", "train", args.shown, "start")
    start = make_start(args.model, args.output / "start", shown, args.epochs, args.start_rate)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        evaluate(args, start, "start", seed)
        for method in args.methods:
            evaluate(args, train(args, start, method, seed), method, seed)
    write_tables(args)
    executor.close()


if __name__ == "__main__":
    main()
