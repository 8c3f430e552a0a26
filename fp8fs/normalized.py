"""Writes a normalized FP8 cache from the store, and says whether a directory is one.

Published by one rename of a directory that was staged beside it. Whoever comes second finds a valid one and takes it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fp8fs.assembly import Survey, survey
from fp8fs.audit import Damage, check_shard
from fp8fs.building import Progress, build_tree
from fp8fs.copies import give_away
from fp8fs.core.checkpoint import Component
from fp8fs.core.normalized import (
    COMPLETE,
    COMPLETE_TEXT,
    FOLDER,
    INDEX,
    MANIFEST,
    Artifact,
    ArtifactShard,
    SourceFile,
    encode_artifact_index,
    encode_artifact_manifest,
    fingerprint,
    index_fault,
    manifest_fault,
    plan_artifact,
    recipe_for,
)
from fp8fs.core.plan import Plan
from fp8fs.core.profiles import Profile, find
from fp8fs.core.recipe import Recipe
from fp8fs.errors import (
    SourceChangedError,
    SourceInvalidError,
    StoreBusyError,
    StoreFullError,
    UsageError,
)
from fp8fs.export import check_apart, check_no_mount_point, check_parent, mount_point_error
from fp8fs.staging import staging
from fp8fs.store.store import Store, Tree

__all__ = ["Looked", "build_normalized", "look", "looks_normalized"]

_STEP_BYTES = 4 << 20
_JSON_MAX_BYTES = 256 << 20
_ATTEMPTS = 100
_TOP = frozenset({COMPLETE, MANIFEST, FOLDER})


class Looked(NamedTuple):
    """A directory as a loader would see it. ``miss``: why it is no hit, "" if it is one."""

    miss: str
    tensors: int = 0
    files: tuple[str, ...] = ()
    """The source files that it was made from."""


# --- looking ------------------------------------------------------------------------------------------------------


def looks_normalized(place: Path) -> bool:
    """Whether *place* is meant to be a normalized cache, valid or not: it has a part of one and no model's config."""
    if any(os.path.exists(place / name) for name in ("model_index.json", "config.json")):
        return False
    return any(os.path.lexists(place / name) for name in (COMPLETE, MANIFEST, INDEX))


def look(place: Path) -> Looked:
    """A hit exactly if the contract is met: marker, manifest, index, files, and sources as they were. Never raises."""
    try:
        return _look(place)
    except (OSError, ValueError, RecursionError) as err:
        return Looked(f"cannot be read: {err}")


def _look(place: Path) -> Looked:
    if _read(place / COMPLETE) != COMPLETE_TEXT:
        return Looked("COMPLETE does not say so")
    index = json.loads(_read(place / INDEX))
    if fault := index_fault(index):
        return Looked(fault)
    weight_map: dict[str, str] = index["weight_map"]
    manifest = json.loads(_read(place / MANIFEST))
    if fault := manifest_fault(manifest, len(weight_map)):
        return Looked(fault)
    for name in sorted(set(weight_map.values())):
        if not (place / FOLDER / name).is_file():
            return Looked(f"{FOLDER}/{name} is missing")
    files: list[str] = manifest["source_files"]
    if fingerprint(map(_source_file, files)) != manifest["source_fingerprint"]:
        return Looked("the source has changed")
    return Looked("", len(weight_map), tuple(files))


def _read(path: Path) -> bytes:
    """A regular file's bytes; a pipe or a file without end is refused, not waited for."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    with path.open("rb") as file:
        data = file.read(_JSON_MAX_BYTES + 1)
    if len(data) > _JSON_MAX_BYTES:
        raise ValueError(f"{path.name} is too large")
    return data


def _source_file(path: str) -> SourceFile:
    found = os.stat(path)
    return SourceFile(path, found.st_size, found.st_mtime_ns)


# --- writing ------------------------------------------------------------------------------------------------------


def build_normalized(
    src: Path,
    target: Path | None,
    recipe: Recipe,
    store_root: Path,
    *,
    device: str = "auto",
    workers: int = 0,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Path:
    """A valid normalized cache of SRC's transformer is at the path returned: *target*, or a place in *store_root*.

    What the store lacks is made first, and what is damaged there made again: its bytes are checked before they are
    linked or copied. A valid one of the same source is left as it is, a stale one replaced.
    Raises: UsageError, SourceInvalidError, SourceChangedError, StoreError, and what ``build_tree`` raises.
    """
    if target is not None:
        _check_target(target, src)
        check_apart(target, store_root)
    with survey(src, recipe, store_root) as found:
        component, profile = _transformer(found)
        full = recipe_for(component, profile, recipe)
        root = os.path.abspath(src)
        files = _source_files(f"{root}/{path}" for path in component.shards)
    with survey(src, full, store_root) as found:  # what cannot be one is refused before any work
        plan_artifact(found.plan, component, profile)
        plan_id = found.plan.plan_id
    place = (target or store_root / "normalized-cache" / plan_id).absolute()
    if _is_hit(place, files):
        return place

    def give(found: Survey, store: Store, tree: Tree) -> list[Damage]:
        component, profile = _transformer(found)
        artifact = plan_artifact(found.plan, component, profile)
        shards = [found.plan.shards[shard.view_shard] for shard in artifact.shards]
        damage = [item for shard in shards for item in check_shard(store, shard)]
        if not damage:
            _make(found.plan, store, artifact, files, place)
        return damage

    make = partial(
        build_tree,
        src,
        full,
        store_root,
        device=device,
        workers=workers,
        progress=progress,
        note=note,
    )
    make()
    give_away(src, full, store_root, give, make, note)
    return place


def _transformer(found: Survey) -> tuple[Component, Profile | None]:
    for component in found.source.checkpoint.components:
        if component.path == FOLDER:
            return component, find(component.class_name, component.kind)
    raise SourceInvalidError(
        f"a normalized cache is of a pipeline's {FOLDER}, and SRC has none",
        hint="fp8fs build SRC without --as",
    )


def _source_files(paths: Iterable[str]) -> list[SourceFile]:
    try:
        return sorted(map(_source_file, paths))
    except OSError as err:
        raise SourceChangedError(f"{err.filename}: {err.strerror}", hint="build again") from err


def _is_hit(place: Path, files: list[SourceFile]) -> bool:
    """Whether a valid artifact of these files is there."""
    found = look(place)
    return not found.miss and list(found.files) == [file.path for file in files]


def _check_target(target: Path, src: Path) -> None:
    """Raises: UsageError for a place where we would have to remove what is not ours."""
    inside, source = target.resolve(), src.resolve()
    if inside == source or source in inside.parents:
        raise UsageError(f"{target} is inside SRC {src}", hint="choose a place outside of it")
    if os.path.islink(target) or (os.path.exists(target) and not target.is_dir()):
        raise UsageError(f"{target} is not a directory", hint="choose a new directory")
    if os.path.isdir(target) and not {entry.name for entry in target.iterdir()} <= _TOP:
        raise UsageError(
            f"{target} holds something that is no normalized cache", hint="choose a new directory"
        )
    check_no_mount_point(target)
    check_parent(target)


def _make(
    plan: Plan, store: Store, artifact: Artifact, files: list[SourceFile], place: Path
) -> None:
    """The artifact is published at *place*. Raises: SourceChangedError, StoreFullError, UsageError for a mount point."""
    try:
        place.parent.mkdir(exist_ok=True)
        with staging(place.parent) as stage:
            made = stage / "cache"
            made.mkdir(0o700)
            _write(plan, store, artifact, files, made)
            if _source_files(file.path for file in files) != files:
                raise SourceChangedError("SRC changed while it was read", hint="build again")
            _publish(made, place, files)
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise mount_point_error(place) from err
        raise _cannot_write(place, err) from err


def _write(
    plan: Plan, store: Store, artifact: Artifact, files: list[SourceFile], stage: Path
) -> None:
    """Everything is in *stage* and durable, COMPLETE last."""
    folder = stage / FOLDER
    folder.mkdir()
    for shard in artifact.shards:
        sealed = store.object_path(plan.shards[shard.view_shard].object_id)
        if not (shard.same and _link(sealed, folder / shard.name)):
            _copy(sealed, shard, folder / shard.name)
    _write_file(stage / INDEX, encode_artifact_index(artifact))
    _sync(folder)
    _write_file(stage / MANIFEST, encode_artifact_manifest(len(artifact.weight_map), files))
    _sync(stage)
    _write_file(stage / COMPLETE, COMPLETE_TEXT)
    os.chmod(folder, 0o755)
    os.chmod(stage, 0o755)
    _sync(stage)


def _link(sealed: Path, target: Path) -> bool:
    """A hard link to the sealed shard; False where there can be none (another filesystem, rights)."""
    try:
        os.link(sealed, target)
    except OSError:
        return False
    return True


def _copy(sealed: Path, shard: ArtifactShard, target: Path) -> None:
    with sealed.open("rb", buffering=0) as reading, _create(target) as writing:
        writing.write(shard.preamble)
        for run in shard.runs:
            at, end = run.start, run.start + run.length
            while at < end:
                data = os.pread(reading.fileno(), min(_STEP_BYTES, end - at), at)
                if not data:
                    raise OSError(errno.EIO, f"{sealed} ends at byte {at}")
                writing.write(data)
                at += len(data)
        os.fchmod(writing.fileno(), os.fstat(reading.fileno()).st_mode & 0o777)
        _flush(writing)


def _write_file(path: Path, data: bytes) -> None:
    with _create(path) as writing:
        writing.write(data)
        _flush(writing)


def _create(path: Path) -> BinaryIO:
    return path.open("xb", buffering=_STEP_BYTES)


def _flush(writing: BinaryIO) -> None:
    writing.flush()
    os.fsync(writing.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(made: Path, place: Path, files: list[SourceFile]) -> None:
    """*place* is a valid artifact: *made*, or another publisher's of the same source.

    A stale one is moved aside first; between the two renames a reader finds nothing, which is a miss like another.
    """
    for attempt in range(_ATTEMPTS):
        try:
            os.rename(made, place)
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            _sync(place.parent)
            return
        if _is_hit(place, files):
            return
        with suppress(FileNotFoundError):  # another publisher was faster
            os.rename(place, made.parent / f"stale-{attempt}")
    raise StoreBusyError(f"{place} is replaced by others again and again", hint="build again")


def _cannot_write(place: Path, err: OSError) -> StoreFullError:
    what: Any = err.strerror or err
    return StoreFullError(f"{place} cannot be written: {what}", hint="check space and rights")
