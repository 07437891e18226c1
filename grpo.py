"""GRPO's objective: log-probabilities of the completions under a model, and the clipped loss over them.

In: rows (prompt_ids, completion_ids) exactly as they were sampled, and one advantage a row. A row is one attempt of the
rollout tree under the prompt it was sampled from: prompt, earlier attempts and feedback carry no loss.
Out: a loss to call `.backward()` on, and what to log about it. First `pad_rows`, `token_logprobs` and `grpo_loss`, the
whole of it; then `rows_logprobs`, the same numbers with shared prefixes computed once.
The train / eval flag is the caller's: with dropout on, old and new log-probabilities differ before any update.

Needs torch and nothing else of this project: copy the file into yours. `python grpo.py` prints an example.
B rows, P and C the longest prompt and completion among them, V the vocabulary.
"""

import itertools
import os.path
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

Row = tuple[Sequence[int], Sequence[int]]  # (prompt_ids, completion_ids), as sampled
CHUNK = 2**24  # logits made at a time by rows_logprobs: 64 MB in float32


def pad_rows(rows: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay rows out as one batch: prompts padded on the left, completions on the right, so that every row's first
    completion token stands in column P.

    Returns input_ids (B, P+C) and attention_mask (B, P+C), both int64, and completion_mask (B, C), bool. The masks are
    made from lengths alone, so that a sampled end token is trained on even where pad_id is the same id.
    ValueError: no rows, or a row with an empty prompt (its first completion token would have nothing to follow).

    >>> [t.tolist() for t in pad_rows([([5], [7, 2]), ([3, 4], [2])], pad_id=2)]
    [[[2, 5, 7, 2], [3, 4, 2, 2]], [[0, 1, 1, 1], [1, 1, 1, 0]], [[True, True], [True, False]]]
    """
    if not rows or not all(len(prompt) for prompt, _ in rows):
        raise ValueError("every row needs at least one prompt token, and a batch at least one row")
    width, tail = max(len(p) for p, _ in rows), max(len(c) for _, c in rows)
    ids = torch.full((len(rows), width + tail), pad_id)
    mask = torch.zeros_like(ids)
    for i, (prompt, completion) in enumerate(rows):
        row = slice(width - len(prompt), width + len(completion))
        ids[i, row] = torch.tensor([*prompt, *completion])
        mask[i, row] = 1
    return ids, mask, mask[:, width:].bool()


def token_logprobs(
    model: Any, input_ids: Tensor, attention_mask: Tensor, completion_mask: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probability of every completion token under the distribution that it was sampled from, (B, C).

        logp[i, t] = log softmax( logits[i, P+t-1] / temperature )[ input_ids[i, P+t] ]       0 where the mask is False

    model: any Hugging Face causal LM. Only its last C+1 positions become logits, (B, C+1, V). The softmax is float32
    whatever the model's type (float64 for a float64 model): in bfloat16 it is off by several percent.
    ValueError: temperature not above 0 (greedy decoding has no distribution to score).
    """
    count = completion_mask.shape[1]
    # Positions count real tokens only. Without them, left padding shifts every learned position embedding.
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False,
                   logits_to_keep=count + 1).logits[:, -count - 1 : -1]  # position P+t-1 predicts token P+t
    completions = input_ids[:, input_ids.shape[1] - count :]
    return _select(logits, completions, temperature).masked_fill(~completion_mask.bool(), 0.0)


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    norm: str = "sequence",
    denominator: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective of a micro-batch: its share of the whole update's loss.

        rho = exp(logp - old_logp),  k3 = exp(d) - d - 1 with d = ref_logp - logp
        loss = sum over tokens of  w * ( -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A) + beta * k3 )

    logp, old_logp, ref_logp, mask: (B, C); advantages, weights: (B,). Only logp receives a gradient. old_logp=None
    means one update per batch: old is logp itself, rho is 1. Then, as the advantages of a group sum to 0, the loss is
    about 0 while its gradient is not: a loss of 0 does not mean that nothing is learned.

    w = 1 / (length of the row * denominator)   norm "sequence": mean over tokens, then over rows; denominator = rows
    w = 1 / denominator                         norm "token": all tokens alike; denominator = tokens
    w = 1 / denominator                         norm "constant" (Dr. GRPO): denominator = rows * a fixed length

    `denominator` is that of the WHOLE update (rows dropped before the forward included), never the micro-batch's: then
    the losses of the micro-batches add up to the same loss and gradient however the update is cut. None: this batch is
    the whole update. `weights` multiply the rows (ours: equal weight for every turn); count them in the denominator.

    stats: detached sums over the tokens, so they add up over micro-batches; `mean_stats` makes means of them. "clipped"
    counts tokens whose clipped branch is the active one (no gradient), not all those whose ratio is outside the band.
    A NaN in a real token shows in the loss. ValueError: shapes that do not fit, an unknown norm, beta without ref_logp.
    """
    shapes = {"old_logp": (old_logp, logp.shape), "ref_logp": (ref_logp, logp.shape), "mask": (mask, logp.shape),
              "advantages": (advantages, logp.shape[:1]), "weights": (weights, logp.shape[:1])}
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, to go with logp, not {tuple(tensor.shape)}")
    if norm not in ("sequence", "token", "constant"):
        raise ValueError(f'unknown norm {norm!r}: use "sequence", "token" or "constant"')
    if (norm == "constant" and denominator is None) or (denominator is not None and not denominator > 0):
        raise ValueError(f'norm "{norm}" needs a denominator above 0 (of the whole update), not {denominator}')
    if beta and ref_logp is None:
        raise ValueError("beta > 0 needs ref_logp, the reference model's log-probabilities")

    mask = mask.bool()  # padding is zeroed before exp: what stands there reaches neither the loss nor the gradient
    old = logp.detach() if old_logp is None else old_logp.detach()
    ratio = (logp - old).masked_fill(~mask, 0.0).exp()
    A = advantages.to(logp)[:, None]
    plain, clipped = ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A
    per_token = -torch.min(plain, clipped)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        d = (ref_logp.detach() - logp).masked_fill(~mask, 0.0)
        kl = torch.expm1(d) - d
        per_token = per_token + beta * kl if beta else per_token

    if denominator is None:
        denominator = len(logp) if norm == "sequence" else mask.sum().clamp(min=1)
    w = mask.to(logp) / denominator
    if norm == "sequence":
        w = w / mask.sum(1, keepdim=True).clamp(min=1)
    if weights is not None:
        w = w * weights.to(logp)[:, None]
    loss = (w * per_token).sum()

    with torch.no_grad():
        stats = {"loss": loss.detach(), "tokens": mask.sum(), "ratio": ratio[mask].sum(), "kl": kl[mask].sum(),
                 "clipped": (clipped < plain)[mask].sum(), "entropy": -logp[mask].sum()}
    return loss, stats


def mean_stats(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Stats of an update's micro-batches as floats: loss and tokens summed; mean ratio, kl, entropy (of the sampled
    tokens, -logp) and clipped (a share) over all its tokens."""
    total = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
    return {name: x if name in ("loss", "tokens") else x / max(total["tokens"], 1) for name, x in total.items()}


def rows_logprobs(
    model: Any, rows: Sequence[Row], pad_id: int, temperature: float = 1.0, packed: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and mask of rows, both (B, C), on the model's device: what `token_logprobs` of `pad_rows` says,
    but `packed` computes the tokens that rows have in common once, in one forward and one backward.

    Three rows, prompts x y, x y and x, completions a b, a c and d, are one tree and become one sequence:

        x -+- y - a -+- b      token     x  y  a  b  c  d      The mask shows a token its ancestors and itself, and
           |         +- c      parent    -  0  1  2  2  0      its position is its depth, so that it cannot tell the
           +- d                position  0  1  2  3  3  1      tree from its own row. Its parent's logits score it.

    Attention is computed along each row's path alone (`_PathMask`), not over all that the mask would hide. Of the logits, at
    most CHUNK numbers exist at a time: each chunk is made again in the backward. The mask of T tokens holds T * T numbers,
    64 MB in float32 for T = 4,096: `micro_batches` keeps T within a budget. A model for which all this would be wrong
    (`why_padded`) gets padded rows, and a warning says why.
    """
    device = next(model.parameters()).device
    ids, attention_mask, mask = (tensor.to(device) for tensor in pad_rows(rows, pad_id))
    reason, states = why_padded(model) if packed else "", None
    if packed and not reason:
        tokens, parents, paths, slots = _merge(rows)
        states = _last_states(model, tokens.to(device), paths)
        reason = "" if states is not None else "it changes its logits after the output layer"
    if reason:
        warnings.warn(f"{type(model).__name__} gets padded rows, shared prefixes are computed again: {reason}")
    if states is None:
        return token_logprobs(model, ids, attention_mask, mask, temperature), mask

    head = model.get_output_embeddings()
    chunks = slots.split(max(1, CHUNK // head.weight.shape[0]))
    scores = [checkpoint(lambda *of: _select(head(of[0]), of[1], temperature), states.index_select(0, parents[at].to(device)),
                         tokens[at].to(device), use_reentrant=False, preserve_rng_state=False) for at in chunks]
    flat = torch.cat(scores)  # row after row: the order in which masked_scatter fills the mask
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat), mask


def micro_batches(rows: Sequence[Row], token_budget: int, packed: bool = True) -> list[list[int]]:
    """Split rows into batches, lists of row numbers, that compute at most `token_budget` tokens each: unique tokens if
    packed (pass `not why_padded(model)`), else rows * (P + C). A longer row is a batch of its own; none is left out."""
    ids = [[*prompt, *completion] for prompt, completion in rows]
    batches: list[list[int]] = []
    size = 0  # of the last batch
    # Packed: in the order of their ids, neighbours share the most. Padded: of one length, rows need no padding.
    for i in sorted(range(len(rows)), key=ids.__getitem__ if packed else lambda i: -len(ids[i])):
        batch = [*batches[-1], i] if batches else [i]
        if packed:
            size += len(ids[i]) - len(os.path.commonprefix([ids[j] for j in batch[-2:]]))
        else:
            size = len(batch) * sum(max(len(rows[j][part]) for j in batch) for part in (0, 1))
        if len(batch) > 1 and size <= token_budget:
            batches[-1] = batch
        else:
            batches.append([i])
            size = len(ids[i])
    return batches


def why_padded(model: Any) -> str:
    """Why rows must not be packed for this model, or "": it attends fully in every layer, and takes a 4-D mask."""
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", "eager") or not model._supports_attention_backend:
        return f"its attention ({config._attn_implementation}) takes no mask of four dimensions"
    windows = {name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None)}
    partial = set(getattr(config, "layer_types", None) or windows) - {"full_attention"}
    return f"not every layer has full attention ({', '.join(sorted(partial))})" if partial else ""


def _merge(rows: Sequence[Row]) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]], Tensor]:
    """Rows as one tree: tokens (T,), parents (T,), each row's path from the root with how many of its last slots no
    earlier row had, and the slots of the rows' completion tokens, row after row."""
    slot_of: dict[tuple[int, int], int] = {}  # (parent's slot, token) -> slot; parents come before their children
    slots: list[int] = []
    paths = []
    for prompt, completion in rows:
        path, before = [-1], len(slot_of)
        for token in (*prompt, *completion):
            path.append(slot_of.setdefault((path[-1], token), len(slot_of)))
        slots += path[1 + len(prompt) :]
        paths.append((len(slot_of) - before, torch.tensor(path[1:])))
    parents, tokens = (torch.tensor(column) for column in zip(*slot_of))
    return tokens, parents, paths, torch.tensor(slots, dtype=torch.long)


def _last_states(model: Any, tokens: Tensor, paths: list[tuple[int, Tensor]]) -> Tensor | None:
    """What reaches the output layer at each token, (T, hidden); None if the model does not return that layer's result
    as it is. The layer is shown the first position only, so that no other logits are made."""
    visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for new, path in paths:
        visible[path[len(path) - new :, None], path] = torch.ones(new, len(path), dtype=torch.bool).tril(len(path) - new)
    visible = visible.to(tokens.device)
    head, seen = model.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]) or args[0][:, :1])
    mask = torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
    mask = mask[None, None].as_subclass(_PathMask)
    ends = itertools.accumulate(new for new, _ in paths)
    mask.parts = [(slice(end - new, end), path.to(tokens.device)) for end, (new, path) in zip(ends, paths) if new]
    try:
        logits = model(tokens[None], attention_mask=mask, position_ids=visible.sum(1)[None] - 1, use_cache=False).logits
    finally:
        hook.remove()
    with torch.no_grad():
        same = torch.equal(head(seen[0][:, :1]), logits)
    return seen[0][0] if same else None


class _PathMask(Tensor):
    """A mask (1, 1, T, T) with which torch computes, in place of a model's attention over all T tokens, that of each row's
    new tokens over their own path: it hides all else from them. To other attention (`eager`) it is a mask like any."""

    parts: list[tuple[slice, Tensor]]  # per row: the slots of its new tokens, and its path

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        mask = kwargs.get("attn_mask")
        with torch._C.DisableTorchFunctionSubclass():
            if function is not scaled_dot_product_attention or mask is None or args[0].shape[2] != mask.shape[2]:
                return function(*args, **kwargs)

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # each (1, heads, T, width)
                hides = mask.as_subclass(Tensor)
                return torch.cat([function(query[:, :, new], key[:, :, path], value[:, :, path],
                                           **kwargs | {"attn_mask": hides[:, :, new][..., path]}) for new, path in mask.parts], 2)

            # Made again in the backward, or every row's copy of the shared keys and values would be kept until then.
            return checkpoint(attend, *args[:3], use_reentrant=False, preserve_rng_state=kwargs.get("dropout_p", 0.0) > 0)


def _select(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `ids`: (..., V) and (...) -> (...), in float32 or better."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to score tokens, not {temperature}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


def _example() -> None:
    """The clip and the KL penalty on four tokens, one a row."""
    print("A token's probability is rho times its old one. The clip (0.2) ends the gradient of a token that already\n"
          "went far enough the way its advantage A asks for; one that went the wrong way keeps it.\n\n"
          "  rho   A    loss  gradient (by logp)")
    for rho, A in ((1.5, 1.0), (1.5, -1.0), (0.5, 1.0), (0.5, -1.0)):
        logp = torch.tensor([[rho]]).log().requires_grad_()
        loss, stats = grpo_loss(logp, torch.zeros(1, 1), torch.tensor([A]), torch.ones(1, 1))
        loss.backward()
        clipped = "  clipped" if stats["clipped"] else ""
        print(f"  {rho:.1f}  {A:+.0f}   {loss:+.2f}  {logp.grad.item():+.2f}{clipped}")
    print("\nThe KL penalty k3 pulls towards the reference and is never negative (beta = 1, no advantage):\n\n"
          "  reference - logp    loss  gradient")
    for d in (0.6931, 0.0, -0.6931):
        logp = torch.zeros(1, 1, requires_grad=True)
        loss, _ = grpo_loss(logp, None, torch.zeros(1), torch.ones(1, 1), beta=1.0, ref_logp=torch.full((1, 1), d))
        loss.backward()
        print(f"  {d:+16.4f}  {loss:.4f}  {logp.grad.item() + 0.0:+.2f}")


if __name__ == "__main__":
    _example()
