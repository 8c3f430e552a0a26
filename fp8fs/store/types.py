"""What goes in and out of the store, as plain data. No I/O, no meaning beyond keys, sizes and digests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

__all__ = [
    "PREAMBLE",
    "ObjectInfo",
    "ObjectRecord",
    "PartialInfo",
    "Poll",
    "Published",
    "ShardSpec",
    "TreeInfo",
    "UnitRecord",
    "UnitSpan",
    "Usage",
    "no_poll",
]

SCHEMA = 1
"""The store's schema; everything of it lives below ROOT/v1, so another version never meets it."""

PREAMBLE = -1
"""The "unit" that ``verify_object`` names when a shard's preamble is damaged."""

Poll = Callable[[], None]
"""Called at least every 0.1 s while the store waits for somebody; may raise to give up."""


def no_poll() -> None:
    """Nobody wants to interrupt the wait."""


class Published(Exception):  # noqa: N818 - an answer, not an error
    """The shard was published while its partial was asked for: look again with ``find_object``."""


class ShardSpec(msgspec.Struct, frozen=True):
    """What the store must know of a view shard to make it: a key, a size, a preamble, attributes. No meaning."""

    object_id: str
    size: int
    preamble: bytes
    unit_count: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class UnitSpan(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where unit ``unit`` lies in its shard file, and how its digest is cut into tiles.

    ``start`` and ``length``: bytes of the data; ``rows``, ``cols``, ``item_bytes``: the SOURCE matrix (a kept tensor: 1,
    its bytes, 1); ``scale_start``, ``scale_length``: 0, 0 without a scale. length == rows * cols always.
    ``row_runs``: (row, rows, data_row) by row: rows of the matrix that tiles are cut from, and where they lie in the data;
    () if in order.
    """

    unit: int
    start: int
    length: int
    rows: int
    cols: int
    item_bytes: int
    scale_start: int = 0
    scale_length: int = 0
    row_runs: tuple[tuple[int, int, int], ...] = ()


class UnitRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The journal's line for one finished unit. Digests are xxh3-128 hex (docs/FORMAT.md); ``amax`` the float32 value
    that the scale came from (per_tensor), else 0.0."""

    unit: int
    amax: float
    input_digest: str
    data_digest: str
    scale_digest: str


class ObjectRecord(msgspec.Struct, frozen=True):
    """The record beside a sealed object. ``facts`` is the caller's JSON, kept unread."""

    schema: int
    object_id: str
    size: int
    preamble_bytes: int
    preamble_digest: str
    shard_digest: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    facts: msgspec.Raw
    records: tuple[UnitRecord, ...]


class ObjectInfo(msgspec.Struct, frozen=True):
    """One sealed object, for ``ls``. ``links``: how many trees hold it by hard link."""

    object_id: str
    size: int
    links: int
    sealed_ns: int


class PartialInfo(msgspec.Struct, frozen=True):
    """One shard in the making. ``in_use``: somebody has it open."""

    object_id: str
    size: int
    allocated_bytes: int
    in_use: bool


class TreeInfo(msgspec.Struct, frozen=True):
    """One tree, for ``ls``. ``pinned``: a mount or a build uses it now. ``size``: its files together; ``object_ids``: those it needs."""

    plan_id: str
    complete: bool
    pinned: bool
    size: int
    changed_ns: int
    object_ids: frozenset[str]


class Usage(msgspec.Struct, frozen=True):
    """Bytes on disk by kind, and bytes free for us."""

    object_bytes: int
    partial_bytes: int
    damaged_bytes: int
    free_bytes: int
