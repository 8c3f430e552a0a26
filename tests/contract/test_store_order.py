"""What is synced before what: the order of system calls on which surviving a power loss rests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8fs.store.fsio import FsIo, StrPath
from fp8fs.store.journal import scan_journal
from fp8fs.store.store import Store
from tests.storing import Toy

TOY = Toy()


class Noting(FsIo):
    """Notes what is changed, synced and renamed, by its last name."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []

    def note(self, what: str, fd: int) -> None:
        self.steps.append((what, Path(os.readlink(f"/proc/self/fd/{fd}")).name))

    def pwrite_once(self, fd: int, data: memoryview, file_offset: int) -> int:
        self.note("change", fd)
        return super().pwrite_once(fd, data, file_offset)

    def fchmod(self, fd: int, mode: int) -> None:
        self.note("change", fd)
        super().fchmod(fd, mode)

    def futime(self, fd: int, mtime_ns: int) -> None:
        self.note("change", fd)
        super().futime(fd, mtime_ns)

    def fsync(self, fd: int) -> None:
        self.note("sync", fd)
        super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        self.note("sync", fd)
        super().fdatasync(fd)

    def rename(self, source: StrPath, dest: StrPath, **folders: int | None) -> None:
        super().rename(source, dest, **folders)
        self.steps.append(("rename", Path(dest).name))


def test_a_publication(tmp_path: Path) -> None:
    """Nothing of the data or its attributes changes between its last sync and the rename; the folder is synced behind it."""
    io = Noting()
    path, _ = TOY.build(Store.open(tmp_path, io=io))
    at = io.steps.index(("rename", path.name))
    assert [what for what, name in io.steps[:at] if name == "data"][-2:] == ["change", "sync"]
    assert ("change", "data") not in io.steps[at:]
    assert io.steps[at + 1] == ("sync", path.parent.name)


def test_a_fact(tmp_path: Path) -> None:
    """The content is synced before it has its name, and the name at once behind that."""
    io = Noting()
    store = Store.open(tmp_path, io=io)
    io.steps.clear()
    store.write_scan("key", {"keep": []})
    (_, staged), *_ = io.steps
    assert io.steps == [("change", staged), ("sync", staged), ("rename", "key.json"), ("sync", "scans")]  # fmt: skip


def test_what_is_set_aside(tmp_path: Path) -> None:
    """The damaged object stays away after a power loss: its folder is synced last."""
    io = Noting()
    store = Store.open(tmp_path, io=io)
    path, _ = TOY.build(store)
    io.steps.clear()
    store.set_aside(TOY.spec.object_id, "test")
    assert [what for what, _ in io.steps] == ["rename", "rename", "sync"]
    assert io.steps[-1] == ("sync", path.parent.name)


def test_a_recovery(tmp_path: Path) -> None:
    """What was read back is on the disk before a journal says so: after a kill it may be in the page cache alone."""
    partial = TOY.open(Store.open(tmp_path))
    TOY.make(partial, 0)
    partial._uncovered = False  # a killed process makes no barrier when it closes
    partial.close()
    io = Noting()
    with TOY.open(Store.open(tmp_path, io=io)) as recovered:
        assert sorted(recovered.records) == [0]
        at = io.steps.index(("rename", "journal"))
        assert ("sync", "data") in io.steps[:at]
        assert io.steps[at + 1] == ("sync", TOY.spec.object_id)


def test_a_barrier_while_others_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that was journaled while the data was being synced is not covered: its bytes may have come too late."""
    monkeypatch.setattr("fp8fs.store.partial.BARRIER_S", 1e9)
    other = TOY.open(Store.open(tmp_path))

    class Interleaved(FsIo):
        late = True

        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            if self.late:
                self.late = False
                TOY.make(other, 1)

    with TOY.open(Store.open(tmp_path, io=Interleaved())) as partial:
        TOY.make(partial, 0)
        partial._barrier()
        scan = scan_journal((partial.path / "journal").read_bytes(), 0, TOY.spec.unit_count)
    where = {record.unit: at for at, record in scan.units}
    assert where[0] < scan.covered <= where[1]
    other.close()
