"""A unit's source matrix as byte runs of SRC, and its place in the view shard. Arithmetic and reads; no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fp8fs.core.dtypes import DTYPES
from fp8fs.core.layout import Tile, Unit, data_rows, tiles
from fp8fs.core.plan import TILE_MAX_BYTES
from fp8fs.core.recipe import BLOCK
from fp8fs.engine.stats import Counters
from fp8fs.errors import SourceInvalidError
from fp8fs.source import Source

__all__ = [
    "Bands",
    "Run",
    "SourceReader",
    "data_item_bytes",
    "element_position",
    "item_bytes",
    "matrix_runs",
    "source_bytes",
    "stored_element",
    "view_bytes",
    "write_tile",
]

_LINES_BYTES = 256 << 10
"""Lines that are turned at once: they stay in a core's cache."""

Write = Callable[[memoryview, int], None]
"""Put these bytes at this offset of the view shard file."""


def item_bytes(dtype: str) -> int:
    """Bytes of one source element."""
    return DTYPES[dtype].bits // 8


def source_bytes(unit: Unit) -> int:
    """Bytes that making the unit reads at least once."""
    return unit.rows * unit.cols * item_bytes(unit.dtype)


def data_item_bytes(unit: Unit) -> int:
    """Bytes in the view of one element of the unit's matrix, its scale apart."""
    return unit.data.length // (unit.rows * unit.cols)


def view_bytes(unit: Unit) -> int:
    """Bytes that the unit has in the view, scale included."""
    return unit.data.length + (unit.scale.length if unit.scale else 0)


class Run(NamedTuple):
    """``nbytes`` bytes at ``file_offset`` of source shard ``shard``."""

    shard: int
    file_offset: int
    nbytes: int


def _runs(unit: Unit, start: int, nbytes: int) -> Iterator[Run]:
    """Where bytes [start, start + nbytes) of the concatenated pieces are; of a turned unit, of its lines."""
    if unit.pitch and unit.pitch != unit.rows:
        yield from _line_runs(unit, start, nbytes)
        return
    for piece in unit.pieces:
        if nbytes <= 0:
            return
        if start < piece.nbytes:
            part = min(nbytes, piece.nbytes - start)
            yield Run(piece.shard, piece.file_offset + start, part)
            start, nbytes = 0, nbytes - part
        else:
            start -= piece.nbytes


def _line_runs(unit: Unit, start: int, nbytes: int) -> Iterator[Run]:
    (piece,) = unit.pieces
    size = item_bytes(unit.dtype)
    width = unit.rows * size
    while nbytes > 0:
        line, inner = divmod(start, width)
        part = min(nbytes, width - inner)
        yield Run(piece.shard, piece.file_offset + line * unit.pitch * size + inner, part)
        start, nbytes = start + part, nbytes - part


def stored_element(unit: Unit, number: int) -> int:
    """The flat index in the unit's matrix of the element that ``read_bytes`` gives at place *number*."""
    if not unit.pitch:
        return number
    line, row = divmod(number, unit.rows)
    return row * unit.cols + line


def element_position(unit: Unit, element: int) -> tuple[str, int]:
    """The source tensor, and the flat index in it, of flat element *element* of the unit's matrix.

    A turned unit is a tensor of its own, by the name and shape that the view gives it.
    """
    if unit.pitch:
        return unit.pieces[0].tensor, element
    size = item_bytes(unit.dtype)
    offset = element * size
    for piece in unit.pieces:
        if offset < piece.nbytes:
            whole = min(p.file_offset for p in unit.pieces if p.tensor == piece.tensor)
            return piece.tensor, (piece.file_offset - whole + offset) // size
        offset -= piece.nbytes
    raise IndexError(element)


class SourceReader:
    """Reads units from SRC into buffers, counts what it reads, and gives consumed page cache back."""

    def __init__(
        self, source: Source, paths: tuple[str, ...], counters: Counters, *, drop: bool
    ) -> None:
        self._source = source
        self._paths = paths
        self._counters = counters
        self._drop = drop

    def check(self, shards: Iterable[int]) -> None:
        """Raises: SourceChangedError if one of these source shards is not what it was at plan time."""
        for shard in sorted(set(shards)):
            try:
                self._source.check(self._paths[shard])
            except OSError as err:
                raise self._unreadable(shard, err) from err

    def read_run(self, run: Run, buffer: memoryview) -> None:
        """Fill *buffer*, which is as long as the run."""
        try:
            self._source.pread_into(self._paths[run.shard], buffer, run.file_offset)
        except OSError as err:
            raise self._unreadable(run.shard, err) from err
        self._counters.source_read(run.nbytes)

    def read_bytes(self, unit: Unit, start: int, buffer: memoryview) -> None:
        """Fill *buffer* with the bytes of the unit's source matrix from byte *start*, in the order in which SRC has them."""
        filled = 0
        for run in _runs(unit, start, len(buffer)):
            self.read_run(run, buffer[filled : filled + run.nbytes])
            filled += run.nbytes

    def read_tile(self, unit: Unit, tile: Tile, buffer: memoryview) -> None:
        """Fill *buffer* with the tile, row after row."""
        size = item_bytes(unit.dtype)
        if unit.pitch:
            self._read_turned(unit, tile, buffer)
            return
        if tile.rows == 1 or tile.cols == unit.cols:
            self.read_bytes(unit, (tile.row * unit.cols + tile.col) * size, buffer)
            return
        width = tile.cols * size
        for row in range(tile.rows):
            start = ((tile.row + row) * unit.cols + tile.col) * size
            self.read_bytes(unit, start, buffer[row * width : (row + 1) * width])

    def _read_turned(self, unit: Unit, tile: Tile, buffer: memoryview) -> None:
        import numpy as np  # few checkpoints need it, and who only looks at one has not loaded it

        size = item_bytes(unit.dtype)
        width, kind = tile.rows * size, f"u{size}"
        matrix = np.frombuffer(buffer, kind).reshape(tile.rows, tile.cols)
        step = min(tile.cols, max(1, _LINES_BYTES // width))
        scratch = memoryview(bytearray(step * width))
        for col in range(0, tile.cols, step):
            count = min(step, tile.cols - col)
            part = scratch[: count * width]
            start = (tile.col + col) * unit.rows + tile.row
            if tile.rows == unit.rows:
                self.read_bytes(unit, start * size, part)
            else:
                for line in range(count):
                    at = (start + line * unit.rows) * size
                    self.read_bytes(unit, at, part[line * width : (line + 1) * width])
            lines = np.frombuffer(part, kind).reshape(count, tile.rows)
            matrix[:, col : col + count] = lines.T

    def drop_bytes(self, unit: Unit, start: int, nbytes: int) -> None:
        """These bytes of the unit's source matrix are not needed again.

        Of a turned unit each band needs a part of every line: all of it goes with its last bytes.
        """
        if not unit.pitch:
            for run in _runs(unit, start, nbytes):
                self.drop_run(run)
        elif start + nbytes == source_bytes(unit):
            (piece,) = unit.pieces
            span = ((unit.cols - 1) * unit.pitch + unit.rows) * item_bytes(unit.dtype)
            self.drop_run(Run(piece.shard, piece.file_offset, span))

    def drop_run(self, run: Run) -> None:
        """This run is not needed again."""
        if self._drop:
            self._source.drop(self._paths[run.shard], run.file_offset, run.nbytes)

    def _unreadable(self, shard: int, err: OSError) -> SourceInvalidError:
        return SourceInvalidError(
            f"{self._paths[shard]}: cannot be read: {err.strerror}", file=self._paths[shard]
        )


def write_tile(write: Write, unit: Unit, tile: Tile, data: memoryview) -> None:
    """Write a tile's view bytes to where they belong in the shard file."""
    item = data_item_bytes(unit)
    width, line = tile.cols * item, unit.cols * item
    base = unit.data.start + tile.col * item
    done = 0
    for data_row, rows in data_rows(unit.row_runs, tile.row, tile.rows):
        if rows == 1 or width == line:
            write(data[done : done + rows * width], base + data_row * line)
            done += rows * width
            continue
        for row in range(data_row, data_row + rows):
            write(data[done : done + width], base + row * line)
            done += width


def matrix_runs(unit: Unit, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Bytes [start, start + length) of a unit's data as runs (start, length) of its matrix in view bytes, in data order."""
    if not unit.row_runs:
        yield start, length
        return
    end = start + length
    line = unit.cols * data_item_bytes(unit)
    for run in sorted(unit.row_runs, key=lambda run: run.data_row):
        first = max(start, run.data_row * line)
        last = min(end, (run.data_row + run.rows) * line)
        if first < last:
            yield run.row * line + first - run.data_row * line, last - first


class Bands:
    """A unit cut into runs of whole rows (of one row: runs of columns), each made without looking at the others.

    A band's tiles follow each other in ``tiles`` order. Its scales are one run in the view, and so is its data, unless
    the rows lie there in another order.
    per_channel needs whole rows for a scale, so there a vector is one band. ``together``: tiles whose source is read at
    once; of a turned unit as many as one buffer may hold, because each read takes only a part of a line.
    """

    __slots__ = ("_tiles_per_band", "count", "elems", "first", "tile_count", "together", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.first = next(tiles(unit.rows, unit.cols, item_bytes(unit.dtype)))
        across = -(-unit.cols // self.first.cols)
        down = -(-unit.rows // self.first.rows)
        self.tile_count = across * down
        self.together = 1
        if unit.rows == 1 and unit.scheme != "per_channel":
            self._tiles_per_band = 1
            self.elems = self.first.cols
        else:
            if unit.pitch and across == 1:
                tile_bytes = self.first.rows * unit.cols * item_bytes(unit.dtype)
                self.together = max(1, min(down, TILE_MAX_BYTES // tile_bytes))
            self._tiles_per_band = across * self.together
            self.elems = self.first.rows * unit.cols * self.together
        self.count = -(-self.tile_count // self._tiles_per_band)

    def tiles(self, band: int) -> Iterator[tuple[int, Tile]]:
        """The band's tiles with their numbers in the unit."""
        unit, first = self.unit, self.first
        across = -(-unit.cols // first.cols)
        begin = band * self._tiles_per_band
        for number in range(begin, min(begin + self._tiles_per_band, self.tile_count)):
            row = number // across * first.rows
            col = number % across * first.cols
            yield (
                number,
                Tile(row, min(first.rows, unit.rows - row), col, min(first.cols, unit.cols - col)),
            )

    def data(self, band: int) -> tuple[int, int]:
        """Start and length in elements of the unit's matrix."""
        start = band * self.elems
        return start, min(self.elems, self.unit.rows * self.unit.cols - start)

    def scale(self, band: int) -> tuple[int, int]:
        """Start and length in bytes of the unit's scales; per_tensor units and those without scales have none of a band's own."""
        unit = self.unit
        start, length = self.data(band)
        if unit.scheme == "per_channel":
            return start // unit.cols * 4, -(-length // unit.cols) * 4
        if unit.scheme.startswith("block"):
            across = -(-unit.cols // BLOCK[1])
            if unit.rows == 1:
                return start // BLOCK[1] * 4, -(-length // BLOCK[1]) * 4
            rows = -(-length // unit.cols)
            return (
                start // unit.cols // BLOCK[0] * across * 4,
                -(-rows // BLOCK[0]) * across * 4,
            )
        return 0, 0
