"""The trees of a run, as one HTML page in which they unfold, or as text.

In: trees.jsonl of a run. Out: one file that needs no other, runs no script. Needs tree.py alone.

    python -m support.page runs/x/trees.jsonl [--step N] [--output page.html]
    python tree.py runs/x/trees.jsonl [--step N] [--width K]      the same trees as text
"""

import signal
import sys

if __name__ == "__main__":  # so that Ctrl-C prints one line
    signal.signal(signal.SIGINT, lambda *_: sys.exit("\npage: stopped"))

import argparse
import html
import json
import os
from pathlib import Path

from tree import Node, draw, from_dict, title

# The policy forbids whatever a text could smuggle in, should an escape ever be missing.
HEAD = """<!doctype html><meta charset="utf-8"><title>Rollout trees</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 14px sans-serif; margin: 2em }
details details { margin-left: 1.5em }
.solved { color: #070 } .failed { color: #a00 }
pre { background: #f4f4f4; padding: .5em; white-space: pre-wrap }
</style>
"""


def page_html(trees: list[tuple[int, Node]]) -> str:
    """The page that shows (step, tree) pairs, as HTML."""
    text = HEAD
    for step, tree in trees:
        children = "".join(attempt_html(child) for child in tree.children)
        name = getattr(tree.problem, "id", "")  # a tree may have no problem
        note = f" (not expanded: {tree.unexpanded})" if tree.unexpanded else ""
        heading = html.escape(f"step {step}, problem {name}{note}")
        text += f"<details open><summary>{heading}</summary>{children}</details>\n"
    return text


def attempt_html(node: Node) -> str:
    """One attempt and all below it: its numbers, and unfolded its texts, each of them escaped."""
    numbers = f"turn {node.turn}, reward {node.reward:.2f}, credit {node.credit:.2f}"
    heading = html.escape(f"{numbers}, advantage {node.advantage:+.2f} | {title(node)}")
    prompt = node.prompt[-1]["content"] if node.prompt else ""
    answer = node.text if node.text.strip() != node.code.strip() else ""
    texts = {"prompt": prompt, "program": node.code, "feedback": node.feedback, "answer": answer}
    inside = ""
    for name, text in texts.items():
        if text.strip():
            inside += f"<p>{name}<pre>{html.escape(text)}</pre>"
    inside += "".join(attempt_html(child) for child in node.children)
    kind = "solved" if node.solved else "failed"
    return f'<details><summary class="{kind}">{heading}</summary>{inside}</details>\n'


def load_trees(path: Path, step: int | None) -> list[tuple[int, Node]]:
    """The trees of a file and their steps, but for a half-written last line. Another kind of file
    ends the program."""
    trees: list[tuple[int, Node]] = []
    try:
        for line in path.read_text("utf-8").split("\n")[:-1]:
            row = json.loads(line)
            tree = (int(row["step"]), from_dict(row))
            page_html([tree])  # raises if it is no tree
            trees.append(tree)
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error.strerror}")
    except Exception as error:  # a file may hold anything
        wrong = f"line {len(trees) + 1} is no tree ({error!r:.100})"
        sys.exit(f"{path} is no trees.jsonl of murphy.py: {wrong}")
    found = [(at, tree) for at, tree in trees if step in (None, at)]
    if not found:
        sys.exit(f"{path} has no tree to show; it has steps {sorted({at for at, _ in trees})}")
    return found


def read_options(extra: str, extra_type: type, extra_help: str) -> tuple[argparse.Namespace, list]:
    """The options FILE, --step and `extra` of the command line, and the trees that they name."""
    parser = argparse.ArgumentParser(description="Show the trees of a run.")
    parser.add_argument("file", type=Path, help="trees.jsonl of a run, or the run's folder")
    parser.add_argument("--step", type=int, help="only the trees of this step")
    parser.add_argument(extra, type=extra_type, help=extra_help)
    options = parser.parse_args()
    if options.file.is_dir():
        options.file /= "trees.jsonl"
    return options, load_trees(options.file, options.step)


def say(text: str) -> None:
    """Print a text. The disk may be full, and who reads it may leave early (`| head`)."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python's last flush goes to nowhere
        sys.exit(None if isinstance(error, BrokenPipeError) else f"cannot print: {error.strerror}")


def draw_file() -> None:
    """`python tree.py FILE`: the trees as text."""
    options, trees = read_options("--width", int, "at most so many attempts of a group")
    if options.width is not None and options.width < 1:
        sys.exit(f"--width is {options.width}: expected at least 1")
    for step, tree in trees:
        say(f"step {step}\n{draw(tree, options.width)}\n")


def main() -> None:
    """`python -m support.page FILE`: the trees as a page."""
    options, trees = read_options("--output", Path, "the page (default: beside FILE)")
    output = options.output or options.file.with_suffix(".html")
    try:
        if output.exists() and output.samefile(options.file):
            sys.exit(f"the page would overwrite {output}: name another --output")
        output.write_text(page_html(trees), "utf-8", "xmlcharrefreplace")  # no lone surrogate
    except OSError as error:
        sys.exit(f"cannot write the page to {output}: {error.strerror}")
    say(f"{len(trees)} trees: {output}")


if __name__ == "__main__":
    main()
