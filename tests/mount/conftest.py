"""Mounts for tests: the real launcher, server, adapter and view, with a fake engine that is steered by files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8fs.errors import MountError, NotMountedError
from fp8fs.fuse import session
from fp8fs.fuse.libfuse import check_fuse
from fp8fs.fuse.mountinfo import read_mountinfo
from tests.mount.fakes import pattern

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = {"model-1.safetensors": 3_000_001, "model-2.safetensors": 700_000, "sub/x.safetensors": 1}


@dataclass
class FakeMount:
    """One mount of a fake checkpoint."""

    src: Path
    dst: Path
    store: Path
    log: Path
    mounted: session.Mounted

    def release(self, *shards: int) -> None:
        """Let the engine make these shards (default: all)."""
        for shard in shards or range(len(SIZES)):
            (self.src / "gates" / str(shard)).touch()

    def say(self, what: str, shard: int) -> None:
        (self.src / what / str(shard)).touch()

    def retract(self, what: str, shard: int) -> None:
        (self.src / what / str(shard)).unlink()

    def points(self) -> list[str]:
        """Mount points at and below DST, as the kernel sees them."""
        return [m.point for m in read_mountinfo() if m.point.startswith(str(self.dst))]


@pytest.fixture(scope="session")
def fuse_answer() -> str:
    """Why FUSE cannot be used here, or ""."""
    try:
        check_fuse(allow_other=False)
    except MountError as err:
        return str(err)
    return ""


@pytest.fixture(autouse=True)
def needs_fuse(fuse_answer: str) -> None:
    if fuse_answer:
        if "fuse" in os.environ.get("FP8FS_REQUIRE", "").split(","):
            pytest.fail(f"FUSE is required: {fuse_answer}")
        pytest.skip(f"no FUSE here: {fuse_answer}")


@pytest.fixture(autouse=True)
def no_mount_left(needs_fuse: None, tmp_path: Path) -> Iterator[None]:
    """A test leaves no mount behind."""
    yield
    assert [m.point for m in read_mountinfo() if m.point.startswith(f"{tmp_path}/")] == []


MountFake = Callable[..., FakeMount]


@pytest.fixture
def mount_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_mount_left: None
) -> Iterator[MountFake]:
    """Mounts a fake checkpoint; options as in MountSpec. Everything is unmounted at the end."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    made: list[FakeMount] = []

    def mount(name: str = "", **options: object) -> FakeMount:
        base = tmp_path / name if name else tmp_path
        src = make_source(base / "src")
        spec = session.MountSpec(
            src=str(src),
            dst=str(base / "mnt"),
            store=str(base / "store"),
            log_path=str(base / "log"),
            factory="tests.mount.fakes:factory",
            **options,  # type: ignore[arg-type]
        )
        mounted = session.mount(spec, timeout_s=60)
        made.append(FakeMount(src, Path(mounted.dst), base / "store", base / "log", mounted))
        return made[-1]

    yield mount
    for fake in made:
        try:
            session.unmount(str(fake.dst), lazy=True)
        except NotMountedError:
            end_process(fake.mounted.pid)


def make_source(src: Path) -> Path:
    """A fake SRC: three shards, a large and a small file that pass through."""
    if not src.exists():
        for folder in ("gates", "full", "broken", "vae", "empty"):
            (src / folder).mkdir(parents=True)
        (src / "fake.json").write_text(json.dumps({"shards": SIZES}))
        (src / "tokenizer.txt").write_bytes(b"hello\n")
        (src / "vae" / "vae.safetensors").write_bytes(pattern(99, 2_000_000))
    return src


def end_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """A reader in a process of its own; ``sys.argv[1:]`` are the arguments."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 20) -> str:
    """What the reader printed; it has ended well."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    return out.strip()


def until(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
