"""The trees of a run, as one HTML page in which they unfold, or as text.

In: trees.jsonl of a run. Out: one file that needs no other and runs no script.
It needs tree.py and Python alone.

    python -m support.page runs/x/trees.jsonl [--step N] [--output page.html]
    python tree.py runs/x/trees.jsonl [--step N] [--width K]      the same trees as text
"""

import argparse
import html
import json
import sys
from pathlib import Path

from tree import Node, draw, from_dict, title

# The policy forbids whatever a text could smuggle in, should an escape ever be missing.
HEAD = """<!doctype html><meta charset="utf-8"><title>Rollout trees</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 14px sans-serif; margin: 2em }
details details { margin-left: 1.5em }
summary { cursor: pointer }
.solved { color: #070 }
.failed { color: #a00 }
.pruned { opacity: .5 }
pre { background: #f4f4f4; padding: .5em; white-space: pre-wrap }
</style>
"""


def page(trees: list[tuple[int, Node]]) -> str:
    """The page of (step, tree) pairs."""
    parts = []
    for step, tree in trees:
        name = tree.problem.id if tree.problem else ""
        children = "".join(unfoldable(child) for child in tree.children)
        note = f" (not expanded: {tree.unexpanded})" if tree.unexpanded else ""
        heading = html.escape(f"step {step}, problem {name}{note}")
        parts.append(f"<details open><summary>{heading}</summary>{children}</details>\n")
    return HEAD + "".join(parts)


def unfoldable(node: Node) -> str:
    """One attempt and all below it: its numbers, and unfolded its texts, each of them escaped."""
    numbers = f"turn {node.turn}, reward {node.reward:.2f}, credit {node.credit:.2f}"
    heading = html.escape(f"{numbers}, advantage {node.advantage:+.2f} | {title(node)}")
    texts = {"program": node.code, "feedback": node.feedback}
    if node.prompt:
        texts = {"prompt": node.prompt[-1]["content"], **texts}
    if node.text.strip() != node.code.strip():
        texts["answer"] = node.text
    shown = [f"<p>{name}<pre>{html.escape(text)}</pre>" for name, text in texts.items() if text]

    kind = "solved" if node.solved else "failed"
    if not node.kept:
        kind += " pruned"
    inside = "".join([*shown, *(unfoldable(child) for child in node.children)])
    return f'<details><summary class="{kind}">{heading}</summary>{inside}</details>\n'


def load_trees(path: str, step: int | None = None) -> list[tuple[int, Node]]:
    """The trees of a file, each with its step. ValueError: another file, or no such step."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        trees = [(row["step"], from_dict(row)) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no trees.jsonl of murphy.py ({reason})") from error
    found = [(at, tree) for at, tree in trees if step in (None, at)]
    if not found:
        raise ValueError(f"{path} has no step {step}; it has {sorted({at for at, _ in trees})}")
    return found


def read_options(*more: tuple[str, type, str]) -> tuple[argparse.Namespace, list]:
    """The options of the command line, and the trees that they name. A wrong file ends it."""
    parser = argparse.ArgumentParser(description="Show the trees of a run.")
    parser.add_argument("file", help="trees.jsonl of a run")
    parser.add_argument("--step", type=int, help="only the trees of this step")
    for name, kind, text in more:
        parser.add_argument(name, type=kind, help=text)
    options = parser.parse_args()
    try:
        return options, load_trees(options.file, options.step)
    except ValueError as error:
        sys.exit(str(error))


def draw_file() -> None:
    """`python tree.py FILE`: the trees as text."""
    width = ("--width", int, "at most so many attempts of a group")
    options, trees = read_options(width)
    for step, tree in trees:
        print(f"step {step}\n{draw(tree, options.width)}\n")


def main() -> None:
    options, trees = read_options(("--output", str, "the page (default: beside FILE)"))
    output = Path(options.output or Path(options.file).with_suffix(".html"))
    # A text may hold half of a surrogate pair, which UTF-8 cannot.
    output.write_bytes(page(trees).encode("utf-8", "xmlcharrefreplace"))
    print(f"{len(trees)} trees: {output}")


if __name__ == "__main__":
    main()
