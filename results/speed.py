"""Speed, measured side by side in one run; the figures go to CSV files beside this script.

    python results/speed.py executor     the executor, an interpreter per program, and the bare fork floor
    python results/speed.py endurance    20,000 programs in a row, one in ten hostile; then their verdicts under load
    python results/speed.py update | sampling | step | groups ...    what training costs, see step.py beside this file

Each of the first two is one function below. CPU time is user + system of the process and of all that it started.
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
import executor  # noqa: E402


def write(name: str, rows: list) -> None:
    """Save rows (dicts with the same keys) as results/<name> and print them."""
    with open(HERE / name, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def workers_cpu() -> float:
    """CPU seconds so far of this process and, with all their children, of the processes of the executor."""
    own, tick = resource.getrusage(resource.RUSAGE_SELF), os.sysconf("SC_CLK_TCK")
    total = own.ru_utime + own.ru_stime
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            if any(
                worker.folder.encode() in words for worker in executor._idle
            ):  # of a judge or zygote of ours
                total += (
                    sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15]))
                    / tick
                )
        except OSError:
            pass
    return total


def cpu_executor(arguments: argparse.Namespace) -> None:
    """Programs a second and CPU milliseconds a program, for 1, 2 and 4 workers, on the same programs."""
    tests = [[[n], n * n + 1] for n in range(6)]
    problem = SimpleNamespace(kind="functional", tests=tests, public_tests=[], entry_point="f")
    asserts = SimpleNamespace(
        kind="assert",
        tests=[f"assert f({n}) == {n * n + 1}" for n in range(6)],
        public_tests=[],
        entry_point="f",
    )
    rows, serial = [], iter(range(10**9))

    def programs(count):
        return [f"def f(x):\n    y = {next(serial)}\n    return x * x + 1\n" for _ in range(count)]

    def measure(way, workers, codes, action):
        before, begin = workers_cpu() + children_cpu(), time.monotonic()
        action(codes)
        wall, cpu = time.monotonic() - begin, workers_cpu() + children_cpu() - before
        rows.append(
            dict(
                way=way,
                workers=workers,
                programs=len(codes),
                per_second=round(len(codes) / wall, 1),
                cpu_ms=round(1000 * cpu / len(codes), 2),
            )
        )

    def through_executor(problem, workers):
        def action(codes):
            assert all(
                r.reward == 1
                for r in executor.run_many([(problem, code) for code in codes], workers=workers)
            )

        return action

    def through_subprocess(codes):
        for code in codes:
            text = code + f"\nassert all(f(*a) == b for a, b in {tests!r})"
            assert subprocess.run([sys.executable, "-I", "-c", text]).returncode == 0

    def through_fork(codes):
        for code in codes:
            child = os.fork()
            if not child:
                space = {}
                exec(compile(code, "<program>", "exec"), space)
                os._exit(0 if all(space["f"](*a) == b for a, b in tests) else 1)
            assert os.waitpid(child, 0)[1] == 0

    for _ in range(arguments.rounds):
        executor.close()
        measure("fork floor", 1, programs(arguments.programs), in_a_clean_process(through_fork))
        measure("subprocess", 1, programs(arguments.programs // 10), through_subprocess)
        for workers in (1, 2, 4):
            executor.run_many(
                [(problem, code) for code in programs(4 * workers)], workers=workers
            )  # start them
            measure(
                "executor, functional",
                workers,
                programs(arguments.programs),
                through_executor(problem, workers),
            )
            measure(
                "executor, assert",
                workers,
                programs(arguments.programs),
                through_executor(asserts, workers),
            )
        executor.close()
    write("speed_executor.csv", rows)
    best = {
        way: min(row["cpu_ms"] for row in rows if row["way"] == way and row["workers"] == 1)
        for way in {row["way"] for row in rows}
    }
    ours = best["executor, functional"]
    print(
        f"CPU per program: {best['subprocess'] / ours:.1f} times less than an interpreter each (asked: 8), "
        f"{ours / best['fork floor']:.1f} times the fork floor (asked: at most 4)"
    )


def children_cpu() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def in_a_clean_process(action):
    """The floor is measured from a process like the zygote: the same modules imported, nothing else."""

    def run(codes):
        import gc

        child = os.fork()
        if not child:
            for name in executor.PRELOADED.split():
                __import__(name)
            gc.freeze()
            gc.disable()
            action(codes)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    return run


def endurance(arguments: argparse.Namespace) -> None:
    """Programs in a row, one in ten hostile: what grows; then the same verdicts while all cores are busy four times over."""
    import test_executor as tests

    hostile = [p for p in tests.corpus() if p[2] == 0]
    jobs = []
    for n in range(arguments.programs):
        name, task, low, high, code = hostile[n // 10 % len(hostile)]
        jobs.append(
            (tests.TASKS[task], code + f"\n#{n}", low, high)
            if n % 10 == 0
            else (tests.SQUARE, f"def square(n):\n    return n * n  # {n}", 1, 1)
        )

    def state():
        ours = [
            pid
            for pid, line in tests.processes().items()
            if any(worker.folder in line for worker in executor._idle)
        ]
        pages = sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in [os.getpid(), *ours]
        )
        return dict(
            processes=len(ours),
            megabytes=round(pages * resource.getpagesize() / 2**20, 1),
            descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *ours]),
            files=sum(len(list(Path(worker.folder).rglob("*"))) for worker in executor._idle),
        )

    rows, verdicts = [], []
    for start in range(0, len(jobs), arguments.programs // 10):
        part = jobs[start : start + arguments.programs // 10]
        begin = time.monotonic()
        results = executor.run_many([job[:2] for job in part], seconds=0.2, memory_mb=256)
        verdicts += [(r.reward, r.status) for r in results]
        bad = sum(not low <= r.reward <= high for (_, _, low, high), r in zip(part, results))
        rows.append(
            dict(
                programs=start + len(part),
                false_verdicts=bad,
                **state(),
                seconds=round(time.monotonic() - begin, 1),
            )
        )
        print(rows[-1], flush=True)
    write("endurance_executor.csv", rows)
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(4 * len(os.sched_getaffinity(0)))
    ]
    try:
        sample = range(0, len(jobs), max(1, len(jobs) // arguments.again))
        again = executor.run_many([jobs[n][:2] for n in sample], seconds=0.2, memory_mb=256)
    finally:
        for process in load:
            process.kill()
            process.wait()
    other = [
        (n, verdicts[n], (r.reward, r.status))
        for n, r in zip(sample, again)
        if verdicts[n] != (r.reward, r.status)
    ]
    print(
        f"{len(again)} of them again under 4 times the load of all cores: {len(other)} other verdicts {other[:5]}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ("update", "sampling", "step", "groups"):
        import step  # here: torch in this process would not be the executor's cost

        step.main()
        sys.exit()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "executor", help="against an interpreter per program and the bare fork floor"
    )
    command.add_argument("--programs", type=int, default=1000)
    command.add_argument("--rounds", type=int, default=3)
    command.set_defaults(function=cpu_executor)
    command = commands.add_parser("endurance", help="many programs in a row, one in ten hostile")
    command.add_argument("--programs", type=int, default=20_000)
    command.add_argument(
        "--again", type=int, default=1000, help="programs that run again under load"
    )
    command.set_defaults(function=endurance)
    arguments = parser.parse_args()
    arguments.function(arguments)
