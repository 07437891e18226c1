"""Load a chat model and sample from it with Hugging Face `generate`.

In: a model folder or Hugging Face id; prompts as chat messages.
Out: `Completion`s. Their token ids are the sampled ones; text is never tokenised again.
It samples from the distribution that training scores: softmax(logits / temperature). Settings that
a checkpoint brings along (top_k, repetition_penalty, ...) never act.
Needs torch, transformers, tree.py and grpo.py. `python murphy.py` shows it at work.
"""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo import pad_rows
from tree import Completion, Messages

SLICE = 32  # after so many tokens, the completions that have ended leave the batch
OUT_OF_MEMORY = "out of memory while sampling: from here on a batch holds at most {} tokens"

# Later versions of transformers 5 call the cache of keys and values `cache`.
NAMES = inspect.signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in NAMES else "past_key_values"


def pick_device(name: str = "auto") -> torch.device:
    """The device of this name; "auto": the best one here. ValueError: PyTorch cannot use it."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Under torchrun, "cuda" is a card of this process's own: nothing may be put on card 0.
    probed = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name == "cuda" else name
    try:
        torch.empty(1, device=probed)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device {name!r} cannot be used on this machine: {reason}") from error
    return torch.device(name)


def autocast(device: torch.device) -> torch.autocast:
    """The arithmetic: bfloat16 on CUDA, float32 elsewhere.

    The trained weights stay float32: in bfloat16 a weight of 0.02 does not notice a step of 1e-6.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def check_model(path: str) -> None:
    """ValueError if a path can only mean a folder, but holds no model; the hub is not asked."""
    folder = Path(path)
    is_folder = folder.exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1
    in_folder = "/" in path and folder.parent.is_dir()  # "runs/a", if runs/ is here
    if (is_folder or in_folder) and not (folder / "config.json").is_file():
        what = "no folder with a config.json (a run that has not ended has none: --resume it)"
        raise ValueError(f"cannot load a model from {path!r}: it is {what}")


def load_model(path: str, device: torch.device, attention: str = "sdpa") -> tuple[Any, Any]:
    """Model (float32, eval mode) and tokenizer from a folder or a Hugging Face id.

    Raises ValueError with one sentence if that fails or if there is no chat template.
    """
    check_model(path)
    load = AutoModelForCausalLM.from_pretrained
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = load(path, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:  # a broken file can make transformers raise anything
        reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
        raise ValueError(f"cannot load a model from {path!r} ({reason})") from error

    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {path!r} has no chat template: take a chat model")
    if not end_tokens(model, tokenizer):
        raise ValueError(f"{path!r} names no end token, so no completion would end")
    return model.to(device).eval(), tokenizer


def special_tokens(tokenizer: Any) -> list[str]:
    """The special tokens that a message may not contain.

    Thinking tags may stay: templates look for them. So may one character: it cannot be broken.
    """
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(token for token in tokens - {"<think>", "</think>"} if len(token) > 1)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a completion: the checkpoint's and the tokenizer's.

    If the chat template puts none of them after an answer, the first special token there is one
    more: the model has learned to end with it.
    """
    own = model.generation_config.eos_token_id
    ids = own if isinstance(own, list) else [own]
    ends = {tokenizer.eos_token_id, *ids} - {None}
    # Two answers, both "ASSISTANT". The first counts: a template may end the last in another way.
    messages = [{"role": role, "content": role.upper()} for role in ("user", "assistant") * 2]
    after = tokenizer.apply_chat_template(messages, tokenize=False).partition("ASSISTANT")[2]
    special = [token for token in special_tokens(tokenizer) if token in after]
    found = tokenizer.convert_tokens_to_ids(sorted(special, key=after.index))
    if found and not ends.intersection(found):
        ends.add(found[0])
    return sorted(ends)


def encode(tokenizer: Any, messages: Messages, enable_thinking: bool = False) -> list[int]:
    """Token ids of a prompt, with the mark that asks for an answer.

    The template tokenises, too: no second BOS is added. A special token that is spelt out in a
    message is broken by a space: text is data and must not end a turn.
    """
    for token in special_tokens(tokenizer):
        broken = token[0] + " " + token[1:]
        messages = [{**m, "content": m["content"].replace(token, broken)} for m in messages]
    options = {"add_generation_prompt": True, "enable_thinking": enable_thinking}
    return list(tokenizer.apply_chat_template(messages, return_dict=False, **options))


@dataclass
class Sampler:
    """A `sample` for `build_trees`: n completions of each prompt.

    Prompts of similar length make a batch: rows * (prompt + max_new_tokens) <= sample_tokens. A
    batch that the device has no memory for is halved. Equal prompts of a batch are read once.
    Temperature 0 takes the likeliest token. A seed repeats a run if the batches are the same.
    """

    model: Any
    tokenizer: Any
    _: KW_ONLY
    max_new_tokens: int
    temperature: float = 1.0
    sample_tokens: int = 32_768
    enable_thinking: bool = False

    def __post_init__(self) -> None:
        self.ends = end_tokens(self.model, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad = self.ends[0] if pad is None else pad
        config = self.model.config.get_text_config()
        self.context = getattr(config, "max_position_embeddings", None) or float("inf")
        self.options = {"eos_token_id": self.ends, "pad_token_id": self.pad}
        self.options["logits_processor"] = [refuse_non_finite]
        if self.temperature > 0:
            self.options |= {"do_sample": True, "temperature": self.temperature, "top_k": 0}

    def __call__(self, prompts: list[Messages], n: int) -> list[list[Completion] | None]:
        """n completions of each prompt; None where prompt and answer could exceed the context."""
        encoded = [tuple(encode(self.tokenizer, p, self.enable_thinking)) for p in prompts]
        rows = [ids for ids in encoded if len(ids) + self.max_new_tokens <= self.context] * n
        rows.sort(key=lambda ids: (len(ids), ids), reverse=True)
        found: dict[tuple[int, ...], list[Completion]] = {ids: [] for ids in rows}
        with only_our_settings(self.model), autocast(self.model.device), torch.no_grad():
            while rows:
                longest = len(rows[0]) + self.max_new_tokens
                batch = rows[: max(1, self.sample_tokens // longest)]
                try:
                    sampled = self.sample_batch(batch)
                except torch.OutOfMemoryError:
                    if len(batch) == 1:
                        raise
                    self.sample_tokens = len(batch) * longest // 2
                    warnings.warn(OUT_OF_MEMORY.format(self.sample_tokens), stacklevel=2)
                    continue  # all rows again: keeping those that had ended would favour short ones
                for ids, tokens in zip(batch, sampled, strict=True):
                    found[ids].append(self.completion(ids, tokens))
                rows = rows[len(batch) :]

        answers: list[list[Completion] | None] = []
        for ids in encoded:  # equal prompts share a list: each takes n of it
            answers.append([found[ids].pop() for _ in range(n)] if ids in found else None)
        return answers

    def sample_batch(self, prompts: list[tuple[int, ...]]) -> list[list[int]]:
        """Sample one completion of each prompt.

        After SLICE tokens, completions that have ended leave the batch and the cache. Without a
        cache, all tokens are sampled in one call.
        """
        distinct = list(dict.fromkeys(prompts))
        padded = pad_rows([(prompt, ()) for prompt in distinct], self.pad)
        ids, mask = [tensor.to(self.model.device) for tensor in padded[:2]]
        cache = self.prefill(ids, mask)
        sampled: list[list[int]] = [[] for _ in prompts]
        alive = sampled  # those that have not ended
        rows = [distinct.index(prompt) for prompt in prompts]  # where in `ids` those stand
        left = self.max_new_tokens
        while alive and left:
            chosen = torch.tensor(rows, device=ids.device)
            ids, mask = ids[chosen], mask[chosen]
            if cache is not None:
                cache.batch_select_indices(chosen)
            size = left if cache is None else min(SLICE, left)
            options = {**self.options, "max_new_tokens": size, CACHE: cache}
            ids = self.model.generate(input_ids=ids, attention_mask=mask, **options)
            for tokens, new in zip(alive, ids[:, mask.shape[1] :].tolist(), strict=True):
                ends = [place + 1 for place, token in enumerate(new) if token in self.ends]
                tokens += new[: min(ends, default=size)]  # padding follows the first end token
            # `size` tokens are new, or fewer if every row has ended: then the loop ends, too.
            mask = F.pad(mask, (0, size), value=1)
            left -= size
            rows = [row for row, tokens in enumerate(alive) if tokens[-1] not in self.ends]
            alive = [alive[row] for row in rows]
        return sampled

    def prefill(self, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache | None:
        """Keys and values of all tokens but the last. None for prompts of one token, and for a
        model that keeps something else (Mamba keeps a state)."""
        cache = DynamicCache(config=self.model.config.get_text_config())
        kinds = {type(layer) for layer in cache.layers}
        keeps_more = not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        if keeps_more or not self.model._supports_default_dynamic_cache() or ids.shape[1] == 1:
            return None
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
        options = {"position_ids": positions, "logits_to_keep": 1, CACHE: cache}
        self.model(ids[:, :-1], attention_mask=mask[:, :-1], **options)
        return cache

    def completion(self, prompt: tuple[int, ...], ids: list[int]) -> Completion:
        """An answer as tokens and as text. The text lacks end and padding, but not other special
        tokens: they may mark a thought."""
        kept = [token for token in ids if token not in (*self.ends, self.pad)]
        text = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        end_of_prompt = self.tokenizer.decode(list(prompt[-16:]))
        opened = end_of_prompt.rstrip().endswith("<think>")  # by the chat template
        truncated = ids[-1] not in self.ends
        return Completion(text, list(prompt), ids, truncated=truncated, thinking=opened)


def refuse_non_finite(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if not logits.amax(-1).isfinite().all():
        raise ValueError("the model's logits are not finite: nothing can be sampled from it")
    return logits


@contextmanager
def only_our_settings(model: Any) -> Iterator[None]:
    """In the block, the model has no dropout, and no settings that `generate` could take over."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # below LoRA
    training, own = model.training, plain.generation_config
    model.eval()
    plain.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.train(training)
        plain.generation_config = own
