"""Scratch memory for tiles: reused, aligned to pages, and never more than one budget."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["BufferPool"]

_SMALL_STEP = 64 << 10
_LARGE_STEP = 1 << 20


def _capacity(nbytes: int) -> int:
    """Sizes are rounded up so that a freed buffer fits the next tile."""
    step = _LARGE_STEP if nbytes >= _LARGE_STEP else _SMALL_STEP
    return max(1, -(-nbytes // step)) * step


class BufferPool:
    """Lends page-aligned buffers; all of them, lent and kept, stay within ``budget_bytes``.

    A borrower takes everything it needs in one call and waits for nobody while it holds it, so waiting here always
    ends. Who comes first is served first. A single request above the budget is served alone.
    The lock is a leaf: nothing is called while it is held.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[object] = deque()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        self._lent_bytes = 0

    @contextmanager
    def lend(self, *sizes: int) -> Iterator[list[memoryview]]:
        """One buffer of exactly each size, contents undefined. They must not be used afterwards."""
        capacities = [_capacity(size) for size in sizes]
        buffers = self._take(capacities)
        try:
            yield [memoryview(b)[:size] for b, size in zip(buffers, sizes, strict=True)]
        finally:
            self._give(buffers)

    def trim(self) -> None:
        """Give the memory of all kept buffers back to the system."""
        with self._changed:
            self._free.clear()
            self._free_bytes = 0

    def _take(self, capacities: list[int]) -> list[mmap.mmap]:
        total = sum(capacities)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            while self._waiting[0] is not ticket or not self._fits(total):
                self._changed.wait()
            self._waiting.popleft()
            self._lent_bytes += total
            buffers = [self._kept(capacity) for capacity in capacities]
            fresh = sum(c for c, b in zip(capacities, buffers, strict=True) if b is None)
            if self._lent_bytes + self._free_bytes > self._budget:
                self._shrink(fresh)
            self._changed.notify_all()
        return [
            mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if buffer is None
            else buffer
            for capacity, buffer in zip(capacities, buffers, strict=True)
        ]

    def _fits(self, total: int) -> bool:
        return self._lent_bytes == 0 or self._lent_bytes + total <= self._budget

    def _kept(self, capacity: int) -> mmap.mmap | None:
        kept = self._free.get(capacity)
        if not kept:
            return None
        self._free_bytes -= capacity
        return kept.pop()

    def _shrink(self, nbytes: int) -> None:
        """Forget kept buffers until *nbytes* are free again, the largest first."""
        for capacity in sorted(self._free, reverse=True):
            kept = self._free[capacity]
            while kept and nbytes > 0:
                kept.pop()
                self._free_bytes -= capacity
                nbytes -= capacity

    def _give(self, buffers: list[mmap.mmap]) -> None:
        with self._changed:
            for buffer in buffers:
                self._lent_bytes -= len(buffer)
                if self._lent_bytes + self._free_bytes + len(buffer) <= self._budget:
                    self._free.setdefault(len(buffer), []).append(buffer)
                    self._free_bytes += len(buffer)
            self._changed.notify_all()
