"""Raw buffers as numpy arrays of codes: the checks and the search that every quantizer shares.

A *code* is the integer with the bits of one source element. BF16 and F32 codes are unsigned; F16
codes are signed, so that the element type of an array alone tells which dtype it holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8fs.core.quantizer import Buffer
from fp8fs.errors import NonFiniteTensorError
from fp8fs.quant.raw import INFINITE
from fp8fs.quant.reference import TENSOR_SCALE_MIN, Weight, to_bf16

__all__ = [
    "CODE",
    "MAGNITUDE",
    "Bytes",
    "Codes",
    "Floats",
    "inverse_scale",
    "nonfinite",
    "round_bf16",
    "row_maxima",
    "source_codes",
    "target_bytes",
    "target_floats",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.integer[Any]]

CODE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<i2"),
    "F32": np.dtype("<u4"),
}
"""Element type of an array of codes, by dtype name."""

MAGNITUDE: dict[str, int] = {"BF16": 0x7FFF, "F16": 0x7FFF, "F32": 0x7FFF_FFFF}
"""Mask that drops the sign of a code. What is left orders as the magnitudes do."""

_SEARCH_ELEMS = 1 << 20
_ROUND_ELEMS = 1 << 16
_VALUE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}


def source_codes(src: Buffer, dtype: str) -> Codes:
    """*src* as a read-only array of codes, without a copy unless its address is not aligned.

    Raises: ValueError for a dtype that is no source dtype, or a size that is not whole elements.
    """
    if dtype not in CODE:
        raise ValueError(f"no quantizer reads dtype {dtype!r}; they read {', '.join(CODE)}")
    codes: Codes = np.frombuffer(memoryview(src), dtype=CODE[dtype])
    if not codes.flags.aligned:
        codes = codes.copy()
    codes.flags.writeable = False
    return codes


def target_bytes(dst: Buffer, count: int) -> Bytes:
    """*dst* as an array of *count* FP8 bytes, without a copy.

    Raises: ValueError if it is read-only or of another size.
    """
    data: Bytes = np.frombuffer(memoryview(dst), dtype=np.uint8)
    if data.size != count or not data.flags.writeable:
        raise ValueError(f"the FP8 buffer must be writable and hold {count} bytes, not {data.size}")
    return data


def target_floats(out: Buffer, count: int) -> Floats:
    """*out* as an array of *count* float32, without a copy.

    Raises: ValueError if it is read-only, not aligned, or of another size.
    """
    floats: Floats = np.frombuffer(memoryview(out), dtype=np.float32)
    if floats.size != count or not floats.flags.writeable or not floats.flags.aligned:
        raise ValueError(
            f"the float32 buffer must be writable, aligned and hold {count} values, not {floats.size}"
        )
    return floats


def round_bf16(src: Buffer, dtype: str, dst: Buffer) -> None:
    """dst = BF16(src). Scratch memory is bounded whatever the tile's size. Raises: ValueError if *dst* does not fit."""
    codes = source_codes(src, dtype)
    target: Codes = np.frombuffer(memoryview(dst), dtype=CODE["BF16"])
    if target.size != codes.size or not target.flags.writeable:
        raise ValueError(
            f"the BF16 buffer must be writable and hold {codes.size} values, not {target.size}"
        )
    weight: Weight = np.frombuffer(codes, _VALUE[dtype])
    for start in range(0, codes.size, _ROUND_ELEMS):
        part = slice(start, start + _ROUND_ELEMS)
        target[part] = to_bf16(weight[part])


def row_maxima(amax: Buffer, rows: int) -> Floats:
    """*amax* as an array of *rows* float32. Raises: ValueError if they are not finite magnitudes."""
    peaks: Floats = np.frombuffer(memoryview(amax), dtype=np.float32)
    if peaks.size != rows or not (np.isfinite(peaks) & (peaks >= 0)).all():
        raise ValueError(f"row maxima must be {rows} finite magnitudes")
    return peaks.copy()


def inverse_scale(scale: float) -> np.float32:
    """1 / *scale* in float32. Raises: ValueError unless *scale* and that are positive and finite."""
    value = np.float32(scale)
    if not TENSOR_SCALE_MIN <= value < np.inf:
        raise ValueError(f"{scale!r} is no per_tensor scale")
    return np.float32(1.0) / value


def nonfinite(codes: Codes, dtype: str) -> NonFiniteTensorError:
    """The error that names the first NaN or Inf of *codes*, which hold at least one.

    Cost: one pass up to that element; scratch memory is bounded whatever the tile's size.
    """
    for start in range(0, codes.size, _SEARCH_ELEMS):
        part = codes[start : start + _SEARCH_ELEMS]
        bad = (part & part.dtype.type(MAGNITUDE[dtype])) >= INFINITE[dtype]
        if bad.any():
            index = start + int(bad.argmax())
            return NonFiniteTensorError(f"element {index} is NaN or Inf", index=index)
    raise ValueError("every element is finite")
