"""A run that survives: checkpoints, resume, signals, a full disk, several ranks; and looking at what it left."""

import copy
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import evaluate
import executor
import murphy
import tree
from murphy import Config
from tree import Completion, Node

ROOT = Path(murphy.__file__).parent
FORKS = multiprocessing.get_context("forkserver")  # torch is imported once, for all processes that a test starts
FORKS.set_forkserver_preload(["murphy"])
torch.set_num_threads(1)  # here and in the ranks alike: threads change the order of float32 sums, and with it the last bits


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(murphy.toy.base_model("cutoff", 0, tmp_path_factory.mktemp("bases"), steps=100, batch=16))


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    """Whether the executor judges rightly is its own tests' matter: a second saved for each run in this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "self_check", lambda: None)
        yield


def settings(base, folder, **more):
    """A run of four steps in which something is learned. With beta: a resumed run must find the initial model again."""
    return Config(**{"model": base, "problems": "cutoff", "steps": 4, "problems_per_step": 4, "group_size": 3, "eval_count": 4,
                     "eval_iterations": 2, "eval_every": 2, "log_trees_every": 1, "save_every": 2, "learning_rate": 1e-3,
                     "beta": 0.05, "output": str(folder)} | more)


@pytest.fixture
def small(base, tmp_path):
    return lambda name, **more: settings(base, tmp_path / name, **more)


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """What a run that nothing happened to left."""
    return left(murphy.train(settings(base, tmp_path_factory.mktemp("runs") / "straight")))


def left(folder):
    """All that a run left, but for its seconds and its config, which names its folder."""
    folder = Path(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["optimizer_steps"] for line in lines) > 2
    state = torch.load(folder / "checkpoints" / "step-000004" / "training.pt", weights_only=True)
    return ([{k: v for k, v in line.items() if k not in ("sampling", "executing", "updating")} for line in lines],
            state["step"], state["evaluations"], *((folder / name).read_bytes() for name in ("trees.jsonl", "evaluation.json", "model.safetensors")))


def steps(folder):
    return sorted(int(path.name[5:]) for path in Path(folder).glob("checkpoints/step-*[0-9]"))


def train_in_one_thread(config):
    torch.set_num_threads(1)
    murphy.train(config)


def test_four_steps_are_two_then_kill_9_then_two_bit_for_bit(small, straight):
    broken = small("broken")
    victim = FORKS.Process(target=train_in_one_thread, args=(broken,), daemon=True)
    victim.start()
    log = Path(broken.output) / "metrics.jsonl"
    while not (steps(broken.output) and log.read_text().count("\n") > 2):  # a line that will have to be made again
        assert victim.is_alive()
        time.sleep(0.01)
    victim.kill()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL and not (Path(broken.output) / "evaluation.json").exists()
    murphy.train(small("broken", resume="latest"))
    assert left(broken.output) == straight
    assert steps(broken.output) == [2, 4]


@pytest.mark.parametrize("moment, call, number, at", [
    ("build_trees", 3, signal.SIGINT, 2), ("choose", 3, signal.SIGTERM, 3), ("attempts", 2, signal.SIGTERM, 2)])
def test_a_signal_abandons_sampling_and_evaluation_but_finishes_an_update(small, straight, monkeypatch, capsys, moment, call, number, at):
    real, calls, before = getattr(murphy, moment), [], signal.getsignal(number)

    def signalled(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            torch.rand(3 * (moment != "choose"))  # drawn for what is then abandoned: it must not be missing afterwards
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)
    monkeypatch.setattr(murphy, moment, signalled)
    with pytest.raises(SystemExit) as stopped:
        murphy.train(small("run", save_every=0))
    assert stopped.value.code == 128 + number and signal.getsignal(number) is before
    monkeypatch.setattr(murphy, moment, real)
    said = capsys.readouterr().out
    assert f"stopped after {at} of 4 steps" in said and f"--output {small('run').output} --resume" in said
    assert steps(small("run").output) == [at]
    murphy.train(small("run", save_every=0, resume="latest"))
    assert left(small("run").output) == straight


def processes_below(pid):
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return children + [below for child in children for below in processes_below(child)]


def test_a_second_signal_leaves_at_once_and_takes_the_workers_along(base, tmp_path):
    command = [sys.executable, str(ROOT / "murphy.py"), "--model", base, "--problems", "cutoff", "--eval-count", "16", "--output", "run"]
    run = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert run.poll() is None
        time.sleep(0.02)
    below = processes_below(run.pid)
    assert below
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=60) in (130, 143)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def finish_and_die(log):
    sys.stdout = open(log, "w")
    sys.argv = ["murphy.py"]
    murphy.train = lambda _: (print("the table"), os.kill(os.getpid(), signal.SIGTERM))
    murphy.main()


def test_what_was_said_before_a_sigterm_outside_of_the_loop_is_in_the_log(tmp_path):
    process = FORKS.Process(target=finish_and_die, args=(str(tmp_path / "log"),), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGTERM and (tmp_path / "log").read_text() == "the table\n"


def test_of_two_signals_the_second_is_not_left_to_the_loop():
    with murphy.Signals() as stop:
        assert stop.unless(lambda: 5) == 5
        os.kill(os.getpid(), signal.SIGINT)  # outside of `unless`: the step goes on
        with pytest.raises(KeyboardInterrupt):
            stop.unless(lambda: 1 / 0)  # and nothing new is begun
        with pytest.raises(SystemExit) as left_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
    assert left_at.value.code == 143


class Part:
    """Something with save_pretrained."""

    def __init__(self, size=10, error=None):
        self.size, self.error = size, error

    def save_pretrained(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "part").write_bytes(bytes(self.size))
        if self.error:
            raise self.error


def save(folder, step, scores=None, part=None, tensor=3):
    evaluations = {k: {"Iter-k": {"all": [{"value": 1.0}, {"value": v}]}} for k, v in (scores or {}).items()}
    murphy.save(folder, {"step": step, "evaluations": evaluations, "optimizer": torch.zeros(tensor)}, (part or Part(),))


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    scores = {0: 0.9, 10: 0.4, 20: 0.6, 40: 0.6, 50: 0.1}
    kept = []
    for step in (10, 20, 30, 40, 50, 60):
        save(tmp_path, step, {k: v for k, v in scores.items() if k <= step})
        kept.append(steps(tmp_path))
    assert kept == [[10], [10, 20], [20, 30], [20, 30, 40], [20, 40, 50], [20, 50, 60]]  # of two that are best, the first


def test_a_checkpoint_is_on_the_disk_with_the_names_of_its_files_and_its_own(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino))
    save(tmp_path, 2)
    place = tmp_path / "checkpoints" / "step-000002"
    assert {path.stat().st_ino for path in (*place.iterdir(), place, place.parent)} <= set(flushed)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil, why", [
    (lambda p: flip(p / "training.pt"), "training.pt is not what was written"),
    (lambda p: (p / "part").write_bytes(b""), "part is not what was written"), (lambda p: (p / "part").unlink(), "FileNotFoundError"),
    (lambda p: (p / "manifest.json").unlink(), "FileNotFoundError"),
    (lambda p: (p / "manifest.json").write_text("{"), "JSONDecodeError"), (lambda p: p.rename(p.with_suffix(".unfinished")), "half-written")])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, capsys, spoil, why):
    save(tmp_path, 2)
    save(tmp_path, 3)
    spoil(tmp_path / "checkpoints" / "step-000003")
    assert murphy.checkpoint(tmp_path, "latest").name == "step-000002"
    said = capsys.readouterr().out
    assert "step-000003" in said and "is passed over" in said and why in said
    with pytest.raises(ValueError, match="no such checkpoint that is good"):
        murphy.checkpoint(tmp_path, "step-000001")
    assert murphy.checkpoint(tmp_path, "step-000002").name == "step-000002"


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew_by_stealth(tmp_path):
    assert murphy.checkpoint(tmp_path, "latest") is None  # killed before the first
    save(tmp_path, 2)
    flip(tmp_path / "checkpoints" / "step-000002" / "training.pt")
    with pytest.raises(ValueError, match="no such checkpoint that is good"):
        murphy.checkpoint(tmp_path, "latest")


@pytest.mark.parametrize("big", [{"part": Part(50_000)}, {"tensor": 50_000}])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays_good(tmp_path, big):
    """A limit on the size of files stands for it: the same writes fail, in the same libraries."""
    save(tmp_path, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="step-000003 could not be written .* --resume"):
            save(tmp_path, 3, **big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    assert murphy.checkpoint(tmp_path, "latest").name == "step-000002"


def test_a_disk_that_is_full_at_the_end_is_one_sentence_too(small):
    folder = murphy.train(small("run", steps=0, beta=0.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="could not be written into .* --resume"):
            murphy.train(small("run", steps=0, beta=0.0, resume="latest"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    murphy.train(small("run", steps=0, beta=0.0, resume="latest"))
    assert (folder / "model.safetensors").stat().st_size > 20_000


def test_a_disk_that_is_full_for_a_log_is_one_sentence_too(monkeypatch):
    def full(config):
        with open("/dev/full", "w") as log:
            log.write("a line")
    monkeypatch.setattr(murphy, "train", full)
    monkeypatch.setattr(sys, "argv", ["murphy.py"])
    with pytest.raises(SystemExit, match=r"^murphy.py: .*No space left on device$"):
        murphy.main()


def test_leaving_in_the_middle_of_a_save_spoils_neither_the_last_nor_the_next(tmp_path, capsys):
    save(tmp_path, 2)
    with pytest.raises(SystemExit):  # as a second signal does
        save(tmp_path, 3, part=Part(error=SystemExit(130)))
    assert murphy.checkpoint(tmp_path, "latest").name == "step-000002"
    assert "step-000003.unfinished is passed over: half-written" in capsys.readouterr().out
    save(tmp_path, 3)
    assert steps(tmp_path) == [2, 3]


def test_what_is_newer_than_the_checkpoint_a_run_goes_on_from_is_made_again(small, straight, capsys):
    folder = murphy.train(small("run", save_every=1))
    flip(folder / "checkpoints" / "step-000004" / "training.pt")
    murphy.train(small("run", save_every=1, resume="latest"))
    assert "step-000004 is passed over" in capsys.readouterr().out and left(folder) == straight
    assert (folder / "checkpoints" / "step-000004.aside" / "manifest.json").exists()  # what was damaged is kept
    murphy.train(small("run", save_every=1, resume="step-000003"))
    assert "step-000004 is passed over: step-000003 was asked for" in capsys.readouterr().out and left(folder) == straight


def test_a_run_goes_on_only_as_it_was_begun(small, capsys):
    folder = murphy.train(small("run", steps=2, eval_every=0, save_every=1))
    with pytest.raises(ValueError) as refused:
        murphy.train(small("run", steps=3, gamma=0.5, eval_every=7, save_every=9, resume="step-000001"))
    assert steps(folder) == [1, 2]  # a refusal changes nothing
    said = str(refused.value)
    assert "steps (2 there, 3 now)" in said and "gamma (1.0 there, 0.5 now)" in said and "every" not in said and "seed" not in said
    with pytest.raises(ValueError, match="holds something already"):
        murphy.train(small("run", steps=2))
    with pytest.raises(ValueError, match="has no settings.json"):
        murphy.train(small("elsewhere", resume="latest"))
    last = folder / "checkpoints" / "step-000002"
    told = torch.load(last / "training.pt", weights_only=True)
    assert murphy.resume(last, told["config"] | {"output": "x", "eval_every": 1}, told["versions"])["step"] == 2
    murphy.resume(last, told["config"], told["versions"] | {"torch": "1.0"})
    assert "not the same run bit for bit" in capsys.readouterr().out
    with pytest.raises(ValueError, match="ranks .1 there, 2 now"):
        murphy.resume(last, told["config"] | {"ranks": 2}, told["versions"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "trees.jsonl"])
def test_a_log_that_has_lost_lines_is_named_and_not_gone_on_from(small, straight, name):
    folder = murphy.train(small("run", save_every=1))
    whole = (folder / name).read_text()
    (folder / name).write_text(whole[:-40])  # the last step's line is cut: nobody would make it again
    with pytest.raises(ValueError, match=f"{name} has lost lines since .*step-000004"):
        murphy.train(small("run", save_every=1, resume="latest"))
    assert (folder / name).read_text() == whole[:-40]
    murphy.train(small("run", save_every=1, resume="step-000003"))
    assert left(folder) == straight


def test_on_the_command_line_resume_needs_nothing_but_the_folder(small, monkeypatch, capsys):
    begun = small("run", steps=1, eval_every=0, gamma=0.75)
    murphy.train(begun)
    seen = []
    monkeypatch.setattr(murphy, "train", seen.append)
    monkeypatch.setattr(sys, "argv", ["murphy.py", "--output", begun.output, "--resume", "--eval-every", "3"])
    murphy.main()
    monkeypatch.setattr(sys, "argv", ["murphy.py", "--output", begun.output, "--resume", "step-000001"])
    murphy.main()
    assert seen[0].__dict__ == begun.__dict__ | {"resume": "latest", "eval_every": 3} and seen[1].resume == "step-000001"


def test_settings_given_at_a_resume_are_judged_together_with_those_of_the_run(tmp_path, monkeypatch):
    begun = Config(model="base", problems="some.jsonl", output=str(tmp_path))
    (tmp_path / "settings.json").write_text(json.dumps(begun.__dict__))
    seen = []
    monkeypatch.setattr(murphy, "train", seen.append)
    monkeypatch.setattr(sys, "argv", ["murphy.py", "--problems", "some.jsonl", "--output", str(tmp_path), "--resume"])
    murphy.main()
    assert seen[0].__dict__ == begun.__dict__ | {"resume": "latest"}


def test_two_runs_into_one_folder_are_refused_but_a_dead_one_is_no_obstacle(tmp_path):
    config = Config(output=str(tmp_path / "run"))
    folder, lock = murphy.output_folder(config)
    with pytest.raises(ValueError, match="another run is writing into it"):
        murphy.output_folder(config)
    lock.close()  # what the kernel does when a process ends, however it ends
    murphy.output_folder(config)[1].close()


def test_a_loss_that_is_not_finite_says_where_and_leaves_its_batch(small, monkeypatch):
    monkeypatch.setattr(murphy, "group_advantages", lambda credits, **_: [float("nan")] * len(credits))
    with pytest.raises(ValueError, match="step 0: in optimizer step 1 of 2 the loss or its gradient is not finite .*nonfinite.json"):
        murphy.train(small("run"))
    first = json.loads((Path(small("run").output) / "nonfinite.json").read_text().splitlines()[0])
    assert first["children"][0]["prompt_ids"] and first["children"][0]["completion_ids"]


def test_a_cap_that_cuts_every_completion_is_warned_of(small, monkeypatch, capsys):
    endless = lambda *_, max_new_tokens, **__: lambda prompts, n, ended=None: [
        [Completion("def f(", [3, 4], [5] * max_new_tokens, truncated=True) for _ in range(n)] for _ in prompts]
    monkeypatch.setattr(murphy, "make_sampler", endless)
    with pytest.warns(UserWarning, match="no end within --max-new-tokens 4"):
        murphy.train(small("run", max_new_tokens=4, steps=2, eval_every=0, beta=0.0))
    for line in map(json.loads, (Path(small("run").output) / "metrics.jsonl").open()):
        assert line["truncated"] == 1.0 and line["groups_with_spread"] == 0.0 and line["completion_tokens"] == 4
    assert "In 2 of 2 steps nothing could be learned" in capsys.readouterr().out


# Two processes, which find each other as under torchrun.


def ranked(function, rank, port, *args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function(rank, *args)


def start_two(function, *args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = [FORKS.Process(target=ranked, args=(function, rank, port, *args), daemon=True) for rank in (0, 1)]
    for process in two:
        process.start()
    return two


def some_nodes(split):
    """Seven attempts, those of rank 0 first; split "idle" leaves rank 1 with nothing to learn."""
    torch.manual_seed(3)
    made = []
    for i in range(7):
        prompt, completion = torch.randint(5, 90, (2 + i % 3,)).tolist(), torch.randint(5, 90, (1 + i,)).tolist()
        advantage = 0.0 if split == "idle" and i > 3 else [1.0, -0.5, 0.0, 2.0, -1.0, 0.7, 0.3][i]
        made.append(Node(1 + i % 2, prompt_ids=prompt, completion_ids=completion, advantage=advantage))
    return made


CASES = [("even", {}), ("idle", {}), ("even", {"loss_norm": "token"}), ("even", {"loss_norm": "constant", "equal_turns": True}),
         ("even", {"minibatches": 3}), ("idle", {"minibatches": 7})]


def updated(model, split, settings, rank=None):
    """Statistics, parameters and last gradient of an update, in steps so small that noise in one stays noise in the next."""
    nodes = some_nodes(split)
    mine = None if rank is None else {id(node) for node in (nodes[4:] if rank else nodes[:4])}
    torch.manual_seed(5 + (rank or 0))  # ranks sample differently: their random states differ
    model = copy.deepcopy(model)
    stats = murphy.update(model, torch.optim.SGD(model.parameters(), lr=1e-4), nodes,
                          Config(**{"minibatches": 1, "grad_clip": 1e9} | settings), mine=mine)
    return stats, torch.cat([p.detach().flatten() for p in model.parameters()]), torch.cat([p.grad.flatten() for p in model.parameters()])


def update_cases(rank, model, results):
    murphy.join(torch.device("cpu"))
    for i, (split, settings) in enumerate(CASES):
        torch.save(updated(model, split, settings, rank), f"{results}/{i}-{rank}")


def test_two_ranks_give_the_gradient_of_one_process(qwen, tmp_path):
    two = start_two(update_cases, qwen, str(tmp_path))
    for process in two:
        process.join(120)
    assert [process.exitcode for process in two] == [0, 0]
    for i, (split, settings) in enumerate(CASES):
        stats, weights, gradient = updated(qwen, split, settings)
        for rank in (0, 1):
            stats_of, weights_of, gradient_of = torch.load(tmp_path / f"{i}-{rank}")
            assert (gradient_of - gradient).norm() <= 1e-6 * gradient.norm(), CASES[i]
            assert (weights_of - weights).norm() <= 1e-6 * weights.norm()
            assert stats_of == pytest.approx(stats, rel=1e-4, abs=1e-6)


def train_quietly(rank, config):
    executor.self_check = lambda: None
    murphy.train(config)


def test_a_whole_run_of_two_ranks_logs_every_tree_once_and_goes_on_from_its_checkpoint(small):
    for name, more in (("straight", {}), ("broken", {}), ("broken", {"resume": "latest"})):
        two = start_two(train_quietly, small(name, steps=2, save_every=1, eval_every=0, **more))
        if name == "broken" and not more:
            while 1 not in steps(small(name).output) and two[0].is_alive():
                time.sleep(0.01)
            two[1].kill()  # one rank dies: the other ends with an error and does not wait for it
        for process in two:
            process.join(120)
        if name == "broken" and not more:
            assert two[0].exitcode not in (0, None) and not (Path(small(name).output) / "evaluation.json").exists()
        else:
            assert [process.exitcode for process in two] == [0, 0]
    straight, broken = Path(small("straight").output), Path(small("broken").output)
    trees = [json.loads(line) for line in (straight / "trees.jsonl").read_text().splitlines()]
    assert [t["step"] for t in trees] == [0] * 4 + [1] * 4
    first, second = ([[n["text"] for n in t["children"]] for t in half] for half in (trees[:2], trees[2:4]))
    assert first != second  # the prompts of this world are all the same: equal seeds would show
    line = json.loads((straight / "metrics.jsonl").read_text().splitlines()[0])
    assert line["programs"] == sum(1 for t in trees[:4] for _ in tree.walk(tree.from_dict(t)))
    for name in ("trees.jsonl", "evaluation.json", "model.safetensors"):
        assert (straight / name).read_bytes() == (broken / name).read_bytes(), name


def evaluate_quietly(rank, arguments):
    executor.self_check = lambda: None
    evaluate.main(arguments)


def test_an_evaluation_shared_by_two_ranks_is_that_of_one(base, tmp_path):
    common = ["--model", base, "--benchmark", "cutoff", "--limit", "7", "--iterations", "2", "--chunk", "4"]
    for process in (two := start_two(evaluate_quietly, [*common, "--output", str(tmp_path / "two")])):
        process.join(120)
    assert [process.exitcode for process in two] == [0, 0]
    evaluate.main([*common, "--output", str(tmp_path / "one")])
    rows = [sorted((tmp_path / name / "samples.jsonl").read_text().splitlines()) for name in ("one", "two")]
    assert rows[0] == rows[1] and len(rows[0]) >= 7  # greedy: the same attempts, each written once
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert one["Iter-k"] == two["Iter-k"] and two["settings"]["ranks"] == 2


# Looking at a run.


def test_a_run_is_drawn_as_a_picture_and_a_table(tmp_path, capsys, monkeypatch):
    with pytest.raises(ValueError, match="holds no step of a run"):
        murphy.plot(tmp_path)
    rows = [{"step": i, "reward_1": i / 40, "reward_2": None if i == 3 else 0.5, "solved_1": 0.0, "solved_2": 0.25, "groups_with_spread": 0.5,
             "completion_tokens": 8.0, "truncated": 0.0, "sampling": 1.0, "executing": 2.0, "updating": 3.0, "optimizer_steps": i % 20} for i in range(40)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 40, "rew')
    monkeypatch.setattr(sys, "argv", ["murphy.py", "--plot", str(tmp_path)])
    murphy.main()
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[:3] == ["step", "reward_1", "reward_2"] and len(table) == 13
    assert table[2].split()[:3] == ["3", "0.038", "0.5"]  # mean of 0, 1/40, 2/40, 3/40
    assert table[12].startswith("In 2 of 40 steps nothing could be learned")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_page_of_trees_shows_everything_and_runs_nothing(tmp_path, monkeypatch, capsys):
    hostile = "</pre></details><script>alert(1)</script>\x1b[2J\ud800 \" onload='x'"
    messages = [{"role": "user", "content": "the prompt <b>"}]
    child = Node(2, messages + [{"role": "user", "content": "asked again"}], code=hostile, text=hostile + " (answer)", reward=1.0, solved=True, credit=1.0)
    root = Node(0, problem=murphy.toy.cutoff_problem(3), children=[
        Node(1, messages, code=hostile, feedback="feedback " + hostile, status="failed", credit=0.5, advantage=-0.25, children=[child], kept=False)])
    root.problem.id = "<script>"
    (tmp_path / "trees.jsonl").write_text(json.dumps({"step": 10} | tree.to_dict(root)) + "\n")
    monkeypatch.setattr(sys, "argv", ["tree.py", str(tmp_path / "trees.jsonl"), "--step", "10", "--html", str(tmp_path / "page.html")])
    tree.main()
    page = (tmp_path / "page.html").read_bytes().decode("utf-8")
    assert "<script" not in page and page.count("<details") == page.count("</details>") == 3 and "'none'" in page
    assert page.count("&lt;/pre&gt;&lt;/details&gt;&lt;script&gt;alert(1)") == 6  # two programs and their titles, an answer, the feedback
    for text in ("turn 1  reward 0.00  credit 0.50  advantage -0.25  pruned", "the prompt &lt;b&gt;", "asked again", "step 10"):
        assert text in page, text
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["tree.py", str(tmp_path / "trees.jsonl")])
    tree.main()
    said = capsys.readouterr().out
    assert "step 10" in said and "\\x1b[2J\\ud800" in said and "\x1b" not in said  # spelt out, not sent to the terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    tree.main()
    assert capsys.readouterr().out.count("\x1b[32m") == 1
