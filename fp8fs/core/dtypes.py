"""The table of tensor dtypes: name in a safetensors header, bits per element, alignment in bytes.

Source: the ``Dtype`` enumeration of safetensors 0.8.0. Sub-byte dtypes are packed; their tensors
must fill whole bytes.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DTYPES", "FP8", "QUANTIZABLE", "QUANTIZED_SOURCES", "DType", "element_count", "nbytes"]


class DType(NamedTuple):
    """One dtype. ``align`` is the alignment in bytes that a reader's typed view needs."""

    name: str
    bits: int
    align: int


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("BOOL", 8, 1),
        DType("F4", 4, 1),
        DType("F6_E2M3", 6, 1),
        DType("F6_E3M2", 6, 1),
        DType("U8", 8, 1),
        DType("I8", 8, 1),
        DType("F8_E5M2", 8, 1),
        DType("F8_E4M3", 8, 1),
        DType("F8_E8M0", 8, 1),
        DType("F8_E4M3FNUZ", 8, 1),
        DType("F8_E5M2FNUZ", 8, 1),
        DType("I16", 16, 2),
        DType("U16", 16, 2),
        DType("F16", 16, 2),
        DType("BF16", 16, 2),
        DType("I32", 32, 4),
        DType("U32", 32, 4),
        DType("F32", 32, 4),
        DType("C64", 64, 4),
        DType("F64", 64, 8),
        DType("I64", 64, 8),
        DType("U64", 64, 8),
    )
}

FP8 = "F8_E4M3"
"""The dtype of every quantized weight: OCP e4m3fn, largest value 448, no infinity."""

QUANTIZABLE = frozenset({"BF16", "F16", "F32"})
"""Source dtypes that the quantizers read."""

QUANTIZED_SOURCES = frozenset(
    {
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "F8_E5M2",
        "F8_E4M3",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
    }
)
"""Dtypes whose presence means that a component is already quantized."""


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements; 1 for a scalar."""
    count = 1
    for size in shape:
        count *= size
    return count


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a packed tensor. Raises: KeyError for an unknown dtype; ValueError if the bits do not fill whole bytes."""
    bits = DTYPES[dtype].bits * element_count(shape)
    if bits % 8:
        raise ValueError(f"{dtype}{list(shape)} has {bits} bits, not whole bytes")
    return bits // 8
