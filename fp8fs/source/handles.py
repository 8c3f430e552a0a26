"""A bounded number of open files, shared by threads."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from fp8fs.core.text import brief
from fp8fs.errors import SourceInvalidError

__all__ = ["Handles"]


class _Handle:
    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0


class Handles:
    """Open descriptors by path, the least recently used closed first.

    Each use is counted, and a handle leaves the table, to be closed, only while nobody uses it. So a number can
    never be closed, and given to another file, while a read with it is under way. The bound is
    passed for as long as more files than that are in use at once.

    Lock: ``_lock`` guards the table and the counts; it is never held over an open, a close or a read.
    """

    def __init__(self, open_file: Callable[[str], int], limit: int) -> None:
        self._open_file = open_file
        self._limit = limit
        self._lock = Lock()
        self._table: OrderedDict[str, _Handle] = OrderedDict()
        self._closed = False

    @contextmanager
    def borrow(self, path: str) -> Iterator[int]:
        """The descriptor of *path*, opened if need be, valid inside the block."""
        handle = self._take(path) or self._open(path)
        try:
            yield handle.fd
        finally:
            self._give_back(handle)

    @contextmanager
    def borrow_open(self, path: str) -> Iterator[int | None]:
        """The same, but None if it is not open at the moment."""
        handle = self._take(path)
        try:
            yield handle.fd if handle else None
        finally:
            if handle:
                self._give_back(handle)

    def close(self) -> None:
        """Close all that nobody uses; the rest when it is given back. Repeatable."""
        with self._lock:
            self._closed = True
            idle = self._drop_idle(0)
        _close_all(idle)

    def __len__(self) -> int:
        return len(self._table)

    def _take(self, path: str) -> _Handle | None:
        with self._lock:
            handle = self._table.get(path)
            if handle is not None:
                handle.users += 1
                self._table.move_to_end(path)
            return handle

    def _open(self, path: str) -> _Handle:
        if self._closed:
            raise SourceInvalidError(f"{brief(path)}: SRC is closed")
        fresh = _Handle(self._open_file(path))
        with self._lock:
            handle = self._table.setdefault(path, fresh)
            handle.users += 1
            self._table.move_to_end(path)
            surplus = self._drop_idle(0 if self._closed else self._limit)
        if handle is not fresh:  # another thread was first
            surplus.append(fresh)
        _close_all(surplus)
        return handle

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            surplus = self._drop_idle(0 if self._closed else self._limit)
        _close_all(surplus)

    def _drop_idle(self, limit: int) -> list[_Handle]:
        """Take idle handles out of the table, oldest first, until *limit* are left. Called with the lock held."""
        surplus = len(self._table) - limit
        if surplus <= 0:
            return []
        idle = [path for path, handle in self._table.items() if not handle.users][:surplus]
        return [self._table.pop(path) for path in idle]


def _close_all(handles: list[_Handle]) -> None:
    for handle in handles:
        os.close(handle.fd)
