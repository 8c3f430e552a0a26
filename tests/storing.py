"""A toy shard for tests of the store: a few units whose bytes follow from their numbers. Digests without our helpers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from fp8fs.store.store import Partial, Published, ShardSpec, Store, UnitRecord, UnitSpan

__all__ = ["Toy", "snapshot"]

PREAMBLE = (4088).to_bytes(8, "little") + b'{"toy":1}'.ljust(4088)


class Toy:
    """A shard of *count* units, each with *rows* x *cols* bytes of data; odd units have a scale of 4 bytes.

    Every unit is one tile, so its digest is the hash of its hash.
    """

    def __init__(
        self, object_id: str = "ab12cd", count: int = 5, *, rows: int = 3, cols: int = 700
    ) -> None:
        self.spans: list[UnitSpan] = []
        at = len(PREAMBLE)
        for unit in range(count):
            length, scale = rows * cols, 4 if unit % 2 else 0
            self.spans.append(
                UnitSpan(unit, at, length, rows, cols, 2, at + length if scale else 0, scale)
            )
            at += length + scale
        self.spec = ShardSpec(
            object_id,
            at,
            PREAMBLE,
            count,
            0o640,
            os.getuid(),
            os.getgid(),
            1_700_000_000_123_456_789,
        )

    def data(self, unit: int) -> bytes:
        seed = hashlib.sha256(f"{self.spec.object_id}/{unit}".encode()).digest()
        return (seed * (self.spans[unit].length // len(seed) + 1))[: self.spans[unit].length]

    def scale(self, unit: int) -> bytes:
        return unit.to_bytes(4, "big")[: self.spans[unit].scale_length]

    def record(self, unit: int) -> UnitRecord:
        scale = self.scale(unit)
        return UnitRecord(
            unit=unit,
            amax=float(unit),
            input_digest=xxhash.xxh3_128(b"in%d" % unit).hexdigest(),
            data_digest=xxhash.xxh3_128(xxhash.xxh3_128(self.data(unit)).digest()).hexdigest(),
            scale_digest=xxhash.xxh3_128(scale).hexdigest() if scale else "",
        )

    def whole(self) -> bytes:
        """The shard file as it must be when sealed."""
        parts = [PREAMBLE]
        for span in self.spans:
            parts += [self.data(span.unit), self.scale(span.unit)]
        return b"".join(parts)

    def write(self, partial: Partial, unit: int) -> None:
        """The unit's bytes, without a record."""
        span = self.spans[unit]
        partial.pwrite(self.data(unit), span.start)
        if span.scale_length:
            partial.pwrite(self.scale(unit), span.scale_start)

    def make(self, partial: Partial, unit: int) -> bool:
        """The unit is made; False if it was already."""
        with partial.claim(unit, timeout_s=20):
            if unit in partial.records:
                return False
            self.write(partial, unit)
            partial.commit(self.record(unit))
            return True

    def open(self, store: Store) -> Partial:
        return store.partial(self.spec, self.spans, timeout_s=20)

    def build(self, store: Store) -> tuple[Path, list[int]]:
        """The object, and the units that were made for it now."""
        made: list[int] = []
        while True:
            if (path := store.find_object(self.spec)) is not None:
                return path, made
            try:
                with self.open(store) as partial:
                    for unit in range(self.spec.unit_count):
                        if self.make(partial, unit):
                            made.append(unit)
                    return partial.seal({"toy": True}, timeout_s=20), made
            except Published:
                continue

    def finished(self, store: Store, units: Iterable[int]) -> None:
        """These units are made, and the partial is closed again."""
        with self.open(store) as partial:
            for unit in units:
                self.make(partial, unit)


def snapshot(root: Path) -> dict[str, bytes | str]:
    """Everything below a directory: file contents, link texts, "dir"."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        key = str(path.relative_to(root))
        if path.is_symlink():
            found[key] = os.readlink(path)
        else:
            found[key] = "dir" if path.is_dir() else path.read_bytes()
    return found
