"""Digests of tiles, units and shards: xxh3-128, defined over ``layout.tiles`` (docs/FORMAT.md).

A tile's digest is over its bytes, row-major. A unit's digest is over the 16-byte digests of its tiles, in
the order of ``tiles(rows, cols, item_bytes)`` with the item size of the SOURCE dtype. So a unit can be
digested while its tiles are made in any order, and read back without knowing how it was made.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash
from typing_extensions import Buffer

__all__ = ["TileDigester", "bytes_digest", "combine", "shard_digest", "tile_digest"]


def tile_digest(data: Buffer) -> bytes:
    """The 16-byte digest of one tile's bytes. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_digest(data)


def bytes_digest(data: Buffer) -> str:
    """The hex digest of plain bytes: a preamble or a scale. "" for no bytes, as a unit without a scale records it."""
    return xxhash.xxh3_128_hexdigest(data) if memoryview(data).nbytes else ""


def combine(tile_digests: Iterable[bytes]) -> str:
    """A unit's hex digest from the 16-byte digests of all its tiles, in tile order."""
    outer = xxhash.xxh3_128()
    for digest in tile_digests:
        outer.update(digest)
    return outer.hexdigest()


class TileDigester:
    """Digests one unit whose tiles come in order."""

    __slots__ = ("_outer",)

    def __init__(self) -> None:
        self._outer = xxhash.xxh3_128()

    def add(self, tile: Buffer) -> None:
        """Take the next tile's bytes."""
        self._outer.update(xxhash.xxh3_128_digest(tile))

    def add_digest(self, digest: bytes) -> None:
        """Take the next tile's digest, made elsewhere by ``tile_digest``."""
        self._outer.update(digest)

    def hexdigest(self) -> str:
        """The unit's digest over the tiles taken so far."""
        return self._outer.hexdigest()


def shard_digest(preamble_digest: str, units: Iterable[tuple[str, str]]) -> str:
    """A shard's hex digest from its preamble's and each unit's (data digest, scale digest or ""), in unit order."""
    outer = xxhash.xxh3_128(bytes.fromhex(preamble_digest))
    for data, scale in units:
        outer.update(bytes.fromhex(data))
        outer.update(bytes.fromhex(scale))
    return outer.hexdigest()
