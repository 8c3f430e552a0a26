"""Names and small JSON files from outside: made fit to print, and parsed without trust."""

from __future__ import annotations

import json

from fp8fs.errors import SourceInvalidError

__all__ = ["brief", "is_text", "parse_object", "quoted"]

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
