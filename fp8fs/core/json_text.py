"""Set one top-level key of a JSON file and leave every other byte as it was written.

People and tools diff configs. Where the text cannot be edited with certainty, it is encoded anew.
"""

from __future__ import annotations

import json
import re
from json import JSONDecoder

import msgspec

__all__ = ["set_key"]

_SPACE = re.compile(r"[ \t\r\n]*")
_BOM = b"\xef\xbb\xbf"


class _Member(msgspec.Struct, frozen=True):
    """One ``"key": value`` of the top-level object; positions are characters in the text."""

    key: str
    key_start: int
    value_start: int
    value_end: int


def set_key(text: bytes, key: str, value: object) -> bytes:
    """The JSON object *text* with *key* set to *value*: replaced in its place, or added behind the last member.

    Indentation, line ends and separators follow the text around. Raises: ValueError if *text* is not a JSON object.
    """
    bom = _BOM if text.startswith(_BOM) else b""
    source = text[len(bom) :].decode("utf-8")
    old = json.loads(source)
    if not isinstance(old, dict):
        raise ValueError("not a JSON object")
    expected = {**old, key: value}
    edited = _edit(source, key, value)
    # NaN is legal in configs written by Python, and unequal to itself: compare texts, not values.
    if edited is None or json.dumps(json.loads(edited)) != json.dumps(expected):
        edited = json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    return bom + edited.encode("utf-8")


def _edit(source: str, key: str, value: object) -> str | None:
    """The edited text, or None where a plain edit cannot be right (the key occurs twice)."""
    opening = source.index("{") + 1
    members = _members(source, opening)
    same = [member for member in members if member.key == key]
    if len(same) > 1:
        return None
    gap_end = members[0].key_start if members else opening
    gap = source[opening:gap_end]
    line_end = "\r\n" if "\r\n" in gap else "\n"
    if "\n" in gap:
        indent = gap.rpartition("\n")[2]
        encoded = json.dumps(value, indent=indent or None, ensure_ascii=False)
        encoded = encoded.replace("\n", line_end + indent)
        separator, colon = "," + line_end + indent, ": "
    else:
        tight = bool(members) and source[members[0].value_start - 1] == ":"
        colon, separator = (":", ",") if tight else (": ", ", ")
        encoded = json.dumps(value, ensure_ascii=False, separators=(separator, colon))
    if same:
        return source[: same[0].value_start] + encoded + source[same[0].value_end :]
    end = members[-1].value_end if members else opening
    lead = separator if members else ""
    return f"{source[:end]}{lead}{json.dumps(key)}{colon}{encoded}{source[end:]}"


def _members(source: str, position: int) -> list[_Member]:
    """The members of the object whose opening brace ends at *position*. The text is known to be valid."""
    decode = JSONDecoder().raw_decode
    members: list[_Member] = []
    while True:
        key_start = _skip(source, position)
        if source[key_start] == "}":
            return members
        key, end = decode(source, key_start)
        value_start = _skip(source, _skip(source, end) + 1)
        _, value_end = decode(source, value_start)
        members.append(_Member(key, key_start, value_start, value_end))
        position = _skip(source, value_end)
        if source[position] == "}":
            return members
        position += 1


def _skip(source: str, position: int) -> int:
    """The first position from *position* on that is no white space."""
    found = _SPACE.match(source, position)
    return found.end() if found else position
