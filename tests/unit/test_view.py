"""The view's rules: what is a link when, and what a handle reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.core.layout import Plan, ViewEntry
from fp8fs.errors import (
    BadHandleError,
    HandedOverError,
    InterruptedWaitError,
    IsADirectoryInViewError,
    NonFiniteTensorError,
    NoSuchPathError,
    NotADirectoryInViewError,
    SourceChangedError,
    StoreFullError,
    UsageError,
)
from fp8fs.view import LINK_MIN_BYTES, Poll, View

OWN = {"uid": 5, "gid": 6, "mtime_ns": 7}
SHARD = "a/model.safetensors"


def no_poll() -> None: ...


class Engine:
    """Sealed when told; ``answer`` is what ensure_sealed does."""

    def __init__(self) -> None:
        self.is_sealed = False
        self.answer: Callable[[], None] = self.seal
        self.opened = 0
        self.closed = 0

    def seal(self) -> None:
        self.is_sealed = True

    def sealed(self, shard: int) -> Path | None:
        return Path("/store/object") if self.is_sealed else None

    def ensure_sealed(self, shard: int, poll: Poll) -> Path:
        poll()
        self.answer()
        return Path("/store/object")

    def open(self, shard: int) -> Engine:
        self.opened += 1
        return self

    def pread(self, offset: int, length: int, poll: Poll) -> bytes:
        return b"0123456789"[offset : offset + length]

    def close(self) -> None:
        self.closed += 1


class Source:
    def __init__(self, root: Path, bind_root: Path | None = None, prefix: str = "") -> None:
        self.root, self.bind_root, self.bind_prefix = root, bind_root or root, prefix

    def open_file(self, path: str) -> int:
        return os.open(self.root / path, os.O_RDONLY)


def entry(path: str, kind: str, size: int = 0, **more: object) -> ViewEntry:
    return ViewEntry(path, kind, size, 0o640, **{**OWN, **more})  # type: ignore[arg-type]


def plan_of(*entries: ViewEntry) -> Plan:
    return Plan("id", {e.path: e for e in entries}, (), (), (), (), {}, {}, (), (), ())


BASIC = (
    entry("a", "dir"),
    entry(SHARD, "shard", 10, shard=0),
    entry("config.json", "text", 4, content=b"text"),
    entry("l", "link", link="elsewhere"),
    entry("s.txt", "source", 3),
)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def view_of(engine: Engine, root: Path, *entries: ViewEntry, **options: object) -> View:
    chosen = {"serve": "handoff", "bound": True, "tree": "/store/tree", **options}
    return View(plan_of(*(entries or BASIC)), engine, Source(root), **chosen)  # type: ignore[arg-type]


def refuse() -> None:
    raise StoreFullError("full")


def test_tree(engine: Engine, tmp_path: Path) -> None:
    """Names, kinds and attributes are the plan's; what is not planned does not exist."""
    view = view_of(engine, tmp_path)
    assert [name for name, _ in view.list("")] == ["a", "config.json", "l", "s.txt"]
    assert view.list("a") == [("model.safetensors", view.lookup(SHARD))]
    assert view.lookup(SHARD) == ("file", 0o640, 10, 7, 5, 6)
    assert view.lookup("l")[0:3] == ("link", 0o777, 9)
    assert view.readlink("l") == "elsewhere"
    assert view.lookup("").kind == "dir"
    for path in ("b", "a/b", "config.json/x", ".fp8fs/x", ".fp8fs/tree/x"):
        with pytest.raises(NoSuchPathError):
            view.lookup(path)
    with pytest.raises(NotADirectoryInViewError):
        view.list("config.json")
    with pytest.raises(NoSuchPathError):
        view.readlink("config.json")


def test_hidden_folder(engine: Engine, tmp_path: Path) -> None:
    """.fp8fs is found by name, not by listing; its documents are read, its mount points are empty."""
    view = view_of(engine, tmp_path, status=lambda: b"{1}", documents={"manifest.json": lambda: b"m"})  # fmt: skip
    assert ".fp8fs" not in [name for name, _ in view.list("")]
    assert {name for name, _ in view.list(".fp8fs")} == {"status.json", "manifest.json", "plan.json", "tree", "src"}  # fmt: skip
    assert (view.list(".fp8fs/tree"), view.list(".fp8fs/src")) == ([], [])
    assert view.pread(view.open(".fp8fs/manifest.json", no_poll), 0, 9, no_poll) == b"m"
    with pytest.raises(IsADirectoryInViewError):
        view.open(".fp8fs/tree", no_poll)


def test_status_is_a_snapshot_of_its_open(engine: Engine, tmp_path: Path) -> None:
    """A status handle goes on reading the document that was made when it was opened."""
    state = [b"first"]
    view = view_of(engine, tmp_path, status=lambda: state[0])
    handle = view.open(".fp8fs/status.json", no_poll)
    state[0] = b"second one"
    assert view.pread(handle, 0, 100, no_poll) == b"first"
    assert view.attrs(handle).size == 5
    assert view.lookup(".fp8fs/status.json").size == 10
    assert view.is_live(".fp8fs/status.json")
    assert not view.is_live("config.json")


def test_open_of_a_shard_seals_and_hands_over(engine: Engine, tmp_path: Path) -> None:
    """No handle is given on a shard that can be sealed; it is a link from then on."""
    view = view_of(engine, tmp_path)
    with pytest.raises(HandedOverError):
        view.open(SHARD, no_poll)
    assert (view.lookup(SHARD).kind, view.readlink(SHARD)) == ("link", "../.fp8fs/tree/" + SHARD)
    assert view.lookup(SHARD).size == len("../.fp8fs/tree/" + SHARD)
    with pytest.raises(HandedOverError):
        view.open(SHARD, no_poll)
    assert (engine.opened, view.open_handles()) == (0, 0)


def test_absolute_links_without_root(engine: Engine, tmp_path: Path) -> None:
    """Unbound, links lead to the store's tree and to SRC by absolute names."""
    big = entry("a/vae.safetensors", "source", 5)
    view = view_of(engine, tmp_path, *BASIC, big, bound=False)
    engine.seal()
    assert view.readlink(SHARD) == "/store/tree/" + SHARD
    assert view.readlink("a/vae.safetensors") == f"{tmp_path}/a/vae.safetensors"


def test_inline_never_links(engine: Engine, tmp_path: Path) -> None:
    """Inline, everything is a file, sealed or not, and open does not wait."""
    view = view_of(engine, tmp_path, *BASIC, entry("v.safetensors", "source", 5), serve="inline")
    engine.seal()
    assert view.lookup(SHARD).kind == view.lookup("v.safetensors").kind == "file"
    handle = view.open(SHARD, no_poll)
    assert view.pread(handle, 3, 4, no_poll) == b"3456"
    view.release(handle)
    assert (engine.opened, engine.closed) == (1, 1)


def test_full_store_falls_back_until_the_last_release(engine: Engine, tmp_path: Path) -> None:
    """A shard opened inline stays a file while any handle lives, sealed meanwhile or not, for new openers too."""
    view = view_of(engine, tmp_path)
    engine.answer = refuse
    first = view.open(SHARD, no_poll)
    engine.seal()
    engine.answer = engine.seal
    assert view.lookup(SHARD).kind == "file"
    second = view.open(SHARD, no_poll)
    view.release(first)
    assert view.lookup(SHARD).kind == "file"
    assert view.pread(second, 0, 2, no_poll) == b"01"
    view.release(second)
    assert view.lookup(SHARD).kind == "link"
    with pytest.raises(HandedOverError):
        view.open(SHARD, no_poll)


def test_a_link_that_is_none_any_more(engine: Engine, tmp_path: Path) -> None:
    """The kernel is told to look again, at a file; a shard that can be sealed again is a link after all."""
    view = view_of(engine, tmp_path)
    with pytest.raises(HandedOverError):
        view.readlink(SHARD)  # waits for nothing
    engine.answer = refuse
    with pytest.raises(HandedOverError):
        view.readlink(SHARD, no_poll)
    handle = view.open(SHARD, no_poll)
    engine.answer = engine.seal
    with pytest.raises(HandedOverError):
        view.readlink(SHARD, no_poll)  # it is a file as long as that handle lives
    assert not engine.is_sealed
    view.release(handle)
    assert view.readlink(SHARD, no_poll) == "../.fp8fs/tree/" + SHARD


def test_seal_that_overtakes_a_fallback(engine: Engine, tmp_path: Path) -> None:
    """If the shard got sealed while the store refused it, no handle appears behind a lookup that said link."""
    view = view_of(engine, tmp_path)

    def refuse_late() -> None:
        engine.seal()
        assert view.lookup(SHARD).kind == "link"  # as the kernel may ask at this moment
        raise StoreFullError("full")

    engine.answer = refuse_late
    with pytest.raises(HandedOverError):
        view.open(SHARD, no_poll)
    assert (view.open_handles(), view.lookup(SHARD).kind) == (0, "link")


def test_fallback_that_fails_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    """An inline open that raises is not counted: the shard can still become a link."""
    view = view_of(engine, tmp_path)
    engine.answer = refuse
    engine.open = fail_to_open  # type: ignore[assignment, method-assign]
    with pytest.raises(NonFiniteTensorError):
        view.open(SHARD, no_poll)
    engine.seal()
    assert view.lookup(SHARD).kind == "link"


def fail_to_open(shard: int) -> Engine:
    raise NonFiniteTensorError("bad", index=0)


def test_interrupted_and_broken_opens(engine: Engine, tmp_path: Path) -> None:
    """What poll raises, and what the engine cannot make, comes out; no handle stays."""

    def interrupted() -> None:
        raise InterruptedWaitError("stop")

    def broken() -> None:
        raise NonFiniteTensorError("bad", index=0)

    view = view_of(engine, tmp_path)
    with pytest.raises(InterruptedWaitError):
        view.open(SHARD, interrupted)
    engine.answer = broken
    with pytest.raises(NonFiniteTensorError):
        view.open(SHARD, no_poll)
    assert view.open_handles() == 0


def test_openers_in_parallel_never_hold_a_handle_on_a_link(engine: Engine, tmp_path: Path) -> None:
    """Whatever the order of openers, releases, refusals and the seal: a lookup says link only without handles."""
    view = view_of(engine, tmp_path)
    turns = [0]
    wrong: list[str] = []

    def sometimes() -> None:
        turns[0] += 1
        if turns[0] % 3 or engine.is_sealed:
            raise StoreFullError("full")
        if turns[0] > 300:
            engine.seal()

    engine.answer = sometimes

    def opener() -> None:
        for _ in range(300):
            try:
                handle = view.open(SHARD, no_poll)
            except HandedOverError:
                continue
            if view.lookup(SHARD).kind != "file":
                wrong.append("a link over an open handle")
            view.release(handle)

    threads = [threading.Thread(target=opener) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (view.open_handles(), engine.opened) == (0, engine.closed)


def test_which_source_files_are_links(engine: Engine, tmp_path: Path) -> None:
    """Large files and weights are links into the bind of SRC, small ones are served."""
    view = view_of(
        engine,
        tmp_path,
        entry("v", "dir"),
        entry("v/w.safetensors", "source", 10),
        entry("v/big.bin", "source", LINK_MIN_BYTES),
        entry("v/small.bin", "source", LINK_MIN_BYTES - 1),
    )
    assert view.readlink("v/w.safetensors") == "../.fp8fs/src/v/w.safetensors"
    assert view.readlink("v/big.bin") == "../.fp8fs/src/v/big.bin"
    assert view.lookup("v/small.bin").kind == "file"


def test_symlinks_in_source(engine: Engine, tmp_path: Path) -> None:
    """In a cache of snapshots and blobs links go through the bind; a name that leads out of it is served as a file."""
    snapshot = tmp_path / "repo/snapshots/r1"
    (tmp_path / "repo/blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (tmp_path / "repo/blobs/b1").write_bytes(b"12345")
    (tmp_path / "outside").write_bytes(b"12345")
    (snapshot / "in.safetensors").symlink_to("../../blobs/b1")
    (snapshot / "twice.safetensors").symlink_to("in.safetensors")
    (snapshot / "absolute.safetensors").symlink_to(tmp_path / "repo/blobs/b1")
    (snapshot / "out.safetensors").symlink_to("../../../outside")
    names = ("in", "twice", "absolute", "out")
    source = Source(snapshot, tmp_path / "repo", "snapshots/r1")
    entries = [entry(f"{name}.safetensors", "source", 5) for name in names]
    view = View(plan_of(*entries), engine, source, serve="handoff", bound=True)
    for name in ("in", "twice"):
        assert view.readlink(f"{name}.safetensors") == f".fp8fs/src/snapshots/r1/{name}.safetensors"
    for name in ("absolute", "out"):
        assert view.lookup(f"{name}.safetensors").kind == "file"


def test_passthrough_is_checked_at_each_read(engine: Engine, tmp_path: Path) -> None:
    """Bytes of a source file are handed out only while its size and mtime are the planned ones."""
    path = tmp_path / "s.txt"
    path.write_bytes(b"abc")
    os.utime(path, ns=(7, 7))
    view = view_of(engine, tmp_path)
    handle = view.open("s.txt", no_poll)
    assert view.pread(handle, 1, 10, no_poll) == b"bc"
    os.utime(path, ns=(8, 8))
    with pytest.raises(SourceChangedError, match=r"s\.txt: mtime_ns was 7, is 8"):
        view.pread(handle, 0, 10, no_poll)
    path.write_bytes(b"abcd")
    with pytest.raises(SourceChangedError, match=r"s\.txt: size was 3, is 4"):
        view.pread(handle, 0, 10, no_poll)
    view.release(handle)


def test_handles(engine: Engine, tmp_path: Path) -> None:
    """A handle reads its bytes cut at the end, keeps its attributes, and is gone after its release."""
    view = view_of(engine, tmp_path)
    handle, other = view.open("config.json", no_poll), view.open("config.json", no_poll)
    assert handle != other
    assert view.pread(handle, 2, 100, no_poll) == b"xt"
    assert view.pread(handle, 4, 100, no_poll) == view.pread(handle, 0, 0, no_poll) == b""
    assert view.attrs(handle) == view.lookup("config.json")
    view.release(handle)
    for action in (lambda: view.pread(handle, 0, 1, no_poll), lambda: view.release(handle)):
        with pytest.raises(BadHandleError):
            action()
    assert view.open_handles() == 1
    with pytest.raises(IsADirectoryInViewError):
        view.open("a", no_poll)


@pytest.mark.parametrize("options", [{"serve": "x"}, {"grain": "x"}, {"grain": "tensor"}])
def test_options_are_checked(engine: Engine, tmp_path: Path, options: dict[str, str]) -> None:
    """Unknown choices, and grain tensor with the handoff, are usage errors."""
    with pytest.raises(UsageError):
        view_of(engine, tmp_path, **options)
