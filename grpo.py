"""GRPO's objective: log-probabilities of the completions under a model, and the clipped loss over them.

In: rows (prompt_ids, completion_ids) exactly as they were sampled, and one advantage a row.
Out: a loss to call `.backward()` on, and what to log about it. A row is one attempt of the rollout tree under the prompt
it was sampled from; prompt, earlier attempts and feedback carry no loss. Nothing here re-tokenises text, reads a pad
token's value, or touches the model's train / eval flag: dropout in train mode makes the ratio wander off 1, so the
caller scores old, reference and new log-probabilities with dropout off.

Needs torch and nothing else of this project: copy the file into yours. `python grpo.py` prints an example.
B rows, P and C the longest prompt and completion among them, V the vocabulary.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
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

    model: any Hugging Face causal LM. Only the C+1 last positions ever become logits (B, C+1, V). The softmax is done in
    float32 whatever the model's type (float64 for a float64 model): in bfloat16 it is off by several percent.
    ValueError: temperature not above 0 (greedy decoding has no distribution to score).
    """
    _check_temperature(temperature)
    count = completion_mask.shape[1]
    # Positions count real tokens only. Without them, left padding shifts every learned position embedding.
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False,
                   logits_to_keep=count + 1).logits[:, -count - 1 : -1]  # position P+t-1 predicts token P+t
    return _select(logits, input_ids[:, input_ids.shape[1] - count :], temperature).masked_fill(~completion_mask.bool(), 0.0)


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

    logp, old_logp, ref_logp, mask: (B, C); advantages, weights: (B,). Only logp receives a gradient. old_logp=None means
    one update per batch: old is logp itself, rho is 1. With rho = 1 and advantages that sum to 0 the loss is about 0
    while its gradient is not: a loss of 0 does not mean that nothing is learned.

    w = 1 / (length of the row * denominator)   norm "sequence": mean over tokens, then over rows; denominator = rows
    w = 1 / denominator                         norm "token": all tokens alike; denominator = tokens
    w = 1 / denominator                         norm "constant" (Dr. GRPO): denominator = rows * a fixed length

    `denominator` is that of the WHOLE update (rows dropped before the forward included), never the micro-batch's: then
    the losses of the micro-batches add up to the same loss and gradient however the update is cut. None: this batch is
    the whole update. `weights` multiply the rows (ours: equal weight for every turn); count them in the denominator.

    stats: detached sums over the tokens, so they add up over micro-batches; `mean_stats` makes means of them. "clipped"
    counts tokens whose clipped branch is the active one (no gradient), not all those whose ratio is outside the band.
    ValueError: shapes that do not fit, an unknown norm, beta without ref_logp. NaN or inf in a real token shows in loss.
    """
    mask = mask.bool()
    for name, tensor in (("old_logp", old_logp), ("ref_logp", ref_logp), ("mask", mask)):
        if tensor is not None and tensor.shape != logp.shape:
            raise ValueError(f"{name} must have the shape of logp, {tuple(logp.shape)}, not {tuple(tensor.shape)}")
    for name, tensor in (("advantages", advantages), ("weights", weights)):
        if tensor is not None and tensor.shape != logp.shape[:1]:
            raise ValueError(f"{name} must hold one number a row, ({len(logp)},), not {tuple(tensor.shape)}")
    if norm not in ("sequence", "token", "constant"):
        raise ValueError(f'unknown norm {norm!r}: use "sequence", "token" or "constant"')
    if norm == "constant" and denominator is None:
        raise ValueError('norm "constant" needs denominator = rows of the whole update * a fixed length')
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator must be above 0, not {denominator}")
    if beta and ref_logp is None:
        raise ValueError("beta > 0 needs ref_logp, the reference model's log-probabilities")

    # Padding is zeroed before exp, so that whatever stands there reaches neither the loss nor the gradient.
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
    """Log-probabilities (B, C) and mask (B, C) of rows, as `token_logprobs` of `pad_rows` gives them, on the model's
    device; with `packed`, each token that rows have in common is computed once, in one forward and one backward.

    Three rows, prompts x x, completions a b, a c and d, become the tree on the left: one sequence in depth-first order.

        x - x - a - b          token     x  x  a  b  c  d      The mask shows each token its ancestors and itself, and
                |   `- c       position  0  1  2  3  3  2      its position is its depth: it sees what it would see in
                `- d           parent    -  0  1  2  2  1      a row of its own. Its parent's logits score it.

    Only token slots of completions become logits, CHUNK values at a time, made again in the backward: [tokens, V] is
    never held. A model that this would be wrong for (`why_padded`) gets padded rows instead, which is said once.
    T unique tokens need a mask of T * T numbers: 64 MB in float32 for T = 4,096. `micro_batches` keeps T within a budget.
    """
    _check_temperature(temperature)
    device = next(model.parameters()).device
    reason = why_padded(model) if packed else ""
    if packed and not reason:
        tokens, parents, visible, slots = _merge(rows)
        hidden = _hidden_states(model, tokens.to(device), visible.to(device))
        reason = "" if hidden is not None else "it changes its logits after the output layer"
    if reason:
        warnings.warn(f"{type(model).__name__}: rows are padded, shared prefixes computed again, for {reason}")
    if not packed or reason:
        ids, attention_mask, mask = (t.to(device) for t in pad_rows(rows, pad_id))
        return token_logprobs(model, ids, attention_mask, mask, temperature), mask

    scored = sorted(set(sum(slots, [])))  # a token may be in several completions: it is scored once
    column = {slot: i for i, slot in enumerate(scored)}
    head = model.get_output_embeddings()

    def score(states: Tensor, ids: Tensor) -> Tensor:
        return _select(head(states), ids, temperature)

    size = max(1, CHUNK // head.weight.shape[0])
    pieces = [checkpoint(score, hidden[parents[part].to(device)], tokens[part].to(device), use_reentrant=False,
                         preserve_rng_state=False) for part in torch.tensor(scored).split(size)]
    flat = torch.cat(pieces)[torch.tensor([column[slot] for row in slots for slot in row], device=device)]
    lengths = torch.tensor([len(row) for row in slots], device=device)
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    return torch.zeros(mask.shape, dtype=flat.dtype, device=device).masked_scatter(mask, flat), mask


def micro_batches(rows: Sequence[Row], token_budget: int, packed: bool = True) -> list[list[int]]:
    """Split rows into batches (lists of row numbers) of at most `token_budget` computed tokens each: unique tokens when
    packed, rows times (P + C) when padded. A longer row gets a batch of its own; every row is in exactly one batch."""
    ids = [[*prompt, *completion] for prompt, completion in rows]
    batches: list[list[int]] = []
    if packed:
        total, last = 0, []
        for i in sorted(range(len(rows)), key=ids.__getitem__):  # neighbours in this order share the most
            new = len(ids[i]) - _shared(last, ids[i])
            if not batches or total + new > token_budget:
                batches.append([])
                total, new = 0, len(ids[i])
            batches[-1].append(i)
            total, last = total + new, ids[i]
    else:
        for i in sorted(range(len(rows)), key=lambda i: -len(ids[i])):
            batch = [*batches[-1], i] if batches else []
            width = sum(max((len(rows[j][part]) for j in batch), default=0) for part in (0, 1))
            if batch and len(batch) * width <= token_budget:
                batches[-1].append(i)
            else:
                batches.append([i])
    return batches


def why_padded(model: Any) -> str:
    """Why rows must not be packed for this model, or "" where they may: it attends fully in every layer, honours a mask
    of four dimensions, and its output layer's result is its logits."""
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attention {config._attn_implementation!r} takes no mask of four dimensions"
    kinds = getattr(config, "layer_types", None)
    windows = [name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None)]
    if set(kinds) != {"full_attention"} if kinds else windows:
        return f"not every layer has full attention ({', '.join(sorted(set(kinds)) if kinds else windows)})"
    return ""


def _merge(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
    """Rows as one tree: tokens (T,), parents (T,), visible (T, T) bool, and the slots of each row's completion."""
    tokens: list[int] = []
    parents: list[int] = []
    slots: list[list[int]] = [[]] * len(rows)
    ids = [[*prompt, *completion] for prompt, completion in rows]
    path, last = [], []
    for i in sorted(range(len(rows)), key=ids.__getitem__):  # in this order a row's longest match is the one before it
        path = path[: _shared(last, ids[i])]
        for token in ids[i][len(path) :]:
            parents.append(path[-1] if path else -1)
            path.append(len(tokens))
            tokens.append(token)
        slots[i], last = path[len(rows[i][0]) :], ids[i]
    visible = torch.eye(len(tokens), dtype=torch.bool)
    for slot, parent in enumerate(parents):
        if parent >= 0:
            visible[slot] |= visible[parent]
    return torch.tensor(tokens), torch.tensor(parents), visible, slots


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _hidden_states(model: Any, tokens: Tensor, visible: Tensor) -> Tensor | None:
    """What the output layer would see at each token, (T, hidden); None if its result is not what the model returns.

    The layer is shown one position only, whatever the model's own name for its body is."""
    head, seen = model.get_output_embeddings(), []

    def first_position_only(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        seen.append(args[0])
        return args[0][:, :1]

    mask = torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
    hook = head.register_forward_pre_hook(first_position_only)
    try:
        logits = model(tokens[None], attention_mask=mask[None, None], position_ids=visible.sum(1)[None] - 1,
                       use_cache=False).logits
    finally:
        hook.remove()
    with torch.no_grad():
        same = torch.equal(head(seen[0][:, :1]), logits)
    return seen[0][0] if same else None


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to score tokens, not {temperature}")


def _select(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at `ids`: (..., V) and (...) -> (...), in float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)
