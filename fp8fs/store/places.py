"""Where everything is below ROOT, and whether ROOT can be trusted and written."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fp8fs.errors import StoreError
from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import checked_key, storing
from fp8fs.store.types import SCHEMA

__all__ = ["Opened", "Places", "open_root"]

_FOLDERS = (
    "objects",
    "partial",
    "amax",
    "trees",
    "scans",
    "hints",
    "adopted",
    "plans",
    "damaged",
    "tmp",
)
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}


class Places:
    """Paths of one store. Keys are checked: no name that a caller gives can lead anywhere else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / f"v{SCHEMA}"
        self.objects = self.home / "objects"
        self.partials = self.home / "partial"
        self.trees = self.home / "trees"
        self.damaged = self.home / "damaged"
        self.tmp = self.home / "tmp"
        self.guard = self.home / "lock"

    def object(self, object_id: str) -> Path:
        key = checked_key(object_id)
        return self.objects / key[:2] / f"{key}.safetensors"

    def record(self, object_id: str) -> Path:
        key = checked_key(object_id)
        return self.objects / key[:2] / f"{key}.json"

    def partial(self, object_id: str) -> Path:
        return self.partials / checked_key(object_id)

    def tree(self, plan_id: str) -> Path:
        return self.trees / checked_key(plan_id)

    def tree_lock(self, plan_id: str) -> Path:
        return self.trees / f"{checked_key(plan_id)}.lock"

    def amax(self, group_id: str) -> Path:
        return self.home / "amax" / checked_key(group_id)

    def fact(self, kind: str, key: str) -> Path:
        return self.home / kind / f"{checked_key(key)}.json"


class Opened(NamedTuple):
    """A ROOT that can be trusted; ``why_not`` is "" if it can be written."""

    places: Places
    why_not: str


def open_root(io: FsIo, root: Path, *, create: bool) -> Opened:
    """ROOT and ROOT/v1 are ours (or root's) and nobody else can write there; made with mode 0700 if missing and *create*.

    Raises: StoreError if ROOT cannot be trusted: then nothing in it is read.
    """
    places = Places(Path(os.path.abspath(root)))
    why_not = ""
    if create:
        try:
            _make(io, places)
        except OSError as err:
            if err.errno not in _READ_ONLY:
                with storing(f"cannot make the store {str(root)!r}"):
                    raise
            why_not = f"cannot make {err.filename!r}: {err.strerror}"
    with storing(f"cannot look at the store {str(root)!r}"):
        found = _check(io, places.root) and _check(io, places.home)
    if not found:
        return Opened(places, why_not or f"there is no store at {str(root)!r}")
    if not why_not and not os.access(places.objects, os.W_OK | os.X_OK, effective_ids=True):
        why_not = f"{str(places.objects)!r} cannot be written"
    return Opened(places, why_not)


def _make(io: FsIo, places: Places) -> None:
    missing: list[Path] = []
    above = places.root
    while not os.path.lexists(above):
        missing.append(above)
        above = above.parent
    for path in reversed(missing):
        _ensure(io, path)
    _check(io, places.root)  # before anything is made inside
    _ensure(io, places.home)
    _check(io, places.home)
    if [name for name in _FOLDERS if _ensure(io, places.home / name)]:
        # What is synced later in these folders is worth nothing if their own names get lost.
        for folder in (places.home, places.root):
            io.fsync_dir(folder)
        for path in missing:
            with suppress(PermissionError):  # a directory above that we may pass, but not read
                io.fsync_dir(path.parent)


def _ensure(io: FsIo, path: Path) -> bool:
    """The directory exists. Returns whether it was made now."""
    if os.path.lexists(path):
        return False
    with suppress(FileExistsError):
        io.mkdir(path)
    return True


def _check(io: FsIo, path: Path) -> bool:
    """Whether the directory exists. Raises: StoreError if somebody else could have put things there."""
    shown = str(path)
    trusted = (os.geteuid(), 0)
    try:
        info = io.lstat(path)
        if stat.S_ISLNK(info.st_mode) and info.st_uid not in trusted:
            raise StoreError(
                f"the store {shown!r} is a symlink that belongs to uid {info.st_uid}",
                hint="name a directory of your own with --store",
                path=shown,
            )
        info = os.stat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError(
            f"the store {shown!r} is not a directory", hint="name another with --store", path=shown
        )
    if info.st_uid not in trusted:
        raise StoreError(
            f"the store {shown!r} belongs to uid {info.st_uid}, we are uid {trusted[0]}",
            hint="name a store of your own with --store",
            path=shown,
        )
    if info.st_mode & 0o022:
        raise StoreError(
            f"the store {shown!r} can be written by others (mode {info.st_mode & 0o7777:04o})",
            hint=f"chmod go-w {shown}",
            path=shown,
        )
    return True
