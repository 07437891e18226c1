"""Talking with a program in another process, as if its functions and objects were here.

`Link` sends requests to the program's process (support/sandbox.py) and reads its answers. What is
no data, such as a function, stays there. `Values` makes a stand-in for it, a `Remote`: it asks the
program to do what the test does with it. A call f(xs) of a test goes this way:

    Remote.__call__ -> Link.ask    notes the call for the feedback
      Link.say                     sends f's number, xs, and what the test changed since last time
    Program.answer                 (in the other process) runs f, sends the value and changes of xs
      Link.answer -> Wire.read     makes the same changes to the test's xs
    Remote.__call__                returns the value, or raises what the program raised

`show` writes values into feedback. Needs the standard library.
"""

import builtins
import collections
import contextlib
import functools
import gc
import itertools
import json
import math
import os
import reprlib
import signal
import socket
import sys
import time
import types
from typing import Any

from support.plan import OPERATORS, Plan, Unscorable
from support.wire import CHANGEABLE, SHARED, Wire, receive, send, shorten

NOTHING = object()  # no value: nothing was called, or it gave none
MOST_COMPARED = 20_000_000  # elements; after so many, only KEPT_EQUAL are compared
MOST_ITEMS = 10**6  # of an iterator that a test hands over
KEPT_EQUAL = 2000  # elements, in the newest containers
MODULE = 0  # the number of the program's module, a stand-in like any other
FREE_WAIT = 0.01  # seconds of each wait that are not charged: the machine needs them
NOT_HOSTED = "a test uses {} of an object that stays with the program"
ALWAYS = {"__iter__", "__next__", "__setattr__", "__delattr__"}  # what each object may be asked
STEPS = ("take items", "__next__")  # requests that may end with StopIteration
BATCHES = (1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # items at once; then 1000


class Died(BaseException):
    """The program is gone: (status, text). No Exception, so that no test can swallow it."""


class Asked(BaseException):
    """The program was asked where it must not be."""


@contextlib.contextmanager
def zygote_lives() -> Any:
    """If the zygote is gone, this judge ends too: the trainer tries once more with a new one."""
    try:
        yield
    except (OSError, EOFError):
        os._exit(1)


class Link:
    """One program under test. control: the socket to the zygote, which starts and ends it."""

    def __init__(self, plan: Plan, code: str, limits: dict, control: Any, empty: bool) -> None:
        self.plan, self.code, self.limits, self.control = plan, code, limits, control
        self.empty = empty  # the program is empty: this run finds out whether tests can be hosted
        self.socket: Any = None
        self.death: Any = None  # the Died that ended the program
        self.shortfall = ""  # what a stand-in could not do: a right program may fail here
        self.unsent: Any = None  # the error of arguments that cannot be sent; the test may catch it
        self.quiet = self.asked = False  # while quiet, a request sets asked and raises Asked
        self.last: Any = None  # the last call as (its line of code, its value)
        self.cpu_seconds = 0.0
        self.compared = 0  # elements that were compared to find changes
        self.values = Values(self)

    def launch(self, source: int = 0, sink: int = 1) -> None:
        """A new process begins to run the program, with these files as stdin and stdout; `start` or
        Run.printed waits for its first answer."""
        self.stop()
        self.death = None
        self.wire = Wire(self.values)
        self.patience = 1.5 * self.limits["timeout"] + 3  # seconds; most run out of CPU time first
        self.socket, theirs = socket.socketpair()
        with theirs:
            files = [source, sink, theirs.fileno()]
            with zygote_lives():
                socket.send_fds(self.control, [json.dumps(self.limits).encode()], files)
        start = {
            "module": "__main__" if self.plan.kind == "stdin" else "solution",
            "context": self.plan.context,
            "code": self.code,
            "names": sorted(self.plan.names),
            "wanted": sorted(self.plan.wanted),
        }
        self.say(json.dumps(start))

    def start(self) -> dict:
        """Define the program. Returns what it has of the names that the tests use, by name."""
        self.launch()
        try:
            found = self.answer()
        except BaseException as error:
            if self.empty:
                raise Unscorable(f"its context does not run: {error!r}") from None
            raise
        if not isinstance(found, dict):
            self.die("error", "sent something that is no answer")
        # Only names that were asked for: it must not replace `abs` or a name of the judge.
        wanted = sorted(self.plan.wanted & found.keys())
        return {name: labelled(found[name], name) for name in wanted}

    def stop(self) -> tuple:
        """End the program. Returns its exit code, and whether it used up its CPU time."""
        if not self.socket:
            return 0, False
        self.socket.close()
        self.socket = None
        with zygote_lives():
            send(self.control, "stop")
            code, seconds = json.loads(receive(self.control))
        self.cpu_seconds = max(self.cpu_seconds, seconds)
        return code, code == -signal.SIGPROF or seconds > 0.95 * self.limits["timeout"]

    def die(self, status: str, text: str) -> None:
        self.death = Died(status, text)
        raise self.death

    def say(self, text: str) -> None:
        if self.death:
            raise self.death
        self.socket.settimeout(max(0.001, self.patience))
        try:
            send(self.socket, text)
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OSError:
            pass  # it has ended: answer() finds out how

    def answer(self, may_stop: bool = False) -> Any:
        """The value that the program sends; raises the exception that it sends instead."""
        limit = self.limits["output_bytes"]
        try:
            begin = time.monotonic()
            text = receive(self.socket, limit, max(0.001, self.patience))
            self.patience -= max(0.0, time.monotonic() - begin - FREE_WAIT)
            if text.count("[") > 1000 + limit / 16:  # "[]" takes far more memory than two bytes
                raise OverflowError
            raised, value = self.wire.read(text)
            if raised and not isinstance(value, BaseException):
                raise TypeError("a class, which could be raised, too")
        except TimeoutError:
            self.die("timeout", "ran out of time")
        except OverflowError:
            self.die("error", f"returned more than {limit} bytes")
        except (OSError, EOFError):
            return self.ended()
        except Exception:
            self.die("error", "sent something that is no answer")
        if not raised:
            return value
        if isinstance(value, StopIteration) and not (may_stop or self.plan.stops):
            raise RuntimeError("the program raised StopIteration")  # else all(map(f, xs)) ends here
        raise value

    def ended(self) -> None:
        """The program's process is gone. For a main program that may be right."""
        code, late = self.stop()
        if late:
            self.die("timeout", "ran out of time")
        if code == 0 and self.plan.kind == "stdin":
            return
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        if code in (0, -signal.SIGKILL):  # SIGKILL is stop()'s, if it only closed its socket
            how = "ended before it answered"
        self.die("error", how)

    def refuse_if_quiet(self) -> None:
        if self.quiet:
            self.asked = True
            raise Asked

    def ask(self, label: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Have the program do function(*args, **kwargs).

        function: a stand-in, a builtin, the name of a method of the first argument, "take items".
        label: what the feedback calls it ("": the feedback does not tell of it).
        """
        self.refuse_if_quiet()
        shown = args[1:] if isinstance(function, str) else args  # without the owner of a method
        call = shown_call(label, shown, kwargs) if label else ""
        args = tuple(self.drawn(x) for x in args)
        kwargs = {name: self.drawn(x) for name, x in kwargs.items()}
        if label:
            self.last = (call, NOTHING)
        if isinstance(function, Missing):
            if self.empty:
                self.request(Wire(self.values), function, args, kwargs)  # Unscorable if not
            error = NameError(f"name '{label}' is not defined")
            error._line = 0
            raise error
        self.say(self.request(self.wire, function, args, kwargs))
        value = self.answer(may_stop=type(function) is str and function in STEPS)
        if label:
            self.last = (call, value)
        return value

    def drawn(self, x: Any) -> Any:
        """An iterator of the tests, its items drawn now: to draw one may ask the program, too."""
        if isinstance(x, Remote) or not isinstance(x, collections.abc.Iterator):
            return x
        items = list(itertools.islice(x, MOST_ITEMS))
        self.shortfall = f"a test hands over an iterator: {MOST_ITEMS:,} items cross at once"
        return iter(items)

    def request(self, wire: Wire, function: Any, args: tuple, kwargs: dict) -> str:
        """The message that asks for a call. Raises TypeError if the arguments cannot cross."""
        try:
            return wire.write(function, kwargs or None, *args, gone=self.unseen(wire))
        except (TypeError, ValueError, RecursionError) as error:
            self.shortfall = f"a test hands the program what cannot cross: {error}"
            if self.empty:
                raise Unscorable(self.shortfall) from None
            self.unsent = TypeError(f"what cannot be sent to the program: {error}")
            raise self.unsent from None

    def unseen(self, wire: Wire) -> list:
        """Numbers of the containers to forget: those that only this process's wire still holds and,
        once comparing has cost too much, all but the newest ones with KEPT_EQUAL elements."""
        numbers, holder = [], {0: []}
        x = holder[0]
        alone = sys.getrefcount(x)  # of an object that one dict and the variable x hold
        room = KEPT_EQUAL if self.compared > MOST_COMPARED else math.inf
        for number in reversed(wire.objects):
            x = wire.objects[number]
            if room < 0 or sys.getrefcount(x) <= alone:
                numbers.append(number)
                continue
            size = 8 + (len(x) if hasattr(x, "__len__") else 0)  # 8: even an empty one costs time
            self.compared += size
            room -= size
        return numbers


class Values:
    """How values that are no data cross between the tests and one program (see Wire)."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.stand_ins: dict = {}  # by the number that the program gave to the object
        self.methods: set = set()  # (class, name) of attributes that were found to be methods

    def may_change(self, x: Any) -> bool:
        """No program changes what modules of this process hold, such as keyword.kwlist."""
        return id(x) not in held_by_modules(len(sys.modules))

    def export(self, x: Any, wire: Wire) -> list:
        """A value of the tests that is no data, as a list for the program."""
        if isinstance(x, Missing):
            return ["missing"] if self.link.empty else x()  # x() raises NameError, as Python does
        if isinstance(x, Remote):
            return ["object", x._number]
        name = getattr(x, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, NOTHING) is x:
            return ["shared", name]
        if isinstance(x, collections.abc.Iterator):
            return ["iterator", *wire.pack_all(list(self.link.drawn(x)))]
        raise TypeError(f"a value of type {type(x).__name__}")

    def load(self, kind: str, parts: list, wire: Wire) -> Any:
        """A value of the program that is no data, for the tests."""
        return getattr(self, f"load_{kind}")(wire, *parts)

    def load_shared(self, wire: Wire, name: str) -> Any:
        value = getattr(builtins, name)
        if name not in SHARED and not is_exception_class(value):
            raise ValueError(name)
        return value

    def load_object(self, wire: Wire, number: int, kind: str) -> Any:
        """The stand-in for an object of a class named `kind`."""
        number = int(number)
        if number not in self.stand_ins:
            if len(self.stand_ins) > 200_000:
                raise ValueError("more objects than any test needs")
            self.stand_ins[number] = Remote(self.link, number, kind)
        return self.stand_ins[number]

    def load_method(self, wire: Wire, name: str, number: int, kind: str) -> Any:
        """A method of an object. From now on it is called without asking for the attribute."""
        if name in STEPS or name[:2] == "__":  # a program must not choose what may stop a map()
            raise ValueError(name)
        owner = self.load_object(wire, number, kind)
        self.methods.add((kind, name))
        return functools.partial(self.link.ask, f"{owner._label}.{name}", name, owner)

    def load_stream(self, wire: Wire, number: int, is_generator: bool) -> Any:
        kind = Generator if is_generator else Stream
        return kind(self.link, int(number), "iterator")

    def load_error(self, wire: Wire, lineage: list, text: str, args: Any, line: int) -> Any:
        """An exception of the nearest class that the judge has. lineage: its class and bases."""
        args = wire.unpack(args)
        if lineage[0][0] == "solution" or not isinstance(args, tuple):
            args = (text,)
        kind = nearest_class(lineage)
        try:
            error = kind.__new__(kind, *args)
        except Exception:
            error = RuntimeError.__new__(RuntimeError)
        if kind.__module__ == "builtins":
            with contextlib.suppress(Exception):
                error.__init__(*args)  # sets code, errno and the like
        error.args, error._line = args, int(line)
        return error


def is_exception_class(x: Any) -> bool:
    """Whether a program may raise x here: a builtin class, or any Exception, but not Died."""
    is_exception = isinstance(x, type) and issubclass(x, BaseException)
    return is_exception and (x.__module__ == "builtins" or issubclass(x, Exception))


def nearest_class(lineage: list) -> type:
    """The first exception class of this process among (module, name) of an exception's classes."""
    for module, name in lineage:
        if module != "solution":
            kind = getattr(sys.modules.get(module), name, None)
            if is_exception_class(kind):
                return kind
    raise ValueError("an exception of no class")


@functools.lru_cache(2)  # `count` is the number of modules: an import makes it search again
def held_by_modules(count: int) -> dict:
    """The containers that modules of this process hold, at any depth, by id."""
    found = {id(sys.modules.get("solution")): None}  # not followed: it leads to the tests' own data
    new = {id(x): x for name, x in sys.modules.items() if name != "solution"}
    while new:
        found |= new
        new = {id(x): x for x in gc.get_referents(*new.values()) if id(x) not in found}
    return {number: x for number, x in found.items() if isinstance(x, CHANGEABLE)}


class Remote:
    """A stand-in for a function, class or object of the program."""

    def __init__(self, link: Link, number: Any, kind: str) -> None:
        fields = {"_link": link, "_number": number, "_label": kind, "_kind": kind}
        for name, value in fields.items():
            object.__setattr__(self, name, value)  # self._link = link would ask the program

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask(self._label, self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        link = self._link
        is_module = self is sys.modules.get("solution")  # a program may hand out its module, too
        is_open = link.plan.objects or is_module or name == "__name__"
        is_special = name[:2] == "__" and name != "__name__"  # python looks for some of them itself
        if not is_open and not is_special:
            link.shortfall = NOT_HOSTED.format(name)
        if not is_open or is_special:
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        if link.empty:
            return Missing(link, None, name)
        if (self._kind, name) in link.values.methods:
            return functools.partial(link.ask, f"{self._label}.{name}", name, self)
        label = name if is_module else f"{self._label}.{name}"
        return labelled(link.ask("", getattr, self, name), label)

    def __instancecheck__(self, x: Any) -> bool:
        """isinstance(x, self): only the program's objects and named tuples can be instances."""
        ours = isinstance(x, Remote) or hasattr(x, "_fields")
        return ours and self._link.ask("", isinstance, x, self)

    def __subclasscheck__(self, x: Any) -> bool:
        return self._link.ask("", issubclass, x, self)

    def _operator(self, name: str, *args: Any) -> Any:
        """Have the program do what an operator does, if the tests may use its operators."""
        if self._link.plan.operators or name in ALWAYS:
            return self._link.ask("", name, self, *args)
        if name in ("__str__", "__repr__", "__format__"):
            return f"<{self._label} object>"
        if name == "__bool__":
            return True
        if name == "__hash__":
            return hash(self._number)
        self._link.shortfall = NOT_HOSTED.format(name)
        raise TypeError(f"<{self._label} object> has no {name}")

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Remote):
            self._link.shortfall = "a test compares an object of the program with plain data"
            return NotImplemented  # else a program could say that its object equals any answer
        return self is other or self._link.ask("", "__eq__", self, other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._link.shortfall = "a test copies an object of the program"
        raise TypeError(self._link.shortfall)


# len(x) of a Remote is x._operator("__len__"), and so on.
for operator_name in OPERATORS | ALWAYS:
    setattr(Remote, operator_name, functools.partialmethod(Remote._operator, operator_name))


def labelled(value: Any, label: str) -> Any:
    """The value. If it is a stand-in, the feedback calls it by this label from now on."""
    if isinstance(value, Remote):
        object.__setattr__(value, "_label", label)
    return value


class Stream(Remote):
    """A stand-in for an iterator of the program."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        object.__setattr__(self, "_items", self._take())

    def _take(self) -> Any:
        """The items: the first ones singly, then in batches."""
        for size in itertools.chain(BATCHES, itertools.repeat(1000)):
            if size > 1:  # the iterator is ahead of the test
                self._link.shortfall = "a test may see how far an iterator has come"
            try:
                items = self._link.ask("", "take items", self, size)
            except StopIteration:
                return
            yield from items

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self._link.refuse_if_quiet()
        return next(self._items)


class Generator(Stream):
    __class__ = types.GeneratorType  # so that isinstance(x, types.GeneratorType) is true


class Missing(Remote):
    """A stand-in for what the program does not define: to use it raises NameError."""

    def __getattr__(self, name: str) -> Any:
        return self()

    def __bool__(self) -> bool:
        return self()

    def __eq__(self, other: Any) -> bool:
        return self()

    __hash__ = Remote.__hash__  # it is not inherited where __eq__ is defined


def message(error: BaseException) -> str:
    """The text of an exception, "" if it has none."""
    try:
        return str(error)
    except Exception:  # str() of a value in it raised
        return ""


class Shown(reprlib.Repr):
    """repr of bounded size that is the same in each run."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.maxlevel, self.maxlong, self.maxother, self.maxstring = 6, 200, 200, room
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 30
        self.maxdeque = 30
        self.left = 2000  # parts that may still be shown

    def repr1(self, x: Any, level: int) -> str:
        self.left -= 1
        if self.left < 0:
            return "..."
        if isinstance(x, functools.partial):  # of load_method
            return f"<method {x.args[0]}>"
        return f"<{x._label} object>" if isinstance(x, Remote) else super().repr1(x, level)

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(shorten(x, self.maxstring), level)

    def repr_set(self, x: set, level: int) -> str:
        try:
            parts = sorted(x)
        except TypeError:  # not comparable; the order of a set differs from run to run
            parts = sorted(x, key=repr)
        return "{" + self.repr_list(parts, level)[1:-1] + "}" if x else "set()"

    def repr_frozenset(self, x: frozenset, level: int) -> str:
        return f"frozenset({self.repr_set(x, level) if x else ''})"


def shown_call(label: str, args: tuple, kwargs: dict) -> str:
    """A call as a line of code, with its arguments as they are before it."""
    words = [show(x, 100) for x in args]
    words += [f"{name}={show(x, 100)}" for name, x in kwargs.items()]
    return shorten(f"{label}({', '.join(words)})", 300)


def show(x: Any, room: int = 200) -> str:
    """A value as text for feedback, cut with a mark.

    >>> show({"b", "a"}), show("x" * 1000, 50)
    ("{'a', 'b'}", "'xxxxxxxxxxxx...[976 cut]...xxxxxxxxxxxx'")
    """
    try:
        if isinstance(x, str):
            return repr(shorten(x, room))
        return shorten(Shown(room).repr(x), room)
    except Exception:
        return f"a {type(x).__name__} that cannot be shown"
