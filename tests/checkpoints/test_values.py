"""Odd values and shapes of real checkpoints: quantized as the oracle says, or kept bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp8fs
from tests import oracle
from tests.checkpoints.looks import LLM, SCHEMES, layer

FILE = "model.safetensors"


def made(tmp_path: Path, tensors: dict[str, torch.Tensor], scheme: str) -> tuple[Path, Path]:
    """The source shard and the finished one."""
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(LLM))
    save_file(tensors, src / FILE, metadata={"format": "pt"})
    return src / FILE, fp8fs.build(src, store=tmp_path / "store", scheme=scheme) / FILE


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def outlier() -> torch.Tensor:
    weight = normal(144, 144)
    weight[3, 5] = 3e4
    return weight


def zero_block() -> torch.Tensor:
    weight = normal(144, 144)
    weight[:128, :128] = 0
    return weight


VALUES = {
    "all zero": lambda: torch.zeros(144, 144).bfloat16(),
    "one block zero": zero_block,
    "one outlier": outlier,
    "F16 near its limits": lambda: normal(144, 144).sign().half() * 65504,
    "F16 subnormal": lambda: normal(144, 144).half() * 2.0**-20,
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("values", VALUES)
def test_odd_values_are_quantized_as_the_oracle_says(
    tmp_path: Path, values: str, scheme: str
) -> None:
    """Extreme but finite weights become FP8 with the oracle's bytes and scales."""
    source, view = made(tmp_path, {layer(0): VALUES[values]()}, scheme)
    wanted = oracle.expected(oracle.read_file(source), {layer(0)}, scheme, {})
    assert oracle.read_file(view) == wanted


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_no_scheme_takes_arrives_bit_for_bit(tmp_path: Path, scheme: str) -> None:
    """F64, 0-dim, empty, one column, kernels, integers and bools are kept beside a weight that is quantized."""
    tensors = {
        layer(0): normal(64, 32),
        layer(1): normal(64, 32).double(),
        layer(2): normal(0, 32),
        layer(3): normal(64, 1),
        layer(4): normal(16, 16, 3),
        layer(5): normal(16, 16, 3, 3),
        layer(6): normal(16, 16, 2, 2, 2),
        layer(7): torch.ones(32, 32, dtype=torch.int64),
        layer(8): torch.ones(32, 32, dtype=torch.bool),
        "model.scalar": torch.tensor(1.5),
    }
    source, view = made(tmp_path, tensors, scheme)
    wanted = oracle.expected(oracle.read_file(source), {layer(0)}, scheme, {})
    assert oracle.read_file(view) == wanted
