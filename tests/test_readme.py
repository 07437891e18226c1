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


VLLM = """
from types import SimpleNamespace as S
SamplingParams = lambda **how: S(**how)
class LLM:
    def __init__(self, name): pass
    def chat(self, prompts, how):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        code = lambda prompt, i: "def f(x): " + ("return 2 * x" if i or len(prompt) > 1 else "pass")
        return [S(prompt_token_ids=[1], outputs=[S(text=code(p, i), token_ids=[2], finish_reason="stop") for i in range(how.n)]) for p in prompts]
"""
BATCH = """
from types import SimpleNamespace as N
node = lambda reward, ids, children=(): N(reward=reward, credit=reward, prompt_ids=ids, completion_ids=ids[:2], children=list(children))
late = [node(1.0, [1, 4, 5, 6]), node(0.0, [1, 4, 5, 6])]
made = batch([N(turn=0, children=[node(0.25, [1, 4, 5]), node(1.0, [1, 4, 5], late)])], 0)
assert made["uid"].tolist() == ["0", "0", "1", "1"]
assert made["token_level_scores"].sum(1).tolist() == [0.25, 1.0, 1.0, 0.0] and made["token_level_scores"][:, 0].sum() == 0
assert made["prompts"].tolist() == [[0, 1, 4, 5], [0, 1, 4, 5], [1, 4, 5, 6], [1, 4, 5, 6]] and made["responses"].shape == (4, 2)
assert [a > 0 for a in made["advantages"].tolist()] == [False, True, True, False]
"""


@pytest.mark.parametrize("number, files, before, after, printed", [
    (0, ["propagate"], "", "", ["[0.5, 1.0]", "[-1.0, 1.0]"]),
    (1, ["executor"], "", "", ["1.0 passed All tests passed.", "0.5 failed Test 2 failed: add(1, 0) returned 5, expected 1",
                               "0.0 error Test 1 failed: the program ended before it answered"]),
    (2, ["grpo"], "", "assert logp.shape == (2, 3) and stats['tokens'] == 5\nprint('ok')", ["ok"]),
    (3, ["tree"], VLLM, "", ["turn 1  reward 0.00", "turn 2  reward 1.00"]),
    (4, ["grpo", "propagate", "tree"], "", BATCH + "print('ok')", ["ok"])])
def test_a_piece_runs_alone_in_an_empty_folder(number, files, before, after, printed, tmp_path):
    code = re.findall(r"```python\n(.*?)```", README.split("## Take a piece")[1].split("\n## ")[0], re.DOTALL)[number]
    for name in files:
        (tmp_path / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    if before:
        (tmp_path / "vllm.py").write_text(before)
    (tmp_path / "example.py").write_text(code + "\n" + after)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in printed), done.stdout
    said = re.findall(r"# (\[.*?\]|[01]\.\d \w+ .*)", code)  # what the example's comments promise
    assert all(line in done.stdout for line in said if number < 2), done.stdout


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
    scripts = "".join((ROOT / name).read_text() for name in ("results/study.py", "results/speed.py", "results/step.py", "results/kill.py", "results/real.py", "executor.py",
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
