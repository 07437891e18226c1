"""Several processes under torchrun: each has a share of the problems and a shard of the model.

    join, rank, count, gather     who am I, how many are we, what do the others say
    share                         deal the attempts of an update, the same on every rank
    rank_0_first                  the others find what rank 0 has made
    shard, whole                  the model in pieces (FSDP2), and a tensor made whole again
    sampling_copy, refresh        whole weights to sample with
    training_state, restore       checkpoints that any number of ranks can read

In one process `rank()` is 0, `gather` gives a list of one, and nothing of FSDP runs.
Needs torch.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as whole_state
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# So long a rank waits for the others, then it ends with an error. Rank 0 may run references first.
PATIENCE = timedelta(hours=6)
FULL = whole_state.StateDictOptions(full_state_dict=True, cpu_offload=True)


def join(device: torch.device) -> tuple[int, int]:
    """Meet the other processes if torchrun has started several; returns `rank()` and `count()`."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
        if rank() > 0:  # rank 0 speaks for all: what the others print is lost
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it stays open
    return rank(), count()


def rank() -> int:
    """This process's number; rank 0 writes the files and speaks for all."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list:
    """A JSON value of every rank, in their order; [value] in one process.

    It travels as JSON in a tensor of bytes: a model's text never meets pickle.
    """
    if count() == 1:
        return [value]
    text = json.dumps(value).encode("ascii")
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = text.ljust(int(longest))  # JSON may end with spaces
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in range(count())]
    dist.all_gather(texts, mine)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def share(values: list, parts: int) -> list[tuple[list, list[int]]]:
    """Deal the JSON values of all ranks into `parts` random parts, the same on every rank.

    Returns for each part its values, and the places in `values` of those that are this rank's.
    A rank may own none of a part.
    """
    lists = gather(values)
    of_all = sum(lists, [])
    first = sum(len(before) for before in lists[: rank()])  # where this rank's items begin
    order = gather(torch.randperm(len(of_all)).tolist())[0]  # rank 0 draws for all
    dealt = []
    for start in range(parts):
        part = order[start::parts]
        own = [place - first for place in part if 0 <= place - first < len(values)]
        dealt.append(([of_all[place] for place in part], own))
    return dealt


@contextmanager
def rank_0_first() -> Iterator[None]:
    """Rank 0 does the block first. The others begin when it has ended, also if by an error, and
    find the files that it made.
    """
    if rank() > 0:
        gather(None)
    try:
        yield
    finally:
        if rank() == 0:
            gather(None)


def shard(model: Any) -> Any:
    """Split each layer, and what stands around them, over the ranks; in one process: nothing."""
    if count() > 1:
        layers = model._no_split_modules or ()  # the names of their classes
        for module in model.modules():
            if type(module).__name__ in layers:
                fully_shard(module)
        fully_shard(model)  # the root: from its forward to the end of the backward it is whole
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with what the other ranks hold of it; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sampling_copy(model: Any) -> Any:
    """The model that samples: made before `shard`, it needs no other rank for a token.

    On CUDA it is in bfloat16: half the bytes to read. One process without CUDA needs no copy.
    """
    device = next(model.parameters()).device
    if count() == 1 and device.type != "cuda":
        return model
    twin = copy.deepcopy(model).requires_grad_(False).eval()
    if device.type == "cuda":
        twin.set_attn_implementation("sdpa")  # FlexAttention is for packed rows
        for weight in twin.parameters():  # not the buffers: RoPE's frequencies need float32
            weight.data = weight.data.to(torch.bfloat16)
    return twin


@torch.no_grad()
def refresh(twin: Any, model: Any) -> None:
    """Give the sampling copy the weights that the model has now; every rank must call it."""
    if twin is not model:
        for old, new in zip(twin.parameters(), model.parameters(), strict=True):
            old.copy_(whole(new))


def whole_weights(model: Any) -> dict[str, Any]:
    """The whole weights by name, on the CPU; every rank must call it, those above 0 get {}."""
    return whole_state.get_model_state_dict(model, options=FULL)


def training_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole weights and optimizer state, on the CPU; both are empty on ranks above 0."""
    moments = {}
    if optimizer.state:  # if it is empty, torch first makes a step by itself, and AdamW counts it
        moments = whole_state.get_optimizer_state_dict(model, optimizer, options=FULL)
    return {"model": whole_weights(model), "optimizer": moments}


def restore(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Put back what rank 0's `training_state` gave; every rank has to pass the whole of it."""
    whole_state.set_model_state_dict(model, state["model"], options=FULL)
    if state["optimizer"]:
        whole_state.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FULL)
