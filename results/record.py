"""Where results lie, and the commit that each of them was made at.

A CSV names the commit in each row, a log in its first line. So a table can say what it measured,
and `results/all.py` can say what is older than the code.
Importing this file also makes the project's modules importable.
"""

import ast
import csv
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from support.verify import EXECUTOR  # noqa: E402, F401  its files

LEARNING = ["grpo.py", "murphy.py", "propagate.py", "tree.py"]
LEARNING += ["support/packing.py", "support/sampling.py", "support/toy.py"]
# The executor is not in STUDY. A study uses it for one-line programs, and tests/test_toy.py holds
# what it says of those: it may get quicker, or stricter with hostile programs, and nothing changes.
STUDY = [*LEARNING, "evaluate.py", "support/settings.py", "support/state.py"]

# old commit -> new commit: the code that learns differs in form alone, and the runs that were made
# again at the new one came out the same to the last digit (README.md says which).
SAME = {"95f7dff": "550a106", "c7aea9f": "550a106", "99ed6d6": "550a106"}

Rows = list[dict]


def git(*arguments: str) -> str:
    """What git prints; "" if it fails, as where the project is no checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    """The commit of the code that is measured now; "+" behind it: changed since, not committed."""
    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":/*.py", ":!/results")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if dirty else "")


def changed(since: str, files: Sequence[str]) -> Sequence[str]:
    """The files whose code has changed since a commit; all of them, if the commit is not known."""
    if not since or since.endswith("+") or not git("cat-file", "-t", since):
        return files
    differ = git("diff", "--name-only", since, "--", *files).split()
    return [name for name in differ if code(git("show", f"{since}:{name}")) != code(now(name))]


def now(name: str) -> str:
    """The text of a file as it is now; "" if it is gone."""
    path = ROOT / name
    return path.read_text() if path.exists() else ""


def code(text: str) -> str:
    """What a file does, without its comments, docstrings and layout.

    >>> code("x = 1  # one") == code("x  =  1"), code("x = 1") == code("x = 2")
    (True, False)
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def last_change(files: Sequence[str]) -> str:
    """The last commit that changed one of these files."""
    return git("log", "-1", "--format=%h", "--", *files)


def read(path: Path) -> Rows:
    """The rows of a CSV; none if there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def replace(path: Path, rows: Rows, key: list[str]) -> None:
    """Put rows into a CSV, in place of those that agree with one of them in all columns of `key`.

    The file is replaced in one step, and other processes wait, so that it is whole at any moment.
    """

    def key_of(row: dict) -> tuple[str, ...]:
        return tuple(str(row.get(name, "")) for name in key)

    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        new = {key_of(row) for row in rows}
        rows = [row for row in read(path) if key_of(row) not in new] + rows
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with open(path.with_suffix(".new"), "w", newline="") as file:
            table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
        os.replace(path.with_suffix(".new"), path)
    finally:
        os.close(folder)  # and with it the lock


def commits(path: Path, **wanted: str) -> list[str]:
    """The commits at which the wanted rows of a CSV, or a log, were made; "": it does not say.

    What an old commit's code measured beside ours does not count: it is never made again.
    """
    if path.suffix == ".csv":
        rows = [row for row in read(path) if not row.get("way", "").startswith("old")]
        rows = [row for row in rows if all(row[name] == wanted[name] for name in wanted)]
        return sorted({row.get("commit", "") for row in rows})
    found = re.match(r"commit (\w+\+?)", path.read_text()) if path.exists() else None
    return [found[1]] if found else [""]


def is_current(since: str, files: Sequence[str] = STUDY) -> bool:
    """Whether what was made at a commit was made with these files as they are now."""
    since = SAME.get(since, since)
    return bool(since) and not changed(since, files)
