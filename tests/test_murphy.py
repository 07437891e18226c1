"""murphy.py: the order of operations, what is trained on, and a whole run on the command line."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import murphy
from grpo import grpo_loss, pad_rows, token_logprobs
from murphy import Config, choose, update
from propagate import group_advantages
from support import toy
from support.run import check_hub
from support.state import recompute_layers
from tree import Completion, Node, build_trees, groups, walk

ROOT = Path(murphy.__file__).parent
KINDS = {"chain": {}, "control": {}, "feedback": {}}
SUMMARY = {"iterations": 1, "Iter-k": {}, "pass@k": {}, **KINDS}  # of an evaluation of nothing


def node(turn, advantage=0.0, prompt=(3, 4), completion=(5, 2), **more):
    ids = {"prompt_ids": list(prompt), "completion_ids": list(completion)}
    return Node(turn, advantage=advantage, **ids, **more)


def seven_nodes():
    torch.manual_seed(3)
    advantages = [1.0, -0.5, 0.0, 2.0, -1.0, 0.0, 0.3]
    made = []
    for i, advantage in enumerate(advantages):
        prompt = torch.randint(5, 90, (2 + i % 3,)).tolist()
        completion = torch.randint(5, 90, (1 + i,)).tolist()
        made.append(node(1 + i % 2, advantage, prompt, completion))
    return made


def rows_of(nodes):
    return [(n.prompt_ids, n.completion_ids) for n in nodes]


def scripted(rewards, turns, group_size, log, trees=1):
    """Trees of the real collector over scripted rewards; the log holds every call in order."""
    numbers = iter(range(1000))

    def completion(prompt):
        number = next(numbers)
        return Completion(f"def p(): return {number}", [3, 4, len(prompt)], [5 + number % 200, 2])

    def sample(prompts, n):
        log.append(f"sample {len(prompts)}x{n}")
        return [[completion(prompt) for _ in range(n)] for prompt in prompts]

    def verdict(code):
        reward = rewards[int(code.split()[-1])]
        return SimpleNamespace(reward=reward, status="", feedback="e", public_passed=False)

    def execute(jobs):
        log.append(f"execute {len(jobs)}")
        return [verdict(code) for _, code in jobs]

    problems = [SimpleNamespace(id="x", prompt="q", entry_point="p") for _ in range(trees)]
    return build_trees(problems, sample, execute, turns, group_size)


def spy(monkeypatch, name, note):
    """Let `note` see the arguments of each call of murphy's `name`."""
    real = getattr(murphy, name)

    def watched(*arguments, **named):
        note(*arguments, **named)
        return real(*arguments, **named)

    monkeypatch.setattr(murphy, name, watched)


def test_the_worked_example_through_the_real_collector(monkeypatch, qwen):
    """Section 8 of the specification: which nodes pass each stage, and in what order."""
    log, rewards = [], [0.5, 0, 1] + [0.5, 0, 0.5] + [1, 0, 0]
    trees = scripted(rewards, 2, 3, log)
    for name in ("propagate", "inter_prune", "intra_prune", "group_advantages"):
        spy(monkeypatch, name, lambda *_, name=name, **__: log.append(name))
    kept = choose(trees, Config(inter_budget=2, intra_budget=2, group_size=3))
    grown = ["sample 1x3", "execute 3", "sample 2x3", "execute 6"]
    assert log == [*grown, "propagate", "inter_prune", *["intra_prune", "group_advantages"] * 2]

    a, b, c = trees[0].children
    assert [n.credit for n in (a, b, c)] == [0.5, 1, 1]
    assert [n.reward for n in (a, b, c)] == [0.5, 0, 1]
    # Spread: turn 1 (.5 1 1) .236, a's children (.5 0 .5) .236, b's (1 0 0) .471; turn 1 wins.
    assert {id(n) for n in kept} == {id(n) for n in (a, b, *b.children[:2])}
    is_kept = [True, True, False] + [False] * 3 + [True, True, False]
    assert [n.kept for n in walk(trees[0])] == is_kept
    assert [round(n.advantage, 3) for n in kept] == [-1, 1, 1, -1]

    trained = []
    spy(monkeypatch, "rows_logprobs", lambda model, rows, *_: trained.extend(rows))
    update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.0), kept, Config(minibatches=1))
    assert sorted(trained) == sorted(rows_of(kept))  # each once, pruned ones never


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from(["mars", "mers", "none"]),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(2, 4),
    st.randoms(use_true_random=False),
)
def test_kept_groups_are_siblings_and_sum_to_nothing(turns, group_size, rule, inter, intra, rng):
    rewards = [rng.choice([0, 0.25, 0.5, 1]) for _ in range(400)]
    trees = scripted(rewards, turns, group_size, [], trees=2)
    config = Config(turns=turns, credit=rule, inter_budget=inter, intra_budget=intra)
    kept = choose(trees, config)
    assert len({id(n) for n in kept}) == len(kept) == sum(n.kept for t in trees for n in walk(t))
    for tree in trees:
        survivors = [[n for n in group if n.kept] for group in groups(tree)]
        assert inter is None or sum(map(bool, survivors)) <= inter
        for members in filter(None, survivors):
            assert intra is None or len(members) <= intra
            assert abs(sum(n.advantage for n in members)) < 1e-6
            assert [n.advantage for n in members] == group_advantages([n.credit for n in members])


def test_with_one_turn_every_rule_is_grpo_to_the_last_bit(qwen):
    rewards, seen = [0, 0.5, 1, 0.25], []
    for rule in ("mars", "mers", "none"):
        kept = choose(scripted(rewards, 1, 4, []), Config(turns=1, credit=rule))
        model = copy.deepcopy(qwen)
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stats = update(model, optimizer, kept, Config(minibatches=1))
        sums = [p.sum().item() for p in model.parameters()]
        seen.append((stats["loss"], stats["grad_norm"], sums))
    # GRPO written out: advantages of the rewards in one group, one clipped loss over all rows.
    ids, attention, mask = pad_rows(rows_of(kept), 0)
    logp = token_logprobs(qwen, ids, attention, mask)
    loss, _ = grpo_loss(logp, logp.detach(), torch.tensor(group_advantages(rewards)), mask)
    loss.backward()
    squares = [p.grad.square().sum() for p in qwen.parameters() if p.grad is not None]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == pytest.approx(loss.item(), abs=1e-6)
    assert seen[0][1] == pytest.approx(torch.sqrt(sum(squares)).item(), rel=1e-4)


def gradient(model, kept, seed=0, **more):
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update(model, optimizer, kept, Config(minibatches=1, grad_clip=1e9, **more))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def expected_gradient(model, nodes, denominator, norm="sequence"):
    """The gradient of one padded batch of all nodes."""
    model = copy.deepcopy(model)
    ids, attention, mask = pad_rows(rows_of(nodes), 0)
    logp = token_logprobs(model, ids, attention, mask)
    advantages = torch.tensor([n.advantage for n in nodes])
    grpo_loss(logp, None, advantages, mask, norm=norm, denominator=denominator)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("norm, denominator", [("sequence", 7), ("token", 28), ("constant", 112)])
def test_neither_micro_batches_nor_packing_nor_order_change_the_gradient(qwen, norm, denominator):
    whole = expected_gradient(qwen, seven_nodes(), denominator, norm)
    for budget in (1, 17, 40, 10_000):
        cut = gradient(qwen, seven_nodes(), seed=budget, loss_norm=norm, micro_tokens=budget)
        assert torch.allclose(cut, whole, rtol=1e-5, atol=1e-6 * whole.abs().max())


@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
def test_layers_are_computed_again_where_asked(kind, request):
    model, again = request.getfixturevalue(kind), []
    expected = gradient(model, seven_nodes())
    recompute_layers(model)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            real = module._gradient_checkpointing_func

            def counted(*arguments, real=real, **named):
                again.append(1)
                return real(*arguments, **named)

            module._gradient_checkpointing_func = counted
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update(model, optimizer, seven_nodes(), Config(minibatches=1, grad_clip=1e9))
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert again and torch.allclose(found, expected, atol=1e-6)


def test_attempts_without_advantage_stay_in_the_denominator_only(qwen, monkeypatch):
    rows = []
    spy(monkeypatch, "rows_logprobs", lambda model, some, *_: rows.extend(some))
    dropped = gradient(qwen, seven_nodes())
    assert len(rows) == 5
    full = expected_gradient(qwen, seven_nodes(), 7)
    assert torch.allclose(dropped, full, rtol=1e-5, atol=1e-6 * full.abs().max())


@pytest.mark.parametrize("norm, denominator", [("sequence", 6), ("token", 24), ("constant", 96)])
def test_a_masked_completion_is_in_neither_rows_nor_denominator(qwen, norm, denominator):
    nodes = seven_nodes()
    nodes[3].truncated = True  # four tokens, the largest advantage
    kept = gradient(qwen, nodes, loss_norm=norm)
    assert torch.equal(kept, gradient(qwen, seven_nodes(), loss_norm=norm))  # trained on as it is
    masked = gradient(qwen, nodes, loss_norm=norm, mask_truncated=True)
    without = expected_gradient(qwen, nodes[:3] + nodes[4:], denominator, norm)
    assert torch.allclose(masked, without, rtol=1e-5, atol=1e-6 * without.abs().max())


def test_with_the_kl_every_kept_attempt_takes_part_and_the_reference_stays(qwen, monkeypatch):
    calls = []
    config = Config(beta=0.1, minibatches=1)
    reference = copy.deepcopy(qwen).requires_grad_(False)
    before = copy.deepcopy(qwen)
    spy(monkeypatch, "rows_logprobs", lambda model, rows, *_: calls.append((model, len(rows))))
    optimizer = torch.optim.SGD(qwen.parameters(), lr=0.01)
    first = update(qwen, optimizer, seven_nodes(), config, reference)
    second = update(qwen, optimizer, seven_nodes(), config, reference)
    assert sum(count for model, count in calls if model is qwen) == 14
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-6  # the policy left the reference, which did not follow
    for p, q in zip(reference.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)


def test_loss_is_about_zero_and_yet_it_learns(qwen):
    good, bad = node(1, 1.0, completion=(7, 8)), node(1, -1.0, completion=(9, 8))
    batch = pad_rows(rows_of([good, bad]), 0)
    before = token_logprobs(qwen, *batch).sum(1)
    optimizer = torch.optim.SGD(qwen.parameters(), lr=0.05)
    stats = update(qwen, optimizer, [good, bad], Config(minibatches=1))
    after = token_logprobs(qwen, *batch).sum(1)
    assert abs(stats["loss"]) < 1e-6 and stats["grad_norm"] > 0
    assert stats["ratio"] == pytest.approx(1, abs=1e-6)
    assert after[0] > before[0] and after[1] < before[1]


def test_old_log_probabilities_are_those_before_any_step_of_the_update(qwen):
    """Two optimizer steps: in the second the ratio has left 1, by what the first one changed."""
    kept = seven_nodes()
    torch.manual_seed(5)
    order = torch.randperm(len(kept)).tolist()
    model = copy.deepcopy(qwen)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(qwen.parameters(), lr=0.1)
    stats = update(qwen, optimizer, kept, Config(minibatches=2, grad_clip=1e9))

    first = [kept[i] for i in order[0::2]]
    second = [kept[i] for i in order[1::2] if kept[i].advantage]
    ids, attention, mask = pad_rows(rows_of(first), 0)
    batch = pad_rows(rows_of(second), 0)
    with torch.no_grad():
        old = token_logprobs(model, *batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    advantages = torch.tensor([n.advantage for n in first])
    grpo_loss(token_logprobs(model, ids, attention, mask), None, advantages, mask)[0].backward()
    optimizer.step()
    with torch.no_grad():
        ratios = (token_logprobs(model, *batch) - old)[batch[2]].exp()
    first_tokens = sum(len(n.completion_ids) for n in first if n.advantage)
    expected = (ratios.sum().item() + first_tokens) / (len(ratios) + first_tokens)
    assert abs(ratios.mean().item() - 1) > 1e-3
    assert stats["ratio"] == pytest.approx(expected, rel=1e-4)


def test_a_step_in_which_nothing_can_be_learned_changes_nothing(qwen):
    before = copy.deepcopy(qwen)
    kept = choose(scripted([0] * 12, 2, 3, []), Config())
    stats = update(qwen, torch.optim.AdamW(qwen.parameters()), kept, Config())
    assert stats["optimizer_steps"] == 0 and stats["loss"] == 0
    for p, q in zip(qwen.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_gradient_that_is_not_finite_stops_before_the_model_is_changed(qwen):
    before = copy.deepcopy(qwen)
    optimizer = torch.optim.SGD(qwen.parameters(), lr=0.1)
    with pytest.raises(FloatingPointError, match="not finite"):
        update(qwen, optimizer, [node(1, float("nan"))], Config())
    for p, q in zip(qwen.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"turns": 0}, "--turns must be at least 1, got 0"),
        ({"group_size": 1}, "--group-size must be at least 2"),
        ({"grad_clip": 0.0}, "--grad-clip must be at least"),
        ({"learning_rate": float("nan")}, "--learning-rate must be at least"),
        ({"credit": "mers", "gamma": 1.5}, r"--gamma must lie in \[0, 1\]"),
        ({"gamma": 0.9}, "--gamma has no effect with --credit mars"),
        ({"limit": 5}, "--limit has no effect with the toy world doctest"),
        ({"intra_budget": 8}, "--intra-budget must be below --group-size"),
        ({"eval_problems": "mbpp"}, "--eval-problems has no effect with the toy world doctest"),
        ({"seed": 2 * 10**9}, "--seed must be at most 1000000000, got 2000000000"),
        ({"temperature": 0.0}, "--temperature must be at least 0.001, got 0.0"),
        ({"inter_budget": 0}, "--inter-budget must be at least 1"),
        ({"intra_budget": 1}, "--intra-budget must be at least 2"),
        ({"clip_low": -0.1}, r"--clip-low must lie in \[0, 1\]"),
        ({"problems": "mbpp"}, "--model is missing"),
    ],
)
def test_settings_that_cannot_work_are_named(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**given)


def test_settings_fit_what_is_trained_unless_they_are_given():
    tiny, real = Config(), Config(model="some/model", problems="mbpp")
    assert (tiny.learning_rate, tiny.max_new_tokens, tiny.feedback_tests) == (6e-4, 16, 1)
    assert (real.learning_rate, real.max_new_tokens, real.feedback_tests) == (1e-6, 1024, 3)
    assert Config(model="some/model", learning_rate=3e-6).learning_rate == 3e-6


def test_every_setting_says_what_it_is():
    assert len(dataclasses.fields(Config)) <= 45
    for field in dataclasses.fields(Config):
        assert len(field.metadata["help"]) > 10, field.name


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / "murphy.py"), *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_a_whole_run_on_the_command_line(tmp_path, monkeypatch):
    base = toy.base_model("doctest", 0, tmp_path / "bases", steps=30, batch=16)
    small = "problems-per-step=2 group-size=3 eval-count=6 eval-iterations=2 max-new-tokens=16"
    run_of = f"model={base} output=run steps=2 eval-every=1 log-trees-every=1"
    arguments = [f"--{option}" for option in f"{run_of} {small}".split()]
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    trees = [json.loads(line) for line in (run / "trees.jsonl").read_text().splitlines()]
    assert len(trees) == 4 and trees[0]["children"][0]["turn"] == 1
    assert json.loads((run / "evaluation.json").read_text()).keys() == {"0", "1", "2"}
    assert "Before: 6 held-out problems" in done.stdout and "After 2 steps" in done.stdout
    assert "--learning-rate 1e-06" in done.stdout  # what was chosen is said
    assert "Traceback" not in done.stderr

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="holds something already"):
        murphy.main(arguments)
    grpo = Config(
        model=str(run),  # what was saved loads again; and this is GRPO
        turns=1,
        credit="none",
        group_size=4,
        steps=1,
        problems_per_step=2,
        max_new_tokens=16,
        eval_count=2,
        eval_iterations=1,
        output=str(tmp_path / "grpo"),
    )
    murphy.train(grpo)
    assert json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text())["programs"] == 8


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--gamma", "2"], "--gamma has no effect with --credit mars"),
        (["--model", "./no/such/model"], "cannot load a model from './no/such/model'"),
        (["--problems", "nothing.jsonl", "--model", "x"], "nothing.jsonl"),
        (["--credit", "best"], "invalid choice: 'best'"),
        (["--tuns", "2"], "unrecognized arguments: --tuns 2. --help lists the options."),
        (["--output", "x", "--resume"], "--resume needs the --output of a run"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--turns", "two"], "invalid int value: 'two'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    tmp_path, monkeypatch, capsys, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(murphy, "check_hub", lambda name, kind: None)
    monkeypatch.setattr(sys, "argv", ["murphy.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        murphy.main()
    assert stopped.value.code not in (0, None)
    said = f"{stopped.value.code} {capsys.readouterr().err}"
    assert sentence in said and len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing is left that would refuse the next command


def test_a_model_that_only_a_hub_out_of_reach_has_is_refused_at_once_and_quietly(
    tmp_path, monkeypatch, capsys
):
    asked, cache = [], tmp_path / "cache"

    class Nowhere:
        def head(self, url, timeout):
            asked.append(url)
            raise ConnectionError("no route")

    monkeypatch.setattr("transformers.utils.hub.get_session", Nowhere)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    sentence = (
        "^murphy.py: model 'some/model' is neither here nor in the cache .* reach .no route.$"
    )
    with pytest.raises(SystemExit, match=sentence):
        murphy.main(["--model", "some/model", "--output", str(tmp_path / "run")])
    assert len(asked) == 1 and capsys.readouterr().err == ""
    check_hub(str(tmp_path), "model")  # a folder
    (cache / "models--some--model").mkdir(parents=True)
    check_hub("some/model", "model")
    assert len(asked) == 1  # what is here needs no hub
    with pytest.raises(ValueError, match="dataset 'some/model' is neither here"):
        check_hub("some/model", "dataset")


def test_a_log_that_somebody_changed_costs_a_run_nothing_but_its_drawing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(murphy, "plot", lambda folder: "the curves")
    state = SimpleNamespace(
        folder=tmp_path,
        config=Config(steps=1),
        held_out=[],
        evaluations={0: SUMMARY, 1: SUMMARY},
        save_model=lambda folder: (folder / "model").touch(),
    )
    for strange in ("3", '{"step": 0}', "no json", "[" * 99_999, "\u00e9"):
        (tmp_path / "trees.jsonl").write_text(strange + "\n", encoding="utf-8")
        murphy.finish(state)
        said = capsys.readouterr().out
        assert said.count("Not shown, since a log holds what this run did not write: ") == 1
        for whole in ("After 1 steps", "the curves", "Everything is in"):
            assert whole in said
    assert (tmp_path / "model").exists()
