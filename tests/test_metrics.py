"""metrics.py: a step in numbers, held against counts made by hand, and the curves of a run."""

import json
import runpy
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from support import metrics
from tree import Node


def node(turn, reward=0.0, children=(), **fields):
    solved = reward == 1.0
    kept = {"completion_ids": [5, 6], "credit": reward, **fields}
    return Node(turn, reward=reward, solved=solved, children=list(children), **kept)


def test_describe_counts_a_tree_by_hand():
    repaired = node(1, 0.0, [node(2, 1.0), node(2), node(2)], credit=1.0, truncated=True)
    hopeless = node(1, 0.5, [node(2), node(2, status="timeout"), node(2)], advantage=-1.0)
    tree = Node(0, children=[repaired, node(1, 1.0, advantage=0.7), hopeless])
    line = metrics.describe([tree], tree.children, 2)
    # Nine programs in three groups; the rewards are 0, 1, 0.5 and then 1, 0, 0 and 0, 0, 0.
    counts = {"programs": 9, "kept": 3, "learning": 2, "timeouts": 1, "no_code": 0, "too_long": 0}
    of_turns = {"reward_1": 1.5 / 3, "solved_1": 1 / 3, "reward_2": 1 / 6, "solved_2": 1 / 6}
    shares = {"problems_solved": 1, "repaired": 1 / 2, "truncated": 1 / 9, "spread_1": 1}
    shares |= {"groups_with_spread": 2 / 3, "completion_tokens": 2}  # the tokens are a mean
    assert line == pytest.approx({**counts, **of_turns, **shares})
    line = metrics.describe([Node(0, unexpanded="too long")], [], 2)
    assert (line["programs"], line["problems_solved"], line["too_long"]) == (0, 0, 1)
    for name in ("reward_1", "reward_2", "repaired", "spread_1"):
        assert line[name] is None  # a share of nothing is no number
    assert not metrics.has_spread([0.1 + 0.2, 0.3])  # the difference is rounding


@given(st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=5), min_size=1))
def test_spread_and_rewards_agree_with_a_naive_count(rewards):
    trees = [Node(0, children=[node(1, reward) for reward in group]) for group in rewards]
    line = metrics.describe(trees, [], 1)
    every, different = sum(rewards, []), [len(set(group)) > 1 for group in rewards]
    assert line["programs"] == len(every)
    assert line["reward_1"] == pytest.approx(sum(every) / len(every))
    assert line["groups_with_spread"] == pytest.approx(sum(different) / len(different))


def test_timed_adds_up_blocks_and_calls_and_what_was_interrupted(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 13.0, 20.0, 24.0])
    monkeypatch.setattr(metrics.time, "perf_counter", clock.__next__)
    seconds = {}
    with metrics.timed(seconds, "sampling"):
        pass
    assert metrics.timed(seconds, "sampling")(sum)([1, 2]) == 3
    with pytest.raises(KeyboardInterrupt), metrics.timed(seconds, "executing"):
        raise KeyboardInterrupt
    assert seconds == {"sampling": 5.0, "executing": 4.0}


def a_run(folder, steps):
    names = ["step", "reward_1", "reward_2", "optimizer_steps", *metrics.TABLE]
    row = dict.fromkeys(names + sum(metrics.PANELS, []), 0.5)
    log = ""
    for i in range(steps):
        changed = {"step": i, "reward_1": i, "repaired": 0.5 if i > 4 else None}
        log += json.dumps(row | changed) + "\n"
    (folder / "metrics.jsonl").write_text(log + '{"step": 40, "rew')  # it goes on
    before, after = [{"value": 0.25}, {"value": 0.5}], [{"value": 0.5}, {"value": 0.75}]
    summaries = {0: {"Iter-k": {"all": before}}, 40: {"Iter-k": {"all": after}}}
    (folder / "evaluation.json").write_text(json.dumps(summaries))


def test_a_run_becomes_curves_and_a_table(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    a_run(tmp_path, 40)
    lines = metrics.plot(tmp_path).splitlines()
    table = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert list(table) == ["step", "reward_1", "reward_2", *metrics.TABLE]
    assert table["reward_1"] == table["step"] == [f"{1.5 + 4 * i:.3f}" for i in range(10)]
    assert table["repaired"] == ["nan"] + ["0.500"] * 9  # without the steps that have no number

    first, rewards, *others = figures[0].axes
    assert [list(line.get_ydata()) for line in first.lines] == [[0.25, 0.5], [0.5, 0.75]]
    thin, thick = rewards.lines[:2]
    assert list(thin.get_ydata()) == list(range(40))
    assert thick.get_ydata()[9] == 37.5  # the mean of the last of ten parts: 36 to 39
    legends = [[text.get_text() for text in axes.get_legend().texts] for axes in others]
    assert legends == metrics.PANELS


def test_one_step_is_drawn(tmp_path):
    a_run(tmp_path, 1)
    table = metrics.plot(tmp_path).splitlines()
    assert table[0] == "Means of 1 parts of the run:"
    assert table[1].split() == ["step", "0.000"]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_no_run_costs_a_sentence(tmp_path, monkeypatch):
    def refused(reason, *arguments):
        monkeypatch.setattr(sys, "argv", ["metrics", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(metrics.__file__, run_name="__main__")
        assert stopped.value.code.startswith(reason) and "\n" not in stopped.value.code

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests keep their own Ctrl-C
    for wrong in ((), ("--help",), ("a", "b")):
        refused("usage: python -m support.metrics FOLDER", *wrong)
    no_run = f"metrics: {tmp_path}: expected the folder of a run ("
    refused(f"{no_run}FileNotFoundError", tmp_path)
    a_run(tmp_path, 1)
    (tmp_path / "evaluation.json").write_text('{"0": 3}')
    refused(f"{no_run}TypeError: 'int' object is not subscriptable", tmp_path)
    a_run(tmp_path, 0)
    refused(f"{no_run}ValueError: {tmp_path}/metrics.jsonl holds no step of a run", tmp_path)
    lines = ['{"step": 0}\n', "[1]\n", '{"step": 0, "reward_1": "x"}\n', '{"step": 1, "rew\n{}\n']
    for text in (*lines, "[" * 200_000 + "\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
        refused(no_run, tmp_path)
