"""Retrospective credit: what the leaves of a rollout tree say about the attempts above them.

In: a tree of executed attempts. A node needs `.reward` (what the executor said, in [0, 1]), `.children` (the attempts
sampled from its feedback; a group) and `.turn` (1, 2, ...; 0 for a root without an attempt of its own).
Out: `.credit` at every node (`reward` is never changed), an advantage for each member of a group, and the groups and
members that a budget keeps. The order is: propagate, then prune on credit, then advantages on what is kept.

Needs numpy and nothing else of this project: copy the file into yours. `python propagate.py` prints an example.
"""

import math
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

SAME = 1e-9  # credits of a group this close are equal: rounding, divided by a std of its own size, looks like signal


def mars(node: Any) -> float:
    """Max reward (MARS, paper): an attempt is worth the best that came of it, however many repairs that took.

        R(n) = max( r(n), max over children c of R(c) )

    There is no discount, so R(n) is the largest reward in the subtree of n.
    """
    return max([_reward(node), *map(mars, node.children)])


def mers(node: Any, turns: int, gamma: float) -> float:
    """Mean reward (MERS, reported): an attempt is worth its own reward and what its children reach on average.

        R(n) = ( r(n) + gamma * mean over children c of R(c) ) / (S - s + 1)      s = node.turn, S = turns
        R(n) = r(n)   without children: solved, last turn, or left unexpanded

    ValueError: `gamma` outside [0, 1]; `turns` not a whole number of at least 1, or a node at turn S has children.
    """
    if not isinstance(turns, int) or turns < 1:
        raise ValueError(f"MERS needs turns, the paper's S, as a whole number of at least 1, not {turns!r}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], not {gamma}: it discounts what the children reach")
    if not node.children:
        return _reward(node)
    if node.turn >= turns:
        raise ValueError(f"a node of turn {node.turn} has children, but turns is {turns}: pass the tree's own S")
    # fsum rounds once, so that the mean does not depend on the order of the siblings
    below = math.fsum(mers(child, turns, gamma) for child in node.children)
    return (_reward(node) + gamma * below / len(node.children)) / (turns - node.turn + 1)


def propagate(tree: Any, rule: str = "mars", turns: int | None = None, gamma: float = 1.0) -> None:
    """Write `.credit` into `tree` and every node below it; `.reward` stays what the executor said.

    rule: "mars", "mers" (needs `turns`, S in the paper, and reads `gamma`) or "none", R(n) = r(n): the ablation, and,
    with one turn, plain GRPO. A second call gives the same credits. A root of turn 0 has no attempt of its own: its
    reward may be None and counts as 0, and its credit is used by nobody.

    >>> from types import SimpleNamespace as Node
    >>> repaired = Node(reward=0.0, turn=1, children=[Node(reward=r, turn=2, children=[]) for r in (1.0, 0.0)])
    >>> propagate(repaired); repaired.credit, repaired.reward
    (1.0, 0.0)
    >>> propagate(repaired, "mers", turns=2, gamma=0.9); repaired.credit
    0.225
    """
    rules = {"mars": mars, "mers": partial(mers, turns=turns, gamma=gamma), "none": _reward}
    if rule not in rules:
        raise ValueError(f"unknown credit rule {rule!r}: use one of {', '.join(rules)}")
    nodes = [tree]
    for node in nodes:  # the list grows while it is read, until every node is in it
        nodes += node.children
        node.credit = rules[rule](node)


def group_advantages(credits: Sequence[float], scale: bool = True, eps: float = 1e-4, ddof: int = 0) -> list[float]:
    """How much better than its siblings each member of one group did (GRPO).

        A(i) = (R(i) - mean R) / (std R + eps)          scale=False leaves the division out (Dr. GRPO)

    `credits` are those of one group: siblings, never nodes of another prompt. ddof=0 is the population's std (ours),
    ddof=1 the sample's (TRL's). A group of one, or of equal credits (within 1e-9), gets exactly 0: it teaches nothing.
    ValueError: a credit that is not finite, another ddof.

    >>> [round(a, 2) for a in group_advantages([1, 0, 0, 0])]
    [1.73, -0.58, -0.58, -0.58]
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof is 0 (std of the population) or 1 (of a sample), not {ddof}")
    values = _array(credits)
    if not _has_spread(values):
        return [0.0] * len(values)
    centred = values - values.mean()
    return (centred / (values.std(ddof=ddof) + eps) if scale else centred).tolist()


def inter_prune(groups: Sequence[Sequence[Any]], budget: int | None) -> list[Sequence[Any]]:
    """InterP: keep the `budget` groups whose credits differ most (largest std of `.credit`), in the order given.

    Ties go to the earlier turn, then to the earlier group. Groups of equal credits are dropped first, so that fewer
    than `budget` groups, or none, may be left. None keeps every group, equal ones too. ValueError: a budget below 1.
    """
    _check_budget(budget)
    if budget is None:
        return list(groups)
    # Sorted and rounded, so that mathematical ties, [0, 0, 1] and [1, 1, 0], are ties in floats too.
    credits = [np.sort(_array([node.credit for node in group])) for group in groups]
    ranks = [(-round(float(c.std()), 12), groups[i][0].turn, i) for i, c in enumerate(credits) if _has_spread(c)]
    return [groups[i] for i in sorted(i for _, _, i in sorted(ranks)[:budget])]


def intra_prune(group: Sequence[Any], budget: int | None) -> list[Any]:
    """IntraP: keep the `budget` members of one group whose credits have the largest variance, in the order given.

    The best subset is always some k highest and budget - k lowest credits, so sorting and trying every k is exact.
    Ties go to the earlier positions. None keeps all. ValueError: a budget below 1. (1 keeps one member, advantage 0.)
    """
    _check_budget(budget)
    credits = _array([node.credit for node in group])
    if budget is None or budget >= len(group):
        return list(group)
    lowest = np.argsort(credits, kind="stable").tolist()  # stable: equal credits stay in order of position
    highest = np.argsort(-credits, kind="stable").tolist()

    def subset(k: int) -> list[int]:
        low = set(lowest[: budget - k])
        return sorted(low.union([i for i in highest if i not in low][:k]))

    # The first members stand for a budget of 1, where every choice has variance 0; otherwise they win only on a tie.
    candidates = [list(range(budget)), *map(subset, range(budget + 1))]
    best = min(candidates, key=lambda kept: (-round(float(credits[kept].var()), 12), kept))
    return [group[i] for i in best]


def _reward(node: Any) -> float:
    reward = 0.0 if node.reward is None and node.turn == 0 else node.reward
    if reward is None or not math.isfinite(reward):
        raise ValueError(f"a node of turn {node.turn} has reward {reward}: execute every node, then propagate")
    return float(reward)


def _array(credits: Sequence[float]) -> np.ndarray:
    values = np.asarray(credits, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"credits must be a flat list of finite numbers, one per member of the group, not {credits}")
    return values


def _has_spread(credits: np.ndarray) -> bool:
    return len(credits) > 1 and bool(np.ptp(credits) > SAME)


def _check_budget(budget: int | None) -> None:
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(f"a pruning budget is None (keep all) or a whole number of at least 1, not {budget!r}")


def _example() -> None:
    """The specification's worked example, S = 2 turns, groups of G = 3, gamma = 0.9, step by step."""
    def group(turn: int, **rewards: float) -> list[Any]:
        return [SimpleNamespace(name=name, turn=turn, reward=r, children=[]) for name, r in rewards.items()]

    root = SimpleNamespace(turn=0, reward=None, children=group(1, a=0.5, b=0.0, c=1.0))
    a, b, c = root.children
    a.children, b.children = group(2, a1=0.5, a2=0.0, a3=0.5), group(2, b1=1.0, b2=0.0, b3=0.0)
    groups = [root.children, a.children, b.children]
    cells = {node.name: f"{node.name:<8} {node.turn}   {node.reward:6.2f}" for node in sum(groups, [])}
    for rule in ("none", "mers", "mars"):
        propagate(root, rule, turns=2, gamma=0.9)
        for siblings in groups:
            for node, advantage in zip(siblings, group_advantages([node.credit for node in siblings])):
                cells[node.name] += ("" if rule == "none" else f"   {node.credit:5.4g}") + f" {advantage:+6.2f}"
    print("c is solved at once, b on its second try, a never. Advantages A are taken within groups of siblings.\n\n"
          "attempt turn reward      A    MERS      A    MARS      A", *cells.values(), sep="\n")
    print("\nBy its own reward b is the worst of its group; by MARS it is as good as c, because the feedback on it\n"
          "led to a solution. Pruning on MARS credit:")
    print("InterP keeps 2 groups: ", " | ".join(" ".join(n.name for n in g) for g in inter_prune(groups, 2)))
    print("IntraP keeps 2 members:", " | ".join(" ".join(n.name for n in intra_prune(g, 2)) for g in groups))


if __name__ == "__main__":
    _example()
