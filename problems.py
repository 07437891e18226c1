"""Problems: a statement, the tests that give the verdict, and those of them that a user may see.

In:  the name of a public set, loaded from the Hugging Face hub, or a local file of the same format (.jsonl, .json, both
     also .gz, .parquet), recognised by its fields: HumanEval, MBPP, LiveCodeBench, KodCode, or our own JSONL.
Out: a list of `Problem`s. Whatever is left out is named on standard error, with the reason, and the run goes on.

`tests` is everything that counts; `public_tests` is what feedback may quote: HumanEval's docstring examples, MBPP's first
assert, LiveCodeBench's own. KodCode has none, so that its feedback is oracle feedback.

Code is run only through `execute` (executor.run_many). With it, a reference that fails its own tests, and tests that an
empty program passes, leave their problem out, and docstring examples become tests if the reference passes them.
"""

import ast
import base64
import builtins
import doctest
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any


@dataclass
class Problem:
    """A programming problem [paper: x is a statement plus unit tests; the fields are ours].

    A test of kind "assert" is Python text (every assert counts; check(candidate) and test_* functions are called), of
    kind "stdin" [input, expected output], of kind "functional" [list of arguments, expected value].

    >>> Problem("add", "Write add(a, b).", ["assert add(1, 2) == 3"], [], "add", "assert").context
    ''
    """

    id: str
    prompt: str  # the whole user message for a chat model
    tests: list  # reward = share passed
    public_tests: list  # of the same kind, mostly among `tests` too
    entry_point: str  # the name that the program must define; "" for stdin
    kind: str
    difficulty: str | None = None
    reference: str | None = None  # a right program, which runs behind `context`
    context: str = ""  # trusted code (imports, helpers) that stands in front of the answer


HUB = {  # name: (format, hub id, configuration)
    "humaneval": ("humaneval", "openai/openai_humaneval", None),
    "mbpp": ("mbpp", "google-research-datasets/mbpp", "full"),
    "mbpp-sanitized": ("mbpp", "google-research-datasets/mbpp", "sanitized"),
    "livecodebench": ("livecodebench", "hf://datasets/livecodebench/code_generation_lite", None),
    "kodcode": ("kodcode", "KodCode/KodCode-V1", None),
    "kodcode-light": ("kodcode", "KodCode/KodCode-Light-RL-10K", None),
}
FIELDS = {  # what tells one format from another
    "problem": {"tests", "kind"},
    "humaneval": {"canonical_solution", "test"},
    "mbpp": {"test_list", "code"},
    "livecodebench": {"public_test_cases", "private_test_cases"},
    "kodcode": {"question", "solution"},
}
MBPP_IDS = {"test": (11, 510), "train": (601, 974), "validation": (511, 600), "prompt": (1, 10), "all": (1, 974)}
SPLITS = {"humaneval": ["test"], "mbpp": [*MBPP_IDS], "livecodebench": ["test"], "kodcode": ["train", "use_with_caution"]}
MAX_PRIVATE_BYTES = 1 << 30  # the private tests of one LiveCodeBench problem; a zlib bomb ends here


def load_problems(source: str | Path, *, split: str | None = None, limit: int | None = None, difficulty: str | None = None,
                  version: str | None = None, start_date: str | None = None, end_date: str | None = None,
                  seed: int | None = None, execute: Callable[[list], list] | None = None,
                  cache: str | Path | None = "~/.cache/murphy", dropped: list | None = None) -> list[Problem]:  # fmt: skip
    """Load a named set from the hub, or a file of the same format, through the same conversion [ours].

    split: MBPP, by task_id: test (default), train, validation, prompt, all. KodCode: train (default), use_with_caution.
    limit: take the first `limit`, with a seed a shuffled sample; what is left out then is not made up for.
    difficulty: "easy", or "easy,hard". version, start_date, end_date (YYYY-MM-DD, included): LiveCodeBench; release_v6.
    execute: executor.run_many; verdicts on references are kept in the folder `cache` (None: they are not kept).
    dropped: a list that receives (id, reason) of the problems left out.
    Raises ValueError or FileNotFoundError, one sentence, for a bad request and when no problem is left.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: expected at least 1, or nothing for all problems")
    first, last = _day(start_date, "start_date"), _day(end_date, "end_date")
    if first and last and first > last:
        raise ValueError(f"start_date {first} lies after end_date {last}: no problem can be between them")
    form, split, rows = _read(str(source), split, version)
    if (first or last) and form != "livecodebench":
        raise ValueError(f"{source} has no dates: start_date and end_date are for LiveCodeBench")
    strata = {part.strip() for part in difficulty.split(",")} if difficulty else None
    order = list(range(len(rows)))
    if seed is not None:
        random.Random(seed).shuffle(order)

    problems, left_out, bad, outside = {}, [], [], 0
    for i in order:
        if limit is not None and len(problems) + len(left_out) >= limit:
            break
        row, label = rows[i], f"row {i + 1}"
        try:
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
            label = next((str(row[key]) for key in ("task_id", "question_id", "id") if key in row), label)
            day = _day(row["contest_date"], "contest_date") if first or last else None
            stratum = row.get("gpt_difficulty" if form == "kodcode" else "difficulty")
            if (day and not (first or day) <= day <= (last or day)) or (strata and str(stratum) not in strata) or (
                form == "mbpp" and not MBPP_IDS[split][0] <= row["task_id"] <= MBPP_IDS[split][1]
            ):  # fmt: skip
                outside += 1
                continue
            problem = CONVERT[form](row)
            _check(problem)
            if problem.id in problems:
                raise ValueError("another problem has this id")
            problems[problem.id] = problem
        except KeyError as error:
            left_out.append((label, f"the field {error} is missing"))
        except Exception as error:  # noqa: BLE001  a row may hold anything; what is wrong with it is reported, not raised
            left_out.append((label, f"{type(error).__name__}: {error}"[:300]))
    loaded = list(problems.values())
    if execute is not None:
        loaded = _verified(loaded, execute, cache, left_out, bad)
    elif form == "humaneval":
        loaded = [replace(problem, public_tests=[]) for problem in loaded]

    say = [f"{source}: {len(rows)} rows, {outside} outside of what was asked for, {len(left_out)} left out, {len(loaded)} problems"]
    say += [f"  left out: {label}: {reason}" for label, reason in left_out]
    say += [f"  not a public test, since the reference fails it: {label}: {test}" for label, test in bad]
    if execute is None and form == "humaneval":
        say += ["  docstring examples do not serve as public tests: nothing was run that could verify them"]
    if oracle := sum(not problem.public_tests for problem in loaded):
        say += [f"  {oracle} problems have no public tests: feedback on them comes from all tests (oracle feedback)"]
    print("\n".join(say), file=sys.stderr)
    if dropped is not None:
        dropped += left_out
    if not loaded:
        why = f", the first, {left_out[0][0]}, because: {left_out[0][1]}" if left_out else ""
        raise ValueError(f"{source}: no problem is left of {len(rows)} rows: {outside} are outside of the split, dates or "
                         f"difficulty asked for, and {len(left_out)} were left out{why}")  # fmt: skip
    return loaded


def livecodebench_files(version: str) -> list[str]:
    """The files that a LiveCodeBench version stands for: release_vN is all up to the N-th, vN is that one [theirs].

    >>> livecodebench_files("v6"), livecodebench_files("v1_v2"), len(livecodebench_files("release_v6"))
    (['test6.jsonl'], ['test.jsonl', 'test2.jsonl'], 6)
    """
    match = re.fullmatch(r"release_v([1-6])|v([1-6])(?:_v([1-6]))?", version)
    if not match:
        raise ValueError(f"unknown LiveCodeBench version {version!r}: expected release_v1 to release_v6, v1 to v6, or v4_v6")
    first, last = (1, match[1]) if match[1] else (int(match[2]), match[3] or match[2])
    return [f"test{n if n > 1 else ''}.jsonl" for n in range(first, int(last) + 1)]


def docstring_examples(prompt: str, entry_point: str) -> list[str]:
    """The examples in a docstring as asserts: doctests, and the inline `f(x) == y`, `=> y`, `-> y`, `returns y` [ours].

    Only constants are taken, so that prose makes no test. An example may still be wrong: run the reference on it.

    >>> docstring_examples('def f(x):\\n    "f(2) => 4, f(x) => x"\\n', "f")
    ['assert f(2) == 4']
    """
    first = _function(prompt, entry_point).body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)):
        return []
    # The source and not the value: an escape in an example belongs to the example's own string.
    text = ast.get_source_segment(prompt, first.value).strip("\"'")
    try:  # an interpreter shows nothing for None
        found = [(example.source, example.want or "None") for example in doctest.DocTestParser().get_examples(text)]
    except ValueError:  # badly indented: the inline search below reads what can be read
        found = []
    for start in re.finditer(rf"(?<![\w.]){re.escape(entry_point)}\(", text):
        tail = text[start.start() :]
        call = next((tail[: end.end()] for end in re.finditer(r"\)", tail) if _expression(tail[: end.end()])), "")
        line = tail[len(call) :].partition("\n")[0].rstrip(" .,;")
        if call and (sign := re.match(r"[ \t]*(# *)?(==>|=>|->|\u279e|==|=|should return|returns?) *", line)):
            line = line[sign.end() :]
            ends = [end for end in range(len(line), 0, -1) if not re.match(r"[\w\"'.]| *[-+*/=]", line[end:])]
            found.append((call, next((line[:end] for end in ends if _constant(line[:end])), "")))
    asserts = []
    for source, want in found:
        call, result = _expression(source), _constant(want)
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)} if isinstance(call, ast.Call) else ()
        if result and entry_point in names and names <= {entry_point, *dir(builtins)}:
            asserts.append(f"assert {ast.unparse(call)} == {result}")
    return list(dict.fromkeys(asserts))


def private_tests(text: str) -> list[dict]:
    """LiveCodeBench's private tests, which are JSON or base64(zlib(pickle(JSON))) [theirs]; anything else raises.

    >>> private_tests('[{"input": "1", "output": "2", "testtype": "stdin"}]')[0]["output"]
    '2'
    """
    if not text.lstrip().startswith("["):
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), MAX_PRIVATE_BYTES)
        if not inflate.eof:
            raise ValueError(f"the private tests are cut short or larger than {MAX_PRIVATE_BYTES} bytes")
        text = _StringUnpickler(io.BytesIO(data)).load()
        if not isinstance(text, str):
            raise ValueError(f"the private tests are a pickled {type(text).__name__}, expected a string")
    return json.loads(text)


class _StringUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # a pickle runs code through the globals it names; a string needs none
        raise pickle.UnpicklingError(f"the private tests name {module}.{name}: nothing but a string is unpickled")


def _humaneval(row: dict) -> Problem:
    prompt, name = row["prompt"], row["entry_point"]
    target = _function(prompt, name)
    above = "".join(prompt.splitlines(keepends=True)[: target.lineno - 1]).strip()
    inside = [ast.unparse(node) for node in target.body if isinstance(node, ast.Import | ast.ImportFrom)]  # HumanEval/115
    message = _message("Complete this program.\n\n" + _fence(prompt), [name])
    public = docstring_examples(prompt, name)  # not repeated in the message: the docstring shows them
    return Problem(row["task_id"], message, [row["test"]], public, name, "assert",
                   reference=prompt + row["canonical_solution"], context="\n".join([above, *inside]).strip())  # fmt: skip


def _mbpp(row: dict) -> Problem:
    code, setup = row["code"].replace("\r\n", "\n"), (row.get("test_setup_code") or "").replace("\r\n", "\n")
    # The setup code builds objects of the answer's own class (367, 927): it cannot stand in front of the answer.
    tests = [f"{setup}\n{test}".strip() for test in row["test_list"]]
    needed = _needed(code, "\n".join(tests))
    calls = [node.func for node in ast.walk(_parse(row["test_list"][0])) if isinstance(node, ast.Call)]
    names = [call.id for call in calls if isinstance(call, ast.Name) and call.id in needed]  # not the wrapper in set(f(x))
    if not names:
        raise ValueError("the first test calls nothing that the reference defines")
    message = _message(row["text"] if "text" in row else row["prompt"], needed, public=tests[:1])
    return Problem(f"Mbpp/{row['task_id']}", message, tests, tests[:1], names[0], "assert",
                   reference=code, context="\n".join(row.get("test_imports") or []))  # fmt: skip


def _livecodebench(row: dict) -> Problem:
    public, private = json.loads(row["public_test_cases"]), private_tests(row["private_test_cases"])
    kinds = {case["testtype"] for case in public + private}
    if not private or kinds not in ({"stdin"}, {"functional"}):
        raise ValueError(f"{len(private)} private tests, test types {sorted(kinds)}: expected tests, either stdin or functional")
    kind, name = kinds.pop(), ""
    cases = [[case["input"], case["output"]] for case in public + private]
    if kind == "functional":  # one JSON value a line, in the order of the arguments
        name = (row["metadata"] if isinstance(row["metadata"], dict) else json.loads(row["metadata"]))["func_name"]
        cases = [[[json.loads(x) for x in given.split("\n") if x.strip()], json.loads(expected)] for given, expected in cases]
    shown = cases[: len(public)]
    message = _message(row["question_content"], [name] * bool(name), row.get("starter_code") or "", shown, kind)
    # The official harness puts these imports first, so that starter code may say List without importing it.
    modules = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
    imports = [f"from {module} import *" for module in f"{modules} builtins typing".split()]
    imports += [f"import {modules.replace(' ', ', ')}", "sys.setrecursionlimit(50000)"]
    return Problem(str(row["question_id"]), message, cases, shown, name, kind, row.get("difficulty"), None, "\n".join(imports))


def _kodcode(row: dict) -> Problem:
    tests, solution = row["test"] if "test" in row else row["test_code"], row["solution"]
    needed = _needed(solution, tests)
    if not needed:
        raise ValueError("the tests use nothing that the solution defines")
    stubs = {info["function_name"]: info["function_declaration"] for info in row.get("test_info") or []}
    functions = [node.name for node in _parse(solution).body if isinstance(node, ast.FunctionDef)]
    name = next(name for name in [*stubs, *functions, *needed] if name in needed)
    if row.get("style") == "complete":  # the question is code to be completed
        message = _message("Complete this program.\n\n" + _fence(row["question"]), needed)
    else:
        message = _message(row["question"], needed, "\n".join(stub for name, stub in stubs.items() if name in needed))
    return Problem(str(row["question_id"]), message, [tests], [], name, "assert", row.get("gpt_difficulty"), solution)


def _problem(row: dict) -> Problem:
    names = [field.name for field in fields(Problem)]
    if unknown := sorted(row.keys() - set(names)):
        raise ValueError(f"unknown field {unknown[0]!r}, expected {', '.join(names)}")
    return Problem(**{"public_tests": [], "entry_point": "", **row, "prompt": row["prompt"], "id": row["id"]})


CONVERT = {"humaneval": _humaneval, "mbpp": _mbpp, "livecodebench": _livecodebench, "kodcode": _kodcode, "problem": _problem}


def _message(statement: str, names: list, code: str = "", public: list = (), kind: str = "assert") -> str:
    """The user message: statement, starter code, names, public tests, and the form of the answer."""
    parts = [statement.strip()]
    if code.strip():
        parts.append("Start from this:\n\n" + _fence(code))
    if names:
        parts.append("The program must define " + ", ".join(f"`{name}`" for name in names) + ".")
    if kind == "stdin":
        parts.append("The program reads standard input and prints the answer to standard output.")
        parts += [f"Input:\n\n{_fence(given, '')}\n\nOutput:\n\n{_fence(expected, '')}" for given, expected in public]
    elif public:
        calls = [f"{names[0]}({', '.join(map(repr, test[0]))}) == {test[1]!r}" for test in public if kind == "functional"]
        parts.append("It must pass:\n\n" + _fence("\n".join(calls or public)))
    return "\n\n".join([*parts, "Answer with one fenced Python block that holds the complete program."])


def _fence(code: str, tag: str = "python") -> str:
    return f"```{tag}\n{code.strip(chr(10))}\n```"


def _parse(code: str, mode: str = "exec") -> ast.AST:
    with warnings.catch_warnings(action="ignore"):  # about escapes in a data set's strings
        return ast.parse(code, mode=mode)


def _function(prompt: str, name: str) -> ast.FunctionDef:
    found = [node for node in _parse(prompt).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ValueError(f"the prompt does not define {name}")
    return found[-1]


def _expression(text: str) -> ast.expr | None:
    try:
        return _parse(text.strip(), "eval").body
    except (SyntaxError, ValueError):
        return None


def _constant(text: str) -> str:
    """`text` in one line if it is a constant, else ""."""
    try:
        ast.literal_eval(text.strip())
        return ast.unparse(_expression(text))
    except (SyntaxError, ValueError, TypeError):
        return ""


def _needed(code: str, tests: str) -> list[str]:
    """The names that `code` defines and `tests` use without defining them themselves, in the order of `code`."""
    used, own, defined = _parse(tests), *([n.name for n in _parse(t).body if hasattr(n, "name")] for t in (tests, code))
    names = {name for node in ast.walk(used) for name in (getattr(node, "id", ""), getattr(node, "name", ""))}
    return [name for name in dict.fromkeys(defined) if name in names and name not in own]


def _check(problem: Problem) -> None:
    """Raise if a problem cannot be shown or scored, or holds a lone surrogate, which no file takes."""
    if problem.kind not in ("assert", "stdin", "functional"):
        raise ValueError(f"kind is {problem.kind!r}, expected assert, stdin or functional")
    for name in ("id", "prompt", "entry_point"):
        value, optional = getattr(problem, name), name == "entry_point" and problem.kind != "functional"
        if not isinstance(value, str) or not (value.strip() or optional):
            raise ValueError(f"{name} is {value!r}, expected text")
    if not problem.tests:
        raise ValueError("no tests")
    for test in [*problem.tests, *problem.public_tests]:
        if problem.kind == "assert":
            _parse(test)
        elif len(test) != 2 or not isinstance(test[0], str if problem.kind == "stdin" else list):
            raise ValueError(f"a test is {str(test)[:60]}, expected [input, output] or [[arguments], value]")
    json.dumps(asdict(problem), ensure_ascii=False).encode()


def _verified(problems: list, execute: Callable, cache: str | Path | None, left_out: list, bad: list) -> list[Problem]:
    """Run the references, in one call of `execute`; verdicts known before come from a JSON file, keyed by content."""
    file = Path(cache).expanduser() / "references.json" if cache else None
    try:
        known = json.loads(file.read_text()) if file and file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and the references run again") from None
    keys = [hashlib.sha256(json.dumps([asdict(p), sys.version_info[:2]]).encode()).hexdigest() for p in problems]
    jobs, new = [], []
    for key, problem in zip(keys, problems):
        if problem.reference and key not in known:
            extra = [test for test in problem.public_tests if test not in problem.tests]
            single = [replace(problem, tests=[test], public_tests=[]) for test in extra]
            jobs += [(problem, "pass"), *((each, problem.reference) for each in [problem, *single])]
            new.append((key, extra))
    results = iter(execute(jobs) if jobs else [])
    for key, extra in new:
        empty, right = next(results), next(results)
        reason = "an empty program passes its tests" if empty.reward == 1 else ""
        if right.reward != 1:
            reason = f"its reference fails its own tests ({right.status}): {right.feedback}"[:300]
        known[key] = [reason, [test for test in extra if next(results).reward != 1]]
    if new and file:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known))
        os.replace(part, file)  # whole or not at all: another run may be reading it
    kept = []
    for key, problem in zip(keys, problems):
        reason, wrong = known.get(key, ["", []])
        if reason:
            left_out.append((problem.id, reason))
        else:
            bad += [(problem.id, test) for test in wrong]
            kept.append(replace(problem, public_tests=[test for test in problem.public_tests if test not in wrong]))
    return kept


def _day(value: Any, name: str) -> date | None:
    try:
        return date.fromisoformat(str(value)[:10]) if value else None  # the text of a datetime begins with its date
    except ValueError:
        raise ValueError(f"{name} is {str(value)[:40]!r}: expected a date like 2025-01-31") from None


def _read(name: str, split: str | None, version: str | None) -> tuple[str, str | None, Any]:
    """(format, split, rows) of a named set or a file."""
    if version and name != "livecodebench":
        raise ValueError(f"version {version} chooses files of livecodebench on the hub; {name} is what it is")
    if name in HUB:
        form, where, config = HUB[name]
        splits = SPLITS[form]
    else:
        rows = _file_rows(Path(name))
        form = next((form for row in rows for form in FIELDS if isinstance(row, dict) and FIELDS[form] <= row.keys()), None)
        if form is None:
            raise ValueError(f"{name}: none of its {len(rows)} rows has the fields of {', '.join(FIELDS)}")
        splits = SPLITS.get(form, [None])[: None if form == "mbpp" else 1]
    if split is not None and split not in splits:
        raise ValueError(f"{name} has no split {split!r}: expected {splits}")
    split = split or splits[0]
    if name not in HUB:
        return form, split, rows
    if form == "livecodebench":
        files = livecodebench_files(version or "release_v6")
        print(f"livecodebench {version or 'release_v6'} is {', '.join(files)}", file=sys.stderr)
        request = {"path": "json", "data_files": [f"{where}/{file}" for file in files], "split": "train"}
    else:
        request = {"path": where, "name": config, "split": "train+test+validation+prompt" if form == "mbpp" else split}
    import datasets  # slow, and of no use for a JSON file

    try:
        return form, split, datasets.load_dataset(**request)
    except Exception as error:
        short = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise ValueError(f"cannot load {where} from the hub ({short}); a local file of the same format will do") from error


def _file_rows(path: Path) -> list:
    if not path.is_file():
        known = f"expected a file or one of {', '.join(HUB)}"
        raise FileNotFoundError(f"{path}: no such file; {known}") if path.suffix else ValueError(f"unknown problems {path}: {known}")
    if path.suffix == ".parquet":
        import datasets

        return list(datasets.load_dataset("parquet", data_files=str(path), split="train"))
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = data.decode("utf-8-sig", "surrogateescape")  # a bad byte costs its own row, not the file
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for line in filter(str.strip, text.split("\n")):
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append(None)  # reported by its number
    return rows
