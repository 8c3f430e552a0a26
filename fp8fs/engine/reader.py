"""Inline reads of one view shard, by offset: what is missing is made first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fp8fs.core.layout import ViewShard
from fp8fs.engine.fill import Filler
from fp8fs.engine.memory import MemoryServer
from fp8fs.engine.once import Poll
from fp8fs.engine.pool import URGENT
from fp8fs.engine.shard import Phase, ShardState
from fp8fs.engine.works import UnitRequest
from fp8fs.errors import BadHandleError, StoreError

__all__ = ["ShardReader"]


class Span(NamedTuple):
    """Bytes [start, end) of a view shard file, all in unit ``unit``'s data or scales."""

    unit: int
    scale: bool
    start: int
    end: int


def spans(shard: ViewShard, units: Iterable[int], start: int, end: int) -> list[Span]:
    """The parts of bytes [start, end) of a view shard that are in these units, in file order."""
    found: list[Span] = []
    for index in units:
        unit = shard.units[index]
        for scale, extent in ((False, unit.data), (True, unit.scale)):
            if extent is not None:
                first = max(start, extent.start)
                last = min(end, extent.start + extent.length)
                if first < last:
                    found.append(Span(index, scale, first, last))
    return sorted(found, key=lambda span: span.start)


class ShardReader:
    """One open handle on a view shard. Thread-safe; close it once no read is under way.

    It holds descriptors of its own: they stay valid when the partial shard becomes the object.
    Lock order: the reader's lock (descriptors only), then the pool's.
    """

    def __init__(
        self,
        filler: Filler,
        memory: MemoryServer,
        state: ShardState,
        wait: Callable[[UnitRequest, Poll], None],
    ) -> None:
        self._filler = filler
        self._memory = memory
        self._state = state
        self._wait = wait
        self._since = filler.moment
        self._lock = threading.Lock()
        self._object_fd = -1
        self._partial_fd = -1
        self._partial_generation = -1
        self._stale_fds: list[int] = []
        self._closed = False

    def pread(self, offset: int, length: int, poll: Poll) -> bytes:
        """The bytes of the view file at *offset*, fewer only at its end. Waits for the units that it covers.

        *poll* runs at least every 0.1 s while waiting and may raise; the work goes on.
        Raises: NonFiniteTensorError, SourceChangedError, SourceInvalidError, DeviceError; never for a store failure.
        """
        shard = self._state.shard
        end = min(offset + length, shard.size)
        if offset >= end:
            return b""
        head = shard.preamble[offset:end]
        start = offset + len(head)
        return head + self._units(start, end, poll) if start < end else head

    def close(self) -> None:
        """Give the descriptors back. Repeatable."""
        with self._lock:
            self._closed = True
            fds = [self._object_fd, self._partial_fd, *self._stale_fds]
            self._object_fd = self._partial_fd = -1
            self._stale_fds = []
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _units(self, start: int, end: int, poll: Poll) -> bytes:
        """Bytes behind the preamble: from the store's file, else from memory."""
        state = self._state
        if state.object is not None:
            sealed = self._from_file((), start, end)
            if sealed is not None:
                return sealed
        units = state.cutter.cut(start, end - start).units
        data = self._from_file(units, start, end)
        if data is None and self._filler.trouble.usable():
            request = UnitRequest(self._filler, state, units, self._since, URGENT)
            try:
                self._wait(request, poll)
            except StoreError:
                data = None
            else:
                data = self._from_file(units, start, end)
        if data is None:
            parts = spans(state.shard, units, start, end)
            data = b"".join(self._from_memory(part, poll) for part in parts)
        return data

    def _from_memory(self, part: Span, poll: Poll) -> bytes:
        unit = self._state.shard.units[part.unit]
        length = part.end - part.start
        if part.scale and unit.scale is not None:
            begin = part.start - unit.scale.start
            return self._memory.read_scale(self._state.index, part.unit, begin, length, poll)
        begin = part.start - unit.data.start
        return self._memory.read_data(self._state.index, part.unit, begin, length, poll)

    def _from_file(self, units: Sequence[int], start: int, end: int) -> bytes | None:
        """The bytes, if the store has all of these units in a file that can be read."""
        try:
            fd = self._descriptor(units)
            return None if fd < 0 else _read_all(fd, start, end)
        except OSError:
            return None

    def _descriptor(self, units: Sequence[int]) -> int:
        """A descriptor of a file that holds all of these units, or -1."""
        state = self._state
        with self._lock:
            if self._closed:
                raise BadHandleError("the handle is closed")
            if self._object_fd >= 0:
                return self._object_fd
            with self._filler.pool.changed:
                path = state.object
                if path is None:
                    if state.phase is not Phase.OPEN or not state.all_made(units):
                        return -1
                    if self._partial_generation != state.generation and state.partial is not None:
                        self._stale_fds.append(self._partial_fd)
                        self._partial_fd = os.dup(state.partial.fd)
                        self._partial_generation = state.generation
                    return self._partial_fd
            self._object_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            return self._object_fd


def _read_all(fd: int, start: int, end: int) -> bytes | None:
    """Bytes [start, end) of a file; None if it is shorter."""
    data = os.pread(fd, end - start, start)
    while data and len(data) < end - start:
        more = os.pread(fd, end - start - len(data), start + len(data))
        if not more:
            return None
        data += more
    return data or None
