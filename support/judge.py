"""What tests mean, and how they are run against a program that lives in another process.

In:  a problem (its kind, tests, public tests, entry point, context, reference) and a program.
Out: for each test whether it passed; for the failed ones a line that says what happened.

The judge runs the code of the tests itself. Where a test uses the program, a stand-in asks the
program's process (support/sandbox.py) and gets plain data back:

    def test_f():                 judge                         program
        xs = [3, 1]               xs = [3, 1]
        assert f(xs) == [1, 3]    f is a stand-in:  [3, 1] -->  runs f
                                  [1, 3] == [1, 3]  <-- [1, 3]

`Plan` reads a problem once. A statement that asserts is one test: a loop, a `try` or a `with` is
one as a whole. So this file has the tests 0 and 1:

    def test_f():                         def test_f():
        assert f(1) == 1                      with __test__(0): __equal__(f(1), 1)
        for n in range(9):                    with __test__(1):
            assert f(n) >= 0                      for n in range(9): assert f(n) >= 0

`Run` runs them against one program, and its `Link` talks with that program. What is no data stays
there: `Values` makes a stand-in for it, a `Remote`. A failed test does not end those after it. Code
that breaks off fails all tests that it did not reach. What the judge cannot host raises Unscorable,
when the problem is read or when its tests meet an empty program.

Needs the standard library (and pytest or numpy, where tests use them).
"""

import ast
import builtins
import collections
import contextlib
import copy
import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import re
import reprlib
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import types
from typing import Any

from support import confine
from support.sandbox import CHANGEABLE, SHARED, Wire, receive, send, shorten, zygote


def words(text: str, form: str = "{}") -> set:
    return {form.format(word) for word in text.split()}


PASSED = ("passed", "")
NOTHING = object()  # no value: nothing was called, or it gave none
OWN_SECONDS = 4  # CPU seconds of the judge for one program, beside the program's own limit
KEPT_EQUAL = 2000  # elements of the containers that both sides hold
TURN = 0.01  # seconds of each wait that are the machine's, not the program's
UNHOSTED = {  # what a test file may not use
    "module": words(
        "asyncio concurrent.futures ctypes dataclasses datetime decimal fractions gc hypothesis io "
        "inspect logging multiprocessing os os.path pandas pathlib pickle shutil socket subprocess "
        "tempfile threading unittest warnings weakref"
    ),
    "word": words(
        "open eval exec locals globals get_type_hints redirect_stdout redirect_stderr stdout stdin "
        "stderr argv setrecursionlimit seed send throw mock patch fixture warns deprecated_call "
        "importorskip skip xfail setUp setUpClass setup_method setup_class setup_function "
        "setup_module setUpModule tearDown teardown_method __init__"
    ),
}
DATA = (str, bytes, list, tuple, dict, set, int, float, complex, range, collections.Counter)
METHODS = set(itertools.chain(*map(dir, DATA))) | words("popleft appendleft all any tolist")
FIELDS = words("value shape dtype ndim size T real imag args __name__")  # of data that are read
OPERATORS = words(  # what tests may do with the program's objects; equality is apart
    "len iter next reversed contains getitem setitem delitem enter exit lt le gt ge neg pos abs "
    "invert index int float complex round str repr format bool hash add radd iadd sub rsub isub "
    "mul rmul imul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul and or xor",
    "__{}__",
)


class Unscorable(BaseException):
    """The judge cannot host the tests: (why,)."""


class Died(BaseException):
    """The program is gone: (status, text). No Exception, so that no test can swallow it."""


class Asked(BaseException):
    """The program was asked where it must not be."""


class Unequal(AssertionError):
    """The two sides of a comparison differ."""


# ---------------------------------------------------------------------- reading tests


class Unit:
    """One text of tests."""

    def __init__(self, public: bool) -> None:
        self.public = public
        self.code: Any = None
        self.body: list[int] = []  # the numbers of its tests outside of functions
        self.functions: list = []  # (class name, function name, the numbers of its tests)


class Plan:
    """A problem made ready for all programs. tests: (source, graded, public) of each test."""

    def __init__(self, kind: str, texts: Any, public: Any, entry: str, context: str, ref: str):
        self.kind, self.entry, self.context = kind, entry or "", context or ""
        self.tests: list = []
        self.units: list[Unit] = []
        self.names: set[str] = {self.entry.partition(".")[0], "Solution"}
        self.operators = False  # operators reach the program's objects
        self.objects = kind == "functional"  # attributes reach the program's objects
        if kind not in ("assert", "stdin", "functional"):
            raise Unscorable(f"its kind is {kind!r}, expected assert, stdin or functional")
        if kind == "functional" and not entry:
            raise Unscorable("it names no entry_point")
        texts, public = list(texts or []), list(public or [])
        items = [(text, False, True) for text in public if text not in texts]
        items += [(text, True, text in public) for text in texts]
        try:
            if kind == "assert":
                self.read_code(items, ast.parse(ref or ""))
            else:
                self.read_cases(items, (str, str) if kind == "stdin" else ((list, tuple), object))
        except (SyntaxError, ValueError, TypeError, RecursionError) as error:
            raise Unscorable(f"a test cannot be read: {error}") from None
        if not any(graded for _, graded, _ in self.tests):
            raise Unscorable("it has no tests")

    def read_cases(self, items: list, kinds: tuple) -> None:
        self.cases = [case for case, *_ in items]
        self.tests = [("", *marks) for _, *marks in items]
        for case in self.cases:
            pair = isinstance(case, (list, tuple)) and len(case) == 2
            if not pair or not all(map(isinstance, case, kinds)):
                raise ValueError(f"expected an input and its output, got {show(case, 60)}")

    def read_code(self, items: list, reference: ast.Module) -> None:
        trees = [ast.parse(text) for text, *_ in items]
        whole = ast.Module([node for tree in trees for node in tree.body], [])
        refuse(whole)
        self.find_names(whole, reference)
        self.find_objects(whole, reference)
        self.refuse_own_exceptions(whole)
        for tree, (_, *marks) in zip(trees, items, strict=True):
            self.marks = marks
            self.units.append(self.read_unit(tree))

    def find_names(self, tests: ast.Module, reference: ast.Module) -> None:
        """Which names of the tests mean the program's."""
        self.imports = [ast.unparse(node) for node in reference.body if is_import(node)]
        self.names = {self.entry} - {""}
        for node in reference.body:
            self.names |= {getattr(node, "name", self.entry)} - {""}
            for target in getattr(node, "targets", ()):
                self.names |= {part.id for part in find(target, ast.Name)}
        for node in find(tests, ast.ImportFrom):
            if node.module == "solution":
                self.names |= {alias.name for alias in node.names}
        for node in find(tests, ast.Attribute):
            if ast.unparse(node.value) == "solution":
                self.names.add(node.attr)
        if not reference.body or "*" in self.names:  # all that nobody else defines
            used = {node.id for node in find(tests, ast.Name)}
            modules = {getattr(node.value, "id", "") for node in find(tests, ast.Attribute)}
            self.names |= used - own_names(tests) - set(dir(builtins))
            self.names -= modules & sys.stdlib_module_names
        self.names -= {"*"}

    def find_objects(self, tests: ast.Module, reference: ast.Module) -> None:
        """Whether tests may use operators and attributes of the program's objects.

        A program must not decide that its object equals an answer. So operators need a class in
        the reference that has one, a base or a decorator. Attributes need a class in the reference,
        or tests that use attributes which no data has. Without a reference, a name in capitals
        stands for a class.
        """
        classes = find(reference, ast.ClassDef)
        self.operators = not reference.body and any(name[:1].isupper() for name in self.names)
        for node in classes:
            methods = {part.name for part in find(node, ast.FunctionDef)}
            bases = " ".join(map(ast.unparse, node.bases + node.decorator_list))
            if methods & (OPERATORS | {"__eq__"}) or re.sub(r"\w*(Error|Exception)", "", bases):
                self.operators = True
        modules = own_names(tests, (ast.Import, ast.ImportFrom)) | {"self", "solution"}
        uses = find(tests, ast.Attribute)
        used = {node.attr for node in uses if ast.unparse(node.value) not in modules}
        self.objects = bool(classes or self.operators or used - METHODS - FIELDS)

    def refuse_own_exceptions(self, tests: ast.Module) -> None:
        """No class of the program is a class of the judge, so none can be expected or caught."""
        expected = [node.type for node in find(tests, ast.ExceptHandler) if node.type]
        for node in find(tests, ast.Call):
            if ast.unparse(node.func) in ("raises", "pytest.raises"):
                expected += node.args[:1]
        for node in expected:
            if mentions(node, self.names - set(dir(builtins))):
                raise Unscorable(f"a test expects {ast.unparse(node)}, a class of the solution")

    def read_unit(self, tree: ast.Module) -> Unit:
        """Wrap each statement that asserts, and collect the test functions."""
        unit, body, tests = Unit(self.marks[1]), [], []
        called = " ".join(ast.unparse(node.value.func) for node in tree.body if is_call(node))
        functions = [node for node in find(tree, ast.FunctionDef) if not is_test(node, called)]
        self.helpers = closure(functions, asserts, set())
        touching = self.names | closure(functions, mentions, self.names)
        for node in tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.ClassDef):
                tests += [(node.name, part) for part in node.body if is_test(part, called)]
            elif is_test(node, called):
                tests.append(("", node))
            else:
                node = self.statement(node, unit.body)
            body.append(node)
        for owner, node in tests:
            self.read_function(unit, owner, node)
        if not unit.body and not unit.functions and re.search("(?i)check|verify|test", called):
            body = [self.wrap(body, unit.body, body[-1])]
        tree.body = [Asserts(touching).visit(node) for node in body]
        unit.code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
        return unit

    def read_function(self, unit: Unit, owner: str, node: ast.FunctionDef) -> None:
        """Wrap the statements of a test function that assert; if there is none, all together."""
        numbers: list[int] = []
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if any(re.match(r"pytest\.mark\.(skip|xfail)\b", mark) for mark in marks):
            return
        if any(re.match(r"pytest\.mark\.(skipif|usefixtures)\b", mark) for mark in marks):
            raise Unscorable(f"{node.name} has the mark skipif or usefixtures")
        given = {"self", *re.findall(r"\w+", " ".join(marks))}
        needed = {arg.arg for arg in node.args.args} - given
        if node.name == "check":
            if not self.entry:
                raise Unscorable("a test defines check(candidate), but there is no entry_point")
        elif needed:
            raise Unscorable(f"{node.name} needs {', '.join(sorted(needed))}, which nothing gives")
        if not all(mark.startswith("pytest.mark.") for mark in marks):
            raise Unscorable(f"{node.name} has a decorator that is no mark of pytest")
        body = [self.statement(part, numbers) for part in node.body]
        whole = ast.Expr(ast.Call(ast.Name(node.name), [], []))
        node.body = body if numbers else [self.wrap(node.body, numbers, whole)]
        unit.functions.append((owner, node.name, numbers))

    def statement(self, node: ast.stmt, numbers: list[int]) -> ast.stmt:
        """A statement, wrapped if it is a test."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not asserts(node, self.helpers):
            return node
        return self.wrap([node], numbers, node.test if isinstance(node, ast.Assert) else node)

    def wrap(self, body: list, numbers: list[int], shown: ast.AST) -> ast.With:
        """Statements as one more test, whose source is that of `shown`."""
        number = len(self.tests)
        numbers.append(number)
        self.tests.append((" ".join(ast.unparse(shown).split()), *self.marks))
        block = ast.parse(f"with __test__({number}): pass").body[0]
        block.body = body
        return block


class Asserts(ast.NodeTransformer):
    """Rewrite comparisons in asserts, so that both sides are known when they differ.

    The side that does not use the program is evaluated first. Else a program that empties its
    argument would buy `assert f(xs) == sorted(xs)`, which becomes

        __equal__(__first__(lambda: f(xs), lambda: sorted(xs)), __second__())
    """

    def __init__(self, touching: set) -> None:
        self.touching = touching  # names that may use the program
        self.inside = False  # an assert

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return node
        node.msg = None  # nobody sees it
        self.inside = True
        self.generic_visit(node)
        self.inside = False
        test = node.test
        if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
            sides = [test.left, test.comparators[0]]
            return ast.Expr(ast.Call(ast.Name("__equal__", ast.Load()), sides, []))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if self.inside and len(node.ops) == 1:
            node.left, node.comparators[0] = self.reorder(node.left, node.comparators[0])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) == "type" and len(node.args) == 1:
            node.func = ast.Name("__type__", ast.Load())
        return node

    def reorder(self, left: ast.expr, right: ast.expr) -> tuple:
        """The two sides, the right one first if only the left one uses the program."""
        fixed = (ast.NamedExpr, ast.Await, ast.Yield, ast.Starred)
        plain = not find(left, ast.Call) or not find(right, ast.Name)
        if plain or mentions(right, self.touching) or find(left, fixed) or find(right, fixed):
            return left, right
        first = ast.parse("__first__(lambda: 0, lambda: 0)", mode="eval").body
        first.args[0].body, first.args[1].body = left, right
        return first, ast.parse("__second__()", mode="eval").body


def find(tree: ast.AST, kinds: Any) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def mentions(node: ast.AST, names: set) -> bool:
    return any(part.id in names for part in find(node, ast.Name))


def is_test(node: ast.AST, called: str) -> bool:
    """A function that pytest calls, or the check(candidate) of HumanEval."""
    if not isinstance(node, ast.FunctionDef):
        return False
    check = node.name == "check" and len(node.args.args) == 1 and "check" not in called.split()
    return node.name.startswith("test") or check


def asserts(node: ast.AST, helpers: set) -> bool:
    """A statement can fail a test: it asserts, or calls something that does."""
    if any(not getattr(part.test, "value", None) for part in find(node, ast.Assert)):
        return True
    names = [ast.unparse(part.func).rpartition(".")[2] for part in find(node, ast.Call)]
    return any(name in helpers or re.match("raises$|fail$|assert", name) for name in names)


def closure(functions: list, test: Any, names: set) -> set:
    """The names of functions of which a test holds, given the names found so far."""
    found: set = set()
    while new := {f.name for f in functions if f.name not in found and test(f, names | found)}:
        found |= new
    return found


def own_names(tree: ast.AST, kinds: Any = ast.AST) -> set:
    """The names that tests bind themselves, by statements of some kinds."""
    names = set()
    for node in find(tree, kinds):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif is_import(node) and getattr(node, "module", "") != "solution":
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def is_exception_class(x: Any) -> bool:
    """Of Python, its library or a package: none that ends the judge or a test of pytest."""
    usual = isinstance(x, type) and issubclass(x, BaseException)
    return usual and (x.__module__ == "builtins" or issubclass(x, Exception))


def refuse(tests: ast.Module) -> None:
    """Raise Unscorable for what the judge cannot host, whatever the program."""
    own = own_names(tests, (ast.Name, ast.arg))
    for node in ast.walk(tests):
        for module in imported_modules(node):
            top = module.partition(".")[0]
            if not UNHOSTED["module"].isdisjoint({module, top}):
                raise Unscorable(f"a test uses {module}, whose values cannot cross")
            if top != "solution" and importlib.util.find_spec(top) is None:
                raise Unscorable(f"the tests need the module {top}")
        mark = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
        used = {getattr(node, field, None) for field in ("id", "attr", "name")} - own
        for word in set() if mark else used & UNHOSTED["word"]:
            raise Unscorable(f"a test uses {word}")
        refuse_syntax(node)


def refuse_syntax(node: Any) -> None:
    if isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
        raise Unscorable("a test is async")
    if isinstance(node, ast.keyword) and node.arg in ("indirect", "marks"):
        raise Unscorable(f"a test uses the option {node.arg} of pytest")
    if not isinstance(node, ast.ClassDef):
        return
    if node.decorator_list or node.bases or not node.name.startswith("Test"):
        raise Unscorable(f"the tests define the class {node.name}, whose objects cannot cross")


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or "solution"]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


# ---------------------------------------------------------------------- talking with a program


class Link:
    """One program under test, seen from the judge: what is asked and what it answers."""

    def __init__(self, plan: Plan, code: str, limits: dict, control: Any, empty: bool) -> None:
        self.plan, self.code, self.limits, self.control = plan, code, limits, control
        self.empty = empty  # the program is empty: find out whether the judge can host the tests
        self.socket: Any = None
        self.death: Any = None
        self.unsent: Any = None  # a test handed over what cannot be sent; the test may catch it
        self.quiet = self.asked = False  # asking is not allowed now; it was tried
        self.last: Any = None  # the last call as (its line of code, its value)
        self.cpu_seconds = 0.0
        self.values = Values(self)

    def launch(self, source: int = 0, sink: int = 1) -> None:
        """A new process begins to run the program."""
        self.stop()
        self.death = None
        self.wire = Wire(self.values)
        self.patience = 1.5 * self.limits["timeout"] + 3  # seconds; CPU time decides, as a rule
        self.socket, theirs = socket.socketpair()
        with theirs:
            files = [source, sink, theirs.fileno()]
            socket.send_fds(self.control, [json.dumps(self.limits).encode()], files)
        start = {
            "module": "__main__" if self.plan.kind == "stdin" else "solution",
            "context": self.plan.context,
            "code": self.code,
            "names": sorted(self.plan.names),
        }
        self.say(json.dumps(start))

    def start(self) -> dict:
        """Define the program; what it has of the names that the tests use."""
        self.launch()
        try:
            found = self.answer()
        except BaseException as error:
            if self.empty:
                raise Unscorable(f"its context does not run: {error!r}") from None
            raise
        for name, value in found.items():
            if isinstance(value, Remote):
                object.__setattr__(value, "_label", name)
        return found

    def stop(self) -> tuple:
        """End the program: (its exit code, whether it used up its time)."""
        if not self.socket:
            return 0, False
        self.socket.close()
        self.socket = None
        send(self.control, "stop")
        code, seconds = json.loads(receive(self.control))
        self.cpu_seconds = max(self.cpu_seconds, seconds)
        return code, code == -signal.SIGPROF or seconds > 0.95 * self.limits["timeout"]

    def die(self, status: str, text: str) -> None:
        self.death = Died(status, text)
        raise self.death

    def say(self, text: str) -> None:
        if self.death:
            raise self.death
        self.socket.settimeout(max(0.001, self.patience))
        try:
            send(self.socket, text)
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OSError:
            pass  # it has ended; its last words are still to be read

    def answer(self, function: Any = "") -> Any:
        """What the program says: a value, or an exception, raised here."""
        if self.death:
            raise self.death
        try:
            begin = time.monotonic()
            text = receive(self.socket, self.limits["output_bytes"], max(0.001, self.patience))
            self.patience -= max(0.0, time.monotonic() - begin - TURN)
            raised, value = self.wire.read(text)
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OverflowError:
            self.die("error", f"returned more than {self.limits['output_bytes']} bytes")
        except (OSError, EOFError):
            return self.ended()
        except Exception:
            self.die("error", "sent something that is no answer")
        if not raised:
            return value
        if isinstance(value, StopIteration) and function not in ("take items", "__next__"):
            raise RuntimeError("the program raised StopIteration")  # else it would end a map()
        raise value

    def ended(self) -> None:
        """The program's process is gone. For a main program that may be right."""
        code, late = self.stop()
        if late:
            self.die("timeout", "ran out of time")
        if code == 0 and self.plan.kind == "stdin":
            return
        how = f"ended with exit code {code}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}  # some have none
            how = f"was ended by {names.get(-code, f'signal {-code}')}"
        if code in (0, -signal.SIGKILL):  # the latter may be ours: it had closed its socket
            how = "ended before it answered"
        self.die("error", how)

    def ask(self, label: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Have the program do function(*args, **kwargs).

        function: a stand-in, a builtin, or the name of a method of the first argument. label: what
        the feedback calls it ("": the feedback does not tell of it).
        """
        if self.quiet:
            self.asked = True
            raise Asked
        if label:
            shown = args[1:] if isinstance(function, str) else args  # without the owner of a method
            self.last = (shown_call(label, shown, kwargs), NOTHING)
        wire = Wire(self.values) if isinstance(function, Missing) else self.wire
        try:
            request = wire.write(function, kwargs or None, *args, gone=self.unseen(wire))
        except (TypeError, ValueError, RecursionError) as error:
            if self.empty:
                raise Unscorable(f"a test hands the program what cannot cross: {error}") from None
            self.unsent = TypeError(f"what cannot be sent to the program: {error}")
            raise self.unsent from None
        if isinstance(function, Missing):
            error = NameError(f"name '{label}' is not defined")
            error._line = 0
            raise error
        self.say(request)
        value = self.answer(function)
        if label:
            self.last = (self.last[0], value)
        return value

    def unseen(self, wire: Wire) -> list:
        """The numbers of containers that no test can see any more, and of old ones if there are
        many. So a turn costs the same after many calls. They are not kept equal any longer."""
        numbers, room = [], KEPT_EQUAL
        for number in reversed(list(wire.objects)):
            x = wire.objects[number]
            room -= 1 + (len(x) if hasattr(x, "__len__") else 0)
            if room < 0 or sys.getrefcount(x) <= 3:  # in wire.objects, as x, as an argument
                numbers.append(number)
        return numbers


class Values:
    """What is no data, on its way between the tests and one program (see Wire)."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.guarded: set = set()  # ids of what no program may change
        self.known: dict = {}  # stand-ins by the program's number, their classes by name
        self.methods: set = set()  # (class, name) of attributes that were found to be methods
        self.streams: dict = {}  # iterators: id -> (stand-in, iterator)

    def may_change(self, x: Any) -> bool:
        """No program changes what modules of this process hold, such as keyword.kwlist."""
        if not self.guarded:
            modules = [module for name, module in sys.modules.items() if name != "solution"]
            held = gc.get_referents(*gc.get_referents(*modules))
            self.guarded = {id(x) for x in held if isinstance(x, CHANGEABLE)}
        return id(x) not in self.guarded

    def export(self, x: Any, wire: Wire) -> list:
        """What of the judge is no data, for the program."""
        if isinstance(x, Missing):
            return ["missing"]
        owner = x if isinstance(x, Remote) else self.streams.get(id(x), (None,))[0]
        if owner is not None:
            return ["object", owner._number]
        name = getattr(x, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, self) is x:
            return ["shared", name]
        if isinstance(x, collections.abc.Iterator):
            return ["iterator", *wire.pack_all(list(itertools.islice(x, 10**6)))]
        raise TypeError(f"a value of type {type(x).__name__}")

    def load(self, kind: str, parts: list, wire: Wire) -> Any:
        """What of the program is no data, for the tests."""
        return getattr(self, f"load_{kind}")(wire, *parts)

    def load_shared(self, wire: Wire, name: str) -> Any:
        value = getattr(builtins, name)
        if name not in SHARED and not is_exception_class(value):
            raise ValueError(name)
        return value

    def load_object(self, wire: Wire, number: int, kind: str) -> Any:
        """The stand-in for an object. Each class of the program has one of its own."""
        if number not in self.known:
            name = f"class {kind}"
            if name not in self.known:
                self.known[name] = type(kind, (Remote,), {})
            self.known[number] = self.known[name](self.link, int(number), kind)
        return self.known[number]

    def load_method(self, wire: Wire, name: str, number: int, kind: str) -> Any:
        """A method of an object; from now on it is called in one message."""
        owner = self.load_object(wire, number, kind)
        self.methods.add((kind, name))
        return functools.partial(self.link.ask, f"{owner._label}.{name}", name, owner)

    def load_stream(self, wire: Wire, number: int, is_generator: bool) -> Any:
        remote = Remote(self.link, number, "iterator")
        stream = self.stream(remote) if is_generator else itertools.chain(self.stream(remote))
        self.streams[id(stream)] = (remote, stream)
        return stream

    def stream(self, remote: Any) -> Any:
        """The items of an iterator of the program: the first ones singly, then in batches."""
        for size in itertools.chain([1] * 8, (2**n for n in range(1, 10)), itertools.repeat(1000)):
            try:
                items = self.link.ask("", "take items", remote, size)
            except StopIteration:
                return
            yield from items

    def load_error(self, wire: Wire, lineage: list, text: str, args: Any, line: int) -> Any:
        """An exception as the nearest class that the judge has. lineage: its class and bases."""
        args, kind = wire.unpack(args), None
        if lineage[0][0] == "solution" or not isinstance(args, tuple):
            args = (text,)
        while not is_exception_class(kind):
            (module, name), *lineage = lineage
            kind = getattr(sys.modules.get(module), name, None)
        try:
            error = kind.__new__(kind, *args)
        except Exception:
            error = RuntimeError.__new__(RuntimeError)
        error.args, error._line, error._text = args, int(line), str(text)
        return error


class Remote:
    """A stand-in for a function, class or object of the program."""

    def __init__(self, link: Link, number: Any, label: str) -> None:
        fields = {"_link": link, "_number": number, "_label": label, "_kind": label}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask(self._label, self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        link = self._link
        asked = name in ("__name__", "__doc__") or (link.plan.objects and name[:2] != "__")
        if not asked:
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        if (self._kind, name) in link.values.methods:
            return functools.partial(link.ask, f"{self._label}.{name}", name, self)
        value = link.ask("", getattr, self, name)
        if isinstance(value, Remote):
            object.__setattr__(value, "_label", f"{self._label}.{name}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("", setattr, self, name, value)

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(x, Remote) and self._link.ask("", isinstance, x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        return self._link.ask("", issubclass, x, self)

    def _operator(self, name: str, *args: Any) -> Any:
        """Have the program do what an operator does, if the reference has it."""
        if self._link.plan.operators:
            return self._link.ask("", name, self, *args)
        if name in ("__str__", "__repr__", "__format__"):
            return f"<{self._label} object>"
        if name in ("__bool__", "__hash__"):
            return name == "__bool__" or hash(self._number)
        raise TypeError(f"<{self._label} object> has no {name}")

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Remote):
            return NotImplemented  # data is the answer itself: no object decides that it equals it
        return self is other or self._link.ask("", "__eq__", self, other)

    def __hash__(self) -> int:
        return self._operator("__hash__")


def operator_method(name: str) -> Any:
    def method(self: Remote, *args: Any) -> Any:
        return self._operator(name, *args)

    return method


for operator_name in OPERATORS - {"__hash__"}:
    setattr(Remote, operator_name, operator_method(operator_name))


class Missing(Remote):
    """A stand-in for what the program does not define."""

    def __getattr__(self, name: str) -> Any:
        return self()


# ---------------------------------------------------------------------- running tests


class Run:
    """The tests of a problem against one program, and the outcome of each."""

    def __init__(self, plan: Plan, code: str, limits: dict, control: Any, empty: bool = False):
        self.plan = plan
        self.link = Link(plan, code, limits, control, empty)
        self.outcomes: list = [None] * len(plan.tests)
        self.reached: set = set()
        self.second: list = []  # right sides of comparisons that were evaluated first

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
        for number in sorted(range(len(self.outcomes)), key=lambda n: not self.plan.tests[n][2]):
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
            link.answer()
        value = text.decode("utf-8", "replace")
        if size > limit:
            value += f"...[{size - limit} cut]"
        link.last = (label, value)
        return value

    def run_code(self) -> None:
        link, found = self.link, self.link.start()
        missing = {name: Missing(link, None, name) for name in self.plan.names - set(found)}
        module = types.ModuleType("solution")
        for name, value in {**found, **(missing if link.empty else {})}.items():
            setattr(module, name, value)
        sys.modules["solution"] = module
        space = {
            "__name__": "test",
            "__test__": self.test,
            "__first__": self.first,
            "__second__": self.second.pop,
            "__equal__": equal,
            "__type__": kind_of,
        }
        for line in self.plan.imports:  # a test may use what the solution imports
            with contextlib.suppress(ImportError):
                exec(line, space)
        space |= missing | found
        exec(self.plan.context, space)
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
            found = getattr(sys.modules["solution"], self.plan.entry, space[self.plan.entry])
            space["check"](found)
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
        is returned."""
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

    def first(self, left: Any, right: Any) -> Any:
        """The left side of a comparison. The right one is evaluated first if it asks nothing."""
        link, value = self.link, None
        link.quiet, link.asked = True, False
        try:
            value = right()
        except BaseException:
            if not link.asked:
                raise
        finally:
            link.quiet = False
        result = left()
        self.second.append(right() if link.asked else value)
        return result

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
        text = f"{type(error).__name__}: {shorten(message(error), 300)}".removesuffix(": ")
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


def kind_of(x: Any) -> Any:
    """type(x), for stand-ins the program's."""
    return x._link.ask("", type, x) if isinstance(x, Remote) else type(x)


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


# ---------------------------------------------------------------------- comparing and showing


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


def message(error: BaseException) -> str:
    try:
        return getattr(error, "_text", "") or str(error)
    except Exception:  # the display of a value in it raises
        return ""


class Shown(reprlib.Repr):
    """repr of bounded size, the same for the same value."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.maxlevel, self.maxlong, self.maxother, self.maxstring = 6, 200, 200, room
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 30
        self.maxdeque = 30

    def repr1(self, x: Any, level: int) -> str:  # the base goes by the name of the class
        return f"<{x._label} object>" if isinstance(x, Remote) else super().repr1(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(shorten(x, self.maxstring), level)

    def repr_set(self, x: set, level: int) -> str:
        if not x:
            return "set()"
        try:
            parts = sorted(x)
        except TypeError:  # the order of addresses differs from run to run
            parts = sorted(x, key=repr)
        shown = [self.repr1(part, level - 1) for part in parts[: self.maxset]]
        if len(x) > self.maxset:
            shown.append("...")
        return "{" + ", ".join(shown) + "}"


def shown_call(label: str, args: tuple, kwargs: dict) -> str:
    """A call as a line of code, with its arguments as they are before it."""
    words = [show(x, 100) for x in args]
    words += [f"{name}={show(x, 100)}" for name, x in kwargs.items()]
    return shorten(f"{label}({', '.join(words)})", 300)


def show(x: Any, room: int = 200) -> str:
    """A value as text for feedback, cut with a mark.

    >>> show({"b", "a"}), show("x" * 1000, 50)
    ("{'a', 'b'}", "'xxxxxxxxxxxx...[976 cut]...xxxxxxxxxxxx'")
    """
    try:
        if isinstance(x, (bool, float)):
            return repr(x)
        return repr(shorten(x, room)) if isinstance(x, str) else shorten(Shown(room).repr(x), room)
    except Exception:
        return f"a {type(x).__name__} that cannot be shown"


# ---------------------------------------------------------------------- the process


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
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = 4 << 30 if hard < 0 else min(4 << 30, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    send(trainer, f"it can see your files, processes and network ({fault})" if fault else "")
    os.dup2(0, 2)  # until here stderr was the trainer's, who does not read on
    plans = functools.lru_cache(200)(functools.partial(ready, control))
    while True:
        try:
            problem, code, limits = json.loads(receive(trainer))
        except (EOFError, OSError):  # the trainer has ended
            os._exit(0)
        limit_own_time(limits["timeout"])
        try:
            answer = Run(plans(problem), code, limits, control).result()
        except Unscorable as error:
            answer = {"status": "unscorable", "lines": [str(error)], "tests": []}
        send(trainer, json.dumps(answer))


def limit_own_time(timeout: float) -> None:
    """The kernel ends this process when it computes too long, whatever C call it sits in."""
    soft = math.ceil(time.process_time() + OWN_SECONDS + timeout)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def ready(control: socket.socket, problem: str) -> Plan:
    """Read a problem, and see with an empty program whether its tests can be hosted."""
    plan = Plan(*Wire().read(problem))
    if plan.kind == "assert" or (plan.kind == "functional" and plan.context):
        limits = {"timeout": 4, "memory_mb": 512, "output_bytes": 1 << 20}
        Run(plan, "", limits, control, empty=True).result()
    return plan
