"""LoRA with MURPHY's update: the weights stay, two thin matrices beside each layer learn.

It saves the gradients and AdamW's two moments of the frozen weights: 12 of 16 bytes a parameter.
The recipe is `LowRank` and the loop in `add_lora`; `merge` makes an ordinary model again.
(The package peft does the same with more settings: get_peft_model, merge_and_unload.)

    python examples/lora.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where murphy.py is

from murphy import Config, update
from support.packing import rows_logprobs
from support.toy import make_model, make_tokenizer
from tree import Node

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRank(nn.Module):
    """A frozen linear layer W, and what is learned: W x + B A x."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.A = nn.Linear(layer.in_features, rank, bias=False)
        self.B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.B.weight)  # at first nothing is added

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.B(self.A(x))


def add_lora(model: Any, rank: int = 8) -> list[nn.Parameter]:
    """Freeze the model, put a LowRank around its layers; returns what learns."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in LAYERS:
                setattr(parent, name, LowRank(layer, rank).to(layer.weight.device))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def merge(model: Any) -> None:
    """Add B A to W in each layer. Then `save_pretrained` writes an ordinary folder."""
    for parent in list(model.modules()):
        for name, low_rank in list(parent.named_children()):
            if isinstance(low_rank, LowRank):
                low_rank.layer.weight += low_rank.B.weight @ low_rank.A.weight
                setattr(parent, name, low_rank.layer)


def main() -> None:
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), seed=0).eval()
    prompt = tokenizer.encode("# add to x\n")
    right, wrong = (tokenizer.encode(f"def f(x): return x + {k}") for k in (1, 2))
    # In your loop `kept` is choose(build_trees(...), config).
    kept = [
        Node(turn=1, prompt_ids=prompt, completion_ids=right, reward=1.0, advantage=1.0),
        Node(turn=1, prompt_ids=prompt, completion_ids=wrong, reward=0.0, advantage=-1.0),
    ]
    rows = [(node.prompt_ids, node.completion_ids) for node in kept]

    def show(when: str) -> None:
        with torch.no_grad():
            sums = rows_logprobs(model, rows)[0].sum(1).tolist()
        print(f"{when:15}  logprob of the right answer {sums[0]:.2f}, of the wrong {sums[1]:.2f}")

    show("before")
    learns = add_lora(model)
    everything = sum(parameter.numel() for parameter in model.parameters())
    print(f"{sum(p.numel() for p in learns):,} of {everything:,} parameters learn")
    optimizer = torch.optim.AdamW(learns, lr=1e-2, weight_decay=0.0)
    config = Config(minibatches=1)
    for _ in range(5):
        update(model, optimizer, kept, config)
    show("after 5 updates")
    merge(model)
    show("merged")


if __name__ == "__main__":
    main()
