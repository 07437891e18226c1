"""Run a program that a model wrote against tests, without being cheated by it.

In:  run_many([(problem, code), ...]); a problem has kind, tests, public_tests, entry_point, context, reference.
Out: one Result per pair: reward (share of tests passed), status, and the feedback that the model reads next.

    trainer            judge (one per worker)        zygote (one per judge)       candidate (one per program)
    run_many  --job--> holds tests and answers,      clean python, imports done,
                       runs the test code itself --> forks a child per program -> drops rights, then
                       |                             sees no test, no program     defines the program
                       |---- "call f(13)" ----------------------------------------> runs f(13)
                       | <--- plain data: 12 ---------------------------------------|
              <-result-| 12 != 13: failed            kills all it started, empties the scratch folder

The process that knows the answers never runs the model's code, and the one that runs it never holds an answer: a
program can lie only about the values of its own functions, so its best way to be paid is to compute them. Neither
an exit status nor anything printed can make a test pass. Standard library only; Linux in full, macOS in part.
"""
import ast, atexit, builtins, collections.abc, ctypes, dataclasses, datetime, decimal, fractions, functools, gc  # noqa: E401
import hashlib, io, json, math, operator, os, re, resource, select, shutil, signal, socket, struct  # noqa: E401
import subprocess, sys, tempfile, threading, time, traceback, types, warnings  # noqa: E401
from typing import Any

PYTHON = sys.executable  # the interpreter that runs the programs; its installed packages can be imported by them
NAMESPACES = os.environ.get("MURPHY_NAMESPACES", "1") != "0"  # 0: as on a system that has none (for tests)
LIMITS = dict(
    seconds=3.0,  # CPU seconds of a program over all its tests (stdin: of each case); wall time may be 2 x + 3 s
    memory_mb=512,  # address space of the program
    output_bytes=4 << 20,  # what it may print in a stdin case, and return from one call
    max_failures=3,  # failing tests told in the feedback
    feedback_chars=2000,  # length of the whole feedback
)


@dataclasses.dataclass
class Result:
    """What the tests said of one program.

    status: "passed" | "failed" (some answer is wrong) | "error" (raised or ended in every failing test) | "timeout"
    | "memory" | "no_code" | "unscorable" (the problem has no test that can be run: total 0, reward 0.0).
    tests: one bool per test, in order. reward = passed / total. public_passed: all public tests passed (all tests,
    where none is public).
    """
    passed: int
    total: int
    reward: float
    status: str
    feedback: str
    tests: list
    public_passed: bool


# ---- the trainer's side -----------------------------------------------------------------------------------------


def run(problem, code: str, **limits) -> Result:
    """Score one program: run_many for a single pair.

    >>> from types import SimpleNamespace
    >>> p = SimpleNamespace(kind="functional", tests=[[[2, 3], 5], [[1, 0], 1]], public_tests=[], entry_point="add")
    >>> run(p, "def add(a, b): return 5").feedback
    'Test 2 failed: add(1, 0) returned 5, expected 1'
    """
    return run_many([(problem, code)], **limits)[0]


def run_many(jobs: list, workers: int | None = None, **limits) -> list[Result]:
    """Score (problem, code) pairs in `workers` processes (default: one per core); results in the order given.

    reward = passed tests / all tests. limits: see LIMITS. Equal pairs run once. The workers stay alive for the next call.
    Raises RuntimeError if no worker can be started, TypeError / ValueError for a limit that is unknown or not positive.
    """
    for name, value in limits.items():
        if name not in LIMITS:
            raise TypeError(f"executor: unknown limit {name!r}; known limits: {', '.join(LIMITS)}")
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"executor: the limit {name} must be a positive number, not {value!r}")
    limits, results, waiting, problems = {**LIMITS, **limits}, [], {}, {}
    for place, (problem, code) in enumerate(jobs):
        results.append(None)
        if not code or not code.strip():
            text = "No code was found in the answer."
            results[place] = Result(0, 0, 0.0, "no_code", text, [], False)
            continue
        try:
            if id(problem) not in problems:  # `jobs` keeps the object alive, so its id cannot be reused meanwhile
                problems[id(problem)] = json.dumps([pack(getattr(problem, name, None)) for name in FIELDS]).encode()
        except (Uncrossable, RecursionError) as error:
            results[place] = Result(0, 0, 0.0, "unscorable", f"This problem cannot be scored: {error}", [], False)
            continue
        waiting.setdefault((problems[id(problem)], code), []).append(place)
    for (key, places), answer in zip(waiting.items(), _dispatch(list(waiting), workers, limits)):
        for place in places:
            results[place] = Result(**{**answer, "tests": list(answer["tests"])})
    return results


FIELDS = ("kind", "tests", "public_tests", "entry_point", "context", "reference")
_idle: list = []  # workers that wait for a call
_lock = threading.Lock()
_warned: set = set()


class Worker:
    """A judge process, seen from the trainer: two pipes, a folder, and a deadline for each job."""

    def __init__(self) -> None:
        self.owner, self.job, self.tries, self.ready = os.getpid(), None, 0, False
        self.folder = tempfile.mkdtemp(prefix="murphy-")
        os.chmod(self.folder, 0o755)
        self.log = open(os.path.join(self.folder, "log"), "w+b")
        try:  # a new process, never a fork: with torch loaded a fork is slow, and its memory could be read
            self.process = subprocess.Popen(
                [PYTHON, "-I", os.path.abspath(__file__), "--judge", self.folder, str(int(NAMESPACES))], cwd="/",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=ENVIRONMENT, start_new_session=True)
        except OSError as error:
            shutil.rmtree(self.folder)
            raise RuntimeError(f"executor: cannot start the interpreter {PYTHON}: {error.strerror}; "
                               "set executor.PYTHON to a working Python") from None

    def send(self, number: int, problem: bytes, code: str, limits: dict, verdict: list | None) -> None:
        self.job, self.deadline = number, time.monotonic() + 3 * _wall(limits) + 30
        try:
            for message in (problem, json.dumps([code, limits, verdict]).encode()):
                self.process.stdin.write(struct.pack("<I", len(message)) + message)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the judge is gone: receive() sees its end of file and says so

    def receive(self) -> dict | None:
        """The judge's next message; None if it died."""
        head = self.process.stdout.read(4)
        body = self.process.stdout.read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
        return json.loads(body) if body else None

    def close(self) -> None:
        if self.owner == os.getpid():
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)  # judge and zygote; a candidate dies with its zygote
            self.process.wait()
            _empty(self.folder)
            os.rmdir(self.folder)
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # an unsent job for a judge that is dead


def _wall(limits: dict) -> float:
    return 2 * limits["seconds"] + 3  # CPU time decides; this only ends what sleeps, or starves on a loaded machine


def _dispatch(jobs: list, workers: int | None, limits: dict) -> list[dict]:
    """Hand each job to a judge that is free; replace a judge that dies or is late, and give its job one more try."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    answers, todo, team = [None] * len(jobs), collections.deque(range(len(jobs))), []
    verdicts, broken = {}, collections.Counter()
    try:
        for _ in range(min(workers or cores, len(jobs))):
            with _lock:  # another thread may be in here with its own team
                while _idle and _idle[-1].owner != os.getpid():
                    _idle.pop()  # inherited through a fork: the parent's
                team.append(_idle.pop() if _idle else None)
            team[-1] = team[-1] or Worker()
        while None in answers:
            for worker in team:
                if worker.job is None and todo:
                    number = todo.popleft()
                    worker.send(number, *jobs[number], limits, verdicts.get(number))
            busy = [worker for worker in team if worker.job is not None]
            patience = max(0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = select.select([worker.process.stdout for worker in busy], [], [], patience)[0]
            for worker in busy:
                late = time.monotonic() > worker.deadline
                if worker.process.stdout not in ready and not late:
                    continue
                message = None if worker.process.stdout not in ready else worker.receive()
                if message and not worker.ready:  # its first message: what it cannot protect here
                    worker.ready = True
                    for text in set(message["warnings"]) - _warned:
                        _warned.add(text)
                        warnings.warn("executor: " + text)
                elif message:
                    answers[worker.job], worker.job = message, None
                else:
                    number, worker.job = worker.job, None
                    worker.log.seek(0)
                    log = worker.log.read()[-2000:].decode("utf-8", "replace").strip()
                    worker.close()
                    if not worker.ready:
                        raise RuntimeError(f"executor: a worker with {PYTHON} did not start: {log or 'no message'}")
                    team[team.index(worker)] = Worker()
                    todo.appendleft(number)
                    broken[number] += 1
                    if late or broken[number] == 2:  # not run again: a judge only writes down that all tests failed
                        verdicts[number] = ["timeout", "The program ran out of time."] if late else \
                            ["error", "The program ended its judge twice."]
                    if broken[number] > 3:
                        raise RuntimeError("executor: the workers die again and again; last words: " + (log or "none"))
        return answers
    finally:
        with _lock:
            _idle.extend(worker for worker in team if worker and worker.job is None)
        for worker in team:
            if worker and worker.job is not None:  # left in the middle of a job by an exception
                worker.close()


def close() -> None:
    """End all workers; the next call starts new ones."""
    with _lock:
        workers, _idle[:] = list(_idle), []
    for worker in workers:
        worker.close()


atexit.register(close)


# ---- plain data, the only thing that crosses between judge and candidate ------------------------------------------


class Uncrossable(Exception):
    """A value that is no plain data."""


GROUPS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
TEXTS = {"bytes": (bytes, bytes.hex, bytes.fromhex), "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
         "Decimal": (decimal.Decimal, str, decimal.Decimal), "int": (int, hex, lambda text: int(text, 16))}
TEXTS.update({kind.__name__: (kind, kind.isoformat, kind.fromisoformat)
              for kind in (datetime.datetime, datetime.date, datetime.time)})
PARTS = {"complex": (complex, lambda x: [x.real, x.imag]), "range": (range, lambda x: [x.start, x.stop, x.step]),
         "Fraction": (fractions.Fraction, lambda x: [x.numerator, x.denominator]),
         "timedelta": (datetime.timedelta, lambda x: [x.days, x.seconds, x.microseconds])}
TAGS = {kind: tag for table in (GROUPS, {k: v[0] for k, v in {**TEXTS, **PARTS}.items()}) for tag, kind in table.items()}


def pack(x: Any, other=None, depth: int = 0) -> Any:
    """Plain data as JSON in which all builtin types stay apart; other(x, depth) packs what is no plain data.

    >>> pack([1, (2.5, None), {3: b"a"}])
    [1, {'tuple': [2.5, None]}, {'dict': [[3, {'bytes': '61'}]]}]
    >>> unpack(pack({1, 2 ** 70})) == {1, 2 ** 70}
    True
    """
    kind = type(x)
    if kind in (str, bool, float, type(None)) or kind is int and -2**63 < x < 2**63:
        return x
    if depth > 100:
        raise Uncrossable("data is nested more than 100 deep")
    if kind is list:
        return [pack(value, other, depth + 1) for value in x]
    if kind is dict:
        return {"dict": [[pack(key, other, depth + 1), pack(value, other, depth + 1)] for key, value in x.items()]}
    tag = TAGS.get(kind)
    if tag in GROUPS:
        return {tag: [pack(value, other, depth + 1) for value in x]}
    if tag in TEXTS:
        return {tag: TEXTS[tag][1](x)}
    if tag in PARTS:
        return {tag: [pack(value) for value in PARTS[tag][1](x)]}
    if other:
        return other(x, depth)
    raise Uncrossable(f"a value of type {kind.__name__} is no plain data")


def unpack(x: Any, other=None) -> Any:
    """The inverse of pack. Loops in Python, so that a timer can interrupt it: x may be made to be slow (equal hashes)."""
    if type(x) is list:
        return [unpack(value, other) for value in x]
    if type(x) is not dict:
        return x
    (tag, inside), = x.items()
    if tag == "dict":
        return {unpack(key, other): unpack(value, other) for key, value in inside}
    if tag == "set" or tag == "frozenset":
        return GROUPS[tag]({unpack(value, other) for value in inside})
    if tag in GROUPS:
        return GROUPS[tag](unpack(value, other) for value in inside)
    if tag in TEXTS:
        value = TEXTS[tag][2](inside)
        if tag == "int" and len(inside) > 1 << 19 or tag == "Decimal" and value and abs(value.adjusted()) > 10_000:
            raise Uncrossable("a number of absurd size")  # the next operation on it could take for ever
        return value
    if tag in PARTS:
        value = PARTS[tag][0](*unpack(inside))
        if tag == "range" and not -10**7 < value.stop - value.start < 10**7:
            raise Uncrossable("a range of absurd size")
        return value
    if other:
        return other(tag, inside)
    raise Uncrossable(f"unknown tag {tag!r}")


def show(x: Any, room: int = 200) -> str:
    """repr for feedback: sets sorted, cut in the middle with a mark, the same text for the same value.

    >>> show({"b", "a"}), show("x" * 1000, 40)
    ("{'a', 'b'}", "'xxxxxxxxxxxxx...[975 cut]...xxxxxxxxxxxx'")
    """
    kind, ends = type(x), {list: "[]", tuple: "()", set: "{}", frozenset: ("frozenset({", "})"), dict: "{}"}
    if kind is str:
        return repr(cut(x, room))
    if kind in ends and x:
        parts, used = [], 0
        for item in sorted(x, key=lambda value: show(value, 50)) if kind in (set, frozenset) else x:
            parts.append(f"{show(item, room)}: {show(x[item], room)}" if kind is dict else show(item, room))
            used += len(parts[-1]) + 2
            if used > room:
                parts.append(f"...[{len(x) - len(parts)} more]")
                break
        return ends[kind][0] + ", ".join(parts) + ("," if kind is tuple and len(x) == 1 else "") + ends[kind][1]
    try:
        return cut(repr(x), room)
    except ValueError:  # more digits than sys.set_int_max_str_digits
        return f"an integer of {x.bit_length()} bits"


def cut(text: str, room: int) -> str:
    """At most about `room` characters of text: head and tail, with the cut marked."""
    half = max(0, (room - 24) // 2)
    return text if len(text) <= room else f"{text[:half + 1]}...[{len(text) - 2 * half - 1} cut]...{text[len(text) - half:]}"


def escape(text: str) -> str:
    """Text of a program that is safe in a prompt: no control characters, lone surrogates, chat marks, addresses."""
    text = re.sub(r"[\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]",
                  lambda match: match[0].encode("unicode_escape").decode(), text)
    text = re.sub(r"<(?=[|\uff5c/]|(?:s|think|tool_\w+|start_of_\w+|end_of_\w+|bos|eos|pad|unk|im_\w+)>)|(?<=[|\uff5c])(?=>)"
                  r"|\[(?=/?INST\])|`(?=``)", lambda match: match[0] + "\\", text)
    return re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", text)


# ---- the judge: holds the answers, runs the tests ------------------------------------------------------------------


class Control(BaseException):
    """Ends the tests. No Exception, so that no `except Exception` of a test can swallow it."""


class Died(Control):
    """The program is gone (it ended, or was ended at a limit); args: status, text."""


class Unscorable(Control):
    """The problem's tests cannot be run; args: why."""


def late(signal_number, frame) -> None:
    raise Died("timeout", "ran out of time")


class Program:
    """One candidate, seen from the judge: sends requests, reads plain data, trusts nothing of it."""

    def __init__(self, zygote, limits: dict, operators: set, hello: bytes, files: tuple = ()) -> None:
        self.zygote, self.limits, self.buffer, self.death, self.last = zygote, limits, bytearray(), None, None
        self.operators = operators
        self.functions, self.references = [], {}
        self.deadline = time.monotonic() + _wall(limits) + 2
        self.socket, theirs = socket.socketpair()
        zygote.start(limits, [theirs.fileno(), *files])
        theirs.close()
        self.send(hello)

    def send(self, body: bytes) -> None:
        try:
            self.socket.settimeout(max(0.01, self.deadline - time.monotonic()))
            self.socket.sendall(struct.pack("<I", len(body)) + body)
        except OSError:
            pass  # the program is gone: receive() finds out why

    def receive(self) -> Any:
        """The next message as JSON; raises Died if there is none within the limits."""
        need = 4
        try:
            while True:
                if need == 4 and len(self.buffer) >= 4:
                    need = 4 + struct.unpack_from("<I", self.buffer)[0]
                    if need > self.limits["output_bytes"] + 64:
                        self.die("error", f"returned more than {self.limits['output_bytes']} bytes")
                if need > 4 and len(self.buffer) >= need:
                    body, self.buffer = bytes(self.buffer[4:need]), self.buffer[need:]
                    return json.loads(body)
                self.socket.settimeout(max(0.01, self.deadline - time.monotonic()))
                data = self.socket.recv(1 << 18)
                if not data:
                    self.die()
                self.buffer += data
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OSError:
            self.die()
        except (ValueError, RecursionError):
            self.die("error", "sent something that is no answer")

    def die(self, status: str = "error", text: str = "") -> None:
        report = self.end()
        if report["why"] and not (text and status == "error"):
            status, text = report["why"], {"timeout": "ran out of time", "memory": "used too much memory"}[report["why"]]
        if not text:
            code = report["code"]  # negative: the signal that ended it
            text = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            status = "ended" if code == 0 else "error"  # stdin: may be no fault; never enough for a test to pass
        self.death = status, text
        raise Died(*self.death)

    def drain(self, reader: int) -> str:
        """What the program prints until it closes its end; more than output_bytes is read and thrown away."""
        head, tail, size, limit = bytearray(), b"", 0, self.limits["output_bytes"]
        while True:
            ready = select.select([reader, self.socket], [], [], max(0, self.deadline - time.monotonic()))[0]
            data = os.read(reader, 1 << 16) if reader in ready else b""
            if not data:  # all who could write are gone; or it has ended and left the pipe to something that it started
                return head.decode("utf-8", "replace") + (f"...[{size - len(head)} cut]..." if size > limit else "")
            size += len(data)
            head += data[:limit - len(head)]

    def end(self) -> dict:
        """Kill the program and all that it started; how it ended."""
        self.socket.close()
        return self.zygote.stop()

    def answer(self, message: Any) -> Any:
        """The value of a reply, or the exception that it tells of, raised."""
        try:
            if "error" in message:
                names, text, line = message["error"]
                error = rebuild([str(name)[:100] for name in names[:50]], str(text), int(line))
            else:
                value = unpack(message["value"], self.foreign)
                changes = [(int(place), unpack(new)) for place, new in message.get("changes", ())]
                return value, changes
        except Exception:
            self.die("error", "sent something that is no answer")
        raise error

    def ask(self, label: str, *request, args=None) -> Any:
        """Let the program do something; args: the arguments, if it is a call that the feedback may tell of."""
        if self.death:
            raise Died(*self.death)
        try:
            packed = pack(list(request), self.native)
        except Uncrossable as error:
            raise Unscorable(f"a test hands the program what cannot be sent to it: {error}") from None
        call = (label, packed[2:4]) if args is not None else None
        if call:
            self.last = [call, "nothing"]
        self.send(json.dumps(packed).encode())
        message = self.receive()
        while type(message) is dict and "callback" in message:  # the program calls a function that the test gave it
            self.send(self.callback(message))
            message = self.receive()
        try:
            value, changes = self.answer(message)
        except Exception as error:
            error.call = call or (self.last and self.last[0])
            raise
        if call:
            self.last = [call, value]
        for place, new in changes if args is not None else ():
            old = args[place] if 0 <= place < len(args) else None
            if type(old) is type(new) and isinstance(old, (list, bytearray)):
                old[:] = new
            elif type(old) is type(new) and isinstance(old, (dict, set)):
                old.clear()
                old.update(new)
        return value

    def callback(self, message: dict) -> bytes:
        try:
            function, args, kwargs = (self.functions[message["callback"]], unpack(message["args"], self.foreign),
                                      unpack(message["kwargs"], self.foreign))
        except Exception:
            self.die("error", "sent something that is no answer")
        try:
            reply = {"value": pack(function(*args, **kwargs), self.native)}
        except Exception as error:
            reply = {"error": describe(error)}
        return json.dumps({"reply": reply}).encode()

    def native(self, x: Any, depth: int) -> dict:
        """Pack what tests hand over besides plain data: the program's own objects, and functions."""
        if isinstance(x, Remote):
            return {"ref": object.__getattribute__(x, "_ref")}
        if isinstance(x, types.FunctionType):
            self.functions.append(x)
            return {"function": len(self.functions) - 1}
        if callable(x) and getattr(x, "__module__", None) in sys.stdlib_module_names and hasattr(x, "__qualname__"):
            return {"global": [x.__module__, x.__qualname__]}
        raise Uncrossable(f"a value of type {type(x).__name__} is no plain data")

    def foreign(self, tag: str, inside: Any) -> Any:
        if tag == "opaque":
            return Opaque(str(inside)[:60])
        if tag == "iterator":
            return RemoteIterator(self, int(inside), "iterator")
        (number, names), kind = inside, RemoteIterator if tag == "iterator" else Remote
        if tag != "object":
            raise Uncrossable(tag)
        if number not in self.references:  # one object there, one object here
            self.references[number] = Remote(self, int(number), str(names[0])[:60], [str(name)[:100] for name in names[:50]])
        return self.references[number]


class Opaque:
    """Something that the program returned and that is no plain data: equal to nothing, good for nothing."""
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name} object>"


class Remote:
    """An object or function that stays with the program. Its attributes and calls cross; its operators count only
    if a class of the reference solution defines them, so that no object can decide that it equals the answer."""
    __slots__ = ("_program", "_ref", "_label", "_names")

    def __init__(self, program, ref, label, names=()) -> None:
        for slot, value in zip(Remote.__slots__, (program, ref, label, names)):
            object.__setattr__(self, slot, value)

    def __call__(self, *args, **kwargs):
        return self._program.ask(self._label, "call", self, list(args), kwargs, args=args)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._program.ask(f"{self._label}.{name}", "get", self, name)
        if isinstance(value, Remote) and value._names[:1] in (["method"], ["function"]):
            object.__setattr__(value, "_label", f"{self._label}.{name}")
        return value

    def __setattr__(self, name, value):
        self._program.ask(self._label, "set", self, name, value)

    def __instancecheck__(self, x):
        return isinstance(x, Remote) and self._label in x._names

    def __hash__(self):
        return hash(str(self._ref))

    def __repr__(self):
        return f"<{self._label} object>"


class RemoteIterator(Remote):
    __slots__ = ()

    def __iter__(self):
        return self

    def __next__(self):
        return self._program.ask("next", "next", self)


OPERATORS = """eq ne lt le gt ge add sub mul truediv floordiv mod pow matmul and or xor lshift rshift neg pos abs invert
    len iter str bool int float index getitem setitem delitem contains enter exit iadd isub imul round""".split()
LENIENT = {"__len__", "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__str__", "__enter__", "__exit__"}


def _operator(name: str):
    def method(self, *args):
        program, dunder = self._program, f"__{name}__"
        if dunder in program.operators or name == "ne" and "__eq__" in program.operators:
            return program.ask(self._label, "operator", self, dunder, list(args))
        if name in ("eq", "ne"):
            return (self is args[0]) == (name == "eq")
        if name == "bool":
            return bool(len(self)) if "__len__" in program.operators else True
        if name == "str":
            return repr(self)
        raise TypeError(f"{self!r} does not support {dunder}")

    return method


for _name in OPERATORS:
    setattr(Remote, f"__{_name}__", _operator(_name))


def describe(error: BaseException) -> list:
    """An exception as plain data: the names of its classes, its message, the line of the program that raised it."""
    try:
        text = str(error)[:4000]
    except BaseException:  # a hostile __str__
        text = ""
    line = getattr(error, "lineno", 0) if isinstance(error, SyntaxError) else 0
    trace, steps = error.__traceback__, 0
    while trace and steps < 100_000:
        if trace.tb_frame.f_code.co_filename == "<solution>":
            line = trace.tb_lineno
        trace, steps = trace.tb_next, steps + 1
    return [[f"{kind.__module__}.{kind.__qualname__}"[:200] for kind in type(error).__mro__], text, int(line or 0)]


def rebuild(names: list[str], text: str, line: int) -> Exception:
    """The exception that a program raised, as a class that the test's `except` and `raises` know."""
    base = Exception
    for name in names:
        module, _, last = name.rpartition(".")
        known = getattr(sys.modules.get(module), last, None)
        if isinstance(known, type) and issubclass(known, Exception):
            base = known
            break
    kind = type(re.sub(r"\W", "?", names[0].rpartition(".")[2])[:60], (base,), {"__str__": lambda self: text})
    error = kind.__new__(kind)
    error.args, error.names, error.line = (text,), {name.rpartition(".")[2] for name in names}, line
    return error


class Rewriter(ast.NodeTransformer):
    """Makes each assert a test that counts by itself: its outcome is recorded and the tests go on.

    An assert in a loop is one test: passed if it was reached and never failed. An assert of a constant is none;
    a block `with raises(...)`, or a try with `assert False` or `pytest.fail` in it, is one test; so is a test function
    without an assert.
    """

    def __init__(self) -> None:
        self.sources: list[str] = []  # of each test, for the feedback

    def point(self, source: str, body: list, node: ast.AST) -> ast.With:
        self.sources.append(" ".join(source.split()))
        call = ast.Call(ast.Name("__point__", ast.Load()), [ast.Constant(len(self.sources) - 1)], [])
        return ast.copy_location(ast.With([ast.withitem(call, ast.Name("__p__", ast.Store()))], body), node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        test = node.test
        if isinstance(test, ast.Constant):
            return node
        equal = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        call = ast.Call(ast.Name("__p__", ast.Load()), [test.left, test.comparators[0]] if equal else [test], [])
        return self.point(ast.unparse(test), [ast.copy_location(ast.Expr(call), node)], node)

    def visit_With(self, node: ast.With) -> ast.AST:
        raises = any(re.match(r"(pytest\.)?raises\(", ast.unparse(item.context_expr)) for item in node.items)
        return self.point(ast.unparse(node), [node], node) if raises else self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        fails = any(isinstance(x, ast.Assert) and isinstance(x.test, ast.Constant) and not x.test.value
                    or isinstance(x, ast.Attribute) and ast.unparse(x) == "pytest.fail" for x in ast.walk(node))
        return self.point(ast.unparse(node), [node], node) if fails else self.generic_visit(node)

    def function(self, node: ast.FunctionDef) -> None:
        """A test function: refuse what would need a fixture, and see that it holds at least one test."""
        optional = len(node.args.args) - len(node.args.defaults)
        marks = " ".join(ast.unparse(mark) for mark in node.decorator_list if "parametrize" in ast.unparse(mark))
        for arg in node.args.args[:optional]:
            if arg.arg != "self" and not re.search(rf"\b{arg.arg}\b", marks):
                raise Unscorable(f"the test {node.name} needs the fixture {arg.arg}")
        before = len(self.sources)
        self.generic_visit(node)
        if len(self.sources) == before:
            node.body = [self.point(node.name + "()", node.body, node)]


@dataclasses.dataclass
class Unit:
    """One test text: its code, what must be called afterwards, and its tests (first, last + 1)."""
    code: types.CodeType
    first: int
    last: int
    functions: list  # (name, class name or None, first, last + 1)
    check: bool  # it defines check(candidate) and does not call it


class Plan:
    """A problem made ready: parsed once, used for all programs of the group."""

    def __init__(self, kind, tests, public_tests, entry_point, context, reference) -> None:
        self.kind, self.entry, self.context, self.reference = kind, entry_point or "", context or "", reference or ""
        if kind not in ("assert", "stdin", "functional"):
            raise Unscorable(f"its kind is {kind!r}, expected assert, stdin or functional")
        if not isinstance(tests, (list, tuple)) or not tests:
            raise Unscorable("it has no tests")
        public = list(public_tests or [])
        items = [(test, False, True) for test in public if test not in tests]  # shown, but not part of the reward
        items += [(test, True, test in public) for test in tests]
        try:
            self.plan_asserts(items) if kind == "assert" else self.plan_cases(items)
        except (SyntaxError, ValueError, TypeError, RecursionError, Uncrossable) as error:
            raise Unscorable(f"a test cannot be read: {error}") from None
        if not any(self.graded):
            raise Unscorable("it has no tests")

    def plan_cases(self, items: list) -> None:
        self.cases, self.graded, self.public = map(list, zip(*items))
        form, shape = ((str, "[input text, expected output]") if self.kind == "stdin" else
                       ((list, tuple), "[list of arguments, expected value]"))
        for case in self.cases:
            if not isinstance(case, (list, tuple)) or len(case) != 2 or not isinstance(case[0], form):
                raise ValueError(f"expected {shape}, got {show(case, 60)}")
        self.operators, self.context_code = set(), None
        self.hello = {"context": self.context, "name": "__main__" if self.kind == "stdin" else "solution"}
        if self.kind == "functional":
            if not self.entry:
                raise Unscorable("it names no entry_point")
            self.hello |= {"entry": self.entry, "calls": [pack(list(given)) for given, _ in self.cases]}

    def plan_asserts(self, items: list) -> None:
        rewriter, self.units, self.graded, self.public = Rewriter(), [], [], []
        used, stored, imported, rooted = set(), set(), set(), set()
        for text, graded, public in items:
            tree = ast.parse(text)
            for node in ast.walk(tree):
                if isinstance(node, ast.Name):
                    (used if isinstance(node.ctx, ast.Load) else stored).add(node.id)
                elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    stored.add(node.name)
                elif isinstance(node, ast.arg):
                    stored.add(node.arg)
                elif isinstance(node, ast.ImportFrom) and node.module == "solution":
                    imported |= {alias.name for alias in node.names} - {"*"}
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.Attribute):
                    rooted |= {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
            calls = {ast.unparse(node.value.func) for node in tree.body
                     if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)}
            first, functions, check = len(rewriter.sources), [], False
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            for place, node in enumerate(tree.body):
                owner = node.name if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else None
                for part in node.body if owner else [node]:
                    if isinstance(part, ast.AsyncFunctionDef) and part.name.startswith("test"):
                        raise Unscorable(f"the test {part.name} is async")
                    if isinstance(part, ast.FunctionDef) and part.name.startswith("test"):
                        start = len(rewriter.sources)
                        rewriter.function(part)
                        functions.append((part.name, owner, start, len(rewriter.sources)))
                    elif not owner:
                        tree.body[place] = rewriter.visit(part)
                    check |= isinstance(part, ast.FunctionDef) and part.name == "check" and "check" not in calls
            if len(rewriter.sources) == first and self.entry in names:  # no assert: the whole text is one test
                tree.body = [rewriter.point(text, tree.body, tree.body[0])]
            if check and not self.entry:
                raise Unscorable("a test defines check(candidate), but the problem names no entry_point")
            code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
            self.units.append(Unit(code, first, len(rewriter.sources), functions, check))
            self.graded += [graded] * (len(rewriter.sources) - first)
            self.public += [public] * (len(rewriter.sources) - first)
        self.sources = rewriter.sources
        self.survey(used, stored, imported, rooted)

    def survey(self, used: set, stored: set, imported: set, rooted: set) -> None:
        """Which names of the tests mean the program's: those that the reference defines, never len or abs."""
        context, reference = ast.parse(self.context), ast.parse(self.reference)
        context_names = [node for node in ast.walk(context) if isinstance(node, ast.Name)]
        made = {node.name for node in context.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        made |= {node.id for node in context_names if isinstance(node.ctx, ast.Store)}
        self.imports, self.constants, defined = [], {}, set()
        for node in reference.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):  # a test may use what the solution imports
                self.imports.append(compile(ast.Module([node], []), "<reference>", "exec"))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        defined.add(target.id)
                        if isinstance(node.value, (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set)):
                            self.constants[target.id] = node.value
        free = (used | {node.id for node in context_names}) - stored - made
        if not self.reference:
            defined = {name for name in free if not hasattr(builtins, name)} - sys.stdlib_module_names - {"pytest"}
            self.imports = [compile(f"import {name}", "<test>", "exec") for name in free & sys.stdlib_module_names
                            if re.search(rf"\b{name}\.", " ".join(self.sources))]
        self.names = free & defined | imported | ({self.entry} - stored - {""})
        classes = [node for node in ast.walk(reference) if isinstance(node, ast.ClassDef)]
        bases = " ".join(ast.unparse(base) for node in classes for base in node.bases + node.decorator_list)
        self.operators = {part.name for node in classes for part in node.body if isinstance(part, ast.FunctionDef)}
        self.operators |= LENIENT if bases or not self.reference else set()
        self.operators |= {"__eq__", "__lt__", "__repr__"} if "dataclass" in bases or "NamedTuple" in bases else set()
        self.context_code = compile(context, "<context>", "exec")
        self.errors = {node.name for node in classes if re.search(r"(Error|Exception)\b", ast.unparse(node).split("\n")[0])}
        self.hello = {"context": "" if {node.id for node in context_names} & defined - made else self.context,
                      "name": "solution", "objects": bool(classes or not self.reference and rooted & self.names),
                      "classes": sorted({node.name for node in classes} if self.reference else self.names)}


class Point:
    """The context manager around one test: __p__(left, right) or __p__(truth) inside it decides."""

    def __init__(self, run, number: int) -> None:
        self.run, self.number = run, number

    def __enter__(self):
        self.verdict, self.line = None, ""
        return self

    def __call__(self, *values) -> None:
        self.verdict = bool(values[0] == values[1] if len(values) == 2 else values[0])
        if not self.verdict:
            last, source = self.run.program.last, self.run.plan.sources[self.number]
            expected = show(values[1]) if len(values) == 2 else source
            if last is None:
                self.line = f"got {show(values[0])}, expected {expected}"
            elif len(values) == 2 and values[0] is not last[1]:
                expected = show(values[0]) if values[1] is last[1] else source
            self.line = self.line or f"{call_text(last[0])} returned {show(last[1])}, expected {expected}"

    def __exit__(self, kind, error, trace) -> bool:
        if error is None:
            self.run.record(self.number, self.verdict is not False, "failed", self.line)
        else:
            self.run.record(self.number, False, *self.run.explain(error, self.run.plan.sources[self.number]))
        return not isinstance(error, Control)


def call_text(call: tuple) -> str:
    """f(1, x=2) from a call as it was sent."""
    label, (args, kwargs) = call
    ghost = lambda tag, inside: Opaque("program's")  # noqa: E731
    parts = [show(unpack(arg, ghost), 100) for arg in args]
    parts += [f"{name}={show(value, 100)}" for name, value in unpack(kwargs, ghost).items()]
    return cut(f"{label}({', '.join(parts)})", 300)


class Run:
    """One program under test: the outcome of each test, and the result that they make."""

    def __init__(self, plan: Plan, code: str, limits: dict, zygote) -> None:
        self.plan, self.code, self.limits, self.zygote, self.program = plan, code, limits, zygote, None
        self.outcomes: list = [None] * len(plan.graded)  # None: not reached, else (passed, status, line)
        self.trouble = None  # (status, line) of what ended or kept the program from the tests

    def record(self, number: int, passed: bool, status: str, line: str) -> None:
        if self.outcomes[number] is None or self.outcomes[number][0]:  # a test that failed once has failed
            self.outcomes[number] = (passed, status, line)

    def explain(self, error: BaseException, source: str) -> tuple[str, str]:
        """(status, feedback line) of an exception that ended a test."""
        last = self.program.last
        if isinstance(error, Died):
            return error.args[0].replace("ended", "error"), f"{call_text(last[0]) if last else 'the program'} {error.args[1]}"
        text = f"{type(error).__name__}: {cut(str(error), 300)}".rstrip(": ")
        if hasattr(error, "line"):  # raised in the program
            call = getattr(error, "call", None)
            status = "memory" if "MemoryError" in error.names else "error"
            return status, f"{call_text(call) if call else 'the program'} raised {text}{self.where(error.line)}"
        if isinstance(error, AssertionError) and error.args:
            return "failed", f"{str(error)}, in `{cut(source, 200)}`"
        if last:
            return "failed", f"{call_text(last[0])} returned {show(last[1])}, expected {cut(source, 200)} ({text})"
        return "failed", f"{text} in `{cut(source, 200)}`"

    def where(self, line: int) -> str:
        lines = self.code.split("\n")
        return f" (line {line}: {cut(lines[line - 1].strip(), 120)})" if 0 < line <= len(lines) else ""

    def start(self, files: tuple = ()) -> bool:
        """Have the program defined; False if that failed (self.trouble says why)."""
        signal.setitimer(signal.ITIMER_REAL, _wall(self.limits) + 3, 1)  # bounds the work on what it returns, too
        hello = {**self.plan.hello, "code": self.code}
        self.program = Program(self.zygote, self.limits, self.plan.operators, json.dumps(hello).encode(), files)
        try:
            self.program.answer(self.program.receive())
            return True
        except (Died, Exception) as error:
            self.trouble = self.explain(error, "")
            return False

    def functional(self) -> None:
        if not self.start():
            return
        for number, (given, expected) in enumerate(self.plan.cases):  # all calls were sent with the program
            self.program.last = [(self.plan.entry, [pack(list(given)), pack({})]), None]
            try:
                value = self.program.answer(self.program.receive())[0]
                self.program.last[1] = value
                self.record(number, same(value, expected), "failed",
                            f"{call_text(self.program.last[0])} returned {show(value)}, expected {show(expected)}")
            except (Died, Exception) as error:
                error.call = self.program.last[0]
                self.record(number, False, *self.explain(error, ""))
                if isinstance(error, Died):
                    return

    def stdin(self) -> None:
        for number, (given, expected) in enumerate(self.plan.cases):
            self.case(number, given, expected)
            if self.outcomes[number][1] == "timeout":
                return  # a program that loops may not cost a time limit per case

    def case(self, number: int, given: str, expected: str) -> None:
        """One fresh process per case; passed if the output is right and the program neither raised nor was ended."""
        with tempfile.TemporaryFile() as source:
            source.write(given.encode("utf-8", "surrogatepass"))
            source.seek(0)
            reader, writer = os.pipe()
            try:
                self.program = None
                signal.setitimer(signal.ITIMER_REAL, _wall(self.limits) + 3, 1)
                hello = json.dumps({**self.plan.hello, "code": self.code}).encode()
                self.program = Program(self.zygote, self.limits, set(), hello, (source.fileno(), writer))
                os.close(writer)
                writer = -1
                output, fault = self.program.drain(reader), None
                try:
                    self.program.answer(self.program.receive())
                except (Died, Exception) as error:
                    fault = error
            finally:
                os.close(reader)
                if writer >= 0:
                    os.close(writer)
        call = f"with the input {show(given, 300)} the program"
        if fault is None or isinstance(fault, Died) and fault.args[0] == "ended":
            self.record(number, same_output(output, expected), "failed",
                        f"{call} printed {show(output, 400)}, expected {show(expected.strip(), 400)}")
        else:
            status, line = self.explain(fault, "")
            self.record(number, False, status, call + line.removeprefix("the program"))

    def asserts(self) -> None:
        if not self.start():
            return
        space = self.space = {"__name__": "test", "__point__": functools.partial(Point, self)}
        plan, module = self.plan, Solution("solution")
        for code in plan.imports:
            try:
                exec(code, space)
            except ImportError:
                pass  # a package that only the solution needs; a test that needs it fails with a NameError
        space |= {name: self.name(name) for name in plan.names}
        module.__dict__["run"] = self
        sys.modules["solution"] = module
        exec(plan.context_code, space)
        if plan.entry in plan.names:
            space[plan.entry] = self.name(plan.entry)
        for unit in plan.units:
            try:
                self.attempt(unit.first, unit.last, lambda: exec(unit.code, space))
                for name, owner, first, last in unit.functions:
                    self.attempt(first, last, lambda: self.call_test(space, name, owner))
                if unit.check:
                    self.attempt(unit.first, unit.last, lambda: space["check"](self.name(plan.entry)))
            except Died as error:
                self.trouble = self.trouble or self.explain(error, "")
                return

    def name(self, name: str) -> Any:
        if name in self.plan.constants:
            return ast.literal_eval(self.plan.constants[name])
        if name in self.plan.errors:
            return type(name, (Exception,), {})
        return Remote(self.program, name, name, [name])

    def attempt(self, first: int, last: int, action) -> None:
        """Run a piece of the tests; what ends it is told for those of its tests that were not reached."""
        try:
            action()
        except Control:
            raise
        except BaseException as error:
            status, line = self.explain(error, "the test code")
            for number in range(first, last):
                if self.outcomes[number] is None:
                    self.record(number, False, status, line)

    def call_test(self, space: dict, name: str, owner: str | None) -> None:
        this = space[owner]() if owner else None
        test = getattr(this, name) if owner else space[name]
        for values in getattr(test, "cases", [{}]):
            getattr(this, "setup_method", getattr(this, "setUp", lambda: None))()
            test(**values)

    def summary(self) -> dict:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.program and not self.program.death:
            self.program.end()
        plan = self.plan
        graded = [bool(outcome and outcome[0]) for outcome, counts in zip(self.outcomes, plan.graded) if counts]
        shown = [outcome for outcome, public in zip(self.outcomes, plan.public) if public or not any(plan.public)]
        public_passed = all(outcome and outcome[0] for outcome in shown)
        failures = [outcome[1] for outcome in self.outcomes if outcome and not outcome[0]]
        failures += [self.trouble[0]] if self.trouble else []
        status = next((word for word in ("timeout", "memory", "failed", "error") if word in failures), "failed")
        if all(graded):
            status = "passed"
        lines, room = [], self.limits["feedback_chars"]
        for number, outcome in enumerate(shown, 1):
            if outcome and not outcome[0] and len(lines) < self.limits["max_failures"]:
                lines.append(f"Test {number} failed: {outcome[2]}")
        if public_passed:
            lines = ["All tests passed." if all(graded) else "The public tests pass, but hidden tests fail."]
        elif self.trouble and not lines:
            lines = [self.trouble[1][0].upper() + self.trouble[1][1:]]
        elif not lines:
            lines = ["The tests ended before they reached an assert."]
        text = "\n".join(escape(line) for line in lines)
        return dict(passed=sum(graded), total=len(graded), reward=sum(graded) / len(graded), status=status,
                    feedback=cut(text, room), tests=graded, public_passed=public_passed)


class Solution(types.ModuleType):
    """What `from solution import f` finds in a test."""

    def __getattr__(self, name):
        if name.startswith("__"):
            if name == "__all__":
                return sorted(self.run.plan.names)
            raise AttributeError(name)
        return self.run.name(name)


def same(value: Any, expected: Any) -> bool:
    """Equality of kind "functional": expected values come from JSON, so a tuple is as good as a list, at any depth,
    and a float is right within 1e-6 (relative). Integers are exact.

    >>> same((1, [2.0000000001]), [1, [2.0]]), same(1333335333334000000, 1.333335333334e18)
    (True, False)
    """
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if type(value) is dict and type(expected) is dict:
        return len(value) == len(expected) and all(key in value and same(value[key], expected[key]) for key in expected)
    if type(value) is float and type(expected) is float:
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9) or value != value and expected != expected
    return bool(value == expected)


NUMBER = re.compile(r"[+-]?(\d{1,4000}(\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?|[+-]?(nan|inf|infinity)", re.I)


def same_output(output: str, expected: str) -> bool:
    """Equality of kind "stdin": line by line without trailing blanks; lines of numbers only are compared as numbers.

    >>> same_output("1 2 \\n\\n", "1 2"), same_output("0.333333", "0.333333333333"), same_output("1\\n2", "1 2")
    (True, True, False)
    """
    left, right = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return len(left) == len(right) and all(
        a == b or len(a.split()) == len(b.split()) and all(map(_same_word, a.split(), b.split())) for a, b in zip(left, right))


def _same_word(a: str, b: str) -> bool:
    if not (NUMBER.fullmatch(a) and NUMBER.fullmatch(b)):
        return False
    x, y = (int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text) for text in (a, b))
    if type(x) is int or type(y) is int:
        return x == y
    return math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9) or x != x and y != y


class raises:  # noqa: N801
    """Stand-in for pytest.raises, which also knows the exceptions that the program itself defines, by name."""

    def __init__(self, *expected, match: str | None = None) -> None:
        self.expected, self.match, self.value, self.type = expected, match, None, None
        if len(expected) > 1 and callable(expected[1]):  # raises(ValueError, f, -1)
            with raises(expected[0]):
                expected[1](*expected[2:])

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> bool:
        wanted = self.expected[0] if isinstance(self.expected[0], tuple) else self.expected[:1]
        names = {object.__getattribute__(x, "_label") if isinstance(x, Remote) else x.__name__ for x in wanted}
        if isinstance(error, Control):
            return False
        if error is None:
            raise AssertionError(f"nothing was raised, expected {' or '.join(sorted(names))}")
        self.value, self.type = error, kind
        if not names & (getattr(error, "names", set()) | {base.__name__ for base in kind.__mro__}):
            return False
        if self.match and not re.search(self.match, str(error)):
            raise AssertionError(f"the message {show(str(error))} does not match {show(self.match)}")
        return True


class approx:  # noqa: N801
    """Stand-in for pytest.approx: numbers, and lists, tuples and dicts of numbers."""

    def __init__(self, expected, rel: float = 1e-6, abs: float = 1e-12, nan_ok: bool = False) -> None:
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel or 1e-6, abs or 1e-12, nan_ok

    def __repr__(self) -> str:
        return f"approx({show(self.expected)})"

    def __eq__(self, value) -> bool:
        again = functools.partial(approx, rel=self.rel, abs=self.abs, nan_ok=self.nan_ok)
        if isinstance(self.expected, dict):
            return type(value) is dict and value.keys() == self.expected.keys() and all(
                value[key] == again(self.expected[key]) for key in value)
        if isinstance(self.expected, (list, tuple)):
            return type(value) is type(self.expected) and len(value) == len(self.expected) and all(
                x == again(y) for x, y in zip(value, self.expected))
        if not isinstance(value, (int, float, complex, decimal.Decimal, fractions.Fraction)):
            return value == self.expected
        if value != value and self.expected != self.expected:
            return self.nan_ok
        return value == self.expected or abs(value - self.expected) <= max(self.rel * abs(self.expected), self.abs)


def parametrize(names, values, **_):
    """Stand-in for pytest.mark.parametrize; stacked marks multiply."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [dict(zip(names, value if len(names) > 1 else [value])) for value in values]

    def mark(function):
        function.cases = [{**old, **row} for old in getattr(function, "cases", [{}]) for row in rows]
        return function

    return mark


def fail(reason: str = "failed", **_) -> None:
    raise AssertionError(reason)


class Zygote:
    """The judge's handle of its zygote: start a program, stop it, start anew when something broke."""

    def __init__(self, folder: str, namespaces: bool) -> None:
        self.folder, self.warnings, self.running = folder, [], False
        for self.mode in (["namespaces"] if namespaces and sys.platform == "linux" else []) + ["plain"]:
            try:
                self.spawn()
                break
            except Broken as error:
                self.warnings.append(f"no namespaces here ({error}): programs share network, files and processes with you")
        else:
            raise SystemExit("the zygote did not start: " + self.warnings[-1])

    def spawn(self) -> None:
        self.socket, theirs = socket.socketpair()
        flags = ["-s", "-P"] if sys.version_info >= (3, 11) else ["-I"]  # -I, but with the hash seed of ENVIRONMENT
        self.process = subprocess.Popen(
            [sys.executable, *flags, os.path.abspath(__file__), "--zygote", str(theirs.fileno()), self.folder, self.mode],
            cwd="/", env=ENVIRONMENT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        self.running = False
        hello = self.receive(30)
        if "error" in hello:
            self.process.wait()
            raise Broken(hello["error"])
        self.warnings += [text for text in hello["warnings"] if text not in self.warnings]

    def receive(self, patience: float) -> dict:
        try:
            self.socket.settimeout(patience)
            return receive(self.socket)
        except (OSError, EOFError, ValueError):
            raise Broken("the zygote died") from None

    def start(self, limits: dict, files: list[int]) -> None:
        if self.running:
            self.stop()
        message = json.dumps({**limits, "wall": _wall(limits), "files": len(files)}).encode()
        try:
            socket.send_fds(self.socket, [struct.pack("<I", len(message)) + message], files)
        except OSError:
            raise Broken("the zygote died") from None
        self.running = True

    def stop(self) -> dict:
        """End the running program; how it ended."""
        self.running = False
        try:
            self.socket.settimeout(10)
            self.socket.sendall(struct.pack("<I", 4) + b'"go"')
        except OSError:
            raise Broken("the zygote died") from None
        return self.receive(10)

    def restart(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.spawn()


class Broken(Exception):
    """The zygote is gone."""


def receive(connection: socket.socket) -> Any:
    """One message of a trusted peer."""
    size, = struct.unpack("<I", _exactly(connection, 4))
    return json.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def send(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(body)) + body)


def judge_main(folder: str, namespaces: bool) -> None:
    """The judge's loop: a problem and a program in, a result out."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for number in (0, 1):  # test code that reads or prints must not touch the trainer's pipes
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    prctl(PR_SET_DUMPABLE, 0)  # no other process of the same user may look into the answers
    signal.signal(signal.SIGALRM, late)
    zygote, plans = Zygote(folder, namespaces), {}
    sys.modules["pytest"] = types.SimpleNamespace(
        raises=raises, approx=approx, fail=fail, mark=types.SimpleNamespace(parametrize=parametrize))

    def reply(message: dict) -> None:
        body = json.dumps(message).encode()
        sink.write(struct.pack("<I", len(body)) + body)
        sink.flush()

    reply({"warnings": zygote.warnings})
    while head := source.read(4):
        problem = source.read(struct.unpack("<I", head)[0])
        code, limits, verdict = json.loads(source.read(struct.unpack("<I", source.read(4))[0]))
        key = hashlib.sha256(problem).digest()
        if key not in plans:
            if len(plans) > 200:
                plans.clear()
            try:
                plans[key] = Plan(*[unpack(field) for field in json.loads(problem)])
            except Unscorable as error:
                plans[key] = error
        reply(judge(plans[key], code, limits, verdict, zygote))


def judge(plan: Plan | Unscorable, code: str, limits: dict, verdict: list | None, zygote: Zygote) -> dict:
    """Run one program; if the zygote breaks meanwhile, once more with a new one."""
    if isinstance(plan, Unscorable):
        return unscorable(plan)
    for attempt in (1, 2):
        run = Run(plan, code, limits, zygote)
        try:
            if verdict:
                run.trouble = verdict
            else:
                {"functional": run.functional, "stdin": run.stdin, "assert": run.asserts}[plan.kind]()
            return run.summary()
        except Unscorable as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return unscorable(error)
        except (Broken, Died) as error:  # Died: the timer struck between two steps
            signal.setitimer(signal.ITIMER_REAL, 0)
            run.program = None
            verdict = error.args if isinstance(error, Died) else ["error", "The program broke the executor twice."]
            verdict = None if attempt == 1 and isinstance(error, Broken) else verdict
            zygote.restart()
    run = Run(plan, code, limits, zygote)
    run.trouble = verdict
    return run.summary()


def unscorable(error: Unscorable) -> dict:
    return dict(passed=0, total=0, reward=0.0, status="unscorable", tests=[], public_passed=False,
                feedback=escape(f"This problem cannot be scored: {error}"))


# ---- the zygote: forks, limits, kills; sees no test and no program --------------------------------------------------

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
PRELOADED = """abc array base64 bisect calendar cmath collections concurrent.futures contextlib copy csv dataclasses
    datetime decimal enum fractions functools hashlib heapq io itertools json math numbers operator os pprint queue random
    re secrets statistics string struct sys tempfile textwrap threading time traceback types typing unicodedata uuid"""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
CLONE_NEWUSER, CLONE_NEWALL = 0x10000000, 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mnt uts ipc pid net


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int, pointer=None) -> bool:
    return sys.platform == "linux" and _libc().prctl(option, ctypes.c_ulong(value), pointer, 0, 0) == 0


def call(name: str, *args) -> None:
    """A function of the C library; raises OSError with its name."""
    if getattr(_libc(), name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


def enter_namespaces(folder: str) -> None:
    """Own user (unless root), mount, pid, net, ipc namespaces, and a private root: python read-only, a small /tmp."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWALL | (CLONE_NEWUSER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()  # the first process in the new pid namespace is its init: when it dies, all in it die
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    needed = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/nix/store"]
    needed += [sys.base_prefix, sys.prefix, *filter(os.path.isdir, sys.path)]
    needed += [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    bound = []
    for path in needed:
        inside = folder + path
        if not os.path.exists(path) or any(path == done or path.startswith(done + "/") for done in bound):
            continue
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
            continue
        os.makedirs(inside if os.path.isdir(path) else os.path.dirname(inside), exist_ok=True)
        if not os.path.isdir(path):
            open(inside, "w").close()
        mount(path, inside, None, MS_BIND | MS_REC)
        if not path.startswith("/dev/"):
            keep = os.statvfs(path).f_flag & (8 | 1024 | 2048)  # noexec, noatime, nodiratime may be locked
            mount("none", inside, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | keep)
        bound.append(path)
    for name in ("proc", "tmp"):
        os.mkdir(f"{folder}/{name}")
    for name, target in (("dev/stdin", "/proc/self/fd/0"), ("dev/stdout", "/proc/self/fd/1"), ("dev/shm", "/tmp"),
                         ("dev/fd", "/proc/self/fd")):
        os.symlink(target, f"{folder}/{name}")
    try:
        mount("proc", folder + "/proc", "proc", MS_NOSUID | MS_NODEV | 8, "hidepid=2")
    except OSError:
        pass  # a container that hides parts of /proc: programs do without it
    mount("tmpfs", folder + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, SCRATCH)
    os.chdir(folder)
    libc = _libc()
    if libc.syscall({"x86_64": 155, "aarch64": 41}[os.uname().machine], b".", b".") != 0:  # pivot_root
        raise OSError(ctypes.get_errno(), "pivot_root")
    call("umount2", b".", 2)
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    os.chdir("/tmp")


SCRATCH = "size=64m,nr_inodes=4096,mode=1777"


def _empty(folder: str) -> None:
    """Remove what is in a folder; no recursion, so that a folder 10,000 deep is no problem: pull it up, level by level."""
    again, number = True, 0
    while again:
        again = False
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                number, again = number + 1, True
                os.rename(os.path.join(path, inner), os.path.join(folder, f".gone-{os.getpid()}-{number}"))
            os.rmdir(path)


DENIED = dict(  # system calls that a program has no use for, as (x86_64, aarch64) numbers
    ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), process_madvise=(440, 440),
    kcmp=(312, 272), pidfd_open=(434, 434), pidfd_getfd=(438, 438), pidfd_send_signal=(424, 424), tkill=(200, 130),
    rt_sigqueueinfo=(129, 138), rt_tgsigqueueinfo=(297, 240), setpriority=(141, 140), sched_setscheduler=(144, 119),
    sched_setparam=(142, 118), sched_setattr=(314, 274), ioprio_set=(251, 30), migrate_pages=(256, 238),
    move_pages=(279, 239), mount=(165, 40), umount2=(166, 39), pivot_root=(155, 41), chroot=(161, 51), open_tree=(428, 428),
    move_mount=(429, 429), fsopen=(430, 430), fsconfig=(431, 431), fsmount=(432, 432), fspick=(433, 433),
    mount_setattr=(442, 442), unshare=(272, 97), setns=(308, 268), add_key=(248, 217), request_key=(249, 218),
    keyctl=(250, 219), bpf=(321, 280), perf_event_open=(298, 241), userfaultfd=(323, 282), io_uring_setup=(425, 425),
    shmget=(29, 194), semget=(64, 190), msgget=(68, 186), mq_open=(240, 180), memfd_create=(319, 279),
    memfd_secret=(447, 447), open_by_handle_at=(304, 265), personality=(135, 92), connect=(42, 203))
ARGUMENT = dict(kill=(62, 129), tgkill=(234, 131), clone=(56, 220), socket=(41, 198), prlimit64=(302, 261),
                sched_setaffinity=(203, 122), fork=(57, 0), vfork=(58, 0))


def syscall_filter(pid: int) -> bytes:
    """The seccomp program (classic BPF). pid: without namespaces the only process that a program may signal, and it may
    start threads but no processes, since nothing else could be sure to find them; 0: it has namespaces of its own."""
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    LOAD, EQUAL, ABOVE, BITS, RETURN, DENY, ALLOW, NO_SUCH = 0x20, 0x15, 0x35, 0x45, 6, 0x50001, 0x7FFF0000, 0x50026
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, (0xC000003E, 0xC00000B7)[column]), (RETURN, 0, 0, 0x80000000), (LOAD, 0, 0, 0)]
    code += [(ABOVE, 0, 1, 0x40000000), (RETURN, 0, 0, NO_SUCH)]  # the x32 numbers of the same calls
    for numbers in DENIED.values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, DENY)]
    code += [(EQUAL, 0, 1, 435), (RETURN, 0, 0, NO_SUCH)]  # clone3 hides its flags; the C library falls back to clone
    new = (BITS, 0, 1, CLONE_NEWUSER | CLONE_NEWALL | 0x2000000)
    rules = [("clone", (BITS, 1, 0, 0x10000) if pid else new), ("socket", (EQUAL, 1, 0, socket.AF_UNIX)),
             ("prlimit64", (EQUAL, 1, 0, 0)), ("sched_setaffinity", (EQUAL, 1, 0, 0))]
    if pid:
        rules += [("kill", (EQUAL, 1, 0, pid)), ("tgkill", (EQUAL, 1, 0, pid))]
        code += [x for name in ("fork", "vfork") if ARGUMENT[name][column]
                 for x in ((EQUAL, 0, 1, ARGUMENT[name][column]), (RETURN, 0, 0, DENY))]
    for name, rule in rules:  # the first argument decides
        code += [(EQUAL, 0, 4, ARGUMENT[name][column]), (LOAD, 0, 0, 16), rule, (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in [*code, (RETURN, 0, 0, ALLOW)])


class Rights:
    """What a candidate gives up after the fork, and what of it this system lets us do (warnings: what not)."""

    def __init__(self, folder: str, namespaces: bool, number: int) -> None:
        self.namespaces, self.uid, self.warnings, self.filter = namespaces, 0, [], b""
        self.folder = "/tmp" if namespaces else os.path.join(folder, "scratch")
        with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else io.StringIO("0") as file:
            self.base = int(file.read().split()[0]) * resource.getpagesize()
        if sys.platform == "linux":
            try:
                syscall_filter(0)
            except KeyError:
                self.warnings.append("system calls are not filtered on this kind of processor")
            else:
                self.filter = b"yes"
        else:
            self.warnings.append("only limits and process groups protect this system from the programs")
        if os.getuid() == 0:
            self.uid = 50_000 + number % 10_000
        self.clean()
        for attempt in range(3):
            fault = self.probe()
            if not fault:
                break
            if attempt == 0 and self.filter:
                self.filter = self.filter and b""
                if not self.probe():
                    self.warnings.append(f"system calls are not filtered ({fault})")
                    break
                self.filter = b"yes"
            self.uid = 0
            self.warnings.append(f"programs run with your own user id ({fault})")
        self.warnings[:] = dict.fromkeys(self.warnings)

    def probe(self) -> str:
        """Drop the rights in a child and look whether Python still works there; what failed, or nothing."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            fault = "a program cannot be run"
            try:
                self.drop(dict(seconds=5, memory_mb=512, output_bytes=1 << 20))
                with open(os.__file__):
                    fault = ""
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            os.write(writer, fault.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            fault = file.read()
        status = os.waitpid(child, 0)[1]
        return fault or (f"the probe ended with {status}" if status else "")

    def drop(self, limits: dict) -> None:
        """In the candidate, before anything of the program is read."""
        os.setsid()
        os.chdir(self.folder)
        bounds = [("CPU", math.ceil(limits["seconds"]) + 1), ("CORE", 0), ("NOFILE", 128), ("FSIZE", 64 << 20),
                  ("AS", self.base + int(limits["memory_mb"] * (1 << 20)))]
        bounds += [("NPROC", 64)] if self.namespaces else []
        for name, value in bounds:
            limit = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(limit)[1]
            try:
                resource.setrlimit(limit, (value, value) if hard < 0 or value < hard else (hard, hard))
            except (ValueError, OSError):
                if not self.warnings:
                    self.warnings.append(f"this system does not limit {name}")
        if self.uid:
            os.setgroups([])
            os.setgid(self.uid)
            os.setuid(self.uid)
        if sys.platform == "linux":
            libc = _libc()
            libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24))
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            prctl(PR_SET_DUMPABLE, 1)
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            if self.filter:
                code = ctypes.create_string_buffer(syscall_filter(0 if self.namespaces else os.getpid()))
                program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", (len(code) - 1) // 8, ctypes.addressof(code)))
                if not prctl(PR_SET_SECCOMP, 2, program):
                    raise OSError("seccomp")

    def kill(self, child: int) -> int:
        """End the program and all that it started; the exit code of the program (negative: a signal)."""
        code = 0
        try:
            os.kill(-1 if self.namespaces else child, signal.SIGKILL)  # as init: everything else in our namespace
        except ProcessLookupError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return code
            if pid == child:
                code = os.waitstatus_to_exitcode(status)

    def clean(self) -> None:
        """Give the next program an empty scratch folder."""
        if self.namespaces:
            state = os.stat("/tmp")
            state = state.st_ctime_ns, state.st_mode, os.listdir("/tmp")
            if state != getattr(self, "state", None):
                call("umount2", b"/tmp", 2)
                mount("tmpfs", "/tmp", "tmpfs", 2 | 4, SCRATCH)
                state = os.stat("/tmp")
                self.state = state.st_ctime_ns, state.st_mode, []
            return
        if os.path.islink(self.folder) or not os.path.isdir(self.folder):
            if os.path.lexists(self.folder):
                os.unlink(self.folder)
            os.mkdir(self.folder)
        os.chmod(self.folder, 0o700)
        if self.uid:
            os.chown(self.folder, self.uid, self.uid)
        _empty(self.folder)

    def usage(self, child: int) -> tuple[float, float]:
        """CPU seconds of the program and resident bytes of all that it started."""
        try:
            cpu = time.clock_gettime(~child << 3 | 2) if sys.platform == "linux" else 0.0
        except OSError:  # it has ended
            return 0.0, 0.0
        pages = 0
        for name in os.listdir("/proc") if self.namespaces else ():
            if name.isdigit() and name != "1":
                try:
                    with open(f"/proc/{name}/statm") as file:
                        pages += int(file.read().split()[1])
                except OSError:
                    pass  # ended meanwhile
        return cpu, pages * resource.getpagesize()


def zygote_main(number: int, folder: str, mode: str) -> None:
    """The zygote's loop: fork a candidate, watch its limits, end it when the judge says so, report, clean up."""
    control, identity = socket.socket(fileno=number), os.getpid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in PRELOADED.split():
        __import__(name)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an init without handlers cannot be signalled from inside
    try:
        if mode == "namespaces":
            enter_namespaces(folder)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_DUMPABLE, 0)
        rights = Rights(folder, mode == "namespaces", identity)
    except OSError as error:
        send(control, {"error": f"{error.strerror or error}"})
        os._exit(1)
    send(control, {"warnings": rights.warnings})
    os.dup2(0, 2)  # stderr was the judge's log, for a start that fails
    sys.argv[:] = [""]
    os.environ.pop("PYTHONHASHSEED")
    gc.collect()
    gc.freeze()  # a candidate's collector never touches, and so never copies, the pages that it shares with us
    gc.disable()
    while True:
        head, files, _, _ = socket.recv_fds(control, 4, 3)
        if len(head) < 4:
            os._exit(0)  # the judge is gone
        limits = json.loads(_exactly(control, struct.unpack("<I", head)[0]))
        begin, child = time.monotonic(), os.fork()
        if not child:
            control.close()
            candidate(files, limits, rights)
        for file in files:
            os.close(file)
        why, tick = None, 0.1
        while not select.select([control], [], [], tick)[0]:
            cpu, memory = rights.usage(child)
            why = why or ("timeout" if cpu > limits["seconds"] or time.monotonic() - begin > limits["wall"] else
                          "memory" if memory > 2 * limits["memory_mb"] * (1 << 20) else None)
            if why:
                os.kill(-1 if rights.namespaces else child, signal.SIGKILL)
            tick = max(0.005, min(0.1, limits["seconds"] - cpu))
        if receive(control) != "go":
            os._exit(1)
        code = rights.kill(child)
        if code == -signal.SIGXCPU:
            why = "timeout"
        rights.clean()
        send(control, {"why": why, "code": code})


# ---- the candidate: runs the model's program, holds nothing worth stealing -------------------------------------------


class Candidate:
    """Defines the program and answers the judge's requests. All of it is in the program's power; it cannot harm."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.objects, self.numbers, self.classes = connection, [], {}, ()

    def work(self) -> None:
        hello = receive(self.connection)
        self.module = module = types.ModuleType(hello["name"])
        self.classes, self.keep = set(hello.get("classes", ())), hello.get("objects", False)
        sys.modules[hello["name"]] = module  # dataclasses look their module up there
        main = hello["name"] == "__main__"
        try:
            if hello["context"]:
                exec(compile(hello["context"], "<context>", "exec"), module.__dict__)
            exec(compile(hello["code"].removeprefix("\ufeff"), "<solution>", "exec"), module.__dict__)
        except SystemExit as error:
            if not main or error.code not in (None, 0):
                self.reply({"error": describe(error)}, main)
        except BaseException as error:
            self.reply({"error": describe(error)}, main)
        if main:
            for thread in threading.enumerate():
                if not thread.daemon and thread is not threading.current_thread():
                    thread.join()
            atexit._run_exitfuncs()
            self.reply({"value": None}, True)
        self.reply({"value": None})
        if "calls" in hello:
            for args in hello["calls"]:
                self.reply(self.perform(lambda: (self.function(hello["entry"])(*unpack(args)), ())))
        while True:
            self.handle(receive(self.connection))

    def reply(self, message: dict, last: bool = False) -> None:
        if last:
            try:
                sys.stdout.flush()
            except (OSError, ValueError):
                pass  # closed by the program
        send(self.connection, message)
        if last or "error" in message and not hasattr(self, "module"):
            os._exit(0)

    def function(self, name: str) -> Any:
        """A function of the program, or the method of that name of its class Solution."""
        space = self.module.__dict__
        owner, _, method = name.rpartition(".")
        if not owner and name in space:
            return space[name]
        owner = space.get(owner or "Solution")
        if owner is None:
            raise NameError(f"name '{name}' is not defined")
        return getattr(owner(), method)

    def perform(self, action) -> dict:
        try:
            value, changes = action()
            message = {"value": pack(value, self.foreign)}
            if changes:
                message["changes"] = changes
            return message
        except BaseException as error:
            return {"error": describe(error)}

    def handle(self, request: list) -> None:
        kind, target, *rest = request

        def action():
            subject = unpack(target, self.native)
            if kind == "call":
                args, kwargs = unpack(rest[0], self.native), unpack(rest[1], self.native)
                value = subject(*args, **kwargs)
                if value is not None:
                    return value, ()
                return None, [[place, new] for place, (arg, old) in enumerate(zip(args, rest[0]))  # changed in place
                              if type(arg) in (list, dict, set, bytearray) and (new := pack(arg, self.foreign)) != old]
            if kind == "get":
                return getattr(subject, rest[0]), ()
            if kind == "set":
                return setattr(subject, rest[0], unpack(rest[1], self.native)), ()
            if kind == "next":
                return next(subject), ()
            name, args = rest[0].strip("_"), unpack(rest[1], self.native)
            if name in ("iter", "len", "str", "repr", "bool", "int", "float", "round"):
                return getattr(builtins, name)(subject, *args), ()
            if name[0] == "r" and name[1:] in OPERATORS:
                return getattr(operator, f"__{name[1:]}__")(args[0], subject), ()
            if hasattr(operator, rest[0]):
                return getattr(operator, rest[0])(subject, *args), ()
            return getattr(subject, rest[0])(*args), ()

        self.reply(self.perform(action))

    def native(self, tag: str, inside: Any) -> Any:
        if tag == "ref" and isinstance(inside, str):
            if inside not in self.module.__dict__:
                raise NameError(f"name '{inside}' is not defined")
            return self.module.__dict__[inside]
        if tag == "ref":
            return self.objects[inside]
        if tag == "global":
            return operator.attrgetter(inside[1])(sys.modules.get(inside[0]) or __import__(inside[0]))

        def function(*args, **kwargs):  # one of the test's own functions: the judge runs it
            send(self.connection, {"callback": inside, "args": pack(list(args), self.foreign),
                                   "kwargs": pack(kwargs, self.foreign)})
            while True:
                message = receive(self.connection)
                if type(message) is dict:
                    break
                self.handle(message)
            if "error" in message["reply"]:
                raise rebuild(*message["reply"]["error"])
            return unpack(message["reply"]["value"], self.native)

        return function

    def foreign(self, x: Any, depth: int) -> Any:
        """Pack what is no plain data: an object of a class that the tests know stays here and gets a number."""
        names = [kind.__name__ for kind in type(x).__mro__]
        known = self.keep and not self.classes.isdisjoint(names)
        if not known and type(x).__module__.partition(".")[0] == "numpy" and hasattr(x, "tolist"):
            return pack(x.tolist(), self.foreign, depth)
        for base, plain in PLAIN.items():
            if not known and isinstance(x, base):
                return pack(plain(x), self.foreign, depth)
        iterator = isinstance(x, (collections.abc.Iterator, collections.abc.KeysView, collections.abc.ValuesView,
                                  collections.abc.ItemsView))
        function = isinstance(x, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial))
        if not (known or iterator or function or self.keep):
            return {"opaque": type(x).__name__[:60]}
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.objects)
            self.objects.append(iter(x) if iterator and not known else x)
        number = self.numbers[id(x)]
        return {"iterator": number} if iterator and not known else {"object": [number, names[:50]]}


PLAIN = {bool: bool, int: int.__index__, float: float.__float__, complex: complex.__complex__ if hasattr(
    complex, "__complex__") else complex, str: str.__str__, bytes: bytes, bytearray: bytearray, list: list, tuple: tuple,
    dict: dict, set: set, frozenset: frozenset, collections.deque: collections.deque}


def candidate(files: list, limits: dict, rights: Rights) -> None:
    """In the child: no rights, no descriptors but its own, then the program."""
    try:
        for place, file in enumerate(files[1:]):
            os.dup2(file, place)
        os.dup2(files[0], 3) if files[0] != 3 else None
        os.closerange(4, 64)
        rights.drop(limits)
        gc.enable()
        Candidate(socket.socket(fileno=3)).work()
    finally:
        os._exit(0)  # whatever happened: never back into the zygote's loop


def self_check() -> None:
    """Score programs of known verdict; raises RuntimeError if the executor judges one of them falsely."""
    problem = types.SimpleNamespace(kind="functional", tests=[[[2, 3], 5]], public_tests=[], entry_point="add")
    wanted = {"def add(a, b): return a + b": "passed", "def add(a, b): return a - b": "failed",
              "def add(a, b):\n    while True: pass": "timeout", "import sys; sys.exit(0)": "error",
              "import os; os._exit(0)": "error"}
    for (code, status), result in zip(wanted.items(), run_many([(problem, code) for code in wanted], seconds=0.5)):
        if result.status != status or (result.reward == 1) != (status == "passed"):
            raise RuntimeError(f"executor: the self-check failed: {code!r} was judged {result.status} (reward "
                               f"{result.reward:g}) instead of {status}; its rewards cannot be trusted on this system. "
                               f"Feedback: {result.feedback}")


def main() -> None:
    if sys.argv[1:2] == ["--judge"]:
        judge_main(sys.argv[2], sys.argv[3] == "1")
    elif sys.argv[1:2] == ["--zygote"]:
        zygote_main(int(sys.argv[2]), *sys.argv[3:])
    else:
        self_check()


if __name__ == "__main__":
    main()
