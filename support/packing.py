"""Packing: the tokens that rows share are computed once.

The rows of a rollout tree share most of their tokens: siblings have the same prompt, and a prompt
of turn 2 holds an attempt of turn 1. `rows_logprobs` gives the numbers and gradients of
`token_logprobs`, but for rounding, and computes such tokens once.

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
So a token sees its own row up to itself, at that row's positions: as if the row were alone.

In: a Hugging Face causal LM and rows. Out: log-probabilities; micro-batches.
Needs grpo.py and support/sampling.py.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from os.path import commonprefix  # it takes lists too
from typing import Any

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


def rows_logprobs(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> tuple[Tensor, ...]:
    """Log-probabilities of the completions and their mask, both (B, C), on the model's device.

    At most CHUNK logits exist at a time: the backward computes each chunk's logits again.
    A model that packing is wrong for gets padded rows.
    """
    ids, attention_mask, mask = [tensor.to(model.device) for tensor in pad_rows(rows, pad_id=0)]
    if not can_pack(model):
        return token_logprobs(model, ids, attention_mask, mask, temperature), mask

    head = model.get_output_embeddings()  # its weights are whole here, see ranks.shard

    def chunk_logprobs(states: Tensor, targets: Tensor) -> Tensor:
        return select_logprobs(head(states), targets, temperature)

    states, logits, predictors = _forward(model, rows)
    # On a CPU the backward of index_select adds in the same order each time; that of
    # states[predictors] does not.
    states = states[0].index_select(0, predictors)
    prompt_width = ids.shape[1] - mask.shape[1]
    targets = ids[:, prompt_width:][mask]  # row after row, as the states are
    size = max(1, CHUNK // logits.shape[-1])
    chunks = zip(states.split(size), targets.split(size), strict=True)
    found = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    logp = torch.cat(found)  # masked_scatter fills the mask row after row, too
    return torch.zeros_like(mask, dtype=logp.dtype).masked_scatter(mask, logp), mask


@lru_cache(maxsize=2)  # a run has two models: the one that learns and its reference
def can_pack(model: Any) -> bool:
    """Whether packing is right for the model. It runs the model: every rank must call it."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or [])
    if not layers and getattr(config, "sliding_window", None):
        layers = {"sliding_attention"}

    if not model._supports_attention_backend:
        reason = "its attention takes no mask of four dimensions"
    elif layers - {"full_attention"}:
        reason = "not every layer has full attention"
    else:
        with torch.no_grad(), autocast(model.device):
            # Two tokens: the embedding of a padding token may be 0, and all logits then are, too.
            states, logits, _ = _forward(model, [([0], [1])])
            ours = model.get_output_embeddings()(states[:, -1:])
        if ours.equal(logits):
            return True
        reason = "it changes the logits that its output layer makes"

    warnings.warn(f"{type(model).__name__} gets padded rows: {reason}", stacklevel=3)
    return False


def micro_batches(model: Any, rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Cut rows into batches, lists of row numbers, that compute at most `token_budget` tokens each.

    A batch computes the tokens of its rows' tree; if padded, rows * (longest prompt + longest
    completion). A longer row is a batch of its own.
    """
    packed = can_pack(model)
    batches: list[list[int]] = [[]]
    size = 0  # the tokens that the last batch computes
    for i, ids, shared in _neighbours(rows):
        if packed:
            size += len(ids) - shared
        else:
            prompts, completions = zip(*[rows[j] for j in [*batches[-1], i]], strict=True)
            size = len(prompts) * (max(map(len, prompts)) + max(map(len, completions)))
        if size > token_budget and batches[-1]:
            batches.append([])
            size = len(ids)  # row i shares nothing in its new batch
        batches[-1].append(i)
    return batches if rows else []


def lay_out(rows: Sequence[Row]) -> tuple[list[int], ...]:
    """Rows as one tree: token, position and end of every slot; and, row after row, the slots that
    predict the completion tokens: for each the slot of the token before it in its row.

    >>> x, y, a, b, c, d = range(6)
    >>> lay_out([([x, y], [a, b]), ([x, y], [a, c]), ([x], [d])])
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 1], [6, 5, 5, 4, 5, 6], [1, 2, 1, 2, 0])
    """
    tokens, positions, ends = [], [], []
    path: list[int] = []  # the slots of a row, from its first token to its last
    predictors: list[list[int]] = [[] for _ in rows]
    for i, ids, shared in _neighbours(rows):
        first = len(tokens)
        tokens += ids[shared:]
        positions += range(shared, len(ids))
        ends += [0] * (len(tokens) - first)
        path = [*path[:shared], *range(first, len(tokens))]
        for slot in path:
            ends[slot] = len(tokens)  # so far
        predictors[i] = path[len(rows[i][0]) - 1 : -1]
    return tokens, positions, ends, [slot for slots in predictors for slot in slots]


def _neighbours(rows: Sequence[Row]) -> Iterator[tuple[int, list[int], int]]:
    """For each row its number, its tokens, and with how many of them the row before also begins.

    The rows are sorted, so that those that begin alike are neighbours.
    """
    last: list[int] = []
    for ids, i in sorted(([*row[0], *row[1]], i) for i, row in enumerate(rows)):
        yield i, ids, len(commonprefix([last, ids]))
        last = ids


def _forward(model: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """The states that the output layer is given (1, T, width), the last slot's logits (1, 1, V),
    and the slots that predict the completion tokens (N)."""
    columns = [torch.tensor(column, device=model.device).long() for column in lay_out(rows)]
    tokens, positions, ends, predictors = columns
    mask = _attention_mask(model, ends)
    # -1: of the last layer only. Older versions of transformers 5 return the states of all layers.
    options = {"use_cache": False, "output_hidden_states": -1, "logits_to_keep": 1}
    output = model(tokens[None], attention_mask=mask, position_ids=positions[None], **options)
    return output.hidden_states[-1], output.logits, predictors


def _attention_mask(model: Any, ends: Tensor) -> Any:
    """Which slot sees which: a BlockMask for FlexAttention, else T * T numbers. (On a CPU
    FlexAttention has no backward.)"""

    def sees(_: Any, __: Any, q: Tensor, k: Tensor) -> Tensor:  # create_block_mask's signature
        return (k <= q) & (q < ends[k])

    if model.config.get_text_config()._attn_implementation == "flex_attention":
        return create_block_mask(sees, None, None, len(ends), len(ends), device=ends.device)

    # 0 or the smallest number, (1, 1, T, T). Each layer would turn a boolean mask into these again.
    slots = torch.arange(len(ends), device=ends.device)
    hidden = ~sees(None, None, slots[:, None], slots)[None, None]
    return hidden.to(model.dtype) * torch.finfo(model.dtype).min


def sdpa_in_blocks(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attention for BLOCK queries at a time: the keys behind them are left out, as all of them are
    hidden by the mask."""
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
