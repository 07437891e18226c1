"""Tiny models and a byte-level tokenizer, made in memory: the fixtures of the shared list of pitfalls."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}")


@pytest.fixture
def gpt2():
    """Learned absolute positions: the cheap model that shows a mistake in them. A large initialiser, so that wrong
    code cannot hide behind logits that are nearly equal."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
                                      bos_token_id=1, eos_token_id=2)).eval()


@pytest.fixture
def qwen():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, max_position_embeddings=512)).eval()


@pytest.fixture
def tokenizer():
    """Byte-level BPE with <pad> 0, <s> 1, </s> 2, a post-processor that adds BOS (so a second one would show), and
    left to its defaults: padding on the right, no sampling settings."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(["hello hello hello world", "def f(x): return x", "the quick brown fox"], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT
    return fast
