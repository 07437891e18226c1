"""Packing: the tokens that rows share are computed once.

The rows of a rollout tree share most of their tokens: siblings have the same prompt, and a prompt
of turn 2 holds an attempt of turn 1. `token_logprobs` computes such tokens again for every row.
`rows_logprobs` computes them once. Its numbers and gradients are the same but for rounding.

An example: three rows with the prompts x y, x y and x, and the completions a b, a c and d. Rows
that begin alike form a tree. It is written down depth first, one token a slot, so that the slots
right after a token hold the subtree below it:

    x -+- y --- a -+- b      slot       0  1  2  3  4  5      what each token sees
       |           +- c      token      x  y  a  b  c  d      x  x
       +- d                  position   0  1  2  3  3  1      y  x y
                             end        6  5  5  4  5  6      a  x y a
                                                              b  x y a b
    position: the depth in the tree                           c  x y a   c
    end: the first slot after the token's subtree             d  x         d

Slot q sees slot k if and only if q lies in the subtree of k:  k <= q < end[k].
A token sees its own row up to itself, at the positions of that row, and nothing else. So the model
computes for it what it would compute in the row alone.

In: a Hugging Face causal LM and rows. Out: log-probabilities; micro-batches.
Needs grpo.py and support/sampling.py.
"""

import warnings
from collections.abc import Sequence
from itertools import chain
from os.path import commonprefix  # it takes lists too
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo import Row, pad_rows, select_logprobs, token_logprobs
from support.sampling import autocast

CHUNK = 2**24  # logits that exist at a time: 64 MB in float32
BLOCK = 256  # slots that `sdpa_in_blocks` takes at a time
FASTEST = {"cuda": "flex_attention", "cpu": "sdpa_in_blocks"}  # attention of packed rows
REASONS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # model -> what `find_reason` found


def rows_logprobs(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> tuple[Tensor, ...]:
    """Log-probabilities of the completions and their mask, both (B, C), on the model's device.

    At most CHUNK logits exist at a time: the backward makes each chunk again.
    A model that packing is wrong for gets padded rows. One warning for each model says why.
    """
    ids, attention_mask, mask = [tensor.to(model.device) for tensor in pad_rows(rows, pad_id=0)]
    if why_padded(model):
        return token_logprobs(model, ids, attention_mask, mask, temperature), mask

    def chunk_logprobs(states: Tensor, targets: Tensor) -> Tensor:
        return select_logprobs(_logits(model, states), targets, temperature)

    states, logits, before = _forward(model, rows)
    slots = torch.tensor([*chain.from_iterable(before)], dtype=torch.long, device=model.device)
    # The backward of index_select, unlike that of states[slots], always adds in the same order.
    states = states[0].index_select(0, slots)
    targets = ids[:, ids.shape[1] - mask.shape[1] :][mask]  # row after row, as the slots are
    size = max(1, CHUNK // logits.shape[-1])
    chunks = zip(states.split(size), targets.split(size), strict=True)
    found = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    logp = torch.cat(found)  # masked_scatter fills the mask row after row, too
    return torch.zeros_like(mask, dtype=logp.dtype).masked_scatter(mask, logp), mask


def why_padded(model: Any) -> str:
    """Why the model gets padded rows, or "". It is found, and warned of, once for each model."""
    if model not in REASONS:
        reason = REASONS[model] = find_reason(model)
        if reason:
            warnings.warn(f"{type(model).__name__} gets padded rows: {reason}", stacklevel=3)
    return REASONS[model]


def find_reason(model: Any) -> str:
    """Why packing is wrong for the model, or "". It runs the model: every rank must call it."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    takes_masks = attention in ("sdpa", "sdpa_in_blocks", "eager", "flex_attention")
    if not takes_masks or not model._supports_attention_backend:
        return f"its attention ({attention}) takes no mask of four dimensions"

    layers = getattr(config, "layer_types", None)
    if not layers:
        layers = ["sliding_window"] if getattr(config, "sliding_window", None) else []
    others = ", ".join(sorted(set(layers) - {"full_attention"}))
    if others:
        return f"not every layer has full attention ({others})"

    with torch.no_grad(), autocast(model.device):
        states, logits, _ = _forward(model, [([0], [1])])  # two: one may be padding
        is_known = torch.equal(_logits(model, states[:, -1:]), logits)
    return "" if is_known else "it changes its logits in a way that is not known here"


def micro_batches(model: Any, rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Cut rows into batches, lists of row numbers, that compute at most `token_budget` tokens each.

    A batch computes the tokens of its rows' tree; if padded, rows * (longest prompt + longest
    completion). A longer row is a batch of its own.
    """
    packed = not why_padded(model)
    ids = [[*prompt, *completion] for prompt, completion in rows]

    def joined(batch: list[int], size: int, i: int) -> int:
        """The tokens of a batch that has `size` of them, once row i is in it."""
        if packed:  # row i adds what it does not share with the row before it
            before = ids[batch[-1]] if batch else []
            return size + len(ids[i]) - len(commonprefix([before, ids[i]]))
        together = [rows[j] for j in [*batch, i]]
        longest_prompt = max(len(prompt) for prompt, _ in together)
        longest_completion = max(len(completion) for _, completion in together)
        return len(together) * (longest_prompt + longest_completion)

    batches: list[list[int]] = []
    batch, size = [], 0
    for i in sorted(range(len(rows)), key=lambda i: ids[i]):  # rows that begin alike are neighbours
        if not batches or joined(batch, size, i) > token_budget:
            batch, size = [], 0
            batches.append(batch)
        size = joined(batch, size, i)
        batch.append(i)
    return batches


def lay_out(rows: Sequence[Row]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Rows as one tree: token, position and end of every slot; for every row, the slots that
    predict its completion tokens (each is the slot before its token).

    >>> x, y, a, b, c, d = range(6)
    >>> lay_out([([x, y], [a, b]), ([x, y], [a, c]), ([x], [d])])
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 1], [6, 5, 5, 4, 5, 6], [[1, 2], [1, 2], [0]])
    """
    ids = [[*prompt, *completion] for prompt, completion in rows]
    tokens, positions, ends = [], [], []
    before: list[list[int]] = [[] for _ in rows]
    last, path = [], []  # the row before, and its slots

    for i in sorted(range(len(rows)), key=lambda i: ids[i]):  # rows that begin alike are neighbours
        shared = len(commonprefix([last, ids[i]]))
        first = len(tokens)
        tokens += ids[i][shared:]
        positions += range(shared, len(ids[i]))
        ends += [0] * (len(tokens) - first)
        path = [*path[:shared], *range(first, len(tokens))]
        for slot in path:
            ends[slot] = len(tokens)  # so far
        before[i] = [path[place - 1] for place in range(len(rows[i][0]), len(ids[i]))]
        last = ids[i]
    return tokens, positions, ends, before


def _forward(model: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """The states that the output layer is given (1, T, width), the last slot's logits (1, 1, V),
    and for every row the slots that predict its completion tokens."""
    *columns, before = lay_out(rows)
    tokens, positions, ends = torch.tensor(columns, device=model.device)
    mask = _attention_mask(model, ends)
    # -1: the states of the last layer only. Older transformers return those of all layers.
    options = {"use_cache": False, "output_hidden_states": -1, "logits_to_keep": 1}
    output = model(tokens[None], attention_mask=mask, position_ids=positions[None], **options)
    return output.hidden_states[-1], output.logits, before


def _logits(model: Any, states: Tensor) -> Tensor:
    """What the output layer makes of its input; a few models scale it."""
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    return model.get_output_embeddings()(states) * factor / divisor


def _attention_mask(model: Any, ends: Tensor) -> Any:
    """Which slot sees which: T * T numbers, or for "flex_attention" blocks (CPU: no backward)."""

    def sees(_: Any, __: Any, q: Tensor, k: Tensor) -> Tensor:  # create_block_mask's signature
        return (k <= q) & (q < ends[k])

    if model.config.get_text_config()._attn_implementation == "flex_attention":
        return create_block_mask(sees, None, None, len(ends), len(ends), device=ends.device)

    # As numbers to add, (1, 1, T, T): every layer would make its own copy of a boolean mask.
    slots = torch.arange(len(ends), device=ends.device)
    hidden = ~sees(None, None, slots[:, None], slots)[None, None]
    return hidden.to(model.dtype) * torch.finfo(model.dtype).min


def sdpa_in_blocks(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attention in blocks: a block does not compute the slots after it, which it may not see."""
    if mask is None or query.shape[2] < key.shape[2]:  # nothing to skip: no mask, or a cache
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    found = []
    for start in range(0, query.shape[2], BLOCK):
        block, seen = slice(start, start + BLOCK), slice(start + BLOCK)
        parts = query[:, :, block], key[:, :, seen], value[:, :, seen], mask[:, :, block, seen]
        found.append(sdpa_attention_forward(module, *parts, **options)[0])
    return torch.cat(found, dim=1), None


AttentionInterface.register("sdpa_in_blocks", sdpa_in_blocks)
AttentionMaskInterface.register("sdpa_in_blocks", AttentionMaskInterface()["sdpa"])
