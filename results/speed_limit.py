"""One side of `speed.py limit`: the update or a decode step beside what the machine can do at best.

An update cannot take less than the bare matrix products of its unique tokens: three for every
linear layer, one forward and two backward. Attention's own products are not counted. A decode step
cannot take less than to read every weight and the whole cache once.

In: a request as JSON on standard input. Out: rows as JSON, the last line that is printed. `share`
is the limit's CPU seconds divided by ours. Where it is under a half, `operators` says what took
the time.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from speed_model import (
    REQUEST,
    Lengths,
    group_rows,
    learn,
    load,
    make_sampler,
    packed_logprobs,
    refinement,
    row,
    timed,
)
from torch.profiler import profile

from support.packing import lay_out

SHORT, LONG = 32, 96  # tokens of two samplings; the decode steps between them are measured
WATCHED = (16, 24)  # the forwards of a sampling that are profiled: of all, the events take 12 GB
READS = 10  # one is too short to be timed


def limit_of_update() -> dict:
    """Forward and backward of one group, and the products of its linear layers alone."""
    model, _, words = load()
    rows = group_rows(words)
    scored = sum(len(completion) for _, completion in rows)
    unique = len(lay_out(rows)[0])
    head = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    widths = {width for layer in layers if layer is not head for width in layer.weight.shape}
    numbers = {width: torch.randn(unique, width) for width in widths}
    logits = torch.randn(scored, head.out_features)

    @torch.no_grad()
    def products() -> None:
        for layer in layers:
            given, back = numbers[layer.in_features], numbers.get(layer.out_features)
            if layer is head:
                given, back = given[:scored], logits
            given @ layer.weight.T  # the output
            back @ layer.weight  # the input's gradient
            back.T @ given  # the weight's

    packed_logprobs(model, [([words[0]], [words[1]])])  # all weights have been read
    _, ours = timed(lambda: learn(model, rows))
    _, limit = timed(products)

    def profiled() -> profile:
        with profile() as found:
            learn(model, rows)
        return found

    return compared(ours, limit, profiled, tokens=unique)


def limit_of_decode() -> dict:
    """Decode steps of one group in our sampler, and one reading of weights and cache for each."""
    model, tokenizer, words = load()
    group, steps = REQUEST["group"], LONG - SHORT
    plan = [SHORT] * group + [LONG] * group
    plan += [SHORT] * group  # for the profile
    Lengths(model, tokenizer, words, plan)
    sample = make_sampler(model, tokenizer)
    prompt = refinement(tokenizer, words, 0)

    (found,), short = timed(lambda: sample([prompt], group))
    _, long = timed(lambda: sample([prompt], group))
    ours = {name: long[name] - short[name] for name in long}

    length = len(found[0].prompt_ids) + (SHORT + LONG) // 2  # of a row, in the middle
    config = model.config
    heads = config.num_key_value_heads * config.head_dim
    cache = torch.randn(2 * config.num_hidden_layers, group, length, heads)
    tensors = [*model.parameters(), cache]

    @torch.no_grad()
    def read() -> None:
        for _ in range(READS):
            for tensor in tensors:
                tensor.sum()

    _, limit = timed(read)
    limit = {name: seconds * steps / READS for name, seconds in limit.items()}

    def profiled() -> profile:
        found, forwards = profile(), itertools.count()

        def watch(*_: Any) -> None:
            forward = next(forwards)
            if forward == WATCHED[0]:
                found.start()
            if forward == WATCHED[1]:
                found.stop()

        model.register_forward_pre_hook(watch)
        sample([prompt], group)
        return found

    return compared(ours, limit, profiled, tokens=group * steps)


def compared(ours: dict, limit: dict, profiled: Callable[[], profile], tokens: int) -> dict:
    """A row; if ours takes more than twice the limit's time, ours is run again to be profiled."""
    share = limit["cpu_seconds"] / ours["cpu_seconds"]
    operators = ""
    if share < 0.5:
        operators = largest(profiled().key_averages())
    found = {"part": REQUEST["part"], "tokens": tokens, "cpu_seconds": ours["cpu_seconds"]}
    found["limit_cpu_seconds"] = limit["cpu_seconds"]
    found = {name: round(x, 2) if isinstance(x, float) else x for name, x in found.items()}
    return row(**found, share=round(share, 2), operators=operators)


def largest(events: Any) -> str:
    """The eight operators that took the most CPU time themselves, and their shares of all."""
    events = sorted(events, key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    shares = [f"{event.key} {event.self_cpu_time_total / total:.1%}" for event in events[:8]]
    return "; ".join(shares)


if __name__ == "__main__":
    limits = {"update": limit_of_update, "decode": limit_of_decode}
    print(json.dumps([limits[REQUEST["part"]]()]))
