"""Rollout trees as a batch for TRL or verl: their trainer, our credit.

A group is what was sampled from one prompt, at any turn. What the trainer calls the reward is the
credit. The names are those of TRL's GRPOTrainer and of verl's DataProto. (They are from the sources
of both; neither was run here.)

    python examples/trl_verl_batch.py
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where tree.py is

from grpo import pad_rows
from propagate import group_advantages, propagate
from tree import Node, groups


def make_batch(trees: list[Node], pad_id: int) -> dict[str, Any]:
    """All attempts of the trees, one a row, P prompt columns and C completion columns.

    `trees` come from build_trees and have their credit from `propagate`.
    """
    made = [group for tree in trees for group in groups(tree)]
    nodes = [node for group in made for node in group]
    rows = [(node.prompt_ids, node.completion_ids) for node in nodes]
    ids, attention_mask, completion_mask = pad_rows(rows, pad_id)
    P = ids.shape[1] - completion_mask.shape[1]

    numbers = [i for i, group in enumerate(made) for _ in group]
    advantages = []
    for group in made:
        advantages += group_advantages([node.credit for node in group])

    # verl wants one score a token: the credit stands at the last one.
    last = torch.arange(completion_mask.shape[1]) == completion_mask.sum(1, keepdim=True) - 1
    credit = torch.tensor([node.credit for node in nodes])
    verl = {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": completion_mask,
        "token_level_scores": credit[:, None] * last,
        "uid": np.array([str(number) for number in numbers], dtype=object),  # GRPO's groups
    }
    trl = {
        "prompt_ids": ids[:, :P],
        "prompt_mask": attention_mask[:, :P],
        "completion_ids": ids[:, P:],
        "completion_mask": completion_mask.long(),
        "advantages": torch.tensor(advantages),
    }
    return {"verl": verl, "trl": trl}


def example_tree() -> Node:
    """Two attempts; the second fails, and one of its two refinements is right."""
    first = [
        Node(turn=1, prompt_ids=[1, 5], completion_ids=[7, 2], reward=0.5),
        Node(turn=1, prompt_ids=[1, 5], completion_ids=[8, 8, 2], reward=0.0),
    ]
    first[1].children = [
        Node(turn=2, prompt_ids=[1, 5, 8, 8, 2, 6], completion_ids=[9, 2], reward=1.0),
        Node(turn=2, prompt_ids=[1, 5, 8, 8, 2, 6], completion_ids=[8, 2], reward=0.0),
    ]
    return Node(turn=0, children=first)


if __name__ == "__main__":
    tree = example_tree()
    propagate(tree, "mars")
    for trainer, columns in make_batch([tree], pad_id=0).items():
        print(f"{trainer}:")
        for name, values in columns.items():
            print(f"  {name:18}  {tuple(values.shape)}")
            if values.ndim == 1:
                print(f"  {'':18}  {values.tolist()}")
