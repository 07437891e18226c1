"""A real pretrained model on a CPU: does it learn to correct itself? SmolLM2-135M-Instruct on MBPP.

    python results/real.py --model FOLDER --mbpp mbpp.jsonl --output FOLDER
    python results/real.py ... --direct --methods mars --seeds 1      without the supervised start

1. Start: supervised, in the product's own prompts and fences, on references of half of MBPP's
   training problems, and on repairs: a reference with a planted fault, what the executor says of
   it, and the reference. It teaches answers that end. All methods share it.
2. Choose problems that the start solves sometimes: training ones from the other half, held-out ones
   from MBPP's test split. What is reported is sampled anew.
3. Train with MARS, MERS, none, and GRPO with as many programs a step as MARS had.
4. Evaluate all by chains of three attempts; write real.csv and real.png beside this file.

Each stage leaves its files in --output, and the same command goes on where it was stopped.
"""

# ruff: noqa: E402
import argparse
import ast
import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import record
import report
import torch

import executor
from evaluate import bootstrap, iter_k
from grpo import pad_rows, token_logprobs
from support.problems import Problem, load_problems
from support.run import load, save, write
from support.sampling import Sampler, encode, load_model
from tree import build_trees, first_messages, refinement_messages

K = 3  # attempts in a chain
CPU = torch.device("cpu")
SAMPLING = {"temperature": 0.6, "max_new_tokens": 128}  # of murphy.py and evaluate.py
TRAINING = {  # options of murphy.py
    "problems_per_step": 3, "minibatches": 1, "learning_rate": 2e-5, "warmup": 3,
    "micro_tokens": 4096, "eval_every": 0, "eval_iterations": 1, "eval_count": 1, "save_every": 5,
}  # fmt: skip
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Div}
SWAPS |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And}


# ---------------------------------------------------------------------- 1. the start


def plant_fault(code: str, rng: random.Random) -> str:
    """A program with one operator exchanged, or one number off by one; "" if it has neither.

    >>> plant_fault("def f(x): return x + y", random.Random(0)).split()[-3:]
    ['x', '-', 'y']
    """
    tree = ast.parse(code)
    places = []
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        is_compared = isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS
        has_operator = isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS
        if is_number or is_compared or has_operator:
            places.append(node)
    if not places:
        return ""
    node = rng.choice(places)
    if isinstance(node, ast.Constant):
        node.value += rng.choice([-1, 1])
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    else:
        node.op = SWAPS[type(node.op)]()
    return ast.unparse(tree)


def fenced(code: str) -> str:
    """A program as an answer; most of MBPP's references have CRLF line ends."""
    code = code.replace("\r\n", "\n").strip()
    return f"```python\n{code}\n```"


def demonstrations(problems: list[Problem], rng: random.Random) -> list[tuple[list, str]]:
    """Chats and the answers to imitate: each reference, and it again after a planted fault."""
    chats, faulty = [], []
    for problem in problems:
        chats.append((first_messages(problem), fenced(problem.reference)))
        faulty += [(problem, plant_fault(problem.reference, rng)) for _ in range(2)]
    faulty = [job for job in faulty if job[1]]
    for (problem, code), result in zip(faulty, executor.run_many(faulty), strict=True):
        if result.reward < 1:
            messages = refinement_messages(first_messages(problem), fenced(code), result.feedback)
            chats.append((messages, fenced(problem.reference)))
    return chats


def make_start(args: argparse.Namespace, problems: list[Problem]) -> Path:
    """Imitate the demonstrations for some epochs; a stopped start goes on from its last epoch."""
    folder, unfinished = args.output / "start", args.output / "start.unfinished"
    if folder.exists():
        return folder
    unfinished.mkdir(exist_ok=True)
    model, tokenizer = load_model(args.model, CPU)
    rows = []
    for messages, answer in demonstrations(problems, random.Random(0)):
        ids = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append((encode(tokenizer, messages), ids))
    rows = [row for row in rows if len(row[0]) + len(row[1]) <= 600]
    print(f"start: {len(rows)} demonstrations, {sum(len(ids) for _, ids in rows)} tokens to learn")

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.start_rate, weight_decay=0.0)
    state = load(unfinished) or {"step": 0}
    if "model" in state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(state["step"], args.epochs):
        loss = imitate(model, optimizer, random.Random(epoch).sample(rows, len(rows)))
        print(f"start: epoch {epoch + 1} of {args.epochs}, loss {loss:.3f}", flush=True)
        weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(unfinished, {"step": epoch + 1, **weights})
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "checkpoint.pt").unlink(missing_ok=True)
    return unfinished.rename(folder)


def imitate(model: Any, optimizer: Any, rows: list) -> float:
    """One epoch in batches of eight rows: the mean of their cross-entropies."""
    losses = []
    for first in range(0, len(rows), 8):
        batch = sorted(rows[first : first + 8], key=lambda row: len(row[0]))
        *inputs, mask = pad_rows(batch, 0)
        logp = token_logprobs(model, *inputs, mask)
        loss = -logp[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return mean(losses)


# ---------------------------------------------------------------------- 2. the problems


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


# ---------------------------------------------------------------------- 3. and 4.


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
    sets = {
        "problems": args.output / "train.jsonl",
        "eval_problems": args.output / "held-out.jsonl",
    }
    run = {"steps": args.steps, "seed": seed, "output": folder}
    python("murphy.py", model=start, **sets, **rule, **run, **TRAINING, **SAMPLING)
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
    row = {"commit": record.commit(), "method": name, "seed": seed, "problems": len(entries)}
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
    args.output.mkdir(parents=True, exist_ok=True)

    training = load_short(args, "train", "validation")
    half = len(training) // 2
    start = Path(args.model) if args.direct else make_start(args, training[:half])
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
