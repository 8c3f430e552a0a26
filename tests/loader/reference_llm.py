"""FP8 checkpoints of the tiny transformers models, written offline with the tests' own code: what a view must equal."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.loader.engine_side import reference_fp8
from tests.loader.reference_pipeline import read_tensors

LINEAR = re.compile(r"^(?!visual\.).*\.(\w+_proj|experts\.\d+\.w[123])\.weight$")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def write_fp8_model(source: Path, target: Path, *, scheme: str) -> None:
    """Convert a tiny BF16 model. ``scheme``: per_tensor, per_channel, block or block_free, as fp8fs names them."""
    output: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    tensors = read_tensors(source)
    for name, tensor in tensors.items():
        if not LINEAR.search(name):
            output[name] = tensor
            if tensor.ndim == 2:
                kept.append(name.removesuffix(".weight"))
            continue
        data, scale = _quantize(name, tensors, scheme)
        output[name] = data
        output[f"{name}_scale_inv" if scheme.startswith("block") else f"{name}_scale"] = scale
    _write(source, target, output, _config(scheme, kept))


def write_dequantized_model(source: Path, target: Path, *, scheme: str) -> None:
    """The BF16 model nearest to what ``write_fp8_model`` stores: the reference for readers without FP8 arithmetic."""
    tensors = read_tensors(source)
    output = {
        name: reference_fp8.dequantize(*_quantize(name, tensors, scheme)).to(torch.bfloat16)
        if LINEAR.search(name)
        else tensor
        for name, tensor in tensors.items()
    }
    _write(source, target, output, None)


def _quantize(
    name: str, tensors: dict[str, torch.Tensor], scheme: str
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = tensors[name]
    if scheme == "per_channel":
        return reference_fp8.per_channel(weight)
    if scheme.startswith("block"):
        return reference_fp8.per_block(weight, power_of_two=scheme == "block")
    scale = reference_fp8.per_tensor_scale(*(tensors[sibling] for sibling in _siblings(name)))
    return reference_fp8.cast_with_scale(weight, scale), scale


def _siblings(name: str) -> list[str]:
    """The weights that vLLM fuses with this one, itself included."""
    leaf = name.split(".")[-2]
    group = next((leaves for leaves in FUSED if leaf in leaves), (leaf,))
    return [name.replace(f".{leaf}.", f".{member}.") for member in group]


def _config(scheme: str, kept: list[str]) -> dict[str, Any]:
    if scheme == "per_channel":
        eight_bit: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**eight_bit, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight_bit, "strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": kept,
            "config_groups": {"group_0": group},
        }
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": kept,
    }
    return config | ({"weight_block_size": [128, 128]} if scheme.startswith("block") else {})


def _write(
    source: Path,
    target: Path,
    tensors: dict[str, torch.Tensor],
    quantization: dict[str, Any] | None,
) -> None:
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".json" and path.name not in (
            "config.json",
            "model.safetensors.index.json",
        ):
            shutil.copy(path, target)
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((source / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
