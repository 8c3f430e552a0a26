"""Normalized caches: where one may be put, sources that change meanwhile, and writers that end before they are done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs import normalized
from fp8fs.core.normalized import ArtifactShard, SourceFile
from fp8fs.core.plan import Extent
from fp8fs.core.recipe import Recipe
from fp8fs.errors import (
    Fp8fsError,
    SourceChangedError,
    SourceInvalidError,
    StoreBusyError,
    StoreFullError,
    UsageError,
)
from fp8fs.normalized import build_normalized, look, looks_normalized
from tests.builders import h3_like, llama_like, write_bytes

BUILD = """
import os, signal, sys
from pathlib import Path
from fp8fs import normalized
from fp8fs.core.normalized import ArtifactShard, SourceFile
from fp8fs.core.plan import Extent
from fp8fs.core.recipe import Recipe
write = normalized._write_file
def die_at_the_marker(path, data):
    if path.name == "COMPLETE":
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)
normalized._write_file = die_at_the_marker
src, target, store = map(Path, sys.argv[1:])
normalized.build_normalized(src, target, Recipe(), store, device="cpu", workers=1)
"""


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A small pipeline."""
    h3_like(tmp_path / "src", layers=1, shards=1)
    return tmp_path / "src"


def build(src: Path, target: Path) -> Path:
    """A cache at *target*, with the store beside the source."""
    store = src.parent / "store"
    return build_normalized(src, target, Recipe(), store, device="cpu", workers=1)


def beside(src: Path) -> set[str]:
    """What is in the test's folder, the source and the store apart."""
    return {path.name for path in src.parent.iterdir()} - {"src", "store"}


PLACES: dict[str, Callable[[Path], Path]] = {
    "inside the source": lambda folder: folder / "src" / "cache",
    "the source itself": lambda folder: folder / "src",
    "a file": lambda folder: write_bytes(folder / "file", b"mine"),
    "without a parent": lambda folder: folder / "none" / "cache",
}


@pytest.mark.parametrize("where", PLACES)
def test_places_that_are_not_ours(src: Path, where: str) -> None:
    """A target in the source, over a file or in no directory is refused before any work, and nothing is touched."""
    target = PLACES[where](src.parent)
    before = sorted(str(path) for path in src.parent.rglob("*"))
    with pytest.raises(UsageError):
        build(src, target)
    assert sorted(str(path) for path in src.parent.rglob("*")) == before


def test_a_link_is_not_followed(src: Path) -> None:
    """A symbolic link as a target is refused: what it points to is not replaced."""
    other = src.parent / "other"
    other.mkdir()
    (src.parent / "cache").symlink_to(other)
    with pytest.raises(UsageError):
        build(src, src.parent / "cache")
    assert list(other.iterdir()) == []


def without_transformer(src: Path) -> None:
    shutil.rmtree(src)
    llama_like(src)


def without_fp8(src: Path) -> None:
    path = src / "transformer" / "config.json"
    path.write_text(json.dumps({"_class_name": "SD3Transformer2DModel"}))


@pytest.mark.parametrize(
    ("change", "error"), [(without_transformer, SourceInvalidError), (without_fp8, UsageError)]
)
def test_sources_of_which_there_is_no_cache(
    src: Path, change: Callable[[Path], None], error: type[Fp8fsError]
) -> None:
    """A model that is no pipeline, and a class in which the engine quantizes nothing, are refused; nothing is written."""
    change(src)
    with pytest.raises(error):
        build(src, src.parent / "cache")
    assert beside(src) == set()


def test_a_source_that_changes_meanwhile_gives_none(
    src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was made of two states of the source is not published."""
    write = normalized._write

    def touch_then_write(*args: object) -> None:
        os.utime(next((src / "transformer").glob("*.safetensors")))
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(normalized, "_write", touch_then_write)
    with pytest.raises(SourceChangedError):
        build(src, src.parent / "cache")
    assert beside(src) == set()


def test_a_shard_that_is_too_short_gives_none(tmp_path: Path) -> None:
    """If the store's shard ends early, the copy is not padded or cut, it fails."""
    sealed = write_bytes(tmp_path / "sealed", b"12345678")
    shard = ArtifactShard("a", 0, b"", (Extent(4, 8),), same=False)
    with pytest.raises(OSError, match="sealed ends at byte 8"):
        normalized._copy(sealed, shard, tmp_path / "a")


def test_a_killed_writer_leaves_no_hit(src: Path) -> None:
    """Killed just before the marker: nothing is at the target; the next one finishes and removes what was left."""
    target = src.parent / "cache"
    arguments = [src, target, src.parent / "store"]
    killed = subprocess.run([sys.executable, "-c", BUILD, *map(str, arguments)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(beside(src)) == 1
    assert not target.exists()
    assert look(build(src, target)).miss == ""
    assert beside(src) == {"cache"}


def test_the_loser_takes_the_winners(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds another's valid cache at the last step leaves it there."""
    target = src.parent / "cache"
    write = normalized._write

    def lose(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(normalized, "_write", write)
        build(src, target)

    monkeypatch.setattr(normalized, "_write", lose)
    before: list[int] = []
    publish = normalized._publish

    def note_then_publish(made: Path, place: Path, files: list[SourceFile]) -> None:
        before.extend([place.stat().st_ino] if place.exists() else [])
        publish(made, place, files)

    monkeypatch.setattr(normalized, "_publish", note_then_publish)
    assert build(src, target) == target
    assert [target.stat().st_ino] == before
    assert beside(src) == {"cache"}


def test_a_place_that_never_rests_is_an_error(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If others put stale ones there again and again, that ends with an error, not never."""
    target = src.parent / "cache"
    rename = os.rename

    def spoil_then_rename(old: Path, new: Path, **directories: int | None) -> None:
        if new == target and not target.exists():
            (target / "transformer").mkdir(parents=True)
        rename(old, new, **directories)

    monkeypatch.setattr(os, "rename", spoil_then_rename)
    with pytest.raises(StoreBusyError):
        build(src, target)


def test_a_place_without_rights_is_said(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system refuses is one error that names the place."""

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(normalized, "_publish", refuse)
    with pytest.raises(StoreFullError, match="cache cannot be written: Permission denied"):
        build(src, src.parent / "cache")
    assert beside(src) == set()


def test_a_model_is_not_taken_for_a_cache(src: Path) -> None:
    """``verify`` takes a directory for a cache by its parts, unless it is a model."""
    assert not looks_normalized(src)
    write_bytes(src / "manifest.json", b"{}")
    assert not looks_normalized(src)
    assert looks_normalized(write_bytes(src.parent / "other" / "COMPLETE", b"").parent)
