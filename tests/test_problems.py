"""Facts about problems: bad rows are named, references are checked, nothing ends the run."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import run_many
from support.problems import Problem, convert_rows, distinct, load_problems, main
from support.verify import EXECUTOR

ROOT = Path(__file__).parents[1]
OWN = Problem("own/1", "Write inc(x).", ["assert inc(1) == 2"], ["assert inc(1) == 2"], "inc")
OWN.difficulty, OWN.reference = "easy", "def inc(x):\n    return x + 1"
WRONG = "def inc(x):\n    return x"


def write(folder: Path, *rows, name: str = "rows.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), errors="surrogateescape")
    return path


def row(**changes) -> dict:
    return asdict(OWN) | changes


def left_out(said: str) -> list[tuple[str, str]]:
    """The rows that are said to be left out, and the reasons."""
    return re.findall(r"^  left out: (row \d+(?: \(.*?\))?): (.*)$", said, re.MULTILINE)


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.json.gz"])
def test_own_rows_come_back_as_they_were_written(tmp_path, name):
    cases = [
        OWN,
        Problem("1", "f", [[[], 1]], [], "f", "functional", timeout=4),
        Problem("two", "Add.\u2028\u00e9", [["1 2", "3"]], [], "", "stdin", timeout=2.5),
        Problem("3", "f", [[[1, [2]], {"a": 0}]], [[[0, []], {}]], "f", "functional", "hard"),
        Problem("row 5", "p", ["assert f() == 1"], entry_point="f"),  # as the test calls it
    ]
    rows = [asdict(problem) for problem in cases[:4]]
    rows.append({"prompt": "p", "tests": ["assert f() == 1"]})  # these are enough
    text = "\ufeff" + "\n\n".join(json.dumps(each, ensure_ascii=False) for each in rows)
    if ".jsonl" not in name:
        text = json.dumps(rows, indent=1)
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert load_problems(tmp_path / name) == cases


DEEP = f"assert inc({'-' * 200_000}1)"
PAIRS = {"tests": [[[1], 2]], "public_tests": []}
BAD_ROWS = [  # a line, or what is changed in a row
    ("[" * 200_000, "not JSON"),
    ("[1, 2]", "not a JSON object"),
    ('{"id": "a", }', "column 13"),
    ({"tests": [DEEP]}, "it is too deep for Python"),
    ({"tests": [DEEP], "entry_point": ""}, "a test is too deep for Python"),
    ({"tests": []}, "tests is empty"),
    ({"tests": "assert inc(1) == 2"}, "expected a list"),
    ({"tests": [{"input": "1"}]}, "expected a text of Python"),
    ({"tests": ["assert inc(("]}, "was never closed"),
    ({"kind": "essay"}, "kind is 'essay'"),
    ({"kind": "stdin", "tests": [["1", 2]]}, "expected [input, output]"),
    ({"kind": "functional", "tests": [["1", 2]]}, "[list of arguments, value]"),
    ({"kind": "functional", "entry_point": "", **PAIRS}, "it names no entry_point"),
    ({"context": {"a": 1}}, "context is {'a': 1}, expected text"),
    ({"timeout": -1}, "timeout is -1, expected seconds above 0"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": None}, "the field 'prompt' is missing"),
    ({"prompt": "\ud800"}, "a text is not in UTF-8: save the file in UTF-8"),  # D36
    ('{"prompt": "\udcff", "tests": ["assert f()"]}', "a text is not in UTF-8"),  # the byte 0xff
    ({"public_test": []}, "unknown field public_test"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_and_the_others_load(tmp_path, capsys, bad, reason):  # D27
    label = "row 2" if isinstance(bad, str) else "row 2 (b)"
    bad = bad if isinstance(bad, str) else row(id="b") | bad
    path = write(tmp_path, row(), bad, row(id="last"))
    assert [p.id for p in load_problems(path, execute=run_many, cache=None)] == ["own/1", "last"]
    told = capsys.readouterr().err
    [(where, why)] = left_out(told)
    assert where == label and reason in why and 0 < len(why) <= 300
    assert "2 problems; of 3 rows 1 left out" in told


@pytest.mark.parametrize(
    "test, name",
    [
        ("assert inc(1) == 2", "inc"),
        ("import math\nassert math.isclose(sorted([inc(1)])[0], other(2))", "inc"),
        ("def helper(g): return g(1)\nassert helper(Solution().inc) == 2", "Solution"),
        ("assert true_constant == 2", ""),
        ("def check(candidate): assert candidate(1) == 2", ""),
        ("import math as m\nfrom math import nan as n\nassert m.floor(inc(n)) == 2", "inc"),
    ],
)
def test_without_an_entry_point_it_is_what_the_tests_call(tmp_path, test, name):
    path = write(tmp_path, row(tests=[test], public_tests=[], entry_point="", context="other = 3"))
    assert [problem.entry_point for problem in load_problems(path)] == [name]


def test_an_error_without_a_text_is_named():
    make = Mock(side_effect=LookupError)
    assert convert_rows([{}], [0], None, make) == ({}, {"row 1": "LookupError()"})


def test_a_cut_or_damaged_gz_is_refused(tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress("".join(json.dumps(row(id=str(n))) + "\n" for n in range(300)).encode())
    damaged = whole[:50] + bytes(9) + whole[59:]
    cut = [(whole[:size], "Compressed file ended ") for size in (5, 50, len(whole) - 1)]
    for data, why in ((b"no gzip", "Not a gzipped "), (damaged, "Error -3 "), *cut):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"^.*gz cannot be unpacked: {why}.*$"):
            load_problems(path)


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_any_bytes_get_one_sentence(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="^(no problem is left|.* is in UTF-16: ).*$"):
        load_problems(path)


def test_a_bad_request_gets_one_sentence(tmp_path, capsys):
    rows = write(tmp_path, row())
    foreign = write(tmp_path, {"a": 1}, name="foreign.jsonl")
    utf16 = tmp_path / "utf16.jsonl"
    utf16.write_text(json.dumps(row()), encoding="utf-16")
    for source, how, sentence in (
        ("humanevil", {}, r"humanevil is neither a file nor a known set \(humaneval, mbpp, .*\)"),
        (rows, {"version": "v6"}, "version v6 is for livecodebench"),
        (rows, {"start_date": "2025-01-01"}, "has no dates: 2025-01-01"),
        (foreign, {}, "no problem is left of the 1 rows of .*foreign.jsonl"),
        (utf16, {}, "utf16.jsonl is in UTF-16: save it in UTF-8"),
        (write(tmp_path, name="empty.jsonl"), {}, "no problem is left of the 0 rows"),
        (write(tmp_path, "[]", name="none.json"), {}, "no problem is left of the 0 rows"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^.*{sentence}.*$"):
            load_problems(source, **how)
    assert left_out(capsys.readouterr().err)[0][1].startswith("unknown field a (known: id, ")


def test_a_sample_is_shuffled_by_its_seed_and_not_made_up_for(tmp_path):
    path = write(tmp_path, *[row(id=str(n)) for n in range(40)])

    def ids(**how):
        return [p.id for p in load_problems(path, **how)]

    assert ids(limit=3) == ["0", "1", "2"]
    assert ids(seed=1) != ids(seed=2) and sorted(ids(seed=1)) == sorted(ids())
    assert ids(seed=1, limit=5) == ids(seed=1)[:5]
    path = write(tmp_path, row(), "{broken", row(), row(id="b"))
    assert ids(limit=3) == ["own/1", "own/1#2"]


@pytest.mark.parametrize(
    "ids, expected",
    [
        ("a b a a", "a b a#2 a#3"),
        ("a a a#2 a#2 a", "a a#2 a#2#2 a#2#3 a#3"),
    ],
)
def test_distinct_marks_what_comes_again(ids, expected):
    marked = distinct([Problem(name, "p", []) for name in ids.split()])
    assert [p.id for p in marked] == expected.split()


def test_references_run_in_one_call_and_those_that_pass_only_once(tmp_path, capsys):
    calls = []  # of each the number of programs

    def execute(jobs):
        calls.append(len(jobs))
        return run_many(jobs)

    path = write(tmp_path, row(), row(id="bad", reference=WRONG))
    load_some = partial(load_problems, path, execute=execute, cache=tmp_path / "c")
    for made in ([4], [4, 2]):  # the second time only what was left out runs
        assert [p.id for p in load_some()] == ["own/1"] and calls == made
        [(where, why)] = left_out(capsys.readouterr().err)
        assert where == "row 2 (bad)" and "its reference fails" in why
    write(tmp_path, row(tests=["assert inc(3) == 4"], public_tests=[]))
    load_some()
    assert calls == [4, 2, 2]  # other tests: another verdict
    file = tmp_path / "c" / "verdicts.json"
    file.write_text('{"damaged')
    os.link(file, tmp_path / "old")  # what a reader has opened
    load_some()
    assert calls == [4, 2, 2, 2]
    assert (tmp_path / "old").read_text() == '{"damaged'  # it was replaced, not written over
    assert os.listdir(tmp_path / "c") == ["verdicts.json"]
    assert len(json.loads(file.read_text())) == 1


def test_a_mend_of_any_file_of_the_executor_makes_all_verdicts_new(tmp_path, monkeypatch):
    execute = Mock(side_effect=run_many)
    path = write(tmp_path, row())
    shutil.copytree(ROOT / "support", tmp_path / "support")
    shutil.copy(ROOT / "executor.py", tmp_path)
    monkeypatch.setattr("support.verify.ROOT", tmp_path)
    for count, file in enumerate(["README.md", *EXECUTOR], 1):  # README.md is none of its files
        with open(tmp_path / file, "a") as text:
            text.write("# mended\n")
        for _ in range(2):
            load_problems(path, execute=execute, cache=tmp_path)
            assert execute.call_count == count


@pytest.mark.parametrize("reference", [None, OWN.reference])
def test_what_has_no_score_is_left_out_and_may_be_asked_again(tmp_path, capsys, reference):
    installed = []

    def execute(jobs):
        results = run_many(jobs)
        for i, (problem, _) in enumerate(jobs):
            if problem.id == "far" and not installed:
                results[i] = replace(results[i], status="unscorable", feedback="No module 'far'")
        return results

    void = row(id="void", tests=["assert True or inc(1)"], reference=reference)
    path = write(tmp_path, void, row(), row(id="far", reference=reference))
    reasons = [("row 1 (void)", "a program that does nothing passes its tests")]
    load_problems(path, execute=execute, cache=tmp_path)
    assert left_out(capsys.readouterr().err) == [*reasons, ("row 3 (far)", "No module 'far'")]
    installed.append("far")
    assert len(load_problems(path, execute=execute, cache=tmp_path)) == 2
    assert left_out(capsys.readouterr().err) == reasons


def test_the_limit_follows_the_time_of_the_reference(tmp_path):
    used = {"slow": 2.9, "quick": 0.01}
    limits = {}

    def execute(jobs):
        results = run_many(jobs)
        for i, (problem, code) in enumerate(jobs):
            if code == problem.reference:
                limits[problem.id] = problem.timeout
                results[i] = replace(results[i], cpu_seconds=used[problem.id])
        return results

    path = write(tmp_path, row(id="slow"), row(id="quick"), row(id="free", reference=None))
    for _ in range(2):  # verified, then out of the cache
        slow, quick, free = load_problems(path, execute=execute, cache=tmp_path)
        assert 3 * 2.9 <= slow.timeout <= 9  # three times what the reference used
        assert 3 * 0.01 <= quick.timeout <= 4  # 4 is what a program has by default
        assert free.timeout is None
    assert min(limits.values()) > 3 * 4  # the reference itself has more time than a program


def test_own_public_tests_are_checked_too(tmp_path):
    public = ["assert inc(1) == 2", "assert inc(5) == 6", "assert inc(5) == 7"]
    path = write(tmp_path, row(public_tests=public))
    [problem] = load_problems(path, execute=run_many, cache=tmp_path)
    [cached] = load_problems(path, execute=lambda jobs: 1 / 0, cache=tmp_path)
    assert problem.public_tests == public[:2] and cached == problem


def test_the_command_tells_of_kinds_rows_reasons_and_references(tmp_path):
    bad = row(id="bad", reference=WRONG)
    public = row(public_tests=["assert inc(2) == 3"])  # tried alone, and not told of
    path = write(tmp_path, public, "{broken", row(id="b", solution="x"), bad)
    command = [sys.executable, "-m", "support.problems", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\n1 of kind assert\n")
    told = re.findall(r"(.*): reference (.*), 0\.", done.stdout)
    assert told == [("own/1", "passed")]
    assert "1 problems; of 4 rows 3 left out" in done.stderr
    assert [label for label, _ in left_out(done.stderr)] == ["row 2", "row 3 (b)", "row 4 (bad)"]
    assert "its reference fails its tests (failed): Test 1" in done.stderr


def test_the_command_ends_with_one_sentence_where_no_problem_is(tmp_path):
    broken, missing = write(tmp_path, "{broken", "[1]"), tmp_path / "missing.jsonl"
    for path, sentence in ((broken, "no problem is left"), (missing, "is neither a file nor")):
        with pytest.raises(SystemExit, match=f"^problems: .*{sentence}.*$"):
            main([str(path)])
    for wrong in ([], ["--help"], ["a", "b"]):
        with pytest.raises(SystemExit, match="^usage: python -m support.problems FILE"):
            main(wrong)


def test_the_examples_are_ten_problems_of_three_kinds():
    found = load_problems(ROOT / "examples" / "own_problems.jsonl")
    assert len(found) == 10 and {p.kind for p in found} == {"assert", "stdin", "functional"}
    assert all(p.reference and p.public_tests and len(p.tests) > 1 for p in found)
    assert all(result.reward == 1 for result in run_many([(p, p.reference) for p in found]))


def test_of_many_rows_that_are_left_out_some_are_shown_and_the_rest_counted(tmp_path, capsys):
    path = write(tmp_path, *["{"] * 53, row())
    assert len(load_problems(path)) == 1
    said = capsys.readouterr().err
    assert said.count("not JSON") == 50 and "left out: 3 more rows, not shown" in said
