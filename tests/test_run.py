"""A run that survives: files, folders, checkpoints, resume, signals, a full disk."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import executor
import murphy
from murphy import Config
from support import run, state, toy
from tree import Completion

ROOT = Path(murphy.__file__).parent
FORKS = multiprocessing.get_context("forkserver")  # torch is imported once for all processes
FORKS.set_forkserver_preload(["murphy"])
torch.set_num_threads(1)  # in all processes alike: threads change the order of float sums


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(toy.base_model("cutoff", 0, tmp_path_factory.mktemp("bases"), steps=100, batch=16))


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    """Whether the executor judges rightly is its own tests' matter; here it saves seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "self_check", lambda: None)
        yield


def settings(base, folder, **more):
    """Four steps that learn. With beta, a resumed run must find the first model again."""
    small = {"problems": "cutoff", "steps": 4, "problems_per_step": 4, "group_size": 3}
    small |= {"max_new_tokens": 16, "micro_tokens": 1024, "learning_rate": 1e-3, "beta": 0.05}
    small |= {"eval_count": 4, "eval_iterations": 2, "eval_every": 2, "eval_temperature": 1.0}
    small |= {"log_trees_every": 1, "save_every": 2, "model": base, "output": str(folder)}
    return Config(**{**small, **more})


@pytest.fixture
def small(base, tmp_path):
    return lambda name, **more: settings(base, tmp_path / name, **more)


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """What a run that nothing happened to has left."""
    return left(murphy.train(settings(base, tmp_path_factory.mktemp("runs") / "straight")))


def left(folder):
    """All that a run left, but for its seconds and the settings, which name its folder."""
    folder = Path(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["optimizer_steps"] for line in lines) > 2
    for line in lines:
        for phase in ("sampling", "executing", "updating"):
            del line[phase]
    names = ("trees.jsonl", "evaluation.json", "model.safetensors", "best/model.safetensors")
    return lines, *((folder / name).read_bytes() for name in names)


def saved_step(folder):
    found = run.load(Path(folder))
    return found["step"] if found else None


def train_in_one_thread(config):
    torch.set_num_threads(1)
    murphy.train(config)


def test_four_steps_are_two_then_kill_9_then_two_bit_for_bit(small, straight):
    broken = small("broken")
    victim = FORKS.Process(target=train_in_one_thread, args=(broken,), daemon=True)
    victim.start()
    log = Path(broken.output) / "metrics.jsonl"
    while not (saved_step(broken.output) == 2 and log.read_text().count("\n") > 2):
        assert victim.is_alive()  # it makes a line that will have to be made again
        time.sleep(0.01)
    victim.kill()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    murphy.train(small("broken", resume=True))
    assert left(broken.output) == straight


MOMENTS = [
    ("build_trees", 3, signal.SIGINT, 2),
    ("choose", 3, signal.SIGTERM, 3),
    ("attempts", 2, signal.SIGTERM, 2),
]


@pytest.mark.parametrize("moment, call, number, at", MOMENTS)
def test_a_signal_leaves_sampling_and_evaluation_but_finishes_an_update(
    small, straight, monkeypatch, capsys, moment, call, number, at
):
    real, calls, before = getattr(murphy, moment), [], signal.getsignal(number)

    def signalled(*arguments, **named):
        calls.append(1)
        if len(calls) == call:
            if moment != "choose":
                torch.rand(3)  # drawn for what is then left: it must not be missing afterwards
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    monkeypatch.setattr(murphy, moment, signalled)
    with pytest.raises(SystemExit) as stopped:
        murphy.train(small("run", save_every=0))
    monkeypatch.setattr(murphy, moment, real)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    said = capsys.readouterr().out
    assert f"stopped after {at} of 4 steps" in said
    assert f"--output {small('run').output} --resume" in said
    assert saved_step(small("run").output) == at
    murphy.train(small("run", save_every=0, resume=True))
    assert left(small("run").output) == straight


def test_a_signal_in_the_last_save_gives_its_exit_code(small, monkeypatch):
    real = run.save

    def signalled(folder, content):
        real(folder, content)
        if content["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(state, "save", signalled)
    with pytest.raises(SystemExit) as stopped:
        murphy.train(small("run", steps=1, eval_every=0))
    assert stopped.value.code == 143
    assert (Path(small("run").output) / "model.safetensors").exists()  # and nothing is missing


def processes_below(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    return children + [below for child in children for below in processes_below(child)]


def test_a_second_signal_leaves_at_once_and_takes_the_workers_along(base, tmp_path):
    arguments = ["--model", base, "--problems", "cutoff", "--max-new-tokens", "16"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "murphy.py"), *arguments, "--output", "run"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    below = processes_below(process.pid)
    assert below
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in process.communicate(timeout=100)[1]
    assert process.returncode in (130, 143)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_of_two_signals_the_second_is_not_left_to_the_loop():
    with run.Signals() as signals:
        assert signals.interruptible(lambda: 5) == 5
        os.kill(os.getpid(), signal.SIGINT)  # outside of `interruptible`: the step goes on
        with pytest.raises(KeyboardInterrupt):
            signals.interruptible(lambda: 1 / 0)  # and nothing new is begun
        with pytest.raises(SystemExit) as left_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
    assert left_at.value.code == 143


# Checkpoints


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    run.save(tmp_path, {"step": 2})

    def half(content, file):
        file.write(b"half of it")
        raise SystemExit(130)  # as a second signal does

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(SystemExit):
        run.save(tmp_path, {"step": 3})
    monkeypatch.undo()
    assert saved_step(tmp_path) == 2
    run.save(tmp_path, {"step": 3})
    assert saved_step(tmp_path) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: order.append("flush") or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *to: order.append("rename") or replace(*to))
    (tmp_path / "metrics.jsonl").write_text("")
    run.save(tmp_path, {"step": 1})
    assert order == ["flush", "flush", "rename", "flush"]  # log, checkpoint, its name, the folder


@pytest.mark.parametrize("content", [b"", b"no checkpoint", "a torch file of something else"])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(tmp_path, content):
    if isinstance(content, str):
        torch.save([content], tmp_path / "checkpoint.pt")
    else:
        (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint.pt cannot be read as a checkpoint .*anew"):
        run.load(tmp_path)


@pytest.fixture
def full_disk():
    """A limit on the size of files stands for it: the same writes fail, in the same libraries."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_sentence_and_the_old_checkpoint_stays(tmp_path, full_disk):
    run.save(tmp_path, {"step": 2})
    with pytest.raises(OSError, match=r"could not be written .* make room, then --resume"):
        run.save(tmp_path, {"step": 3, "model": torch.zeros(50_000)})
    assert saved_step(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_disk_that_is_full_for_a_log_is_one_sentence_too(monkeypatch):
    def full(config):
        with open("/dev/full", "w") as log:
            log.write("a line")

    monkeypatch.setattr(murphy, "train", full)
    monkeypatch.setattr(sys, "argv", ["murphy.py"])
    with pytest.raises(SystemExit, match=r"^murphy.py: .*No space left on device$"):
        murphy.main()


# Resume


def test_a_run_goes_on_only_as_it_was_begun(small, monkeypatch, capsys):
    folder = murphy.train(small("run", steps=2, eval_every=0, save_every=1))
    with pytest.raises(ValueError) as refused:
        changed = {"group_size": 4, "eval_every": 7, "save_every": 9, "resume": True}
        murphy.train(small("run", steps=2, **changed))
    assert "--group-size was 3, is 4" in str(refused.value)
    assert "every" not in str(refused.value) and "--seed" not in str(refused.value)
    with pytest.raises(ValueError, match="--steps 1: the run has made 2 already"):
        murphy.train(small("run", steps=1, resume=True))
    monkeypatch.setattr(state, "fingerprint", lambda _: 7)  # other problems have another number
    with pytest.raises(ValueError, match="the problems are not those of the run"):
        murphy.train(small("run", steps=2, resume=True))
    assert saved_step(folder) == 2  # a refusal changes nothing
    with pytest.raises(ValueError, match="holds something already"):
        murphy.train(small("run"))


def test_a_finished_run_says_so_and_can_be_extended(small, capsys):
    folder = murphy.train(small("run", steps=1, eval_every=0))
    murphy.train(small("run", steps=1, eval_every=0, resume=True))
    assert "already finished; --resume --steps 2 would go on" in capsys.readouterr().out
    murphy.train(small("run", steps=2, eval_every=0, resume=True))
    assert "from here on the learning rate falls over all of them" in capsys.readouterr().out
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_on_the_command_line_resume_needs_nothing_but_the_folder(small, monkeypatch):
    begun = small("run")
    Path(begun.output).mkdir()
    settings = json.dumps(state.asdict(begun))
    (Path(begun.output) / "settings.json").write_text(settings)
    seen = []
    monkeypatch.setattr(murphy, "train", seen.append)
    murphy.main(["--output", begun.output, "--resume", "--eval-every", "3"])
    assert state.asdict(seen[0]) == {**json.loads(settings), "resume": True, "eval_every": 3}


@pytest.mark.parametrize("strange", [{"model": 5}, {"steps": "many"}, {"benchmark": "mbpp"}])
def test_settings_that_murphy_did_not_write_are_refused_in_a_sentence(small, strange):
    begun = small("run")
    Path(begun.output).mkdir()
    settings = state.asdict(begun) | strange
    (Path(begun.output) / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(SystemExit, match="settings.json in --output is not of murphy.py"):
        murphy.main(["--output", begun.output, "--resume"])


def test_a_log_is_cut_at_the_checkpoint_and_half_a_line_is_no_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert run.cut_log(log, 2) == [{"step": 0}, {"step": 1}]
    assert log.read_text() == '{"step": 0}\n{"step": 1}\n'
    log.write_text('{"step": 0}\n[]\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 of .* is no line of this log"):
        run.cut_log(log, 2)


def test_a_log_that_has_lost_lines_is_named_and_not_gone_on_from(small):
    folder = murphy.train(small("run", steps=2, eval_every=0))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[1] + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl does not hold each of the 2 steps"):
        murphy.train(small("run", steps=3, resume=True))


# Folders, and what a start refuses


def test_two_runs_into_one_folder_are_refused_but_a_dead_one_is_no_obstacle(tmp_path):
    lock = run.claim(tmp_path / "run")
    with pytest.raises(ValueError, match="another run is writing there"):
        run.claim(tmp_path / "run")
    lock.close()  # what the kernel does when a process ends, however it ends
    run.claim(tmp_path / "run").close()


def test_a_new_run_gets_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run.check_folder(Config())
    assert first == Path("runs/doctest-mars-seed0") and not first.exists()
    first.mkdir(parents=True)
    assert run.check_folder(Config()) == Path("runs/doctest-mars-seed0-1")


def test_prompts_that_leave_no_room_for_an_answer_stop_the_start(small):
    with pytest.raises(ValueError, match="no prompt fits: the shortest has .* --max-new-tokens"):
        murphy.train(small("run", max_new_tokens=300))
    assert not Path(small("run").output).exists()


@pytest.mark.parametrize("count, expected", [(None, 1), (3, 3)])
def test_a_tenth_of_a_file_is_held_out_at_least_one(tmp_path, count, expected):
    file = tmp_path / "nine.jsonl"
    row = {"prompt": "Write f.", "tests": ["assert f() == 1"], "entry_point": "f", "kind": "assert"}
    rows = [{**row, "id": str(number)} for number in range(9)]
    file.write_text(run.json_lines(rows))
    config = Config(model="m", problems=str(file), eval_count=count, problems_per_step=2)
    of_step, held_out, training = state.listed_data(config)
    assert len(held_out) == expected and len(training) == 9 - expected
    epoch = [p.id for step in range(4) for p in of_step(step)][: len(training)]
    assert sorted(epoch) == sorted(p.id for p in training)  # each once before any comes again
    with pytest.raises(ValueError, match="nothing is left to train on"):
        state.listed_data(Config(model="m", problems=str(file), eval_count=9))


def test_a_cap_that_cuts_every_completion_is_warned_of(small, monkeypatch, capsys):
    def endless(self, prompts, n):
        cut = Completion("def f(", [3, 4], [5] * self.max_new_tokens, truncated=True)
        return [[cut] * n for _ in prompts]

    monkeypatch.setattr(state.Sampler, "__call__", endless)
    folder = murphy.train(small("run", max_new_tokens=4, steps=2, eval_every=0, beta=0.0))
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        assert line["truncated"] == 1.0 and line["groups_with_spread"] == 0.0
    said = capsys.readouterr()
    assert "In 2 steps nothing could be learned" in said.out
    assert said.err.count("no end within 4 tokens") == 1
