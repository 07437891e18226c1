"""HumanEval, MBPP, LiveCodeBench and KodCode: their rows become Problems.

In:  the name of a set on the Hugging Face hub, or rows of a local file in the same format.
Out: a Problem for each row, or an error that says why this row cannot be one.
Needs: benchmarks.json (hub ids, splits, fields); `datasets` for the hub and .parquet files.
Run: python -m support.problems humaneval --no-run
"""

import ast
import base64
import builtins
import contextlib
import doctest
import itertools
import json
import pickletools
import re
import sys
import textwrap
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.problems import MAX_BYTES, Problem

SETS = json.loads(Path(__file__).with_suffix(".json").read_text())
HUB = SETS["hub"]  # name: [format, hub id, configuration, split]
MBPP_IDS = SETS["mbpp_ids"]  # split: [first task_id, last task_id]


def recognise(name: str, rows: list | None) -> str:
    """The format of a named set, or of a file by its fields; "own" for any other."""
    if rows is None:
        return HUB[name][0]
    row = next((row for row in rows if isinstance(row, dict)), {})
    for form, signs in SETS["signs"].items():
        if row.keys() >= set(signs) and "tests" not in row:
            return form
    return "own"


def hub_rows(name: str, split: str | None = None, version: str | None = None) -> Any:
    """The rows of a named set, or of a .parquet file. ValueError, in one sentence, if it fails."""
    import datasets  # here, because it is slow to import and JSON files do without it

    form, where, configuration, default = HUB.get(name, ["parquet", "parquet", None, "train"])
    request = {"path": where, "name": configuration, "split": default}
    if form == "parquet":
        request["data_files"] = name
    if form == "kodcode":
        request["split"] = split or default
    if form == "livecodebench":  # datasets 5 refuses the set's own loading script
        version = version or "release_v6"
        files = SETS["livecodebench_files"].get(version, [])
        if not files:
            known = ", ".join(SETS["livecodebench_files"])
            raise ValueError(f"unknown LiveCodeBench version {version!r}: expected one of {known}")
        print(f"livecodebench {version} is {', '.join(files)}", file=sys.stderr)
        addresses = [f"hf://datasets/{where}/{file}" for file in files]
        request = {"path": "json", "data_files": addresses, "split": default}
    try:
        return datasets.load_dataset(**request)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        advice = "a local JSON file of the same format will do"
        raise ValueError(f"cannot load {name} from {where} ({why}); {advice}") from error


def selection(
    name: str, form: str, split: str | None, difficulty: str | None, dates: tuple
) -> Callable[[dict], bool]:
    """A function that says of a row whether it was asked for. ValueError for a wrong request."""
    if form.startswith("mbpp"):
        split = split or ("test" if form == "mbpp" else "all")
        if split not in MBPP_IDS:
            raise ValueError(f"{name} has no split {split!r}: expected {' or '.join(MBPP_IDS)}")
    elif split and name not in HUB:
        raise ValueError(f"{name} has no split {split!r}: it is not divided")
    for day in filter(None, dates):
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
            raise ValueError(f"{day!r} is no date: expected one like 2025-01-31")
    first, last = dates[0] or "", dates[1] or "9999"
    levels = [level.strip() for level in (difficulty or "").split(",")]

    def wanted(row: dict) -> bool:
        if difficulty and str(row.get("gpt_difficulty", row.get("difficulty"))) not in levels:
            return False
        if any(dates) and not first <= str(row["contest_date"])[:10] <= last:
            return False  # the text of a datetime begins with its date
        ids = MBPP_IDS[split] if form.startswith("mbpp") else None
        return ids is None or ids[0] <= int(row["task_id"]) <= ids[1]

    return wanted


def convert(form: str, row: dict) -> Problem:
    """A row of a benchmark as a Problem. A field that nobody reads is refused, not ignored."""
    unread = [name for name in row if row[name] and not re.fullmatch(SETS["fields"][form], name)]
    if unread:
        raise ValueError(f"unknown field {', '.join(unread)}")
    makers = {"humaneval": _humaneval, "livecodebench": _livecodebench, "kodcode": _kodcode}
    return makers.get(form, _mbpp)(row)


def _humaneval(row: dict) -> Problem:
    """Docstring examples are public. The prompt's helpers are context: answers leave them out."""
    prompt, name = row["prompt"], row["entry_point"]
    target = _function(prompt, name)
    above = "".join(prompt.splitlines(keepends=True)[: target.lineno - 1])
    imports = [node for node in target.body if isinstance(node, ast.Import | ast.ImportFrom)]
    context = "\n".join([above.strip(), *map(ast.unparse, imports)]).strip()
    message = _message(_block("Complete this program", prompt), [name])
    tests, public = [row["test"]], docstring_examples(prompt, name)
    right = prompt + row["canonical_solution"]
    return Problem(row["task_id"], message, tests, public, name, reference=right, context=context)


def _mbpp(row: dict) -> Problem:
    """MBPP: the first assert is public. MBPP+: its long `test` counts as one more hidden test."""
    code = row["code"].replace("\r\n", "\n")
    asserts = [*row["test_list"], *(row.get("challenge_test_list") or [])]
    if row.get("test"):  # a helper holds its asserts: only a function shows that it is a test
        asserts.append("def test_plus():\n" + textwrap.indent(row["test"], "    "))
    # Set-up code makes objects of the answer's own class, so it stands in front of each test.
    setup = (row.get("test_setup_code") or "").replace("\r\n", "\n")
    tests = [f"{setup}\n{test}".strip() for test in asserts]
    needed = _needed(code, "\n".join(tests))
    called = [node.func for node in ast.walk(ast.parse(asserts[0])) if isinstance(node, ast.Call)]
    names = [node.id for node in called if isinstance(node, ast.Name) and node.id in needed]
    if not names:  # the wrapper of set(f(x)) is not needed
        raise ValueError("the first test calls nothing that the reference defines")
    message = _message(row.get("text") or row["prompt"], needed, _block("It must pass", tests[0]))
    key, context = f"Mbpp/{row['task_id']}", "\n".join(row.get("test_imports") or [])
    return Problem(key, message, tests, tests[:1], names[0], reference=code, context=context)


def _livecodebench(row: dict) -> Problem:
    """A case is [input, output]; for a function [arguments, value], which stand as JSON lines."""
    public, private = json.loads(row["public_test_cases"]), private_tests(row["private_test_cases"])
    kinds = {case["testtype"] for case in public + private}
    if not private or kinds not in ({"stdin"}, {"functional"}):
        raise ValueError(f"{len(private)} private tests, types {sorted(kinds)}: expected one type")
    kind, names = kinds.pop(), []
    cases = [[case["input"], case["output"]] for case in public + private]
    hints = ["It reads standard input and prints the answer to standard output."]
    for given, want in cases[: len(public)]:
        hints += [_block("Input", given, ""), _block("Output", want, "")]
    if kind == "functional":
        metadata = row["metadata"]
        names = [(metadata if isinstance(metadata, dict) else json.loads(metadata))["func_name"]]
        for case in cases:
            lines = filter(str.strip, case[0].split("\n"))
            case[:] = [[json.loads(line) for line in lines], json.loads(case[1])]
        shown = [f"{names[0]}({repr(x)[1:-1]}) == {y!r}" for x, y in cases[: len(public)]]
        hints = [_block("Start from this", row["starter_code"])]
        hints.append(_block("It must pass", "\n".join(shown)))
    # LiveCodeBench's harness puts these imports first: its starter code uses List unimported.
    imports = [f"from {name} import *\nimport {name}" for name in SETS["livecodebench_modules"]]
    message = _message(row["question_content"], names, *hints)
    head = str(row["question_id"]), message, cases, cases[: len(public)], "".join(names), kind
    return Problem(
        *head, row.get("difficulty"), context="\n".join([*imports, "sys.setrecursionlimit(50000)"])
    )


def _kodcode(row: dict) -> Problem:
    """A pytest file, none of it public. In style "complete" the question lacks only a body."""
    tests = [row[name] for name in ("test", "test_code") if row.get(name)]
    needed = _needed(row["solution"], "\n".join(tests))
    if not needed:
        raise ValueError("the tests use nothing that the solution defines")
    message = _message(_block("Complete this program", row["question"]), needed)
    if row.get("style") != "complete":
        stubs = [info["function_declaration"] for info in row.get("test_info") or []]
        message = _message(row["question"], needed, _block("Start from this", "\n".join(stubs)))
    key, level = str(row["question_id"]), row.get("gpt_difficulty")
    return Problem(key, message, tests, [], needed[0], "assert", level, row["solution"])


def docstring_examples(prompt: str, entry_point: str) -> list[str]:
    """A docstring's examples as asserts: doctests, and `f(x) == y`, `=> y`, `returns y` in prose.

    Only constants are taken, so prose makes no test. Some are wrong: run the reference on them.

    >>> docstring_examples('def f(x):\\n    "f(2) => 4, f(x) => x"\\n', "f")
    ['assert f(2) == 4']
    """
    target = _function(prompt, entry_point)
    if ast.get_docstring(target) is None:
        return []
    # The source and not the value: an escape in an example belongs to the example's own string.
    text = (ast.get_source_segment(prompt, target.body[0]) or "").strip("\"'")
    found = []
    with contextlib.suppress(ValueError):  # a badly indented doctest
        examples = doctest.DocTestParser().get_examples(text)
        found = [(example.source, _constant(example.want or "None")) for example in examples]
    start = rf"(?<![\w.]){re.escape(entry_point)}\("
    sign = r"[ \t]*(?:# *)?(?:==>|=>|->|\u279e|==|=|should return|returns?) *"
    for call, line in re.findall(rf"({start}(?:(?!{start})[^\0])*?\)){sign}(?=(.*))", text):
        line = line.rstrip(" .,;")
        ends = range(len(line), 0, -1)  # the longest constant that nothing goes on from
        free = [end for end in ends if not re.match(r"\.?\w|[\"']| *[-+*/=]", line[end:])]
        values = [_constant(line[:end]) for end in free if line[end - 1] not in ".,"]
        found.append((call, next(filter(None, values), "")))
    asserts, allowed = [], {entry_point, *dir(builtins)}
    for source, result in found:
        call = _expression(source)
        names = {node.id for node in ast.walk(call or ast.Pass()) if isinstance(node, ast.Name)}
        if isinstance(call, ast.Call) and result and {entry_point} <= names <= allowed:
            asserts.append(f"assert {ast.unparse(call)} == {result}")
    return list(dict.fromkeys(asserts))


def private_tests(text: str) -> list[dict]:
    """LiveCodeBench's private tests, which are JSON or base64(zlib(pickle(JSON))) [theirs]."""
    if not text.lstrip().startswith("["):
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        if not inflate.eof:
            raise ValueError(f"the private tests are cut short or larger than {MAX_BYTES} bytes")
        # Loading a pickle can run code. This one is only read: it must hold one text.
        first = itertools.islice(pickletools.genops(data), 9)
        steps = [(step.name, value) for step, value, _ in first]
        texts = [value for name, value in steps if "UNICODE" in name]
        harmless = r"PROTO|FRAME|STOP|MEMOIZE|\w*PUT|\w*UNICODE8?"
        others = [name for name, _ in steps if not re.fullmatch(harmless, name)]
        if others or len(texts) != 1:
            raise ValueError(f"the private tests are a pickle of {others}, expected one text")
        text = texts[0]
    return json.loads(text)


def _message(statement: str, names: list[str], *hints: str) -> str:
    """The user message of a problem."""
    parts = [statement.strip()]
    if names:
        parts.append("The program must define " + ", ".join(f"`{name}`" for name in names) + ".")
    ending = "Answer with one fenced Python block that holds the complete program."
    return "\n\n".join([*parts, *filter(None, hints), ending])


def _block(title: str, text: str, tag: str = "python") -> str:
    text = text.strip("\n")
    return f"{title}:\n\n```{tag}\n{text}\n```" if text or not tag else ""


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _constant(text: str) -> str:
    """A constant as Python shows it, or "" for any other text."""
    try:
        return repr(ast.literal_eval(text.strip()))
    except (SyntaxError, ValueError, TypeError):
        return ""


def _function(prompt: str, name: str) -> ast.FunctionDef:
    for node in ast.parse(prompt).body[::-1]:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"the prompt does not define {name}")


def _needed(code: str, tests: str) -> list[str]:
    """The names that `code` defines and `tests` use but do not define, in the order of `code`."""
    own = [getattr(node, "name", "") for node in ast.parse(tests).body]
    used = {getattr(node, "id", getattr(node, "name", "")) for node in ast.walk(ast.parse(tests))}
    defined = [getattr(node, "name", "") for node in ast.parse(code).body]
    return [name for name in dict.fromkeys(defined) if name in used.difference(own)]
