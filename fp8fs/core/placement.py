"""Where each tensor of a view shard lies: the order without holes in which every offset is aligned.

    1. kept tensors whose length is a multiple of 8, in source order (empty ones too);
    2. weight, scale, weight, scale, ... in source order, for FP8 weights whose length is a multiple of 4;
    3. the scales of the other ("odd") FP8 weights;
    4. the other kept tensors, by descending alignment;
    5. the odd FP8 weights themselves.

Why every offset is aligned, though no byte may be left empty: the data section starts at a multiple of
4096, so part 1 keeps every offset at a multiple of 8, which is the largest alignment there is. An 8-byte
dtype always has a length that is a multiple of 8, so nothing after part 1 needs more than 4. In parts 2
and 3 all lengths are multiples of 4 (a scale is F32), so all offsets are. In part 4 a tensor's length is a
multiple of its own alignment, and alignments only fall. FP8 weights need none, so odd ones may end the file.
An odd weight's scale is thereby apart from it; no linear layer's weight is odd (both sides are multiples of
16), only one that the user names with --quantize can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fp8fs.core.dtypes import DTYPES, FP8, element_count, nbytes
from fp8fs.core.header import encode_preamble
from fp8fs.core.plan import CAST, Extent, Piece, RowRun, Unit
from fp8fs.core.recipe import BLOCK, BLOCK_SCHEMES

__all__ = [
    "HeaderEntry",
    "Placed",
    "Scales",
    "ViewTensor",
    "place",
    "scale_bytes",
    "scale_name",
    "scale_shape",
]

HeaderEntry = tuple[str, str, tuple[int, ...], int, int]
"""name, dtype, shape, begin, end: what ``encode_preamble`` takes. Offsets count from the data section."""


class ViewTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the view before it has a place. ``dtype``, ``shape`` and ``nbytes`` are the source's;
    ``group`` is the fusion group's name, "" if alone. ``row_runs``, ``pitch``: as in ``Unit``. ``cast``: the dtype of a kept tensor
    in the view, "" for its own."""

    name: str
    quantize: bool
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: tuple[Piece, ...]
    group: str
    row_runs: tuple[RowRun, ...] = ()
    cast: str = ""
    pitch: int = 0

    @property
    def kept_dtype(self) -> str:
        """A kept tensor's dtype in the view."""
        return self.cast or self.dtype

    @property
    def kept_bytes(self) -> int:
        """A kept tensor's bytes in the view."""
        return nbytes(self.cast, self.shape) if self.cast else self.nbytes


class Placed(msgspec.Struct, frozen=True):
    """A view shard's bytes, planned: the preamble, the units in file order, the size of the file."""

    preamble: bytes
    units: tuple[Unit, ...]
    size: int


def scale_name(weight: str, scheme: str) -> str:
    """The name on disk of the scale of ``<module>.weight``."""
    return f"{weight}_scale_inv" if scheme in BLOCK_SCHEMES else f"{weight}_scale"


def scale_shape(scheme: str, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the F32 scale of a weight of that many rows and columns."""
    if scheme == "per_tensor":
        return (1,)
    if scheme == "per_channel":
        return (rows, 1)
    return (-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))


def scale_bytes(scheme: str, rows: int, cols: int) -> int:
    """Bytes of that scale."""
    if scheme == "per_tensor":
        return 4
    if scheme == "per_channel":
        return 4 * rows
    return 4 * -(-rows // BLOCK[0]) * -(-cols // BLOCK[1])


class Scales(dict[tuple[int, ...], tuple[tuple[int, ...], int]]):
    """Shape and bytes of a weight's scale by the shape of the weight: a model has thousands of weights of a few shapes.

    ``suffix``: what a weight's name ends with when it is its scale's.
    """

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.suffix = scale_name("", scheme)
        self._scheme = scheme

    def __missing__(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        rows, cols = shape
        found = scale_shape(self._scheme, rows, cols), scale_bytes(self._scheme, rows, cols)
        self[shape] = found
        return found


def place(
    tensors: Iterable[ViewTensor],
    scheme: str,
    metadata: Mapping[str, str],
    groups: Mapping[str, int] | None = None,
) -> Placed:
    """Give every tensor its place, in the order that this module's first lines prove right.

    *groups*: index of each group whose members share a scale.
    """
    groups = groups or {}
    scales = Scales(scheme)
    aligned: list[ViewTensor] = []
    pairs: list[ViewTensor] = []
    odd: list[ViewTensor] = []
    rest: list[ViewTensor] = []
    for tensor in tensors:
        if not tensor.quantize:
            (rest if tensor.kept_bytes & 7 else aligned).append(tensor)
        else:
            (odd if tensor.shape[0] * tensor.shape[1] & 3 else pairs).append(tensor)
    rest.sort(key=lambda tensor: -DTYPES[tensor.kept_dtype].align)

    entries: list[HeaderEntry] = []
    end = 0
    for tensor in aligned:
        begin, end = end, end + tensor.kept_bytes
        entries.append((tensor.name, tensor.kept_dtype, tensor.shape, begin, end))
    pairs_begin = end
    for tensor in pairs:
        name, shape = tensor.name, tensor.shape
        scale, scale_size = scales[shape]
        begin, middle = end, end + shape[0] * shape[1]
        end = middle + scale_size
        entries.append((name, FP8, shape, begin, middle))
        entries.append((name + scales.suffix, "F32", scale, middle, end))
    odd_scales_begin = end
    for tensor in odd:
        scale, scale_size = scales[tensor.shape]
        begin, end = end, end + scale_size
        entries.append((tensor.name + scales.suffix, "F32", scale, begin, end))
    rest_begin = end
    for tensor in rest:
        begin, end = end, end + tensor.kept_bytes
        entries.append((tensor.name, tensor.kept_dtype, tensor.shape, begin, end))
    odd_begin = end
    for tensor in odd:
        begin, end = end, end + tensor.shape[0] * tensor.shape[1]
        entries.append((tensor.name, FP8, tensor.shape, begin, end))

    preamble = encode_preamble(entries, {**metadata, "format": "pt"})
    base = len(preamble)
    units: list[Unit] = []
    _copies(units, aligned, base)
    position = base + pairs_begin
    for tensor in pairs:
        data = Extent(position, tensor.shape[0] * tensor.shape[1])
        scale_extent = Extent(position + data.length, scales[tensor.shape][1])
        units.append(_weight(tensor, scheme, groups.get(tensor.group, -1), data, scale_extent))
        position = scale_extent.start + scale_extent.length
    _copies(units, rest, base + rest_begin)
    position, scale_position = base + odd_begin, base + odd_scales_begin
    for tensor in odd:
        data = Extent(position, tensor.shape[0] * tensor.shape[1])
        scale_extent = Extent(scale_position, scales[tensor.shape][1])
        units.append(_weight(tensor, scheme, groups.get(tensor.group, -1), data, scale_extent))
        position += data.length
        scale_position += scale_extent.length
    return Placed(preamble, tuple(units), base + end)


def _copies(units: list[Unit], tensors: Iterable[ViewTensor], position: int) -> None:
    """Append a unit for each kept tensor, from *position* of the file on; an empty one has no bytes to make."""
    for tensor in tensors:
        size = tensor.kept_bytes
        if not size:
            continue
        extent = Extent(position, size)
        scheme, dtype, rows, cols = CAST if tensor.cast else "", tensor.dtype, 1, size
        if tensor.pitch:
            rows, cols = tensor.shape
        elif tensor.cast:
            cols = element_count(tensor.shape)
        else:
            dtype = "U8"
        units.append(
            Unit(
                tensor.name,
                scheme,
                dtype,
                rows,
                cols,
                tensor.pieces,
                extent,
                None,
                -1,
                pitch=tensor.pitch,
            )
        )
        position += size


def _weight(tensor: ViewTensor, scheme: str, group: int, data: Extent, scale: Extent) -> Unit:
    """The unit of a quantized weight."""
    rows, cols = tensor.shape
    return Unit(
        tensor.name,
        scheme,
        tensor.dtype,
        rows,
        cols,
        tensor.pieces,
        data,
        scale,
        group,
        tensor.row_runs,
        tensor.pitch,
    )
