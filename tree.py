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
THOUGHT = r"(?P<thought></?think(?:ing)?>)"  # "<think>", "</thinking>"
# A fence may stand in the middle of a line: "Try ```f = 1```". If the group `own_line` matches, it
# has a line of its own; blanks or a list's bullet may come before it: "```", "  ~~~~", "1. ```".
FENCE = r"(?P<own_line>^(?:(?:[-*+]|\d+[.)])?[ \t])*)?(?:```|~~~)[`~]*[ \t]*"
# The tag behind a fence: "python", "Python 3.12", "{.python", "src/a.py".
TAG = r"[{.]*(?:[\w./-]+\.py|(?:i?python|pypy|py)[\d.]*(?: +[\d.]+)?)(?![\w-])"
# How code begins that stands in the fence's own line: "import x", "@cache", "n = ", "g(".
CODE = r"(?:def|class|import|from) +\w|@\w|[\w, ]+ = |[\w.]+\("


def extract_code(text: str, entry_point: str = "", thinking: bool = False) -> str:
    """The program in an answer, or "" if there is none (ours).

    1. Leave out the thought, and cut the answer into pieces at its fences.
    2. Keep the pieces with a Python tag, and those that parse and define one of the names in
       `entry_point` ("f"; "Solution.f" has two). Without a name: those that read input or print.
    3. The one with most of what step 2 asks for wins. Of equals: one with a tag, one that parses,
       the last.

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
    """An answer without a thought at its beginning, cut to its last LONGEST characters, without the
    "> " of a quoted fence and invisible characters before a line. (`pieces` drops later thoughts.)
    """
    if thinking or re.match(r"[\s\ufeff\u200b]*<think", text):  # an unclosed thought leaves ""
        text = re.sub(r"\A.*?(?:</think(?:ing)?>|\Z)", "", text, count=1, flags=re.DOTALL)
    text = text.rstrip()[-LONGEST:].replace("\r\n", "\n")
    text = re.sub(r"^([ \t]*)[\ufeff\u200b]+", r"\1", text, flags=re.MULTILINE)  # of no width
    if re.search(r"^[ \t]*>.*(?:```|~~~)", text, re.MULTILINE):  # "> ```python"
        text = re.sub(r"^[ \t]*(?:> ?)+", "", text, flags=re.MULTILINE)
    return text


@dataclass
class Mark:
    """A place where an answer is cut."""

    start: int  # the piece before the mark ends here
    end: int  # the piece after it begins here
    after: str  # what that piece is: "python" (by its tag), "plain", "other", "thought", "answer"
    own_line: bool = False  # a fence that has a line of its own


def marks_of(text: str) -> list[Mark]:
    """Where an answer is cut: its beginning, each fence and each tag of a thought, its end."""
    marks = [Mark(0, 0, "plain")]
    for match in re.finditer(f"{THOUGHT}|{FENCE}", text, re.MULTILINE | re.IGNORECASE):
        if match.start() < marks[-1].end:
            continue  # a part of the last fence's tag
        if match["thought"]:
            after = "answer" if match["thought"].startswith("</") else "thought"
            marks.append(Mark(match.start(), match.end(), after))
        else:
            line = text[match.end() :].partition("\n")[0]
            after, code = read_tag(line)
            end = match.end() + len(line) - len(code)
            marks.append(Mark(match.start(), end, after, match["own_line"] is not None))
    return [*marks, Mark(len(text), len(text), "plain")]


def read_tag(line: str) -> tuple[str, str]:
    """What follows a fence in its line: the kind of the piece after it, and code that begins there.

    >>> read_tag("python"), read_tag("py x = 1"), read_tag("x = 1"), read_tag("bash"), read_tag("")
    (('python', ''), ('python', 'x = 1'), ('plain', 'x = 1'), ('other', ''), ('plain', ''))
    """
    tag = re.match(TAG, line, re.IGNORECASE)
    rest = line[tag.end() :].lstrip(" \t") if tag else line
    code = rest if re.match(CODE, rest, re.IGNORECASE) else ""
    if tag:
        return "python", code
    if rest and not code:
        return "other", ""
    return "plain", code


def pieces(text: str) -> list[tuple[str, bool]]:
    """The answer, cut at its marks: each piece, and whether its fence is tagged as Python.

    "Try ```python f = 1 ``` or this" has two: "Try", and "f = 1", which is tagged. ("or this"
    counts as the tag of another language.) Prose is also a piece, but rarely defines a wanted name.

    A program may hold a fence in a string, as in `s = "```"`. So a piece ends at the first mark at
    which it parses; fences on a line of their own are tried first. If none does, at the next mark.
    """
    marks = marks_of(text)[:50]  # to parse is slow: at most 50 marks, and 10 tries for each piece
    found = []
    while len(marks) > 1:
        opening = marks.pop(0)
        if opening.after in ("thought", "answer"):
            found = []  # what came before is not the answer
        if opening.after == "thought":  # leave it out
            while len(marks) > 1 and marks[0].after != "answer":
                marks.pop(0)
            continue  # a thought that never ends goes on to the end of the text

        closing = marks[0]
        for mark in sorted(marks[:10], key=lambda mark: not mark.own_line):
            _, parses = dedented(text[opening.end : mark.start])
            if parses:
                closing = mark
                break
        marks = marks[marks.index(closing) :]  # it opens the next piece
        if opening.after != "other":
            found.append((text[opening.end : closing.start], opening.after == "python"))
    return found


def dedented(piece: str) -> tuple[str, bool]:
    """(The piece without its indentation, True) if that parses; else (the piece, False)."""
    lines = piece.strip("\n").split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()] or [0]
    # Try the smallest indentation, then that of the first line: a string may begin left of it.
    for width in sorted({min(indents), indents[0]}):
        # At most `width` blanks of each line: a shorter indentation goes as a whole.
        code = "\n".join(line[:width].lstrip() + line[width:] for line in lines).rstrip()
        with warnings.catch_warnings(action="ignore"), suppress(Exception):
            compile(code, "answer", "exec")  # it refuses a `return` outside of functions, too
            return code, True
    return "\n".join(lines).rstrip(), False


def draw(tree: Node, width: int | None = None) -> str:
    """A tree as text: for each attempt what it earned, its first line, what its children were told.

    `width` shows at most that many of a group: first those with children, then the best.
    """
    head = "turn  reward  credit  advantage   "
    name = tree.problem.id if tree.problem else ""
    lines = [f"{head}problem: {name}", *draw_below(tree, len(head) * " ", "", width)]
    return "\n".join(printable(line) for line in lines)


def printable(line: str) -> str:
    """A line in which all that could steer a terminal is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def draw_below(parent: Node, blank: str, indent: str, width: int | None) -> Iterator[str]:
    """The lines of a node's children and all below. blank: as wide as the columns of numbers."""
    shown = parent.children
    if width:
        shown = sorted(shown, key=lambda node: (not node.children, -node.credit))[:width]
    hidden = len(parent.children) - len(shown)
    for node in shown:
        branch, deeper = "|-- ", "|   "
        if node is shown[-1] and not hidden:
            branch, deeper = "`-- ", "    "
        numbers = f"{node.turn:4}  {node.reward:6.2f}  {node.credit:6.2f}  {node.advantage:+9.2f}"
        yield f"{numbers}   {indent}{branch}{title(node)}"
        if node.children:
            yield from (f"{blank}{indent}{deeper}  {line}" for line in node.feedback.split("\n"))
            yield from draw_below(node, blank, indent + deeper, width)
    if hidden:
        yield f"{blank}{indent}`-- and {hidden} more"


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
