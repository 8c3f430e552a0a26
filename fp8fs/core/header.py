"""The preamble of a safetensors file: bytes to a typed header and back, with every format check.

The format: 8 bytes little-endian length N, N bytes of JSON (padded with spaces), then the data.
Each entry is ``name: {"dtype", "shape", "data_offsets": [begin, end]}`` with offsets relative to
the data section; entries cover the data section without gap or overlap.
Source: the format section of safetensors 0.8.0's README and its ``validate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

__all__ = [
    "MAX_HEADER_BYTES",
    "Header",
    "TensorEntry",
    "encode_preamble",
    "header_length",
    "parse_header",
]

MAX_HEADER_BYTES = 100_000_000
"""The reader's own limit in safetensors; a larger claim is refused before anything is read."""


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor as the header states it. ``data_offsets`` are bytes relative to the data section."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class Header(msgspec.Struct, frozen=True):
    """A checked header. ``tensors`` is in the order of the offsets; ``preamble_bytes`` is 8 + N.

    A tensor's bytes are at file offset ``preamble_bytes + data_offsets[0]``.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    preamble_bytes: int

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section."""
        return max((t.data_offsets[1] for t in self.tensors.values()), default=0)


def header_length(first8: bytes, file_bytes: int, file: str) -> int:
    """The N of a safetensors file, checked against MAX_HEADER_BYTES and the file's size.

    Raises: SourceInvalidError naming *file*.
    """
    raise NotImplementedError


def parse_header(preamble: bytes, file_bytes: int, file: str) -> Header:
    """A header whose every statement has been checked; tensors in the order of their data.

    *preamble* is the first 8 + N bytes of the file, *file_bytes* its whole size.
    Raises: SourceInvalidError naming *file*, the tensor, what was expected and found.
    """
    raise NotImplementedError


def encode_preamble(
    entries: Iterable[tuple[str, str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str],
    *,
    data_align: int = 4096,
) -> bytes:
    """Length, JSON and padding, so that the data section starts at a multiple of *data_align*.

    *entries*: (name, dtype, shape, begin, end), written in the given order after ``__metadata__``.
    """
    raise NotImplementedError
