"""Find the weights that cannot be quantized because they hold NaN or Inf, before anything is mounted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from fp8fs.core.layout import Plan
from fp8fs.core.quantizer import Quantizer
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.cast import bad_index
from fp8fs.engine.matrix import Run, SourceReader, item_bytes
from fp8fs.engine.once import POLL_S
from fp8fs.engine.pool import default_workers
from fp8fs.engine.stats import Counters
from fp8fs.errors import NonFiniteTensorError
from fp8fs.source import Source

__all__ = ["NonFinite", "scan"]

_CHUNK_BYTES = 4 << 20


class NonFinite(msgspec.Struct, frozen=True):
    """A source tensor that holds NaN or Inf; ``index`` is the flat index of the first such element."""

    component: str
    tensor: str
    index: int


class _Chunk(NamedTuple):
    """A run of a weight: ``element`` is the flat index in the source tensor of its first element."""

    component: str
    tensor: str
    dtype: str
    element: int
    run: Run


def scan(
    plan: Plan,
    source: Source,
    quantizer: Quantizer,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
    drop_source: bool = False,
) -> list[NonFinite]:
    """Read every weight that is to be quantized once; list those that hold NaN or Inf, in plan order.

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
            thread.start()
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
        self._reader = reader
        self._quantizer = quantizer
        self._buffers = buffers
        self._lock = threading.Lock()
        self._chunks = enumerate(_chunks(plan))
        self._found: dict[tuple[str, str], tuple[int, int]] = {}

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

    def findings(self) -> list[NonFinite]:
        """What was found, in plan order."""
        ordered = sorted(self._found.items(), key=lambda item: item[1])
        return [NonFinite(component, tensor, index) for (component, tensor), (_, index) in ordered]

    def _look(self, number: int, chunk: _Chunk) -> None:
        with self._buffers.lend(chunk.run.nbytes) as (buffer,):
            self._reader.read_run(chunk.run, buffer)
            self._reader.drop_run(chunk.run)
            bad = -1
            try:
                self._quantizer.amax(buffer, chunk.dtype)
            except NonFiniteTensorError as err:
                bad = chunk.element + bad_index(err)
        key = (chunk.component, chunk.tensor)
        with self._lock:
            self.done_bytes += chunk.run.nbytes
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
            for piece in unit.pieces:
                before = piece.file_offset - starts[piece.tensor]
                for at in range(0, piece.nbytes, _CHUNK_BYTES):
                    run = Run(
                        piece.shard, piece.file_offset + at, min(_CHUNK_BYTES, piece.nbytes - at)
                    )
                    yield _Chunk(
                        shard.component, piece.tensor, unit.dtype, (before + at) // size, run
                    )
