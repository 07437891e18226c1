"""What all tests share: their settings, tiny models, a byte-level tokenizer and a trained model."""

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from support import toy

torch.set_num_threads(1)  # tiny models gain nothing from more; the order of sums stays the same
settings.register_profile("facts", deadline=None)
settings.load_profile("facts")

TEXTS = ["hello hello hello world", "def f(x): return x", "the quick brown fox"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# The initialiser is large: with nearly equal logits, wrong code would look right.
COMMON = {"vocab_size": 300, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture
def gpt2():
    """It has learned absolute positions, so a mistake in the positions shows."""
    torch.manual_seed(0)
    sizes = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**COMMON, **sizes)).eval()


@pytest.fixture
def qwen():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return Qwen2ForCausalLM(Qwen2Config(**COMMON, **sizes, **heads)).eval()


@pytest.fixture
def tokenizer():
    """<pad> 0, <s> 1, </s> 2. It adds <s> itself: a second one would show. The rest is default."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    fast.chat_template = CHAT
    return fast


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a model that solves a few problems of world "cutoff", and fails most."""
    return str(toy.base_model("cutoff", 0, tmp_path_factory.mktemp("bases"), steps=100, batch=16))
