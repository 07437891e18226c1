"""A run that is killed 50 times at random moments ends as one that is left alone.

    python results/kill.py        about 5 minutes on two free cores

After each kill the checkpoint must hold every step up to the last one at which it was due. In the
end the metrics (without their seconds), trees, evaluations and weights are compared with those of a
run that nothing happened to: they must be the same bytes.
"""

# ruff: noqa: E402
import argparse
import contextlib
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import record  # noqa: F401  it makes the project importable

import murphy
from support import toy
from support.run import load
from support.settings import Config

FORKS = multiprocessing.get_context("forkserver")  # torch is imported once, not 50 times
FORKS.set_forkserver_preload(["murphy"])
SECONDS = ("sampling", "executing", "updating")


def quietly(config: Config) -> None:
    """A run whose words go to a file."""
    with (
        open(f"{config.output}.log", "a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        murphy.train(config)


def begin(folder: Path, base: Path, args: argparse.Namespace) -> multiprocessing.Process:
    """Start the run, or go on with it; one that had no settings yet is begun again."""
    resume = (folder / "settings.json").exists()
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    config = Config(
        model=str(base),
        problems="cutoff",
        steps=args.steps,
        problems_per_step=4,
        group_size=3,
        temperature=1.0,
        max_new_tokens=16,
        feedback_tests=1,
        learning_rate=1e-3,
        eval_count=8,
        eval_iterations=2,
        eval_every=20,
        log_trees_every=1,
        save_every=args.save_every,
        output=str(folder),
        resume=resume,
    )
    process = FORKS.Process(target=quietly, args=(config,))
    process.start()
    return process


def left(folder: Path) -> list:
    """What a run leaves that must be the same in both; its seconds are left out."""
    lines = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        lines.append({name: value for name, value in line.items() if name not in SECONDS})
    names = ("trees.jsonl", "evaluation.json", "model.safetensors")
    return [lines, *((folder / name).read_bytes() for name in names)]


def steps_in_log(folder: Path) -> int:
    """How many steps have been made, by the lines of the log."""
    log = folder / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def unfinished_save(folder: Path) -> int:
    """When the save that was never finished began to write, in nanoseconds; 0: there is none."""
    path = folder / "checkpoint.new"
    return path.stat().st_mtime_ns if path.exists() else 0


def kill(
    folder: Path, base: Path, at_start: bool, moment: float, args: argparse.Namespace
) -> tuple[int, int]:
    """Run, then kill -9; (steps made, steps that the checkpoint holds).

    One kill in five comes while the run starts, the others once it has made a step. Then a part
    `moment` of --seconds passes. So the kills hit steps and saves on a slow machine, too.
    """
    process = begin(folder, base, args)
    before = steps_in_log(folder)
    if not at_start:
        while process.is_alive() and steps_in_log(folder) <= before:
            time.sleep(0.01)
    process.join(moment * args.seconds)
    process.kill()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        sys.exit("kill.py: the run ended before it was killed; nothing is shown: raise --steps")
    try:
        state = load(folder)
    except ValueError as error:
        sys.exit(f"kill.py: {error}")
    return steps_in_log(folder), state["step"] if state else 0


def finish(folder: Path, base: Path, args: argparse.Namespace) -> list:
    """Run to the end; what it leaves."""
    process = begin(folder, base, args)
    process.join()
    if process.exitcode:
        words = Path(f"{folder}.log").read_text()[-2000:]
        sys.exit(f"kill.py: the run in {folder.name} failed\n{words}")
    return left(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=250, help="more than the last kill will see")
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1, help="the latest moment of a kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    lost, saved, in_a_save = [], 0, 0
    with tempfile.TemporaryDirectory() as top:
        base = toy.base_model("cutoff", 0, Path(top), steps=100, batch=16)
        folder = Path(top) / "broken"
        for number in range(args.kills):
            before = unfinished_save(folder)
            made, kept = kill(folder, base, number % 5 == 0, rng.random(), args)
            in_a_save += unfinished_save(folder) > before
            lost.append(made - kept)
            print(f"kill {number + 1}: {made} steps made, {kept} in the checkpoint", flush=True)
            if kept < saved or lost[-1] > args.save_every:
                sys.exit("kill.py: steps were lost that the checkpoint had, or should have had")
            saved = kept
        same = finish(folder, base, args) == finish(Path(top) / "straight", base, args)
    end = "as" if same else "OTHERWISE THAN"
    print(
        f"{args.kills} kills, {in_a_save} of them in the middle of a save; steps lost: at most "
        f"{max(lost)}, {sum(lost) / len(lost):.1f} on average (saved every {args.save_every})\n"
        f"the run ended {end} the one left alone: {args.steps} lines, trees, evaluations, weights"
    )
    sys.exit(not same)


if __name__ == "__main__":
    main()
