"""Packing: the tokens that rows share are computed once.

The rows of one rollout tree share most of their tokens. Siblings have the same prompt, and a prompt
of turn 2 holds a whole attempt of turn 1. `token_logprobs` computes such tokens again for every
row. `rows_logprobs` computes them once and gets the same numbers and gradients.

An example: three rows with the prompts x y, x y and x, and the completions a b, a c and d. Rows
that begin alike are one tree. It is written down depth first, one token a slot. So the slots right
after a token hold the subtree below it:

    x -+- y --- a -+- b      slot       0  1  2  3  4  5      what each token sees
       |           +- c      token      x  y  a  b  c  d      x  x
       +- d                  position   0  1  2  3  3  1      y  x y
                             end        6  5  5  4  5  6      a  x y a
                                                              b  x y a b
    position: the depth in the tree                           c  x y a   c
    end: the first slot after the token's subtree             d  x         d

Slot q sees slot k if and only if q lies in the subtree of k:  k <= q < end[k].

So a token sees its own row up to itself, at the positions of that row, and nothing else. The model
computes for it what it would compute in that row alone.

In: a Hugging Face causal LM and rows. Out: log-probabilities; rows cut into micro-batches.
Needs torch and grpo.py. `python -m pytest tests/test_packing.py` compares both ways.
"""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix  # it takes lists too
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from grpo import Row, pad_rows, select_logprobs, token_logprobs

CHUNK = 2**24  # logits that exist at a time: 64 MB in float32
OTHER_LOGITS = "it changes its logits in a way that is not known here"
PADDED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # models that got padded rows, and why


def rows_logprobs(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> tuple[Tensor, ...]:
    """Log-probabilities of the completions and their mask, both (B, C), on the model's device.

    What `token_logprobs` says of `pad_rows`, gradients too. At most CHUNK logits exist at a time;
    the backward makes each chunk again. For T tokens in the tree, the mask holds T * T numbers with
    "sdpa" and "eager" attention, and only its non-empty blocks with "flex_attention" (which has no
    backward on the CPU). `micro_batches` keeps T small.
    A model that packing is wrong for gets padded rows. One warning for each model says why.
    """
    device = next(model.parameters()).device
    ids, attention_mask, mask = (tensor.to(device) for tensor in pad_rows(rows, pad_id=0))

    logp = None
    reason = why_padded(model)
    if not reason:
        logp = _packed_logprobs(model, rows, temperature, device)
        reason = OTHER_LOGITS if logp is None else ""
    if reason and PADDED.get(model) != reason:
        PADDED[model] = reason
        warnings.warn(f"{type(model).__name__} gets padded rows: {reason}", stacklevel=2)
    if logp is None:
        return token_logprobs(model, ids, attention_mask, mask, temperature), mask
    return torch.zeros(mask.shape).to(logp).masked_scatter(mask, logp), mask  # row after row


def lay_out(rows: Sequence[Row]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Rows as one tree: token, position and end of every slot, and the slots of every row.

    >>> x, y, a, b, c, d = range(6)
    >>> lay_out([([x, y], [a, b]), ([x, y], [a, c]), ([x], [d])])[:3]
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 1], [6, 5, 5, 4, 5, 6])
    """
    ids = [[*prompt, *completion] for prompt, completion in rows]
    tokens: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = [[] for _ in rows]
    last: list[int] = []  # the row before
    path: list[int] = []  # its slots

    for i in sorted(range(len(rows)), key=ids.__getitem__):  # rows that begin alike are neighbours
        shared = len(commonprefix([last, ids[i]]))
        for slot in path[shared:]:
            ends[slot] = len(tokens)
        path = [*path[:shared], *range(len(tokens), len(tokens) + len(ids[i]) - shared)]
        tokens += ids[i][shared:]
        positions += range(shared, len(ids[i]))
        ends += [-1] * (len(ids[i]) - shared)  # not known yet
        last = ids[i]
        paths[i] = path

    ends = [len(tokens) if end == -1 else end for end in ends]
    return tokens, positions, ends, paths


def micro_batches(model: Any, rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Cut rows into batches, lists of row numbers, that compute at most `token_budget` tokens each.

    A batch computes the tokens of its tree, or rows * (P+C) if the model gets padded rows. A row
    longer than the budget is a batch of its own. Every row is in one batch.
    """
    packed = not why_padded(model)
    ids = [[*prompt, *completion] for prompt, completion in rows]
    order = sorted(range(len(rows)), key=ids.__getitem__)  # neighbours share the most
    if not packed:
        order.sort(key=lambda i: -len(ids[i]))  # rows of one length need little padding

    def computed(batch: list[int]) -> int:
        if not packed:
            P = max(len(rows[i][0]) for i in batch)
            C = max(len(rows[i][1]) for i in batch)
            return len(batch) * (P + C)
        shared = [len(commonprefix([ids[i], ids[j]])) for i, j in pairwise(batch)]
        return sum(len(ids[i]) for i in batch) - sum(shared)

    batches: list[list[int]] = []
    for i in order:
        if batches and computed([*batches[-1], i]) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def why_padded(model: Any) -> str:
    """Why the model gets padded rows; "" if it can be packed: full attention, and a mask of ours."""
    if PADDED.get(model) == OTHER_LOGITS:
        return OTHER_LOGITS
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if (
        attention not in ("sdpa", "eager", "flex_attention")
        or not model._supports_attention_backend
    ):
        return f"its attention ({attention}) takes no mask of four dimensions"

    windows = [name for name in ("sliding_window", "attention_chunk_size") if hasattr(config, name)]
    partial = {name for name in windows if getattr(config, name)}
    if getattr(config, "layer_types", None):
        partial = set(config.layer_types) - {"full_attention"}
    return f"not every layer has full attention ({', '.join(sorted(partial))})" if partial else ""


def _packed_logprobs(model: Any, rows: Sequence[Row], temperature: float, device: Any) -> Any:
    """Log-probabilities of all completion tokens, row after row; None for an unknown kind of model."""
    tokens, positions, ends, paths = lay_out(rows)
    output = model(
        torch.tensor([tokens], device=device),
        attention_mask=_attention_mask(model, torch.tensor(ends, device=device)),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        output_hidden_states=-1,  # the last ones alone; older transformers return all of them
        logits_to_keep=1,
    )
    states = output.hidden_states[-1]
    with torch.no_grad():
        if not torch.equal(_logits(model, states[:, -1:]), output.logits):
            return None

    slots: list[int] = []  # of the tokens that predict a completion token: those before it
    targets: list[int] = []
    for (prompt, completion), path in zip(rows, paths, strict=True):
        slots += path[len(prompt) - 1 : -1]
        targets += completion
    # The backward of index_select, unlike that of states[slots], adds in the same order every time.
    states = states[0].index_select(0, torch.tensor(slots, dtype=torch.long, device=device))

    def score(states: Tensor, targets: Tensor) -> Tensor:
        return select_logprobs(_logits(model, states), targets, temperature)

    size = max(1, CHUNK // model.get_output_embeddings().weight.shape[0])
    chunks = zip(
        states.split(size),
        torch.tensor(targets, dtype=torch.long).to(device).split(size),
        strict=True,
    )
    again = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(score, *chunk, **again) for chunk in chunks])


def _attention_mask(model: Any, ends: Tensor) -> Any:
    """Which slot sees which, in the form that the model's attention takes."""

    def sees(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k])

    attention = model.config.get_text_config()._attn_implementation
    if attention == "flex_attention":
        return create_block_mask(sees, None, None, len(ends), len(ends), device=ends.device)

    slots = torch.arange(len(ends), device=ends.device)
    visible = sees(None, None, slots[:, None], slots)[None, None]  # (1, 1, T, T)
    if attention == "sdpa":
        return visible
    lowest = torch.finfo(model.dtype).min
    return torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, lowest)


def _logits(model: Any, states: Tensor) -> Tensor:
    """The output layer, and what some models do with its logits."""
    logits = model.get_output_embeddings()(states)
    config = model.config.get_text_config()
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None) is not None:  # Gemma
        cap = config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits
