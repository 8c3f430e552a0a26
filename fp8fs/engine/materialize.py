"""Make the units of one claim: read, measure, cast, digest, write, commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from fp8fs.core.digest import bytes_digest
from fp8fs.core.layout import Plan, Unit
from fp8fs.core.quantizer import Quantizer
from fp8fs.core.scale_range import odd_scales_of, scales_sentence
from fp8fs.engine.amax import AmaxTable
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.cast import Draft, bad_index, cast_band, cast_tile, nonfinite_error
from fp8fs.engine.matrix import (
    Bands,
    Run,
    SourceReader,
    data_item_bytes,
    item_bytes,
    source_bytes,
    view_bytes,
)
from fp8fs.engine.pool import Pool
from fp8fs.engine.stats import Counters
from fp8fs.errors import NonFiniteTensorError
from fp8fs.store.store import Partial, UnitRecord

__all__ = ["SMALL_BYTES", "Materializer", "Sink"]

log = logging.getLogger(__name__)

SMALL_BYTES = 8 << 20
"""Units that have no more source bytes than this together are read once and made in one go."""

_GATHER_BYTES = 1 << 20
_ALIGN = 64


class Sink:
    """Where finished units go: a partial shard, and whoever wants to know at once."""

    def __init__(self, partial: Partial, on_made: Callable[[Sequence[int]], None]) -> None:
        self._partial = partial
        self._on_made = on_made

    @property
    def records(self) -> dict[int, UnitRecord]:
        return self._partial.records

    def write(self, data: memoryview, file_offset: int) -> None:
        self._partial.pwrite(data, file_offset)

    def expect(self, unit: Unit) -> None:
        """The unit's data will be written band by band."""
        self._partial.expect(unit.data.start, unit.data.length)

    def commit(self, records: Sequence[UnitRecord]) -> None:
        """Journal units whose bytes are written."""
        self._partial.commit(*records)
        self._on_made([record.unit for record in records])


class Materializer:
    """Turns claims into finished units. Runs on worker threads; its caller holds the claim's lease."""

    def __init__(
        self,
        plan: Plan,
        reader: SourceReader,
        buffers: BufferPool,
        pool: Pool,
        counters: Counters,
        amaxes: AmaxTable,
        quantizer: Callable[[], Quantizer],
    ) -> None:
        self.plan = plan
        self.reader = reader
        self.buffers = buffers
        self.pool = pool
        self.counters = counters
        self.amaxes = amaxes
        self.quantizer = quantizer

    def make(self, shard: int, wanted: Sequence[int], sink: Sink, priority: int) -> None:
        """Make these units of a shard and commit each.

        The source is checked before the first read and again before every commit: what was read from a source that
        changed meanwhile is never journaled.
        Raises: NonFiniteTensorError, DeviceError, SourceChangedError, SourceInvalidError, StoreError, Stopped.
        """
        units = self.plan.shards[shard].units
        self.reader.check(_sources(units[index] for index in wanted))
        if _small([units[index] for index in wanted]):
            self._commit(shard, self._make_small(shard, wanted, sink, priority), sink)
        else:
            self._make_large(shard, wanted, sink, priority)

    def draft(self, shard: int, index: int, records: dict[int, UnitRecord], priority: int) -> Draft:
        """A unit ready to be cast: its scale known where it is one for all."""
        unit = self.plan.shards[shard].units[index]
        if unit.scheme != "per_tensor":
            return Draft(unit, 0.0, 0.0)
        amax = self.amaxes.get((shard, index), records, priority)
        return Draft(unit, amax, self.quantizer().tensor_scale(amax))

    def cast(
        self, shard: int, draft: Draft, band: int, write: Callable[[memoryview, int], None]
    ) -> None:
        """Make one band of a unit, wherever *write* puts it."""
        component = self.plan.shards[shard].component
        cast_band(self.quantizer, self.reader, self.buffers, component, draft, band, write)

    def _make_large(self, shard: int, wanted: Sequence[int], sink: Sink, priority: int) -> None:
        """Bands of all units on all idle workers; whoever makes the last band of a unit commits it."""
        drafts = [self.draft(shard, index, sink.records, priority) for index in wanted]
        tasks = [(at, band) for at, draft in enumerate(drafts) for band in range(draft.bands.count)]
        left = [draft.bands.count for draft in drafts]
        lock = threading.Lock()
        for draft in drafts:
            sink.expect(draft.unit)

        def make(number: int) -> None:
            at, band = tasks[number]
            draft = drafts[at]
            self.cast(shard, draft, band, sink.write)
            self.counters.progressed(draft.bands.data(band)[1] * item_bytes(draft.unit.dtype))
            with lock:
                left[at] -= 1
                last = left[at] == 0
            if last:
                self._commit(shard, [_finish(draft, wanted[at], sink)], sink)
                # Bands end in any order, so here and there one of them left a neighbour's pages behind.
                self.reader.drop_bytes(draft.unit, 0, source_bytes(draft.unit))

        self.pool.parallel(len(tasks), make, priority)

    def _commit(self, shard: int, records: Sequence[UnitRecord], sink: Sink) -> None:
        units = [self.plan.shards[shard].units[record.unit] for record in records]
        self.reader.check(_sources(units))
        sink.commit(records)
        for record in records:
            self.amaxes.forget((shard, record.unit))
            self._tell_odd_scales(shard, record)
        self.counters.made(len(units), sum(map(source_bytes, units)), sum(map(view_bytes, units)))

    def _tell_odd_scales(self, shard: int, record: UnitRecord) -> None:
        planned = self.plan.shards[shard]
        odd = odd_scales_of(planned.component, planned.units[record.unit], record.amax)
        for each in odd:
            log.warning("%s: %s", planned.path, scales_sentence([each]))
        if odd:
            self.counters.odd_scales(len(odd))

    def _make_small(
        self, shard: int, wanted: Sequence[int], sink: Sink, priority: int
    ) -> list[UnitRecord]:
        """All bytes of these units in one buffer, read once, written in as few runs as they have in the view."""
        units = self.plan.shards[shard].units
        amaxes = self._amaxes_outside(shard, wanted, sink, priority)
        layout = _SourceLayout([units[index] for index in wanted])
        largest = max(_longest_run(units[index]) for index in wanted)
        total = sum(view_bytes(units[index]) for index in wanted)
        gather_bytes = max(largest, min(total, _GATHER_BYTES)) + _ALIGN
        records: list[UnitRecord] = []
        with self.buffers.lend(layout.nbytes, gather_bytes) as (source, gather_buffer):
            for at, run in layout.runs:
                self.reader.read_run(run, source[at : at + run.nbytes])
            matrices = {
                index: source[at : at + source_bytes(units[index])]
                for index, at in zip(wanted, layout.places, strict=True)
            }
            gather = _Gather(gather_buffer, sink.write)
            for index in wanted:
                self.pool.check()
                if units[index].scheme == "per_tensor" and index not in amaxes:
                    self._measure_inside(shard, index, matrices, amaxes)
                records.append(
                    self._cast_small(shard, index, amaxes.get(index, 0.0), matrices[index], gather)
                )
            gather.flush()
        for _, run in layout.runs:
            self.reader.drop_run(run)
        self.counters.progressed(sum(source_bytes(units[index]) for index in wanted))
        return records

    def _amaxes_outside(
        self, shard: int, wanted: Sequence[int], sink: Sink, priority: int
    ) -> dict[int, float]:
        """amax of the per_tensor units for which it is known, or needs bytes of other units than *wanted*.

        Measured before any buffer is borrowed: who holds a buffer waits for nobody.
        """
        units, chosen, records = self.plan.shards[shard].units, set(wanted), sink.records
        amaxes: dict[int, float] = {}
        for index in wanted:
            if units[index].scheme != "per_tensor":
                continue
            value = self.amaxes.known((shard, index), records)
            if value is None:
                members = self.amaxes.members((shard, index))
                if not all(where == shard and other in chosen for where, other in members):
                    value = self.amaxes.get((shard, index), records, priority)
            if value is not None:
                amaxes[index] = value
        return amaxes

    def _measure_inside(
        self, shard: int, index: int, matrices: dict[int, memoryview], amaxes: dict[int, float]
    ) -> None:
        """amax of a unit and all that share its scale, from bytes that are here already."""
        members = [other for _, other in self.amaxes.members((shard, index))]
        value = max(self.amaxes.measure((shard, other), 0, matrices[other]) for other in members)
        for other in members:
            amaxes[other] = value
        self.amaxes.put((shard, index), value)

    def _cast_small(
        self, shard: int, index: int, amax: float, source: memoryview, gather: _Gather
    ) -> UnitRecord:
        unit = self.plan.shards[shard].units[index]
        scale = self.quantizer().tensor_scale(amax) if unit.scheme == "per_tensor" else 0.0
        draft = Draft(unit, amax, scale)
        size, data_size = item_bytes(unit.dtype), data_item_bytes(unit)
        out = gather.place(unit.data.start, unit.data.length)
        for band in range(draft.bands.count):
            for number, tile in draft.bands.tiles(band):
                start = tile.row * unit.cols + tile.col
                end = start + tile.rows * tile.cols
                part = source[start * size : end * size]
                data = out[start * data_size : end * data_size]
                if not unit.scheme:
                    data[:] = part
                else:
                    try:
                        cast_tile(self.quantizer(), draft, tile, part, data)
                    except NonFiniteTensorError as err:
                        component = self.plan.shards[shard].component
                        bad = start + bad_index(err)
                        raise nonfinite_error(component, unit, bad, err) from None
                draft.digest(number, part, data)
        if unit.scale is not None:
            gather.place(unit.scale.start, unit.scale.length)[:] = draft.scales
        return _record(draft, index)


class _SourceLayout:
    """Where the matrices of some units go in one buffer, so that neighbours in SRC are read in one call."""

    __slots__ = ("nbytes", "places", "runs")

    def __init__(self, units: Sequence[Unit]) -> None:
        self.places: list[int] = []
        self.runs: list[tuple[int, Run]] = []
        at = 0
        for unit in units:
            first = unit.pieces[0]
            if at % item_bytes(unit.dtype) or not self._continues(
                first.shard, first.file_offset, at
            ):
                at = -(-at // _ALIGN) * _ALIGN
            self.places.append(at)
            for piece in unit.pieces:
                if self._continues(piece.shard, piece.file_offset, at):
                    begin, run = self.runs[-1]
                    self.runs[-1] = (begin, run._replace(nbytes=run.nbytes + piece.nbytes))
                else:
                    self.runs.append((at, Run(piece.shard, piece.file_offset, piece.nbytes)))
                at += piece.nbytes
        self.nbytes = at

    def _continues(self, shard: int, file_offset: int, at: int) -> bool:
        """Whether bytes there follow the last run, in SRC and in the buffer."""
        if not self.runs:
            return False
        begin, run = self.runs[-1]
        return (
            run.shard == shard
            and run.file_offset + run.nbytes == file_offset
            and begin + run.nbytes == at
        )


class _Gather:
    """Joins bytes that follow each other in the view shard into one write."""

    def __init__(self, buffer: memoryview, write: Callable[[memoryview, int], None]) -> None:
        self._buffer = buffer
        self._write = write
        self._file_start = 0
        self._begin = 0
        self._end = 0

    def place(self, file_offset: int, nbytes: int) -> memoryview:
        """Room for these bytes of the shard; filled by the caller before the next call. As aligned as in the file."""
        follows = self._file_start + self._end - self._begin == file_offset
        if not follows or self._end + nbytes > len(self._buffer):
            self.flush()
            self._file_start = file_offset
            self._begin = self._end = file_offset % _ALIGN
        at = self._end
        self._end += nbytes
        return self._buffer[at : self._end]

    def flush(self) -> None:
        """Write what was collected."""
        if self._end > self._begin:
            self._write(self._buffer[self._begin : self._end], self._file_start)
        self._begin = self._end


def _finish(draft: Draft, index: int, sink: Sink) -> UnitRecord:
    """Write a unit's scales, where they were not written with the data."""
    if draft.unit.scale is not None:
        sink.write(memoryview(draft.scales), draft.unit.scale.start)
    return _record(draft, index)


def _record(draft: Draft, index: int) -> UnitRecord:
    input_digest, data_digest = draft.digests()
    return UnitRecord(index, draft.amax, input_digest, data_digest, bytes_digest(draft.scales))


def _small(units: Sequence[Unit]) -> bool:
    """Whether these fit one buffer, each tile of them in one run."""
    if sum(map(source_bytes, units)) > SMALL_BYTES or any(
        unit.row_runs or unit.pitch for unit in units
    ):
        return False
    return all(
        (unit.rows == 1 and unit.scheme != "per_channel") or Bands(unit).first.cols == unit.cols
        for unit in units
    )


def _longest_run(unit: Unit) -> int:
    return max(unit.data.length, unit.scale.length if unit.scale else 0)


def _sources(units: Iterable[Unit]) -> set[int]:
    return {piece.shard for unit in units for piece in unit.pieces}
