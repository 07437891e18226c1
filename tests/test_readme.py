"""What the README says is held against the code and the evidence."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = ("problems", "executor", "tree", "propagate", "grpo", "toy", "evaluate", "murphy")
sys.path.insert(0, str(ROOT / "results"))
import report  # noqa: E402


def names(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def test_every_row_of_the_paper_to_code_table_names_things_that_exist():
    section = README.split("## From the paper to the code")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ") and "---" not in row][1:]
    assert len(rows) >= 10
    for row in rows:
        code, tests = row.split("|")[3:5]
        for cell in (code, tests):
            places = re.findall(r"`([\w/]+\.py)(?::(\w+))?`", cell)
            assert places, row
            for file, name in places:
                assert not name or name in names(ROOT / file), f"{file}:{name}"


def test_excerpts_in_the_readme_are_lines_of_the_code():
    code = "\n".join((ROOT / f"{name}.py").read_text() for name in MODULES)
    squeeze = lambda text: re.sub(r"\s+", " ", text).strip()
    blocks = re.findall(r"```python\n(.*?)```", README.split("## How it works")[1].split("\n## ")[0], re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        assert squeeze(block) in squeeze(code), block


def test_line_counts_in_the_readme_are_the_files_own():
    for name in MODULES:
        lines = len((ROOT / f"{name}.py").read_text().splitlines())
        assert re.search(rf"^\| `{name}\.py` \|.*\| {lines} \|$", README, re.MULTILINE), f"{name}.py has {lines} lines"


def test_the_two_commands_make_an_environment_and_ci_runs_the_second():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2 and commands[0].endswith("murphy.py") and commands[1].endswith("-m pytest")
    assert all("pip install" in c and "requirements.txt" in c for c in commands)
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_option_in_the_readme_exists():
    import murphy
    from evaluate import EvalConfig
    known = {f"--{n.replace('_', '-')}" for n in (*murphy.Config.__dataclass_fields__, *EvalConfig.__dataclass_fields__)}
    scripts = "".join((ROOT / name).read_text() for name in ("results/study.py", "results/speed.py", "results/kill.py", "executor.py",
                                                             "tree.py")) + "--nproc-per-node"  # torchrun's own
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert {u for u in used if u not in known and u not in scripts} == set()


def test_tables_of_the_study_are_those_of_the_csv():
    made = report.tables(ROOT / "results")
    shown = dict(re.findall(r"<!-- table (\S+) -->\n(.*?)\n<!-- /table -->", README, re.DOTALL))
    assert len(shown) >= 6
    for name, text in shown.items():
        assert text == made[name], name


@pytest.mark.parametrize("name", ["propagate", "grpo", "executor", "tree"])
def test_each_file_that_teaches_one_concept_runs_as_a_demonstration(name):
    """One screen each, and no traceback."""
    done = subprocess.run([sys.executable, str(ROOT / f"{name}.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 5 < len(done.stdout.splitlines()) < 60
