"""What a program's process may not do.

The programs run without namespaces, so that each rule stands alone.
"""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import executor
from support import confine, syscalls

ROOT = Path(__file__).resolve().parent.parent
LINUX = sys.platform == "linux"


def confined(tmp_path, program, **limits):
    """What a program prints that runs in a cage without namespaces."""
    limits = {"timeout": 5, "memory_mb": 512, **limits}
    code = (
        "import os, sys\nfrom support.confine import Cage\n"
        f"cage = Cage({str(tmp_path)!r}, False)\nplace = cage.open()\n"
        f"os.chdir(place)\ncage.enter({limits})\n{program}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.split()


def attempts(*lines):
    """A program that says for each line whether it was allowed."""
    head = (
        "import ctypes, fcntl, os, resource, signal, socket, threading\nlibc = ctypes.CDLL(None)\n"
    )
    body = [
        f"try:\n    {line}\n    print('yes')\nexcept OSError:\n    print('no')" for line in lines
    ]
    return head + "\n".join(body)


@pytest.mark.parametrize("isolated", [False])
def test_each_program_gets_a_folder_that_did_not_exist(tmp_path, isolated):
    code = (
        f"from support.confine import Cage\nimport os\ncage = Cage({str(tmp_path)!r}, {isolated})\n"
        "one = cage.open()\nopen(one + '/file', 'w').close()\ncage.close(one)\n"
        "two = cage.open()\nprint(os.listdir(two), one != two)\ncage.close(two)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[] True\n" and not list(tmp_path.iterdir())


def test_no_process_starts_and_none_is_reached(tmp_path):
    program = attempts(
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.kill(os.getppid(), 0)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
        "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "os.sched_setaffinity(os.getppid(), {0})",
    )
    program += "\nprint(libc.prctl(1, 0, 0, 0, 0), libc.ptrace(16, os.getppid(), 0, 0))"
    assert confined(tmp_path, program) == ["no"] * 7 + ["-1", "-1"]


def test_no_network_but_local_sockets_and_threads(tmp_path):
    program = attempts(
        "socket.socket()",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.socketpair()",
        "threading.Thread(target=print).start()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",  # could send to any address
    )
    assert confined(tmp_path, program) == ["no", "no", "yes", "yes", "no", "no"]


def test_without_namespaces_no_file_outside_is_changed(tmp_path):
    """Landlock watches who opens a file, not who changes its attributes."""
    outside = tmp_path / "outside"
    outside.write_text("x" * 10)
    before = outside.stat()
    name = repr(str(outside))
    program = attempts(
        f"os.truncate({name}, 0)",
        f"os.chmod({name}, 0)",
        f"os.utime({name}, (5, 5))",
        f"os.setxattr({name}, 'user.message', b'1')",
        f"os.chown({name}, 1, 1)",
        "os.utime('..', (5, 5))",
        "os.chmod(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 0o755)",
        "os.open('mine', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)",
    )
    assert confined(tmp_path, program) == ["no"] * 7 + ["yes"]
    after = outside.stat()
    assert (after.st_size, after.st_mode, after.st_mtime) == (10, before.st_mode, before.st_mtime)


def test_no_message_is_left_in_the_times_of_a_device():
    code = (
        "import os\ndef f():\n    try: os.utime('/dev/null')\n    except OSError: return 1\n"
        "    return 0"
    )
    p = SimpleNamespace(kind="functional", tests=[[[], 1]], public_tests=[], entry_point="f")
    assert executor.run(p, code).status == "passed"
    executor.close()


def test_no_memory_and_no_messages_outlive_a_program(tmp_path):
    calls = {
        "shmget": "29, 0, 100, 0o1666",
        "semget": "64, 0, 1, 0o1666",
        "msgget": "68, 0, 0o1666",
    }
    calls |= {"memfd_create": "319, b'x', 0", "mq_open": "240, b'x', 0o100, 0o600, 0"}
    numbers = {name: row.split(",")[0] for name, row in calls.items()}
    table = dict(re.findall(r"(\w+) (\d+) ", syscalls.DENIED))
    assert {name: table[name] for name in calls} == numbers
    if os.uname().machine == "x86_64":
        program = "import ctypes\nlibc = ctypes.CDLL(None)\n"
        program += "\n".join(f"print(libc.syscall({row}))" for row in calls.values())
        assert confined(tmp_path, program) == ["-1"] * 5


def test_files_are_seen_in_the_own_folder_only(tmp_path):
    outside = tmp_path / "outside"
    secret = tmp_path / "secret"
    secret.write_text("x")
    program = attempts(
        "open('mine', 'w').close()",
        "open(os.devnull, 'w').close()",
        "os.listdir(os.path.dirname(os.__file__))",
        f"open({str(outside)!r}, 'w').close()",
        f"os.mkdir({str(outside)!r})",
        f"open({str(secret)!r}).close()",
    )
    allowed = confine.LIBRARY.syscall(444, None, 0, 1) < 1  # a kernel without Landlock
    assert confined(tmp_path, program) == ["yes", "yes", "yes"] + ["yes" if allowed else "no"] * 3


def test_limits_cannot_be_raised(tmp_path):
    program = (
        "import resource\n"
        "for name in ('CPU', 'AS', 'NOFILE', 'FSIZE'):\n"
        "    which = getattr(resource, 'RLIMIT_' + name)\n"
        "    soft, hard = resource.getrlimit(which)\n"
        "    try:\n        resource.setrlimit(which, (hard, hard + 1))\n        print('raised')\n"
        "    except (ValueError, OSError):\n        print(soft == hard > 0)\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU)[1])"
    )
    assert confined(tmp_path, program, timeout=2.5) == ["True"] * 4 + ["3"]


def test_the_filter_jumps_to_its_own_lines():
    code = bytes(syscalls.system_call_filter(isolated=False))
    rows = [code[at : at + 8] for at in range(0, len(code) - 1, 8)]
    assert len(rows) > 100
    for at, row in enumerate(rows):
        if row[0] in (0x15, 0x35, 0x45):  # jumps: how many lines, if so and if not
            assert at + max(row[2], row[3]) < len(rows) - 1


def test_the_filter_has_all_calls_of_its_tables():
    column = {"x86_64": -2, "aarch64": -1}[os.uname().machine]
    for isolated, text in (
        (True, syscalls.DENIED),
        (False, syscalls.DENIED + syscalls.DENIED_PLAIN),
    ):
        calls = [part.split() for part in re.split("[,:\n]", text) if re.search(r"\d ", part)]
        assert {"fork", "ptrace", "connect", "execve", "kill"} <= {name for name, *_ in calls}
        code = bytes(syscalls.system_call_filter(isolated))
        rows = list(struct.iter_unpack("<HBBI", code[: len(code) // 8 * 8]))
        fails = (6, 0, 0, 0x50001)
        found = [row[3] for row, after in zip(rows, rows[1:], strict=False) if after == fails]
        wanted = [int(words[column]) for words in calls if words[column] != "-"]
        assert found[: len(wanted)] == wanted


def test_remove_follows_no_link_and_needs_no_right(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    os.mkfifo(folder / "fifo")
    deep = os.open(folder, os.O_RDONLY)
    for _ in range(1500):  # longer than any path may be
        os.mkdir("d" * 20, dir_fd=deep)
        inner = os.open("d" * 20, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = inner
    os.close(deep)
    (folder / "locked").mkdir(0o000)
    (folder / "outer" / "locked").mkdir(0o000, parents=True)
    confine.remove(str(folder))
    folder.symlink_to(kept)  # a program put a link in its place
    confine.remove(str(folder))
    assert not os.path.lexists(folder) and (kept / "file").read_text() == "x"
