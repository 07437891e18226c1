"""What a long run needs besides the method: files, a folder of its own, a checkpoint, signals.

    write, json_lines          files that are replaced in one step, never half-written
    check_hub                  whether the hub can be reached, if it is needed
    check_folder, claim        the output folder, which belongs to one run at a time
    read_settings              what the run in a folder was begun with
    save, load, cut_log        one checkpoint: a killed run goes on from it, bit for bit
    Signals                    Ctrl-C and SIGTERM: leave what can be done again, finish the rest

Needs torch and support/ranks.py.
"""

import fcntl
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from support import ranks


def write(path: Path, text: str) -> None:
    """Replace an ASCII text file: a kill at any moment leaves the old one or the new one, whole."""
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


def check_hub(name: str, kind: str) -> None:
    """ValueError if a "model" or "dataset" must come from the hub, and the hub is out of reach.

    It is one request; the libraries' own retries take a minute.
    """
    from transformers.utils.hub import constants, get_session  # here, because it loads slowly

    cached = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")
    if not Path(name).is_dir() and not cached.exists():
        try:
            get_session().head(constants.ENDPOINT, timeout=10)
        except Exception as error:  # of whatever library huggingface_hub uses
            where = f"{kind} {name!r} is neither here nor in the cache of Hugging Face"
            raise ValueError(f"{where}, and the hub is out of reach ({error})") from error


def check_folder(config: Any) -> Path:
    """The output folder of a run; `claim` will make it. ValueError: this run cannot have it."""
    if config.resume:
        load(Path(config.output))  # one that is damaged is refused before anything is made
        return Path(config.output)  # `read_settings` has found a run there
    default = f"runs/{Path(config.problems).stem}-{config.credit}-seed{config.seed}"
    folder, number = Path(config.output or default), 0
    while folder.exists() and not config.output:
        number += 1
        folder = Path(f"{default}-{number}")
    leftovers = {"lock", "settings.json.new"}  # of a run that was killed as it began
    if folder.is_dir() and {path.name for path in folder.iterdir()} - leftovers:
        raise ValueError(
            f"--output {folder} holds something already: "
            "name a new or empty folder, or go on with its run by --resume"
        )
    check_writable(folder)
    return folder


def check_writable(folder: Path) -> None:
    """ValueError if it is no folder, cannot be made, or takes no files."""
    whole = folder.absolute()
    existing = next(path for path in (whole, *whole.parents) if path.exists())
    try:
        os.rmdir(tempfile.mkdtemp(dir=existing))
    except OSError:
        why = f"{existing} is no folder to write into"
        raise ValueError(f"--output {folder} cannot be used: {why}") from None


def read_settings(output: str) -> dict[str, Any]:
    """The settings of the run in a folder, for --resume. ValueError: there is none."""
    if not output:
        raise ValueError("--resume needs --output, the folder of the run to go on with")
    path = Path(output) / "settings.json"
    try:
        return {**json.loads(path.read_text(encoding="ascii"))}  # TypeError: it is no object
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"--resume needs the --output of a run, but {path} cannot be read ({error})"
        ) from error


def claim(folder: Path) -> Any:
    """Make the folder and lock it for this process; returns the open lock file.

    The lock ends with the process, however that dies. ValueError: another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  it stays open as long as the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"--output {folder}: another run is writing there") from None
    return lock


def save(folder: Path, state: dict[str, Any]) -> None:
    """Replace `folder`/checkpoint.pt: a kill at any moment leaves the old or the new one, whole.

    The logs are flushed first: they are never older than the checkpoint. OSError: it could not be
    written; the old one stays.
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
    entries = os.open(folder, os.O_RDONLY)
    os.fsync(entries)  # the new name, too, must survive a power cut
    os.close(entries)


def load(folder: Path) -> dict[str, Any] | None:
    """The state in `folder`/checkpoint.pt, on the CPU; None where no checkpoint was made yet.

    ValueError: the file holds something else, or is damaged.
    """
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {**state, "step": int(state["step"])}
    except Exception as error:  # torch raises many kinds for a file that is not its own
        reason = re.split(r"[.\n]", str(error).strip())[0][:200]  # its first sentence
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {reason}); "
            "start anew in another folder"
        ) from error


def cut_log(path: Path, step: int, every: bool = False) -> None:
    """Cut from a log what was made at `step` or later, and a half-written last line.

    The run that goes on makes the cut lines again.
    every: whether each step before must have a line. ValueError: one is missing, or a line is
    strange; then the file stays as it is.
    """
    text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
    lines, rows = text.splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["step"] < step:
                rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                raise ValueError(
                    f"line {number} of {path} is no line of this log: mend or remove it, then go on"
                ) from None
    if every and [row["step"] for row in rows] != list(range(step)):
        raise ValueError(
            f"{path} does not hold each of the {step} steps before the checkpoint once: "
            "it has been changed, and the run cannot go on from it"
        )
    write(path, json_lines(rows))


class Signals:
    """Ctrl-C and SIGTERM while a run is at work.

    A signal only asks the run to stop. Work that can be done again (sampling, executing,
    evaluating) is called by `interruptible` and left at once. All other work, above all an
    optimizer step, goes on to its end. A second signal ends the program at once.
    """

    def __init__(self) -> None:
        self.number = 0  # of the signal that came; 0: none
        self.may_leave = False  # whether `interruptible` work is being done

    def __enter__(self) -> "Signals":
        both = (signal.SIGINT, signal.SIGTERM)
        self.before = {number: signal.signal(number, self.receive) for number in both}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: Any) -> None:
        """Python calls this, between two instructions of the run, when a signal comes."""
        if self.number:
            raise SystemExit(128 + number)
        self.number = number
        # Not print: the signal may have come in the middle of one, and it cannot be entered twice.
        os.write(2, b"\nstopping: the checkpoint is written first (once more: at once)\n")
        if self.may_leave:
            raise KeyboardInterrupt  # `interruptible` catches it

    def interruptible(self, work: Callable, *arguments: Any) -> Any:
        """The value of work(*arguments), or KeyboardInterrupt if a signal came to any rank.

        The rank that it came to leaves its work at once; the others finish theirs.
        """
        value = None
        try:
            self.may_leave = True
            if not self.number:
                value = work(*arguments)
            self.may_leave = False
        except KeyboardInterrupt:
            self.may_leave = False
        self.check()
        return value

    def check(self) -> None:
        """KeyboardInterrupt(number) on every rank if a signal came to any of them."""
        number = max(ranks.gather(self.number))
        if number:
            raise KeyboardInterrupt(number)
