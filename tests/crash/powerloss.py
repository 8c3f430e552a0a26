"""What a disk may hold after a power loss: every call is recorded, then replayed onto a disk that forgets.

``Recorder`` does the real calls and writes them down. ``Disk.after(calls)`` knows for each file and directory what was
synced and what was not, and ``Disk.write_out`` makes the store that the next boot may find:

    strict    nothing survives that was not synced: no byte, no name, no mode
    ordered   names as a journaling filesystem keeps them, all up to some moment; bytes in any mixture
    chaos     each unsynced name and each unsynced write survives or not, by itself; writes may be torn, a rename
              is one step
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fp8fs.store.fsio import FsIo, StrPath

__all__ = ["WAYS", "Call", "Disk", "Recorder"]

WAYS = ("strict", "ordered", "chaos")


class Call(NamedTuple):
    """One thing that happened. ``node`` numbers files and directories; ``what`` is the call's own."""

    kind: str
    node: int
    what: tuple[Any, ...] = ()


class Recorder(FsIo):
    """The real calls, one at a time, and a list of those that change something below *top* (which exists).

    The first ``begun`` calls stand for what was there, synced.
    """

    def __init__(self, top: Path) -> None:
        self.calls: list[Call] = []
        self._lock = threading.RLock()
        self._nodes: dict[tuple[int, int], int] = {}
        self._by_fd: dict[int, int] = {}
        self._count = 0
        self._adopt(top)
        self.calls += [Call("fsync", node) for node in range(self._count)]
        self.begun = len(self.calls)

    def mark(self, what: str, *facts: Any) -> None:
        """Something was promised from this moment on."""
        with self._lock:
            self.calls.append(Call("mark", -1, (what, *facts)))

    def _new(self, info: os.stat_result) -> int:
        node = self._nodes[(info.st_dev, info.st_ino)] = self._count
        self._count += 1
        return node

    def _adopt(self, path: Path) -> int:
        """What is there before anything is recorded."""
        info = path.lstat()
        known = self._nodes.get((info.st_dev, info.st_ino))
        if known is not None:
            return known
        node = self._new(info)
        mode = stat.S_IMODE(info.st_mode)
        if stat.S_ISDIR(info.st_mode):
            self.calls.append(Call("dir", node, (mode,)))
            for name in sorted(os.listdir(path)):
                self.calls.append(Call("name", node, (name, self._adopt(path / name))))
        elif stat.S_ISLNK(info.st_mode):
            self.calls.append(Call("symlink", node, (os.readlink(path),)))
        else:
            self.calls.append(Call("file", node, (mode,)))
            self.calls.append(Call("write", node, (0, path.read_bytes())))
        return node

    def _node(self, fd: int) -> int:
        return self._by_fd[fd]

    def _parent(self, path: StrPath, dir_fd: int | None) -> tuple[int, str]:
        folder, name = os.path.split(os.fspath(path))
        info = os.stat(folder or ".", dir_fd=dir_fd)
        return self._nodes[(info.st_dev, info.st_ino)], name

    def _named(self, path: StrPath, dir_fd: int | None) -> int:
        info = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        return self._nodes[(info.st_dev, info.st_ino)]

    # -- calls that make, name and unname --------------------------------------------------

    def open(
        self, path: StrPath, flags: int, mode: int = 0o600, *, dir_fd: int | None = None
    ) -> int:
        with self._lock:
            there = True
            try:
                os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            except OSError:
                there = False
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            info = os.fstat(fd)
            if not there:
                node = self._new(info)
                self.calls.append(Call("file", node, (stat.S_IMODE(info.st_mode),)))
                folder, name = self._parent(path, dir_fd)
                self.calls.append(Call("name", folder, (name, node)))
            self._by_fd[fd] = self._nodes.get((info.st_dev, info.st_ino), -1)
            return fd

    def mkdir(self, path: StrPath, mode: int = 0o700, *, dir_fd: int | None = None) -> None:
        with self._lock:
            super().mkdir(path, mode, dir_fd=dir_fd)
            node = self._new(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
            folder, name = self._parent(path, dir_fd)
            self.calls.append(Call("dir", node, (mode,)))
            self.calls.append(Call("name", folder, (name, node)))

    def symlink(self, target: str, path: StrPath, *, dir_fd: int | None = None) -> None:
        with self._lock:
            super().symlink(target, path, dir_fd=dir_fd)
            node = self._new(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
            folder, name = self._parent(path, dir_fd)
            self.calls.append(Call("symlink", node, (target,)))
            self.calls.append(Call("name", folder, (name, node)))

    def link(self, source: StrPath, dest: StrPath, *, dest_dir_fd: int | None = None) -> None:
        with self._lock:
            super().link(source, dest, dest_dir_fd=dest_dir_fd)
            folder, name = self._parent(dest, dest_dir_fd)
            self.calls.append(Call("name", folder, (name, self._named(dest, dest_dir_fd))))

    def rename(
        self,
        source: StrPath,
        dest: StrPath,
        *,
        source_dir_fd: int | None = None,
        dest_dir_fd: int | None = None,
    ) -> None:
        with self._lock:
            node = self._named(source, source_dir_fd)
            try:
                same = self._named(dest, dest_dir_fd) == node
            except FileNotFoundError:
                same = False
            super().rename(source, dest, source_dir_fd=source_dir_fd, dest_dir_fd=dest_dir_fd)
            if not same:  # else the kernel did nothing
                there, new = self._parent(dest, dest_dir_fd)
                here, old = self._parent(source, source_dir_fd)
                self.calls.append(Call("rename", here, (old, there, new, node)))

    def unlink(self, path: StrPath, *, dir_fd: int | None = None) -> None:
        with self._lock:
            folder, name = self._parent(path, dir_fd)
            super().unlink(path, dir_fd=dir_fd)
            self.calls.append(Call("name", folder, (name, None)))

    def rmdir(self, path: StrPath, *, dir_fd: int | None = None) -> None:
        with self._lock:
            folder, name = self._parent(path, dir_fd)
            super().rmdir(path, dir_fd=dir_fd)
            self.calls.append(Call("name", folder, (name, None)))

    # -- calls that write and sync ---------------------------------------------------------

    def pwrite_once(self, fd: int, data: memoryview, file_offset: int) -> int:
        with self._lock:
            done = super().pwrite_once(fd, data, file_offset)
            what = (file_offset, bytes(data[:done]))
            self.calls.append(Call("write", self._node(fd), what))
            return done

    def write_once(self, fd: int, data: bytes) -> int:
        with self._lock:
            at = os.fstat(fd).st_size
            done = super().write_once(fd, data)
            self.calls.append(Call("write", self._node(fd), (at, data[:done])))
            return done

    def ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            super().ftruncate(fd, size)
            self.calls.append(Call("size", self._node(fd), (size,)))

    def copy_chunk(self, source_fd: int, dest_fd: int, length: int, file_offset: int) -> int:
        with self._lock:
            done = os.copy_file_range(source_fd, dest_fd, length, file_offset, file_offset)
            what = (file_offset, os.pread(dest_fd, done, file_offset))
            self.calls.append(Call("write", self._node(dest_fd), what))
            return done

    def fchmod(self, fd: int, mode: int) -> None:
        with self._lock:
            super().fchmod(fd, mode)
            self.calls.append(Call("mode", self._node(fd), (mode,)))

    def futime(self, fd: int, mtime_ns: int) -> None:
        with self._lock:
            super().futime(fd, mtime_ns)
            self.calls.append(Call("time", self._node(fd), (mtime_ns,)))

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            super().fdatasync(fd)
            self.calls.append(Call("fdatasync", self._node(fd)))

    def fsync(self, fd: int) -> None:
        with self._lock:
            super().fsync(fd)
            self.calls.append(Call("fsync", self._node(fd)))


@dataclass
class _Node:
    """``synced``: what the disk surely has; ``since``: what was done afterwards, in order."""

    kind: str
    mode: int = 0o600
    mtime_ns: int = 0
    synced_mode: int = 0o600
    synced_mtime_ns: int = 0
    target: str = ""
    synced: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)
    since: list[tuple[Any, ...]] = field(default_factory=list)


class Disk:
    """What a disk knows and what it may forget."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._last_sync = 0
        self._calls: list[Call] = []

    @classmethod
    def after(cls, calls: Iterable[Call]) -> Disk:
        """The disk at the moment after these calls."""
        disk = cls()
        disk._calls = list(calls)
        for number, call in enumerate(disk._calls):
            disk._do(number, call)
        return disk

    def _do(self, number: int, call: Call) -> None:
        kind, node, what = call
        if kind in ("file", "dir", "symlink"):
            self._nodes[node] = _Node(kind)
            if kind == "symlink":
                self._nodes[node].target = what[0]
            else:
                self._nodes[node].mode = self._nodes[node].synced_mode = what[0]
        elif kind == "rename":
            old, there, new, moved = what
            self._nodes[there].since.append(("name", new, moved, number))
            self._nodes[node].since.append(("name", old, None, number))
        elif kind == "name":
            self._nodes[node].since.append((kind, *what, number))
        elif kind in ("write", "size"):
            self._nodes[node].since.append((kind, *what))
        elif kind == "mode":
            self._nodes[node].mode = what[0]
        elif kind == "time":
            self._nodes[node].mtime_ns = what[0]
        elif kind in ("fsync", "fdatasync"):
            self._sync(self._nodes[node], attributes=kind == "fsync")
            self._last_sync = number

    def _sync(self, node: _Node, *, attributes: bool) -> None:
        for change in node.since:
            _apply(node, change)
        node.since.clear()
        if attributes:
            node.synced_mode, node.synced_mtime_ns = node.mode, node.mtime_ns

    def write_out(self, top: Path, way: str, rng: random.Random) -> None:
        """Below *top* (made now) is what was below the recorded top, as far as the disk remembers it."""
        keep_until = len(self._calls)
        if way == "ordered":
            keep_until = rng.randrange(self._last_sync, len(self._calls) + 1)
        names: dict[int, dict[str, int]] = {}
        fates: dict[int, bool] = {}
        for number, node in self._nodes.items():
            if node.kind == "dir":
                known = dict(node.names)
                for _, name, other, call in node.since if way == "chaos" else ():
                    if fates.setdefault(call, rng.random() < 0.5):
                        _name(known, name, other)
                names[number] = known
        if way == "ordered":
            names = self._names_until(keep_until)
        self._write(top, 0, names, way, rng, {})

    def _names_until(self, end: int) -> dict[int, dict[str, int]]:
        names: dict[int, dict[str, int]] = {
            n: {} for n, o in self._nodes.items() if o.kind == "dir"
        }
        for kind, node, what in self._calls[:end]:
            if kind == "name":
                _name(names[node], *what)
            elif kind == "rename":
                old, there, new, moved = what
                _name(names[there], new, moved)
                _name(names[node], old, None)
        return names

    def _write(
        self,
        path: Path,
        number: int,
        names: dict[int, dict[str, int]],
        way: str,
        rng: random.Random,
        made: dict[int, Path],
    ) -> None:
        node = self._nodes[number]
        if node.kind == "symlink":
            os.symlink(node.target, path)
        elif node.kind == "dir":
            path.mkdir()
            for name, inner in names[number].items():
                self._write(path / name, inner, names, way, rng, made)
            path.chmod(node.synced_mode | 0o700)
        elif number in made:
            os.link(made[number], path)
        else:
            made[number] = path
            path.write_bytes(self._content(node, way, rng))
            path.chmod(node.synced_mode)
            if node.synced_mtime_ns:
                os.utime(path, ns=(node.synced_mtime_ns, node.synced_mtime_ns))

    def _content(self, node: _Node, way: str, rng: random.Random) -> bytes:
        if way == "strict" or not node.since:
            return bytes(node.synced)
        left = _Node("file", synced=bytearray(node.synced))
        for change in node.since:
            fate = rng.randrange(3)
            if fate == 0:
                continue
            if fate == 1 and change[0] == "write":
                _, at, data = change
                change = ("write", at, data[: rng.randrange(len(data) + 1)])
            _apply(left, change)
        return bytes(left.synced)


def _name(names: dict[str, int], name: str, node: int | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _apply(node: _Node, change: tuple[Any, ...]) -> None:
    kind, *what = change
    if kind == "name":
        name, other, _ = what
        _name(node.names, name, other)
    elif kind == "size":
        (size,) = what
        del node.synced[size:]
        node.synced.extend(bytes(size - len(node.synced)))
    else:
        at, data = what
        if len(node.synced) < at:
            node.synced.extend(bytes(at - len(node.synced)))
        node.synced[at : at + len(data)] = data
