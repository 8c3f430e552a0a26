"""Names and small JSON files from outside: made fit to print, and parsed without trust."""

from __future__ import annotations

import json
import shlex

from fp8fs.errors import SourceInvalidError

__all__ = ["brief", "counted", "is_text", "parse_object", "quoted", "shell_word"]

_SHOWN_CHARACTERS = 200


def brief(text: str) -> str:
    """*text* as one printable line of bounded length: control characters and undecodable bytes escaped."""
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def quoted(text: str) -> str:
    """*text* in quotes, fit for a sentence."""
    return f'"{brief(text)}"'


def counted(count: int, noun: str) -> str:
    """So many of them: "1 tree", "2 trees"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def shell_word(text: str) -> str:
    """*text* as one word of a command line, on one line: what a terminal would not show is escaped as $'...' has it."""
    if text.isprintable():
        return shlex.quote(text)
    shown = (f"\\{c}" if c in "\\'" else c if c.isprintable() else _octal(c) for c in text)
    return f"$'{''.join(shown)}'"


def _octal(character: str) -> str:
    """Its bytes, three digits each: so no digit that follows belongs to them."""
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def is_text(text: str) -> bool:
    """Whether *text* can be written as UTF-8: an escape in JSON can make half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_object(data: bytes, file: str) -> dict[str, object]:
    """A JSON object in UTF-8, read as the loaders read it (Python's json: NaN allowed, the last of equal keys wins).

    Raises: SourceInvalidError naming *file*.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as err:
        raise SourceInvalidError(f"{file}: not JSON: {err}", file=file) from err
    if not isinstance(value, dict):
        raise SourceInvalidError(f"{file}: not a JSON object", file=file)
    return value
