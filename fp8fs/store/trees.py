"""trees/<plan id>: a plain checkpoint directory that needs neither FUSE nor us.

Everything is reached from the tree's own descriptor, one component at a time, never through a symlink: the tree holds
links to SRC, and what is written must not follow them. A name gets its content in one step. What is there is never
changed, only replaced by the same content: as long as the tree is not complete, files are compared in full (after a
power loss they may be empty); an object's link is replaced when the object was damaged and made again.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from fp8fs.errors import StoreError, StoreFullError
from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import (
    closing_fd,
    decode_checked,
    encode_checked,
    read_small,
    storing,
    temporary_name,
)
from fp8fs.store.lease import locked_file
from fp8fs.store.places import Places
from fp8fs.store.types import SCHEMA, Poll, no_poll

__all__ = ["COMPLETE", "PRIVATE", "Pin", "Tree", "read_references"]

log = logging.getLogger(__name__)

PRIVATE = ".fp8fs"
COMPLETE = "COMPLETE"
REFERENCES = "objects"

_COMPARE_BYTES = 1 << 20
_NO_LINK = {errno.EMLINK, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class _Complete(msgspec.Struct):
    schema: int
    plan_id: str


class _Attributes(msgspec.Struct, frozen=True):
    mode: int
    uid: int
    gid: int
    mtime_ns: int | None


class Pin:
    """Keeps a tree (and the objects it refers to) from being collected while open. Context manager; close() repeatable."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._held.close()


class Tree:
    """trees/<plan id>: a plain checkpoint directory. All paths relative, "/"-separated; nothing there is ever changed."""

    path: Path

    def __init__(self, io: FsIo, places: Places, plan_id: str, *, writable: bool) -> None:
        self.path = places.tree(plan_id)
        self._io = io
        self._places = places
        self._plan_id = plan_id
        self._writable = writable
        self._directories: dict[str, _Attributes] = {}

    # -- what it needs --------------------------------------------------------------------

    def refer(self, object_ids: Iterable[str], *, poll: Poll = no_poll) -> None:
        """Say which objects this tree needs (now or later), so that collect() keeps them and their partials."""
        with self._changing(""), ExitStack() as held:
            guard = self._places.guard
            held.enter_context(
                locked_file(self._io, guard, poll, exclusive=False, what="the store (gc)")
            )
            self._ensure_private()
            known = read_references(self._io, self.path)
            wanted = known | set(object_ids)
            if wanted != known:
                self._write_private(REFERENCES, encode_checked(sorted(wanted)), durable=True)

    # -- content --------------------------------------------------------------------------

    def ensure_dir(
        self, path: str, *, mode: int, uid: int = -1, gid: int = -1, mtime_ns: int | None = None
    ) -> None:
        """The directory exists ("" is the tree itself). Its exact mode and mtime are set by complete(), owner rights are kept until then."""
        attributes = _Attributes(mode & 0o7777, uid, gid, mtime_ns)
        with self._changing(path):
            self._ensure_root()
            with self._parent(path) as (parent, name):
                if name:
                    self._mkdir(name, parent)
                    fd = self._io.open_dir(name, dir_fd=parent)
                else:
                    fd = self._io.open_dir(".", dir_fd=parent)
                with closing_fd(self._io, fd):
                    if path not in self._directories and not self.is_complete():
                        self._own(fd, attributes)
                        self._io.fchmod(fd, attributes.mode | 0o700)
            self._directories[path] = attributes

    def write_text(
        self,
        path: str,
        content: bytes,
        *,
        mode: int,
        uid: int = -1,
        gid: int = -1,
        mtime_ns: int | None = None,
    ) -> None:
        """The file exists with this content and these attributes."""

        def same(fd: int) -> bool:
            return self._io.pread(fd, len(content) + 1, 0) == content

        def fill(fd: int) -> None:
            self._io.pwrite(fd, content, 0)

        self._put_file(path, _Attributes(mode, uid, gid, mtime_ns), len(content), same, fill)

    def copy_file(
        self,
        path: str,
        source_fd: int,
        size: int,
        *,
        mode: int,
        uid: int = -1,
        gid: int = -1,
        mtime_ns: int | None = None,
    ) -> None:
        """The file exists as a copy (reflink where possible) of the first *size* bytes of *source_fd*."""

        def same(fd: int) -> bool:
            return all(
                self._io.pread(fd, _COMPARE_BYTES, at)
                == self._io.pread(source_fd, _COMPARE_BYTES, at)
                for at in range(0, size, _COMPARE_BYTES)
            )

        attributes = _Attributes(mode, uid, gid, mtime_ns)
        self._put_file(path, attributes, size, same, lambda fd: self._copy(source_fd, fd, size))

    def link_source(self, path: str, target: str) -> None:
        """A symlink with text *target* exists at *path*."""
        with self._changing(path), self._parent(path) as (parent, name):
            try:
                if self._io.readlink(name, dir_fd=parent) == target:
                    return
            except OSError as err:
                if err.errno not in (errno.ENOENT, errno.EINVAL):
                    raise
            with self._unlocked(parent):
                self._swap_in(
                    parent, name, lambda staged: self._io.symlink(target, self._places.tmp / staged)
                )

    def link_object(self, path: str, object_path: Path) -> None:
        """The object is in the tree: hard link, else reflink, else copy. An older inode of it (set aside as damaged) is replaced."""
        with self._changing(path), self._parent(path) as (parent, name):
            wanted = self._io.lstat(object_path)
            found = self._look(name, parent)
            if found is not None and (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return
            with self._unlocked(parent):
                try:
                    self._swap_in(
                        parent,
                        name,
                        lambda staged: self._io.link(object_path, self._places.tmp / staged),
                    )
                    return
                except OSError as err:
                    if err.errno not in _NO_LINK:
                        raise
                    log.debug("no hard link for %s: %s", path, err)
            self._copy_object(path, object_path)

    def _copy_object(self, path: str, object_path: Path) -> None:
        with closing_fd(self._io, self._io.open(object_path, os.O_RDONLY)) as fd:
            info = self._io.fstat(fd)
            self.copy_file(
                path,
                fd,
                info.st_size,
                mode=stat.S_IMODE(info.st_mode),
                uid=info.st_uid,
                gid=info.st_gid,
                mtime_ns=info.st_mtime_ns,
            )

    def is_linked(self, path: str, object_id: str) -> bool:
        """Whether the tree's file is the object itself by another name: then there is one set of bytes to check."""
        _names(path)
        with storing(f"cannot read tree {self._plan_id}"):
            try:
                found = self._io.lstat(self.path / path)
                wanted = self._io.lstat(self._places.object(object_id))
            except (FileNotFoundError, NotADirectoryError):
                return False
        return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)

    def shard_fault(self, path: str, object_id: str, *, size: int, preamble: bytes) -> str:
        """What a look tells to be wrong with an object's file in the tree, "" for nothing; a link of the object is right.

        Cost: three stats; for a file of its own one open and a read of the preamble, too.
        """
        if self.is_linked(path, object_id):
            return ""
        with storing(f"cannot read tree {self._plan_id}"):
            place = self.path / path
            try:
                info = self._io.lstat(place)
                if not stat.S_ISREG(info.st_mode):
                    return "is no regular file"
                if info.st_size != size:
                    return f"has {info.st_size} bytes, expected {size}"
                granted = self._io.lstat(self._places.object(object_id)).st_mode
                if fault := grants_more(info.st_mode, granted):
                    return fault
                flags = os.O_RDONLY | os.O_NONBLOCK
                with closing_fd(self._io, self._io.open(place, flags)) as fd:
                    same = self._io.pread(fd, len(preamble), 0) == preamble
            except (FileNotFoundError, NotADirectoryError):
                return "is missing"
        return "" if same else "has another header than planned"

    def write_manifest(
        self, content: bytes, *, name: str = "manifest.json", durable: bool = False
    ) -> None:
        """The tree's .fp8fs/<name> is *content*, atomically; with *durable*, power loss cannot undo what was written now."""
        with self._changing(f"{PRIVATE}/{name}"):
            self._ensure_private()
            if read_small(self._io, self.path / PRIVATE / name) != content:
                self._write_private(name, content, durable=durable)

    def read_private(self, name: str) -> bytes | None:
        """The tree's .fp8fs/<name>; None if it is not there."""
        with storing(f"cannot read tree {self._plan_id}"):
            return read_small(self._io, self.path / PRIVATE / name)

    # -- completion -----------------------------------------------------------------------

    def complete(self) -> None:
        """Everything in the tree is durable, directories have their final attributes, COMPLETE exists."""
        if self.is_complete():
            return
        with self._changing(""):
            self._ensure_private()
            with closing_fd(self._io, self._io.open_dir(self.path)) as root:
                self._sync(root)
            for path in sorted(self._directories, key=lambda p: p.count("/"), reverse=True):
                if path:
                    self._finish_dir(path, self._directories[path])
            # COMPLETE is made below .fp8fs, so the root's final attributes do not stand in its way.
            if (attributes := self._directories.get("")) is not None:
                self._finish_dir("", attributes)
            self._io.fsync_dir(self._places.trees)
            self._write_private(
                COMPLETE, encode_checked(_Complete(SCHEMA, self._plan_id)), durable=True
            )

    def doubt(self) -> None:
        """The tree is complete no more: the next one who writes to it compares everything, and completes it again."""
        with self._changing(""), suppress(FileNotFoundError):
            self._io.unlink(self.path / PRIVATE / COMPLETE)

    def is_complete(self) -> bool:
        """Whether complete() was reached once."""
        with storing(f"cannot read tree {self._plan_id}"):
            data = read_small(self._io, self.path / PRIVATE / COMPLETE)
        value = decode_checked(data) if data is not None else None
        if value is None:
            return False
        try:
            return msgspec.json.decode(value, type=_Complete) == _Complete(SCHEMA, self._plan_id)
        except msgspec.MsgspecError:
            return False

    def _sync(self, dir_fd: int) -> None:
        """Files and directories below are on the disk. Objects are already."""
        for name in self._io.listdir(dir_fd):
            info = self._io.lstat(name, dir_fd=dir_fd)
            if stat.S_ISDIR(info.st_mode):
                with closing_fd(self._io, self._io.open_dir(name, dir_fd=dir_fd)) as inner:
                    self._sync(inner)
            elif stat.S_ISREG(info.st_mode) and info.st_nlink == 1:
                flags = os.O_RDONLY | os.O_NONBLOCK
                with closing_fd(self._io, self._io.open(name, flags, dir_fd=dir_fd)) as fd:
                    self._io.fsync(fd)
        self._io.fsync(dir_fd)

    def _finish_dir(self, path: str, attributes: _Attributes) -> None:
        fd = self._io.open_dir(self.path / path)
        with closing_fd(self._io, fd):
            self._io.fchmod(fd, attributes.mode)
            if attributes.mtime_ns is not None:
                self._io.futime(fd, attributes.mtime_ns)
            self._io.fsync(fd)

    # -- small steps ----------------------------------------------------------------------

    @contextmanager
    def _changing(self, path: str) -> Iterator[None]:
        if not self._writable:
            raise StoreFullError("the store cannot be written", hint="name another with --store")
        shown = f"{self._plan_id}/{path}" if path else self._plan_id
        with storing(f"cannot write tree {shown}"):
            yield

    def _ensure_root(self) -> None:
        with suppress(FileExistsError):
            self._io.mkdir(self.path)

    def _ensure_private(self) -> None:
        """.fp8fs exists, for its owner only: it names tensors of files that others may not read."""
        self._ensure_root()
        private = self.path / PRIVATE
        if not os.path.lexists(private):
            with closing_fd(self._io, self._io.open_dir(self.path)) as root, self._unlocked(root):
                self._mkdir(PRIVATE, root)

    def _mkdir(self, name: str, parent: int) -> None:
        if self._look(name, parent) is None:
            with self._unlocked(parent), suppress(FileExistsError):
                self._io.mkdir(name, dir_fd=parent)

    def _look(self, name: str, parent: int) -> os.stat_result | None:
        try:
            return self._io.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return None

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that holds *path*, reached without following a link, and the last name."""
        names = _names(path)
        with ExitStack() as opened:
            self._ensure_root()
            fd = opened.enter_context(closing_fd(self._io, self._io.open_dir(self.path)))
            for name in names[:-1]:
                inner = self._io.open_dir(name, dir_fd=fd)
                fd = opened.enter_context(closing_fd(self._io, inner))
            yield fd, names[-1] if names else ""

    @contextmanager
    def _unlocked(self, dir_fd: int) -> Iterator[None]:
        """The directory can be written by us for a moment: a finished one may have SRC's mode 0555, and we may not be root."""
        mode = stat.S_IMODE(self._io.fstat(dir_fd).st_mode)
        if mode & 0o300 == 0o300 or os.geteuid() == 0:
            yield
            return
        self._io.fchmod(dir_fd, mode | 0o300)
        try:
            yield
        finally:
            self._io.fchmod(dir_fd, mode)

    def _put_file(
        self,
        path: str,
        attributes: _Attributes,
        size: int,
        same: Callable[[int], bool],
        fill: Callable[[int], None],
    ) -> None:
        with self._changing(path), self._parent(path) as (parent, name):
            found = self._look(name, parent)
            if found is not None and self._is_right(found, attributes, name, parent, size, same):
                return
            with self._unlocked(parent):
                self._swap_in(parent, name, lambda staged: self._stage(staged, attributes, fill))

    def _is_right(
        self,
        found: os.stat_result,
        attributes: _Attributes,
        name: str,
        parent: int,
        size: int,
        same: Callable[[int], bool],
    ) -> bool:
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return False
        if self.is_complete():
            return True
        if stat.S_IMODE(found.st_mode) != attributes.mode:
            return False
        if attributes.mtime_ns not in (None, found.st_mtime_ns):
            return False
        flags = os.O_RDONLY | os.O_NONBLOCK
        with closing_fd(self._io, self._io.open(name, flags, dir_fd=parent)) as fd:
            return same(fd)

    def _stage(self, staged: str, attributes: _Attributes, fill: Callable[[int], None]) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with closing_fd(self._io, self._io.open(self._places.tmp / staged, flags)) as fd:
            fill(fd)
            self._own(fd, attributes)
            self._io.fchmod(fd, attributes.mode)
            if attributes.mtime_ns is not None:
                self._io.futime(fd, attributes.mtime_ns)

    def _own(self, fd: int, attributes: _Attributes) -> None:
        info = self._io.fstat(fd)
        uid = info.st_uid if attributes.uid == -1 else attributes.uid
        gid = info.st_gid if attributes.gid == -1 else attributes.gid
        if (uid, gid) != (info.st_uid, info.st_gid):
            self._io.fchown(fd, uid, gid)

    def _swap_in(self, parent: int, name: str, make: Callable[[str], None]) -> None:
        """*name* is what *make* makes under a temporary name, in one step."""
        staged = temporary_name("tree")
        try:
            make(staged)
            self._io.rename(self._places.tmp / staged, name, dest_dir_fd=parent)
        finally:
            # Also after success: a rename onto another link of the same inode does nothing and leaves both names.
            with suppress(OSError):
                self._io.unlink(self._places.tmp / staged)

    def _copy(self, source_fd: int, dest_fd: int, size: int) -> None:
        done = 0
        while done < size:
            copied = self._io.copy_chunk(source_fd, dest_fd, size - done, done)
            if copied == 0:
                raise StoreError(f"a file to copy ends at byte {done}, expected {size}")
            done += copied

    def _write_private(self, name: str, content: bytes, *, durable: bool = False) -> None:
        def fill(fd: int) -> None:
            self._io.pwrite(fd, content, 0)
            if durable:
                self._io.fsync(fd)

        attributes = _Attributes(0o600, -1, -1, None)
        with closing_fd(self._io, self._io.open_dir(self.path / PRIVATE)) as parent:
            self._swap_in(parent, name, lambda staged: self._stage(staged, attributes, fill))
            if durable:
                self._io.fsync(parent)


def grants_more(mode: int, granted: int) -> str:
    """Whether others may do more with a file of *mode* than with one of *granted*: a copied store may have lost its modes."""
    if not mode & ~granted & 0o077:
        return ""
    return f"has mode {stat.S_IMODE(mode):04o}, which grants more than {stat.S_IMODE(granted):04o}"


def _names(path: str) -> list[str]:
    """The names that lead to a path of a tree, [] for the tree itself. Raises: StoreError if one leads out of it."""
    names = path.split("/") if path else []
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise StoreError(f"not a path inside a tree: {path!r}")
    return names


def read_references(io: FsIo, tree: Path) -> frozenset[str]:
    """Ids of the objects that a tree has said it needs; none if the list is missing or damaged."""
    data = read_small(io, tree / PRIVATE / REFERENCES)
    value = decode_checked(data) if data is not None else None
    if value is not None:
        with suppress(msgspec.MsgspecError, RecursionError):
            return msgspec.json.decode(value, type=frozenset[str])
    return frozenset()
