"""/proc/PID/mountinfo as data: the only way in which mounts are found. Never touches a mount.

A dead FUSE mount answers ENOTCONN, or from the attribute cache as if it lived, and a hung one blocks: so nothing here
(and nothing that looks for mounts) may call stat on a mount point.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

__all__ = ["FSTYPE", "Mount", "below", "find", "parse_mountinfo", "read_mountinfo", "resolve"]

FSTYPE = "fuse.fp8fs"

_ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    """One line. ``device`` is "major:minor"; ``root`` the directory of that filesystem that is mounted; ``point`` where;
    ``options`` those of this mount, ``super_options`` those of the filesystem."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    point: str
    options: str
    fstype: str
    source: str
    super_options: str

    def super_option(self, name: str) -> str:
        """The value of ``name=value`` among the filesystem's options, "" without."""
        for option in self.super_options.split(","):
            key, _, value = option.partition("=")
            if key == name:
                return value
        return ""


def parse_mountinfo(text: bytes) -> list[Mount]:
    """Every well-formed line, in order (a later line at the same point covers the earlier one).

    Any user can put nearly any byte into the source and type of a mount of theirs: the kernel escapes the newline, and
    no other line end; nothing has to be UTF-8.
    """
    mounts = []
    for line in text.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        fields, tail = before.split(b" "), after.split(b" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        if not (fields[0].isdigit() and fields[1].isdigit()):
            continue
        mounts.append(
            Mount(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=os.fsdecode(fields[2]),
                root=_unescape(fields[3]),
                point=_unescape(fields[4]),
                options=os.fsdecode(fields[5]),
                fstype=os.fsdecode(tail[0]),
                source=_unescape(tail[1]),
                super_options=_unescape(tail[2]),
            )
        )
    return mounts


def read_mountinfo(pid: int | None = None) -> list[Mount]:
    """The mounts of a process's namespace (default: ours). Raises: OSError for a process that is gone."""
    with open(f"/proc/{'self' if pid is None else pid}/mountinfo", "rb") as file:
        return parse_mountinfo(file.read())


def find(point: str, mounts: list[Mount]) -> Mount | None:
    """The topmost mount at exactly *point*, of any type."""
    return next((mount for mount in reversed(mounts) if mount.point == point), None)


def below(point: str, mounts: list[Mount]) -> list[Mount]:
    """Mounts strictly below *point*, in the order in which they have to be taken away."""
    inside = [mount for mount in mounts if mount.point.startswith(point.rstrip("/") + "/")]
    return sorted(inside, key=lambda mount: (mount.point.count("/"), mount.mount_id), reverse=True)


def resolve(path: str, mounts: list[Mount]) -> str:
    """*path* absolute and without symlinks, without touching anything that is mounted at the result.

    A mount point is recognised by name after resolving its parent; only a name that is no mount point is read as a
    symlink.
    """
    for _ in range(40):
        parent, name = os.path.split(os.path.abspath(path))
        at = os.path.join(os.path.realpath(parent), name) if name else parent
        if find(at, mounts) is not None:
            return at
        try:
            path = os.path.join(os.path.dirname(at), os.readlink(at))
        except OSError:
            return at
    return at


def _unescape(field: bytes) -> str:
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field)
    return os.fsdecode(raw)
