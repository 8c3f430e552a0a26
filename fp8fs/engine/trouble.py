"""Whether the store can be written now, and when to try again."""

from __future__ import annotations

import threading
import time

from fp8fs.engine.once import fresh
from fp8fs.errors import Fp8fsError, StoreError, StoreFullError
from fp8fs.store.store import Store

__all__ = ["StoreTrouble"]

_RETRY_S = 3.0


class StoreTrouble:
    """Remembers the store's last failure. While there is one, one caller every few seconds may try the store again.

    ``failures`` counts them, so that work which began before the last one knows. The lock is a leaf.
    """

    def __init__(self, store: Store | None, why_no_store: str) -> None:
        self._lock = threading.Lock()
        self._error: Fp8fsError | None = None
        self._retry_at = 0.0
        self.failures = 0
        self._permanent: StoreError | None = None
        if store is None:
            self._permanent = StoreFullError(f"no store: {why_no_store or 'none was given'}")
        elif not store.writable:
            self._permanent = StoreFullError(f"the store cannot be written: {store.why_not}")

    @property
    def reason(self) -> str:
        """Why the store is not written, or ""."""
        with self._lock:
            error = self._permanent or self._error
            return "" if error is None else str(error)

    def error(self) -> StoreError:
        """The failure, to be raised by a caller who cannot do without the store."""
        with self._lock:
            error = self._permanent or self._error
        if error is None:
            return StoreError("the store failed a moment ago")
        return StoreError(error.what, hint=error.hint, **error.facts)

    def usable(self) -> bool:
        """Whether to try the store. In trouble, True for one caller per interval."""
        with self._lock:
            if self._permanent is not None:
                return False
            if self._error is None:
                return True
            now = time.monotonic()
            if now < self._retry_at:
                return False
            self._retry_at = now + _RETRY_S
            return True

    def failed(self, error: Fp8fsError) -> bool:
        """Take note of a failure. Returns whether it is news."""
        with self._lock:
            news = self._error is None or self._error.what != error.what
            self._error = fresh(error)
            self._retry_at = time.monotonic() + _RETRY_S
            self.failures += 1
            return news

    def worked(self) -> None:
        """The store took something: all is well again."""
        if self._error is not None:
            with self._lock:
                self._error = None
