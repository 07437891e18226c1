"""A run that survives: files, folders, checkpoints, resume, signals, a full disk."""

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from matplotlib.figure import Figure

import executor
import murphy
from murphy import Config
from support import run, state
from tests.test_ranks import SMALL, lines_of, start, train_and_signal
from tree import Completion


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The judge's check of itself and the picture are slow, and have tests of their own."""
    monkeypatch.setattr(executor, "self_check", lambda: None)
    monkeypatch.setattr(Figure, "savefig", lambda *_: None)


def settings(base, folder, **more):
    """Four steps that learn. With beta, a resumed run must find the first model again."""
    small = SMALL | {"model": base, "output": str(folder), "steps": 4, "beta": 0.05}
    small |= {"eval_every": 2, "eval_temperature": 1.0, "log_trees_every": 1, "save_every": 2}
    return Config(**{**small, **more})


@pytest.fixture
def small(base, tmp_path):
    return lambda **more: settings(base, tmp_path / "run", **more)


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """What a run that nothing happened to has left."""
    return left(murphy.train(settings(base, tmp_path_factory.mktemp("runs") / "straight")))


def left(folder):
    """All that a run left, but for its seconds and the settings, which name its folder."""
    lines = lines_of(folder / "metrics.jsonl")
    assert sum(line["optimizer_steps"] for line in lines) > 2
    for line in lines:
        for phase in ("sampling", "executing", "updating"):
            del line[phase]
    names = ("trees.jsonl", "evaluation.json", "model.safetensors", "best/model.safetensors")
    return lines, *((folder / name).read_bytes() for name in names)


def ended_by(config, *signals):
    """The exit code of a process that got these signals when its third step was logged."""
    (process,) = start(1, train_and_signal, config, 0, 2, *signals)
    process.join(300)
    return process.exitcode


def test_four_steps_are_two_then_kill_9_then_two_bit_for_bit(small, straight, tmp_path):
    assert ended_by(small(), signal.SIGKILL) == -signal.SIGKILL
    assert run.load(tmp_path / "run")["step"] == 2  # the third step will have to be made again
    assert left(murphy.train(small(resume=True))) == straight


def test_a_second_signal_ends_the_program_at_once(small, tmp_path):
    assert ended_by(small(save_every=0), signal.SIGTERM, signal.SIGINT) == 130
    assert run.load(tmp_path / "run")["step"] == 2  # after one signal it would be 3


# The call before which a signal comes (module, name, count), the signal, and the steps made then.
MOMENTS = [
    (murphy, "build_trees", 3, signal.SIGINT, 2),
    (murphy, "choose", 3, signal.SIGTERM, 3),
    (murphy, "attempt_rows", 2, signal.SIGTERM, 2),
    (state, "save", 3, signal.SIGTERM, 4),  # all steps are made; only the exit status tells of it
]


@pytest.mark.parametrize("module, name, call, number, at", MOMENTS)
def test_a_signal_leaves_sampling_and_evaluation_but_finishes_an_update(
    small, straight, tmp_path, monkeypatch, capsys, module, name, call, number, at
):
    real, calls, before = getattr(module, name), count(1), signal.getsignal(number)

    def signalled(*arguments, **named):
        if next(calls) == call:
            if name in ("build_trees", "attempt_rows"):
                torch.rand(3)  # random numbers of work that is given up: a resume draws them again
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, signalled)
    with pytest.raises(SystemExit) as stopped:
        murphy.train(small(save_every=0))
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    said = capsys.readouterr().out
    assert f"stopped after {at} of 4 steps" in said
    assert f"--output {tmp_path / 'run'} --resume" in said
    assert run.load(tmp_path / "run")["step"] == at
    assert left(murphy.train(small(save_every=0, resume=True))) == straight


TOOLS = ("compare", "metrics", "problems", "page")
STOPPED = [(f"support/{name}.py", 1, f"\n{name}: stopped\n") for name in TOOLS]
STOPPED.append(("murphy.py", 130, "\nmurphy.py: stopped\n"))
STOPPED.append(("evaluate.py", 1, "\nevaluate.py: stopped; the same command continues\n"))


@pytest.mark.parametrize("program, code, line", STOPPED)
def test_ctrl_c_while_a_program_starts_ends_in_a_line(program, code, line, tmp_path):
    ctrl_c = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    for library in ("numpy", "torch", "gzip", "html"):  # each program imports one of them
        (tmp_path / f"{library}.py").write_text(ctrl_c)
    command = [sys.executable, Path(murphy.__file__).parent / program]
    path = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, line)


def test_an_error_of_the_disk_ends_the_program_with_its_sentence(monkeypatch):
    full = OSError("the checkpoint could not be written; --resume")
    monkeypatch.setattr(murphy, "train", Mock(side_effect=full))
    with pytest.raises(SystemExit, match="^murphy.py: the checkpoint could .* --resume$"):
        murphy.main([])


def test_a_full_disk_or_a_kill_in_a_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def half(content, file):
        file.write(b"half of it")
        raise SystemExit(130)  # as a second signal does

    run.save(tmp_path, {"step": 2})
    (tmp_path / "checkpoint.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="^the checkpoint .* not be written .* make room, then --res"):
        run.save(tmp_path, {"step": 3, "model": torch.zeros(50_000)})
    with monkeypatch.context() as killed, pytest.raises(SystemExit):
        killed.setattr(torch, "save", half)
        run.save(tmp_path, {"step": 3})
    assert run.load(tmp_path)["step"] == 2
    run.save(tmp_path, {"step": 3})
    assert run.load(tmp_path)["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda number: order.append("flush"))
    monkeypatch.setattr(os, "replace", lambda *names: order.append("rename"))
    (tmp_path / "metrics.jsonl").write_text("")
    run.save(tmp_path, {"step": 1})
    assert order == ["flush", "flush", "rename", "flush"]  # log, checkpoint, its name, the folder


def test_what_is_no_checkpoint_is_refused_in_a_sentence(tmp_path):
    file = tmp_path / "checkpoint.pt"
    torch.save(["something else"], file)
    for content in (file.read_bytes(), b"no checkpoint", b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="checkpoint.pt cannot be read as a .* anew in"):
            run.load(tmp_path)
        with pytest.raises(ValueError, match="checkpoint.pt cannot be read"):  # before all else
            run.check_folder(SimpleNamespace(resume=True, output=str(tmp_path)))


def test_a_run_goes_on_only_as_it_was_begun_or_longer(small, monkeypatch, capsys):
    folder = murphy.train(small(steps=1, eval_every=0))
    log = (folder / "metrics.jsonl").read_text()

    def refused(sentence, **changed):
        with pytest.raises(ValueError, match=sentence):
            murphy.train(small(**{"steps": 1, "resume": True, **changed}))

    only = "is another run: --group-size was 3, is 4$"  # the others may change
    refused(only, group_size=4, eval_every=7, save_every=9)
    refused("--steps 0: the run already has 1", steps=0)
    refused("holds something already", resume=False)
    with monkeypatch.context() as changed:
        changed.setattr(state, "fingerprint", lambda _: 7)
        refused("the problems are not those of the run")
        changed.setattr(state, "load", lambda _: {"step": 1, "data": 7, "settings": {}})
        refused(r"checkpoint.pt in .* lacks \['evaluations', 'model', 'optimizer'\]")
    (folder / "metrics.jsonl").write_text("")
    refused("metrics.jsonl does not hold each of the 1 steps")
    (folder / "metrics.jsonl").write_text(log)
    assert run.load(folder)["step"] == 1  # a refusal changes nothing
    run.save(folder, {**run.load(folder), "versions": {}})  # an older MURPHY kept more in it
    capsys.readouterr()

    murphy.train(small(steps=1, eval_every=0, resume=True))
    said = capsys.readouterr().out
    assert "going on after 1 of 1 steps" in said and "learning rate now" not in said
    memory = {"micro_tokens": 90, "sample_tokens": 200, "gradient_checkpointing": True}
    murphy.train(small(steps=2, eval_every=0, resume=True, **memory))
    assert "--steps was 1: the learning rate now falls until step 2" in capsys.readouterr().out
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == [0, 1]


def test_a_log_is_cut_at_the_checkpoint_and_half_a_line_is_no_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    run.cut_log(log, 2)
    assert log.read_text() == '{"step": 0}\n{"step": 1}\n'
    log.write_text('{"step": 0}\n[]\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 of .* is no line of this log"):
        run.cut_log(log, 2)


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


@pytest.mark.parametrize("eval_count, expected", [(None, 1), (3, 3)])
def test_a_tenth_of_a_file_is_held_out_at_least_one(tmp_path, eval_count, expected):
    file = tmp_path / "nine.jsonl"
    row = {"prompt": "Write f.", "tests": ["assert f() == 1"]}
    file.write_text(run.json_lines({**row, "id": str(number)} for number in range(9)))
    config = Config(model="m", problems=str(file), eval_count=eval_count, problems_per_step=5)
    problems_of, held_out, training = state.listed_data(config)
    size = 9 - expected
    assert len(held_out) == expected and len(training) == size
    ids = [problem.id for step in range(4) for problem in problems_of(step)]
    assert len(ids) == 20 and ids[:size] != ids[size : 2 * size]
    for epoch in (ids[:size], ids[size : 2 * size]):  # each once before any comes again
        assert sorted(epoch) == sorted(problem.id for problem in training)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        state.listed_data(Config(model="m", problems=str(file), eval_count=9))


def test_a_cap_that_cuts_every_completion_is_warned_of(small, monkeypatch, capsys):  # D20
    def endless(self, prompts, n):
        cut = Completion("def f(", [3, 4], [5] * self.max_new_tokens, truncated=True)
        return [[cut] * n for _ in prompts]

    monkeypatch.setattr(state.Sampler, "__call__", endless)
    folder = murphy.train(small(max_new_tokens=4, steps=2, eval_every=0, beta=0.0))
    for line in lines_of(folder / "metrics.jsonl"):
        assert line["truncated"] == 1.0 and line["groups_with_spread"] == 0.0
    said = capsys.readouterr()
    assert "In 2 steps nothing could be learned" in said.out
    assert said.err.count("no end within 4 tokens") == 1
