"""Retrospective credit: what the later attempts of a rollout tree say about the earlier ones.

In: a tree of executed attempts. A node needs `.reward` (what the executor said, in [0, 1]),
    `.children` (a group, sampled from its feedback) and `.turn` (1, 2, ...; 0: the root).
Out: `.credit` at every node (`.reward` never changes); the groups and members that a budget keeps;
    an advantage for each of them. The order is: propagate, prune, advantages of what is kept.
Paper: its abstract, or GRPO's. Reported: from two descriptions by others. Ours: decided here.
Needs numpy, and no other file of this project: copy the file. Try it: `python propagate.py`.
"""

import math
import signal
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np


def mars(node: Any) -> float:
    """Max reward (MARS, paper; formula: reported): an attempt is worth the best that came of it.

        R(n) = max(r(n), max over children c of R(c))

    No discount: R(n) is the largest reward in the subtree of n.
    """
    below = [mars(child) for child in node.children]
    return max([_reward(node), *below])


def mers(node: Any, turns: int, gamma: float) -> float:
    """Mean reward (MERS, reported): own reward plus what the children reach on average.

        R(n) = (r(n) + gamma * mean over children c of R(c)) / (S - s + 1)
        R(n) = r(n)    without children: solved, last turn, or no room for its next prompt

    s: node.turn; S: `turns`; gamma, in [0, 1]: how much the children count. The divisor is as
    reported; R stays in [0, 1]. ValueError: bad `gamma` or `turns`; a node of turn S has children.
    """
    if not isinstance(turns, int) or turns < 1:
        raise ValueError(f"MERS needs turns (S) as a whole number of at least 1, not {turns!r}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], not {gamma}")
    if not node.children:
        return _reward(node)
    if node.turn >= turns:
        raise ValueError(f"a node of turn {node.turn} has children, but turns is {turns}")
    below = [mers(child, turns, gamma) for child in node.children]
    mean = math.fsum(below) / len(below)  # fsum: the order of the siblings changes nothing
    return (_reward(node) + gamma * mean) / (turns - node.turn + 1)


def propagate(tree: Any, rule: str = "mars", turns: int | None = None, gamma: float = 1.0) -> None:
    """Write `.credit` into `tree` and every node below it.

    rule: "mars"; "mers" (needs `turns`, uses `gamma`); "none": R(n) = r(n), no propagation.
    A root of turn 0 gets a credit, too, which nobody uses. Its reward may be None: it counts as 0.

    >>> from types import SimpleNamespace as Node
    >>> repaired = Node(reward=0.0, turn=1, children=[Node(reward=1.0, turn=2, children=[])])
    >>> propagate(repaired); repaired.credit, repaired.reward
    (1.0, 0.0)
    >>> propagate(repaired, "mers", turns=2, gamma=0.9); repaired.credit
    0.45
    """
    rules = {"mars": mars, "mers": partial(mers, turns=turns, gamma=gamma), "none": _reward}
    if rule not in rules:
        raise ValueError(f"unknown credit rule {rule!r}: use one of {', '.join(rules)}")
    nodes = [tree]
    for node in nodes:  # the list grows until it holds every node
        nodes += node.children
    for node in reversed(nodes):  # children first: a rule may read child.credit (ours need not)
        node.credit = rules[rule](node)


def group_advantages(
    credits: Sequence[float], scale: bool = True, eps: float = 1e-4, ddof: int = 0
) -> list[float]:
    """How much better than its siblings each member of one group did (paper: GRPO).

        A(i) = (R(i) - mean R) / (std R + eps)       scale=False: no division (Dr. GRPO)

    `credits` belong to siblings. ddof=0: std of the population (ours); ddof=1: of a sample (TRL's).
    A group of one, or of equal credits (within 1e-9), gets 0. ValueError: not finite; other ddof.

    >>> [round(a, 2) for a in group_advantages([1, 0, 0, 0])]
    [1.73, -0.58, -0.58, -0.58]
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof is 0 (std of the population) or 1 (of a sample), not {ddof}")
    values = _array(credits)
    if not has_spread(values):
        return [0.0] * len(values)
    advantages = values - values.mean()
    if scale:
        advantages /= values.std(ddof=ddof) + eps
    return advantages.tolist()


def inter_prune(groups: Sequence[Sequence[Any]], budget: int | None) -> list[Sequence[Any]]:
    """InterP (reported): of a tree's groups keep the `budget` with the largest std, in given order.

    Ties go to the earlier turn, then to the earlier group. A budget drops groups of equal credits,
    which teach nothing, so fewer may be left. None keeps all. ValueError: a budget below 1.
    """
    _check_budget(budget)
    if budget is None:
        return list(groups)
    sort_keys = []
    for i, group in enumerate(groups):
        # Sorted and rounded, since float sums differ in the last digit: equal spreads must tie.
        credits = np.sort(_array([node.credit for node in group]))
        if has_spread(credits):
            sort_keys.append((-round(float(credits.std()), 12), group[0].turn, i))
    best = sorted(sort_keys)[:budget]
    return [groups[i] for i in sorted(i for _, _, i in best)]


def intra_prune(group: Sequence[Any], budget: int | None) -> list[Any]:
    """IntraP (reported): keep the `budget` members whose credits vary most, in given order.

    The best subset is always some k highest and budget - k lowest credits, since a member in the
    middle adds less variance than one at an end. So every k is tried. Ties go to the earlier
    positions. None keeps all. ValueError: a budget below 1.
    """
    _check_budget(budget)
    credits = _array([node.credit for node in group])
    if budget is None or budget >= len(group):
        return list(group)
    lowest = np.argsort(credits, kind="stable").tolist()  # stable: earlier positions come first
    highest = np.argsort(-credits, kind="stable").tolist()
    candidates = [list(range(budget))]  # wins if no subset has variance, as with a budget of 1
    for k in range(budget + 1):
        low = set(lowest[: budget - k])
        high = [i for i in highest if i not in low][:k]
        candidates.append(sorted([*low, *high]))
    sort_keys = [(-round(float(credits[kept].var()), 12), kept) for kept in candidates]
    return [group[i] for i in min(sort_keys)[1]]


def _reward(node: Any) -> float:
    if node.reward is None and node.turn == 0:
        return 0.0
    if node.reward is None or not math.isfinite(node.reward):
        raise ValueError(f"a node of turn {node.turn} has reward {node.reward}: execute it first")
    return float(node.reward)


def _array(credits: Sequence[float]) -> np.ndarray:
    values = np.asarray(credits, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"credits must be a flat list of finite numbers, not {credits}")
    return values


def has_spread(credits: Sequence[float]) -> bool:
    """Whether the credits of a group differ; a group of equal credits teaches nothing."""
    return len(credits) > 1 and bool(np.ptp(credits) > 1e-9)  # a smaller difference is rounding


def _check_budget(budget: int | None) -> None:
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(f"a budget is None or a whole number of at least 1, not {budget!r}")


def _example() -> None:
    """A worked example: S = 2 turns, groups of 3, gamma = 0.9."""

    def node(name: str, reward: float | None, *children: Any) -> Any:
        turn = len(name)  # "" is the root, "a" is of turn 1, "a1" of turn 2
        return SimpleNamespace(name=name, turn=turn, reward=reward, children=list(children))

    a = node("a", 0.5, node("a1", 0.5), node("a2", 0.0), node("a3", 0.5))
    b = node("b", 0.0, node("b1", 1.0), node("b2", 0.0), node("b3", 0.0))
    root = node("", None, a, b, node("c", 1.0))
    groups = [root.children, a.children, b.children]
    lines = {n.name: f"{n.name:8}{n.turn:4}{n.reward:8.2f}" for group in groups for n in group}
    for rule in ("none", "mers", "mars"):
        propagate(root, rule, turns=2, gamma=0.9)
        for group in groups:
            advantages = group_advantages([n.credit for n in group])
            for n, advantage in zip(group, advantages, strict=True):
                lines[n.name] += f"{n.credit:10.4g}{advantage:+7.2f}"
    print("Three attempts a, b, c at one problem. a1 to a3 correct a, b1 to b3 correct b. c passes")
    print("at once; b1 passes, too. R: credit. A: advantage among siblings. gamma is 0.9.\n")
    print("attempt turn  reward  none:  R      A  MERS:  R      A  MARS:  R      A")
    print(*lines.values(), sep="\n")
    print("\nMERS of b: (0 + 0.9 * (1 + 0 + 0) / 3) / 2 = 0.15.")
    print("MARS of b: max(0, 1, 0, 0) = 1. So b is as good as c, though its own reward is 0.\n")
    print("Pruning on MARS credit. InterP keeps the 2 groups that differ most, IntraP 2 of each:")
    within = [intra_prune(group, 2) for group in groups]
    for title, kept in (("InterP:", inter_prune(groups, 2)), ("IntraP:", within)):
        print(title, " | ".join(" ".join(n.name for n in group) for group in kept))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    _example()
