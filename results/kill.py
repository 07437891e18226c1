"""A run killed 50 times at random moments ends as one left alone: python results/kill.py   (about 5 minutes on two free cores)

Every time the newest good checkpoint must hold all steps but those since the last save. In the end the metrics (without
their seconds), the trees, the evaluations and the weights are compared with those of a run that nothing happened to.
"""

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import murphy  # noqa: E402

FORKS = multiprocessing.get_context("forkserver")  # torch is imported once, not 50 times
FORKS.set_forkserver_preload(["murphy"])


def quietly(config: murphy.Config) -> None:
    with (
        open(f"{config.output}.log", "a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        murphy.train(config)


def begin(folder: Path, base: Path, steps: int, save_every: int):
    """Start the run, or go on with it; a run that was killed before it had any settings is begun again."""
    resume = "latest" if (folder / "settings.json").exists() else ""
    process = FORKS.Process(
        target=quietly,
        args=(
            murphy.Config(
                model=str(base),
                problems="cutoff",
                steps=steps,
                problems_per_step=4,
                group_size=3,
                eval_count=8,
                eval_iterations=2,
                eval_every=20,
                log_trees_every=1,
                learning_rate=1e-3,
                save_every=save_every,
                output=str(folder),
                resume=resume,
            ),
        ),
    )
    process.start()
    return process


def left(folder: Path) -> list:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    files = ("trees.jsonl", "evaluation.json", "model.safetensors")
    return [
        {k: v for k, v in line.items() if k not in ("sampling", "executing", "updating")}
        for line in lines
    ] + [(folder / name).read_bytes() for name in files]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--steps", type=int, default=250, help="more than will be made before the last kill"
    )
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=6,
        help="the latest moment of a kill, from the start of the process",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as top:
        top, lost, at, middle = Path(top), [], [], 0
        base = murphy.toy.base_model("cutoff", 0, top, steps=100, batch=16)
        for number in range(args.kills):
            run = begin(top / "broken", base, args.steps, args.save_every)
            log = top / "broken" / "metrics.jsonl"
            run.join(rng.uniform(0, args.seconds))
            run.kill()
            run.join()
            if run.exitcode == 0:
                sys.exit(f"kill.py: the run ended before its kill {number + 1}; nothing is shown")
            made = log.read_bytes().count(b"\n") if log.exists() else 0
            middle += any((top / "broken").glob("checkpoints/*.unfinished"))
            good = [
                int(path.name[5:])
                for path in (top / "broken").glob("checkpoints/step-*[0-9]")
                if not murphy.damage(path)
            ]
            at.append(max(good, default=0))
            lost.append(made - at[-1])
            print(
                f"kill {number + 1}: {made} steps made, {at[-1]} in a good checkpoint", flush=True
            )
            if lost[-1] > args.save_every or at != sorted(at):
                sys.exit("kill.py: steps were lost that a checkpoint had held, or should have")
        for name in ("broken", "straight"):
            run = begin(top / name, base, args.steps, args.save_every)
            run.join()
            if run.exitcode:
                sys.exit(
                    f"kill.py: the {name} run failed\n" + (top / f"{name}.log").read_text()[-2000:]
                )
        same = left(top / "broken") == left(top / "straight")
        print(
            f"{args.kills} kills, {middle} of them in the middle of a save; steps lost at each: at most {max(lost)}, on average "
            f"{sum(lost) / len(lost):.1f} (saved every {args.save_every}); the run ended {'as' if same else 'OTHERWISE THAN'} the one "
            f"left alone: {args.steps} lines, trees, evaluations, weights"
        )
    sys.exit(not same)


if __name__ == "__main__":
    main()
