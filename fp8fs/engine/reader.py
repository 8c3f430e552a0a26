"""Inline reads of one view shard, by offset: what is missing is made first."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ShardReader"]


class ShardReader:
    """One open handle on a view shard. Thread-safe; close it once no read is under way."""

    def pread(self, offset: int, length: int, poll: Callable[[], None]) -> bytes:
        """The bytes of the view file at *offset*, fewer only at its end. Waits for the units that it covers.

        *poll* runs at least every 0.1 s while waiting and may raise; the work goes on.
        Raises: NonFiniteTensorError, SourceChangedError, SourceInvalidError, DeviceError; never for a store failure.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
