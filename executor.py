"""Run a program that a model wrote against tests, without being cheated by it.

In:  run_many([(problem, code), ...]); a problem has kind, tests, public_tests, entry_point, context, reference.
Out: one Result per pair: reward (share of tests passed), status, and the feedback that the model reads next.

    trainer            judge (one per worker)         zygote (one per judge)      candidate (one per program)
    run_many --job-->  holds tests and answers,       clean python, forked
                       runs the test code itself ---> before any test came; ---> drops its rights, then
                         |                            forks per program          defines the program
                         |---- call f(13) --------------------------------------> runs f(13)
                         |<--- 12, as plain data --------------------------------|
            <--result--  12 is not 13: failed         kills it, empties its folder

The process that knows the answers never runs the model's code, and the one that runs it never holds an answer: a program
can lie only about the values of its own functions, so its best way to be paid is to compute them. No exit status and
nothing printed can make a test pass. Standard library only; Linux in full, macOS in part.
"""
import ast, atexit, builtins, collections, collections.abc, contextlib, ctypes, dataclasses, datetime, decimal, fractions
import functools, gc, json, math, operator, os, re, reprlib, resource, select, signal, socket, struct, subprocess, sys
import tempfile, threading, time, types, warnings  # noqa: E401
from typing import Any

PYTHON = sys.executable  # runs the programs: they can import what is installed for it
FIELDS = ("kind", "tests", "public_tests", "entry_point", "context", "reference")  # of a problem
LIMITS = dict(
    seconds=4.0,         # CPU seconds of a program over all its tests (stdin: per case); 1.5 x + 3 s of wall time end it too
    memory_mb=512,       # its address space
    output_bytes=4 << 20,  # of one stdin case, or of the value of one call
    max_failures=3,      # failing tests that the feedback tells of
    feedback_chars=2000,
)


@dataclasses.dataclass
class Result:
    """What the tests say of one program: reward = passed / total; tests: passed or not, one bool per test.

    public_passed: all public tests passed (all tests, where none is public). status: "passed" | "failed" (a wrong answer) |
    "error" (raised, or ended early, in all failing tests) | "timeout" | "memory" | "no_code" | "unscorable" (reward 0.0).
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
    >>> problem = SimpleNamespace(kind="functional", tests=[[[2, 3], 5], [[1, 0], 1]], entry_point="add")
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
    texts = {}
    for problem in {id(problem): problem for problem, _ in jobs}.values():  # `jobs` keeps them alive, so the ids stay theirs
        try:
            texts[id(problem)] = json.dumps([pack(getattr(problem, name, None)) for name in FIELDS]), len(problem.tests or ())
        except (TypeError, ValueError) as error:
            texts[id(problem)] = error, 0
    pairs = [(*texts[id(problem)], code if (code or "").strip() else "") for problem, code in jobs]
    from concurrent.futures import ThreadPoolExecutor  # here, so that the zygote stays small
    pool = ThreadPoolExecutor(workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))
    _pools.add(pool)
    try:
        unique = list(dict.fromkeys(pairs))
        results = dict(zip(unique, pool.map(functools.partial(_score, LIMITS | limits), unique)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        _pools.discard(pool)
    return [dataclasses.replace(results[pair], tests=list(results[pair].tests)) for pair in pairs]


def verdict(status: str, feedback: str, tests: list, public_passed: bool = False) -> Result:
    passed, total = sum(tests), len(tests)
    return Result(passed, total, passed / max(1, total), status, feedback, tests, public_passed)


def wall(limits: dict) -> float:
    return 1.5 * limits["seconds"] + 3  # CPU time decides; this ends only what sleeps, or starves on a loaded machine


def _score(limits: dict, pair: tuple) -> Result:
    """Have a judge score a pair. One that dies is replaced and the pair tried once more; one that is late is ended."""
    text, count, code = pair
    if isinstance(text, Exception):
        return verdict("unscorable", f"This problem cannot be scored: {text}", [])
    if not code:
        return verdict("no_code", "No code was found in the answer.", [])
    failed = [False] * count
    for again in (False, True):
        try:
            worker = Worker() if again else _idle.pop()  # the second try is a new judge's: what is idle may be dead as well
        except IndexError:
            worker = Worker()
        worker.socket.settimeout(20 + 2 * wall(limits) * max(1, count))
        _busy.add(worker)
        try:
            send(worker.socket, [text, code, limits])
            answer = verdict(*receive(worker.socket))
        except (EOFError, OSError) as error:
            worker.close()
            if isinstance(error, TimeoutError):
                return verdict("timeout", "The program ran out of time.", failed)
            if worker not in _busy:  # close() ended it
                break
            continue
        finally:
            _busy.discard(worker)  # before it is idle, or it would be taken from the next job's
        _idle.append(worker)
        return answer
    return verdict("error", "The program ended its judge.", failed)


_idle: list = []  # workers that wait for a job
_busy: set = set()  # workers that have one
_pools: set = set()  # of the calls of run_many that go on
os.register_at_fork(after_in_child=lambda: [mine.clear() for mine in (_idle, _busy, _pools)])  # they are the parent's


ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class Worker:
    """A judge's process as the trainer sees it."""

    def __init__(self) -> None:
        try:
            self.folder, (self.socket, theirs) = tempfile.mkdtemp(prefix="murphy-"), socket.socketpair()
        except OSError as error:
            raise RuntimeError(f"executor: cannot start a worker: {error}") from None
        command = [PYTHON, "-s", "-P", "-W", "ignore", os.path.abspath(__file__), "--judge", str(theirs.fileno()), self.folder,
                   os.environ.get("MURPHY_ISOLATION", "")]
        self.process = None
        try:  # a new process, never a fork: with torch loaded a fork is slow, and its memory could be read
            with theirs:
                self.process = subprocess.Popen(
                    command, cwd="/", env=ENVIRONMENT, pass_fds=[theirs.fileno()], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            lacking = receive(self.socket)
        except (EOFError, OSError) as error:
            raise RuntimeError(f"executor: cannot start the interpreter {PYTHON} as a worker, it did not start "
                               f"({self.close() or error}); set executor.PYTHON to one that works") from None
        if lacking:  # warnings shows each text once
            warnings.warn(f"executor: a program is less confined on this system: {lacking}", stacklevel=3)

    def kill(self) -> None:
        """End the judge and, with it, its zygote and candidate."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> str:
        """End all of it and clean up; the judge's last words."""
        self.kill()  # before its socket closes, at which it would clean up by itself
        self.socket.close()
        words = self.process.communicate()[1].decode("utf-8", "replace")[-2000:].strip() if self.process else ""
        empty(self.folder)
        os.rmdir(self.folder)
        return words


@atexit.register
def close() -> None:
    """End all workers, and calls of run_many that go on in other threads; the next call starts new ones."""
    for pool in list(_pools):
        pool.shutdown(wait=False, cancel_futures=True)
    while _busy:
        _busy.pop().kill()  # the thread that waits for it cleans up
    while _idle:
        _idle.pop().close()


def judge_main(number: int, folder: str, isolation: str) -> None:
    """Problem and program in, result out."""
    trainer, fault = socket.socket(fileno=number), "not Linux" if sys.platform != "linux" else ""
    fault = "MURPHY_ISOLATION is plain" if isolation == "plain" else fault
    for isolated in (False,) if fault else (True, False):
        zygote, theirs = socket.socketpair()
        if not os.fork():  # still a clean interpreter: no test was ever here
            trainer.close()
            zygote.close()
            zygote_main(theirs, folder, isolated)
        theirs.close()
        if not (failure := receive(zygote)):
            break
        fault = failure
    prctl(4, 0)  # PR_SET_DUMPABLE: no process of the same user may look into our memory
    plan = functools.lru_cache(200)(lambda problem: Plan(*unpack(json.loads(problem))))
    send(trainer, fault and f"it can see your files, processes and network ({fault})")
    os.dup2(0, 2)  # until here stderr was the trainer's, who does not read on
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        while True:
            problem, code, limits = receive(trainer)
            try:
                answer = Run(plan(problem), code, limits, zygote).result()
            except Unscorable as error:
                answer = ["unscorable", escape(f"This problem cannot be scored: {error}"), []]
            send(trainer, answer)
    except (EOFError, OSError):  # the trainer ended without a word (or the zygote did: then the trainer finds the folder gone)
        zygote.close()
        empty(folder)
        os.rmdir(folder)


class Died(BaseException):
    """The program is gone: (status, text). No Exception, so that no `except Exception` of a test can swallow it."""


class Unscorable(BaseException):
    """The tests cannot be run: (why,)."""


class Plan(ast.NodeTransformer):
    """A problem made ready; serves all programs of its group. tests: (source, graded, public) of each test.

    Each assert becomes a test of its own: `with __test__(k) as __is__: __is__(left, right)` notes the outcome and goes on.
    An assert in a loop is one test, passed if it was reached and never failed, and nothing broke the loop (or the rows of a
    parametrized test) off: `with __loop__(first, last)` is around it. An assert of a constant is none. A block
    `with raises(...)`, a try with `assert False` or `fail(...)` in it, a test function without an assert, and a row that
    has none but calls a helper (`verify(1, 2)`, `numpy.testing.assert_equal(...)`, `pytest.raises(...)`) are one each.
    """

    objects, takes, classes, operators = False, set(), [], set()  # what of the program may be used: read_code finds out

    def __init__(self, kind, texts, public, entry, context, reference) -> None:
        self.kind, self.entry, self.context, self.tests = kind, entry or "", context or "", []
        if kind not in ("assert", "stdin", "functional"):
            raise Unscorable(f"its kind is {kind!r}, expected assert, stdin or functional")
        if kind == "functional" and not entry:
            raise Unscorable("it names no entry_point")
        texts, public = texts if isinstance(texts, (list, tuple)) else [], public or []
        items = [(text, False, True) for text in public if text not in texts]  # shown, but not graded
        items += [(text, True, text in public) for text in texts]
        try:
            if kind == "assert":
                self.read_code(items, ast.parse(reference or ""))
            else:
                self.read_cases(items, (str, str) if kind == "stdin" else (list, object))
        except (SyntaxError, ValueError, TypeError, RecursionError, ImportError) as error:
            raise Unscorable(f"a test cannot be read: {error}") from None
        self.public = any(public for *_, public in self.tests)
        if not any(graded for _, graded, _ in self.tests):
            raise Unscorable("it has no tests")

    def read_cases(self, items: list, kinds: tuple) -> None:
        self.cases, self.tests = [case for case, *_ in items], [("", *mark) for _, *mark in items]
        for case in self.cases:
            if not isinstance(case, (list, tuple)) or len(case) != 2 or not all(map(isinstance, case, kinds)):
                raise ValueError(f"expected a pair of {' and '.join(kind.__name__ for kind in kinds)}, got {show(case, 60)}")

    def read_code(self, items: list, reference: ast.Module) -> None:
        """Rewrite the tests, and find which of their names mean the program's: the entry point, and what the reference
        defines (without one: what nothing else defines); never len or abs, and never what tests or context define."""
        def find(tree, kind):
            return [node for node in ast.walk(tree) if isinstance(node, kind)]

        self.units, used = [], set()
        self.imports = [ast.unparse(node) for node in reference.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.names = {x.name for x in reference.body if isinstance(x, (ast.FunctionDef, ast.ClassDef))} | {self.entry} - {""}
        for text, *self.mark in items:
            tree, first = ast.parse(text), len(self.tests)
            if "redirect_stdout" in text or "sys.stdout" in text:
                raise Unscorable("a test captures what the program prints")
            if re.search(r"^\s*(import|from) pytest\b", text, re.M):
                import pytest  # noqa: F401  the real one, only for a problem that needs it
            self.names |= {name.name for node in find(tree, ast.ImportFrom) if node.module == "solution" for name in node.names}
            used |= {node.id for node in find(tree, ast.Name)}
            self.visit(tree)
            calls = [ast.unparse(node.value.func) for node in tree.body
                     if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
            if len(self.tests) == first and re.search("(?i)assert|raises|check|verify|test", " ".join(calls)):
                tree.body = [self.test(text, tree.body)]
            self.units.append((first, len(self.tests), compile(ast.fix_missing_locations(tree), "<test>", "exec")))
        # A function that returns a value may not change its arguments for the tests, since it could empty them to agree with
        # sorted(xs); unless the reference takes from its argument, as a dequeue(queue) must.
        self.takes = {f.name for f in reference.body if isinstance(f, ast.FunctionDef) and f.name in used
                      for node in find(f, ast.Attribute) if node.attr in ("pop", "popleft", "popitem")
                      and ast.unparse(node.value) in [x.arg for x in f.args.args]}
        # Objects stay with the program; which operators may ask them, and whether attributes may, is the reference's say.
        classes = find(reference, ast.ClassDef)
        self.classes = [(node.name, [ast.unparse(base) for base in node.bases]) for node in classes]
        errors = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}
        for node in classes:  # exceptions are classes of the judge's own (see code_tests), so they open nothing
            errors |= {node.name} & {node.name for base in node.bases if ast.unparse(base) in errors}
        classes = [node for node in classes if node.name not in errors]
        self.operators = {part.name for node in classes for part in node.body if isinstance(part, ast.FunctionDef)}
        if any(node.bases or node.decorator_list for node in classes):
            self.operators |= {f"__{name}__" for name in "len iter getitem contains str eq lt".split()}
        self.objects = bool(classes) if reference.body else any(name[:1].isupper() for name in self.names)
        if not reference.body:
            self.names |= used - {*dir(builtins), *sys.stdlib_module_names}

    def test(self, source: str, body: list) -> ast.With:
        self.tests.append((" ".join(source.split()), *self.mark))
        return self.within(f"__test__({len(self.tests) - 1}) as __is__", body)

    def within(self, context: str, body: list) -> ast.With:
        manager = ast.parse(f"with {context}: pass").body[0]
        manager.body = body
        return manager

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        source = ast.unparse(node.test)
        match node.test:
            case ast.Constant():
                return node
            case ast.Compare(left, [ast.Eq()], [right]):
                sides = f"{ast.unparse(left)}, {ast.unparse(right)}"
            case _:
                sides = source
        return self.test(source, ast.parse(f"__is__({sides})").body)

    def visit_For(self, node: ast.AST) -> ast.AST:
        first = len(self.tests)
        self.generic_visit(node)
        return self.within(f"__loop__({first}, {len(self.tests)})", [node]) if len(self.tests) > first else node

    visit_While = visit_For

    def visit_With(self, node: ast.AST) -> ast.AST:
        pattern = r"\Awith (pytest\.)?raises\(" if isinstance(node, ast.With) else r"^\s*(assert (False|0)\b|pytest\.fail\()"
        source = ast.unparse(node)
        return self.test(source, [node]) if re.search(pattern, source, re.M) else self.generic_visit(node)

    visit_Try = visit_With

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        """A test, which tells that it is one when it is defined; the asserts of a helper fail the test that called it."""
        if not node.name.startswith("test") and (node.name != "check" or len(node.args.args) != 1):
            return node
        args, marks = node.args.args, " ".join(map(ast.unparse, node.decorator_list))
        needed = {arg.arg for arg in args[:len(args) - len(node.args.defaults)]} - {"self", *re.findall(r"\w+", marks)}
        if node.name == "check" and not self.entry:
            raise Unscorable("a test defines check(candidate), but the problem has no entry_point")
        if isinstance(node, ast.AsyncFunctionDef) or node.name != "check" and needed:
            raise Unscorable(f"the test {node.name} is async or needs a fixture")
        first = len(self.tests)
        self.generic_visit(node)
        if len(self.tests) == first:
            node.body = [self.test(node.name + "()", node.body)]
        node.decorator_list.insert(0, ast.parse(f"__case__({first}, {len(self.tests)})", mode="eval").body)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


PASSED, UNREACHED = ("passed", ""), ("failed", "it was never reached")  # outcomes of a test: (status, line of feedback)


class Run:
    """One program under test, seen from the judge: its socket, its last call, the outcome of each test."""

    def __init__(self, plan: Plan, code: str, limits: dict, zygote: socket.socket) -> None:
        self.plan, self.code, self.limits, self.zygote, self.socket, self.objects = plan, code, limits, zygote, None, {}
        self.lock = threading.RLock()  # for threads of a test
        self.last: Any = None  # [what tells of the last call, its value]
        self.outcomes, self.death = [UNREACHED] * len(plan.tests), None
        self.unsent = None  # what a test handed the program that could not be sent

    def result(self) -> list:
        """Run all tests; the arguments of verdict()."""
        try:
            with self.attempt(range(len(self.outcomes))):
                self.case_tests() if self.plan.kind != "assert" else self.code_tests()
        except Died:
            pass  # the tests that were not reached have failed
        finally:
            self.stop()
        graded = [outcome == PASSED for outcome, (_, graded, _) in zip(self.outcomes, self.plan.tests) if graded]
        shown = [outcome for outcome, (_, _, public) in zip(self.outcomes, self.plan.tests) if public] or self.outcomes
        words = {status for status, _ in self.outcomes}
        status = next(word for word in ("timeout", "memory", "failed", "error", "passed") if word in words)
        failures = dict.fromkeys(outcome for outcome in shown if outcome != PASSED)  # the same failure is told of once
        lines = [f"Test {shown.index(failure) + 1} failed: {failure[1]}" for failure in failures]
        if not failures:
            lines = ["All tests passed." if all(graded) else "The public tests pass, but hidden tests fail."]
        text = "\n".join(map(escape, lines[:int(self.limits["max_failures"])]))
        return ["passed" if all(graded) else status, cut(text, int(self.limits["feedback_chars"])), graded, not failures]

    def case_tests(self) -> None:
        function, equal = self.printed, same_output
        if self.plan.kind == "functional":
            remote = Remote(self, "entry:" + self.plan.entry, self.plan.entry)
            function, equal = lambda args: remote(*unpack(pack(args))), same  # a copy, for what it changes in place
            self.start()
            self.answer()
        # Public ones first, so that a program cannot answer them with what hidden ones asked.
        for number, (args, expected) in sorted(enumerate(self.plan.cases), key=lambda case: not self.plan.tests[case[0]][2]):
            try:
                with self.test(number, equal) as check:
                    check(function(args), expected)
            except Died as death:
                if death.args[0] == "timeout" or self.plan.kind == "functional":
                    raise  # a program that loops may not cost its time limit once per case

    def printed(self, given: str) -> str:
        """What the program prints for an input, in a fresh process, which may neither raise nor be ended."""
        self.last = [lambda: f"with the input {show(given, 300)} the program", "nothing"]
        reader, writer = os.pipe()
        memory = hasattr(os, "memfd_create")  # a full disk would fail the program
        with open(os.memfd_create("in"), "w+b") if memory else tempfile.TemporaryFile() as source, open(reader, "rb", 0) as output:
            source.write(given.encode("utf-8", "replace"))
            source.seek(0)
            with open(writer, "wb", 0):
                for file in (source.fileno(), writer):
                    os.fchmod(file, 0o666)  # the program runs as another user, and may open them as /dev/stdin and /dev/stdout
                self.start(source.fileno(), writer)
            text, size, limit = bytearray(), 0, int(self.limits["output_bytes"])
            while data := output.read(1 << 16):  # what exceeds the limit is read and thrown away
                text, size = text + data[:limit - len(text)], size + len(data)
            self.answer()
        self.last[1] = text.decode("utf-8", "replace") + (f"...[{size - limit} cut]" if size > limit else "")
        return self.last[1]

    def code_tests(self) -> None:
        cases: list = []
        case = lambda first, last: lambda test: cases.append((first, last, test)) or test
        space = {"__name__": "test", "__test__": self.test, "__loop__": self.loop, "__case__": case}
        for line in self.plan.imports:  # a test may use what the solution imports
            with contextlib.suppress(ImportError):  # a package for the solution alone; a test that needs it fails, and says so
                exec(line, space)
        self.start()
        self.answer()
        remotes = {name: Remote(self, name, name) for name in self.plan.names}
        for name, bases in self.plan.classes:  # exceptions of the solution are classes here, so that a test can catch them
            for base in (remotes.get(base, getattr(builtins, base, None)) for base in bases):
                if isinstance(base, type) and issubclass(base, Exception):
                    remotes[name] = type(name, (base,), {})
        sys.modules["solution"] = types.SimpleNamespace(**remotes)
        space |= remotes
        exec(self.plan.context, space)
        space |= {name: remote for name, remote in remotes.items() if name == self.plan.entry}  # the context may define it, too
        for first, last, code in self.plan.units:
            with self.attempt(range(first, last)):
                exec(code, space)
        for first, last, test in cases:
            with self.attempt(range(first, last)):
                self.call_test(space, test, first, last)

    def call_test(self, space: dict, test: Any, first: int, last: int) -> None:
        """Call a test function, or method of a test class, once for each row of its parameters."""
        if test.__name__ == "check":
            return test(space[self.plan.entry])
        owner, rows = space.get(test.__qualname__.rpartition(".")[0]), [{}]
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "parametrize":
                names, values, *_ = *mark.args, *(mark.kwargs[key] for key in ("argnames", "argvalues") if key in mark.kwargs)
                names = re.findall(r"\w+", names) if isinstance(names, str) else names
                values = [dict(zip(names, value.values if type(value).__name__ == "ParameterSet"  # pytest.param
                                   else value if len(names) > 1 else [value])) for value in values]
                rows = [{**row, **value} for row in rows for value in values]
        with self.loop(first, last) if len(rows) > 1 else contextlib.nullcontext():
            for row in rows:
                this = owner() if owner else None  # a fresh object for each
                for name in ("setUpClass", "setup_class", "setUp", "setup_method"):
                    if setup := getattr(this, name, None):
                        setup(*[test] * (setup.__code__.co_argcount - 1))
                test(*[this] if owner else [], **row)

    @contextlib.contextmanager
    def loop(self, first: int, last: int) -> Any:
        """The context around what may reach a test more than once: broken off, it leaves none of its tests passed."""
        try:
            yield
        except BaseException:
            self.outcomes[first:last] = [UNREACHED if outcome == PASSED else outcome for outcome in self.outcomes[first:last]]
            raise

    @contextlib.contextmanager
    def test(self, number: int, equal: Any = operator.eq) -> Any:
        """The context around one test: called with (left, right), which must be equal, or with (truth)."""
        def check(*values):
            if not (equal(*values) if len(values) == 2 else values[0]):
                wrong = AssertionError()
                wrong.sides = values  # no arguments of it: their text may be long, or none
                raise wrong

        with self.attempt(range(number, number + 1)):
            yield check
            if self.outcomes[number] is UNREACHED and not self.death:  # a test that has failed once has failed
                self.outcomes[number] = PASSED

    @contextlib.contextmanager
    def attempt(self, numbers: range) -> Any:
        """The context around a piece of test code: what breaks it fails its tests that were not reached, or else the last."""
        try:
            yield
            if self.death or self.unsent:  # which the test may have caught
                raise self.death or self.unsent
        except BaseException as error:
            self.unsent = None
            for number in [n for n in numbers if self.outcomes[n] is UNREACHED] or numbers[-1:]:
                if self.outcomes[number] in (UNREACHED, PASSED):
                    self.outcomes[number] = self.explain(error, self.plan.tests[number][0])
            if isinstance(error, (Died, Unscorable)):
                raise
        finally:
            if self.last and self.plan.public and not any(self.plan.tests[number][2] for number in numbers):
                self.last = ()  # what a hidden test called is not for a public one to tell

    def explain(self, error: BaseException, source: str) -> tuple[str, str]:
        """(status, line of feedback) of what failed a test, whose source is given."""
        call, value = (self.last[0](), self.last[1]) if self.last else ("the program", None)
        if isinstance(error, Died):
            return error.args[0], f"{call} {error.args[1]}"
        text = f"{type(error).__name__}: {cut(str(error), 300)}".removesuffix(": ")
        if hasattr(error, "line"):  # raised by the program
            lines = ["", *self.code.splitlines()]
            where = f" (line {error.line}: {cut(lines[error.line].strip(), 120)})" if 0 < error.line < len(lines) else ""
            return "memory" if isinstance(error, MemoryError) else "error", f"{call} raised {text}{where}"
        sides = getattr(error, "sides", ())
        expected = cut(source, 200) + ("" if sides else f" ({text})")
        if len(sides) == 2 and any(side is value for side in sides):
            expected = show(sides[sides[0] is value], 400 if self.plan.kind == "stdin" else 200)
        if not self.last:
            return "failed", f"expected {expected}"
        verb, room = ("printed", 400) if self.plan.kind == "stdin" else ("returned", 200)
        return "failed", f"{call} {verb} {show(value, room)}, expected {expected}"

    def start(self, source: int = 0, sink: int = 1) -> None:
        """A new candidate begins to define the program; source and sink are its stdin and stdout (else ours: /dev/null)."""
        self.stop()
        self.death = None
        signal.signal(signal.SIGALRM, lambda *_: self.die("timeout", "ran out of time"))
        signal.setitimer(signal.ITIMER_REAL, wall(self.limits), 1)  # also bounds our own work on what it answers
        self.socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.zygote, [json.dumps(self.limits).encode()], [source, sink, theirs.fileno()])
        send(self.socket, ["__main__" if self.plan.kind == "stdin" else "solution", self.plan.context, self.code,
                           [name for name, _ in self.plan.classes], bool(self.plan.takes)])

    def stop(self) -> list:
        """End the candidate; [whether it ran out of time, its exit code]. If the zygote is gone this raises, here and once more
        in result(), so that the judge ends, too; the trainer then tries the program again with another."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self.socket:
            return [False, 0]
        self.socket.close()
        send(self.zygote, "stop")
        ending, self.socket = receive(self.zygote), None
        return ending

    def die(self, status: str, text: str) -> None:
        self.death = Died(status, text)
        raise self.death

    def ask(self, label: str, function: Any, /, *args, **kwargs) -> Any:
        """Have the candidate do function(*args, **kwargs); a function is a Remote, or the name of an operator or a builtin."""
        try:
            request = pack([function, list(args), kwargs], self.native)
        except (TypeError, ValueError) as error:
            if self.last is not None or isinstance(error, ValueError):  # the program may have made it: it was called before
                self.unsent = TypeError(f"what cannot be sent to the program: {error}")  # noted, so that raises() is not content
                raise self.unsent from None
            raise Unscorable(f"a test hands the program what cannot be sent to it: {error}") from None
        call, called = [lambda: self.text(label, request), "nothing"], isinstance(function, Remote)
        with self.lock:
            if called:
                self.last = call
            call[1], changes = self.answer(request)
        # Arguments that the function changed in place; not those of one that returns a value (see read_code), say it what it may.
        for place, new in changes if called and (call[1] is None or function._ref in self.plan.takes) else ():
            if 0 <= place < len(args) and type(args[place]) is type(new) in (list, dict, set):
                args[place].clear()
                (args[place].extend if type(new) is list else args[place].update)(new)
        return call[1]

    def text(self, label: str, request: list) -> str:
        _, args, kwargs = unpack(request, lambda tag, ref: Remote(self, ref, "object"))
        words = [show(arg, 100) for arg in args] + [f"{name}={show(value, 100)}" for name, value in kwargs.items()]
        return cut(f"{label}({', '.join(words)})", 300)

    def answer(self, request: Any = None) -> tuple[Any, list]:
        """What the candidate says to a request: a value and changes of arguments, or what it raised, raised here."""
        if self.death:
            raise self.death
        try:
            if request:
                send(self.socket, request)
            message = receive(self.socket, int(self.limits["output_bytes"]))
            if "error" not in message:
                changes = [(int(place), unpack(new, self.foreign)) for place, new in message.get("changes", ())]
                return unpack(message["value"], self.foreign), changes
            error = rebuild(*message["error"])
            if isinstance(error, StopIteration) and (not request or request[0] != "next"):  # or map(f, xs) in a test would end
                error = rebuild(["builtins.RuntimeError"], "the program raised StopIteration", error.line)
        except OverflowError:
            self.die("error", f"returned more than {self.limits['output_bytes']} bytes")
        except (OSError, EOFError):
            late, code = self.stop()
            if late:
                self.die("timeout", "ran out of time")
            if code == 0 and self.plan.kind == "stdin":
                return None, []  # it left by itself: what it printed decides
            if code in (0, -signal.SIGKILL):  # (which may be ours: it had closed its socket)
                self.die("error", "ended before it answered")
            names = {number.value: number.name for number in signal.Signals}  # not all have one
            self.die("error", f"ended with exit code {code}" if code > 0 else f"was ended by {names.get(-code, f'signal {-code}')}")
        except Exception:
            self.die("error", "sent something that is no answer")
        raise error

    def native(self, x: Any, depth: int) -> dict:
        if isinstance(x, Remote):
            return {"ref": x._ref}
        if x is getattr(builtins, getattr(x, "__name__", ""), self):  # a test may hand over int or len
            return {"ref": "builtin:" + x.__name__}
        raise TypeError(f"a value of type {type(x).__name__} is no plain data")

    def foreign(self, tag: str, parts: list) -> "Remote":
        number, names = parts
        if tag != "object" or type(number) is not int or number < 0 or not all(isinstance(name, str) for name in names):
            raise TypeError(tag)
        if number not in self.objects:  # one object there is one object here
            allowed = {"__iter__", "__next__"} if "iterator" in names else self.plan.operators & OPERATORS.keys()
            kind = type(names[0][:60], (Remote,), {name: OPERATORS[name] for name in allowed} | {"__hash__": Remote.__hash__})
            self.objects[number] = kind(self, number, names[0][:60], names)
        return self.objects[number]


class Remote:
    """What stays with the program: its functions and objects. Calls and attributes cross; an operator does only if a class
    of the reference defines it (see foreign), so that no object of the program can decide that it equals the answer."""

    def __init__(self, run: Run, ref: Any, label: str, names: Any = ()) -> None:
        self.__dict__.update(_run=run, _ref=ref, _label=label, _names=names)

    def __call__(self, /, *args, **kwargs):
        return self._run.ask(self._label, self, *args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("__") or not self._run.plan.objects:
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        value = self._run.ask(self._label, "getattr", self, name)
        if isinstance(value, Remote) and value._names[0] in ("method", "function", "builtin_function_or_method"):
            value.__dict__["_label"] = f"{self._label}.{name}"
        return value

    __repr__ = lambda self: f"<{self._label} object>"
    __setattr__ = lambda self, name, value: self._run.ask(self._label, "setattr", self, name, value)
    __instancecheck__ = lambda self, x: isinstance(x, Remote) and self._label in x._names
    __hash__ = lambda self: hash(str(self._ref))


def _operator(name: str) -> Any:
    def method(self, *args):
        if name == "eq" and not isinstance(args[0], Remote):
            return False  # plain data is the answer itself: no object equals it
        return self._run.ask(self._label, name, self, *args)

    return method


OPERATORS = {f"__{name}__": _operator(name) for name in """eq lt le gt ge add sub mul truediv floordiv mod pow and or neg abs
        len iter next str bool int float getitem setitem delitem contains""".split()}


def rebuild(classes: list, text: str, line: int) -> Exception:
    """An exception as the tests' own except clauses and raises() know it."""
    names = [name.rpartition(".")[::2] for name in classes]
    known = [getattr(sys.modules.get(module), name, None) for module, name in names]
    base = next(kind for kind in [*known, Exception] if isinstance(kind, type) and issubclass(kind, Exception)
                and not issubclass(kind, BaseExceptionGroup))
    text = str(text)
    kind = type(re.sub(r"\W", "?", names[0][1])[:60], (base,), {"__str__": lambda self: text})
    error = kind.__new__(kind)
    error.args, error.line = (text,), int(line)
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
    def numbers(line):
        if not line.isascii() or "_" in line or max(map(len, line.split()), default=0) > 4000:  # as a float such would be inf
            raise ValueError
        return [int(word) if re.fullmatch(r"[+-]?\d{1,4000}", word) else float(word) for word in line.split()]

    left, right = ([row.rstrip() for row in text.rstrip().splitlines()] for text in (output, expected))
    with contextlib.suppress(ValueError):  # not numbers
        return len(left) == len(right) and all(a == b or same(numbers(a), numbers(b)) for a, b in zip(left, right))
    return False


def zygote_main(control: socket.socket, folder: str, isolated: bool) -> None:
    """Fork a candidate, watch its limits, end it when the judge says so, report how it ended, clean up; again."""
    uid = 50_000 + os.getpid() % 10_000 if isolated and not os.getuid() else 0  # one per worker: in its namespace each is process 1
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an init without handlers cannot be signalled from inside
    for name in PRELOADED.split():
        __import__(name)
    try:
        folder, rules, size = enter_namespaces(folder) if isolated else folder, None, 0
        if sys.platform == "linux":
            rules, size = syscall_filter(), int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (8 << 20)
            prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
            prctl(4, 0)  # PR_SET_DUMPABLE
    except (OSError, KeyError) as error:
        send(control, str(error))
        os._exit(1)
    send(control, "")
    os.dup2(0, 2)
    os.environ.update(HOME=folder, TMPDIR=folder)
    sys.argv[:] = [""]
    gc.collect()
    gc.freeze()  # a candidate's collector does not touch, and so not copy, the pages that it shares with us
    gc.disable()
    empty(folder)
    while True:
        uid and os.chmod(folder, 0o777)
        message, files, *_ = socket.recv_fds(control, 1 << 12, 3)
        if not message:  # the judge has ended
            os._exit(0)
        limits = json.loads(message)
        child = os.fork()
        if not child:
            control.close()
            candidate(files, lambda: confine(folder, limits, uid, rules, size))
        for file in files:
            os.close(file)
        used, tick = 0.0, 0.1
        while not select.select([control], [], [], tick)[0]:
            with contextlib.suppress(OSError):  # it has ended
                used = time.clock_gettime(~child << 3 | 2)  # the CPU clock of a process
                tick = max(0.005, min(0.1, limits["seconds"] - used))
                if used > limits["seconds"]:
                    os.kill(child, signal.SIGKILL)
        receive(control)
        for target in (child, -child):
            with contextlib.suppress(OSError):
                os.kill(target, signal.SIGKILL)
        _, ending, usage = os.wait4(child, 0)
        empty(folder)  # before the judge hears of it, or the time would be the next program's
        send(control, [max(used, usage.ru_utime + usage.ru_stime) > limits["seconds"], os.waitstatus_to_exitcode(ending)])


PRELOADED = "bisect cmath copy enum heapq itertools random string"  # what most programs import, beside ours
DENIED = (  # system calls that a program has no use for: x86_64 and aarch64 numbers
    # fork, vfork, ptrace, process_vm_readv/writev, pidfd_getfd
    (57, 435), (58, 435), (101, 117), (310, 270), (311, 271), (438, 438),
    # kill, tkill, tgkill, pidfd_send_signal, rt_sigqueueinfo, rt_tgsigqueueinfo
    (62, 129), (200, 130), (234, 131), (424, 424), (129, 138), (297, 240),
    # sched_setattr, ioprio_set: of others, too
    (314, 274), (251, 30),
    # execve, execveat: from a thread they would clear PR_SET_PDEATHSIG
    (59, 221), (322, 281),
    # connect, unshare, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup, memfd_create
    (42, 203), (272, 97), (248, 217), (249, 218), (250, 219), (321, 280), (298, 241), (323, 282), (425, 425), (319, 279),
    # shmget, semget, msgget, mq_open, setpriority, sched_setscheduler
    (29, 194), (64, 190), (68, 186), (240, 180), (141, 140), (144, 119))
LIBRARY = ctypes.CDLL(None, use_errno=True)


def _c(name: str, *args) -> None:
    """A function of the C library; raises OSError."""
    if getattr(LIBRARY, name)(*(x.encode() if isinstance(x, str) else x for x in args)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int, pointer: Any = None) -> None:
    if sys.platform == "linux":
        _c("prctl", option, ctypes.c_ulong(value), pointer, 0, 0)


def enter_namespaces(folder: str) -> str:
    """Own user (unless root), mount, pid, net and ipc namespaces, and a root with nothing but python and an empty folder:
    /tmp, or /scratch where python itself lies in /tmp. Returns that folder."""
    NOSUID, NODEV, NOEXEC, KEEP, BIND, REMOUNT_READ_ONLY, PRIVATE = 2, 4, 8, 0xC08, 0x5000, 0x1023, 0x44000
    uid, gid = os.getuid(), os.getgid()
    _c("unshare", 0x6C020000 | (1 << 28 if uid else 0))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")) if uid else ():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if child := os.fork():  # the init of the new pid namespace: when it dies, all in there die
        os.waitpid(child, 0)
        os._exit(0)
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    _c("mount", "none", "/", None, PRIVATE, None)
    _c("mount", "tmpfs", folder, "tmpfs", NOSUID, "size=1m,mode=755")
    for path in ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store", sys.base_prefix, sys.prefix, *sys.path,
                 "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]:
        inside = folder + path
        if os.path.islink(path) and path.count("/") == 1:
            os.symlink(os.readlink(path), inside)
        elif os.path.exists(path):
            os.makedirs(inside if os.path.isdir(path) else os.path.dirname(inside), exist_ok=True)
            os.path.isdir(path) or open(inside, "w").close()
            _c("mount", path, inside, None, BIND, None)
            if not path.startswith("/dev/"):  # the flags that are kept may not be dropped in a user namespace
                _c("mount", "none", inside, None, REMOUNT_READ_ONLY | NODEV | os.statvfs(path).f_flag & KEEP, None)
    scratch = "/scratch" if os.path.exists(folder + "/tmp") else "/tmp"
    for name, target in (("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"), ("fd", "")):
        os.symlink(f"/proc/self/fd{target}", f"{folder}/dev/{name}")
    os.mkdir(folder + "/proc")
    os.mkdir(folder + scratch)
    with contextlib.suppress(OSError):  # in a container that hides parts of /proc; only /dev/stdin needs it
        _c("mount", "proc", folder + "/proc", "proc", NOSUID | NODEV | NOEXEC, "hidepid=2")
    os.chdir(folder)
    _c("syscall", {"x86_64": 155, "aarch64": 41}[os.uname().machine], ".", ".")  # pivot_root
    _c("umount2", ".", 2)
    _c("mount", "none", "/", None, REMOUNT_READ_ONLY, None)
    _c("mount", "tmpfs", scratch, "tmpfs", NOSUID | NODEV, "size=64m,nr_inodes=4096")
    os.stat(os.__file__)  # python is there
    return scratch


def syscall_filter() -> Any:
    """A seccomp program (classic BPF). No process can be started, so that nothing outlives the program."""
    LOAD, EQUAL, ABOVE, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 6
    KILL, DENY, MISSING, ALLOW = 1 << 31, 0x50001, 0x50026, 0x7FFF0000
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, (0xC000003E, 0xC00000B7)[column]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0),
            (ABOVE, 0, 1, 1 << 30), (RETURN, 0, 0, MISSING),  # the same calls under other numbers (x32)
            (EQUAL, 0, 1, 435), (RETURN, 0, 0, MISSING)]  # clone3, whose flags cannot be read; the library turns to clone
    for numbers in DENIED:
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, DENY)]
    only = {(56, 220): (BITS, 1 << 16),  # clone: a thread
            (41, 198): (EQUAL, socket.AF_UNIX),  # socket: a local one
            (302, 261): (EQUAL, 0), (203, 122): (EQUAL, 0)}  # prlimit64, sched_setaffinity: of itself
    for numbers, (test, value) in only.items():  # the first argument decides
        code += [(EQUAL, 0, 4, numbers[column]), (LOAD, 0, 0, 16), (test, 1, 0, value)]
        code += [(RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    never = {(72, 25): (24, (8, 10, 15)), (16, 29): (24, (0x8901, 0x8902)),  # fcntl, ioctl: SETOWN and SETSIG signal anybody
             (157, 167): (16, (1,))}  # prctl: PR_SET_PDEATHSIG would let it outlive its zygote
    for numbers, (offset, values) in never.items():
        code += [(EQUAL, 0, 2 * len(values) + 2, numbers[column]), (LOAD, 0, 0, offset)]
        for value in values:
            code += [(EQUAL, 0, 1, value), (RETURN, 0, 0, DENY)]
        code.append((RETURN, 0, 0, ALLOW))
    code.append((RETURN, 0, 0, ALLOW))
    return ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in code))


def empty(folder: str) -> None:
    """Remove all in a folder. What lies in its folders is pulled up, so that no depth needs recursion or a long path."""
    if os.path.islink(folder) or not os.path.isdir(folder):  # a program that is not confined replaced it
        os.path.lexists(folder) and os.unlink(folder)
        os.mkdir(folder)
    os.chmod(folder, 0o700)
    while names := os.listdir(folder):
        for path in (os.path.join(folder, name) for name in names):
            if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, 0o700)
                for inner in os.listdir(path):
                    os.rename(os.path.join(path, inner), os.path.join(folder, os.urandom(12).hex()))
                os.rmdir(path)
            else:
                os.unlink(path)


def confine(folder: str, limits: dict, uid: int, rules: Any, size: int) -> None:
    """In the candidate, before the program: from here on all is in its power, and holds nothing worth stealing."""
    os.setsid()
    os.chdir(folder)
    for name, value in dict(CPU=math.ceil(limits["seconds"]) + 1, CORE=0, NOFILE=128, FSIZE=64 << 20,
                            NPROC=64 if uid else 1 << 16, AS=size + int(limits["memory_mb"] * (1 << 20))).items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        with contextlib.suppress(*() if rules else (ValueError, OSError)):  # macOS refuses some
            resource.setrlimit(which, (min(value, hard) if hard >= 0 else value,) * 2)
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    if rules:
        _c("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))  # no capability, even as root
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        prctl(4, 1)  # PR_SET_DUMPABLE: /dev/stdin is under /proc/self
        prctl(22, 2, struct.pack("<HxxxxxxQ", len(rules) // 8, ctypes.addressof(rules)))  # PR_SET_SECCOMP


def candidate(files: list, confine: Any) -> None:
    """Define the program, then do what the judge asks: function(*args, **kwargs). files: stdin, stdout, a socket."""
    try:
        for place, file in zip((0, 1, 3), files):
            os.dup2(file, place)
        for place in (0, 1, 2):  # the judge's, whose locks and flags would stay for the next program
            if os.path.sameopenfile(place, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), place)
        os.closerange(4, 64)
        sys.stdin = sys.__stdin__ = open(0, errors=sys.stdin.errors, closefd=False)  # the old ones recall whether /dev/null can seek
        sys.stdout = sys.__stdout__ = open(1, "w", errors=sys.stdout.errors, closefd=False)
        gc.enable()
        connection = socket.socket(fileno=3)
        name, context, code, classes, takes = receive(connection)
        error, main, objects, module = None, name == "__main__", [], types.ModuleType(name)
        sys.modules[name] = sys.modules["__main__"] = module  # dataclasses look their module up there; ours is out of sight
        space = module.__dict__
        try:
            confine()
            with contextlib.suppress(NameError):  # set-up code of the tests, which uses the program's names: only the judge's
                exec(compile(context, "<context>", "exec"), space)
            exec(compile(code.removeprefix("\ufeff"), "<solution>", "exec"), space)
        except BaseException as fault:
            error = None if main and isinstance(fault, SystemExit) and fault.code in (None, 0) else fault
        if main:
            threading._shutdown()
            atexit._run_exitfuncs()
            try:
                getattr(sys.stdout, "closed", False) or sys.stdout.flush()
                space.clear()  # closes its files
            except Exception as fault:
                error = error or fault
        send(connection, {"error": describe(error)} if error else {"value": None})
        while not main:
            request = receive(connection)
            try:
                reply = perform(space, objects, set(classes), takes, request)
            except BaseException as error:
                reply = {"error": describe(error)}
            send(connection, reply)
    finally:
        os._exit(0)


def perform(space: dict, objects: list, classes: set, takes: bool, request: list) -> dict:
    def native(tag, ref):
        """What the judge calls by a number (an object that it was told of) or by name."""
        if isinstance(ref, int):
            return objects[ref]
        if ref.startswith("builtin:"):
            return getattr(builtins, ref[8:])
        owner, _, name = ref.removeprefix("entry:").rpartition(".")
        if not owner and name in space:
            return space[name]
        if not ref.startswith("entry:") or (owner or "Solution") not in space:
            raise NameError(f"name '{name}' is not defined")
        return getattr(space[owner or "Solution"](), name)  # a fresh object for each call

    def foreign(x, depth):
        """What is no plain data: made plain, or kept here under a number."""
        names = [kind.__name__ for kind in type(x).__mro__]
        if classes.isdisjoint(names):  # else an object of a class that the tests know
            if type(x).__module__ == "numpy":
                return pack(x.tolist(), foreign, depth + 1)
            for base in (int, float, str, bytes, list, tuple, dict, set, frozenset, collections.deque):
                if isinstance(x, base):  # a subclass: made by its base's own methods, which the program cannot replace
                    x = {int: int.__index__, float: float.__float__, str: str.__str__}.get(base, base)(x)
                    return pack(x, foreign, depth + 1)
            if isinstance(x, (collections.abc.Iterator, collections.abc.MappingView)):
                x, names = iter(x), ["iterator"]
        number = next((n for n, old in enumerate(objects) if old is x), len(objects))
        objects[number:] = objects[number:] or [x]
        return {"object": [number, names]}

    function, args, kwargs = unpack(request, native)
    if isinstance(function, str):
        function = getattr(builtins, function, None) or getattr(operator, f"__{function}__")
    value, changes = function(*args, **kwargs), []
    if value is None or takes:
        changes = [[place, pack(arg, foreign)] for place, arg in enumerate(args) if type(arg) in (list, dict, set)]
    return {"value": pack(value, foreign), "changes": changes}


def describe(error: BaseException) -> list:
    """An exception as plain data: its classes, its message, the line of the program that raised it."""
    text, line, trace = "", error.lineno if isinstance(error, SyntaxError) else 0, error.__traceback__
    with contextlib.suppress(BaseException):  # the program's own __str__
        text = str(error)[:4000]
    while trace:
        line, trace = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<solution>" else line, trace.tb_next
    return [[f"{kind.__module__}.{kind.__name__}"[:100] for kind in type(error).__mro__[:20]], text, line or 0]


def _size(x: Any) -> Any:
    """Refuse numbers whose next operation could take for ever."""
    if (x.bit_length() > 1 << 21 if type(x) is int else abs(x.stop - x.start) > 10**7 if type(x) is range else
            x.is_finite() and abs(x.adjusted()) > 10**4):
        raise ValueError(f"a {type(x).__name__} of absurd size")
    return x


TYPES = {kind.__name__: (kind, parts, make) for kind, parts, make in (  # the loops are Python's, so that a timer can end them
    (tuple, list, tuple), (set, list, lambda v: {x for x in v}), (frozenset, list, lambda v: frozenset({x for x in v})),
    (dict, lambda x: map(list, x.items()), lambda v: {key: x for key, x in v}), (collections.deque, list, collections.deque),
    (int, lambda x: [hex(x)], lambda v: _size(int(v[0], 16))), (complex, lambda x: [x.real, x.imag], lambda v: complex(*v)),
    (range, lambda x: [x.start, x.stop, x.step], lambda v: _size(range(*v))),
    (decimal.Decimal, lambda x: [str(x)], lambda v: _size(decimal.Decimal(v[0]))),
    (fractions.Fraction, lambda x: [x.numerator, x.denominator], lambda v: fractions.Fraction(*v)),
    (datetime.timedelta, lambda x: [x.days, x.seconds, x.microseconds], lambda v: datetime.timedelta(*v)),
    *((kind, lambda x: [x.decode("latin-1")], lambda v, kind=kind: kind(v[0].encode("latin-1")))
      for kind in (bytes, bytearray)),
    *((kind, lambda x: [x.isoformat()], lambda v, kind=kind: kind.fromisoformat(v[0]))
      for kind in (datetime.datetime, datetime.date, datetime.time)))}


def pack(x: Any, other: Any = None, depth: int = 0) -> Any:
    """Plain data as JSON in which the builtin types stay apart; other(x, depth) packs what is no plain data.

    Plain data is all that crosses between judge and candidate. Raises TypeError for the rest, ValueError for absurd sizes.

    >>> pack([1, (2.5, None), {3: b"a"}])
    [1, {'tuple': [2.5, None]}, {'dict': [[3, {'bytes': ['a']}]]}]
    """
    kind = type(x)
    if kind in (str, bool, float, type(None)) or kind is int and -2**63 < x < 2**63:
        return x
    if depth > 100:
        raise ValueError("data nested more than 100 deep cannot cross")
    if kind is list:
        return [pack(value, other, depth + 1) for value in x]
    if TYPES.get(kind.__name__, [None])[0] is kind:
        return {kind.__name__: [pack(part, other, depth + 1) for part in TYPES[kind.__name__][1](x)]}
    if other:
        return other(x, depth)
    raise TypeError(f"a value of type {kind.__name__} is no plain data")


def unpack(x: Any, other: Any = None) -> Any:
    """The inverse of pack; other(tag, parts) makes what is no plain data. x may come from a hostile program."""
    if type(x) is list:
        return [unpack(value, other) for value in x]
    if type(x) is not dict:
        return x
    (tag, parts), = x.items()
    return TYPES[tag][2](unpack(parts, other)) if tag in TYPES else other(tag, parts)


def send(connection: socket.socket, message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket, limit: int = -1) -> Any:
    """One message, a line of JSON; raises EOFError if there is none, OverflowError if it is longer than `limit` bytes.
    The two sides take turns, so what a hostile one sent besides is dropped with the buffer."""
    with connection.makefile("rb", 1 << 16) as stream:
        line = stream.readline(limit)
    if not line.endswith(b"\n"):
        raise OverflowError if len(line) == limit else EOFError("the other side is gone")
    return json.loads(line)


ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")  # another one in each run


def cut(text: str, room: int) -> str:
    """At most `room` characters of a text: its head and its tail, with the cut marked."""
    text = ADDRESS.sub("at 0x...", text)  # here, since a cut may go through one
    half = max(0, room - 26) // 2
    return text if len(text) <= room else f"{text[:half]}...[{len(text) - 2 * half} cut]...{text[len(text) - half:]}"


class _Repr(reprlib.Repr):
    def repr1(self, x, level):  # the base goes by the class's name, which for a Remote the program chose
        return repr(x) if isinstance(x, Remote) else super().repr1(x, level)

    def repr_str(self, x, level):
        return super().repr_str(cut(x, self.maxstring), level)

    def repr_set(self, x, level):  # what cannot be compared is not left in the order of its addresses
        return "set()" if not x else "{" + ", ".join(self.ordered(x, level)) + "}"

    def ordered(self, x, level):
        try:
            x = sorted(x)
        except TypeError:
            x = sorted(x, key=repr)
        return [self.repr1(y, level - 1) for y in x[:self.maxset]] + ["..."] * (len(x) > self.maxset)


_repr = _Repr()
_repr.maxlevel, _repr.maxlong, _repr.maxother = 6, 200, 200
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxfrozenset = _repr.maxdict = _repr.maxdeque = 30


def show(x: Any, room: int = 200) -> str:
    """repr for feedback: the same text for the same value (sets and dicts are sorted), cut with a mark.

    >>> show({"b", "a"}), show("x" * 1000, 50)
    ("{'a', 'b'}", "'xxxxxxxxxxxx...[976 cut]...xxxxxxxxxxxx'")
    """
    _repr.maxstring = room
    try:
        return repr(cut(x, room)) if isinstance(x, str) else cut(_repr.repr(x), room)
    except ValueError:  # more digits than Python prints
        return "an integer too long to print"


def escape(text: str) -> str:
    """Make a program's text safe in a prompt: no control characters, lone surrogates, chat marks, fences, addresses.

    >>> escape("a<|im_end|>\\n<object at 0x7f3a>")
    'a<\\\\|im_end|>\\\\n<object at 0x...>'
    """
    text = re.sub(r"[\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]",
                  lambda match: match[0].encode("unicode_escape").decode(), text)
    text = re.sub(r"(<)(?=[|\uff5c]|/?(s|think|pad|eos|bos|unk|mask|filename|reponame|unused\d+|tool\w*|\w+_\w+)>|\w+\|>|</?SYS>>)"
                  r"|(\[)(?=/?[A-Z_]{3,}\])|`(?=``)", lambda match: match[0] + "\\", text)
    return ADDRESS.sub("at 0x...", text)


PROGRAMS = {  # of known verdict, for f(1) == 1, f(5) == 120, f(0) == 1
    "right": ("passed", "def f(n): return 1 if n < 2 else n * f(n - 1)"),
    "wrong at 0": ("failed", "def f(n): return 1 if n == 1 else n * f(n - 1) if n else 0"),
    "never ends": ("timeout", "def f(n):\n    while n < 9: pass"),
    "leaves": ("error", "import os\ndef f(n): os._exit(0)"),
    "a cheat": ("failed", "class Equal:\n    def __eq__(self, other): return True\ndef f(n): return Equal()")}


def self_check() -> list[Result]:
    """Score PROGRAMS; raises RuntimeError if the executor judges one of them falsely on this system."""
    problem = types.SimpleNamespace(kind="functional", tests=[[[1], 1], [[5], 120], [[0], 1]], entry_point="f")
    results = run_many([(problem, code) for _, code in PROGRAMS.values()], seconds=0.5)
    for (status, code), result in zip(PROGRAMS.values(), results):
        if (result.status, result.reward == 1) != (status, status == "passed"):
            raise RuntimeError(f"executor: {code!r} was judged {result.status!r} with reward {result.reward:g} instead of "
                               f"{status!r}, so no reward can be trusted on this system ({result.feedback})")
    return results


def demonstration() -> None:
    print("Tests: f(1) == 1, f(5) == 120, f(0) == 1\n")
    for (name, (_, code)), result in zip(PROGRAMS.items(), self_check()):
        print(f"{name}: reward {result.reward:.2f}, {result.status}")
        print("\n".join("    " + line for line in code.split("\n") + ["-> " + x for x in result.feedback.split("\n")]))


def check(path: str) -> None:
    """Score the reference solution of each problem of a JSONL file; list those that do not reach 1."""
    try:
        with open(path, encoding="utf-8") as file:
            problems = [types.SimpleNamespace(**json.loads(line)) for line in file if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"executor: cannot read problems from {path} ({error}); expected one JSON object a line") from None
    results = run_many([(problem, getattr(problem, "reference", None)) for problem in problems])
    for problem, result in zip(problems, results):
        if result.reward < 1:
            name = getattr(problem, "id", "?")
            print(f"{name}: {result.status}, {result.passed} of {result.total}: {escape(result.feedback)}")
    print(f"{sum(r.reward == 1 for r in results)} of {len(problems)} reference solutions pass all their tests")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        judge_main(int(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1:2] == ["--check"] and len(sys.argv) == 3:
        check(sys.argv[2])
    elif len(sys.argv) == 1:
        demonstration()
    else:
        raise SystemExit("usage: python executor.py [--check problems.jsonl]")
