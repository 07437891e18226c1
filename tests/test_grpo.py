"""Facts about log-probabilities and the loss, on tiny models with random weights.

The large initialiser matters: with the usual one all logits are nearly equal and wrong code looks right. GPT-2's
learned positions show what a model with rotary positions hides.
"""

import ast
import copy
import math
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from grpo import grpo_loss, mean_stats, micro_batches, pad_rows, rows_logprobs, token_logprobs, why_padded

torch.set_num_threads(1)
settings.register_profile("facts", deadline=None)
settings.load_profile("facts")

SOURCE = Path(grpo.__file__)
SMALL = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GPT2 = dict(vocab_size=97, n_positions=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=1,
            eos_token_id=2)
MODELS: dict = {}


def tiny(kind, dtype=torch.float32, **changes):
    """A model of this architecture, made once; tests leave it as they found it."""
    key = (kind, dtype, *sorted(changes.items()))
    if key not in MODELS:
        torch.manual_seed(0)
        settings_ = {**(GPT2 if kind == "GPT2" else SMALL), **changes}
        config = getattr(transformers, kind + ("TextConfig" if kind == "Gemma3" else "Config"))(**settings_)
        head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        MODELS[key] = getattr(transformers, kind + head)(config).to(dtype).eval()
    return MODELS[key]


class Fixed(torch.nn.Module):
    """A model whose logits are given, and that notes what it was asked for."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.asked = logits, []

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        self.asked.append(dict(kwargs, logits_to_keep=logits_to_keep))
        return SimpleNamespace(logits=self.logits[:, -logits_to_keep:])


def alone(model, row, temperature=1.0):
    """Log-probabilities of a row by a loop over its positions: no padding, no mask, no slices."""
    prompt, completion = row
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double()
    return [torch.log_softmax(logits[len(prompt) + t - 1] / temperature, -1)[token].item()
            for t, token in enumerate(completion)]


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def gap(found, expected):
    """The largest difference of two lists of gradients, relative to the largest gradient."""
    scale = max(e.abs().max() for e in expected if e is not None)
    assert all((f is None) == (e is None) for f, e in zip(found, expected))
    return float(max((f - e).abs().max() for f, e in zip(found, expected) if e is not None) / scale)


ROWS = [([5], [7, 8, 9]), ([10, 11, 12], [13]), ([20, 21, 22, 23, 24, 25, 26, 27, 28], [30, 31, 32, 33, 2])]


# Rows and log-probabilities


@pytest.mark.parametrize("ids, length, pad, expected", [  # D06
    ([5, 6, 2], 5, 2, [1, 1, 1, 0, 0]), ([5, 6, 2], 5, 0, [1, 1, 1, 0, 0]), ([2], 3, 2, [1, 0, 0]),
    ([5, 6, 7, 8, 9], 5, 2, [1] * 5), ([5, 6, 7, 8, 2], 5, 2, [1] * 5), ([5, 0, 6, 2], 5, 0, [1, 1, 1, 1, 0])])
def test_masks_come_from_lengths_not_from_token_values(ids, length, pad, expected):
    prompt = [pad, 3]  # a prompt may hold the pad id too
    input_ids, attention_mask, mask = pad_rows([(prompt, ids), ([3], [4] * length)], pad)
    assert mask[0].tolist() == expected and attention_mask[0].tolist() == [1, 1] + expected
    assert attention_mask[1].tolist() == [0, 1] + [1] * length and mask.sum() == len(ids) + length
    assert input_ids[0].tolist() == prompt + ids + [pad] * (length - len(ids))


def test_a_row_keeps_the_ids_that_were_sampled():  # D02: five letters that a tokenizer would merge into one word
    input_ids, _, mask = pad_rows([([9, 8], [40, 37, 44, 44, 47])], 0)
    assert input_ids.tolist() == [[9, 8, 40, 37, 44, 44, 47]]
    assert mask.tolist() == [[True] * 5]


@pytest.mark.parametrize("rows", [[], [([], [1])]])
def test_rows_that_cannot_be_scored_are_refused(rows):
    with pytest.raises(ValueError, match="at least one prompt token"):
        pad_rows(rows, 0)


def test_temperature_by_hand():  # D04
    model = Fixed(torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]))
    for temperature, expected in ((2.0, -0.31326), (1.0, -0.12693)):
        logp = token_logprobs(model, *pad_rows([([1], [0])], 0), temperature)
        assert logp.item() == pytest.approx(expected, abs=1e-5)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            token_logprobs(model, *pad_rows([([1], [0])], 0), bad)


def test_logprobs_are_those_of_the_distribution_sampled_from():  # D04, end to end
    model = tiny("Qwen2")
    torch.manual_seed(1)
    out = model.generate(torch.tensor([[5, 6, 7]] * 8), attention_mask=torch.ones(8, 3), do_sample=True,
                         max_new_tokens=6, temperature=0.7, top_k=0, top_p=1.0, repetition_penalty=1.0,
                         eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True)
    sampled = out.sequences[:, 3:]
    at_sampling = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, sampled[..., None]).squeeze(-1)
    for packed in (False, True):
        logp, _ = rows_logprobs(model, [([5, 6, 7], row) for row in sampled.tolist()], 0, 0.7, packed=packed)
        assert (logp - at_sampling).abs().max() < 1e-4


def test_a_token_is_scored_by_the_position_before_it():  # D05
    logits = torch.randn(1, 4, 20, generator=torch.Generator().manual_seed(0))
    logp = token_logprobs(Fixed(logits), *pad_rows([([10, 11], [12, 13])], 0))
    expected = [logits[0, 1].log_softmax(-1)[12], logits[0, 2].log_softmax(-1)[13]]
    assert logp.shape == (1, 2) and logp[0].tolist() == pytest.approx([e.item() for e in expected], abs=1e-6)


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2"])
def test_padding_changes_nothing(kind):  # D05, D07
    model = tiny(kind)
    logp = token_logprobs(model, *pad_rows(ROWS, 0), temperature=0.8)
    for row, found in zip(ROWS, logp.tolist()):
        length = len(row[1])
        assert found[:length] == pytest.approx(alone(model, row, 0.8), abs=1e-5)
        assert found[length:] == [0.0] * (len(found) - length)


def test_the_softmax_is_float32_whatever_the_model_is():  # D18
    logits = (torch.randn(1, 9, 32_000, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    completion = list(range(100, 108))
    logp = token_logprobs(Fixed(logits), *pad_rows([([1], completion)], 0))
    expected = logits[0, :8].float().log_softmax(-1)[torch.arange(8), torch.tensor(completion)]
    in_bfloat16 = logits[0, :8].log_softmax(-1)[torch.arange(8), torch.tensor(completion)]
    assert logp.dtype == torch.float32 and (logp[0] - expected).abs().max() < 1e-5
    assert (in_bfloat16.float() - expected).abs().max() > 1e-2
    assert token_logprobs(Fixed(logits.double()), *pad_rows([([1], completion)], 0)).dtype == torch.float64


def test_only_completion_positions_become_logits():  # D19
    model = Fixed(torch.randn(1, 54, 7))
    token_logprobs(model, *pad_rows([([1] * 50, [2, 3, 4, 5])], 0))
    assert [asked["logits_to_keep"] for asked in model.asked] == [5]
    assert model.asked[0]["position_ids"].tolist() == [list(range(54))]


def test_prompt_positions_get_no_gradient():  # D22: a turn-2 prompt holds the problem, the attempt and its feedback
    prompt, completion = [3, 4, 5, 6, 7, 8], [9, 10, 2]
    logits = torch.randn(1, 9, 20, requires_grad=True)
    ids, attention_mask, mask = pad_rows([(prompt, completion)], 0)
    logp = token_logprobs(Fixed(logits), ids, attention_mask, mask)
    loss, stats = grpo_loss(logp, None, torch.tensor([1.0]), mask)
    loss.backward()
    touched = logits.grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False] * 5 + [True] * 3 + [False]  # the prompt's last position scores the first token
    assert stats["tokens"] == mask.sum() == len(completion)


# The loss


def one_row(ratio, advantage, **kwargs):
    logp = torch.tensor([[ratio]]).log().requires_grad_()
    loss, stats = grpo_loss(logp, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), **kwargs)
    loss.backward()
    return loss.item(), logp.grad.item(), stats


def test_the_clip_by_hand():  # D11
    table = {(1.5, 1.0): (-1.2, 0.0), (1.5, -1.0): (1.5, 1.5), (0.5, 1.0): (-0.5, -0.5), (0.5, -1.0): (0.8, 0.0)}
    stats = []
    for (ratio, advantage), (loss, gradient) in table.items():
        found = one_row(ratio, advantage)
        assert found[:2] == pytest.approx((loss, gradient), abs=1e-6)
        stats.append(found[2])
    assert mean_stats(stats)["clipped"] == 0.5 and mean_stats(stats)["ratio"] == pytest.approx(1.0)
    assert one_row(1.5, 1.0, clip_high=0.6)[:2] == pytest.approx((-1.5, -1.5))  # the two bounds are separate
    assert one_row(0.5, -1.0, clip_low=0.6)[:2] == pytest.approx((0.5, 0.5))


def test_the_kl_by_hand():  # D12
    for d, kl, gradient in ((math.log(2), 0.30685, -1.0), (-math.log(2), 0.19315, 0.5), (0.0, 0.0, 0.0)):
        logp, ref = torch.zeros(1, 1, requires_grad=True), torch.full((1, 1), d, requires_grad=True)
        loss, stats = grpo_loss(logp, None, torch.zeros(1), torch.ones(1, 1), beta=1.0, ref_logp=ref)
        loss.backward()
        assert (loss.item(), logp.grad.item()) == pytest.approx((kl, gradient), abs=1e-5)
        assert ref.grad is None and stats["kl"].item() == pytest.approx(kl, abs=1e-5)


def test_the_kl_estimator_has_the_right_expectation():
    policy, ref = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((policy * (policy / ref).log()).sum())
    loss, _ = grpo_loss(policy.log()[:, None], None, torch.zeros(3), torch.ones(3, 1), beta=1.0,
                        ref_logp=ref.log()[:, None], weights=policy, denominator=1)
    assert exact == pytest.approx(0.5362, abs=1e-4) and loss.item() == pytest.approx(exact, abs=1e-6)


def test_each_norm_is_the_documented_one_for_policy_and_kl_alike():  # D13
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    zeros = torch.zeros(2, 4)
    d = torch.tensor([[math.log(2)] * 4, [math.log(3)] + [50.0] * 3])  # what stands in padding is of no account
    k3 = [1 - math.log(2), 2 - math.log(3)]
    for norm, denominator, mean in (("sequence", None, lambda a, b: (a + b) / 2),
                                    ("token", None, lambda a, b: (4 * a + b) / 5),
                                    ("constant", 2 * 8, lambda a, b: (4 * a + b) / 16)):
        loss, _ = grpo_loss(zeros, None, torch.tensor([-1.0, -4.0]), mask, norm=norm, denominator=denominator)
        assert loss.item() == pytest.approx(mean(1.0, 4.0)), norm  # 2.5, 1.6, 0.5
        kl, _ = grpo_loss(zeros, None, torch.zeros(2), mask, beta=1.0, ref_logp=d, norm=norm, denominator=denominator)
        assert kl.item() == pytest.approx(mean(*k3), abs=1e-5), norm


def naive_loss(logp, old, advantages, lengths, low, high, beta, ref, norm, denominator):
    total = 0.0
    for i, length in enumerate(lengths):
        row = 0.0
        for t in range(length):
            rho = math.exp(logp[i][t] - old[i][t])
            row -= min(rho * advantages[i], min(max(rho, 1 - low), 1 + high) * advantages[i])
            d = ref[i][t] - logp[i][t]
            row += beta * (math.exp(d) - d - 1)
        total += row / length if norm == "sequence" else row
    return total / denominator


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    number = st.floats(-2, 2, width=32)
    table = [[[draw(number) for _ in range(max(lengths))] for _ in lengths] for _ in range(3)]
    return lengths, table, [draw(number) for _ in lengths]


norms = st.sampled_from(["sequence", "token", "constant"])


@given(batches(), norms, st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1))
def test_the_loss_against_a_loop(batch, norm, low, high, beta):
    lengths, (logp, old, ref), advantages = batch
    denominator = {"sequence": len(lengths), "token": sum(lengths), "constant": 7.0 * len(lengths)}[norm]
    as_tensor = lambda table: torch.tensor(table, dtype=torch.float64)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    found, stats = grpo_loss(as_tensor(logp), as_tensor(old), as_tensor(advantages), mask, clip_low=low, clip_high=high,
                             beta=beta, ref_logp=as_tensor(ref), norm=norm,
                             denominator=denominator if norm == "constant" else None)
    expected = naive_loss(logp, old, advantages, lengths, low, high, beta, ref, norm, denominator)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    real = [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    means = mean_stats([stats])
    assert means["ratio"] == pytest.approx(sum(math.exp(logp[i][t] - old[i][t]) for i, t in real) / len(real))
    assert means["entropy"] == pytest.approx(-sum(logp[i][t] for i, t in real) / len(real), abs=1e-9)
    assert means["kl"] >= -1e-12 and means["tokens"] == len(real) and 0 <= means["clipped"] <= 1


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), norms, st.booleans())
def test_any_cut_into_micro_batches_gives_the_same_gradient(labels, norm, weighted):
    generator = torch.Generator().manual_seed(3)
    logp = (torch.randn(5, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    old, ref = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0])
    mask = torch.arange(4) < torch.tensor([4, 1, 1, 3, 2])[:, None]
    weights = torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0]) if weighted else None
    denominator = {"sequence": 5.0, "token": 11.0, "constant": 40.0}[norm]

    def part(at):
        return grpo_loss(logp[at], old[at], advantages[at], mask[at], beta=0.1, ref_logp=ref[at], norm=norm,
                         denominator=denominator, weights=None if weights is None else weights[at])

    whole, stats = part(torch.arange(5))
    cut = [part((torch.tensor(labels) == label).nonzero().flatten()) for label in set(labels)]
    expected, = torch.autograd.grad(whole, logp, retain_graph=True)
    found, = torch.autograd.grad(sum(loss for loss, _ in cut), logp)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert mean_stats([s for _, s in cut]) == pytest.approx(mean_stats([stats]), rel=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_micro_batches_of_a_model_add_up(packed):  # D14: 1, 2, 4 and 3 with an uneven last one
    model, rows = tiny("Qwen2"), ROWS + [([5, 6], [7] * 5)]
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0])

    def gradient(size):
        total = 0
        for start in range(0, 4, size):
            logp, mask = rows_logprobs(model, rows[start : start + size], 0, packed=packed)
            total = total + grpo_loss(logp, None, advantages[start : start + size], mask, denominator=4)[0]
        return gradients(model, total)

    whole = gradient(4)
    assert all(gap(gradient(size), whole) < 1e-5 for size in (1, 2, 3))
    # and to 1e-6 of the gradient's norm, rounding of single entries aside
    flat = lambda grads: torch.cat([g.flatten() for g in grads])
    assert all((flat(gradient(size)) - flat(whole)).norm() < 1e-6 * flat(whole).norm() for size in (1, 2, 3))


def test_dropped_rows_stay_in_the_denominator():
    logp, mask = torch.randn(3, 2, requires_grad=True), torch.ones(3, 2)
    advantages = torch.tensor([1.0, -1.0, 0.0])  # the last row's group has no spread: it need not be computed
    everything, = torch.autograd.grad(grpo_loss(logp, None, advantages, mask)[0], logp)
    kept, = torch.autograd.grad(grpo_loss(logp[:2], None, advantages[:2], mask[:2], denominator=3)[0], logp)
    assert torch.equal(everything, kept)


def test_a_loss_of_zero_still_teaches():  # D15, D16
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)).eval()
    rows, before = [([5, 6], [7, 8, 2]), ([5, 6], [9, 10, 2])], [p.clone() for p in model.parameters()]
    with torch.no_grad():
        old, _ = rows_logprobs(model, rows, 0)
    new, mask = rows_logprobs(model, rows, 0)
    assert new.requires_grad and not old.requires_grad and (new - old).abs().max() < 1e-5  # D17
    loss, stats = grpo_loss(new, old, torch.tensor([1.0, -1.0]), mask)
    loss.backward()
    assert abs(loss.item()) < 1e-6 and sum(p.grad.norm() for p in model.parameters()) > 0.1
    assert mean_stats([stats])["clipped"] == 0 and mean_stats([stats])["ratio"] == pytest.approx(1, abs=1e-5)
    torch.optim.SGD(model.parameters(), 1e-3).step()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
    after, _ = rows_logprobs(model, rows, 0)
    assert after[0].sum() > old[0].sum() and after[1].sum() < old[1].sum()


def test_on_policy_it_is_reinforce():
    model, advantages = tiny("GPT2"), torch.tensor([1.0, -0.5, 0.25])
    logp, mask = rows_logprobs(model, ROWS, 0)
    loss, _ = grpo_loss(logp, None, advantages, mask)
    same, _ = grpo_loss(logp, logp, advantages, mask)  # an old that hangs on the graph gets no gradient
    lengths = mask.sum(1)
    reinforce = -(advantages / lengths * logp.masked_fill(~mask, 0).sum(1)).sum() / len(ROWS)
    found, again, expected = (torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (loss, same, reinforce))
    assert torch.equal(loss, same) and torch.equal(found, again) and (found - expected).abs().max() < 1e-7


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_is_that_of_finite_differences(packed):
    model = tiny("GPT2", torch.float64)
    rows, step = [([5, 6], [7, 8, 2]), ([5, 6], [7, 9]), ([5], [4, 4])], 1e-5
    generator = torch.Generator().manual_seed(0)
    old, ref = (-4 + torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))

    def loss():
        logp, mask = rows_logprobs(model, rows, 0, temperature=0.9, packed=packed)
        old_logp = logp.detach() + 0.1 * (old + 4)
        return grpo_loss(logp, fixed if fixed is not None else old_logp, torch.tensor([1.0, -1.0, 0.5]), mask, beta=0.3,
                         ref_logp=ref)[0], old_logp

    fixed = None
    fixed = loss()[1]
    found = gradients(model, loss()[0])
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()]
    expected = sum((g * d).sum() for g, d in zip(found, direction)).item()

    def moved(amount):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction):
                p += amount * d
            return loss()[0].item()

    ahead, behind = moved(step), moved(-2 * step)
    moved(step)
    assert abs(expected) > 1e-2 and (ahead - behind) / (2 * step) == pytest.approx(expected, rel=1e-5)


def test_dropout_moves_the_ratio_and_flags_stay_the_callers():  # D17
    model = tiny("GPT2", resid_pdrop=0.1)
    before = {name: module.training for name, module in model.named_modules()}
    for packed in (False, True):
        a, b = (rows_logprobs(model, ROWS, 0, packed=packed)[0] for _ in range(2))
        assert torch.equal(a, b)
        model.train()
        try:
            a, b = (rows_logprobs(model, ROWS, 0, packed=packed)[0] for _ in range(2))
            assert model.training and (a - b).abs().max() > 0.1
        finally:
            model.eval()
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_nan_is_shown_if_real_and_ignored_in_padding():
    mask = torch.tensor([[True, True], [True, False]])
    for bad in (math.nan, math.inf, -math.inf):
        logp = torch.zeros(2, 2)
        logp[1, 1] = bad
        logp.requires_grad_()
        zeros = torch.zeros(2, 2)
        loss, _ = grpo_loss(logp, zeros, torch.tensor([1.0, -1.0]), mask, beta=0.1, ref_logp=zeros)
        loss.backward()
        assert loss.isfinite() and logp.grad.isfinite().all() and logp.grad[1, 1] == 0
    broken = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    assert grpo_loss(broken, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), mask)[0].isnan()


@pytest.mark.parametrize("change, said", [
    (dict(advantages=torch.ones(2, 1)), r"advantages must have shape \(2,\)"),
    (dict(advantages=torch.ones(2, 3)), "advantages must have shape"),
    (dict(mask=torch.ones(2, 4)), r"mask must have shape \(2, 3\)"),
    (dict(old_logp=torch.ones(2)), "old_logp must have shape"),
    (dict(beta=0.1), "beta > 0 needs ref_logp"),
    (dict(norm="mean"), "unknown norm 'mean'"),
    (dict(norm="constant"), "needs a denominator"),
    (dict(denominator=0), "denominator above 0"),
])
def test_bad_arguments_are_refused_in_a_sentence(change, said):
    arguments = dict(logp=torch.ones(2, 3), old_logp=None, advantages=torch.ones(2), mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=said):
        grpo_loss(**{**arguments, **change})


def test_with_two_threads_the_gradient_is_the_same_bit_for_bit_each_time():
    """Indexing with a tensor is not enough for that: its backward adds in whatever order the threads come."""
    model, threads = tiny("Qwen3", hidden_size=128), torch.get_num_threads()
    rows = [(list(range(3, 43)), [3 + (7 * i + t * t) % 90 for t in range(24)]) for i in range(32)]  # 32 share one parent
    gradients = []
    torch.set_num_threads(2)
    try:
        for _ in range(12):
            model.zero_grad()
            logp, _ = rows_logprobs(model, rows, 0)
            (logp * torch.linspace(-1, 1, 32)[:, None]).sum().backward()
            gradients.append(model.get_input_embeddings().weight.grad.clone())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients[1:])


# Packed rows


@st.composite
def forests(draw):
    """Rows of rollout trees: siblings share a prompt, and a refinement's prompt begins with an earlier row."""
    token = st.integers(3, 8)  # few tokens, so that completions share prefixes too
    words = st.lists(token, min_size=1, max_size=5)
    rows = []
    prompts = draw(st.lists(words, min_size=1, max_size=2))
    while prompts:
        prompt = prompts.pop()
        for completion in draw(st.lists(st.lists(token, max_size=5), min_size=1, max_size=3)):
            rows.append((prompt, completion))
            if len(prompt) < 12 and draw(st.booleans()):
                prompts.append(prompt + completion + draw(words))
        if len(rows) > 8:
            break
    return draw(st.permutations(rows))


PACKABLE = ["Qwen3", "Llama", "Olmo2", "GPT2"]


@pytest.mark.parametrize("kind", PACKABLE)
@settings(max_examples=40)
@given(rows=forests())
def test_packed_rows_are_padded_rows(kind, rows):
    model = tiny(kind)
    assert why_padded(model) == ""
    (padded, mask), (packed, packed_mask) = (rows_logprobs(model, rows, 0, 0.8, packed=p) for p in (False, True))
    assert packed.dtype == torch.float32 and torch.equal(mask, packed_mask) and not packed[~mask].any()
    assert torch.allclose(packed, padded, rtol=1e-5, atol=1e-5)
    if mask.any():
        advantages = torch.linspace(-1, 1.5, len(rows))
        losses = [grpo_loss(logp, None, advantages, mask, beta=0.1, ref_logp=logp.detach() + 0.1)[0]
                  for logp in (packed, padded)]
        found, expected = (gradients(model, loss) for loss in losses)
        assert gap(found, expected) < 1e-5


class Attention(TorchDispatchMode):
    """Notes for how many queries and keys attention is computed."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "scaled_dot_product" in function.__name__ and "backward" not in function.__name__:
            self.sizes.append((args[0].shape[2], args[1].shape[2]))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("again", [None, dict(use_reentrant=False), dict(use_reentrant=True)])
def test_attention_is_computed_along_each_rows_path_alone_also_where_layers_are_made_again(again):
    model = copy.deepcopy(tiny("Qwen3"))
    rows = [([3, 4, 5, 6, 7], [8, 9, 10]), ([3, 4, 5, 6, 7], [9]), ([3, 4, 5, 6, 7], [8, 9, 11, 12])]

    def gradient(packed):
        logp, mask = rows_logprobs(model, rows, 0, packed=packed)
        model.zero_grad()
        grpo_loss(logp, None, torch.tensor([1.0, -0.5, 0.3]), mask)[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = gradient(False)
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
        model.enable_input_require_grads()  # the reentrant kind needs it
        model.train()
    with Attention() as forward:
        rows_logprobs(model, rows, 0)
    paths = [(8, 8), (1, 6), (2, 9)]  # new tokens, and the path that they see
    assert forward.sizes == paths * model.config.num_hidden_layers
    with Attention() as both:
        assert torch.allclose(gradient(True), expected, atol=1e-6)
    assert len(both.sizes) > len(forward.sizes) and set(both.sizes) == set(paths)  # what is made again in the backward, too


@given(forests())
def test_the_tree_holds_each_prefix_once(rows):
    tokens, parents, paths, slots = grpo._merge(rows)
    visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for (new, path), (prompt, completion) in zip(paths, rows, strict=True):
        assert tokens[path].tolist() == [*prompt, *completion]
        assert path[len(path) - new:].tolist() == sorted(path[len(path) - new:].tolist())  # slots side by side, in the order of rows
        for n, slot in enumerate(path[len(path) - new:], len(path) - new):
            visible[slot, path[:n + 1]] = True
    assert sum(new for new, _ in paths) == len(tokens)
    prefixes = {(*p, *c)[: n + 1] for p, c in rows for n in range(len(p) + len(c))}
    assert len(tokens) == len(prefixes)
    paths = {tuple(tokens[visible[slot]].tolist()) for slot in range(len(tokens))}  # what a token sees is its own row
    assert paths == prefixes
    assert tokens[slots].tolist() == [token for _, completion in rows for token in completion]
    assert all(parent < slot and (parent < 0 or visible[slot, parent]) for slot, parent in enumerate(parents.tolist()))


@given(forests(), st.integers(1, 60), st.booleans())
def test_micro_batches_keep_the_budget_and_every_row(rows, budget, packed):
    batches_ = micro_batches(rows, budget, packed)
    assert sorted(i for batch in batches_ for i in batch) == list(range(len(rows)))
    for batch in batches_:
        part = [rows[i] for i in batch]
        cost = len(grpo._merge(part)[0]) if packed else pad_rows(part, 0)[0].numel()
        assert cost <= budget or len(batch) == 1


def test_siblings_go_into_one_pack():
    prompts = [[p] * 50 for p in (3, 4, 5)]
    rows = [(prompts[i % 3], [6 + i] * 10) for i in range(12)]
    assert sorted(sorted(batch) for batch in micro_batches(rows, 90)) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert len(micro_batches(rows, 120, packed=False)) == 6


def test_logits_are_made_a_chunk_at_a_time_and_only_for_completions(monkeypatch):  # D19
    model = tiny("Qwen3")
    rows = [([5] * 30, [6, 7, 8, 9, 10]), ([5] * 30, [11, 12, 13, 2])]
    expected, mask = rows_logprobs(model, rows, 0)
    gradient = gradients(model, grpo_loss(expected, None, torch.tensor([1.0, -1.0]), mask)[0])
    monkeypatch.setattr(grpo, "CHUNK", 4 * 97)
    made = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: made.append(out.numel() // 97))
    try:
        logp, _ = rows_logprobs(model, rows, 0)
        grad = gradients(model, grpo_loss(logp, None, torch.tensor([1.0, -1.0]), mask)[0])
    finally:
        hook.remove()
    # one position twice to see that the layer's result is the model's, 9 completion tokens, 9 again in the backward
    assert sorted(made) == [1, 1, 1, 1, 4, 4, 4, 4] and (logp - expected).abs().max() < 1e-6
    assert gap(grad, gradient) < 1e-5


@pytest.mark.parametrize("kind, changes, reason", [
    ("Mistral", dict(sliding_window=4), "not every layer has full attention (sliding_window)"),
    ("Gemma3", dict(sliding_window=4), "not every layer has full attention"),
    ("Cohere", dict(logit_scale=0.5), "it changes its logits after the output layer"),
    ("Granite", dict(logits_scaling=3.0), "it changes its logits after the output layer"),
])
def test_a_model_that_packing_is_wrong_for_gets_padded_rows_and_a_warning(kind, changes, reason):
    model = tiny(kind, **changes)
    rows = [([5, 6, 7, 8, 9, 10], [11, 12, 13]), ([5, 6, 7, 8, 9, 10], [11, 14])]
    with pytest.warns(UserWarning, match="gets padded rows") as said:
        logp, mask = rows_logprobs(model, rows, 0)
    assert len(said) == 1 and reason in str(said[0].message)
    for row, found in zip(rows, logp.tolist()):
        assert found[: len(row[1])] == pytest.approx(alone(model, row), abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for padded rows: nothing to say
        assert torch.equal(rows_logprobs(model, rows, 0, packed=False)[0], logp)


def test_other_attention_kernels_are_padded():
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    config.get_text_config = lambda: config
    assert "flash_attention_2" in why_padded(SimpleNamespace(config=config, _supports_attention_backend=True))
    config._attn_implementation = "sdpa"
    assert "takes no mask" in why_padded(SimpleNamespace(config=config, _supports_attention_backend=False))


def test_packing_composes_with_checkpointing_eager_attention_and_autocast():
    model, rows = tiny("Llama"), [([5, 6, 7], [8, 9, 2]), ([5, 6, 7], [8, 10])]
    advantages = torch.tensor([1.0, -1.0])
    expected, mask = rows_logprobs(model, rows, 0, packed=False)
    gradient = gradients(model, grpo_loss(expected, None, advantages, mask)[0])

    def same(variant):
        logp, _ = rows_logprobs(variant, rows, 0)
        found = gradients(variant, grpo_loss(logp, None, advantages, mask)[0])
        return (logp - expected).abs().max() < 1e-5 and gap(found, gradient) < 1e-5

    torch.manual_seed(0)
    again = transformers.LlamaForCausalLM._from_config(model.config, attn_implementation="eager")
    again.load_state_dict(model.state_dict())
    assert again.config._attn_implementation == "eager" and same(again.eval())
    model.train()  # no dropout in it: train mode is what switches checkpointing on
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers renamed it within the versions that we support
        try:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing and same(model)
        finally:
            model.gradient_checkpointing_disable()
            model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        packed, padded = (rows_logprobs(model, rows, 0, packed=p)[0] for p in (True, False))
    assert packed.dtype == padded.dtype == torch.float32
    assert (packed - expected).abs().max() < 0.3 and (packed - padded).abs().max() < 0.3


# The file by itself


def test_it_works_copied_alone_into_an_empty_folder(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    run = subprocess.run([sys.executable, "-I", "grpo.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = run.stdout.splitlines()
    assert (run.returncode, run.stderr) == (0, "") and len(lines) <= 24 and max(map(len, lines)) <= 110
    rows = [line.split() for line in lines]
    assert ["1.5", "+1", "-1.20", "+0.00", "clipped"] in rows and ["1.5", "-1", "+1.50", "+1.50"] in rows
    assert ["0.5", "+1", "-0.50", "-0.50"] in rows and ["0.5", "-1", "+0.80", "+0.00", "clipped"] in rows
    assert ["+0.6931", "0.3068", "-1.00"] in rows and ["-0.6931", "0.1931", "+0.50"] in rows
    names = {name.split(".")[0] for node in ast.walk(ast.parse(SOURCE.read_text()))
             for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else
                          [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert names - sys.stdlib_module_names == {"torch"}
