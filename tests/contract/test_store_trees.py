"""Trees, pins and collection: what is in a tree, and what of the store may go."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fp8fs.errors import StoreBusyError, StoreError
from fp8fs.store.fsio import FsIo
from fp8fs.store.store import Store, Tree
from tests.storing import Toy, snapshot

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
NOBODY = 65534
TIME = 1_600_000_000_987_654_321


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store")


@pytest.fixture
def sealed(store: Store) -> Path:
    path, _ = Toy().build(store)
    return path


def fill(tree: Tree, sealed: Path, source: Path) -> None:
    """A small tree of every kind of entry."""
    tree.refer([sealed.stem])
    tree.ensure_dir("", mode=0o755, mtime_ns=TIME)
    tree.ensure_dir("vae", mode=0o555, mtime_ns=TIME + 1)
    tree.write_text("config.json", b'{"a":1}', mode=0o640, mtime_ns=TIME)
    source.write_bytes(b"tokens" * 1000)
    with source.open("rb") as file:
        tree.copy_file("vae/merges.txt", file.fileno(), 6000, mode=0o604, mtime_ns=TIME + 2)
    tree.link_object("model.safetensors", sealed)
    tree.link_source("vae/big.safetensors", "/src/vae/big.safetensors")
    tree.write_manifest(b'{"m":1}')


def test_a_tree_is_a_plain_directory(store: Store, sealed: Path, tmp_path: Path) -> None:
    """Contents, modes, times, links and the hard link to the object are as asked, and COMPLETE comes last."""
    tree = store.tree("plan1")
    assert not tree.path.exists()
    fill(tree, sealed, tmp_path / "source")
    assert not tree.is_complete()
    tree.complete()
    tree.complete()
    assert tree.is_complete()
    assert store.tree("plan1").is_complete()
    assert not store.tree("plan2").is_complete()
    found = snapshot(tree.path)
    assert set(found) == {
        ".fp8fs", ".fp8fs/COMPLETE", ".fp8fs/manifest.json", ".fp8fs/objects", "config.json",
        "model.safetensors", "vae", "vae/big.safetensors", "vae/merges.txt",
    }  # fmt: skip
    assert found["config.json"] == b'{"a":1}'
    assert found["vae/merges.txt"] == b"tokens" * 1000
    assert found["vae/big.safetensors"] == "/src/vae/big.safetensors"
    assert (tree.path / "model.safetensors").stat().st_ino == sealed.stat().st_ino
    for name, mode, mtime_ns in (
        ("", 0o755, TIME),
        ("vae", 0o555, TIME + 1),
        ("config.json", 0o640, TIME),
        ("vae/merges.txt", 0o604, TIME + 2),
    ):
        info = (tree.path / name).stat()
        assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (mode, mtime_ns), name
    assert stat.S_IMODE((tree.path / ".fp8fs").stat().st_mode) == 0o700
    assert os.listdir(store.root / "v1" / "tmp") == []


def test_filling_a_tree_again_changes_nothing(store: Store, sealed: Path, tmp_path: Path) -> None:
    """Inode, content and change time of everything stay, before and after completion."""
    tree = store.tree("plan1")
    fill(tree, sealed, tmp_path / "source")

    def seen() -> dict[str, tuple[int, int]]:
        names = snapshot(tree.path)
        infos = {n: (tree.path / n).lstat() for n in names if n not in ("vae", ".fp8fs")}
        return {n: (info.st_ino, info.st_mtime_ns) for n, info in infos.items()}

    before = seen()
    fill(store.tree("plan1"), sealed, tmp_path / "source")
    assert seen() == before
    tree.complete()
    before = seen()
    again = store.tree("plan1")
    fill(again, sealed, tmp_path / "source")
    again.complete()
    assert seen() == before
    assert stat.S_IMODE((tree.path / "vae").stat().st_mode) == 0o555


def test_what_a_power_loss_emptied_is_written_again(
    store: Store, sealed: Path, tmp_path: Path
) -> None:
    """In an unfinished tree a file of the right size with wrong bytes is replaced, a wrong link too."""
    tree = store.tree("plan1")
    fill(tree, sealed, tmp_path / "source")
    wanted = snapshot(tree.path)
    (tree.path / "config.json").write_bytes(b"\0" * 7)
    (tree.path / "vae" / "merges.txt").write_bytes(b"\0" * 6000)
    link = tree.path / "vae" / "big.safetensors"
    link.unlink()
    link.symlink_to("/elsewhere")
    (tree.path / "model.safetensors").unlink()
    fill(store.tree("plan1"), sealed, tmp_path / "source")
    assert snapshot(tree.path) == wanted


def test_a_tree_heals_when_its_object_was_made_again(store: Store, sealed: Path) -> None:
    """link_object replaces the link to an object that was set aside as damaged."""
    tree = store.tree("plan1")
    tree.ensure_dir("", mode=0o755)
    tree.link_object("m.safetensors", sealed)
    tree.complete()
    sealed.chmod(0o600)
    with sealed.open("r+b") as file:
        file.write(b"damage")
    path, made = Toy().build(store)
    assert len(made) == 5
    store.tree("plan1").link_object("m.safetensors", path)
    assert (tree.path / "m.safetensors").read_bytes() == Toy().whole()


@pytest.mark.parametrize("why", [errno.EMLINK, errno.EXDEV, errno.EPERM])
def test_an_object_that_cannot_be_linked_is_copied(tmp_path: Path, why: int) -> None:
    """Where the filesystem gives no hard link, the tree gets a copy with the object's attributes, and keeps it."""

    class NoLinks(FsIo):
        def link(self, *args: object, **kwargs: object) -> None:
            raise OSError(why, os.strerror(why))

        def copy_chunk(self, source_fd: int, dest_fd: int, length: int, file_offset: int) -> int:
            return super().copy_chunk(source_fd, dest_fd, min(length, 5000), file_offset)

    store = Store.open(tmp_path / "store", io=NoLinks())
    path, _ = Toy().build(store)
    tree = store.tree("plan1")
    tree.refer([path.stem])
    tree.ensure_dir("", mode=0o755)
    tree.link_object("m.safetensors", path)
    info, wanted = (tree.path / "m.safetensors").stat(), path.stat()
    assert (tree.path / "m.safetensors").read_bytes() == Toy().whole()
    assert (info.st_mode, info.st_mtime_ns) == (wanted.st_mode, wanted.st_mtime_ns)
    tree.link_object("m.safetensors", path)
    assert (tree.path / "m.safetensors").stat().st_ino == info.st_ino
    store.collect(grace_s=0)
    assert path.exists()


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a//x", "./x", "a\0b", "vae/"])
def test_a_path_cannot_leave_its_tree(store: Store, sealed: Path, path: str) -> None:
    """Paths with "..", empty or absolute parts are refused by everything that writes."""
    tree = store.tree("plan1")
    tree.ensure_dir("", mode=0o755)
    tree.ensure_dir("a", mode=0o755)
    before = snapshot(store.root)
    for use in (
        lambda: tree.ensure_dir(path, mode=0o755),
        lambda: tree.write_text(path, b"x", mode=0o644),
        lambda: tree.link_source(path, "/x"),
        lambda: tree.link_object(path, sealed),
    ):
        with pytest.raises(StoreError):
            use()
    assert snapshot(store.root) == before


def test_links_in_a_tree_are_never_followed(store: Store, sealed: Path, tmp_path: Path) -> None:
    """A link to a directory outside, even of the right name, gets nothing written behind it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = store.tree("plan1")
    tree.ensure_dir("", mode=0o755)
    tree.link_source("vae", str(outside))
    for use in (
        lambda: tree.ensure_dir("vae", mode=0o755),
        lambda: tree.ensure_dir("vae/deep", mode=0o755),
        lambda: tree.write_text("vae/x", b"x", mode=0o644),
        lambda: tree.link_object("vae/x", sealed),
    ):
        with pytest.raises(StoreError):
            use()
    assert os.listdir(outside) == []
    tree.link_source("config.json", str(outside / "victim"))
    tree.write_text("config.json", b"{}", mode=0o644)
    assert os.listdir(outside) == []
    assert (tree.path / "config.json").read_bytes() == b"{}"


def test_odd_names_are_kept(store: Store) -> None:
    """Undecodable bytes, newlines and long names go into a tree as they are."""
    tree = store.tree("plan1")
    tree.ensure_dir("", mode=0o755)
    for name in ("m\udcff.json", "a\nb", "\u00fc" * 120, "COMPLETE", "-rf"):
        tree.write_text(name, name.encode("utf-8", "surrogateescape"), mode=0o644)
        assert (tree.path / name).read_bytes() == os.fsencode(name)


def test_many_fill_one_tree_at_once(store: Store, sealed: Path, tmp_path: Path) -> None:
    """Eight threads fill and complete the same tree: no error, one result."""

    def work(n: int) -> None:
        tree = store.tree("plan1")
        fill(tree, sealed, tmp_path / f"source{n}")
        tree.complete()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [None] * 8
    assert store.tree("plan1").is_complete()
    assert os.listdir(store.root / "v1" / "tmp") == []


def test_a_damaged_complete_mark_is_none(store: Store, sealed: Path, tmp_path: Path) -> None:
    """COMPLETE counts only as written, and for its own plan."""
    tree = store.tree("plan1")
    fill(tree, sealed, tmp_path / "source")
    tree.complete()
    mark = tree.path / ".fp8fs" / "COMPLETE"
    whole = mark.read_bytes()
    for broken in (b"", whole[:-2], whole.replace(b"plan1", b"plan2"), b"\xff"):
        mark.write_bytes(broken)
        assert not tree.is_complete()


@needs_root
def test_owners_are_kept(store: Store, sealed: Path) -> None:
    """Root gives files and directories of a tree, and objects, their source's owner."""
    tree = store.tree("plan1")
    tree.ensure_dir("", mode=0o755)
    tree.ensure_dir("d", mode=0o700, uid=NOBODY, gid=NOBODY)
    tree.write_text("d/t", b"x", mode=0o600, uid=NOBODY, gid=NOBODY)
    tree.complete()
    for name in ("d", "d/t"):
        info = (tree.path / name).stat()
        assert (info.st_uid, info.st_gid) == (NOBODY, NOBODY)


UNPRIVILEGED = """
import os, sys
import msgspec
from pathlib import Path
from fp8fs.errors import StoreError
from fp8fs.store.store import Store
from tests.contract.test_store_trees import fill
from tests.storing import Toy
os.setgroups([]); os.setgid(65534); os.setuid(65534)
root = Path(sys.argv[1])
store = Store.open(root / "store")
toy = Toy()
toy.finished(store, range(5))
(root / "store/v1/partial" / toy.spec.object_id / "data").chmod(0o440)
path, made = toy.build(store)
assert made == [] and path.read_bytes() == toy.whole()
for _ in range(2):
    tree = store.tree("plan1")
    fill(tree, path, root / "source")
    tree.complete()
(tree.path / "vae/merges.txt").chmod(0o600)
tree.write_text("vae/late", b"x", mode=0o444)
assert oct(os.stat(tree.path / "vae").st_mode)[-3:] == "555"
theirs = Toy("eeee")
theirs.spec = msgspec.structs.replace(theirs.spec, uid=0)
try:
    theirs.build(store)
except StoreError as err:
    assert "permitted" in str(err), err
else:
    raise AssertionError("sealed with a foreign owner")
assert not store.object_path("eeee").exists()
store.remove_tree("plan1")
assert store.collect(grace_s=0) > 0
print(len(store.list_objects()), store.list_trees())
"""


@needs_root
def test_an_unprivileged_user_can_do_all_of_it() -> None:
    """Sealed partials, finished 0555 directories and removal work without root; a foreign owner is refused."""
    with tempfile.TemporaryDirectory() as room:
        os.chown(room, NOBODY, NOBODY)
        command = [sys.executable, "-B", "-c", UNPRIVILEGED, room]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "0 []\n"), done.stderr


# -- pins and collection -----------------------------------------------------------------


def test_collection_keeps_what_trees_need(store: Store) -> None:
    """An object or partial goes only if no tree refers to it, none links it, nobody has it open and it is not kept."""
    referred, linked, kept, loose = (Toy(f"{n}{n}00") for n in "abcd")
    paths = {toy.spec.object_id: toy.build(store)[0] for toy in (referred, linked, kept, loose)}
    tree = store.tree("plan1")
    tree.refer(["aa00", "ee00"])
    tree.ensure_dir("", mode=0o755)
    tree.link_object("m", paths["bb00"])
    for object_id in ("ee00", "ff00", "0a00"):
        Toy(object_id).finished(store, [0])
    with Toy("0a00").open(store):
        assert store.collect(keep=["cc00"]) == 0
        freed = store.collect(keep=["cc00"], grace_s=0)
        assert freed >= loose.spec.size
        assert {info.object_id for info in store.list_objects()} == {"aa00", "bb00", "cc00"}
        assert {(p.object_id, p.in_use) for p in store.list_partials()} == {
            ("ee00", False),
            ("0a00", True),
        }
    assert not paths["dd00"].with_suffix(".json").exists()
    store.remove_tree("plan1")
    store.collect(grace_s=0)
    assert (store.list_objects(), store.list_partials(), store.list_trees()) == ([], [], [])
    assert [p for p in (store.root / "v1").rglob("*") if p.suffix == ".json"] == []


def test_references_add_up(store: Store) -> None:
    """refer() adds to what the tree needs; a damaged list reads as none and can be written again."""
    tree = store.tree("plan1")
    tree.refer(["b1", "a1"])
    tree.refer(["c1"])
    (info,) = store.list_trees()
    assert info.object_ids == {"a1", "b1", "c1"}
    listed = tree.path / ".fp8fs" / "objects"
    whole = listed.read_bytes()
    for broken in (b"", whole[:-3], whole.replace(b"a1", b"a2"), b"[" * 9999):
        listed.write_bytes(broken)
        (info,) = store.list_trees()
        assert info.object_ids == frozenset()
    tree.refer(["d1"])
    (info,) = store.list_trees()
    assert info.object_ids == {"d1"}


def test_a_pinned_tree_is_not_removed(store: Store, sealed: Path, tmp_path: Path) -> None:
    """remove_tree refuses while any pin is held, by this process or another, and works afterwards."""
    fill(store.tree("plan1"), sealed, tmp_path / "source")
    first, second = store.pin("plan1"), Store.open(store.root).pin("plan1")
    first.close()
    first.close()
    with pytest.raises(StoreBusyError, match="plan1"):
        store.remove_tree("plan1")
    assert [info.pinned for info in store.list_trees()] == [True]
    with second:
        assert (store.tree("plan1").path / "config.json").exists()
    assert [info.pinned for info in store.list_trees()] == [False]
    store.remove_tree("plan1")
    store.remove_tree("plan1")
    assert os.listdir(store.root / "v1" / "trees") == []


def test_a_pin_taken_while_a_tree_is_removed_holds(store: Store) -> None:
    """Removing deletes the lock's file; a pin that waited on it ends up on the file of that name."""
    stop = threading.Event()
    removed: list[float] = []

    def remove() -> None:
        while not stop.is_set():
            with suppress(StoreBusyError):
                store.remove_tree("plan1")
                removed.append(time.monotonic())

    end = time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        remover = pool.submit(remove)
        try:
            pins = 0
            while (pins < 60 or not removed) and time.monotonic() < end:
                with store.pin("plan1"):
                    store.tree("plan1").write_manifest(b"x")
                    assert (store.tree("plan1").path / ".fp8fs" / "manifest.json").exists()
                pins += 1
        finally:
            stop.set()
        remover.result()
    assert removed, "nothing was ever removed between two pins"


def test_leftovers_are_collected_when_they_are_old(
    store: Store, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What crashed processes staged, damaged objects and private partials go after their time, not before."""
    (store.root / "v1" / "tmp" / "left").mkdir()
    (store.root / "v1" / "tmp" / "left" / "data").write_bytes(b"x" * 9000)
    (store.root / "v1" / "partial" / "abcd.123.ff").mkdir()
    store.set_aside(sealed.stem, "test")
    store.collect(grace_s=0)
    assert store.usage().damaged_bytes < 8192
    assert (store.root / "v1" / "tmp" / "left" / "data").exists()
    assert (store.root / "v1" / "partial" / "abcd.123.ff").exists()
    monkeypatch.setattr("fp8fs.store.collect.TEMPORARY_GRACE_S", 0.0)
    monkeypatch.setattr("fp8fs.store.collect.PRIVATE_GRACE_S", 0.0)
    assert store.collect(grace_s=0) >= 9000
    assert os.listdir(store.root / "v1" / "tmp") == []
    assert os.listdir(store.root / "v1" / "partial") == []


def test_lists_tell_what_is_there(store: Store, sealed: Path, tmp_path: Path) -> None:
    """ls sees sizes, links, completeness and bytes on disk."""
    toy = Toy("ffff")
    toy.finished(store, [0])
    tree = store.tree("plan1")
    fill(tree, sealed, tmp_path / "source")
    (info,) = store.list_objects()
    assert (info.object_id, info.size, info.links) == (sealed.stem, sealed.stat().st_size, 1)
    (partial,) = store.list_partials()
    assert (partial.object_id, partial.size) == ("ffff", toy.spec.size)
    assert partial.allocated_bytes > 0
    (listed,) = store.list_trees()
    assert (listed.plan_id, listed.complete) == ("plan1", False)
    assert listed.size > 6000 + sealed.stat().st_size
    usage = store.usage()
    assert usage.object_bytes >= info.size
    assert usage.partial_bytes > 0
    assert usage.damaged_bytes < 8192
    assert usage.free_bytes > 0
