"""What a run has done, in numbers: a line for each step, and curves over all steps.

In: the trees of a step; later the folder of a run with its metrics.jsonl and evaluation.json.
Out: a dict that is one line of metrics.jsonl; a picture, curves.png, and a short table.
Needs tree.py; matplotlib to draw. Shown by: python -m support.metrics runs/x
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tree import Node, groups, walk

# Every column of metrics.jsonl. reward_1 and solved_1 are of turn 1; later turns have theirs.
COLUMNS = {
    "step": "number of the step, from 0",
    "programs": "attempts in all trees of the step",
    "kept": "attempts that pruning left",
    "learning": "kept attempts whose advantage is not 0",
    "reward_1": "mean reward of the attempts at this turn",
    "solved_1": "share of the attempts at this turn that pass all tests",
    "problems_solved": "share of the problems with an attempt that passes all tests",
    "repaired": "share of the refined failures with a refinement that passes all tests",
    "groups_with_spread": "share of the groups whose credits differ; the others teach nothing",
    "spread_1": "the same, of the groups at turn 1",
    "truncated": "share of the completions that were cut at max_new_tokens",
    "completion_tokens": "mean tokens of a completion",
    "timeouts": "programs that ran out of CPU time",
    "no_code": "completions without a program",
    "too_long": "prompts that did not fit the model's context, so nothing was sampled",
    "loss": "loss, summed over the optimizer steps; near 0 says nothing",
    "tokens": "completion tokens that were trained on",
    "ratio": "mean over tokens of new probability / old probability",
    "kl": "mean over tokens of the KL to the initial model; 0 without beta",
    "clipped": "share of the tokens where the clip stops the gradient",
    "entropy": "mean over tokens of -logprob: how undecided the model is",
    "grad_norm": "largest gradient norm of the optimizer steps, before it is cut",
    "optimizer_steps": "optimizer steps; 0 when nothing could be learned",
    "lr": "learning rate",
    "sampling": "seconds of sampling",
    "executing": "seconds of running programs",
    "updating": "seconds of the optimizer steps",
}
# The columns of each panel of curves.png; "reward_" stands for all turns.
PANELS = (
    "reward_", "repaired", "groups_with_spread", "grad_norm", "ratio clipped", "entropy",
    "completion_tokens", "truncated", "sampling executing updating",
)  # fmt: skip
TABLE = ("reward_", "repaired", "groups_with_spread", "grad_norm", "completion_tokens", "truncated")


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


def has_spread(group: list[Node]) -> bool:
    """Whether the credits of a group differ; float rounding is no difference."""
    credits = [node.credit for node in group]
    return max(credits) - min(credits) > 1e-9


def describe(trees: list[Node], kept: list[Node], turns: int) -> dict[str, Any]:
    """The part of a metrics line that does not depend on the update; None: no attempt to count."""
    nodes = [node for tree in trees for node in walk(tree)]
    made = [group for tree in trees for group in groups(tree)]
    line: dict[str, Any] = {"programs": len(nodes), "kept": len(kept)}
    line["learning"] = sum(node.advantage != 0 for node in kept)
    for turn in range(1, turns + 1):
        line[f"reward_{turn}"] = mean([node.reward for node in nodes if node.turn == turn])
        line[f"solved_{turn}"] = mean([node.solved for node in nodes if node.turn == turn])

    refined = [node for node in nodes if node.children]
    line["problems_solved"] = mean([any(node.solved for node in walk(tree)) for tree in trees])
    line["repaired"] = mean([any(child.solved for child in node.children) for node in refined])
    line["groups_with_spread"] = mean([has_spread(group) for group in made])
    line["spread_1"] = mean([has_spread(group) for group in made if group[0].turn == 1])
    line["truncated"] = mean([node.truncated for node in nodes])
    line["completion_tokens"] = mean([len(node.completion_ids) for node in nodes])
    line["timeouts"] = sum(node.status == "timeout" for node in nodes)
    line["no_code"] = sum(node.status == "no_code" for node in nodes)
    line["too_long"] = sum(node.unexpanded != "" for node in [*trees, *nodes])
    return line


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without a last one that is half-written; ValueError: no line."""
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if not rows:
        raise ValueError(f"{folder} holds no step of a run: metrics.jsonl is missing or empty")
    return rows


def column(rows: list[dict[str, Any]], name: str) -> list[float | None]:
    """The values of a column; None where a step has none."""
    return [row.get(name) for row in rows]


def plot(folder: Path) -> str:
    """Draw the curves of a run into curves.png; returns means over tenths of it as a table.

    Thin lines are steps, thick ones these means. ValueError: the folder holds no step of a run.
    """
    from matplotlib.figure import Figure  # imported here: it loads slowly

    rows, picture = read(folder), Path(folder) / "curves.png"
    count = min(10, len(rows))
    tenths = [rows[len(rows) * i // count : len(rows) * (i + 1) // count] for i in range(count)]
    figure = Figure(figsize=(20, 7), layout="constrained")
    first, *others = figure.subplots(2, 5).flat
    plot_evaluations(first, Path(folder) / "evaluation.json")

    middles = [mean(column(tenth, "step")) for tenth in tenths]
    for axes, panel in zip(others, PANELS, strict=True):
        names = [name for name in rows[0] if name.startswith(tuple(panel.split()))]
        axes.set_title(", ".join(names))
        for name in names:
            (thin,) = axes.plot(column(rows, "step"), column(rows, name), alpha=0.3)
            means = [mean(column(tenth, name)) for tenth in tenths]
            axes.plot(middles, means, color=thin.get_color(), marker=".", label=name)
            axes.legend()
    figure.savefig(picture)
    return f"{table(tenths)}\nA line is the mean of a tenth of the steps. Curves: {picture}"


def plot_evaluations(axes: Any, path: Path) -> None:
    """Draw Iter-1, Iter-2, ... over the steps made before each evaluation."""
    axes.set_title("Iter-k, percent solved")
    summaries = json.loads(path.read_text()) if path.exists() else {}
    steps = sorted(summaries, key=int)
    scores = [summaries[step]["Iter-k"]["all"] for step in steps]
    for k, at_k in enumerate(zip(*scores, strict=True), 1):
        percent = [100 * score["value"] for score in at_k]
        axes.plot([int(step) for step in steps], percent, marker="o", label=f"Iter-{k}")
        axes.legend()


def table(tenths: list[list[dict[str, Any]]]) -> str:
    """The means of each tenth as text; `step` is its last step."""
    names = [name for name in tenths[0][0] if name.startswith(TABLE)]
    lines = ["   step  " + "  ".join(names)]
    for tenth in tenths:
        text = f"{tenth[-1]['step']:7}"
        for name in names:
            value = mean(column(tenth, name))
            text += ("-" if value is None else f"{value:.3f}").rjust(len(name) + 2)
        lines.append(text)
    idle = sum(row.get("optimizer_steps") == 0 for tenth in tenths for row in tenth)
    if idle:
        lines.append(f"In {idle} steps nothing could be learned: no group had credits that differ.")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(plot(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
    except (ValueError, OSError) as error:
        sys.exit(f"metrics: {error}")
