"""A3: with grain tensor, looking makes nothing and a read makes little more than it asks for."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import oracle
from tests.acceptance.harness import Fp8fs, make_checkpoint, read_chars, settle

pytestmark = pytest.mark.fuse

READ_AHEAD = 128 << 10
TENSOR = ("--serve", "inline", "--grain", "tensor")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors much larger than a read-ahead window."""
    folder = tmp_path_factory.mktemp("a03") / "llama"
    return make_checkpoint(folder, "llama", "64M", "--hidden", "512", "--shards", "2")


def layout(path: Path) -> dict[str, tuple[int, int]]:
    """tensor -> [start, end) in the file."""
    start, entries, _ = oracle.read_header(path)
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
        for name, entry in entries.items()
    }


def touched(extents: dict[str, tuple[int, int]], begin: int, end: int) -> set[str]:
    """Weights (a scale counts as its weight) that a byte range covers, with all their siblings."""
    covered = {
        name.removesuffix("_scale")
        for name, (start, stop) in extents.items()
        if start < end and stop > begin
    }
    groups = oracle.sibling_groups(name for name in extents if not name.endswith("_scale"))
    return {member for name in covered for member in groups[name]}


def made(fp8fs: Fp8fs, dst: Path) -> int:
    return int(fp8fs.status(dst)["units"]["made"])


def fault(path: Path, start: int, length: int) -> bytes:
    """Read by mapping the file, as loaders do."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
            return mapped[start : start + length]
    finally:
        os.close(fd)


def test_looking_makes_nothing(fp8fs: Fp8fs, place: Path, source: Path) -> None:
    """ls -lR, stat, du, configs and index neither make a tensor nor read a weight."""
    dst = place / "view"
    pid = fp8fs.mount(source, dst, *TENSOR)["pid"]
    settle(pid)
    before = read_chars(pid)
    subprocess.run(["ls", "-lR", dst], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["du", "--apparent-size", dst], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(f"stat {dst}/*", shell=True, check=True, stdout=subprocess.DEVNULL)
    for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
        (dst / name).read_bytes()
    assert made(fp8fs, dst) == 0
    assert read_chars(pid) - before < 1 << 20


def test_a_header_costs_at_most_one_read_ahead(fp8fs: Fp8fs, place: Path, source: Path) -> None:
    """Mapping the first bytes makes no more than the groups that 128 KiB of read-ahead cover."""
    dst = place / "view"
    fp8fs.mount(source, dst, "--scheme", "per_tensor", *TENSOR)
    path = dst / "model-00001-of-00002.safetensors"
    fault(path, 0, 8)
    count = made(fp8fs, dst)
    extents = layout(path)
    assert count <= len(touched(extents, 0, READ_AHEAD))
    assert count < len(extents) / 4


def test_a_tensor_makes_its_group_and_no_more(fp8fs: Fp8fs, place: Path, source: Path) -> None:
    """Reading a weight and its scale makes its fusion group and what read-ahead covers beside it."""
    dst = place / "view"
    fp8fs.mount(source, dst, "--scheme", "per_tensor", *TENSOR)
    path = dst / "model-00002-of-00002.safetensors"
    extents = layout(path)
    names = [n for n in extents if n.endswith("up_proj.weight")]
    name = names[len(names) // 2]
    before = made(fp8fs, dst)
    start, end = extents[name]
    scale = extents[f"{name}_scale"]
    fault(path, start, end - start)
    fault(path, scale[0], scale[1] - scale[0])
    count = made(fp8fs, dst) - before
    allowed = touched(extents, start - READ_AHEAD, scale[1] + READ_AHEAD)
    assert 0 < count <= len(allowed)
    assert count < len(extents) / 4


def test_both_grains_end_in_the_same_bytes(place: Path, checkpoint: Callable[[str], Path]) -> None:
    """Whatever the order of making, the sealed file is the same."""
    src = checkpoint("llama")
    by_shard = Fp8fs(place / "store-shard").build(src)
    tensorwise = Fp8fs(place / "store-tensor")
    dst = place / "view"
    tensorwise.mount(src, dst, *TENSOR)
    for path in sorted(dst.glob("*.safetensors"), reverse=True):
        extents = layout(path)
        for name in reversed(list(extents)):
            start, end = extents[name]
            fault(path, start, end - start)
        assert path.read_bytes() == (by_shard / path.name).read_bytes()
