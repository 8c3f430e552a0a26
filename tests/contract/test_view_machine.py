"""The file-system oracle: random operations on a view and on a plain dict of bytes never differ.

One machine, two drivers (the View object; a real mount whose server is another process), both serve modes and both
grains. Real rooms stand behind it: the dict is what ``build`` made of the same SRC in another store.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fp8fs.assembly import Assembled, assemble
from fp8fs.building import build_tree
from fp8fs.core.recipe import Recipe
from fp8fs.errors import HandedOverError, NoSuchPathError
from fp8fs.fuse import session
from fp8fs.view import View
from tests.builders import llama_like
from tests.conftest import LONG

STEPS, RUNS = (50, {"object": 80, "mount": 80}) if LONG else (30, {"object": 12, "mount": 5})
"""The long target: over 10,000 steps of a view object in its three modes, and as many of a mount."""

LENGTHS = st.sampled_from([1, 7, 512, 4095, 4096, 4097, 20_000, 131_072, 200_000, 0])

MODES = {
    "handoff": ("handoff", "shard"),
    "inline": ("inline", "shard"),
    "inline-tensor": ("inline", "tensor"),
}


class Handle(Protocol):
    def pread(self, offset: int, length: int) -> bytes: ...

    def close(self) -> None: ...


class Driver(Protocol):
    def open(self, path: str) -> Handle: ...

    def size(self, path: str) -> int: ...

    def names(self, path: str) -> set[str]: ...

    def exists(self, path: str) -> bool: ...

    def close(self) -> None: ...


class Descriptor:
    """A file as the kernel opens it, native or through FUSE."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def pread(self, offset: int, length: int) -> bytes:
        return os.pread(self.fd, length, offset)

    def close(self) -> None:
        os.close(self.fd)


class ViewHandle:
    def __init__(self, view: View, handle: int) -> None:
        self.view, self.handle = view, handle

    def pread(self, offset: int, length: int) -> bytes:
        return self.view.pread(self.handle, offset, length, lambda: None)

    def close(self) -> None:
        self.view.release(self.handle)


class Object:
    """The View, with the second look that the kernel takes after a handoff."""

    def __init__(self, base: Path, serve: str, grain: str) -> None:
        self.base = base
        self.made: Assembled = assemble(
            base / "src", Recipe(), base / "store", grain=grain, workers=2, device="cpu"
        )
        self.view = self.made.view(serve=serve, grain=grain, bound=False)

    def open(self, path: str) -> Handle:
        if self.view.lookup(path).kind != "link":
            try:
                return ViewHandle(self.view, self.view.open(path, lambda: None))
            except HandedOverError:
                assert self.view.lookup(path).kind == "link"
        return Descriptor(Path(self.view.readlink(path)))

    def size(self, path: str) -> int:
        attrs = self.view.lookup(path)
        return os.stat(self.view.readlink(path)).st_size if attrs.kind == "link" else attrs.size

    def names(self, path: str) -> set[str]:
        return {name for name, _ in self.view.list(path)}

    def exists(self, path: str) -> bool:
        try:
            self.view.lookup(path)
        except NoSuchPathError:
            return False
        return True

    def close(self) -> None:
        assert self.view.open_handles() == 0
        self.made.close()


class Mount:
    """The same through the kernel; nothing of the server is in this process."""

    def __init__(self, base: Path, serve: str, grain: str) -> None:
        spec = session.MountSpec(
            src=str(base / "src"),
            dst=str(base / "mnt"),
            store=str(base / "store"),
            log_path=str(base / "log"),
            device="cpu",
            workers=2,
            serve=serve,
            grain=grain,
        )
        self.root = Path(session.mount(spec, timeout_s=120).dst)

    def open(self, path: str) -> Handle:
        return Descriptor(self.root / path)

    def size(self, path: str) -> int:
        return os.stat(self.root / path).st_size

    def names(self, path: str) -> set[str]:
        return set(os.listdir(self.root / path))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path)

    def close(self) -> None:
        session.unmount(str(self.root))


DRIVERS = {"object": Object, "mount": Mount}


def oracle_of(src: Path, store: Path) -> dict[str, bytes]:
    """Every file of a finished tree, made in a store of its own."""
    tree = build_tree(src, Recipe(), store, device="cpu")
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and ".fp8fs" not in path.parts[len(tree.parts) :]
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    base = tmp_path_factory.mktemp("machine")
    llama_like(base / "src", layers=2, shards=3)
    (base / "src" / "deep" / "er").mkdir(parents=True)
    (base / "src" / "deep" / "er" / "notes.txt").write_bytes(b"n" * 5000)
    (base / "src" / "empty").mkdir()
    (base / "src" / "zero").touch()
    return base / "src", oracle_of(base / "src", base / "oracle")


def machine(
    src: Path,
    oracle: dict[str, bytes],
    driver: str,
    serve: str,
    grain: str,
    taken: Counter[str],
) -> type[RuleBasedStateMachine]:
    """The state machine of one driver in one mode; *taken* counts its steps."""
    files = sorted(oracle)
    folders = {"": set[str]()}
    for path in [*files, "empty/"]:
        parts = path.rstrip("/").split("/")
        for depth, name in enumerate(parts):
            folders.setdefault("/".join(parts[:depth]), set()).add(name)
    folders.setdefault("empty", set())

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.base = Path(tempfile.mkdtemp(prefix="fp8fs-machine-"))
            (self.base / "src").symlink_to(src)
            self.held: list[tuple[str, Handle]] = []
            self.maps: list[tuple[str, mmap.mmap]] = []
            self.driver: Driver = DRIVERS[driver](self.base, serve, grain)

        @invariant()
        def count(self) -> None:
            taken["steps"] += 1

        def teardown(self) -> None:
            try:
                for _, mapped in self.maps:
                    mapped.close()
                for _, handle in self.held:
                    handle.close()
                self.driver.close()
            finally:
                shutil.rmtree(self.base)

        @rule(path=st.sampled_from(files))
        def open(self, path: str) -> None:
            self.held.append((path, self.driver.open(path)))

        @precondition(lambda self: self.held)
        @rule(pick=st.integers(0, 99), at=st.integers(0, 104), length=LENGTHS)
        def read(self, pick: int, at: float, length: int) -> None:
            path, handle = self.held[pick % len(self.held)]
            offset = len(oracle[path]) * at // 100
            assert handle.pread(offset, length) == oracle[path][offset : offset + length]

        @precondition(lambda self: self.held)
        @rule(pick=st.integers(0, 99))
        def read_all(self, pick: int) -> None:
            path, handle = self.held[pick % len(self.held)]
            assert handle.pread(0, len(oracle[path]) + 1) == oracle[path]

        @precondition(lambda self: self.held)
        @rule(pick=st.integers(0, 99))
        def close(self, pick: int) -> None:
            self.held.pop(pick % len(self.held))[1].close()

        @precondition(
            lambda self: any(isinstance(h, Descriptor) and oracle[p] for p, h in self.held)
        )
        @rule(pick=st.integers(0, 99), private=st.booleans())
        def map(self, pick: int, private: bool) -> None:
            able = [(p, h) for p, h in self.held if isinstance(h, Descriptor) and oracle[p]]
            path, handle = able[pick % len(able)]
            kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
            mapped = mmap.mmap(handle.fd, 0, flags=kind, prot=mmap.PROT_READ)
            self.maps.append((path, mapped))

        @precondition(lambda self: self.maps)
        @rule(pick=st.integers(0, 99), at=st.integers(0, 104), length=LENGTHS)
        def slice(self, pick: int, at: float, length: int) -> None:
            path, mapped = self.maps[pick % len(self.maps)]
            offset = len(oracle[path]) * at // 100
            assert mapped[offset : offset + length] == oracle[path][offset : offset + length]

        @rule(path=st.sampled_from(files))
        def stat(self, path: str) -> None:
            assert self.driver.size(path) == len(oracle[path])

        @rule(path=st.sampled_from(sorted(folders)))
        def list(self, path: str) -> None:
            assert self.driver.names(path) == folders[path]

        @rule(path=st.sampled_from(["nothing", "deep/nothing", "empty/x", ".fp8fs/nothing"]))
        def miss(self, path: str) -> None:
            assert not self.driver.exists(path)

    return Machine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("driver", ["object", pytest.param("mount", marks=pytest.mark.fuse)])
def test_random_operations(
    world: tuple[Path, dict[str, bytes]],
    driver: str,
    mode: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Opens, reads, maps, slices, stats, listings and misses in any order answer as the dict does."""
    src, oracle = world
    taken = Counter[str]()
    run_state_machine_as_test(
        machine(src, oracle, driver, *MODES[mode], taken),
        settings=settings(
            max_examples=RUNS[driver],
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    record_property("machine steps", taken["steps"])


def test_the_oracle_is_no_copy_of_the_source(world: tuple[Path, dict[str, bytes]]) -> None:
    """Shards of the oracle differ from SRC's, other files are equal: a view that showed SRC would fail above."""
    src, oracle = world
    for path, content in oracle.items():
        assert stat.S_ISREG((src / path).stat().st_mode) or path.endswith(".json")
        same = (src / path).read_bytes() == content
        assert same != path.endswith((".safetensors", "config.json", ".index.json")) or (
            path == "tokenizer_config.json" or path == "generation_config.json"
        )
