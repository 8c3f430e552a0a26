"""The only door to the store: sealed objects, partial shards, trees, recorded facts.

    ROOT/v1/objects/ab/ab12....safetensors   a sealed view shard: mode, owner and mtime of its sources, no write bits
            objects/ab/ab12....json          its record: attributes, digests, one line per unit
            partial/ab12..../data            sparse shard in the making; renamed to the object when sealed
            partial/ab12..../journal         one checksummed line per finished unit, barriers between
            partial/ab12..../lock            open-file-description locks: byte u = the lease of claim u
            amax/<group id>                  largest magnitude of a group that crosses shards
            trees/<plan id>/...              a plain checkpoint directory: hard links to objects, copies of small files, links to large ones
            trees/<plan id>/.fp8fs/          manifest.json, plan.json, objects, COMPLETE
            trees/<plan id>.lock             held shared by whoever uses the tree
            scans/<key>.json                 keep lists found by plan --scan and build
            hints/<key>.json                 local stat facts (dev, ino, ctime) seen at the last mount
            adopted/<identity>.json          identities that verify --adopt proved equal to older ones
            damaged/, tmp/                   what was set aside; what is being written
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from fp8fs.store.types import (
    ObjectInfo,
    ObjectRecord,
    PartialInfo,
    Poll,
    Published,
    ShardSpec,
    TreeInfo,
    UnitRecord,
    UnitSpan,
    Usage,
    no_poll,
)

__all__ = [
    "AmaxSlot", "ObjectInfo", "ObjectRecord", "Partial", "PartialInfo", "Pin", "Poll", "Published",
    "ShardSpec", "Store", "Tree", "TreeInfo", "UnitRecord", "UnitSpan", "Usage", "no_poll",
]


class AmaxSlot:
    """A group's recorded amax, held exclusively. ``value`` is None until somebody ``put`` it."""

    value: float | None

    def put(self, value: float) -> None:
        """Record the float32 value; from now on every holder sees it."""
        raise NotImplementedError


class Pin:
    """Keeps a tree (and the objects it refers to) from being collected while open. Context manager; close() repeatable."""

    def __enter__(self) -> Pin:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Partial:
    """A view shard in the making, shared by threads and processes. Thread-safe. close() when done; context manager."""

    fd: int
    """The data file, open for reading and writing; stays valid after the rename, until close()."""

    records: dict[int, UnitRecord]
    """Finished units: refreshed by claim(), refresh() and commit(). Replaced, never mutated, so iterating is safe."""

    def claim(self, claim: int, *, poll: Poll = no_poll, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Hold the lease of claim number *claim* (0 <= claim < unit_count), alone among all threads and processes.

        On entry ``records`` is fresh: look whether the units are made already. Raises: Published; StoreBusyError after
        *timeout_s*; whatever *poll* raises. A thread holds one claim at a time.
        """
        raise NotImplementedError

    def refresh(self) -> None:
        """Read what others have journaled since. Raises: Published."""
        raise NotImplementedError

    def pwrite(self, data: Buffer, file_offset: int) -> None:
        """Write all of *data*. The caller holds the claim of the unit that it belongs to."""
        raise NotImplementedError

    def pread(self, length: int, file_offset: int) -> bytes:
        """Read exactly *length* bytes of finished units."""
        raise NotImplementedError

    def commit(self, *records: UnitRecord) -> None:
        """Journal finished units, after their bytes are written and while their claim is held. One write for all."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Units without a record, as far as known."""
        raise NotImplementedError

    def seal(self, facts: Any, *, poll: Poll = no_poll, timeout_s: float | None = None) -> Path:
        """Publish the shard: when this returns, the object's path exists for good. The caller holds no claim.

        *facts*: JSON-ready data for the record. Also returns when somebody else published it. Raises: StoreError if units
        are missing; StoreBusyError; StoreFullError.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back. Repeatable. Finished units stay for whoever opens the partial next."""
        raise NotImplementedError


class Tree:
    """trees/<plan id>: a plain checkpoint directory. All paths relative, "/"-separated; nothing there is ever changed."""

    path: Path

    def refer(self, object_ids: Iterable[str]) -> None:
        """Say which objects this tree needs (now or later), so that collect() keeps them and their partials."""
        raise NotImplementedError

    def ensure_dir(self, path: str, *, mode: int, uid: int = -1, gid: int = -1, mtime_ns: int | None = None) -> None:
        """The directory exists ("" is the tree itself). Its exact mode and mtime are set by complete(), owner rights are kept until then."""
        raise NotImplementedError

    def write_text(self, path: str, content: bytes, *, mode: int, uid: int = -1, gid: int = -1, mtime_ns: int | None = None) -> None:
        """The file exists with this content and these attributes."""
        raise NotImplementedError

    def copy_file(self, path: str, source_fd: int, size: int, *, mode: int, uid: int = -1, gid: int = -1, mtime_ns: int | None = None) -> None:
        """The file exists as a copy (reflink where possible) of the first *size* bytes of *source_fd*."""
        raise NotImplementedError

    def link_source(self, path: str, target: str) -> None:
        """A symlink with text *target* exists at *path*."""
        raise NotImplementedError

    def link_object(self, path: str, object_path: Path) -> None:
        """The object is in the tree: hard link, else reflink, else copy. An older inode of it (set aside as damaged) is replaced."""
        raise NotImplementedError

    def write_manifest(self, content: bytes, *, name: str = "manifest.json") -> None:
        """The tree's .fp8fs/<name> is *content*, atomically."""
        raise NotImplementedError

    def complete(self) -> None:
        """Everything in the tree is durable, directories have their final attributes, COMPLETE exists."""
        raise NotImplementedError

    def is_complete(self) -> bool:
        raise NotImplementedError


class Store:
    """One store below ``root``. Thread-safe. Raises StoreError and its kinds only (and Published)."""

    root: Path
    writable: bool
    why_not: str

    @classmethod
    def open(cls, root: Path, *, create: bool = True) -> Store:
        """Open ROOT/v1, made with mode 0700 if missing. Read-only (``writable`` False, ``why_not``) if it cannot be written,
        or is missing and *create* is False. Raises: StoreError if ROOT is a link or not ours alone to write."""
        raise NotImplementedError

    def object_path(self, object_id: str) -> Path:
        """Where the object is, or would be."""
        raise NotImplementedError

    def find_object(self, spec: ShardSpec) -> Path | None:
        """The published object if its size, preamble and record are right, else None; what is damaged is set aside."""
        raise NotImplementedError

    def record(self, object_id: str) -> ObjectRecord | None:
        """The record beside an object; None if missing or damaged."""
        raise NotImplementedError

    def verify_object(self, object_id: str, spans: Iterable[UnitSpan], *, poll: Poll = no_poll) -> list[int]:
        """Units whose bytes do not match the record's digests (PREAMBLE for the preamble), by reading all of them.

        Raises: StoreDamagedError if there is no readable record or the file's size is wrong; StoreError for a read error.
        """
        raise NotImplementedError

    def set_aside(self, object_id: str, reason: str) -> None:
        """The object and its record are gone from objects/ (moved to damaged/), so that it is made again."""
        raise NotImplementedError

    def partial(self, spec: ShardSpec, spans: Sequence[UnitSpan], *, poll: Poll = no_poll, timeout_s: float | None = None) -> Partial:
        """Open or create the partial shard; recovers it if nobody else has it open. *spans* in unit order, one per unit.

        Raises: Published; StoreBusyError while somebody else recovers it; StoreFullError if it cannot be written.
        """
        raise NotImplementedError

    def group_amax(self, group_id: str, *, poll: Poll = no_poll) -> AbstractContextManager[AmaxSlot]:
        """The group's amax slot, held exclusively among threads and processes."""
        raise NotImplementedError

    def tree(self, plan_id: str) -> Tree:
        """The tree of a plan; nothing is created before the first ensure_dir (or other) call."""
        raise NotImplementedError

    def pin(self, plan_id: str, *, poll: Poll = no_poll) -> Pin:
        """Hold the tree against removal until closed. Works before the tree exists."""
        raise NotImplementedError

    def read_scan(self, key: str) -> Any | None: raise NotImplementedError
    def write_scan(self, key: str, value: Any) -> None: raise NotImplementedError
    def read_hints(self, key: str) -> Any | None: raise NotImplementedError
    def write_hints(self, key: str, value: Any) -> None: raise NotImplementedError
    def read_adopted(self, identity: str) -> Any | None: raise NotImplementedError
    def write_adopted(self, identity: str, value: Any) -> None: raise NotImplementedError

    def list_objects(self) -> list[ObjectInfo]: raise NotImplementedError
    def list_partials(self) -> list[PartialInfo]: raise NotImplementedError
    def list_trees(self) -> list[TreeInfo]: raise NotImplementedError
    def usage(self) -> Usage: raise NotImplementedError

    def free_bytes(self) -> int:
        """Bytes free for us on the store's filesystem; 0 if unknown."""
        raise NotImplementedError

    def remove_tree(self, plan_id: str) -> None:
        """The tree is gone. Raises: StoreBusyError if it is pinned."""
        raise NotImplementedError

    def collect(self, *, keep: Collection[str] = (), grace_s: float = 3600.0) -> int:
        """Remove objects and partials that no tree refers to or links, that nobody has open, that are not in *keep* (object
        ids) and older than *grace_s*; and old leftovers. Returns the bytes freed."""
        raise NotImplementedError
