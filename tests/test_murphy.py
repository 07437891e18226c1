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
from tree import Completion, Node, build_trees, groups, walk

ROOT = Path(murphy.__file__).parent


def node(turn, credit=0.0, advantage=0.0, prompt=(3, 4), completion=(5, 2), **kw):
    return Node(turn, prompt_ids=list(prompt), completion_ids=list(completion), credit=credit, advantage=advantage, **kw)


def scripted(problems, rewards, turns, group_size, log):
    """Trees of the real collector over scripted rewards; the log holds every call in order."""
    count = iter(range(1000))

    def sample(prompts, n):
        log.append(f"sample {len(prompts)}x{n}")
        return [[Completion(f"p = {(i := next(count))}", [3, 4, len(p)], [5 + i, 2]) for _ in range(n)] for p in prompts]

    def execute(jobs):
        log.append(f"execute {len(jobs)}")
        return [SimpleNamespace(reward=rewards[int(code.split()[-1])], status="", feedback="e", public_passed=False) for _, code in jobs]
    return build_trees(problems, sample, execute, turns, group_size)


def a_problem():
    return SimpleNamespace(id="x", prompt="q", entry_point="p")


def test_the_worked_example_through_the_real_collector_sampled_executed_propagated_pruned_trained(monkeypatch, qwen):
    """Section 8 of the specification, a = 0, b = 1, c = 2: which nodes pass each stage, and in what order."""
    log, rewards = [], [0.5, 0, 1] + [0.5, 0, 0.5] + [1, 0, 0]
    trees = scripted([a_problem()], rewards, 2, 3, log)
    for name in ("propagate", "inter_prune", "intra_prune", "group_advantages"):
        real = getattr(murphy, name)
        monkeypatch.setattr(murphy, name, lambda *a, _real=real, _name=name, **k: log.append(_name) or _real(*a, **k))
    kept = choose(trees, Config(inter_budget=2, intra_budget=2, group_size=3))
    assert log == ["sample 1x3", "execute 3", "sample 2x3", "execute 6", "propagate", "inter_prune",
                   "intra_prune", "group_advantages", "intra_prune", "group_advantages"]
    a, b, c = trees[0].children
    assert [n.credit for n in (a, b, c)] == [0.5, 1, 1] and [n.reward for n in (a, b, c)] == [0.5, 0, 1]
    # Spread of credit: turn 1 (.5 1 1) .236, a's children (.5 0 .5) .236, b's (1 0 0) .471; the tie goes to turn 1.
    assert {id(n) for n in kept} == {id(n) for n in (a, b, *b.children[:2])}
    assert [n.kept for n in walk(trees[0])] == [True, True, False] + [False] * 3 + [True, True, False]
    assert [round(n.advantage, 3) for n in kept] == [-1, 1, 1, -1]
    trained = []
    real_rows = murphy.rows_logprobs
    monkeypatch.setattr(murphy, "rows_logprobs", lambda m, rows, *a: trained.extend(rows) or real_rows(m, rows, *a))
    update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.0), kept, Config(minibatches=1))
    assert sorted(trained) == sorted((n.prompt_ids, n.completion_ids) for n in kept)  # each once, pruned ones never


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.integers(2, 4), st.sampled_from(["mars", "mers", "none"]), st.none() | st.integers(1, 5),
       st.none() | st.integers(2, 4), st.randoms(use_true_random=False))
def test_whatever_the_tree_kept_groups_are_siblings_and_sum_to_nothing(turns, group_size, rule, inter, intra, rng):
    rewards = [rng.choice([0, 0.25, 0.5, 1]) for _ in range(400)]
    trees = scripted([a_problem(), a_problem()], rewards, turns, group_size, [])
    kept = choose(trees, Config(turns=turns, credit=rule, gamma=0.9, inter_budget=inter, intra_budget=intra))
    assert len({id(n) for n in kept}) == len(kept) == sum(n.kept for t in trees for n in walk(t))
    for tree in trees:
        survivors = [[n for n in g if n.kept] for g in groups(tree)]
        assert inter is None or sum(map(bool, survivors)) <= inter
        for members in filter(None, survivors):
            assert intra is None or len(members) <= intra
            assert abs(sum(n.advantage for n in members)) < 1e-6
            expected = group_advantages([n.credit for n in members])
            assert [n.advantage for n in members] == expected


def test_with_one_turn_every_rule_is_grpo_to_the_last_bit(qwen):
    rewards, losses = [0, 0.5, 1, 0.25], []
    for rule in ("mars", "mers", "none"):
        trees = scripted([a_problem()], rewards, 1, 4, [])
        kept = choose(trees, Config(turns=1, credit=rule))
        model = copy.deepcopy(qwen)
        torch.manual_seed(0)
        stats = update(model, torch.optim.SGD(model.parameters(), lr=0.1), kept, Config(minibatches=1))
        losses.append((stats["loss"], stats["grad_norm"], *(p.sum().item() for p in model.parameters())))
    # GRPO written out: advantages of the rewards in one group, one clipped loss over all rows.
    rows = [(n.prompt_ids, n.completion_ids) for n in kept]
    ids, attention, mask = pad_rows(rows, 0)
    logp = token_logprobs(qwen, ids, attention, mask)
    loss, _ = grpo_loss(logp, logp.detach(), torch.tensor(group_advantages(rewards)), mask)
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in qwen.parameters() if p.grad is not None)).item()
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] == pytest.approx(loss.item(), abs=1e-6) and losses[0][1] == pytest.approx(norm, rel=1e-4)


def some_nodes(n=7):
    torch.manual_seed(3)
    made = []
    for i in range(n):
        prompt, completion = torch.randint(5, 90, (2 + i % 3,)).tolist(), torch.randint(5, 90, (1 + i,)).tolist()
        made.append(node(1 + i % 2, advantage=[1.0, -0.5, 0.0, 2.0, -1.0, 0.0, 0.3][i], prompt=prompt, completion=completion))
    return made


def gradient(model, kept, seed=0, **settings):
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    update(model, torch.optim.SGD(model.parameters(), lr=0.0), kept, Config(minibatches=1, grad_clip=1e9, **settings))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("norm", ["sequence", "token", "constant"])
@pytest.mark.parametrize("packed", [True, False])
def test_neither_micro_batches_nor_packing_nor_order_change_the_gradient(qwen, norm, packed):
    whole = gradient(qwen, some_nodes(), loss_norm=norm, packed=False, micro_tokens=10_000)
    for budget in (1, 17, 40, 10_000):
        cut = gradient(qwen, some_nodes(), seed=budget, loss_norm=norm, packed=packed, micro_tokens=budget)
        assert torch.allclose(cut, whole, rtol=1e-5, atol=1e-6 * whole.abs().max())


@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
@pytest.mark.parametrize("packed", [True, False])
def test_layers_are_computed_again_where_asked_and_the_gradient_is_the_same(kind, packed, request, monkeypatch):
    model, again = request.getfixturevalue(kind), []
    kept = [node for node in some_nodes() if max(node.prompt_ids + node.completion_ids) < model.config.vocab_size]
    config = Config(minibatches=1, packed=packed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = update(model, optimizer, kept, config)
    gradient = [p.grad.clone() for p in model.parameters()]
    murphy.recompute_layers(model)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            real = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = lambda *a, real=real, **k: again.append(1) or real(*a, **k)
    assert update(model, optimizer, kept, config) == pytest.approx(expected, rel=1e-5, abs=1e-6) and again
    for p, g in zip(model.parameters(), gradient, strict=True):
        assert torch.allclose(p.grad, g, atol=1e-6)


def test_attempts_without_advantage_never_reach_the_forward_yet_stay_in_the_denominator(qwen, monkeypatch):
    rows, real = [], murphy.rows_logprobs
    monkeypatch.setattr(murphy, "rows_logprobs", lambda m, r, *a: rows.extend(r) or real(m, r, *a))
    dropped = gradient(qwen, some_nodes())
    assert len(rows) == 5
    ids, attention, mask = pad_rows([(n.prompt_ids, n.completion_ids) for n in some_nodes()], 0)
    model = copy.deepcopy(qwen)
    logp = token_logprobs(model, ids, attention, mask)
    grpo_loss(logp, None, torch.tensor([n.advantage for n in some_nodes()]), mask)[0].backward()  # all seven rows
    full = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(dropped, full, rtol=1e-5, atol=1e-6 * full.abs().max())


def test_with_the_kl_every_kept_attempt_takes_part_and_the_reference_stays(qwen, monkeypatch):
    rows, real = [], murphy.rows_logprobs
    config = Config(beta=0.1, minibatches=1, learning_rate=0.01)
    reference = murphy.reference_model(qwen, config)
    before = copy.deepcopy(qwen)
    monkeypatch.setattr(murphy, "rows_logprobs", lambda m, r, *a: rows.append((m, len(r))) or real(m, r, *a))
    optimizer = torch.optim.SGD(qwen.parameters(), lr=0.01)
    first = update(qwen, optimizer, some_nodes(), config, reference)
    second = update(qwen, optimizer, some_nodes(), config, reference)
    assert sum(n for m, n in rows if m is qwen) == 14
    assert first["kl"] == pytest.approx(0, abs=1e-9) and second["kl"] > 1e-6  # the policy left it, it did not follow
    frozen = next(m for m, _ in rows if m is not qwen)
    assert all(torch.equal(p, q) for p, q in zip(frozen.parameters(), before.parameters(), strict=True))
    assert murphy.reference_model(qwen, Config()) is None  # beta 0 loads no second model


def test_loss_is_about_zero_and_yet_it_learns(qwen):
    good, bad = node(1, advantage=1.0, completion=(7, 8)), node(1, advantage=-1.0, completion=(9, 8))
    rows = pad_rows([(n.prompt_ids, n.completion_ids) for n in (good, bad)], 0)
    before = token_logprobs(qwen, *rows).sum(1)
    stats = update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.05), [good, bad], Config(minibatches=1))
    after = token_logprobs(qwen, *rows).sum(1)
    assert abs(stats["loss"]) < 1e-6 and stats["grad_norm"] > 0 and stats["ratio"] == pytest.approx(1, abs=1e-6)
    assert after[0] > before[0] and after[1] < before[1]


def test_old_log_probabilities_are_those_before_any_step_of_the_batch(qwen):
    """Two optimizer steps: in the second the ratio has left 1, by just what the first step changed."""
    kept = some_nodes()
    config = Config(minibatches=2, grad_clip=1e9)
    torch.manual_seed(5)
    order = torch.randperm(len(kept)).tolist()
    first, second = copy.deepcopy(qwen), [kept[i] for i in order[1::2] if kept[i].advantage]
    torch.manual_seed(5)
    stats = update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.1), kept, config)
    part = [kept[i] for i in order[0::2]]
    rows, learn = [(n.prompt_ids, n.completion_ids) for n in part], torch.tensor([n.advantage for n in part])
    ids, attention, mask = pad_rows(rows, 0)
    batch = pad_rows([(n.prompt_ids, n.completion_ids) for n in second], 0)
    with torch.no_grad():
        old = token_logprobs(first, *batch)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    grpo_loss(token_logprobs(first, ids, attention, mask), None, learn, mask)[0].backward()
    optimizer.step()
    with torch.no_grad():
        ratios = (token_logprobs(first, *batch) - old)[batch[2]].exp()
    first_tokens = sum(len(n.completion_ids) for n in part if n.advantage)
    expected = (ratios.sum().item() + first_tokens) / (len(ratios) + first_tokens)
    assert abs(ratios.mean().item() - 1) > 1e-3 and stats["ratio"] == pytest.approx(expected, rel=1e-4)


def test_equal_turns_gives_each_turn_the_same_total_weight(qwen, monkeypatch):
    seen, real = [], murphy.grpo_loss
    monkeypatch.setattr(murphy, "grpo_loss", lambda *a, **k: seen.append(k["weights"]) or real(*a, **k))
    kept = [node(1, advantage=1.0, completion=(5,)), *(node(2, advantage=-1.0, completion=(6 + i,)) for i in range(3))]
    update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.0), kept, Config(minibatches=1, equal_turns=True, packed=False))
    assert sorted(torch.cat(seen).tolist()) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])


def test_truncated_completions_are_trained_on_unless_masked(qwen, monkeypatch):
    rows, real = [], murphy.rows_logprobs
    monkeypatch.setattr(murphy, "rows_logprobs", lambda m, r, *a: rows.extend(r) or real(m, r, *a))
    kept = [node(1, advantage=1.0), node(1, advantage=-1.0, completion=(8, 9), truncated=True)]
    for mask, count in ((False, 2), (True, 1)):
        rows.clear()
        update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.0), kept, Config(minibatches=1, mask_truncated=mask))
        assert len(rows) == count


def test_a_step_in_which_nothing_can_be_learned_changes_nothing(qwen):
    before = copy.deepcopy(qwen)
    trees = scripted([a_problem()], [0] * 12, 2, 3, [])
    kept = choose(trees, Config())
    stats = update(qwen, torch.optim.AdamW(qwen.parameters()), kept, Config())
    line = murphy.describe(trees, kept, 2)
    assert stats["optimizer_steps"] == 0 and line["learning"] == 0 and line["groups_with_spread"] == 0.0
    assert all(torch.equal(p, q) for p, q in zip(qwen.parameters(), before.parameters(), strict=True))


def test_a_loss_that_is_not_finite_stops_before_the_model_is_changed(qwen):
    before = copy.deepcopy(qwen)
    with pytest.raises(FloatingPointError, match="not finite"):
        update(qwen, torch.optim.SGD(qwen.parameters(), lr=0.1), [node(1, advantage=float("nan"))], Config())
    assert all(torch.equal(p, q) for p, q in zip(qwen.parameters(), before.parameters(), strict=True))


def test_describe_counts_by_turn():
    trees = scripted([a_problem()], [0, 1, 0.5] + [1, 0, 0] + [0, 0, 0], 2, 3, [])
    trees[0].children[0].truncated = True
    line = murphy.describe(trees, choose(trees, Config()), 2)
    assert line["programs"] == 9 and line["reward_1"] == 0.5 and line["solved_1"] == pytest.approx(1 / 3)
    assert line["reward_2"] == pytest.approx(1 / 6) and line["repaired"] == 0.5 and line["problems_solved"] == 1
    assert line["truncated"] == pytest.approx(1 / 9) and line["groups_with_spread"] == pytest.approx(2 / 3)
    assert line["completion_tokens"] == 2 and line["kept"] == 9 and line["learning"] == 6


@pytest.mark.parametrize("settings, sentence", [
    ({"turns": 0}, "--turns must be at least 1, got 0"), ({"group_size": 1}, "--group-size must be at least 2"),
    ({"grad_clip": 0.0}, "--grad-clip must be at least"), ({"learning_rate": 0.0}, "--learning-rate must be at least"),
    ({"gamma": 1.5}, r"--gamma must lie in \[0, 1\]"), ({"temperature": 0.0}, "--temperature must be at least 0.001, got 0.0"),
    ({"inter_budget": 0}, "--inter-budget must be at least 1"), ({"intra_budget": 1}, "--intra-budget must be at least 2"),
    ({"clip_low": -0.1}, r"--clip-low must lie in \[0, 1\]"), ({"problems": "mbpp"}, "--model is missing")])
def test_settings_that_cannot_work_are_named(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**settings)


def test_every_setting_says_what_it_is():
    for field in dataclasses.fields(Config):
        assert len(field.metadata["help"]) > 10, field.name


def command(*arguments, cwd):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(ROOT / "murphy.py"), *arguments], cwd=cwd, env=env, capture_output=True, text=True)


SMALL = ["--steps", "2", "--problems-per-step", "2", "--group-size", "3", "--eval-count", "6", "--eval-iterations", "2",
         "--log-trees-every", "1"]


def test_a_whole_run_on_the_command_line(tmp_path):
    base = murphy.toy.base_model("doctest", 0, tmp_path / "bases", steps=30, batch=16)
    done = command(*SMALL, "--model", str(base), "--output", "run", "--eval-every", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for name in ("reward_1", "solved_2", "repaired", "groups_with_spread", "truncated", "timeouts", "tokens", "loss", "grad_norm",
                 "kl", "ratio", "clipped", "sampling", "executing", "updating"):
        assert name in lines[0], name
    drawn = [json.loads(line) for line in (run / "trees.jsonl").read_text().splitlines()]
    assert len(drawn) == 4 and drawn[0]["children"][0]["turn"] == 1
    assert json.loads((run / "evaluation.json").read_text()).keys() == {"0", "1", "2"}
    assert "Iter-1" in done.stdout and "Before (6 held-out" in done.stdout and "After 2 steps" in done.stdout
    with pytest.raises(ValueError, match="holds something already"):
        murphy.output_folder(Config(output=str(run)))
    murphy.train(Config(steps=1, problems_per_step=2, group_size=4, turns=1, eval_count=2, eval_iterations=1,
                        model=str(run), output=str(tmp_path / "run2")))  # what was saved loads again; and GRPO
    assert json.loads((tmp_path / "run2" / "metrics.jsonl").read_text())["programs"] == 8


@pytest.mark.parametrize("arguments, sentence", [
    (["--gamma", "2"], "--gamma must lie in [0, 1]"), (["--model", "no/such/model"], "cannot load a model from 'no/such/model'"),
    (["--problems", "nothing.jsonl", "--model", "x"], "nothing.jsonl"), (["--credit", "best"], "invalid choice: 'best'"),
    (["--tuns", "2"], "--tuns")])
def test_a_mistake_on_the_command_line_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["murphy.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        murphy.main()
    assert stopped.value.code not in (0, None)
    assert sentence in f"{stopped.value.code} {capsys.readouterr().err}"
