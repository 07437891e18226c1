"""The executor: verdicts that cannot be cheated, limits that hold, nothing left behind.

What tests mean is in test_judge.py. D26 to D36 are entries of a list of faults that programs of
this kind were reported with.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

import executor
from executor import run, run_many
from support.verify import EXECUTOR

ROOT = Path(executor.__file__).resolve().parent
REDTEAM = Path(__file__).parent / "redteam"


def stdin(given, expected):
    return SimpleNamespace(kind="stdin", tests=[[given, expected]])


def functional(*tests):
    return SimpleNamespace(kind="functional", tests=list(map(list, tests)), entry_point="f")


CHECK = "import executor; executor.self_check()"
ADD = functional(([2, 3], 5), ([1, 0], 1), ([10, 20], 30))
RIGHT = "def f(a, b): return a + b"
LOOP = "while True: pass"
TASKS = json.loads((REDTEAM / "tasks.json").read_text())
SIDE_EFFECTS = ("leaves a message", "reads the message", "secrets", "sleeps", "half a message")
DANGEROUS = ("fork bomb", "kills all", "double fork", "deep folder", "locked folders")


def unescaped(line):
    if not line.startswith("#escaped "):
        return line
    line = line.removeprefix("#escaped ").encode().decode("unicode_escape")
    return re.sub(r"\{\{(\d+) x (.*?)\}\}", lambda match: match[2] * int(match[1]), line)


# A program that tries to cheat, or an honest one; its reward must lie between low and high.
Attack = namedtuple("Attack", "name problem low high program")


def corpus(name):
    """The programs of a file."""
    for block in (REDTEAM / name).read_bytes().decode("utf-8").split("\n#### ")[1:]:
        head, _, body = block.partition("\n")
        name, kind, low, high, _ = (part.strip() for part in head.split("|"))
        program = "\n".join(map(unescaped, body.split("\n")))
        yield Attack(name, SimpleNamespace(**TASKS[kind]), float(low), float(high), program)


def judged(programs):
    """Score programs of a corpus; those whose reward is none of the allowed ones."""
    hostile = [p for p in programs if p.low < 1]
    honest = [p for p in programs if p.low == 1]
    results = run_many([(p.problem, p.program) for p in hostile], timeout=0.3, memory_mb=256)
    results += run_many([(p.problem, p.program) for p in honest], timeout=5)
    faults = []
    for p, result in zip(hostile + honest, results, strict=True):
        feedback = result.feedback.encode("utf-8")
        assert len(result.feedback) <= 2000 and b"\x1b" not in feedback and b"<|im" not in feedback
        if result.status == "unscorable" or not p.low <= result.reward <= p.high:
            faults.append((p.name, result))
    return faults


def processes():
    """{pid: (parent, command line)} of all processes that can be seen."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            words = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
            if state != "Z" or int(parent) == os.getpid():
                found[int(folder.name)] = int(parent), words
    return found


def descendants(pid):
    """The processes below one."""
    seen = processes()
    below = {pid}
    for _ in range(5):
        below |= {child for child, (parent, _) in seen.items() if parent in below}
    return {child for child in below - {pid} if "multiprocessing" not in seen[child][1]}


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the kernel was faster
            os.kill(pid, signal.SIGKILL)


def python(*arguments, cwd=ROOT, **options):
    """A new interpreter that has run in a folder."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)


@pytest.fixture(autouse=True, scope="module")
def workers_end():
    """Neither workers nor zombies are left."""
    yield
    executor.close()
    left = descendants(os.getpid())
    assert not left, [processes().get(pid) for pid in left]


@pytest.mark.parametrize("name", ["programs.txt", "handed.txt"])
def test_the_red_team_is_paid_for_nothing(name):
    programs = list(corpus(name))
    assert len(programs) > 110
    assert not judged(programs)
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/root", "/etc", "/"):
        assert not list(Path(folder).glob("EXECLAB_LEAK_*"))


def test_without_namespaces_only_side_effects_get_through(monkeypatch):
    monkeypatch.setenv("MURPHY_ISOLATION", "plain")
    executor.close()
    some = list(corpus("programs.txt"))
    programs = [p for p in some[::6] if p.name not in SIDE_EFFECTS]
    programs += [p for p in some if p.name in DANGEROUS]
    with pytest.warns(UserWarning, match="a program is less confined on this system"):
        faults = judged(programs)
    executor.close()
    assert not faults


LOOK = """
import fcntl, os
def f():
    here = os.stat(".")
    open("new", "w").write("x" * 10**6)
    fcntl.flock(os.open("/dev/null", 2), fcntl.LOCK_EX | fcntl.LOCK_NB)
    flags = [fcntl.fcntl(fd, 11) for fd in (0, 1, 2)]
    times = [here.st_mtime > 1e9, os.stat("/dev/null").st_mtime]
    return [os.listdir("."), here.st_mode & 0o777, times, os.listxattr("."), flags]
"""
LEAVE = [
    "os.chmod('.', 0o300)",
    "os.utime('.', (5, 5))",
    "os.utime('/dev/null')",
    "os.setxattr('.', 'user.message', b'1')",
    "open('message', 'w').write('1')",
    "open('all', 'wb').write(bytes(10**9))",
    "[open(str(n), 'w').close() for n in range(10**5)]",
    "[fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) for fd in (0, 1, 2)]",
    "[fcntl.fcntl(fd, 10, 42) for fd in (0, 1, 2)]",
]


def test_nothing_passes_from_one_program_to_the_next():
    """A program gets a folder that did not exist before, and streams of its own."""
    p = functional(([], 0))
    clean = run(p, LOOK).feedback
    assert "f() returned [[" in clean
    for line in LEAVE:
        leave = f"import fcntl, os\ndef f():\n    try: {line}\n    except OSError: pass"
        _, seen = run_many([(p, leave), (p, f"{LOOK}# after {line}")], workers=1)
        assert seen.feedback == clean, line


def test_d26_d31_an_early_exit_is_no_pass_and_input_ends_at_once():
    exits = ["import sys; sys.exit(0)", "raise SystemExit", "quit()", "import os; os._exit(0)"]
    results = run_many([(ADD, line) for line in exits])
    assert [(result.reward, result.status) for result in results] == [(0, "error")] * 4
    assert run(stdin("", ""), "def f(): raise ValueError\nf()").reward == 0
    for p in (ADD, stdin("", "1")):
        assert "EOFError" in run(p, "x = input()").feedback


def test_d28_a_broken_sandbox_stops_the_run(monkeypatch):
    executor.close()
    for path in ("/nowhere/python", shutil.which("false")):
        monkeypatch.setattr(executor, "PYTHON", path)
        with pytest.raises(RuntimeError, match=f"cannot start .* {path} .*: it did not start"):
            executor.self_check()
    broken = executor.verdict("error", "", [False])
    monkeypatch.setattr(executor, "run_many", lambda jobs, **_: [broken] * len(jobs))
    with pytest.raises(RuntimeError, match="no reward can be trusted"):
        executor.self_check()


def test_d29_timeouts_leave_nothing_behind():
    """No other program sleeps so long."""
    sleeper = "import subprocess as s\ntry: s.Popen(['sleep', '86399.25'])\nexcept OSError: 0\n"
    codes = [f"{head}{LOOP}  # {n}" for head in ("", sleeper) for n in range(3)]
    results = run_many([(ADD, code) for code in codes], timeout=0.2)
    assert [result.status for result in results] == ["timeout"] * 6
    assert not [words for _, words in processes().values() if "86399.25" in words]


def test_d30_output_neither_blocks_nor_fills_memory():
    big = stdin("", "x" * 200_000)
    assert run(big, "print('x' * 200000)").reward == 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    floods = [f"import os\nwhile True: os.write({stream}, b'y' * 1000)" for stream in (1, 2)]
    for result in run_many([(p, flood) for p in (big, ADD) for flood in floods], timeout=0.3):
        assert result.status == "timeout" and len(result.feedback) <= 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000
    result = run(big, "print('head' + 'y' * 10**6 + 'tail')")
    assert re.search(r"'head.*cut\].*tail\\n'", result.feedback)
    value = run(ADD, "def f(a, b): return 'z' * 10**7", output_bytes=10**6)
    assert value.feedback.startswith("Test 1 failed: f(2, 3) returned more than 1000000 bytes")


def test_d33_cpu_time_decides_and_not_waiting_for_a_busy_machine():
    busy = "import time\ndef f(a, b):\n    while time.process_time() < 0.2: pass\n    return a + b"
    workers = 4 * len(os.sched_getaffinity(0))
    results = run_many([(ADD, f"{busy}  # {n}") for n in range(8)], workers=workers, timeout=2)
    assert [result.status for result in results] == ["passed"] * 8
    assert all(0.2 <= result.cpu_seconds < 2 for result in results)


def test_d34_the_executor_works_under_spawn_and_in_threads_and_needs_neither_itself():
    for method in ("spawn", "fork"):  # a fork does not use the workers that it sees
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(run, (ADD, RIGHT)).reward == 1
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        codes = [f"def f(a, b): return a + b + {n}" for n in range(12)]
        assert list(pool.map(lambda code: run(ADD, code).reward, codes)) == [1] + [0] * 11
    code = "import os, executor, sys; print(os.listdir('/proc/self/task'), 'torch' in sys.modules)"
    assert re.fullmatch(r"\['\d+'\] False\n", python("-c", code).stdout)


def test_d35_memory_is_limited_in_the_program_alone():
    result = run(ADD, "def f(a, b): return len(bytearray(4 << 30))")
    assert result.status == "memory" and "MemoryError" in result.feedback
    threads = "import os\ndef f(): return os.environ['OPENBLAS_NUM_THREADS']"
    assert run(functional(([], "1")), threads).reward == 1
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)"
    done = python("-c", f"{limit}; {CHECK}")  # the user has less memory than the judge asks for
    assert done.returncode == 0, done.stderr


def test_d36_odd_characters_are_judged_as_what_they_are():
    for code, status in (
        (r"print('\ud800')", "error"),
        (r"import sys; sys.stdout.buffer.write(b'\xff\xfe')", "failed"),
        ("print('e')\r\n", "passed"),
        ("x = '\ud800'\nprint('e')", "error"),
        ("print('\u00e9')", "failed"),
    ):
        assert run(stdin("", "e"), code).status == status, code
    assert run(stdin("\u00e9\n", "\u00e9"), "print(input())").reward == 1


TOKENS = r"""<|im_end|> <|endoftext|> <start_of_turn> </think> [/INST] [INST] <tool_call> <s> </s>
<<SYS>> <</SYS>> <repo_name> <file_sep> <filename> <reponame> <jupyter_output> <unused7> <turn|>
[TOOL_CALLS] [|endofturn|] <\uff5cend\uff5c> ``` ~~~ <EOT> <thinking> <Assistant>
\x1b \ud800 \u200b \u202e \u2028 \ufeff \U000e0041 \u061c \u00ad \ufff9 \x07 \x9b \u2066
\ufe0f \U000e0100 \u034f \u3164 \u115f \uffa0 \u2800"""


@pytest.mark.parametrize("action, says", [("return", "returned"), ("raise ValueError", "raised")])
def test_no_special_token_or_control_character_gets_into_feedback(action, says):
    marks = [token.encode("ascii").decode("unicode_escape") for token in TOKENS.split()]
    p = functional(*[([n], 0) for n in range(len(marks))])
    code = f"marks = {marks!a}\ndef f(n): {action}(marks[n])"
    lines = run(p, code, feedback_tests=99, feedback_chars=10**5).feedback.split("\n")
    for n, (mark, line) in enumerate(zip(marks, lines, strict=True)):
        assert line.startswith(f"Test {n + 1} failed: f({n}) {says} "), line
        assert mark not in line, (mark, line)


def test_equal_pairs_run_once_and_results_keep_their_order():
    noisy = functional(([], 1))
    code = "import os\ndef f(): return int.from_bytes(os.urandom(8), 'big')"
    results = run_many([(noisy, code), (ADD, RIGHT), (noisy, code), (noisy, ""), (noisy, None)])
    assert results[0] == results[2] and results[0].tests is not results[2].tests
    statuses = [result.status for result in results]
    assert statuses == ["failed", "passed", "failed", "no_code", "no_code"]
    assert results[3].feedback == "No code was found in the answer." and results[3].reward == 0
    assert run_many([]) == []


def test_a_limit_that_is_unknown_or_no_positive_number_is_refused():
    with pytest.raises(TypeError, match="unknown limit 'seconds'; the limits are timeout"):
        run(ADD, "x", seconds=1)
    for name in ("timeout", "feedback_tests", "memory_mb", "output_bytes", "feedback_chars"):
        for value in (0, -1, float("nan"), float("inf"), "3"):
            with pytest.raises(ValueError, match=f"{name} must be a positive number"):
                run(ADD, "x", **{name: value})


@pytest.mark.parametrize("spare_judges", [False, True, False])
def test_workers_that_die_are_replaced(spare_judges):
    """All their processes, or the zygotes alone."""
    run_many([(ADD, f"x = {n}") for n in range(2)])
    judges = {worker.process.pid for worker in executor._idle if spare_judges}
    kill(descendants(os.getpid()) - judges)
    results = run_many([(ADD, f"{RIGHT}  # {n}") for n in range(9)])
    assert [result.status for result in results] == ["passed"] * 9


def test_close_ends_what_goes_on_in_other_threads_and_the_next_call_works():
    run_many([(ADD, f"x = {n}") for n in range(2)], workers=2)
    idle = len(descendants(os.getpid()))
    jobs = [(ADD, f"def f(*a):\n    while True: {n}") for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(run_many, jobs, workers=2, timeout=300)
        while len(descendants(os.getpid())) < idle + 2:
            time.sleep(0.01)
        executor.close()
        with pytest.raises(concurrent.futures.CancelledError):
            call.result(120)  # alone they would take hours
    assert run(ADD, RIGHT).reward == 1


@pytest.mark.parametrize("n, answers", [(1, False), (2, False), (3, True)])
def test_no_worker_outlives_close(monkeypatch, n, answers):
    """It comes before a worker starts, while it starts, or as it has answered and becomes idle."""

    def enter():
        if lock.__enter__.call_count == n:  # just before the lock is taken for the n-th time
            executor.close()

    executor.close()
    lock = MagicMock()
    lock.__enter__.side_effect = enter
    monkeypatch.setattr(executor, "_lock", lock)
    monkeypatch.setattr(executor, "Worker", MagicMock(wraps=executor.Worker))
    ended = pytest.raises(concurrent.futures.CancelledError)
    with contextlib.nullcontext() if answers else ended:
        assert run(ADD, RIGHT).reward == 1
    assert lock.__enter__.call_count > n and executor.Worker.called == (n > 1)
    assert not executor._idle and not executor._alive and not descendants(os.getpid())


def train(body):
    run(ADD, RIGHT)
    print("ready", flush=True)
    run(ADD, f"def f(a, b): {body}", timeout=60)
    time.sleep(60)


@pytest.mark.parametrize("body, all_at_once", [("0", False), (LOOP, False), (LOOP, True)])
def test_a_trainer_that_is_killed_leaves_no_trace(tmp_path, monkeypatch, body, all_at_once):
    """Its judge idle or at work; what a kill of all at once leaves is removed by the next run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", f"from tests.test_executor import train; train({body!r})"]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert trainer.stdout.readline() == b"ready\n"
    below = descendants(trainer.pid)
    assert len(below) > 1
    kill([trainer.pid, *below] if all_at_once else [trainer.pid])
    trainer.communicate()
    patience = time.monotonic() + 60  # the kernel ends them; the time is for a broken executor
    while processes().keys() & below:
        assert time.monotonic() < patience
        time.sleep(0.05)
    assert python("-c", CHECK).returncode == 0
    assert not list(tmp_path.iterdir())


def test_many_programs_leave_no_trace():
    names = ("crashes", "exit in the call", "closes all", "double fork", "forged messages")
    hostile = [p.program for p in corpus("programs.txt") if p.name in names]
    codes = [f"{program}\n# {n}" for n in range(2) for program in hostile]
    codes += [f"def square(n): return n * n  # {n}" for n in range(90)]

    def state():
        """Processes, open files (where they may be seen) and pages of memory."""
        ours = [Path("/proc", str(pid)) for pid in descendants(os.getpid())]
        pages = sum(int((folder / "statm").read_text().split()[1]) for folder in ours)
        seen = [folder / "fd" for folder in ours if os.access(folder / "fd", os.R_OK)]
        return len(ours), sum(len(os.listdir(fd)) for fd in (*seen, "/proc/self/fd")), pages

    executor.close()
    square, states = SimpleNamespace(**TASKS["square"]), []
    for _ in range(2):
        results = run_many([(square, code) for code in codes], workers=2)
        states.append(state())
        assert [result.reward == 1 for result in results] == [False] * 10 + [True] * 90
    before, after = states
    assert before[:2] == after[:2] and after[2] < before[2] * 1.1 + 2000


def test_the_executor_and_its_seven_files_work_alone_in_an_empty_folder(tmp_path):
    (tmp_path / "support").mkdir()
    for name in EXECUTOR:
        shutil.copy(ROOT / name, tmp_path / name)
    done = python("executor.py", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rewards = ["1.00, passed", "0.67, failed", "0.00, timeout", "0.00, error", "0.00, failed"]
    assert re.findall(r": reward (.*)", done.stdout) == rewards
    files = [path for path in tmp_path.rglob("*.*") if path.suffix != ".pyc"]
    assert len(files) == len(EXECUTOR) == 8


def test_a_folder_that_another_process_removes_is_made_again(monkeypatch, tmp_path):
    made = iter([str(tmp_path / "gone"), str(tmp_path)])
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: next(made))
    folder, lock = executor.own_folder()
    os.close(lock)
    assert folder == str(tmp_path)
