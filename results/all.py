"""Which results are older than the code that they measured, and how each is made again.

    python results/all.py                        lists them, with a command each
    python results/all.py --make                 makes all again that are older
    python results/all.py --make kill study      only these
    python results/all.py --make --model FOLDER --humaneval HumanEval.jsonl.gz
                                                 also those of a real model

A result is older if a file that it measures has changed since its commit. Comments do not count.
Stopped, the same command goes on: what is made is no longer older, and study.py and real.py go on
inside. At the end the tables of results/README.md are put in.
"""

import argparse
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import record
from record import EXECUTOR, LEARNING, STUDY

LOOP = [*STUDY, "support/run.py", "support/metrics.py"]
REAL = [*LOOP, "results/real.py", "results/start.py"]
SPEED = [*LEARNING, "results/speed.py", "results/speed_model.py", "results/speed_limit.py"]
OLD = "89fc813"  # the last commit before the rebuild


@dataclass
class Result:
    """A file of results, the command that makes it, and the files that it measures."""

    name: str
    command: str  # MODEL, HUMANEVAL: options of this script; CODE: the code's last commit
    path: str
    measures: list[str]
    rows: dict[str, str] = field(default_factory=dict)  # which rows of a CSV; empty: all
    log: bool = False  # what the command prints goes to `path`, below a line with the commit

    def older(self) -> bool:
        commits = record.commits(record.HERE / self.path, **self.rows)
        return not commits or any(not record.is_current(c, self.measures) for c in commits)


def speed(measure: str, more: str = "", **rows: str) -> list[Result]:
    """A measure of speed.py with the tiny model, and with a real one."""
    found = []
    for name, option in (("tiny", ""), ("real", " --model MODEL")):
        model = "smollm2" if option else "tiny"
        command = f"results/speed.py {measure}{more}{option}"
        wanted = {"model": model, **rows}
        title = "-".join(["speed", measure, *rows.values(), name])
        measures = [*SPEED, *EXECUTOR] if measure == "step" else SPEED  # only a step runs programs
        found.append(Result(title, command, f"speed_{measure}.csv", measures, wanted))
    return found


RESULTS = [
    Result("main", "murphy.py", "main.log", LOOP, log=True),
    Result("study", "results/study.py --seeds 10", "study.csv", STUDY),
    *speed("update", f" --old {OLD}"),
    *speed("sampling", f" --old {OLD}", prompts="1"),
    *speed("sampling", f" --old {OLD} --prompts 4", prompts="4"),
    *speed("step", f" --old {OLD}"),
    *speed("groups"),
    *speed("limit"),
    Result("executor", f"results/speed.py executor --old {OLD}", "speed_executor.csv", EXECUTOR),
    Result("endurance", "results/speed.py endurance", "speed_endurance.csv", EXECUTOR),
    Result("kill", "results/kill.py", "kill.log", LOOP, log=True),
    Result("memory", "results/memory.py", "memory.csv", [*LEARNING, "support/ranks.py"]),
    Result("real", "results/real.py --model MODEL --output runs/real-CODE", "real.csv", REAL),
    Result(
        "graders",
        "results/graders.py --model MODEL --humaneval HUMANEVAL --output runs/graders-CODE",
        "graders.csv",
        [*EXECUTOR, "evaluate.py", "support/compare.py", "results/graders.py", "results/start.py"],
    ),
]


def lacks(result: Result, word: str, given: str) -> bool:
    """Whether a command needs an option of this script that was not given."""
    return word in result.command and not given


def whole(path: str) -> str:
    """A path that is also right in the project's root, where the commands run."""
    return str(Path(path).absolute()) if path else ""


def make(result: Result, model: str, humaneval: str) -> bool:
    """Run a result's command; whether it ended well."""
    words = {"MODEL": model, "HUMANEVAL": humaneval}
    code = record.last_change(result.measures)
    parts = [words.get(word, word.replace("CODE", code)) for word in result.command.split()]
    command = shlex.join(parts)
    print(f"\n{result.name}: python {command}", flush=True)
    running = [sys.executable, *parts]
    if not result.log:
        return subprocess.run(running, cwd=record.ROOT, check=False).returncode == 0

    path = record.HERE / result.path
    unfinished = Path(f"{path}.unfinished")
    with open(unfinished, "w") as log:
        print(f"commit {record.commit()}: python {command}", file=log, flush=True)
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(running, cwd=record.ROOT, **both) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
    if process.returncode == 0:
        unfinished.rename(path)
    return process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [result.name for result in RESULTS]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--make", action="store_true", help="make again what is older")
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M-Instruct, as smollm2")
    parser.add_argument("--humaneval", default="", help="HumanEval.jsonl.gz")
    args = parser.parse_args()
    unknown = set(args.names) - set(names)
    if unknown:
        sys.exit(f"all.py: no such result: {', '.join(unknown)}; they are {', '.join(names)}")

    failed = []
    for result in RESULTS:
        if args.names and result.name not in args.names:
            continue
        if not result.older():
            print(f"{result.name}: up to date")
        elif not args.make:
            print(f"{result.name}: older    python results/all.py --make {result.name}")
        elif lacks(result, "MODEL", args.model) or lacks(result, "HUMANEVAL", args.humaneval):
            print(f"{result.name}: older; left out, because it needs --model or --humaneval")
        elif not make(result, whole(args.model), whole(args.humaneval)):
            failed.append(result.name)
    if args.make:
        report = [sys.executable, str(record.HERE / "report.py"), "--write"]
        subprocess.run(report, stdout=subprocess.DEVNULL, check=True)
    if failed:
        sys.exit(f"all.py: these failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
