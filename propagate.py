"""Retrospective credit: what the leaves of a rollout tree say about the attempts above them.

In: a tree of executed attempts. A node needs `.reward` (what the executor said, in [0, 1]), `.children` (the attempts
sampled from its feedback; a group) and `.turn` (1, 2, ...; 0 for a root without an attempt of its own).
Out: `.credit` at every node (`reward` is never changed), an advantage for each member of a group, and the groups and
members that a budget keeps. The order is: propagate, then prune on credit, then advantages on what is kept.

Needs numpy and nothing else of this project: copy the file into yours. `python propagate.py` prints an example.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

# Credits of one group that lie within SAME of each other count as equal: they come out of means, and rounding must not
# become a signal once it is divided by a standard deviation of the same tiny size.
SAME = 1e-9


def mars(node: Any) -> float:
    """Max reward (MARS, paper): an attempt is worth the best that came of it, however many repairs that took.

        R(n) = max( r(n), max over children c of R(c) )

    There is no discount, so R(n) is the largest reward in the subtree of n.
    """
    return _leaves_first(node, _max_rule)[-1][1]


def mers(node: Any, turns: int, gamma: float) -> float:
    """Mean reward (MERS, reported): an attempt is worth its own reward and what its children reach on average.

        R(n) = ( r(n) + gamma * mean over children c of R(c) ) / (S - s + 1)      s = node.turn, S = turns
        R(n) = r(n)   without children: solved, last turn, or left unexpanded

    ValueError: `gamma` outside [0, 1]; `turns` not a whole number of at least 1, or a node at turn S has children.
    """
    return _leaves_first(node, _mean_rule(turns, gamma))[-1][1]


def propagate(tree: Any, rule: str = "mars", turns: int | None = None, gamma: float = 1.0) -> None:
    """Write `.credit` into `tree` and every node below it, leaves first; `.reward` stays what the executor said.

    rule: "mars", "mers" (needs `turns`, S in the paper, and reads `gamma`) or "none", R(n) = r(n): the ablation, and
    plain GRPO. Each node is visited once, and a second call gives the same credits. A root of turn 0 has no attempt of
    its own: its reward may be None and counts as 0, and its credit is used by nobody.

    >>> from types import SimpleNamespace as Node
    >>> repaired = Node(reward=0.0, turn=1, children=[Node(reward=r, turn=2, children=[]) for r in (1.0, 0.0)])
    >>> propagate(repaired); repaired.credit, repaired.reward
    (1.0, 0.0)
    >>> propagate(repaired, "mers", turns=2, gamma=0.9); repaired.credit
    0.225
    """
    if rule not in ("mars", "mers", "none"):
        raise ValueError(f'unknown credit rule {rule!r}: use "mars", "mers" or "none"')
    if rule == "mers" and turns is None:
        raise ValueError('rule "mers" needs turns, the number S of turns in the tree; pass turns=S')
    step = _mean_rule(turns, gamma) if rule == "mers" else _max_rule if rule == "mars" else _own_rule
    for node, credit in _leaves_first(tree, step):
        node.credit = credit


def group_advantages(credits: Sequence[float], scale: bool = True, eps: float = 1e-4, ddof: int = 0) -> list[float]:
    """How much better than its siblings each member of one group did (GRPO).

        A(i) = (R(i) - mean R) / (std R + eps)          scale=False leaves the division out (Dr. GRPO)

    `credits` are those of one group: siblings, never nodes of another prompt. ddof=0 is the population's std (ours),
    ddof=1 the sample's (TRL's). A group of one, or of equal credits (within 1e-9), gets exactly 0: it teaches nothing.
    ValueError: a credit that is not finite.

    >>> [round(a, 2) for a in group_advantages([1, 0, 0, 0])]
    [1.73, -0.58, -0.58, -0.58]
    """
    values = _finite(credits)
    if not _has_spread(values):
        return [0.0] * len(values)
    centred = values - values.mean()
    return (centred / (values.std(ddof=ddof) + eps) if scale else centred).tolist()


def inter_prune(groups: Sequence[Sequence[Any]], budget: int | None) -> list[Sequence[Any]]:
    """InterP: keep the `budget` groups whose credits differ most, in the order given.

    Ranked by std of `.credit`; ties go to the earlier turn, then to the earlier group. Groups of equal credits are
    dropped first, so that fewer than `budget` groups, or none, may be left. None keeps every group, equal ones too.
    ValueError: a budget below 1.
    """
    if not _limits(budget):
        return list(groups)
    # Sorting inside a group and rounding make mathematical ties ([0, 0, 1] and [1, 1, 0]) ties in floats too.
    spreads = [round(float(np.std(sorted(_credits(group)))), 12) if group else 0.0 for group in groups]
    alive = [i for i, group in enumerate(groups) if _has_spread(_credits(group))]
    kept = sorted(alive, key=lambda i: (-spreads[i], groups[i][0].turn, i))[:budget]
    return [groups[i] for i in sorted(kept)]


def intra_prune(group: Sequence[Any], budget: int | None) -> list[Any]:
    """IntraP: keep the `budget` members of one group whose credits have the largest variance, in their old order.

    The best subset is always some k highest and budget - k lowest credits, so sorting and trying every k is exact.
    In the sorted credits, read as a ring, each such subset is one window: two running sums give every variance.
    Ties go to the earlier positions. None keeps all. ValueError: a budget below 1. (A budget of 1 keeps one member,
    whose advantage is then 0.)
    """
    credits = _credits(group)
    if not _limits(budget) or budget >= len(group):
        return list(group)
    order = np.sort(credits)
    ring = np.concatenate([order, order]) - order.mean()  # centred: no cancellation in the difference of squares
    sums, squares = (np.concatenate([[0.0], np.cumsum(ring**power)]) for power in (1, 2))
    starts = len(group) - np.arange(budget + 1)  # the window that starts at n - k holds the k highest
    variance = (squares[starts + budget] - squares[starts]) / budget
    variance -= ((sums[starts + budget] - sums[starts]) / budget) ** 2
    best = {tuple(np.sort(np.roll(order, -s)[:budget])) for s in starts[variance >= variance.max() - 1e-12]}
    return [group[i] for i in min(_earliest(credits, wanted) for wanted in best)]


Rule = Callable[[Any, float, list[float]], float]  # (node, its own reward, its children's credits) -> its credit


def _leaves_first(root: Any, rule: Rule) -> list[tuple[Any, float]]:
    """(node, credit) of every node, children before parents, root last; a loop, so that no tree is too deep."""
    nodes = [root]
    for node in nodes:  # grows while it is read: breadth first, which reversed puts every child before its parent
        nodes.extend(node.children)
    credit: dict[int, float] = {}
    for node in reversed(nodes):
        reward = 0.0 if node.reward is None and node.turn == 0 else node.reward
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"a node of turn {node.turn} has reward {reward}: execute every node, then propagate")
        credit[id(node)] = rule(node, float(reward), [credit[id(child)] for child in node.children])
    return [(node, credit[id(node)]) for node in reversed(nodes)]


def _own_rule(node: Any, reward: float, below: list[float]) -> float:
    return reward


def _max_rule(node: Any, reward: float, below: list[float]) -> float:
    return max([reward, *below])


def _mean_rule(turns: int, gamma: float) -> Rule:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], not {gamma}: it discounts what the children reach")
    if not isinstance(turns, int) or turns < 1:
        raise ValueError(f"turns must be a whole number of at least 1 (the paper's S), not {turns!r}")

    def rule(node: Any, reward: float, below: list[float]) -> float:
        if not below:
            return reward
        if node.turn >= turns:
            raise ValueError(f"a node of turn {node.turn} has children, but turns is {turns}: pass the tree's own S")
        # fsum rounds once, so the mean does not depend on the order of the siblings
        return (reward + gamma * math.fsum(below) / len(below)) / (turns - node.turn + 1)

    return rule


def _finite(credits: Sequence[float]) -> np.ndarray:
    values = np.asarray(credits, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"credits must be a flat list of finite numbers, one per member of a group, not {credits}")
    return values


def _credits(group: Sequence[Any]) -> np.ndarray:
    return _finite([node.credit for node in group])


def _has_spread(values: np.ndarray) -> bool:
    return len(values) > 1 and float(values.max() - values.min()) > SAME


def _limits(budget: int | None) -> bool:
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(f"a pruning budget is None (keep all) or a whole number of at least 1, not {budget!r}")
    return budget is not None


def _earliest(credits: np.ndarray, wanted: Sequence[float]) -> list[int]:
    """The first positions that together hold the values `wanted`."""
    left, positions = Counter(wanted), []
    for i, credit in enumerate(credits.tolist()):
        if left[credit] > 0:
            left[credit] -= 1
            positions.append(i)
    return positions


def _example() -> None:
    """The worked example of the specification: S = 2 turns, groups of G = 3, gamma = 0.9."""
    def group(turn, **rewards):
        return [SimpleNamespace(name=n, turn=turn, reward=r, children=[]) for n, r in rewards.items()]

    root = SimpleNamespace(name="x", turn=0, reward=None, children=group(1, a=0.5, b=0.0, c=1.0))
    a, b, c = root.children
    a.children, b.children = group(2, a1=0.5, a2=0.0, a3=0.5), group(2, b1=1.0, b2=0.0, b3=0.0)
    groups = [root.children, a.children, b.children]
    print("Two turns, three attempts a prompt. c is solved at once, b on the second try, a never.\n")
    print("attempt  turn  reward  MERS    MARS   advantage of: reward   MARS credit")
    columns = []
    for rule in ("mers", "none", "mars"):
        propagate(root, rule, turns=2, gamma=0.9)
        advantages = [group_advantages([node.credit for node in siblings]) for siblings in groups]
        columns.append({n.name: (n.credit, adv) for g, advs in zip(groups, advantages) for n, adv in zip(g, advs)})
    for node in sum(groups, []):
        (mers_credit, _), (_, plain), (mars_credit, retro) = (column[node.name] for column in columns)
        print(f"{node.name:<7}  {node.turn}     {node.reward:<6.2f}  {mers_credit:<6.4g}  {mars_credit:<6.2f}"
              f" {plain:>+19.2f}   {retro:>+11.2f}")
    names = lambda nodes: " ".join(node.name for node in nodes)
    print("\nBy its own reward b is the worst of its group; by MARS it is as good as c, for the feedback on it led to"
          "\na solution. Pruning, on MARS credit:\n")
    print("InterP, 2 groups: ", " | ".join(names(g) for g in inter_prune(groups, 2)))
    print("IntraP, 2 members:", " | ".join(names(intra_prune(g, 2)) for g in groups))


if __name__ == "__main__":
    _example()
