"""A6: a changed source shard is made again, alone; a live mount never mixes old and new bytes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests import oracle
from tests.acceptance.harness import Fp8fs, digests, make_checkpoint, objects

pytestmark = pytest.mark.fuse


@pytest.fixture
def source(place: Path) -> Path:
    """A checkpoint that the test may change; the cut between shards runs through fusion groups."""
    return make_checkpoint(place / "llama", "llama", "8M", "--shards", "6")


def rewrite_in_place(path: Path) -> None:
    """Other values of the same size, with the old mtime restored: nothing but content and ctime differs."""
    before = path.stat()
    start, entries, _ = oracle.read_header(path)
    data = bytearray(path.read_bytes())
    for entry in entries.values():
        begin, end = entry["data_offsets"]
        values = data[start + begin : start + end]
        data[start + begin : start + end] = values[2:] + values[:2]  # BF16 values moved by one
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def name_of(shard: int) -> str:
    return f"model-{shard:05d}-of-00006.safetensors"


def inodes(tree: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in tree.glob("*.safetensors")}


@pytest.mark.parametrize("scheme", ["per_channel", "per_tensor"])
def test_a_changed_shard_is_made_again_alone(
    fp8fs: Fp8fs, place: Path, source: Path, scheme: str
) -> None:
    """Exactly the shard, and with shared scales the shards of its group partners, are new objects."""
    tree = fp8fs.build(source, "--scheme", scheme)
    before, old = inodes(tree), objects(fp8fs.store)

    weights = {p.name: set(oracle.read_header(p)[1]) for p in source.glob("*.safetensors")}
    where = {name: file for file, names in weights.items() for name in names}
    split = [
        homes
        for members in oracle.sibling_groups(where).values()
        if len(homes := {where[member] for member in members}) > 1
    ]
    assert split, "the fixture must split a group"
    changed = min(split[0])
    dependent = {changed}
    if scheme == "per_tensor":
        dependent = dependent.union(*(homes for homes in split if changed in homes))
        assert dependent < weights.keys()
    rewrite_in_place(source / changed)

    dst = place / "view"
    fp8fs.mount(source, dst, "--scheme", scheme)
    shown = digests(dst)
    after = {p.name: p.stat().st_ino for p in dst.glob("*.safetensors")}
    assert {name for name in before if before[name] != after[name]} == dependent
    assert old.items() <= objects(fp8fs.store).items()

    fresh = Fp8fs(place / "fresh-store").build(source, "--scheme", scheme)
    for name in before:
        assert shown[name] == digests(fresh)[name]


def test_a_live_mount_refuses_what_changed_and_keeps_what_is_sealed(
    fp8fs: Fp8fs, place: Path, source: Path
) -> None:
    """Unsealed: an error that names file and difference. Sealed: the snapshot. ``status`` says so."""
    original = place / "original"
    shutil.copytree(source, original)
    dst = place / "view"
    fp8fs.mount(source, dst, "--workers", "1")
    sealed = (dst / name_of(1)).read_bytes()
    # The engine runs ahead of the latest open by a few shards; the last one is still unmade.
    assert not (dst / name_of(6)).is_symlink()
    with (source / name_of(6)).open("r+b") as file:
        file.truncate(file.seek(0, 2) - 2)
    (source / name_of(1)).write_bytes(b"gone")

    with pytest.raises(OSError, match=r".") as raised:
        (dst / name_of(6)).read_bytes()
    assert raised.value.errno == errno.EIO
    assert (dst / name_of(1)).read_bytes() == sealed
    status = fp8fs.status(dst)
    assert any(name_of(6) in error["what"] for error in status["errors"])
    assert any("was" in error["what"] and "is" in error["what"] for error in status["errors"])
    assert any(name_of(1) in change for change in status["source_changes"])

    fp8fs.unmount(dst)
    fp8fs.run("mount", source, dst, code=10)


def test_verify_adopt_accepts_a_copy_with_new_dates(
    fp8fs: Fp8fs, place: Path, source: Path
) -> None:
    """A copy of SRC is proved equal by reading it, and its mount then makes nothing."""
    tree = fp8fs.build(source)
    made = objects(fp8fs.store)
    copy = place / "copy"
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    fp8fs.run("path", copy, code=1)
    adopted = fp8fs.json("verify", copy, "--adopt")
    assert set(adopted["adopted"]) == {name_of(n) for n in range(1, 7)}
    second = Path(fp8fs.run("path", copy).stdout.rstrip("\n"))
    assert fp8fs.build(copy) == second
    assert objects(fp8fs.store) == made
    assert digests(second) == digests(tree)


def test_verify_adopt_refuses_other_values(fp8fs: Fp8fs, place: Path, source: Path) -> None:
    """A shard with one changed value is not adopted, which is said and ends with 11; its unchanged neighbours are."""
    fp8fs.build(source)
    copy = place / "copy"
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    with (copy / name_of(3)).open("r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte[0] ^ 1]))
    document = fp8fs.json("verify", copy, "--adopt", code=11)
    assert set(document["adopted"]) == {name_of(n) for n in (1, 2, 4, 5, 6)}
    assert set(document["refused"]) == {name_of(3)}
    tensor = document["refused"][name_of(3)]["tensor"]
    assert tensor in oracle.read_header(copy / name_of(3))[1]
    shown = fp8fs.run("verify", copy, "--adopt", code=11).stdout
    assert f"{name_of(3)}: {tensor}: not adopted: has other values\n" in shown
    fp8fs.run("verify", copy)  # what was not made yet is no damage
