"""Who may work on what: claims of one partial shard, among threads and among processes.

A claim is a byte of the partial's ``lock`` file, held with an open-file-description lock: the kernel frees it when
its holder dies. Such a lock belongs to the open file, not to a thread, so a table of our own stands in front.

    bytes [0, PRESENCE)     claim numbers; sealing takes all of them
    byte  PRESENCE          shared by everybody who has the partial open, exclusive for recovery and removal

Lock order: the table's condition, then nothing; the kernel is asked with the condition released.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from fp8fs.errors import StoreBusyError
from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import is_named
from fp8fs.store.types import Poll

__all__ = ["PRESENCE", "Claims", "Deadline", "LocksUnavailable", "locked_file", "wait_until"]

log = logging.getLogger(__name__)

PRESENCE = 1 << 62
_ALL = -1
_HOLDER_BYTES = 128
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class LocksUnavailable(Exception):  # noqa: N818 - an answer, not an error
    """The filesystem has no working locks: work alone, in private."""


class Deadline:
    """A point in time after which a wait ends with StoreBusyError, or never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def check(self, what: str, holder: Callable[[], str]) -> None:
        """Raises: StoreBusyError, naming the holder, if the time is over."""
        if self.is_over():
            who = holder()
            by = f" by {who}" if who else ""
            raise StoreBusyError(f"{what} is held{by}", hint="try again later", holder=who)


@contextmanager
def _translating_locks() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        if err.errno in _NO_LOCKS:
            raise LocksUnavailable(os.strerror(err.errno)) from err
        raise


def _nobody() -> str:
    return ""


def wait_until(
    ready: Callable[[], bool],
    poll: Poll,
    deadline: Deadline,
    what: str,
    holder: Callable[[], str] = _nobody,
) -> None:
    """Returns once *ready* says True; asks with pauses from 1 to 50 ms and polls between."""
    pause_s = _FIRST_PAUSE_S
    while not ready():
        poll()
        deadline.check(what, holder)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


@contextmanager
def locked_file(
    io: FsIo,
    path: Path,
    poll: Poll,
    *,
    what: str,
    exclusive: bool = True,
    timeout_s: float | None = None,
    required: bool = False,
) -> Iterator[int]:
    """The file *path*, made if missing and locked as a whole (flock); surely the one of that name once it is locked.

    Where the filesystem has no such lock the file is just open, unless *required* (then StoreBusyError).
    """
    deadline = Deadline(timeout_s)
    with ExitStack() as held:
        while True:
            fd = io.open(path, os.O_RDWR | os.O_CREAT)
            held.callback(io.close, fd)
            try:
                with _translating_locks():
                    wait_until(
                        partial(io.try_flock, fd, exclusive=exclusive),
                        poll,
                        deadline,
                        what,
                        partial(_flock_holders, fd),
                    )
            except LocksUnavailable as err:
                if required:
                    raise StoreBusyError(f"{what} cannot be locked here: {err}") from err
            if is_named(io, fd, path):
                break
            held.pop_all().close()
        yield fd


def _flock_holders(fd: int) -> str:
    """Who has the open file locked, as far as /proc/locks tells: processes of this host; "" for others."""
    info = os.fstat(fd)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        text = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    pids = re.findall(rf"^\d+: FLOCK +\w+ +\w+ +(\d+) {file} ", text, re.MULTILINE)
    return f"pid {', '.join(sorted(set(pids), key=int))} on {socket.gethostname()}" if pids else ""


class Claims:
    """The claims of one open partial. ``fd`` is its lock file; None works alone (no kernel locks)."""

    def __init__(self, io: FsIo, fd: int | None) -> None:
        self._io = io
        self._fd = fd
        self._changed = threading.Condition()
        self._held: set[int] = set()

    # -- presence -------------------------------------------------------------------------

    def try_presence(self, *, exclusive: bool) -> bool:
        """Be there, alone or among others; changes what is held already. Raises: LocksUnavailable."""
        if self._fd is None:
            return True
        with _translating_locks():
            return self._io.try_lock_range(self._fd, PRESENCE, 1, exclusive=exclusive)

    # -- claims ---------------------------------------------------------------------------

    @contextmanager
    def one(self, claim: int, poll: Poll, deadline: Deadline) -> Iterator[None]:
        """Hold one claim."""
        with self._holding(claim, claim, 1, poll, deadline, f"claim {claim}"):
            self._write_holder(claim)
            yield

    @contextmanager
    def all(self, poll: Poll, deadline: Deadline) -> Iterator[None]:
        """Hold every claim."""
        with self._holding(_ALL, 0, PRESENCE, poll, deadline, "the shard"):
            yield

    @contextmanager
    def _holding(
        self, key: int, start: int, length: int, poll: Poll, deadline: Deadline, what: str
    ) -> Iterator[None]:
        self._enter_table(key, poll, deadline, what)
        try:
            fd = self._fd
            if fd is not None:
                wait_until(
                    lambda: self._io.try_lock_range(fd, start, length, exclusive=True),
                    poll,
                    deadline,
                    what,
                    lambda: self._read_holder(start),
                )
            try:
                yield
            finally:
                if fd is not None:
                    self._unlock(fd, start, length)
        finally:
            with self._changed:
                self._held.discard(key)
                self._changed.notify_all()

    def _unlock(self, fd: int, start: int, length: int) -> None:
        try:
            self._io.unlock_range(fd, start, length)
        except OSError as err:  # must not hide what happened inside; closing the file unlocks too
            log.warning("cannot unlock a claim: %s", err)

    def _enter_table(self, key: int, poll: Poll, deadline: Deadline, what: str) -> None:
        while True:
            with self._changed:
                blocked = bool(self._held) if key == _ALL else bool(self._held & {key, _ALL})
                if not blocked:
                    self._held.add(key)
                    return
                if not deadline.is_over():
                    self._changed.wait(_LONGEST_PAUSE_S)
            poll()
            deadline.check(what, _me)

    # -- who holds it, for messages only --------------------------------------------------

    def _write_holder(self, claim: int) -> None:
        if self._fd is not None:
            with suppress(OSError):
                text = _me().encode()[:_HOLDER_BYTES].ljust(_HOLDER_BYTES)
                self._io.pwrite(self._fd, text, claim * _HOLDER_BYTES)

    def _read_holder(self, claim: int) -> str:
        if self._fd is None:
            return ""
        with suppress(OSError):
            text = self._io.pread(self._fd, _HOLDER_BYTES, claim * _HOLDER_BYTES)
            return text.strip(b" \0").decode("utf-8", "replace")
        return ""


def _me() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
