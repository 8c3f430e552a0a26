"""Every system call with which the store reads, writes, syncs, renames, links, locks or removes. The seam for fault injection.

Methods are as small as the calls they stand for; what they mean is decided by their callers. Failures are
``OSError``; ``guard.storing`` turns them into the store's own errors. A test subclasses ``FsIo`` to fail the
n-th call, or to write and read short (``pwrite_once``, ``pread_once``, ``write_once``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

from typing_extensions import Buffer

__all__ = ["FsIo", "StrPath"]

StrPath = str | os.PathLike[str]

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid
_SYNC_FILE_RANGE_WRITE = 2
_COPY_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF}
_COPY_CHUNK = 4 << 20

_libc = ctypes.CDLL(None)  # calls without the GIL
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class FsIo:
    """The real system calls. Stateless and thread-safe."""

    # -- descriptors ----------------------------------------------------------------------

    def open(
        self, path: StrPath, flags: int, mode: int = 0o600, *, dir_fd: int | None = None
    ) -> int:
        """A descriptor that is not inherited; a symlink as the last component is refused (ELOOP)."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)

    def open_dir(self, path: StrPath, *, dir_fd: int | None = None) -> int:
        """A descriptor of a directory that is not reached through a symlink."""
        return self.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: StrPath, *, dir_fd: int | None = None) -> os.stat_result:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def listdir(self, path: StrPath | int) -> list[str]:
        """The names in a directory, sorted; a descriptor lists what it stands for."""
        return sorted(os.listdir(path))

    # -- bytes ----------------------------------------------------------------------------

    def pread_once(self, fd: int, length: int, file_offset: int) -> bytes:
        return os.pread(fd, length, file_offset)

    def pwrite_once(self, fd: int, data: memoryview, file_offset: int) -> int:
        return os.pwrite(fd, data, file_offset)

    def write_once(self, fd: int, data: bytes) -> int:
        return os.write(fd, data)

    def pread(self, fd: int, length: int, file_offset: int) -> bytes:
        """*length* bytes, fewer only at the end of the file."""
        parts: list[bytes] = []
        while length > 0:
            try:
                part = self.pread_once(fd, length, file_offset)
            except InterruptedError:
                continue
            if not part:
                break
            parts.append(part)
            length -= len(part)
            file_offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def pwrite(self, fd: int, data: Buffer, file_offset: int) -> None:
        """All of *data*, however short the single writes are."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            try:
                written = self.pwrite_once(fd, view, file_offset)
            except InterruptedError:
                continue
            if written == 0:
                raise OSError(errno.EIO, "pwrite wrote nothing")
            view = view[written:]
            file_offset += written

    def append(self, fd: int, data: bytes) -> None:
        """*data* in one write to an O_APPEND descriptor, so that writers never mix. A short write fails (ENOSPC)."""
        while True:
            try:
                written = self.write_once(fd, data)
            except InterruptedError:
                continue
            break
        if written != len(data):
            raise OSError(errno.ENOSPC, "short append")

    def allocate(self, fd: int, file_offset: int, length: int) -> None:
        """Room for these bytes, in few pieces, before they are written. A hint: it never fails, the write may."""
        _libc.fallocate(fd, 0, file_offset, length)

    def start_writing(self, fd: int, file_offset: int, length: int) -> None:
        """The disk begins with these bytes now; nobody waits, nothing is promised. A hint: it never fails."""
        _libc.sync_file_range(fd, file_offset, length, _SYNC_FILE_RANGE_WRITE)

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def copy_chunk(self, source_fd: int, dest_fd: int, length: int, file_offset: int) -> int:
        """Up to *length* bytes at the same offset of both files, in the kernel (a reflink where it can); 0 at the end."""
        try:
            return os.copy_file_range(source_fd, dest_fd, length, file_offset, file_offset)
        except OSError as err:
            if err.errno not in _COPY_UNSUPPORTED:
                raise
        part = self.pread(source_fd, min(length, _COPY_CHUNK), file_offset)
        self.pwrite(dest_fd, part, file_offset)
        return len(part)

    # -- durability -----------------------------------------------------------------------

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_dir(self, path: StrPath) -> None:
        """The names in a directory survive a power loss."""
        fd = self.open_dir(path)
        try:
            self.fsync(fd)
        finally:
            self.close(fd)

    # -- names ----------------------------------------------------------------------------

    def mkdir(self, path: StrPath, mode: int = 0o700, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)

    def rename(
        self,
        source: StrPath,
        dest: StrPath,
        *,
        source_dir_fd: int | None = None,
        dest_dir_fd: int | None = None,
    ) -> None:
        os.rename(source, dest, src_dir_fd=source_dir_fd, dst_dir_fd=dest_dir_fd)

    def link(self, source: StrPath, dest: StrPath, *, dest_dir_fd: int | None = None) -> None:
        os.link(source, dest, dst_dir_fd=dest_dir_fd, follow_symlinks=False)

    def symlink(self, target: str, path: StrPath, *, dir_fd: int | None = None) -> None:
        os.symlink(target, path, dir_fd=dir_fd)

    def readlink(self, path: StrPath, *, dir_fd: int | None = None) -> str:
        return os.readlink(path, dir_fd=dir_fd)

    def unlink(self, path: StrPath, *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: StrPath, *, dir_fd: int | None = None) -> None:
        os.rmdir(path, dir_fd=dir_fd)

    # -- attributes -----------------------------------------------------------------------

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def chmod(self, path: StrPath, mode: int) -> None:
        """For the one case where the file cannot be opened because of its mode."""
        os.chmod(path, mode)

    def fchown(self, fd: int, uid: int, gid: int) -> None:
        os.fchown(fd, uid, gid)

    def lchown(self, path: StrPath, uid: int, gid: int, *, dir_fd: int | None = None) -> None:
        os.chown(path, uid, gid, dir_fd=dir_fd, follow_symlinks=False)

    def futime(self, fd: int, mtime_ns: int) -> None:
        os.utime(fd, ns=(mtime_ns, mtime_ns))

    # -- locks ----------------------------------------------------------------------------

    def try_lock_range(self, fd: int, start: int, length: int, *, exclusive: bool) -> bool:
        """Lock bytes for this open file description, or change the lock that it holds; False if somebody else is in the way."""
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        try:
            self._set_lock(fd, kind, start, length)
        except BlockingIOError:
            return False
        return True

    def unlock_range(self, fd: int, start: int, length: int) -> None:
        self._set_lock(fd, fcntl.F_UNLCK, start, length)

    def _set_lock(self, fd: int, kind: int, start: int, length: int) -> None:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))

    def try_flock(self, fd: int, *, exclusive: bool) -> bool:
        """Lock the whole file for this open file description; False if somebody else is in the way."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
