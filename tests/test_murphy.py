"""murphy.py: the order of operations, what is trained on, and a whole run on the command line."""

import copy
import json
import runpy
import signal
import sys
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector

import murphy
from grpo import grpo_loss, pad_rows, token_logprobs
from murphy import Config, choose, update
from propagate import group_advantages
from support.run import check_hub
from support.state import recompute_layers
from tests.test_ranks import lines_of, seven_nodes
from tests.test_tree import Script, grow
from tree import Node, groups, walk


def spy(monkeypatch, name, note):
    """Let `note` see the arguments of each call of murphy's `name`."""
    real = getattr(murphy, name)

    def watched(*arguments, **named):
        note(*arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(murphy, name, watched)


def rows_of(nodes):
    return [(n.prompt_ids, n.completion_ids) for n in nodes]


def weights(model):
    return parameters_to_vector(model.parameters()).detach()


def gradient(model):
    return parameters_to_vector(p.grad for p in model.parameters())


def optimise(model, nodes, lr=0.0, reference=None, **more):
    """`update` with plain SGD, as one optimizer step unless told otherwise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = Config(**{"minibatches": 1, "grad_clip": 1e9, **more})
    return update(model, optimizer, nodes, config, reference)


def gradient_of_update(model, nodes, seed=0, **more):
    torch.manual_seed(seed)  # it decides the order of the nodes
    model = copy.deepcopy(model)
    optimise(model, nodes, **more)
    return gradient(model)


def grpo_alone(model, nodes, **more):
    """Loss and gradient of one padded batch of all nodes, by grpo.py alone."""
    model = copy.deepcopy(model)
    *batch, mask = pad_rows(rows_of(nodes), 0)
    logp = token_logprobs(model, *batch, mask)
    loss, _ = grpo_loss(logp, None, torch.tensor([n.advantage for n in nodes]), mask, **more)
    loss.backward()
    return loss.item(), gradient(model)


def test_the_worked_example_through_the_real_collector(monkeypatch, qwen):
    """Section 8 of the specification: which nodes pass each stage, and in what order."""
    script = Script([0.5, 0, 1] + [0.5, 0, 0.5] + [1, 0, 0])
    trees = grow(script, "x", turns=2, group_size=3)
    for name in ("propagate", "inter_prune", "intra_prune", "group_advantages"):
        spy(monkeypatch, name, lambda *_, name=name: script.log.append(name))
    kept = choose(trees, Config(inter_budget=2, intra_budget=2, group_size=3))
    grown = [("sample", 1, 3), ("execute", 3), ("sample", 2, 3), ("execute", 6)]
    chosen = ["propagate", "inter_prune", *["intra_prune", "group_advantages"] * 2]
    assert script.log == grown + chosen
    a, b, c = trees[0].children
    assert [n.credit for n in (a, b, c)] == [0.5, 1, 1]
    assert [n.reward for n in (a, b, c)] == [0.5, 0, 1]
    # Spread: turn 1 (.5 1 1) .236, a's children (.5 0 .5) .236, b's (1 0 0) .471; turn 1 wins.
    assert {id(n) for n in kept} == {id(n) for n in (a, b, *b.children[:2])}
    assert [n.kept for n in walk(trees[0])] == [1, 1, 0] + [0, 0, 0] + [1, 1, 0]
    assert [round(n.advantage, 3) for n in kept] == [-1, 1, 1, -1]

    trained = []
    spy(monkeypatch, "rows_logprobs", lambda model, rows, *_: trained.extend(rows))
    optimise(qwen, kept)
    assert sorted(trained) == sorted(rows_of(kept))  # each once, pruned ones never


RULES = ("mars", "mers", "none")
INTER, INTRA = [st.none() | st.integers(least, 5) for least in (1, 2)]


@settings(max_examples=50)
@given(st.integers(1, 3), st.integers(2, 4), st.sampled_from(RULES), INTER, INTRA, st.randoms())
def test_kept_groups_are_siblings_and_sum_to_nothing(turns, group_size, rule, inter, intra, rng):
    rewards = rng.choices([0, 0.25, 0.5, 1], k=400)
    trees = grow(Script(rewards), "xy", turns, group_size)
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
    for rule in RULES:
        kept = choose(grow(Script(rewards), "x", 1, 4), Config(turns=1, credit=rule))
        model = copy.deepcopy(qwen)
        torch.manual_seed(0)
        stats = optimise(model, kept, lr=0.1)
        seen.append((stats["loss"], stats["grad_norm"], weights(model).tolist()))
    assert seen[0] == seen[1] == seen[2]
    # GRPO written out: advantages of the rewards in one group, one clipped loss over all rows.
    assert [node.advantage for node in kept] == group_advantages(rewards)
    loss, expected = grpo_alone(qwen, kept)
    assert seen[0][0] == pytest.approx(loss, abs=1e-6)
    assert seen[0][1] == pytest.approx(expected.norm().item(), rel=1e-4)


# A norm of the loss; its denominator for all seven nodes, and for all but the fourth. The nodes
# have 1 + 2 + ... + 7 = 28 tokens, the fourth has 4. "constant": rows * max_new_tokens, 16.
NORMS = [("sequence", 7, 6), ("token", 28, 24), ("constant", 112, 96)]


@pytest.mark.parametrize("norm, of_seven, of_six", NORMS)
def test_the_gradient_is_that_of_one_padded_batch(qwen, monkeypatch, norm, of_seven, of_six):
    def check(expected, seed=0, **more):
        found = gradient_of_update(qwen, nodes, seed, loss_norm=norm, **more)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max())

    nodes, rows = seven_nodes(), []
    spy(monkeypatch, "rows_logprobs", lambda model, some, *_: rows.extend(some))
    _, expected = grpo_alone(qwen, nodes, norm=norm, denominator=of_seven)
    for budget in (1, 17, 40, 10_000):  # however it is cut, packed and ordered
        rows.clear()
        check(expected, seed=budget, micro_tokens=budget)
        assert len(rows) == 5  # those without an advantage are in the denominator only

    nodes[3].truncated = True  # four tokens, the largest advantage
    check(expected)  # trained on as it is
    _, expected = grpo_alone(qwen, nodes[:3] + nodes[4:], norm=norm, denominator=of_six)
    check(expected, mask_truncated=True)


@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
def test_with_recomputed_layers_the_gradient_is_the_same(kind, request):
    model, calls = request.getfixturevalue(kind), []
    layer = next(part for name, part in model.named_modules() if name.endswith(".0.mlp"))
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    expected = gradient_of_update(model, seven_nodes())
    once = sum(calls)
    recompute_layers(model)
    found = gradient_of_update(model, seven_nodes())
    assert sum(calls) == 3 * once  # now in the forward, and again in the backward
    assert torch.allclose(found, expected, atol=1e-6)  # although GPT-2 has dropout


def test_with_the_kl_every_kept_attempt_takes_part_and_the_reference_stays(qwen, monkeypatch):
    calls = []
    reference = copy.deepcopy(qwen).requires_grad_(False)
    before = weights(qwen)
    spy(monkeypatch, "rows_logprobs", lambda model, rows, *_: calls.append((model, len(rows))))
    first, second = [optimise(qwen, seven_nodes(), 0.01, reference, beta=0.1) for _ in range(2)]
    assert sum(count for model, count in calls if model is qwen) == 7 + 7
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-6  # the policy left the reference, which did not follow
    assert torch.equal(weights(reference), before)


def test_loss_is_about_zero_and_yet_it_learns(qwen):
    good = Node(1, advantage=1.0, prompt_ids=[3, 4], completion_ids=[7, 8])
    bad = Node(1, advantage=-1.0, prompt_ids=[3, 4], completion_ids=[9, 8])
    batch = pad_rows(rows_of([good, bad]), 0)
    before = token_logprobs(qwen, *batch).sum(1)
    stats = optimise(qwen, [good, bad], lr=0.05)
    after = token_logprobs(qwen, *batch).sum(1)
    assert abs(stats["loss"]) < 1e-6 and stats["grad_norm"] > 0
    assert stats["ratio"] == pytest.approx(1, abs=1e-6)
    assert after[0] > before[0] and after[1] < before[1]


def test_old_log_probabilities_are_those_before_any_step_of_the_update(qwen, monkeypatch):
    """Two optimizer steps: in the second the ratio has left 1, by what the first one changed."""
    before, rows, compared = copy.deepcopy(qwen), [], []
    spy(monkeypatch, "rows_logprobs", lambda model, some, *_: rows.append(some))
    spy(monkeypatch, "grpo_loss", lambda logp, old, *_: compared.append((logp, old)))
    optimise(qwen, seven_nodes(), lr=0.1, minibatches=2)
    (_, old_of_first), (logp, old) = compared
    assert old_of_first is None  # the model has not changed yet
    expected = token_logprobs(before, *pad_rows(rows[-1], 0))
    assert torch.allclose(old, expected, atol=1e-5)
    assert (logp - old).abs().max() > 0.01


def test_where_nothing_can_be_learned_or_the_gradient_is_not_finite_nothing_changes(qwen):
    before = weights(qwen)
    kept = choose(grow(Script([0] * 12), "x", 2, 3), Config())
    stats = update(qwen, torch.optim.AdamW(qwen.parameters()), kept, Config())
    assert stats["optimizer_steps"] == stats["loss"] == 0
    assert torch.equal(weights(qwen), before)

    kept[0].advantage = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        optimise(qwen, kept, lr=0.1)
    assert torch.equal(weights(qwen), before)


def test_a_whole_run_on_the_command_line(base, tmp_path, monkeypatch, capsys):
    small = "steps=2 eval-every=1 log-trees-every=1 problems-per-step=2 group-size=3 eval-count=6"
    small += f" eval-iterations=2 max-new-tokens=16 problems=cutoff model={base} output=run"
    arguments = [f"--{option}" for option in small.split()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["murphy.py", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests keep their own Ctrl-C
    runpy.run_path(murphy.__file__, run_name="__main__")
    run = tmp_path / "run"
    assert [line["step"] for line in lines_of(run / "metrics.jsonl")] == [0, 1]
    assert [tree["step"] for tree in lines_of(run / "trees.jsonl")] == [0, 0, 1, 1]
    assert json.loads((run / "evaluation.json").read_text()).keys() == {"0", "1", "2"}
    said = capsys.readouterr().out
    for text in ("Before: 6 held-out", "After 2 steps", "--learning-rate 1e-06", "curves.png"):
        assert text in said

    # A log that somebody changed costs a run nothing but its drawing.
    spy(monkeypatch, "plot", lambda folder: (folder / "evaluation.json").write_text("[" * 99_999))
    grpo = ["--model=run", "--turns=1", "--credit=none", "--steps=1", "--output=grpo"]
    murphy.main(arguments + grpo)  # what was saved loads again
    (line,) = lines_of(tmp_path / "grpo" / "metrics.jsonl")
    assert line["programs"] == 6  # two problems, one turn, groups of three
    said = capsys.readouterr().out
    assert said.count("The run is whole, but its curves cannot be drawn: ") == 1
    for text in ("After 1 steps", "Everything is in grpo"):
        assert text in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--gamma", "1"], "--gamma has no effect with --credit mars"),
        (["--model", "./no/such/model"], "cannot load a model from './no/such/model'"),
        (["--problems", "nothing.jsonl", "--model", "x"], "nothing.jsonl is neither a file nor a"),
        (["--output", "x", "--resume"], "--resume needs the --output of a run"),
        (["--resume"], "--resume needs --output, the folder of the run"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used on this machine"),
    ],
)
def test_a_mistake_costs_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(murphy, "check_hub", lambda name, kind: None)
    with pytest.raises(SystemExit) as stopped:
        murphy.main(arguments)
    said = f"{stopped.value.code} {capsys.readouterr().err}"
    assert stopped.value.code not in (0, None) and sentence in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing is left that would refuse the next command


def test_a_hub_out_of_reach_is_asked_once_and_named(tmp_path, monkeypatch, capsys):
    cache, ask = tmp_path / "cache", Mock(side_effect=ConnectionError("no route"))
    monkeypatch.setattr("transformers.utils.hub.get_session", lambda: Mock(head=ask))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(cache))
    sentence = "^murphy.py: model 'some/model' is neither here nor .* reach .no route.$"
    with pytest.raises(SystemExit, match=sentence):
        murphy.main(["--model", "some/model", "--output", str(tmp_path / "run")])
    assert capsys.readouterr().err == ""
    check_hub(str(tmp_path), "model")  # a folder
    (cache / "models--some--model").mkdir(parents=True)
    check_hub("some/model", "model")
    assert ask.call_count == 1  # what is here needs no hub
