"""What a program's process may not do.

The programs run without namespaces, so that each rule stands alone.
"""

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


COLUMN = syscalls.MACHINES[os.uname().machine][0]
NUMBERS = {
    name: pair[COLUMN] for name, *pair in re.findall(r"(\w+) (\d+) (\d+|-)", syscalls.DENIED)
}


def confined(tmp_path, program, timeout=5):
    """What a program prints that runs in a cage without namespaces."""
    return in_python(
        "import fcntl, os, resource, signal, socket, threading\n"
        f"from support.confine import Cage, call\ncage = Cage({str(tmp_path)!r}, False)\n"
        "os.chdir(cage.open())\n"
        f"def system(name, *args): call('syscall', int({NUMBERS}[name]), *args)\n"
        f"cage.enter({{'timeout': {timeout}, 'memory_mb': 512}})\n{program}"
    )


ALLOWED = """
    socket.socketpair()
    threading.Thread(target=print).start()
    open('mine', 'w').close()
    open(os.devnull, 'w').close()
    os.listdir(os.path.dirname(os.__file__))
"""
DENIED = """
    os.fork()
    os.execv('/bin/true', ['true'])
    os.kill(os.getppid(), 0)
    os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)
    resource.prlimit(os.getppid(), resource.RLIMIT_CPU)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())
    os.sched_setaffinity(os.getppid(), {0})
    call('prctl', 1, 0, 0, 0, 0)  # to outlive its parent
    call('ptrace', 16, os.getppid(), 0, 0)

    socket.socket()
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    socket.socket(socket.AF_UNIX)
    socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # could send to any address

    # Landlock watches who opens a file, not who changes its attributes.
    os.truncate('../outside', 0)
    os.chmod('../outside', 0)
    os.utime('../outside', (5, 5))
    os.setxattr('../outside', 'user.message', b'1')
    os.chown('../outside', 1, 1)
    os.utime('..', (5, 5))
    os.chmod(os.open(os.path.dirname(os.__file__), os.O_RDONLY), 0o755)

    # Memory and messages that would outlive a program.
    system('shmget', 0, 100, 0o1666)
    system('semget', 0, 1, 0o1666)
    system('msgget', 0, 0o1666)
    system('memfd_create', b'x', 0)
    system('mq_open', b'x', 0o100, 0o600, 0)
"""
DENIED_BY_LANDLOCK = """
    open('../file', 'w').close()
    os.mkdir('../folder')
    open('/etc/passwd').close()
"""


def test_a_program_may_do_what_is_allowed_and_nothing_that_is_denied(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("x" * 10)
    before = outside.stat()
    has_landlock = confine.LIBRARY.syscall(444, None, 0, 1) >= 1  # landlock_create_ruleset
    tables = {ALLOWED: "yes", DENIED: "no", DENIED_BY_LANDLOCK: "no" if has_landlock else "yes"}
    expected = {}
    for table, answer in tables.items():
        expected |= dict.fromkeys(re.findall(r"^ +(\w.*)", table, re.MULTILINE), answer)
    form = "try:\n    {}\n    print('yes')\nexcept PermissionError:\n    print('no')\n"
    printed = confined(tmp_path, "".join(form.format(line) for line in expected))
    assert dict(zip(expected, printed, strict=True)) == expected
    after = outside.stat()
    assert (after.st_size, after.st_mode, after.st_mtime) == (10, before.st_mode, before.st_mtime)


def test_each_program_gets_a_folder_that_did_not_exist(tmp_path):
    printed = in_python(
        f"from support.confine import Cage\nimport os\ncage = Cage({str(tmp_path)!r}, False)\n"
        "one = cage.open()\nopen(one + '/file', 'w').close()\ncage.close(one)\n"
        "two = cage.open()\nprint(os.listdir(two), one != two)\ncage.close(two)"
    )
    assert printed == ["[]", "True"] and not list(tmp_path.iterdir())


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
    assert {"fork", "ptrace", "connect", "execve", "kill", "shmget"} <= {call[0] for call in calls}
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
