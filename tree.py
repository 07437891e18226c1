"""The rollout tree: sample programs, run them, pair each failure with its feedback, sample again.

In: problems with `.prompt`, `.id` and `.entry_point`, and two functions of yours:
    sample(prompts, n)  for each prompt a list of n `Completion`s, or None if it exceeds the context
    execute(jobs)       for each (problem, code) a result: .reward .status .feedback .public_passed
Out: for each problem the root of its tree. The root (turn 0) is no attempt.

It needs Python alone: copy the file into your project. `python tree.py` draws an example.
`python tree.py runs/x/trees.jsonl` draws the trees of a run (with support/page.py).
"""

import ast
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

Messages = list[dict[str, str]]
SOLVED = attrgetter("solved")


@dataclass
class Completion:
    """One sampled answer. The ids are needed for training only."""

    text: str
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)  # with the end token, unless truncated
    truncated: bool = False  # no end token came within the allowed length
    thinking: bool = False  # the prompt ended inside a thought that the chat template opened


@dataclass
class Node:
    """One attempt: the answer, what the executor said of it, and the attempts made after that."""

    turn: int
    prompt: Messages = field(default_factory=list)  # all messages that it was sampled from
    prompt_ids: list[int] = field(default_factory=list)  # as sampled: no text is tokenised again
    completion_ids: list[int] = field(default_factory=list)
    text: str = ""
    code: str = ""
    truncated: bool = False
    reward: float = 0.0  # what the executor said; never overwritten
    status: str = ""
    feedback: str = ""
    solved: bool = False
    public_passed: bool = False
    unexpanded: str = ""  # why a failure has no children although turns were left
    children: list["Node"] = field(default_factory=list)  # a group: sampled from one prompt
    credit: float = 0.0  # the reward after propagation
    advantage: float = 0.0
    kept: bool = True  # False once pruned
    problem: Any = None


def build_trees(
    problems: list, sample: Callable, execute: Callable, turns: int, group_size: int, stop=SOLVED
) -> list[Node]:
    """Grow one tree for each problem, turn by turn (paper).

    A turn is one call of `sample` and one of `execute`, for the open nodes of all problems. A node
    for which `stop` holds gets no children. G + G^2 + ... + G^S attempts if nothing is solved.

    ValueError: a wrong number of answers, or a problem that no program can be scored on.
    """
    if turns < 1 or group_size < 1:
        raise ValueError(f"turns ({turns}) and group_size ({group_size}) must be at least 1")
    trees = open_nodes = [Node(turn=0, problem=problem) for problem in problems]
    verdicts = {}
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
                parent.children = [attempt(parent, answer) for answer in completions]

        grown = [node for parent in open_nodes for node in parent.children]
        judge(grown, execute, verdicts)
        open_nodes = [node for node in grown if not stop(node)]
    return trees


def check_count(function: str, what: str, asked: int, given: int) -> None:
    if given != asked:
        raise ValueError(f"{function}() got {asked} {what} and gave {given}")


def attempt(parent: Node, answer: Completion) -> Node:
    """A new child of `parent`, not yet executed."""
    ids = answer.prompt_ids, answer.completion_ids
    code = extract_code(answer.text, parent.problem.entry_point, answer.thinking)
    child = Node(parent.turn + 1, next_prompt(parent), *ids, answer.text, code, answer.truncated)
    child.problem = parent.problem
    return child


def judge(nodes: list[Node], execute: Callable, verdicts: dict) -> None:
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
    """The prompt of the next turn: all messages so far, the attempt, and its feedback (paper)."""
    request = f"The program does not pass its tests.\n{feedback}\nWrite the corrected program."
    answer = {"role": "assistant", "content": text}
    return [*messages, answer, {"role": "user", "content": request}]


LONGEST = 30_000  # characters of an answer that are read, from its end: parsing is slow
READS_AND_PRINTS = [r"\binput *\(|\bstdin\b(?! *=)|\bopen *\( *0", r"\bprint *\(|\bstdout\b"]
DEFINES = r"^[ \t]*(async +)?(def|class) +{0}\b|^[ \t]*{0} *(:[^=\n]*)?= *(lambda\b|[^\W\d][\w.]*$)"
END_OF_THOUGHT = re.compile("</think(?:ing)?>")
TAG = r"[{.]*(?:[\w./-]+\.py|(?:i?python|pypy|py)[\d.]*(?: +[\d.]+)?)(?![\w-])"  # of Python
REOPENING = re.compile(rf"(?im){TAG}|[\w+#.-]+[ \t]*$")
LIST = r"(?:[ \t]|(?:[-*+]|\d+[.)])[ \t])*"  # blanks, and the marks of list items
TEXT = r"(?:[^`\n]|`{1,2}(?!`))*+(?=`+(?:python\b|\S*[ \t]*$))"  # any, if at most a tag follows
CODE = r"(?:def|class|import|from) +\w|@\w|[\w, ]+ = |[\w.]+\("  # on the line of the fence
OPENING = re.compile(
    rf"(?im)^(?:{LIST}|{TEXT})(?P<mark>```|~~~)[`~]*(?=[^`\n]*$)"
    rf"[ \t]*(?P<python>{TAG})?[ \t]*(?:(?={CODE})|(?P<rest>.*)$)"
)


def extract_code(text: str, entry_point: str = "", thinking: bool = False) -> str:
    """The program in an answer, or "" if there is none (ours). Thoughts are left out.

    It is the block that defines most of `entry_point` ("f", "Solution.f") or, without a name, that
    reads and prints. Of equals: one tagged as Python, one that parses, the last. Untagged blocks,
    the text outside, and the whole answer must parse and do something of that. Blocks are not
    joined, a stub is a definition, and unfenced code among prose or in [PYTHON] tags is not found.
    """
    if thinking or re.match(r"[\s\ufeff\u200b]*<think", text):
        text = "".join(END_OF_THOUGHT.split(text, maxsplit=1)[1:])
    text = text.rstrip()[-LONGEST:].replace("\r\n", "\n")
    text = re.sub(r"^([ \t]*)[\ufeff\u200b]+", r"\1", text, flags=re.MULTILINE)
    if re.search(r"^[ \t]*>.*(?:```|~~~)", text, re.MULTILINE):  # a fence in a quotation
        text = re.sub(r"^[ \t]*(?:> ?)+", "", text, flags=re.MULTILINE)
    names = entry_point.split(".") if entry_point else []
    wanted = [DEFINES.format(re.escape(name)) for name in names] or READS_AND_PRINTS

    programs = [(0, False, False, 0, "")]
    for place, (tagged, block) in enumerate([(False, text), *split_fences(text)]):
        code, parses = read(block)
        done = sum(re.search(pattern, code, re.MULTILINE) is not None for pattern in wanted)
        if code.strip() and not code.startswith(">>>") and (tagged or (parses and done)):
            programs.append((done, tagged, parses, place, code))
    return max(programs)[-1]


def split_fences(text: str) -> list[tuple[bool, str]]:
    """The text outside of fences, and the first 30 blocks: (tagged as Python, code) each."""
    blocks, outside, place = [], [], 0
    for _ in range(30):
        opening = OPENING.search(text, place)
        begin = opening.start("mark") if opening else len(text)
        *thoughts, between = END_OF_THOUGHT.split(text[place:begin])
        if thoughts:
            blocks, outside = [], []
        outside.append(between)
        if opening is None:
            break
        begin = opening.end()
        end, place = find_end(text, begin, opening["mark"])
        thoughts = list(END_OF_THOUGHT.finditer(text, begin, end))
        if thoughts and not read(text[begin:end])[1]:
            place = thoughts[-1].start()  # the fence was opened in the thought
        elif opening["python"] or not opening["rest"]:
            blocks.append((opening["python"] is not None, text[begin:end]))
    outside = "\n".join(outside)
    return [] if "<think" in outside else [(False, outside), *blocks]


def find_end(text: str, begin: int, mark: str) -> tuple[int, int]:
    """Where the code of a block ends, and where the text behind its closing fence begins.

    The fence is on its own line or behind code, and a string may hold others. Of four places the
    block ends at the first up to which it parses, else at the next fence on its own line.
    """
    in_string = r'""".*?"""' r"|'''.*?'''" r"|'[^'\n]*'" r'|"[^"\n]*"' r"|#[^\n]*"
    patterns = []
    for fence in (rf"^[ \t]*{mark}[`~]*", rf"{mark}[`~]*"):
        patterns += [rf".*?({fence}|\Z)", rf"(?:{in_string}|(?!{fence}).)*+({fence}|\Z)"]
    found = [re.compile(each, re.DOTALL | re.MULTILINE).match(text, begin) for each in patterns]
    parsed = [match for match in found if read(text[begin : match.start(1)])[1]]
    end, behind = [*parsed, *found][0].span(1)
    return (end, end) if REOPENING.match(text, behind) else (end, behind)


@lru_cache(maxsize=16)
def read(block: str) -> tuple[str, bool]:
    """A block without its indentation, and whether it parses. As it is, if it does not."""
    lines = block.strip("\n").split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    for width in (min(indents, default=0), *indents[:1]):  # a string may have lines further left
        code = "\n".join(line[:width].lstrip() + line[width:] for line in lines).rstrip()
        try:
            with warnings.catch_warnings(action="ignore"):
                statements = ast.parse(code).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if not any(isinstance(node, ast.Return) for node in statements):  # else a function's body
            return code, True
    return "\n".join(lines).rstrip(), False


def draw(tree: Node, width: int | None = None) -> str:
    """A tree as text: what each attempt earned, its program, and the feedback that was answered.

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
    shown = parent.children
    if width:
        shown = sorted(shown, key=lambda node: (not node.children, -node.credit))[:width]
    hidden = len(parent.children) - len(shown)
    for node in shown:
        branch, deeper = ("`-- ", "    ") if node is shown[-1] and not hidden else ("|-- ", "|   ")
        numbers = f"{node.turn:4}  {node.reward:6.2f}  {node.credit:6.2f}  {node.advantage:+9.2f}"
        yield f"{numbers}   {indent}{branch}{title(node)}"
        if node.children:
            yield from (f"{blank}{indent}{deeper}  {line}" for line in node.feedback.split("\n"))
            yield from draw_below(node, blank, indent + deeper, width)
    if hidden:
        yield f"{blank}{indent}`-- and {hidden} more"


def title(node: Node) -> str:
    """The first line of an attempt's program, and what was special about the attempt."""
    first, *more = (node.code.strip() or "(no code)").split("\n")
    notes = {f"and {len(more)} lines": more, "truncated": node.truncated, "pruned": not node.kept}
    notes[f"not expanded: {node.unexpanded}"] = node.unexpanded
    said = ", ".join(note for note, holds in notes.items() if holds)
    return f"{first}  ({said})" if said else first


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
    """Six attempts at a program with f(2) == 4 and f(3) == 6, as MARS and GRPO value them."""
    tree = Node(turn=0, problem=SimpleNamespace(id="f(x) is twice x"))
    for turn, formula, reward, credit, advantage, feedback in (
        (1, "x + 2", 0.5, 0.5, -1.0, "f(3) returned 5, expected 6"),
        (2, "x + 3", 0.5, 0.5, +1.0, "f(2) returned 5, expected 4"),
        (2, "x + 4", 0.0, 0.0, -1.0, "f(2) returned 6, expected 4"),
        (1, "x * 3", 0.0, 1.0, +1.0, "f(2) returned 6, expected 4"),
        (2, "x * 2", 1.0, 1.0, +1.0, ""),
        (2, "x * 4", 0.0, 0.0, -1.0, "f(2) returned 8, expected 4"),
    ):
        node = Node(turn, code=f"def f(x): return {formula}", reward=reward, feedback=feedback)
        node.credit, node.advantage, node.solved = credit, advantage, reward == 1
        parent = tree if turn == 1 else tree.children[-1]
        parent.children.append(node)
    return tree


if __name__ == "__main__":
    if sys.argv[1:]:  # the trees.jsonl of a run
        from support.page import draw_file

        draw_file()
    else:
        print(draw(demonstrate()))
