"""What a program may not do: namespaces, limits and a filter of system calls.

In:  the folder of a worker; the limits of a program.
Out: a process that sees python and one empty folder, starts no process and reaches no network.

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

LIBRARY = ctypes.CDLL(None, use_errno=True)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # what the kernel calls them (AUDIT_ARCH)

# Constants of prctl(2), mount(2) and unshare(2).
PARENT_DEATH_SIGNAL, DUMPABLE, SECCOMP, NO_NEW_PRIVILEGES = 1, 4, 22, 38
NO_SUID, NO_DEVICES, NO_EXEC, READ_ONLY, REMOUNT, BIND = 2, 4, 8, 1, 0x20, 0x1000
RECURSIVE, PRIVATE, DETACH = 0x4000, 0x40000, 2
LOCKED_FLAGS = 0xC08  # noexec, noatime, nodiratime: a user namespace may not drop them
NEW_USER, NEW_MOUNT_PID_NET_IPC = 1 << 28, 0x6C020000

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# Name, number on x86_64, number on aarch64 (-: it has none). These calls fail.
DENIED = """
    fork 57 -                   vfork 58 -                  execve 59 221
    execveat 322 281            ptrace 101 117              process_vm_readv 310 270
    process_vm_writev 311 271   pidfd_getfd 438 438         kill 62 129
    tkill 200 130               tgkill 234 131              pidfd_send_signal 424 424
    rt_sigqueueinfo 129 138     rt_tgsigqueueinfo 297 240   sched_setattr 314 274
    sched_setscheduler 144 119  setpriority 141 140         ioprio_set 251 30
    connect 42 203              unshare 272 97              add_key 248 217
    request_key 249 218         keyctl 250 219              bpf 321 280
    perf_event_open 298 241     userfaultfd 323 282         io_uring_setup 425 425
    memfd_create 319 279        shmget 29 194               semget 64 190
    msgget 68 186               mq_open 240 180             -
"""
# These calls fail by one argument: unless it has the bits, unless it is the value, or if it is one.
LIMITED = """
    clone 56 220 0 bits 0x10000              # a thread may start, a process may not
    socket 41 198 0 only 1                   # AF_UNIX
    prlimit64 302 261 0 only 0               # its own limits
    sched_setaffinity 203 122 0 only 0
    fcntl 72 25 1 never 8 10 15              # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others
    ioctl 16 29 1 never 0x8901 0x8902        # FIOSETOWN, SIOCSPGRP
    prctl 157 167 0 never 1                  # PR_SET_PDEATHSIG: it would outlive its zygote
"""


def readable() -> list[str]:
    """The paths that a program needs to run python. (sys.path changes: the judge's is not here.)"""
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


def enter_namespaces(folder: str) -> str:
    """Move this process to a root with python and an empty folder; the path of that folder.

    The namespaces are: user (unless root), mount, process ids, network, messages.
    Raises OSError where the system does not allow them.
    """
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEW_MOUNT_PID_NET_IPC | (NEW_USER if uid else 0))
    if uid:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)

    child = os.fork()  # the first process of the new ids: when it ends, all of them end
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent()

    call("mount", "none", "/", None, PRIVATE | RECURSIVE, None)
    call("mount", "tmpfs", folder, "tmpfs", NO_SUID, "size=1m,mode=755")
    for path in readable():
        _show(path, folder)
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


def _show(path: str, folder: str) -> None:
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
    if not path.startswith("/dev/"):
        kept = os.statvfs(path).f_flag & LOCKED_FLAGS
        flags = REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept
        call("mount", "none", inside, None, flags, None)


def system_call_filter() -> Any:
    """SYSTEM_CALLS as a program for the kernel (seccomp, classic BPF), in a buffer."""
    load, equal, above, bits, give = 0x20, 0x15, 0x35, 0x45, 6
    kill, deny, missing, allow = 1 << 31, 0x50001, 0x50026, 0x7FFF0000
    machine = os.uname().machine
    code = [
        (load, 0, 0, 4),
        (equal, 1, 0, MACHINES[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (above, 0, 1, 1 << 30),  # the same calls under other numbers (x32)
        (give, 0, 0, missing),
        (equal, 0, 1, 435),  # clone3: its flags cannot be read; libraries then use clone
        (give, 0, 0, missing),
    ]
    column = 1 if machine == "x86_64" else 2
    words = DENIED.split()
    for at in range(0, len(words) - 1, 3):
        number = words[at + column]
        if number != "-":
            code += [(equal, 0, 1, int(number)), (give, 0, 0, deny)]
    for line in LIMITED.strip().split("\n"):
        row = line.partition("#")[0].split()
        matching, others = (deny, allow) if row[4] == "never" else (allow, deny)
        compare = bits if row[4] == "bits" else equal
        body = [(load, 0, 0, 16 + 8 * int(row[3]))]
        for value in row[5:]:
            body += [(compare, 0, 1, int(value, 0)), (give, 0, 0, matching)]
        body.append((give, 0, 0, others))
        code += [(equal, 0, len(body), int(row[column])), *body]
    code.append((give, 0, 0, allow))
    return ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in code))


class Cage:
    """What a zygote prepares once, and each of its programs enters."""

    def __init__(self, folder: str, isolated: bool) -> None:
        self.folder, self.scratch, self.rules, self.size, self.uid = folder, "", None, 0, 0
        if isolated and os.getuid() == 0:
            self.uid = 50_000 + os.getpid() % 10_000  # one for each worker: its threads are counted
        if isolated:
            self.scratch = enter_namespaces(folder)
        if sys.platform == "linux":
            self.rules = system_call_filter()
            with open("/proc/self/statm") as file:
                self.size = int(file.read().split()[0]) * resource.getpagesize() + (8 << 20)
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
            resource.RLIMIT_NOFILE: 128,
            resource.RLIMIT_FSIZE: 64 << 20,
            resource.RLIMIT_NPROC: 64 if self.uid else 4096,  # threads; 4096: of all that we run
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
        if self.rules:
            call(
                "capset", struct.pack("<Ii", 0x20080522, 0), bytes(24)
            )  # no capability, even as root
            die_with_parent()
            if not self.scratch:
                see_only(os.getcwd())
            prctl(DUMPABLE, 1)  # else it cannot open /dev/stdin, which is under /proc/self
            rows, place = len(self.rules) // 8, ctypes.addressof(self.rules)
            prctl(SECCOMP, 2, struct.pack("<HxxxxxxQ", rows, place))


def die_with_parent() -> None:
    prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def see_only(folder: str) -> None:
    """Write only in a folder; read only there and what python needs (Landlock)."""
    everything, read_file, read_folder = 0x1FFE, 4, 8
    ruleset = LIBRARY.syscall(444, struct.pack("<Q", everything), 8, 0)
    if ruleset < 0:
        return
    rules = dict.fromkeys(filter(os.path.exists, readable()), read_file | read_folder)
    rules |= {folder: everything, "/proc/self": read_file | read_folder, os.devnull: read_file | 2}
    for path, rights in rules.items():
        if not os.path.isdir(path):
            rights &= ~read_folder
        file = os.open(path, os.O_PATH)
        call("syscall", 445, ruleset, 1, struct.pack("<Qi", rights, file), 0)
        os.close(file)
    call("syscall", 446, ruleset, 0)
    os.close(ruleset)


def remove(folder: str) -> None:
    """Remove a folder. What the system does not let us remove stays."""
    with contextlib.suppress(OSError):
        if not _is_folder(folder):  # a program replaced it
            os.unlink(folder)
            return
        os.chmod(folder, 0o700)
        while names := os.listdir(folder):
            for name in names:
                _pull_up(os.path.join(folder, name), folder)
        os.rmdir(folder)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _pull_up(path: str, folder: str) -> None:
    """Remove one entry of a folder, and move what it holds into the folder itself.

    So no depth needs a long path.
    """
    if not _is_folder(path):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        inner = os.path.join(path, name)
        if _is_folder(inner):
            os.chmod(inner, 0o700)  # only who may write to a folder may move it
        os.rename(inner, os.path.join(folder, os.urandom(12).hex()))
    os.rmdir(path)
