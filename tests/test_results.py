"""What results/README.md shows is what the CSV files hold, and what is older can be told."""

import ast
import csv
import re
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parent.parent / "results"
sys.path.insert(0, str(RESULTS))

import all as every  # noqa: E402
import record  # noqa: E402
import report  # noqa: E402

PAGE = (RESULTS / "README.md").read_text()


def test_the_tables_of_the_page_are_those_of_the_csv_files():
    assert len(re.findall("<!-- table", PAGE)) >= 15
    assert report.fill(PAGE, report.tables(RESULTS)) == PAGE


def test_a_table_of_the_page_is_made_anew():
    page = "a\n<!-- table x -->\nold\n<!-- /table -->\nb"
    assert report.fill(page, {"x": "| new |"}) == page.replace("old", "| new |")


def test_a_cell_is_mean_and_half_width_over_seeds():
    # Mean 20%, std 10 points; t of two degrees of freedom is 4.303: 4.303 * 10 / sqrt(3) = 24.8
    assert report.cell([0.1, 0.2, 0.3]) == "20.0 ± 24.8"
    assert report.cell([0.5], "+") == "+50.0"


def test_a_difference_is_paired_by_seed():
    values = {}
    for k in report.KS:
        values["cutoff", "mers", "sampled", "all", k] = {1: 0.5, 2: 0.6, 3: 0.9}
        values["cutoff", "none", "sampled", "all", k] = {1: 0.4, 2: 0.5}
    table = report.paired_table(values, "cutoff", [("mers", "none")])  # seed 3 has no pair
    assert table.splitlines()[-1] == "| mers - none | " + " | ".join(["+10.0 ± 0.0"] * 5) + " |"


def test_each_run_of_the_study_has_five_iter_k_of_both_decodings_and_one_commit():
    seen = {}
    for row in record.read(RESULTS / "study.csv"):
        run = row["world"], row["seed"], row["method"]
        seen.setdefault(run, []).append(row)
        assert 0 <= float(row["value"]) <= 1
    assert len(seen) > 50
    for run, rows in seen.items():
        assert len({row["commit"] for row in rows}) == 1 and rows[0]["commit"], run
        for decoding in ("sampled", "greedy"):
            whole = [r for r in rows if (r["decoding"], r["difficulty"]) == (decoding, "all")]
            assert [row["k"] for row in whole] == list("12345"), run


def test_comments_make_no_result_older_and_an_unknown_commit_makes_all_older():
    plain = "def f(x):\n    return x\n"
    documented = '"""A."""\ndef f(x):\n    """B."""\n    return (x)  # C\n'
    assert record.code(documented) == record.code(plain)
    assert record.code("def f(x):\n    return -x\n") != record.code(plain)
    assert record.changed("no commit", ["grpo.py"]) == ["grpo.py"]


def test_rows_are_replaced_by_their_key(tmp_path):
    path = tmp_path / "a.csv"
    record.replace(path, [{"way": "x", "n": 1}, {"way": "y", "n": 2}], ["way"])
    record.replace(path, [{"way": "x", "n": 3, "more": 4}], ["way"])
    with open(path) as file:
        assert list(csv.reader(file)) == [["way", "n", "more"], ["y", "2", ""], ["x", "3", "4"]]


@pytest.mark.parametrize("result", every.RESULTS, ids=[r.name for r in every.RESULTS])
def test_each_result_has_a_script_and_files_that_exist(result):
    script = result.command.split()[0]
    assert all((record.ROOT / path).exists() for path in [script, *result.measures])


def test_each_script_says_how_it_is_used():
    for script in ("study", "report", "speed", "kill", "real", "graders", "memory", "all"):
        said = ast.get_docstring(ast.parse((RESULTS / f"{script}.py").read_text()))
        assert f"python results/{script}.py" in said
