"""What a plan is made of, and how its parts are cut: shards into units, reads into units, matrices into tiles.

``layout.plan`` makes these; everything here is frozen and holds no path of SRC's outside. What a large checkpoint has a
hundred thousand of is encoded without the names of its fields (``array_like``): kept plans are read at every mount.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from fp8fs.core.dtypes import FP8

__all__ = [
    "CAST",
    "Cut",
    "Cutter",
    "Extent",
    "Group",
    "Piece",
    "Plan",
    "RowRun",
    "TensorRow",
    "Tile",
    "Unit",
    "ViewEntry",
    "ViewShard",
    "data_rows",
    "tiles",
]

CAST = "cast"
"""The scheme of a kept tensor whose values are shown in BF16, rounded to the nearest, ties to even."""

TILE_BYTES = 4 << 20
TILE_MAX_BYTES = 16 << 20


class Piece(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A run of whole rows of one source tensor: ``nbytes`` bytes at ``file_offset`` of source shard ``shard``.

    ``shard`` indexes ``Plan.source_shards``. A unit's pieces, one after the other, are its source matrix; of a turned unit
    there is one, whose bytes are the lines alone, without what is between them.
    """

    shard: int
    file_offset: int
    nbytes: int
    tensor: str


class Extent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Bytes [start, start + length) of one view shard, counted from the start of the file. length > 0."""

    start: int
    length: int


class RowRun(NamedTuple):
    """Rows [row, row + rows) of a unit's matrix, which are rows [data_row, data_row + rows) of its data."""

    row: int
    rows: int
    data_row: int


class Unit(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A kept tensor (``scheme`` "": ``data`` is a copy of the pieces), one that is kept in another dtype (CAST: its
    values, rounded to BF16), or a weight and its scale.

    ``rows`` x ``cols`` is the source matrix in elements of ``dtype`` (a kept tensor: 1 x nbytes of "U8").
    ``group`` indexes ``Plan.groups`` when the scale is shared (per_tensor only), else -1.
    ``row_runs``: where the matrix's rows lie in ``data``, by ``row``; () if they lie there in order. Blocks and digests
    are cut in the matrix, whatever the order in the file.
    ``pitch``: not 0 for a turned unit, of which SRC holds the transpose: ``cols`` lines of ``rows`` elements, ``pitch``
    elements from one to the next. Such a unit has its true shape when it is kept, too.
    An empty tensor (0 elements) has no unit: it lives in the header only.
    """

    name: str
    scheme: str
    dtype: str
    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    data: Extent
    scale: Extent | None
    group: int
    row_runs: tuple[RowRun, ...] = ()
    pitch: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether its data is FP8."""
        return self.scheme not in ("", CAST)


class Group(msgspec.Struct, frozen=True, gc=False):
    """Weights that share one scale. ``members``: (view shard index, unit index). ``id``: hex, stands for the
    source bytes of all members; ``crosses``: the members are in more than one view shard."""

    name: str
    id: str
    members: tuple[tuple[int, int], ...]
    crosses: bool


class ViewShard(msgspec.Struct, frozen=True):
    """One shard of the view. ``units`` are in file order. ``sources``: indices of the source shards that decide
    its bytes (group partners too). ``object_id``: hex key of the sealed bytes and their attributes.
    mode (no write bits), uid, gid: the strictest of ``sources``; mtime_ns: the latest."""

    path: str
    component: str
    preamble: bytes
    size: int
    units: tuple[Unit, ...]
    sources: tuple[int, ...]
    object_id: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class ViewEntry(msgspec.Struct, frozen=True):
    """One name of the view. ``kind``: "dir"; "shard" (``shard`` indexes ``Plan.shards``); "text" (``content`` is served,
    rewritten configs and indexes); "source" (the same bytes as SRC's file of that path); "link" (a symlink, text ``link``)."""

    path: str
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    shard: int = -1
    content: bytes = b""
    link: str = ""


class TensorRow(msgspec.Struct, frozen=True, gc=False):
    """One line of ``fp8fs plan``: what happens to one source tensor. ``view_name``: the view's tensor that it is in,
    where that has another name."""

    component: str
    name: str
    shape: tuple[int, ...]
    dtype_in: str
    dtype_out: str
    bytes_in: int
    bytes_out: int
    group: str
    reason: str
    view_name: str = ""


class Plan(msgspec.Struct, frozen=True):
    """The whole view. ``plan_id``: hex, decided by everything in the view (paths inside it, attributes, bytes), and by
    nothing outside it. ``source_shards``: paths of the shards that pieces refer to, with their identities beside.
    ``schemes``: component path -> scheme, for the components that are quantized. ``order``: component -> its view shard indices in index order. ``hidden``: files of SRC that are not
    shown, with the reason. ``warnings``: what may surprise a reader; ``notes``: what else was decided."""

    plan_id: str
    entries: dict[str, ViewEntry]
    shards: tuple[ViewShard, ...]
    groups: tuple[Group, ...]
    source_shards: tuple[str, ...]
    source_identities: tuple[str, ...]
    schemes: dict[str, str]
    order: dict[str, tuple[int, ...]]
    rows: tuple[TensorRow, ...]
    hidden: dict[str, str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def fp8_bytes(self) -> int:
        """Bytes of the view's FP8 weights and their scales: 0 if no weight becomes FP8."""
        return sum(row.bytes_out for row in self.rows if row.dtype_out == FP8)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all the view's tensors."""
        return sum(row.bytes_out for row in self.rows)


class Tile(msgspec.Struct, frozen=True, gc=False):
    """Rows [row, row + rows) x columns [col, col + cols) of a unit's source matrix, in elements."""

    row: int
    rows: int
    col: int
    cols: int


def tiles(rows: int, cols: int, item_bytes: int) -> Iterator[Tile]:
    """Cut a matrix into the tiles in which it is read, quantized and digested, in order.

    Tiles start at multiples of 128 rows and 128 columns, hold about TILE_BYTES and never more than TILE_MAX_BYTES of source,
    and depend on nothing but the arguments: digests are defined over them (docs/FORMAT.md).
    """
    if rows == 1:  # a kept tensor or a vector: plain runs of bytes
        step = max(128, TILE_BYTES // item_bytes)
        for col in range(0, cols, step):
            yield Tile(0, 1, col, min(step, cols - col))
        return
    max_cols = TILE_MAX_BYTES // 128 // item_bytes // 128 * 128
    tile_cols = min(cols, max_cols)
    tile_rows = max(128, TILE_BYTES // max(1, tile_cols * item_bytes) // 128 * 128)
    for row in range(0, rows, tile_rows):
        for col in range(0, cols, tile_cols):
            yield Tile(row, min(tile_rows, rows - row), col, min(tile_cols, cols - col))


def data_rows(
    row_runs: Sequence[tuple[int, int, int]], row: int, rows: int
) -> Iterator[tuple[int, int]]:
    """Where rows [row, row + rows) of a unit's matrix lie in its data: (first row there, number of rows), in matrix order."""
    if not row_runs:
        yield row, rows
        return
    end = row + rows
    for first, count, data_row in row_runs[bisect_left(row_runs, (row + 1,)) - 1 :]:
        if first >= end:
            return
        begin = max(row, first)
        yield data_row + begin - first, min(end, first + count) - begin


class Cut(msgspec.Struct, frozen=True):
    """What a read of a view shard touches: the preamble or not, and ``units`` (indices, ascending)."""

    preamble: bool
    units: tuple[int, ...]


class Cutter:
    """Answers which units a read of one shard touches, by bisection. Immutable after it is built; thread-safe.

    Cost: building is one pass over the units; a cut is two bisections and the touched extents.
    """

    def __init__(self, shard: ViewShard) -> None:
        runs = [(unit.data.start, i) for i, unit in enumerate(shard.units)]
        runs += [(unit.scale.start, i) for i, unit in enumerate(shard.units) if unit.scale]
        runs.sort()
        self._starts = [start for start, _ in runs]
        self._units = [i for _, i in runs]
        self._data_start = len(shard.preamble)
        self._size = shard.size

    def cut(self, file_offset: int, length: int) -> Cut:
        """Bytes [file_offset, file_offset + length), as far as they are inside the file."""
        end = min(file_offset + length, self._size)
        if file_offset >= end:
            return Cut(preamble=False, units=())
        # Extents leave no hole, so the last one that starts at or before a data byte holds it.
        first = max(0, bisect_right(self._starts, file_offset) - 1)
        last = bisect_left(self._starts, end)
        touched = tuple(sorted(set(self._units[first:last])))
        return Cut(preamble=file_offset < self._data_start, units=touched)
