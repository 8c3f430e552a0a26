"""What the engine has done and is doing, as numbers that are cheap to take."""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec

from fp8fs.errors import Fp8fsError

__all__ = ["Counters", "EngineStats", "ErrorNote"]

_LAST_ERRORS = 32
_RATE_WINDOW_S = 5.0
_SAMPLE_S = 0.25


class ErrorNote(msgspec.Struct, frozen=True):
    """One failure as ``status`` shows it: the reader saw only EIO or SIGBUS. ``time`` is seconds since the epoch."""

    time: float
    code: str
    what: str
    hint: str
    facts: dict[str, str | int | float | bool | None]


class EngineStats(msgspec.Struct, frozen=True):
    """A moment of the engine.

    ``units_made``: made by this process; ``units_reused``: found finished in the store. ``bytes_in`` and
    ``bytes_out``: source and view bytes of the units made here; ``bytes_reused``: view bytes of the reused;
    ``bytes_total``: view bytes of all units. ``source_bytes_read``: everything read from SRC, second passes too.
    ``rate_bytes_s``: ``bytes_in`` per second over the last few seconds. ``in_flight``: claims being made;
    ``waiting``: callers that wait. ``bytes_failed``: view bytes that are not made, of shards that cannot be. ``odd_scales``:
    weights made here whose scale is outside what vLLM can load unchanged. ``degraded``: why the store is not written, or "".
    """

    shards_total: int
    shards_sealed: int
    units_total: int
    units_made: int
    units_reused: int
    bytes_total: int
    bytes_in: int
    bytes_out: int
    bytes_reused: int
    source_bytes_read: int
    rate_bytes_s: float
    in_flight: int
    waiting: int
    bytes_failed: int
    odd_scales: int
    last_errors: tuple[ErrorNote, ...]
    degraded: str


class Counters:
    """The numbers behind EngineStats. Thread-safe; its lock is a leaf: nothing is called while it is held."""

    def __init__(self, *, shards_total: int, units_total: int, bytes_total: int) -> None:
        self._lock = threading.Lock()
        self._shards_total = shards_total
        self._units_total = units_total
        self._bytes_total = bytes_total
        self._shards_sealed = 0
        self._units_made = 0
        self._units_reused = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._bytes_reused = 0
        self._source_bytes_read = 0
        self._in_flight = 0
        self._waiting = 0
        self._odd_scales = 0
        self._errors: deque[ErrorNote] = deque(maxlen=_LAST_ERRORS)
        self._progress_bytes = 0
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def source_read(self, nbytes: int) -> None:
        with self._lock:
            self._source_bytes_read += nbytes

    def progressed(self, source_bytes: int) -> None:
        """Count source bytes of a finished tile, for the rate only."""
        now = time.monotonic()
        with self._lock:
            self._progress_bytes += source_bytes
            if now - self._samples[-1][0] >= _SAMPLE_S:
                self._samples.append((now, self._progress_bytes))
                while len(self._samples) > 1 and now - self._samples[0][0] > _RATE_WINDOW_S:
                    self._samples.popleft()

    def made(self, units: int, source_bytes: int, view_bytes: int) -> None:
        with self._lock:
            self._units_made += units
            self._bytes_in += source_bytes
            self._bytes_out += view_bytes

    def reused(self, units: int, view_bytes: int) -> None:
        with self._lock:
            self._units_reused += units
            self._bytes_reused += view_bytes

    def sealed(self, change: int) -> None:
        with self._lock:
            self._shards_sealed += change

    def in_flight(self, change: int) -> None:
        with self._lock:
            self._in_flight += change

    def waiting(self, change: int) -> None:
        with self._lock:
            self._waiting += change

    def odd_scales(self, number: int) -> None:
        with self._lock:
            self._odd_scales += number

    def failed(self, error: Fp8fsError) -> None:
        note = ErrorNote(time.time(), error.code, error.what, error.hint, dict(error.facts))
        with self._lock:
            self._errors.append(note)

    def snapshot(self, *, bytes_failed: int, degraded: str) -> EngineStats:
        now = time.monotonic()
        with self._lock:
            since, before = self._samples[0]
            for moment, progress in self._samples:
                if now - moment <= _RATE_WINDOW_S:
                    break
                since, before = moment, progress
            elapsed = max(now - since, _SAMPLE_S)
            return EngineStats(
                shards_total=self._shards_total,
                shards_sealed=self._shards_sealed,
                units_total=self._units_total,
                units_made=self._units_made,
                units_reused=self._units_reused,
                bytes_total=self._bytes_total,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                bytes_reused=self._bytes_reused,
                source_bytes_read=self._source_bytes_read,
                rate_bytes_s=(self._progress_bytes - before) / elapsed,
                in_flight=self._in_flight,
                waiting=self._waiting,
                bytes_failed=bytes_failed,
                odd_scales=self._odd_scales,
                last_errors=tuple(self._errors),
                degraded=degraded,
            )
