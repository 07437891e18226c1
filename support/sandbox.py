"""The process that runs a program: the zygote of a judge forks a new one, `candidate`, for each.

In:  from the judge, over a socket: the program, then one request after another.
Out: one reply for each request; how the program ended and the CPU seconds that it used.

A request is a function, its keyword arguments (or null) and its arguments. All that a test may do
with a program has this form: to read an attribute, the judge asks for getattr(x, "name"). A reply
is whether it raised, and the value or the exception. support/wire.py says how they cross. What is
no data stays here: the judge knows it by a number. Standard library only.
"""

import atexit
import builtins
import collections
import contextlib
import gc
import importlib
import json
import linecache
import operator
import os
import signal
import socket
import sys
import threading
import types
from os import _exit as end_process  # by name: a program may change what modules hold
from traceback import walk_tb
from typing import Any

from support import confine
from support.wire import KIND_OF_TYPE, SHARED, Wire, receive, send

PRELOADED = ("bisect", "cmath", "copy", "enum", "heapq", "math", "random", "string")
OWN = ("json", "json.decoder", "json.encoder", "json.scanner")  # programs get a copy of them
THREAD_STACK = 2 << 20  # bytes; at the usual eight, the memory limit would allow 64 threads
SOURCE = "<solution>"  # the file of a program, as its traces and __file__ call it
PLAIN = {  # a class -> what makes a plain object of it from one of a subclass
    int: int.__index__,
    float: float.__float__,
    str: str.__str__,
    collections.defaultdict: lambda x: collections.defaultdict(x.default_factory, x),
    collections.deque: lambda x: collections.deque(x, x.maxlen),
}
NOTHING = object()  # no value


class Program:
    """A program under test, in its own process: it does what the judge asks."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.wire = Wire(self)
        self.kept: list = []  # what the judge knows by a number: objects, classes, iterators
        self.numbers: dict = {}  # the numbers, by id
        self.named: set = set()  # names in the tests
        self.endings: dict = {}  # the exceptions that ended iterators, by the iterator's id

    def serve(self) -> None:
        """Define the program, then answer until the judge ends this process."""
        start = json.loads(receive(self.connection))
        self.named = set(start["names"])
        is_main = start["module"] == "__main__"
        module = types.ModuleType(start["module"])
        sys.modules[start["module"]] = sys.modules["__main__"] = module
        space = module.__dict__
        context, error = define(space, start["context"], start["code"])
        if is_main:
            error = end_main(space, error)
        self.keep(module)  # the judge knows it by the number 0
        own = {}
        for name in start["wanted"]:
            value = getattr(module, name, NOTHING)
            if value is not NOTHING and value is not context.get(name, NOTHING):
                own[name] = value  # what only the context defines is not the program's
        self.reply(error, own)
        while not is_main:
            self.answer(receive(self.connection))

    def answer(self, request: str) -> None:
        value, error = None, None
        try:
            function, kwargs, *args = self.wire.read(request)
            if type(function) is not str:
                value = function(*args, **(kwargs or {}))
            elif function == "take items":
                value = self.take(*args)
            else:
                value = run_named(function, *args, **(kwargs or {}))
        except BaseException as fault:
            error = fault
        self.reply(error, value)

    def reply(self, error: BaseException | None, value: Any = None) -> None:
        """Say whether it raised, and the value or the exception."""
        try:
            text = self.wire.write(error is not None, value if error is None else error)
        except BaseException as fault:  # the value or a changed argument cannot cross
            text = self.wire.write(True, fault, tell_changes=False)
        send(self.connection, text)

    def take(self, source: Any, size: int) -> list:
        """At most `size` items. An exception after the first item waits for the next request."""
        if id(source) in self.endings:
            raise self.endings.pop(id(source))
        items: list = []
        try:
            while len(items) < size:
                items.append(next(source))
        except BaseException as error:
            if not items:
                raise
            self.endings[id(source)] = error
        return items

    def export_error(self, error: BaseException, wire: Wire) -> list:
        """An exception: class and bases, message, arguments, the line of the program."""
        text, args = "", None
        with contextlib.suppress(BaseException):  # its __str__ may raise, its args may not cross
            text = str(error)[:4000]
            if len(Wire(self).write(error.args)) < 10_000:  # tried on a wire of its own
                args = error.args
        line = error.lineno if isinstance(error, SyntaxError) else 0
        for frame, number in walk_tb(error.__traceback__):
            if frame.f_code.co_filename == SOURCE:
                line = number
        lineage = [[base.__module__, base.__name__[:60]] for base in type(error).__mro__[:-1]]
        return ["error", lineage, text, wire.pack(args), line or 0]

    def keep(self, x: Any) -> int:
        """The number by which the judge knows what stays here."""
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.kept)
            self.kept.append(x)
        return self.numbers[id(x)]

    def export(self, x: Any, wire: Wire) -> list:
        """What is no data: shared by name, made plain, or kept here under a number."""
        cls = type(x)
        has_name = issubclass(cls, (type, types.MethodType, types.BuiltinFunctionType))
        name = x.__name__ if has_name else ""  # elsewhere a __getattr__ of the program might answer
        is_exception = isinstance(x, type) and issubclass(x, BaseException)
        if (name in SHARED or is_exception) and getattr(builtins, name, None) is x:
            return ["shared", name]
        if isinstance(x, BaseException):
            return self.export_error(x, wire)
        if isinstance(x, types.MethodType) and name[:2] != "__":
            return ["method", name, *self.export_object(x.__self__)]
        # An object of a subclass of dict, int, ... crosses as one of its base, if no test uses the
        # name of its class.
        if self.named.isdisjoint(base.__name__ for base in cls.__mro__):
            for base in cls.__mro__:
                if base in KIND_OF_TYPE or base in PLAIN:
                    return wire.pack(PLAIN.get(base, base)(x))
            if isinstance(x, collections.abc.Iterator) and cls.__module__ != "solution":
                return ["stream", self.keep(x), isinstance(x, types.GeneratorType)]
        return ["object", *self.export_object(x)]

    def export_object(self, x: Any) -> list:
        """What stays here: [7, "Stack"] for an object, [8, "class Stack"] for its class."""
        kind = f"class {x.__name__}" if isinstance(x, type) else type(x).__name__
        return [self.keep(x), kind[:60]]

    def may_change(self, x: Any) -> bool:
        return True

    def load(self, kind: str, parts: list, wire: Wire) -> Any:
        """The value that the judge means: an object of this side, a builtin, or an iterator."""
        if kind == "iterator":
            return iter(wire.unpack_all(parts))
        return getattr(builtins, parts[0]) if kind == "shared" else self.kept[parts[0]]


def run_named(name: str, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an object, or do what an operator does: "__len__" stands for len(owner)."""
    if not name.startswith("__"):
        return getattr(owner, name)(*args, **kwargs)
    plain = name.strip("_")
    if name in dir(operator):  # not hasattr(): each module has a __repr__ and a __hash__, too
        function = getattr(operator, name)
    elif hasattr(builtins, plain) and plain != "exit":  # exit() does not stand for __exit__
        function = getattr(builtins, plain)
    else:  # such as __enter__ and __radd__
        function = getattr(type(owner), name)
    return function(owner, *args)


def define(space: dict, context: str, code: str) -> tuple[dict, BaseException | None]:
    """Run context and program in a namespace. Returns what the context defined, and the error."""
    before: dict = {}
    space.update(__file__=SOURCE, __builtins__=sys.modules["builtins"])
    linecache.cache[SOURCE] = (len(code), None, code.splitlines(True), SOURCE)  # for inspect
    try:
        # A context that uses the program raises NameError here: only the judge runs all of it.
        with contextlib.suppress(NameError):
            exec(compile(context, "<context>", "exec"), space)
        before = dict(space)
        exec(compile(code.removeprefix("\ufeff"), SOURCE, "exec"), space)
    except BaseException as error:
        return before, error
    return before, None


def end_main(space: dict, error: BaseException | None) -> BaseException | None:
    """End a main program as python does. Returns why its exit code is not 0, or None."""
    if isinstance(error, SystemExit):
        is_zero = isinstance(error.code, int) and error.code % 256 == 0  # only eight bits count
        if error.code is None or is_zero:
            error = None
    threading._shutdown()  # waits for its threads
    atexit._run_exitfuncs()
    try:
        flush_output()
        sys.stdout = sys.__stdout__
        space.clear()
        gc.collect()  # now each __del__ runs, and may print
        flush_output()
    except BaseException as fault:
        error = error or fault
    return error


def flush_output() -> None:
    for stream in (getattr(sys, "stdout", None), sys.__stdout__):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def candidate(files: list, folder: str, limits: dict, cage: confine.Cage) -> None:
    """The life of a program's process. files: its stdin, its stdout, its socket."""
    try:
        for place, file in zip((0, 1, 3), files, strict=True):
            os.dup2(file, place)
        for place in (0, 1, 2):
            if os.path.sameopenfile(place, 2):  # all programs share it: a lock on it would stay
                os.dup2(os.open(os.devnull, os.O_RDWR), place)
        os.closerange(4, 64)
        # New streams: the old ones recall whether the zygote's /dev/null can seek.
        sys.stdin = sys.__stdin__ = os.fdopen(0, errors=sys.stdin.errors, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", errors=sys.stdout.errors, closefd=False)
        os.environ.update(HOME=folder, TMPDIR=folder)
        os.chdir(folder)
        os.setsid()
        gc.enable()
        cage.enter(limits)  # it gives up all rights
        # The exact limit. A program may undo it: RLIMIT_CPU, in whole seconds, ends that one.
        signal.setitimer(signal.ITIMER_PROF, limits["timeout"])
        Program(socket.socket(fileno=3)).serve()
    finally:
        end_process(0)


def zygote(control: socket.socket, folder: str, isolated: bool) -> None:
    """For each message of the judge: fork a program, end it on request, tell how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # then no program can interrupt this process
    confine.die_with_parent()
    second_copies()
    for name in PRELOADED + OWN:
        importlib.import_module(name)
    threading.stack_size(THREAD_STACK)
    try:
        cage = confine.Cage(folder, isolated)
    except (OSError, KeyError) as error:
        send(control, str(error))
        os._exit(1)
    send(control, "")
    os.dup2(0, 2)
    sys.argv[:] = [""]
    gc.collect()
    gc.freeze()  # no collector of a program writes to the pages that it shares with this process
    gc.disable()
    while True:
        message, files, *_ = socket.recv_fds(control, 1 << 12, 3)
        if not message:  # the judge has ended
            os._exit(0)
        limits = json.loads(message)
        place = cage.open()
        if cage.scratch:  # the next process id must not tell how many threads the last program had
            with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write("1")
        child = os.fork()
        if not child:
            control.close()
            candidate(files, place, limits, cage)
        for file in files:
            os.close(file)
        receive(control)  # the judge says "stop"
        for target in (child, -child):  # -child: its process group
            with contextlib.suppress(OSError):  # it has ended, or leads no group yet
                os.kill(target, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        cage.close(place)
        seconds = usage.ru_utime + usage.ru_stime
        send(control, json.dumps([os.waitstatus_to_exitcode(status), seconds]))


def second_copies() -> None:
    """Have programs import copies of our modules: what they change there breaks no message."""
    for name in OWN:
        del sys.modules[name]  # the next import makes a new one
    copy = types.ModuleType("builtins")
    for name in dir(builtins):
        setattr(copy, name, getattr(builtins, name))
    sys.modules["builtins"] = copy
