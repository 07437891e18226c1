"""What tests mean: a problem's tests are read once, and each statement that asserts is one test.

In:  the kind of a problem, its tests, public tests, entry point, context and reference.
Out: a `Plan`: the code of the tests, with a mark around each, and which names are the program's.

A loop, a `try` or a `with` that asserts is one test as a whole. So this text has the tests 0 and 1:

    def test_f():                         def test_f():
        assert f(1) == 1                      with __test__(0): __equal__(f(1), 1)
        for n in range(9):                    with __test__(1):
            assert f(n) >= 0                      for n in range(9): assert f(n) >= 0

judge.py gives __test__ a meaning. What no judge can host raises Unscorable. Standard library only.
"""

import ast
import builtins
import collections
import importlib.util
import re
import symtable
import sys
from typing import Any


def words(text: str) -> set:
    return set(text.split())


UNHOSTED_MODULES = words(  # a test file may not import these
    "asyncio concurrent ctypes dataclasses datetime decimal fractions gc hypothesis io "
    "inspect logging multiprocessing os pandas pathlib pickle shutil socket subprocess "
    "tempfile threading unittest warnings weakref"
)
UNHOSTED_NAMES = words(  # nor use these names
    "open eval exec locals globals get_type_hints redirect_stdout redirect_stderr stdout stdin "
    "stderr argv setrecursionlimit seed send throw mock patch fixture warns deprecated_call "
    "importorskip skip xfail setUp setUpClass setup_method setup_class setup_function "
    "setup_module setUpModule tearDown teardown_method __init__ __doc__ __cause__ __context__"
)
TAKING = words("next pop popleft popitem send")  # calls that take something out of an argument
DATA = (str, bytes, list, tuple, dict, set, complex, range, collections.Counter, collections.deque)
# What plain data have (also arrays and exceptions). Other attributes need an object.
DATA_ATTRIBUTES = words("all any tolist value shape dtype ndim size T args __name__")
DATA_ATTRIBUTES.update(dir(0), dir(0.0), *map(dir, DATA))
OPERATORS = words(  # what tests may do with the program's objects; for == see Remote.__eq__
    "len iter next reversed contains getitem setitem delitem enter exit lt le gt ge neg pos abs "
    "invert index int float complex round str repr format bool hash add radd iadd sub rsub isub "
    "mul rmul imul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul and or xor"
)
OPERATORS = {f"__{word}__" for word in OPERATORS}
IMPORTS = (ast.Import, ast.ImportFrom)
ASKING = {"type": 1, "callable": 1, "hasattr": 2}  # builtins and how many arguments they have


class Unscorable(BaseException):
    """The judge cannot host the tests. Its text says why."""


# A test: its code for the feedback ("" for a case), whether it is graded, whether it may be shown.
Test = collections.namedtuple("Test", "source graded public")
# A text of tests: its compiled code with marks, the numbers of the tests that stand outside of
# functions, and (class name or "", function name, numbers of its tests) for each test function.
Text = collections.namedtuple("Text", "public code outside functions")


class Plan:
    """A problem made ready for all programs."""

    def __init__(self, kind: str, tests: Any, public: Any, entry: str, context: str, ref: str):
        self.kind, self.reference = kind, ref
        self.entry, self.context = entry or "", context or ""
        self.tests: list[Test] = []
        self.cases: list = []  # kinds stdin and functional: (input, expected output) of each test
        self.texts: list[Text] = []  # kind assert
        self.names: set[str] = {self.entry.partition(".")[0], "Solution"} - {""}  # the program's
        self.wanted = self.names  # those that the program sends as soon as it is defined
        self.stops = False  # the tests speak of StopIteration
        self.operators = False  # tests may use operators on the program's objects
        self.objects = kind == "functional"  # tests may use attributes of the program's objects
        if kind not in ("assert", "stdin", "functional"):
            raise Unscorable(f"its kind is {kind!r}, expected assert, stdin or functional")
        if kind == "functional" and not entry:
            raise Unscorable("it names no entry_point")
        tests, public = list(tests or []), list(public or [])
        items = [(item, False, True) for item in public if item not in tests]  # not graded
        items += [(item, True, item in public) for item in tests]
        try:
            if kind == "assert":
                self.read_code(items)
            else:
                self.read_cases(items)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            why = str(error) or "it is too deep for Python"  # a MemoryError of the parser: no text
            raise Unscorable(f"a test cannot be read: {why}") from None
        if not any(test.graded for test in self.tests):
            raise Unscorable("it has no tests")

    def read_cases(self, items: list) -> None:
        types = (str, str) if self.kind == "stdin" else ((list, tuple), object)
        for case, graded, public in items:
            is_pair = isinstance(case, (list, tuple)) and len(case) == 2
            if not is_pair or not all(map(isinstance, case, types)):
                raise ValueError(f"expected an input and its output, got {case!r:.60}")
            self.cases.append(case)
            self.tests.append(Test("", graded, public))

    def read_code(self, items: list) -> None:
        """Read texts of kind "assert": first what all of them mean together, then one by one."""
        try:
            reference = ast.parse(self.reference or "")
        except (SyntaxError, ValueError) as error:
            raise Unscorable(f"its reference cannot be read: {error}") from None
        trees = [ast.parse(item) for item, _, _ in items]
        hidden, shown = ast.Module([], []), ast.Module([], [])
        for tree, (_, _, public) in zip(trees, items, strict=True):
            (shown if public else hidden).body += tree.body
        whole = ast.Module(shown.body + hidden.body, [])
        for node in find(whole, ast.ImportFrom):  # `from . import f`, `from .solution import f`
            node.module, node.level = node.module or "solution", 0
        refuse(whole)
        self.find_names(whole, reference)
        self.find_objects(whole, reference)
        self.refuse_own_exceptions(whole)
        self.refuse_named_iterators(whole)
        needed = names_in(shown) & own_names(hidden) - own_names(shown) - self.names
        if needed:  # public tests run first
            raise Unscorable(f"a public test uses {min(needed)}, which a hidden one defines")
        called = statement_calls(whole.body)
        self.pytest_calls, functions = set(), []
        for node in find(whole, ast.FunctionDef):  # check(candidate) is from HumanEval
            is_check = node.name == "check" and len(node.args.args) == 1 and "check" not in called
            if node.name.startswith("test") or is_check:
                self.pytest_calls.add(node)
            else:
                functions.append(node)
        self.helpers = with_callers(set(), functions, asserts)  # a call of these may fail a test
        self.touching = with_callers(self.names, functions, mentions)  # these may use the program
        for tree, (_, graded, public) in zip(trees, items, strict=True):
            self.graded, self.public = graded, public  # `mark` gives them to the tests of this text
            self.texts.append(self.read_text(tree))

    def find_names(self, tests: ast.Module, reference: ast.Module) -> None:
        """Find the names in the tests that mean the program's: what the reference defines, or what
        tests take from the module `solution`. Without a reference, names that nobody defines."""
        self.imports = [ast.unparse(node) for node in reference.body if isinstance(node, IMPORTS)]
        self.names = {self.entry.partition(".")[0]}
        for symbol in symtable.symtable(self.reference or "", "", "exec").get_symbols():
            if symbol.is_namespace() or (symbol.is_assigned() and not symbol.is_imported()):
                self.names.add(symbol.get_name())  # a function, a class or a variable
        modules = {"solution"}  # what tests call this module
        for node in find(tests, IMPORTS):
            for alias in node.names:
                if getattr(node, "module", "") == "solution":
                    self.names |= {alias.name, alias.asname or alias.name}
                elif alias.name == "solution":
                    modules.add(alias.asname or alias.name)
        attributes = find(tests, ast.Attribute)
        taken = {node.attr for node in attributes if ast.unparse(node.value) in modules}
        self.names |= modules | taken
        used = names_in(tests)
        if not reference.body or "*" in self.names:
            own = own_names(tests) | own_names(ast.parse(self.context))
            self.names |= used - own - set(dir(builtins))
            owners = {getattr(node.value, "id", "") for node in attributes}
            self.names -= owners & sys.stdlib_module_names  # `math.pi` where nobody imports math
        self.names -= {"*", ""}
        self.wanted = self.names & used.union(re.findall(r"\w+", f"{self.entry} {self.context}"))
        self.stops = "StopIteration" in used

    def find_objects(self, tests: ast.Module, reference: ast.Module) -> None:
        """Find whether tests may use operators (self.operators: x + y, len(x)) and attributes
        (self.objects: x.name) of the program's objects.

        A program must not decide that its object equals an answer. So operators need a class in
        the reference that has one, or a base or decorator that may bring one. Attributes need a
        class in the reference, or tests that use attributes which no data has. Without a reference,
        a name in capitals stands for a class.
        """
        classes = find(reference, ast.ClassDef)
        self.operators = not reference.body and any(name[:1].isupper() for name in self.names)
        for node in classes:
            methods = {part.name for part in find(node, ast.FunctionDef)}
            bases = [ast.unparse(base) for base in node.bases + node.decorator_list]
            plain = r"object|\w*(Error|Exception)"  # they bring no operators
            is_plain = all(re.fullmatch(plain, base) for base in bases)
            if not is_plain or methods & (OPERATORS | {"__eq__"}):
                self.operators = True
        if any(mentions(item.context_expr, self.names) for item in find(tests, ast.withitem)):
            self.operators = True  # `with f(1) as x` calls __enter__
        modules = own_names(tests, IMPORTS) | {"self", "solution"}
        attributes = find(tests, ast.Attribute)
        used = {node.attr for node in attributes if ast.unparse(node.value) not in modules}
        self.objects = bool(classes or self.operators or used - DATA_ATTRIBUTES)

    def refuse_own_exceptions(self, tests: ast.Module) -> None:
        """Refuse tests that expect or catch a class of the program: the judge has no such class."""
        expected = [node.type for node in find(tests, ast.ExceptHandler) if node.type]
        for node in find(tests, ast.Call):
            if ast.unparse(node.func) in ("raises", "pytest.raises"):
                expected += node.args[:1]
        for node in expected:
            if mentions(node, self.names):
                raise Unscorable(f"a test expects {ast.unparse(node)}, a class of the solution")

    def refuse_named_iterators(self, tests: ast.Module) -> None:
        """Refuse `it = iter(xs); f(it)`: it crosses with all items, also those that f leaves."""
        handed = set()
        for node in find(tests, ast.Call):
            if mentions(node.func, self.names):
                handed |= {arg.id for arg in node.args if isinstance(arg, ast.Name)}
        for node in find(tests, ast.Assign):
            is_generator = isinstance(node.value, ast.GeneratorExp)
            is_iterator = is_generator or ast.unparse(node.value).startswith("iter(")
            if is_iterator and mentions(node.targets[0], handed):
                raise Unscorable("a test hands over an iterator that has a name")

    def read_text(self, tree: ast.Module) -> Text:
        """Put a mark around each statement that asserts, and collect the test functions."""
        body, outside, functions = [], [], []
        for node in tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if not self.pytest_calls.isdisjoint(find(node, ast.FunctionDef)):
                    raise Unscorable("a test function stands below an if, a try or a with")
                node = self.mark_if_test(node, outside)
            body.append(node)
        found = {}  # of equal names the last one counts
        for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            for node in owner.body:
                if node in self.pytest_calls:
                    found[getattr(owner, "name", ""), node.name] = node
        for (owner, _), node in sorted(found.items(), key=lambda item: item[1].lineno):
            self.read_function(functions, owner, node)
        if not outside and not functions and self.is_one_test(body):
            body = [self.mark(body, outside, ast.unparse(body[-1]))]
        tree = Rewriter(self.touching).visit(ast.Module(body, []))
        code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
        return Text(self.public, code, outside, functions)

    def is_one_test(self, body: list) -> bool:
        """Whether statements without an assert are a test: they use the program or call a check."""
        plain = (*IMPORTS, ast.FunctionDef, ast.ClassDef)
        uses = any(mentions(node, self.touching) for node in body if not isinstance(node, plain))
        if not uses and not re.search("(?i)check|verify|test", " ".join(statement_calls(body))):
            return False
        if isinstance(getattr(body[-1], "value", None), ast.Compare):
            raise Unscorable(f"it asserts nothing: {ast.unparse(body[-1])}")
        return True

    def read_function(self, functions: list, owner: str, node: ast.FunctionDef) -> None:
        """Put a mark around each statement that asserts; if there is none, around all together.
        Refuse a function that the judge cannot call as pytest does."""
        decorators = [ast.unparse(part) for part in node.decorator_list]
        if any(re.match(r"pytest\.mark\.(skip|xfail)\b", part) for part in decorators):
            return
        for part in decorators:
            if not part.startswith("pytest.mark.parametrize("):
                raise Unscorable(f"{node.name} has the decorator {part}")
        if find(node, (ast.Yield, ast.YieldFrom)):
            raise Unscorable(f"{node.name} yields")
        given = {"self", *re.findall(r"\w+", " ".join(decorators))}  # parametrize("n", ...) gives n
        without_default = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        needed = sorted({arg.arg for arg in without_default} - given)
        if needed and not (node.name == "check" and self.entry):
            raise Unscorable(f"{node.name} needs {', '.join(needed)}, which nothing gives")
        numbers: list[int] = []
        body = [self.mark_if_test(part, numbers) for part in node.body]
        node.body = body if numbers else [self.mark(body, numbers, f"{node.name}()")]
        functions.append((owner, node.name, numbers))

    def mark_if_test(self, node: ast.stmt, numbers: list[int]) -> ast.stmt:
        """The statement; if it asserts, with a mark around it."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or not asserts(node, self.helpers):
            return node
        shown = node.test if isinstance(node, ast.Assert) else node
        return self.mark([node], numbers, ast.unparse(shown))

    def mark(self, body: list, numbers: list[int], source: str) -> ast.With:
        """Make statements one more test. Its number is added to `numbers`."""
        number = len(self.tests)
        numbers.append(number)
        self.tests.append(Test(" ".join(source.split()), self.graded, self.public))
        block = ast.parse(f"with __test__({number}): pass").body[0]
        block.body = body
        return block


class Rewriter(ast.NodeTransformer):
    """Put calls of the judge into tests:

    assert f(x) == 1          __equal__(f(x), 1)
    type(x), x.__class__      __ask__(type, x); also callable(x) and hasattr(x, name)
    f(xs) == sorted(xs)       [f(xs) == __4__() for (__4__,) in [__early__(lambda: sorted(xs))]][0]

    The last one evaluates sorted(xs) before f(xs). Else a program that empties xs and returns it
    would pass. Behind a call, a side of a comparison or operation and an argument go first if they
    do not use the program; except plain names, and what takes something out (next, pop).
    """

    def __init__(self, touching: set) -> None:
        self.touching = touching  # names that may use the program
        self.moved: dict = {}  # a side that is evaluated first -> the name of its value

    def visit(self, node: ast.AST) -> ast.AST:
        if node in self.moved:
            return parsed(f"{self.moved[node]}()")
        sides = self.movable(node) if isinstance(node, (ast.Compare, ast.BinOp, ast.Call)) else []
        if not sides:
            return super().visit(node)
        early = parsed("__early__()")
        for side in sides:
            function = parsed("lambda: 0")
            function.body = self.visit(side)
            early.args.append(function)
            self.moved[side] = f"__{len(self.moved)}__"
        names = ", ".join(self.moved[side] for side in sides)
        whole = parsed(f"[0 for ({names},) in [__early__()]][0]")
        whole.value.generators[0].iter.elts = [early]
        whole.value.elt = super().visit(node)
        return whole

    def movable(self, node: ast.AST) -> list:
        """The sides that stand behind a call and can be evaluated before it: those that do not use
        the program. A plain name stays; next(...) must."""
        sides, after_call = [], False
        for side in ast.iter_child_nodes(node):
            while isinstance(side, (ast.keyword, ast.Starred, ast.NamedExpr)):
                side = side.value  # sorted(xs) of `f(xs) == (want := sorted(xs))`
            used, called = names_in(side), called_names(side)
            is_free = used and used.isdisjoint(self.touching) and called.isdisjoint(TAKING)
            if after_call and is_free and not isinstance(side, ast.Name):
                if find(side, (ast.NamedExpr, ast.Yield, ast.YieldFrom)):
                    raise Unscorable("a test has := or yield beside a call of the solution")
                sides.append(side)
            after_call = after_call or bool(called)
        return sides

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        node.msg = None  # nobody sees it
        if isinstance(node.test, ast.Compare) and [type(op) for op in node.test.ops] == [ast.Eq]:
            call = parsed("__equal__()")
            call.args = [node.test.left, node.test.comparators[0]]
            node = ast.Expr(call)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        for part in node.body:
            if isinstance(part, ast.FunctionDef):  # in the rest no lambda sees the class's names
                part.body = list(map(self.visit, part.body))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if node.attr == "__class__":
            node = ast.Call(parsed("__ask__"), [parsed("type"), node.value], [])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if ASKING.get(ast.unparse(node.func)) == len(node.args):
            node.func, node.args = parsed("__ask__"), [node.func, *node.args]
        return self.generic_visit(node)


def parsed(expression: str) -> Any:
    return ast.parse(expression, mode="eval").body


def find(tree: ast.AST, kinds: Any) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def statement_calls(body: list) -> set:
    """What is called by statements that are a call and nothing else: {"main"} for `main()`."""
    values = [node.value for node in body if isinstance(node, ast.Expr)]
    return {ast.unparse(value.func) for value in values if isinstance(value, ast.Call)}


def names_in(node: ast.AST) -> set:
    return {part.id for part in find(node, ast.Name)}


def called_names(node: ast.AST) -> set:
    """The last part of each name that is called: {"sorted"} for numpy.sorted(xs)."""
    return {ast.unparse(part.func).rpartition(".")[2] for part in find(node, ast.Call)}


def mentions(node: ast.AST, names: set) -> bool:
    return not names_in(node).isdisjoint(names)


def asserts(node: ast.AST, helpers: set) -> bool:
    """Whether a statement or function can fail a test: it asserts, or calls what does."""
    for part in find(node, ast.Assert):
        if not isinstance(part.test, ast.Constant) or not part.test.value:
            return True  # it is not `assert True`
    calls = called_names(node)
    return any(name in helpers or re.match("raises$|fail$|assert", name) for name in calls)


def with_callers(names: set, functions: list, uses: Any) -> set:
    """The names, and those of all functions that use one of them, directly or through others."""
    before = None
    while names != before:
        before = names
        names = names | {node.name for node in functions if uses(node, names)}
    return names


def own_names(tree: ast.AST, kinds: Any = ast.AST) -> set:
    """The names that tests bind themselves, by nodes of these kinds."""
    names = set()
    for node in find(tree, kinds):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, IMPORTS) and getattr(node, "module", "") != "solution":
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def refuse(tests: ast.Module) -> None:
    """Raise Unscorable for what the judge cannot host, whatever the program."""
    own = own_names(tests, (ast.Name, ast.arg))
    for node in ast.walk(tests):
        for alias in node.names if isinstance(node, IMPORTS) else ():
            module = getattr(node, "module", alias.name)
            top = module.partition(".")[0]
            if top in UNHOSTED_MODULES:
                raise Unscorable(f"a test uses {module}, whose values cannot cross")
            if top != "solution" and importlib.util.find_spec(top) is None:
                raise Unscorable(f"the tests need the module {top}")
        is_mark = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
        used = {getattr(node, field, None) for field in ("id", "attr", "name")}
        unhosted = (used & UNHOSTED_NAMES) - own
        if unhosted and not is_mark:  # pytest.mark.skip: see read_function
            raise Unscorable(f"a test uses {unhosted.pop()}")
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await)):
            raise Unscorable("a test is async")
        if isinstance(node, ast.keyword) and node.arg in ("indirect", "marks"):
            raise Unscorable(f"a test uses the option {node.arg} of pytest")
        is_class = isinstance(node, ast.ClassDef)
        if is_class and (node.decorator_list or node.bases or not node.name.startswith("Test")):
            raise Unscorable(f"the tests define the class {node.name}, whose objects cannot cross")
