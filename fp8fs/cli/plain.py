"""The commands that make something, called without the option parser where their command line is a plain one.

The parser (typer, with what it is made of) takes a third of the time until a command begins. It stays the
judge: everything that is not plainly right, and every mistake, is left to it.
"""

from __future__ import annotations

import functools
import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plain_call"]


def _command(name: str) -> Callable[..., None] | None:
    """The command of that name, if it is one of ours."""
    if name == "build":
        from fp8fs.cli.build import build

        return build
    if name == "mount":
        from fp8fs.cli.mount import mount

        return mount
    if name == "plan":
        from fp8fs.cli.plan import plan

        return plan
    return None


def plain_call(arguments: Sequence[str]) -> Callable[[], int] | None:
    """What runs the command that *arguments* spell and returns its exit code; None unless each word is plainly understood."""
    command = _command(arguments[0]) if arguments else None
    if command is None:
        return None
    hints = typing.get_type_hints(command, include_extras=True)
    names = command.__code__.co_varnames[: command.__code__.co_argcount]
    options: dict[str, str] = {}
    places: list[str] = []
    for name in names:
        about = hints[name].__metadata__[0]
        if type(about).__name__ == "ArgumentInfo":
            places.append(name)
        elif about.envvar and about.envvar in os.environ:
            return None
        else:
            # The first spelling, written where a default would be if it were not in an annotation.
            first = (
                about.default if isinstance(about.default, str) else f"--{name.replace('_', '-')}"
            )
            for spelling in (first, *(about.param_decls or ())):
                options[spelling] = name
    given = _read(arguments[1:], options, places, hints)
    return None if given is None else functools.partial(_call, command, given)


def _call(command: Callable[..., None], given: dict[str, Any]) -> int:
    import typer

    try:
        command(**given)
    except typer.Exit as end:
        return end.exit_code
    return 0


def _read(
    words: Sequence[str], options: dict[str, str], places: Sequence[str], hints: dict[str, Any]
) -> dict[str, Any] | None:
    """Parameters by name; None for words that need the parser."""
    given: dict[str, Any] = {}
    left = list(places)
    rest = iter(words)
    for word in rest:
        spelling, has_value, text = word.partition("=")
        if not word.startswith("-"):
            if not left or not word:
                return None
            given[left.pop(0)] = Path(word)
            continue
        if spelling not in options:
            return None
        name = options[spelling]
        kind = typing.get_args(hints[name])[0]
        if kind is bool:
            if has_value or name in given:
                return None
            given[name] = True
            continue
        if not has_value:
            text = next(rest, "")
        if (
            not text
            or text.startswith("-")
            or (name in given and not isinstance(given[name], list))
        ):
            return None
        if kind in (int, int | None):
            about = hints[name].__metadata__[0]
            number = int(text) if text.isascii() and text.isdecimal() else -1
            if number < (about.min or 0) or (about.max is not None and number > about.max):
                return None
            given[name] = number
        elif kind == list[str] | None:
            given.setdefault(name, []).append(text)
        elif kind is str:
            given[name] = text
        elif kind in (Path, Path | None):
            given[name] = Path(text)
        else:
            return None
    return None if left else given
