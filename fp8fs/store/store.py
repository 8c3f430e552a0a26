"""The only door to the store: sealed objects, partial shards, trees, recorded facts.

    ROOT/v1/objects/ab/ab12....safetensors   a sealed view shard: mode, owner and mtime of its sources, no write bits
            objects/ab/ab12....json          its record: attributes, digests, one entry per unit
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
            plans/<key>.json                 which finished tree keeps the plan of a large checkpoint
            damaged/, tmp/                   what was set aside; what is being written
            lock                             held shared while a tree records its references, exclusive by collect

Formats: docs/FORMAT.md. A newer schema lives in another folder beside v1 and is never touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from fp8fs.errors import StoreFullError
from fp8fs.store.collect import Collector
from fp8fs.store.facts import AmaxSlot, Facts, amax_slot
from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import storing
from fp8fs.store.lease import locked_file
from fp8fs.store.objects import Objects
from fp8fs.store.partial import Partial, open_partial
from fp8fs.store.places import Places, open_root
from fp8fs.store.staging import try_retire
from fp8fs.store.trees import Pin, Tree
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
    "AmaxSlot",
    "ObjectInfo",
    "ObjectRecord",
    "Partial",
    "PartialInfo",
    "Pin",
    "Poll",
    "Published",
    "ShardSpec",
    "Store",
    "Tree",
    "TreeInfo",
    "UnitRecord",
    "UnitSpan",
    "Usage",
    "no_poll",
]


class Store:
    """One store below ``root``. Thread-safe. Raises StoreError and its kinds only (and Published).

    ``writable`` False: nothing is ever written, what is there is served, and ``why_not`` says why.
    """

    def __init__(self, io: FsIo, places: Places, why_not: str) -> None:
        self.root = places.root
        self.why_not = why_not
        self.writable = not why_not
        self._io = io
        self._places = places
        self._objects = Objects(io, places, writable=self.writable)
        self._facts = Facts(io, places)
        self._collector = Collector(io, places)

    @classmethod
    def open(cls, root: Path, *, create: bool = True, io: FsIo | None = None) -> Store:
        """Open ROOT/v1, made with mode 0700 if missing. Read-only (``writable`` False, ``why_not``) if it cannot be written,
        or is missing and *create* is False. Raises: StoreError if ROOT is a link or directory that others could write."""
        io = FsIo() if io is None else io
        opened = open_root(io, root, create=create)
        return cls(io, opened.places, opened.why_not)

    def __repr__(self) -> str:
        state = "writable" if self.writable else f"read-only: {self.why_not}"
        return f"<Store {str(self.root)!r} ({state})>"

    def _check_writable(self) -> None:
        if not self.writable:
            raise StoreFullError(
                f"the store cannot be written: {self.why_not}", hint="name another with --store"
            )

    # -- objects --------------------------------------------------------------------------

    def object_path(self, object_id: str) -> Path:
        """Where the object is, or would be."""
        return self._places.object(object_id)

    def find_object(self, spec: ShardSpec) -> Path | None:
        """The published object if its size, preamble and record are right, else None; what is damaged is set aside."""
        path = self._objects.find(spec)
        if path is not None and self.writable:
            leftover = self._places.partial(spec.object_id)
            if os.path.lexists(leftover):  # its sealer died between the rename and the cleaning up
                with suppress(OSError):
                    try_retire(self._io, self._places, leftover)
        return path

    def record(self, object_id: str) -> ObjectRecord | None:
        """The record beside an object; None if missing or damaged."""
        return self._objects.record(object_id)

    def verify_object(
        self,
        object_id: str,
        spans: Iterable[UnitSpan],
        *,
        poll: Poll = no_poll,
        copy: Path | None = None,
    ) -> list[int]:
        """Units whose bytes do not match the record's digests (PREAMBLE for the preamble), by reading all of them.

        *copy*: look at this copy of the object instead.
        Raises: StoreDamagedError if there is no readable record or the file's size is wrong; StoreError for a read error.
        """
        return self._objects.verify(object_id, spans, poll, copy=copy)

    def set_aside(self, object_id: str, reason: str) -> None:
        """The object and its record are gone from objects/ (moved to damaged/), so that it is made again."""
        self._check_writable()
        self._objects.set_aside(object_id, reason)

    def partial(
        self,
        spec: ShardSpec,
        spans: Sequence[UnitSpan],
        *,
        poll: Poll = no_poll,
        timeout_s: float | None = None,
    ) -> Partial:
        """Open or create the partial shard; recovers it if nobody else has it open. *spans* in unit order, one per unit.

        Raises: Published; StoreBusyError while somebody else recovers it; StoreFullError if it cannot be written.
        """
        self._check_writable()
        with storing(f"cannot open shard {spec.object_id}"):
            return open_partial(
                self._io,
                self._places,
                self._objects,
                spec,
                spans,
                poll=poll,
                timeout_s=timeout_s,
            )

    def group_amax(
        self, group_id: str, *, poll: Poll = no_poll
    ) -> AbstractContextManager[AmaxSlot]:
        """The group's amax slot, held exclusively among threads and processes."""
        path = self._places.amax(group_id)
        return amax_slot(self._io, path, poll, writable=self.writable)

    # -- trees ----------------------------------------------------------------------------

    def tree(self, plan_id: str) -> Tree:
        """The tree of a plan; nothing is created before the first call that writes."""
        return Tree(self._io, self._places, plan_id, writable=self.writable)

    def pin(self, plan_id: str, *, poll: Poll = no_poll) -> Pin:
        """Hold the tree against removal until closed. Works before the tree exists; does nothing in a read-only store."""
        with ExitStack() as held:
            if self.writable:
                path = self._places.tree_lock(plan_id)
                with storing(f"cannot pin tree {plan_id}"):
                    held.enter_context(
                        locked_file(self._io, path, poll, exclusive=False, what=f"tree {plan_id}")
                    )
            return Pin(held.pop_all())

    # -- facts ----------------------------------------------------------------------------

    def read_scan(self, key: str) -> Any | None:
        """What ``plan --scan`` or ``build`` recorded for a source; None if nothing readable."""
        return self._facts.read("scans", key)

    def write_scan(self, key: str, value: Any) -> None:
        """Record JSON-ready data for every later mount; durable."""
        self._write_fact("scans", key, value)

    def read_hints(self, key: str) -> Any | None:
        """Local stat facts seen at the last mount; None if nothing readable."""
        return self._facts.read("hints", key)

    def write_hints(self, key: str, value: Any) -> None:
        """Record local stat facts; durable."""
        self._write_fact("hints", key, value)

    def read_adopted(self, identity: str) -> Any | None:
        """What ``verify --adopt`` proved about an identity; None if nothing readable."""
        return self._facts.read("adopted", identity)

    def write_adopted(self, identity: str, value: Any) -> None:
        """Record what an identity was proved equal to; durable."""
        self._write_fact("adopted", identity, value)

    def keeps_plans(self) -> bool:
        """Whether any plan was kept, so that ``read_plan`` may find one."""
        return self._facts.has_any("plans")

    def read_plan(self, key: str) -> Any | None:
        """Where a plan was kept; None if nothing readable."""
        return self._facts.read("plans", key)

    def write_plan(self, key: str, value: Any) -> None:
        """Record where a plan is kept; durable."""
        self._write_fact("plans", key, value)

    def _write_fact(self, kind: str, key: str, value: Any) -> None:
        self._check_writable()
        self._facts.write(kind, key, value)

    # -- housekeeping ---------------------------------------------------------------------

    def list_objects(self) -> list[ObjectInfo]:
        """Every sealed object."""
        return self._collector.objects()

    def list_partials(self) -> list[PartialInfo]:
        """Every shard in the making."""
        return self._collector.partials()

    def list_trees(self) -> list[TreeInfo]:
        """Every tree, complete or not."""
        return self._collector.trees()

    def usage(self) -> Usage:
        """Bytes on disk by kind."""
        return self._collector.usage()

    def free_bytes(self) -> int | None:
        """Bytes free for us on the store's filesystem; None if unknown."""
        return self._collector.free_bytes()

    def remove_tree(self, plan_id: str) -> None:
        """The tree is gone. Raises: StoreBusyError if it is pinned."""
        self._check_writable()
        self._collector.remove_tree(plan_id)

    def collect(self, *, keep: Collection[str] = (), grace_s: float = 3600.0) -> int:
        """Remove objects and partials that no tree refers to or links, that nobody has open, that are not in *keep* (object
        ids) and older than *grace_s*; and old leftovers. Returns the bytes freed."""
        self._check_writable()
        return self._collector.collect(keep=keep, grace_s=grace_s)
