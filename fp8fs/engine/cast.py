"""One band of a unit: read, quantize, digest, hand the bytes on. Knows no store and no threads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from fp8fs.core.digest import combine, tile_digest
from fp8fs.core.layout import Tile, Unit
from fp8fs.core.plan import CAST
from fp8fs.core.quantizer import Quantizer
from fp8fs.core.recipe import BLOCK
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.matrix import (
    Bands,
    SourceReader,
    data_item_bytes,
    element_position,
    item_bytes,
    write_tile,
)
from fp8fs.errors import NonFiniteTensorError

__all__ = ["Draft", "bad_index", "cast_band", "cast_tile", "nonfinite_error"]

_DIGEST_BYTES = 16


def nonfinite_error(
    component: str, unit: Unit, element: int, cause: NonFiniteTensorError
) -> NonFiniteTensorError:
    """The quantizer's error with the source tensor's name and the flat index in it."""
    tensor, index = element_position(unit, element)
    name = f"{component}/{tensor}" if component else tensor
    return NonFiniteTensorError(
        f'tensor "{name}": element {index} is NaN or Inf, which FP8 cannot hold',
        hint=f"add --keep '{name}', or run plan --scan",
        **{**cause.facts, "component": component, "tensor": name, "index": index},
    )


class Draft:
    """What is collected of one unit while its bands are made in any order: scales and tile digests."""

    __slots__ = ("_data_digests", "_input_digests", "amax", "bands", "scale", "scales", "unit")

    def __init__(self, unit: Unit, amax: float, scale: float) -> None:
        self.unit = unit
        self.amax = amax
        self.scale = scale
        self.bands = Bands(unit)
        self.scales = bytearray(unit.scale.length if unit.scale else 0)
        self._input_digests = bytearray(self.bands.tile_count * _DIGEST_BYTES)
        self._data_digests = (
            bytearray(self.bands.tile_count * _DIGEST_BYTES)
            if unit.scheme
            else self._input_digests  # a copied tensor's bytes are its input
        )
        if unit.scheme == "per_tensor":
            self.scales[:] = struct.pack("<f", scale)

    def digest(self, number: int, source: memoryview, data: memoryview) -> None:
        """Take tile *number*'s bytes."""
        at = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
        self._input_digests[at] = tile_digest(source)
        if self._data_digests is not self._input_digests:
            self._data_digests[at] = tile_digest(data)

    def digests(self) -> tuple[str, str]:
        """Input and data digest of the whole unit, once every tile was taken."""
        return _combine(self._input_digests), _combine(self._data_digests)


def _combine(digests: bytearray) -> str:
    view = memoryview(digests)
    return combine(
        bytes(view[at : at + _DIGEST_BYTES]) for at in range(0, len(digests), _DIGEST_BYTES)
    )


def cast_tile(
    quantizer: Quantizer, draft: Draft, tile: Tile, source: memoryview, data: memoryview
) -> None:
    """View bytes of a tile into *data*, its scales into the draft. Not for copied units, nor per_channel tiles of split rows.

    Raises: NonFiniteTensorError with the flat index in the tile.
    """
    unit, scales = draft.unit, memoryview(draft.scales)
    if unit.scheme == CAST:
        quantizer.cast_bf16(source, unit.dtype, data)
    elif unit.scheme == "per_tensor":
        quantizer.cast_tensor(source, unit.dtype, draft.scale, data)
    elif unit.scheme == "per_channel":
        scale = scales[tile.row * 4 : (tile.row + tile.rows) * 4]
        quantizer.quantize_rows(source, unit.dtype, tile.rows, data, scale)
    else:
        _cast_blocks(quantizer, draft, tile, source, data)


def _cast_blocks(
    quantizer: Quantizer, draft: Draft, tile: Tile, source: memoryview, data: memoryview
) -> None:
    unit, scales = draft.unit, memoryview(draft.scales)
    across = -(-unit.cols // BLOCK[1])
    rows, cols = -(-tile.rows // BLOCK[0]), -(-tile.cols // BLOCK[1])
    first = tile.row // BLOCK[0] * across + tile.col // BLOCK[1]
    pow2 = unit.scheme == "block"
    args = (source, unit.dtype, tile.rows, tile.cols, data)
    if cols == across or rows == 1:
        scale = scales[first * 4 : (first + rows * cols) * 4]
        quantizer.quantize_blocks(*args, scale, pow2=pow2)
        return
    own = memoryview(bytearray(rows * cols * 4))
    quantizer.quantize_blocks(*args, own, pow2=pow2)
    for row in range(rows):
        at = (first + row * across) * 4
        scales[at : at + cols * 4] = own[row * cols * 4 : (row + 1) * cols * 4]


def cast_band(
    quantizer: Callable[[], Quantizer],
    reader: SourceReader,
    buffers: BufferPool,
    component: str,
    draft: Draft,
    band: int,
    write: Callable[[memoryview, int], None],
) -> None:
    """Make one band of a unit: *write* gets its view bytes with their offsets in the shard file, the draft the rest.

    Raises: NonFiniteTensorError naming the source tensor; whatever *write* raises.
    """
    unit, bands = draft.unit, draft.bands
    size, data_size = item_bytes(unit.dtype), data_item_bytes(unit)
    elems = bands.first.rows * bands.first.cols
    data_bytes = elems * data_size if unit.scheme else 0
    with buffers.lend(elems * bands.together * size, data_bytes) as (source_buffer, data_buffer):
        split_rows = unit.scheme == "per_channel" and bands.first.cols < unit.cols
        maxima = memoryview(bytearray(bands.first.rows * 4 if split_rows else 0))
        if split_rows:
            for _, tile, source in _sources(reader, bands, band, source_buffer):
                try:
                    quantizer().amax_rows(source, unit.dtype, tile.rows, maxima[: tile.rows * 4])
                except NonFiniteTensorError as err:
                    raise nonfinite_error(component, unit, _element(unit, tile, err), err) from None
        for number, tile, source in _sources(reader, bands, band, source_buffer):
            data = data_buffer[: tile.rows * tile.cols * data_size] if unit.scheme else source
            try:
                if split_rows:
                    scale = memoryview(draft.scales)[tile.row * 4 : (tile.row + tile.rows) * 4]
                    known = maxima[: tile.rows * 4]
                    quantizer().cast_rows(source, unit.dtype, tile.rows, known, data, scale)
                elif unit.scheme:
                    cast_tile(quantizer(), draft, tile, source, data)
            except NonFiniteTensorError as err:
                raise nonfinite_error(component, unit, _element(unit, tile, err), err) from None
            draft.digest(number, source, data)
            write_tile(write, unit, tile, data)
    start, length = bands.data(band)
    reader.drop_bytes(unit, start * size, length * size)


def _sources(
    reader: SourceReader, bands: Bands, band: int, buffer: memoryview
) -> Iterator[tuple[int, Tile, memoryview]]:
    """The band's tiles with their numbers in the unit and their source bytes, good until the next one is asked for."""
    unit, at = bands.unit, 0
    size = item_bytes(unit.dtype)
    if bands.together > 1:
        start, length = bands.data(band)
        whole = Tile(start // unit.cols, length // unit.cols, 0, unit.cols)
        reader.read_tile(unit, whole, buffer[: length * size])
    for number, tile in bands.tiles(band):
        nbytes = tile.rows * tile.cols * size
        source = buffer[at : at + nbytes]
        if bands.together > 1:
            at += nbytes
        else:
            reader.read_tile(unit, tile, source)
        yield number, tile, source


def bad_index(error: NonFiniteTensorError) -> int:
    """The flat index, in the buffer that the quantizer saw, of the element that it refused."""
    index = error.facts.get("index")
    return index if isinstance(index, int) else 0


def _element(unit: Unit, tile: Tile, error: NonFiniteTensorError) -> int:
    """The flat index in the unit's matrix of the element that the quantizer named within a tile."""
    row, col = divmod(bad_index(error), tile.cols)
    return (tile.row + row) * unit.cols + tile.col + col
