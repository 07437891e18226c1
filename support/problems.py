"""Problems: a statement, the tests that decide, and those of them that a user may see.

In:  a file with your own problems, or a benchmark by its name or as a file (support/benchmarks.py).
Out: a list of Problem. Rows that are left out are named, with the reason, on standard error.
Needs: executor.py, support/plan.py, verify.py.
Run: python -m support.problems examples/own_problems.jsonl
"""

import signal
import sys

if __name__ == "__main__":  # so that Ctrl-C prints one line
    signal.signal(signal.SIGINT, lambda *_: sys.exit("\nproblems: stopped"))

import ast
import builtins
import gzip
import json
import math
import random
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from executor import run_many
from support.plan import find, own_names
from support.verify import remembered, verified

SHOWN = 50  # of the rows that are left out, so many are printed with their reason
TESTS = {  # kind: what one test is
    "assert": "a text of Python",
    "stdin": "[input, output], two texts",
    "functional": "[list of arguments, value]",
}
# The type of a field of Problem: its name in messages.
WORDS = {str: "text", str | None: "text", list: "a list", int | float | None: "seconds"}


@dataclass
class Problem:
    """A programming problem [paper: x is a statement with unit tests; the fields are ours].

    Kind "assert" has Python text: each statement that asserts is a test, and check(candidate) and
    test_* functions are called. The other kinds have pairs, which TESTS describes.
    """

    id: str
    prompt: str  # the whole user message
    tests: list  # texts or pairs; the reward is the share of tests that pass
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
    limit: int | None = None,
    seed: int | None = None,
    execute: Callable[[list], list] | None = None,
    cache: str | Path | None = "~/.cache/murphy",
    **request: str | None,
) -> list[Problem]:
    """The problems of a benchmark on the hub, or of a file (.jsonl or .json, also .gz).

    limit: how many rows are read: the first ones, or with a seed a random sample. A row that is
    left out counts, too; one outside the dates or the split does not.
    execute: executor.run_many, to check tests and references; what passes is kept in `cache`.
    request: version, start_date and end_date of a benchmark, see benchmarks.find_rows.
    ValueError or FileNotFoundError, one sentence: a wrong request, or no problem is left.
    """
    from support import benchmarks  # here, because it imports Problem from this file

    rows, make = benchmarks.find_rows(str(source), **request)
    order = list(range(len(rows)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    with warnings.catch_warnings(action="ignore"):  # about escapes in the strings of a data set
        found, left_out = convert_rows(rows, order, limit, make)
    if execute is not None and cache:
        found = remembered(found, execute, left_out, Path(cache).expanduser() / "verdicts.json")
    elif execute is not None:
        found = verified(found, execute, left_out)
    report(source, len(rows), found, left_out)
    if not found:
        raise ValueError(f"no problem is left of the {len(rows)} rows of {source}")
    return distinct(list(found.values()))


def report(source: str | Path, rows: int, found: dict, left_out: dict) -> None:
    """Say on standard error what a set holds, and why rows are left out."""
    lines = [f"{source}: {len(found)} problems; of {rows} rows {len(left_out)} left out"]
    for label, reason in list(left_out.items())[:SHOWN]:
        lines.append(f"  left out: {label}: {' '.join(reason.split())[:300]}")
    if len(left_out) > SHOWN:
        lines.append(f"  left out: {len(left_out) - SHOWN} more rows, not shown")
    oracle = sum(not problem.public_tests for problem in found.values())
    lines.append(f"  {oracle} without public tests: feedback tells of all tests (oracle)")
    print(*lines, sep="\n", file=sys.stderr)


def convert_rows(rows: Any, order: list, limit: int | None, make: Callable) -> tuple[dict, dict]:
    """{label: problem}, and {label: reason} of the rows that cannot be one."""
    found, left_out = {}, {}
    for i in order:
        if len(found) + len(left_out) == limit:
            break
        row, label = rows[i], f"row {i + 1}"
        try:
            if isinstance(row, ValueError):  # a line that is no JSON
                raise row
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            ids = [row[key] for key in ("task_id", "question_id", "id") if key in row]
            label += "".join(f" ({value})" for value in ids)
            problem = make(row)
            if problem is not None:  # None: it was not asked for
                problem.id = problem.id or label
                check(problem)
                problem.entry_point = find_entry_point(problem)
                found[label] = problem
        except KeyError as error:
            left_out[label] = f"the field {error} is missing"
        except UnicodeEncodeError:
            left_out[label] = "a text is not in UTF-8: save the file in UTF-8"
        except (MemoryError, RecursionError) as error:
            left_out[label] = f"a test is too deep for Python: {error!r}"
        except Exception as error:  # a row may hold anything, and costs no more than itself
            left_out[label] = str(error) or repr(error)
    return found, left_out


def own(row: dict) -> Problem:
    """A row of your own file: the fields of Problem, of which prompt and tests must be there."""
    names = [item.name for item in fields(Problem)]
    unknown = [name for name in row if name not in names]
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)} (known: {', '.join(names)})")
    given = {name: value for name, value in row.items() if value is not None}
    return Problem(given.pop("id", ""), given.pop("prompt"), given.pop("tests"), **given)


def check(problem: Problem) -> None:
    """ValueError, in words, if a field is wrong. (Code is read later, by the executor.)"""
    for item in fields(problem):
        value = getattr(problem, item.name)
        if not isinstance(value, item.type):
            raise ValueError(f"{item.name} is {value!r:.60}, expected {WORDS[item.type]}")
        if item.name in ("prompt", "tests") and not value:
            raise ValueError(f"{item.name} is empty")
    if problem.kind not in TESTS:
        raise ValueError(f"kind is {problem.kind!r:.60}, expected one of {', '.join(TESTS)}")
    if problem.timeout is not None and not 0 < problem.timeout < math.inf:
        raise ValueError(f"timeout is {problem.timeout}, expected seconds above 0")
    for test in problem.tests + problem.public_tests:
        match problem.kind, test:
            case ("assert", str()) | ("stdin", [str(), str()]) | ("functional", [list(), _]):
                pass
            case _:
                raise ValueError(f"a test is {test!r:.60}, expected {TESTS[problem.kind]}")
    json.dumps(asdict(problem), ensure_ascii=False).encode()  # raises if a text is not UTF-8


def find_entry_point(problem: Problem) -> str:
    """The name by which a program is found in an answer: the given one, or what tests call first.

    "" if it is unknown: what the tests call, they define themselves.
    """
    if problem.entry_point or problem.kind != "assert":
        return problem.entry_point
    tests = ast.parse("\n".join(problem.tests), "the tests, in one file")
    context = ast.parse(problem.context, "the context")
    others = own_names(tests) | own_names(context) | set(dir(builtins))
    called = [ast.unparse(call.func) for call in find(tests, ast.Call)]
    return next((name for name in called if name.isidentifier() and name not in others), "")


def distinct(problems: list) -> list:
    """Make all ids different, because results are kept by id: a second "a" becomes "a#2"."""
    marked: dict[str, Problem] = {}
    for problem in problems:
        name, number = problem.id, 1
        while name in marked:
            number += 1
            name = f"{problem.id}#{number}"
        marked[name] = replace(problem, id=name)
    return list(marked.values())


def fingerprint(problems: list) -> int:
    """A number that names the problems, without their time limits, which the machine decides."""
    text = repr([replace(problem, timeout=None) for problem in problems])
    return zlib.crc32(text.encode("utf-8", "replace"))


def read_rows(path: Path) -> list:
    """The rows of a file; a line that is no JSON stands there as a ValueError."""
    data = path.read_bytes()
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell writes such files
        raise ValueError(f"{path} is in UTF-16: save it in UTF-8")
    text = data.decode("utf-8-sig", "surrogateescape")  # a bad byte costs its row only
    pieces = [text] if text.lstrip().startswith("[") else text.split("\n")
    rows = []
    for piece in filter(str.strip, pieces):
        try:
            rows.append(json.loads(piece))
        except (ValueError, RecursionError) as error:
            reason = str(error).replace("line 1 column", "column")
            rows.append(ValueError(f"not JSON ({reason}); expected one object a line"))
    return rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows


def main(arguments: list[str]) -> None:
    """The command line: what a file holds, what is left out and why, how its references do."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit("usage: python -m support.problems FILE (or the name of a benchmark)")
    try:
        problems = load_problems(arguments[0], execute=run_many, cache=None)
        jobs = [(problem, problem.reference) for problem in problems if problem.reference]
        for (problem, _), result in zip(jobs, run_many(jobs), strict=True):  # again, for its time
            print(f"{problem.id}: reference {result.status}, {result.cpu_seconds:.2f} s of CPU")
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"problems: {error}")
    kinds = Counter(problem.kind for problem in problems)
    print(", ".join(f"{count} of kind {kind}" for kind, count in kinds.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
