"""Odd values and shapes of real checkpoints: quantized as the oracle says, or kept bit for bit, in every way of serving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp8fs
from tests import oracle
from tests.acceptance.harness import Fp8fs
from tests.checkpoints.looks import LLM, SCHEMES, layer

FILE = "model.safetensors"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def changed(weight: torch.Tensor, place: tuple[int | slice, ...], value: float) -> torch.Tensor:
    weight[place] = value
    return weight


VALUES: dict[str, torch.Tensor] = {
    "all zero": torch.zeros(144, 144).bfloat16(),
    "all negative zero": -torch.zeros(144, 144).bfloat16(),
    "one block zero": changed(normal(144, 144), (slice(128), slice(128)), 0.0),
    "rows and columns of zeros": changed(
        changed(normal(144, 144), (slice(3, 9),), 0.0), (slice(None), slice(140, 144)), 0.0
    ),
    "all but one zero": changed(torch.zeros(144, 144).bfloat16(), (143, 143), -2.5),
    "one outlier": changed(normal(144, 144), (3, 5), 3e4),
    "one outlier beyond FP16": changed(normal(144, 144), (140, 2), -1e30),
    "BF16 at its limits": normal(144, 144).sign() * torch.finfo(torch.bfloat16).max,
    "BF16 subnormal": (normal(144, 144).view(torch.int16) & -0x7F81).view(torch.bfloat16),
    "F16 near its limits": normal(144, 144).sign().half() * 65504,
    "F16 subnormal": normal(144, 144).half() * 2.0**-20,
    "F32 at its limits": normal(144, 144).float().sign() * torch.finfo(torch.float32).max,
    "F32 subnormal": normal(144, 144).float() * 2.0**-130,
    "F32 that BF16 has not": normal(144, 144).float() * (1 + 2.0**-20),
    "one value": torch.full((144, 144), 0.1).bfloat16(),
}

KEPT: dict[str, torch.Tensor] = {
    "F64": normal(64, 32).double(),
    "no rows": normal(0, 32),
    "no columns": normal(32, 0),
    "one column": normal(64, 1),
    "one row": normal(1, 64),
    "Conv1d": normal(16, 16, 3),
    "Conv2d": normal(16, 16, 3, 3),
    "Conv3d": normal(16, 16, 2, 2, 2),
    "a vector": normal(64),
    "I64": torch.arange(1024).reshape(32, 32),
    "I32": torch.arange(1024, dtype=torch.int32).reshape(32, 32),
    "I16": torch.arange(1024, dtype=torch.int16).reshape(32, 32),
    "I8": torch.ones(32, 32, dtype=torch.int8),
    "U8": torch.ones(32, 32, dtype=torch.uint8),
    "bools": torch.ones(32, 32, dtype=torch.bool),
    "complex": torch.complex(normal(32, 32).float(), normal(32, 32).float()),
    "NaN where nothing is quantized": changed(normal(64), (3,), float("nan")),
}


def source(src: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one shard."""
    src.mkdir()
    (src / "config.json").write_text(json.dumps(LLM))
    save_file(tensors, src / FILE, metadata={"format": "pt"})
    return src


def numbered(*groups: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor as the weight of a layer of its own."""
    tensors = [tensor for group in groups for tensor in group.values()]
    return {layer(number): tensor for number, tensor in enumerate(tensors)}


def made(tmp_path: Path, tensors: dict[str, torch.Tensor], scheme: str) -> tuple[Path, Path]:
    """The source shard and the finished one."""
    src = source(tmp_path / "src", tensors)
    return src / FILE, fp8fs.build(src, store=tmp_path / "store", scheme=scheme) / FILE


@pytest.mark.parametrize("scheme", SCHEMES)
def test_odd_values_are_quantized_as_the_oracle_says(tmp_path: Path, scheme: str) -> None:
    """Extreme but finite weights become FP8 with the oracle's bytes and scales."""
    shard, view = made(tmp_path, numbered(VALUES), scheme)
    found, wanted = oracle.read_file(view), oracle.read_file(shard)
    wanted = oracle.expected(wanted, set(wanted), scheme, {})
    assert found.keys() == wanted.keys()
    for number, values in enumerate(VALUES):
        for name in (layer(number), oracle.scale_name(layer(number), scheme)):
            assert found[name] == wanted[name], values


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_no_scheme_takes_arrives_bit_for_bit(tmp_path: Path, scheme: str) -> None:
    """F64, 0-dim, empty, one column, kernels, integers, bools and complex numbers are kept beside what is quantized."""
    tensors = {**numbered({"": normal(64, 32)}, KEPT), "model.scalar": torch.tensor(1.5)}
    shard, view = made(tmp_path, tensors, scheme)
    wanted = oracle.expected(oracle.read_file(shard), {layer(0)}, scheme, {})
    assert oracle.read_file(view) == wanted


@pytest.mark.fuse
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_of_it_through_one_mount(place: Path, mount: Callable[..., Path], scheme: str) -> None:
    """All of these together, in one shard, are the same in every way of serving."""
    src = source(place / "src", {**numbered(VALUES, KEPT), "model.scalar": torch.tensor(1.5)})
    chosen = {layer(number) for number in range(len(VALUES))}
    wanted = oracle.expected(oracle.read_file(src / FILE), chosen, scheme, {})
    assert oracle.read_file(mount(src, "--scheme", scheme) / FILE) == wanted


BAD = {
    layer(number): changed(normal(144, 144).to(dtype), (number, 5), float(value))
    for number, (dtype, value) in enumerate(
        (dtype, value)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for value in ("nan", "inf", "-inf")
    )
}
SOUND = {layer(9): normal(144, 144)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_bad_element_keeps_its_weight(tmp_path: Path, scheme: str) -> None:
    """NaN, +Inf or -Inf in one element of any dtype: a build keeps that weight bit for bit, and quantizes the others."""
    src = source(tmp_path / "src", {**BAD, **SOUND})
    notes: list[str] = []
    tree = fp8fs.build(src, store=tmp_path / "store", scheme=scheme, note=notes.append)
    wanted = oracle.expected(oracle.read_file(src / FILE), SOUND, scheme, {})
    assert oracle.read_file(tree / FILE) == wanted
    assert sorted(notes) == [
        f"{name}: NaN or Inf at index {number * 144 + 5}; kept as it is"
        for number, name in enumerate(BAD)
    ]


@pytest.mark.fuse
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scan_makes_bad_elements_servable(
    fp8fs: Fp8fs, place: Path, mount: Callable[..., Path], scheme: str
) -> None:
    """After ``plan --scan`` a mount keeps such weights too, in every way of serving."""
    src = source(place / "src", {**BAD, **SOUND})
    found = fp8fs.json("plan", src, "--scan", "--scheme", scheme)["non_finite"]
    assert {bad["tensor"] for bad in found} == BAD.keys()
    wanted = oracle.expected(oracle.read_file(src / FILE), SOUND, scheme, {})
    assert oracle.read_file(mount(src, "--scheme", scheme) / FILE) == wanted
