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

In: a Hugging Face causal LM and rows. Out: log-probabilities; micro-batches. Needs grpo.py.
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

CHUNK = 2**24  # logits that exist at a time: 64 MB in float32
BLOCK = 256  # slots that `sdpa_in_blocks` takes at a time
FASTEST = {"cuda": "flex_attention", "cpu": "sdpa_in_blocks"}  # attention of packed rows
PADDED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # model -> the reason it was warned of
OTHER_LOGITS = "it changes its logits in a way that is not known here"


def rows_logprobs(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> tuple[Tensor, ...]:
    """Log-probabilities of the completions and their mask, both (B, C), on the model's device.

    At most CHUNK logits exist at a time: the backward makes each chunk again.
    A model that packing is wrong for gets padded rows. One warning for each model says why.
    """
    padded = [tensor.to(model.device) for tensor in pad_rows(rows, pad_id=0)]
    ids, attention_mask, mask = padded
    reason = why_padded(model)
    if not reason:
        targets = ids[:, ids.shape[1] - mask.shape[1] :][mask]  # row after row
        logp = _packed_logprobs(model, rows, targets, temperature)
        if logp is not None:  # masked_scatter fills the mask in the same order
            return torch.zeros_like(mask, dtype=logp.dtype).masked_scatter(mask, logp), mask
        reason = OTHER_LOGITS

    if PADDED.get(model) != reason:
        PADDED[model] = reason
        warnings.warn(f"{type(model).__name__} gets padded rows: {reason}", stacklevel=2)
    return token_logprobs(model, ids, attention_mask, mask, temperature), mask


def why_padded(model: Any) -> str:
    """Why the model gets padded rows; "" if all its layers can take our mask."""
    if PADDED.get(model) == OTHER_LOGITS:  # only a forward pass can find this out
        return OTHER_LOGITS
    config = model.config.get_text_config()
    attention = config._attn_implementation
    takes_masks = attention in ("sdpa", "sdpa_in_blocks", "eager", "flex_attention")
    if not takes_masks or not model._supports_attention_backend:
        return f"its attention ({attention}) takes no mask of four dimensions"

    layers = getattr(config, "layer_types", None)
    if not layers:
        layers = ["sliding_window"] if getattr(config, "sliding_window", None) else []
    others = ", ".join(sorted(set(layers) - {"full_attention"}))
    return f"not every layer has full attention ({others})" if others else ""


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
    for i in sorted(range(len(rows)), key=lambda i: ids[i]):  # neighbours share the most
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

    for i in sorted(range(len(rows)), key=lambda i: ids[i]):  # that begin alike are neighbours
        shared = len(commonprefix([last, ids[i]]))
        first = len(tokens)
        tokens += ids[i][shared:]
        positions += range(shared, len(ids[i]))
        ends += [0] * (len(tokens) - first)
        path = [*path[:shared], *range(first, len(tokens))]
        for slot in path:
            ends[slot] = len(tokens)  # so far
        before[i] = path[len(rows[i][0]) - 1 : -1]
        last = ids[i]
    return tokens, positions, ends, before


def _packed_logprobs(model: Any, rows: Any, targets: Tensor, temperature: float) -> Tensor | None:
    """Log-probabilities of the tokens `targets`; None if the model does more to its logits."""
    *columns, before = lay_out(rows)
    tokens, positions, ends = torch.tensor(columns, device=model.device)
    mask = _attention_mask(model, ends)
    # -1: the states of the last layer only. Older transformers return those of all layers.
    options = {"use_cache": False, "output_hidden_states": -1, "logits_to_keep": 1}
    output = model(tokens[None], attention_mask=mask, position_ids=positions[None], **options)
    states = output.hidden_states[-1]  # (1, T, width), what the output layer is given

    # A few models scale their logits. If we cannot make the last ones again, packing is wrong here.
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    if not torch.equal(head(states[:, -1:]) * factor / divisor, output.logits):
        return None

    def chunk_logprobs(states: Tensor, targets: Tensor) -> Tensor:
        # select_logprobs divides by the temperature, so the scale goes in there.
        return select_logprobs(head(states), targets, temperature * divisor / factor)

    slots = torch.tensor([*chain.from_iterable(before)], dtype=torch.long, device=model.device)
    # The backward of index_select, unlike that of states[slots], always adds in the same order.
    states = states[0].index_select(0, slots)
    size = max(1, CHUNK // output.logits.shape[-1])
    chunks = zip(states.split(size), targets.split(size), strict=True)
    found = [checkpoint(chunk_logprobs, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(found)


def _attention_mask(model: Any, ends: Tensor) -> Any:
    """Which slot sees which: T * T numbers, or for "flex_attention" blocks (CPU: no backward)."""

    def sees(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends[k])

    if model.config.get_text_config()._attn_implementation == "flex_attention":
        return create_block_mask(sees, None, None, len(ends), len(ends), device=ends.device)

    # As numbers to add, (1, 1, T, T): every layer would make its own copy of a boolean mask.
    slots = torch.arange(len(ends), device=ends.device)
    hidden = ~sees(None, None, slots[:, None], slots)[None, None]
    return hidden.to(model.dtype) * torch.finfo(model.dtype).min


def sdpa_in_blocks(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """The attention "sdpa_in_blocks": a block of slots skips all later ones, which are hidden."""
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
