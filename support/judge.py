"""The judge: runs the tests of a problem against a program that lives in another process.

In:  a problem (its kind, tests, public tests, entry point, context, reference) and a program.
Out: for each test whether it passed; for the failed ones a line that says what happened.

The judge runs the code of the tests itself. Where a test uses the program, a stand-in asks the
program's process and gets plain data back:

    def test_f():                 judge                         program
        xs = [3, 1]               xs = [3, 1]
        assert f(xs) == [1, 3]    f is a stand-in:  [3, 1] -->  runs f
                                  [1, 3] == [1, 3]  <-- [1, 3]

support/plan.py reads the tests, support/link.py talks with the program, `Run` runs one against the
other. A failed test does not end those after it. Code that breaks off fails all tests that it did
not reach. Needs the standard library (and pytest or numpy, where tests use them).
"""

import contextlib
import copy
import functools
import gc
import json
import math
import os
import re
import resource
import select
import socket
import sys
import tempfile
import time
from typing import Any

from support import confine
from support.link import MODULE, NOTHING, Asked, Died, Link, Missing, Remote, message, show
from support.plan import Plan, Unscorable
from support.sandbox import zygote
from support.wire import Wire, receive, send, shorten

PASSED = ("passed", "")
OWN_SECONDS = 4  # CPU seconds of the judge for one program, beside the program's own limit
OWN_MEMORY = 800 << 20  # bytes of address space for the values of one program
MOST_MEMORY = 4 << 30  # bytes of it at any time
LARGE = 1 << 20  # characters of a problem


class Unequal(AssertionError):
    """The two sides of a comparison differ."""


class Run:
    """The tests of a problem against one program, and the outcome of each."""

    def __init__(self, plan: Plan, code: str, limits: dict, control: Any, empty: bool = False):
        self.plan = plan
        self.link = Link(plan, code, limits, control, empty)
        self.outcomes: list = [None] * len(plan.tests)
        self.reached: set = set()
        self.program: dict = {}  # what names of the program mean in the tests
        self.early: list = []  # (frame, functions that give what was evaluated first in it)

    def result(self) -> dict:
        """Run all tests, public ones first, so that no hidden argument reaches their feedback."""
        try:
            if self.plan.kind == "assert":
                self.run_code()
            else:
                self.run_cases()
        except Unscorable:
            raise
        except BaseException as error:  # a program may raise SystemExit when it is loaded
            self.fail(range(len(self.outcomes)), error, only=(None,))
        finally:
            self.link.stop()
        graded, shown = [], []
        for outcome, (_, is_graded, is_public) in zip(self.outcomes, self.plan.tests, strict=True):
            if is_graded:
                graded.append(outcome == PASSED)
            if is_public:
                shown.append(outcome)
        is_reference = self.link.code == self.plan.reference and not self.link.death
        if is_reference and self.link.shortfall and not all(graded):
            raise Unscorable(self.link.shortfall)  # it is not the reference that is wrong
        shown = shown or self.outcomes
        found = {status for status, _ in self.outcomes}
        order = ("timeout", "memory", "failed", "error", "passed")
        failures = dict.fromkeys(outcome for outcome in shown if outcome != PASSED)
        return {
            "status": "passed" if all(graded) else next(word for word in order if word in found),
            "lines": [f"Test {shown.index(line) + 1} failed: {line[1]}" for line in failures],
            "tests": graded,
            "public_passed": not failures,
            "cpu_seconds": self.link.cpu_seconds,
        }

    def run_cases(self) -> None:
        found = self.link.start() if self.plan.kind == "functional" else {}
        end = time.monotonic() + 9 * self.link.limits["timeout"] + 20  # before the trainer's bound
        for number in sorted(range(len(self.outcomes)), key=lambda n: not self.plan.tests[n][2]):
            if time.monotonic() > end:
                self.link.last = None  # not of the case that ran last
                raise Died("timeout", "was not run on all cases: together they take too long")
            given, expected = self.plan.cases[number]
            with self.test(number):
                if self.plan.kind == "stdin":
                    value, right = self.printed(given), same_output
                else:
                    value, right = self.entry(found)(*copy.deepcopy(given)), same
                if not right(value, expected):
                    raise Unequal(value, expected)
            death = self.link.death
            if death and (death.args[0] == "timeout" or self.plan.kind == "functional"):
                raise death  # no time limit is used up once per case

    def entry(self, found: dict) -> Any:
        """What the cases call: a function, or a method of a new Solution."""
        owner, _, name = self.plan.entry.rpartition(".")
        if not owner and name in found:
            return found[name]
        if (owner or "Solution") in found:
            return getattr(found[owner or "Solution"](), name)
        return Missing(self.link, None, name)

    def printed(self, given: str) -> str:
        """What the program prints for an input, in a new process."""
        link, limit = self.link, int(self.link.limits["output_bytes"])
        label = f"with the input {show(given, 300)} the program"
        link.last = (label, NOTHING)
        text, size = bytearray(), 0
        reader, writer = os.pipe()
        with open(reader, "rb", 0) as output:
            with open(writer, "wb", 0), memory_file(given) as source:
                for file in (source.fileno(), writer):
                    os.fchmod(file, 0o666)  # the program is another user; it may open /dev/stdin
                link.launch(source.fileno(), writer)
            end = time.monotonic() + link.patience
            while True:
                if not select.select([output], [], [], max(0, end - time.monotonic()))[0]:
                    link.die("timeout", "ran out of time")
                data = output.read(1 << 16)
                if not data:
                    break
                text += data[: max(0, limit - len(text))]  # what exceeds the limit is thrown away
                size += len(data)
            link.patience = end - time.monotonic()  # both waits share it
            link.answer()
        value = text.decode("utf-8", "replace")
        if size > limit:
            value += f"...[{size - limit} cut]"
        link.last = (label, value)
        return value

    def run_code(self) -> None:
        missing = {name: Missing(self.link, None, name) for name in self.plan.names}
        found = self.link.start()
        self.program = missing | found
        sys.modules["solution"] = Remote(self.link, MODULE, "solution")
        space = {"__name__": "test"}
        hooks = {
            "__test__": self.test,
            "__first__": self.first,
            "__taken__": self.taken,
            "__last__": self.last,
            "__equal__": equal,
        }
        hooks |= {f"__{asked.__name__}__": about(asked) for asked in (type, callable, hasattr)}
        for line in self.plan.imports:  # a test may use what the solution imports
            with contextlib.suppress(ImportError):
                exec(line, space)
        space |= self.program | hooks
        exec(self.plan.context, space)
        space |= found  # a helper of the context that the program defines anew
        for part in self.plan.definitions:
            with contextlib.suppress(Exception):  # it fails again in its own text
                exec(part, space)
        for unit in sorted(self.plan.units, key=lambda unit: not unit.public):
            broken = self.attempt(unit.body, exec, unit.code, space)
            for owner, name, numbers in unit.functions:
                if broken:
                    self.fail(numbers, broken)
                else:
                    self.attempt(numbers, self.call_test, space, owner, name, numbers)

    def call_test(self, space: dict, owner: str, name: str, numbers: list) -> None:
        """Call a test function, once for each row of its parameters."""
        if name == "check":
            space["check"](self.entry(self.program))
            return
        function = getattr(space[owner], name) if owner else space[name]
        rows: list[dict] = [{}]
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                new = parameters(*mark.args, **mark.kwargs)
                rows = [{**row, **more} for row in rows for more in new]
        for row in rows:
            this = [space[owner]()] if owner else []  # a new object each time
            if len(rows) == 1:
                function(*this, **row)
            else:
                self.attempt(numbers, function, *this, **row)

    def attempt(self, numbers: list, action: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a piece of test code. What breaks it off fails the tests that it did not reach, and
        is returned. If it reached all, the last one fails."""
        self.reached -= set(numbers)
        self.link.last = None
        try:
            action(*args, **kwargs)
            self.check()
        except BaseException as error:
            self.fail([n for n in numbers if n not in self.reached] or numbers[-1:], error)
            if isinstance(error, (Died, Unscorable)):
                raise
            return error
        for number in numbers:  # after an early return: nothing broke off before them
            self.outcomes[number] = self.outcomes[number] or PASSED
        return None

    @contextlib.contextmanager
    def test(self, number: int) -> Any:
        """Around one test: note its outcome. A failed test does not end those after it."""
        self.reached.add(number)
        try:
            yield
            self.check()
        except BaseException as error:
            self.fail([number], error)
            if isinstance(error, Unscorable) or (self.link.death and self.plan.kind != "stdin"):
                raise
        else:
            self.outcomes[number] = self.outcomes[number] or PASSED

    def check(self) -> None:
        """Raise what a test must not catch: the program's end, a value that cannot be sent."""
        problem, self.link.unsent = self.link.death or self.link.unsent, None
        if problem:
            raise problem

    def first(self, *sides: Any) -> None:
        """Evaluate what a test wants first (see plan.Order); __taken__() hands it out, one value
        after the other, and __last__() ends this."""
        values = [self.now(side) for side in sides]
        self.early.append((id(sys._getframe(1)), values[::-1]))

    def taken(self) -> Any:
        frame = id(sys._getframe(1))
        while self.early[-1][0] != frame:  # left there by an exception, in a call that has ended
            self.early.pop()
        return self.early[-1][1].pop()()

    def last(self) -> None:
        while self.early.pop()[0] != id(sys._getframe(1)):
            pass

    def now(self, side: Any) -> Any:
        """A function with the value of the side now. It is the side itself if that raises or asks
        the program: then it is evaluated when it is taken, in Python's order."""
        link = self.link
        was_quiet, link.quiet, link.asked = link.quiet, True, False
        try:
            value = side()
        except (Exception, Asked):
            return side
        finally:
            link.quiet = was_quiet
        return side if link.asked else lambda: value

    def fail(self, numbers: Any, error: BaseException, only: tuple = (None, PASSED)) -> None:
        for number in numbers:
            if self.outcomes[number] in only:
                self.outcomes[number] = self.explain(error, self.plan.tests[number][0])

    def explain(self, error: BaseException, source: str) -> tuple[str, str]:
        """(status, line of feedback) of what failed a test with this source."""
        call, value = self.link.last or ("the program", NOTHING)
        if isinstance(error, Died):
            return error.args[0], f"{call} {error.args[1]}"
        if isinstance(error, ImportError) and error.name == "solution":
            name = re.search(r"name '(\w+)'|$", error.msg)[1]
            return "error", f"the program does not define {name}"
        text = type(error).__name__
        if not isinstance(error, Unequal):  # its values are shown below; together they may be huge
            text = f"{text}: {shorten(message(error), 300)}".removesuffix(": ")
        if hasattr(error, "_line"):  # raised by the program
            lines = ["", *self.link.code.splitlines()]
            if 0 < error._line < len(lines):
                text += f" (line {error._line}: {shorten(lines[error._line].strip(), 120)})"
            return "memory" if isinstance(error, MemoryError) else "error", f"{call} raised {text}"
        printed = self.plan.kind == "stdin"
        room = 400 if printed else 200
        expected = shorten(source, 200)
        if not isinstance(error, Unequal):
            expected += f" ({text})"
        elif error.args[0] is value:
            expected = show(error.args[1], room)
        elif error.args[1] is value:
            expected = show(error.args[0], room)
        if value is NOTHING:
            return "failed", f"expected {expected}"
        verb = "printed" if printed else "returned"
        return "failed", f"{call} {verb} {show(value, room)}, expected {expected}"


def memory_file(text: str) -> Any:
    """An open file with a text. A full disk must not fail the program."""
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("in"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file


def about(function: Any) -> Any:
    """A builtin such as type: of a stand-in it asks the program."""

    def ask(x: Any, *rest: Any) -> Any:
        return x._link.ask("", function, x, *rest) if isinstance(x, Remote) else function(x, *rest)

    return ask


def equal(left: Any, right: Any) -> None:
    if not left == right:
        raise Unequal(left, right)


def parameters(argnames: Any, argvalues: Any, **_: Any) -> list[dict]:
    """The rows of pytest.mark.parametrize."""
    names = re.findall(r"\w+", argnames) if isinstance(argnames, str) else list(argnames)
    rows = []
    for value in argvalues:
        if type(value).__name__ == "ParameterSet":  # pytest.param
            value = value.values
        elif len(names) == 1:
            value = [value]
        rows.append(dict(zip(names, value, strict=True)))
    return rows


def same(value: Any, expected: Any) -> bool:
    """Equality of kind "functional". Expected values come from JSON: a tuple is as good as a list,
    floats are right within 1e-6 (relative), integers are exact.

    >>> same((1, [2.0000000001]), [1, [2.0]]), same(1333335333334000000, 1.333335333334e18)
    (True, False)
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[k], expected[k]) for k in value)
    if type(value) is float and type(expected) is float:
        both_nan = value != value and expected != expected
        return both_nan or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(value == expected)


def same_output(output: str, expected: str) -> bool:
    """Equality of kind "stdin": line by line, without blanks around the text or a line; a line of
    numbers number by number, as in same().

    >>> same_output(" 1 2 \\r\\n\\n", "1 2"), same_output("0.333333", "0.333333333333")
    (True, True)
    >>> same_output("1\\n2", "1 2"), same_output("a\\x0bb", "a\\nb")
    (False, False)
    """
    left, right = ([row.strip() for row in x.strip().split("\n")] for x in (output, expected))
    if len(left) != len(right):
        return False
    return all(a == b or same_numbers(a, b) for a, b in zip(left, right, strict=True))


def same_numbers(*lines: str) -> bool:
    sides = []
    for line in lines:
        words = line.split()
        if not line.isascii() or "_" in line or max(map(len, words), default=0) > 4000:
            return False
        try:
            sides.append([int(w) if re.fullmatch(r"[+-]?\d+", w) else float(w) for w in words])
        except ValueError:
            return False
    return same(*sides)


def main(number: int, folder: str, isolation: str) -> None:
    """Answer the trainer: problem and program in, result out."""
    confine.die_with_parent()
    trainer = socket.socket(fileno=number)
    fault = "" if sys.platform == "linux" else "not Linux"
    if isolation == "plain":
        fault = "MURPHY_ISOLATION is plain"
    for isolated in (False,) if fault else (True, False):
        control, theirs = socket.socketpair()
        if not os.fork():  # still a clean interpreter: no test was ever here
            trainer.close()
            control.close()
            zygote(theirs, folder, isolated)
        theirs.close()
        failure = receive(control)
        if not failure:
            break
        fault = failure
    confine.prctl(confine.DUMPABLE, 0)  # no process of the same user may look into our memory
    send(trainer, f"it can see your files, processes and network ({fault})" if fault else "")
    os.dup2(0, 2)  # until here stderr was the trainer's, who does not read on
    plans = functools.lru_cache(200)(functools.partial(ready, control))
    while True:
        limit_own(resource.RLIMIT_AS, MOST_MEMORY)
        try:
            problem, code, limits = json.loads(receive(trainer))
        except (EOFError, OSError):  # the trainer has ended
            os._exit(0)
        seconds = time.process_time() + OWN_SECONDS + limits["timeout"]
        limit_own(resource.RLIMIT_CPU, math.ceil(seconds))
        try:
            large = len(problem) > LARGE  # kept, such problems would fill the memory
            plan = ready(control, problem) if large else plans(problem)
            if confine.address_space() > OWN_MEMORY // 4:
                gc.collect()  # what an exception of the last program holds
            limit_own(resource.RLIMIT_AS, confine.address_space() + OWN_MEMORY)
            answer = Run(plan, code, limits, control).result()
        except Unscorable as error:
            answer = {"status": "unscorable", "lines": [str(error)], "tests": []}
        send(trainer, json.dumps(answer))


def limit_own(which: int, soft: int) -> None:
    """Have the kernel hold this process to a limit, whatever C call it sits in."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (soft if hard < 0 else min(soft, hard), hard))


def ready(control: socket.socket, problem: str) -> Plan:
    """Read a problem, and see with an empty program whether its tests can be hosted."""
    plan = Plan(*Wire().read(problem))
    if plan.kind == "assert" or (plan.kind == "functional" and plan.context):
        limits = {"timeout": 4, "memory_mb": 512, "output_bytes": 1 << 20}
        Run(plan, "", limits, control, empty=True).result()
    return plan
