"""A short MURPHY training of a real pretrained model, on a CPU: SmolLM2-135M-Instruct on easy MBPP problems.

    python results/real.py --model FOLDER --mbpp mbpp.jsonl --output FOLDER

Easy: the reference has at most 3 lines and, of 4 attempts of the untrained model, one at least passes a test (without that no group
has any spread). Trains on problems of MBPP's training split, evaluates on problems of its test split chosen alike, with attempts of
their own: murphy.py before and after with one sample a problem, evaluate.py with eight, and the two compared in pairs.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

import executor  # noqa: E402
from problems import load_problems  # noqa: E402
from tree import build_trees, load_model, make_sampler, walk  # noqa: E402

TRAINING = """
    --problems-per-step 3 --group-size 4 --turns 2 --steps 30 --max-new-tokens 96 --temperature 0.6 --learning-rate 2e-5 --warmup 3
    --minibatches 1 --feedback-tests 3 --eval-iterations 3 --eval-every 0 --eval-temperature 0.6 --micro-tokens 4096
    --log-trees-every 5 --save-every 10""".split()
EVALUATION = "--iterations 3 --samples 8 --temperature 0.6 --max-new-tokens 96".split()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in dict(
        model="folder of SmolLM2-135M-Instruct",
        mbpp="mbpp.jsonl, all splits",
        output="a new folder",
    ).items():
        parser.add_argument(f"--{name}", required=True, help=text)
    args = parser.parse_args()
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model, tokenizer = load_model(args.model, torch.device("cpu"))
    sample = make_sampler(model, tokenizer, max_new_tokens=96, temperature=0.6, token_budget=40_000)
    for split in ("train", "test"):
        if not (folder / f"{split}.jsonl").exists():
            easy(args.mbpp, split, sample, folder / f"{split}.jsonl")
    python = lambda script, *options: subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, options)], check=True
    )
    held_out = folder / "test.jsonl"
    python(
        "murphy.py",
        "--model",
        args.model,
        "--problems",
        folder / "train.jsonl",
        "--eval-problems",
        held_out,
        "--eval-count",
        999,
        "--output",
        folder / "run",
        *TRAINING,
    )
    for name, model in (("before", args.model), ("after", folder / "run")):
        python(
            "evaluate.py",
            "--model",
            model,
            "--benchmark",
            held_out,
            "--output",
            folder / name,
            *EVALUATION,
        )
    python(
        "evaluate.py",
        "--compare",
        folder / "before" / "result.json",
        folder / "after" / "result.json",
    )


def easy(mbpp: str, split: str, sample, path: Path) -> None:
    """Write the easy ones among the 72 shortest problems of a split."""
    problems = [
        p
        for p in load_problems(mbpp, split=split, execute=executor.run_many)
        if len(p.reference.strip().splitlines()) <= 3
    ]
    problems = sorted(problems, key=lambda p: (len(p.reference), p.id))[:72]
    trees = build_trees(problems, sample, executor.run_many, turns=1, group_size=4)
    chosen = [
        p
        for p, tree in zip(problems, trees, strict=True)
        if any(node.reward for node in walk(tree))
    ]
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in chosen))
    print(f"{split}: {len(chosen)} of {len(problems)} problems are easy", flush=True)


if __name__ == "__main__":
    main()
