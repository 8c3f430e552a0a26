"""What ``verify --adopt`` does: a source with new dates is accepted as the one that the store was made from, shard by
shard, if reading it proves that its bytes are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from fp8fs.assembly import Survey
from fp8fs.core.digest import TileDigester
from fp8fs.core.dtypes import DTYPES
from fp8fs.core.manifest import Manifest, parse_manifest
from fp8fs.core.plan import Unit, ViewShard, tiles
from fp8fs.engine.matrix import SourceReader
from fp8fs.engine.stats import Counters
from fp8fs.store.store import Store, UnitRecord

__all__ = ["Adoption", "Difference", "adopt"]

_OBJECT_ID = re.compile(r"[0-9a-f]{32}")

Progress = Callable[[int], None]


class Difference(msgspec.Struct, frozen=True):
    """Why a source shard was not adopted. ``tensor``: the first one of the view that differs, "" if it is none of them."""

    tensor: str
    what: str


class Adoption(msgspec.Struct, frozen=True):
    """Source shards by path: ``adopted`` with the older identity that each was proved equal to, ``refused`` with what
    differs. A shard that the store knows, or has nothing to compare with, is in neither."""

    adopted: dict[str, str]
    refused: dict[str, Difference]


def adopt(found: Survey, *, progress: Progress | None = None) -> Adoption:
    """Source shards proved equal to ones that the store knows are recorded as such, and the others are named.

    A shard is equal if a finished view of the same recipe has the same names, sizes and headers, and every
    input digest recorded for that shard equals what its bytes give now. Reads each candidate shard once.
    """
    store = found.store
    adopted: dict[str, str] = {}
    differs: dict[str, Difference] = {}
    if store is None or not store.writable:
        return Adoption(adopted, differs)
    unknown = {
        path: identity
        for path, identity in zip(
            found.plan.source_shards, found.plan.source_identities, strict=True
        )
        if not _is_known(store, found, path)
    }
    for manifest in _similar(store, found):
        older = {source.path: source for source in manifest.sources}
        left = {p for p, i in unknown.items() if p not in adopted and p in older}
        left = {path for path in left if older[path].identity != unknown[path]}
        if not left:
            continue
        differences = _differences(store, found, manifest, left, progress)
        for path in left - differences.keys():
            was = older[path]
            value = {"identity": was.identity, "mtime_ns": was.mtime_ns}
            store.write_adopted(unknown[path], value)
            adopted[path] = was.identity
        differs = differences | differs  # the newest tree's word counts
    refused = {path: what for path, what in differs.items() if path not in adopted}
    return Adoption(dict(sorted(adopted.items())), dict(sorted(refused.items())))


def _is_known(store: Store, found: Survey, path: str) -> bool:
    """Whether some sealed object of this plan is made from that source shard already."""
    index = found.plan.source_shards.index(path)
    return any(
        store.record(shard.object_id) is not None
        for shard in found.plan.shards
        if index in shard.sources
    )


def _similar(store: Store, found: Survey) -> list[Manifest]:
    """Manifests of finished trees with the same recipe and the same shards, newest first."""
    mine = found.manifest
    shape = [(shard.path, shard.size, shard.tensors) for shard in mine.shards]
    similar = []
    for info in sorted(store.list_trees(), key=lambda tree: -tree.changed_ns):
        if not info.complete or info.plan_id == found.plan.plan_id:
            continue
        try:
            place = store.tree(info.plan_id).path / ".fp8fs" / "manifest.json"
            manifest = parse_manifest(place.read_bytes())
        except OSError:
            continue
        if (
            manifest is not None
            and manifest.quantizer == mine.quantizer
            and manifest.schemes == mine.schemes
            and [(s.path, s.size, s.tensors) for s in manifest.shards] == shape
            and all(_OBJECT_ID.fullmatch(s.object_id) for s in manifest.shards)
        ):
            similar.append(manifest)
    return similar


def _differences(
    store: Store,
    found: Survey,
    manifest: Manifest,
    candidates: set[str],
    progress: Progress | None,
) -> dict[str, Difference]:
    """Those of *candidates* that are not proved equal to what *manifest* was made from, and the first thing that differs."""
    differs: dict[str, Difference] = {}
    for shard, older in zip(found.plan.shards, manifest.shards, strict=True):
        by_unit, what = _recorded(store, older.object_id, shard)
        if what:
            for path in {found.plan.source_shards[i] for i in shard.sources} & candidates:
                differs.setdefault(path, Difference("", what))
            continue
        for number, unit in enumerate(shard.units):
            paths = {found.plan.source_shards[piece.shard] for piece in unit.pieces} & candidates
            if not paths - differs.keys():
                continue
            line = by_unit.get(number)
            if line is None or line.input_digest != _input_digest(found, unit):
                for path in paths:
                    differs.setdefault(path, Difference(unit.name, "has other values"))
            if progress is not None:
                progress(sum(piece.nbytes for piece in unit.pieces))
    return differs


def _recorded(store: Store, object_id: str, shard: ViewShard) -> tuple[dict[int, UnitRecord], str]:
    """What a sealed shard of another plan was made from, by unit; or why that says nothing of *shard*."""
    record = store.record(object_id)
    preamble = _first_bytes(store.object_path(object_id), len(shard.preamble))
    if record is None or preamble is None:
        return {}, "what the store made of it is gone"
    if preamble != shard.preamble:
        return {}, "has other names or shapes"
    return {line.unit: line for line in record.records}, ""


def _first_bytes(sealed: Path, count: int) -> bytes | None:
    try:
        with sealed.open("rb") as file:
            return file.read(count)
    except OSError:
        return None


def _input_digest(found: Survey, unit: Unit) -> str:
    """The digest of a unit's source matrix, tile by tile as the engine makes it."""
    counters = Counters(shards_total=0, units_total=0, bytes_total=0)
    reader = SourceReader(found.source, found.plan.source_shards, counters, drop=False)
    item = DTYPES[unit.dtype].bits // 8
    digester = TileDigester()
    for tile in tiles(unit.rows, unit.cols, item):
        data = bytearray(tile.rows * tile.cols * item)
        reader.read_tile(unit, tile, memoryview(data))
        digester.add(data)
    return digester.hexdigest()
