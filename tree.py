"""The rollout tree: sample programs, run them, pair each failure with its feedback, sample again.

In: problems with `.prompt`, `.id` and `.entry_point`, and two functions of yours:
    sample(prompts, n)  for each prompt a list of n `Completion`s, or None if it exceeds the context
    execute(jobs)       for each (problem, code) a result: .reward .status .feedback .public_passed
Out: for each problem the root of its tree. The root (turn 0) is no attempt.

It needs Python alone: copy the file into your project. `python tree.py` grows a tree and draws it.
`python tree.py runs/x/trees.jsonl` draws the trees of a run.
"""

import argparse
import ast
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any

Messages = list[dict[str, str]]


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


def is_solved(node: Node) -> bool:
    return node.solved


def build_trees(
    problems: list, sample: Callable, execute: Callable, turns: int, group_size: int, stop=is_solved
) -> list[Node]:
    """Grow one tree for each problem, turn by turn (paper).

    A turn is one call of `sample` and one of `execute`, for the open nodes of all problems. A node
    for which `stop` holds gets no children. G + G^2 + ... + G^S attempts if nothing is solved.

    ValueError: a wrong number of answers, or a problem that cannot be scored. (A broken problem
    must not look like a wrong program.)
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
            name = node.problem.id
            raise ValueError(f"problem {name!r} cannot be scored ({result.feedback}): leave it out")
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


LONGEST = 50_000  # characters of an answer that are read, from its end: parsing is slow
READS = r"\binput *\(|\bstdin\b(?! *=)|\bopen *\( *0"
PRINTS = r"\bprint *\(|\bstdout\b(?! *=)"
DEFINES = r"^[ \t]*(async +)?(def|class) +{0}\b|^[ \t]*{0} *(:[^=\n]*)?= *(lambda\b|[^\W\d][\w.]*$)"
END_OF_THOUGHT = re.compile("</think(?:ing)?>")
TAG = r"[{.]*(?:[\w./-]+\.py|(?:i?python|pypy|py)[\d.]*(?: +[\d.]+)?)(?![\w-])"  # of Python
REOPENING = re.compile(rf"{TAG}|[\w+#.-]+[ \t]*$", re.MULTILINE | re.IGNORECASE)
OPENING = re.compile(  # a fence behind list marks, or behind text if at most a tag follows
    r"^(?:(?:[ \t]|(?:[-*+]|\d+[.)])[ \t])*|(?:[^`\n]|`{1,2}(?!`))*+(?=`+(?:python\b|\S*[ \t]*$)))"
    rf"(?P<mark>```|~~~)[`~]*[ \t]*(?P<python>{TAG})?[ \t]*"
    r"(?P<code>(?=(?:def|class|import|from) +\w|@\w|[\w, ]+ = |[\w.]+\())?(?P<rest>[^`\n]*)$",
    re.MULTILINE | re.IGNORECASE,
)
WHOLE, TAGGED, UNTAGGED, OUTSIDE = 3, 2, 1, 0


def extract_code(text: str, entry_point: str = "", thinking: bool = False) -> str:
    """The program in an answer, or "" if there is none (ours). Thoughts are left out.

    Of all fenced blocks it is the one that defines the most of `entry_point` ("f", or "Solution.f"),
    or, without a name, that reads input and prints. Of equal ones: a block tagged as Python, one
    that parses, the last. A block without a tag, the text outside of fences and the whole answer
    count only if they parse and do something of that. Blocks are not joined; an ipython tag is
    Python's; a stub counts; code among prose or in [PYTHON] tags, without a fence, does not.
    """
    text = re.sub(r"^([ \t]*)[\ufeff\u200b]+", r"\1", text.replace("\r\n", "\n"), flags=re.M)
    if re.search(r"^[ \t]*>.*(?:```|~~~)", text, re.MULTILINE):  # a fence in a quotation
        text = re.sub(r"^[ \t]*(?:> ?)+", "", text, flags=re.MULTILINE)
    if thinking or text.lstrip().startswith("<think"):
        text = "".join(END_OF_THOUGHT.split(text, maxsplit=1)[1:])
    text = text.strip("\n")[-LONGEST:]
    wanted = [READS, PRINTS]
    if entry_point:
        wanted = [DEFINES.format(re.escape(name)) for name in entry_point.split(".")]

    programs = [(0, 0, False, 0, "")]
    for place, (kind, block) in enumerate([(WHOLE, text), *split_fences(text)]):
        code, parses = read(block)
        done = sum(re.search(pattern, code, re.MULTILINE) is not None for pattern in wanted)
        if code.strip() and not code.startswith(">>>") and (kind == TAGGED or (parses and done)):
            programs.append((done, kind, parses, place, code))
    return max(programs)[-1]


def split_fences(text: str) -> list[tuple[int, str]]:
    """The fenced blocks of an answer and the text outside, each with its kind."""
    blocks, outside, place = [], [], 0
    while True:
        opening = OPENING.search(text, place)
        until = opening.start("mark") if opening else len(text)
        *thoughts, between = END_OF_THOUGHT.split(text[place:until])
        if thoughts:
            blocks, outside = [], []
        outside.append(between)
        if opening is None:
            break
        begin = opening.end() if opening["code"] is None else opening.end("code")
        end, place = find_end(text, begin, opening["mark"])
        thoughts = list(END_OF_THOUGHT.finditer(text, begin, end))
        if thoughts and not read(text[begin:end])[1]:  # the fence was opened in the thought
            blocks, outside, place = [], [], thoughts[-1].end()
        elif opening["python"]:
            blocks.append((TAGGED, text[begin:end]))
        elif opening["code"] is not None or not opening["rest"]:
            blocks.append((UNTAGGED, text[begin:end]))
    outside = "\n".join(outside)
    return [] if "<think" in outside else [*blocks, (OUTSIDE, outside)]


def find_end(text: str, begin: int, mark: str) -> tuple[int, int]:
    """Where a block's code ends, and where the text behind its closing fence begins.

    The fence is the next on its own line, else the next of those outside of long strings, else
    one behind code: the first of them up to which the block parses.
    """
    line = rf"(?m:^)[ \t]*{mark}"
    string = r'(?s:""".*?"""' r"|'''.*?''')"
    spans = []
    for code in (rf"(?s:.*?)(?={line})", rf"(?:{string}|(?!{line})(?s:.))*+", "(?s:.*?)"):
        fence = re.compile(rf"{code}(?P<fence>[ \t]*{mark}[`~]*)").match(text, begin)
        spans.append(fence.span("fence") if fence else (len(text), len(text)))
    parsed = [span for span in spans if read(text[begin : span[0]])[1]]
    end, behind = [*parsed, *spans][0]
    return (end, end) if REOPENING.match(text, behind) else (end, behind)


@lru_cache(maxsize=16)
def read(block: str) -> tuple[str, bool]:
    """A block without its indentation, and whether it parses. As it is, if it does not."""
    lines = block.strip("\n").split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    for width in (min(indents, default=0), *indents[:1]):  # a string may have lines further left
        code = "\n".join(line[:width].lstrip() + line[width:] for line in lines)
        try:
            with warnings.catch_warnings(action="ignore"):
                statements = ast.parse(code).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if not any(isinstance(node, ast.Return) for node in statements):  # else a function's body
            return code, True
    return "\n".join(lines), False


def draw(tree: Node, width: int | None = None) -> str:
    """A tree as text: what each attempt earned, and below a repaired one the feedback on it.

    `width` shows at most that many of a group: first those with children, then the best.
    """
    head = "turn  reward  credit  advantage"
    name = "" if tree.problem is None else f" {tree.problem.id}"
    return "\n".join([f"{head}   problem{name}", *draw_group(tree, len(head) * " ", "", width)])


def draw_group(parent: Node, blank: str, indent: str, width: int | None) -> Iterator[str]:
    shown = parent.children
    if width:
        shown = sorted(shown, key=lambda node: (not node.children, -node.credit))[:width]
    left_out = len(parent.children) - len(shown)
    for node in shown:
        is_last = node is shown[-1] and not left_out
        numbers = f"{node.turn:4}  {node.reward:6.2f}  {node.credit:6.2f}  {node.advantage:+9.2f}"
        yield f"{numbers}   {indent}{'`-- ' if is_last else '|-- '}{title(node)}"
        deeper = indent + ("    " if is_last else "|   ")
        if node.children:
            yield from (f"{blank}   {deeper}  {line}" for line in node.feedback.split("\n"))
            yield from draw_group(node, blank, deeper, width)
    if left_out:
        yield f"{blank}   {indent}`-- and {left_out} more"


def title(node: Node) -> str:
    """The first line of an attempt's program, and what else is to be known of the attempt."""
    first, *more = (node.code.strip() or "(no code)").split("\n")
    notes = [f"and {len(more)} lines"] if more else []
    notes += ["truncated"] if node.truncated else []
    notes += [] if node.kept else ["pruned"]
    notes += [f"not expanded: {node.unexpanded}"] if node.unexpanded else []
    return first + (f"  ({', '.join(notes)})" if notes else "")


def to_dict(node: Node, ids: bool = False) -> dict:
    """A tree as plain data for JSON. The ids are large and left out unless asked for."""
    hidden = set() if ids else {"prompt_ids", "completion_ids"}
    plain = {f.name: getattr(node, f.name) for f in fields(Node) if f.name not in hidden}
    plain["problem"] = None if node.problem is None else node.problem.id
    plain["tokens"] = len(node.completion_ids)
    return plain | {"children": [to_dict(child, ids) for child in node.children]}


def from_dict(plain: dict) -> Node:
    """The tree that `to_dict` wrote. Of its problem only the id is left."""
    known = {f.name: plain[f.name] for f in fields(Node) if f.name in plain}
    if known["problem"] is not None:
        known["problem"] = SimpleNamespace(id=known["problem"])
    return Node(**known | {"children": [from_dict(child) for child in plain["children"]]})


def printable(line: str) -> str:
    """A line in which whatever could steer a terminal is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def load_trees(path: str, step: int | None = None) -> list[tuple[int, Node]]:
    """The trees of a run's trees.jsonl, each with its step. ValueError: it is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            trees = [(plain["step"], from_dict(plain)) for plain in map(json.loads, file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no trees.jsonl of murphy.py ({reason})") from error
    found = [pair for pair in trees if step in (None, pair[0])]
    if not found:
        raise ValueError(f"{path} has no step {step}; it has {sorted({at for at, _ in trees})}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the trees of a run, or one that is made up.")
    parser.add_argument("file", nargs="?", help="trees.jsonl of a run")
    parser.add_argument("--step", type=int, help="only the trees of this step")
    parser.add_argument("--width", type=int, help="at most so many attempts of a group")
    options = parser.parse_args()
    if options.file is None:
        return print(draw(demonstrate()))
    try:
        trees = load_trees(options.file, options.step)
    except ValueError as error:
        sys.exit(f"tree.py: {error}")
    for step, tree in trees:
        lines = draw(tree, options.width).split("\n")
        print(f"step {step}", *map(printable, lines), "", sep="\n")


def demonstrate() -> Node:
    """A tree that a script grows. Each program is really run on two tests: f(2) and f(3)."""
    answers = iter(["x + 2", "x * 3", "x + 3", "x + 4", "x * 2", "x * 4"])

    def sample(prompts: list[Messages], n: int) -> list[list[Completion]]:
        return [
            [Completion(f"def f(x): return {next(answers)}") for _ in range(n)] for _ in prompts
        ]

    def execute(jobs: list) -> list[SimpleNamespace]:
        return [run(code) for _, code in jobs]

    def run(code: str) -> SimpleNamespace:
        space = {}
        exec(code, space)
        wrong = [x for x in (2, 3) if space["f"](x) != 2 * x]
        said = [f"f({x}) returned {space['f'](x)}, expected {2 * x}" for x in wrong]
        return SimpleNamespace(
            reward=1 - len(wrong) / 2, status="", public_passed=not wrong, feedback="; ".join(said)
        )

    problem = SimpleNamespace(id="f(x) is twice x", prompt="Write f(x), twice x.", entry_point="f")
    (tree,) = build_trees([problem], sample, execute, turns=2, group_size=2)
    for group in reversed(groups(tree)):  # from the leaves up, as propagate.py does it
        for node in group:
            node.credit = max([node.reward, *(child.credit for child in node.children)])
        credits = [node.credit for node in group]
        for node in group:
            node.advantage = (node.credit - mean(credits)) / (pstdev(credits) + 1e-4)
    return tree


if __name__ == "__main__":
    main()
