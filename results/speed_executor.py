"""One side of `speed.py executor` or `speed.py endurance`; torch is not imported here.

In: a request as JSON on standard input. Out: rows as JSON, the last line that is printed.
"""

# ruff: noqa: E402  the code that is measured lies in the folder that the request names
import gc
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REQUEST = json.loads(sys.stdin.read())
sys.path.insert(0, REQUEST["code"])

TESTS = [[[n], n * n + 1] for n in range(6)]
FUNCTIONAL = SimpleNamespace(kind="functional", tests=TESTS, public_tests=[], entry_point="f")
ASSERTS = SimpleNamespace(
    kind="assert",
    tests=[f"assert f({n}) == {n * n + 1}" for n in range(6)],
    public_tests=[],
    entry_point="f",
)


def programs(count: int, first: int = 0) -> list[str]:
    """Right programs, all different: equal ones run only once."""
    return [f"def f(x):\n    y = {first + n}\n    return x * x + 1\n" for n in range(count)]


def cpu_seconds(executor: Any = None) -> float:
    """CPU seconds so far of this process, its ended children, and the executor's processes."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    tick = os.sysconf("SC_CLK_TCK")
    for pid in workers(executor) if executor else []:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, stat[11:15])) / tick  # its own and its ended children's
    return total


def workers(executor: Any) -> list[int]:
    """The processes of the executor: judges and zygotes name their worker's folder."""
    folders = [worker.folder.encode() for worker in executor._idle]
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if any(folder in words for folder in folders):
            found.append(int(path.name))
    return found


def measured(action: Callable, codes: list[str], executor: Any = None) -> list[dict]:
    """CPU milliseconds of a program, and programs a second."""
    before, begin = cpu_seconds(executor), time.monotonic()
    action(codes)
    wall, cpu = time.monotonic() - begin, cpu_seconds(executor) - before
    row = {"way": REQUEST["way"], "workers": REQUEST["workers"], "programs": len(codes)}
    row["per_second"] = round(len(codes) / wall, 1)
    return [row | {"cpu_ms": round(1000 * cpu / len(codes), 2)}]


def through_executor() -> list[dict]:
    import executor

    problem = FUNCTIONAL if REQUEST["kind"] == "functional" else ASSERTS

    def action(codes: list[str]) -> None:
        jobs = [(problem, code) for code in codes]
        results = executor.run_many(jobs, workers=REQUEST["workers"])
        assert all(result.reward == 1 for result in results)

    count = REQUEST["programs"]
    action(programs(4 * REQUEST["workers"], first=count))  # the workers start
    return measured(action, programs(count), executor)


def through_interpreters(codes: list[str]) -> None:
    for code in codes:
        text = f"{code}\nassert all(f(*a) == b for a, b in {TESTS!r})"
        subprocess.run([sys.executable, "-I", "-c", text], check=True)


def through_forks(codes: list[str]) -> None:
    """The least that a program in a process of its own costs, with the zygote's modules loaded."""
    for name in ("bisect", "cmath", "copy", "enum", "heapq", "math", "random", "string"):
        importlib.import_module(name)
    gc.freeze()
    gc.disable()
    for code in codes:
        child = os.fork()
        if not child:
            space: dict = {}
            exec(compile(code, "<program>", "exec"), space)
            right = all(space["f"](*arguments) == value for arguments, value in TESTS)
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0


# ---------------------------------------------------------------------- endurance


def hostile_jobs(count: int) -> list[tuple]:
    """Programs with their problem and the rewards that they may get; one in ten is hostile."""
    sys.path.insert(0, f"{REQUEST['code']}/tests")
    import test_executor

    hostile = [program for program in test_executor.corpus("programs.txt") if program[2] == 0]
    jobs = []
    for n in range(count):
        _, problem, low, high, code = hostile[n // 10 % len(hostile)]
        if n % 10:
            square = f"def f(x):\n    return x * x + 1  # {n}"
            jobs.append((FUNCTIONAL, square, 1, 1))
        else:
            jobs.append((problem, f"{code}\n#{n}", low, high))
    return jobs


def state(executor: Any) -> dict:
    """What must not grow: processes, memory, open files, files left behind."""
    pids = [os.getpid(), *workers(executor)]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    left = [list(Path(worker.folder).rglob("*")) for worker in executor._idle]
    return {
        "processes": len(pids) - 1,
        "megabytes": round(pages * resource.getpagesize() / 2**20, 1),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "files": sum(map(len, left)),
    }


def endurance() -> list[dict]:
    """Many programs in a row: what grows; then some of them again while all cores are busy."""
    import executor

    limits = {"timeout": 0.2, "memory_mb": 256}
    jobs = hostile_jobs(REQUEST["programs"])
    size = max(1, len(jobs) // 10)
    rows, verdicts = [], []
    for start in range(0, len(jobs), size):
        part = jobs[start : start + size]
        begin = time.monotonic()
        results = executor.run_many([job[:2] for job in part], **limits)
        verdicts += [(result.reward, result.status) for result in results]
        false = 0
        for (_, _, low, high), result in zip(part, results, strict=True):
            false += not low <= result.reward <= high
        row = {"programs": start + len(part), "false_verdicts": false, **state(executor)}
        rows.append(row | {"seconds": round(time.monotonic() - begin, 1)})
        print(rows[-1], file=sys.stderr, flush=True)

    chosen = range(0, len(jobs), max(1, len(jobs) // REQUEST["again"]))
    with_load = under_load(executor, [jobs[n][:2] for n in chosen], limits)
    pairs = zip((verdicts[n] for n in chosen), with_load, strict=True)
    others = [pair for pair in pairs if pair[0] != pair[1]]
    print(f"{len(chosen)} again under load: {len(others)} other verdicts", file=sys.stderr)
    rows[-1]["others_under_load"] = len(others)
    return rows


def under_load(executor: Any, jobs: list, limits: dict) -> list[tuple]:
    """Verdicts while four times as many processes as cores are busy."""
    command = [sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(command) for _ in range(4 * len(os.sched_getaffinity(0)))]
    try:
        results = executor.run_many(jobs, **limits)
    finally:
        for process in load:
            process.kill()
            process.wait()
    return [(result.reward, result.status) for result in results]


def main() -> list[dict]:
    if REQUEST["measure"] == "endurance":
        return endurance()
    if REQUEST["way"] == "fork floor":
        return measured(through_forks, programs(REQUEST["programs"]))
    if REQUEST["way"] == "an interpreter each":
        return measured(through_interpreters, programs(REQUEST["programs"]))
    return through_executor()


if __name__ == "__main__":
    print(json.dumps(main()))
