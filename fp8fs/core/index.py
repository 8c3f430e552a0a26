"""``*.safetensors.index.json``: bytes to a checked index and back."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fp8fs.core.text import is_text, parse_object, quoted
from fp8fs.errors import SourceInvalidError

__all__ = ["Index", "encode_index", "parse_index"]


class Index(msgspec.Struct, frozen=True):
    """A checked index. ``weight_map``: tensor name -> file name beside the index, in the file's order.

    ``metadata`` keeps every key of the source's, ``total_size`` included.
    """

    weight_map: dict[str, str]
    metadata: dict[str, object]


def parse_index(data: bytes, file: str) -> Index:
    """A checked index. Raises: SourceInvalidError naming *file*."""
    whole = parse_object(data, file)
    metadata = whole.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise SourceInvalidError(f"{file}: metadata is not an object", file=file)
    try:
        msgspec.json.encode(metadata)  # it has to come out again, in the view's index
    except (ValueError, OverflowError, RecursionError) as err:
        raise SourceInvalidError(
            f"{file}: metadata cannot be written again: {err}", file=file
        ) from err
    found = whole.get("weight_map")
    if not isinstance(found, dict):
        raise SourceInvalidError(f"{file}: has no weight_map object", file=file)
    for name, shard in found.items():
        if not isinstance(shard, str):
            raise SourceInvalidError(
                f"{file}: the file of tensor {quoted(name)} is not a string", file=file
            )
    if not is_text("".join(found)):
        name = next(name for name in found if not is_text(name))
        raise SourceInvalidError(f"{file}: tensor name {quoted(name)} is not valid text", file=file)
    for shard in dict.fromkeys(found.values()):
        _check_plain(shard, file)
    return Index(found, metadata)


def encode_index(
    metadata: Mapping[str, object], weight_map: Mapping[str, str], total_size: int
) -> bytes:
    """The index as JSON, two spaces of indent, weight_map sorted by tensor name, ``metadata.total_size`` replaced by
    *total_size* (bytes of all tensors), every other metadata key kept."""
    by_name = msgspec.Raw(msgspec.json.encode(weight_map, order="sorted"))
    whole = {"metadata": {**metadata, "total_size": total_size}, "weight_map": by_name}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def _check_plain(shard: str, file: str) -> None:
    """A name in the index's own folder, and nothing that leads elsewhere."""
    if shard in ("", ".", "..") or "/" in shard or "\0" in shard or not is_text(shard):
        raise SourceInvalidError(
            f"{file}: names {quoted(shard)}, which is not a plain file name", file=file
        )
