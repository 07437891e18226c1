"""Tables and pictures of what study.py measured; `python results/study.py --report` runs it on the CSV files alone."""

import csv
import math
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Student's t, two-sided 95%, by number of seeds: a handful of seeds is not a normal sample.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
OPTIMUM = [1 / 16, 3 / 16, 7 / 16, 15 / 16, 1.0]  # binary search for a cut-off in 1..16: 1, 2, 4, 8, 1 cut-offs found at turn k
NAMES = {"base": "base (warm start)", "grpo": "GRPO, same number of programs", "none": "MURPHY, no propagation", "mers": "MURPHY, MERS",
         "mars": "MURPHY, MARS", "mars-interp": "MARS, InterP (5 of 9 groups)", "mars-intrap": "MARS, IntraP (4 of 8)",
         "mars-shuffled": "MARS, credits shuffled", "mers-gamma0.5": "MERS, gamma 0.5", "mers-gamma0.9": "MERS, gamma 0.9",
         "mars-g4": "MARS, G = 4", "mars-g16": "MARS, G = 16", "mars-s3": "MARS, S = 3, G = 4", "mars-g8-s3": "MARS, S = 3, G = 8"}
COLOURS = {"base": "#888888", "grpo": "#d1495b", "none": "#edae49", "mers": "#00798c", "mars": "#30638e", "mars-interp": "#6a4c93",
           "mars-intrap": "#9a6cc9", "mars-shuffled": "#b0b0b0", "mars-g8-s3": "#7fb069"}
KS = range(1, 6)
ABLATIONS = ("mars-shuffled", "mers-gamma0.5", "mers-gamma0.9", "mars-g4", "mars-g16", "mars-s3")  # of world A, one seed each


def load(folder: Path) -> tuple[dict, list[dict]]:
    """(world, method, decoding, difficulty, k) -> {seed: value}, and the lines of the curves."""
    values: dict[tuple, dict[int, float]] = defaultdict(dict)
    with open(folder / "study.csv") as file:
        for row in csv.DictReader(file):
            key = (row["world"], row["method"], row["decoding"], row["difficulty"], int(row["k"]))
            values[key][int(row["seed"])] = float(row["value"])
    with open(folder / "curves.csv") as file:
        return dict(values), list(csv.DictReader(file))


def interval(numbers: list[float]) -> tuple[float, float]:
    """Mean and half-width of the 95% t interval over seeds; the half-width of a single seed is not known (nan)."""
    return mean(numbers), T95[len(numbers)] * stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan


def cell(numbers: list[float], sign: str = "") -> str:
    centre, half = interval([100 * x for x in numbers])
    return f"{centre:{sign}.1f}" + (f" ± {half:.1f}" if half == half else "")


def table(values: dict, world: str, decoding: str, difficulty: str = "all", of: Collection[str] = NAMES) -> str:
    """Iter-1..5 of the methods of a world, percent, mean and 95% interval over seeds, as Markdown."""
    methods = [m for m in of if (world, m, decoding, difficulty, 1) in values]
    lines = ["| method | seeds | " + " | ".join(f"Iter-{k}" for k in KS) + " |", "| --- | --- |" + " --- |" * len(KS)]
    for m in methods:
        row = [list(values[world, m, decoding, difficulty, k].values()) for k in KS]
        lines.append(f"| {NAMES[m]} | {len(row[0])} | " + " | ".join(map(cell, row)) + " |")
    if world == "cutoff":
        lines.append("| *binary search (the optimum)* | | " + " | ".join(f"{100 * x:.1f}" for x in OPTIMUM) + " |")
    return "\n".join(lines)


def differences(values: dict, world: str, pairs: list[tuple[str, str]], difficulty: str = "all") -> str:
    """Paired by seed: method minus method at each Iter-k, points, with the 95% interval over seeds."""
    lines = ["| points | " + " | ".join(f"Iter-{k}" for k in KS) + " |", "| --- |" + " --- |" * len(KS)]
    for a, b in pairs:
        cells = []
        for k in KS:
            left, right = (values.get((world, m, "sampled", difficulty, k), {}) for m in (a, b))
            both = sorted(left.keys() & right.keys())
            cells.append(cell([left[s] - right[s] for s in both], "+") if both else "")
        lines.append(f"| {a} - {b} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost(values: dict, curves: list[dict]) -> str:
    """Programs, tokens optimised and seconds per step of the update, beside the score: means over seeds and steps; the
    seconds are those of the seed with the fewest, since other work ran on the machine during some of the others."""
    lines = ["| method | programs a step | tokens optimised a step | seconds of update a step (quietest seed) | Iter-5 |",
             "| --- | --- | --- | --- | --- |"]
    for m in ("grpo", "none", "mars", "mars-interp", "mars-intrap"):
        rows = [row for row in curves if row["world"] == "doctest" and row["method"] == m]
        if rows:
            programs, tokens = (mean(float(row[name]) for row in rows) for name in ("programs", "tokens"))
            lines.append(f"| {NAMES[m]} | {programs:.0f} | {tokens:.0f} | {quietest(rows):.2f} | "
                         + cell(list(values["doctest", m, "sampled", "all", 5].values())) + " |")
    return "\n".join(lines)


def quietest(rows: list[dict]) -> float:
    return min(mean(float(row["updating"]) for row in rows if row["seed"] == seed) for seed in {row["seed"] for row in rows})


def speed(folder: Path) -> str:
    """Ratios of what step.py measured: of each run the first row is ours."""
    def rows(name: str, model: str) -> list[dict]:
        with open(folder / f"speed_{name}.csv") as file:
            return [row for row in csv.DictReader(file) if row["model"] == model]

    def measured(model: str) -> list[float]:
        ours, *padded = rows("update", model)
        rate = lambda row: float(row["tokens_per_cpu_second"])
        ratios = []
        for prompts in ("1", "4"):
            sampler, plain = (row for row in rows("sampling", model) if row["prompts"] == prompts)
            ratios.append(rate(sampler) / rate(plain))
        ratios.append(rate(ours) / max(map(rate, padded)))
        ratios.append(float(ours["peak_mb"]) / max(float(row["peak_mb"]) for row in padded))
        step, trl = rows("step", model)
        first, *_, last = rows("groups", model)
        assert first["group"] == "8" and last["group"] == "64"
        return [*ratios, float(trl["cpu_seconds"]) / float(step["cpu_seconds"]), float(last["tokens"]) / float(first["tokens"]),
                float(last["cpu_seconds"]) / float(first["cpu_seconds"])]

    what = ["`sampling`: 8 completions of one prompt, tokens a CPU second against `generate(num_return_sequences=8)` | at least 1.8",
            "`sampling --prompts 4`: the same for 4 prompts in a batch | at least 1.8",
            "`update`: 8 siblings, tokens a CPU second against the best micro-batch of padded rows | at least 2",
            "`update`: peak memory against padded rows in one batch | at most 0.33",
            "`step`: CPU seconds of TRL 1.16's GRPOTrainer for the same completions, against ours | at least 2",
            "`groups`: tokens of 64 completions a group against 8 | ", "`groups`: CPU seconds of sampling and updating, the same | "]
    lines = ["| `python results/speed.py ...` | target | SmolLM2-135M | tiny |", "| --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {text} | {real:.2f} | {tiny:.2f} |" for text, real, tiny in
                              zip(what, measured("smollm2"), measured("tiny"), strict=True)])


def tables(folder: Path) -> dict[str, str]:
    """Every table of the README by name; a test holds the README against this."""
    values, curves = load(folder)
    made = {"speed": speed(folder)} if (folder / "speed_step.csv").exists() else {}  # measured apart from the study
    if any(key[0] == "doctest" for key in values):
        made["doctest"] = table(values, "doctest", "sampled", of=[m for m in NAMES if m not in ABLATIONS])
        made["doctest-ablations"] = table(values, "doctest", "sampled", of=("mars", *ABLATIONS))
        made["doctest-greedy"] = table(values, "doctest", "greedy")
        for level in ("easy", "medium", "hard"):
            made[f"doctest-{level}"] = table(values, "doctest", "sampled", level)
        pairs = [("mars", "grpo"), ("mars", "none"), ("mers", "none"), ("mars-interp", "mars"), ("mars-intrap", "mars")]
        made["doctest-paired"] = differences(values, "doctest", pairs)
        made["doctest-paired-hard"] = differences(values, "doctest", pairs[:3], "hard")
        made["cost"] = cost(values, curves)
        made["no-feedback"] = table(values, "doctest", "no feedback")
    if any(key[0] == "cutoff" for key in values):
        made["cutoff"] = table(values, "cutoff", "sampled")
        made["cutoff-greedy"] = table(values, "cutoff", "greedy")
        made["cutoff-paired"] = differences(values, "cutoff", [("mers", "none"), ("mers", "grpo"), ("mars", "none"), ("mars", "mers")])
    return made


def smooth(rows: list[dict], name: str, width: int = 10) -> tuple[list[int], list[float]]:
    """Mean over seeds at each step, then over a running window; empty cells (no attempt at that turn) are left out."""
    by_step = defaultdict(list)
    for row in rows:
        if row[name]:
            by_step[int(row["step"])].append(float(row[name]))
    steps = sorted(by_step)
    return steps, [mean(mean(by_step[s]) for s in steps[max(0, i - width + 1):i + 1]) for i in range(len(steps))]


def draw(folder: Path) -> list[Path]:
    """The pictures: dark ink on a white card, so that they can be read in either of GitHub's themes."""
    plt.rcParams.update({"figure.facecolor": "white", "savefig.facecolor": "white", "axes.spines.top": False,
                         "axes.spines.right": False, "font.size": 9, "legend.frameon": False, "legend.fontsize": 8})
    values, curves = load(folder)
    worlds = {key[0] for key in values}
    made = []

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / name, dpi=130, metadata={"Software": ""})
        plt.close(figure)
        made.append(folder / name)

    def iterations(axis, world, methods, difficulty, title):
        for m in methods:
            if (world, m, "sampled", difficulty, 1) in values:
                centre, half = zip(*(interval([100 * x for x in values[world, m, "sampled", difficulty, k].values()]) for k in KS))
                axis.errorbar(KS, centre, yerr=half if half[0] == half[0] else None, label=NAMES[m], color=COLOURS[m], marker="o",
                              markersize=3, capsize=2, linewidth=1.5)
        axis.set(title=title, xlabel="attempts (k)", xticks=list(KS), ylim=(0, 102))

    methods = ("base", "grpo", "none", "mers", "mars")
    if "doctest" in worlds:
        figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), sharey=True)
        for axis, level in zip(axes, ("all", "easy", "medium", "hard"), strict=True):
            iterations(axis, "doctest", methods, level, f"World A, {level}")
        axes[0].set_ylabel("held-out problems solved, %")
        axes[1].legend(loc="lower right")
        save(figure, "iterations.png")

        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
        for m in ("grpo", "none", "mars", "mars-interp", "mars-intrap"):
            rows = [row for row in curves if row["world"] == "doctest" and row["method"] == m]
            if rows:
                centre, half = interval([100 * x for x in values["doctest", m, "sampled", "all", 5].values()])
                for axis, x in zip(axes, (mean(float(row["tokens"]) for row in rows), quietest(rows)), strict=True):
                    axis.errorbar(x, centre, yerr=half if half == half else None, fmt="o", color=COLOURS[m], label=NAMES[m], capsize=2)
        axes[0].set(xlabel="tokens optimised a step", ylabel="Iter-5, %", xlim=(0, None))
        axes[1].set(xlabel="seconds of update a step (quietest seed)", xlim=(0, None))
        axes[1].legend(loc="lower right")
        save(figure, "cost.png")

        figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
        for m in ("grpo", "none", "mars"):
            rows = [row for row in curves if row["world"] == "doctest" and row["method"] == m]
            for axis, name in ((axes[0], "reward"), (axes[1], "solved")):
                axis.plot(*smooth(rows, name + "_1"), color=COLOURS[m], label=NAMES[m])
                axis.plot(*smooth(rows, name + "_2"), color=COLOURS[m], linestyle="--")
            axes[2].plot(*smooth(rows, "repaired"), color=COLOURS[m])
        for axis, title in zip(axes, ("mean reward (solid: turn 1, dashed: turn 2)", "share of attempts solved",
                                      "failures with a solved refinement"), strict=True):
            axis.set(title=title, xlabel="step", ylim=(0, 1))
        axes[0].legend(loc="lower right")
        save(figure, "curves.png")
    if "cutoff" in worlds:
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.4))
        axes = axes.flat
        iterations(axes[0], "cutoff", methods, "all", "World B: problems solved, %")
        axes[0].plot(KS, [100 * x for x in OPTIMUM], "k:", label="binary search (optimum)")
        axes[0].legend(loc="upper left")
        for m in ("grpo", "none", "mars", "mers"):
            rows = [row for row in curves if row["world"] == "cutoff" and row["method"] == m]
            if rows:
                axes[1].plot(*entropies(rows), color=COLOURS[m], label=NAMES[m], marker="o", markersize=3)
        axes[1].set(title="entropy of the first guess, bits (uniform: 4)", xlabel="step", ylim=(0, None))
        axes[1].legend(loc="lower left")
        last = [row for row in curves if row["world"] == "cutoff" and row["method"] == "mers" and int(row["step"]) >= 80]
        share = guesses(last)
        axes[2].bar(range(1, 17), [share.get(g, 0.0) for g in range(1, 17)], color=COLOURS["mers"])
        axes[2].set(title="first guesses of MERS, last 20 steps, all seeds", xlabel="guess (binary search: 8 or 9)")
        for m in ("mers", "mars", "mars-g8-s3"):
            rows = [row for row in curves if row["world"] == "cutoff" and row["method"] == m]
            if rows:
                axes[3].plot(*smooth(rows, "spread_1"), color=COLOURS[m], label=NAMES[m])
        axes[3].set(title="turn-1 groups with any spread of credit", xlabel="step", ylim=(0, 1.02))
        axes[3].legend(loc="lower left")
        save(figure, "cutoff.png")
    return made


def guesses(rows: list[dict]) -> dict[int, float]:
    """Share of each first guess over some steps."""
    count: dict[int, int] = defaultdict(int)
    for row in rows:
        for item in row["first_guesses"].split():
            guess, _, n = item.partition(":")
            if guess.isdigit():
                count[int(guess)] += int(n)
    total = sum(count.values())
    return {g: n / total for g, n in count.items()}


def entropies(rows: list[dict], width: int = 10) -> tuple[list[int], list[float]]:
    """Bits of the first guess over windows of steps: pooled within a window (few guesses look more certain than they
    are), then the mean over seeds."""
    windows: dict[int, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        windows[int(row["step"]) // width][row["seed"]].append(row)
    bits = {w: mean(-sum(p * math.log2(p) for p in guesses(part).values()) for part in seeds.values()) for w, seeds in windows.items()}
    return [width * w + width // 2 for w in sorted(bits)], [bits[w] for w in sorted(bits)]


def main(folder: Path) -> None:
    for name, text in tables(folder).items():
        print(f"\n{name}\n\n{text}")
    for path in draw(folder):
        print(f"\nwrote {path}")
