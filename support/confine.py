"""What a program may not do: namespaces, limits and a filter of system calls.

In:  the folder of a worker; the limits of a program.
Out: a process that sees python, the system's libraries and one empty folder.

    namespaces    it sees no other file, process or network; its folder is new and goes with it
    limits        time, memory, threads and open files that it can use up
    filter        it starts no process, sends no signal, reaches no network (support/syscalls.py)
    Landlock      it opens no other file, where the system allows no namespaces

The zygote builds one `Cage`. Each program enters it before its first line runs.
Linux in full. Elsewhere only the limits that the system knows. Standard library only.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import struct
import sys
import tempfile
from typing import Any

from support.syscalls import system_call_filter

LIBRARY = ctypes.CDLL(None, use_errno=True)
THREADS, OPEN_FILES = 256, 256  # of a program; each file may be a socket that holds 400 KB

# Constants of prctl(2), mount(2), unshare(2) and landlock(7).
PARENT_DEATH_SIGNAL, DUMPABLE, SECCOMP, NO_NEW_PRIVILEGES = 1, 4, 22, 38
NO_SUID, NO_DEVICES, NO_EXEC, READ_ONLY, REMOUNT, BIND = 2, 4, 8, 1, 0x20, 0x1000
RECURSIVE, PRIVATE, DETACH = 0x4000, 0x40000, 2
LOCKED_FLAGS = 0xC08  # noexec, noatime, nodiratime: a user namespace may not drop them
NEW_USER = 1 << 28
NEW_REST = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mount, name, ipc, pid, net
WRITE_FILE, READ_FILE, READ_FOLDER, TRUNCATE, ALL_OLD = 2, 4, 8, 1 << 14, 0x1FFE

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def readable() -> list[str]:
    """The paths that a program needs to run python. (sys.path is read anew each time.)"""
    return [*SYSTEM, sys.base_prefix, sys.prefix, *filter(None, sys.path), *DEVICES]


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library; raises OSError if it fails."""
    plain = [x.encode() if isinstance(x, str) else x for x in arguments]
    if getattr(LIBRARY, name)(*plain) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int, pointer: Any = None) -> None:
    """Set an attribute of this process (Linux only)."""
    if sys.platform == "linux":
        call("prctl", option, ctypes.c_ulong(value), pointer, 0, 0)


def address_space() -> int:
    """The bytes of address space that this process has; elsewhere than on Linux: 4 GiB."""
    if sys.platform != "linux":
        return 4 << 30
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def die_with_parent() -> None:
    prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


# ---------------------------------------------------------------------- namespaces


def enter_namespaces(folder: str) -> str:
    """Move this process to namespaces of its own; the path of the folder for its programs.

    Raises OSError where the system does not allow them.
    """
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEW_REST | (NEW_USER if uid else 0))
    if uid:
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()  # the first process of the new ids: when it ends, all of them end
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent()
    return enter_root(folder)


def enter_root(folder: str) -> str:
    """Make a folder the root, with python and an empty folder in it; the path of that folder."""
    call("mount", "none", "/", None, PRIVATE | RECURSIVE, None)
    call("mount", "tmpfs", folder, "tmpfs", NO_SUID, "size=1m,mode=755")
    for path in readable():
        show(path, folder)
    for name, target in (("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"), ("fd", "")):
        os.symlink(f"/proc/self/fd{target}", f"{folder}/dev/{name}")
    scratch = "/scratch" if os.path.exists(folder + "/tmp") else "/tmp"  # python may lie in /tmp
    os.mkdir(folder + "/proc")
    os.mkdir(folder + scratch)
    with contextlib.suppress(OSError):  # a container may hide parts of /proc; /dev/stdin needs it
        call("mount", "proc", folder + "/proc", "proc", NO_SUID | NO_DEVICES | NO_EXEC, "hidepid=2")
    os.chdir(folder)
    pivot_root = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    call("syscall", pivot_root, ".", ".")
    call("umount2", ".", DETACH)
    call("mount", "none", "/", None, REMOUNT | BIND | READ_ONLY | NO_SUID, None)
    os.stat(os.__file__)  # python is there
    return scratch


def show(path: str, folder: str) -> None:
    """Let a path of the system be seen, read-only, under a folder that becomes the root."""
    inside = folder + path
    if os.path.islink(path) and path.count("/") == 1:
        os.symlink(os.readlink(path), inside)
    elif os.path.isdir(path):
        os.makedirs(inside, exist_ok=True)
    elif os.path.exists(path):
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        with open(inside, "w"):
            pass
    if os.path.islink(inside) or not os.path.exists(inside):
        return
    call("mount", path, inside, None, BIND | RECURSIVE, None)
    flags = REMOUNT | BIND | READ_ONLY | NO_SUID | (os.statvfs(path).f_flag & LOCKED_FLAGS)
    if path not in DEVICES:  # "read-only" protects the attributes of a device, not its use
        flags |= NO_DEVICES
    call("mount", "none", inside, None, flags, None)


# ---------------------------------------------------------------------- the cage


class Cage:
    """What a zygote prepares once, and each of its programs enters."""

    def __init__(self, folder: str, isolated: bool) -> None:
        self.folder = folder
        self.scratch = ""  # where a new file system is mounted for each program
        self.uid = 0  # the programs' user, if they need not be ours
        self.size = 0  # bytes of address space before a program starts
        self.filter: Any = None  # of system calls
        if isolated and os.getuid() == 0:
            self.uid = 50_000 + os.getpid() % 10_000  # one for each worker: its threads are counted
        if isolated:
            self.scratch = enter_namespaces(folder)
        if sys.platform == "linux":
            self.filter = system_call_filter(isolated)
            self.size = address_space() + (8 << 20)
            prctl(NO_NEW_PRIVILEGES, 1)
            prctl(DUMPABLE, 0)

    def open(self) -> str:
        """A folder that did not exist before: an own file system, or else a new folder."""
        if self.scratch:
            options = f"size=64m,nr_inodes=4096,mode=700,uid={self.uid or os.getuid()}"
            call("mount", "tmpfs", self.scratch, "tmpfs", NO_SUID | NO_DEVICES, options)
            return self.scratch
        return tempfile.mkdtemp(dir=self.folder)

    def close(self, place: str) -> None:
        """Remove the folder that open() made."""
        if self.scratch:
            call("umount2", place, DETACH)
        else:
            remove(place)

    def enter(self, limits: dict) -> None:
        """Give up all rights. From here on this process holds nothing worth stealing.

        limits: timeout (CPU seconds; here half a second more, rounded up) and memory_mb.
        """
        wanted = {
            resource.RLIMIT_CPU: math.ceil(limits["timeout"] + 0.5),
            resource.RLIMIT_AS: self.size + int(limits["memory_mb"] * (1 << 20)),
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_FSIZE: 64 << 20,
            resource.RLIMIT_NPROC: THREADS if self.uid else 4096,  # 4096: all of our user count
        }
        for which, value in wanted.items():
            hard = resource.getrlimit(which)[1]
            value = min(value, hard) if hard >= 0 else value
            with contextlib.suppress(ValueError, OSError):  # macOS refuses some
                resource.setrlimit(which, (value, value))
        if self.uid:
            os.setgroups([])
            os.setgid(self.uid)
            os.setuid(self.uid)
        if self.filter:
            no_capability = struct.pack("<Ii", 0x20080522, 0), bytes(24)
            call("capset", *no_capability)  # not even as root
            die_with_parent()
            if not self.scratch:
                see_only(os.getcwd())
            prctl(DUMPABLE, 1)  # else it cannot open /dev/stdin, which is under /proc/self
            lines, place = len(self.filter) // 8, ctypes.addressof(self.filter)
            prctl(SECCOMP, 2, struct.pack("<HxxxxxxQ", lines, place))


def see_only(folder: str) -> None:
    """Write only in a folder; read only there and what python needs (Landlock)."""
    version = LIBRARY.syscall(444, None, 0, 1)
    if version < 1:
        return
    everything = ALL_OLD | (TRUNCATE if version >= 3 else 0)
    ruleset = LIBRARY.syscall(444, struct.pack("<Q", everything), 8, 0)
    rules = dict.fromkeys(filter(os.path.exists, readable()), READ_FILE | READ_FOLDER)
    rules |= {"/proc/self": READ_FILE | READ_FOLDER, os.devnull: READ_FILE | WRITE_FILE}
    rules[folder] = everything
    for path, rights in rules.items():
        if not os.path.isdir(path):
            rights &= ~READ_FOLDER
        file = os.open(path, os.O_PATH)
        call("syscall", 445, ruleset, 1, struct.pack("<Qi", rights, file), 0)
        os.close(file)
    call("syscall", 446, ruleset, 0)
    os.close(ruleset)


def remove(folder: str) -> None:
    """Remove a folder. What the system does not let us remove stays.

    A program may nest folders deeper than a path may be long. So each folder inside is first moved
    up to where its path is short.
    """
    with contextlib.suppress(OSError):
        if os.path.islink(folder) or not os.path.isdir(folder):  # a program replaced it
            os.unlink(folder)
            return
        waiting = [folder]
        while waiting:
            outer = waiting.pop()
            os.chmod(outer, 0o700)
            for entry in list(os.scandir(outer)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)  # only who may write to a folder may move it
                    waiting.append(os.path.join(folder, os.urandom(12).hex()))
                    os.rename(entry.path, waiting[-1])
                else:
                    os.unlink(entry.path)
            if outer != folder:
                os.rmdir(outer)
        os.rmdir(folder)
