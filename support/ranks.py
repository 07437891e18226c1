"""Several processes (torchrun): who am I, what do the others say.

One process: `join` answers (0, 1), `gather` a list of one, and nothing else of this file runs.
Needs torch.
"""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=30)  # a rank waits so long for the others, then it ends with an error


def join(device: torch.device) -> tuple[int, int]:
    """This process's rank and the number of ranks: (0, 1) unless torchrun has started several.

    Rank 0 speaks for all: what the others print goes nowhere.
    """
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
        if rank > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it stays open
    return rank, ranks


def gather(value: Any) -> list:
    """A JSON value of every rank, in their order; [value] in one process.

    It travels as JSON in a tensor of bytes: a model's text never meets pickle.
    """
    if not dist.is_initialized():
        return [value]
    text = json.dumps(value).encode("ascii")
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = text.ljust(int(longest))  # JSON may end with spaces
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, mine)
    return [json.loads(text.numpy().tobytes()) for text in texts]
