"""A lane between the daemon and its quantizer process: a socket for words, a memfd for tiles.

One call is in a lane at a time. The caller lays its buffers out in the shared memory one after the
other, sends a ``Call``, and gets a ``Reply`` once the buffers that are written hold their results.
A socket that reads as closed means that the other process is gone, however it went.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence

import msgspec
import numpy as np

from fp8fs.quant.buffers import Bytes

__all__ = ["Call", "Lane", "LaneClosedError", "Reply", "offsets"]

_ALIGN = 64
_MESSAGE_BYTES = 64 * 1024


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One method of the quantizer protocol. ``lengths``: bytes of each of its buffers, in order."""

    method: str
    dtype: str
    lengths: tuple[int, ...]
    rows: int = 0
    cols: int = 0
    scale: float = 0.0
    pow2: bool = False


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What a call came to: ``value``, or an ``error`` ("nonfinite" at ``index``, or "device")."""

    value: float = 0.0
    error: str = ""
    what: str = ""
    index: int = 0


class LaneClosedError(Exception):
    """The process at the other end is gone."""


def offsets(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of *lengths* lie in the shared memory, and the bytes that they need together."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // _ALIGN) * _ALIGN
    return starts, end


class Lane:
    """One end of a lane. Not thread-safe: whoever has it has it alone."""

    def __init__(self, connection: socket.socket, memory_fd: int) -> None:
        self.connection = connection
        self.memory_fd = memory_fd
        self._memory: mmap.mmap | None = None

    def buffers(self, lengths: Sequence[int], *, grow: bool = False) -> list[Bytes]:
        """Views of the shared memory for buffers of *lengths*; with *grow* it is made large enough."""
        starts, total = offsets(lengths)
        if self._memory is None or len(self._memory) < total:
            if grow:
                os.ftruncate(self.memory_fd, max(total, mmap.PAGESIZE))
            self._memory = mmap.mmap(self.memory_fd, 0)  # the old map goes with its last view
        return [
            np.frombuffer(self._memory, dtype=np.uint8, count=length, offset=start)
            for start, length in zip(starts, lengths, strict=True)
        ]

    def send(self, message: Call | Reply) -> None:
        """Raises: LaneClosedError; TimeoutError if the socket has a limit."""
        try:
            self.connection.send(msgspec.msgpack.encode(message))
        except (BrokenPipeError, ConnectionResetError) as err:
            raise LaneClosedError from err

    def receive(self) -> bytes:
        """The next message, encoded; waits without the GIL. Raises: as ``send``."""
        try:
            message = self.connection.recv(_MESSAGE_BYTES)
        except ConnectionResetError as err:
            raise LaneClosedError from err
        if not message:
            raise LaneClosedError
        return message

    def close(self) -> None:
        """Close both descriptors, once."""
        if self.memory_fd >= 0:
            self.connection.close()
            os.close(self.memory_fd)
            self.memory_fd = -1
            self._memory = None
