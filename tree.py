"""The rollout tree: sample programs, run them, pair each failure with its feedback, sample again.

In: problems with `.prompt`, `.id` and `.entry_point`, and two functions of yours:
    sample(prompts, n)  for each prompt a list of n `Completion`s, or None if it exceeds the context
    execute(jobs)       for each (problem, code) a result: .reward .status .feedback .public_passed
Out: for each problem the root of its tree. The root (turn 0) is no attempt.

It needs Python alone: copy the file into your project. `python tree.py` draws an example.
`python tree.py runs/x/trees.jsonl` draws the trees of a run (with support/page.py).
"""

import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

Messages = list[dict[str, str]]


@dataclass
class Completion:
    """One sampled answer. The ids are needed to train, and to count tokens."""

    text: str
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)  # with the end token, unless truncated
    truncated: bool = False  # no end token came within the allowed length
    thinking: bool = False  # the chat template left a <think> open: the answer begins inside it


@dataclass
class Node:
    """One attempt (or the root, turn 0): the answer, what the executor said, the attempts below."""

    turn: int
    prompt: Messages = field(default_factory=list)  # all messages that it was sampled from
    prompt_ids: list[int] = field(default_factory=list)  # as sampled; training takes these
    completion_ids: list[int] = field(default_factory=list)
    text: str = ""
    code: str = ""
    truncated: bool = False
    reward: float = 0.0  # what the executor said; never overwritten
    status: str = ""
    feedback: str = ""
    solved: bool = False
    public_passed: bool = False
    unexpanded: str = ""  # "too long", if its next prompt did not fit
    children: list["Node"] = field(default_factory=list)  # a group: sampled from one prompt
    credit: float = 0.0  # what the attempt is worth, by propagation
    advantage: float = 0.0
    kept: bool = True  # False once pruned
    problem: Any = None


def build_trees(
    problems: list,
    sample: Callable,
    execute: Callable,
    turns: int,
    group_size: int,
    stop: Callable[[Node], bool] = attrgetter("solved"),
) -> list[Node]:
    """Grow one tree for each problem, turn by turn (paper).

    Each turn calls `sample` once, for all open nodes of all problems, and `execute` once, for the
    programs that are new. A node for which `stop` holds gets no children. If nothing is
    solved there are G + G^2 + ... + G^S attempts. ValueError: turns or group_size below 1; a wrong
    number of answers; a problem that cannot be scored.
    """
    if turns < 1 or group_size < 1:
        raise ValueError(f"turns ({turns}) and group_size ({group_size}) must be at least 1")
    trees = [Node(turn=0, problem=problem) for problem in problems]
    open_nodes = trees
    verdicts = {}  # (id(problem), code) -> result, filled by `execute_all`
    for _ in range(turns):
        if not open_nodes:
            break
        answers = sample([next_prompt(node) for node in open_nodes], group_size)
        check_count("sample", "prompts", len(open_nodes), len(answers))

        for parent, completions in zip(open_nodes, answers, strict=True):
            if completions is None:
                parent.unexpanded = "too long"
            else:
                check_count("sample", "completions to make", group_size, len(completions))
                parent.children = [new_child(parent, answer) for answer in completions]

        grown = [node for parent in open_nodes for node in parent.children]
        execute_all(grown, execute, verdicts)
        open_nodes = [node for node in grown if not stop(node)]
    return trees


def check_count(function: str, what: str, asked: int, given: int) -> None:
    if given != asked:
        raise ValueError(f"{function}() got {asked} {what} and gave {given}")


def new_child(parent: Node, answer: Completion) -> Node:
    """A new attempt below `parent`, not yet executed."""
    child = Node(turn=parent.turn + 1, prompt=next_prompt(parent), problem=parent.problem)
    child.prompt_ids, child.completion_ids = answer.prompt_ids, answer.completion_ids
    child.text, child.truncated = answer.text, answer.truncated
    child.code = extract_code(answer.text, parent.problem.entry_point, answer.thinking)
    return child


def execute_all(nodes: list[Node], execute: Callable, verdicts: dict) -> None:
    """Fill in what the executor says. Identical programs for a problem run only once."""
    jobs = {(id(node.problem), node.code): (node.problem, node.code) for node in nodes}
    new = [key for key in jobs if key not in verdicts]
    results = execute([jobs[key] for key in new]) if new else []
    check_count("execute", "jobs", len(new), len(results))
    verdicts.update(zip(new, results, strict=True))

    for node in nodes:
        result = verdicts[id(node.problem), node.code]
        if result.status == "unscorable":
            raise ValueError(f"problem {node.problem.id!r} cannot be scored: {result.feedback}")
        node.reward, node.status, node.feedback = result.reward, result.status, result.feedback
        node.solved, node.public_passed = result.reward == 1.0, result.public_passed


def walk(tree: Node) -> Iterator[Node]:
    """All attempts of a tree, turn by turn."""
    level = tree.children
    while level:
        yield from level
        level = [child for node in level for child in node.children]


def groups(tree: Node) -> list[list[Node]]:
    """All groups of a tree, turn by turn. Only the members of one group are compared."""
    return [node.children for node in (tree, *walk(tree)) if node.children]


def next_prompt(node: Node) -> Messages:
    """The prompt from which the children of a node are sampled."""
    if node.turn == 0:
        return first_messages(node.problem)
    return refinement_messages(node.prompt, node.text, node.feedback)


def first_messages(problem: Any) -> Messages:
    """The prompt of turn 1. It has no system message, because some chat templates refuse one."""
    return [{"role": "user", "content": problem.prompt}]


def refinement_messages(messages: Messages, text: str, feedback: str) -> Messages:
    """The next prompt: all messages so far (ours), the attempt and its feedback (paper)."""
    request = f"The program does not pass its tests.\n{feedback}\nWrite the corrected program."
    answer = {"role": "assistant", "content": text}
    return [*messages, answer, {"role": "user", "content": request}]


LONGEST = 30_000  # characters of an answer that are read, from its end: parsing is slow
READS = r"\binput *\(|\bstdin\b(?! *=)|\bopen *\( *0"  # "input()", "sys.stdin", not "stdin=x"
PRINTS = r"\bprint *\(|\bstdout\b"  # "print(x)", "sys.stdout.write(x)"
DEFINES = r"^[ \t]*(?:async +)?(?:def|class) +{name}\b"  # "def f(x):", "class Solution:"
ASSIGNS = r"^[ \t]*{name} *(?::[^=\n]*)?= *(?:lambda\b|[^\W\d][\w.]*$)"  # "f = lambda: 1", "f = g"
# Where an answer is cut: its two ends, the tags of a thought, and each fence with its tag. A fence
# with a text in `rest` and none in `python` is of another language: its piece is left out.
MARK = re.compile(
    r"""
      \A | \Z
    | (?P<thought> <think(?:ing)?> )
    | (?P<answer> </think(?:ing)?> )
    | (?P<own_line> ^ (?: (?:[-*+]|\d+[.)])? [ \t] )* )?  # blanks or a list's bullet: "1. ```"
      (?:```|~~~) [`~]* [ \t]*  # it may stand in the middle of a line: "Try ```f = 1```"
      (?P<python>  # "python", "Python 3.12", "{.python", "src/a.py"
        [{.]* (?: [\w./-]+\.py | (?:i?python|pypy|py) [\d.]* (?:[ ]+[\d.]+)? ) (?![\w-]) [ \t]*
      )?
      (?: (?= (?:def|class|import|from)[ ]+\w | @\w | [\w, ]+[ ]=[ ] | [\w.]+\( )  # code: "x = "
        | (?P<rest> .* )  # what else follows in the line: "bash", or an option of the tag
      )
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)


def extract_code(text: str, entry_point: str = "", thinking: bool = False) -> str:
    """The program in an answer, or "" if there is none (ours).

    1. Leave out the thought, and cut the answer into pieces at its fences.
    2. Keep the pieces with a Python tag, and those that parse and define one of the names in
       `entry_point` ("f"; "Solution.f" has two). Without a name: those that read input or print.
    3. The piece that defines most of the names wins. Of equals, one with a tag does; then one that
       parses; then the last.

    Pieces are not joined. A stub `def f(): ...` counts as a definition. Code beside prose, without
    a fence, is not found.
    """
    names = [re.escape(name) for name in entry_point.split(".") if name]
    patterns = [(DEFINES + "|" + ASSIGNS).replace("{name}", name) for name in names]
    wanted = patterns or [READS, PRINTS]
    best, best_quality = "", (0, False, False)
    for piece, tagged in pieces(cleaned(text, thinking)):
        code, parses = dedented(piece)
        matches = [pattern for pattern in wanted if re.search(pattern, code, re.MULTILINE)]
        quality = (len(matches), tagged, parses)
        is_program = tagged or (parses and matches)
        if code and is_program and quality >= best_quality:  # of equals the last
            best, best_quality = code, quality
    return best


def cleaned(text: str, thinking: bool) -> str:
    """An answer without its first thought, cut to its last LONGEST characters; then without
    characters of no width and marks of a quotation."""
    if thinking or re.match(r"[\s\ufeff\u200b]*<think", text):  # an unclosed thought leaves ""
        text = re.sub(r"(?s)\A.*?(?:</think(?:ing)?>|\Z)", "", text)
    text = text.rstrip()[-LONGEST:].replace("\r\n", "\n")
    text = re.sub(r"(?m)^([ \t]*)[\ufeff\u200b]+", r"\1", text)  # characters without a width
    if re.search(r"(?m)^[ \t]*>.*(?:```|~~~)", text):  # a quoted fence: "> ```python"
        text = re.sub(r"(?m)^[ \t]*(?:> ?)+", "", text)
    return text


def pieces(text: str) -> list[tuple[str, bool]]:
    """The answer, cut at its marks: each piece, and whether its fence is tagged as Python.

    "Try ```python f = 1 ``` or this" has two: "Try", and "f = 1", which is tagged. ("or this" is
    taken for the tag of another language.) Prose is also a piece, but rarely defines a wanted name.
    """
    marks = list(MARK.finditer(text))[-50:]  # to parse is slow, and the last program counts
    found = []
    while len(marks) > 1:
        opening = marks.pop(0)
        closing = closing_mark(text, opening, marks)
        marks = marks[marks.index(closing) :]  # it also opens the next piece, often one of prose
        if opening["thought"] or opening["answer"]:
            found = []  # what came before is not the answer
        is_python = opening["python"] is not None
        is_other_language = opening["rest"] and not is_python
        if not opening["thought"] and not is_other_language:
            piece = text[opening.end() : closing.start()]
            found.append((piece, is_python))
    return found


def closing_mark(text: str, opening: re.Match, later: list[re.Match]) -> re.Match:
    """The one of the `later` marks at which the piece behind `opening` ends.

    A program may hold a fence in a string, as in `s = "```"`. So a piece ends at the first mark at
    which it parses; fences on a line of their own are tried first. If none does, at the next mark.
    """
    if opening["thought"]:  # one that never ends goes on to the end of the text
        return next((mark for mark in later if mark["answer"]), later[-1])
    for mark in sorted(later[:10], key=lambda mark: mark["own_line"] is None):
        _, parses = dedented(text[opening.end() : mark.start()])
        if parses:
            return mark
    return later[0]


def dedented(piece: str) -> tuple[str, bool]:
    """(The piece without its indentation, True) if that parses; else (the piece, False)."""
    lines = piece.strip("\n").split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()] or [0]
    # Try the smallest indentation, then that of the first line: in a string of several lines a line
    # may stand left of the code.
    for width in sorted({min(indents), indents[0]}):
        # Remove up to `width` blanks from the start of each line.
        code = "\n".join(line[:width].lstrip() + line[width:] for line in lines).rstrip()
        with warnings.catch_warnings(action="ignore"), suppress(Exception):
            compile(
                code, "answer", "exec"
            )  # unlike ast.parse it refuses a `return` outside of functions
            return code, True
    return "\n".join(lines).rstrip(), False


def draw(tree: Node, width: int | None = None) -> str:
    """A tree as text: for each attempt what it earned, its first line, what its children were told.

    `width` shows at most that many of a group: first those with children, then the best.
    """
    name = tree.problem.id if tree.problem else ""
    rows = [("turn  reward  credit  advantage", f"problem: {name}"), *rows_below(tree, "", width)]
    return "\n".join(printable(f"{numbers:31}   {text}") for numbers, text in rows)


def printable(line: str) -> str:
    """A line in which all that could steer a terminal is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def rows_below(parent: Node, indent: str, width: int | None) -> Iterator[tuple[str, str]]:
    """What `draw` shows of a node's children and all below: in each line its numbers, its text."""
    shown = parent.children
    if width:
        shown = sorted(shown, key=lambda node: (not node.children, -node.credit))[:width]
    hidden = len(parent.children) - len(shown)
    for node in shown:
        branch, deeper = "|-- ", indent + "|   "
        if node is shown[-1] and not hidden:
            branch, deeper = "`-- ", indent + "    "
        numbers = f"{node.turn:4}  {node.reward:6.2f}  {node.credit:6.2f}  {node.advantage:+9.2f}"
        yield numbers, indent + branch + title(node)
        if node.children:
            yield from (("", f"{deeper}  {line}") for line in node.feedback.split("\n"))
            yield from rows_below(node, deeper, width)
    if hidden:
        yield "", f"{indent}`-- and {hidden} more"


def title(node: Node) -> str:
    """The first line of an attempt's program, and what was special about the attempt."""
    first, *more = node.code.strip().split("\n")
    notes = [f"and {len(more)} lines"] if more else []
    if node.truncated:
        notes.append("truncated")
    if not node.kept:
        notes.append("pruned")
    if node.unexpanded:
        notes.append(f"not expanded: {node.unexpanded}")
    first = first or "(no code)"
    return f"{first}  ({', '.join(notes)})" if notes else first


def to_dict(node: Node, ids: bool = False) -> dict:
    """A tree as plain data for JSON. The ids are many, and left out unless asked for."""
    hidden = () if ids else ("prompt_ids", "completion_ids")
    plain = {f.name: getattr(node, f.name) for f in fields(Node) if f.name not in hidden}
    plain["problem"] = node.problem.id if node.problem else None
    plain["tokens"] = len(node.completion_ids)
    return plain | {"children": [to_dict(child, ids) for child in node.children]}


def from_dict(plain: dict) -> Node:
    """The tree that `to_dict` wrote. Of its problem only the id is left."""
    node = Node(**{f.name: plain[f.name] for f in fields(Node) if f.name in plain})
    node.problem = None if plain["problem"] is None else SimpleNamespace(id=plain["problem"])
    node.children = [from_dict(child) for child in plain["children"]]
    return node


def demonstrate() -> Node:
    """Six attempts at f with f(2) == 4 and f(3) == 6; tests/test_tree.py checks the numbers."""
    tree = Node(turn=0, problem=SimpleNamespace(id="f(x) is twice x"))
    for turn, formula, reward, credit, advantage, feedback in (
        (1, "x + 2", 0.5, 0.5, -1.0, "Test 2 failed: f(3) returned 5, expected 6"),
        (2, "x + 3", 0.5, 0.5, +1.0, "Test 1 failed: f(2) returned 5, expected 4"),
        (2, "x + 4", 0.0, 0.0, -1.0, "Test 1 failed: f(2) returned 6, expected 4"),
        (1, "x * 3", 0.0, 1.0, +1.0, "Test 1 failed: f(2) returned 6, expected 4"),
        (2, "x * 2", 1.0, 1.0, +1.0, "All tests passed."),
        (2, "x * 4", 0.0, 0.0, -1.0, "Test 1 failed: f(2) returned 8, expected 4"),
    ):
        node = Node(turn, code=f"def f(x): return {formula}", reward=reward, feedback=feedback)
        node.credit, node.advantage, node.solved = credit, advantage, reward == 1
        parent = tree if turn == 1 else tree.children[-1]
        parent.children.append(node)
    return tree


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    if sys.argv[1:]:  # the trees.jsonl of a run
        from support.page import draw_file

        draw_file()
    else:
        print(draw(demonstrate()))
