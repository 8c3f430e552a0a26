"""Whose a private partial is where nothing can be locked: process and host, a heartbeat, and who is gone.

The partial's ``lock`` file names its holder and is written again at most every ``BEAT_S`` seconds of work. A holder on
this machine is gone when its process is; of one elsewhere only the heartbeat tells. Ages are differences between two
dates that the same filesystem gave, so clocks that differ decide nothing. A holder taken for gone by mistake does no
damage: it finds its directory renamed, as after a publication, and what both write is the same.
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path

from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import closing_fd, read_small, temporary_name

__all__ = ["Holder", "filesystem_now_ns", "holder_text", "is_abandoned", "try_adopt"]

BEAT_S = 30.0
GONE_S = 600.0
"""A holder elsewhere that has written nothing for so long is gone."""


class Holder:
    """This process, as the holder of a private partial. ``fd``: its lock file, which the partial closes."""

    def __init__(self, io: FsIo, fd: int) -> None:
        self._io = io
        self._fd = fd
        self._text = holder_text()
        self._beat()
        io.ftruncate(
            fd, len(self._text)
        )  # never empty on the way: that would say that nobody holds it

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._io.pwrite(self._fd, self._text, 0)

    def beat(self) -> None:
        """Say that we are alive, if that was not said a moment ago. Never fails: the data's date says it, too."""
        if time.monotonic() - self._beaten >= BEAT_S:
            with suppress(OSError):
                self._beat()

    def release(self) -> None:
        """Nobody holds it: the next one goes on from here at once."""
        with suppress(OSError):
            self._io.ftruncate(self._fd, 0)


def holder_text() -> bytes:
    """What a lock file says of this process."""
    return f"{os.getpid()} {_started(str(os.getpid()))} {_machine()}\n".encode()


def filesystem_now_ns(io: FsIo, tmp: Path) -> int:
    """The date that the filesystem gives to a file written now. Raises: OSError."""
    probe = tmp / temporary_name("now")
    with closing_fd(io, io.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL)) as fd:
        try:
            io.pwrite(fd, b"now", 0)
            return io.fstat(fd).st_mtime_ns
        finally:
            io.unlink(probe)


def try_adopt(io: FsIo, partials: Path, object_id: str, path: Path, now_ns: int) -> bool:
    """Give the name *path* to what somebody who is gone left of this shard. Returns whether there was anything.

    The rename decides between several that try.
    """
    for name in io.listdir(partials):
        if name.startswith(f"{object_id}.") and is_abandoned(io, partials / name, now_ns):
            with suppress(OSError):
                io.rename(partials / name, path)
                return True
    return False


def is_abandoned(io: FsIo, folder: Path, now_ns: int) -> bool:
    """Whether the holder of a private partial released it or is gone."""
    try:
        content = read_small(io, folder / "lock")
        dates = [io.lstat(folder / name).st_mtime_ns for name in ("lock", "data", "journal")]
    except OSError:
        return False
    if not content:  # released, or not even a file
        return content is not None
    pid, started, machine = [*content.decode("utf-8", "replace").split(), "", "", ""][:3]
    if machine == _machine():
        return _started(pid) != started
    return now_ns - max(dates) > GONE_S * 1e9


def _started(pid: str) -> str:
    """When a process began, in the kernel's ticks; "gone" if none of that number runs (a zombie does not)."""
    if not re.fullmatch("[0-9]{1,10}", pid):
        return "gone"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    """Host, boot and process namespace: a process number means something only where all of these are the same."""
    boot = namespace = "unknown"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot}/{namespace}"
