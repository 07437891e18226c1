"""Problems: a statement, the tests that give the verdict, and those of them that a user may see.

In:  the name of a public set, loaded from the Hugging Face hub, or a local file of the same format (.jsonl, .json, both
     also .gz, .parquet), recognised by its fields: HumanEval, MBPP, LiveCodeBench, KodCode, or our own JSONL.
Out: a list of `Problem`s. Whatever is left out is named on standard error, with the reason, and the run goes on.

`tests` is everything that counts; `public_tests` is what feedback may quote: HumanEval's docstring examples, MBPP's first
assert, LiveCodeBench's own. KodCode has none, so that its feedback is oracle feedback.

Code is run only through `execute` (executor.run_many). With it, a reference that fails its own tests, and tests that an
empty program passes, leave their problem out, and docstring examples become tests if the reference passes them.
"""
import ast, base64, builtins, doctest, gzip, hashlib, io, json, os, pickle, random, re, sys, warnings, zlib  # noqa: E401
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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
MBPP_IDS = {"test": range(11, 511), "train": range(601, 975), "validation": range(511, 601), "prompt": range(1, 11),
            "all": range(1, 975)}
SPLITS = {"humaneval": ["test"], "mbpp": [*MBPP_IDS], "livecodebench": ["test"], "own": [None],
          "kodcode": ["train", "use_with_caution"]}  # the default first
MAX_PRIVATE_BYTES = 1 << 30  # the private tests of one LiveCodeBench problem; a zlib bomb ends here


def load_problems(source: str | Path, *, split: str | None = None, limit: int | None = None, seed: int | None = None,
                  difficulty: str | None = None, version: str | None = None, start_date: str | None = None,
                  end_date: str | None = None, execute: Callable[[list], list] | None = None,
                  cache: str | Path | None = "~/.cache/murphy", dropped: list | None = None) -> list[Problem]:
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
    first, last = _day(start_date or date.min), _day(end_date or date.max)
    strata = {part.strip() for part in difficulty.split(",")} if difficulty else None
    form, split, rows = _read(str(source), split, version)
    order = list(range(len(rows)))
    if seed is not None:
        random.Random(seed).shuffle(order)

    taken, left_out, outside = {}, [], 0
    for i in order:
        if limit is not None and len(taken) + len(left_out) >= limit:
            break
        row, label = rows[i], f"row {i + 1}"
        try:
            if not isinstance(row, dict):
                raise TypeError(f"{str(row)[:40]}, expected a JSON object")
            label = next((str(row[key]) for key in ("task_id", "question_id", "id") if key in row), label)
            if (strata and str(row.get("gpt_difficulty", row.get("difficulty"))) not in strata
                    or (start_date or end_date) and not first <= _day(row["contest_date"]) <= last
                    or form == "mbpp" and int(row["task_id"]) not in MBPP_IDS[split]):
                outside += 1
                continue
            problem = CONVERT[form](row)
            _check(problem)
            if taken.setdefault(problem.id, problem) is not problem:
                raise ValueError("another problem has this id")
        except Exception as error:  # noqa: BLE001  a row may hold anything; what is wrong with it is reported
            missing = isinstance(error, KeyError)
            reason = f"the field {error} is missing" if missing else f"{type(error).__name__}: {error}"
            left_out.append((label, reason[:300]))
    problems = list(taken.values())
    if execute is not None:
        problems = _verified(problems, execute, cache, left_out)
    elif form == "humaneval":
        problems = [replace(problem, public_tests=[]) for problem in problems]

    say = [f"{source}: {len(problems)} problems; of {len(rows)} rows {len(left_out)} left out, {outside} not asked for"]
    say += [f"  left out: {label}: {reason}" for label, reason in left_out]
    say += [f"  not a public test, since the reference fails it: {problem.id}: {test}" for problem in problems if execute
            for test in taken[problem.id].public_tests if test not in problem.public_tests]
    if execute is None and any(problem.reference for problem in problems):
        say += ["  no reference was run" + ", so docstring examples do not serve as public tests" * (form == "humaneval")]
    if oracle := sum(not problem.public_tests for problem in problems):
        say += [f"  {oracle} problems have no public tests: feedback on them comes from all tests (oracle feedback)"]
    print("\n".join(say), file=sys.stderr)
    if dropped is not None:
        dropped += left_out
    if not problems:
        why = f"; the first one, {left_out[0][0]}: {left_out[0][1]}" if left_out else ""
        raise ValueError(f"{source}: none of {len(rows)} rows is left: {outside} are outside of the split, dates or "
                         f"difficulty asked for, {len(left_out)} were left out{why}")
    return problems


def livecodebench_files(version: str) -> list[str]:
    """The files that a LiveCodeBench version stands for: release_vN is all up to the N-th, vN is that one [theirs].

    >>> livecodebench_files("v6"), livecodebench_files("v1_v2"), len(livecodebench_files("release_v6"))
    (['test6.jsonl'], ['test.jsonl', 'test2.jsonl'], 6)
    """
    match = re.fullmatch(r"release_v([1-6])|v([1-6])(?:_v([1-6]))?", version)
    if not match:
        raise ValueError(f"unknown LiveCodeBench version {version!r}: expected release_v1 to release_v6, v1 to v6, v4_v6")
    first, last = match[2] or 1, match[1] or match[3] or match[2]
    return [f"test{n if n > 1 else ''}.jsonl" for n in range(int(first), int(last) + 1)]


def docstring_examples(prompt: str, entry_point: str) -> list[str]:
    """The examples in a docstring as asserts: doctests, and the inline `f(x) == y`, `=> y`, `-> y`, `returns y` [ours].

    Only constants are taken, so that prose makes no test. An example may still be wrong: run the reference on it.

    >>> docstring_examples('def f(x):\\n    "f(2) => 4, f(x) => x"\\n', "f")
    ['assert f(2) == 4']
    """
    target = _function(prompt, entry_point)
    if ast.get_docstring(target) is None:
        return []
    # The source and not the value: an escape in an example belongs to the example's own string.
    text = ast.get_source_segment(prompt, target.body[0]).strip("\"'")
    try:  # an interpreter shows nothing for None
        found = [(example.source, example.want or "None") for example in doctest.DocTestParser().get_examples(text)]
    except ValueError:  # badly indented: the inline search below reads what can be read
        found = []
    for start in re.finditer(rf"(?<![\w.]){re.escape(entry_point)}\(", text):
        tail = text[start.start():]
        call = next((tail[:end.end()] for end in re.finditer(r"\)", tail) if _expression(tail[:end.end()])), "")
        line = tail[len(call):].partition("\n")[0].rstrip(" .,;")
        if sign := re.match(r"[ \t]*(# *)?(==>|=>|->|\u279e|==|=|should return|returns?) *", line):
            line = line[sign.end():]
            # The longest beginning that is a constant and is not followed by what would continue it.
            starts = (line[:end] for end in range(len(line), 0, -1)
                      if line[end - 1] not in ".," and not re.match(r"\.?\w|[\"']| *[-+*/=]", line[end:]))
            found.append((call, next(filter(_constant, starts), "")))
    asserts = []
    for source, want in found:
        call, result = _expression(source), _constant(want)
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)} if call else set()
        if isinstance(call, ast.Call) and result and entry_point in names <= {entry_point, *dir(builtins)}:
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
    def find_class(self, module: str, name: str) -> Any:  # a pickle runs code through what it names; a string needs none
        raise pickle.UnpicklingError(f"the private tests name {module}.{name}: nothing but a string is unpickled")


def _humaneval(row: dict) -> Problem:
    prompt, name = row["prompt"], row["entry_point"]
    target = _function(prompt, name)
    above = "".join(prompt.splitlines(keepends=True)[:target.lineno - 1]).strip()
    inside = [ast.unparse(node) for node in target.body if isinstance(node, ast.Import | ast.ImportFrom)]  # in 115
    message = _message("Complete this program.\n\n" + _fence(prompt), [name])
    public = docstring_examples(prompt, name)  # not repeated in the message: the docstring shows them
    return Problem(row["task_id"], message, [row["test"]], public, name, "assert",
                   reference=prompt + row["canonical_solution"], context="\n".join([above, *inside]).strip())


def _mbpp(row: dict) -> Problem:
    code, setup = row["code"].replace("\r\n", "\n"), (row.get("test_setup_code") or "").replace("\r\n", "\n")
    # The setup code builds objects of the answer's own class (367, 927): it cannot stand in front of the answer.
    tests = [f"{setup}\n{test}".strip() for test in row["test_list"]]
    needed = _needed(code, "\n".join(tests))
    calls = [node.func for node in ast.walk(_parse(row["test_list"][0])) if isinstance(node, ast.Call)]
    names = [call.id for call in calls if isinstance(call, ast.Name) and call.id in needed]  # not the set of set(f(x))
    if not names:
        raise ValueError("the first test calls nothing that the reference defines")
    message = _message(row["text"] if "text" in row else row["prompt"], needed, public=tests[:1])
    return Problem(f"Mbpp/{row['task_id']}", message, tests, tests[:1], names[0], "assert",
                   reference=code, context="\n".join(row.get("test_imports") or []))


def _livecodebench(row: dict) -> Problem:
    public, private = json.loads(row["public_test_cases"]), private_tests(row["private_test_cases"])
    kinds = {case["testtype"] for case in public + private}
    if not private or kinds not in ({"stdin"}, {"functional"}):
        raise ValueError(f"{len(private)} private tests, types {sorted(kinds)}: expected some, stdin or functional")
    kind, names = kinds.pop(), []
    cases = [[case["input"], case["output"]] for case in public + private]
    if kind == "functional":  # one JSON value a line, in the order of the arguments
        names = [(row["metadata"] if isinstance(row["metadata"], dict) else json.loads(row["metadata"]))["func_name"]]
        cases = [[[json.loads(x) for x in given.split("\n") if x.strip()], json.loads(want)] for given, want in cases]
    shown = cases[:len(public)]
    message = _message(row["question_content"], names, row.get("starter_code") or "", shown, kind)
    # The official harness puts these imports first, so that starter code may say List without importing it.
    modules = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
               "itertools", "functools", "operator", "io", "sys", "json")
    imports = [*(f"from {m} import *" for m in (*modules, "builtins", "typing")), *(f"import {m}" for m in modules)]
    return Problem(str(row["question_id"]), message, cases, shown, "".join(names), kind, row.get("difficulty"),
                   context="\n".join([*imports, "sys.setrecursionlimit(50000)"]))


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


CONVERT = {"humaneval": _humaneval, "mbpp": _mbpp, "livecodebench": _livecodebench, "kodcode": _kodcode,
           "own": lambda row: Problem(**{"public_tests": [], "entry_point": "", **row})}
FIELDS = {"canonical_solution": "humaneval", "test_list": "mbpp", "private_test_cases": "livecodebench",
          "solution": "kodcode", "kind": "own"}  # a field that only this format has


def _message(statement: str, names: list, code: str = "", public: list = (), kind: str = "assert") -> str:
    """The user message: statement, starter code, names, public tests, and the form of the answer."""
    parts = [statement.strip()]
    if code.strip():
        parts.append("Start from this:\n\n" + _fence(code))
    if names:
        parts.append("The program must define " + ", ".join(f"`{name}`" for name in names) + ".")
    if kind == "stdin":
        parts.append("The program reads standard input and prints the answer to standard output.")
        parts += [f"Input:\n\n{_fence(given, '')}\n\nOutput:\n\n{_fence(want, '')}" for given, want in public]
    elif public:
        calls = [f"{names[0]}({', '.join(map(repr, test[0]))}) == {test[1]!r}" for test in public if kind == "functional"]
        parts.append("It must pass:\n\n" + _fence("\n".join(calls or public)))
    return "\n\n".join([*parts, "Answer with one fenced Python block that holds the complete program."])


def _fence(code: str, tag: str = "python") -> str:
    return f"```{tag}\n" + code.strip("\n") + "\n```"


def _parse(code: str, mode: str = "exec") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in a data set's strings
        return ast.parse(code, mode=mode)


def _expression(text: str) -> ast.expr | None:
    try:
        return _parse(text.strip(), "eval").body
    except (SyntaxError, ValueError):
        return None


def _constant(text: str) -> str:
    """`text` in one line if it is a constant, else ""."""
    try:
        return ast.unparse(tree) if (tree := _expression(text)) and ast.literal_eval(tree) is not ... else ""
    except (ValueError, TypeError):
        return ""


def _function(prompt: str, name: str) -> ast.FunctionDef:
    found = [node for node in _parse(prompt).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ValueError(f"the prompt does not define {name}")
    return found[-1]


def _needed(code: str, tests: str) -> list[str]:
    """The names that `code` defines and `tests` use without defining them themselves, in the order of `code`."""
    defined, own = ([node.name for node in _parse(text).body if hasattr(node, "name")] for text in (code, tests))
    used = {getattr(node, "id", getattr(node, "name", "")) for node in ast.walk(_parse(tests))}
    return [name for name in dict.fromkeys(defined) if name in used and name not in own]


def _check(problem: Problem) -> None:
    """Raise if a problem cannot be shown or scored, or holds a lone surrogate, which no file takes."""
    if problem.kind not in ("assert", "stdin", "functional"):
        raise ValueError(f"kind is {problem.kind!r}, expected assert, stdin or functional")
    for name in ("id", "prompt", "entry_point")[:3 if problem.kind == "functional" else 2]:
        if not isinstance(getattr(problem, name), str) or not getattr(problem, name).strip():
            raise ValueError(f"{name} is {getattr(problem, name)!r}, expected text")
    if not problem.tests:
        raise ValueError("no tests")
    for test in [*problem.tests, *problem.public_tests]:
        if problem.kind == "assert":
            _parse(test)
        elif len(test) != 2 or not isinstance(test[0], str if problem.kind == "stdin" else list):
            raise ValueError(f"a test is {str(test)[:60]}, expected [input, output] or [[arguments], value]")
    json.dumps(asdict(problem), ensure_ascii=False).encode()


def _verified(problems: list, execute: Callable, cache: str | Path | None, left_out: list) -> list[Problem]:
    """Run the references, in one call of `execute`; verdicts known before come from a JSON file, keyed by content."""
    file = Path(cache).expanduser() / "references.json" if cache else None
    known = json.loads(file.read_text()) if file and file.exists() else {}
    keys = [hashlib.sha256(json.dumps([asdict(p), sys.version_info[:2]]).encode()).hexdigest() for p in problems]
    jobs = {}
    for key, p in zip(keys, problems):
        if p.reference and key not in known:
            alone = [replace(p, tests=[test], public_tests=[]) for test in p.public_tests if test not in p.tests]
            jobs[key] = [(p, "pass"), (p, p.reference), *((example, p.reference) for example in alone)]
    results = iter(execute(sum(jobs.values(), [])) if jobs else [])
    for key, mine in jobs.items():
        empty, right, *rest = [next(results) for _ in mine]
        reason = "an empty program passes its tests" if empty.reward == 1 else ""
        if right.reward != 1:
            reason = f"its reference fails its own tests ({right.status}): {right.feedback}"[:300]
        known[key] = [reason, [p.tests[0] for (p, _), result in zip(mine[2:], rest) if result.reward != 1]]
    if jobs and file:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known))
        os.replace(part, file)  # whole or not at all: another run may be reading it
    verdicts = [known.get(key, ["", []]) for key in keys]
    left_out += [(p.id, reason) for p, (reason, _) in zip(problems, verdicts) if reason]
    return [replace(p, public_tests=[test for test in p.public_tests if test not in wrong])
            for p, (reason, wrong) in zip(problems, verdicts) if not reason]


def _day(value: Any) -> date:
    try:
        return date.fromisoformat(str(value)[:10])  # the text of a datetime begins with its date
    except ValueError:
        raise ValueError(f"{str(value)[:40]!r} is no date: expected one like 2025-01-31") from None


def _read(name: str, split: str | None, version: str | None) -> tuple[str, str | None, Any]:
    """(format, split, rows) of a named set or a file."""
    if version and name != "livecodebench":
        raise ValueError(f"version {version} chooses files of livecodebench on the hub; {name} is what it is")
    if name in HUB:
        form, where, config = HUB[name]
        splits = SPLITS[form]
    else:
        rows = _file_rows(Path(name))
        form = next((FIELDS[key] for row in rows if isinstance(row, dict) for key in FIELDS if key in row), None)
        if form is None:
            raise ValueError(f"{name}: none of its {len(rows)} rows has one of the fields {', '.join(FIELDS)}")
        splits = SPLITS[form][:None if form == "mbpp" else 1]
    if split is not None and split not in splits:
        raise ValueError(f"{name} has no split {split!r}: expected {' or '.join(map(str, splits))}")
    split = split or splits[0]
    if name not in HUB:
        return form, split, rows
    import datasets  # slow, and of no use for a JSON file

    request = {"path": where, "name": config, "split": "train+test+validation+prompt" if form == "mbpp" else split}
    if form == "livecodebench":
        files = livecodebench_files(version or "release_v6")
        print(f"livecodebench {version or 'release_v6'} is {', '.join(files)}", file=sys.stderr)
        request = {"path": "json", "data_files": [f"{where}/{file}" for file in files], "split": "train"}
    try:
        return form, split, datasets.load_dataset(**request)
    except Exception as error:
        short = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise ValueError(f"cannot load {where} from the hub ({short}); a local file of its format will do") from error


def _file_rows(path: Path) -> list:
    if not path.is_file():
        kind, what = (FileNotFoundError, "no such file") if path.suffix else (ValueError, "unknown problems")
        raise kind(f"{path}: {what}, expected a file or one of {', '.join(HUB)}")
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
            rows.append("a line that is not JSON")  # reported by its number
    return rows
