"""support/sampling.py: what a prompt holds, what `generate` is made to do, what a start refuses."""

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import GenerationConfig

import support.sampling as S
from grpo import select_logprobs
from support.sampling import Sampler, autocast, encode, load_model, pick_device
from tests.test_packing import tiny
from tree import refinement_messages

CPU = torch.device("cpu")
CONV = {"layer_types": ["conv", "full_attention"]}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FAMILIES = {"GPT2": {}, "Qwen2": {}, "Lfm2": CONV, "Gemma3Text": WINDOW}


@pytest.fixture(params=FAMILIES)
def model(request):
    """Gemma's first layer sees 8 tokens; that of Lfm2 keeps a state that is no key and no value."""
    return tiny(request.param, vocab_size=300, **FAMILIES[request.param])


def chat(text):
    return [{"role": "user", "content": text}]


def sampler(model, tokenizer, **options):
    return Sampler(model, tokenizer, **{"max_new_tokens": 6, **options})


def ends_often(model, bias=4.0):
    """The model with the end token made likely, so that rows end at different lengths."""
    added = torch.zeros(300)
    added[2] = bias
    model.get_output_embeddings().register_forward_hook(lambda _, states, logits: logits + added)
    return model


def watch(model, look):
    """Let `look` see the prompts of each call of `generate`."""
    real = model.generate

    def watched(input_ids, **options):
        look(input_ids)
        return real(input_ids=input_ids, **options)

    model.generate = watched


def test_one_bos_and_the_ids_of_direct_tokenising(tokenizer):
    direct = tokenizer.apply_chat_template(chat("hello"), add_generation_prompt=True)
    assert encode(tokenizer, chat("hello")) == direct["input_ids"]
    assert tokenizer.decode(direct["input_ids"]) == "<s>[user]hello[assistant]"
    # A special token that is spelt in a text does not end a turn.
    ids = encode(tokenizer, chat("say </s> and <s>"))
    assert tokenizer.eos_token_id not in ids and ids.count(tokenizer.bos_token_id) == 1
    assert "say < /s> and < s>" in tokenizer.decode(ids)


@pytest.mark.parametrize("special", [False, True])
def test_a_template_that_drops_old_thoughts_still_shows_the_feedback_once(tokenizer, special):
    tokenizer.add_tokens([AddedToken(f"<{mark}>", special=special) for mark in ("think", "/think")])
    content = "{{ m.content.split('</think>')[-1] }}"
    tokenizer.chat_template = "{% for m in messages %}" + content + "{% endfor %}[assistant]"
    prompt = refinement_messages(chat("q"), "<think>abc</think>code", "the feedback")
    text = tokenizer.decode(encode(tokenizer, prompt))
    assert text.count("the feedback") == 1 and "abc" not in text and "code" in text


def test_a_thought_that_the_template_opens_is_told(qwen, tokenizer):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}[answer]"
    mark = "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    for template, on in [(plain + mark, True), (plain + mark, False), (plain, True)]:
        tokenizer.chat_template = template
        prompts = [chat("q"), chat("write <think>")]
        answers = sampler(qwen, tokenizer, enable_thinking=on, max_new_tokens=1)(prompts, 1)
        opened = on and template != plain
        assert [answer.thinking for (answer,) in answers] == [opened, opened]


def test_a_prompt_may_fill_the_context_or_be_one_token_and_is_never_cut(gpt2, tokenizer):
    fits = 256 - 6 - len(encode(tokenizer, chat("")))  # 256 positions, 6 of them for the answer
    letter = tokenizer.convert_ids_to_tokens(5)
    short, longest, too_long = chat("a"), chat(letter * fits), chat(letter * (fits + 1))
    answers = sampler(gpt2, tokenizer)([too_long, short, longest, too_long], 2)
    assert answers[0] is None and answers[3] is None
    for prompt, pair in ((short, answers[1]), (longest, answers[2])):
        assert [answer.prompt_ids for answer in pair] == [encode(tokenizer, prompt)] * 2
    tokenizer.chat_template = "x"
    ((answer,),) = sampler(gpt2, tokenizer)([chat("")], 1)
    assert len(answer.prompt_ids) == 1 and answer.completion_ids


def test_the_checkpoints_own_settings_are_not_used_and_a_seed_repeats_a_run(qwen, tokenizer):
    torch.manual_seed(0)
    (expected,) = sampler(qwen, tokenizer)([chat("hello")], 64)
    assert len({tuple(answer.completion_ids) for answer in expected}) > 30  # 1 with top_k=1

    own = GenerationConfig(top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=9.0, eos_token_id=2)
    own.update(num_beams=3, bad_words_ids=[[5]], min_new_tokens=6, suppress_tokens=[6])
    own.update(no_repeat_ngram_size=1, sequence_bias={(7,): 99.0}, max_length=3)
    qwen.generation_config = own
    torch.manual_seed(0)
    assert sampler(qwen, tokenizer)([chat("hello")], 64) == [expected]
    assert qwen.generation_config is own and own.top_k == 1  # left as they were


@torch.no_grad()
def test_the_sampled_distribution_is_the_scored_one(model, tokenizer, monkeypatch):  # D04
    """A token is drawn from what grpo.py scores it with, for each row alone, without padding."""
    outputs = []
    real = ends_often(model).generate

    def generate(**given):
        outputs.append(real(**given, output_scores=True, return_dict_in_generate=True))
        return outputs[-1].sequences

    model.generate = generate
    monkeypatch.setattr(S, "SLICE", 2)
    torch.manual_seed(3)
    sampler(model, tokenizer, temperature=0.7)([chat("hello"), chat("a longer prompt")], 4)

    checked = 0
    for output in outputs:
        start = output.sequences.shape[1] - len(output.scores)
        for row, text in enumerate(output.sequences.tolist()):
            padding = text.index(1)  # up to BOS
            logits = model(torch.tensor([text[padding:]])).logits[0]
            for place, scores in enumerate(output.scores, start):
                if 2 in text[:place]:
                    break  # this row has ended
                before = logits[place - padding - 1].expand(300, 300)
                expected = select_logprobs(before, torch.arange(300), 0.7)  # of each of 300 tokens
                drawn_from = scores[row].log_softmax(-1)
                torch.testing.assert_close(drawn_from, expected, atol=1e-4, rtol=0)
                checked += 1
    assert checked > 10


@pytest.mark.parametrize("size, budget, temperature", [(2, 10_000, 0), (32, 100, 1e-5)])
def test_a_row_is_as_if_alone(model, tokenizer, monkeypatch, size, budget, temperature):
    """Batches, left padding, shared prompts, rows that leave and dropout change no token."""
    monkeypatch.setattr(S, "SLICE", size)
    ends_often(model, 2.0)
    prompts = [chat("a"), chat("bbb b and a longer one " * 2), chat("cc"), chat("a")]
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    greedy = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": 2, "pad_token_id": 0}
    alone = [model.generate(torch.tensor([ids]), **greedy)[0].tolist() for ids in encoded]
    shapes = []
    watch(model.train(), lambda ids: shapes.append(ids.shape))
    options = {"temperature": temperature, "max_new_tokens": 9, "sample_tokens": budget}
    answers = sampler(model, tokenizer, **options)(prompts, 2)
    for ids, text, pair in zip(encoded, alone, answers, strict=True):
        found = [(answer.prompt_ids, answer.completion_ids, answer.truncated) for answer in pair]
        assert found == [(ids, text[len(ids) :], text[-1] != 2)] * 2
    assert model.training and all(rows * width <= budget for rows, width in shapes)


def test_a_prompt_is_read_once_and_rows_that_ended_leave(qwen, tokenizer, monkeypatch):
    monkeypatch.setattr(S, "SLICE", 2)
    read, rows = [], []
    embed = qwen.model.embed_tokens
    embed.register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
    watch(ends_often(qwen), lambda ids: rows.append(len(ids)))
    torch.manual_seed(3)
    (answers,) = sampler(qwen, tokenizer, max_new_tokens=12)([chat("a long prompt " * 9)], 8)
    lengths = [len(answer.completion_ids) for answer in answers]
    assert rows == [sum(n > made for n in lengths) for made in range(0, max(lengths), 2)]
    assert len(set(rows)) > 2
    assert sum(read) < len(answers[0].prompt_ids) + 8 * 12  # the prompt, and each new token


def test_a_batch_that_does_not_fit_is_halved_and_said(qwen, tokenizer):
    tried, largest = [], 3

    def refuse(ids):
        tried.append(len(ids))
        if len(ids) > largest:
            raise torch.OutOfMemoryError("no room")

    watch(qwen, refuse)
    sample = sampler(qwen, tokenizer, max_new_tokens=2)
    with pytest.warns(UserWarning) as said:
        (answers,) = sample([chat("hello")], 10)
    row = len(encode(tokenizer, chat("hello"))) + 2
    quarter = 10 * row // 4  # ten rows, halved twice
    assert str(said[-1].message).endswith(f"a batch holds at most {quarter} tokens")
    assert tried == [10, 5, 2, 2, 2, 2, 2] and len(said) == 2
    assert all(answer.completion_ids for answer in answers)

    sample([chat("hello")], 10)
    assert tried[7:] == [2] * 5  # it does not try again what did not fit
    largest = 0
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning):
        sample([chat("hello")], 10)  # nothing is left to halve


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_and_the_model_is_as_before(qwen, tokenizer, bad):
    own = qwen.generation_config
    ends_often(qwen, bad).train()
    with pytest.raises(ValueError, match="logits are not finite"):
        sampler(qwen, tokenizer)([chat("hello")], 2)
    assert qwen.training and qwen.generation_config is own


def answer_of(model, tokenizer, tail):
    """The sampler's answer if `generate` gives these ids behind the prompt."""
    new = torch.tensor([tail])
    model.generate = lambda input_ids, **_: torch.cat([input_ids, new], 1)
    return sampler(model, tokenizer, max_new_tokens=len(tail))([chat("q")], 1)[0][0]


CASES = [  # pad token, what `generate` gives, how much of it is kept, truncated
    (2, [5, 6, 2, 2, 2], 3, False),
    (None, [5, 6, 2, 2, 2], 3, False),
    (0, [5, 77, 0, 0, 0], 2, False),
    (0, [2, 0, 0, 0, 0], 1, False),
    (0, [5, 6, 7, 8, 9], 5, True),
    (0, [5, 6, 7, 8, 2], 5, False),
    (0, [5, 0, 6, 2, 0], 4, False),
]


@pytest.mark.parametrize("pad, tail, kept, truncated", CASES)
def test_the_end_token_is_kept_and_padding_is_not(qwen, tokenizer, pad, tail, kept, truncated):
    """A padding token before the end was sampled, and is kept."""
    tokenizer.pad_token_id = pad
    qwen.generation_config.eos_token_id = [77]  # the tokenizer's is 2: both end a completion
    answer = answer_of(qwen, tokenizer, tail)
    assert answer.completion_ids == tail[:kept] and answer.truncated == truncated
    assert answer.text == tokenizer.decode([token for token in tail if token not in (0, 2, 77)])


def test_ids_and_text_are_kept_as_sampled(qwen, tokenizer):  # D02
    letters = tokenizer.convert_tokens_to_ids(list("hello"))
    assert len(tokenizer("hello", add_special_tokens=False)["input_ids"]) < 5
    answer = answer_of(qwen, tokenizer, [*letters, 2])
    assert answer.completion_ids == [*letters, 2] and answer.text == "hello"

    tokenizer.add_tokens([AddedToken("</think>", special=True)])
    tokenizer.clean_up_tokenization_spaces = True
    tail = tokenizer("x , y</think>z .</s>", add_special_tokens=False)["input_ids"]
    assert answer_of(qwen, tokenizer, tail).text == "x , y</think>z ."


def test_a_device_that_is_not_here_is_refused_and_the_cpu_computes_in_float32():
    assert pick_device("cpu") == CPU
    assert pick_device().type in ("cpu", "cuda", "mps")
    with pytest.raises(ValueError, match=r"^device 'cuda:99' cannot be used on this machine: .+$"):
        pick_device("cuda:99")
    with pytest.raises(ValueError, match="^device 'gpu' cannot be used on this machine: .+: gpu$"):
        pick_device("gpu")
    with autocast(CPU):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def test_under_torchrun_a_process_tries_its_own_card(monkeypatch):
    tried = []
    monkeypatch.setattr(torch, "empty", lambda _, device: tried.append(device))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [pick_device("cuda").type, pick_device("cuda:1").index] == ["cuda", 1]
    assert tried == ["cuda:3", "cuda:1"]  # anything on card 0 would take memory there


def test_load_model_gives_float32_or_says_why_not(tmp_path, tokenizer, qwen, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    reason = r"no folder with a config.json \(a run that has not ended has none: --resume it\)$"
    for path in ("/no/such", "./model", "../model", "~/model", "a/b/c", "runs/model", "runs"):
        with pytest.raises(ValueError, match=f"cannot load a model from '{path}': it is {reason}"):
            load_model(path, CPU)  # no hub is asked

    tokenizer.save_pretrained("model")
    qwen.bfloat16().train().save_pretrained("model")
    model, _ = load_model("./model", CPU)
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}

    Path("model/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        load_model("./model", CPU)
    for name in ("model.safetensors", "config.json"):
        Path("model", name).write_text("{")
        with pytest.raises(ValueError, match=r"cannot load a model from './model' \(.+\)$"):
            load_model("./model", CPU)


ENDS = [  # what a template puts after an answer, and after the last; how much of three is kept
    ("<|im_end|><|im_start|>", "<|im_end|>", 2),  # no config names it, but it ends an answer
    ("<|im_end|>", "</s>", 3),  # the last answer ends as the config says
    ("", "", 3),
]


@pytest.mark.parametrize("between, last, kept", ENDS)
def test_an_end_token_that_only_the_template_knows(qwen, tokenizer, between, last, kept):
    tokenizer.add_tokens([AddedToken(f"<|im_{at}|>", special=True) for at in ("start", "end")])
    end = f"{{% if loop.last %}}{last}{{% else %}}{between}{{% endif %}}"
    tokenizer.chat_template = f"<s>{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
    sampled = [5, tokenizer.convert_tokens_to_ids("<|im_end|>"), 6]
    assert answer_of(qwen, tokenizer, sampled).completion_ids == sampled[:kept]
