"""The keys of the store: digests of everything that decides bytes and attributes, and of nothing else.

Fields are joined by NUL, which no name can hold; every record has a fixed number of fields, so two
different lists of facts never give one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from fp8fs.core.attributes import Attributes
from fp8fs.core.placement import Placed
from fp8fs.core.plan import Group, Unit, ViewEntry, ViewShard

__all__ = ["digest_bytes", "group_id", "object_id", "plan_id"]

OBJECT_FORMAT = "fp8fs object 1"
GROUP_FORMAT = "fp8fs group 1"
PLAN_FORMAT = "fp8fs plan 1"
"""First field of each key: raised when a key's making changes."""

_DIGEST_BYTES = 16


def digest_bytes(data: bytes) -> str:
    """blake2b-128 in hex."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def group_id(members: Iterable[Unit], identities: Sequence[str]) -> str:
    """The key of a shared scale: the source bytes of all members, in any order, whatever their names."""
    facts = sorted(_source_facts(unit, identities) for unit in members)
    return digest_bytes("\0".join((GROUP_FORMAT, *facts)).encode("ascii"))


def object_id(
    placed: Placed,
    attributes: Attributes,
    groups: Sequence[Group],
    identities: Sequence[str],
    quantizer_version: str,
) -> str:
    """The key of a sealed view shard: its preamble, attributes, and what each unit is made from and how."""
    head = (
        OBJECT_FORMAT,
        quantizer_version,
        str(placed.size),
        str(attributes.mode),
        str(attributes.uid),
        str(attributes.gid),
        str(attributes.mtime_ns),
        str(len(placed.preamble)),
    )
    units = [
        f"{unit.scheme}:{groups[unit.group].id if unit.group >= 0 else ''}:{_source_facts(unit, identities)}{_row_facts(unit)}"
        for unit in placed.units
    ]
    hasher = hashlib.blake2b("\0".join((*head, "")).encode("utf-8"), digest_size=_DIGEST_BYTES)
    hasher.update(placed.preamble)
    hasher.update("\0".join(units).encode("ascii"))
    return hasher.hexdigest()


def plan_id(
    entries: Mapping[str, ViewEntry],
    shards: Sequence[ViewShard],
    source_digests: Mapping[str, str],
    quantizer_version: str,
) -> str:
    """The key of a whole view. *source_digests*: what is known of the bytes of files that are passed through."""
    facts = [PLAN_FORMAT, quantizer_version]
    for entry in entries.values():
        if entry.kind == "shard":
            content = shards[entry.shard].object_id
        elif entry.kind == "text":
            content = digest_bytes(entry.content)
        elif entry.kind == "link":
            content = entry.link
        else:
            content = source_digests.get(entry.path, "")
        facts += (
            entry.path,
            entry.kind,
            f"{entry.size}:{entry.mode}:{entry.uid}:{entry.gid}:{entry.mtime_ns}",
            content,
        )
    return digest_bytes("\0".join(facts).encode("utf-8", "surrogateescape"))


def _source_facts(unit: Unit, identities: Sequence[str]) -> str:
    """Which source bytes a unit is made from, and how they are read."""
    if len(unit.pieces) == 1:
        piece = unit.pieces[0]
        pieces = f"{identities[piece.shard]}+{piece.file_offset}+{piece.nbytes}"
    else:
        pieces = ",".join(f"{identities[p.shard]}+{p.file_offset}+{p.nbytes}" for p in unit.pieces)
    turned = f":/{unit.pitch}" if unit.pitch else ""
    return f"{unit.dtype}:{unit.rows}:{unit.cols}:{pieces}{turned}"


def _row_facts(unit: Unit) -> str:
    """Where a unit's rows go, if not in order."""
    if not unit.row_runs:
        return ""
    return ":" + ",".join(f"{run.row}+{run.rows}+{run.data_row}" for run in unit.row_runs)
