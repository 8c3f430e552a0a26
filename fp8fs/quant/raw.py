"""Raw buffers as addresses, for compiled kernels: what buffers.py does for arrays, without importing numpy."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple

from fp8fs.core.quantizer import Buffer
from fp8fs.core.recipe import BLOCK

__all__ = [
    "INFINITE",
    "ITEM_BYTES",
    "PANEL",
    "Raw",
    "block_grid",
    "contents",
    "float32",
    "magnitude",
    "row_length",
    "row_maxima",
    "source",
    "target_bytes",
    "target_floats",
]

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of an element, by dtype name."""

INFINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}
"""Magnitude code of infinity; every NaN is above it."""

PANEL = 32
"""Blocks side by side that a kernel reads, then casts: 512 KiB to 2 MiB of source, and its scratch."""

_F32 = struct.Struct("<f")


class Raw(NamedTuple):
    """Memory that stays where it is for as long as this is held."""

    holder: object
    address: int
    elems: int


def source(src: Buffer, dtype: str) -> Raw:
    """*src* as elements of *dtype*, copied if it is read-only or its address is not aligned.

    Raises: ValueError for a dtype that is no source dtype, or a size that is not whole elements.
    """
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise ValueError(f"no quantizer reads dtype {dtype!r}; they read {', '.join(ITEM_BYTES)}")
    view = memoryview(src)
    count, rest = divmod(view.nbytes, item)
    if rest:
        raise ValueError(f"{view.nbytes} bytes are no whole elements of {dtype}")
    raw = None if view.readonly else _raw(view, count)
    if raw is None or raw.address % item:
        raw = _raw(memoryview(bytearray(view)), count)
    return raw


def target_bytes(dst: Buffer, count: int) -> Raw:
    """*dst* as *count* FP8 bytes. Raises: ValueError if it is read-only or of another size."""
    view = memoryview(dst)
    if view.nbytes != count or view.readonly:
        raise ValueError(
            f"the FP8 buffer must be writable and hold {count} bytes, not {view.nbytes}"
        )
    return _raw(view, count)


def target_floats(out: Buffer, count: int) -> Raw:
    """*out* as *count* float32. Raises: ValueError if it is read-only, not aligned, or of another size."""
    view = memoryview(out)
    if view.nbytes == 4 * count and not view.readonly:
        raw = _raw(view, count)
        if raw.address % 4 == 0:
            return raw
    raise ValueError(
        f"the float32 buffer must be writable, aligned and hold {4 * count} bytes, not {view.nbytes}"
    )


def float32(value: float) -> float:
    """The float32 nearest to *value*."""
    return ctypes.c_float(value).value


def magnitude(code: int, dtype: str) -> float:
    """The value of a finite magnitude code, exact."""
    if dtype == "F16":
        return float(struct.unpack("<e", struct.pack("<H", code))[0])
    bits = code << 16 if dtype == "BF16" else code
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def row_length(count: int, rows: int) -> int:
    """Elements per row of *count* elements in *rows* rows. Raises: ValueError if they are ragged."""
    if rows < 0 or (count % rows if rows else count):
        raise ValueError(f"{count} elements do not make {rows} equal rows")
    return count // rows if rows else 0


def block_grid(count: int, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of the scales of a (rows, cols) tile: edge blocks count whole.

    Raises: ValueError if the tile does not have *count* elements.
    """
    if rows < 0 or cols < 0 or rows * cols != count:
        raise ValueError(f"{count} elements are no {rows} x {cols} matrix")
    return -(-rows // BLOCK[0]), -(-cols // BLOCK[1])


def row_maxima(amax: Buffer, rows: int) -> Raw:
    """A copy of *amax* as *rows* float32. Raises: ValueError if they are not finite magnitudes."""
    copy = bytearray(memoryview(amax))
    if len(copy) != 4 * rows or not all(
        0.0 <= value < math.inf for (value,) in _F32.iter_unpack(copy)
    ):
        raise ValueError(f"row maxima must be {rows} finite magnitudes")
    return _raw(memoryview(copy), rows)


def contents(raw: Raw, dtype: str) -> Buffer:
    """The bytes of elements of *dtype*, for as long as *raw* is held."""
    return (ctypes.c_ubyte * (raw.elems * ITEM_BYTES[dtype])).from_address(raw.address)


def _raw(view: memoryview, count: int) -> Raw:
    if not view.nbytes:
        return Raw(view, 0, 0)
    first = ctypes.c_char.from_buffer(view)
    return Raw(first, ctypes.addressof(first), count)
