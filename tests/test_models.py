"""The architectures and chat templates that the README names, tiny and randomly initialised: the whole path runs on each."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

from grpo import why_padded
from murphy import Config, choose, update
from tree import build_trees, encode, first_messages, make_sampler, refinement_messages, walk

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0}
# Written for these tests in the form of each family's own: marks, system role, treatment of thoughts, generation mark.
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEMPLATES = {
    "qwen3": ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '</think>' in m.content %}"
              "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
              "<think>\n\n</think>\n\n{% endif %}{% endif %}"),
    "smollm2": ("{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}" + CHATML),
    "olmo2": ("{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' and not loop.last %}"
              "{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"),
    "llama": ("{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
              "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"),
    "gemma": ("{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
              "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
              "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
              "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"),
}
GENERATION_MARK = {"qwen3": "<think>\n\n</think>\n\n", "smollm2": "<|im_start|>assistant\n", "olmo2": "<|assistant|>\n",
                   "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n", "gemma": "<start_of_turn>model\n"}


def make(family):
    torch.manual_seed(0)
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).eval()
    if family == "olmo2":
        return Olmo2ForCausalLM(Olmo2Config(**SIZES)).eval()
    if family == "gemma":  # sliding windows in every other layer: must not be packed, and its caches not be repeated blindly
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16,
                                                  layer_types=["sliding_attention", "full_attention"])).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


PROBLEM = SimpleNamespace(id="p", prompt="Write f(x): the statement.", entry_point="f")


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_step_of_murphy_on_each_family(family, tokenizer):
    tokenizer.chat_template = TEMPLATES[family]
    model = make(family)
    assert bool(why_padded(model)) == (family == "gemma")
    rewards = iter([0.0, 0.5, 1.0] * 20)
    execute = lambda jobs: [SimpleNamespace(reward=next(rewards), status="failed", feedback="THE FEEDBACK", public_passed=False)
                            for _ in jobs]
    drawn, number = make_sampler(model, tokenizer, max_new_tokens=8), iter(range(100))

    def sample(prompts, n):  # the ids are the model's; the texts are programs of which no two are equal, so each is executed
        answers = drawn(prompts, n)
        for completion in (c for completions in answers for c in completions):
            completion.text = f"f = {next(number)}"
        return answers
    torch.manual_seed(0)
    trees = build_trees([PROBLEM], sample, execute, turns=2, group_size=3)
    nodes = list(walk(trees[0]))
    assert {node.turn for node in nodes} == {1, 2}
    for node in nodes:
        text = tokenizer.decode(node.prompt_ids)
        assert text.count("the statement") == 1 and text.count("THE FEEDBACK") == node.turn - 1
        assert text.endswith(GENERATION_MARK[family])
        assert node.prompt_ids == encode(tokenizer, node.prompt) and node.prompt_ids.count(1) <= 1
    config = Config(minibatches=1, grad_clip=1e9)
    gradients = []
    for packed in (True, False):
        config.packed = packed
        copied = copy.deepcopy(model)
        torch.manual_seed(0)
        stats = update(copied, torch.optim.SGD(copied.parameters(), lr=0.0), choose(trees, config), config)
        assert stats["ratio"] == pytest.approx(1, abs=1e-5) and stats["grad_norm"] > 0
        gradients.append(torch.cat([p.grad.flatten() for p in copied.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5 * gradients[0].abs().max())


@pytest.mark.parametrize("family", TEMPLATES)
def test_sampled_tokens_are_those_of_plain_generate(family, tokenizer):
    """Greedy through our batching and the repeated cache against `generate` on each prompt alone."""
    tokenizer.chat_template = TEMPLATES[family]
    model = make(family)
    prompts = [first_messages(PROBLEM), refinement_messages(first_messages(PROBLEM), "def f(x): return 1", "got 1, expected 2")]
    for prompt, answers in zip(prompts, make_sampler(model, tokenizer, max_new_tokens=8, temperature=0)(prompts, 2), strict=True):
        ids = torch.tensor([encode(tokenizer, prompt)])
        alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected = alone[0, ids.shape[1]:].tolist()
        assert all(expected[:len(a.completion_ids)] == a.completion_ids for a in answers)


def test_thinking_follows_the_templates_own_switch(tokenizer):
    tokenizer.chat_template = TEMPLATES["qwen3"]
    prompt = refinement_messages(first_messages(PROBLEM), "<think>a thought</think>\nprogram", "fb")
    off, on = (tokenizer.decode(encode(tokenizer, prompt, enable_thinking=value)) for value in (False, True))
    assert off.endswith("<think>\n\n</think>\n\n") and on.endswith("<|im_start|>assistant\n")
    assert "a thought" not in on and "program" in on  # the template drops thoughts from the history, and nothing else


def test_several_completions_of_one_prompt_share_one_reading_of_it_where_every_layer_allows_it(tokenizer, monkeypatch):
    for family in ("qwen3", "gemma"):
        tokenizer.chat_template = TEMPLATES[family]
        model, caches = make(family), []
        real = model.generate
        monkeypatch.setattr(model, "generate", lambda past_key_values=None, _real=real, **kw: caches.append(past_key_values) or _real(
            **kw, **({} if past_key_values is None else {"past_key_values": past_key_values})))
        make_sampler(model, tokenizer, max_new_tokens=4)([first_messages(PROBLEM)], 3)
        assert (caches[0] is not None) == (family == "qwen3")
