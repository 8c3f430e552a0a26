"""What ``verify`` does: are the sealed bytes what their records say, and are they what the source gives?

check_store(store)      every object against its own record, by reading all of it
check_plan(found)       the objects of one plan; deep: made again from the source and compared
check_copy(...)         a copy of one object, by that object's record
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from time import sleep

import msgspec

from fp8fs.assembly import Survey
from fp8fs.core.dtypes import DTYPES
from fp8fs.core.header import Header, parse_header
from fp8fs.core.manifest import (
    decode_manifest,
    encode_manifest,
    encode_plan,
    parse_manifest,
    with_digests,
)
from fp8fs.core.plan import CAST, Plan, ViewShard
from fp8fs.core.recipe import BLOCK_SCHEMES, Recipe
from fp8fs.engine import Engine
from fp8fs.engine.shard import shard_spec, unit_spans
from fp8fs.errors import SourceInvalidError, StoreDamagedError, StoreError, StoreVersionError
from fp8fs.quant import make_quantizer
from fp8fs.store.store import Store, Tree, UnitSpan
from fp8fs.store.types import PREAMBLE
from fp8fs.tree import tree_faults
from fp8fs.version import __version__

__all__ = [
    "Audit",
    "Damage",
    "check_copy",
    "check_plan",
    "check_shard",
    "check_store",
    "check_tree",
    "of_tree",
    "set_aside",
]

_COMPARE_BYTES = 8 << 20
_LOOKS = 4
_LOOK_AGAIN_S = 0.2
"""A process that is about to write a document of a tree has done so after two or three of these."""

Progress = Callable[[int], None]


class Damage(msgspec.Struct, frozen=True):
    """One thing that is wrong. ``tensor`` is "" when it concerns the whole file, ``object_id`` when it is no object.

    ``readable`` False: the disk did not give it, so nobody knows whether it is damaged. ``tree``: the plan id of the
    tree whose own file it is, "" for an object.
    """

    object_id: str
    path: str
    tensor: str
    what: str
    readable: bool = True
    tree: str = ""


class Audit(msgspec.Struct, frozen=True):
    """What was looked at. ``missing``: view shards that are not sealed yet, which is no damage."""

    checked: int
    missing: int
    checked_bytes: int
    damage: tuple[Damage, ...]


def check_plan(
    found: Survey,
    *,
    deep: bool = False,
    device: str = "cpu",
    workers: int = 0,
    progress: Progress | None = None,
) -> Audit:
    """Digests of every sealed shard of the plan and of the finished tree's copies; *deep*: against a second making, too."""
    damage: list[Damage] = []
    judged: set[str] = set()
    missing = checked_bytes = 0
    tree = _tree_to_check(found)
    fresh = _fresh_engine(found, device=device, workers=workers) if deep else None
    try:
        for number, shard in enumerate(found.plan.shards):
            store = found.store
            if store is None or not os.path.lexists(store.object_path(shard.object_id)):
                missing += 1
                continue
            bad = check_shard(store, shard)
            if fresh is not None and not bad:
                bad = _compare(fresh, number, shard, store.object_path(shard.object_id))
            if tree is not None and not bad:  # else the link of the damaged object goes with it
                bad = _check_tree_shard(found.plan.plan_id, store, tree, shard)
            damage += bad
            judged.add(shard.path)
            checked_bytes += shard.size
            if progress is not None:
                progress(shard.size)
    finally:
        if fresh is not None:
            fresh.close()
    damage += check_tree(found, judged=judged)
    if tree is not None and _tree_to_check(found) is None:  # given up meanwhile: made again anyway
        damage = [item for item in damage if not item.tree]
    return Audit(len(judged), missing, checked_bytes, tuple(damage))


def check_shard(store: Store, shard: ViewShard) -> list[Damage]:
    """Every byte of a sealed shard. What the cheap check of every use refuses is set aside by that check."""
    try:
        sealed = store.find_object(shard_spec(shard))
    except StoreError as err:
        return [Damage(shard.object_id, shard.path, "", err.what, readable=False)]
    if sealed is None:
        what = "size, header, record or mode is not what was written"
        return [Damage(shard.object_id, shard.path, "", what)]
    return check_copy(store, shard)


def check_copy(store: Store, shard: ViewShard, copy: Path | None = None) -> list[Damage]:
    """Every byte of a *copy* of a sealed shard (None: of the object itself), by the object's record."""
    names = [unit.name for unit in shard.units]
    return _check_object(store, shard.object_id, shard.path, unit_spans(shard), names, copy)


def _tree_to_check(found: Survey) -> Tree | None:
    """The finished tree; None also if that cannot be told, which ``check_tree`` reports."""
    try:
        return found.tree
    except StoreError:
        return None


def _check_tree_shard(plan_id: str, store: Store, tree: Tree, shard: ViewShard) -> list[Damage]:
    """Every byte of a sealed shard as a tree holds it, unless that is the object itself."""
    try:
        fault = tree.shard_fault(
            shard.path, shard.object_id, size=shard.size, preamble=shard.preamble
        )
        if fault:
            return [Damage("", shard.path, "", fault, tree=plan_id)]
        if tree.is_linked(shard.path, shard.object_id):
            return []
    except StoreError as err:
        return [Damage("", shard.path, "", err.what, readable=False, tree=plan_id)]
    return of_tree(plan_id, check_copy(store, shard, tree.path / shard.path))


def of_tree(plan_id: str, damage: Iterable[Damage]) -> list[Damage]:
    """What is wrong with a copy of an object is the tree's damage, not the object's."""
    return [msgspec.structs.replace(item, object_id="", tree=plan_id) for item in damage]


def check_tree(found: Survey, *, judged: Collection[str] = ()) -> list[Damage]:
    """The finished tree's own files: shards by a look, and not those that were *judged* already; all else in full."""
    plan_id = found.plan.plan_id
    try:
        tree = found.tree
        if tree is None:
            return []
        faults = tree_faults(found.plan, found.source, tree, full=True)
        for name in _damaged_documents(found, tree):
            faults[f".fp8fs/{name}"] = "is not what was written"
    except StoreError as err:
        return [Damage("", "", "", err.what, readable=False, tree=plan_id)]
    return [
        Damage("", path, "", what, tree=plan_id)
        for path, what in faults.items()
        if path not in judged
    ]


def _damaged_documents(found: Survey, tree: Tree) -> list[str]:
    """manifest.json and plan.json, if they do not say what they must.

    Looked at several times before that is said: others may be about to finish the tree, or to make it again.
    """
    planned_as = cache(found.planned_as)
    for look in range(_LOOKS):
        if look:
            sleep(_LOOK_AGAIN_S)
        wrong = _wrong_documents(found, tree, planned_as)
        if not wrong or not tree.is_complete():
            return []
    return wrong


def _wrong_documents(
    found: Survey, tree: Tree, planned_as: Callable[[Recipe], Plan | None]
) -> list[str]:
    """What ``_damaged_documents`` returns, as of now. Another version may say it in other words."""
    content = _read_own(tree.path, "manifest.json")
    manifest = parse_manifest(content)
    if manifest is None:
        return ["manifest.json"]
    if manifest.version != __version__:
        return []
    planned = planned_as(manifest.recipe)
    if planned is None:
        return ["manifest.json"]
    expected = msgspec.structs.replace(found.manifest, name=manifest.name, recipe=manifest.recipe)
    digests = {shard.object_id: shard.digest for shard in manifest.shards}
    for object_id in {shard.object_id for shard in expected.shards}:
        record = found.store.record(object_id) if found.store is not None else None
        if record is not None:  # else the object itself is damaged
            digests[object_id] = record.shard_digest
    wrong = []
    if encode_manifest(with_digests(expected, digests)) != content:
        wrong.append("manifest.json")
    if _read_own(tree.path, "plan.json") != encode_plan(planned):
        wrong.append("plan.json")
    return wrong


def _read_own(tree: Path, name: str) -> bytes:
    """A file of the tree's .fp8fs/; empty if it is missing."""
    try:
        return (tree / ".fp8fs" / name).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as err:
        raise StoreError(f"{tree}: {name} cannot be read: {err.strerror}") from err


def check_store(store: Store, *, progress: Progress | None = None) -> Audit:
    """Digests of every object of a store and of its finished trees' copies, whatever they were made from."""
    damage: list[Damage] = []
    sound: set[str] = set()
    objects = store.list_objects()
    for info in objects:
        bad = _check_recorded(store, info.object_id)
        if not bad:
            sound.add(info.object_id)
        damage += bad
        if progress is not None:
            progress(info.size)
    for place in store.list_trees():
        if place.complete:
            damage += _check_recorded_tree(store, place.plan_id, sound)
    return Audit(len(objects), 0, sum(info.size for info in objects), tuple(damage))


def _check_recorded_tree(store: Store, plan_id: str, sound: Collection[str]) -> list[Damage]:
    """The shards of a finished tree by its manifest, as far as their objects are *sound*."""
    damage: list[Damage] = []
    tree = store.tree(plan_id)
    try:
        try:
            shards = decode_manifest(_read_own(tree.path, "manifest.json")).shards
        except StoreVersionError:  # a newer fp8fs made it, and can check it
            return []
        except StoreDamagedError as err:
            shards = ()
            damage.append(Damage("", ".fp8fs/manifest.json", "", err.what))
        for shard in shards:
            if shard.object_id not in sound or tree.is_linked(shard.path, shard.object_id):
                continue
            fault = tree.shard_fault(shard.path, shard.object_id, size=shard.size, preamble=b"")
            if fault:
                damage.append(Damage("", shard.path, "", fault))
            else:
                copy = tree.path / shard.path
                damage += _check_recorded(store, shard.object_id, shard.path, copy)
        complete = tree.is_complete()
    except StoreError as err:
        return [Damage("", "", "", err.what, readable=False, tree=plan_id)]
    return of_tree(plan_id, damage) if complete else []  # removed or given up meanwhile


def set_aside(store: Store, damage: Iterable[Damage]) -> int:
    """Damaged objects leave the store, so that they are made again; how many did. Trees that hold one, or are damaged
    themselves, are complete no more. What could not be read stays: another cable or kernel may read it."""
    reasons: dict[str, str] = {}
    for item in damage:
        if not item.readable:
            continue
        if item.tree:
            store.tree(item.tree).doubt()
            continue
        reasons.setdefault(item.object_id, f"verify: {item.tensor or item.path}: {item.what}")
    for object_id, reason in reasons.items():
        store.set_aside(object_id, reason)
    for info in store.list_trees() if reasons else ():
        if info.complete and not info.object_ids.isdisjoint(reasons):
            store.tree(info.plan_id).doubt()
    return len(reasons)


def _check_object(
    store: Store,
    object_id: str,
    path: str,
    spans: list[UnitSpan],
    names: list[str],
    copy: Path | None = None,
) -> list[Damage]:
    try:
        bad = store.verify_object(object_id, spans, copy=copy)
    except StoreDamagedError as err:
        return [Damage(object_id, path, "", err.what)]
    except StoreError as err:
        return [Damage(object_id, path, "", err.what, readable=False)]
    found = []
    for unit in bad:
        if unit == PREAMBLE:
            found.append(Damage(object_id, path, "", "the header is not what was written"))
        else:
            what = "its bytes are not what was written"
            found.append(Damage(object_id, path, names[unit], what))
    return found


class _RecordedUnit(msgspec.Struct, frozen=True):
    """What a record says of one unit (engine.shard.seal_facts)."""

    name: str
    scheme: str
    dtype: str
    row_runs: tuple[tuple[int, int, int], ...] = ()
    pitch: int = 0


class _RecordedFacts(msgspec.Struct, frozen=True):
    units: tuple[_RecordedUnit, ...]


def _check_recorded(
    store: Store, object_id: str, path: str = "", copy: Path | None = None
) -> list[Damage]:
    """An object, or a *copy* of it, by its record and the object's own header, without the plan that it was made for."""
    try:
        record = store.record(object_id)
    except StoreError as err:
        return [Damage(object_id, path, "", err.what, readable=False)]
    if record is None:
        return [Damage(object_id, path, "", "its record is missing or damaged")]
    try:
        facts = msgspec.json.decode(record.facts, type=_RecordedFacts)
        with store.object_path(object_id).open("rb") as file:
            preamble = file.read(record.preamble_bytes)
        header = parse_header(preamble, record.size, object_id)
        spans = [_recorded_span(i, unit, header) for i, unit in enumerate(facts.units)]
    except OSError as err:
        return [Damage(object_id, path, "", f"cannot be read: {err.strerror}", readable=False)]
    except (msgspec.DecodeError, KeyError, SourceInvalidError) as err:
        return [Damage(object_id, path, "", f"header and record do not match: {err}")]
    return _check_object(store, object_id, path, spans, [unit.name for unit in facts.units], copy)


def _recorded_span(number: int, unit: _RecordedUnit, header: Header) -> UnitSpan:
    """Where a unit lies, by the header of the file that it is in."""
    entry = header.tensors[unit.name]
    start = header.preamble_bytes + entry.data_offsets[0]
    item_bytes = DTYPES[unit.dtype].bits // 8
    if unit.scheme in ("", CAST):
        narrowing = item_bytes * 8 // DTYPES[entry.dtype].bits if unit.scheme else 1
        rows = entry.shape[0] if unit.pitch else 1
        return UnitSpan(number, start, entry.nbytes, rows, entry.nbytes // rows, narrowing)
    suffix = "_scale_inv" if unit.scheme in BLOCK_SCHEMES else "_scale"
    scale = header.tensors[unit.name + suffix]
    return UnitSpan(
        number,
        start,
        entry.nbytes,
        entry.shape[0],
        entry.shape[1],
        item_bytes,
        header.preamble_bytes + scale.data_offsets[0],
        scale.nbytes,
        unit.row_runs,
    )


def _fresh_engine(found: Survey, *, device: str, workers: int) -> Engine:
    """An engine that knows no store, so that it makes everything from the source."""
    return Engine(
        found.plan,
        found.source,
        None,
        lambda: make_quantizer(device),
        workers=workers,
        grain="tensor",
        why_no_store="verify --deep compares with the source",
    )


def _compare(fresh: Engine, number: int, shard: ViewShard, sealed: Path) -> list[Damage]:
    """The tensors whose sealed bytes differ from those made now."""
    found = []
    reader = fresh.open(number)
    fd = os.open(sealed, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for unit in shard.units:
            extents = [unit.data] + ([unit.scale] if unit.scale else [])
            if any(not _same(reader.pread, fd, extent.start, extent.length) for extent in extents):
                what = "its bytes are not what the source gives"
                found.append(Damage(shard.object_id, shard.path, unit.name, what))
    finally:
        os.close(fd)
        reader.close()
    return found


def _same(
    pread: Callable[[int, int, Callable[[], None]], bytes], fd: int, start: int, length: int
) -> bool:
    for at in range(start, start + length, _COMPARE_BYTES):
        step = min(_COMPARE_BYTES, start + length - at)
        if pread(at, step, lambda: None) != os.pread(fd, step, at):
            return False
    return True
