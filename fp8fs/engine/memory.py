"""Units served from memory while the store cannot be written: bands made on demand, the latest ones kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

import msgspec

from fp8fs.core.layout import Unit
from fp8fs.engine.cast import Draft
from fp8fs.engine.materialize import Materializer
from fp8fs.engine.matrix import Bands, data_item_bytes, matrix_runs
from fp8fs.engine.once import Outcome, Poll, closing_error, told
from fp8fs.engine.pool import URGENT, Pool, Task, Work

__all__ = ["MemoryServer"]

_SCALE_SHARE = 8


class _Sized(Protocol):
    def __len__(self) -> int: ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=_Sized)


class _Latest(Generic[K, V]):
    """The values used last, together at most ``budget`` long; one that is longer stays alone. The lock is a leaf."""

    def __init__(self, budget: int) -> None:
        self._lock = threading.Lock()
        self._budget = budget
        self._used = 0
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._used += len(value)
            while self._used > self._budget and len(self._values) > 1:
                _, dropped = self._values.popitem(last=False)
                self._used -= len(dropped)


BandKey = tuple[int, int, int]
"""View shard index, unit index, band number."""


class _BandWork(Work):
    """Makes one band once, however many wait for it."""

    def __init__(self, server: MemoryServer, key: BandKey) -> None:
        super().__init__(URGENT)
        self.outcome = Outcome()
        self.data = b""
        self.scales = b""
        self._server = server
        self._key = key

    def take(self) -> Task | None:
        if self.finished:
            return None
        self.finished = True
        return self._run

    def abandon(self) -> None:
        super().abandon()
        self.outcome.finish(closing_error())

    def _run(self) -> None:
        try:
            self.data, self.scales = self._server.make(self._key)
        except Exception as err:  # noqa: BLE001 - a worker reports to those who wait
            self._server.done(self._key)
            self.outcome.finish(told(err))
        else:
            self._server.done(self._key, self.data, self.scales)
            self.outcome.finish()


class MemoryServer:
    """Gives bytes of units without a store. Bands are made on worker threads; callers wait.

    At most ``budget_bytes`` of data are kept, and an eighth of that in scales, which would else cost a whole unit.
    """

    def __init__(self, materializer: Materializer, pool: Pool, budget_bytes: int) -> None:
        self._materializer = materializer
        self._pool = pool
        self._data: _Latest[BandKey, bytes] = _Latest(budget_bytes)
        self._scales: _Latest[BandKey, bytes] = _Latest(budget_bytes // _SCALE_SHARE)
        self._lock = threading.Lock()
        self._works: dict[BandKey, _BandWork] = {}

    def read_data(self, shard: int, index: int, start: int, length: int, poll: Poll) -> bytes:
        """Bytes [start, start + length) of a unit's data."""
        unit = self._unit(shard, index)
        band_bytes = Bands(unit).elems * data_item_bytes(unit)
        parts: list[bytes] = []
        for begin, left in matrix_runs(unit, start, length):
            while left > 0:
                band, inner = divmod(begin, band_bytes)
                data = self._data.get((shard, index, band))
                if data is None:
                    data = self._made((shard, index, band), poll).data
                part = data[inner : inner + left]
                parts.append(part)
                begin, left = begin + len(part), left - len(part)
        return b"".join(parts)

    def read_scale(self, shard: int, index: int, start: int, length: int, poll: Poll) -> bytes:
        """Bytes [start, start + length) of a unit's scales."""
        unit = self._unit(shard, index)
        bands = Bands(unit)
        parts: list[bytes] = []
        for band in range(bands.count):
            begin, size = (0, 4) if unit.scheme == "per_tensor" else bands.scale(band)
            if begin + size <= start:
                continue
            if begin >= start + length:
                break
            scales = self._scales.get((shard, index, band))
            if scales is None:
                scales = self._made((shard, index, band), poll).scales
            parts.append(scales[max(0, start - begin) : start + length - begin])
            if unit.scheme == "per_tensor":
                break
        return b"".join(parts)

    def make(self, key: BandKey) -> tuple[bytes, bytes]:
        """One band's data, rows in matrix order, and scales, from the source. Runs on a worker thread.

        The source is checked before and after, so nothing of a changed source is served.
        """
        shard, index, band = key
        unit = self._unit(shard, index)
        sources = {piece.shard for piece in unit.pieces}
        self._materializer.reader.check(sources)
        draft = self._draft(shard, index)
        item = data_item_bytes(unit)
        start, length = draft.bands.data(band)
        out = bytearray(length * item)
        base = unit.data.start + start * item

        def write(data: memoryview, file_offset: int) -> None:
            out[file_offset - base : file_offset - base + len(data)] = data

        self._materializer.cast(shard, draft, band, write)
        self._materializer.reader.check(sources)
        begin, size = (0, 4) if unit.scheme == "per_tensor" else draft.bands.scale(band)
        return bytes(out), bytes(draft.scales[begin : begin + size])

    def done(self, key: BandKey, data: bytes = b"", scales: bytes = b"") -> None:
        """A band's work has ended; what it made is kept for a while."""
        if data:
            self._data.put(key, data)
        if scales:
            self._scales.put(key, scales)
        with self._lock:
            self._works.pop(key, None)

    def _draft(self, shard: int, index: int) -> Draft:
        draft = self._materializer.draft(shard, index, {}, URGENT)
        if draft.unit.row_runs:
            draft.unit = msgspec.structs.replace(draft.unit, row_runs=())
        return draft

    def _made(self, key: BandKey, poll: Poll) -> _BandWork:
        with self._lock:
            work = self._works.get(key)
            fresh = work is None
            if work is None:
                work = self._works[key] = _BandWork(self, key)
        if fresh:
            self._pool.add(work)
        work.outcome.wait(poll)
        return work

    def _unit(self, shard: int, index: int) -> Unit:
        return self._materializer.plan.shards[shard].units[index]
