"""Speed, measured side by side: each side in a process of its own, in turn, in one run.

    python results/speed.py update   --model FOLDER   packed against padded rows, and their memory
    python results/speed.py sampling --model FOLDER   our sampler against one call of generate
    python results/speed.py step     --model FOLDER   a step of ours against one of TRL's
    python results/speed.py groups   --model FOLDER   8 to 64 completions a group
    python results/speed.py limit    --model FOLDER   update and decode steps against the machine
    python results/speed.py executor                  against an interpreter each, and a bare fork
    python results/speed.py endurance                 20,000 programs, one in ten hostile

With --old COMMIT the code of that commit is one more side, except of groups, limit and endurance.
Without --model the tiny model of the toy worlds is measured, with random weights. Prompts have
about 600 tokens, completions 20 to 300. Everything is float32 on the CPU. CPU seconds (user and
system) are the unit, because other jobs disturb them least; of the rounds the fastest counts.
Out: results/speed_MEASURE.csv. What a side does is in speed_model.py, speed_limit.py
and speed_executor.py.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

FASTEST = {"executor": "cpu_ms", "endurance": "seconds"}  # else: "cpu_seconds"
SCRIPTS = {"limit": "speed_limit.py"}  # else: "speed_model.py"
SCRIPTS |= {"executor": "speed_executor.py", "endurance": "speed_executor.py"}
KEYS = {  # the columns that tell the rows of a CSV apart
    "update": ["model", "way", "rows"],
    "sampling": ["model", "way", "prompts"],
    "step": ["model", "way"],
    "groups": ["model", "group"],
    "limit": ["model", "part"],
    "executor": ["way", "workers"],
    "endurance": ["programs"],
}


@dataclass
class Side:
    """What one process measures: the code in a folder, or a peer of it, with some settings."""

    way: str
    code: Path
    settings: dict[str, Any]


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder.

    It lies in runs/, because the old executor is less confined below /tmp, and so cheaper.
    """
    (record.ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=record.ROOT / "runs") as top:
        folder = str(Path(top) / "old")
        git = ["git", "-C", str(record.ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def measure(name: str, side: Side, shared: dict) -> list[dict]:
    """Run one side in a new process, where nothing is warm; the rows that it printed."""
    script = SCRIPTS.get(name, "speed_model.py")
    request = {"measure": name, "way": side.way, "code": str(side.code), **shared, **side.settings}
    done = subprocess.run(
        [sys.executable, str(record.HERE / script)],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"speed.py: {name}, {side.way}: it failed; its last words are above")
    return json.loads(done.stdout.splitlines()[-1])


def alternate(name: str, sides: list[Side], shared: dict, rounds: int) -> list[list[dict]]:
    """The fastest rows of each side. In every round each side has its turn."""
    fastest = FASTEST.get(name, "cpu_seconds")
    best: list[list[dict]] = []
    for number in range(rounds):
        for place, side in enumerate(sides):
            rows = measure(name, side, shared)
            print(f"round {number + 1}: {show(rows[-1])}", flush=True)
            if number == 0:
                best.append(rows)
            elif rows[-1][fastest] < best[place][-1][fastest]:
                best[place] = rows
    return best


def show(row: dict) -> str:
    shown = {name: value for name, value in row.items() if name != "prompts_in_full"}
    return "  ".join(f"{name} {value}" for name, value in shown.items())


def ours_and_old(old: Path | None, label: str = "", **settings: Any) -> list[Side]:
    sides = [Side(f"ours{label}", record.ROOT, settings)]
    if old:
        sides.append(Side(f"old{label}", old, settings))
    return sides


def sides_of(args: argparse.Namespace, old: Path | None) -> list[Side]:
    """The sides of a measure, ours first. (TRL's is not among them: it needs our prompts.)"""
    peer = record.ROOT
    if args.measure == "update":
        sizes = [size for size in (8, 4, 2, 1) if size <= args.group]
        padded = [Side("padded", peer, {"rows": size}) for size in sizes]
        return ours_and_old(old, rows=args.group) + padded
    if args.measure == "sampling":
        return [*ours_and_old(old), Side("generate", peer, {})]
    if args.measure == "groups":
        return [Side("ours", peer, {"group": size}) for size in args.sizes]
    if args.measure == "limit":
        parts = ("update", "decode")
        return [Side("ours", peer, {"part": part, "rows": args.group}) for part in parts]
    if args.measure == "executor":
        few = {"workers": 1, "programs": max(1, args.programs // 10)}
        sides = [Side("fork floor", peer, {"workers": 1}), Side("an interpreter each", peer, few)]
        for workers in (1, 2, 4):
            for kind in ("functional", "assert"):
                sides += ours_and_old(old, f", {kind}", kind=kind, workers=workers)
        return sides
    return ours_and_old(old if args.measure == "step" else None)


def add_trl(args: argparse.Namespace, found: list[list[dict]], shared: dict) -> bool:
    """Add TRL's step on the prompts that ours was made of; False: there is no TRL."""
    prompts = found[0][0]["prompts_in_full"]
    for rows in found:
        rows[0].pop("prompts_in_full")
    try:
        import trl  # noqa: F401
    except ImportError:
        print("TRL is not installed here, so its side is left out and nothing is written")
        return False
    settings = {"prompts_in_full": prompts, "trl_batch": args.trl_batch}
    found += alternate("step", [Side("trl", record.ROOT, settings)], shared, args.rounds)
    ours, theirs = found[0][0], found[-1][0]
    if (ours["tokens"], ours["prompt_tokens"]) != (theirs["tokens"], theirs["prompt_tokens"]):
        sys.exit(f"speed.py: the two steps were not the same work: {ours}, {theirs}")
    return True


def ratios(name: str, rows: list[dict]) -> list[str]:
    """What the first row, which is ours, is to each of the others."""
    lines = []
    ours = rows[0]
    for row in rows[1:]:
        what = f"{row['way']} ({row.get('rows', 'all')} rows)"
        if "cpu_seconds" in row and row["tokens"] == ours["tokens"]:
            times = row["cpu_seconds"] / ours["cpu_seconds"]
            lines.append(f"{what}: {times:.2f} times our CPU seconds")
        if "peak_mb" in row:
            lines[-1] += f"; ours has {ours['peak_mb'] / max(row['peak_mb'], 1):.2f} of its memory"
        if name == "executor" and row["way"].startswith("old"):
            peer = row["way"].replace("old", "ours"), row["workers"]
            mine = next(r for r in rows if (r["way"], r["workers"]) == peer)
            times = mine["cpu_ms"] / row["cpu_ms"]
            lines.append(f"{peer[0]}, {row['workers']} workers: {times:.2f} times the old CPU time")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=list(KEYS))
    parser.add_argument(
        "--model", default="tiny", help="folder of a chat model; tiny: a random one"
    )
    parser.add_argument("--old", default="", help="a commit whose code is measured, too")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--longest", type=int, default=300, help="tokens of a completion at most")
    parser.add_argument("--prompts", type=int, default=1, help="prompts in a batch (sampling)")
    parser.add_argument("--micro-tokens", type=int, default=2048, help="as of murphy.py")
    parser.add_argument("--failures", type=int, default=2, help="first attempts that fail (step)")
    parser.add_argument("--trl-batch", type=int, default=1, help="TRL's rows of a forward (step)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="(groups)")
    parser.add_argument("--programs", type=int, default=0, help="(executor, endurance)")
    parser.add_argument("--again", type=int, default=1000, help="programs under load (endurance)")
    parser.add_argument("--output", type=Path, default=record.HERE, help="folder of the CSV files")
    args = parser.parse_args()
    args.programs = args.programs or {"endurance": 20_000}.get(args.measure, 1000)
    args.rounds = 1 if args.measure == "endurance" else args.rounds

    names = ("model", "threads", "seed", "group", "longest", "prompts", "micro_tokens")
    names += ("failures", "programs", "again")
    shared = {name: getattr(args, name) for name in names}
    with checkout(args.old) if args.old else contextlib.nullcontext() as old:
        found = alternate(args.measure, sides_of(args, old), shared, args.rounds)
    whole = args.measure != "step" or add_trl(args, found, shared)

    commit = record.commit()
    rows = []
    for row in [row for rows_of_side in found for row in rows_of_side]:
        is_old = row.get("way", "").startswith("old")
        rows.append({"commit": args.old if is_old else commit, **row})
    if whole:
        record.replace(args.output / f"speed_{args.measure}.csv", rows, KEYS[args.measure])
    if args.measure not in ("groups", "limit", "endurance"):  # they have no other side
        print("\n".join(ratios(args.measure, rows)))


if __name__ == "__main__":
    main()
