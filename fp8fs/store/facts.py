"""Small recorded facts: keep lists, hints, adopted identities, and the amax of groups that cross shards.

Each is one checked JSON value; what cannot be read as such is absent.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import (
    decode_checked,
    encode_checked,
    read_small,
    replace_file,
    storing,
)
from fp8fs.store.lease import locked_file
from fp8fs.store.places import Places
from fp8fs.store.types import Poll

__all__ = ["AmaxSlot", "Facts", "amax_slot"]

log = logging.getLogger(__name__)


class Facts:
    """scans/, hints/, adopted/, plans/: one durable JSON file per key. Thread-safe."""

    def __init__(self, io: FsIo, places: Places) -> None:
        self._io = io
        self._places = places

    def read(self, kind: str, key: str) -> Any | None:
        """The value; None if missing, damaged or unreadable: a fact spares work, and no work fails for want of it."""
        try:
            data = read_small(self._io, self._places.fact(kind, key))
        except OSError as err:
            log.warning("cannot read %s/%s: %s", kind, key, err.strerror)
            return None
        value = decode_checked(data) if data is not None else None
        try:
            return None if value is None else msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            return None

    def has_any(self, kind: str) -> bool:
        """Whether it is worth while to make a key and ask; true where that cannot be told."""
        try:
            return bool(self._io.listdir(self._places.home / kind))
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def write(self, kind: str, key: str, value: Any) -> None:
        """From now on, and after a power loss, the key has this value."""
        with storing(f"cannot write {kind}/{key}"):
            replace_file(
                self._io,
                self._places.fact(kind, key),
                encode_checked(value),
                tmp=self._places.tmp,
            )


class AmaxSlot:
    """A group's recorded amax, held exclusively. ``value`` is None until somebody ``put`` it."""

    value: float | None

    def __init__(self, io: FsIo, fd: int | None, value: float | None) -> None:
        self._io = io
        self._fd = fd
        self.value = value

    def put(self, value: float) -> None:
        """Record the float32 value; from now on every holder sees it. Power loss may take it back."""
        exact = struct.unpack("<f", struct.pack("<f", value))[0]
        self.value = exact
        if self._fd is not None:
            with storing("cannot record a group's amax"):
                self._io.ftruncate(self._fd, 0)
                self._io.pwrite(self._fd, encode_checked(exact), 0)


@contextmanager
def amax_slot(io: FsIo, path: Path, poll: Poll, *, writable: bool) -> Iterator[AmaxSlot]:
    """The slot in *path*, locked; where nothing can be written, a slot that only remembers."""
    if not writable:
        with storing("cannot read a group's amax"):
            value = _decode_amax(read_small(io, path))
        yield AmaxSlot(io, None, value)
        return
    with ExitStack() as held:
        with storing("cannot open a group's amax"):
            fd = held.enter_context(locked_file(io, path, poll, what="the group"))
            value = _decode_amax(io.pread(fd, 200, 0))
        yield AmaxSlot(io, fd, value)


def _decode_amax(data: bytes | None) -> float | None:
    value = decode_checked(data) if data else None
    with suppress(msgspec.MsgspecError):
        return None if value is None else msgspec.json.decode(value, type=float)
    return None
