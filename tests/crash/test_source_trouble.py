"""SRC is replaced, cut, touched, rewritten or deleted while its view is filled: old bytes or one error, never a mixture.

The trouble comes before the first read, between two reads, or between the last read and the commit; the store is then
compared with what the untouched SRC gives, and a new mount with what the new SRC gives.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from fp8fs.assembly import assemble
from fp8fs.audit import check_store
from fp8fs.building import build_tree
from fp8fs.errors import HandedOverError, SourceChangedError, SourceInvalidError
from fp8fs.fuse import session
from fp8fs.source import Source
from fp8fs.store.store import Store
from fp8fs.view import View
from tests import oracle
from tests.crash.flows import LONG, RECIPE, World, no_poll

Trouble = Callable[[Path], None]


def shards(src: Path) -> list[Path]:
    return sorted(src.glob("*.safetensors"))


def other_values(path: Path) -> bytes:
    """The file with every BF16 value moved by one place: as long, as valid, other weights."""
    start, entries, _ = oracle.read_header(path)
    data = bytearray(path.read_bytes())
    for entry in entries.values():
        begin, end = entry["data_offsets"]
        values = data[start + begin : start + end]
        data[start + begin : start + end] = values[2:] + values[:2]
    return bytes(data)


def replaced(src: Path) -> None:
    """Another file is renamed over each shard, as rsync does it."""
    for path in shards(src):
        new = path.with_suffix(".new")
        new.write_bytes(other_values(path))
        new.rename(path)


def replaced_alike(src: Path) -> None:
    """The same, with the size and the date of the old one."""
    for path in shards(src):
        facts = path.stat()
        new = path.with_suffix(".new")
        new.write_bytes(other_values(path))
        os.utime(new, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        new.rename(path)


def rewritten_alike(src: Path) -> None:
    """Other weights are written into the open files, and the dates put back."""
    for path in shards(src):
        facts = path.stat()
        with path.open("r+b") as file:
            file.write(other_values(path))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def swapped(src: Path) -> None:
    """Two shards take each other's name."""
    one, two = shards(src)
    aside = src / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def truncated(src: Path) -> None:
    for path in shards(src):
        os.truncate(path, path.stat().st_size // 2)


def growing(src: Path) -> None:
    """As a file that is still being downloaded."""
    for path in shards(src):
        with path.open("ab") as file:
            file.write(bytes(100))


def touched(src: Path) -> None:
    for path in shards(src):
        os.utime(path)


def deleted(src: Path) -> None:
    for path in shards(src):
        path.unlink()


def directory_deleted(src: Path) -> None:
    shutil.rmtree(src)


def pointers(src: Path) -> None:
    """``git checkout`` without LFS: text files where the weights were."""
    for path in shards(src):
        size = path.stat().st_size
        path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize {size}\n")


def no_files(src: Path) -> None:
    """Something that must not even be opened has the name."""
    for path in shards(src):
        path.unlink()
        os.mkfifo(path)


TROUBLES: list[Trouble] = [
    replaced, replaced_alike, rewritten_alike, swapped, truncated, growing, touched, deleted,
    directory_deleted, pointers, no_files,
]  # fmt: skip
STILL_A_MODEL = [replaced, replaced_alike, rewritten_alike, touched]
"""After these SRC can be mounted again."""


@pytest.fixture
def src(world: World, room: Path) -> Path:
    """A copy of SRC with its dates, so that its shards are the same objects."""
    return shutil.copytree(world.src, room / "src")


@contextmanager
def troubled(src: Path, trouble: Trouble, nth: int, *, behind: bool) -> Iterator[list[int]]:
    """*trouble* comes before the *nth* read of a weight, or right *behind* it. Yields the count of reads."""
    reads = [0]
    real = Source.pread_into

    def pread_into(self: Source, *arguments: object) -> None:
        reads[0] += 1
        mine = reads[0] == nth
        if mine and not behind:
            trouble(src)
        real(self, *arguments)  # type: ignore[arg-type]
        if mine and behind:
            trouble(src)

    with mock.patch.object(Source, "pread_into", pread_into):
        yield reads


def read_shard(view: View, name: str) -> bytes:
    """All of a shard as a reader gets it. Raises what its reader gets an errno for."""
    while view.lookup(name).kind != "link":
        try:
            handle = view.open(name, no_poll)
        except HandedOverError:
            continue
        try:
            parts: list[bytes] = []
            while part := view.pread(handle, sum(map(len, parts)), 1 << 15, no_poll):
                parts.append(part)
            return b"".join(parts)
        finally:
            view.release(handle)
    return Path(view.readlink(name)).read_bytes()


def check_store_is_old(world: World, root: Path) -> int:
    """Each sealed object is one that the untouched SRC gives, byte for byte. Returns how many there are."""
    known = set(world.bytes.values())
    sealed = list(root.glob("v1/objects/*/*.safetensors"))
    for path in sealed:
        assert path.read_bytes() in known, path
    assert check_store(Store.open(root)).damage == ()
    return len(sealed)


def check_what_is_left_is_old(world: World, root: Path, pristine: Path) -> None:
    """Journaled units are those of the untouched SRC, too: finished from there, the tree is the known one."""
    tree = build_tree(pristine, RECIPE, root, device="cpu", workers=1)
    assert {path.name: path.read_bytes() for path in shards(tree)} == world.bytes


@pytest.mark.parametrize("behind", [False, True], ids=["before a read", "behind a read"])
@pytest.mark.parametrize(("serve", "grain"), [("handoff", "shard"), ("inline", "tensor")])
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: t.__name__)
def test_a_view_never_mixes(
    world: World, src: Path, room: Path, trouble: Trouble, serve: str, grain: str, behind: bool
) -> None:
    """Whenever the trouble comes, a reader gets the old bytes or an error that names a file, and the store has old bytes only."""
    errors: list[SourceChangedError] = []
    for nth in itertools.count(1, 1 if LONG else 3):
        root = room / "store"
        for folder in (src, root):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(world.src, src)
        with ExitStack() as stack:
            reads = stack.enter_context(troubled(src, trouble, nth, behind=behind))
            made = stack.enter_context(
                assemble(src, RECIPE, root, device="cpu", workers=1, grain=grain)
            )
            view = made.view(serve=serve, grain=grain, bound=False)
            for name, wanted in world.bytes.items():
                try:
                    assert read_shard(view, name) == wanted
                except SourceChangedError as err:
                    errors.append(err)
            happened = reads[0] >= nth
        check_store_is_old(world, root)
        check_what_is_left_is_old(world, root, world.src)
        if not happened:
            break
    assert errors
    assert {error.errno for error in errors} == {errno.EIO}
    assert all(error.facts["file"] for error in errors)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: t.__name__)
def test_a_build_never_mixes(world: World, src: Path, room: Path, trouble: Trouble) -> None:
    """A build in whose middle SRC changes ends with one error and no finished tree; what it kept is right."""
    root = room / "store"
    with (
        troubled(src, trouble, 3, behind=True),
        pytest.raises(SourceChangedError),
    ):
        build_tree(src, RECIPE, root, device="cpu", workers=2)
    assert list(root.glob("v1/trees/*/.fp8fs/COMPLETE")) == []
    check_store_is_old(world, root)
    check_what_is_left_is_old(world, root, world.src)


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda t: t.__name__)
def test_between_plan_and_first_open(world: World, src: Path, room: Path, trouble: Trouble) -> None:
    """Changed after the mount and before anything was read: each shard is one error, and nothing is made."""
    root = room / "store"
    with assemble(src, RECIPE, root, device="cpu", workers=2) as made:
        view = made.view(serve="handoff", grain="shard", bound=False)
        trouble(src)
        for name in world.bytes:
            with pytest.raises(SourceChangedError, match=r"was"):
                read_shard(view, name)
        assert made.engine.stats().units_made == 0
    assert check_store_is_old(world, root) == 0


@pytest.mark.parametrize("trouble", STILL_A_MODEL, ids=lambda t: t.__name__)
def test_the_next_mount_shows_the_new_source(
    world: World, src: Path, room: Path, trouble: Trouble
) -> None:
    """After a change in the middle of a fill, the next build makes what a store that never saw the old SRC makes."""
    root = room / "store"
    with (
        troubled(src, trouble, 3, behind=True),
        pytest.raises(SourceChangedError),
    ):
        build_tree(src, RECIPE, root, device="cpu", workers=2)
    tree = build_tree(src, RECIPE, root, device="cpu")
    fresh = build_tree(src, RECIPE, room / "fresh", device="cpu")
    found = {path.name: path.read_bytes() for path in shards(tree)}
    assert found == {path.name: path.read_bytes() for path in shards(fresh)}
    assert (found == world.bytes) == (trouble is touched)


@pytest.mark.parametrize("trouble", [truncated, growing, deleted, pointers, no_files])
def test_what_is_no_model_any_more_is_refused(src: Path, room: Path, trouble: Trouble) -> None:
    """A mount of what the trouble left is one sentence, not a view."""
    trouble(src)
    with pytest.raises(SourceInvalidError, match=r"^[^\n]+$"):
        assemble(src, RECIPE, room / "store", device="cpu").close()


@contextmanager
def bad_sectors(nth: int, *, persistent: bool) -> Iterator[list[int]]:
    """The *nth* read of a weight fails, and with *persistent* all later ones. Yields the count of reads."""
    reads = [0]
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
        if not flags:  # else a look at the page cache
            reads[0] += 1
            if reads[0] == nth or (persistent and reads[0] > nth):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, at, flags)

    with mock.patch.object(os, "preadv", preadv):
        yield reads


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(("serve", "grain"), [("handoff", "shard"), ("inline", "tensor")])
def test_a_bad_sector_of_the_source(
    world: World, room: Path, serve: str, grain: str, persistent: bool
) -> None:
    """Whichever read of a weight fails: right bytes or one EIO that names file and byte, and nothing else is stored."""
    errors: list[SourceInvalidError] = []
    for nth in itertools.count(1, 1 if LONG else 4):
        root = room / "store"
        shutil.rmtree(root, ignore_errors=True)
        with (
            assemble(world.src, RECIPE, root, device="cpu", workers=1, grain=grain) as made,
            bad_sectors(nth, persistent=persistent) as reads,
        ):
            view = made.view(serve=serve, grain=grain, bound=False)
            for name, wanted in world.bytes.items():
                try:
                    assert read_shard(view, name) == wanted
                except SourceInvalidError as err:
                    errors.append(err)
        check_store_is_old(world, root)
        check_what_is_left_is_old(world, root, world.src)
        if reads[0] < nth:
            break
    assert errors
    assert {error.errno for error in errors} == {errno.EIO}
    says = re.compile(r"\.safetensors: cannot be read at byte \d+: Input/output error")
    assert all(says.search(str(error)) for error in errors)


@pytest.mark.parametrize("name", ["{}.incomplete", ".cache/huggingface/download/{}.abc.incomplete"])
def test_a_download_that_has_not_ended(src: Path, room: Path, name: str) -> None:
    """Before the mount it is refused by name; one that begins under a mount disturbs nobody."""
    first = shards(src)[0]
    with assemble(src, RECIPE, room / "store", device="cpu", workers=1) as made:
        part = src / name.format(first.name)
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(first.read_bytes()[:1000])
        made.engine.fill()
    with pytest.raises(SourceInvalidError, match="not finished"):
        assemble(src, RECIPE, room / "store", device="cpu").close()


@pytest.mark.fuse
@pytest.mark.parametrize("trouble", [replaced_alike, truncated, deleted, directory_deleted])
@pytest.mark.parametrize(("serve", "grain"), [("handoff", "shard"), ("inline", "tensor")])
def test_through_a_mount(
    world: World, src: Path, tmp_path: Path, trouble: Trouble, serve: str, grain: str
) -> None:
    """A reader process sees the old bytes or EIO at once; what was sealed stays readable; the mount goes away as ever."""
    spec = session.MountSpec(
        src=str(src), dst=str(tmp_path / "view"), store=str(tmp_path / "store"), recipe=RECIPE,
        device="cpu", workers=1, serve=serve, grain=grain, log_path=str(tmp_path / "log"),
    )  # fmt: skip
    session.mount(spec, timeout_s=60)
    try:
        trouble(src)
        for name in world.bytes:
            cat = subprocess.run(
                ["cat", tmp_path / "view" / name], capture_output=True, timeout=20, check=False
            )
            assert cat.returncode == 1
            assert cat.stdout == world.bytes[name][: len(cat.stdout)]
            assert b"Input/output error" in cat.stderr
        status = session.read_status(str(tmp_path / "view"))
        assert {error["code"] for error in status["errors"]} == {"source.changed"}
        assert status["source_changes"]
    finally:
        session.unmount(str(tmp_path / "view"))
    check_store_is_old(world, tmp_path / "store")
