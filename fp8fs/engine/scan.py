"""Read every weight once, before anything is mounted: NaN and Inf, weights of zeros, scales that a reader cannot keep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from fp8fs.core.layout import Plan, Unit
from fp8fs.core.quantizer import Quantizer
from fp8fs.core.scale_range import OddScale, odd_scales_of
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.cast import bad_index
from fp8fs.engine.matrix import SourceReader, item_bytes, stored_element
from fp8fs.engine.once import POLL_S
from fp8fs.engine.pool import default_workers, start
from fp8fs.engine.stats import Counters
from fp8fs.errors import NonFiniteTensorError
from fp8fs.source import Source

__all__ = ["Findings", "NonFinite", "Zeros", "scan"]

_CHUNK_BYTES = 4 << 20


class NonFinite(msgspec.Struct, frozen=True):
    """A source tensor that holds NaN or Inf; ``index`` is the flat index of the first such element."""

    component: str
    tensor: str
    index: int


class Zeros(msgspec.Struct, frozen=True):
    """A source tensor that holds nothing but zeros."""

    component: str
    tensor: str


class Findings(msgspec.Struct, frozen=True):
    """What a scan found, each in plan order."""

    non_finite: tuple[NonFinite, ...] = ()
    zeros: tuple[Zeros, ...] = ()
    odd_scales: tuple[OddScale, ...] = ()


class _Chunk(NamedTuple):
    """Bytes [start, start + nbytes) of a unit, all of one source tensor: the element before which there are n in the unit
    has n - ``origin`` before it in the tensor."""

    component: str
    tensor: str
    unit: Unit
    start: int
    nbytes: int
    origin: int


def scan(
    plan: Plan,
    source: Source,
    quantizer: Quantizer,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    drop_source: bool = False,
) -> Findings:
    """Read every weight that is to be quantized once; say which hold NaN or Inf, or zeros alone, or get an odd scale.

    Memory: a buffer for each worker, and a number for each tensor.
    *progress*: called about every 0.1 s and at the end, on this thread, with (source bytes read, source bytes in all); it may raise.
    Raises: SourceChangedError, SourceInvalidError, DeviceError.
    """
    count = workers or default_workers()
    counters = Counters(shards_total=len(plan.shards), units_total=0, bytes_total=0)
    reader = SourceReader(source, plan.source_shards, counters, drop=drop_source)
    job = _Scan(plan, reader, quantizer, BufferPool(count * _CHUNK_BYTES))
    reader.check(job.sources)
    threads = [
        threading.Thread(target=job.work, name=f"fp8fs-scan-{number}", daemon=True)
        for number in range(count)
    ]
    try:
        for thread in threads:
            start(thread)
        for thread in threads:
            while thread.is_alive():
                thread.join(POLL_S)
                if progress is not None and thread.is_alive():
                    progress(job.done_bytes, job.total_bytes)
        if progress is not None:
            progress(job.done_bytes, job.total_bytes)
    finally:
        job.stop = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if job.error is not None:
        raise job.error
    reader.check(job.sources)
    return job.findings()


class _Scan:
    """The state that the scanning threads share. The lock guards the iterator and the findings, never a read."""

    def __init__(
        self, plan: Plan, reader: SourceReader, quantizer: Quantizer, buffers: BufferPool
    ) -> None:
        self.sources: set[int] = set()
        self.total_bytes = 0
        for shard in plan.shards:
            for unit in shard.units:
                if unit.is_quantized:
                    self.sources.update(piece.shard for piece in unit.pieces)
                    self.total_bytes += sum(piece.nbytes for piece in unit.pieces)
        self.done_bytes = 0
        self.stop = False
        self.error: Exception | None = None
        self._plan = plan
        self._reader = reader
        self._quantizer = quantizer
        self._buffers = buffers
        self._lock = threading.Lock()
        self._chunks = enumerate(_chunks(plan))
        self._found: dict[tuple[str, str], tuple[int, int]] = {}
        self._amax: dict[tuple[str, str], float] = {}

    def work(self) -> None:
        """Take chunks until there are none, on one thread."""
        try:
            while not self.stop:
                with self._lock:
                    number, chunk = next(self._chunks, (0, None))
                if chunk is None:
                    return
                self._look(number, chunk)
        except Exception as err:  # noqa: BLE001 - raised by scan() on its own thread
            self.error = self.error or err
            self.stop = True

    def findings(self) -> Findings:
        """What was found, in plan order."""
        ordered = sorted(self._found.items(), key=lambda item: item[1])
        zeros: dict[tuple[str, str], None] = {}
        odd: dict[OddScale, None] = {}
        for shard in self._plan.shards:
            for unit in shard.units:
                if not unit.is_quantized:
                    continue
                for piece in unit.pieces:
                    key = (shard.component, piece.tensor)
                    if self._amax.get(key) == 0.0 and key not in self._found:
                        zeros[key] = None
                amax = self._scale_amax(shard.component, unit)
                odd.update(dict.fromkeys(odd_scales_of(shard.component, unit, amax)))
        return Findings(
            tuple(NonFinite(*key, index) for key, (_, index) in ordered),
            tuple(Zeros(*key) for key in zeros),
            tuple(odd),
        )

    def _scale_amax(self, component: str, unit: Unit) -> float:
        """The largest magnitude of all that share the unit's scale; 0 if one of them cannot be quantized."""
        units = [unit]
        if unit.group >= 0:
            members = self._plan.groups[unit.group].members
            units = [self._plan.shards[shard].units[index] for shard, index in members]
        names = {(component, piece.tensor) for member in units for piece in member.pieces}
        if not names.isdisjoint(self._found):
            return 0.0
        return max(self._amax.get(name, 0.0) for name in names)

    def _look(self, number: int, chunk: _Chunk) -> None:
        unit = chunk.unit
        with self._buffers.lend(chunk.nbytes) as (buffer,):
            self._reader.read_bytes(unit, chunk.start, buffer)
            self._reader.drop_bytes(unit, chunk.start, chunk.nbytes)
            bad, amax = -1, 0.0
            try:
                amax = self._quantizer.amax(buffer, unit.dtype)
            except NonFiniteTensorError as err:
                element = chunk.start // item_bytes(unit.dtype) + bad_index(err)
                bad = stored_element(unit, element) - chunk.origin
        key = (chunk.component, chunk.tensor)
        with self._lock:
            self.done_bytes += chunk.nbytes
            self._amax[key] = max(self._amax.get(key, 0.0), amax)
            if bad >= 0:
                self._found[key] = min(self._found.get(key, (number, bad)), (number, bad))


def _chunks(plan: Plan) -> Iterator[_Chunk]:
    """Every weight that is to be quantized, tensor by tensor, in runs that fit a buffer."""
    for shard in plan.shards:
        for unit in shard.units:
            if not unit.is_quantized:
                continue
            size = item_bytes(unit.dtype)
            starts: dict[str, int] = {}  # of each tensor, whose rows may be in any order
            for piece in unit.pieces:
                known = starts.get(piece.tensor, piece.file_offset)
                starts[piece.tensor] = min(known, piece.file_offset)
            start = 0
            for piece in unit.pieces:
                origin = (start - piece.file_offset + starts[piece.tensor]) // size
                for at in range(0, piece.nbytes, _CHUNK_BYTES):
                    nbytes = min(_CHUNK_BYTES, piece.nbytes - at)
                    yield _Chunk(shard.component, piece.tensor, unit, start + at, nbytes, origin)
                start += piece.nbytes
