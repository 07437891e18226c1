"""Programs that are run before a problem is used: one that does nothing, and the reference.

In:  problems, and executor.run_many. Out: the problems that can be scored, with a time limit that
fits the reference; for each other one the reason. Standard library only.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JUDGE = ("judge", "plan", "link", "wire", "sandbox", "confine", "syscalls")
EXECUTOR = ["executor.py", *(f"support/{name}.py" for name in JUDGE)]
NOTHING = "pass"  # the program that does nothing
REFERENCE_TIMEOUT = 20.0  # CPU seconds for a reference; what it uses sets the problem's timeout


def verified(found: dict, execute: Callable, left_out: dict) -> dict:
    """The problems that can be scored; `left_out` gets a reason for each of the others.

    The program that does nothing must fail. The reference must pass, and any program gets at least
    three times the reference's CPU seconds, whatever --timeout says. A public test that the
    reference fails is public no longer.
    """
    jobs = {}  # (label, what): job; what is "nothing", "reference" or the repr of a public test
    for label, problem in found.items():
        jobs[label, "nothing"] = (problem, NOTHING)
        if problem.reference is None:
            continue
        patient = replace(problem, timeout=max(problem.timeout or 0, REFERENCE_TIMEOUT))
        jobs[label, "reference"] = (patient, problem.reference)
        for test in problem.public_tests:
            if test not in problem.tests:
                alone = replace(patient, tests=[test], public_tests=[])
                jobs[label, repr(test)] = (alone, problem.reference)  # a list can be no key
    results = dict(zip(jobs, execute(list(jobs.values())), strict=True))

    usable = {}
    for label, problem in found.items():
        reference = results.get((label, "reference"))
        reason = why_unusable(results[label, "nothing"], reference)
        if reason:
            left_out[label] = reason
            continue
        usable[label] = problem
        if reference:
            problem.timeout = max(1, problem.timeout or 0, math.ceil(3 * reference.cpu_seconds))
        for test in problem.public_tests[:]:
            result = results.get((label, repr(test)))
            if result and result.reward < 1:
                problem.public_tests.remove(test)
                print(f"{label}: not public, since the reference fails it: {test}", file=sys.stderr)
    return usable


def why_unusable(nothing: Any, reference: Any) -> str:
    """Why a problem is left out, from the results of two programs; "" if it is not."""
    if nothing.status == "unscorable":
        return nothing.feedback
    if nothing.reward == 1:
        return "a program that does nothing passes its tests"
    if reference and reference.reward < 1:
        return f"its reference fails its tests ({reference.status}): {reference.feedback}"
    return ""


def remembered(found: dict, execute: Callable, left_out: dict, file: Path) -> dict:
    """`verified`, but `file` tells of the problems that it found usable before.

    Other problems are tried again: a package may be there now, or the machine less busy. All are
    if the executor or Python is another.
    """
    version = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in EXECUTOR)).hexdigest()
    keys = {}
    for label, problem in found.items():
        text = json.dumps([asdict(problem), sys.version, version])
        keys[label] = hashlib.sha256(text.encode()).hexdigest()
    known: dict[str, dict] = {}
    with suppress(OSError, ValueError, TypeError):  # no file yet, or a damaged one
        known = dict(json.loads(file.read_text()))
    new = {label: problem for label, problem in found.items() if keys[label] not in known}
    if new:
        for label, problem in verified(new, execute, left_out).items():
            known[keys[label]] = {"timeout": problem.timeout, "public_tests": problem.public_tests}
        with suppress(OSError):  # a folder that nobody may write to: they are run again
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(known))
            unfinished.replace(file)
    usable = [label for label in found if keys[label] in known]
    return {label: replace(found[label], **known[keys[label]]) for label in usable}
