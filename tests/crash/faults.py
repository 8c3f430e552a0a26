"""Ways for the store's system calls to go wrong: fail the n-th, do things by halves, lose what was not synced."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from typing import Any

from fp8fs.store.fsio import FsIo

__all__ = ["SHORT", "FaultyIo", "HalvingIo", "PowerCut", "PowerLossIo"]

SHORT = 0
"""Not an errno: the call does half of what it was asked for, and says so."""

COUNTED = (
    "open", "fstat", "lstat", "listdir", "pread_once", "pwrite_once", "write_once", "ftruncate",
    "copy_chunk", "fdatasync", "fsync", "mkdir", "rename", "link", "symlink", "readlink", "unlink",
    "rmdir", "fchmod", "chmod", "fchown", "lchown", "futime", "try_lock_range", "try_flock",
)  # fmt: skip
"""Every method that makes one system call, except close and unlock, which cannot fail in a way that matters."""


class FaultyIo(FsIo):
    """The *nth* counted call fails with *code*, and so do all later ones if *persistent* (until ``heal``).

    A write that fails with ENOSPC has written half of its bytes before, as a full disk does. SHORT counts reads and
    writes alone.
    """

    def __init__(self, nth: int, code: int, *, persistent: bool) -> None:
        self.calls = 0
        self.failed = ""
        self._nth, self._code, self._persistent = nth, code, persistent
        self._lock = threading.Lock()

    def fail_from(self, nth: int) -> None:
        """The *nth* call and all later ones fail."""
        with self._lock:
            self._nth, self._persistent = nth, True

    def heal(self) -> None:
        """No further call fails."""
        with self._lock:
            self._nth, self._persistent = 0, False

    def step(self, name: str) -> bool:
        """Count a call. Returns whether it fails."""
        if self._code == SHORT and name not in _HALVED:
            return False
        with self._lock:
            self.calls += 1
            fails = self.calls == self._nth or (self._persistent and self.calls > self._nth > 0)
            self.failed = self.failed or (name if fails else "")
            return fails


_HALVED = ("pread_once", "pwrite_once", "write_once")


def _half(io: FsIo, name: str, fd: int, what: Any, *rest: Any) -> Any:
    if name == "pread_once":
        return FsIo.pread_once(io, fd, -(-what // 2), *rest)
    real = getattr(FsIo, name)
    return real(io, fd, what[: -(-len(what) // 2)], *rest)


def _failing(name: str) -> Callable[..., Any]:
    real = getattr(FsIo, name)

    def call(self: FaultyIo, *args: Any, **kwargs: Any) -> Any:
        if not self.step(name):
            return real(self, *args, **kwargs)
        if self._code == SHORT:
            return _half(self, name, *args)
        if self._code == errno.ENOSPC and name in ("pwrite_once", "write_once"):
            fd, data, *rest = args
            real(self, fd, data[: len(data) // 2], *rest)
            if name == "write_once":
                return len(data) // 2
        raise OSError(self._code, os.strerror(self._code))

    return call


for _name in COUNTED:
    setattr(FaultyIo, _name, _failing(_name))


class HalvingIo(FsIo):
    """Reads and writes are short whenever they can be, and every third is interrupted first."""

    def __init__(self) -> None:
        self.calls = 0

    def _some(self, length: int) -> int:
        self.calls += 1
        if self.calls % 3 == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return max(1, length // 2)

    def pread_once(self, fd: int, length: int, file_offset: int) -> bytes:
        return super().pread_once(fd, self._some(length), file_offset)

    def pwrite_once(self, fd: int, data: memoryview, file_offset: int) -> int:
        return super().pwrite_once(fd, data[: self._some(len(data))], file_offset)


class PowerCut(BaseException):
    """The machine is off. Not an Exception: nothing may handle it."""


class PowerLossIo(FsIo):
    """The *nth* counted call and all later ones raise PowerCut; ``lose`` then takes back what was not synced.

    Names are kept (renames happen at once); contents count as lost until the file itself was synced.
    """

    def __init__(self, nth: int) -> None:
        self.calls = 0
        self._nth = nth
        self._unsynced: dict[tuple[int, int], list[tuple[int, bytes, int]]] = {}
        self._files: dict[tuple[int, int], int] = {}

    def step(self, name: str) -> None:
        self.calls += 1
        if self.calls >= self._nth:
            raise PowerCut(name)

    def _note(self, fd: int, file_offset: int, length: int) -> None:
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino)
        if key not in self._files:
            self._files[key] = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        old = os.pread(self._files[key], length, file_offset)
        self._unsynced.setdefault(key, []).append((file_offset, old, length))

    def _synced(self, fd: int) -> None:
        info = os.fstat(fd)
        self._unsynced.pop((info.st_dev, info.st_ino), None)

    def lose(self, rng: random.Random) -> int:
        """Each unsynced write is kept, lost or torn. Returns how many were not kept whole."""
        lost = 0
        for key, writes in self._unsynced.items():
            fd = self._files[key]
            for file_offset, old, length in reversed(writes):
                kept = rng.choice([0, rng.randrange(length + 1), length])
                lost += kept < length
                if len(old) < length and os.fstat(fd).st_size <= file_offset + length:
                    os.ftruncate(fd, file_offset + max(kept, len(old)))
                if kept < len(old):
                    os.pwrite(fd, old[kept:], file_offset + kept)
        return lost

    def close_all(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def _losing(name: str) -> Callable[..., Any]:
    real = getattr(FsIo, name)

    def call(self: PowerLossIo, *args: Any, **kwargs: Any) -> Any:
        self.step(name)
        if name == "pwrite_once":
            self._note(args[0], args[2], len(args[1]))
        elif name == "write_once":
            self._note(args[0], os.fstat(args[0]).st_size, len(args[1]))
        result = real(self, *args, **kwargs)
        if name in ("fsync", "fdatasync"):
            self._synced(args[0])
        return result

    return call


for _name in COUNTED:
    setattr(PowerLossIo, _name, _losing(_name))
