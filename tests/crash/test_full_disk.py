"""The store's disk is full, read-only, forbidden or gone: readers never notice, ``status`` does, and it heals."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fp8fs
from fp8fs.assembly import Assembled, assemble
from fp8fs.building import build_tree
from fp8fs.errors import StoreFullError
from fp8fs.fuse import session
from fp8fs.view import View
from tests import builders
from tests.builders import llama_like
from tests.crash.disks import disk, fill_up, remount
from tests.crash.faults import FaultyIo
from tests.crash.flows import RECIPE, World, injected, read_view, reading

ROOM_BYTES = 24 << 20
REPOSITORY = Path(builders.__file__).parent.parent


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in trouble is tried again at once."""
    monkeypatch.setattr("fp8fs.engine.trouble._RETRY_S", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A model of a few megabytes in three shards, and its view."""
    base = tmp_path_factory.mktemp("model")
    llama_like(base / "src", layers=2, hidden=256, inter=768, vocab=512, shards=3)
    tree = build_tree(base / "src", RECIPE, base / "store", device="cpu")
    return base / "src", {path.name: path.read_bytes() for path in tree.glob("*.safetensors")}


@contextmanager
def served(src: Path, store: Path) -> Iterator[tuple[Assembled, View]]:
    with assemble(src, RECIPE, store, device="cpu", workers=2) as made:
        yield made, made.view(serve="handoff", grain="shard", bound=False)


@contextmanager
def mounted(src: Path, dst: Path, store: Path, log: Path, **how: str) -> Iterator[None]:
    spec = session.MountSpec(
        src=str(src), dst=str(dst), store=str(store), recipe=RECIPE, device="cpu", log_path=str(log),
        **how,  # type: ignore[arg-type]
    )  # fmt: skip
    session.mount(spec, timeout_s=60)
    try:
        yield
    finally:
        session.unmount(str(dst), lazy=True)


def until(condition: Callable[[], bool], timeout_s: float = 20) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def remove(store: Path) -> None:
    """``rm -rf``, against a server that is still making things there."""
    while store.exists():
        shutil.rmtree(store, ignore_errors=True)


def kinds(view: View, names: dict[str, bytes]) -> set[str]:
    return {view.lookup(name).kind for name in names}


# -- full ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_build_asks_for_room_first(
    tmp_path: Path, model: tuple[Path, dict[str, bytes]], kind: str
) -> None:
    """Too little room: one error with both numbers, before a byte is quantized; with room it builds."""
    src, names = model
    with disk(tmp_path / "disk", kind, ROOM_BYTES) as point:
        ballast = fill_up(point, leave=2 << 20)
        with pytest.raises(
            StoreFullError, match=r"needs [\d,]+ bytes more .* [\d,]+ are free"
        ) as e:
            fp8fs.build(src, store=point / "store", scheme=RECIPE.scheme)
        assert e.value.facts["needed_bytes"] >= sum(map(len, names.values()))
        assert 0 < e.value.facts["free_bytes"] < 3 << 20
        assert list(point.glob("store/v1/partial/*")) == []
        ballast.unlink()
        tree = fp8fs.build(src, store=point / "store", scheme=RECIPE.scheme)
        assert {p.name: p.read_bytes() for p in tree.glob("*.safetensors")} == names


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("leave", [0, 200_000, 1_500_000])
def test_a_full_disk_is_served_from_memory_and_heals(
    tmp_path: Path, model: tuple[Path, dict[str, bytes]], kind: str, leave: int
) -> None:
    """Full before, at the first or in a later shard: right bytes, a reason in the stats, sealed once there is room."""
    src, names = model
    with disk(tmp_path / "disk", kind, ROOM_BYTES) as point:
        with served(src, point / "store"):
            pass  # the tree is there
        ballast = fill_up(point, leave=leave)
        with served(src, point / "store") as (made, view):
            assert any("bytes more" in warning for warning in made.warnings)
            assert read_view(view, names) == names
            assert "No space left" in made.engine.stats().degraded
            ballast.unlink()
            assert until(lambda: read_view(view, names) == names and kinds(view, names) == {"link"})
            assert made.engine.stats().degraded == ""
            assert made.tree is not None
            assert made.tree.is_complete()


def test_a_full_disk_keeps_what_was_made(
    tmp_path: Path, model: tuple[Path, dict[str, bytes]]
) -> None:
    """Units that were journaled before the disk was full are not made again when there is room."""
    src, names = model
    with disk(tmp_path / "disk", "tmpfs", ROOM_BYTES) as point:
        with served(src, point / "store"):
            pass
        ballast = fill_up(point, leave=900_000)
        with served(src, point / "store") as (made, view):
            assert read_view(view, names) == names
            before = made.engine.stats().units_made
            assert before > 0
        ballast.unlink()
        with served(src, point / "store") as (made, view):
            made.engine.fill()
            assert made.engine.stats().units_reused >= before


@pytest.mark.fuse
def test_a_mapping_lives_through_full_and_free(
    tmp_path: Path, model: tuple[Path, dict[str, bytes]]
) -> None:
    """Fill the disk, map, free space, seal, read on: the shard stays a file until its last release, then it is a link."""
    src, names = model
    name = sorted(names)[0]
    with disk(tmp_path / "disk", "tmpfs", ROOM_BYTES) as point:
        with served(src, point / "store"):
            pass
        ballast = fill_up(point)
        dst = tmp_path / "view"
        spec = session.MountSpec(
            src=str(src), dst=str(dst), store=str(point / "store"), recipe=RECIPE, device="cpu",
            log_path=str(tmp_path / "log"),
        )  # fmt: skip
        session.mount(spec, timeout_s=60)
        try:
            shard = dst / name
            fd = os.open(shard, os.O_RDONLY)
            mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            assert mapped[: 1 << 20] == names[name][: 1 << 20]
            assert "No space left" in session.read_status(str(dst))["degraded"]
            ballast.unlink()
            # Another handle on the same file asks for the rest, until the store takes it.
            assert until(
                lambda: (
                    os.pread(fd, 1 << 20, 0) == names[name][: 1 << 20]
                    and shard.read_bytes() == names[name]
                    and session.read_status(str(dst))["shards"]["sealed"] == len(names)
                )
            )
            assert not shard.is_symlink()
            assert mapped[:] == names[name]
            mapped.close()
            os.close(fd)
            assert until(shard.is_symlink)
            assert shard.read_bytes() == names[name]
            assert session.read_status(str(dst))["degraded"] == ""
        finally:
            session.unmount(str(dst), lazy=True)


@pytest.mark.parametrize("nth", [1, 60, 120, 200, 300])
@pytest.mark.parametrize("workers", [1, 3])
def test_whatever_failed_heals(world: World, room: Path, nth: int, workers: int) -> None:
    """After the store works again everything is handed over, nothing is degraded, and the tree is complete."""
    with reading(world, room / "store", serve="handoff", grain="shard"):
        pass  # a tree that cannot be made at mount is not made later
    io = FaultyIo(0, errno.ENOSPC, persistent=False)
    with (
        injected(io),
        reading(world, room / "store", serve="handoff", grain="shard", workers=workers) as (
            made,
            view,
        ),
    ):
        io.fail_from(io.calls + nth)
        assert read_view(view, world.bytes) == world.bytes
        io.heal()
        assert until(
            lambda: (
                read_view(view, world.bytes) == world.bytes and kinds(view, world.bytes) == {"link"}
            )
        )
        assert made.engine.stats().degraded == ""
        assert made.tree is not None
        assert made.tree.is_complete()


@pytest.mark.fuse
@pytest.mark.parametrize(("serve", "grain"), [("inline", "tensor"), ("handoff", "shard")])
def test_asking_for_the_status_is_enough(
    tmp_path: Path, model: tuple[Path, dict[str, bytes]], serve: str, grain: str
) -> None:
    """Nobody reads any more, space returns, ``status`` is asked: the store is tried with what it refused, and no more."""
    src, names = model
    dst = tmp_path / "view"
    with disk(tmp_path / "disk", "tmpfs", ROOM_BYTES) as point:
        with served(src, point / "store"):
            pass
        ballast = fill_up(point, leave=300_000)
        with mounted(src, dst, point / "store", tmp_path / "log", serve=serve, grain=grain):
            assert {name: (dst / name).read_bytes() for name in names} == names
            before = session.read_status(str(dst))
            assert "No space left" in before["degraded"]
            ballast.unlink()
            assert until(lambda: session.read_status(str(dst))["degraded"] == "")
            after = session.read_status(str(dst))
            assert before["units"]["made"] < after["units"]["made"]
            assert after["units"]["total"] > after["units"]["made"]


# -- quota, rights, read-only ----------------------------------------------------------------------

READ_ALL = textwrap.dedent(
    """
    import hashlib, os, sys
    from pathlib import Path
    from fp8fs.assembly import assemble
    from tests.crash.flows import RECIPE, read_view
    src, store, before = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    names = dict.fromkeys(sys.argv[4:])
    with assemble(src, RECIPE, store, device="cpu", workers=2) as made:
        view = made.view(serve="handoff", grain="shard", bound=False)
        first = read_view(view, names=dict.fromkeys(list(names)[:1]))
        exec(before)
        found = read_view(view, names)
        assert all(found[name] == value for name, value in first.items())
        for name in names:
            print(hashlib.sha256(found[name]).hexdigest())
        print(made.engine.stats().degraded)
    """
)


def read_elsewhere(
    src: Path, store: Path, names: dict[str, bytes], before: str, **how: object
) -> str:
    """A process that reads everything, with *before* run after the first shard. Returns why it was degraded."""
    child = subprocess.run(
        [sys.executable, "-c", READ_ALL, src, store, before, *names],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        **how,  # type: ignore[call-overload]
    )
    assert child.returncode == 0, child.stderr
    *digests, degraded = child.stdout.splitlines()
    assert digests == [hashlib.sha256(data).hexdigest() for data in names.values()]
    return degraded


def test_a_limit_on_file_sizes(tmp_path: Path, model: tuple[Path, dict[str, bytes]]) -> None:
    """Where the store may not have files that large (RLIMIT_FSIZE, FAT), readers are served all the same."""
    src, names = model

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    degraded = read_elsewhere(src, tmp_path / "store", names, "", preexec_fn=limit)
    assert "File too large" in degraded


def test_permission_lost(model: tuple[Path, dict[str, bytes]]) -> None:
    """An unprivileged server whose store is closed under it goes on serving, and says why."""
    src, names = model
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder)
        shared.chmod(0o755)
        shutil.copytree(src, shared / "src")
        home = shared / "home"
        home.mkdir()
        os.chown(home, 65534, 65534)
        closed = "[os.chmod(folder, 0o500) for folder in [*store.glob('v1/*/'), store / 'v1']]"
        degraded = read_elsewhere(
            shared / "src", home / "store", names, closed, user=65534, group=65534, extra_groups=[]
        )
    assert "Permission denied" in degraded


def test_a_read_only_store(tmp_path: Path, model: tuple[Path, dict[str, bytes]]) -> None:
    """A finished tree is handed over from a read-only filesystem; one that is not finished is completed in memory."""
    src, names = model
    with disk(tmp_path / "disk", "tmpfs", ROOM_BYTES) as point:
        with served(src, point / "store") as (made, view):
            made.engine._run_ahead = 0
            made.engine.ensure_sealed(0, lambda: None)
            assert kinds(view, names) == {"link", "file"}
        remount(point, "ro")
        with served(src, point / "store") as (made, view):
            assert read_view(view, names) == names
            assert kinds(view, names) == {"file"}
            assert "cannot be written" in made.engine.stats().degraded
        remount(point, "rw")
        build_tree(src, RECIPE, point / "store", device="cpu")
        remount(point, "ro")
        with served(src, point / "store") as (made, view):
            assert read_view(view, names) == names
            assert kinds(view, names) == {"link"}
            assert made.engine.stats().source_bytes_read == 0


# -- gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [0, 1, 2])
def test_a_store_deleted_under_a_view(world: World, room: Path, sealed: int) -> None:
    """Whatever was sealed before ``rm -rf``: names turn back into files, the bytes are right, the stats say why."""
    with reading(world, room / "store", serve="handoff", grain="shard") as (made, view):
        for shard in range(sealed):
            made.engine.ensure_sealed(shard, lambda: None)
        remove(room / "store")
        assert read_view(view, world.bytes) == world.bytes
        assert kinds(view, world.bytes) == {"file"}
        assert "No such file" in made.engine.stats().degraded
        assert "unmount and mount again" in made.engine.stats().degraded
        assert made.engine.stats().shards_sealed == 0
    assert not (room / "store").exists()
    with reading(world, room / "store", serve="handoff", grain="shard") as (made, view):
        assert read_view(view, world.bytes) == world.bytes
        assert kinds(view, world.bytes) == {"link"}


@pytest.mark.parametrize("what", ["objects", "trees"])
def test_a_part_of_the_store_deleted_under_a_view(world: World, room: Path, what: str) -> None:
    """Without its objects the store still has the tree's links, without trees no link leads anywhere: the bytes are right."""
    with reading(world, room / "store", serve="handoff", grain="shard") as (_, view):
        assert read_view(view, world.bytes) == world.bytes
        shutil.rmtree(room / "store" / "v1" / what)
        assert read_view(view, world.bytes) == world.bytes


def move(store: Path) -> None:
    store.rename(store.with_name("elsewhere"))


def empty(store: Path) -> None:
    """The store stays and can be used; what was sealed is gone from it, under each of its names."""
    for path in store.glob("v1/**/*"):
        if path.is_file() and path.stat().st_size > 200_000:
            path.unlink()


def remake(store: Path) -> None:
    """Another process makes the same things anew at the place of a store that was removed."""
    remove(store)
    build_tree(store.with_name("src"), RECIPE, store, device="cpu")


@pytest.mark.fuse
@pytest.mark.parametrize("gone", [remove, move, empty, remake])
def test_a_store_deleted_under_a_mount(
    tmp_path: Path, model: tuple[Path, dict[str, bytes]], gone: Callable[[Path], None]
) -> None:
    """Through the kernel: open handles and mappings go on, and the very next open gives the right bytes, served inline."""
    names = model[1]
    src, dst, store = (tmp_path / name for name in ("src", "view", "store"))
    src.symlink_to(model[0])
    with mounted(src, dst, store, tmp_path / "log"):
        first = sorted(names)[0]
        with (
            (dst / first).open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as m,
        ):
            assert {name: (dst / name).read_bytes() for name in names} == names
            assert all((dst / name).is_symlink() for name in names)  # so the kernel knows them
            gone(store)
            for name, data in names.items():
                assert (dst / name).read_bytes() == data
            assert m[:] == names[first]
            assert file.read() == names[first]
        degraded = session.read_status(str(dst))["degraded"]
        assert ("unmount and mount again" in degraded) == (gone is not empty)


# -- memory ----------------------------------------------------------------------------------------

MEASURE = textwrap.dedent(
    """
    import re, sys
    from pathlib import Path
    from fp8fs.core.layout import plan
    from fp8fs.core.recipe import Recipe
    from fp8fs.engine import Engine
    from fp8fs.quant import quantizer_factory
    from fp8fs.source import Source
    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
    source = Source.open(Path(sys.argv[1]))
    planned = plan(source.checkpoint, Recipe(scheme="per_tensor"), quantizer_version="1")
    engine = Engine(planned, source, None, quantizer_factory("cpu"), workers=2, memory_bytes=8 << 20, grain="tensor")
    total = 0
    for turn in range(2):
        for index, shard in enumerate(planned.shards):
            reader = engine.open(index)
            for at in range(0, shard.size, 1 << 20):
                total += len(reader.pread(at, 1 << 20, lambda: None))
            reader.close()
        if not turn:
            before = peak()
    engine.close()
    print(total, peak() - before, peak())
    """
)


def test_serving_without_a_store_needs_bounded_memory(tmp_path: Path) -> None:
    """A model much larger than the budget, read twice from memory alone: the second time takes no more than the first."""
    llama_like(tmp_path / "src", layers=4, hidden=1024, inter=2816, vocab=512, shards=2)
    child = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "src"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    total, growth, peak = map(int, child.stdout.split())
    assert total > 80 << 20
    assert growth < 8 << 20
    assert peak < 330 << 20
