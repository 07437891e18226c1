"""The supervised start of real.py: a model learns to answer in our form, and to repair.

    make_start(base, folder, problems, epochs, rate)

In: a model and problems with references. Out: the folder of a model that imitates each reference,
and each repair of a planted fault, in the prompts and fences that murphy.py uses.
"""

# ruff: noqa: E402
import ast
import random
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import record  # noqa: F401  it makes the project importable
import torch

import executor
from support.packing import rows_logprobs
from support.problems import Problem
from support.run import load, save
from support.sampling import encode, load_model
from tree import first_messages, refinement_messages

LONGEST = 600  # tokens of a demonstration: a longer one needs more memory than it teaches
SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Div}
SWAPS |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And}


def plant_fault(code: str, rng: random.Random) -> str:
    """A program with one operator exchanged, or one number off by one; "" if it has neither.

    >>> plant_fault("def f(x): return x + y", random.Random(0)).split()[-3:]
    ['x', '-', 'y']
    """
    tree = ast.parse(code)
    places = []
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        is_compared = isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS
        has_operator = isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS
        if is_number or is_compared or has_operator:
            places.append(node)
    if not places:
        return ""
    node = rng.choice(places)
    if isinstance(node, ast.Constant):
        node.value += rng.choice([-1, 1])
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    else:
        node.op = SWAPS[type(node.op)]()
    return ast.unparse(tree)


def fenced(code: str) -> str:
    """A program as an answer.

    It is written by ast.unparse, so that style does not tell right programs from faulty ones.
    """
    return f"```python\n{ast.unparse(ast.parse(code))}\n```"


def demonstrations(problems: list[Problem], rng: random.Random) -> list[tuple[list, str]]:
    """Chats and the answers to imitate: each reference, and it again as the repair of a faulty one.

    A problem's chats are neighbours. They share a prompt, which packing computes once.
    """
    chats = {p.id: [(first_messages(p), fenced(p.reference))] for p in problems}
    faulty = [(problem, plant_fault(problem.reference, rng)) for problem in problems]
    faulty = [job for job in faulty if job[1]]
    for (problem, code), result in zip(faulty, executor.run_many(faulty), strict=True):
        if result.reward < 1:
            messages = refinement_messages(first_messages(problem), fenced(code), result.feedback)
            chats[problem.id].append((messages, fenced(problem.reference)))
    return list(chain.from_iterable(chats.values()))


def make_start(base: str, folder: Path, problems: list, epochs: int, rate: float) -> Path:
    """Imitate the demonstrations for some epochs; a stopped start goes on from its last epoch."""
    unfinished = folder.with_suffix(".unfinished")
    if folder.exists():
        return folder
    unfinished.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(base, torch.device("cpu"))
    rows = []
    for messages, answer in demonstrations(problems, random.Random(0)):
        ids = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
        rows.append((encode(tokenizer, messages), ids))
    long = [row for row in rows if len(row[0]) + len(row[1]) > LONGEST]
    rows = [row for row in rows if row not in long]
    batches = [rows[first : first + 8] for first in range(0, len(rows), 8)]
    learned = sum(len(ids) for _, ids in rows)
    print(
        f"start: {len(rows)} demonstrations, {learned} tokens to learn; {len(long)} were too long"
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    state = load(unfinished) or {"step": 0}
    if "model" in state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(state["step"], epochs):
        loss = imitate(model, optimizer, random.Random(epoch).sample(batches, len(batches)))
        print(f"start: epoch {epoch + 1} of {epochs}, loss {loss:.3f}", flush=True)
        weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(unfinished, {"step": epoch + 1, **weights})
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "checkpoint.pt").unlink(missing_ok=True)
    return unfinished.rename(folder)


def imitate(model: Any, optimizer: Any, batches: list) -> float:
    """Train for one epoch; returns the mean loss of its batches."""
    losses = []
    for rows in batches:
        logp, mask = rows_logprobs(model, rows)
        loss = -logp[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return mean(losses)
