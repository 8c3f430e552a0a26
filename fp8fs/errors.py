"""The exception tree: one class per kind of trouble, each with a stable code, exit code and errno.

    Fp8fsError
    +-- UsageError
    +-- SourceInvalidError       SourceChangedError       NothingQuantizedError
    +-- StoreError
    |   +-- StoreBusyError  StoreDamagedError  StoreFullError  StoreVersionError
    +-- QuantError
    |   +-- NonFiniteTensorError  DeviceError
    +-- MountError
    |   +-- MountPointError  FuseMissingError  NotMountedError
    +-- VerifyFailedError
    +-- ViewError
        +-- NoSuchPathError  NotADirectoryInViewError  IsADirectoryInViewError  ReadOnlyError
        +-- HandedOverError  InterruptedWaitError  BadHandleError

Codes and exit codes are API: never renumbered, never reused (docs/CLI.md lists them).
"""

from __future__ import annotations

import errno as _errno
from typing import ClassVar

__all__ = [
    "BadHandleError",
    "DeviceError",
    "Fp8fsError",
    "FuseMissingError",
    "HandedOverError",
    "InterruptedWaitError",
    "IsADirectoryInViewError",
    "MountError",
    "MountPointError",
    "NoSuchPathError",
    "NonFiniteTensorError",
    "NotADirectoryInViewError",
    "NotMountedError",
    "NothingQuantizedError",
    "QuantError",
    "ReadOnlyError",
    "SourceChangedError",
    "SourceInvalidError",
    "StoreBusyError",
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreVersionError",
    "UsageError",
    "VerifyFailedError",
    "ViewError",
]

ERROR, DEBUG = 40, 10
"""Log levels, as numbers: the rooms inside may not know logging."""

Fact = str | int | float | bool | None


class Fp8fsError(Exception):
    """Something that fp8fs expects may go wrong, said in one line: object, expected, found, hint.

    ``what`` is the sentence without the hint; ``hint`` the one thing to do; ``facts`` the same
    values as data, for ``--json``, ``status`` and the log.
    """

    code: ClassVar[str] = "error"
    exit: ClassVar[int] = 70
    errno: ClassVar[int] = _errno.EIO
    level: ClassVar[int] = ERROR

    def __init__(self, what: str, *, hint: str = "", **facts: Fact) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.facts: dict[str, Fact] = facts

    def __str__(self) -> str:
        return f"{self.what}. hint: {self.hint}" if self.hint else self.what

    def as_dict(self) -> dict[str, object]:
        """The error as JSON-ready data; the same fields everywhere."""
        return {"code": self.code, "what": self.what, "hint": self.hint, "facts": dict(self.facts)}


class UsageError(Fp8fsError):
    """The command line asks for something that does not exist or does not go together."""

    code, exit = "usage", 2


class SourceInvalidError(Fp8fsError):
    """SRC is not a checkpoint that can be read: damaged, incomplete, or of an unsupported kind."""

    code, exit = "source.invalid", 10


class SourceChangedError(Fp8fsError):
    """A source file is not what it was when the view was planned."""

    code, exit = "source.changed", 11


class NothingQuantizedError(Fp8fsError):
    """No weight of SRC becomes FP8, so a mount would show it as it is."""

    code, exit = "source.unquantized", 12


class StoreError(Fp8fsError):
    """The store cannot be used as asked. Readers of a mount are served all the same."""

    code, exit = "store", 29


class StoreBusyError(StoreError):
    """Somebody else holds the lease that is needed, and did not let go in time."""

    code, exit = "store.busy", 20


class StoreDamagedError(StoreError):
    """A stored object is not what its record says."""

    code, exit = "store.damaged", 21


class StoreFullError(StoreError):
    """The store's filesystem has not enough room, or cannot be written."""

    code, exit = "store.full", 22


class StoreVersionError(StoreError):
    """The store was written by a version of fp8fs that this one cannot read."""

    code, exit = "store.version", 23


class QuantError(Fp8fsError):
    """Values or devices prevent quantization."""

    code, exit = "quant", 39


class NonFiniteTensorError(QuantError):
    """A weight that should be quantized holds NaN or Inf.

    facts: ``component``, ``tensor`` (name with the component before it; both added by the engine), ``index`` (flat index of
    the first bad element).
    """

    code, exit = "quant.nonfinite", 30


class DeviceError(QuantError):
    """The asked-for device is missing, failed, or has no memory left."""

    code, exit = "quant.device", 31


class MountError(Fp8fsError):
    """The mount cannot be made, found or removed."""

    code, exit = "mount", 49


class MountPointError(MountError):
    """DST cannot be a mount point for this source and store; or it is in use and cannot stop being one."""

    code, exit = "mount.point", 40


class FuseMissingError(MountError):
    """FUSE itself is not usable here: no device, no library, no helper."""

    code, exit = "mount.fuse", 41


class NotMountedError(MountError):
    """There is no fp8fs mount at that path."""

    code, exit = "mount.none", 42


class VerifyFailedError(Fp8fsError):
    """``verify`` found damage."""

    code, exit = "verify.failed", 50


class ViewError(Fp8fsError):
    """An ordinary negative answer of the view; logged at debug."""

    code, exit, level = "view", 70, DEBUG


class NoSuchPathError(ViewError):
    code, errno = "view.enoent", _errno.ENOENT


class NotADirectoryInViewError(ViewError):
    code, errno = "view.enotdir", _errno.ENOTDIR


class IsADirectoryInViewError(ViewError):
    code, errno = "view.eisdir", _errno.EISDIR


class ReadOnlyError(ViewError):
    code, errno = "view.erofs", _errno.EROFS


class BadHandleError(ViewError):
    code, errno = "view.ebadf", _errno.EBADF


class HandedOverError(ViewError):
    """Not a failure: the shard is sealed now (or no longer), and the kernel shall look the path up again.

    Linux answers ESTALE during a path walk by walking once more with revalidation; the lookup then
    says symlink, and the kernel opens the store's file itself (docs/DESIGN.md, "handoff"); or it says file
    where the kernel still knew a symlink to what was removed from the store.
    """

    code, errno = "view.handoff", _errno.ESTALE


class InterruptedWaitError(ViewError):
    """The caller of a waiting open or read is about to die or was interrupted by its user."""

    code, errno = "view.eintr", _errno.EINTR
