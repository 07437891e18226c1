"""What a program's process may not do.

The programs run without namespaces, so that each rule stands alone.
"""

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support import confine, syscalls

ROOT = Path(__file__).resolve().parent.parent


def in_python(code):
    """What code prints, in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.split()


def confined(tmp_path, program, timeout=5):
    """What a program prints that runs in a cage without namespaces."""
    return in_python(
        "import ctypes, fcntl, os, resource, signal, socket, threading\n"
        "libc = ctypes.CDLL(None, use_errno=True)\nfrom support.confine import Cage\n"
        f"cage = Cage({str(tmp_path)!r}, False)\nos.chdir(cage.open())\n"
        f"cage.enter({{'timeout': {timeout}, 'memory_mb': 512}})\n{program}"
    )


def attempts(*lines):
    """A program that says for each line whether it was allowed."""
    form = "try:\n    {}\n    print('yes')\nexcept OSError:\n    print('no')"
    return "\n".join(form.format(line) for line in lines)


def test_each_program_gets_a_folder_that_did_not_exist(tmp_path):
    printed = in_python(
        f"from support.confine import Cage\nimport os\ncage = Cage({str(tmp_path)!r}, False)\n"
        "one = cage.open()\nopen(one + '/file', 'w').close()\ncage.close(one)\n"
        "two = cage.open()\nprint(os.listdir(two), one != two)\ncage.close(two)"
    )
    assert printed == ["[]", "True"] and not list(tmp_path.iterdir())


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
    )
    assert confined(tmp_path, program) == ["no"] * 7
    after = outside.stat()
    assert (after.st_size, after.st_mode, after.st_mtime) == (10, before.st_mode, before.st_mtime)


def test_no_memory_and_no_messages_outlive_a_program(tmp_path):
    calls = {"shmget": "0, 100, 0o1666", "semget": "0, 1, 0o1666", "msgget": "0, 0o1666"}
    calls |= {"memfd_create": "b'x', 0", "mq_open": "b'x', 0o100, 0o600, 0"}
    numbers = re.findall(r"(\w+) (\d+) (\d+|-)", syscalls.DENIED)
    number = {name: pair[syscalls.MACHINES[os.uname().machine][0]] for name, *pair in numbers}
    lines = [
        f"print(libc.syscall({number[name]}, {values}), ctypes.get_errno())"
        for name, values in calls.items()
    ]
    assert confined(tmp_path, "\n".join(lines)) == ["-1", str(errno.EPERM)] * 5


def test_files_are_seen_in_the_own_folder_only(tmp_path):
    program = attempts(
        "open('mine', 'w').close()",
        "open(os.devnull, 'w').close()",
        "os.listdir(os.path.dirname(os.__file__))",
        f"open({str(tmp_path / 'file')!r}, 'w').close()",
        f"os.mkdir({str(tmp_path / 'folder')!r})",
        "open('/etc/passwd').close()",
    )
    has_landlock = confine.LIBRARY.syscall(444, None, 0, 1) >= 1  # landlock_create_ruleset
    answer = "no" if has_landlock else "yes"
    assert confined(tmp_path, program) == ["yes"] * 3 + [answer] * 3


def test_limits_cannot_be_raised(tmp_path):
    program = (
        "for name in ('CPU', 'AS', 'NOFILE', 'FSIZE'):\n"
        "    which = getattr(resource, 'RLIMIT_' + name)\n"
        "    soft, hard = resource.getrlimit(which)\n"
        "    try:\n        resource.setrlimit(which, (hard, hard + 1))\n        print('raised')\n"
        "    except (ValueError, OSError):\n        print(soft == hard > 0)\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU)[1])"
    )
    assert confined(tmp_path, program, timeout=2.5) == ["True"] * 4 + ["3"]


@pytest.mark.parametrize("isolated", [True, False])
def test_the_filter_has_all_calls_of_its_tables(isolated):
    text = syscalls.DENIED if isolated else syscalls.DENIED + syscalls.DENIED_PLAIN
    column = {"x86_64": -2, "aarch64": -1}[os.uname().machine]
    calls = [part.split() for part in re.split("[,:\n]", text) if re.search(r"\d ", part)]
    names = {name for name, *_ in calls}
    assert {"fork", "ptrace", "connect", "execve", "kill"} <= names
    assert {"memfd_create", "shmget", "semget", "msgget", "mq_open"} <= names  # outlive a program
    code = bytes(syscalls.system_call_filter(isolated))
    # Each line: operation, lines to skip if it is so, lines to skip if not, value.
    lines = list(struct.iter_unpack("<HBBI", code[: len(code) // 8 * 8]))
    fails = (6, 0, 0, 0x50001)  # ends with: the call fails with error 1, EPERM
    found = [line[3] for line, after in zip(lines, lines[1:], strict=False) if after == fails]
    wanted = [int(words[column]) for words in calls if words[column] != "-"]
    assert found[: len(wanted)] == wanted
    for place, (operation, if_so, if_not, _) in enumerate(lines):
        if operation in (0x15, 0x35, 0x45):  # it jumps (if equal, at least, bits): not too far
            assert place + max(if_so, if_not) < len(lines) - 1


def test_remove_follows_no_link_and_needs_no_right(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(kept)
    os.mkfifo(folder / "fifo")
    monkeypatch.chdir(folder)
    for _ in range(250):  # longer than any path may be
        os.mkdir("d" * 20)
        os.chdir("d" * 20)
    monkeypatch.undo()
    (folder / "locked").mkdir(0o000)
    (folder / "outer" / "locked").mkdir(0o000, parents=True)
    confine.remove(str(folder))
    folder.symlink_to(kept)  # a program put a link in its place
    confine.remove(str(folder))
    assert not os.path.lexists(folder) and (kept / "file").read_text() == "x"
