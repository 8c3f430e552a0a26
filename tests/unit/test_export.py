"""Plain copies of finished trees: everything or nothing, no links, attributes kept."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8fs import export
from fp8fs.errors import StoreFullError, UsageError
from fp8fs.export import check_target, export_tree
from tests.builders import llama_like


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree as the store makes it: files, a folder, a link to a large file outside, its .fp8fs."""
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"large" * 1000)
    root = tmp_path / "tree"
    (root / "vae").mkdir(parents=True)
    (root / ".fp8fs").mkdir()
    (root / ".fp8fs" / "COMPLETE").write_bytes(b"")
    (root / "config.json").write_bytes(b"{}")
    (root / "model.safetensors").write_bytes(os.urandom(5 << 20))
    (root / "model.safetensors").chmod(0o440)
    os.utime(root / "model.safetensors", ns=(1, 1_600_000_000_123_456_789))
    (root / "vae" / "big.bin").symlink_to(outside)
    (root / "dangling").symlink_to("nowhere")
    (root / "vae").chmod(0o550)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".fp8fs" not in path.parts
    }


def check_copy(tree: Path, target: Path) -> None:
    assert contents(target) == contents(tree)
    assert not (target / ".fp8fs").exists()
    assert not (target / "vae" / "big.bin").is_symlink()
    assert (target / "dangling").is_symlink()
    before, after = (tree / "model.safetensors").stat(), (target / "model.safetensors").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert after.st_ino != before.st_ino


@pytest.mark.parametrize("exists", [False, True])
def test_a_copy_is_plain_and_complete(tree: Path, tmp_path: Path, exists: bool) -> None:
    """New or empty target: links followed, attributes kept, no trace of the staging."""
    target = tmp_path / "copy"
    if exists:
        target.mkdir()
    told: list[int] = []
    export_tree(tree, target, progress=told.append)
    check_copy(tree, target)
    assert sum(told) == sum(len(data) for data in contents(tree).values())
    assert [p.name for p in tmp_path.iterdir() if ".tmp-" in p.name] == []


def test_a_copy_can_be_made_in_place(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--to .`` in an empty directory fills that directory."""
    target = tmp_path / "copy"
    target.mkdir()
    monkeypatch.chdir(target)
    check_target(Path("."), tmp_path / "src")
    export_tree(tree, Path("."))
    check_copy(tree, target)


def test_without_copy_file_range(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filesystems that refuse the system call get ordinary reads and writes."""

    def refuse(*args: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(export.os, "copy_file_range", refuse)
    export_tree(tree, tmp_path / "copy")
    check_copy(tree, tmp_path / "copy")


def test_nothing_half_written_stays(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in the middle leaves neither target nor staging, and is a StoreFullError."""
    before = sorted(p.name for p in tmp_path.iterdir())

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_copy_bytes", full)
    with pytest.raises(StoreFullError, match="No space left"):
        export_tree(tree, tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_unfit_targets_are_refused_before_any_work(tmp_path: Path) -> None:
    """Not empty, a file, a link, inside SRC, or in a folder that does not exist."""
    src = tmp_path / "src"
    src.mkdir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(full)
    for target in ("full", "file", "link", "src/copy", "src", "none/copy"):
        with pytest.raises(UsageError):
            check_target(tmp_path / target, src)
    check_target(tmp_path / "new", src)


def test_a_mount_point_is_refused_by_name(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy cannot take a mount point's place: said before any work, and after it if only rename tells."""
    target = tmp_path / "mnt"
    target.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(export.os.path, "ismount", lambda place: place == target)
        with pytest.raises(UsageError, match="is a mount point"):
            check_target(target, tmp_path / "src")

    def busy(*args: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(export.os, "rename", busy)
    with pytest.raises(UsageError, match="is a mount point"):
        export_tree(tree, target)
    assert list(target.iterdir()) == []
    assert staged(tmp_path) == []


SLOW = """
import signal, sys, time
from fp8fs import cli, export
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells start with it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
export._copy_bytes = lambda *arguments: time.sleep(60)
cli.main()
"""


def staged(place: Path) -> list[Path]:
    """What is being made beside a target."""
    return [path for path in place.iterdir() if ".tmp-" in path.name]


def slow_export(tmp_path: Path, target: Path) -> subprocess.Popen[bytes]:
    """``fp8fs build --to`` that has begun to copy, and goes on for a minute."""
    if not (tmp_path / "src").exists():
        llama_like(tmp_path / "src")
    before = set(staged(tmp_path))
    words = ["build", tmp_path / "src", "--to", target, "--store", tmp_path / "store"]
    process = subprocess.Popen([sys.executable, "-c", SLOW, *words], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(any(path.glob("copy/*")) for path in set(staged(tmp_path)) - before):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_nothing_half_made(tmp_path: Path, number: signal.Signals) -> None:
    """Whichever signal ends ``build --to``: no staging, no target, 128 + N, no traceback."""
    process = slow_export(tmp_path, tmp_path / "copy")
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (128 + number, b"")
    assert staged(tmp_path) == []
    assert not (tmp_path / "copy").exists()


def test_leftovers_of_the_killed_go_and_those_of_the_living_stay(
    tree: Path, tmp_path: Path
) -> None:
    """The next export beside it removes what a killed one left; never what a live one, another host or user makes."""
    alive = slow_export(tmp_path, tmp_path / "first")
    (living,) = staged(tmp_path)
    killed = slow_export(tmp_path, tmp_path / "second")
    (dead,) = set(staged(tmp_path)) - {living}
    killed.kill()
    killed.communicate()
    elsewhere = tmp_path / ".fp8fs.tmp-0123456789abcdef"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("another host")
    mine = tmp_path / ".fp8fs.tmp-mine"
    mine.mkdir()
    try:
        export_tree(tree, tmp_path / "third")
        assert set(staged(tmp_path)) == {living, elsewhere, mine}
        assert not dead.exists()
    finally:
        alive.terminate()
        alive.communicate()
    check_copy(tree, tmp_path / "third")
