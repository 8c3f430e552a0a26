"""What the modules of the store share: OSError to StoreError, checked names, checked JSON, small durable files."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from fp8fs.errors import StoreError, StoreFullError
from fp8fs.store.fsio import FsIo, StrPath

__all__ = [
    "checked_key",
    "closing_fd",
    "decode_checked",
    "encode_checked",
    "is_named",
    "read_small",
    "remove_tree",
    "replace_file",
    "storing",
    "temporary_name",
]

MAX_SMALL_BYTES = 1 << 30
"""No record, fact or manifest is larger; a file that claims to be is damaged."""

_CANNOT_WRITE = {
    errno.ENOSPC: "free some space, or name another store with --store",
    errno.EDQUOT: "the quota is used up; free some space, or name another store with --store",
    errno.EFBIG: "the filesystem or a limit forbids a file this large; name another store with --store",
    errno.EROFS: "the filesystem is read-only; name another store with --store",
    errno.EACCES: "check the store's owner and permissions, or name another one with --store",
    errno.EPERM: "check the store's owner and permissions, or name another one with --store",
}
_KEY = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,199}")


@contextmanager
def storing(what: str) -> Iterator[None]:
    """An OSError inside leaves as StoreFullError (no room, no right) or StoreError (all else), saying *what* failed."""
    try:
        yield
    except OSError as err:
        text = f"{what}: {err.strerror or err}"
        path = os.fsdecode(err.filename) if isinstance(err.filename, str | bytes) else None
        hint = _CANNOT_WRITE.get(err.errno or 0)
        if hint is not None:
            raise StoreFullError(text, hint=hint, errno=err.errno, path=path) from err
        gone = "was the store removed? unmount and mount again" if err.errno == errno.ENOENT else ""
        raise StoreError(text, hint=gone, errno=err.errno, path=path) from err


def checked_key(key: str) -> str:
    """*key* itself, if it can be a file name of the store. Raises: ValueError (a bug of the caller)."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a key of the store: {key!r}")
    return key


@contextmanager
def closing_fd(io: FsIo, fd: int) -> Iterator[int]:
    """The descriptor, closed on the way out."""
    try:
        yield fd
    finally:
        io.close(fd)


def encode_checked(value: Any) -> bytes:
    """One JSON object that carries a checksum of its value: ``{"crc32":"........","value":...}``."""
    body = msgspec.json.encode(value)
    return b'{"crc32":"%08x","value":%b}\n' % (zlib.crc32(body), body)


class _Checked(msgspec.Struct):
    crc32: str
    value: msgspec.Raw


def decode_checked(data: bytes) -> msgspec.Raw | None:
    """The JSON text of the value, or None if anything about *data* is not as encoded."""
    try:
        checked = msgspec.json.decode(data, type=_Checked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return checked.value if checked.crc32 == f"{zlib.crc32(checked.value):08x}" else None


def read_small(io: FsIo, path: StrPath, *, dir_fd: int | None = None) -> bytes | None:
    """The bytes of a regular file; None if there is none of that name."""
    try:
        fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        if err.errno in (errno.ELOOP, errno.ENXIO):  # a symlink, a socket: nothing of ours
            return None
        raise
    with closing_fd(io, fd):
        info = io.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_SMALL_BYTES:
            return None
        return io.pread(fd, info.st_size, 0)


def is_named(io: FsIo, fd: int, path: StrPath) -> bool:
    """Whether the open file or directory is still the one called *path*."""
    try:
        found = io.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    ours = io.fstat(fd)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def temporary_name(stem: str) -> str:
    """A name that nobody else uses: the stem, our pid, a random part."""
    return f"{stem}.{os.getpid()}.{secrets.token_hex(6)}"


def replace_file(io: FsIo, path: Path, content: bytes, *, tmp: Path, durable: bool = True) -> None:
    """*path* is *content*, whole or untouched at any moment; with *durable*, power loss cannot undo it."""
    staged = tmp / temporary_name(path.name)
    try:
        with closing_fd(io, io.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as fd:
            io.pwrite(fd, content, 0)
            if durable:
                io.fsync(fd)
        io.rename(staged, path)
    except BaseException:
        with suppress(OSError):
            io.unlink(staged)
        raise
    if durable:
        io.fsync_dir(path.parent)


def remove_tree(io: FsIo, path: Path) -> int:
    """A directory of ours and all in it are gone; what is gone already is no error. Returns the bytes that it freed."""
    freed = 0
    try:
        fd = io.open_dir(path)
    except FileNotFoundError:
        return 0
    with closing_fd(io, fd):
        freed += _empty_dir(io, fd)
    with suppress(FileNotFoundError):
        io.rmdir(path)
    return freed


def _empty_dir(io: FsIo, dir_fd: int) -> int:
    freed = 0
    if io.fstat(dir_fd).st_mode & 0o300 != 0o300:  # a 0555 directory of SRC
        io.fchmod(dir_fd, 0o700)
    for name in io.listdir(dir_fd):
        with suppress(FileNotFoundError):
            info = io.lstat(name, dir_fd=dir_fd)
            if stat.S_ISDIR(info.st_mode):
                with closing_fd(io, io.open_dir(name, dir_fd=dir_fd)) as inner:
                    freed += _empty_dir(io, inner)
                io.rmdir(name, dir_fd=dir_fd)
            else:
                io.unlink(name, dir_fd=dir_fd)
                freed += info.st_blocks * 512 if info.st_nlink == 1 else 0
    return freed
