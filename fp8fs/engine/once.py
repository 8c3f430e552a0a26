"""Waiting for work that another thread does: one outcome, many waiters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fp8fs.errors import Fp8fsError

__all__ = ["POLL_S", "OnceTable", "Outcome", "Poll", "Stopped", "closing_error", "fresh", "told"]

Poll = Callable[[], None]
"""Called at least every ``POLL_S`` while waiting; may raise to give up the wait."""

POLL_S = 0.1

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Stopped(Exception):  # noqa: N818 - an order, not an error
    """The engine is closing: leave what is in work cleanly unfinished."""


def closing_error() -> Fp8fsError:
    """What callers get whose wait the engine's end cuts short."""
    return Fp8fsError("fp8fs is being unmounted", hint="mount again")


def told(failure: BaseException) -> Fp8fsError:
    """What a waiter is told when the thread that worked for it failed in any way."""
    if isinstance(failure, Fp8fsError):
        return fresh(failure)
    if isinstance(failure, Stopped):
        return closing_error()
    return Fp8fsError(f"internal error: {failure!r}", hint="see the log; please report it")


def fresh(error: Fp8fsError) -> Fp8fsError:
    """The same error without traceback and cause: those would keep scratch buffers alive, and several threads raise it."""
    return type(error)(error.what, hint=error.hint, **error.facts)


class Outcome:
    """Set once: done, or failed with an error. Waiters share it and can leave; the work goes on."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: Fp8fsError | None = None

    def finish(self, error: Fp8fsError | None = None) -> None:
        """Let all waiters go. The first call decides."""
        if not self._done.is_set():
            self.error = None if error is None else fresh(error)
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, poll: Poll) -> None:
        """Return when done. Raises: the error of the work; whatever *poll* raises."""
        while not self._done.wait(POLL_S):
            poll()
        if self.error is not None:
            raise fresh(self.error)


class OnceTable(Generic[K, V]):
    """Values that are computed once by whoever asks first, while the others wait. Failures are not kept.

    The lock is a leaf: computing happens outside it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[K, V] = {}
        self._pending: dict[K, Outcome] = {}

    def known(self, key: K) -> V | None:
        with self._lock:
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value

    def pop(self, key: K) -> None:
        with self._lock:
            self._values.pop(key, None)

    def get(self, key: K, compute: Callable[[], V], poll: Poll) -> V:
        """The value, computed on this thread unless another does already."""
        while True:
            with self._lock:
                if key in self._values:
                    return self._values[key]
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = Outcome()
            if pending is None:
                return self._compute(key, compute, mine)
            pending.wait(poll)

    def _compute(self, key: K, compute: Callable[[], V], outcome: Outcome) -> V:
        error: Fp8fsError | None = None
        try:
            value = compute()
            self.put(key, value)
            return value
        except BaseException as failure:
            error = told(failure)
            raise
        finally:
            with self._lock:
                del self._pending[key]
            outcome.finish(error)

    def drain(self) -> list[V]:
        """All values, which are forgotten."""
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
        return values
