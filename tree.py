"""The rollout tree: sample G programs for a problem, run them, pair every failure with its feedback, sample again.

    root (the problem) --- group of G turn-1 attempts --- each failure: a group of G turn-2 attempts --- ... S turns
                           sampled from prompt x          sampled from (x, attempt, feedback)

In: problems, and two plain callables, so that a scripted policy, your own engine and HF `generate` all plug in:
    sample(prompts, n)  -> for each prompt a list of n `Completion`s, or None where it does not fit the context
                           (a third argument, with `overlap`: see `build_trees`)
    execute(jobs)       -> for each (problem, code) a result with .reward, .status, .feedback, .public_passed
Out: trees of `Node`s. A tree is its root node (turn 0, nothing sampled); a group is the children of one node.
Token ids are the truth: `prompt_ids` and `completion_ids` are what was sampled, and text is never tokenised again.
"""

import argparse
import ast
import html
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad as pad_right
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

Messages = list[dict[str, str]]
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # `cache` in transformers 6; all of 5 take this


@dataclass
class Completion:
    """One sampled answer. A scripted sampler needs `text` only; ids are needed to train on it."""

    text: str
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)  # ends with the end token unless truncated
    truncated: bool = False  # no end token within the cap


@dataclass
class Node:
    """One attempt: a completion, what the executor said of it, and the refinements sampled from that."""

    turn: int
    prompt: Messages = field(default_factory=list)  # what it was sampled from: the whole path, nothing cut
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    text: str = ""
    code: str = ""
    truncated: bool = False
    reward: float = 0.0  # the executor's word, never overwritten
    status: str = ""
    feedback: str = ""
    solved: bool = False
    public_passed: bool = False
    unexpanded: str = ""  # why a failure with turns left has no children
    children: list["Node"] = field(default_factory=list)
    credit: float = 0.0  # reward after propagation: what training uses
    advantage: float = 0.0
    kept: bool = True  # False once pruned
    problem: Any = None


def build_trees(
    problems: list, sample: Callable, execute: Callable, turns: int, group_size: int,
    stop: Callable[[Node], bool] = lambda node: node.solved, overlap: bool = False,
) -> list[Node]:
    """Grow one rollout tree per problem, breadth first (paper).

    One `sample` call and one `execute` call per turn for all open nodes of all problems, equal jobs left out. A node for
    which `stop` holds (solved, unless told otherwise) is never expanded; G + G^2 + ... + G^S nodes where nothing is
    solved. With `overlap`, `sample(prompts, n, ended)` calls ended([(prompt's number, completion), ...]) now and then, and
    those programs are run at once, in another thread, while the others are sampled. The trees are the same.
    Raises ValueError if `sample` or `execute` breaks its contract or a problem cannot be scored.
    """
    if turns < 1 or group_size < 1:
        raise ValueError(f"a tree needs turns >= 1 and group_size >= 1, got turns={turns}, group_size={group_size}")
    trees = frontier = [Node(turn=0, problem=problem) for problem in problems]
    with closing(Verdicts(execute)) as verdicts:
        while frontier and frontier[0].turn < turns:
            ended = lambda some: verdicts.start([attempt(frontier[i], completion) for i, completion in some], beside=True)
            answers = sample([next_prompt(node) for node in frontier], group_size, *([ended] if overlap else []))
            if len(answers) != len(frontier):
                raise ValueError(f"sample() got {len(frontier)} prompts and answered {len(answers)}")
            for parent, completions in zip(frontier, answers, strict=True):
                if completions is None:
                    parent.unexpanded = "too long"
                elif len(completions) == group_size:
                    parent.children = [attempt(parent, completion) for completion in completions]
                else:
                    raise ValueError(f"sample() was asked for {group_size} completions a prompt and gave {len(completions)}")
            grown = [node for parent in frontier for node in parent.children]
            verdicts.start(grown)
            for node in grown:
                result = verdicts.of(node)
                if result.status == "unscorable":  # a broken problem must not look like a wrong answer
                    raise ValueError(f"problem {node.problem.id!r} cannot be scored ({result.feedback}): leave it out")
                node.reward, node.status, node.feedback = result.reward, result.status, result.feedback
                node.solved, node.public_passed = result.reward == 1.0, result.public_passed
            frontier = [node for node in grown if not stop(node)]
    return trees


def next_prompt(node: Node) -> Messages:
    """What a node's children are sampled from."""
    return refinement_messages(node.prompt, node.text, node.feedback) if node.turn else first_messages(node.problem)


def attempt(parent: Node, c: Completion) -> Node:
    code = extract_code(c.text, parent.problem.entry_point)
    return Node(parent.turn + 1, next_prompt(parent), c.prompt_ids, c.completion_ids, c.text, code, c.truncated,
                problem=parent.problem)


class Verdicts:
    """What the executor says of the programs of a forest. A policy repeats itself: equal programs for a problem are run once."""

    def __init__(self, execute: Callable) -> None:
        self.execute, self.thread, self.found = execute, ThreadPoolExecutor(1), {}  # found: (problem, program) -> its place

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)  # what runs already is its caller's to end (executor.close)

    def start(self, nodes: list[Node], beside: bool = False) -> None:
        """Run the programs of these that are new, now or, in another thread, beside what comes next."""
        jobs = {(id(node.problem), node.code): (node.problem, node.code) for node in nodes}
        jobs = {key: job for key, job in jobs.items() if key not in self.found}
        if jobs:
            run = partial(self.execute, list(jobs.values()))
            results = self.thread.submit(run).result if beside else (lambda done=run(): done)
            self.found |= {key: (results, place, len(jobs)) for place, key in enumerate(jobs)}

    def of(self, node: Node) -> Any:
        results, place, asked = self.found[id(node.problem), node.code]
        if len(results()) != asked:
            raise ValueError(f"execute() got {asked} jobs and answered {len(results())}")
        return results()[place]


def walk(tree: Node) -> Iterator[Node]:
    """Every attempt of a tree, breadth first, the root (which is no attempt) left out."""
    level = tree.children
    while level:
        yield from level
        level = [child for node in level for child in node.children]


def groups(tree: Node) -> list[list[Node]]:
    """The sibling groups of a tree, breadth first: attempts sampled from one prompt, the unit of GRPO's baseline."""
    return [node.children for node in (tree, *walk(tree)) if node.children]


def first_messages(problem: Any) -> Messages:
    """The prompt of turn 1 as chat messages; no system message, since some templates refuse that role."""
    return [{"role": "user", "content": problem.prompt}]


def refinement_messages(messages: Messages, text: str, feedback: str) -> Messages:
    """The prompt of the next turn: the path so far, the attempt, and what the executor said of it (paper: (x, y, e)).

    >>> [m["role"] for m in refinement_messages([{"role": "user", "content": "x"}], "y", "e")]
    ['user', 'assistant', 'user']
    """
    request = "The program does not pass its tests.\n" + feedback + "\nWrite the corrected program."
    return messages + [{"role": "assistant", "content": text}, {"role": "user", "content": request}]


FENCE = re.compile(r"^[ \t]*`{3,}[ \t]*(.*?)[ \t]*$\n?", re.MULTILINE)
PYTHON_TAG = re.compile(r"(?:python3?|py)(?:[ \t]+|$)", re.IGNORECASE)
OTHER_TAG = re.compile(r"[\w+#.-]+")


def extract_code(text: str, entry_point: str = "") -> str:
    """The program in a model's answer, or "" where there is none (ours).

    Text up to the last </think> is ignored, and an unfinished <think> means no code. Of the fenced Python blocks (tagged
    python, or untagged) the last that defines `entry_point`, else the last. Without one: the text outside fences, if it
    parses as Python. An open fence runs to the end; code on a fence's own line counts.

    >>> extract_code("Sure:\\n```python\\ndef f(): return 1\\n```\\nUse it so:\\n```\\nf()\\n```", "f")
    'def f(): return 1'
    """
    text = text.rpartition("</think>")[2].replace("\r\n", "\n")
    if "<think>" in text:
        return ""
    text = re.sub(r"(?<=[^`\s])[ \t]*`{3,}\s*\Z", "\n```", text)  # closed on the last line of the code itself
    outside, *fenced = FENCE.split(text)
    programs, is_open = [], False
    for info, block in zip(fenced[::2], fenced[1::2], strict=True):  # what stands on a fence's own line, and below it
        is_open = info != "" or not is_open  # a bare fence closes; one with text opens, even inside an unclosed block
        tag = PYTHON_TAG.match(info)
        if not is_open:
            outside += block
        elif tag or not OTHER_TAG.fullmatch(info):
            programs.append((info[tag.end():] if tag else info) + "\n" + block)
    programs = [code.strip("\n") for code in programs if code.strip()]
    defining = [code for code in programs if entry_point and defines(code, entry_point.rpartition(".")[2])]
    if programs:
        return (defining or programs)[-1]
    plain = outside.strip("\n")
    return plain if plain.strip() and parse(plain) is not None else ""


def parse(code: str) -> ast.Module | None:
    """The syntax tree of model-written text, or None where it is not Python; nothing is run."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # NUL bytes, absurd nesting
        return None


def defines(code: str, name: str) -> bool:
    """Whether a program defines `name` (function, method, class, variable); by its text, as it may hold a syntax error."""
    name = re.escape(name)
    return re.search(rf"^\s*((async\s+)?def|class)\s+{name}\b|^\s*{name}\s*(:[^=\n]*)?=(?!=)", code, re.MULTILINE) is not None


def draw(tree: Node, width: int | None = None) -> str:
    """A tree as text: at each node its reward, credit and advantage, the program's first line and the feedback on it.

    `width` shows at most that many of a group, those with children first and then by credit, and counts the others.

    >>> tree = Node(0, children=[Node(1, code="def f(): return 1", reward=0.5, credit=1.0, advantage=0.7)])
    >>> print(draw(tree))
    problem
    `-- turn 1  reward 0.50  credit 1.00  advantage +0.70  | def f(): return 1
    """
    def below(node: Node, indent: str) -> Iterator[str]:
        ranked = sorted(node.children, key=lambda n: (not n.children, -n.credit)) if width else node.children
        shown = ranked[:width]
        for i, child in enumerate(shown):
            last = i == len(ranked) - 1
            yield indent + ("`-- " if last else "|-- ") + label(child)
            deeper = indent + ("    " if last else "|   ")
            if child.children:
                for line in child.feedback.split("\n"):
                    yield deeper + "  " + line
            yield from below(child, deeper)
        if len(ranked) > len(shown):
            yield f"{indent}`-- and {len(ranked) - len(shown)} more"

    return "\n".join([f"problem {tree.problem.id}" if tree.problem is not None else "problem", *below(tree, "")])


def to_dict(node: Node, ids: bool = False) -> dict:
    """A tree as plain data for JSON; the ids, which only training needs, where they are asked for."""
    plain = {k: v for k, v in vars(node).items() if ids or k not in ("prompt_ids", "completion_ids")}
    return plain | {"problem": node.problem.id if node.problem is not None else None, "tokens": len(node.completion_ids),
                    "children": [to_dict(child, ids) for child in node.children]}


def pick_device(name: str = "auto") -> torch.device:
    """The one place where a device is chosen: cuda, else mps, else cpu, unless named."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def autocast(device: torch.device):
    """The one place where a dtype is chosen: bfloat16 arithmetic on CUDA, float32 elsewhere.

    The weights stay float32: near 0.02 neighbouring bfloat16 numbers are 1e-4 apart, and an AdamW step of 1e-6 is lost.
    """
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def load_model(path: str, device: torch.device) -> tuple[torch.nn.Module, Any]:
    """Model (float32, eval mode) and tokenizer from a folder or hub id; ValueError with one sentence if it cannot be."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot load a model from {path!r}: expected a folder made by save_pretrained or a Hugging "
                         f"Face id that can be reached ({type(error).__name__}: {first})") from error
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {path!r} has no chat template: refinement needs a chat (instruct) model")
    return model.to(device).eval(), tokenizer


def encode(tokenizer: Any, messages: Messages, enable_thinking: bool = False) -> list[int]:
    """Token ids of a prompt, generation mark included: the template renders and tokenises in one go, so one BOS.

    A special token spelt out in a message (by a model, or a test's output) is broken by a space: a text is data and
    must not end a turn.
    """
    special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and len(str(t)) > 1]
    for token in special:
        messages = [m | {"content": m["content"].replace(token, token[0] + " " + token[1:])} for m in messages]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False,
                                              enable_thinking=enable_thinking))


class Sampler:
    """A `sample` for `build_trees` on HF `generate`; temperature 0 is greedy (n equal answers are then sampled once).

    Rows are batched by length, left-padded, rows * (prompt + max_new_tokens) <= token_budget a batch (None: what the
    memory holds, `fitting_tokens`; a batch that a CUDA device has no room for is halved, counted and said). Each distinct
    prompt is read once, and every `slice_tokens` tokens the rows that have ended leave the batch, which changes the tokens
    of no other. (Another split into batches does: a seed repeats a run where the same batches fit.) A prompt that would
    not fit the model's context with its answer gives None. Ids are kept as sampled, the end token included.
    """

    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, *, max_new_tokens: int, temperature: float = 1.0, top_p: float = 1.0,
        token_budget: int | None = None, slice_tokens: int = 32, enable_thinking: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.enable_thinking = model, tokenizer, enable_thinking
        self.max_new_tokens, self.token_budget, self.slice_tokens = max_new_tokens, token_budget, slice_tokens
        self.device = next(model.parameters()).device
        self.plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # LoRA's wrapper: its base's settings act
        ends = self.plain.generation_config.eos_token_id
        self.ends = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.ends[0]
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or float("inf")
        self.warpers = [TemperatureLogitsWarper(temperature)] if temperature > 0 else []
        self.warpers += [TopPLogitsWarper(top_p)] if temperature > 0 and top_p < 1 else []
        self.most, self.halved = float("inf"), 0  # tokens of a batch that the memory was found to hold; how often it was too small
        self.sliceable = True  # until the cache turns out to be no plain one: sliding windows, recurrent states

    def __call__(self, prompts: list[Messages], n: int, ended: Callable | None = None) -> list[list[Completion] | None]:
        encoded = [tuple(encode(self.tokenizer, messages, self.enable_thinking)) for messages in prompts]
        draws = n if self.warpers else 1
        answers: list[list[Any] | None] = [[None] * draws if len(ids) + self.max_new_tokens <= self.context else None
                                           for ids in encoded]
        rows = [(ids, i, j) for i, ids in enumerate(encoded) if answers[i] for j in range(draws)]
        rows.sort(key=lambda row: (len(row[0]), row))  # similar lengths together, equal prompts side by side
        with self.no_defaults(), autocast(self.device):
            budget = self.token_budget or fitting_tokens(self.model, self.max_new_tokens)
            while rows:
                batch = rows[:self.batch_size(rows, budget)]
                try:
                    for some in self.generate([ids for ids, *_ in batch]):
                        for row, ids in some.items():
                            prompt, i, j = batch[row]
                            answers[i][j] = self.completion(prompt, ids)
                        if ended and some:
                            ended([(i, answers[i][j]) for _, i, j in map(batch.__getitem__, some)])
                except torch.OutOfMemoryError:
                    if len(batch) == 1:
                        raise
                    self.halve(len(batch), len(batch[-1][0]))
                    continue  # all of the batch anew: to keep the rows that had ended would favour short ones
                rows = rows[len(batch):]
        return [a if a is None or draws == n else a * n for a in answers]

    def batch_size(self, rows: list[tuple], budget: int) -> int:
        size = 1
        while size < len(rows) and (size + 1) * (len(rows[size][0]) + self.max_new_tokens) <= min(self.most, budget):
            size += 1
        return size

    def halve(self, size: int, length: int) -> None:
        self.most, self.halved = size * (length + self.max_new_tokens) // 2, self.halved + 1
        warnings.warn(f"out of memory while sampling {size} completions of up to {self.max_new_tokens} tokens: from here on "
                      f"a batch holds at most {self.most} tokens, prompts included (halved {self.halved} times so far)")

    def completion(self, prompt: tuple[int, ...], ids: list[int]) -> Completion:
        ids = ids[:next((k + 1 for k, token in enumerate(ids) if token in self.ends), len(ids))]  # what follows is padding
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Completion(text, list(prompt), ids, truncated=ids[-1] not in self.ends)

    @contextmanager
    def no_defaults(self) -> Iterator[None]:
        """A checkpoint's own defaults (top_k, repetition_penalty, ...) fill every field that a call of `generate` leaves
        unset, and the log-probabilities of training know nothing of them: so for the call the model has no defaults at all.
        And no dropout: it would make the sampled distribution another than the trained one."""
        training, defaults = self.model.training, self.plain.generation_config
        self.model.eval()
        self.plain.generation_config = GenerationConfig(eos_token_id=self.ends, pad_token_id=self.pad)
        try:
            yield
        finally:
            self.plain.generation_config = defaults
            self.model.train(training)

    @torch.no_grad()
    def generate(self, prompts: list[tuple[int, ...]]) -> Iterator[dict[int, list[int]]]:
        """Sample one completion of each prompt, equal ones side by side; yields {row: ids} of those that end in each slice."""
        count, model, limit = Counter(prompts), self.model, self.max_new_tokens
        width = max(map(len, count))
        ids = torch.tensor([[self.pad] * (width - len(p)) + list(p) for p in count], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in count], device=self.device)
        cache, copies = None, torch.tensor(list(count.values()), device=self.device)
        chosen = torch.arange(len(count), device=self.device).repeat_interleave(copies)  # rows of the cache that go on
        if width > 1 and self.sliceable:  # a shared prompt is read once: its cache is repeated
            position = (mask.cumsum(1) - 1).clamp(min=0)
            cache = getattr(model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=position[:, :-1],
                                  use_cache=True, logits_to_keep=1), "past_key_values", None)
            self.sliceable = all(type(layer) is DynamicLayer for layer in getattr(cache, "layers", [None]))
            cache = cache if self.sliceable else None
        ids, mask, rows = ids[chosen], mask[chosen], torch.arange(len(prompts), device=self.device)
        stops = torch.tensor(self.ends, device=self.device)

        def draw(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            """The largest of p / q, q ~ Exp(1), is a sample of p: torch.multinomial's way, with the noise of rows that
            have left drawn all the same, so that no other row can tell."""
            p = logits.softmax(-1)
            if p.isnan().any():
                raise ValueError("the model's logits are not finite: nothing can be sampled from it")
            return p / p.new_empty(len(prompts), p.shape[1]).exponential_()[rows]

        while len(rows):
            size = min(self.slice_tokens, width + limit - ids.shape[1]) if cache else limit
            for number, layer in enumerate(cache.layers if cache else ()):  # one after the other: two whole caches need not fit
                cache.layers[number] = Room(layer, chosen, size)
            ids = model.generate(
                input_ids=ids, attention_mask=mask, past_key_values=cache,
                logits_processor=[*self.warpers, draw] if self.warpers else [], generation_config=GenerationConfig(
                    max_new_tokens=size, do_sample=False, eos_token_id=self.ends, pad_token_id=self.pad))
            mask = pad_right(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            over = torch.isin(ids[:, width:], stops).any(1) | (ids.shape[1] == width + limit)
            yield dict(zip(rows[over].tolist(), ids[over, width:].tolist()))
            rows, ids, mask, chosen = rows[~over], ids[~over], mask[~over], ~over


make_sampler = Sampler  # to its callers it is one function among others: any `sample` will do


class Room(DynamicLayer):
    """Keys and values of the chosen rows, with room for `more` tokens: one is written into its place, where DynamicLayer
    copies all that came before it."""

    def __init__(self, layer: DynamicLayer, chosen: torch.Tensor, more: int) -> None:
        super().__init__()
        vars(self).update(vars(layer))
        self.room = [pad_right(held[chosen], (0, 0, 0, more)) for held in (layer.keys, layer.values)]
        self.show(layer.keys.shape[2])

    def show(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (held[:, :, :end] for held in self.room)
        return self.keys, self.values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        for held, new in zip(self.room, (keys, values), strict=True):
            held[:, :, start:end] = new
        return self.show(end)


@torch.no_grad()
def fitting_tokens(model: torch.nn.Module, max_new_tokens: int) -> int:
    """Tokens of one batch whose cache and logits fill half of the memory at hand (ours)."""
    device, probe = next(model.parameters()).device, 8
    cache = getattr(model(torch.zeros(1, probe, dtype=torch.long, device=device), use_cache=True), "past_key_values", None)
    kept = [held for layer in getattr(cache, "layers", []) for held in vars(layer).values() if isinstance(held, torch.Tensor)]
    cached = sum(held.nbytes for held in kept) / probe  # measured: layers may share, and autocast keeps some in float32
    # Six float32 copies of a row's logits; it has max_new_tokens + 1 tokens at least.
    logits = 6 * 4 * model.config.get_text_config().vocab_size / (max_new_tokens + 1)
    return int(free_memory(device) / 2 / (cached + logits))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a CUDA device; elsewhere this rank's share of half of all there is (a container's limit
    counts), which is the same at each call, so that a run repeats itself bit for bit."""
    if device.type == "cuda":  # what the allocator holds and nobody uses is free as well
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes")):
        if file.exists() and (text := file.read_text().strip()) != "max":
            limits.append(int(text))
    return min(limits) // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def main() -> None:
    """Draw the trees of a run, or, without a file, grow one on a script and draw it."""
    parser = argparse.ArgumentParser(description="Draw rollout trees of a run's trees.jsonl; without a file, a scripted one.")
    parser.add_argument("file", nargs="?", help="trees.jsonl of a run")
    parser.add_argument("--step", type=int, help="only the trees of this step")
    parser.add_argument("--width", type=int, help="show at most so many attempts of a group, and count the others")
    parser.add_argument("--html", help="write one self-contained page into this file instead, in which trees unfold")
    args = parser.parse_args()
    if args.file is None:
        return demonstrate()
    try:
        every = [json.loads(line) for line in open(args.file, encoding="utf-8")]
        trees = [(from_dict(line), line["step"]) for line in every if args.step in (None, line["step"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"tree.py: {args.file} is no trees.jsonl of murphy.py ({type(error).__name__}: {error})")
    if not trees:
        sys.exit(f"tree.py: {args.file} has no step {args.step}; it has {sorted({line['step'] for line in every})}")
    if args.html:
        page = PAGE + "".join(unfoldable(tree, step) for tree, step in trees)
        Path(args.html).write_bytes(page.encode("utf-8", "xmlcharrefreplace"))  # a text may hold half of a surrogate pair
        return print(f"{len(trees)} trees: {args.html}")
    for tree, step in trees:
        print(f"step {step}, " + "\n".join(map(shown, draw(tree, args.width).split("\n"))) + "\n")


def shown(line: str) -> str:
    """A line of `draw` for the screen: what could steer a terminal is spelt out; on a terminal green is solved, red is not."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    reward = re.match(r"[ |`-]*turn \d+  reward (\d\.\d\d)", line)
    return line if not (reward and sys.stdout.isatty()) else f"\033[{32 if reward[1] == '1.00' else 31}m{line}\033[0m"


# No script; the policy forbids all that a text could smuggle in, should an escape ever be missing.
PAGE = """<!doctype html><meta charset="utf-8"><title>Rollout trees</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>body{font:14px sans-serif;margin:2em}details details{margin-left:1.5em}summary{cursor:pointer}.solved{color:#070}
.failed{color:#a00}.pruned{opacity:.5}pre{background:#f4f4f4;padding:.5em;white-space:pre-wrap}</style>
"""


def label(node: Node) -> str:
    """An attempt in one line."""
    first, *more = (node.code.strip() or "(no code)").split("\n")
    marks = "  truncated" * node.truncated + "  pruned" * (not node.kept) + f"  not expanded: {node.unexpanded}" * bool(node.unexpanded)
    return (f"turn {node.turn}  reward {node.reward:.2f}  credit {node.credit:.2f}  advantage {node.advantage:+.2f}{marks}  | {first}"
            + f"  (+{len(more)} lines)" * bool(more))


def unfoldable(node: Node, step: int | None = None) -> str:
    """A tree as nested <details>: numbers in the summary; prompt, answer, program and feedback inside. All texts escaped."""
    title = label(node) if node.turn else f"step {step}, problem {node.problem.id if node.problem else ''} {node.unexpanded}"
    texts = {"prompt": node.prompt[-1]["content"] if node.prompt else "", "program": node.code, "feedback": node.feedback,
             "answer": node.text if node.text.strip() != node.code.strip() else ""}
    inside = "".join(f"<p>{name}<pre>{html.escape(text)}</pre>" for name, text in texts.items() if text)
    kind = f"{'solved' if node.solved else 'failed' if node.turn else ''} {'' if node.kept else 'pruned'}"
    return (f'<details{" open" * (node.turn == 0)}><summary class="{kind}">{html.escape(title)}</summary>{inside}'
            + "".join(map(unfoldable, node.children)) + "</details>\n")


def from_dict(plain: dict) -> Node:
    """A tree as `to_dict` wrote it; without its ids it is enough to draw."""
    fields = {name: plain[name] for name in Node.__dataclass_fields__ if name in plain and name not in ("children", "problem")}
    problem = SimpleNamespace(id=plain["problem"]) if plain["problem"] is not None else None
    return Node(**fields, problem=problem, children=[from_dict(child) for child in plain["children"]])


def demonstrate() -> None:
    """A scripted policy that reads its feedback and a scripted executor: the tree after each turn."""
    problem = SimpleNamespace(id="double x", prompt="Write f(x), twice x.", entry_point="f")
    answers = iter(["x + 2", "x * 3", "x * 2", "x + x", "x + 3", "2"])

    def sample(prompts: list[Messages], n: int) -> list[list[Completion]]:
        for prompt in prompts:
            print(f"sample {n} completions of: " + prompt[-1]["content"].replace("\n", " / "))
        return [[Completion("def f(x): return " + next(answers, "0")) for _ in range(n)] for _ in prompts]

    def execute(jobs: list) -> list:
        right = [code.endswith(("x * 2", "x + x")) for _, code in jobs]
        feedback = {"x + 2": "f(5) returned 7, expected 10", "x * 3": "f(1) returned 3, expected 2"}
        return [SimpleNamespace(reward=float(r), status="", public_passed=r, feedback=feedback.get(code[17:], "wrong"))
                for r, (_, code) in zip(right, jobs, strict=True)]

    (tree,) = build_trees([problem], sample, execute, turns=2, group_size=2)
    for node in walk(tree):  # MARS in one line for two turns; propagate.py has it for any tree
        node.credit = max([node.reward, *(child.reward for child in node.children)])
    print("\nBoth first attempts fail, and the feedback on one of them leads to a solution: that one earns the credit.\n")
    print(draw(tree))


if __name__ == "__main__":
    main()
