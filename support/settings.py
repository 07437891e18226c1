"""A dataclass of settings as a command line.

    option, at_least     a field with its help; bounds that are refused by the option's name
    parse                what was given on the command line

Needs the standard library. murphy.py and evaluate.py show its use.
"""

import argparse
import types
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin


def option(default: Any, help: str, group: str = "options") -> Any:
    """A field of a settings dataclass, with its help text and the heading it stands under."""
    return field(default=default, metadata={"help": help, "group": group})


def flag(name: str) -> str:
    """The command-line name of a setting.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.replace("_", "-")


def at_least(settings: Any, **least: float) -> None:
    """Refuse settings below their least values, by the name of their option; None is fine."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= low:  # `not >=` refuses NaN, too
            raise ValueError(f"{flag(name)} must be at least {low}, got {value}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """One line in place of argparse's whole usage text."""
        self.exit(2, f"{self.prog}: {message}. --help lists the options.\n")


def parse(kind: type, arguments: list[str] | None, description: str) -> dict[str, Any]:
    """The options that were given on the command line, and no others.

    kind: a dataclass whose fields are `option`s. A wrong option ends the program with one line and
    exit status 2.
    """
    parser = _Parser(
        usage="%(prog)s [options]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what was not given is not in the answer
        allow_abbrev=False,
    )
    headings: dict[str, Any] = {}
    for setting in fields(kind):
        heading = setting.metadata["group"]
        if heading not in headings:
            headings[heading] = parser.add_argument_group(heading)
        text = setting.metadata["help"].replace("%", "%%")
        if setting.default not in (None, ""):
            text += f" (default: {setting.default})"
        how = _argument(setting.type)
        headings[heading].add_argument(flag(setting.name), dest=setting.name, help=text, **how)
    given = parser.parse_args(arguments)
    return {s.name: getattr(given, s.name) for s in fields(kind) if hasattr(given, s.name)}


def _argument(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type: int, float, str, bool, Literal, or `int | None`."""
    if isinstance(kind, types.UnionType):
        kind = get_args(kind)[0]  # `int | None`: None means that the option is not given
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"type": kind, "metavar": kind.__name__.upper()}
