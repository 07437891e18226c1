"""Problems: a statement, the tests that decide, and those of them that a user may see.

In:  a file with your own problems, or a benchmark by its name or as a file (support/benchmarks.py).
Out: a list of Problem. Rows that are left out are named, with the reason, on standard error.
Needs: the standard library; executor.py where programs are to be run.
Run: python -m support.problems examples/own_problems.jsonl
"""

import argparse
import ast
import contextlib
import gzip
import hashlib
import json
import math
import os
import random
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 30  # what packed data may unpack to
REFERENCE_TIMEOUT = 20.0  # CPU seconds for a reference; what it uses sets the problem's limit
TESTS = {  # kind: what a test is, in words and as types
    "assert": ("a text of Python", (str,)),
    "stdin": ("[input, output], two texts", (str, str)),
    "functional": ("[list of arguments, value]", (list, object)),
}


@dataclass
class Problem:
    """A programming problem [paper: x is a statement with unit tests; the fields are ours].

    A test of kind "assert" is Python text: every assert counts, check(candidate) and test_*
    functions are called. The other kinds have pairs, which TESTS describes.
    """

    id: str
    prompt: str  # the whole user message
    tests: list  # the reward is the share of them that passes
    public_tests: list = field(default_factory=list)  # feedback may quote these
    entry_point: str = ""  # the name that the program must define
    kind: str = "assert"
    difficulty: str | None = None
    reference: str | None = None  # a right program
    context: str = ""  # trusted code (imports, helpers) that runs before the program
    timeout: int | float | None = None  # CPU seconds that a program gets at least; None: the run's


def load_problems(
    source: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    difficulty: str | None = None,
    version: str | None = None,
    start_date: str | None = None,
    end_date: str | None = None,
    execute: Callable[[list], list] | None = None,
    cache: str | Path | None = "~/.cache/murphy",
    dropped: list | None = None,
) -> list[Problem]:
    """The problems of a benchmark on the hub, or of a file (.jsonl, .json, also .gz, or .parquet).

    split: MBPP: test (default), train, validation, prompt, all. KodCode: train, use_with_caution.
    limit: the first `limit` rows, with a seed a shuffled sample; rows left out are not made up for.
    difficulty: "easy" or "easy,hard". version, start_date and end_date (2025-01-31): LiveCodeBench.
    execute: executor.run_many, to check tests and references; verdicts are kept in `cache`.
    dropped: a list that receives (row, reason) for what is left out.
    Raises ValueError or FileNotFoundError, one sentence, for a wrong request or if nothing is left.
    """
    from support import benchmarks  # here, because it imports Problem from this file

    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: expected at least 1, or nothing for all problems")
    name = str(source)
    if version and name != "livecodebench":
        raise ValueError(f"version {version} is for livecodebench on the hub, not for {name}")
    rows = None if name in benchmarks.HUB else read_rows(Path(name))
    form = benchmarks.recognise(name, rows)
    wanted = benchmarks.selection(name, form, split, difficulty, (start_date, end_date))
    if rows is None:
        rows = benchmarks.hub_rows(name, split, version)
    order = list(range(len(rows)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    make = own if form == "own" else partial(benchmarks.convert, form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the strings of a data set
        found, left_out, outside = _convert(rows, order, limit, wanted, make)
    if execute is not None:
        found = _verified(found, execute, cache, left_out)
    elif form == "humaneval":  # some docstring examples are wrong, and nothing has run them
        found = {row: replace(problem, public_tests=[]) for row, problem in found.items()}

    counts = f"of {len(rows)} rows {len(left_out)} left out, {outside} not asked for"
    oracle = sum(not problem.public_tests for problem in found.values())
    say = [f"{source}: {len(found)} problems; {counts}"]
    say += [f"  left out: {row}: {reason}" for row, reason in left_out]
    say.append(f"  {oracle} without public tests: feedback on them tells of all tests (oracle)")
    print("\n".join(say), file=sys.stderr)
    if dropped is not None:
        dropped += left_out
    if not found:
        first = "".join(f"; {row}: {reason}" for row, reason in left_out[:1])
        raise ValueError(f"{source}: no problem is left; {counts}{first}")
    return list(found.values())


def _convert(rows: Any, order: list, limit: int | None, wanted: Callable, make: Callable) -> tuple:
    """(row: problem, [(row, reason)] of those left out, the number of those not asked for)."""
    found: dict[str, Problem] = {}
    ids: dict[str, str] = {}
    left_out: list[tuple[str, str]] = []
    outside = 0
    for i in order:
        if limit is not None and len(found) + len(left_out) >= limit:
            break
        row, label = rows[i], f"row {i + 1}"
        try:
            if not isinstance(row, dict):  # read_rows gives a ValueError for a line it cannot read
                raise row if isinstance(row, ValueError) else ValueError("not a JSON object")
            keys = [key for key in ("task_id", "question_id", "id") if key in row]
            label += "".join(f" ({row[key]})" for key in keys)
            if not wanted(row):
                outside += 1
                continue
            problem = make(row)
            problem.id = problem.id or label
            check(problem)
            if ids.setdefault(problem.id, label) != label:
                raise ValueError(f"{ids[problem.id]} has the same id")
            found[label] = problem
        except Exception as error:  # a row may hold anything, and costs no more than itself
            reason = str(error) or type(error).__name__
            if isinstance(error, KeyError):
                reason = f"the field {error} is missing"
            left_out.append((label, " ".join(reason.split())[:300]))
    return found, left_out, outside


def own(row: dict) -> Problem:
    """A row of your own file: the fields of Problem, of which prompt and tests must be there."""
    names = [item.name for item in fields(Problem)]
    unknown = [name for name in row if name not in names]
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)} (known: {', '.join(names)})")
    given = {name: value for name, value in row.items() if value is not None}
    return Problem(given.pop("id", ""), given.pop("prompt"), given.pop("tests"), **given)


def check(problem: Problem) -> None:
    """Raise ValueError, in words, if a problem cannot be shown or scored."""
    words = {str: "text", str | None: "text", list: "a list", int | float | None: "seconds"}
    for item in fields(problem):
        value = getattr(problem, item.name)
        if not isinstance(value, item.type):
            raise ValueError(f"{item.name} is {value!r:.60}, expected {words[item.type]}")
        if item.name in ("prompt", "tests") and str(value).strip() in ("", "[]"):
            raise ValueError(f"{item.name} is empty")
    if problem.kind not in TESTS:
        raise ValueError(f"kind is {problem.kind!r:.60}, expected one of {', '.join(TESTS)}")
    if problem.kind == "functional" and not problem.entry_point.isidentifier():
        raise ValueError(f"entry_point is {problem.entry_point!r:.60}, expected a function's name")
    if problem.timeout is not None and not 0 < problem.timeout < math.inf:
        raise ValueError(f"timeout is {problem.timeout}, expected seconds above 0")
    expected, types = TESTS[problem.kind]
    for test in [*problem.tests, *problem.public_tests]:
        parts = [test] if problem.kind == "assert" else test
        whole = isinstance(parts, list) and len(parts) == len(types)
        if not whole or not all(map(isinstance, parts, types)):
            raise ValueError(f"a test is {test!r:.60}, expected {expected}")
        if problem.kind == "assert":
            ast.parse(test, "a test")
    json.dumps(asdict(problem), ensure_ascii=False).encode()  # no file takes half a character


def _verified(found: dict, execute: Callable, cache: str | Path | None, left_out: list) -> dict:
    """Run an empty program and the reference of each problem, and keep what can be scored.

    A verdict is [why the problem is left out, its wrong public tests, its reference's seconds].
    """
    file = Path(cache).expanduser() / "verdicts.json" if cache else Path(os.devnull)
    known: dict[str, list] = {}
    with contextlib.suppress(OSError, ValueError):  # no cache yet, or a damaged one
        known = dict(json.loads(file.read_text()))
    keys, jobs = {}, {}
    for row, problem in found.items():
        content = json.dumps([asdict(problem), sys.version])
        keys[row] = hashlib.sha256(content.encode()).hexdigest()
        if keys[row] not in known:
            jobs[keys[row]] = _jobs(problem)
    results = iter(execute([job for group in jobs.values() for job in group]) if jobs else [])
    for key, group in jobs.items():
        known[key] = _verdict(group, [next(results) for _ in group])
    if jobs and cache:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({key: known[key] for key in known if known[key][2] is not None}))
        os.replace(part, file)  # in one step: another run may be reading it

    usable = {}
    for row, problem in found.items():
        reason, wrong, seconds = known[keys[row]]
        if reason:
            left_out.append((row, reason))
            continue
        for test in wrong:
            print(f"{row}: not public, since the reference fails it: {test}", file=sys.stderr)
        public = [test for test in problem.public_tests if test not in wrong]
        timeout = max(problem.timeout or 0.0, math.ceil(3 * seconds))
        usable[row] = replace(problem, public_tests=public, timeout=timeout or None)
    return usable


def _jobs(problem: Problem) -> list[tuple[Problem, str]]:
    """What checks a problem: an empty program, the reference, the reference on further examples."""
    jobs = [(problem, "pass")]
    if problem.reference is not None:
        patient = replace(problem, timeout=max(problem.timeout or 0.0, REFERENCE_TIMEOUT))
        others = [test for test in problem.public_tests if test not in problem.tests]
        alone = [replace(patient, tests=[test], public_tests=[]) for test in others]
        jobs += [(variant, problem.reference) for variant in [patient, *alone]]
    return jobs


def _verdict(jobs: list, results: list) -> list:
    empty, *others = results
    for result in results[:2]:
        if result.status == "unscorable":  # a package installed later may change this: not kept
            return [result.feedback, [], None]
    if empty.reward == 1:
        return ["a program that does nothing passes its tests", [], 0.0]
    if others and others[0].reward != 1:
        feedback = " ".join(others[0].feedback.split())[:300]
        return [f"its reference fails its tests ({others[0].status}): {feedback}", [], 0.0]
    pairs = zip(jobs[2:], others[1:], strict=True)
    wrong = [problem.tests[0] for (problem, _), result in pairs if result.reward != 1]
    return ["", wrong, others[0].cpu_seconds if others else 0.0]


def distinct(problems: list) -> list:
    """The problems, an id that comes again marked #2, #3, ...: results are kept by id."""
    times: Counter = Counter()
    marked = []
    for problem in problems:
        times[problem.id] += 1
        again = f"#{times[problem.id]}" if times[problem.id] > 1 else ""
        marked.append(replace(problem, id=problem.id + again))
    return marked


def read_rows(path: Path) -> list:
    """The rows of a file; a line that cannot be read stands there as a ValueError."""
    from support import benchmarks

    if not path.is_file():
        kind = FileNotFoundError if path.suffix else ValueError
        raise kind(f"{path} is neither a file nor one of {', '.join(benchmarks.HUB)}")
    if path.suffix == ".parquet":
        return benchmarks.hub_rows(str(path))
    data = bytearray()
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            while chunk := file.read1(1 << 20):
                data += chunk
                if path.suffix == ".gz" and len(data) > MAX_BYTES:
                    raise EOFError(f"it unpacks to more than {MAX_BYTES} bytes")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        print(f"{path}: what could be read of it is used: {error}", file=sys.stderr)
    text = data.decode("utf-8-sig", "surrogateescape")  # a bad byte costs its row only
    rows = _json(text) if text.lstrip().startswith("[") else None
    if isinstance(rows, list):
        return rows
    return [_json(line) for line in text.split("\n") if line.strip()]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Check a file: what it holds, what is left out and why, and how its references do."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", help="a file of problems, or the name of a benchmark")
    parser.add_argument("--no-run", action="store_true", help="run no program")
    options = parser.parse_args(arguments)

    def execute(jobs: list) -> list:
        from executor import run_many

        results = run_many(jobs)
        for (problem, code), result in zip(jobs, results, strict=True):
            if code == problem.reference:
                share = f"{result.passed} of {result.total} tests"
                print(f"{problem.id}: reference passes {share}, {result.cpu_seconds:.2f} s of CPU")
        return results

    try:
        run = None if options.no_run else execute
        problems = load_problems(options.file, execute=run, cache=None)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for kind, count in Counter(problem.kind for problem in problems).items():
        print(f"{count} of kind {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
