"""Several processes are one: the update, a whole run, a kill, another number of ranks."""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector

import executor
import murphy
from murphy import Config
from support import ranks, run, state
from tests.test_packing import tiny
from tree import Node, from_dict, walk

FORKS = multiprocessing.get_context("forkserver")  # torch is imported once for all processes
FORKS.set_forkserver_preload(["murphy"])


def ranked(function, rank, count, port, arguments):
    torch.set_num_threads(1)  # as here: threads change the order of float sums
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    executor.self_check = lambda: None  # slow, and tested elsewhere, as is the picture
    murphy.plot = str
    function(*arguments)


def start(count, function, *arguments):
    """Processes that find each other as under torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in range(count):
        how = (function, rank, count, port, arguments)
        started.append(FORKS.Process(target=ranked, args=how, daemon=True))
        started[-1].start()
    return started


def finish(processes):
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(processes)


# One update of seven attempts. A case: the rank that holds each attempt, and settings. With two
# ranks, the second one also holds the attempts of the third.
CASES = [
    ([0, 0, 0, 1, 1, 2, 2], {"beta": 0.1, "minibatches": 2, "gradient_checkpointing": True}),
    ([0, 0, 0, 1, 1, 2, 2], {"loss_norm": "token", "micro_tokens": 12}),
    ([0, 0, 0, 0, 0, 0, 0], {"loss_norm": "constant", "minibatches": 2}),  # the others are idle
]
ALL = list(itertools.product(("Qwen2", "Mistral"), range(len(CASES))))  # packed and padded


def seven_nodes():
    torch.manual_seed(3)
    nodes = [Node(1, advantage=value) for value in (1.0, -0.5, 0.0, 2.0, -1.0, 0.0, 0.3)]
    for i, node in enumerate(nodes):
        node.prompt_ids = torch.randint(5, 90, (2 + i % 3,)).tolist()
        node.completion_ids = torch.randint(5, 90, (1 + i,)).tolist()
    return nodes


def updated(family, number):
    """Numbers, gradient and weights of an update; how many weights and moments are held here."""
    owners, more = CASES[number]
    config = Config(**{"minibatches": 1, "grad_clip": 1e9, **more})
    model = tiny(family).double()  # in float32 the first step's rounding shows in the second
    here = [min(owner, ranks.count() - 1) == ranks.rank() for owner in owners]
    mine = list(itertools.compress(seven_nodes(), here))
    reference = None
    if config.beta:
        other = tiny(family, initializer_range=0.29)  # with equal weights the KL would be 0
        reference = ranks.shard(other.double().requires_grad_(False))
    if config.gradient_checkpointing:
        state.recompute_layers(model)
    model = ranks.shard(model)
    # A large eps: with Adam's own, noise in a gradient near 0 would decide the sign of its step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, eps=0.01)
    torch.manual_seed(5)
    numbers = murphy.update(model, optimizer, mine, config, reference)
    gradient = parameters_to_vector([ranks.whole(p.grad) for p in model.parameters()])
    weights = parameters_to_vector([ranks.whole(p.detach()) for p in model.parameters()])
    held = [*model.parameters(), *(moment["exp_avg"] for moment in optimizer.state.values())]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
    return numbers, gradient, weights, sum(t.numel() for t in local)


def update_all(folder):
    ranks.join(torch.device("cpu"))
    torch.save([updated(*case) for case in ALL], f"{folder}/{ranks.count()}-{ranks.rank()}")


def test_the_update_of_several_ranks_is_that_of_one_process(tmp_path):
    for count in (2, 3):
        finish(start(count, update_all, tmp_path))
    for number, case in enumerate(ALL):
        numbers, gradient, weights, held = updated(*case)  # in this process, alone
        for count, rank in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]:
            found = torch.load(tmp_path / f"{count}-{rank}")[number]
            assert found[0] == pytest.approx(numbers, rel=1e-6, abs=1e-9), case
            assert (found[1] - gradient).norm() <= 1e-6 * gradient.norm(), case
            assert (found[2] - weights).norm() <= 1e-6 * weights.norm(), case
            assert found[3] <= held / count * 1.05


# Settings of a small run, here and in test_run.py
SMALL = {"problems": "cutoff", "problems_per_step": 4, "group_size": 3, "max_new_tokens": 16}
SMALL |= {"learning_rate": 1e-3, "eval_count": 4, "eval_iterations": 2, "micro_tokens": 1024}


@pytest.fixture
def small(base, tmp_path):
    often = {"steps": 3, "log_trees_every": 2, "eval_every": 0, "save_every": 1}
    own = SMALL | often | {"model": base}
    return lambda name, **more: Config(**{**own, "output": str(tmp_path / name), **more})


def lines_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def train_and_signal(config, rank, step, *signals):
    """Train. When this step was logged, this rank gets these signals."""
    report = murphy.report

    def signalled(state, *rest):
        report(state, *rest)
        if (ranks.rank(), state.step) == (rank, step):
            for number in signals:
                os.kill(os.getpid(), number)

    murphy.report = signalled
    murphy.train(config)


def test_a_run_of_two_killed_and_resumed_is_the_undisturbed_run(small):
    whole, broken = small("whole"), small("broken")
    finish(start(2, murphy.train, whole))
    first, second = start(2, train_and_signal, broken, 1, 1, signal.SIGKILL)
    second.join(300)
    first.join(300)  # it ends with an error and does not wait for ever
    assert first.exitcode not in (0, None) and second.exitcode == -signal.SIGKILL
    folder = Path(broken.output)
    assert run.load(folder)["step"] == 1
    finish(start(2, murphy.train, small("broken", resume=True)))
    for name in ("trees.jsonl", "evaluation.json", "model.safetensors"):
        assert (Path(whole.output) / name).read_bytes() == (folder / name).read_bytes(), name

    trees = lines_of(folder / "trees.jsonl")
    assert [tree["step"] for tree in trees] == [0] * 4 + [2] * 4
    texts = [[child["text"] for child in tree["children"]] for tree in trees]
    assert texts[:2] != texts[2:4]  # of two ranks: with equal seeds they would be equal
    line = lines_of(folder / "metrics.jsonl")[0]
    assert line["programs"] == sum(len(list(walk(from_dict(tree)))) for tree in trees[:4])


def test_a_run_of_two_of_which_one_has_no_problem_goes_on_with_one(small):
    few = {"problems_per_step": 1, "eval_count": 1}
    finish(start(2, murphy.train, small("run", steps=1, **few)))
    folder = murphy.train(small("run", steps=2, resume=True, **few))
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [0, 1]


def in_turn(folder):
    ranks.join(torch.device("cpu"))
    for name in ("one", "two"):
        with contextlib.suppress(ValueError), ranks.rank_0_first():
            if ranks.rank() == 0:
                time.sleep(0.2)  # so that the others would be first, if they did not wait
                (folder / name).write_text("")
            assert (folder / name).exists()
            raise ValueError  # what ends rank 0 here does not keep the others waiting


def test_rank_0_works_first_and_the_others_find_what_it_made(tmp_path):
    finish(start(3, in_turn, tmp_path))


def test_one_process_gathers_itself_and_samples_with_the_model(qwen):
    assert (ranks.rank(), ranks.count(), ranks.gather({"a": 1})) == (0, 1, [{"a": 1}])
    assert ranks.sampling_copy(qwen) is ranks.shard(qwen) is qwen
    dealt = ranks.share(["a", "b", "c", "d", "e"], 2)
    assert sorted(sum((own for _, own in dealt), [])) == [0, 1, 2, 3, 4]
    assert all(values == ["abcde"[place] for place in own] for values, own in dealt)


def test_a_checkpoint_before_the_first_step_does_not_count_as_a_step():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    ranks.training_state(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    # The first step of Adam moves each weight by the rate, against the gradient's sign.
    assert torch.allclose(model.weight, before - 0.1, atol=1e-6)
