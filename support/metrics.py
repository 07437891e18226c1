"""What a run has done, in numbers: a line for each step, and curves over all steps.

In: the trees of a step; later the folder of a run, with its metrics.jsonl and evaluation.json.
Out: a dict, for one line of metrics.jsonl; a picture, curves.png, and a short table.
Needs propagate.py, tree.py, support/page.py, numpy, matplotlib.
Shown by: python -m support.metrics runs/x
"""

import signal
import sys

if __name__ == "__main__":  # so that Ctrl-C during the slow imports prints one line
    signal.signal(signal.SIGINT, lambda *_: sys.exit("\nmetrics: stopped"))

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from propagate import has_spread
from support.page import say
from tree import Node, walk

TABLE = ["repaired", "groups_with_spread", "grad_norm", "completion_tokens", "truncated"]
# The panels of curves.png after those of Iter-k and the rewards.
PANELS = [["repaired", "groups_with_spread"], ["grad_norm"], ["ratio", "clipped"], ["entropy"]]
PANELS += [["completion_tokens"], ["truncated"], ["sampling", "executing", "updating"]]


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a block, or of each call of a decorated function, to seconds[name]."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def describe(trees: list[Node], kept: list[Node], turns: int) -> dict[str, Any]:
    """What a step has sampled, as a part of its line; None: there was nothing to take a mean of."""
    nodes = [node for tree in trees for node in walk(tree)]
    line: dict[str, Any] = {"programs": len(nodes), "kept": len(kept)}
    line["learning"] = sum(node.advantage != 0 for node in kept)
    for turn in range(1, turns + 1):
        line[f"reward_{turn}"] = mean([node.reward for node in nodes if node.turn == turn])
        line[f"solved_{turn}"] = mean([node.solved for node in nodes if node.turn == turn])

    refined = [node.children for node in nodes if node.children]
    first = [tree.children for tree in trees if tree.children]
    line["problems_solved"] = mean([any(node.solved for node in walk(tree)) for tree in trees])
    line["repaired"] = mean([any(node.solved for node in children) for children in refined])
    spread = [has_spread([node.credit for node in group]) for group in first + refined]
    line["groups_with_spread"] = mean(spread)
    line["spread_1"] = mean(spread[: len(first)])
    line["truncated"] = mean([node.truncated for node in nodes])
    line["completion_tokens"] = mean([len(node.completion_ids) for node in nodes])
    line["timeouts"] = sum(node.status == "timeout" for node in nodes)
    line["no_code"] = sum(node.status == "no_code" for node in nodes)
    line["too_long"] = sum(node.unexpanded != "" for node in [*trees, *nodes])
    return line


def plot(folder: Path) -> str:
    """Draw a run into curves.png; returns a table. An error of any kind: it is no run."""
    from matplotlib.figure import Figure  # imported here: it loads slowly

    log = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().split("\n")[:-1]]  # no half last line
    if not rows:
        raise ValueError(f"{log} holds no step of a run")
    # The run is cut into at most ten parts. The table and the thick curves show the mean of each.
    count = min(10, len(rows))
    columns, means = {}, {}
    for name in rows[0]:
        columns[name] = [row[name] for row in rows]
        parts = np.array_split(columns[name], count)
        means[name] = np.array([mean(part) for part in parts], dtype=float)  # None becomes nan
    rewards = [name for name in columns if name.startswith("reward_")]
    text = f"Means of {count} parts of the run:\n"
    for name in ["step", *rewards, *TABLE]:
        text += f"{name:18}" + "".join(f"{value:9.3f}" for value in means[name]) + "\n"

    figure = Figure(figsize=(16, 10), layout="constrained")
    first, *others = figure.subplots(3, 3).flat
    for axes, names in zip(others, [rewards, *PANELS], strict=True):
        for number, name in enumerate(names):
            axes.plot(columns["step"], columns[name], f"C{number}", alpha=0.3)
            axes.plot(means["step"], means[name], f"C{number}.-", label=name)
        axes.legend()

    summaries = json.loads((folder / "evaluation.json").read_text())
    steps = [int(step) for step in summaries]
    scores = [summary["Iter-k"]["all"] for summary in summaries.values()]
    for i in range(len(scores[0])):
        first.plot(steps, [score[i]["value"] for score in scores], ".-", label=f"Iter-{i + 1}")
    first.legend()
    figure.savefig(folder / "curves.png")
    idle = columns["optimizer_steps"].count(0)
    if idle:
        text += f"In {idle} steps nothing could be learned: see groups_with_spread and truncated.\n"
    return f"{text}Curves: {folder / 'curves.png'}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m support.metrics FOLDER (of a run)")
    try:
        say(plot(Path(sys.argv[1])))
    except Exception as error:  # the files may hold anything
        reason = f"{type(error).__name__}: {error}"
        sys.exit(f"metrics: {sys.argv[1]}: expected the folder of a run ({reason})")
