"""Facts about log-probabilities and the loss. The D numbers are those of the list of pitfalls."""

import collections
import math
import runpy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo import grpo_loss, mean_stats, pad_rows, select_logprobs, token_logprobs

ROWS = [([5], [7, 8, 9]), ([10, 11, 12], [13]), ([20, 21, 22, 23, 24, 25, 26], [30, 31, 32, 33, 2])]


def score(model, rows, temperature=1.0):
    ids, attention_mask, mask = pad_rows(rows, 0)
    return token_logprobs(model, ids, attention_mask, mask, temperature), mask


def alone(model, row, temperature):
    """Log-probabilities of a row by a loop over its positions: no padding, no mask, no slices."""
    prompt, completion = row
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    before = logits[len(prompt) - 1 :]
    return [torch.log_softmax(before[t], -1)[token].item() for t, token in enumerate(completion)]


def slopes(loss, by):
    return torch.autograd.grad(loss, by, retain_graph=True)[0]


# Rows and log-probabilities


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("ids", [[5, 6, 2], [2], [5, 6, 7, 8, 9], [5, 0, 6, 2]])
def test_rows_keep_their_ids_and_masks_come_from_lengths_alone(ids, pad):  # D02, D06
    rows = [([pad, 3], ids), ([3], [4] * 5)]  # a prompt may hold the pad id too
    input_ids, attention_mask, mask = pad_rows(rows, pad)
    expected = [1] * len(ids) + [0] * (5 - len(ids))
    assert mask[0].tolist() == expected
    assert attention_mask.tolist() == [[1, 1, *expected], [0, 1, 1, 1, 1, 1, 1]]
    assert input_ids[0].tolist() == [pad, 3] + ids + [pad] * (5 - len(ids))


@pytest.mark.parametrize("rows", [[], [([], [1])]])
def test_rows_that_cannot_be_scored_are_refused(rows):
    with pytest.raises(ValueError, match="at least one prompt token"):
        pad_rows(rows, 0)


def test_temperature_by_hand():  # D04
    logits, first = torch.tensor([2.0, 0.0]), torch.tensor(0)
    # log softmax([2, 0] / T)[0] = -log(1 + exp(-2 / T))
    assert select_logprobs(logits, first, 2.0).item() == pytest.approx(-0.31326, abs=1e-5)
    assert select_logprobs(logits, first).item() == pytest.approx(-0.12693, abs=1e-5)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            select_logprobs(logits, first, bad)


@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_padding_changes_nothing(name, request):  # D05, D07
    model = request.getfixturevalue(name)
    logp, _ = score(model, ROWS, 0.8)
    for row, found in zip(ROWS, logp.tolist(), strict=True):
        length = len(row[1])
        assert found[:length] == pytest.approx(alone(model, row, 0.8), abs=1e-5)
        assert found[length:] == [0.0] * (len(found) - length)


def test_the_softmax_is_float32_whatever_the_model_is():  # D18
    logits = (torch.randn(8, 32_000, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    ids = torch.arange(100, 108)
    expected = logits.float().log_softmax(-1)[torch.arange(8), ids]
    assert select_logprobs(logits, ids).dtype == torch.float32
    assert (select_logprobs(logits, ids) - expected).abs().max() < 1e-5
    assert select_logprobs(logits.double(), ids).dtype == torch.float64


def test_only_completion_positions_become_logits_and_get_a_gradient():  # D19, D22
    """The prompt may hold an attempt and its feedback: they are not trained on."""
    logits, asked = torch.randn(1, 9, 20, requires_grad=True), {}

    def model(input_ids, logits_to_keep, **kwargs):
        asked.update(kwargs, logits_to_keep=logits_to_keep)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    logp, mask = score(model, [([3, 4, 5, 6, 7, 8], [9, 10, 2])])
    assert asked["logits_to_keep"] == 4
    assert asked["position_ids"].tolist() == [list(range(9))]
    loss, stats = grpo_loss(logp, None, torch.tensor([1.0]), mask)
    touched = slopes(loss, logits)[0].abs().sum(-1) > 0
    # the last position of the prompt scores the first token of the completion
    assert touched.tolist() == [False] * 5 + [True] * 3 + [False]
    assert stats["tokens"] == 3


# The loss


HANDMADE = [
    # rho, A, loss = -min(rho * A, clip(rho, 0.8, 1.2) * A), its slope in logp
    "1.5 +1 -1.20 +0.00 clipped",
    "1.5 -1 +1.50 +1.50",
    "0.5 +1 -0.50 -0.50",
    "0.5 -1 +0.80 +0.00 clipped",
    # d = ref_logp - logp, kl = exp(d) - d - 1, its slope in logp, 1 - exp(d)
    "+0.6931 0.3068 -1.00",
    "+0.0000 0.0000 +0.00",
    "-0.6931 0.1931 +0.50",
]


def test_the_clip_by_hand(capsys):  # D11, D12
    runpy.run_path(grpo.__file__, run_name="__main__")
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in HANDMADE:
        assert row.split() in shown


@pytest.mark.parametrize(
    "norm, denominator, expected",
    [("sequence", None, (1 + 4) / 2), ("token", None, (4 + 4) / 5), ("constant", 16, (4 + 4) / 16)],
)
def test_each_norm_is_the_documented_one(norm, denominator, expected):  # D13
    """Each token of a row of four costs 1, and the token of a row of one costs 4."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    options = {"norm": norm, "denominator": denominator}
    loss, _ = grpo_loss(torch.zeros(2, 4), None, torch.tensor([-1.0, -4.0]), mask, **options)
    assert loss.item() == pytest.approx(expected)


def naive_loss(tables, advantages, lengths, weights, low, high, beta, norm, denominator):
    """The loss and the stats, token by token."""
    loss, sums = 0.0, collections.Counter()
    for i, length in enumerate(lengths):
        scale = weights[i] / denominator
        if norm == "sequence":
            scale /= max(length, 1)
        for t in range(length):
            logp, old, ref = (table[i][t] for table in tables)
            rho = math.exp(logp - old)
            plain = rho * advantages[i]
            clipped = min(max(rho, 1 - low), 1 + high) * advantages[i]
            kl = math.exp(ref - logp) - (ref - logp) - 1
            loss += scale * (beta * kl - min(plain, clipped))
            sums.update(ratio=rho, kl=kl, clipped=clipped < plain, entropy=-logp)
    tokens = sum(lengths)
    means = {name: total / tokens for name, total in sums.items()}
    return {"loss": loss, "tokens": tokens, **means}


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))  # 0: masked out
    row = st.lists(st.floats(-2, 2, width=32), min_size=max(lengths), max_size=max(lengths))
    table = st.lists(row, min_size=len(lengths), max_size=len(lengths))
    advantages, weights = [[draw(st.floats(-2, 2, width=32)) for _ in lengths] for _ in range(2)]
    return lengths, [draw(table) for _ in range(3)], advantages, weights


norms = st.sampled_from(["sequence", "token", "constant"])


@settings(max_examples=60)
@given(batches(), norms, st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1))
def test_the_loss_against_a_loop(batch, norm, low, high, beta):
    lengths, tables, advantages, weights = batch
    rows = sum(length > 0 for length in lengths)
    count = {"sequence": rows, "token": sum(lengths), "constant": 7.0 * rows}[norm]
    logp, old, ref, A, w = (
        torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
        for numbers in (*tables, advantages, weights)
    )
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    options = {"clip_low": low, "clip_high": high, "beta": beta, "ref_logp": ref, "norm": norm}
    if norm == "constant":
        options["denominator"] = count
    loss, stats = grpo_loss(logp, old, A, mask, weights=w, **options)
    expected = naive_loss(tables, advantages, lengths, weights, low, high, beta, norm, count)
    assert mean_stats([stats]) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert loss.item() == stats["loss"]
    assert torch.autograd.grad(loss, [old, ref], allow_unused=True) == (None, None)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), norms)
def test_any_cut_into_micro_batches_gives_the_same_gradient(labels, norm):  # D14
    generator = torch.Generator().manual_seed(3)
    logp, old, ref = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0])
    mask = torch.arange(4) < torch.tensor([4, 1, 1, 3, 2])[:, None]
    # 5 rows; 4 + 1 + 1 + 3 + 2 tokens; 5 rows * 8 tokens
    options = {"norm": norm, "denominator": {"sequence": 5, "token": 11, "constant": 40}[norm]}

    def part(at):
        extra = {"beta": 0.1, "ref_logp": ref[at]}
        return grpo_loss(logp[at], old[at], advantages[at], mask[at], **extra, **options)

    whole, stats = part(torch.arange(5))
    parts = [part(torch.tensor(labels) == label) for label in set(labels)]
    expected = slopes(whole, logp)
    found = slopes(sum(loss for loss, _ in parts), logp)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert mean_stats([s for _, s in parts]) == pytest.approx(mean_stats([stats]), rel=1e-9)


def test_on_policy_it_is_reinforce(gpt2):
    advantages = torch.tensor([1.0, -0.5, 0.25])
    logp, mask = score(gpt2, ROWS)
    loss, _ = grpo_loss(logp, None, advantages, mask)
    same, _ = grpo_loss(logp, logp, advantages, mask)  # an old_logp that is still in the graph
    reinforce = -(advantages / mask.sum(1) * (logp * mask).sum(1)).sum() / len(ROWS)
    assert torch.equal(loss, same)
    assert torch.equal(slopes(loss, logp), slopes(same, logp))
    assert (slopes(loss, logp) - slopes(reinforce, logp)).abs().max() < 1e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_is_shown_if_real_and_ignored_in_padding(bad):
    zeros, mask = torch.zeros(1, 2), torch.tensor([[True, False]])
    logp = torch.tensor([[0.0, bad]], requires_grad=True)
    loss, _ = grpo_loss(logp, zeros, torch.ones(1), mask, beta=0.1, ref_logp=zeros)
    assert loss.isfinite()
    assert slopes(loss, logp).tolist() == [[-1.0, 0.0]]
    real = torch.tensor([[math.nan, 0.0]])
    assert grpo_loss(real, zeros, torch.ones(1), mask)[0].isnan()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"advantages": torch.ones(2, 1)}, r"advantages must have shape \(2,\), not \(2, 1\)"),
        ({"weights": torch.ones(3)}, r"weights must have shape \(2,\)"),
        ({"mask": torch.ones(2, 4)}, r"mask must have shape \(2, 3\)"),
        ({"old_logp": torch.ones(2)}, "old_logp must have shape"),
        ({"beta": 0.1}, "beta above 0 needs ref_logp"),
        ({"norm": "mean"}, "unknown norm 'mean'"),
        ({"norm": "constant"}, "needs a denominator"),
        ({"denominator": 0}, "denominator must be above 0"),
        ({"denominator": math.nan}, "denominator must be above 0"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(change, said):
    arguments = {"logp": torch.ones(2, 3), "old_logp": None, "mask": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=said):
        grpo_loss(**{**arguments, "advantages": torch.ones(2), **change})
