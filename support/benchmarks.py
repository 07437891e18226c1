"""HumanEval, MBPP, LiveCodeBench and KodCode: their rows become Problems.

In:  the name of a set on the Hugging Face hub, or rows of a local file in the same format.
Out: a Problem for each row, or an error that says why this row cannot be one.
Needs: benchmarks.json (hub ids, splits, fields); `datasets` for the hub.
Run: python -m support.problems humaneval
"""

import ast
import base64
import builtins
import contextlib
import doctest
import io
import json
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.plan import find, names_in
from support.problems import Problem, own, read_rows

SETS = json.loads(Path(__file__).with_suffix(".json").read_text())
HUB = SETS["hub"]  # name: [format, hub id, configuration, split]


def find_rows(
    name: str,
    version: str | None = None,
    start_date: str | None = None,
    end_date: str | None = None,
) -> tuple[Any, Callable[[dict], Problem | None]]:
    """The rows of a set, and what makes a row a Problem, or None: it is outside dates or split.

    version, start_date and end_date (2025-01-31) are for LiveCodeBench.
    Raises ValueError or FileNotFoundError for a wrong request, before the hub is asked.
    """
    rows, form = ([], HUB[name][0]) if name in HUB else file_rows(name)  # the hub is asked below
    if version and name != "livecodebench":
        raise ValueError(f"version {version} is for livecodebench on the hub, not for {name}")
    for day in filter(None, (start_date, end_date)):
        if form != "livecodebench":
            raise ValueError(f"{name} has no dates: {day} is for livecodebench")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
            raise ValueError(f"{day!r} is no date: expected one like 2025-01-31")
    if name in HUB:
        rows = hub_rows(name, version or "release_v6")

    def make(row: dict) -> Problem | None:
        if start_date or end_date:
            day = str(row["contest_date"])[:10]  # a datetime, too, begins with its date
            if not (start_date or "") <= day <= (end_date or "9999"):
                return None
        if form == "mbpp" and not 11 <= int(row["task_id"]) <= 510:  # the test split
            return None
        return convert_row(form, row)

    return rows, make


def file_rows(name: str) -> tuple[list, str]:
    """The rows of a file, and their format by the fields of the first; "own": your own problems."""
    if not Path(name).is_file():
        raise FileNotFoundError(f"{name} is neither a file nor a known set ({', '.join(HUB)})")
    rows = read_rows(Path(name))
    first = next((row for row in rows if isinstance(row, dict)), {})
    forms = [form for sign, form in SETS["signs"].items() if sign in first and "tests" not in first]
    return rows, forms[0] if forms else "own"


def hub_rows(name: str, version: str) -> Any:
    """The rows of a set on the hub. ValueError, in one sentence, if that fails."""
    import datasets  # here, because both are slow to import and files do without them

    from support.run import check_hub

    form, address, configuration, split = HUB[name]
    request = {"path": address, "name": configuration, "split": split}
    if form == "livecodebench":  # datasets 5 refuses the loading script of this set
        known = SETS["livecodebench_files"]
        if version not in known:
            raise ValueError(f"{name} has no version {version!r}: expected {', '.join(known)}")
        print(f"livecodebench {version} is {', '.join(known[version])}", file=sys.stderr)
        addresses = [f"hf://datasets/{address}/{file}" for file in known[version]]
        request = {"path": "json", "data_files": addresses, "split": split}
    try:
        check_hub(address, "dataset")
        return datasets.load_dataset(**request)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        advice = "a local JSON file of the same format will do"
        raise ValueError(f"cannot load {name} from {address} ({why}); {advice}") from error


def convert_row(form: str, row: dict) -> Problem:
    """A row as a Problem. A field that nobody reads is refused, not ignored."""
    if form == "own":
        return own(row)
    unread = [name for name in row if row[name] and not re.fullmatch(SETS["fields"][form], name)]
    if unread:
        raise ValueError(f"unknown field {', '.join(unread)}")
    makers = {"humaneval": _humaneval, "mbpp": _mbpp, "livecodebench": _livecodebench}
    return makers.get(form, _kodcode)(row)


def _humaneval(row: dict) -> Problem:
    """Docstring examples are public. The prompt's helpers are context: answers leave them out."""
    prompt, name = row["prompt"], row["entry_point"]
    target = _definitions(prompt).get(name)
    if not isinstance(target, ast.FunctionDef):
        raise ValueError(f"the prompt does not define {name}")
    above = "".join(prompt.splitlines(keepends=True)[: target.lineno - 1])
    imports = find(target, ast.Import | ast.ImportFrom)
    context = "\n".join([above.strip(), *map(ast.unparse, imports)]).strip()
    message = _message(_block("Complete this program", prompt), [name])
    tests, public = [row["test"]], docstring_examples(prompt, name)
    right = prompt + row["canonical_solution"]
    return Problem(row["task_id"], message, tests, public, name, reference=right, context=context)


def _mbpp(row: dict) -> Problem:
    """The first assert is public."""
    code = row["code"].replace("\r\n", "\n")
    asserts = row["test_list"] + (row.get("challenge_test_list") or [])
    # Set-up code makes objects of the answer's own class, so it stands in front of each test.
    setup = (row.get("test_setup_code") or "").replace("\r\n", "\n")
    tests = [f"{setup}\n{test}".strip() for test in asserts]
    needed = _needed(code, "\n".join(tests))
    called = [ast.unparse(call.func) for call in find(ast.parse(asserts[0]), ast.Call)]
    names = [name for name in called if name in needed]  # in int(f(2)) it is f
    if not names:
        raise ValueError("the first test calls nothing that the reference defines")
    message = _message(row.get("text") or row["prompt"], needed, _block("It must pass", tests[0]))
    key, context = f"Mbpp/{row['task_id']}", "\n".join(row.get("test_imports") or [])
    return Problem(key, message, tests, tests[:1], names[0], reference=code, context=context)


def _livecodebench(row: dict) -> Problem:
    """A case is [input, output], or [arguments, value], where each line of the input is JSON."""
    shown = json.loads(row["public_test_cases"])
    private = private_tests(row["private_test_cases"])
    cases = shown + private
    kinds = {case["testtype"] for case in cases}
    if not private or len(kinds) != 1:
        raise ValueError(f"{len(private)} private tests, types {sorted(kinds)}: expected one type")
    [kind] = kinds
    if kind == "functional":
        name = json.loads(row["metadata"])["func_name"]
        tests = []
        for case in cases:
            lines = filter(str.strip, case["input"].split("\n"))
            tests.append([list(map(json.loads, lines)), json.loads(case["output"])])
        public = tests[: len(shown)]
        calls = [f"{name}({', '.join(map(repr, given))}) == {value!r}" for given, value in public]
        hints = [_block("Start from this", row["starter_code"])]
        hints.append(_block("It must pass", "\n".join(calls)))
    else:
        name, tests = "", [[case["input"], case["output"]] for case in cases]
        public = tests[: len(shown)]
        hints = ["It reads standard input and prints the answer to standard output."]
        for given, expected in public:
            hints += [_block("Input", given, ""), _block("Output", expected, "")]
    # LiveCodeBench's harness puts these imports first: its starter code uses List unimported.
    imports = [f"from {module} import *\nimport {module}" for module in SETS["modules"]]
    context = "\n".join([*imports, "sys.setrecursionlimit(50000)"])
    key, level = str(row["question_id"]), row.get("difficulty")
    message = _message(row["question_content"], [name] if name else [], *hints)
    return Problem(key, message, tests, public, name, kind, level, context=context)


def _kodcode(row: dict) -> Problem:
    """A pytest file, none of it public. In style "complete" the question lacks only a body."""
    tests = [row[name] for name in ("test", "test_code") if row.get(name)]
    needed = _needed(row["solution"], "\n".join(tests))
    if not needed:
        raise ValueError("the tests use nothing that the solution defines")
    if row.get("style") == "complete":
        message = _message(_block("Complete this program", row["question"]), needed)
    else:
        stubs = [info["function_declaration"] for info in row.get("test_info") or []]
        message = _message(row["question"], needed, _block("Start from this", "\n".join(stubs)))
    key, right, level = str(row["question_id"]), row["solution"], row.get("gpt_difficulty")
    return Problem(key, message, tests, entry_point=needed[0], difficulty=level, reference=right)


def docstring_examples(prompt: str, entry_point: str) -> list[str]:
    """A docstring's examples as asserts: doctests, and `f(x) == y`, `=> y`, `returns y` in prose.

    Only constants are taken, so prose makes no test. Some are wrong: run the reference on them.

    >>> docstring_examples('def f(x):\\n    "f(2) => 4, f(x) => x"\\n', "f")
    ['assert f(2) == 4']
    """
    target = _definitions(prompt)[entry_point]
    # The docstring as it is written: in its value an example's "\n" would be a line break.
    text = (ast.get_source_segment(prompt, target.body[0]) or "").strip("\"'")
    examples = doctest.DocTestParser().get_examples(text)
    found = [(example.source, _constant(example.want or "None")) for example in examples]
    start = rf"(?<![\w.]){re.escape(entry_point)}\("  # "f(", but not "of(" or "my.f("
    call = rf"{start}(?:(?!{start})[\s\S])*?\)"  # "f((1, 2), [])", also over several lines
    sign = r"[ \t]*(?:# *)?(?:==>|=>|->|\u279e|==|=|should return|returns?) *"  # " # => "
    # The call; after its sign, the rest of the line (looked at, not consumed: it may hold a call).
    for source, rest in re.findall(f"({call}){sign}(?=(.*))", text):
        found.append((source, _constant(rest)))

    asserts = []
    for source, result in found:
        with contextlib.suppress(SyntaxError, ValueError):
            tree = ast.parse(source.strip(), mode="eval").body
            is_closed = names_in(tree) - set(dir(builtins)) == {entry_point}
            if isinstance(tree, ast.Call) and is_closed and result:
                asserts.append(f"assert {ast.unparse(tree)} == {result}")
    return list(dict.fromkeys(asserts))


def _constant(text: str) -> str:
    """The longest constant at the start of a text; "" if a formula goes on after it (`4 + x`)."""
    for end in range(len(text), 0, -1):
        # What stands behind "4" in "42", "4.5", "4 + x": then "4" is not the whole value.
        goes_on = re.match(r"\.?\w|[\"']| *[-+*/=]", text[end:])
        with contextlib.suppress(SyntaxError, ValueError, TypeError):
            value = ast.literal_eval(text[:end].strip())
            if not goes_on and text[end - 1] not in ".,":
                return repr(value)
    return ""


class NamelessUnpickler(pickle.Unpickler):
    """Loading a pickle can run code that it names. This one knows no names."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the private tests are a pickle that names {module}.{name}")


def private_tests(text: str) -> list[dict]:
    """LiveCodeBench's private tests, which are JSON or base64(zlib(pickle(JSON))) [theirs]."""
    if not text.lstrip().startswith("["):
        data = zlib.decompress(base64.b64decode(text, validate=True))
        text = NamelessUnpickler(io.BytesIO(data)).load()
    return json.loads(text)


def _message(statement: str, names: list[str], *hints: str) -> str:
    """The user message of a problem."""
    parts = [statement.strip()]
    if names:
        parts.append("The program must define " + ", ".join(f"`{name}`" for name in names) + ".")
    ending = "Answer with one fenced Python block that holds the complete program."
    return "\n\n".join([*parts, *filter(None, hints), ending])


def _block(title: str, text: str, tag: str = "python") -> str:
    """A text under its title. An empty Python block is left out; an empty input is shown."""
    text = text.strip("\n")
    is_empty_program = tag == "python" and not text
    return "" if is_empty_program else f"{title}:\n\n```{tag}\n{text}\n```"


def _definitions(text: str) -> dict[str, Any]:
    """The functions and classes at the top level of a program, by name; of equal names the last."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name: node for node in ast.parse(text).body if isinstance(node, kinds)}


def _needed(code: str, tests: str) -> list[str]:
    """The names that `code` defines and `tests` use but do not define, in the order of `code`."""
    tree = ast.parse(tests)
    imported = {alias.name for alias in find(tree, ast.alias)}  # from solution import f
    used = (names_in(tree) | imported) - _definitions(tests).keys()
    return [name for name in _definitions(code) if name in used]
