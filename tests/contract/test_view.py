"""One suite, two drivers: the View object alone, and the same view mounted by the kernel."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from fp8fs.errors import HandedOverError, MountError, NoSuchPathError, NotADirectoryInViewError
from fp8fs.fuse import session
from fp8fs.fuse.libfuse import check_fuse
from fp8fs.view import View
from tests.mount.conftest import REPOSITORY, SIZES, make_source
from tests.mount.fakes import FakeEngine, FakeSource, make_plan, pattern

KINDS = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


class Driver(Protocol):
    """The view as somebody uses it. Errors are OSErrors; links are not followed, but by ``read``."""

    def facts(self, path: str) -> tuple[str, int, int, int]:
        """kind, permission bits, size, mtime_ns (a directory's size is nobody's business: 0)."""
        ...

    def names(self, path: str) -> list[str]: ...

    def read(self, path: str, offset: int, length: int) -> bytes: ...


class Object:
    """The View, with the retry that the kernel makes after a handoff."""

    def __init__(self, view: View, tree: Path, source: Path) -> None:
        self.view, self.tree, self.source = view, tree, source

    def facts(self, path: str) -> tuple[str, int, int, int]:
        try:
            attrs = self.view.lookup(path)
        except NoSuchPathError as err:
            raise FileNotFoundError(path) from err
        return attrs.kind, attrs.mode, 0 if attrs.kind == "dir" else attrs.size, attrs.mtime_ns

    def names(self, path: str) -> list[str]:
        try:
            return [name for name, _ in self.view.list(path)]
        except NotADirectoryInViewError as err:
            raise NotADirectoryError(path) from err

    def read(self, path: str, offset: int, length: int) -> bytes:
        if self.facts(path)[0] != "link":
            try:
                handle = self.view.open(path, lambda: None)
            except HandedOverError:
                assert self.facts(path)[0] == "link"
            else:
                try:
                    return self.view.pread(handle, offset, length, lambda: None)
                finally:
                    self.view.release(handle)
        target = self.view.readlink(path)
        for marker, root in ((".fp8fs/tree/", self.tree), (".fp8fs/src/", self.source)):
            if marker in target:
                return (root / target.partition(marker)[2]).read_bytes()[offset : offset + length]
        return Path(target).read_bytes()[offset : offset + length]


class Mount:
    def __init__(self, root: Path) -> None:
        self.root = root

    def facts(self, path: str) -> tuple[str, int, int, int]:
        found = os.lstat(self.root / path)
        kind = KINDS[stat.S_IFMT(found.st_mode)]
        size = 0 if kind == "dir" else found.st_size
        return kind, stat.S_IMODE(found.st_mode), size, found.st_mtime_ns

    def names(self, path: str) -> list[str]:
        return os.listdir(self.root / path)

    def read(self, path: str, offset: int, length: int) -> bytes:
        fd = os.open(self.root / path, os.O_RDONLY)
        try:
            return os.pread(fd, length, offset)
        finally:
            os.close(fd)


@pytest.fixture(params=["handoff", "inline"])
def serve(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=["object", pytest.param("mount", marks=pytest.mark.fuse)])
def driver(
    request: pytest.FixtureRequest, serve: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Driver]:
    src, store = make_source(tmp_path / "src"), tmp_path / "store"
    for shard in range(len(SIZES)):
        (src / "gates" / str(shard)).touch()
    bound = os.geteuid() == 0
    if request.param == "object":
        content = [pattern(number, size) for number, size in enumerate(SIZES.values())]
        engine = FakeEngine(src, content, list(SIZES), store / "tree")
        view = View(make_plan(src, SIZES), engine, FakeSource(src), serve=serve, bound=bound, tree=str(store / "tree"))  # fmt: skip
        yield Object(view, store / "tree", src)
        return
    try:
        check_fuse(allow_other=False)
    except MountError as err:
        if "fuse" in os.environ.get("FP8FS_REQUIRE", "").split(","):
            raise
        pytest.skip(f"no FUSE here: {err}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    spec = session.MountSpec(src=str(src), dst=str(tmp_path / "mnt"), store=str(store), serve=serve, log_path=str(tmp_path / "log"), factory="tests.mount.fakes:factory")  # fmt: skip
    mounted = session.mount(spec)
    try:
        yield Mount(Path(mounted.dst))
    finally:
        session.unmount(mounted.dst, lazy=True)


CONTENT = {
    **{name: pattern(number, size) for number, (name, size) in enumerate(SIZES.items())},
    "config.json": b'{"a": 1}',
    "tokenizer.txt": b"hello\n",
    "vae/vae.safetensors": pattern(99, 2_000_000),
}


def test_names(driver: Driver) -> None:
    """Every directory lists exactly its planned names."""
    top = {path.partition("/")[0] for path in CONTENT} | {"empty"}
    assert sorted(driver.names("")) == sorted(top)
    assert driver.names("empty") == []
    assert driver.names("sub") == ["x.safetensors"]
    with pytest.raises(NotADirectoryError):
        driver.names("config.json")


def test_what_does_not_exist(driver: Driver) -> None:
    """Names outside the plan are not there, however near they are."""
    for path in ("no", "sub/no", "model-1", "gates", "fake.json", ".fp8fs/no", "vae/vae"):
        with pytest.raises(FileNotFoundError):
            driver.facts(path)


def test_facts(driver: Driver, serve: str) -> None:
    """Cold shards are files with their final size; only large source files are links, and only with the handoff."""
    for path, content in CONTENT.items():
        kind, mode, size, mtime_ns = driver.facts(path)
        if path.startswith("vae/") and serve == "handoff":
            assert kind == "link"
        else:
            wanted = 0o444 if path in SIZES else 0o644
            assert (kind, mode, size) == ("file", wanted, len(content))
        assert mtime_ns > 0
    assert driver.facts("sub")[0] == "dir"


def test_reads(driver: Driver) -> None:
    """Any slice of any file is the oracle's slice, in any order, cold and warm."""
    choose = random.Random(3)
    for _ in range(60):
        path = choose.choice(list(CONTENT))
        content = CONTENT[path]
        offset, length = choose.randrange(len(content) + 10), choose.choice([1, 4097, 1 << 20])
        assert driver.read(path, offset, length) == content[offset : offset + length]


def test_shards_turn_into_links(driver: Driver, serve: str) -> None:
    """After its first read a shard is a link with the handoff, and the same file as before without."""
    before = driver.facts("model-1.safetensors")
    driver.read("model-1.safetensors", 0, 10)
    after = driver.facts("model-1.safetensors")
    assert after[0] == ("link" if serve == "handoff" else "file")
    assert after[3] == before[3]
    assert driver.facts("model-2.safetensors")[0] == "file"
