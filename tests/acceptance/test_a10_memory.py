"""A10: filling on the CPU needs no torch and little memory, whatever the tensor's size."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from pathlib import Path

import pytest

from tests.acceptance.harness import Fp8fs

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

ROWS, COLS = 32768, 16384
LIMIT_BYTES = 400 * 1000 * 1000
HIDDEN, INNER = 5120, 8192
SCHEMES = ("per_tensor", "per_channel", "block")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One BF16 weight of 1 GiB: a pattern of small values, written piece by piece."""
    folder = tmp_path_factory.mktemp("a10") / "big"
    write(folder, {"model.layers.0.mlp.down_proj.weight": (ROWS, COLS)}, "LlamaForCausalLM")
    return folder


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One expert as large as Llama 4's, 240 MiB, stored [in, out]."""
    folder = tmp_path_factory.mktemp("a10") / "turned"
    base = "model.layers.0.feed_forward.experts"
    shapes = {
        f"{base}.down_proj": (1, INNER, HIDDEN),
        f"{base}.gate_up_proj": (1, HIDDEN, 2 * INNER),
    }
    write(folder, shapes, "Llama4ForCausalLM")
    return folder


def write(folder: Path, shapes: dict[str, tuple[int, ...]], architecture: str) -> None:
    """BF16 weights of a pattern of small values, written piece by piece."""
    folder.mkdir()
    header: dict[str, object] = {}
    size = 0
    for name, shape in shapes.items():
        end = size + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    piece = b"".join(
        struct.pack("<H", (sign << 15) | (exponent << 7) | mantissa)
        for sign in (0, 1)
        for exponent in range(112, 120)
        for mantissa in range(128)
    )
    block = piece * ((4 << 20) // len(piece))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(size // len(block)):
            file.write(block)
    config = {"architectures": [architecture], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))


def peak_bytes(pid: int) -> int:
    """Largest resident size that a process ever had."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gigabyte_tensor_needs_little_memory(place: Path, source: Path, scheme: str) -> None:
    """Peak RSS of the server, kernels compiled in the same run, stays under 400 MB; no torch is loaded."""
    check(place, source, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_turned_expert_needs_little_memory(place: Path, turned: Path, scheme: str) -> None:
    """The same where each weight is the transpose of what the source has."""
    check(place, turned, scheme, "--split-experts")


def check(place: Path, source: Path, scheme: str, *options: str) -> None:
    """Open the one shard of a view and look at the server when it is sealed."""
    fresh = place / "cache"
    fp8fs = Fp8fs(
        place / "store", env={"XDG_CACHE_HOME": str(fresh), "NUMBA_CACHE_DIR": str(fresh / "numba")}
    )
    dst = place / "view"
    pid = fp8fs.mount(source, dst, "--scheme", scheme, "--device", "cpu", *options)["pid"]
    fd = os.open(dst / "model.safetensors", os.O_RDONLY)
    try:
        assert os.fstat(fd).st_size > (source / "model.safetensors").stat().st_size // 2
    finally:
        os.close(fd)
    assert (dst / "model.safetensors").is_symlink()
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert peak_bytes(pid) < LIMIT_BYTES
    fp8fs.unmount(dst)
