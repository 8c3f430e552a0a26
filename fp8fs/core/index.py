"""``*.safetensors.index.json``: bytes to a checked index and back."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["Index", "encode_index", "parse_index"]


class Index(msgspec.Struct, frozen=True):
    """A checked index. ``weight_map``: tensor name -> file name beside the index, in the file's order.

    ``metadata`` keeps every key of the source's, ``total_size`` included.
    """

    weight_map: dict[str, str]
    metadata: dict[str, object]


def parse_index(data: bytes, file: str) -> Index:
    """A checked index. Raises: SourceInvalidError naming *file*."""
    raise NotImplementedError


def encode_index(
    metadata: Mapping[str, object], weight_map: Mapping[str, str], total_size: int
) -> bytes:
    """The index as JSON, two spaces of indent, weight_map sorted by tensor name, ``metadata.total_size`` replaced by
    *total_size* (bytes of all tensors), every other metadata key kept."""
    raise NotImplementedError
