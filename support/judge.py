"""What tests mean, and how they are run against a program that lives in another process.

In:  a problem (its kind, tests, public tests, entry point, context, reference) and a program.
Out: for each test whether it passed; for the failed ones a line that says what happened.

The judge runs the code of the tests itself. Where a test uses the program, a stand-in sends a
request to the program's process (support/sandbox.py) and gets plain data back:

    def test_f():                 judge                         program
        xs = [3, 1]               xs = [3, 1]
        assert f(xs) == [1, 3]    f is a stand-in:  [3, 1] -->  runs f
                                  [1, 3] == [1, 3]  <-- [1, 3]

`Plan` makes a problem ready once. A statement that asserts is one test: a loop, a `try` or a `with`
is one as a whole. So the tests of this file are number 0 and number 1:

    def test_f():                         def test_f():
        assert f(1) == 1                      with __test__(0): __equal__(f(1), 1)
        for n in range(9):                    with __test__(1):
            assert f(n) >= 0                      for n in range(9): assert f(n) >= 0

`Run` runs them against one program. A failed test does not end the tests after it. Code that breaks
off fails all tests that it did not reach. What the judge cannot host raises Unscorable when the
problem is read, or when its tests meet an empty program. Standard library only (and pytest or
numpy, where the tests use them).
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
from support.sandbox import CHANGEABLE, SHARED, Wire, receive, send, zygote


def dunder(names: str) -> set:
    return {f"__{name}__" for name in names.split()}


PASSED = ("passed", "")
OWN_SECONDS = 4  # CPU seconds of the judge for one program, beside the program's own limit
NOTHING = object()  # no value: nothing was called, or it gave none
KEPT_EQUAL = 2000  # elements of containers that both sides hold
TURN = 0.01  # seconds of each wait that are the machine's, not the program's
FIXTURE, MARK = r"pytest\.fixture\b|fixture\b", r"pytest\.mark\.(?!skipif|usefixtures)\w+"
UNHOSTED = {  # what reaches beyond plain values: a test file that uses it is left out
    "modules": set(
        "asyncio concurrent ctypes dataclasses datetime decimal fractions gc hypothesis inspect io "
        "logging mock multiprocessing os pandas pathlib pickle shutil socket subprocess tempfile "
        "threading unittest.mock warnings weakref".split()
    ),
    "names": set(
        "open input eval exec locals globals breakpoint redirect_stdout redirect_stderr "
        "get_type_hints".split()
    ),
    "attributes": set(
        "seed send throw readouterr warns deprecated_call importorskip skip xfail skipif "
        "usefixtures stdout stdin stderr argv setrecursionlimit setUpClass redirect_stdout".split()
    ),
    "definitions": set(
        "setUp setUpClass setup_method setup_class setup_function setup_module setUpModule "
        "tearDown teardown_method __init__".split()
    ),
}
DATA = [str, bytes, list, tuple, dict, set, int, float, complex, range, collections.deque]
DATA_ATTRIBUTES = set(itertools.chain(*map(dir, [*DATA, collections.Counter, types.ModuleType])))
INHERITED = dunder("len iter next getitem setitem contains bool str repr eq lt le gt ge hash")
FAMILIES = [
    dunder("str repr format"),
    dunder("eq ne hash"),
    dunder("lt le gt ge"),
    dunder("len bool iter next contains getitem reversed"),
]
OPERATORS = INHERITED | dunder(
    "ne add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv rfloordiv mod rmod pow "
    "matmul neg pos abs invert and rand or ror xor rxor lshift rshift int float complex index "
    "round delitem reversed format enter exit"
)


class Unscorable(BaseException):
    """The judge cannot host the tests: (why,)."""


class Died(BaseException):
    """The program is gone: (status, text). No Exception, so that no test can swallow it."""


class Asked(BaseException):
    """What must not use the program did."""


class Unit:
    """One text of tests: its code, the numbers of its tests, its test functions."""

    def __init__(self, public: bool) -> None:
        self.public = public
        self.code: Any = None
        self.body: list[int] = []  # the tests outside of functions
        self.functions: list = []  # (class name, function name, arguments, numbers)
        self.fixtures: dict = {}  # arguments, by name


class Plan:
    """A problem made ready; it serves all programs for this problem.

    tests: (source, graded, public) of each test.
    """

    def __init__(self, kind: str, texts: Any, public: Any, entry: str, context: str, ref: str):
        self.kind, self.entry, self.context = kind, entry or "", context or ""
        self.tests: list = []
        self.units: list[Unit] = []
        self.operators: set[str] = set()  # dunder methods that reach the program's objects
        self.objects = False  # attributes reach the program's objects
        if kind not in ("assert", "stdin", "functional"):
            raise Unscorable(f"its kind is {kind!r}, expected assert, stdin or functional")
        if kind == "functional" and not entry:
            raise Unscorable("it names no entry_point")
        texts = texts if isinstance(texts, list) else []
        items = [(text, False, True) for text in public or [] if text not in texts]
        items += [(text, True, text in (public or [])) for text in texts]
        try:
            if kind == "assert":
                self.read_code(items, ast.parse(ref or ""))
            else:
                self.read_cases(items)
        except (SyntaxError, ValueError, TypeError, RecursionError, ImportError) as error:
            raise Unscorable(f"a test cannot be read: {error}") from None
        if not any(graded for _, graded, _ in self.tests):
            raise Unscorable("it has no tests")

    def read_cases(self, items: list) -> None:
        self.cases = [case for case, *_ in items]
        for case, graded, public in items:
            if not isinstance(case, list) or len(case) != 2:
                raise ValueError(f"expected a pair of input and output, got {show(case, 60)}")
            kinds = (str, str) if self.kind == "stdin" else (list, object)
            if not all(map(isinstance, case, kinds)):
                raise ValueError(f"wrong types in the pair {show(case, 60)}")
            self.tests.append(("", graded, public))

    def read_code(self, items: list, reference: ast.Module) -> None:
        trees = [ast.parse(text) for text, *_ in items]
        for tree in trees:
            refuse(tree)
        self.find_names(trees, reference)
        self.find_objects(trees, reference)
        for tree, (_, graded, public) in zip(trees, items, strict=True):
            self.mark = (graded, public)
            self.units.append(self.read_unit(tree))

    def find_names(self, trees: list, reference: ast.Module) -> None:
        """Which names of the tests mean the program's."""
        self.imports = [ast.unparse(node) for node in reference.body if is_import(node)]
        self.names = {self.entry} - {""}
        for node in reference.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.names.add(node.name)
            for target in getattr(node, "targets", ()):
                self.names |= {part.id for part in find(target, ast.Name)}
        used = {node.id for tree in trees for node in find(tree, ast.Name)}
        imported = set()
        for node in itertools.chain(*(find(tree, ast.ImportFrom) for tree in trees)):
            if node.module == "solution":
                imported |= {alias.name for alias in node.names}
        attributes = {
            node.attr
            for tree in trees
            for node in find(tree, ast.Attribute)
            if ast.unparse(node.value) == "solution"
        }
        self.names |= imported | attributes
        if not reference.body or "*" in imported:
            own = set(itertools.chain(*map(defined_names, trees)))
            for node in itertools.chain(*(find(tree, ast.Attribute) for tree in trees)):
                if getattr(node.value, "id", "") in sys.stdlib_module_names:
                    own.add(node.value.id)  # such as math, where the reference imports it
            self.names |= used - own - set(dir(builtins))
        self.names -= {"*"}

    def find_objects(self, trees: list, reference: ast.Module) -> None:
        """Whether tests may use attributes and operators of the program's objects.

        A program must not decide that its object equals an answer. So attributes need a class in
        the reference, or tests that use attributes which no data has. An operator needs a class
        in the reference that has it; a class with bases or decorators has the INHERITED ones.
        """
        classes = find(reference, ast.ClassDef)
        classes = [node for node in classes if not is_exception(node, classes)]
        operators = {part.name for node in classes for part in find(node, ast.FunctionDef)}
        if any(node.bases or node.decorator_list for node in classes):
            operators |= INHERITED
        for family in FAMILIES:  # str() of a class may come from its repr()
            if operators & family:
                operators |= family
        capital = not reference.body and any(name[:1].isupper() for name in self.names)
        self.operators = OPERATORS if capital else OPERATORS & operators | dunder("eq ne hash")
        attributes, read = set(), set()
        for tree in trees:
            called = {id(node.func) for node in find(tree, ast.Call)}
            modules = {name for node in find(tree, ast.Import) for name in imported_names(node)}
            for node in find(tree, ast.Attribute):
                if ast.unparse(node.value) not in modules | {"self"}:
                    (attributes if id(node) in called else read).add(node.attr)
        # Data has methods, but hardly any attribute that is read.
        read -= {"value", "shape", "dtype", "ndim", "size", "T", "real", "imag", "args", "__name__"}
        attributes -= DATA_ATTRIBUTES | {"tolist", "all", "any"}
        self.objects = bool(classes or attributes or read) or capital

    def read_unit(self, tree: ast.Module) -> Unit:
        """Wrap each statement that asserts, and collect the test functions."""
        unit = Unit(self.mark[1])
        body, tests = [], []
        called = {ast.unparse(node.value.func) for node in tree.body if is_call(node)}
        functions = [node for node in find(tree, ast.FunctionDef) if not is_test(node, called)]
        self.helpers = closure(functions, lambda node, names: asserts(node, names), set())
        self.touching = self.names | closure(functions, mentions, self.names)
        for node in tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.FunctionDef) and is_test(node, called):
                tests.append(("", node))
            elif isinstance(node, ast.FunctionDef) and decorated(node, FIXTURE):
                unit.fixtures[node.name] = [arg.arg for arg in node.args.args]
                node.decorator_list = []
            elif isinstance(node, ast.ClassDef):
                tests += [(node.name, part) for part in node.body if is_test(part, called)]
            else:
                node = self.statement(node, unit.body)
            body.append(node)
        for owner, node in tests:
            self.read_function(unit, owner, node)
        if not unit.body and not unit.functions and re.search("(?i)check|verify|test", str(called)):
            body = [self.wrap(body, unit.body)]
        tree.body = [Asserts(self.touching).visit(node) for node in body]
        unit.code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
        return unit

    def read_function(self, unit: Unit, owner: str, node: ast.FunctionDef) -> None:
        marks = " ".join(map(ast.unparse, node.decorator_list))
        if re.search(r"pytest\.mark\.(skip|xfail)\b", marks):
            return
        numbers: list[int] = []
        args = [arg.arg for arg in node.args.args]
        needed = set(args) - {"self", *re.findall(r"\w+", marks), *unit.fixtures}
        if node.name == "check":
            if not self.entry:
                raise Unscorable("a test defines check(candidate), but there is no entry_point")
        elif needed:
            raise Unscorable(f"{node.name} needs {', '.join(sorted(needed))}: no such fixture")
        if not all(re.match(MARK, ast.unparse(mark)) for mark in node.decorator_list):
            raise Unscorable(f"{node.name} has a decorator that is no mark of pytest")
        body = [self.statement(part, numbers) for part in node.body]
        node.body = body if numbers else [self.wrap(node.body, numbers, node.name + "()")]
        unit.functions.append((owner, node.name, args, numbers))

    def statement(self, node: ast.stmt, numbers: list[int]) -> ast.stmt:
        """A statement, wrapped if it is a test."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not asserts(node, self.helpers):
            return node
        source = node.test if isinstance(node, ast.Assert) else node
        return self.wrap([node], numbers, ast.unparse(source))

    def wrap(self, body: list, numbers: list[int], source: str = "") -> ast.With:
        number = len(self.tests)
        numbers.append(number)
        self.tests.append((" ".join((source or ast.unparse(body[-1])).split()), *self.mark))
        block = ast.parse(f"with __test__({number}): pass").body[0]
        block.body = body
        return block


class Asserts(ast.NodeTransformer):
    """Rewrite comparisons in asserts, so that both sides are known when they differ.

    The side that does not use the program is evaluated first: else a program that empties its
    argument would buy `assert f(xs) == sorted(xs)`.

        assert f(xs) == sorted(xs)    __equal__(__first__(lambda: f(xs), lambda: sorted(xs)),
                                                __second__())
    """

    def __init__(self, touching: set) -> None:
        self.touching = touching  # names that may use the program

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return node
        node.msg = None  # nobody sees it
        self.generic_visit(node)
        if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
            if len(node.test.ops) == 1:
                sides = [node.test.left, node.test.comparators[0]]
                return ast.Expr(ast.Call(ast.Name("__equal__", ast.Load()), sides, []))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) == 1:
            node.left, node.comparators[0] = self.reorder(node.left, node.comparators[0])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) == "type" and len(node.args) == 1:
            node.func = ast.Name("__type__", ast.Load())
        if re.match(r"self\.assert\w*Equal$", ast.unparse(node.func)) and len(node.args) > 1:
            node.args[:2] = self.reorder(*node.args[:2])
        return node

    def reorder(self, left: ast.expr, right: ast.expr) -> tuple:
        bound = (ast.NamedExpr, ast.Await, ast.Yield, ast.Starred)
        if not find(left, ast.Call) or not find(right, ast.Name) or mentions(right, self.touching):
            return left, right
        if find(left, bound) or find(right, bound):
            return left, right
        first = ast.parse("__first__(lambda: 0, lambda: 0)", mode="eval").body
        first.args[0].body, first.args[1].body = left, right
        return first, ast.parse("__second__()", mode="eval").body


def find(tree: ast.AST, kinds: Any) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def imported_names(node: Any) -> list[str]:
    return [alias.asname or alias.name for alias in node.names]


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def mentions(node: ast.AST, names: set) -> bool:
    return any(part.id in names for part in find(node, ast.Name))


def decorated(node: Any, pattern: str) -> bool:
    return any(re.match(pattern, ast.unparse(mark)) for mark in node.decorator_list)


def is_test(node: ast.AST, called: set) -> bool:
    """A function that pytest calls, or the check(candidate) of HumanEval."""
    if not isinstance(node, ast.FunctionDef) or decorated(node, FIXTURE):
        return False
    check = node.name == "check" and len(node.args.args) == 1 and "check" not in called
    return node.name.startswith("test") or check


def asserts(node: ast.AST, helpers: set) -> bool:
    """A statement can fail a test: it asserts, or calls something that does."""
    if any(not getattr(part.test, "value", None) for part in find(node, ast.Assert)):
        return True
    names = [ast.unparse(part.func).rpartition(".")[2] for part in find(node, ast.Call)]
    return any(name in helpers or re.match("raises$|fail$|assert", name) for name in names)


def closure(functions: list, test: Any, names: set) -> set:
    """The names of functions of which a test holds, given the names of those found so far."""
    found: set = set()
    while new := {f.name for f in functions if f.name not in found and test(f, names | found)}:
        found |= new
    return found


def defined_names(tree: ast.Module) -> set:
    """The names that a text of tests binds itself."""
    names = {node.id for node in find(tree, ast.Name) if isinstance(node.ctx, ast.Store)}
    names |= {node.name for node in find(tree, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.arg for node in find(tree, ast.arg)}
    for node in find(tree, (ast.Import, ast.ImportFrom)):
        if getattr(node, "module", "") != "solution":
            names |= {name.partition(".")[0] for name in imported_names(node)}
    return names


def is_exception(node: ast.ClassDef, classes: list) -> bool:
    """A class of the reference is an exception: the judge has a class for it."""
    for base in map(ast.unparse, node.bases):
        if is_exception_class(getattr(builtins, base, None)):
            return True
        if any(other.name == base and is_exception(other, classes) for other in classes):
            return True
    return False


def require(node: Any) -> None:
    """Raise Unscorable if a test imports a module that is not there."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    for module in modules or [alias.name for alias in node.names]:
        root = module.partition(".")[0]
        if root not in ("", "solution") and importlib.util.find_spec(root) is None:
            raise Unscorable(f"the tests need the module {root}")


def is_exception_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, BaseException)


def refuse(tree: ast.Module) -> None:
    """Raise Unscorable for what the judge cannot host, whatever the program."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
            raise Unscorable("a test is async")
        if is_import(node):
            for name in [getattr(node, "module", None) or "", *(x.name for x in node.names)]:
                if not UNHOSTED["modules"].isdisjoint({name, name.partition(".")[0]}):
                    raise Unscorable(f"a test uses {name}, and its values cannot cross")
            require(node)
        if isinstance(node, ast.Name) and node.id in UNHOSTED["names"]:
            raise Unscorable(f"a test uses {node.id}")
        if isinstance(node, ast.Attribute) and node.attr in UNHOSTED["attributes"]:
            if not ast.unparse(node).startswith("pytest.mark."):
                raise Unscorable(f"a test uses {ast.unparse(node)[-60:]}")
        if isinstance(node, ast.FunctionDef) and node.name in UNHOSTED["definitions"]:
            raise Unscorable(f"the tests define {node.name}")
        if isinstance(node, ast.FunctionDef) and decorated(node, FIXTURE):
            if find(node, ast.Yield) or decorated(node, r".*\(.+\)"):
                raise Unscorable(f"the fixture {node.name} has options or yields")
        if isinstance(node, ast.ClassDef):
            unit = "TestCase" in " ".join(map(ast.unparse, node.bases))
            if node.decorator_list or not unit and (node.bases or node.name[:4] != "Test"):
                raise Unscorable(f"the tests define the class {node.name}")
        if isinstance(node, ast.keyword) and node.arg in ("indirect", "marks"):
            raise Unscorable(f"a test uses the option {node.arg} of pytest")


class Run:
    """One program under test: what was last called, and the outcome of each test."""

    def __init__(self, plan: Plan, code: str, limits: dict, control: Any, empty: bool = False):
        self.plan, self.code, self.limits, self.control = plan, code, limits, control
        self.empty = empty  # an empty program: find out whether the judge can host the tests
        self.socket: Any = None
        self.outcomes: list = [None] * len(plan.tests)
        self.reached: set = set()
        self.last: Any = None  # (label, request, value) of the last call
        self.death: Any = None
        self.unsent: Any = None  # what a test handed over that cannot be sent
        self.quiet = False
        self.seconds_right: list = []
        self.guarded: set = set()
        self.cpu_seconds = 0.0
        self.stand_ins: dict = {}  # by the program's number
        self.kinds: dict = {}  # classes of stand-ins, by the program's number
        self.errors: dict = {}  # classes of exceptions, by the program's number
        self.streams: dict = {}  # iterators: id -> (number, iterator)

    def result(self) -> dict:
        """Run all tests, public ones first, so that no hidden argument reaches their feedback."""
        try:
            if self.plan.kind == "assert":
                self.run_code()
            else:
                self.run_cases()
        except Died as death:
            missing = [n for n, outcome in enumerate(self.outcomes) if outcome is None]
            self.fail(missing, death)
        finally:
            self.stop()
        tests = zip(self.outcomes, self.plan.tests, strict=True)
        graded = [outcome == PASSED for outcome, (_, graded, _) in tests if graded]
        tests = zip(self.outcomes, self.plan.tests, strict=True)
        shown = [outcome for outcome, (_, _, public) in tests if public] or self.outcomes
        words = {status for status, _ in self.outcomes}
        order = ("timeout", "memory", "failed", "error", "passed")
        status = next(word for word in order if word in words)
        failures = dict.fromkeys(outcome for outcome in shown if outcome != PASSED)
        lines = [f"Test {shown.index(line) + 1} failed: {line[1]}" for line in failures]
        return {
            "status": "passed" if all(graded) else status,
            "lines": lines,
            "tests": graded,
            "public_passed": not failures,
            "cpu_seconds": self.cpu_seconds,
        }

    # ------------------------------------------------------------------ the tests

    def run_cases(self) -> None:
        order = sorted(range(len(self.outcomes)), key=lambda n: not self.plan.tests[n][2])
        if self.plan.kind == "functional":
            names = [self.plan.entry.partition(".")[0], "Solution"]
            found = self.start(names=names)
        for number in order:
            given, expected = self.plan.cases[number]
            with self.test(number):
                if self.plan.kind == "stdin":
                    value, right = self.printed(given), same_output
                else:
                    value, right = self.entry(found)(*copy.deepcopy(given)), same
                if not right(value, expected):
                    raise Unequal(value, expected)
            if self.death and self.death.args[0] == "timeout":
                raise self.death  # it may not cost its time limit once per case
            self.death = None if self.plan.kind == "stdin" else self.death

    def entry(self, found: dict) -> Any:
        """What the cases call: a function, or a method of a new Solution."""
        owner, _, name = self.plan.entry.rpartition(".")
        if not owner and name in found:
            return found[name]
        if (owner or "Solution") in found:
            return getattr(found[owner or "Solution"](), name)
        return Missing(self, name)

    def printed(self, given: str) -> str:
        """What the program prints for an input, in a new process."""
        self.last = (f"with the input {show(given, 300)} the program", "", 0, NOTHING)
        memory = hasattr(os, "memfd_create")  # a full disk must not fail the program
        with contextlib.ExitStack() as files:
            source = os.fdopen(os.memfd_create("in"), "w+b") if memory else tempfile.TemporaryFile()
            files.enter_context(source)
            source.write(given.encode("utf-8", "replace"))
            source.seek(0)
            reader, writer = os.pipe()
            output = files.enter_context(open(reader, "rb", 0))
            with open(writer, "wb", 0):
                for file in (source.fileno(), writer):
                    os.fchmod(file, 0o666)  # the program is another user; it may open /dev/stdin
                self.launch(source.fileno(), writer)
            text, size, limit = bytearray(), 0, int(self.limits["output_bytes"])
            while data := self.wait_for(output):
                text += data[: max(0, limit - len(text))]  # what exceeds the limit is thrown away
                size += len(data)
            self.answer()
        words = text.decode("utf-8", "replace")
        words += f"...[{size - limit} cut]" if size > limit else ""
        self.last = (*self.last[:3], words)
        return words

    def wait_for(self, output: Any) -> bytes:
        if not select.select([output], [], [], self.patience)[0]:
            self.die("timeout", "ran out of time")
        return output.read(1 << 16)

    def run_code(self) -> None:
        found = self.start(names=sorted(self.plan.names))
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        missing = {name: Missing(self, name) for name in self.plan.names - set(found)}
        for name, value in {**found, **(missing if self.empty else {})}.items():
            setattr(module, name, value)
        space = {"__name__": "test", "__test__": self.test, "__equal__": equal, "__type__": kind_of}
        space |= {"__first__": self.first, "__second__": lambda: self.seconds_right.pop()}
        for line in self.plan.imports:  # a test may use what the solution imports
            with contextlib.suppress(ImportError):
                exec(line, space)
        space |= missing | found
        exec(self.plan.context, space)
        if self.plan.entry:
            space[self.plan.entry] = (missing | found)[self.plan.entry]
        for unit in sorted(self.plan.units, key=lambda unit: not unit.public):
            numbers = [n for *_, numbers in unit.functions for n in numbers]
            if not self.attempt(unit.body, exec, unit.code, space):
                self.fail([n for n in numbers if self.outcomes[n] is None], self.broken)
                continue
            for owner, name, args, numbers in unit.functions:
                self.attempt(numbers, self.call_test, unit, space, owner, name, args, numbers)

    def call_test(self, unit: Unit, space: dict, owner: str, name: str, args: list, numbers: list):
        """Call a test function, once for each row of its parameters."""
        if name == "check":
            return space["check"](space[self.plan.entry])
        function = getattr(space[owner], name) if owner else space[name]
        rows: list[dict] = [{}]
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                rows = [{**row, **new} for row in rows for new in parameters(*mark.args)]
        for row in rows:
            values = {arg: self.fixture(unit, space, arg) for arg in args if arg in unit.fixtures}
            this = []
            if owner:
                case = "TestCase" in [base.__name__ for base in space[owner].__mro__]
                this = [space[owner](name) if case else space[owner]()]
            if len(rows) > 1:
                self.attempt(numbers, function, *this, **values, **row)
            else:
                function(*this, **values, **row)

    def fixture(self, unit: Unit, space: dict, name: str) -> Any:
        needed = unit.fixtures[name]
        return space[name](**{arg: self.fixture(unit, space, arg) for arg in needed})

    def attempt(self, numbers: list, action: Any, /, *args: Any, **kwargs: Any) -> bool:
        """Run a piece of test code. What breaks it off fails the tests that it did not reach."""
        self.reached -= set(numbers)
        self.last = None
        try:
            action(*args, **kwargs)
            self.check()
        except BaseException as error:
            self.broken = error
            self.fail([n for n in numbers if n not in self.reached] or numbers[-1:], error)
            if isinstance(error, (Died, Unscorable)):
                raise
            return False
        for number in numbers:  # an early return leaves tests unreached: nothing failed them
            self.outcomes[number] = self.outcomes[number] or PASSED
        return True

    @contextlib.contextmanager
    def test(self, number: int) -> Any:
        """The context around one test."""
        self.reached.add(number)
        try:
            yield
            self.check()
        except BaseException as error:
            self.fail([number], error)
            if isinstance(error, Unscorable) or self.death and self.plan.kind == "assert":
                raise
        else:
            self.outcomes[number] = self.outcomes[number] or PASSED

    def check(self) -> None:
        """Raise what a test may have caught, but must not: the program's end, a value not sent."""
        problem, self.unsent = self.death or self.unsent, None
        if problem:
            raise problem

    def first(self, left: Any, right: Any) -> Any:
        """The left side of a comparison; the right one is evaluated first if it asks nothing."""
        self.quiet = True
        try:
            second = right()
        except Asked:
            self.quiet = False
            value = left()
            second = right()
        else:
            self.quiet = False
            value = left()
        finally:
            self.quiet = False
        self.seconds_right.append(second)
        return value

    def fail(self, numbers: list, error: BaseException) -> None:
        for number in numbers:
            if self.outcomes[number] in (None, PASSED):
                self.outcomes[number] = self.explain(error, self.plan.tests[number][0])

    def explain(self, error: BaseException, source: str) -> tuple[str, str]:
        """(status, line of feedback) of what failed a test with this source."""
        call, value = "the program", NOTHING
        if self.last:
            call, value = self.text(*self.last[:3]), self.last[3]
        if isinstance(error, Died):
            return error.args[0], f"{call} {error.args[1]}"
        if isinstance(error, ImportError) and error.name == "solution":
            return "error", f"the program does not have all that the tests import ({error.msg})"
        text = f"{type(error).__name__}: {cut(message(error), 300)}".removesuffix(": ")
        if hasattr(error, "_line"):  # raised by the program
            lines = ["", *self.code.splitlines()]
            where = ""
            if 0 < error._line < len(lines):
                where = f" (line {error._line}: {cut(lines[error._line].strip(), 120)})"
            status = "memory" if isinstance(error, MemoryError) else "error"
            return status, f"{call} raised {text}{where}"
        room = 400 if self.plan.kind == "stdin" else 200
        if isinstance(error, Unequal):
            expected = cut(source, 200)
            if any(side is value for side in error.args):
                expected = show(error.args[error.args[0] is value], room)
        else:
            expected = cut(source, 200) + f" ({text})"
        if value is NOTHING:
            return "failed", f"expected {expected}"
        verb = "printed" if self.plan.kind == "stdin" else "returned"
        return "failed", f"{call} {verb} {show(value, room)}, expected {expected}"

    def text(self, label: str, request: str, first: int) -> str:
        """A call as a line of code, with its arguments as they were when it began."""
        if not request:
            return label
        wire = Wire(self)
        wire.objects, wire.count = self.wire.objects | self.wire.undone, first
        try:
            _, changes, value = json.loads(request)
            for _, parts in changes:
                wire.unpack_all(parts)
            function, args, kwargs = wire.unpack(value)
        except Exception:  # an argument was forgotten since
            return f"{label}(...)"
        words = [show(arg, 100) for arg in args]
        if isinstance(function, str):  # a method: the first is its owner
            words = words[1:]
        words += [f"{name}={show(value, 100)}" for name, value in kwargs.items()]
        return cut(f"{label}({', '.join(words)})", 300)

    # ------------------------------------------------------------------ the program

    def launch(self, source: int = 0, sink: int = 1, names: Any = ()) -> None:
        """A new process begins to run the program."""
        self.stop()
        self.death = None
        self.patience = wall(self.limits["timeout"])
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.wire = Wire(self)
            files = [source, sink, theirs.fileno()]
            socket.send_fds(self.control, [json.dumps(self.limits).encode()], files)
        start = {
            "module": "__main__" if self.plan.kind == "stdin" else "solution",
            "context": self.plan.context,
            "code": self.code,
            "names": list(names),
            "operators": [*self.plan.operators],
        }
        self.exchange(json.dumps(start))

    def start(self, names: list) -> dict:
        """Define the program; those of the names that it has."""
        self.launch(names=names)
        try:
            found = self.answer()
        except Exception as error:
            if self.empty:
                raise Unscorable(f"its context does not run: {error!r}") from None
            self.fail(range(len(self.outcomes)), error)
            self.die("error", "could not be loaded")
        for name, value in found.items():
            if isinstance(value, Remote):
                object.__setattr__(value, "_label", name)
        return found

    def stop(self) -> None:
        """End the program; (its exit code, whether it used up its time)."""
        self.ending = (0, False)
        if self.socket:
            self.socket.close()
            self.socket = None
            send(self.control, "stop")
            code, seconds = json.loads(receive(self.control))
            self.cpu_seconds = max(self.cpu_seconds, seconds)
            late = code == -signal.SIGPROF or seconds >= 0.98 * self.limits["timeout"]
            self.ending = (code, late)

    def die(self, status: str, text: str) -> None:
        self.death = Died(status, text)
        raise self.death

    def exchange(self, text: str) -> None:
        """Send a message. Where the program has ended, its last words are still to be read."""
        if self.death:
            raise self.death
        self.socket.settimeout(max(0.001, self.patience))
        try:
            send(self.socket, text)
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OSError:
            pass

    def answer(self, function: Any = "") -> Any:
        """What the program says: its value, or its exception, raised here."""
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
            error = RuntimeError("the program raised StopIteration")  # it would end a map()
            error._line = value._line
            raise error
        raise value

    def ended(self) -> None:
        """The program's process is gone. For a main program that may be right."""
        self.stop()
        code, late = self.ending
        if late:
            self.die("timeout", "ran out of time")
        if code == 0 and self.plan.kind == "stdin":
            return
        if code in (0, -signal.SIGKILL):  # the latter may be ours: it had closed its socket
            self.die("error", "ended before it answered")
        names = {number.value: number.name for number in signal.Signals}  # some have no name
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {names.get(-code, f'signal {-code}')}"
        self.die("error", how)

    def ask(self, label: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Have the program do function(*args, **kwargs).

        function: a stand-in, a builtin, or the name of a method of the first argument.
        """
        if self.quiet:
            raise Asked
        self.forget()
        first = self.wire.count
        try:
            if isinstance(function, Missing):
                Wire(self).write((args, kwargs))
            else:
                request = self.wire.write((function, list(args), kwargs))
        except (TypeError, ValueError, RecursionError) as error:
            if self.empty:
                raise Unscorable(f"a test hands the program what cannot cross: {error}") from None
            self.unsent = TypeError(f"what cannot be sent to the program: {error}")
            raise self.unsent from None
        if isinstance(function, Missing):
            self.last = (label, Wire(self).write(("", [label, *args], kwargs)), 0, NOTHING)
            error = NameError(f"name '{label}' is not defined")
            error._line = 0
            raise error
        if label:
            self.last = (label, request, first, NOTHING)
        self.exchange(request)
        value = self.answer(function)
        if label:
            self.last = (label, request, first, value)
        return value

    def forget(self) -> None:
        """Forget the containers that no test can see any more, and the old ones if there are many.

        So a turn costs the same after many calls. What both forgot is no longer kept equal.
        """
        room, objects = KEPT_EQUAL, self.wire.objects
        for number in reversed(list(objects)):
            x = objects[number]
            room -= 1 + len(x) if hasattr(x, "__len__") else 1
            if room < 0 or sys.getrefcount(x) <= 3:  # in objects, as x, as an argument
                self.wire.forget(number)
                self.wire.gone.append(number)

    def may_change(self, x: Any) -> bool:
        """No program changes what modules of this process hold, such as keyword.kwlist."""
        if not self.guarded:
            modules = [module for name, module in sys.modules.items() if name != "solution"]
            held = gc.get_referents(*gc.get_referents(*modules))
            self.guarded = {id(x) for x in held if isinstance(x, CHANGEABLE)}
        return id(x) not in self.guarded

    def export(self, x: Any, wire: Wire) -> list:
        """What of the judge is no data, for the program."""
        if isinstance(x, Remote):
            return ["object", x._number]
        if id(x) in self.streams:
            return ["object", self.streams[id(x)][0]]
        name = getattr(x, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, self) is x:
            return ["shared", name]
        if x is NotImplemented:
            return ["shared", "NotImplemented"]
        number = getattr(x, "_number", None)
        if isinstance(number, int):  # an exception of the program, or its class
            return ["object", number]
        if isinstance(x, collections.abc.Iterator):
            return ["iterator", *wire.pack_all(list(itertools.islice(x, 10**6)))]
        raise TypeError(f"a value of type {type(x).__name__}")

    def load(self, kind: str, parts: list, wire: Wire) -> Any:
        """What of the program is no data, for the tests."""
        if kind == "shared":
            value = getattr(builtins, parts[0])
            if parts[0] not in SHARED and not is_exception_class(value):
                raise ValueError(parts[0])
            return value
        if kind == "error":
            return self.load_error(*parts, wire)
        if kind == "class":
            return self.exception_class(*parts[:3], parts[3:])
        if kind == "stream":
            number, is_generator = parts
            stream = self.stream(
                Remote(self, number, "iterator")
            )  # its items, as they are asked for
            stream = stream if is_generator else itertools.chain(stream)
            self.streams[id(stream)] = (number, stream)
            return stream
        if kind == "iterator":
            return parts
        if kind != "object":
            raise ValueError(kind)
        if parts[0] not in self.stand_ins:
            if parts[1] not in self.kinds:
                self.kinds[parts[1]] = self.stand_in_class(*parts[2:])
            kind = self.kinds[parts[1]]
            self.stand_ins[parts[0]] = kind(self, int(parts[0]), kind.__name__)
        return self.stand_ins[parts[0]]

    def load_error(self, kind: list, number: int, text: str, args: Any, line: int, wire: Wire):
        """An exception as the tests know it."""
        kind, args = self.load(kind[0], kind[1:], wire), wire.unpack(args)
        args = args if isinstance(args, tuple) else (text,)
        if number not in self.stand_ins:
            try:
                error = kind.__new__(kind, *args)
            except Exception:
                error = RuntimeError.__new__(RuntimeError)
            error.args = args
            error._line, error._text, error._number = int(line), str(text), int(number)
            self.stand_ins[number] = error
        return self.stand_ins[number]

    def stand_in_class(self, names: list, own: list, methods: list) -> type:
        allowed = [name for name in own if name in self.plan.operators or name == "__call__"]
        space = {name: operator_named(name) for name in allowed}
        space["_methods"] = set(methods) if self.plan.objects else set()
        return type(names[0][:60], (Remote,), space)

    def exception_class(self, number: int, module: str, name: str, bases: list) -> type:
        known = getattr(sys.modules.get(module), name, None)
        if is_exception_class(known) and (module == "builtins" or issubclass(known, Exception)):
            return known
        if number not in self.errors:
            parents = tuple(self.load(base[0], base[1:], self.wire) for base in bases)
            space = {"_run": self, "_number": number}
            try:
                self.errors[number] = type(name, (Raised, *parents), space)
            except TypeError:
                self.errors[number] = type(name, (Raised, Exception), space)
        return self.errors[number]

    def stream(self, remote: Any) -> Any:
        """The items of an iterator of the program: the first ones singly, then in batches."""
        for size in itertools.chain([1] * 8, (2**n for n in range(1, 10)), itertools.repeat(1000)):
            try:
                items = self.ask("", "take items", remote, size)
            except StopIteration:
                return
            yield from items


class Remote:
    """A stand-in for a function, class or object of the program."""

    _methods: set = set()

    def __init__(self, run: Run, number: int, label: str) -> None:
        for name, value in (("_run", run), ("_number", number), ("_label", label)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        label = f"{self._label}.{name}"
        if name in type(self)._methods:
            return functools.partial(self._run.ask, label, name, self)
        if name[:2] == "__" and name not in ("__name__", "__doc__", "__qualname__"):
            raise AttributeError(name)
        if not self._run.plan.objects and name[:2] != "__":
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        value = self._run.ask("", getattr, self, name)
        if isinstance(value, Remote):
            object.__setattr__(value, "_label", label)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._run.ask("", setattr, self, name, value)

    def __instancecheck__(self, x: Any) -> bool:
        try:
            return self._run.ask("", isinstance, x, self)
        except TypeError:
            self._run.unsent = None
            return False

    def __subclasscheck__(self, x: Any) -> bool:
        return self._run.ask("", issubclass, x, self)

    def __repr__(self) -> str:
        return f"<{self._label} object>"


class Missing(Remote):
    """A stand-in for what the program does not define."""

    def __init__(self, run: Run, name: str) -> None:
        super().__init__(run, -1, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run.ask(self._label, self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self()


class Raised:
    """What the stand-in for an exception class of the program can do."""

    _text = None

    def __str__(self) -> str:
        return super().__str__() if self._text is None else self._text

    def __getattr__(self, name: str) -> Any:
        if self._text is None or name.startswith("_"):
            raise AttributeError(name)
        return self._run.ask("", getattr, self, name)


class Unequal(AssertionError):
    """The two sides of a comparison differ."""


def operator_named(name: str) -> Any:
    """A dunder method of a stand-in, which asks the program."""

    def method(self: Remote, /, *args: Any, **kwargs: Any) -> Any:
        if name == "__call__":
            return self._run.ask(self._label, self, *args, **kwargs)
        if name in ("__eq__", "__ne__") and not isinstance(args[0], Remote):
            return NotImplemented  # data is the answer itself: no object decides that it equals it
        return self._run.ask("", name, self, *args)

    return method


def kind_of(x: Any) -> Any:
    return x._run.ask("", type, x) if isinstance(x, Remote) else type(x)


def equal(left: Any, right: Any) -> None:
    if not left == right:
        raise Unequal(left, right)


def parameters(names: Any, values: Any, **_: Any) -> list[dict]:
    """The rows of pytest.mark.parametrize."""
    names = re.findall(r"\w+", names) if isinstance(names, str) else list(names)
    rows = []
    for value in values:
        if type(value).__name__ == "ParameterSet":  # pytest.param
            value = value.values
        elif len(names) == 1:
            value = [value]
        rows.append(dict(zip(names, value, strict=True)))
    return rows


def wall(timeout: float) -> float:
    """Seconds that a program may hold the turn: CPU time decides, this ends what sleeps."""
    return 1.5 * timeout + 3


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
    if isinstance(value, dict) and type(expected) is dict:
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


def same_numbers(left: str, right: str) -> bool:
    sides = []
    for line in (left, right):
        words = line.split()
        if not line.isascii() or "_" in line or max(map(len, words), default=0) > 4000:
            return False
        try:
            sides.append([int(w) if re.fullmatch(r"[+-]?\d+", w) else float(w) for w in words])
        except ValueError:
            return False
    return same(*sides)


ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")  # another one in each run


def message(error: BaseException) -> str:
    try:
        return str(getattr(error, "_text", None) or error)
    except Exception:  # the display of a value in it raises
        return ""


def cut(text: str, room: int) -> str:
    """At most `room` characters of a text: its head and its tail, with the cut marked."""
    text = ADDRESS.sub("at 0x...", text)  # here, since a cut may go through one
    half = max(0, room - 26) // 2
    if len(text) <= room:
        return text
    return f"{text[:half]}...[{len(text) - 2 * half} cut]...{text[len(text) - half :]}"


class Shown(reprlib.Repr):
    """repr for feedback: the same text for the same value, of bounded size."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.maxlevel, self.maxlong, self.maxother, self.maxstring = 6, 200, 200, room
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 30
        self.maxdeque = 30

    def repr1(self, x: Any, level: int) -> str:  # the base goes by the name of the class
        return repr(x) if isinstance(x, Remote) else super().repr1(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(cut(x, self.maxstring), level)

    def repr_set(self, x: set, level: int) -> str:
        if not x:
            return "set()"
        try:
            parts = sorted(x)
        except TypeError:  # not left in the order of their addresses
            parts = sorted(x, key=repr)
        words = [self.repr1(part, level - 1) for part in parts[: self.maxset]]
        return "{" + ", ".join(words + ["..."] * (len(x) > self.maxset)) + "}"


def show(x: Any, room: int = 200) -> str:
    """A value as text for feedback, cut with a mark.

    >>> show({"b", "a"}), show("x" * 1000, 50)
    ("{'a', 'b'}", "'xxxxxxxxxxxx...[976 cut]...xxxxxxxxxxxx'")
    """
    try:
        return repr(cut(x, room)) if isinstance(x, str) else cut(Shown(room).repr(x), room)
    except Exception:
        return f"a {type(x).__name__} that cannot be shown"


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
    size = 4 << 30 if hard < 0 else min(4 << 30, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))
    words = f"it can see your files, processes and network ({fault})" if fault else ""
    send(trainer, words)
    os.dup2(0, 2)  # until here stderr was the trainer's, who does not read on
    plans = functools.lru_cache(200)(functools.partial(ready, control))
    while True:
        try:
            problem, code, limits = json.loads(receive(trainer))
        except (EOFError, OSError):  # the trainer has ended
            os._exit(0)
        limit_cpu(limits)
        try:
            answer = Run(plans(problem), code, limits, control).result()
        except Unscorable as error:
            answer = {"status": "unscorable", "lines": [str(error)], "tests": []}
        send(trainer, json.dumps(answer))


def limit_cpu(limits: dict) -> None:
    """The kernel ends this process when it computes too long, whatever C call it sits in."""
    used = time.process_time() + OWN_SECONDS + limits["timeout"]
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(used)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def ready(control: socket.socket, problem: str) -> Plan:
    """Read a problem, and see with an empty program whether its tests can be hosted."""
    plan = Plan(*json.loads(problem))
    if plan.kind == "assert":
        limits = {"timeout": 4, "memory_mb": 512, "output_bytes": 1 << 20}
        Run(plan, "", limits, control, empty=True).result()
    return plan
