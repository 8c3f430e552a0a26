"""Many processes, mounts and threads on one store, and servers that go away under their readers."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from fp8fs.assembly import survey
from fp8fs.audit import check_plan
from fp8fs.building import build_tree
from fp8fs.errors import MountError
from fp8fs.fuse import session
from fp8fs.fuse.mountinfo import read_mountinfo
from fp8fs.store.store import Store
from tests.builders import llama_like
from tests.crash.disks import KINDS, disk
from tests.crash.flows import RECIPE, work_done

REPOSITORY = Path(__file__).resolve().parents[2]
NO_LOCKS = {"ENOLCK": errno.ENOLCK, "EOPNOTSUPP": errno.EOPNOTSUPP, "ENOSYS": errno.ENOSYS}
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV, errno.ENOENT, errno.ESTALE}
"""What a reader may be told when its mount is taken away."""

BUILD = textwrap.dedent(
    """
    import json, os, sys
    from pathlib import Path
    from fp8fs.assembly import assemble
    from fp8fs.store.fsio import FsIo
    from tests.crash.flows import RECIPE, injected

    class Lockless(FsIo):
        code = int(sys.argv[3])
        def try_lock_range(self, fd, start, length, *, exclusive):
            raise OSError(self.code, os.strerror(self.code))
        def try_flock(self, fd, *, exclusive):
            raise OSError(self.code, os.strerror(self.code))

    with injected(Lockless() if Lockless.code else FsIo()):
        with assemble(Path(sys.argv[1]), RECIPE, Path(sys.argv[2]), device="cpu", workers=2, need_store=True) as made:
            print("ready", flush=True)
            sys.stdin.readline()
            made.engine.fill()
            stats = made.engine.stats()
            print(json.dumps([stats.units_made, stats.units_reused, stats.units_total]))
    """
)


class Model:
    """A source and what its view must be."""

    def __init__(self, base: Path, **shape: int) -> None:
        self.src = base / "src"
        llama_like(self.src, **shape)
        tree = build_tree(self.src, RECIPE, base / "reference", device="cpu")
        self.bytes = {path.name: path.read_bytes() for path in tree.glob("*.safetensors")}
        with survey(self.src, RECIPE, base / "reference") as found:
            self.units = sum(len(shard.units) for shard in found.plan.shards)

    def check(self, store: Path) -> None:
        """The finished tree is there, and re-quantizing finds nothing else than it holds."""
        with survey(self.src, RECIPE, store) as found:
            assert found.tree is not None
            shown = {path.name: path.read_bytes() for path in found.tree.path.glob("*.safetensors")}
            assert shown == self.bytes
            assert check_plan(found, deep=True).damage == ()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    """Two checkpoints of a few megabytes that share nothing."""
    base = tmp_path_factory.mktemp("models")
    return (
        Model(base / "one", layers=2, hidden=256, inter=768, vocab=512, shards=3),
        Model(base / "two", layers=2, hidden=192, inter=512, vocab=384, shards=2),
    )


@pytest.fixture(autouse=True)
def no_mount_left(tmp_path: Path) -> Iterator[None]:
    """A test leaves no mount behind."""
    yield
    assert [m.point for m in read_mountinfo() if m.point.startswith(f"{tmp_path}/")] == []


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Builder:
    """A process that is about to fill a store, and waits for the word."""

    def __init__(self, src: Path, store: Path, *, no_locks: int = 0) -> None:
        self.process = python(BUILD, src, store, no_locks)

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[int, int, int]:
        """Units that it made, that it found, and that there are."""
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err
        made, reused, total = json.loads(out)
        return made, reused, total


def sealed_units(src: Path, store: Path) -> int:
    """Units in sealed shards."""
    with survey(src, RECIPE, store) as found:
        return sum(
            len(shard.units)
            for shard in found.plan.shards
            if Store.open(store).object_path(shard.object_id).exists()
        )


def build_at_once(builders: list[Builder]) -> list[tuple[int, int, int]]:
    for builder in builders:
        builder.wait_ready()
    for builder in builders:
        builder.go()
    return [builder.finish() for builder in builders]


@contextmanager
def mounted(model: Model, dst: Path, store: Path, **how: str) -> Iterator[session.Mounted]:
    spec = session.MountSpec(
        src=str(model.src), dst=str(dst), store=str(store), recipe=RECIPE, device="cpu", workers=2,
        log_path=str(dst) + ".log", **how,  # type: ignore[arg-type]
    )  # fmt: skip
    found = session.mount(spec, timeout_s=120)
    try:
        yield found
    finally:
        with suppress(MountError):
            session.unmount(str(dst), lazy=True)


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.fuse
def test_eight_processes_make_each_tensor_once(models: tuple[Model, Model], tmp_path: Path) -> None:
    """Four mounts that are read and four builds, of two sources, on one store: no tensor twice, and everything right."""
    store = tmp_path / "store"
    modes = [{"serve": "handoff"}, {"serve": "inline", "grain": "tensor"}]
    made = {model.src: 0 for model in models}
    with ExitStack() as stack:
        builders = [(model, Builder(model.src, store)) for model in models for _ in range(2)]
        views: list[tuple[Model, Path]] = []
        for number, model in enumerate([*models, *models]):
            dst = tmp_path / f"view{number}"
            stack.enter_context(mounted(model, dst, store, **modes[number // 2]))
            views.append((model, dst))
        for _, builder in builders:
            builder.wait_ready()
        readers = [
            (path, model, subprocess.Popen(["cat", path], stdout=subprocess.PIPE))
            for model, dst in views
            for path in sorted(dst.glob("*.safetensors"))
        ]
        for _, builder in builders:
            builder.go()
        for path, model, reader in readers:
            assert reader.communicate(timeout=120)[0] == model.bytes[path.name], path
        for model, builder in builders:
            made[model.src] += builder.finish()[0]
        for model, dst in views:
            status = session.read_status(str(dst))
            assert status["errors"] == []
            made[model.src] += status["units"]["made"]
    assert made == {model.src: model.units for model in models}
    for model in models:
        model.check(store)
    assert os.listdir(store / "v1" / "partial") == []


@pytest.mark.parametrize("kind", KINDS)
def test_on_every_filesystem(models: tuple[Model, Model], tmp_path: Path, kind: str) -> None:
    """Four builds at once on a tmpfs, an ext4 and an overlay: each tensor once, and everything right."""
    with disk(tmp_path / "disk", kind, 48 << 20) as point:
        built = build_at_once([Builder(models[0].src, point / "store") for _ in range(4)])
        assert sum(made for made, _, _ in built) == models[0].units
        models[0].check(point / "store")


@pytest.mark.parametrize("why", NO_LOCKS)
def test_without_locks(models: tuple[Model, Model], tmp_path: Path, why: str) -> None:
    """Four builds at once where no file can be locked: made more than once, identically, and nothing is left over."""
    store = tmp_path / "store"
    built = build_at_once([Builder(models[0].src, store, no_locks=NO_LOCKS[why]) for _ in range(4)])
    assert sum(made for made, _, _ in built) >= models[0].units
    models[0].check(store)
    assert os.listdir(store / "v1" / "partial") == []


@pytest.mark.parametrize("no_locks", [0, errno.ENOLCK], ids=["locks", "no locks"])
def test_the_dead_are_succeeded(models: tuple[Model, Model], tmp_path: Path, no_locks: int) -> None:
    """A builder is killed in the middle: the next one goes on from what it finished, locks or not, and makes no unit again."""
    store = tmp_path / "store"
    dead = Builder(models[0].src, store, no_locks=no_locks)
    dead.wait_ready()
    dead.go()
    end = time.monotonic() + 60
    while work_done(store) < 3 and time.monotonic() < end:
        pass
    dead.process.kill()
    dead.process.communicate()
    left = work_done(store) + sealed_units(models[0].src, store)
    assert left >= 3
    (counts,) = build_at_once([Builder(models[0].src, store, no_locks=no_locks)])
    made, reused, total = counts
    assert reused >= left
    assert made + reused == total
    models[0].check(store)
    assert os.listdir(store / "v1" / "partial") == []


@pytest.mark.parametrize("no_locks", [0, errno.ENOLCK], ids=["locks", "no locks"])
@pytest.mark.parametrize("date", [0, 4_000_000_000], ids=["1970", "2096"])
def test_clocks_decide_nothing(
    models: tuple[Model, Model], tmp_path: Path, date: int, no_locks: int
) -> None:
    """With every date of the store far off, twice in the middle of a build, its work and its claims stand."""
    store = tmp_path / "store"
    builders = [Builder(models[0].src, store, no_locks=no_locks) for _ in range(2)]
    for builder in builders:
        builder.wait_ready()
        builder.go()
    for _ in range(20):
        for folder, folders, names in os.walk(
            store / "v1" / "partial"
        ):  # what goes meanwhile is left out
            for name in (*folders, *names):
                with suppress(FileNotFoundError):
                    os.utime(os.path.join(folder, name), (date, date))
        time.sleep(0.005)
    made = sum(builder.finish()[0] for builder in builders)
    assert made == models[0].units or no_locks
    models[0].check(store)


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.fuse
@pytest.mark.parametrize("grain", ["shard", "tensor"])
def test_threads_on_one_cold_descriptor(
    models: tuple[Model, Model], tmp_path: Path, grain: str
) -> None:
    """Sixteen threads read random ranges of one descriptor while its tensors are being made: all of them right."""
    model = models[0]
    with mounted(model, tmp_path / "view", tmp_path / "store", serve="inline", grain=grain):
        name, wanted = sorted(model.bytes.items())[0]
        fd = os.open(tmp_path / "view" / name, os.O_RDONLY)
        wrong: list[tuple[int, int]] = []

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                at, length = rng.randrange(len(wanted)), rng.choice([1, 4096, 70_000, 300_000])
                if os.pread(fd, length, at) != wanted[at : at + length]:
                    wrong.append((at, length))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        os.close(fd)
        assert wrong == []


# -- servers that go away -------------------------------------------------------------------------

READ_ON = textwrap.dedent(
    """
    import os, sys, random, time
    rng = random.Random(int(sys.argv[2]))
    with open(sys.argv[3], "rb") as file:
        wanted = file.read()
    fd = os.open(sys.argv[1], os.O_RDONLY)
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        at = rng.randrange(len(wanted))
        try:
            found = os.pread(fd, 50_000, at)
            other = os.open(sys.argv[1], os.O_RDONLY)
            os.close(other)
        except OSError as err:
            print(err.errno)
            sys.exit(0)
        assert found == wanted[at : at + 50_000]
    """
)


def kill(found: session.Mounted) -> None:
    os.kill(found.pid, signal.SIGKILL)
    os.waitpid(found.pid, 0)
    session.unmount(found.dst)


def terminate(found: session.Mounted) -> None:
    os.kill(found.pid, signal.SIGTERM)
    os.waitpid(found.pid, 0)


def detach(found: session.Mounted) -> None:
    session.unmount(found.dst, lazy=True)


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("end", "grain"), [(kill, "tensor"), (terminate, "shard"), (detach, "tensor")]
)
def test_unmount_while_reading(
    models: tuple[Model, Model], tmp_path: Path, end: Callable[[session.Mounted], None], grain: str
) -> None:
    """However the mount goes away, its readers read right bytes until they get one clean errno, and nothing hangs or stays."""
    model = models[0]
    dst = tmp_path / "view"
    with ExitStack() as stack:
        found = stack.enter_context(
            mounted(model, dst, tmp_path / "store", serve="inline", grain=grain)
        )
        readers = []
        for seed, (name, wanted) in enumerate(sorted(model.bytes.items())):
            (tmp_path / name).write_bytes(wanted)
            readers.append(python(READ_ON, dst / name, seed, tmp_path / name))
            stack.callback(readers[-1].communicate)
            stack.callback(readers[-1].kill)
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        with pytest.raises(MountError, match="in use"):
            session.unmount(str(dst))
        time.sleep(0.2)
        assert all(reader.poll() is None for reader in readers)
        end(found)
        for reader in readers:
            out, err = reader.communicate(timeout=20)
            assert reader.returncode == 0, err
            assert int(out) in GONE, errno.errorcode[int(out)]
        assert [m.point for m in read_mountinfo() if m.point.startswith(str(dst))] == []


@pytest.mark.fuse
def test_mappings_outlive_servers_and_gc(models: tuple[Model, Model], tmp_path: Path) -> None:
    """Killed, mounted again, unmounted, its tree removed and collected: what was mapped of a sealed shard stays."""
    model, other = models
    store, dst = tmp_path / "store", tmp_path / "view"
    held: dict[str, mmap.mmap] = {}

    def check_held() -> None:
        assert {name: mapped[:] for name, mapped in held.items()} == model.bytes

    with mounted(model, dst, store) as first:
        for name in model.bytes:
            with (dst / name).open("rb") as file:
                held[name] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        check_held()
        os.kill(first.pid, signal.SIGKILL)
        os.waitpid(first.pid, 0)
        check_held()
        with mounted(model, dst, store):  # over the dead one
            check_held()
            inodes = {name: os.stat(dst / name).st_ino for name in model.bytes}
            assert inodes.keys() == held.keys()
            assert session.read_status(str(dst))["units"]["made"] == 0
        check_held()
    build_tree(other.src, RECIPE, store, device="cpu")
    opened = Store.open(store)
    for tree in opened.list_trees():
        opened.remove_tree(tree.plan_id)
    assert opened.collect(grace_s=0) > 0
    assert opened.list_objects() == []
    check_held()
    with mounted(model, dst, store):
        assert {name: (dst / name).read_bytes() for name in model.bytes} == model.bytes
    check_held()
    for mapped in held.values():
        mapped.close()
