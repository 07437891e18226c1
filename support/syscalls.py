"""The filter of system calls: what a program may not ask the kernel for.

In:  the tables below. Out: a filter as the kernel takes it (seccomp, classic BPF).
A call that is denied fails with "Operation not permitted". Linux only. Standard library only.
"""

import ctypes
import os
import re
import struct
from typing import Any

# These calls fail. Each has its name and its numbers on x86_64 and aarch64 (-: it has none).
DENIED = """
    start a process: fork 57 -, vfork 58 -, execve 59 221, execveat 322 281
    look into a process: ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
        pidfd_getfd 438 438
    send a signal: kill 62 129, tkill 200 130, tgkill 234 131, pidfd_send_signal 424 424,
        rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240
    slow others down: sched_setattr 314 274, sched_setscheduler 144 119, setpriority 141 140,
        ioprio_set 251 30, sync 162 81, syncfs 306 267
    reach the network: socket 41 198, connect 42 203
    gain rights: unshare 272 97, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
        io_uring_setup 425 425
    hold memory that no limit counts: memfd_create 319 279, memfd_secret 447 447
    leave something behind: add_key 248 217, request_key 249 218, keyctl 250 219, shmget 29 194,
        shmat 30 196, shmctl 31 195, semget 64 190, semctl 66 191, semop 65 193,
        semtimedop 220 192, msgget 68 186, msgctl 71 187, msgsnd 69 189, msgrcv 70 188,
        mq_open 240 180, mq_unlink 241 181
"""
# Without namespaces these fail, too: they change a file of the same user, and Landlock allows it.
DENIED_PLAIN = """
    cut a file: truncate 76 45
    change its attributes: chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452,
        chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54, utime 132 -, utimes 235 -,
        futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
        setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
        removexattrat 466 466, file_setattr 469 469
"""
# These fail by one argument; the third number says which, counted from 0. only: it must be one of
# the values. bits: it must have these bits. never: it must be none of the values.
LIMITED = """
    clone 56 220 0 bits 0x10000                  # a thread may start, a process may not
    socketpair 53 199 1 only 1 0x80001 0x80801   # streams: other kinds can send to any address
    prlimit64 302 261 0 only 0                   # its own limits
    sched_setaffinity 203 122 0 only 0
    fcntl 72 25 1 never 8 10 15                  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals
    ioctl 16 29 1 never 0x8901 0x8902 0x40086602 0x401c5820  # signals; attributes of files
    prctl 157 167 0 never 1                      # PR_SET_PDEATHSIG: it would outlive its zygote
"""

# A line of the filter: operation, lines to skip if it is so, lines to skip if not, value.
LOAD, EQUAL, AT_LEAST, BITS, END = 0x20, 0x15, 0x35, 0x45, 6
ALLOW, DENY, MISSING = (END, 0, 0, 0x7FFF0000), (END, 0, 0, 0x50001), (END, 0, 0, 0x50026)
KILL = (END, 0, 0, 1 << 31)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, name


def when(test: int, value: int, *lines: tuple) -> list[tuple]:
    """Lines that run only if what was loaded passes a test."""
    return [(test, 0, len(lines), value), *lines]


def system_call_filter(isolated: bool) -> Any:
    """The tables as a program for the kernel, in a buffer. isolated: it runs in namespaces."""
    tables = DENIED if isolated else DENIED + DENIED_PLAIN
    column, machine = MACHINES[os.uname().machine]
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine), KILL]
    code.append((LOAD, 0, 0, 0))  # the number of the call
    code += when(AT_LEAST, 1 << 30, MISSING)  # the same calls under other numbers (x32)
    code += when(EQUAL, 435, MISSING)  # clone3: its flags cannot be read; libraries then use clone
    for numbers in re.findall(r"\w+ (\d+) (\d+|-)", tables):
        if numbers[column] != "-":
            code += when(EQUAL, int(numbers[column]), DENY)
    for row in LIMITED.strip().splitlines():
        words = row.partition("#")[0].split()
        number, argument, rule = int(words[1 + column]), int(words[3]), words[4]
        found, last = (DENY, ALLOW) if rule == "never" else (ALLOW, DENY)
        body = [(LOAD, 0, 0, 16 + 8 * argument)]
        for value in words[5:]:
            body += when(BITS if rule == "bits" else EQUAL, int(value, 0), found)
        code += when(EQUAL, number, *body, last)
    code.append(ALLOW)
    return ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
