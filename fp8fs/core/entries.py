"""The names below SRC as plain data, and the few things that follow from a name alone."""

from __future__ import annotations

import msgspec

__all__ = ["SourceEntry", "folder_of", "is_private", "join", "name_of"]


class SourceEntry(msgspec.Struct, frozen=True):
    """One name below SRC. ``path`` is relative, "/"-separated, undecodable bytes as surrogates.

    ``kind``: "file" (after following symlinks), "dir", "link" (a symlink that is dangling or leads to a
    directory: shown as the link it is), "other" (FIFO, device, socket: never opened).
    ``mode`` is permission bits only (0o7777); ``link`` the symlink's text if the name itself is a symlink
    (for kind "file" too, as in an HF cache), else "".
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int
    dev: int
    ino: int
    link: str = ""


def folder_of(path: str) -> str:
    """The folder of a path, "" for SRC itself."""
    return path.rpartition("/")[0]


def name_of(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


def join(folder: str, name: str) -> str:
    """*name* in *folder*."""
    return f"{folder}/{name}" if folder else name


def is_private(path: str) -> bool:
    """Whether a part of the path starts with a dot: caches and version control, never part of a checkpoint."""
    return path.startswith(".") or "/." in path
