"""Run a program that a model wrote against tests, without being cheated by it.

In:  run_many([(problem, code), ...]). A problem has a kind and tests of this kind: "assert" (texts
     of Python), "functional" ([[arguments], value]) or "stdin" ([input, output]). It may have
     public_tests, entry_point, timeout, context (code that runs before the program), and reference
     (a right program; tests may use only the names that it defines).
Out: one Result per pair: reward (share of tests passed), status, and the feedback that the model
     reads next.

    trainer            judge (one per worker)        zygote (one per judge)      program
    run_many --job-->  knows tests and answers,      a clean python, forked
                       runs the code of the tests    before any test came;
                         |                           forks each program   --->  gives up its rights,
                         |                                                      defines the program
                         |---- call f(3) --------------------------------------> runs f(3)
                         |<--- 5, as plain data ---------------------------------|
            <--result--  5 is not 6: failed ------>  ends the program

The process that knows the answers never runs the model's code, and the one that runs it never holds
an answer. A program can lie only about the values and arguments of its own functions (for kind
stdin: about what it prints), so the best that it can do is to compute the right ones. No exit
status makes a test pass. In support/: plan.py says what a test is, judge.py runs it, link.py talks
with the program, wire.py says how values cross, sandbox.py is the program's side, confine.py and
syscalls.py say what it cannot do.

Time. A program has `timeout` CPU seconds over all its tests. Of kind stdin it has them for each
case, and after a case that ran out no other is run. (A program that switches its own timer off is
ended at most 1.5 seconds later.) All its calls together may last 1.5 * timeout + 3 seconds of wall
time; of kind stdin each case may, and all cases together 8 * timeout + 20. The judge has 4 CPU
seconds more than its program; then the kernel ends it, even inside a C call. A worker that has
started gives a result within 10 * timeout + 30 seconds, however many tests there are; else the
trainer ends judge, zygote and program. When the trainer dies, so do they.

What differs from tests in the program's own process: objects of its classes never reach the judge,
which has stand-ins for them. A stand-in never equals plain data. The expected value is evaluated
before the call: in `assert f(xs) == len(xs)` it is the old length. (The test sees what the program
changes in xs; after very many calls, only in the newest arguments.) A problem whose tests cannot
work in this way is "unscorable".

Standard library only; Linux in full, macOS in part. MURPHY_ISOLATION=plain switches the namespaces
off. `python executor.py` shows known programs and their verdicts.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from support.confine import remove
from support.wire import Wire, receive, send, shorten, without_addresses

PYTHON = sys.executable  # runs the programs: they can import what is installed for it
FIELDS = ("kind", "tests", "public_tests", "entry_point", "context", "reference")  # of a problem
LIMITS = {
    "timeout": 4.0,  # CPU seconds of a program over all its tests (stdin: per case)
    "memory_mb": 512,  # its address space
    "output_bytes": 16 << 20,  # of one stdin case, or of the value of one call
    "feedback_tests": 3,  # failing tests that the feedback tells of
    "feedback_chars": 2000,
}
CLOSED = "executor: close() ended this call"
FOLDER = "murphy-worker-"  # how the names of the workers' folders begin
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0"} | dict.fromkeys(THREADS, "1")


@dataclasses.dataclass
class Result:
    """What the tests say of one program: reward = passed / total.

    status: "passed" | "failed" (a wrong answer) | "error" (no wrong answer, but the program raised
    or ended early) | "timeout" | "memory" | "no_code" | "unscorable" (the problem's fault).
    tests: passed or not, one bool per test. public_passed: all public tests passed (all tests,
    where none is public). cpu_seconds: of the program (of kind stdin: of its slowest case).
    """

    passed: int
    total: int
    reward: float
    status: str
    feedback: str
    tests: list
    public_passed: bool
    cpu_seconds: float = 0.0


class Job(NamedTuple):
    """A problem made ready for a judge, and a program. It can be the key of a dict: equal jobs run
    once."""

    message: str  # its FIELDS as JSON (Wire adds tuples, sets, ...); "" if they cannot cross
    fault: str  # what is wrong with the problem, or ""
    count: int  # the number of its tests
    limits: tuple  # pairs of name and value
    code: str = ""


def run(problem: Any, code: str, **limits: float) -> Result:
    """Score one program: run_many with a single pair.

    >>> from types import SimpleNamespace
    >>> tests = [[[2, 3], 5], [[1, 0], 1]]  # add(2, 3) == 5, add(1, 0) == 1
    >>> problem = SimpleNamespace(kind="functional", tests=tests, entry_point="add")
    >>> run(problem, "def add(a, b): return 5").feedback
    'Test 2 failed: add(1, 0) returned 5, expected 1'
    """
    return run_many([(problem, code)], **limits)[0]


def run_many(jobs: list, workers: int | None = None, **limits: float) -> list[Result]:
    """Score (problem, code) pairs, in order, with `workers` judges (default: one per core).

    reward = tests passed / tests. Equal pairs run once. The judges live on for later calls.
    limits: see LIMITS. The time limit of a problem is max(timeout, problem.timeout). Raises
    RuntimeError if no worker starts, TypeError or ValueError for a bad limit, CancelledError if
    another thread calls `close`.
    """
    for name, value in limits.items():
        if name not in LIMITS:
            known = ", ".join(LIMITS)
            raise TypeError(f"executor: unknown limit {name!r}; the limits are {known}")
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"executor: the limit {name} must be a positive number, not {value!r}")

    problems = {id(problem): problem for problem, _ in jobs}
    prepared = {key: prepare(problem, LIMITS | limits) for key, problem in problems.items()}
    asked = [prepared[id(problem)]._replace(code=code or "") for problem, code in jobs]
    unique = list(dict.fromkeys(asked))
    linux = hasattr(os, "sched_getaffinity")  # it counts the cores that this process may use
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
    pool = concurrent.futures.ThreadPoolExecutor(workers or cores)
    try:
        answers = pool.map(functools.partial(_judge, _closings), unique)
        results = dict(zip(unique, answers, strict=True))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    # Copies: a caller may change a Result, and that of equal jobs must stay as it is.
    return [dataclasses.replace(results[job], tests=[*results[job].tests]) for job in asked]


def prepare(problem: Any, limits: dict) -> Job:
    """The problem as a job that has no program yet."""
    timeout = max(limits["timeout"], getattr(problem, "timeout", None) or 0)
    limits = tuple((limits | {"timeout": timeout}).items())
    fields = {name: getattr(problem, name, None) for name in FIELDS}
    try:
        return Job(Wire().write(*fields.values()), "", len(fields["tests"] or ()), limits)
    except (TypeError, ValueError) as error:
        return Job("", f"a test is no plain data: {error}", 0, limits)


def verdict(status: str, feedback: str, tests: list, public: bool = False, seconds: float = 0.0):
    """A Result; passed, total and reward are counted from `tests`."""
    reward = sum(tests) / max(1, len(tests))
    return Result(sum(tests), len(tests), reward, status, feedback, tests, public, seconds)


def _judge(closings: int, job: Job) -> Result:
    """Have a judge score a job. If the judge dies, a new one tries once more."""
    failed = [False] * job.count
    if job.fault:
        return verdict("unscorable", f"This problem cannot be scored: {job.fault}", [])
    if not job.code.strip():
        return verdict("no_code", "No code was found in the answer.", failed)
    limits = dict(job.limits)
    message = json.dumps([job.message, job.code, limits])
    try:
        # First an idle worker; if it dies, a new one, since the other idle ones may be dead, too.
        for new in (False, True):
            answer = _ask(closings, message, 10 * limits["timeout"] + 30, new)
            if answer:
                return read(answer, limits)
    except TimeoutError:
        return verdict("timeout", "The tests ran out of time.", failed)
    return verdict("error", "The program ended its judge.", failed)


def read(answer: dict, limits: dict) -> Result:
    """A judge's answer as a Result, its text made safe for a prompt."""
    lines = [escape(line) for line in answer["lines"]]
    status, tests = answer["status"], answer["tests"]
    if status == "unscorable":
        return verdict(status, f"This problem cannot be scored: {lines[0]}", [])
    if not lines:
        lines = ["All tests passed."]
        if not all(tests):
            lines = ["The public tests pass, but hidden tests fail."]
    text = "\n".join(lines[: int(limits["feedback_tests"])])
    text = shorten(text, int(limits["feedback_chars"]))
    return verdict(status, text, tests, answer["public_passed"], answer["cpu_seconds"])


# ---------------------------------------------------------------------- workers

_lock = threading.RLock()  # held while one of the next three changes
_alive: set = set()  # all workers that have started
_idle: list = []  # those that wait for a job
_closings = 0  # how often `close` was called
# The kernel ends a worker when the thread that started it ends (PR_SET_PDEATHSIG). The threads of
# run_many end with each call; this one lives as long as the process, so it starts all workers.
_starter = concurrent.futures.ThreadPoolExecutor(1)


def _forget() -> None:
    """A fork of this process has none of its threads, and must not use its workers."""
    global _lock, _starter
    _lock, _starter = threading.RLock(), concurrent.futures.ThreadPoolExecutor(1)
    _alive.clear()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def _ask(closings: int, message: str, seconds: float, new: bool) -> dict | None:
    """What an idle worker answers, or a new one; None if it died.

    closings: the number _closings when the call of run_many began. If it is another one now,
    `close` came since: CancelledError, unless the answer is there already. It is looked at before a
    worker starts, after its start, and after its death. TimeoutError: no answer in so many seconds,
    or the judge used up its own time.
    """
    with _lock:
        if closings != _closings:  # start no worker after `close`
            raise concurrent.futures.CancelledError(CLOSED)
        worker = _idle.pop() if _idle and not new else None
    worker = worker or _starter.submit(Worker).result()
    answer = None
    try:
        if closings == _closings:  # else `close` came, and could not know of this new worker
            send(worker.socket, message)
            answer = json.loads(receive(worker.socket, seconds=seconds))
    except TimeoutError:  # it is an OSError, too, but the worker did not die
        raise
    except (EOFError, OSError):
        pass  # it died
    finally:
        with _lock:  # no `close` comes between
            stays = answer is not None and closings == _closings
            if stays:
                _idle.append(worker)
        if not stays:
            worker.close()
    if answer is None and closings != _closings:
        raise concurrent.futures.CancelledError(CLOSED)
    if answer is None and worker.process.returncode == -signal.SIGXCPU:
        raise TimeoutError  # the kernel held the judge to its own limit
    return answer


class Worker:
    """A judge's process as the trainer sees it."""

    def __init__(self) -> None:
        self.process = None
        try:
            self.socket, theirs = socket.socketpair()
            self.folder, self.lock = own_folder()
        except OSError as error:
            raise RuntimeError(f"executor: cannot start a worker: {error}") from None
        root = str(Path(__file__).resolve().parent)
        program = (  # root is removed again: a test must not import files of this project
            f"import sys; sys.path.insert(0, {root!r}); from support.judge import main; "
            f"sys.path.remove({root!r}); main(int(sys.argv[1]), *sys.argv[2:])"
        )
        plain = os.environ.get("MURPHY_ISOLATION", "")
        command = [PYTHON, "-s", "-P", "-W", "ignore", "-c", program]
        try:  # a new process, never a fork: with torch loaded a fork is slow, and shows its memory
            with theirs:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), self.folder, plain],
                    cwd="/",
                    env=ENVIRONMENT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            missing = receive(self.socket, seconds=60)  # what cannot be confined here
        except (EOFError, OSError) as error:
            reason = self.close() or error
            raise RuntimeError(
                f"executor: cannot start the interpreter {PYTHON} as a worker: it did "
                f"not start ({reason}); set executor.PYTHON to one that works"
            ) from None
        if missing:
            text = f"executor: a program is less confined on this system: {missing}"
            warnings.warn(text, stacklevel=2)  # each text is shown once
        with _lock:
            _alive.add(self)

    def kill(self) -> None:
        """End the judge and, with it, its zygote and program."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> str:
        """End all of it and clean up; what the judge wrote on stderr."""
        printed = b""
        with _lock:
            _alive.discard(self)
        self.kill()
        self.socket.close()
        if self.process:
            printed = self.process.communicate()[1]
        remove(self.folder)
        os.close(self.lock)
        return printed.decode("utf-8", "replace")[-2000:].strip()


def own_folder() -> tuple[str, int]:
    """A new folder, and the lock that says that it is in use.

    Folders whose lock nobody holds are removed: the trainer of their worker was killed.
    """
    for old in Path(tempfile.gettempdir()).glob(FOLDER + "*"):
        with contextlib.suppress(OSError):  # in use, another user's, or gone
            lock = os.open(old, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(old))
            finally:
                os.close(lock)
    while True:
        folder = tempfile.mkdtemp(prefix=FOLDER)
        # Until it is locked another process may take it for an abandoned one, and remove it.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return folder, lock
            os.close(lock)


@atexit.register
def close() -> None:
    """End all workers, and calls of run_many in other threads; the next call starts new ones."""
    global _closings
    with _lock:
        _closings += 1
        while _idle:
            _idle.pop().close()
        for worker in _alive:
            worker.kill()  # the thread that waits for its answer cleans up


# ---------------------------------------------------------------------- feedback

# What chat templates read as control marks. escape() puts a backslash after the first sign:
# "<|im_end|>" becomes "<\|im_end|>". So do "</s>", "<think>" and any "<a_b>".
MARKS = re.compile(
    r"""
    < (?=                                                  # a "<" before:
        [|\uff5c] | \w+\|> | </?SYS>> |                    # "|im_end|>", "endoftext|>", "<SYS>>"
        /? ( s | (?i: think(ing)? | pad | eo[sdpt] | [bs]o[sp] | pre | unk | mask | user | system
        | assistant | human | bot | answer | image | message | channel | observation )
        | filename | reponame | unused\d+ | extra_id_\d+ | 0x[0-9A-F]{2} | tool\w* | \w+_\w+ ) >
    )
    | \[ (?= \| | /?g?[A-Z_]{3,}\] )                       # "[|endofturn|]", "[INST]", "[/INST]"
    | ` (?= `` ) | ~ (?= ~~ )                              # fences
    """,
    re.VERBOSE,
)
INVISIBLE = re.compile(  # marks and fillers that Python calls printable
    "[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def escape(text: str) -> str:
    """Make a program's text safe in a prompt: control and invisible characters and lone surrogates
    are spelt out, chat marks and fences get a backslash, addresses are hidden.

    >>> escape("a<|im_end|>\\n\\u202e<object at 0x7f3a>")
    'a<\\\\|im_end|>\\\\n\\\\u202e<object at 0x...>'
    """
    shown = [c if c.isprintable() and not INVISIBLE.match(c) else ascii(c)[1:-1] for c in text]
    text = "".join(shown)
    return MARKS.sub(lambda match: match[0] + "\\", without_addresses(text))


# ---------------------------------------------------------------------- known programs

PROGRAMS = {  # of known verdict, for f(1) == 1, f(5) == 120, f(0) == 1
    "right": ("passed", "def f(n): return 1 if n < 2 else n * f(n - 1)"),
    "wrong at 0": ("failed", "def f(n): return 1 if n == 1 else n * f(n - 1) if n else 0"),
    "never ends": ("timeout", "def f(n):\n    while n < 9: pass"),
    "leaves": ("error", "import os\ndef f(n): os._exit(0)"),
    "a cheat": (
        "failed",
        "class Equal:\n    def __eq__(self, other): return True\ndef f(n): return Equal()",
    ),
}


def self_check() -> list[Result]:
    """Score PROGRAMS; raises RuntimeError if one of them is judged falsely on this system."""
    tests = [[[1], 1], [[5], 120], [[0], 1]]
    problem = types.SimpleNamespace(kind="functional", tests=tests, entry_point="f")
    results = run_many([(problem, code) for _, code in PROGRAMS.values()], timeout=0.5)
    for (status, code), result in zip(PROGRAMS.values(), results, strict=True):
        if (result.status, result.reward == 1) != (status, status == "passed"):
            raise RuntimeError(
                f"executor: {code!r} was judged {result.status!r} with reward {result.reward:g} "
                f"instead of {status!r}, so no reward can be trusted on this system "
                f"({result.feedback})"
            )
    return results


if __name__ == "__main__":
    results = self_check()
    close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    print("Tests: f(1) == 1, f(5) == 120, f(0) == 1")
    for (name, (_, code)), result in zip(PROGRAMS.items(), results, strict=True):
        print(f"\n{name}: reward {result.reward:.2f}, {result.status}\n{code}")
        print("-> " + result.feedback.replace("\n", "\n-> "))
