"""What a long run needs besides the method: settings, files, its folder, a checkpoint, signals.

    option, at_least, parse     a dataclass of settings becomes a command line
    write, json_lines           files that are replaced in one step, never half-written
    claim                       an output folder that belongs to one run at a time
    save, load, cut_log         one checkpoint: a killed run goes on from it, bit for bit
    Signals                     Ctrl-C and SIGTERM: finish what must be finished, leave the rest

In: a folder and what is to be kept. Out: files in that folder.
Needs torch, and support/ranks.py for runs of several processes.
"""

import argparse
import fcntl
import json
import os
import signal
import types
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torch

from support.ranks import gather

# Settings


def option(default: Any, help: str, group: str = "options") -> Any:
    """A field of a settings dataclass, with its help text and the heading it stands under."""
    return field(default=default, metadata={"help": help, "group": group})


def flag(name: str) -> str:
    """The command-line name of a setting.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.replace("_", "-")


def at_least(settings: Any, **least: float) -> None:
    """Refuse settings below their least values, by the name of their option; None is fine."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:  # `not >=` refuses NaN, too
            raise ValueError(f"{flag(name)} must be at least {low}, got {value}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line in place of argparse's whole usage text."""
        self.exit(2, f"{self.prog}: {message}. --help lists the options.\n")


def parse(kind: type, arguments: list[str] | None, description: str) -> dict[str, Any]:
    """The options that were given on the command line, and no others.

    kind: a dataclass whose fields are `option`s. A wrong option ends the program with one line and
    exit status 2. `kind(**parse(kind, None, ""))` makes the settings.
    """
    parser = _Parser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what was not given is not in the answer
        allow_abbrev=False,
    )
    headings: dict[str, Any] = {}
    for setting in fields(kind):
        heading = setting.metadata["group"]
        if heading not in headings:
            headings[heading] = parser.add_argument_group(heading)
        text = setting.metadata["help"].replace("%", "%%")
        if setting.default not in (None, ""):
            text += f" (default: {setting.default})"
        how = _argument(setting.type)
        headings[heading].add_argument(flag(setting.name), dest=setting.name, help=text, **how)
    given = parser.parse_args(arguments)
    return {s.name: getattr(given, s.name) for s in fields(kind) if hasattr(given, s.name)}


def _argument(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type: int, float, str, bool, Literal, or `int | None`."""
    if isinstance(kind, types.UnionType):
        kind = get_args(kind)[0]  # `int | None`: None means that the option is not given
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind, "metavar": kind.__name__.upper()}


# Files


def write(path: Path, text: str) -> None:
    """Write a text file in ASCII; it is flushed, then takes the old one's place in one step."""
    new = path.with_name(path.name + ".new")
    with open(new, "w", encoding="ascii") as file:
        file.write(text)
        flush(file)
    os.replace(new, path)


def json_lines(rows: Iterable[Any]) -> str:
    r"""Rows as JSON, one a line, in ASCII, so that a text may hold any character.

    >>> json_lines([{"text": "é"}, 1])
    '{"text": "\\u00e9"}\n1\n'
    """
    return "".join(json.dumps(row) + "\n" for row in rows)


def flush(file: Any) -> None:
    """Wait until the disk has what was written to an open file."""
    file.flush()
    os.fsync(file.fileno())


# The output folder


def check_free(folder: Path) -> None:
    """Raise ValueError if a new run cannot have this folder; nothing is made yet."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {folder} is a file: name a new or an empty folder")
    if folder.is_dir() and any(path.name != "lock" for path in folder.iterdir()):
        raise ValueError(
            f"--output {folder} holds something already: "
            "name a new or empty folder, or go on with its run by --resume"
        )


def claim(folder: Path) -> Any:
    """Make the folder and lock it for this process: returns the open lock file.

    The lock ends with the process, however it dies. ValueError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  it stays open as long as the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"--output {folder}: another run is writing there; name another folder"
        ) from None
    return lock


# The checkpoint


def save(folder: Path, state: dict[str, Any]) -> None:
    """Replace `folder`/checkpoint.pt by one that holds `state`.

    It is written under another name and flushed first, so a kill at any moment leaves the old or
    the new one, whole. The logs are flushed before it: they are never older than the checkpoint.
    OSError: it could not be written; the old one stays.
    """
    for path in folder.glob("*.jsonl"):
        with open(path, "ab") as log:
            flush(log)
    new = folder / "checkpoint.new"
    try:
        with open(new, "wb") as file:
            torch.save(state, file)
            flush(file)
        os.replace(new, folder / "checkpoint.pt")
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        new.unlink(missing_ok=True)
        raise OSError(
            f"the checkpoint in {folder} could not be written ({error}); the one before it stays "
            "good: make room, then --resume"
        ) from error
    names = os.open(folder, os.O_RDONLY)
    os.fsync(names)  # the folder's entry, too, must survive a power cut
    os.close(names)


def load(folder: Path) -> dict[str, Any] | None:
    """The state in `folder`/checkpoint.pt, on the CPU; None where no checkpoint was made yet.

    ValueError: the file holds something else, or is damaged.
    """
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {"step": int(state["step"]), **state}
    except Exception as error:  # torch raises many kinds for a file that is not one of its own
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {reason}); "
            "start anew in another folder"
        ) from error


def cut_log(path: Path, step: int) -> list[dict[str, Any]]:
    """Cut from a log of JSON lines what was made at `step` or later; returns the lines that stay.

    A half-written last line goes, too: the run that resumes makes it again.
    ValueError: a line before the last one is no JSON object with a step.
    """
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["step"] < step:
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise ValueError(
                    f"line {number} of {path} is no line of this log: the run cannot go on from it"
                ) from None
    write(path, json_lines(rows))
    return rows


# Signals


class Signals:
    """Ctrl-C and SIGTERM while a run is at work.

    Work that can be done again (sampling, executing, evaluating) is left at once; it stands in
    `unless`. Anything else, an optimizer step above all, is finished first. A second signal ends
    the program at once.
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal that came; 0: none
        self.may_leave = False

    def __enter__(self) -> "Signals":
        both = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.receive) for number in both}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: Any) -> None:
        if self.number:
            raise SystemExit(128 + number)
        self.number = number
        # A print must not be entered twice; the signal may have come in the middle of one.
        os.write(2, b"\nstopping: the checkpoint is written first (once more: at once)\n")
        if self.may_leave:
            raise KeyboardInterrupt

    def unless(self, work: Callable, *arguments: Any) -> Any:
        """work(*arguments), left at once when a signal comes: KeyboardInterrupt on every rank."""
        answer = None
        try:
            self.may_leave = True
            if not self.number:
                answer = work(*arguments)
            self.may_leave = False
        except KeyboardInterrupt:
            self.may_leave = False
        self.check()
        return answer

    def check(self) -> None:
        """KeyboardInterrupt(number) on every rank if a signal came to any of them."""
        number = max(gather(self.number))
        if number:
            raise KeyboardInterrupt(number)
