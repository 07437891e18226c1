"""GRPO's objective: log-probabilities of completions under a model, and the clipped loss over them.

In: rows (prompt_ids, completion_ids), exactly as sampled, and an advantage for each. A row is one
    attempt of the rollout tree. Its prompt (problem, earlier attempts, feedback) carries no loss.
Out: a loss to call `.backward()` on, and sums to log.

Read top-down: `pad_rows` lays rows out as a batch, `token_logprobs` scores their tokens,
`grpo_loss` is the objective, `mean_stats` makes means of its sums. In place of the first two,
murphy.py calls `support/packing.py`: the same numbers faster, and tests compare them.
The caller sets train or eval mode: with dropout on, old and new log-probabilities differ.
Needs torch, and no other file of this project: copy the file into yours.
`python grpo.py` shows the clip and the KL penalty on a few tokens.

Shapes: B rows, P tokens in the longest prompt, C in the longest completion, V in the vocabulary.
"""

import signal
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Row = tuple[Sequence[int], Sequence[int]]  # (prompt_ids, completion_ids), as sampled


def pad_rows(rows: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay rows out as one batch: prompts are padded on the left, completions on the right.

    So every completion starts in column P. Returns input_ids (B, P+C) and attention_mask (B, P+C),
    both int64, and completion_mask (B, C), bool. The masks come from lengths alone: a sampled end
    token is trained on even if pad_id is the same id.
    ValueError: no rows, or a row without a prompt (nothing would predict its first token).

    >>> [t.tolist() for t in pad_rows([([5], [7, 2]), ([3, 4], [2])], pad_id=2)]
    [[[2, 5, 7, 2], [3, 4, 2, 2]], [[0, 1, 1, 1], [1, 1, 1, 0]], [[True, True], [True, False]]]
    """
    if not rows or not all(len(prompt) for prompt, _ in rows):
        raise ValueError("a batch needs at least one row, and every row at least one prompt token")

    P = max(len(prompt) for prompt, _ in rows)
    C = max(len(completion) for _, completion in rows)
    ids = torch.full((len(rows), P + C), pad_id)
    mask = torch.zeros_like(ids)

    for i, (prompt, completion) in enumerate(rows):
        columns = slice(P - len(prompt), P + len(completion))
        ids[i, columns] = torch.tensor([*prompt, *completion])
        mask[i, columns] = 1

    return ids, mask, mask[:, P:].bool()


def token_logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_mask: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of every completion token, under the distribution it was sampled from.

        logp[i, t] = log softmax(logits[i, P+t-1] / temperature)[input_ids[i, P+t]]

    Returns (B, C), 0 where completion_mask is False. The arguments are those of `pad_rows`, on the
    model's device. model: a Hugging Face causal LM that takes position_ids and logits_to_keep: it
    makes logits for its last C+1 positions only, (B, C+1, V). ValueError: temperature not above 0.
    """
    C = completion_mask.shape[1]
    # Positions count real tokens only. Without them, left padding would shift learned positions.
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    output = model(
        input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=C + 1,
    )

    logits = output.logits[:, -C - 1 : -1]  # the position before a token predicts it
    completions = input_ids[:, input_ids.shape[1] - C :]
    logp = select_logprobs(logits, completions, temperature)
    return logp.masked_fill(~completion_mask.bool(), 0.0)


def select_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `ids`: (..., V) and (...) -> (...).

    In float32 whatever the model's type (float64 stays): bfloat16 is off by several percent.
    ValueError: a temperature not above 0, because greedy decoding has no distribution to score.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to score tokens, not {temperature}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype) / temperature
    return logits.gather(-1, ids[..., None]).squeeze(-1) - logits.logsumexp(-1)


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
    """The clipped objective (paper: GRPO's): a micro-batch's share of an optimizer step's loss.

        rho  = exp(logp - old_logp)
        k3   = exp(d) - d - 1                        d = ref_logp - logp
        loss = sum over tokens of  w * (-min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)
                                        + beta * k3)

    norm "sequence": w = 1 / (tokens of the row * denominator)    denominator: rows
    norm "token":    w = 1 / denominator                          denominator: tokens
    norm "constant": w = 1 / denominator (Dr. GRPO)               denominator: rows * a fixed length

    logp, old_logp, ref_logp and mask are (B, C); advantages and weights are (B,). weights (ours;
    murphy.py gives none): a factor for each row. Only logp gets a gradient.
    old_logp=None: the model has not changed since it sampled, so rho is 1. With norm "sequence" a
    whole group then has a loss of about 0, as its advantages sum to 0. Its gradient is not 0: rho
    has the value 1 but changes with logp.

    denominator: count the rows (or tokens) of the WHOLE optimizer step, not of this micro-batch.
    Then the micro-batches add up to one gradient. Rows of advantage 0 count, even those that you do
    not pass; rows without a token do not. None: this batch is the whole step, and counted here.

    stats: the loss, sums over tokens; `mean_stats` makes means. "clipped" counts tokens for which
    the clipped term is the minimum: they have no gradient but the KL's. "kl" is 0 without ref_logp.
    A NaN in a real token shows in the loss.
    ValueError: a wrong shape, an unknown norm, no usable denominator, beta without ref_logp.
    """
    _check_shape("mask", mask, logp.shape)
    _check_shape("old_logp", old_logp, logp.shape)
    _check_shape("ref_logp", ref_logp, logp.shape)
    _check_shape("advantages", advantages, logp.shape[:1])
    _check_shape("weights", weights, logp.shape[:1])
    if beta and ref_logp is None:
        raise ValueError("beta above 0 needs ref_logp, the reference model's log-probabilities")

    # Padding is zeroed before exp: what stands there reaches neither the loss nor the gradient.
    mask = mask.bool()
    old_logp = logp if old_logp is None else old_logp  # the ratio is then 1, and has a gradient
    ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0).exp()
    A = advantages.to(logp)[:, None]
    plain = ratio * A
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * A
    per_token = -torch.min(plain, clipped)

    ref_logp = logp if ref_logp is None else ref_logp
    d = (ref_logp.detach() - logp).masked_fill(~mask, 0.0)
    k3 = torch.expm1(d) - d  # exp(d) - 1 - d, exact near 0
    if beta:
        per_token = per_token + beta * k3

    w = _token_weights(mask.to(logp), norm, denominator)
    if weights is not None:
        w = w * weights.to(logp)[:, None]
    loss = (w * per_token).sum()

    sums = {"tokens": mask, "ratio": ratio, "kl": k3, "clipped": clipped < plain, "entropy": -logp}
    stats = {name: values.detach()[mask].sum() for name, values in sums.items()}
    return loss, {"loss": loss.detach(), **stats}


def _check_shape(name: str, tensor: Tensor | None, shape: torch.Size) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(tensor.shape)}")


def _token_weights(mask: Tensor, norm: str, denominator: float | None) -> Tensor:
    """w of `grpo_loss`, (B, C); 0 for padding."""
    if norm not in ("sequence", "token", "constant"):
        raise ValueError(f'unknown norm {norm!r}: use "sequence", "token" or "constant"')
    if denominator is None and norm == "constant":
        raise ValueError('norm "constant" needs a denominator: rows of the step * a fixed length')
    if denominator is not None and not denominator > 0:
        raise ValueError(f"the denominator must be above 0, not {denominator}")

    lengths = mask.sum(1, keepdim=True)
    if denominator is None:
        count = (lengths > 0).sum() if norm == "sequence" else lengths.sum()
        denominator = count.clamp(min=1)
    w = mask / denominator
    return w / lengths.clamp(min=1) if norm == "sequence" else w


def mean_stats(parts: Sequence[dict[str, Tensor | float]]) -> dict[str, float]:
    """Stats of an update's micro-batches as floats.

    loss and tokens are added up, also over optimizer steps. ratio, kl, clipped (a share) and
    entropy (-logp of the sampled tokens) are means over all tokens that were computed.
    """
    means = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
    for name in ("ratio", "kl", "clipped", "entropy"):
        means[name] /= max(means["tokens"], 1)
    return means


def _example() -> None:
    """The clip and the KL penalty, one token a line."""
    one = torch.ones(1, 1)
    print("A token's probability is now rho times what it was. Its advantage A says where to go.")
    print("The clip ends its gradient once rho has moved more than 0.2 in that direction.\n")
    print("  rho   A    loss  gradient (by logp)")
    for rho, A in ((1.5, 1.0), (1.5, -1.0), (0.5, 1.0), (0.5, -1.0)):
        logp = torch.tensor([[rho]]).log().requires_grad_()
        loss, stats = grpo_loss(logp, 0 * one, torch.tensor([A]), one)
        loss.backward()
        note = "  clipped" if stats["clipped"] else ""
        print(f"  {rho:.1f}  {A:+.0f}   {loss:+.2f}  {logp.grad.item():+.2f}{note}")

    print("\nThe KL penalty k3 is never negative. It pulls logp to the reference. (Here A is 0.)\n")
    print("  reference - logp    loss  gradient (by logp)")
    for d in (0.6931, 0.0, -0.6931):
        logp = torch.zeros(1, 1, requires_grad=True)
        loss, _ = grpo_loss(logp, None, torch.zeros(1), one, beta=1.0, ref_logp=d * one)
        loss.backward()
        print(f"  {d:+16.4f}  {loss:.4f}  {logp.grad.item() + 0.0:+.2f}")  # + 0.0: no "-0.00"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    _example()
