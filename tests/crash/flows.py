"""Whole flows on one store, from SRC to the finished tree, and what must be true of a store after whatever happened.

A flow is what a user does: build, mount and read, take up what was left, publish, collect. Each takes the root of a
store and works with the real planner, source, engine, CPU kernels, store and view; the store's system calls can be
replaced (``injected``).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from fp8fs.assembly import Assembled, assemble, survey
from fp8fs.audit import check_plan
from fp8fs.building import build_tree
from fp8fs.core.recipe import Recipe
from fp8fs.engine.shard import shard_spec, unit_spans
from fp8fs.errors import HandedOverError
from fp8fs.store.fsio import FsIo
from fp8fs.store.store import Published, Store
from fp8fs.view import View
from tests import oracle
from tests.builders import llama_like
from tests.storing import snapshot

__all__ = ["FLOWS", "World", "injected", "read_view", "reading", "work_done"]

LONG = bool(os.environ.get("FP8FS_LONG"))
"""The full set, as ``make crash`` runs it for a release; without it, what CI has time for."""

RECIPE = Recipe(scheme="per_tensor")
OTHER = Recipe(scheme="per_channel")
FOLDERS = {
    "adopted", "amax", "damaged", "hints", "lock", "objects", "partial", "plans", "scans", "tmp", "trees",
}  # fmt: skip


def no_poll() -> None:
    """Nobody interrupts."""


@contextmanager
def injected(io: FsIo) -> Iterator[None]:
    """Every store that is opened meanwhile makes its system calls through *io*."""
    with mock.patch("fp8fs.store.store.FsIo", return_value=io):
        yield


@dataclass
class World:
    """A small model whose fusion groups cross its two shards, and what its view must be, checked with torch."""

    base: Path
    src: Path = field(init=False)
    bytes: dict[str, bytes] = field(init=False)
    tree: dict[str, bytes | str] = field(init=False)
    templates: Path = field(init=False)

    def __post_init__(self) -> None:
        self.src = self.base / "src"
        llama_like(self.src, layers=1, hidden=64, inter=160, vocab=32)
        tree = build_tree(self.src, RECIPE, self.base / "reference", device="cpu", workers=1)
        original = oracle.read_folder(self.src)
        view = oracle.read_folder(tree)
        chosen = [name for name, stored in view.items() if stored.dtype == "F8_E4M3"]
        assert chosen
        groups = oracle.sibling_groups(chosen)
        assert view == oracle.expected(original, chosen, RECIPE.scheme, groups)
        self.bytes = {path.name: path.read_bytes() for path in tree.glob("*.safetensors")}
        self.tree = snapshot(tree)
        self.templates = self.base / "templates"
        self._half_made(self.templates / "half")
        self._unsealed(self.templates / "unsealed")
        self._two_trees(self.templates / "two")

    @classmethod
    def existing(cls, base: Path) -> World:
        """The world that another process made at *base*, without its checks."""
        world = cls.__new__(cls)
        world.base, world.src, world.templates = base, base / "src", base / "templates"
        (tree,) = (p for p in base.glob("reference/v1/trees/*") if p.is_dir())
        world.bytes = {path.name: path.read_bytes() for path in tree.glob("*.safetensors")}
        world.tree = snapshot(tree)
        return world

    def fresh(self, template: str, root: Path) -> Path:
        """A store at *root*: a copy of a template, or nothing for ""."""
        if root.exists():
            shutil.rmtree(root)
        if template:
            shutil.copytree(self.templates / template, root, symlinks=True)
        return root

    def _fill(self, root: Path, count: Callable[[int], int]) -> None:
        """Journal some units of each shard, as a killed builder leaves them: no barrier, no seal."""
        with survey(self.src, RECIPE, root, create=True) as found:
            store = found.store
            assert store is not None
            for shard in found.plan.shards:
                whole = self.bytes[shard.path]
                record = Store.open(self.base / "reference").record(shard.object_id)
                assert record is not None
                partial = store.partial(shard_spec(shard), unit_spans(shard))
                for number in range(count(len(shard.units))):
                    unit = shard.units[number]
                    for extent in (unit.data, unit.scale):
                        if extent is not None:
                            data = whole[extent.start : extent.start + extent.length]
                            partial.pwrite(data, extent.start)
                    partial.commit(record.records[number])
                partial._uncovered = False  # close() makes a barrier, a killed process does not
                partial.close()

    def _half_made(self, root: Path) -> None:
        self._fill(root, lambda units: units // 2)
        for journal in root.glob("v1/partial/*/journal"):
            with journal.open("ab") as file:
                file.write(b'\n0badc0de [3,1.0,"torn')  # the last line did not get out whole

    def _unsealed(self, root: Path) -> None:
        self._fill(root, lambda units: units)

    def _two_trees(self, root: Path) -> None:
        build_tree(self.src, RECIPE, root, device="cpu", workers=1)
        build_tree(self.src, OTHER, root, device="cpu", workers=1)


# -- flows ----------------------------------------------------------------------------------------


def build(world: World, root: Path) -> None:
    """``fp8fs build``, from nothing."""
    build_tree(world.src, RECIPE, root, device="cpu", workers=1)


def mount_and_read(world: World, root: Path) -> None:
    """``fp8fs mount`` and a loader that reads everything; whatever the store does, it reads the right bytes."""
    with reading(world, root, serve="handoff", grain="shard") as (_, view):
        assert read_view(view, world.bytes) == world.bytes


def mount_by_tensor(world: World, root: Path) -> None:
    """The same, served inline and made tensor by tensor."""
    with reading(world, root, serve="inline", grain="tensor") as (_, view):
        assert read_view(view, world.bytes) == world.bytes


def collect(world: World, root: Path) -> None:
    """``fp8fs rm`` of another recipe's tree, and ``gc``."""
    store = Store.open(root)
    with survey(world.src, RECIPE, root) as found:
        mine = found.plan.plan_id
    for tree in store.list_trees():
        if tree.plan_id != mine:
            store.remove_tree(tree.plan_id)
    store.collect(grace_s=0)


FLOWS: dict[str, tuple[Callable[[World, Path], None], str]] = {
    "build": (build, ""),
    "mount": (mount_and_read, ""),
    "tensor": (mount_by_tensor, ""),
    "recovery": (build, "half"),
    "publish": (build, "unsealed"),
    "gc": (collect, "two"),
}
"""name -> (flow, template of the store that it starts from)."""


@contextmanager
def reading(
    world: World, root: Path, *, serve: str, grain: str, workers: int = 1
) -> Iterator[tuple[Assembled, View]]:
    """A view of the world, as the daemon makes it."""
    with assemble(world.src, RECIPE, root, device="cpu", workers=workers, grain=grain) as made:
        yield made, made.view(serve=serve, grain=grain, bound=False)


def read_view(view: View, names: dict[str, bytes], *, chunk: int = 1 << 17) -> dict[str, bytes]:
    """Every shard as the kernel and a reader get it: opened, or followed as a link where it is handed over."""
    found: dict[str, bytes] = {}
    for name in names:
        for _ in range(3):
            try:
                handle = view.open(name, no_poll)
            except HandedOverError:
                if view.lookup(name).kind == "link":
                    found[name] = Path(view.readlink(name)).read_bytes()
                    break
                continue
            parts: list[bytes] = []
            while part := view.pread(handle, sum(map(len, parts)), chunk, no_poll):
                parts.append(part)
            view.release(handle)
            found[name] = b"".join(parts)
            break
    return found


# -- what must be true afterwards -----------------------------------------------------------------


def check_sound(world: World, root: Path, *, deep: bool = False) -> None:
    """Whatever happened: everything in its place, each unit whole or absent, and it can be finished now."""
    if root.exists():
        assert os.listdir(root) in (["v1"], [])
    if (root / "v1").exists():
        assert set(os.listdir(root / "v1")) <= FOLDERS
    store = Store.open(root)
    assert store.writable
    with survey(world.src, RECIPE, root) as found:
        for shard in found.plan.shards:
            spec, spans = shard_spec(shard), unit_spans(shard)
            whole = world.bytes[shard.path]
            sealed = store.find_object(spec)
            if sealed is not None:
                assert sealed.read_bytes() == whole
                assert store.verify_object(spec.object_id, spans) == []
                continue
            with suppress(Published), store.partial(spec, spans) as partial:
                for number in partial.records:
                    unit = shard.units[number]
                    for extent in (unit.data, unit.scale):
                        if extent is not None:
                            data = partial.pread(extent.length, extent.start)
                            assert data == whole[extent.start : extent.start + extent.length]
        tree = store.tree(found.plan.plan_id)
        if tree.is_complete():
            assert _shown(tree.path) == _without_origin(world.tree)
    finished = build_tree(world.src, RECIPE, root, device="cpu", workers=1)
    assert _shown(finished) == _without_origin(world.tree)
    assert os.listdir(root / "v1" / "partial") == []
    with survey(world.src, RECIPE, root) as found:
        assert check_plan(found, deep=deep).damage == ()


def work_done(root: Path) -> int:
    """Lines in all journals: grows with every unit that is finished."""
    total = 0
    for journal in root.glob("v1/partial/*/journal"):
        with suppress(FileNotFoundError):
            total += journal.read_bytes().count(b"\n[") + journal.read_bytes().count(b" [")
    return total


def _shown(tree: Path) -> dict[str, bytes | str]:
    return _without_origin(snapshot(tree))


def _without_origin(found: dict[str, bytes | str]) -> dict[str, bytes | str]:
    """A tree but for what only people read: where it was first made from, and that its path was given away."""
    aside = (".fp8fs/pinned", ".fp8fs/origin.json", ".fp8fs/manifest.json")
    left = {name: value for name, value in found.items() if name not in aside}
    manifest = json.loads(found[".fp8fs/manifest.json"])
    return {**left, "manifest": json.dumps({**manifest, "name": "", "version": ""})}
