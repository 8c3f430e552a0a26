"""Keeps the store's tree of one plan up with what is sealed, and completes it when everything is."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

from fp8fs.core.manifest import (
    Manifest,
    encode_manifest,
    encode_plan,
    parse_manifest,
    with_digests,
)
from fp8fs.core.plan import Plan, ViewEntry
from fp8fs.errors import StoreError
from fp8fs.source import Source
from fp8fs.source.access import shown_mode
from fp8fs.store.store import Store, Tree
from fp8fs.store.trees import grants_more

__all__ = [
    "COPY_MAX_BYTES",
    "TreeKeeper",
    "is_pinned_for_good",
    "origin_of",
    "pin_for_good",
    "tree_faults",
]

log = logging.getLogger(__name__)

COPY_MAX_BYTES = 16 << 20
"""Unchanged files up to this size are copied into the tree; larger ones are links to SRC."""

ORIGIN = "origin.json"
"""Name in the tree's .fp8fs/ that says, for ``ls``, which directory the tree was first made from."""

PINNED = "pinned"
"""Name in the tree's .fp8fs/ that says: ``build`` or ``path`` gave this path away, so gc keeps it."""


_REMOVED = "unmount and mount again; what was in the store is made again"


class TreeKeeper:
    """Thread-safe. ``_lock`` guards ``_linked``; no other lock is taken while it is held."""

    def __init__(self, plan: Plan, source: Source, store: Store, manifest: Manifest) -> None:
        self._plan = plan
        self._source = source
        self._store = store
        self._manifest = manifest
        self._lock = threading.Lock()
        self._linked: set[int] = set()
        self._identity = (0, 0)
        self.tree: Tree = store.tree(plan.plan_id)

    def prepare(self) -> None:
        """Everything but the shards is in the tree. Repeatable; a finished tree is left alone, unless a look at it says
        that something is missing or cut short. Cost then: a stat per name."""
        if self.tree.is_complete():
            self._look_over()
        if not self.tree.is_complete():
            self._place_all()
            self.tree.refer(shard.object_id for shard in self._plan.shards)
        self._identity = self._look()

    def _look_over(self) -> None:
        """What a look tells to be missing in a finished tree makes it unfinished. One that cannot be looked at is used."""
        try:
            faults = tree_faults(self._plan, self._source, self.tree)
            for path, what in faults.items():
                log.warning("tree %s: %s: %s; made again", self._plan.plan_id, path, what)
            if faults:
                self.tree.doubt()
            else:
                self.tree.refer(shard.object_id for shard in self._plan.shards)
        except StoreError as err:
            log.warning("%s", err)

    def _place_all(self) -> None:
        owned = os.geteuid() == 0
        root = os.stat(self._source.root)
        uid, gid = (root.st_uid, root.st_gid) if owned else (-1, -1)
        # Whoever may enter SRC may enter the tree: a mount's links lead others through it.
        self.tree.ensure_dir(
            "",
            mode=shown_mode(str(self._source.root), root),
            uid=uid,
            gid=gid,
            mtime_ns=root.st_mtime_ns,
        )
        for path, entry in self._plan.entries.items():
            self._place(path, entry, owned=owned)
        origin = {"src": os.fsencode(self._source.root).decode("utf-8", "replace")}
        self.tree.write_manifest(json.dumps(origin).encode(), name=ORIGIN)
        self._place_manifest()

    def _place_manifest(self) -> None:
        """The tree says what it is. Others may finish it at any moment: what they say of it, digests and all, stays."""
        there = self.tree.read_private("manifest.json")
        if there is None or parse_manifest(there) is None:
            self.tree.write_manifest(encode_manifest(self._manifest))
            if self.tree.is_complete() and (documents := self._documents()) is not None:
                self._describe(documents, durable=True)

    def link(self, shard: int, sealed: Path) -> Path:
        """The sealed object is in the tree, at the path returned; the last one completes it.

        Raises: StoreError, also if the tree was removed meanwhile: what a mount has bound is the old one.
        """
        path = self._plan.shards[shard].path
        if self._identity != self._look():
            raise StoreError(f"the tree {str(self.tree.path)!r} was removed", hint=_REMOVED)
        self.tree.link_object(path, sealed)
        with self._lock:
            self._linked.add(shard)
            last = len(self._linked) == len(self._plan.shards)
        if last and not self.tree.is_complete():
            self._complete()
        return self.tree.path / path

    def is_there(self, place: Path) -> bool:
        """Whether what ``link`` returned still leads to the object: for a mount too, that has bound the tree of then."""
        return self._identity == self._look() and os.path.lexists(place)

    def _look(self) -> tuple[int, int]:
        """Which directory the tree is; (0, 0) if there is none."""
        try:
            found = os.lstat(self.tree.path)
        except OSError:
            return (0, 0)
        return found.st_dev, found.st_ino

    def _complete(self) -> None:
        documents = self._documents()
        if documents is not None:
            self._describe(documents, durable=False)
            self.tree.complete()  # all is durable then
            # Who looked for a manifest before there was one may have put a bare one in place meanwhile, and could not
            # see then that the tree is complete. Who does so from now on sees it.
            self._describe(documents, durable=True)

    def _documents(self) -> dict[str, bytes] | None:
        """What a finished tree says of itself; None as long as a record is missing."""
        digests: dict[str, str] = {}
        for shard in self._plan.shards:
            record = self._store.record(shard.object_id)
            if record is None:
                log.warning("%s: its record is gone, the tree stays incomplete", shard.path)
                return None
            digests[shard.object_id] = record.shard_digest
        return {
            "plan.json": encode_plan(self._plan),
            "manifest.json": encode_manifest(with_digests(self._manifest, digests)),
        }

    def _describe(self, documents: Mapping[str, bytes], *, durable: bool) -> None:
        for name, content in documents.items():
            self.tree.write_manifest(content, name=name, durable=durable)

    def _place(self, path: str, entry: ViewEntry, *, owned: bool) -> None:
        uid, gid = (entry.uid, entry.gid) if owned else (-1, -1)
        if entry.kind == "dir":
            self.tree.ensure_dir(path, mode=entry.mode, uid=uid, gid=gid, mtime_ns=entry.mtime_ns)
        elif entry.kind == "text":
            self.tree.write_text(
                path,
                entry.content,
                mode=entry.mode,
                uid=uid,
                gid=gid,
                mtime_ns=entry.mtime_ns,
            )
        elif entry.kind == "link":
            self.tree.link_source(path, entry.link)
        elif entry.kind == "source" and entry.size <= COPY_MAX_BYTES:
            fd = self._source.open_file(path)
            try:
                self.tree.copy_file(
                    path,
                    fd,
                    entry.size,
                    mode=entry.mode,
                    uid=uid,
                    gid=gid,
                    mtime_ns=entry.mtime_ns,
                )
            finally:
                os.close(fd)
        elif entry.kind == "source":
            self.tree.link_source(path, f"{self._source.root}/{path}")


def tree_faults(plan: Plan, source: Source, tree: Tree, *, full: bool = False) -> dict[str, str]:
    """Names of a finished tree that are not as planned -> what is wrong.

    By kind, size and what it grants to others, a shard that is no link of its object by its header too; with *full* all
    but shards by content.
    Raises: StoreError if one cannot be read; SourceChangedError.
    """
    found: dict[str, str] = {}
    for path, entry in plan.entries.items():
        if entry.kind == "shard":
            shard = plan.shards[entry.shard]
            what = tree.shard_fault(path, shard.object_id, size=shard.size, preamble=shard.preamble)
        else:
            what = _fault(tree.path / path, path, entry, source, full=full)
        if what:
            found[path] = what
    return found


def _fault(place: Path, path: str, entry: ViewEntry, source: Source, *, full: bool) -> str:
    try:
        info = place.lstat()
        linked = entry.kind == "link" or (entry.kind == "source" and entry.size > COPY_MAX_BYTES)
        if linked:
            if not stat.S_ISLNK(info.st_mode):
                return "is no link"
            leads = entry.kind == "link" or place.exists()
            return "" if leads else "leads nowhere"
        if entry.kind == "dir":
            if not stat.S_ISDIR(info.st_mode):
                return "is no directory"
            return grants_more(info.st_mode, entry.mode)
        size = len(entry.content) if entry.kind == "text" else entry.size
        if not stat.S_ISREG(info.st_mode):
            return "is no regular file"
        if info.st_size != size:
            return f"has {info.st_size} bytes, expected {size}"
        if fault := grants_more(info.st_mode, entry.mode):
            return fault
        if full and place.read_bytes() != _content(path, entry, source):
            return "its bytes are not what was written"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as err:
        raise StoreError(f"{place}: cannot be read: {err.strerror}", errno=err.errno) from err
    return ""


def _content(path: str, entry: ViewEntry, source: Source) -> bytes:
    """What a small file of the tree holds."""
    if entry.kind == "text":
        return entry.content
    with os.fdopen(source.open_file(path), "rb") as file:
        return file.read(entry.size)


def pin_for_good(tree: Tree) -> None:
    """gc keeps the tree from now on: its path has been given away."""
    try:
        tree.write_manifest(b"", name=PINNED)
    except StoreError as err:
        log.warning("%s cannot be pinned: %s", tree.path, err)


def is_pinned_for_good(tree_path: Path) -> bool:
    """Whether ``build`` or ``path`` gave this tree's path away."""
    return (tree_path / ".fp8fs" / PINNED).exists()


def origin_of(tree_path: Path) -> str:
    """The directory that the tree was first made from, "" if that is not known."""
    try:
        origin = json.loads((tree_path / ".fp8fs" / ORIGIN).read_bytes())
    except (OSError, ValueError):
        return ""
    src = origin.get("src") if isinstance(origin, dict) else None
    return src if isinstance(src, str) else ""
