"""support/page.py: the page shows everything and runs nothing."""

import json
import sys
from types import SimpleNamespace

import pytest

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
    tree = Node(0, problem=SimpleNamespace(id="<script>"), children=[first])
    rows = [{"step": step, **to_dict(tree)} for step in (5, 10)]
    file = tmp_path / "trees.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(command, *options):
        monkeypatch.setattr(sys, "argv", ["page", str(file), *options])
        command()
        return capsys.readouterr().out

    call.folder = tmp_path
    return call


def test_a_page_shows_everything_and_runs_nothing(run):
    assert run(page.main, "--step", "10").startswith("1 trees: ")
    text = (run.folder / "trees.html").read_bytes().decode("utf-8")
    assert text.count("<details") == text.count("</details>") == 3
    assert "<script" not in text and "default-src 'none'" in text
    # Two programs, each also in its heading, an answer and a feedback.
    assert text.count("&lt;/pre&gt;&lt;/details&gt;&lt;script&gt;alert(1)") == 6
    for piece in ("credit 0.50, advantage +0.00 | ", "pruned", "the prompt &lt;b&gt;"):
        assert piece in text
    assert "asked again" in text and "step 10" in text and "step 5" not in text


def test_a_file_is_drawn_for_a_terminal(run):
    said = run(page.draw_file, "--width", "1")
    assert said.count("step ") == 2 and "\\x1b[2J\\ud800" in said and "\x1b" not in said


def test_what_is_no_file_of_trees_or_lacks_the_step_is_said_in_a_sentence(run):
    with pytest.raises(SystemExit, match=r"has no step 7; it has \[5, 10\]"):
        run(page.main, "--step", "7")
    for text in ("[1]\n", '{"step": 1}\n', "no json", "3"):
        (run.folder / "trees.jsonl").write_text(text)
        with pytest.raises(SystemExit, match="is no trees.jsonl of murphy.py"):
            run(page.main)
