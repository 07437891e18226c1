"""Facts about packing: packed rows give the numbers and gradients of padded rows.

The tiny models have a large initialiser: with nearly equal logits, wrong code would look right.
"""

from functools import cache
from itertools import accumulate

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import grpo_loss, pad_rows, token_logprobs
from support import packing
from support.packing import can_pack, lay_out, micro_batches, rows_logprobs

TOKENS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = ["Qwen3", "Llama", "Olmo2", "GPT2", "Qwen2", "Phi3"]
ROWS = [([3, 4, 5], [8, 9, 10]), ([3, 4, 5], [9]), ([3, 4, 5, 9, 6], [8, 9, 11, 12])]


def tiny(family, **changes):
    """A new model of this family, the same every time."""
    torch.manual_seed(0)
    sizes = {**TOKENS, **LAYERS, **HEADS, **changes}
    config = getattr(transformers, f"{family}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


shared = cache(tiny)  # for tests that leave the model as they found it


def padded(model, rows, temperature=1.0):
    return token_logprobs(model, *pad_rows(rows, 0), temperature)


def gradient(model, logp, mask):
    """All gradients of the loss as one vector; 0 for what no row reached."""
    advantages = torch.linspace(-1, 1.5, len(mask))
    loss, _ = grpo_loss(logp, None, advantages, mask, beta=0.1, ref_logp=logp.detach() + 0.1)
    weights = list(model.parameters())
    grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def assert_packed_is_padded(model, rows, expected):
    """Log-probabilities and gradients within 1e-5 of those of padded rows."""
    found, mask = rows_logprobs(model, rows, 0.8)
    assert torch.equal(mask, pad_rows(rows, 0)[2])
    assert not found[~mask].any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # the type, too
    if mask.any():
        right = gradient(model, expected, mask)
        error = (gradient(model, found, mask) - right).abs().max()
        assert error <= 1e-5 * right.abs().max()


@st.composite
def forests(draw):
    """Rows of rollout trees: siblings share a prompt, and later prompts begin with earlier rows."""
    words = st.lists(st.integers(3, 8), min_size=1, max_size=5)  # so that completions share too
    prompts = draw(st.lists(words, min_size=1, max_size=2))
    rows = []
    while prompts and len(rows) <= 8:
        prompt = prompts.pop()
        for completion in draw(st.lists(st.just([]) | words, min_size=1, max_size=3)):
            rows.append((prompt, completion))
            if len(prompt) < 12 and draw(st.booleans()):
                prompts.append(prompt + completion + draw(words))
    return draw(st.permutations(rows))


@settings(max_examples=50)
@given(forests())
def test_the_tree_holds_each_prefix_once(rows):
    tokens, positions, ends, before = lay_out(rows)
    seen = []  # by each slot: the tokens of the slots that it sees
    for q in range(len(tokens)):
        visible = [k for k in range(len(tokens)) if k <= q < ends[k]]
        seen.append(tuple(tokens[k] for k in visible))
        assert [positions[k] for k in visible] == list(range(positions[q] + 1))

    prefixes, expected = set(), []
    for prompt, completion in rows:
        prefixes |= set(accumulate([(token,) for token in [*prompt, *completion]]))
        expected += [(*prompt, *completion[:t]) for t in range(len(completion))]
    assert sorted(seen) == sorted(prefixes)
    assert [seen[slot] for slot in before] == expected


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(rows=forests())
def test_packed_rows_are_padded_rows(family, rows):
    model = shared(family)
    assert can_pack(model)
    assert_packed_is_padded(model, rows, padded(model, rows, 0.8))


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa_in_blocks"])
def test_packed_is_padded_with_eager_attention_and_in_blocks(family, attention, monkeypatch):
    model = tiny(family)
    expected = padded(model, ROWS, 0.8)
    monkeypatch.setattr(packing, "BLOCK", 4)  # slots that skip all later ones
    model.set_attn_implementation(attention)
    assert_packed_is_padded(model, ROWS, expected)


def test_under_autocast_log_probabilities_are_float32_and_those_of_padded_rows():
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = rows_logprobs(shared("Llama"), ROWS)
        assert found.dtype == torch.float32
        # bfloat16 has 8 bits: logits of a few units are off by some hundredths.
        assert (found - padded(shared("Llama"), ROWS)).abs().max() < 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_packed_is_padded_with_flex_attention():
    model = tiny("Llama", head_dim=16)  # it has no backward on the CPU, and no smaller heads
    rows = [(prompt * 45, completion) for prompt, completion in ROWS]  # more than one block
    expected = padded(model, rows)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found, _ = rows_logprobs(model, rows)
    assert can_pack(model)
    assert torch.allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_dropout_and_flags_stay_the_callers():  # D17
    model = tiny("GPT2", resid_pdrop=0.1)
    for training in (False, True):
        model.train(training)
        first, second = [rows_logprobs(model, ROWS)[0] for _ in range(2)]
        assert torch.equal(first, second) == (not training)
    assert all(module.training for module in model.modules())


def test_with_two_threads_the_gradient_is_the_same_bit_for_bit_each_time():
    """All rows are scored at one slot: indexing would add their gradients in any order."""
    model = tiny("Qwen3", hidden_size=256)
    rows = [([3, 4, 5, 6], [3 + i % 90]) for i in range(200)]
    torch.set_num_threads(2)
    try:
        first, *others = [gradient(model, *rows_logprobs(model, rows)) for _ in range(3)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(first, other) for other in others)


def test_logits_are_made_a_chunk_at_a_time_and_only_for_completions(monkeypatch):  # D19
    model = tiny("Qwen3")
    expected = padded(model, ROWS, 0.8)
    made = []
    model.lm_head.register_forward_hook(lambda _, __, out: made.append(out.numel() // 97))
    monkeypatch.setattr(packing, "CHUNK", 3 * 97)  # three positions; the vocabulary has 97 ids
    assert_packed_is_padded(model, ROWS, expected)
    # Eight tokens are made as 3 + 3 + 2, in the forward and again in the backward. The model makes
    # one position by itself, and two were made before that, to see that its logits are ours.
    assert sorted(made) == [1, 1, 1, 2, 2, 3, 3, 3, 3]


WINDOW = {"sliding_window": 2}
MIXED = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        ("Mistral", WINDOW, "not every layer has full attention"),
        ("Qwen3", MIXED, "not every layer has full attention"),
        ("NanoChat", {"final_logit_softcapping": 2.0}, "it changes the logits that its output"),
        ("Granite", {"logits_scaling": 3.0}, "it changes the logits that its output"),
        ("Bloom", {}, "its attention takes no mask of four dimensions"),
    ],
)
def test_a_model_that_packing_is_wrong_for_is_padded_with_one_warning(family, changes, reason):
    model = tiny(family, **changes)
    with pytest.warns(UserWarning, match="gets padded rows") as said:
        # Before any other forward pass. Packed, all rows are 12 tokens; padded, the first two are.
        assert micro_batches(model, ROWS, 12) == [[0, 1], [2]]
        logp, _ = rows_logprobs(model, ROWS)
        again, _ = rows_logprobs(model, ROWS)
    assert len(said) == 1
    assert reason in str(said[0].message)
    assert torch.equal(logp, again)
    for row, found in zip(ROWS, logp, strict=True):
        assert torch.allclose(found[: len(row[1])], padded(model, [row])[0], atol=1e-5)


@settings(max_examples=50)
@given(forests(), st.integers(1, 60), st.booleans())
def test_micro_batches_keep_the_budget_and_every_row(rows, budget, packed):
    model = shared("Llama" if packed else "Mistral")
    batches = micro_batches(model, rows, budget)
    assert sorted(sum(batches, [])) == list(range(len(rows)))
    for batch in batches:
        part = [rows[i] for i in batch]
        computed = len(lay_out(part)[0]) if packed else pad_rows(part, 0)[0].numel()
        assert computed <= budget or len(batch) == 1


def test_siblings_go_into_one_batch():
    rows = [([3 + i % 3] * 50, [6 + i] * 10) for i in range(12)]
    batches = micro_batches(shared("Llama"), rows, 90)  # a prompt and four completions
    assert sorted(map(sorted, batches)) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert len(micro_batches(shared("Mistral"), rows, 120)) == 6  # two whole rows each
