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
import itertools
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
MOST_MEMORY = 4 << 30  # bytes of it while no program runs
LARGE = 1 << 20  # characters of a large problem


class Unequal(AssertionError):
    """The two sides of a comparison differ."""


class Run:
    """The tests of a problem against one program, and the outcome of each."""

    def __init__(self, plan: Plan, code: str, limits: dict, control: Any, empty: bool = False):
        self.plan = plan
        self.link = Link(plan, code, limits, control, empty)
        self.outcomes: list = [None] * len(plan.tests)  # then PASSED or (status, line of feedback)
        self.begun: set = set()  # the numbers of the tests that have begun
        self.program: dict = {}  # what names of the program mean in the tests

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
            self.note([n for n, outcome in enumerate(self.outcomes) if not outcome], error)
        finally:
            self.link.stop()
        return self.summary()

    def summary(self) -> dict:
        """The outcomes as the trainer reads them."""
        pairs = list(zip(self.plan.tests, self.outcomes, strict=True))
        graded = [outcome == PASSED for test, outcome in pairs if test.graded]
        shown = [outcome for test, outcome in pairs if test.public] or self.outcomes
        failures = dict.fromkeys(outcome for outcome in shown if outcome != PASSED)  # equal: once
        status = "passed"
        if not all(graded):
            found = [outcome[0] for outcome in self.outcomes]
            status = next(x for x in ("timeout", "memory", "failed", "error") if x in found)
            is_reference = self.link.code == self.plan.reference and not self.link.death
            if is_reference and self.link.shortfall:
                raise Unscorable(self.link.shortfall)  # it is not the reference that is wrong
        return {
            "status": status,
            "lines": [f"Test {shown.index(one) + 1} failed: {one[1]}" for one in failures],
            "tests": graded,
            "public_passed": not failures,
            "cpu_seconds": self.link.cpu_seconds,
        }

    def run_cases(self) -> None:
        """Run each case of kind "functional" or "stdin": compare one value with the right one."""
        found = self.link.start() if self.plan.kind == "functional" else {}
        # With one more case this ends before the trainer's bound, 10 * timeout + 30.
        end = time.monotonic() + 8 * self.link.limits["timeout"] + 20
        numbers = sorted(range(len(self.outcomes)), key=lambda n: not self.plan.tests[n].public)
        for number in numbers:
            if time.monotonic() > end:
                self.link.last = None  # the feedback must not name the case that ran last
                raise Died("timeout", "was not run on all cases: together they take too long")
            given, expected = self.plan.cases[number]
            with self.test(number):
                if self.plan.kind == "stdin":
                    value = self.printed(given)
                    is_right = same_output(value, expected)
                else:
                    value = self.entry(found)(*copy.deepcopy(given))
                    is_right = same(value, expected)
                if not is_right:
                    raise Unequal(value, expected)
            death = self.link.death
            if death and (self.plan.kind == "functional" or death.args[0] == "timeout"):
                raise death  # else each further case could use up the time limit again

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
        text = bytearray()
        reader, writer = os.pipe()
        with open(reader, "rb", 0) as output:
            with open(writer, "wb", 0), tempfile.TemporaryFile() as source:
                source.write(given.encode("utf-8", "replace"))
                source.seek(0)
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
                text += data[: limit + 1 - len(text)]  # what exceeds the limit is thrown away
            link.patience = end - time.monotonic()  # what is left, for answer() to wait
            link.answer()
        value = text.decode("utf-8", "replace")
        if len(text) > limit:
            value += "...[cut]"
        link.last = (label, value)
        return value

    def run_code(self) -> None:
        """Run the texts of kind "assert", in one space of names as if all were one file."""
        missing = {name: Missing(self.link, None, name) for name in self.plan.names}
        found = self.link.start()
        self.program = missing | found
        sys.modules["solution"] = Remote(self.link, MODULE, "solution")
        space = {"__name__": "test"}
        hooks = {"__test__": self.test, "__early__": self.evaluate_early}
        hooks |= {"__equal__": equal, "__ask__": ask}
        for line in self.plan.imports:  # a test may use what the solution imports
            with contextlib.suppress(ImportError):
                exec(line, space)
        space |= self.program | hooks
        exec(self.plan.context, space)
        space |= found  # a helper of the context that the program defines anew
        for text in sorted(self.plan.texts, key=lambda text: not text.public):
            error = self.attempt(text.outside, exec, text.code, space)
            for owner, name, numbers in text.functions:
                if error:
                    self.note(numbers, error)
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
                rows = [one | other for one, other in itertools.product(rows, new)]
        for row in rows:
            this = [space[owner]()] if owner else []  # a new object each time
            self.attempt(numbers, function, *this, **row)

    def attempt(self, numbers: list, action: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a piece of test code; returns what it raises, or None. That fails the tests among
        `numbers` that have not begun; if all have, the last one. Without it, a test that was not
        reached has passed: an early return left it out."""
        self.begun, self.link.last = set(), None
        try:
            action(*args, **kwargs)
            self.check()
        except BaseException as error:
            self.note([n for n in numbers if n not in self.begun] or numbers[-1:], error)
            if isinstance(error, (Died, Unscorable)):
                raise
            return error
        self.note(numbers)
        return None

    @contextlib.contextmanager
    def test(self, number: int) -> Any:
        """Around one test: note its outcome. If it fails, the code behind it still runs."""
        self.begun.add(number)
        try:
            yield
            self.check()
        except BaseException as error:
            self.note([number], error)
            if isinstance(error, Unscorable) or (self.link.death and self.plan.kind != "stdin"):
                raise
        else:
            self.note([number])

    def check(self) -> None:
        """Raise what a test must not catch: the program's end, a value that cannot be sent."""
        problem = self.link.death or self.link.unsent
        self.link.unsent = None
        if problem:
            raise problem

    def evaluate_early(self, *sides: Any) -> list:
        """Evaluate sides before the call beside them (see plan.Rewriter): for each a function that
        gives its value. If a side raises or asks the program, it is evaluated later, as in Python.
        """
        link, found = self.link, []
        for side in sides:
            was_quiet, link.quiet, link.asked = link.quiet, True, False
            try:
                value = side()
                found.append(side if link.asked else lambda value=value: value)
            except (Exception, Asked):
                found.append(side)
            finally:
                link.quiet = was_quiet
        return found

    def note(self, numbers: Any, error: BaseException | None = None) -> None:
        """Note that tests passed, or what failed them. In a loop the first failure stays."""
        for number in numbers:
            if self.outcomes[number] in (None, PASSED):
                source = self.plan.tests[number].source
                self.outcomes[number] = PASSED if error is None else self.explain(error, source)

    def explain(self, error: BaseException, source: str) -> tuple[str, str]:
        """The status and the line of feedback for what failed a test with this source."""
        call, value = self.link.last or ("the program", NOTHING)
        if isinstance(error, Died):
            return error.args[0], f"{call} {error.args[1]}"
        if isinstance(error, ImportError) and error.name == "solution":
            return "error", described(error)  # cannot import name 'f' from 'solution'
        if hasattr(error, "_line"):  # raised by the program
            text = described(error)
            lines = ["", *self.link.code.splitlines()]
            if 0 < error._line < len(lines):
                text += f" (line {error._line}: {shorten(lines[error._line].strip(), 120)})"
            return "memory" if isinstance(error, MemoryError) else "error", f"{call} raised {text}"
        verb, room = ("printed", 400) if self.plan.kind == "stdin" else ("returned", 200)
        expected = shorten(source, 200)
        if not isinstance(error, Unequal):
            expected += f" ({described(error)})"
        elif error.args[0] is value:
            expected = show(error.args[1], room)
        elif error.args[1] is value:
            expected = show(error.args[0], room)
        if value is NOTHING:
            return "failed", f"expected {expected}"
        return "failed", f"{call} {verb} {show(value, room)}, expected {expected}"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {shorten(message(error), 300)}".removesuffix(": ")


def ask(function: Any, x: Any, *rest: Any) -> Any:
    """What a builtin such as type gives for x. About a stand-in the program is asked."""
    if isinstance(x, Remote):
        return x._link.ask("", function, x, *rest)
    return function(x, *rest)


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
    two floats are equal within 1e-6 (relative), integers are exact.

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
    left = [line.strip() for line in output.strip().split("\n")]
    right = [line.strip() for line in expected.strip().split("\n")]
    if len(left) != len(right):
        return False
    return all(a == b or same_numbers(a, b) for a, b in zip(left, right, strict=True))


def same_numbers(*lines: str) -> bool:
    """Whether two lines have the same numbers and nothing else."""
    sides = []
    for line in lines:
        words = line.split()
        if not line.isascii() or "_" in line or max(map(len, words), default=0) > 4000:
            return False  # Python would take 1_0 for a number, and int() takes no longer one
        try:
            sides.append([int(w) if re.fullmatch(r"[+-]?\d+", w) else float(w) for w in words])
        except ValueError:
            return False
    return same(*sides)


def start_zygote(trainer: socket.socket, folder: str, isolated: bool) -> tuple:
    """Fork the zygote. Returns the socket to it, and "" or why it cannot isolate programs."""
    control, theirs = socket.socketpair()
    if not os.fork():  # still a clean interpreter: no test was ever here
        trainer.close()
        control.close()
        zygote(theirs, folder, isolated)
    theirs.close()
    return control, receive(control)


def main(number: int, folder: str, isolation: str) -> None:
    """Answer the trainer: problem and program in, result out."""
    confine.die_with_parent()
    trainer = socket.socket(fileno=number)
    if isolation == "plain":
        fault = "MURPHY_ISOLATION is plain"
    elif sys.platform != "linux":
        fault = "not Linux"
    else:
        control, fault = start_zygote(trainer, folder, isolated=True)
        if fault:
            control.close()  # that zygote has ended; try one that isolates nothing
    if fault:
        control, failure = start_zygote(trainer, folder, isolated=False)
        if failure:
            sys.exit(failure)  # the trainer reads it on stderr
    confine.prctl(confine.DUMPABLE, 0)  # no process of the same user may look into our memory
    send(trainer, f"it can see your files, processes and network ({fault})" if fault else "")
    os.dup2(0, 2)  # until here the trainer read our stderr; from now on nobody does
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
            large = len(problem) > LARGE  # not kept: such plans would fill the memory
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
