"""What tests mean: a problem's tests are read once, and each statement that asserts is one test.

In:  the kind of a problem, its tests, entry point, context and reference.
Out: a `Plan`: code of the tests in which each test is marked, and what may reach the program.

A loop, a `try` or a `with` that asserts is one test as a whole. So this file has the tests 0 and 1:

    def test_f():                         def test_f():
        assert f(1) == 1                      with __test__(0): __equal__(f(1), 1)
        for n in range(9):                    with __test__(1):
            assert f(n) >= 0                      for n in range(9): assert f(n) >= 0

What the judge cannot host raises Unscorable. Needs the standard library.
"""

import ast
import builtins
import collections
import importlib.util
import itertools
import re
import sys
from typing import Any


def words(text: str, form: str = "{}") -> set:
    return {form.format(word) for word in text.split()}


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
        "setup_module setUpModule tearDown teardown_method __init__ __doc__ __cause__ __context__"
    ),
}
MOVERS = words("next pop popleft popitem send")  # calls that change what they are given
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
        self.reference = ref
        self.tests: list = []
        self.units: list[Unit] = []
        self.names: set[str] = {self.entry.partition(".")[0], "Solution"} - {""}
        self.definitions: list = []  # code: what all texts import, define and assign
        self.wanted = self.names  # those that the program sends when it is defined
        self.stops = False  # the tests speak of StopIteration
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
                self.read_code(items, parsed_reference(ref))
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
                raise ValueError(f"expected an input and its output, got {case!r:.60}")

    def read_code(self, items: list, reference: ast.Module) -> None:
        trees = [ast.parse(text) for text, *_ in items]
        whole = ast.Module([node for tree in trees for node in tree.body], [])
        refuse(whole)
        self.find_names(whole, reference)
        self.find_objects(whole, reference)
        self.refuse_own_exceptions(whole)
        self.refuse_named_iterators(whole)
        self.called = {ast.unparse(node.value.func) for node in whole.body if is_call(node)}
        functions = [x for x in find(whole, ast.FunctionDef) if not is_test(x, self.called)]
        self.helpers = closure(functions, asserts, set())
        self.touching = self.names | closure(functions, mentions, self.names)
        for tree, (_, *marks) in zip(trees, items, strict=True):
            self.marks = marks
            self.units.append(self.read_unit(tree))
        if len(trees) > 1:  # public texts run first, but may need what others define
            parts = [ast.Module([node], []) for node in whole.body if self.defines(node)]
            self.definitions = [compile(part, "<test>", "exec") for part in parts]

    def defines(self, node: Any) -> bool:
        """It gives names a meaning without the program."""
        parts: list = [node.value] if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.FunctionDef):
            parts = node.decorator_list + node.args.defaults
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)
        return isinstance(node, kinds) and not mentions(ast.Tuple(parts), self.touching)

    def find_names(self, tests: ast.Module, reference: ast.Module) -> None:
        """Which names of the tests mean the program's."""
        self.imports = [ast.unparse(node) for node in reference.body if is_import(node)]
        self.names, modules = {self.entry.partition(".")[0]}, {"solution"}
        used = names_in(tests)
        for node in reference.body:
            self.names |= {getattr(node, "name", "")}
            for target in getattr(node, "targets", ()):
                self.names |= {part.id for part in find(target, ast.Name)}
        for node in filter(is_import, ast.walk(tests)):
            for alias in node.names:
                if getattr(node, "module", "") == "solution":
                    self.names |= {alias.name, alias.asname or alias.name}
                elif alias.name == "solution":
                    modules.add(alias.asname or alias.name)
        uses = find(tests, ast.Attribute)
        self.names |= modules | {node.attr for node in uses if ast.unparse(node.value) in modules}
        if not reference.body or "*" in self.names:  # all that nobody else defines
            owners = {getattr(node.value, "id", "") for node in uses}
            own = own_names(tests) | own_names(ast.parse(self.context))
            self.names |= used - own - set(dir(builtins))
            self.names -= owners & sys.stdlib_module_names
        self.names -= {"*", ""}
        self.wanted = self.names & (used | words(self.entry.replace(".", " ")))
        self.wanted |= self.names & set(re.findall(r"\w+", self.context))
        self.stops = "StopIteration" in used

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
            methods = {part.name: part for part in find(node, ast.FunctionDef)}
            if "__eq__" in methods and equals_data(methods["__eq__"]):
                raise Unscorable(f"objects of {node.name} may be equal to plain data")
            bases = " ".join(map(ast.unparse, node.bases + node.decorator_list))
            others = re.sub(r"\w*(Error|Exception)", "", bases)
            if others or not methods.keys().isdisjoint(OPERATORS | {"__eq__"}):
                self.operators = True
        for item in find(tests, ast.withitem):
            self.operators = self.operators or mentions(item.context_expr, self.names)
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

    def refuse_named_iterators(self, tests: ast.Module) -> None:
        """An iterator crosses with all its items at once, so no test could go on with it."""
        handed = set()
        for node in find(tests, ast.Call):
            if mentions(node.func, self.names):
                handed |= {arg.id for arg in node.args if isinstance(arg, ast.Name)}
        for node in find(tests, ast.Assign):
            made = ast.unparse(node.value)
            lazy = isinstance(node.value, ast.GeneratorExp) or made.startswith("iter(")
            if lazy and mentions(node.targets[0], handed):
                raise Unscorable("a test hands over an iterator that has a name")

    def read_unit(self, tree: ast.Module) -> Unit:
        """Wrap each statement that asserts, and collect the test functions."""
        unit, body = Unit(self.marks[1]), []
        for node in tree.body:
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                continue
            if not isinstance(node, ast.ClassDef) and not is_test(node, self.called):
                inner = [] if isinstance(node, ast.FunctionDef) else find(node, ast.FunctionDef)
                if any(is_test(part, self.called) for part in inner):
                    raise Unscorable("a test function stands below an if, a try or a with")
                node = self.statement(node, unit.body)
            body.append(node)
        for owner, node in test_functions(tree, self.called):
            self.read_function(unit, owner, node)
        # A text that asserts nothing, but uses the program or calls a check, is one test.
        plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        uses = any(mentions(node, self.touching) for node in body if not isinstance(node, plain))
        calls = " ".join(ast.unparse(node.value.func) for node in tree.body if is_call(node))
        calls_a_check = re.search("(?i)check|verify|test", calls)
        if not unit.body and not unit.functions and (uses or calls_a_check):
            if isinstance(getattr(body[-1], "value", None), ast.Compare):
                raise Unscorable(f"it asserts nothing: {ast.unparse(body[-1])}")
            body = [self.wrap(body, unit.body, body[-1])]
        tree.body = [Order(self.touching).visit(node) for node in body]
        unit.code = compile(ast.fix_missing_locations(tree), "<test>", "exec")
        return unit

    def read_function(self, unit: Unit, owner: str, node: ast.FunctionDef) -> None:
        """Wrap the statements of a test function that assert; if there is none, all together."""
        numbers: list[int] = []
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if any(re.match(r"pytest\.mark\.(skip|xfail)\b", mark) for mark in marks):
            return
        if find(node, (ast.Yield, ast.YieldFrom)):
            raise Unscorable(f"{node.name} yields")
        if re.search(r"pytest\.mark\.(skipif|usefixtures)\b", " ".join(marks)):
            raise Unscorable(f"{node.name} has the mark skipif or usefixtures")
        given = {"self", *re.findall(r"\w+", " ".join(marks))}
        without_default = node.args.args[: len(node.args.args) - len(node.args.defaults)]
        needed = {arg.arg for arg in without_default} - given
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


class Order(ast.NodeTransformer):
    """Evaluate first what does not use the program.

    Else a program that empties its argument would pass `assert f(xs) == sorted(xs)`. It becomes

        (__first__(lambda: sorted(xs)), __equal__(f(xs), __taken__()), __last__())[1]

    This holds for the sides of a comparison or an operation, and for the arguments of a call. In
    Python's order stay plain names, what moves an iterator, and what takes from a container.
    """

    def __init__(self, touching: set) -> None:
        self.touching = touching  # names that may use the program
        self.moved: set = set()  # nodes that are evaluated first

    def visit(self, node: ast.AST) -> ast.AST:
        if node in self.moved:
            return parsed("__taken__()")
        first = self.movable(node) if isinstance(node, (ast.Compare, ast.BinOp, ast.Call)) else []
        self.moved.update(first)
        node = super().visit(node)
        if not first:
            return node
        pair = parsed("(__first__(), 0, __last__())[1]")
        pair.value.elts[1] = node
        for side in first:
            self.moved.remove(side)
            early = parsed("lambda: 0")
            early.body = self.visit(side)
            pair.value.elts[0].args.append(early)
        return pair

    def movable(self, node: ast.AST) -> list:
        """The sides that stand after a call and do not use the program."""
        found, after_call = [], False
        for side in ast.iter_child_nodes(node):
            value = side
            while isinstance(value, (ast.keyword, ast.Starred, ast.NamedExpr)):
                value = value.value  # sorted(xs) of `f(xs) == (want := sorted(xs))`
            called = {ast.unparse(x.func).rpartition(".")[2] for x in find(value, ast.Call)}
            fixed = isinstance(value, (ast.Name, ast.Lambda)) or called & MOVERS
            used = names_in(value)
            if after_call and used and not fixed and used.isdisjoint(self.touching):
                found.append(value)
                if find(value, (ast.NamedExpr, ast.Yield, ast.YieldFrom)):
                    raise Unscorable("a test has := or yield beside a call of the solution")
            after_call = after_call or bool(called)
        return found

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        node.msg = None  # nobody sees it
        test = node.test
        if isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.Eq]:
            call = parsed("__equal__()")
            call.args = [test.left, test.comparators[0]]
            node = ast.Expr(call)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if node.attr == "__class__":
            node = ast.Call(ast.Name("__type__", ast.Load()), [node.value], [])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = ast.unparse(node.func)
        if (name, len(node.args)) in (("type", 1), ("callable", 1), ("hasattr", 2)):
            node.func = ast.Name(f"__{name}__", ast.Load())
        return self.generic_visit(node)


def parsed(expression: str) -> Any:
    return ast.parse(expression, mode="eval").body


def parsed_reference(code: str | None) -> ast.Module:
    try:
        return ast.parse(code or "")
    except (SyntaxError, ValueError) as error:
        raise Unscorable(f"its reference cannot be read: {error}") from None


def find(tree: ast.AST, kinds: Any) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def names_in(node: ast.AST) -> set:
    return {part.id for part in find(node, ast.Name)}


def mentions(node: ast.AST, names: set) -> bool:
    return not names_in(node).isdisjoint(names)


def is_test(node: ast.AST, called: set) -> bool:
    """A function that pytest calls, or the check(candidate) of HumanEval."""
    if not isinstance(node, ast.FunctionDef):
        return False
    check = node.name == "check" and len(node.args.args) == 1 and "check" not in called
    return node.name.startswith("test") or check


def test_functions(tree: ast.Module, called: set) -> list[tuple[str, ast.FunctionDef]]:
    """(class, function) of those that pytest calls: of one name the last one."""
    found = {}
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if is_test(node, called):
                found[getattr(owner, "name", ""), node.name] = node
    tests = [(owner, node) for (owner, _), node in found.items()]
    return sorted(tests, key=lambda test: test[1].lineno)


def asserts(node: ast.AST, helpers: set) -> bool:
    """A statement can fail a test: it asserts, or calls something that does."""
    tests = [part.test for part in find(node, ast.Assert)]
    if any(not (isinstance(test, ast.Constant) and test.value) for test in tests):
        return True  # `assert True` is none
    names = [ast.unparse(part.func).rpartition(".")[2] for part in find(node, ast.Call)]
    return any(name in helpers or re.match("raises$|fail$|assert", name) for name in names)


def closure(functions: list, test: Any, names: set) -> set:
    """The names of functions for which test(function, names) holds; what is found adds to names."""
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
    """An exception that a program may raise here: a builtin one, or any Exception; not Died."""
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


def equals_data(method: ast.FunctionDef) -> bool:
    """An __eq__ that compares the other object itself, or asks whether it is of a plain type."""
    other, kinds = method.args.args[-1].arg, "|".join(kind.__name__ for kind in DATA)
    pattern = rf"== {other}\b(?![.[])|\b{other} ==|isinstance\({other}, [^)]*\b({kinds})\b"
    return bool(re.search(pattern, ast.unparse(method)))


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
