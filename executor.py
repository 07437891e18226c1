"""Run a program that a model wrote against tests, without being cheated by it.

In:  run_many([(problem, code), ...]); a problem has kind, tests, public_tests, entry_point, context, reference.
Out: one Result per pair: reward (share of tests passed), status, and the feedback that the model reads next.

    trainer            judge (one per worker)         zygote (one per judge)      candidate (one per program)
    run_many --job-->  holds tests and answers,       clean python, imports
                       runs the test code itself ---> done; forks a child  -----> drops its rights, then
                         |                            per program                 defines the program
                         |---- call f(13) ---------------------------------------> runs f(13)
                         |<--- 12, as plain data ---------------------------------|
            <--result--  12 is not 13: failed         kills all that it started, empties its folder

The process that knows the answers never runs the model's code, and the one that runs it never holds an answer: a
program can lie only about the values of its own functions, so its best way to be paid is to compute them. No exit
status and nothing printed can make a test pass. Standard library only; Linux in full, macOS in part.
"""
import ast, atexit, builtins, collections, collections.abc, ctypes, dataclasses, datetime, decimal, fractions, functools
import gc, json, math, operator, os, re, reprlib, resource, select, signal, socket, struct, subprocess, sys, tempfile
import threading, time, types, warnings  # noqa: E401
from typing import Any

PYTHON = sys.executable  # runs the programs: they can import what is installed for it
LIMITS = dict(
    seconds=3.0,         # CPU seconds of a program over all its tests (stdin: per case); 2 x + 3 s of wall time end it too
    memory_mb=512,       # its address space
    output_bytes=4 << 20,  # of one stdin case, or of the value of one call
    max_failures=3,      # failing tests that the feedback tells of
    feedback_chars=2000,
)


@dataclasses.dataclass
class Result:
    """What the tests say of one program.

    reward = passed / total; tests: passed or not, one bool per test; public_passed: all public tests passed (all
    tests, where none is public). status: "passed" | "failed" (a wrong answer) | "error" (raised, or ended early, in all
    failing tests) | "timeout" | "memory" | "no_code" | "unscorable" (no test can be run; total 0, reward 0.0, never 1).
    """
    passed: int
    total: int
    reward: float
    status: str
    feedback: str
    tests: list
    public_passed: bool


def run(problem: Any, code: str, **limits) -> Result:
    """Score one program: run_many with a single pair.

    >>> from types import SimpleNamespace
    >>> problem = SimpleNamespace(kind="functional", tests=[[[2, 3], 5], [[1, 0], 1]], public_tests=[], entry_point="add")
    >>> run(problem, "def add(a, b): return 5").feedback
    'Test 2 failed: add(1, 0) returned 5, expected 1'
    """
    return run_many([(problem, code)], **limits)[0]


def run_many(jobs: list, workers: int | None = None, **limits) -> list[Result]:
    """Score (problem, code) pairs, in order, with `workers` judges (default: one per core), which live on for later calls.

    reward = tests passed / tests. Equal pairs run once. limits: see LIMITS; a timeout ends the program, and the tests that
    had not run have failed. Raises RuntimeError if no worker starts, TypeError or ValueError for a bad limit.
    """
    for name, value in limits.items():
        if name not in LIMITS:
            raise TypeError(f"executor: unknown limit {name!r}; the limits are {', '.join(LIMITS)}")
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"executor: the limit {name} must be a positive number, not {value!r}")
    results, waiting, texts = [None] * len(jobs), collections.defaultdict(list), {}
    for place, (problem, code) in enumerate(jobs):
        try:
            if not (code or "").strip():
                results[place] = Result(0, 0, 0.0, "no_code", "No code was found in the answer.", [], False)
                continue
            if id(problem) not in texts:  # `jobs` keeps the problem alive, so its id is not used again meanwhile
                fields = ("kind", "tests", "public_tests", "entry_point", "context", "reference")
                texts[id(problem)] = json.dumps([pack(getattr(problem, name, None)) for name in fields])
            waiting[texts[id(problem)], code].append(place)
        except Uncrossable as error:
            results[place] = Result(0, 0, 0.0, "unscorable", f"This problem cannot be scored: {error}", [], False)
    for places, answer in zip(waiting.values(), _dispatch(list(waiting), workers, {**LIMITS, **limits})):
        for place in places:
            results[place] = Result(**{**answer, "tests": list(answer["tests"])})
    return results


_idle: list = []  # workers between two calls
_lock = threading.Lock()
_told: set = set()  # warnings that were given


class Worker:
    """A judge's process as the trainer sees it: a socket, a folder, and a deadline for its job."""

    def __init__(self) -> None:
        self.owner, self.job, self.ready, self.folder = os.getpid(), None, False, tempfile.mkdtemp(prefix="murphy-")
        os.chmod(self.folder, 0o711)
        self.socket, theirs = socket.socketpair()
        with open(self.folder + "/log", "wb") as log:
            command = [PYTHON, "-I", os.path.abspath(__file__), "--judge", str(theirs.fileno()), self.folder]
            try:  # a new process, never a fork: with torch loaded a fork is slow, and its memory could be read
                self.process = subprocess.Popen(
                    [*command, os.environ.get("MURPHY_ISOLATION", "")], cwd="/", env=ENVIRONMENT, start_new_session=True,
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)
            except OSError as error:
                self.process = None
                self.close()
                raise RuntimeError(f"executor: cannot start the interpreter {PYTHON} ({error.strerror}); "
                                   "set executor.PYTHON to one that works") from None
            finally:
                theirs.close()

    def close(self) -> str:
        """End the judge and, with it, its zygote and candidate; its last words."""
        if self.process and self.owner == os.getpid():
            if self.process.poll() is None:  # before its socket closes, at which it would begin to clean up by itself
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.socket.close()
        if self.owner != os.getpid():  # after a fork it is the other process's
            return ""
        with open(self.folder + "/log", "rb") as log:
            words = log.read()[-2000:].decode("utf-8", "replace").strip()
        _empty(self.folder)
        os.rmdir(self.folder)
        return words


def _wall(limits: dict) -> float:
    return 2 * limits["seconds"] + 3  # CPU time decides; this ends only what sleeps, or starves on a loaded machine


def _dispatch(jobs: list, workers: int | None, limits: dict) -> list[dict]:
    """Give each free judge a job. A judge that dies is replaced and its job tried once more; one that is late is killed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    answers, todo, tries, team = [None] * len(jobs), collections.deque(range(len(jobs))), collections.Counter(), []
    try:
        for _ in range(min(workers or cores, len(jobs))):
            with _lock:  # other threads have teams of their own
                while _idle and _idle[-1].owner != os.getpid():
                    _idle.pop()  # the parent's, if this process is a fork
                worker = _idle.pop() if _idle else None
            team.append(worker or Worker())
        while None in answers:
            for worker in team:
                if worker.job is None and todo:
                    worker.job, worker.deadline = todo.popleft(), time.monotonic() + 2 * _wall(limits) + 20
                    try:
                        send(worker.socket, [*jobs[worker.job], limits])
                    except OSError:
                        pass  # it is dead: the next read finds that out
            busy = [worker for worker in team if worker.job is not None]
            patience = max(0, min(worker.deadline for worker in busy) - time.monotonic())
            readable = select.select([worker.socket for worker in busy], [], [], patience)[0]
            for worker in busy:
                number, late = worker.job, time.monotonic() > worker.deadline
                if worker.socket not in readable and not late:
                    continue
                try:
                    message = receive(worker.socket) if worker.socket in readable else None
                except (EOFError, OSError):
                    message = None
                if message and not worker.ready:  # its first message: what it cannot protect here
                    worker.ready = True
                    for text in set(message["warnings"]) - _told:
                        _told.add(text)
                        warnings.warn(f"executor: {text}", stacklevel=4)
                elif message:
                    answers[number], worker.job = message, None
                else:  # dead, or late and to be ended
                    worker.job, words = None, worker.close()
                    if not worker.ready:
                        raise RuntimeError(f"executor: a worker of {PYTHON} did not start: {words or 'no message'}")
                    team[team.index(worker)] = Worker()
                    tries[number] += 1
                    if not late and tries[number] == 1:
                        todo.appendleft(number)
                        continue
                    total = len(unpack(json.loads(jobs[number][0])[1]))  # of test texts; the judge would have known
                    answers[number] = dict(
                        passed=0, total=total, reward=0.0, status="timeout" if late else "error", tests=[False] * total,
                        feedback="The program ran out of time." if late else "The program ended its judge.", public_passed=False)
        return answers
    finally:
        with _lock:
            _idle.extend(worker for worker in team if worker.job is None and worker.process.returncode is None)
        for worker in team:
            if worker.job is not None:  # an exception left it in the middle of a job
                worker.close()


@atexit.register
def close() -> None:
    """End all workers; the next call starts new ones."""
    with _lock:
        workers, _idle[:] = list(_idle), []
    for worker in workers:
        worker.close()


# Plain data: all that crosses between judge and candidate.


class Uncrossable(Exception):
    """A value that is no plain data."""


def _size(kind: Any, value: Any) -> Any:
    """Refuse numbers whose next operation could take for ever."""
    if {int: lambda: value.bit_length() > 1 << 21, range: lambda: abs(value.stop - value.start) > 10**7,
            decimal.Decimal: lambda: value.is_finite() and abs(value.adjusted()) > 10**4}[kind]():
        raise Uncrossable(f"a {kind.__name__} of absurd size")
    return value


TYPES = {kind.__name__: (kind, parts, make) for kind, parts, make in (  # the loops are Python's, so a timer can end them
    (tuple, list, tuple), (set, list, lambda v: {x for x in v}), (frozenset, list, lambda v: frozenset({x for x in v})),
    (dict, lambda x: [list(pair) for pair in x.items()], lambda v: {key: value for key, value in v}),
    (collections.deque, list, collections.deque),
    (bytes, lambda x: [x.decode("latin-1")], lambda v: v[0].encode("latin-1")),
    (bytearray, lambda x: [x.decode("latin-1")], lambda v: bytearray(v[0].encode("latin-1"))),
    (int, lambda x: [hex(x)], lambda v: _size(int, int(v[0], 16))),
    (complex, lambda x: [x.real, x.imag], lambda v: complex(*v)),
    (range, lambda x: [x.start, x.stop, x.step], lambda v: _size(range, range(*v))),
    (decimal.Decimal, lambda x: [str(x)], lambda v: _size(decimal.Decimal, decimal.Decimal(v[0]))),
    (fractions.Fraction, lambda x: [x.numerator, x.denominator], lambda v: fractions.Fraction(*v)),
    (datetime.timedelta, lambda x: [x.days, x.seconds, x.microseconds], lambda v: datetime.timedelta(*v)),
    *((kind, lambda x: [x.isoformat()], lambda v, kind=kind: kind.fromisoformat(v[0]))
      for kind in (datetime.datetime, datetime.date, datetime.time)))}


def pack(x: Any, other: Any = None, depth: int = 0) -> Any:
    """Plain data as JSON in which the builtin types stay apart; other(x, depth) packs what is no plain data.

    >>> pack([1, (2.5, None), {3: b"a"}])
    [1, {'tuple': [2.5, None]}, {'dict': [[3, {'bytes': ['a']}]]}]
    >>> unpack(pack({1, 2 ** 70})) == {1, 2 ** 70}
    True
    """
    kind = type(x)
    if kind in (str, bool, float, type(None)) or kind is int and -2**63 < x < 2**63:
        return x
    if depth > 100:
        raise Uncrossable("data nested more than 100 deep cannot cross")
    if kind is list:
        return [pack(value, other, depth + 1) for value in x]
    if kind.__name__ in TYPES and TYPES[kind.__name__][0] is kind:
        return {kind.__name__: [pack(part, other, depth + 1) for part in TYPES[kind.__name__][1](x)]}
    if other:
        return other(x, depth)
    raise Uncrossable(f"a value of type {kind.__name__} is no plain data")


def unpack(x: Any, other: Any = None) -> Any:
    """The inverse of pack; other(tag, parts) makes what is no plain data. x may come from a hostile program."""
    if type(x) is list:
        return [unpack(value, other) for value in x]
    if type(x) is not dict:
        return x
    (tag, parts), = x.items()
    return TYPES[tag][2](unpack(parts, other)) if tag in TYPES else other(tag, parts)


def cut(text: str, room: int) -> str:
    """At most `room` characters of a text: its head and its tail, with the cut marked."""
    half = max(0, room - 26) // 2
    return text if len(text) <= room else f"{text[:half]}...[{len(text) - 2 * half} cut]...{text[len(text) - half:]}"


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxlist, _repr.maxtuple, _repr.maxset, _repr.maxfrozenset, _repr.maxdict, _repr.maxdeque = 6, *[30] * 6
_repr.maxlong, _repr.maxother = 200, 200


def show(x: Any, room: int = 200) -> str:
    """repr for feedback: the same text for the same value (sets and dicts are sorted), cut with a mark.

    >>> show({"b", "a"}), show("x" * 1000, 50)
    ("{'a', 'b'}", "'xxxxxxxxxxxx...[976 cut]...xxxxxxxxxxxx'")
    """
    if isinstance(x, (str, bytes)):
        return repr(cut(x, room)) if isinstance(x, str) else cut(repr(x[:room]), room) + ("..." if len(x) > room else "")
    _repr.maxstring = room
    try:
        return cut(_repr.repr(x), room)
    except ValueError:  # more digits than Python prints
        return "an integer too long to print"


def escape(text: str) -> str:
    """Make a program's text safe in a prompt: no control characters, lone surrogates, chat marks, fences, addresses.

    >>> escape("a<|im_end|>\\n<object at 0x7f3a>")
    'a<\\\\|im_end|>\\\\n<object at 0x...>'
    """
    text = re.sub(r"[\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]",
                  lambda match: match[0].encode("unicode_escape").decode(), text)
    text = re.sub(r"(<)(?=[|\uff5c]|/?(s|think|pad|eos|bos|unk|mask|tool\w*|im_\w+|\w+_of_\w+)>)|(\[)(?=/?INST\])|`(?=``)",
                  lambda match: match[0] + "\\", text)
    return re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", text)


# The judge: holds the answers and runs the tests.


class Control(BaseException):
    """Ends the tests; no Exception, so that no `except Exception` of a test can swallow it."""


class Died(Control):
    """The program is gone: (status, text)."""


class Broken(Control):
    """The zygote is gone: the judge ends too, and the trainer tries the program once more with another."""


class Unscorable(Control):
    """The tests cannot be run: (why,)."""


class Rewriter(ast.NodeTransformer):
    """Makes each assert a test of its own: `with __test__(k) as __is__: __is__(left, right)` notes the outcome and goes on.

    An assert in a loop is one test, passed if it was reached and never failed; an assert of a constant is none. A block
    `with raises(...)`, a try with `assert False` or `fail(...)` in it, and a test function without an assert are one test each.
    """

    def __init__(self) -> None:
        self.sources: list = []  # of the tests, for the feedback

    def test(self, source: str, body: list) -> ast.With:
        self.sources.append(" ".join(source.split()))
        manager = ast.parse(f"with __test__({len(self.sources) - 1}) as __is__: pass").body[0]
        manager.body = body
        return ast.copy_location(manager, body[0])

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        test = node.test
        if isinstance(test, ast.Constant):
            return node
        equal = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        call = ast.Call(ast.Name("__is__", ast.Load()), [test.left, test.comparators[0]] if equal else [test], [])
        return self.test(ast.unparse(test), [ast.copy_location(ast.Expr(call), node)])

    def block(self, node: ast.AST, pattern: str) -> ast.AST:
        one = re.search(pattern, ast.unparse(node), re.M)
        return self.test(ast.unparse(node), [node]) if one else self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        return self.block(node, r"\Awith (pytest\.)?raises\(")

    def visit_Try(self, node: ast.Try) -> ast.AST:
        return self.block(node, r"^\s*(assert (False|0)\b|pytest\.fail\()")

    def function(self, node: ast.FunctionDef) -> None:
        marks = "".join(ast.unparse(mark) for mark in node.decorator_list if "parametrize" in ast.unparse(mark))
        for arg in node.args.args[:len(node.args.args) - len(node.args.defaults)]:
            if arg.arg != "self" and not re.search(rf"\b{arg.arg}\b", marks):
                raise Unscorable(f"the test {node.name} needs the fixture {arg.arg}")
        before = len(self.sources)
        self.generic_visit(node)
        if len(self.sources) == before:
            node.body = [self.test(node.name + "()", node.body)]


class Plan:
    """A problem made ready; serves all programs of its group. tests: (graded, public) of each test."""

    def __init__(self, kind, texts, public, entry, context, reference) -> None:
        self.kind, self.entry, self.context, self.operators, self.objects = kind, entry or "", context or "", set(), False
        self.hello = {"context": self.context, "name": "__main__" if kind == "stdin" else "solution"}
        if kind not in ("assert", "stdin", "functional"):
            raise Unscorable(f"its kind is {kind!r}, expected assert, stdin or functional")
        if not isinstance(texts, (list, tuple)) or not texts:
            raise Unscorable("it has no tests")
        items = [(text, False, True) for text in public or () if text not in texts]  # shown, but not graded
        items += [(text, True, text in (public or ())) for text in texts]
        try:
            if kind == "assert":
                self.read_code(items, reference or "")
            else:
                self.read_cases(items)
        except (SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise Unscorable(f"a test cannot be read: {error}") from None
        if not any(graded for graded, _ in self.tests):
            raise Unscorable("it has no tests")

    def read_cases(self, items: list) -> None:
        self.cases, self.tests = [case for case, *_ in items], [item[1:] for item in items]
        form, shape = ((str, "[input text, output text]") if self.kind == "stdin" else (list, "[arguments (a list), value]"))
        for case in self.cases:
            if not isinstance(case, (list, tuple)) or len(case) != 2 or not isinstance(case[0], form) or not isinstance(
                    case[1], str if self.kind == "stdin" else object):
                raise ValueError(f"expected {shape}, got {show(case, 60)}")
        if self.kind == "functional" and not self.entry:
            raise Unscorable("it names no entry_point")

    def read_code(self, items: list, reference: str) -> None:
        """Rewrite the tests, and find which of their names mean the program's: those that the reference defines (without a
        reference: those that nothing else defines), never len or abs, and never what the trusted context defines."""
        rewriter, self.units, self.tests, self.imports = Rewriter(), [], [], []
        self.names = {self.entry} - {""}
        for text, graded, public in items:
            tree = ast.parse(text)
            first, calls, used = len(rewriter.sources), [], {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            self.names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "solution"
                           for alias in node.names} - {"*"}
            for place, node in enumerate(tree.body):
                owner = node.name if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else None
                for part in node.body if owner else [node]:
                    name = part.name if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
                    start = len(rewriter.sources)
                    if name.startswith("test"):
                        if isinstance(part, ast.AsyncFunctionDef):
                            raise Unscorable(f"the test {name} is async")
                        rewriter.function(part)
                    elif not owner:
                        tree.body[place] = rewriter.visit(part)
                    if name.startswith("test") or name == "check" and not re.search(r"^check\(", text, re.M):
                        calls.append((owner, name, start, len(rewriter.sources)))
            if len(rewriter.sources) == first and self.entry in used:  # no assert: the text is one test
                tree.body = [rewriter.test(text, tree.body)]
            if any(name == "check" for _, name, *_ in calls) and not self.entry:
                raise Unscorable("a test defines check(candidate), but the problem has no entry_point")
            code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
            self.units.append((code, first, len(rewriter.sources), calls))
            self.tests += [(graded, public)] * (len(rewriter.sources) - first)
        if any("redirect_stdout" in text or "sys.stdout" in text for text, *_ in items):
            raise Unscorable("a test captures what the program prints")
        self.sources, context, solution = rewriter.sources, ast.parse(self.context), ast.parse(reference)
        classes = [node for node in ast.walk(solution) if isinstance(node, ast.ClassDef)]
        for node in solution.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.names.add(node.name)
            elif isinstance(node, ast.Assign):
                self.names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, (ast.Import, ast.ImportFrom)):  # a test may use what the solution imports
                self.imports.append(compile(ast.Module([node], []), "<reference>", "exec"))
        self.before = compile(context, "<context>", "exec")
        if {node.id for node in ast.walk(context) if isinstance(node, ast.Name)} & (self.names - {self.entry}):
            self.hello["context"] = ""  # set-up code that needs the program's names runs in the judge only
        bases = " ".join(ast.unparse(base) for node in classes for base in node.bases + node.decorator_list)
        self.operators = {part.name for node in classes for part in node.body if isinstance(part, ast.FunctionDef)}
        self.operators |= {f"__{name}__" for name in "len iter getitem contains str".split()} if bases else set()
        self.operators |= {"__eq__", "__lt__"} if re.search("dataclass|NamedTuple|Enum", bases) else set()
        self.open, self.hello["classes"] = not reference, [node.name for node in classes]
        self.objects = bool(classes) if reference else any(re.search(r"\b[A-Z]\w*\(", text) for text, *_ in items)


class Run:
    """One program under test, seen from the judge: its socket, what it last answered, the outcome of each test."""

    def __init__(self, plan: Plan, code: str, limits: dict, zygote: "Zygote") -> None:
        self.plan, self.code, self.limits, self.zygote = plan, code, limits, zygote
        self.last = self.trouble = self.socket = None  # last: [call, value]; trouble: (status, line) that ended the tests
        self.outcomes = [None] * len(plan.tests)  # None: not reached; else (passed, status, line of feedback)
        self.remotes: dict = {}

    def start(self, *files: int) -> None:
        """A new candidate defines the program; raises what the program raised."""
        self.stop()
        self.death, self.buffer, self.deadline = None, bytearray(), time.monotonic() + _wall(self.limits) + 2
        signal.setitimer(signal.ITIMER_REAL, _wall(self.limits) + 3, 1)  # bounds our own work on what it answers
        self.socket, theirs = socket.socketpair()
        self.zygote.start(self.limits, [theirs.fileno(), *files])
        theirs.close()
        self.send({**self.plan.hello, "code": self.code})

    def stop(self) -> dict | None:
        """End the candidate and all that it started; how it ended."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.socket:
            self.socket.close()
            self.socket = None
            return self.zygote.stop()

    def send(self, message: Any) -> None:
        try:
            self.socket.settimeout(max(0.01, self.deadline - time.monotonic()))
            send(self.socket, message)
        except OSError:
            pass  # it is gone: answer() finds out why

    def answer(self) -> Any:
        """The value in the candidate's next message, or what it raised, raised here; Died if there is no such message."""
        try:
            while len(self.buffer) < 4 or len(self.buffer) < 4 + struct.unpack_from("<I", self.buffer)[0]:
                if len(self.buffer) > self.limits["output_bytes"]:
                    self.die("error", f"returned more than {self.limits['output_bytes']} bytes")
                self.socket.settimeout(max(0.01, self.deadline - time.monotonic()))
                data = self.socket.recv(1 << 18)
                if not data:
                    self.die()
                self.buffer += data
            end = 4 + struct.unpack_from("<I", self.buffer)[0]
            message, self.buffer = json.loads(self.buffer[4:end]), self.buffer[end:]
            if "error" not in message:
                return unpack(message["value"], self.foreign), [(int(n), unpack(new)) for n, new in message.get("changes", ())]
            error = rebuild(*message["error"])
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OSError:
            self.die()
        except Exception:
            self.die("error", "sent something that is no answer")
        raise error

    def die(self, status: str = "error", text: str = "") -> None:
        report = self.stop() or {"why": None, "code": 0}
        if report["why"]:
            status, text = report["why"], {"timeout": "ran out of time", "memory": "used too much memory"}[report["why"]]
        if not text:
            code = report["code"]
            status = "ended" if code == 0 else "error"
            text = "ended before it answered" if code in (0, -signal.SIGKILL) else f"ended with exit code {code}" if code > 0 \
                else f"was ended by {signal.Signals(-code).name}"  # (SIGKILL may be ours: it had closed its socket)
        self.death = Died(status, text)
        raise self.death

    def ask(self, label: str, name: str, args: tuple, kwargs: dict) -> Any:
        """Have the candidate do name(*args, **kwargs), where "call" means args[0](*args[1:], **kwargs)."""
        if self.death:
            raise self.death
        try:
            request = [name, *pack([list(args), kwargs], lambda x, _: self.native(x))]
        except Uncrossable as error:
            raise Unscorable(f"a test hands the program what cannot be sent to it: {error}") from None
        if name == "call":
            self.last = [(label, request[1][1:], request[2]), "nothing"]
        self.send(request)
        try:
            value, changes = self.answer()
        except Exception as error:
            error.call = self.last and self.last[0]
            raise
        if name == "call":
            self.last[1] = value
        for place, new in changes:  # an argument that the function changed in place
            if 0 < place < len(args) and type(args[place]) is type(new) in (list, dict, set):
                args[place].clear()
                (args[place].extend if type(new) is list else args[place].update)(new)
        return value

    def native(self, x: Any) -> dict:
        if isinstance(x, Remote):
            return {"ref": x._ref}
        if x is getattr(builtins, getattr(x, "__name__", ""), self):  # a test may hand over int or len
            return {"ref": "builtin:" + x.__name__}
        raise Uncrossable(f"a value of type {type(x).__name__} is no plain data")

    def foreign(self, tag: str, parts: list) -> "Remote":
        number, names = parts
        if tag != "object" or not all(isinstance(name, str) for name in names):
            raise Uncrossable(tag)
        if number not in self.remotes or number < 0:  # one object there is one object here
            self.remotes[int(number)] = Remote(self, int(number), names[0][:60], names)
        return self.remotes[number]

    def note(self, number: int, passed: bool, status: str, line: str) -> None:
        if self.outcomes[number] is None or self.outcomes[number][0]:  # a test that has failed once has failed
            self.outcomes[number] = (passed, status, line)

    def explain(self, error: BaseException, source: str) -> tuple[str, str]:
        """(status, line of feedback) of what ended a test."""
        doing = call_text(self.last[0]) if self.last else "the program"
        if isinstance(error, Died):
            return error.args[0].replace("ended", "error"), f"{doing} {error.args[1]}"
        text = f"{type(error).__name__}: {cut(str(error), 300)}".removesuffix(": ")
        if hasattr(error, "line"):  # raised in the program
            lines = ["", *self.code.splitlines()]
            where = f" (line {error.line}: {cut(lines[error.line].strip(), 120)})" if 0 < error.line < len(lines) else ""
            doing = call_text(error.call) if getattr(error, "call", None) else "the program"
            return "memory" if "MemoryError" in error.names else "error", f"{doing} raised {text}{where}"
        got = f"{doing} returned {show(self.last[1])}, expected" if self.last else "expected"
        return "failed", f"{got} {cut(source, 200)} ({text})"

    def functional(self) -> None:
        function = Remote(self, "entry:" + self.plan.entry, self.plan.entry)
        for number, (args, expected) in enumerate(self.plan.cases):
            with Point(self, number, same) as test:
                test(function(*args), expected)

    def stdin(self) -> None:
        """A fresh process per case, which passes if its output is right and it neither raised nor was ended."""
        for number, (given, expected) in enumerate(self.plan.cases):
            with tempfile.TemporaryFile() as source:
                source.write(given.encode("utf-8", "replace"))
                source.seek(0)
                reader, writer = os.pipe()
                try:
                    self.start(source.fileno(), writer)
                finally:
                    os.close(writer)
                output, fault = "", None
                try:
                    output = self.drain(reader)
                    self.answer()
                except (Died, Exception) as error:
                    fault = error if error.args[:1] != ("ended",) else None  # exit code 0: the output decides
                finally:
                    os.close(reader)
            text = f"with the input {show(given, 300)} the program"
            if fault is None:
                line = f"{text} printed {show(output, 400)}, expected {show(expected.strip(), 400)}"
                self.note(number, same_output(output, expected), "failed", line)
                continue
            status, line = self.explain(fault, "")
            self.note(number, False, status, text + line.removeprefix("the program"))
            if status == "timeout":
                return  # a program that loops may not cost its time limit once per case

    def drain(self, reader: int) -> str:
        """All that the program prints; what exceeds output_bytes is read and thrown away."""
        kept, size, limit = bytearray(), 0, int(self.limits["output_bytes"])
        while True:
            ready = select.select([reader, self.socket], [], [], max(0, self.deadline - time.monotonic()))[0]
            data = os.read(reader, 1 << 16) if reader in ready else b""
            if not data:  # all writers are gone, or it is done and something that it started holds the pipe
                return kept.decode("utf-8", "replace") + (f"...[{size - len(kept)} cut]" if size > limit else "")
            kept, size = kept + data[:limit - len(kept)], size + len(data)

    def code_tests(self) -> None:
        plan = self.plan
        space = {"__name__": "test", "__test__": functools.partial(Point, self), "__builtins__": Builtins(vars(builtins))}
        for code in plan.imports:
            try:
                exec(code, space)
            except ImportError:
                pass  # a package for the solution alone; a test that needs it too fails with a NameError and says so
        remotes = {name: Remote(self, name, name) for name in plan.names}
        sys.modules["solution"] = types.SimpleNamespace(**remotes)
        space["__builtins__"].run = self if plan.open else None
        space |= remotes
        exec(plan.before, space)
        space |= {name: remotes[name] for name in remotes if name == plan.entry}
        for code, first, last, calls in plan.units:
            self.attempt(first, last, exec, code, space)
            for owner, name, start, end in calls:
                if name == "check":
                    self.attempt(start, end, space["check"], Remote(self, plan.entry, plan.entry))
                else:
                    self.attempt(start, end, self.call_test, space, owner, name)

    def attempt(self, first: int, last: int, action: Any, *args) -> None:
        """Run a piece of test code; what breaks it is told for those of its tests that were not reached."""
        try:
            action(*args)
        except (Unscorable, Broken):
            raise
        except BaseException as error:
            for number in range(first, last):
                if self.outcomes[number] is None:
                    self.note(number, False, *self.explain(error, self.plan.sources[number]))
                    if isinstance(error, Died):
                        break  # one of them tells of the end; the others had no chance
            if isinstance(error, Died):
                raise

    def call_test(self, space: dict, owner: str | None, name: str) -> None:
        for values in getattr(getattr(space[owner], name) if owner else space[name], "cases", [{}]):
            this = space[owner]() if owner else None  # a fresh object for each
            getattr(this, "setup_method", getattr(this, "setUp", lambda: None))()
            (getattr(this, name) if owner else space[name])(**values)

    def result(self) -> dict:
        """Run all tests; the Result's fields."""
        try:
            if self.plan.kind != "stdin":
                self.start()
                self.answer()
            {"functional": self.functional, "stdin": self.stdin, "assert": self.code_tests}[self.plan.kind]()
        except (Died, Exception) as error:
            self.trouble = self.explain(error, "")
        self.stop()
        some_public = any(public for _, public in self.plan.tests)
        graded = [bool(outcome and outcome[0]) for outcome, (counts, _) in zip(self.outcomes, self.plan.tests) if counts]
        shown = [outcome for outcome, (_, public) in zip(self.outcomes, self.plan.tests) if public or not some_public]
        public_passed = all(outcome and outcome[0] for outcome in shown)
        words = [self.trouble and self.trouble[0], *(outcome[1] for outcome in self.outcomes if outcome and not outcome[0])]
        status = "passed" if all(graded) else next(
            (word for word in ("timeout", "memory", "failed", "error") if word in words), "failed")
        lines = [f"Test {number} failed: {outcome[2]}" for number, outcome in enumerate(shown, 1) if outcome and not outcome[0]]
        if public_passed:
            lines = ["All tests passed." if all(graded) else "The public tests pass, but hidden tests fail."]
        elif not lines:  # no test was reached
            lines = [self.trouble[1] if self.trouble else "the tests ended before they checked anything"]
            lines[0] = lines[0][0].upper() + lines[0][1:]
        text = "\n".join(map(escape, lines[:int(self.limits["max_failures"])]))
        return dict(passed=sum(graded), total=len(graded), reward=sum(graded) / len(graded), status=status, tests=graded,
                    feedback=cut(text, int(self.limits["feedback_chars"])), public_passed=public_passed)


class Point:
    """The context around one test: called with (left, right) or (truth); leaving it notes the outcome."""

    def __init__(self, run: Run, number: int, equal: Any = operator.eq) -> None:
        self.run, self.number, self.equal, self.passed, self.line = run, number, equal, True, ""

    def __enter__(self) -> "Point":
        return self

    def __call__(self, *values) -> None:
        self.passed = bool(self.equal(*values) if len(values) == 2 else values[0])
        last = self.run.last
        if not self.passed:
            source = self.run.plan.sources[self.number] if self.equal is operator.eq else ""
            sides = {id(values[0]): values[-1], id(values[-1]): values[0]} if len(values) == 2 else {}
            expected = show(sides[id(last[1])]) if last and id(last[1]) in sides else source
            self.line = f"{call_text(last[0])} returned {show(last[1])}, expected {expected}" if last else f"expected {source}"

    def __exit__(self, kind, error, trace) -> bool:
        if error is None:
            self.run.note(self.number, self.passed, "failed", self.line)
        else:
            source = self.run.plan.sources[self.number] if self.equal is operator.eq else ""
            self.run.note(self.number, False, *self.run.explain(error, source))
        return not isinstance(error, Control)


def call_text(call: tuple) -> str:
    label, args, kwargs = call
    ghost = lambda tag, parts: Remote(None, 0, "object")  # noqa: E731
    words = [show(unpack(arg, ghost), 100) for arg in args]
    words += [f"{name}={show(value, 100)}" for name, value in unpack(kwargs, ghost).items()]
    return cut(f"{label}({', '.join(words)})", 300)


class Remote:
    """What stays with the program: its functions and objects. Calls and attributes cross; an operator does only if a class
    of the reference defines it, so that no object of the program can decide that it equals the answer."""

    def __init__(self, run: Run | None, ref: Any, label: str, names: Any = ()) -> None:
        self.__dict__.update(_run=run, _ref=ref, _label=label, _names=names)

    def __call__(self, *args, **kwargs):
        return self._run.ask(self._label, "call", (self, *args), kwargs)

    def __getattr__(self, name):
        if name.startswith("__") or not self._run.plan.objects:
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        value = self._run.ask(self._label, "getattr", (self, name), {})
        if isinstance(value, Remote) and value._names[0] in ("method", "function", "builtin_function_or_method"):
            value.__dict__["_label"] = f"{self._label}.{name}"
        return value

    def __setattr__(self, name, value):
        self._run.ask(self._label, "setattr", (self, name, value), {})

    def __instancecheck__(self, x):
        return isinstance(x, Remote) and self._label in x._names

    def __hash__(self):
        return hash(str(self._ref))

    def __repr__(self):
        return f"<{self._label} object>"


def _operator(name: str) -> Any:
    def method(self, *args):
        dunder, free = f"__{name}__", "iterator" in self._names and name in ("iter", "next")
        if name in ("eq", "ne") and not (args and isinstance(args[0], Remote)):
            return name == "ne"  # plain data is the answer itself: no object equals it
        if free or self._run and {dunder, "__eq__" if name == "ne" else dunder} & self._run.plan.operators:
            swapped = name[0] == "r" and name != "round"
            return self._run.ask(self._label, name[1:] if swapped else name, (*args, self) if swapped else (self, *args), {})
        if name in ("eq", "ne"):
            return (self is args[0]) == (name == "eq")
        if name == "bool":
            return len(self) > 0 if self._run and "__len__" in self._run.plan.operators else True
        if name == "str":
            return repr(self)
        raise TypeError(f"{self!r} does not support {dunder}")

    return method


for _name in """eq ne lt le gt ge add sub mul truediv floordiv mod pow radd rsub rmul rtruediv and or xor neg abs len iter
        next str bool int float getitem setitem delitem contains iadd isub""".split():
    setattr(Remote, f"__{_name}__", _operator(_name))


class Builtins(dict):
    """The builtin names of test code; without a reference solution, a name that nothing else defines is the program's."""

    def __missing__(self, name: str) -> Any:
        if self.run is None or name.startswith("__"):
            raise KeyError(name)
        return __import__(name) if name in sys.stdlib_module_names else Remote(self.run, name, name)


def describe(error: BaseException) -> list:
    """An exception as plain data: its classes, its message, the line of the program that raised it."""
    try:
        text = str(error)[:4000]
    except BaseException:  # the program's own __str__
        text = ""
    line, trace = error.lineno if isinstance(error, SyntaxError) else 0, error.__traceback__
    while trace:
        line, trace = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<solution>" else line, trace.tb_next
    return [[f"{kind.__module__}.{kind.__name__}"[:100] for kind in type(error).__mro__[:20]], text, line or 0]


def rebuild(classes: list, text: str, line: int) -> Exception:
    """An exception as the tests' own except clauses and raises() know it."""
    names = [name.rpartition(".")[::2] for name in classes]
    known = [getattr(sys.modules.get(module), name, None) for module, name in names]
    base = next((kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)
                 and not issubclass(kind, BaseExceptionGroup)), Exception)
    kind = type(re.sub(r"\W", "?", names[0][1])[:60], (base,), {"__str__": lambda self: text})
    error = kind.__new__(kind)
    error.args, error.names, error.line = (str(text),), {name for _, name in names}, int(line)
    return error


def same(value: Any, expected: Any) -> bool:
    """Equality of kind "functional". Expected values come from JSON: a tuple is as good as a list, and floats are right
    within 1e-6 (relative); integers are exact.

    >>> same((1, [2.0000000001]), [1, [2.0]]), same(1333335333334000000, 1.333335333334e18)
    (True, False)
    """
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    if type(value) is dict and type(expected) is dict:
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in expected)
    if type(value) is float and type(expected) is float:
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9) or value != value and expected != expected
    return bool(value == expected)


def same_output(output: str, expected: str) -> bool:
    """Equality of kind "stdin": line by line without trailing blanks; in a line of numbers, number by number as in same().

    >>> same_output("1 2 \\r\\n\\n", "1 2"), same_output("0.333333", "0.333333333333"), same_output("1\\n2", "1 2")
    (True, True, False)
    """
    def number(text):
        return int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else float(text)

    def line(a, b):
        try:
            return a == b or len(a.split()) == len(b.split()) and all(
                same(number(x), number(y)) for x, y in zip(a.split(), b.split()))
        except ValueError:  # not numbers
            return False

    left, right = ([row.rstrip() for row in text.rstrip().splitlines()] for text in (output, expected))
    return len(left) == len(right) and all(map(line, left, right))


class raises:  # noqa: N801
    """Stand-in for pytest.raises; knows the program's own exceptions by name."""

    def __init__(self, expected: Any, *call, match: str = "") -> None:
        self.match, kinds = match, expected if isinstance(expected, tuple) else (expected,)
        self.names = {kind._label if isinstance(kind, Remote) else kind.__name__ for kind in kinds}
        if call:  # raises(ValueError, f, -1)
            with self:
                call[0](*call[1:])

    def __enter__(self) -> "raises":
        return self

    def __exit__(self, kind, error, trace) -> bool:
        if error is None:
            raise AssertionError(f"nothing was raised, expected {' or '.join(sorted(self.names))}")
        self.type, self.value = kind, error
        known = self.names & (getattr(error, "names", set()) | {base.__name__ for base in kind.__mro__})
        return bool(known and not isinstance(error, Control) and re.search(self.match or "", str(error)))


class approx:  # noqa: N801
    """Stand-in for pytest.approx: numbers, and lists, tuples and dicts of them."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, **_) -> None:
        self.expected, self.rel, self.abs = expected, 1e-6 if rel is None else rel, 1e-12 if abs is None else abs

    def __eq__(self, value: Any) -> bool:
        again, expected = functools.partial(approx, rel=self.rel, abs=self.abs), self.expected
        if isinstance(expected, (list, tuple, dict)):
            pairs = zip(value, expected) if type(value) is not dict else ((value[key], expected[key]) for key in expected)
            return type(value) is type(expected) and len(value) == len(expected) and all(x == again(y) for x, y in pairs)
        return value == expected or abs(value - expected) <= max(self.rel * abs(expected), self.abs)


def parametrize(names: Any, values: Any, **_) -> Any:
    """Stand-in for pytest.mark.parametrize; stacked ones multiply."""
    names = re.findall(r"\w+", names) if isinstance(names, str) else list(names)
    rows = [dict(zip(names, row if len(names) > 1 else [row])) for row in values]

    def mark(function):
        function.cases = [{**old, **row} for old in getattr(function, "cases", [{}]) for row in rows]
        return function

    return mark


def fail(reason: str = "", **_) -> None:
    raise AssertionError(reason)


def send(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    connection.sendall(struct.pack("<I", len(body)) + body)


def receive(connection: socket.socket, data: bytes = b"") -> Any:
    """One message of a trusted peer; data: what of it has been read already."""
    need, data = 4, bytearray(data)
    while len(data) < need or need == 4 and (need := 4 + struct.unpack_from("<I", data)[0]) > len(data):
        piece = connection.recv(min(need - len(data), 1 << 20))
        if not piece:
            raise EOFError("the other side is gone")
        data += piece
    return json.loads(data[4:])


class Zygote:
    """The judge's handle of its zygote. Where this system cannot give it all protection, it starts with less, and says so."""

    def __init__(self, folder: str, mode: str) -> None:
        self.warnings, flags = [], ["-s", "-P"] if sys.version_info >= (3, 11) else ["-I"]  # -I, but keep our hash seed
        ladder = {"namespaces user filter": "it can see your files, processes and network",
                  "user filter": "it has your user id", "filter": "its system calls are not filtered", "": "nothing is left"}
        for features, lacking in ladder.items():
            fault = "" if sys.platform == "linux" else "not Linux"
            fault = "MURPHY_ISOLATION is plain" if mode == "plain" else fault
            if not fault or "namespaces" not in features:
                self.socket, theirs = socket.socketpair()
                subprocess.Popen([sys.executable, *flags, os.path.abspath(__file__), "--zygote", str(theirs.fileno()), folder,
                                  features], cwd="/", env=ENVIRONMENT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL)
                theirs.close()
                self.socket.settimeout(60)
                try:
                    fault = receive(self.socket)
                except EOFError:
                    fault = "it does not start"
            if not fault:  # a first program shows whether programs can live in there
                trial = Plan("functional", [[[], 1]], (), "f", "", "")
                result = Run(trial, "import os\ndef f(): return len(open(os.__file__).read(1))", LIMITS, self).result()
                if result["reward"] == 1:
                    return
                fault = result["feedback"]
            self.warnings.append(f"a program is less confined on this system: {lacking} ({fault})")
        raise RuntimeError(fault)

    def start(self, limits: dict, files: list) -> None:
        body = json.dumps({**limits, "wall": _wall(limits)}).encode()
        try:
            socket.send_fds(self.socket, [struct.pack("<I", len(body)) + body], files)
        except OSError as error:
            raise Broken(f"the zygote is gone: {error}") from None

    def stop(self) -> dict:
        try:
            self.socket.settimeout(20)
            send(self.socket, "stop")
            return receive(self.socket)
        except (OSError, EOFError) as error:
            raise Broken(f"the zygote is gone: {error}") from None


def judge_main(number: int, folder: str, mode: str) -> None:
    """Problem and program in, result out. If the zygote breaks, this process ends, and the trainer starts another."""
    trainer, plans = socket.socket(fileno=number), {}
    prctl(4, 0)  # PR_SET_DUMPABLE: no process of the same user may look into our memory
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def late(*_):
        raise Died("timeout", "ran out of time")

    signal.signal(signal.SIGALRM, late)
    sys.modules["pytest"] = types.SimpleNamespace(
        raises=raises, approx=approx, fail=fail, mark=types.SimpleNamespace(parametrize=parametrize))
    zygote = Zygote(folder, mode)
    send(trainer, {"warnings": zygote.warnings})
    while True:
        try:
            problem, code, limits = receive(trainer)
        except EOFError:  # the trainer ended without a word
            _empty(folder)
            os.rmdir(folder)
            return
        run = None
        try:
            if problem not in plans:
                if len(plans) > 200:
                    plans.clear()
                plans[problem] = Plan(*unpack(json.loads(problem)))
            run = Run(plans[problem], code, limits, zygote)
            send(trainer, run.result())
        except Unscorable as error:
            if run:
                run.stop()
            send(trainer, dict(passed=0, total=0, reward=0.0, status="unscorable", tests=[], public_passed=False,
                               feedback=escape(f"This problem cannot be scored: {error}")))


# The zygote: forks, watches, kills. It sees no test and no program.

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
PRELOADED = """array base64 bisect calendar cmath concurrent.futures contextlib copy csv enum heapq io itertools numbers pprint
    queue random secrets statistics string textwrap traceback typing unicodedata uuid"""  # and all that we import ourselves
DENIED = (  # system calls that a program has no use for: x86_64 and aarch64 numbers
    # ptrace, process_vm_readv/writev, process_madvise, kcmp, pidfd_open/getfd/send_signal, tkill, rt_sigqueueinfo, rt_tgsig...
    (101, 117), (310, 270), (311, 271), (440, 440), (312, 272), (434, 434), (438, 438), (424, 424), (200, 130), (129, 138),
    # setpriority, sched_setscheduler/setparam/setattr, ioprio_set, migrate_pages, move_pages, personality, connect
    (297, 240), (141, 140), (144, 119), (142, 118), (314, 274), (251, 30), (256, 238), (279, 239), (135, 92), (42, 203),
    # mount, umount2, pivot_root, chroot, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, unshare
    (165, 40), (166, 39), (155, 41), (161, 51), *((number, number) for number in range(428, 434)), (442, 442), (272, 97),
    # setns, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup, shmget, semget, msgget, mq_open
    (308, 268), (248, 217), (249, 218), (250, 219), (321, 280), (298, 241), (323, 282), (425, 425), (29, 194), (64, 190),
    (68, 186), (240, 180), (319, 279), (447, 447), (304, 265))  # memfd_create, memfd_secret, open_by_handle_at


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _c(name: str, *args) -> int:
    """A function of the C library; raises OSError."""
    value = getattr(_library(), name)(*args)
    if value < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return value


def prctl(option: int, value: int, pointer: Any = None) -> None:
    if sys.platform == "linux":
        _c("prctl", option, ctypes.c_ulong(value), pointer, 0, 0)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _c("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


SCRATCH = "size=64m,nr_inodes=4096,mode=1777"  # of the folder that a program may write to
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, NEWUSER, NEWALL = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 1 << 28, 0x6C020000)  # NEWALL: mount, uts, ipc, pid and net


def enter_namespaces(folder: str) -> str:
    """Own user (unless root), mount, pid, net and ipc namespaces, and a root with nothing but python and an empty folder:
    /tmp, or /scratch where python itself lies in /tmp. Returns that folder."""
    uid, gid = os.getuid(), os.getgid()
    _c("unshare", NEWALL | (NEWUSER if uid else 0))
    if uid:
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()  # the init of the new pid namespace: when it dies, all in there die
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", folder, "tmpfs", NOSUID, "size=1m,mode=755")
    bound = []
    for path in ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store", sys.base_prefix, sys.prefix, *sys.path,
                 *(f"/dev/{name}" for name in ("null", "zero", "random", "urandom"))]:
        inside = folder + path
        if os.path.islink(path) and path.count("/") == 1:
            os.symlink(os.readlink(path), inside)
        elif os.path.exists(path) and not any(path == other or path.startswith(other + "/") for other in bound):
            os.makedirs(inside if os.path.isdir(path) else os.path.dirname(inside), exist_ok=True)
            if not os.path.isdir(path):
                open(inside, "w").close()
            mount(path, inside, None, BIND | REC)
            if not path.startswith("/dev/"):  # the flags that are kept may not be dropped in a user namespace
                keep = os.statvfs(path).f_flag & (NOEXEC | 1024 | 2048)
                mount("none", inside, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV | keep)
            bound.append(path)
    scratch = "/scratch" if os.path.exists(folder + "/tmp") else "/tmp"
    for name, target in ("dev/stdin", "/proc/self/fd/0"), ("dev/stdout", "/proc/self/fd/1"), ("dev/shm", scratch):
        os.symlink(target, f"{folder}/{name}")
    for name in ("/proc", scratch):
        os.mkdir(folder + name)
    try:
        mount("proc", folder + "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    except OSError:
        pass  # in a container that hides parts of /proc; nothing here needs it
    os.chdir(folder)
    _c("syscall", {"x86_64": 155, "aarch64": 41}[os.uname().machine], b".", b".")  # pivot_root
    _c("umount2", b".", 2)
    mount("none", "/", None, REMOUNT | BIND | RDONLY | NOSUID)
    mount("tmpfs", scratch, "tmpfs", NOSUID | NODEV, SCRATCH)
    return scratch


@functools.cache
def syscall_filter(pid: int) -> bytes:
    """A seccomp program (classic BPF). pid: the only process that may be signalled, and then no process may be started
    (outside a pid namespace nothing else would be sure to find it again); 0: signals and processes stay in the namespace."""
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    LOAD, EQUAL, ABOVE, BITS, RETURN, DENY, ALLOW, MISSING = 0x20, 0x15, 0x35, 0x45, 6, 0x50001, 0x7FFF0000, 0x50026
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, (0xC000003E, 0xC00000B7)[column]), (RETURN, 0, 0, 1 << 31), (LOAD, 0, 0, 0),
            (ABOVE, 0, 1, 1 << 30), (RETURN, 0, 0, MISSING),  # the same calls under other numbers (x32)
            (EQUAL, 0, 1, 435), (RETURN, 0, 0, MISSING)]  # clone3, whose flags cannot be read; the library turns to clone
    for numbers in DENIED + (((57, 435), (58, 435)) if pid else ()):  # fork and vfork of x86_64
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, DENY)]
    rules = {(56, 220): (BITS, 1, 0, 0x10000) if pid else (BITS, 0, 1, 0x7E020000),  # clone: a thread; no namespace
             (41, 198): (EQUAL, 1, 0, socket.AF_UNIX), (302, 261): (EQUAL, 1, 0, 0), (203, 122): (EQUAL, 1, 0, 0)}
    if pid:  # socket: local; prlimit64, sched_setaffinity: of oneself; kill, tgkill: oneself
        rules |= {(62, 129): (EQUAL, 1, 0, pid), (234, 131): (EQUAL, 1, 0, pid)}
    for numbers, rule in rules.items():  # the first argument decides
        code += [(EQUAL, 0, 4, numbers[column]), (LOAD, 0, 0, 16), rule, (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in [*code, (RETURN, 0, 0, ALLOW)])


class Cage:
    """What the zygote does around each candidate; features: which of "namespaces user filter" it uses."""

    def __init__(self, features: str, folder: str) -> None:
        self.namespaces, self.filter = "namespaces" in features, "filter" in features and sys.platform == "linux"
        self.uid = 50_000 + os.getpid() % 10_000 if "user" in features and os.getuid() == 0 else 0
        self.state, self.folder = None, enter_namespaces(folder) if self.namespaces else folder + "/scratch"
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        prctl(4, 0)  # PR_SET_DUMPABLE
        with open("/proc/self/statm" if os.path.exists("/proc/self/statm") else os.devnull) as file:
            self.base = int((file.read().split() or ["0"])[0]) * resource.getpagesize() + (8 << 20)
        self.filter and syscall_filter(0)  # made once, before the forks
        self.clean()

    def confine(self, limits: dict) -> None:
        """In the candidate, before anything of the program is read."""
        os.setsid()
        os.chdir(self.folder)
        bounds = dict(CPU=math.ceil(limits["seconds"]) + 1, CORE=0, NOFILE=128, FSIZE=64 << 20,
                      AS=self.base + int(limits["memory_mb"] * (1 << 20)))
        for name, value in (bounds | ({"NPROC": 64} if self.namespaces else {})).items():
            which = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(which)[1]
            try:
                resource.setrlimit(which, (min(value, hard), min(value, hard)) if hard >= 0 else (value, value))
            except (ValueError, OSError):
                if sys.platform == "linux":
                    raise  # macOS refuses some of them
        if self.uid:
            os.setgroups([])
            os.setgid(self.uid)
            os.setuid(self.uid)
        if sys.platform == "linux":
            _c("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))  # no capability, even as root
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            prctl(4, 1)  # PR_SET_DUMPABLE: /dev/stdin is under /proc/self
            prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        if self.filter:
            code = ctypes.create_string_buffer(syscall_filter(0 if self.namespaces else os.getpid()))
            prctl(22, 2, struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(code)))  # PR_SET_SECCOMP

    def kill(self) -> None:
        if self.namespaces:
            os.kill(-1, signal.SIGKILL)  # as init: all in the namespace but ourselves
        else:
            os.kill(self.child, signal.SIGKILL)

    def reap(self) -> int:
        """Kill and bury the candidate and all that it started; its exit code, or minus its signal."""
        code = 0
        try:
            self.kill()
        except ProcessLookupError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return code
            code = os.waitstatus_to_exitcode(status) if pid == self.child else code

    def clean(self) -> None:
        """An empty folder for the next program."""
        if self.namespaces:
            def look():
                return os.stat(self.folder).st_ctime_ns, os.stat(self.folder).st_mode, os.listdir(self.folder)

            if self.state != look():  # a fresh file system is quicker than any removal, and forgets everything
                _c("umount2", self.folder.encode(), 2)
                mount("tmpfs", self.folder, "tmpfs", NOSUID | NODEV, SCRATCH)
                self.state = look()
            return
        if os.path.islink(self.folder) or not os.path.isdir(self.folder):
            if os.path.lexists(self.folder):
                os.unlink(self.folder)
            os.mkdir(self.folder)
        if self.uid:
            os.chown(self.folder, self.uid, self.uid)
        os.chmod(self.folder, 0o700)
        _empty(self.folder)

    def usage(self) -> tuple[float, int]:
        """CPU seconds of the candidate, and resident bytes of all in its namespace."""
        try:
            cpu = time.clock_gettime(~self.child << 3 | 2) if sys.platform == "linux" else 0.0  # the clock of a process
        except OSError:
            cpu = 0.0  # it has ended
        pages = 0
        for name in os.listdir("/proc") if self.namespaces else ():
            try:
                if name.isdigit() and name != "1":
                    with open(f"/proc/{name}/statm") as file:
                        pages += int(file.read().split()[1])
            except OSError:
                pass  # it ended meanwhile
        return cpu, pages * resource.getpagesize()


def _empty(folder: str) -> None:
    """Remove all in a folder. What lies in its folders is pulled up, so that no depth needs recursion or a long path."""
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                os.rename(os.path.join(path, inner), os.path.join(folder, os.urandom(12).hex()))
            os.rmdir(path)


def zygote_main(number: int, folder: str, features: str) -> None:
    """Fork a candidate, watch its limits, end it when the judge says so, report how it ended, clean up; again."""
    control = socket.socket(fileno=number)
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for name in PRELOADED.split():
        __import__(name)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an init without handlers cannot be signalled from inside
    try:
        cage = Cage(features, folder)
    except (OSError, KeyError) as error:
        send(control, str(error))
        os._exit(0)
    send(control, "")
    os.dup2(0, 2)  # until here stderr was the judge's log
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=cage.folder, TMPDIR=cage.folder)
    del os.environ["PYTHONHASHSEED"]
    sys.argv[:] = [""]
    gc.collect()
    gc.freeze()  # a candidate's collector does not touch, and so not copy, the pages that it shares with us
    gc.disable()
    while True:
        head, files, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not head:
            os._exit(0)  # the judge is gone
        limits, begin = receive(control, head), time.monotonic()
        cage.child = os.fork()
        if not cage.child:
            control.close()
            candidate(files, limits, cage)
        for file in files:
            os.close(file)
        why, tick = None, 0.1
        while not select.select([control], [], [], tick)[0]:
            cpu, memory = cage.usage()
            if not why and (cpu > limits["seconds"] or time.monotonic() - begin > limits["wall"]):
                why = "timeout"
            elif not why and memory > 2 * limits["memory_mb"] * (1 << 20):
                why = "memory"
            if why:
                cage.kill()
            tick = max(0.005, min(0.1, limits["seconds"] - cpu))
        receive(control)
        code = cage.reap()
        cage.clean()
        send(control, {"why": "timeout" if code == -signal.SIGXCPU else why, "code": code})


# The candidate: all of this is in the program's power, and holds nothing worth stealing.


def candidate(files: list, limits: dict, cage: Cage) -> None:
    """In the child: nothing but its own descriptors, no rights, then the program; never back into the zygote's loop."""
    try:
        for place, file in enumerate([*files[1:], *files[:1]] if len(files) > 1 else ()):
            os.dup2(file, place if place < 2 else 3)
        if len(files) == 1 and files[0] != 3:
            os.dup2(files[0], 3)
        os.closerange(4, 64)
        gc.enable()
        Candidate(socket.socket(fileno=3)).work(lambda: cage.confine(limits))
    finally:
        os._exit(0)


class Candidate:
    """Defines the program, then does what the judge asks: name(*args, **kwargs)."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.objects, self.numbers = connection, [], {}

    def work(self, confine: Any) -> None:
        hello, error = receive(self.connection), None
        module = types.ModuleType(hello["name"])
        sys.modules[hello["name"]] = module  # dataclasses look their module up there
        self.space, self.classes, _ = module.__dict__, set(hello.get("classes", ())), 0
        main = hello["name"] == "__main__"
        try:
            confine()
            exec(compile(hello["context"], "<context>", "exec"), self.space)
            exec(compile(hello["code"].removeprefix("\ufeff"), "<solution>", "exec"), self.space)
        except SystemExit as stop:
            error = None if main and stop.code in (None, 0) else stop
        except BaseException as fault:
            error = fault
        if main:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            atexit._run_exitfuncs()
            try:
                sys.stdout.flush()
            except Exception as fault:
                error = error or fault
        send(self.connection, {"error": describe(error)} if error else {"value": None})
        while not main:
            request = receive(self.connection)
            try:
                reply = self.perform(*request)
            except BaseException as error:
                reply = {"error": describe(error)}
            send(self.connection, reply)

    def perform(self, name: str, packed: list, kwargs: dict) -> dict:
        args = [unpack(arg, self.native) for arg in packed]
        if name == "call":
            value = args[0](*args[1:], **unpack(kwargs, self.native))
        else:
            value = (getattr(operator, name, None) or getattr(builtins, name))(*args)
        reply = {"value": pack(value, self.foreign)}
        if name == "call" and value is None:  # a function of the kind that changes its arguments in place
            reply["changes"] = [[place, pack(arg, self.foreign)] for place, arg in enumerate(args)
                                if place and type(arg) in (list, dict, set)]
        return reply

    def native(self, tag: str, ref: Any) -> Any:
        """What the judge calls by a number (an object that it was told of) or by name."""
        if isinstance(ref, int):
            return self.objects[ref]
        if ref.startswith("builtin:"):
            return getattr(builtins, ref[8:])
        _, entry, name = ref.rpartition("entry:")
        if name in self.space:
            return self.space[name]
        owner, _, method = name.rpartition(".")
        if not entry or (owner or "Solution") not in self.space:
            raise NameError(f"name '{name}' is not defined")
        return getattr(self.space[owner or "Solution"](), method)  # a fresh object for each call

    def foreign(self, x: Any, depth: int) -> Any:
        """What is no plain data: made plain, or kept here under a number."""
        names = [kind.__name__ for kind in type(x).__mro__]
        known = not self.classes.isdisjoint(names)  # an object of a class that the tests know
        if not known and type(x).__module__ == "numpy":
            return pack(x.tolist(), self.foreign, depth + 1)
        for base, plain in PLAIN.items():
            if not known and isinstance(x, base):
                return pack(plain(x), self.foreign, depth + 1)
        if not known and isinstance(x, (collections.abc.Iterator, collections.abc.MappingView)):
            x, names = iter(x), ["iterator"]
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.objects)
            self.objects.append(x)
        return {"object": [self.numbers[id(x)], names]}


PLAIN = {int: int.__index__, float: float.__float__, str: str.__str__, bytes: bytes, list: list, tuple: tuple, dict: dict,
         set: set, frozenset: frozenset, collections.deque: collections.deque}  # subclasses cross as these


# The command line.


def self_check() -> None:
    """Score programs of known verdict; raises RuntimeError if the executor judges one of them falsely on this system."""
    problem = types.SimpleNamespace(kind="functional", tests=[[[2, 3], 5]], public_tests=[], entry_point="add")
    wanted = {"def add(a, b): return a + b": "passed", "def add(a, b): return a - b": "failed",
              "def add(a, b):\n    while True: pass": "timeout", "import sys; sys.exit(0)": "error",
              "import os; os._exit(0)": "error"}
    for (code, status), result in zip(wanted.items(), run_many([(problem, code) for code in wanted], seconds=0.5)):
        if (result.status, result.reward) != (status, float(status == "passed")):
            raise RuntimeError(f"executor: {code!r} was judged {result.status!r} with reward {result.reward:g} instead of "
                               f"{status!r}, so no reward can be trusted on this system ({result.feedback})")


def demonstration() -> None:
    problem = types.SimpleNamespace(kind="functional", tests=[[[1], 1], [[5], 120], [[0], 1]], public_tests=[], entry_point="f")
    programs = {
        "right": "def f(n): return 1 if n < 2 else n * f(n - 1)",
        "wrong at 0": "def f(n): return 1 if n == 1 else n * f(n - 1) if n else 0",
        "never ends": "def f(n):\n    while n < 9: pass",
        "raises": "def f(n): return n / (n - 1)",
        "a cheat": "class Equal:\n    def __eq__(self, other): return True\ndef f(n): return Equal()",
    }
    print("Tests: f(1) == 1, f(5) == 120, f(0) == 1\n")
    for (name, code), result in zip(programs.items(), run_many([(problem, code) for code in programs.values()], seconds=0.5)):
        print(f"{name}: reward {result.reward:.2f}, {result.status}")
        print("\n".join("    " + line for line in code.split("\n") + ["-> " + x for x in result.feedback.split("\n")]))


def check(path: str) -> None:
    """Score the reference solution of each problem of a JSONL file; list those that do not reach 1."""
    try:
        with open(path, encoding="utf-8") as file:
            problems = [types.SimpleNamespace(**json.loads(line)) for line in file if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"executor: cannot read problems from {path} ({error}); expected one JSON object a line") from None
    bad = 0
    for problem, result in zip(problems, run_many([(x, getattr(x, "reference", None) or "") for x in problems])):
        if result.reward < 1:
            bad += 1
            print(f"{getattr(problem, 'id', '?')}: {result.status}, {result.passed} of {result.total}: {escape(result.feedback)}")
    print(f"{len(problems) - bad} of {len(problems)} reference solutions pass all their tests")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        judge_main(int(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1:2] == ["--zygote"]:
        zygote_main(int(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1:2] == ["--check"] and len(sys.argv) == 3:
        check(sys.argv[2])
    elif len(sys.argv) == 1:
        demonstration()
    else:
        raise SystemExit("usage: python executor.py [--check problems.jsonl]")
