"""A real pretrained model on a CPU: does it learn to correct itself? SmolLM2-135M-Instruct on MBPP.

    python results/real.py --model FOLDER --mbpp mbpp.jsonl --output FOLDER
    python results/real.py ... --direct --methods mars --seeds 1      without the supervised start

1. Start (start.py): supervised, in the product's own prompts and fences, on references of half of
   MBPP's training problems, and on repairs: a reference with a planted fault, what the executor
   says of it, and the reference. It teaches answers that end. All methods share it.
2. Choose problems that the start solves sometimes: training ones from the other half, held-out ones
   from MBPP's test split. What is reported is sampled anew.
3. Train with MARS, MERS, none, and GRPO with as many programs a step as MARS had.
4. Evaluate all by chains of three attempts; write real.csv and real.png beside this file.

Each stage leaves its files in --output, and the same command goes on where it was stopped.
"""

# ruff: noqa: E402
import argparse
import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import record
import report
import torch
from start import make_start

import executor
from evaluate import bootstrap, iter_k
from support.problems import Problem, load_problems
from support.run import write
from support.sampling import Sampler, load_model
from tree import build_trees

K = 3  # attempts in a chain
CPU = torch.device("cpu")
SAMPLING = {"temperature": 0.6, "max_new_tokens": 128}  # of murphy.py and evaluate.py
TRAINING = {  # options of murphy.py
    "problems_per_step": 3, "minibatches": 1, "learning_rate": 2e-5, "warmup": 3,
    "micro_tokens": 4096, "eval_every": 0, "eval_iterations": 1, "eval_count": 1, "save_every": 5,
}  # fmt: skip


def load_short(args: argparse.Namespace, *splits: str) -> list[Problem]:
    """The problems of some splits whose reference is short, in a fixed random order."""
    found = []
    for split in splits:
        found += load_problems(args.mbpp, split=split, execute=executor.run_many)
    short = [p for p in found if len(p.reference.strip().splitlines()) <= args.lines]
    random.Random(0).shuffle(short)
    return short


def choose(args: argparse.Namespace, start: Path, name: str, problems: list[Problem]) -> Path:
    """Write the first `--problems` problems that the start solves in 1 to 7 of 8 attempts."""
    path = args.output / f"{name}.jsonl"
    if path.exists():
        return path
    model, tokenizer = load_model(str(start), CPU)
    sample = Sampler(model, tokenizer, max_new_tokens=128, temperature=0.6)
    torch.manual_seed(0)
    chosen, tried = [], 0
    while len(chosen) < args.problems and tried < len(problems):
        part = problems[tried : tried + 16]
        tried += len(part)
        trees = build_trees(part, sample, executor.run_many, turns=1, group_size=8)
        for problem, tree in zip(part, trees, strict=True):
            if 0 < sum(node.solved for node in tree.children) < 8:
                chosen.append(problem)
    lines = [json.dumps(asdict(problem)) + "\n" for problem in chosen[: args.problems]]
    print(f"{name}: {len(lines)} problems, {tried} were tried", flush=True)
    if not lines:
        sys.exit(f"real.py: the start solves none of the {name} problems sometimes")
    write(path, "".join(lines))
    return path


def python(script: str, *flags: str, **options: object) -> None:
    """Run a script of the project; its options are named with _ for -."""
    command = [sys.executable, str(record.ROOT / script), *flags]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    subprocess.run(command, check=True)


def train(args: argparse.Namespace, start: Path, method: str, seed: int) -> Path:
    """Train one method from the start; a stopped run goes on from its checkpoint."""
    folder = args.output / f"{method}-seed{seed}"
    if (folder / "model.safetensors").exists():
        return folder
    if (folder / "settings.json").exists():
        python("murphy.py", "--resume", output=folder)
        return folder
    rule = {"turns": 2, "credit": method, "group_size": 4}
    if method == "grpo":  # as many programs a step as MARS had
        log = (args.output / f"mars-seed{seed}" / "metrics.jsonl").read_text()
        programs = mean(json.loads(line)["programs"] for line in log.splitlines())
        group = round(programs / TRAINING["problems_per_step"])
        rule = {"turns": 1, "credit": "none", "group_size": group}
    rule |= {"problems": args.output / "train.jsonl"}
    rule |= {"eval_problems": args.output / "held-out.jsonl"}
    run = {"steps": args.steps, "seed": seed, "output": folder}
    python("murphy.py", model=start, **rule, **run, **TRAINING, **SAMPLING)
    return folder


def evaluate(args: argparse.Namespace, model: Path, name: str, seed: int) -> list[dict]:
    """Iter-k of a model on the held-out problems, and what later attempts add to the first."""
    folder = args.output / f"eval-{name}-seed{seed}"
    if not (folder / "result.json").exists():
        held_out = args.output / "held-out.jsonl"
        chains = {"iterations": K, "samples": args.samples, "seed": seed, "output": folder}
        python("evaluate.py", model=model, benchmark=held_out, **chains, **SAMPLING)
    result = json.loads((folder / "result.json").read_text())
    entries = list(result["problems"].values())
    commit = (args.output / "commit").read_text()
    row = {"commit": commit, "method": name, "seed": seed, "problems": len(entries)}
    for k in range(1, K + 1):
        row[f"iter_{k}"] = round(100 * mean(iter_k(entry, k) for entry in entries), 1)
    gains = [100 * (iter_k(entry, K) - iter_k(entry, 1)) for entry in entries]
    low, high = bootstrap(gains)
    row |= {"gain": round(mean(gains), 1), "low": round(low, 1), "high": round(high, 1)}
    made = result["chain"]
    for count in ("repeated", "truncated"):
        row[count] = round(100 * made[count] / made["attempts"], 1)
    return [row]


def draw(rows: list[dict], path: Path) -> None:
    """Iter-1 to Iter-3 of each method, a thin line for each seed."""
    report.plt.rcParams.update(report.STYLE)
    _, axes = report.plt.subplots(figsize=(5, 3.6))
    for row in rows:
        name = "base" if row["method"] == "start" else row["method"]
        label = row["method"] if row["seed"] == 1 else None
        scores = [row[f"iter_{k}"] for k in range(1, K + 1)]
        axes.plot(range(1, K + 1), scores, color=report.COLOURS[name], label=label)
    axes.set(xlabel="attempts (k)", ylabel="held-out problems solved, %", xticks=range(1, K + 1))
    axes.legend()
    report.plt.savefig(path, dpi=130, bbox_inches="tight", metadata={"Software": ""})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--mbpp", required=True, help="mbpp.jsonl, with all splits")
    parser.add_argument("--output", required=True, type=Path, help="folder of all stages")
    parser.add_argument("--direct", action="store_true", help="leave the supervised start out")
    parser.add_argument("--methods", nargs="+", default=["mars", "mers", "none", "grpo"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="of the start")
    parser.add_argument("--start-rate", type=float, default=2e-5, help="learning rate of the start")
    parser.add_argument("--lines", type=int, default=8, help="of a reference, at most")
    parser.add_argument("--problems", type=int, default=40, help="to train on, and held out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=8, help="chains of each held-out problem")
    parser.add_argument("--table", type=Path, default=record.HERE, help="folder of real.csv")
    args = parser.parse_args()
    if "grpo" in args.methods and args.methods[0] != "mars":
        sys.exit("real.py: grpo gets as many programs as mars had, so --methods begins with mars")
    args.output.mkdir(parents=True, exist_ok=True)
    began = args.output / "commit"  # all stages in a folder are of the code that began it
    if not began.exists():
        write(began, record.commit())

    training = load_short(args, "train", "validation")
    half = len(training) // 2
    start = Path(args.model)
    if not args.direct:
        folder = args.output / "start"
        start = make_start(args.model, folder, training[:half], args.epochs, args.start_rate)
    choose(args, start, "train", training[half:])
    choose(args, start, "held-out", load_short(args, "test"))
    rows = []
    for seed in range(1, args.seeds + 1):
        rows += evaluate(args, start, "start", seed)
        for method in args.methods:
            rows += evaluate(args, train(args, start, method, seed), method, seed)
    record.replace(args.table / "real.csv", rows, ["method", "seed"])
    draw(rows, args.table / "real.png")
    print(report.csv_table(args.table / "real.csv"))
    executor.close()


if __name__ == "__main__":
    main()
