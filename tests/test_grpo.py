"""Facts about log-probabilities and the loss. The D numbers are those of the list of pitfalls."""

import math
import runpy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grpo
from grpo import grpo_loss, mean_stats, pad_rows, select_logprobs, token_logprobs

ROWS = [([5], [7, 8, 9]), ([10, 11, 12], [13]), ([20, 21, 22, 23, 24, 25, 26], [30, 31, 32, 33, 2])]


class Fixed(torch.nn.Module):
    """A model whose logits are given, and that notes what it was asked for."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.asked = []

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        self.asked.append({**kwargs, "logits_to_keep": logits_to_keep})
        return SimpleNamespace(logits=self.logits[:, -logits_to_keep:])


def score(model, rows, temperature=1.0):
    ids, attention_mask, mask = pad_rows(rows, 0)
    return token_logprobs(model, ids, attention_mask, mask, temperature), mask


def alone(model, row, temperature):
    """Log-probabilities of a row by a loop over its positions: no padding, no mask, no slices."""
    prompt, completion = row
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0].double() / temperature
    before = logits[len(prompt) - 1 :]
    return [torch.log_softmax(before[t], -1)[token].item() for t, token in enumerate(completion)]


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
    model = Fixed(torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]))
    # log softmax([2, 0] / T)[0] = -log(1 + exp(-2 / T))
    assert score(model, [([1], [0])], 2.0)[0].item() == pytest.approx(-0.31326, abs=1e-5)
    assert score(model, [([1], [0])], 1.0)[0].item() == pytest.approx(-0.12693, abs=1e-5)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            score(model, [([1], [0])], bad)


def test_a_token_is_scored_by_the_position_before_it():  # D05
    logits = torch.randn(1, 4, 20, generator=torch.Generator().manual_seed(0))
    logp, _ = score(Fixed(logits), [([10, 11], [12, 13])])
    expected = [logits[0, 1].log_softmax(-1)[12].item(), logits[0, 2].log_softmax(-1)[13].item()]
    assert logp.tolist() == [pytest.approx(expected, abs=1e-6)]


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
    in_bfloat16 = logits.log_softmax(-1)[torch.arange(8), ids].float()
    assert select_logprobs(logits, ids).dtype == torch.float32
    assert (select_logprobs(logits, ids) - expected).abs().max() < 1e-5
    assert (in_bfloat16 - expected).abs().max() > 1e-2
    assert select_logprobs(logits.double(), ids).dtype == torch.float64


def test_only_completion_positions_become_logits():  # D19
    model = Fixed(torch.randn(1, 54, 7))
    score(model, [([1] * 50, [2, 3, 4, 5])])
    assert [asked["logits_to_keep"] for asked in model.asked] == [5]
    assert model.asked[0]["position_ids"].tolist() == [list(range(54))]


def test_prompt_positions_get_no_gradient():  # D22: the prompt may hold an attempt and feedback
    logits = torch.randn(1, 9, 20, requires_grad=True)
    logp, mask = score(Fixed(logits), [([3, 4, 5, 6, 7, 8], [9, 10, 2])])
    loss, stats = grpo_loss(logp, None, torch.tensor([1.0]), mask)
    loss.backward()
    touched = logits.grad[0].abs().sum(-1) > 0
    # the last position of the prompt scores the first token of the completion
    assert touched.tolist() == [False] * 5 + [True] * 3 + [False]
    assert stats["tokens"] == mask.sum() == 3


# The loss


def one_token(ratio, advantage, **options):
    logp = torch.tensor([[ratio]]).log().requires_grad_()
    one = torch.ones(1, 1)
    loss, stats = grpo_loss(logp, 0 * one, torch.tensor([advantage]), one, **options)
    loss.backward()
    return loss.item(), logp.grad.item(), stats


def test_the_clip_by_hand():  # D11
    table = [  # rho, A, loss = -min(rho * A, clip(rho, 0.8, 1.2) * A), its slope in logp
        (1.5, 1.0, -1.2, 0),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0),
    ]
    parts = []
    for ratio, advantage, loss, slope in table:
        *found, stats = one_token(ratio, advantage)
        assert found == pytest.approx([loss, slope], abs=1e-6)
        parts.append(stats)
    assert mean_stats(parts)["clipped"] == 0.5  # the first and the last: they have no gradient
    assert mean_stats(parts)["ratio"] == pytest.approx(1.0)
    # the two bounds are separate
    assert one_token(1.5, 1.0, clip_high=0.6)[:2] == pytest.approx((-1.5, -1.5))
    assert one_token(0.5, -1.0, clip_low=0.6)[:2] == pytest.approx((0.5, 0.5))


def test_the_kl_by_hand():  # D12
    one = torch.ones(1, 1)
    # kl = exp(d) - d - 1, and its slope in logp is 1 - exp(d)
    for d, kl, slope in ((math.log(2), 0.30685, -1.0), (-math.log(2), 0.19315, 0.5), (0, 0, 0)):
        logp = torch.zeros(1, 1, requires_grad=True)
        ref = torch.full((1, 1), float(d), requires_grad=True)
        loss, stats = grpo_loss(logp, None, torch.zeros(1), one, beta=1.0, ref_logp=ref)
        loss.backward()
        assert (loss.item(), logp.grad.item()) == pytest.approx((kl, slope), abs=1e-5)
        assert ref.grad is None
        assert stats["kl"].item() == pytest.approx(kl, abs=1e-5)


def test_the_expectation_of_the_kl_estimate_is_the_kl():
    """Each of three tokens is weighted with its probability under the policy."""
    policy, ref = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((policy * (policy / ref).log()).sum())
    weighted = {"weights": policy, "denominator": 1, "beta": 1.0, "ref_logp": ref.log()[:, None]}
    loss, _ = grpo_loss(policy.log()[:, None], None, torch.zeros(3), torch.ones(3, 1), **weighted)
    assert exact == pytest.approx(0.5362, abs=1e-4)
    assert loss.item() == pytest.approx(exact, abs=1e-6)


def test_each_norm_is_the_documented_one_for_policy_and_kl_alike():  # D13
    """Each token of a row of four costs 1, and the token of a row of one costs 4."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    zeros, costs = torch.zeros(2, 4), torch.tensor([1.0, 4.0])
    d = torch.tensor([[math.log(2)] * 4, [math.log(3), 50.0, 50.0, 50.0]])  # 50: in padding
    a, b = 1 - math.log(2), 2 - math.log(3)  # what the KL of these tokens costs
    table = [
        ("sequence", None, (1 + 4) / 2, (a + b) / 2),
        ("token", None, (1 + 1 + 1 + 1 + 4) / 5, (4 * a + b) / 5),
        ("constant", 16, (1 + 1 + 1 + 1 + 4) / 16, (4 * a + b) / 16),
    ]
    for norm, denominator, policy, kl in table:
        options = {"norm": norm, "denominator": denominator}
        found, _ = grpo_loss(zeros, None, -costs, mask, **options)
        assert found.item() == pytest.approx(policy)
        found, _ = grpo_loss(zeros, None, 0 * costs, mask, beta=1.0, ref_logp=d, **options)
        assert found.item() == pytest.approx(kl, abs=1e-5)


def naive_loss(tables, advantages, lengths, low, high, beta, norm, denominator):
    logp, old, ref = tables
    total = 0.0
    for i, length in enumerate(lengths):
        row = 0.0
        for t in range(length):
            rho = math.exp(logp[i][t] - old[i][t])
            clipped = min(max(rho, 1 - low), 1 + high)
            d = ref[i][t] - logp[i][t]
            row += beta * (math.exp(d) - d - 1) - min(rho * advantages[i], clipped * advantages[i])
        total += row / length if norm == "sequence" else row
    return total / denominator


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    row = st.lists(st.floats(-2, 2, width=32), min_size=max(lengths), max_size=max(lengths))
    table = st.lists(row, min_size=len(lengths), max_size=len(lengths))
    advantages = [draw(st.floats(-2, 2, width=32)) for _ in lengths]
    return lengths, [draw(table) for _ in range(3)], advantages


norms = st.sampled_from(["sequence", "token", "constant"])


@given(batches(), norms, st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1))
def test_the_loss_against_a_loop(batch, norm, low, high, beta):
    lengths, tables, advantages = batch
    count = {"sequence": len(lengths), "token": sum(lengths), "constant": 7.0 * len(lengths)}[norm]
    logp, old, ref = (torch.tensor(table, dtype=torch.float64) for table in tables)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    options = {"clip_low": low, "clip_high": high, "beta": beta, "ref_logp": ref, "norm": norm}
    if norm == "constant":
        options["denominator"] = count
    A = torch.tensor(advantages, dtype=torch.float64)
    found, stats = grpo_loss(logp, old, A, mask, **options)
    expected = naive_loss(tables, advantages, lengths, low, high, beta, norm, count)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)

    means = mean_stats([stats])
    assert means["tokens"] == sum(lengths)
    assert means["ratio"] == pytest.approx((logp - old).exp()[mask].mean().item())
    assert means["entropy"] == pytest.approx(-logp[mask].mean().item(), abs=1e-9)
    assert means["kl"] >= -1e-12
    assert 0 <= means["clipped"] <= 1


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), norms, st.booleans())
def test_any_cut_into_micro_batches_gives_the_same_gradient(labels, norm, weighted):  # D14
    generator = torch.Generator().manual_seed(3)
    logp, old, ref = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.0])
    mask = torch.arange(4) < torch.tensor([4, 1, 1, 3, 2])[:, None]
    weights = torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0]) if weighted else torch.ones(5)
    options = {"norm": norm, "denominator": {"sequence": 5, "token": 11, "constant": 40}[norm]}

    def part(at):
        extra = {"beta": 0.1, "ref_logp": ref[at], "weights": weights[at]}
        return grpo_loss(logp[at], old[at], advantages[at], mask[at], **extra, **options)

    whole, stats = part(torch.arange(5))
    parts = [part(torch.tensor(labels) == label) for label in set(labels)]
    expected = slopes(whole, logp)
    found = slopes(sum(loss for loss, _ in parts), logp)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert mean_stats([s for _, s in parts]) == pytest.approx(mean_stats([stats]), rel=1e-9)


def slopes(loss, logp):
    return torch.autograd.grad(loss, logp, retain_graph=True)[0]


def test_the_gradient_is_that_of_finite_differences():
    random = torch.Generator().manual_seed(0)
    logits, old, ref = (torch.randn(2, 4, 7, generator=random).double() for _ in range(3))

    def loss(logits):
        logp, mask = score(Fixed(logits), [([1, 2], [3, 4]), ([5], [6])], 0.9)
        options = {"beta": 0.3, "ref_logp": ref[:, :2, 0]}
        return grpo_loss(logp, old[:, :2, 0] - 2, torch.tensor([1.0, -0.5]), mask, **options)[0]

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_dropped_rows_stay_in_the_denominator():
    logp, mask = torch.randn(3, 2, requires_grad=True), torch.ones(3, 2)
    advantages = torch.tensor([1.0, -1.0, 0.0])  # the last row teaches nothing: nobody computes it
    whole, _ = grpo_loss(logp, None, advantages, mask)
    rest, _ = grpo_loss(logp[:2], None, advantages[:2], mask[:2], denominator=3)
    assert torch.equal(slopes(rest, logp), slopes(whole, logp))


@pytest.mark.parametrize("norm", ["sequence", "token"])
def test_a_row_that_is_masked_out_is_as_if_it_were_not_there(norm):
    logp = torch.randn(3, 2, requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])  # the last row was truncated, say
    advantages = torch.tensor([1.0, -1.0, 0.5])
    masked, _ = grpo_loss(logp, None, advantages, mask, norm=norm)
    without, _ = grpo_loss(logp[:2], None, advantages[:2], mask[:2], norm=norm)
    assert torch.equal(slopes(masked, logp), slopes(without, logp))


def test_a_loss_of_zero_still_teaches(qwen):  # D15, D16
    rows = [([5, 6], [7, 8, 2]), ([5, 6], [9, 10, 2])]
    with torch.no_grad():
        old, _ = score(qwen, rows)
    new, mask = score(qwen, rows)
    assert new.requires_grad
    assert torch.equal(new, old)  # D17: the ratio is 1
    loss, stats = grpo_loss(new, old, torch.tensor([1.0, -1.0]), mask)
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert mean_stats([stats])["clipped"] == 0
    assert mean_stats([stats])["ratio"] == pytest.approx(1, abs=1e-6)
    torch.optim.SGD(qwen.parameters(), 1e-3).step()
    after, _ = score(qwen, rows)
    assert after[0].sum() > old[0].sum() + 0.01
    assert after[1].sum() < old[1].sum() - 0.01


def test_on_policy_it_is_reinforce(gpt2):
    advantages = torch.tensor([1.0, -0.5, 0.25])
    logp, mask = score(gpt2, ROWS)
    loss, _ = grpo_loss(logp, None, advantages, mask)
    same, _ = grpo_loss(logp, logp, advantages, mask)  # an old that hangs on the graph
    reinforce = -(advantages / mask.sum(1) * (logp * mask).sum(1)).sum() / len(ROWS)
    assert torch.equal(loss, same)
    assert torch.equal(slopes(loss, logp), slopes(same, logp))
    assert (slopes(loss, logp) - slopes(reinforce, logp)).abs().max() < 1e-7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nan_is_shown_if_real_and_ignored_in_padding(bad):
    zeros, mask = torch.zeros(2, 2), torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([1.0, -1.0])
    logp = torch.tensor([[0.0, 0.0], [0.0, bad]], requires_grad=True)
    loss, _ = grpo_loss(logp, zeros, advantages, mask, beta=0.1, ref_logp=zeros)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()
    assert logp.grad[1, 1] == 0
    broken = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    assert grpo_loss(broken, zeros, advantages, mask)[0].isnan()


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


def test_the_example_of_the_file_shows_the_clip_and_the_kl(capsys):
    runpy.run_path(grpo.__file__, run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1.5", "+1", "-1.20", "+0.00", "clipped"] in rows
    assert ["1.5", "-1", "+1.50", "+1.50"] in rows
    assert ["0.5", "-1", "+0.80", "+0.00", "clipped"] in rows
    assert ["+0.6931", "0.3068", "-1.00"] in rows
