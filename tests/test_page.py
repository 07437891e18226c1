"""support/page.py: the page shows everything and runs nothing."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import tree
from support import page
from tree import Node, to_dict

HOSTILE = "</pre></details><script>alert(1)</script>\x1b[2J\ud800 \" onload='x'"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Writes a trees.jsonl of two steps, and calls a command of the page on it."""
    child = Node(2, [{"role": "user", "content": "asked again"}], code=HOSTILE, reward=1.0)
    child.text, child.solved = HOSTILE + " (answer)", True
    first = Node(1, [{"role": "user", "content": "the prompt <b>"}], code=HOSTILE, credit=0.5)
    first.feedback, first.children, first.kept = "feedback " + HOSTILE, [child], False
    root = Node(0, problem=SimpleNamespace(id="<script>"), children=[first])
    rows = [{"step": step, **to_dict(root)} for step in (5, 10)]
    file = tmp_path / "trees.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(command, *options):
        monkeypatch.setattr(sys, "argv", ["page", str(call.file), *map(str, options)])
        command()
        return capsys.readouterr().out

    call.file = file
    return call


def test_a_page_shows_everything_and_runs_nothing(run):
    assert run(page.main, "--step", "10").startswith("1 trees: ")
    text = run.file.with_suffix(".html").read_text("utf-8")
    assert text.count("<details") == text.count("</details>") == 3
    assert "<script" not in text and "default-src 'none'" in text
    # Two programs, each also in its heading, an answer and a feedback.
    assert text.count("&lt;/pre&gt;&lt;/details&gt;&lt;script&gt;alert(1)") == 6
    for piece in ("credit 0.50, advantage +0.00 | ", "pruned", "prompt &lt;b&gt;", "asked again"):
        assert piece in text
    assert "step 10" in text and "step 5" not in text


def test_a_file_is_drawn_for_a_terminal(run):
    said = run(page.draw_file, "--width", "1")
    assert said.count("step ") == 2
    assert "\\x1b[2J\\ud800" in said and "\x1b" not in said
    with pytest.raises(SystemExit, match="--width is -1: expected at least 1"):
        run(page.draw_file, "--width", "-1")


@pytest.mark.parametrize("command", [page.main, page.draw_file])
def test_what_is_no_file_of_trees_or_lacks_the_step_is_said_in_a_sentence(command, run):
    def refused(sentence, *options):
        with pytest.raises(SystemExit, match=sentence):
            run(command, *options)

    refused(r"has no tree to show; it has steps \[5, 10\]", "--step", "7")
    good = to_dict(Node(0, children=[Node(1)])) | {"step": 1}
    (child,) = good["children"]
    wrong = [3, child | {"reward": "x"}, child | {"code": None}, child | {"feedback": None}]
    wrong = [json.dumps(good | {"children": [node]}) for node in wrong]
    for line in ("[1]", '{"step": 1}', "no json", "3", "[" * 200_000, *wrong):
        run.file.write_text(f"{json.dumps(good)}\n{line}\n")
        refused("is no trees.jsonl of murphy.py: line 2 is no tree ")
    run.file.write_text('{"step": 1')
    refused(r"trees.jsonl has no tree to show; it has steps \[\]")
    run.file.unlink()
    refused("trees.jsonl cannot be read: No such file")


def test_a_half_last_line_is_left_out_and_no_page_takes_the_place_of_its_trees(run):
    run.file.write_text(run.file.read_text() + '{"step": 15, "tu')
    assert run(page.main).startswith("2 trees: ")
    before = run.file.read_bytes()
    with pytest.raises(SystemExit, match="would overwrite .*trees.jsonl"):
        run(page.main, "--output", run.file)
    for output in (run.file.parent, run.file.parent / "nodir" / "p.html", "/dev/full"):
        with pytest.raises(SystemExit, match=f"cannot write the page to {output}: "):
            run(page.main, "--output", output)
    assert run.file.read_bytes() == before
    run.file = run.file.parent  # a folder stands for its trees
    assert run(page.main) == f"2 trees: {run.file / 'trees.html'}\n"


@pytest.mark.parametrize(
    "end, said, lines", [("| head -1", "", 0), ("> /dev/full", "cannot print: No space", 1)]
)
def test_a_reader_that_leaves_costs_nothing_and_a_full_disk_one_line(end, said, lines, run):
    run.file.write_text(run.file.read_text() * 500)
    command = f"{sys.executable} {tree.__file__} {run.file} {end}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == lines
