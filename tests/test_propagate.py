"""Facts about credit, advantages and pruning, on trees made by hand or by hypothesis."""

import runpy
import statistics
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import propagate as module
from propagate import group_advantages, inter_prune, intra_prune, mars, mers, propagate


@dataclass(eq=False)
class Node:
    """The least that propagate.py asks for."""

    reward: float | None
    turn: int = 1
    children: list = ()
    credit: float | None = None


def everything(node):
    """A node and all below it."""
    nodes = [node]
    for node in nodes:  # the list grows
        nodes += node.children
    return nodes


def credited(*credits, turn=1):
    return [Node(0.0, turn, credit=credit) for credit in credits]


def kept_places(credits, budget):
    group = credited(*credits)
    kept = intra_prune(group, budget)
    assert [node.credit for node in group] == credits  # as they were
    return [group.index(node) for node in kept]


rewards = st.one_of(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]), st.floats(0, 1))


@st.composite
def trees(draw, turns=3, turn=1):
    reward = draw(rewards)
    if turn == turns or reward == 1.0:
        return Node(reward, turn)
    children = [draw(trees(turns=turns, turn=turn + 1)) for _ in range(draw(st.integers(0, 3)))]
    return Node(reward, turn, children)


# The credit rules


def test_the_worked_example(capsys):  # D24
    runpy.run_path(module.__file__, run_name="__main__")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # Attempt, turn, reward; then credit and advantage by GRPO, MERS and MARS. a has failed with 0.5
    # and its children with 0.5, 0 and 0.5. b has failed with 0, and one of its children passes.
    # MERS, gamma 0.9: a (0.5 + 0.9 * 1 / 3) / 2 = 0.4; b (0 + 0.9 * 1 / 3) / 2 = 0.15
    assert "a 1 0.50 0.5 +0.00 0.4 -0.33 0.5 -1.41" in lines
    assert "b 1 0.00 0 -1.22 0.15 -1.03 1 +0.71" in lines
    assert "c 1 1.00 1 +1.22 1 +1.35 1 +0.71" in lines
    assert "b1 2 1.00 1 +1.41 1 +1.41 1 +1.41" in lines
    # Two groups: b's children differ most; turn 1 ties with a's children and is earlier.
    assert "InterP: a b c | b1 b2 b3" in lines
    # Two of each group, by MARS: rewards alone would keep b and c.
    assert "IntraP: a b | a1 a2 | b1 b2" in lines


def test_mars_runs_bottom_up_on_credits_and_can_be_repeated():  # D25
    c = Node(0.5, 1, [Node(0.25, 2, [Node(1, 3), Node(0, 3)]), Node(0.25, 2)])
    repaired = Node(0, 1, [Node(0, 2), Node(1, 2)])
    root = Node(None, 0, [repaired, Node(1, 1), c, Node(0, 1, [Node(0, 2), Node(0, 2)])])
    for _ in range(2):
        propagate(root)
        credits = [node.credit for node in root.children]
        assert credits == [1, 1, 1, 0]
        assert [node.credit for node in c.children] == [1, 0.25]
        assert [node.reward for node in root.children] == [0, 1, 0.5, 0]  # what the executor said
    # The mean is 3/4. The std is sqrt(3)/4 of the population, and 1/2 of a sample.
    assert group_advantages(credits, eps=0) == pytest.approx([0.57735] * 3 + [-1.73205], abs=1e-5)
    assert group_advantages(credits, eps=0, ddof=1) == pytest.approx([0.5] * 3 + [-1.5], abs=1e-9)


@given(trees())
def test_mars_is_the_largest_reward_in_the_subtree(tree):
    propagate(tree, "mars")
    for node in everything(tree):
        largest = max(n.reward for n in everything(node))
        assert node.credit == mars(node) == largest


def exact_mers(node, turns, gamma):
    """The definition, in fractions."""
    if not node.children:
        return Fraction(node.reward)
    mean = sum(exact_mers(child, turns, gamma) for child in node.children) / len(node.children)
    return (Fraction(node.reward) + Fraction(gamma) * mean) / (turns - node.turn + 1)


@given(trees(), st.floats(0, 1), st.integers(3, 5))
def test_mers_is_its_definition_and_lies_between_0_and_mars(tree, gamma, turns):
    propagate(tree, "mers", turns=turns, gamma=gamma)
    for node in everything(tree):
        assert node.credit == mers(node, turns, gamma)
        assert node.credit == pytest.approx(float(exact_mers(node, turns, gamma)), abs=1e-12)
        assert 0 <= node.credit <= min(1, mars(node) + 1e-12)


@given(trees(), st.data())
def test_credit_never_falls_when_a_reward_below_or_gamma_rises(tree, data):
    raised = data.draw(st.sampled_from(everything(tree)))
    low, high = sorted(data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    before = [(mars(node), mers(node, 3, low)) for node in everything(tree)]
    raised.reward = data.draw(st.floats(raised.reward, 1))
    for node, (largest, mean) in zip(everything(tree), before, strict=True):
        assert mars(node) >= largest
        assert mers(node, 3, low) >= mean - 1e-15
        assert mers(node, 3, high) >= mers(node, 3, low) - 1e-15


@given(trees(), st.randoms(use_true_random=False), st.sampled_from(["mars", "mers", "none"]))
def test_credit_depends_neither_on_the_order_of_siblings_nor_on_other_subtrees(tree, random, rule):
    def shuffled(node):
        children = [shuffled(child) for child in node.children]
        random.shuffle(children)
        return Node(node.reward, node.turn, children)

    root = Node(1.0, 0, [tree, Node(1.0, 1)])
    propagate(root, rule, turns=3, gamma=0.7)
    for node in everything(tree):
        alone = shuffled(node)
        propagate(alone, rule, turns=3, gamma=0.7)
        assert alone.credit == node.credit  # to the last bit


@pytest.mark.parametrize(
    "bad, said",
    [
        (lambda: propagate(Node(0.0), "max"), "unknown credit rule 'max': use one of mars, mers"),
        (lambda: propagate(Node(0.0), "mers", gamma=0.9), "needs turns"),
        (lambda: mers(Node(0.0), 2, 1.5), r"gamma must lie in \[0, 1\], not 1.5"),
        (lambda: mers(Node(0.0, 1, [Node(0.0, 2)]), 1, 0.9), "turn 1 has children, but turns is 1"),
        (lambda: mers(Node(0.0), 0, 0.9), "whole number of at least 1, not 0"),
        (lambda: propagate(Node(None, 1)), "turn 1 has reward None"),
        (lambda: mars(Node(float("nan"), 2)), "turn 2 has reward nan"),
        (lambda: group_advantages([0.0, float("nan")]), "flat list of finite numbers, not .*nan"),
        (lambda: group_advantages([[0.0, 1.0]]), r"flat list of finite numbers, not \[\["),
        (lambda: group_advantages([0.0, 1.0], ddof=2), "ddof is 0"),
        (lambda: inter_prune([credited(0, 1)], 0), "whole number of at least 1, not 0"),
        (lambda: intra_prune(credited(0, 1), 1.5), "whole number of at least 1, not 1.5"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(bad, said):
    with pytest.raises(ValueError, match=said):
        bad()


# Advantages


def test_advantages_by_hand():
    # The mean is 1/4, the std sqrt(3)/4: 3/4 over it is sqrt(3), and -1/4 over it -1/sqrt(3).
    expected = [1.7317, -0.5772, -0.5772, -0.5772]
    assert group_advantages([1, 0, 0, 0]) == pytest.approx(expected, abs=1e-4)
    assert group_advantages([1, 0, 0, 0], scale=False) == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages([0.3]) == [0.0]
    assert group_advantages([]) == []


def test_equal_credits_give_exactly_zero():  # D08
    for size in range(2, 17):
        for hundredths in range(103):
            assert group_advantages([hundredths / 100] * size) == [0.0] * size
    nearly = [0.1 + 0.2, 0.3, 0.3]  # what two orders of the same sum leave behind
    assert group_advantages(nearly) == [0.0] * 3
    assert inter_prune([credited(*nearly)], 1) == []
    assert group_advantages([0, 1e-6], eps=0) == pytest.approx([-1, 1])  # small, but no rounding


@given(st.lists(rewards, min_size=2, max_size=9), st.sampled_from([0, 1]), st.booleans())
def test_advantages_against_the_standard_library(credits, ddof, scale):
    found = group_advantages(credits, scale=scale, ddof=ddof)
    if max(credits) - min(credits) <= 1e-9:
        assert found == [0.0] * len(credits)
        return
    mean = statistics.fmean(credits)
    std = statistics.stdev(credits) if ddof else statistics.pstdev(credits)
    divisor = std + 1e-4 if scale else 1.0
    assert found == pytest.approx([(c - mean) / divisor for c in credits], abs=1e-9)


# Pruning


def test_inter_prune_by_hand():
    flat, wide, narrow = credited(0.5, 0.5), credited(0, 1), credited(0.4, 0.6)
    assert inter_prune([flat, wide, narrow], 1) == [wide]
    assert inter_prune([narrow, flat, wide], 2) == [narrow, wide]  # in the order given
    assert inter_prune([flat, wide, narrow], 9) == [wide, narrow]  # without spread: dropped
    assert inter_prune([flat, wide], None) == [flat, wide]
    # Ties go to the earlier turn, then to the earlier group, also where floats round.
    first, second, late = credited(1, 1, 0), credited(0, 1, 0), credited(0, 0, 1, turn=2)
    assert inter_prune([late, first, second], 1) == [first]
    assert inter_prune([late, second, first], 2) == [second, first]
    earlier, later = credited(0.9, 0.9, 0.3), credited(0.3, 0.3, 0.9)
    assert inter_prune([earlier, later], 1) == [earlier]


grid = st.integers(0, 12).map(lambda twelfths: Fraction(twelfths, 12))
shapes = st.lists(st.tuples(st.integers(1, 3), st.lists(grid, min_size=1, max_size=4)), max_size=6)


@given(shapes, st.integers(1, 7))
def test_inter_prune_against_exact_arithmetic(shape, budget):
    groups = [credited(*map(float, credits), turn=turn) for turn, credits in shape]
    rank = []
    for i, (turn, credits) in enumerate(shape):
        if len(set(credits)) > 1:
            rank.append((-statistics.pvariance(credits), turn, i))
    expected = sorted(i for _, _, i in sorted(rank)[:budget])
    assert inter_prune(groups, budget) == [groups[i] for i in expected]


def test_intra_prune_by_hand():
    assert kept_places([0.5, 1, 0, 0.5], 2) == [1, 2]  # the variance is the largest
    assert kept_places([0.5, 1, 0, 0.4, 0.9], 3) == [1, 2, 4]
    assert kept_places([0.2, 0.9, 0.4], None) == [0, 1, 2]
    assert kept_places([0.5, 0, 1], 1) == [0]
    # Two of one and one of the other: the earliest that do, also where floats round.
    for credits in ([0, 1, 1, 0], [0.3, 0.9, 0.3, 0.9], [0.9, 0.3, 0.9, 0.3]):
        assert kept_places(credits, 3) == [0, 1, 2]


@given(st.lists(grid, min_size=1, max_size=7), st.integers(1, 8))
def test_intra_prune_is_the_best_of_all_subsets(credits, budget):
    def rank(places):
        return -statistics.pvariance([credits[i] for i in places]), places  # ties: the earlier

    subsets = combinations(range(len(credits)), min(budget, len(credits)))
    assert kept_places(list(map(float, credits)), budget) == list(min(subsets, key=rank))
