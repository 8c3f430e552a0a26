"""Fail the n-th system call, n = 1, 2, ... until a run is clean: what is there afterwards is whole, or is made again."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fp8fs.errors import StoreError, StoreFullError
from fp8fs.store.fsio import FsIo
from fp8fs.store.store import Published, Store
from tests.crash.faults import FaultyIo, HalvingIo, PowerCut, PowerLossIo
from tests.storing import Toy, snapshot

TOY = Toy("ab12cd", count=3)
SCAN = {"keep": ["a"]}


def finish_tree(store: Store, sealed: Path) -> None:
    tree = store.tree("plan1")
    tree.refer([sealed.stem])
    tree.ensure_dir("", mode=0o755, mtime_ns=10**18)
    tree.ensure_dir("d", mode=0o750)
    tree.write_text("config.json", b"{}", mode=0o644, mtime_ns=10**18)
    with sealed.open("rb") as file:
        tree.copy_file("d/copy", file.fileno(), 5000, mode=0o600)
    tree.link_object("m.safetensors", sealed)
    tree.link_source("d/link", "/src/x")
    tree.write_manifest(b"{}")
    tree.complete()


def work(root: Path, io: FsIo) -> None:
    """Everything that a store is used for, with an interruption in the middle of the shard. Raises: StoreError."""
    store = Store.open(root, io=io)
    with store.pin("plan1"):
        with suppress(Published):
            TOY.finished(store, [0, 1])
        with store.group_amax("g") as slot:
            if slot.value is None:
                slot.put(1.5)
        sealed, _ = TOY.build(store)
        finish_tree(store, sealed)
        store.write_scan("k", SCAN)
    store.set_aside(TOY.spec.object_id, "test")
    sealed, _ = TOY.build(store)
    finish_tree(store, sealed)
    store.remove_tree("plan0")
    store.collect(grace_s=0)


def check(root: Path, reference: dict[str, bytes | str]) -> None:
    """The store is sound: each thing whole or absent, and everything can be finished now."""
    store = Store.open(root)
    assert store.writable
    found = store.find_object(TOY.spec)
    if found is not None:
        assert found.read_bytes() == TOY.whole()
        assert store.verify_object(TOY.spec.object_id, TOY.spans) == []
    tree = store.tree("plan1")
    if tree.is_complete():
        assert (tree.path / "m.safetensors").read_bytes() == TOY.whole()
        assert (tree.path / "config.json").read_bytes() == b"{}"
    with store.group_amax("g") as slot:
        assert slot.value in (None, 1.5)
    assert store.read_scan("k") in (None, SCAN)
    sealed, _ = TOY.build(store)
    finish_tree(store, sealed)
    store.write_scan("k", SCAN)
    assert sealed.read_bytes() == TOY.whole()
    assert store.verify_object(TOY.spec.object_id, TOY.spans) == []
    found_tree = snapshot(tree.path)
    assert found_tree == reference
    top = {
        "adopted",
        "amax",
        "damaged",
        "hints",
        "lock",
        "objects",
        "partial",
        "plans",
        "scans",
        "tmp",
        "trees",
    }
    assert set(os.listdir(root / "v1")) <= top
    assert os.listdir(root) == ["v1"]
    assert os.listdir(root / "v1" / "partial") == []


def reference_tree(room: Path) -> dict[str, bytes | str]:
    work(room / "reference", FsIo())
    return snapshot(room / "reference" / "v1" / "trees" / "plan1")


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_the_nth_call_fails(
    room: Path, code: int, persistent: bool, record_property: Callable[[str, object], None]
) -> None:
    """Whichever call fails: a StoreError or no error, no descriptor left open, and a sound store afterwards."""
    reference = reference_tree(room)
    before = len(os.listdir("/proc/self/fd"))
    nth = 0
    while True:
        nth += 1
        root = room / "store"
        io = FaultyIo(nth, code, persistent=persistent)
        try:
            work(root, io)
        except (StoreError, Published):
            assert io.failed
        if not io.failed:
            break
        assert len(os.listdir("/proc/self/fd")) == before, io.failed
        check(root, reference)
        shutil.rmtree(root)
    assert nth > 200
    record_property("faults injected", nth - 1)


class Lockless(FaultyIo):
    """The same where nothing can be locked."""

    def try_lock_range(self, fd: int, start: int, length: int, *, exclusive: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def try_flock(self, fd: int, *, exclusive: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_the_nth_call_fails_without_locks(
    room: Path, code: int, persistent: bool, record_property: Callable[[str, object], None]
) -> None:
    """Whichever call fails while somebody goes on from what another one left: the object is whole in the end."""
    root = room / "store"
    before = len(os.listdir("/proc/self/fd"))
    for nth in itertools.count(1):
        TOY.finished(Store.open(root, io=Lockless(0, code, persistent=False)), [0])
        io = Lockless(nth, code, persistent=persistent)
        with suppress(StoreError, Published):
            TOY.build(Store.open(root, io=io))
        if not io.failed:
            break
        assert len(os.listdir("/proc/self/fd")) == before, io.failed
        path, _ = TOY.build(Store.open(root, io=Lockless(0, code, persistent=False)))
        assert path.read_bytes() == TOY.whole()
        assert Store.open(root).verify_object(TOY.spec.object_id, TOY.spans) == []
        shutil.rmtree(root)
    assert nth > 60
    record_property("faults injected", nth - 1)


def test_short_and_interrupted_calls_change_nothing(room: Path) -> None:
    """With every read and write short or interrupted, the result is the same."""
    reference = reference_tree(room)
    io = HalvingIo()
    work(room / "store", io)
    assert io.calls > 50
    check(room / "store", reference)


@pytest.mark.parametrize("barrier_s", [0.0, 1e9], ids=["barriers", "no barriers"])
def test_unsynced_writes_are_lost(
    room: Path,
    barrier_s: float,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Power fails at the n-th call, and what was not synced is lost or torn: units whose commit ended in a barrier
    are still there, published bytes are whole, a complete tree is complete."""
    monkeypatch.setattr("fp8fs.store.partial.BARRIER_S", barrier_s)
    reference = reference_tree(room)
    rng = random.Random(7)
    nth, losses, cuts = int(barrier_s > 0), 0, 0
    clean = False
    while not clean:
        nth += 2  # one run takes the even calls, the other the odd ones
        root = room / "store"
        io = PowerLossIo(nth)
        safe: list[int] = []
        sealed = False
        try:
            try:
                store = Store.open(root, io=io)
                with TOY.open(store) as partial:
                    for unit in range(TOY.spec.unit_count):
                        TOY.make(partial, unit)
                        safe.append(unit)
                    partial.seal({})
                sealed = True
                work(root, io)
                clean = True
            except PowerCut:
                losses += io.lose(rng)
                cuts += 1
        finally:
            io.close_all()
        store = Store.open(root)
        if not barrier_s and not sealed and store.find_object(TOY.spec) is None:
            with TOY.open(store) as partial:
                assert set(partial.records) >= set(safe)
        check(root, reference)
        shutil.rmtree(root)
    assert losses > 50
    record_property("power losses", cuts)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
def test_a_partial_whose_sync_failed_is_given_up(room: Path, others: bool) -> None:
    """The kernel forgets what it could not write, so a second sync proves nothing: the units are made again, unless
    somebody else is at work there, whose own sync decides."""

    class Unsyncable(FsIo):
        def fdatasync(self, fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    root = room / "store"
    partial = TOY.open(Store.open(root, io=Unsyncable()))
    other = TOY.open(Store.open(root)) if others else None
    partial._synced_at -= 10
    with pytest.raises(StoreError, match="Input/output error"):
        TOY.make(partial, 0)
    with pytest.raises(StoreError, match="cannot be trusted: a sync failed"):
        TOY.make(partial, 1)
    with pytest.raises(StoreError, match="cannot be trusted"):
        partial.seal({})
    if other is not None:
        with other.claim(2):
            partial.close()
            assert partial.path.exists()
        other.close()
        return
    partial.close()
    assert not partial.path.exists()
    assert TOY.build(Store.open(root))[1] == [0, 1, 2]


def test_a_full_disk_keeps_what_is_finished(room: Path) -> None:
    """No room for a barrier's line is no reason to give units up: their data is synced, and they are still there."""

    class Full(FsIo):
        full = False

        def write_once(self, fd: int, data: bytes) -> int:
            if self.full and b"barrier" in data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write_once(fd, data)

    io = Full()
    partial = TOY.open(Store.open(room / "store", io=io))
    TOY.make(partial, 0)
    io.full = True
    partial._synced_at -= 10
    with pytest.raises(StoreFullError, match="No space left"):
        TOY.make(partial, 1)
    partial.close()
    assert TOY.build(Store.open(room / "store"))[1] == [2]
