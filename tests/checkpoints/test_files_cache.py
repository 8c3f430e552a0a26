"""Hugging Face caches: snapshots, repositories, revisions that share blobs, downloads that have not ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.errors import SourceInvalidError
from tests.acceptance.harness import Fp8fs, digests, mount_points, objects, wait_for
from tests.builders import hf_cache, named, write_bytes, write_files, write_json
from tests.checkpoints.looks import LLM, check_files, check_index, layer, look

S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
A, B = layer(0), layer(1)


def model(folder: Path, *, second: int = 0) -> dict[str, dict[str, object]]:
    """Two shards; *second* decides the values of the second one."""
    write_bytes(folder / "tokenizer" / "vocab.txt", b"one\ntwo\n")
    files = {S1: named(A), S2: named(B, seed=second)}
    return write_files(folder, files, {**LLM, "revision": second})  # type: ignore[return-value]


@pytest.fixture
def repository(place: Path) -> Path:
    """A cache repository with one revision, "abc"."""
    model(place / "model")
    return hf_cache(place / "hub", place / "model", revision="abc")


@pytest.mark.fuse
@pytest.mark.parametrize("src", ["", "snapshots/abc"], ids=["repository", "snapshot"])
def test_a_cache_is_served_as_its_snapshot(
    mount: Callable[..., Path], repository: Path, place: Path, src: str
) -> None:
    """The repository means the snapshot of refs/main; links to blobs are shown as the files that they lead to."""
    dst = mount(repository / src)
    files = {S1: named(A), S2: named(B)}
    check_files(dst, files, {A, B}, "per_channel")
    check_index(dst / INDEX)
    assert (dst / "tokenizer" / "vocab.txt").read_bytes() == b"one\ntwo\n"
    assert not (dst / "tokenizer" / "vocab.txt").is_symlink()
    assert sorted(p.name for p in dst.iterdir()) == [
        "config.json",
        S1,
        S2,
        INDEX,
        "tokenizer",
    ]


@pytest.mark.fuse
def test_a_copy_of_a_cache_without_blobs_is_a_cache(
    mount: Callable[..., Path], repository: Path, place: Path
) -> None:
    """Copied with its links followed, it still means the snapshot of refs/main, and not all revisions at once."""
    model(place / "next", second=7)
    hf_cache(place / "hub", place / "next", revision="def")
    copy = place / "copy"
    shutil.copytree(repository, copy)
    shutil.rmtree(copy / "blobs")
    dst = mount(copy)
    check_files(dst, {S1: named(A), S2: named(B, seed=7)}, {A, B}, "per_channel")
    assert not (dst / "snapshots").exists()


@pytest.mark.fuse
def test_all_ways_to_a_model_are_one_plan(fp8fs: Fp8fs, repository: Path, place: Path) -> None:
    """Repository, snapshot and a link to either give one plan and one tree."""
    (place / "link").symlink_to(repository / "snapshots" / "abc")
    trees = {fp8fs.build(src) for src in (repository, repository / "snapshots/abc", place / "link")}
    assert len(trees) == 1


def test_revisions_share_what_is_the_same(fp8fs: Fp8fs, repository: Path, place: Path) -> None:
    """Of two revisions that differ in one shard, the other one is one object: one inode, made once, never touched."""
    first = fp8fs.build(repository)
    before = objects(fp8fs.store)
    model(place / "next", second=7)
    hf_cache(place / "hub", place / "next", revision="def")
    assert len(list((repository / "blobs").iterdir())) == 4 + 2  # the shard and the config
    second = fp8fs.build(repository)
    assert first != second
    assert (first / S1).stat().st_ino == (second / S1).stat().st_ino
    assert (first / S2).stat().st_ino != (second / S2).stat().st_ino
    after = objects(fp8fs.store)
    assert len(before) == 2
    assert len(after) == 3
    assert {name: after[name] for name in before} == before
    check_files(second, {S1: named(A), S2: named(B, seed=7)}, {A, B}, "per_channel")
    check_files(first, {S1: named(A), S2: named(B)}, {A, B}, "per_channel")


@pytest.mark.fuse
def test_a_mount_of_a_second_revision_makes_only_what_differs(
    mount: Callable[..., Path], fp8fs: Fp8fs, repository: Path, place: Path
) -> None:
    """Read through both mounts, the shared shard was made for the first one only."""
    old = mount(repository)
    digests(old)
    wait_for(lambda: len(objects(fp8fs.store)) == 2)  # inline, a shard is sealed a little later
    before = objects(fp8fs.store)
    model(place / "next", second=7)
    hf_cache(place / "hub", place / "next", revision="def")
    new = mount(repository)
    assert digests(new)[S1] == digests(old)[S1]
    assert digests(new)[S2] != digests(old)[S2]
    wait_for(lambda: len(objects(fp8fs.store)) >= 3)
    after = objects(fp8fs.store)
    assert len(after) == 3
    assert {name: after[name] for name in before} == before


def refusal(src: Path) -> str:
    with pytest.raises(SourceInvalidError) as caught:
        look(src)
    assert caught.value.hint == "finish the download, or remove this file if nothing is missing"
    return caught.value.what


def test_a_download_that_has_not_ended_is_refused_by_name(repository: Path) -> None:
    """A blob under way may be anything that the only snapshot still lacks."""
    write_bytes(repository / "blobs" / f"{'0' * 64}.incomplete", b"")
    said = f"blobs/{'0' * 64}.incomplete: the download of it is not finished"
    assert refusal(repository) == said
    assert refusal(repository / "snapshots" / "abc") == said


def test_what_a_finished_download_left_behind_is_no_obstacle(repository: Path) -> None:
    """A part beside the whole blob, as two downloads at once leave it."""
    blob = next((repository / "blobs").iterdir())
    write_bytes(repository / "blobs" / f"{blob.name}.0123abcd.incomplete", b"")
    assert look(repository).quantized == {A, B}


def test_with_several_revisions_a_whole_one_is_served(repository: Path, place: Path) -> None:
    """The part is taken for another revision's, with a warning; a snapshot that lacks weights is refused by the part."""
    model(place / "next", second=7)
    hf_cache(place / "hub", place / "next", revision="def")
    part = repository / "blobs" / f"{'0' * 64}.incomplete"
    write_bytes(part, b"")
    seen = look(repository)
    assert seen.quantized == {A, B}
    assert seen.warned(f"blobs/{part.name}", "another revision's")
    (repository / "snapshots" / "def" / S2).unlink()
    assert refusal(repository) == f"blobs/{part.name}: the download of it is not finished"
    part.unlink()
    with pytest.raises(SourceInvalidError, match="shard 2 of 2 of model is missing"):
        look(repository)


def test_a_blob_that_is_gone_is_refused_by_name(repository: Path) -> None:
    """A shard's link that leads nowhere, as a cache that was cleaned up by hand has it."""
    (
        repository / "blobs" / os.path.basename(os.readlink(repository / "snapshots/abc" / S2))
    ).unlink()
    with pytest.raises(SourceInvalidError, match=f"{S2} is a symlink that leads to no file"):
        look(repository)


@pytest.mark.parametrize(
    "part",
    [
        f"{S2}.incomplete",
        ".cache/huggingface/download/U3kTqRzz.0123456789abcdef.incomplete",
        "transformer/.cache/huggingface/download/x.safetensors.0123.incomplete",
    ],
)
def test_downloads_into_plain_folders_are_refused_by_name(tmp_path: Path, part: str) -> None:
    """As huggingface_hub and others name what has not arrived in full."""
    model(tmp_path)
    write_bytes(tmp_path / part, b"x")
    assert refusal(tmp_path) == f"{part}: the download of it is not finished"


def test_other_files_named_incomplete_are_files(tmp_path: Path) -> None:
    """Only weights, and what lies where downloads lie."""
    model(tmp_path)
    write_bytes(tmp_path / "notes.incomplete", b"x")
    write_json(tmp_path / ".cache" / "huggingface" / "download" / "config.json.metadata", {})
    assert "notes.incomplete" in look(tmp_path).names


@pytest.mark.fuse
def test_a_refused_download_leaves_no_mount(fp8fs: Fp8fs, repository: Path, place: Path) -> None:
    """Exit 10, the file's name, nothing mounted."""
    write_bytes(repository / "blobs" / f"{'0' * 64}.incomplete", b"")
    said = fp8fs.run("mount", repository, place / "view", code=10).stderr
    assert f"{'0' * 64}.incomplete: the download of it is not finished" in said
    assert mount_points(place) == []


@pytest.mark.fuse
def test_a_cache_may_go_away_once_everything_is_made(
    fp8fs: Fp8fs, repository: Path, place: Path
) -> None:
    """The finished tree is a checkpoint by itself."""
    tree = fp8fs.build(repository)
    shutil.rmtree(repository)
    check_files(tree, {S1: named(A), S2: named(B)}, {A, B}, "per_channel")
    assert (tree / "tokenizer" / "vocab.txt").read_bytes() == b"one\ntwo\n"
