"""tree.py: which nodes are sampled, executed and expanded; what a prompt holds; what HF `generate` is made to do."""

import ast
import json
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

import tree as T
from problems import Problem
from tree import Completion, Node, build_trees, draw, encode, extract_code, fitting_tokens, groups, make_sampler, refinement_messages, walk


def problem(name="p", prompt="write f"):
    return Problem(id=name, prompt=prompt, tests=[[[1], 1]], public_tests=[], entry_point="f", kind="functional")


def result(reward, feedback="it failed"):
    return SimpleNamespace(reward=reward, status="passed" if reward == 1 else "failed", feedback=feedback, public_passed=reward == 1)


class Script:
    """A policy and an executor that follow a script and keep a log; the n-th completion ever sampled is program n."""

    def __init__(self, rewards):
        self.rewards, self.log, self.count, self.prompts = rewards, [], 0, []

    def sample(self, prompts, n):
        self.log.append(("sample", len(prompts), n))
        self.prompts += prompts
        answers = []
        for _ in prompts:
            answers.append([Completion(f"f = {self.count + i}", [1], [9, 2]) for i in range(n)])
            self.count += n
        return answers

    def execute(self, jobs):
        self.log.append(("execute", len(jobs)))
        return [result(self.rewards[int(code.split()[-1])], f"feedback on {code}") for _, code in jobs]


def test_breadth_first_one_call_a_turn_for_all_problems_and_solved_nodes_are_not_expanded():
    script = Script([0, 1, 0.5, 1] + [0, 0, 1, 0] + [0] * 6)
    trees = build_trees([problem("a"), problem("b")], script.sample, script.execute, turns=3, group_size=2)
    # Turn 1: programs 0 1 | 2 3; failures 0 and 2 get 4 5 | 6 7; failures 4 5 7 get 8..13.
    assert script.log == [("sample", 2, 2), ("execute", 4), ("sample", 2, 2), ("execute", 4), ("sample", 3, 2), ("execute", 6)]
    assert [n.code for n in walk(trees[0])] == ["f = 0", "f = 1", "f = 4", "f = 5", "f = 8", "f = 9", "f = 10", "f = 11"]
    assert [[n.code for n in g] for g in groups(trees[1])] == [["f = 2", "f = 3"], ["f = 6", "f = 7"], ["f = 12", "f = 13"]]
    assert all(not n.children for tree in trees for n in walk(tree) if n.solved)
    assert [n.turn for n in walk(trees[1])] == [1, 1, 2, 2, 3, 3]


def test_a_program_that_comes_again_in_its_tree_is_not_run_again():
    jobs = []
    sample = lambda prompts, n: [[Completion("f = 1"), Completion(f"f = {len(jobs) + i}")] for i, _ in enumerate(prompts, 5)]
    execute = lambda asked: jobs.append(asked) or [result(0.5, f"on {code}") for _, code in asked]
    trees = build_trees([problem("a"), problem("b")], sample, execute, turns=2, group_size=2)
    assert [[(p.id, code) for p, code in asked] for asked in jobs] == [
        [("a", "f = 1"), ("a", "f = 5"), ("b", "f = 1"), ("b", "f = 6")],  # the same text for another problem is another job
        [("a", "f = 6"), ("a", "f = 7"), ("b", "f = 8"), ("b", "f = 9")]]
    assert all(n.reward == 0.5 and n.feedback == f"on {n.code}" for tree in trees for n in walk(tree))


def test_prompt_of_a_refinement_is_the_whole_path_and_its_feedback_once():
    script = Script([0] * 14)
    build_trees([problem(prompt="the statement")], script.sample, script.execute, turns=3, group_size=2)
    for prompt in script.prompts:
        assert [m["role"] for m in prompt] == ["user", "assistant"] * (len(prompt) // 2) + ["user"]
        assert prompt[0]["content"] == "the statement"
        for attempt, reply in zip(prompt[1::2], prompt[2::2], strict=True):
            assert reply["content"].count(f"feedback on {attempt['content']}") == 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.randoms(use_true_random=False))
def test_shape_of_any_tree(n_problems, turns, group_size, rng):
    script = Script([rng.choice([0.0, 0.5, 1.0]) for _ in range(200)])
    trees = build_trees([problem(str(i)) for i in range(n_problems)], script.sample, script.execute, turns, group_size)
    full = sum(group_size**t for t in range(1, turns + 1))
    for tree in trees:
        nodes = list(walk(tree))
        assert len(nodes) <= full and (any(n.solved for n in nodes) or len(nodes) == full)
        assert sorted(map(id, nodes)) == sorted(id(n) for g in groups(tree) for n in g)  # each node in just one group
        for node in nodes:
            assert bool(node.children) == (not node.solved and node.turn < turns)
            assert len(node.children) in (0, group_size)
            assert all(child.turn == node.turn + 1 for child in node.children)
    assert sum(1 for tree in trees for _ in walk(tree)) == script.count


def test_stop_rule_is_the_callers_so_that_evaluation_can_end_on_public_tests():
    script = Script([0.5] * 9)
    trees = build_trees([problem()], script.sample, script.execute, turns=3, group_size=1, stop=lambda n: n.reward == 0.5)
    assert len(list(walk(trees[0]))) == 1


def test_prompt_too_long_leaves_the_node_unexpanded_and_says_so():
    script = Script([0] * 20)
    first = script.sample
    sample = lambda prompts, n: [a if len(p) == 1 else None for p, a in zip(prompts, first(prompts, n), strict=True)]
    (tree,) = build_trees([problem()], sample, script.execute, turns=3, group_size=2)
    assert [n.unexpanded for n in walk(tree)] == ["too long", "too long"]
    assert "not expanded: too long" in draw(tree)


@pytest.mark.parametrize("answers, sentence", [
    ([], "got 1 prompts and answered 0"), ([[Completion("x")]], "asked for 2 completions a prompt and gave 1")])
def test_a_sampler_that_breaks_its_contract_is_named(answers, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_trees([problem()], lambda prompts, n: answers, lambda jobs: [], turns=1, group_size=2)


def test_an_executor_that_breaks_its_contract_is_named():
    with pytest.raises(ValueError, match="execute\\(\\) got 2 jobs and answered 1"):
        build_trees([problem()], Script([]).sample, lambda jobs: [result(0)], turns=1, group_size=2)


@pytest.mark.parametrize("seed", range(3))
def test_with_overlap_programs_run_while_others_are_sampled_and_the_trees_are_the_same(seed):
    rewards = [float(x) for x in torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(seed))]
    plain = Script(rewards)
    expected = build_trees([problem("a"), problem("b")], plain.sample, plain.execute, turns=3, group_size=2)
    script, running = Script(rewards), threading.Event()

    def execute(jobs):
        running.set()
        return script.execute(jobs)

    def sample(prompts, n, ended):
        answers = script.sample(prompts, n)
        running.clear()
        ended([(0, answers[0][0])])  # the others are not sampled yet
        assert running.wait(60)
        ended([(len(prompts) - 1, answers[-1][-1]), (0, answers[0][0])])
        return answers
    trees = build_trees([problem("a"), problem("b")], sample, execute, turns=3, group_size=2, overlap=True)
    assert trees == expected
    ran = [[count for kind, count, *_ in log if kind == "execute"] for log in (script.log, plain.log)]
    assert sum(ran[0]) == sum(ran[1]) and len(ran[0]) > len(ran[1]) >= 2


def test_what_an_executor_raises_beside_the_sampling_ends_the_run():
    def sample(prompts, n, ended):
        answers = Script([]).sample(prompts, n)
        ended([(0, answers[0][0])])
        return answers
    with pytest.raises(RuntimeError, match="no worker"):
        build_trees([problem()], sample, lambda jobs: (_ for _ in ()).throw(RuntimeError("no worker")), 1, 2, overlap=True)


def test_an_unscorable_problem_is_no_wrong_answer():
    bad = SimpleNamespace(reward=0.0, status="unscorable", feedback="no tests", public_passed=False)
    with pytest.raises(ValueError, match="'p' cannot be scored"):
        build_trees([problem()], Script([]).sample, lambda jobs: [bad for _ in jobs], turns=1, group_size=2)


CODE = "def f(x):\n    return x > 1"


@pytest.mark.parametrize("text, code", [
    (f"Sure.\n```python\n{CODE}\n```\nDone.", CODE),
    (f"```Python  \n{CODE}\n```", CODE), (f"```py\n{CODE}\n```", CODE), (f"```python3\n{CODE}\n```", CODE),
    (f"```\n{CODE}\n```", CODE),
    ("```\nimport heapq\ndef f(): pass\n```", "import heapq\ndef f(): pass"),  # the first word is no tag
    ("def f(): return 1\n```", "def f(): return 1"),  # a lone closing fence
    (f"```python\n{CODE}", CODE),  # never closed
    ("```python def f(): return 1\n```", "def f(): return 1"),
    ("```def f(): return 1\n```", "def f(): return 1"),
    ("```python\ndef f(): return 1```", "def f(): return 1"),  # closed on the code's own line
    (CODE, CODE),
    ("use python here", ""), ("", ""), ("```python\n```", ""), ("   \n", ""),
    (f"<think>\n```python\nwrong = 1\n```\n</think>\n```python\n{CODE}\n```", CODE),
    ("<think>\n```python\ndef f(): return 1\n```", ""),  # unfinished thought
    (f"```python\n{CODE}\n```\nUse:\n```python\nprint(f(1))\n```", CODE),
    (f"```python\n{CODE}\n```\n```bash\npip install x\n```", CODE),
    ("```bash\nls\n```", ""),
    ("```python\na = 1\n```\n```python\nb = 2\n```", "b = 2"),
    (f"```python\ndef f(): old\n```\nBetter:\n```python\n{CODE}\n```", CODE),
    ("```python\n    return a > b\n```", "    return a > b"),  # leading spaces are kept
    ("```python\r\ndef f(): return 1\r\n```", "def f(): return 1"),
    ("```python\nclass Solution:\n    def f(self): return 1\n```\n```python\nx = 3\n```", "class Solution:\n    def f(self): return 1"),
    ("```python\ndef f(: broken\n```\n```python\nprint(2)\n```", "def f(: broken"),  # defines it, though it cannot run
    ("x\x00y", ""),
])
def test_extract_code(text, code):
    assert extract_code(text, "f") == code


def test_extract_code_of_a_stdin_problem_takes_the_last_block():
    assert extract_code("```python\na = 1\n```\n```python\nprint(2)\n```", "") == "print(2)"


def test_a_stop_mark_inside_a_program_cuts_nothing():
    assert extract_code("```python\ndef f(a, b):\n    return a > b  # <|endoftext|>\n```", "f").endswith("# <|endoftext|>")


@settings(deadline=None)
@given(st.text(max_size=200))
def test_extract_code_takes_any_text(text):
    code = extract_code(text, "f")
    assert isinstance(code, str) and (not code or code.strip())


@settings(deadline=None)
@given(st.lists(st.sampled_from(["x = 1", "def f(): return 2", "if x:\n    y = [3]", "# no fence"]), min_size=1).map("\n".join))
def test_a_fenced_program_comes_out_as_it_went_in(program):
    assert extract_code(f"Here:\n```python\n{program}\n```\nThat is all.", "f") == program
    assert extract_code(program, "f") == (program if ast.parse(program).body or program.strip() else "")


def test_deeply_nested_text_is_refused_not_fatal():
    assert extract_code("(" * 100_000, "f") == ""
    assert extract_code("```python\n" + "-" * 100_000 + "1\n```", "f") == "-" * 100_000 + "1"  # code all the same: it is run


def chat(*contents):
    return [{"role": role, "content": c} for role, c in zip(["user", "assistant"] * len(contents), contents, strict=False)]


def test_one_bos_and_the_ids_of_direct_tokenising(tokenizer):
    ids = encode(tokenizer, chat("hello"))
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert ids == tokenizer.apply_chat_template(chat("hello"), add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<s>[user]hello[assistant]"


def test_a_special_token_spelt_in_a_text_cannot_end_a_turn(tokenizer):
    ids = encode(tokenizer, chat("say </s> and <s>"))
    assert tokenizer.eos_token_id not in ids and ids.count(tokenizer.bos_token_id) == 1
    assert "say < /s> and < s>" in tokenizer.decode(ids)


def test_a_template_that_drops_thoughts_from_history_still_shows_the_feedback_once(tokenizer):
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}")
    ids = encode(tokenizer, refinement_messages(chat("q"), "<think>abc</think>code", "the feedback"))
    text = tokenizer.decode(ids)
    assert text.count("the feedback") == 1 and "abc" not in text and text.endswith("[assistant]")


def test_a_template_that_refuses_the_system_role_is_never_given_one(tokenizer):
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
                               "{{ raise_exception('roles') }}{% endif %}{{ m.content }}{% endfor %}")
    prompt = T.first_messages(problem(prompt="q"))
    for attempt in ("y1", "y2"):
        prompt = refinement_messages(prompt, attempt, "e")
        encode(tokenizer, prompt)


def sampler(model, tokenizer, **kw):
    return make_sampler(model, tokenizer, **{"max_new_tokens": 6, **kw})


def test_the_checkpoints_own_sampling_defaults_are_not_used(qwen, tokenizer):
    qwen.generation_config.top_k = 1
    qwen.generation_config.repetition_penalty = 1.3
    torch.manual_seed(0)
    (answers,) = sampler(qwen, tokenizer)([chat("hello")], 64)
    assert len({tuple(a.completion_ids) for a in answers}) > 30  # 1 with the checkpoint's top_k
    assert qwen.generation_config.top_k == 1  # and they are left as they were


def mixed(model, end_bias=4.0):
    """Make the end token likely, so that rows end at unlike lengths."""
    head, real = model.get_output_embeddings(), model.get_output_embeddings().forward
    bias = torch.zeros(head.weight.shape[0]).index_fill_(0, torch.tensor([2]), end_bias)
    head.forward = lambda x: real(x) + bias
    return model


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
@pytest.mark.parametrize("temperature, top_p", [(0.7, 1.0), (1.3, 0.6)])
def test_every_row_gets_the_tokens_of_plain_generate_in_slices_of_any_size(kind, temperature, top_p, request, tokenizer, monkeypatch):
    """Nothing but the temperature and top_p stands between model and sample, and a row that leaves changes no other."""
    model = mixed(request.getfixturevalue(kind))
    model.generation_config = GenerationConfig(top_k=3, top_p=0.5, repetition_penalty=1.5, eos_token_id=2, min_new_tokens=3)
    prompts = [chat("hello"), chat("a longer prompt")]
    encoded = [encode(tokenizer, p) for p in sorted(prompts, key=lambda p: len(encode(tokenizer, p)))]
    width = max(map(len, encoded))
    ids = torch.tensor([[0] * (width - len(e)) + e for e in encoded for _ in range(5)])
    torch.manual_seed(3)
    plain = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), generation_config=GenerationConfig(
        do_sample=True, temperature=temperature, top_p=top_p, top_k=0, max_new_tokens=12, min_new_tokens=0, repetition_penalty=1.0,
        eos_token_id=2, pad_token_id=0))[:, width:].tolist()
    plain = [row[:row.index(2) + 1] if 2 in row else row for row in plain]
    assert len({len(row) for row in plain}) > 2  # else nothing leaves early
    for size in (1, 3, 12):
        shapes, real = [], model.generate
        monkeypatch.setattr(model, "generate", lambda **kw: shapes.append(len(kw["input_ids"])) or real(**kw))
        torch.manual_seed(3)
        answers = sampler(model, tokenizer, temperature=temperature, top_p=top_p, max_new_tokens=12, slice_tokens=size)(prompts, 5)
        monkeypatch.setattr(model, "generate", real)
        assert [c.completion_ids for answer in answers for c in answer] == plain
        lengths = [len(row) for row in plain]
        alive = [sum(length > made or made == 0 for length in lengths) for made in range(0, max(lengths), size)]
        assert shapes == alive and (size == 12 or min(shapes) < 10)


def test_a_sampler_tells_of_completions_as_they_end(qwen, tokenizer):
    told = []
    torch.manual_seed(3)
    answers = sampler(mixed(qwen), tokenizer, max_new_tokens=12, slice_tokens=2)([chat("hello"), chat("x")], 5, told.append)
    assert len(told) > 2 and all(told)
    assert sorted(repr(pair) for part in told for pair in part) == sorted(repr((i, c)) for i in (0, 1) for c in answers[i])
    assert max(len(c.completion_ids) for _, c in told[0]) <= 2


def test_a_batch_that_does_not_fit_is_halved_counted_and_said(qwen, tokenizer, monkeypatch):
    real, tried = qwen.generate, []

    def generate(**kw):
        tried.append(len(kw["input_ids"]))
        if len(kw["input_ids"]) > 3:
            raise torch.OutOfMemoryError("no room")
        return real(**kw)
    monkeypatch.setattr(qwen, "generate", generate)
    row = len(encode(tokenizer, chat("hello"))) + 6
    sample = sampler(qwen, tokenizer)  # whatever the budget was: what failed is halved
    with pytest.warns(UserWarning, match=rf"at most {10 * row // 4} tokens, prompts included \(halved 2 times so far\)"):
        (answers,) = sample([chat("hello")], 10)
    assert tried == [10, 5, 2, 2, 2, 2, 2] and all(len(a.completion_ids) for a in answers)
    tried.clear()
    sample([chat("hello")], 10)
    assert max(tried) == 2  # it does not try again what did not fit
    monkeypatch.setattr(qwen, "generate", lambda **kw: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning):
        sample([chat("hello")], 10)  # a single row that does not fit is no matter of batches


@pytest.mark.parametrize("limit, ranks, memory", [(None, 1, 4 << 30), ("max", 1, 4 << 30), (str(1 << 30), 1, 1 << 30), (None, 2, 2 << 30)])
def test_the_budget_is_what_fits_in_a_quarter_of_this_ranks_memory(qwen, monkeypatch, tmp_path, limit, ranks, memory):
    row = 2 * 2 * 2 * 8 * 4  # bytes of a token: keys and values, 2 layers, 2 heads of width 8, float32
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(T, "Path", lambda _: tmp_path)
    if limit:
        (tmp_path / "memory.max").write_text(limit + "\n")
    assert fitting_tokens(qwen, 15) == int(memory / 4 / (row + 6 * 4 * 300 / 16))  # six float32 copies of a row's logits, over 16 tokens


class Wrapped:
    """As peft wraps a model: generates by the base's settings; and, as some architectures are: no cache in what a forward returns."""

    def __init__(self, model):
        self.model, self.training, self.read = model, False, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def get_base_model(self):
        return self.model

    def __call__(self, *args, **kwargs):
        self.read += 1
        return SimpleNamespace(logits=self.model(*args, **kwargs).logits)


def test_a_wrapped_model_without_a_cache_to_share_gives_the_same_tokens_and_reads_ahead_only_once(qwen, tokenizer):
    plain = sampler(qwen, tokenizer, temperature=0)([chat("a"), chat("bb b")], 1)
    qwen.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, suppress_tokens=[c.completion_ids[0] for (c,) in plain])
    wrapped = Wrapped(qwen)
    sample = sampler(wrapped, tokenizer, temperature=0, token_budget=1000)
    assert sample([chat("a"), chat("bb b")], 1) == plain == sample([chat("a"), chat("bb b")], 1) and wrapped.read == 1
    assert qwen.generation_config.suppress_tokens  # and the checkpoint's settings are left as they were


def test_a_model_whose_logits_are_no_numbers_is_not_sampled(qwen, tokenizer):
    torch.nn.init.constant_(qwen.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="logits are not finite"):
        sampler(qwen, tokenizer)([chat("hello")], 2)


def test_greedy_in_a_batch_equals_greedy_alone(gpt2, tokenizer):
    prompts = [chat("a"), chat("bbb b and a longer one"), chat("cc")]
    together = sampler(gpt2, tokenizer, temperature=0)(prompts, 1)
    alone = [sampler(gpt2, tokenizer, temperature=0)([p], 1)[0] for p in prompts]
    assert [a[0].completion_ids for a in together] == [a[0].completion_ids for a in alone]


def test_a_tokenizer_without_a_pad_token_samples(gpt2, tokenizer):
    with_pad = sampler(gpt2, tokenizer, temperature=0)([chat("a"), chat("bbb b")], 1)
    tokenizer.pad_token = None
    assert sampler(gpt2, tokenizer, temperature=0)([chat("a"), chat("bbb b")], 1) == with_pad


def fake_generate(model, monkeypatch, tails):
    def generate(input_ids, **kw):
        return torch.cat([input_ids, torch.tensor(tails[:len(input_ids)])], 1)
    monkeypatch.setattr(model, "generate", generate)


@pytest.mark.parametrize("pad, tail, kept, truncated", [
    (2, [5, 6, 2, 2, 2], [5, 6, 2], False), (0, [5, 6, 2, 0, 0], [5, 6, 2], False), (0, [2, 0, 0, 0, 0], [2], False),
    (0, [5, 6, 7, 8, 9], [5, 6, 7, 8, 9], True), (0, [5, 6, 7, 8, 2], [5, 6, 7, 8, 2], False),
    (0, [5, 0, 6, 2, 0], [5, 0, 6, 2], False)])
def test_the_end_token_is_kept_padding_is_not_and_a_sampled_pad_is_a_token(qwen, tokenizer, monkeypatch, pad, tail, kept, truncated):
    tokenizer.pad_token_id = pad
    fake_generate(qwen, monkeypatch, [tail])
    ((answer,),) = sampler(qwen, tokenizer, max_new_tokens=5)([chat("q")], 1)
    assert answer.completion_ids == kept and answer.truncated == truncated


def test_every_end_token_of_the_checkpoint_ends_a_completion(qwen, tokenizer, monkeypatch):
    qwen.generation_config.eos_token_id = [2, 77]
    fake_generate(qwen, monkeypatch, [[5, 77, 0, 0]])
    ((answer,),) = sampler(qwen, tokenizer)([chat("q")], 1)
    assert answer.completion_ids == [5, 77] and not answer.truncated


def test_ids_are_kept_as_sampled_where_the_text_has_another_tokenisation(qwen, tokenizer, monkeypatch):
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "hello"]
    assert len(tokenizer("hello", add_special_tokens=False)["input_ids"]) < 5
    fake_generate(qwen, monkeypatch, [[*letters, 2]])
    (tree,) = build_trees([problem()], sampler(qwen, tokenizer), lambda jobs: [result(0) for _ in jobs], 1, 1)
    (node,) = tree.children
    assert node.completion_ids == [*letters, 2] and node.text == "hello"
    assert node.prompt_ids == encode(tokenizer, node.prompt)


def test_context_limit_is_refused_before_the_forward_with_the_whole_prompt_or_none(gpt2, tokenizer):
    short, long = chat("a"), chat("statement " + "x " * 300)
    answers = sampler(gpt2, tokenizer)([short, long], 2)
    assert len(answers[0]) == 2 and answers[1] is None
    fits = 256 - 6 - len(encode(tokenizer, chat("")))  # the last length that fits: 256 positions, 6 of them for the answer
    pad = tokenizer.convert_ids_to_tokens(5)
    assert sampler(gpt2, tokenizer)([chat(pad * fits)], 1)[0] is not None
    assert sampler(gpt2, tokenizer)([chat(pad * (fits + 1))], 1)[0] is None


def test_train_or_eval_is_left_as_it_was_and_dropout_is_off_while_sampling(gpt2, tokenizer):
    gpt2.train()
    greedy = sampler(gpt2, tokenizer, temperature=0)
    assert greedy([chat("a")], 1) == greedy([chat("a")], 1)
    assert gpt2.training


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_a_token_budget_changes_no_greedy_answer_and_bounds_each_batch(gpt2, tokenizer, monkeypatch, budget):
    shapes, real = [], gpt2.generate
    monkeypatch.setattr(gpt2, "generate", lambda **kw: shapes.append(kw["input_ids"].shape) or real(**kw))
    prompts = [chat("a" * n) for n in (1, 30, 2, 17, 3)]
    answers = sampler(gpt2, tokenizer, temperature=0, token_budget=budget)(prompts, 1)
    assert [a[0].prompt_ids for a in answers] == [encode(tokenizer, p) for p in prompts]
    assert all(rows == 1 or rows * (width + 6) <= budget for rows, width in shapes) and sum(r for r, _ in shapes) == 5
    assert answers == sampler(gpt2, tokenizer, temperature=0)(prompts, 1)


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
def test_a_prompt_read_once_for_all_its_completions_gives_the_same_tokens(kind, request, tokenizer, monkeypatch):
    """Prompts of unlike lengths, some equal: with and without the repeated cache, token for token under one seed."""
    model = request.getfixturevalue(kind)
    prompts, real, given_caches = [chat("a"), chat("bbb b and longer"), chat("a"), chat("cc")], model.generate, []

    def run(keep):
        def generate(past_key_values=None, **kw):
            given_caches.append(past_key_values is not None)
            return real(**kw, **{"past_key_values": past_key_values} if keep else {})
        monkeypatch.setattr(model, "generate", generate)
        torch.manual_seed(1)
        return sampler(model, tokenizer, temperature=0.8)(prompts, 5)
    assert run(True) == run(False) and all(given_caches)


def test_greedy_draws_once_and_repeats_the_answer(gpt2, tokenizer):
    (answers,) = sampler(gpt2, tokenizer, temperature=0)([chat("a")], 3)
    assert answers[0] == answers[1] == answers[2] and len(answers) == 3


def test_draw_shows_the_worked_example_and_counts_what_it_leaves_out():
    b = Node(1, code="def f(): return 0\n# more", reward=0.0, credit=1.0, advantage=0.71, feedback="got 0",
             children=[Node(2, code="def f(): return 1", reward=1.0, credit=1.0, advantage=1.41)])
    tree = Node(0, problem=problem("x"), children=[Node(1, code="", reward=0.5, credit=0.5, advantage=-1.41, kept=False), b])
    lines = draw(tree).split("\n")
    assert lines[0] == "problem x"
    assert lines[1] == "|-- turn 1  reward 0.50  credit 0.50  advantage -1.41  pruned  | (no code)"
    assert lines[2] == "`-- turn 1  reward 0.00  credit 1.00  advantage +0.71  | def f(): return 0  (+1 lines)"
    assert lines[3].strip() == "got 0" and lines[4].startswith("    `-- turn 2")
    assert draw(tree, width=1).split("\n")[-1] == "`-- and 1 more" and "turn 2" in draw(tree, width=1)


def test_a_tree_with_odd_characters_is_plain_json(qwen):
    tree = Node(0, problem=problem("x"), children=[Node(1, text="\ud800 \x00", code="\ud800", completion_ids=[1, 2])])
    line = json.dumps(T.to_dict(tree)).encode()
    assert json.loads(line)["children"][0]["code"] == "\ud800" and json.loads(line)["children"][0]["tokens"] == 2


def test_load_model_names_what_is_wrong(tmp_path, tokenizer, qwen):
    with pytest.raises(ValueError, match="cannot load a model from"):
        T.load_model(str(tmp_path / "nothing"), torch.device("cpu"))
    tokenizer.chat_template = None
    qwen.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        T.load_model(str(tmp_path), torch.device("cpu"))
