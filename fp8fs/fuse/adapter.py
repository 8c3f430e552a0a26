"""libfuse calls to ``View`` calls, nothing else. The only place where an errno is sent.

Refused, because nothing below a mount is ever written (EROFS): see ``_REFUSED``, and ``open`` with any flag that
writes. Not implemented, so that the kernel answers by itself: ``lock``, ``flock`` (both stay local to the machine),
``ioctl`` (ENOTTY), ``poll``, ``bmap``, ``lseek`` (SEEK_DATA sees no holes), ``copy_file_range`` (falls back to reads),
``access`` (the mount option default_permissions decides from the attributes), ``fsync``, ``flush``.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from typing import Any

from fp8fs.core.text import brief
from fp8fs.errors import Fp8fsError, InterruptedWaitError, ReadOnlyError
from fp8fs.fuse.libfuse import LibFuse
from fp8fs.fuse.pending import wants_to_stop
from fp8fs.view import Attrs, View

__all__ = ["Operations", "fuse_options", "replying"]

log = logging.getLogger(__name__)

MAX_THREADS = 1024
"""Waiting opens and inline reads each hold one; libfuse makes them when needed."""

MAX_BACKGROUND = 2048
"""Requests that the kernel sends ahead (readahead); beyond the congestion threshold it stops reading ahead."""

MAX_READAHEAD = 1 << 20
"""A cap only: the bdi's own value decides, and stays at the kernel's 128 KiB unless root raises it."""

_FORMATS = {"dir": stat.S_IFDIR, "file": stat.S_IFREG, "link": stat.S_IFLNK}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_REFUSED = (
    "mknod", "mkdir", "unlink", "rmdir", "symlink", "rename", "link", "chmod", "chown", "truncate", "write",
    "setxattr", "removexattr", "create", "utimens", "fallocate",
)  # fmt: skip


@contextmanager
def replying(error: type[OSError], op: str, path: str) -> Iterator[None]:
    """One log line and one errno for whatever happens inside.

    The binding would pass the errno of any inner OSError to the reader: an ENOENT of the store would look like "no such
    file in the mount".
    """
    try:
        yield
    except Fp8fsError as err:
        log.log(err.level, "%s %s: %s", op, brief(path), err, extra={"facts": err.facts})
        raise error(err.errno) from err
    except Exception as err:
        log.exception("%s %s: bug", op, brief(path))
        raise error(errno.EIO) from err


def fuse_options(
    *, fsname: str, minor: int, allow_other: bool, threads: int = MAX_THREADS
) -> dict[str, str | int | float | bool]:
    """Mount options for libfuse 3.*minor*, as keyword arguments of the binding."""
    options: dict[str, str | int | float | bool] = {
        "fsname": fsname.replace("\\", "\\\\").replace(",", "\\,"),
        "subtype": "fp8fs",
        "ro": True,
        "nosuid": True,
        "nodev": True,
        "default_permissions": True,
        "allow_other": allow_other,
        # Longer hides the turn from file to link (an hour did); zero makes every path walk a round trip.
        "entry_timeout": 1.0,
        # Every walk past that brings attributes along. If they could run out first, or between two steps of one walk, the
        # kernel would ask for those of a file that has turned into a link meanwhile, and fail with EIO.
        "attr_timeout": 86400.0,
        # Spare threads stay: making one for each of a burst of requests costs more than keeping it.
        "max_idle_threads": threads,
    }
    if minor >= 12:  # unknown to older libfuse, which has no limit
        options["max_threads"] = threads
    return options


class Operations:
    """The callbacks, in the shape that the binding expects with ``raw_fi``."""

    use_ns = True

    def __init__(self, view: View, libfuse: LibFuse, *, on_init: Callable[[], None]) -> None:
        self._view = view
        self._on_init = on_init
        self._lib: CDLL = libfuse.library
        self._error: type[OSError] = libfuse.binding.FuseOSError
        self._context: Callable[[], tuple[int, int, int]] = libfuse.binding.fuse_get_context
        for name in _REFUSED:
            setattr(self, name, self._refuse)

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Limits of the connection; and the mount answers from now on."""
        connection.max_background = MAX_BACKGROUND
        connection.congestion_threshold = MAX_BACKGROUND * 3 // 4
        connection.max_readahead = MAX_READAHEAD
        config.use_ino = 0  # the inode has to differ when a shard turns from file to link
        self._on_init()

    def getattr(self, path: str, info: Any = None) -> dict[str, int]:
        with replying(self._error, "getattr", path):
            if info is not None and info.fh:
                return _stat(self._view.attrs(info.fh))
            return _stat(self._view.lookup(_inside(path)))

    def readlink(self, path: str) -> str:
        with replying(self._error, "readlink", path):
            return self._view.readlink(_inside(path), self._poll)

    def opendir(self, path: str) -> int:
        return 0

    def readdir(self, path: str, handle: int) -> list[tuple[str, int, int]]:
        with replying(self._error, "readdir", path):
            names = [(name, _FORMATS[a.kind], 0) for name, a in self._view.list(_inside(path))]
        return [(".", stat.S_IFDIR, 0), ("..", stat.S_IFDIR, 0), *names]

    def open(self, path: str, info: Any) -> int:
        with replying(self._error, "open", path):
            if info.flags & _WRITING:
                raise ReadOnlyError(f"{path}: read-only")
            info.fh = self._view.open(_inside(path), self._poll)
            live = self._view.is_live(_inside(path))
            info.direct_io = live
            info.keep_cache = not live
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        with replying(self._error, "read", path):
            return self._view.pread(info.fh, offset, size, self._poll)

    def release(self, path: str, info: Any) -> int:
        with replying(self._error, "release", path):
            self._view.release(info.fh)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        with replying(self._error, "statfs", path):
            return self._view.statfs()

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        raise self._error(errno.ENODATA)

    def listxattr(self, path: str) -> list[str]:
        return []

    def _refuse(self, *_args: object) -> int:
        raise self._error(errno.EROFS)

    def _poll(self) -> None:
        """Raise InterruptedWaitError if the caller of this request is to end or was interrupted by its user."""
        if self._lib.fuse_interrupted() and wants_to_stop(self._context()[2]):
            raise InterruptedWaitError("the caller was interrupted while it waited")


def _inside(path: str) -> str:
    return path.strip("/")


def _stat(attrs: Attrs) -> dict[str, int]:
    return {
        "st_mode": _FORMATS[attrs.kind] | attrs.mode,
        "st_nlink": 2 if attrs.kind == "dir" else 1,
        "st_size": attrs.size,
        "st_blocks": (attrs.size + 511) // 512,
        "st_blksize": 1 << 20,
        "st_uid": attrs.uid,
        "st_gid": attrs.gid,
        "st_mtime": attrs.mtime_ns,
        "st_ctime": attrs.mtime_ns,
        "st_atime": attrs.mtime_ns,
    }
