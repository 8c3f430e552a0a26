"""A view shard in the making: sparse data, journal and leases, shared by threads and processes.

    partial/<object id>/data      full size from the start; what no record speaks of means nothing
                        journal   finished units and barriers (journal.py)
                        lock      claims and presence (lease.py)

What a crash leaves is repaired by the next one who has the partial to itself: records behind the last barrier count
only if the bytes on the disk have their digests. Where the filesystem has no locks, everybody works in a private
directory instead (holder.py); then work may be done twice, with the same result, and who is gone is succeeded.

Lock order: ``_sync`` before ``_mutex``; claims (lease.py) are taken with neither held.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from fp8fs.errors import StoreDamagedError, StoreError
from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import (
    is_named,
    storing,
    temporary_name,
)
from fp8fs.store.holder import Holder, filesystem_now_ns, try_adopt
from fp8fs.store.journal import Journal, barrier_line, unit_line
from fp8fs.store.lease import Claims, Deadline, LocksUnavailable, wait_until
from fp8fs.store.objects import Objects
from fp8fs.store.places import Places
from fp8fs.store.staging import create, has_data, open_data, recover, retire
from fp8fs.store.types import Poll, Published, ShardSpec, UnitRecord, UnitSpan, no_poll

__all__ = ["Partial", "open_partial"]

log = logging.getLogger(__name__)

BARRIER_BYTES = 256 << 20
BARRIER_S = 1.0
"""Power loss costs at most what was made since the last barrier: this much, or this long."""
WRITE_BEHIND_BYTES = 1 << 20
"""Writes of this size are begun on the disk at once, so that a barrier finds little left to wait for."""


class Partial:
    """A view shard in the making. Thread-safe. close() when done; context manager."""

    fd: int
    """The data file, open for reading and writing; stays valid after the rename, until close()."""

    records: dict[int, UnitRecord]
    """Finished units, as far as known. Grows while others commit: look up with ``in`` or get(), copy before iterating."""

    def __init__(
        self, io: FsIo, places: Places, objects: Objects, spec: ShardSpec, path: Path
    ) -> None:
        self.spec = spec
        self.path = path
        self.records = {}
        self.fd = -1
        self._io = io
        self._places = places
        self._objects = objects
        self._open_fds = ExitStack()
        self._sync = threading.Lock()
        self._mutex = threading.Lock()
        self._unsynced_bytes = 0
        self._synced_at = time.monotonic()
        self._uncovered = False  # a record stands behind the last barrier
        self._named = False  # the names of our files are on the disk
        self._lost = ""
        self._sealed = False
        self._holder: Holder | None = None  # of a private partial
        self._claims = Claims(io, None)
        self._dir_fd = self._keep(io.open_dir(path))

    def _keep(self, fd: int) -> int:
        self._open_fds.callback(self._io.close, fd)
        return fd

    # -- opening --------------------------------------------------------------------------

    def _join(self, *, private: bool, poll: Poll, deadline: Deadline) -> bool:
        """Be present, alone if possible. Returns whether alone. Raises: LocksUnavailable; FileNotFoundError."""
        fd = self._keep(self._io.open("lock", os.O_RDWR | os.O_CREAT, dir_fd=self._dir_fd))
        if private:
            self._holder = Holder(self._io, fd)
        else:
            self._claims = Claims(self._io, fd)
        if self._claims.try_presence(exclusive=True):
            return True
        wait_until(
            lambda: self._claims.try_presence(exclusive=False),
            poll,
            deadline,
            f"shard {self.spec.object_id} (being recovered)",
        )
        return False

    def _open_journal(self) -> Journal:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        fd = self._keep(self._io.open("journal", flags, dir_fd=self._dir_fd))
        return Journal(self._io, fd, self.spec.unit_count)

    def _start(self, spans: Sequence[UnitSpan], *, alone: bool, poll: Poll) -> None:
        """Files open, recovered if alone, records read."""
        self.fd = self._keep(open_data(self._io, self.path, self._dir_fd))
        self._journal = self._open_journal()
        if alone:
            replaced = recover(
                self._io,
                self.spec,
                self.path,
                self.fd,
                self._journal,
                spans,
                tmp=self._places.tmp,
                poll=poll,
            )
            if replaced:
                self._journal = self._open_journal()
            self._claims.try_presence(exclusive=False)
        elif not self._journal.is_for(self.spec):
            raise StoreDamagedError(
                f"the journal of shard {self.spec.object_id} is damaged while others use it",
                hint="end the other mounts and builds that use this store, then try again",
            )
        self.records.update(self._journal.read_new())

    def _is_current(self) -> bool:
        """Whether the directory and the data under our names are still the ones that we have open."""
        return is_named(self._io, self.fd, self.path / "data")

    # -- working --------------------------------------------------------------------------

    @contextmanager
    def claim(
        self, claim: int, *, poll: Poll = no_poll, timeout_s: float | None = None
    ) -> Iterator[None]:
        """Hold the lease of claim number *claim* (0 <= claim < unit_count), alone among all threads and processes.

        On entry ``records`` is fresh: look whether the units are made already. Raises: Published; StoreBusyError after
        *timeout_s*; whatever *poll* raises. A thread holds one claim at a time.
        """
        if not 0 <= claim < max(1, self.spec.unit_count):
            raise ValueError(f"no claim {claim} in a shard of {self.spec.unit_count} units")
        with ExitStack() as held:
            with storing(f"cannot claim a part of shard {self.spec.object_id}"):
                held.enter_context(self._claims.one(claim, poll, Deadline(timeout_s)))
            self.refresh()
            yield

    def refresh(self) -> None:
        """Read what others have journaled since. Raises: Published."""
        if self._sealed:
            raise Published
        with storing(f"cannot read the journal of shard {self.spec.object_id}"):
            if not self._is_current():
                raise Published
            if self._holder is not None:
                self._holder.beat()
            with self._mutex:
                self.records.update(self._journal.read_new())

    def pwrite(self, data: Buffer, file_offset: int) -> None:
        """Write all of *data*. The caller holds the claim of the unit that it belongs to."""
        if self._sealed:
            raise Published
        with storing(f"cannot write shard {self.spec.object_id}"):
            self._io.pwrite(self.fd, data, file_offset)
        nbytes = memoryview(data).nbytes
        if nbytes >= WRITE_BEHIND_BYTES:
            self._io.start_writing(self.fd, file_offset, nbytes)
        with self._mutex:
            self._unsynced_bytes += nbytes

    def expect(self, file_offset: int, length: int) -> None:
        """These bytes are about to be written, in parts and in any order: one piece of the disk for all of them."""
        self._io.allocate(self.fd, file_offset, length)

    def pread(self, length: int, file_offset: int) -> bytes:
        """Read *length* bytes of the preamble or of finished units."""
        with storing(f"cannot read shard {self.spec.object_id}"):
            data = self._io.pread(self.fd, length, file_offset)
        if len(data) != length:
            raise StoreDamagedError(
                f"shard {self.spec.object_id} ends at byte {file_offset + len(data)}",
                expected=file_offset + length,
            )
        return data

    def commit(self, *records: UnitRecord) -> None:
        """Journal finished units, after their bytes are written and while their claim is held. One write for all."""
        self._check_usable()
        lines = b"".join(unit_line(record) for record in records)
        with storing(f"cannot write the journal of shard {self.spec.object_id}"):
            self._journal.append(lines)
            self._uncovered = (
                True  # after the append: a barrier clears it before it looks at the length
            )
            self.records.update({record.unit: record for record in records})
            if self._barrier_is_due() and self._sync.acquire(blocking=False):
                # Other threads go on committing meanwhile; whoever finds a barrier in work leaves it to that one.
                try:
                    self._barrier()
                finally:
                    self._sync.release()

    def missing(self) -> list[int]:
        """Units without a record, as far as known."""
        return [unit for unit in range(self.spec.unit_count) if unit not in self.records]

    def _check_usable(self) -> None:
        if self._sealed:
            raise Published
        if self._lost:
            raise StoreError(f"shard {self.spec.object_id} cannot be trusted: {self._lost}")

    # -- durability -----------------------------------------------------------------------

    def _barrier_is_due(self) -> bool:
        with self._mutex:
            waited_s = time.monotonic() - self._synced_at
            return self._unsynced_bytes >= BARRIER_BYTES or waited_s >= BARRIER_S

    def _barrier(self) -> None:
        """What the journal says up to now is on the disk, and so is a line that says so. The caller holds ``_sync``.

        A failed sync is not repeated: the kernel then holds pages for clean that never reached the disk, and a second
        try would succeed. Nothing here can be trusted any more, so the partial is given up.
        """
        with self._mutex:
            self._unsynced_bytes = 0
            self._uncovered = False
        if not self._named:
            self._io.fsync(self._dir_fd)
            self._io.fsync_dir(self.path.parent)
            self._named = True
        covered = self._journal.size()
        self._sync_or_lose(self.fd)
        self._journal.append(barrier_line(covered))
        self._sync_or_lose(self._journal.fd)
        with self._mutex:
            self._synced_at = time.monotonic()

    def _sync_or_lose(self, fd: int) -> None:
        try:
            self._io.fdatasync(fd)
        except OSError as err:
            self._lost = f"a sync failed: {err.strerror}"
            raise

    def seal(self, facts: Any, *, poll: Poll = no_poll, timeout_s: float | None = None) -> Path:
        """Publish the shard: when this returns, the object's path exists for good. The caller holds no claim.

        *facts*: JSON-ready data for the record. Also returns when somebody else published it. Raises: StoreError if units
        are missing; StoreBusyError; StoreFullError; Published if the partial was given up by somebody else.
        """
        with ExitStack() as held, storing(f"cannot seal shard {self.spec.object_id}"):
            held.enter_context(self._claims.all(poll, Deadline(timeout_s)))
            if (published := self._objects.find(self.spec)) is not None:
                self._finish()
                return published
            self.refresh()
            self._check_usable()
            if missing := self.missing():
                raise StoreError(
                    f"shard {self.spec.object_id}: {len(missing)} of {self.spec.unit_count} units are not made",
                    first_missing=missing[0],
                )
            with self._sync:
                self._barrier()
            try:
                path = self._objects.publish(
                    self.spec,
                    [self.records[unit] for unit in range(self.spec.unit_count)],
                    facts,
                    fd=self.fd,
                    partial_dir_fd=self._dir_fd,
                )
            except OSError:
                self._sealed = not self._is_current()  # renamed: only its directory's sync failed
                raise
            self._finish()
            return path

    def _finish(self) -> None:
        """The object is published: nothing is written here any more, and the directory goes."""
        self._sealed = True
        retire(self._io, self._places, self.path)

    # -- closing --------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back. Repeatable. Finished units stay for whoever opens the partial next."""
        with self._mutex:
            stack, self._open_fds = self._open_fds, ExitStack()
        try:
            if self._lost or (self._holder is not None and not self.records):
                self._give_up()
            elif self._uncovered and not self._sealed:
                with storing(f"cannot sync shard {self.spec.object_id}"), self._sync:
                    self._barrier()
        except StoreError as err:
            log.warning("%s; units behind the last barrier are checked at the next use", err)
        finally:
            self._release()
            stack.close()

    def _release(self) -> None:
        """Let others go on with a private partial, unless it is theirs already: then its lock file speaks of them."""
        with suppress(OSError):
            if self._holder is not None and is_named(self._io, self._dir_fd, self.path):
                self._holder.release()

    def _give_up(self) -> None:
        """Remove what cannot be trusted or is worth nothing, unless others still work on it (their own sync will tell them)."""
        if self._sealed:
            return
        with suppress(OSError, StoreError), self._claims.all(no_poll, Deadline(0.0)):
            if self._is_current():
                if self._lost:
                    log.warning("shard %s is given up: %s", self.spec.object_id, self._lost)
                retire(self._io, self._places, self.path)

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- opening and creating -----------------------------------------------------------------


def open_partial(
    io: FsIo,
    places: Places,
    objects: Objects,
    spec: ShardSpec,
    spans: Sequence[UnitSpan],
    *,
    poll: Poll,
    timeout_s: float | None,
) -> Partial:
    """The partial of a shard, created or joined, recovered if we are alone. Raises: Published; LocksUnavailable never."""
    deadline = Deadline(timeout_s)
    path = places.partial(spec.object_id)
    try:
        for attempt in itertools.count():
            try:
                return _try_open(
                    io, places, objects, spec, spans, path, poll, deadline, private=False
                )
            except FileNotFoundError:
                create(io, places, spec, path, shared=True)
            except _Stale:
                pass
            poll()
            deadline.check(f"shard {spec.object_id}", str)
            if attempt:  # somebody is publishing or giving it up just now
                time.sleep(0.002)
    except LocksUnavailable as err:
        log.warning("the store has no locks here (%s); working in private", err)
    now_ns = filesystem_now_ns(io, places.tmp)
    while True:
        path = places.partials / temporary_name(spec.object_id)
        if not try_adopt(io, places.partials, spec.object_id, path, now_ns):
            create(io, places, spec, path, shared=False)
        with suppress(FileNotFoundError, _Stale):  # somebody else adopted it in the same moment
            return _try_open(io, places, objects, spec, spans, path, poll, deadline, private=True)
        poll()
        deadline.check(f"shard {spec.object_id}", str)


class _Stale(Exception):  # noqa: N818 - an answer, not an error
    """The directory that was opened is not the one of that name any more."""


def _try_open(
    io: FsIo,
    places: Places,
    objects: Objects,
    spec: ShardSpec,
    spans: Sequence[UnitSpan],
    path: Path,
    poll: Poll,
    deadline: Deadline,
    *,
    private: bool,
) -> Partial:
    partial = Partial(io, places, objects, spec, path)
    try:
        alone = partial._join(private=private, poll=poll, deadline=deadline)
        if not is_named(io, partial._dir_fd, path):
            raise _Stale
        if objects.find(spec) is not None:
            if alone:
                retire(io, places, path)
            raise Published
        if alone and not has_data(io, partial._dir_fd):
            retire(io, places, path)  # its object was published once, and is gone
            raise _Stale
        partial._start(spans, alone=alone, poll=poll)
    except BaseException:
        partial.close()
        raise
    return partial
