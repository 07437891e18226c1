"""Tables and pictures of what the other scripts measured.

    python results/report.py            prints every table of results/README.md, draws the pictures
    python results/report.py --write    also puts the tables into results/README.md

In: the CSV files beside this script. Out: iterations.png, cost.png, curves.png, cutoff.png.
"""

# ruff: noqa: E402  matplotlib must know that there is no screen before pyplot is imported
import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import record

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Student's t, two-sided 95%, by the number of seeds: a handful of seeds is no normal sample.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
# Binary search for a cut-off in 1..16 finds 1, 2, 4, 8 and 1 of them at its attempts.
OPTIMUM = [1 / 16, 3 / 16, 7 / 16, 15 / 16, 1.0]
NAMES = {
    "base": "base (warm start)",
    "grpo": "GRPO, same number of programs",
    "none": "MURPHY, no propagation",
    "mers": "MURPHY, MERS",
    "mars": "MURPHY, MARS",
    "mars-interp": "MARS, InterP (5 of 9 groups)",
    "mars-intrap": "MARS, IntraP (4 of 8)",
    "mars-shuffled": "MARS, credits shuffled",
    "mers-gamma0.5": "MERS, gamma 0.5",
    "mers-gamma0.9": "MERS, gamma 0.9",
    "mars-g4": "MARS, G = 4",
    "mars-g16": "MARS, G = 16",
    "mars-s3": "MARS, S = 3, G = 4",
    "mars-g8-s3": "MARS, S = 3, G = 8",
    "mers-300": "MERS, 300 steps in place of 100",
    "none-300": "no propagation, 300 steps",
}
ABLATIONS = ("mars-shuffled", "mers-gamma0.5", "mers-gamma0.9", "mars-g4", "mars-g16", "mars-s3")
COLOURS = {
    "base": "#888888",
    "grpo": "#d1495b",
    "none": "#edae49",
    "mers": "#00798c",
    "mars": "#30638e",
    "mars-interp": "#6a4c93",
    "mars-intrap": "#9a6cc9",
    "mars-g8-s3": "#7fb069",
}
PAIRS = [
    ("mars", "grpo"),
    ("mars", "none"),
    ("mers", "none"),
    ("mars-interp", "mars"),
    ("mars-intrap", "mars"),
]
CUTOFF_PAIRS = [("mers", "none"), ("mers", "grpo"), ("mars", "none"), ("mars", "mers")]
CUTOFF_PAIRS += [("mers-300", "mers"), ("mers-300", "none-300")]
COSTED = ("grpo", "none", "mars", "mars-interp", "mars-intrap")
KS = range(1, 6)
Values = dict[tuple, dict[int, float]]  # (world, method, decoding, difficulty, k) -> seed -> score


def load(folder: Path) -> tuple[Values, list[dict]]:
    """The scores of the study, and the rows of its curves."""
    values: Values = defaultdict(dict)
    for row in record.read(folder / "study.csv"):
        key = (row["world"], row["method"], row["decoding"], row["difficulty"], int(row["k"]))
        values[key][int(row["seed"])] = float(row["value"])
    return dict(values), record.read(folder / "curves.csv")


# ---------------------------------------------------------------------- tables


def interval(numbers: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95% t interval over seeds: None for a single seed.

    >>> interval([1.0, 3.0])
    (2.0, 12.706)
    """
    n = len(numbers)
    if n == 1:
        return numbers[0], None
    return mean(numbers), T95[n] * stdev(numbers) / math.sqrt(n)


def cell(shares: Iterable[float], sign: str = "") -> str:
    """Shares as a cell of a table, in percent.

    >>> cell([0.25, 0.25]), cell([0.5], sign="+")
    ('25.0 ± 0.0', '+50.0')
    """
    centre, half = interval([100 * share for share in shares])
    text = f"{centre:{sign}.1f}"
    return text if half is None else f"{text} ± {half:.1f}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def score_table(
    values: Values,
    world: str,
    decoding: str = "sampled",
    difficulty: str = "all",
    methods: Iterable[str] = NAMES,
) -> str:
    """Iter-1 to Iter-5 of the methods of a world, mean and 95% interval over seeds."""
    rows = []
    for method in methods:
        if (world, method, decoding, difficulty, 1) in values:
            scores = [values[world, method, decoding, difficulty, k].values() for k in KS]
            rows.append([NAMES[method], str(len(scores[0])), *map(cell, scores)])
    if world == "cutoff":
        best = [f"{100 * share:.1f}" for share in OPTIMUM]
        rows.append(["*binary search (the optimum)*", "", *best])
    return markdown(["method", "seeds", *(f"Iter-{k}" for k in KS)], rows)


def paired_table(values: Values, world: str, pairs: list, difficulty: str = "all") -> str:
    """Method minus method at each Iter-k in points, paired by seed."""
    rows = []
    for a, b in pairs:
        row = [f"{a} - {b}"]
        for k in KS:
            left = values.get((world, a, "sampled", difficulty, k), {})
            right = values.get((world, b, "sampled", difficulty, k), {})
            both = sorted(left.keys() & right.keys())
            differences = [left[seed] - right[seed] for seed in both]
            row.append(cell(differences, "+") if both else "")
        if any(row[1:]):  # both have been run
            rows.append(row)
    return markdown(["points", *(f"Iter-{k}" for k in KS)], rows)


def of(curves: list[dict], world: str, method: str) -> list[dict]:
    return [row for row in curves if (row["world"], row["method"]) == (world, method)]


def column(rows: list[dict], name: str) -> list[float]:
    """The numbers of a column; empty cells (no attempt at that turn) are left out."""
    return [float(row[name]) for row in rows if row[name]]


def quietest(rows: list[dict]) -> float:
    """Seconds of update a step, of the seed with the fewest: others shared the machine."""
    seconds = defaultdict(list)
    for row in rows:
        seconds[row["seed"]].append(float(row["updating"]))
    return min(map(mean, seconds.values()))


def cost_table(values: Values, curves: list[dict]) -> str:
    """What a step of each method costs in world A, beside its score."""
    heads = ["method", "programs a step", "tokens optimised a step"]
    heads += ["seconds of update a step (quietest seed)", "Iter-5"]
    rows = []
    for method in COSTED:
        steps = of(curves, "doctest", method)
        if steps:
            counts = [f"{mean(column(steps, name)):.0f}" for name in ("programs", "tokens")]
            score = cell(values["doctest", method, "sampled", "all", 5].values())
            rows.append([NAMES[method], *counts, f"{quietest(steps):.2f}", score])
    return markdown(heads, rows)


def made_at(folder: Path) -> str:
    """The commit that each measured file was made at."""
    files = sorted([*folder.glob("*.csv"), *folder.glob("*.log")])
    rows = []
    for path in files:
        known = [commit for commit in record.commits(path) if commit]
        if known:
            rows.append([f"`{path.name}`", ", ".join(known)])
    return markdown(["result", "commit"], rows)


# ---------------------------------------------------------------------- the speed table


def rate(row: dict) -> float:
    return float(row["tokens_per_cpu_second"])


def seconds(row: dict) -> float:
    return float(row["cpu_seconds"])


def by_way(folder: Path, measure: str, model: str, **wanted: str) -> dict[str, list[dict]]:
    """The rows of a measure: way -> its rows."""
    found = defaultdict(list)
    for row in record.read(folder / f"speed_{measure}.csv"):
        if row["model"] == model and all(row[name] == value for name, value in wanted.items()):
            found[row.get("way", "")].append(row)
    return found


def update_ratios(folder: Path, model: str) -> tuple[float, float]:
    """Tokens a CPU second against the best padded rows, and memory against all of them at once."""
    ways = by_way(folder, "update", model)
    (ours,) = ways["ours"]
    best = max(map(rate, ways["padded"]))
    whole = max(ways["padded"], key=lambda row: int(row["rows"]))
    return rate(ours) / best, float(ours["peak_mb"]) / float(whole["peak_mb"])


def sampling_ratio(folder: Path, model: str, prompts: str) -> float:
    ways = by_way(folder, "sampling", model, prompts=prompts)
    return rate(ways["ours"][0]) / rate(ways["generate"][0])


def step_ratio(folder: Path, model: str) -> float:
    ways = by_way(folder, "step", model)
    return seconds(ways["trl"][0]) / seconds(ways["ours"][0])


def group_ratios(folder: Path, model: str) -> tuple[float, float]:
    """64 completions a group against 8: the tokens, and the CPU seconds."""
    rows = {row["group"]: row for row in by_way(folder, "groups", model)["ours"]}
    small, large = rows["8"], rows["64"]
    return float(large["tokens"]) / float(small["tokens"]), seconds(large) / seconds(small)


SPEED = [  # what is measured, and what is asked for
    (
        "`sampling`: tokens a CPU second against `generate`, 8 completions of a prompt",
        "1.4 or more",
    ),
    ("`sampling --prompts 4`: the same for 4 prompts in a batch", "2 or more"),
    ("`update`: tokens a CPU second against the best padded rows, 8 siblings", "2 or more"),
    ("`update`: peak memory against padded rows in one batch", "0.4 or less"),
    ("`step`: CPU seconds of TRL's GRPOTrainer against ours", "2 or more"),
    ("`groups`: tokens of 64 completions a group against 8", ""),
    ("`groups`: CPU seconds of sampling and updating, the same", ""),
    ("`limit`: bare matrix products of its unique tokens, as a share of an update's time", ""),
    ("`limit`: reading weights and cache once, as a share of a decode step's time", ""),
]


def limit_shares(folder: Path, model: str) -> list[float]:
    """What the machine could do at best, as a share of our time: update, decode step."""
    shares = {"update": math.nan, "decode": math.nan}
    for row in record.read(folder / "speed_limit.csv"):
        if row["model"] == model:  # the tiny one's limit is below what can be timed
            shares[row["part"]] = float(row["share"])
    return list(shares.values())


def speed_table(folder: Path) -> str:
    columns = []
    for model in ("smollm2", "tiny"):
        ratios = [sampling_ratio(folder, model, prompts) for prompts in ("1", "4")]
        ratios += update_ratios(folder, model)
        ratios.append(step_ratio(folder, model))
        ratios += group_ratios(folder, model)
        ratios += limit_shares(folder, model)
        columns.append(["" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios])
    rows = [[*what, *cells] for what, *cells in zip(SPEED, *columns, strict=True)]
    return markdown(["`python results/speed.py ...`", "asked", "SmolLM2-135M", "tiny"], rows)


def executor_table(folder: Path) -> str:
    """CPU milliseconds of a program and programs a second, the best of all rounds."""
    best: dict[tuple, dict] = {}
    for row in record.read(folder / "speed_executor.csv"):
        key = row["way"], row["workers"]
        if key not in best or float(row["cpu_ms"]) < float(best[key]["cpu_ms"]):
            best[key] = row
    names = ["way", "workers", "cpu_ms", "per_second"]
    rows = [[row[name] for name in names] for row in best.values()]
    return markdown(["way", "workers", "CPU ms a program", "programs a second"], rows)


def csv_table(path: Path) -> str:
    """A small CSV as it is, without its commits."""
    rows = record.read(path)
    names = [name for name in rows[0] if name != "commit"]
    heads = [name.replace("_", " ") for name in names]
    return markdown(heads, [[row[name] for name in names] for row in rows])


def study_tables(folder: Path) -> dict[str, str]:
    values, curves = load(folder)
    worlds = {key[0] for key in values}
    made = {}
    if "doctest" in worlds:
        main = [name for name in NAMES if name not in ABLATIONS]
        made["doctest"] = score_table(values, "doctest", methods=main)
        made["doctest-paired"] = paired_table(values, "doctest", PAIRS)
        made["doctest-paired-hard"] = paired_table(values, "doctest", PAIRS[:3], "hard")
        made["doctest-ablations"] = score_table(values, "doctest", methods=("mars", *ABLATIONS))
        for level in ("easy", "medium", "hard"):
            made[f"doctest-{level}"] = score_table(values, "doctest", difficulty=level)
        made["doctest-greedy"] = score_table(values, "doctest", "greedy")
        made["no-feedback"] = score_table(values, "doctest", "no feedback")
        made["cost"] = cost_table(values, curves)
    if "cutoff" in worlds:
        made["cutoff"] = score_table(values, "cutoff")
        made["cutoff-paired"] = paired_table(values, "cutoff", CUTOFF_PAIRS)
        made["cutoff-greedy"] = score_table(values, "cutoff", "greedy")
    return made


def tables(folder: Path) -> dict[str, str]:
    """Every table of results/README.md by name; a test holds the page against this."""
    made = study_tables(folder)
    if (folder / "speed_step.csv").exists():  # measured apart from the study
        made["speed"] = speed_table(folder)
        made["executor"] = executor_table(folder)
        made["endurance"] = csv_table(folder / "speed_endurance.csv")
        made["made-at"] = made_at(folder)
    for name in ("memory", "real", "real_paired", "graders"):
        if (folder / f"{name}.csv").exists():
            made[name] = csv_table(folder / f"{name}.csv")
    return made


def fill(text: str, made: dict[str, str]) -> str:
    """A page with its tables, `<!-- table NAME --> ... <!-- /table -->`, made anew."""

    def table(match: re.Match) -> str:
        return f"<!-- table {match[1]} -->\n{made[match[1]]}\n<!-- /table -->"

    return re.sub(r"<!-- table (\S+) -->\n.*?<!-- /table -->", table, text, flags=re.DOTALL)


# ---------------------------------------------------------------------- pictures

# Dark ink on a white card can be read in either of GitHub's themes.
STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def smooth(rows: list[dict], name: str, width: int = 10) -> tuple[list[int], list[float]]:
    """The mean over seeds at each step, then over the last `width` steps."""
    by_step = defaultdict(list)
    for row in rows:
        if row[name]:
            by_step[int(row["step"])].append(float(row[name]))
    steps = sorted(by_step)
    means = [mean(by_step[step]) for step in steps]
    return steps, [mean(means[max(0, i - width + 1) : i + 1]) for i in range(len(steps))]


def guesses(rows: list[dict]) -> dict[int, float]:
    """The share of each first guess over some steps."""
    count: dict[int, int] = defaultdict(int)
    for row in rows:
        for item in row["first_guesses"].split():
            guess, _, n = item.partition(":")
            if guess.isdigit():
                count[int(guess)] += int(n)
    total = sum(count.values())
    return {guess: n / total for guess, n in count.items()}


def entropies(rows: list[dict], width: int = 10) -> tuple[list[int], list[float]]:
    """Bits of the first guess, pooled over windows of steps, then the mean over seeds.

    A few guesses alone would look more certain than they are.
    """
    windows: dict[tuple[int, str], list[dict]] = defaultdict(list)
    for row in rows:
        windows[int(row["step"]) // width, row["seed"]].append(row)
    bits = defaultdict(list)
    for (window, _), part in windows.items():
        bits[window].append(-sum(p * math.log2(p) for p in guesses(part).values()))
    middles = [width * window + width // 2 for window in sorted(bits)]
    return middles, [mean(bits[window]) for window in sorted(bits)]


def draw_scores(axes: Any, values: Values, world: str, difficulty: str, title: str) -> None:
    for method in ("base", "grpo", "none", "mers", "mars"):
        key = (world, method, "sampled", difficulty)
        if (*key, 1) in values:
            scores = [interval([100 * x for x in values[(*key, k)].values()]) for k in KS]
            centre, half = zip(*scores, strict=True)
            bars = {"yerr": half, "capsize": 2} if half[0] is not None else {}
            look = {"label": NAMES[method], "color": COLOURS[method]}
            axes.errorbar(KS, centre, marker="o", markersize=3, **bars, **look)
    axes.set(title=title, xlabel="attempts (k)", xticks=list(KS), ylim=(0, 102))


def draw_iterations(values: Values, curves: list[dict]) -> None:
    _, row = plt.subplots(1, 4, figsize=(12, 3.4), sharey=True)
    for axes, level in zip(row, ("all", "easy", "medium", "hard"), strict=True):
        draw_scores(axes, values, "doctest", level, f"World A, {level}")
    row[0].set_ylabel("held-out problems solved, %")
    row[1].legend(loc="lower right")


def draw_cost(values: Values, curves: list[dict]) -> None:
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for method in COSTED:
        rows = of(curves, "doctest", method)
        if rows:
            scores = values["doctest", method, "sampled", "all", 5].values()
            centre, half = interval([100 * score for score in scores])
            look = {"fmt": "o", "color": COLOURS[method], "label": NAMES[method], "capsize": 2}
            left.errorbar(mean(column(rows, "tokens")), centre, yerr=half, **look)
            right.errorbar(quietest(rows), centre, yerr=half, **look)
    left.set(xlabel="tokens optimised a step", ylabel="Iter-5, %", xlim=(0, None))
    right.set(xlabel="seconds of update a step (quietest seed)", xlim=(0, None))
    right.legend(loc="lower right")


def draw_curves(values: Values, curves: list[dict]) -> None:
    _, (rewards, solved, repaired) = plt.subplots(1, 3, figsize=(12, 3.4))
    for method in ("grpo", "none", "mars"):
        rows, colour = of(curves, "doctest", method), COLOURS[method]
        for axes, name in ((rewards, "reward"), (solved, "solved")):
            axes.plot(*smooth(rows, f"{name}_1"), color=colour, label=NAMES[method])
            axes.plot(*smooth(rows, f"{name}_2"), color=colour, linestyle="--")
        repaired.plot(*smooth(rows, "repaired"), color=colour)
    rewards.set(title="mean reward (solid: turn 1, dashed: turn 2)")
    solved.set(title="share of attempts solved")
    repaired.set(title="failures with a solved refinement")
    for axes in (rewards, solved, repaired):
        axes.set(xlabel="step", ylim=(0, 1))
    rewards.legend(loc="lower right")


def draw_cutoff(values: Values, curves: list[dict]) -> None:
    _, ((scores, entropy), (first, spread)) = plt.subplots(2, 2, figsize=(10, 6.4))
    draw_scores(scores, values, "cutoff", "all", "World B: problems solved, %")
    scores.plot(KS, [100 * x for x in OPTIMUM], "k:", label="binary search (optimum)")
    scores.legend(loc="upper left")

    for method in ("grpo", "none", "mars", "mers"):
        rows = of(curves, "cutoff", method)
        look = {"color": COLOURS[method], "label": NAMES[method], "marker": "o", "markersize": 3}
        entropy.plot(*entropies(rows), **look)
    entropy.set(title="entropy of the first guess, bits (uniform: 4)", xlabel="step")
    entropy.set(ylim=(0, None))
    entropy.legend(loc="lower left")

    late = [row for row in of(curves, "cutoff", "mers") if int(row["step"]) >= 80]
    share = guesses(late)
    heights = [share.get(guess, 0.0) for guess in range(1, 17)]
    first.bar(range(1, 17), heights, color=COLOURS["mers"])
    first.set(title="first guesses of MERS, last 20 steps, all seeds")
    first.set(xlabel="guess (binary search: 8 or 9)")

    for method in ("mers", "mars", "mars-g8-s3"):
        rows = of(curves, "cutoff", method)
        spread.plot(*smooth(rows, "spread_1"), color=COLOURS[method], label=NAMES[method])
    spread.set(title="turn-1 groups with any spread of credit", xlabel="step", ylim=(0, 1.02))
    spread.legend(loc="lower left")


PICTURES: dict[str, tuple[str, Callable]] = {
    "iterations.png": ("doctest", draw_iterations),
    "cost.png": ("doctest", draw_cost),
    "curves.png": ("doctest", draw_curves),
    "cutoff.png": ("cutoff", draw_cutoff),
}


def draw(folder: Path) -> list[Path]:
    """Draw the pictures of the worlds that were measured."""
    plt.rcParams.update(STYLE)
    values, curves = load(folder)
    made = []
    for name, (world, picture) in PICTURES.items():
        if any(key[0] == world for key in values):
            picture(values, curves)
            plt.tight_layout()
            plt.savefig(folder / name, dpi=130, metadata={"Software": ""})
            plt.close()
            made.append(folder / name)
    return made


def main(folder: Path) -> None:
    for name, text in tables(folder).items():
        print(f"\n{name}\n\n{text}")
    for path in draw(folder):
        print(f"\nwrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=record.HERE, help="where the CSV files are")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md there")
    args = parser.parse_args()
    main(args.folder)
    if args.write:
        page = args.folder / "README.md"
        page.write_text(fill(page.read_text(), tables(args.folder)))
