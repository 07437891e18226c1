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

    At most CHUNK logits exist at a time: the backward computes each chunk's logits again.
    A model that packing is wrong for gets padded rows. One warning for each model says why.
    """
    ids, attention_mask, mask = [tensor.to(model.device) for tensor in pad_rows(rows, pad_id=0)]
    if why_padded(model):
        return token_logprobs(model, ids, attention_mask, mask, temperature), mask

    head = model.get_output_embeddings()  # its weights are whole here, see ranks.shard
    factor, divisor = logit_scale(model)  # the model's logits are head(states) * factor / divisor

    def chunk_logprobs(states: Tensor, targets: Tensor) -> Tensor:
        return select_logprobs(head(states), targets, temperature * divisor / factor)

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

    layers = set(getattr(config, "layer_types", None) or [])
    if not layers and getattr(config, "sliding_window", None):
        layers = {"sliding_window"}
    others = ", ".join(sorted(layers - {"full_attention"}))
    if others:
        return f"not every layer has full attention ({others})"

    factor, divisor = logit_scale(model)
    with torch.no_grad(), autocast(model.device):
        # Two tokens: the embedding of a padding token may be 0, and all logits then are, too.
        states, logits, _ = _forward(model, [([0], [1])])
        ours = model.get_output_embeddings()(states[:, -1:]) * factor / divisor
    return "" if ours.equal(logits) else "it changes its logits in a way that is not known here"


def logit_scale(model: Any) -> tuple[float, float]:
    """By what a model multiplies and divides its logits: Cohere does the one, Granite the other."""
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return factor, divisor


def micro_batches(model: Any, rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Cut rows into batches, lists of row numbers, that compute at most `token_budget` tokens each.

    A batch computes the tokens of its rows' tree; if padded, rows * (longest prompt + longest
    completion). A longer row is a batch of its own.
    """
    packed = not why_padded(model)
    batches: list[list[int]] = [[]]
    size = 0  # the tokens that the last batch computes
    for i, ids, shared in _neighbours(rows):
        batch = [*batches[-1], i]
        prompts, completions = zip(*[rows[j] for j in batch], strict=True)
        padded = len(batch) * (max(map(len, prompts)) + max(map(len, completions)))
        size = size + len(ids) - shared if packed else padded
        if size <= token_budget or len(batch) == 1:
            batches[-1] = batch
        else:  # row i begins a new batch, and shares nothing in it
            batches.append([i])
            size = len(ids)
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
    # -1 asks for the states of the last layer. Older versions of transformers 5 read it as True,
    # and return those of all layers.
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

    # Numbers that are added to the scores, (1, 1, T, T): 0 or the smallest one. Each layer would
    # turn a boolean mask into such numbers again.
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
