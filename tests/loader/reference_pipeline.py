"""FP8 checkpoints of the tiny diffusion pipelines, written offline with the tests' own code: what a view must equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.loader.engine_side import omni_names, reference_fp8

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARD = "diffusion_pytorch_model-00001-of-00001.safetensors"


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of all shards in a folder."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return tensors


def write_fp8_pipeline(
    source: Path,
    target: Path,
    *,
    model: str,
    scheme: str,
    facts: dict[str, Any],
    runtime_names: bool = False,
) -> None:
    """Convert the BF16 pipeline *source*, made by ``omni_make_source.py``, whose result is *facts*.

    ``runtime_names``: one tensor per runtime tensor (rows concatenated), with the runtime's name and dtype.
    """
    folder = source / "transformer"
    config = json.loads((folder / "config.json").read_text())
    stored = read_tensors(folder)
    output: dict[str, torch.Tensor] = {}
    for runtime_name, dtype in facts["runtime_dtypes"].items():
        names = omni_names.checkpoint_names(model, runtime_name)
        members = [stored[name] for name in names]
        linear = runtime_name.removesuffix(".weight")
        if runtime_names:
            names, members = (
                [runtime_name],
                [torch.cat(members) if len(members) > 1 else members[0]],
            )
        if runtime_name.endswith(".weight") and linear in facts["fp8_linears"]:
            heads = (config["num_attention_heads"], config["attention_head_dim"])
            grouped = heads if model == "h3" and linear.endswith("qkv_proj") else None
            output |= _quantized(names, members, scheme, grouped)
        else:
            for name, tensor in zip(names, members, strict=True):
                output[name] = tensor.to(getattr(torch, dtype)) if runtime_names else tensor
    (target / "transformer").mkdir(parents=True)
    shutil.copy(source / "model_index.json", target)
    save_file(
        {n: t.contiguous() for n, t in output.items()},
        target / "transformer" / SHARD,
        metadata={"format": "pt"},
    )
    total = sum(t.numel() * t.element_size() for t in output.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(output), SHARD)}
    (target / "transformer" / INDEX).write_text(json.dumps(index))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "is_checkpoint_fp8_serialized": True,
        "activation_scheme": "dynamic",
        "ignored_layers": [],
    }
    if scheme.startswith("block"):
        config["quantization_config"]["weight_block_size"] = [128, 128]
    (target / "transformer" / "config.json").write_text(json.dumps(config))


def write_runtime_pipeline(
    source: Path, target: Path, *, model: str, facts: dict[str, Any]
) -> None:
    """The same BF16 pipeline under the runtime's names, rows joined and dtypes as at run time."""
    stored = read_tensors(source / "transformer")
    output = {
        name: torch.cat([stored[part] for part in omni_names.checkpoint_names(model, name)]).to(
            getattr(torch, dtype)
        )
        for name, dtype in facts["runtime_dtypes"].items()
    }
    (target / "transformer").mkdir(parents=True)
    shutil.copy(source / "model_index.json", target)
    shutil.copy(source / "transformer" / "config.json", target / "transformer")
    save_file(output, target / "transformer" / SHARD, metadata={"format": "pt"})


def mark_as_view(pipeline: Path) -> None:
    """Put the file there by which the plugin knows a view."""
    (pipeline / ".fp8fs").mkdir()
    (pipeline / ".fp8fs" / "manifest.json").write_text("{}")


def _quantized(
    names: list[str], members: list[torch.Tensor], scheme: str, grouped: tuple[int, int] | None
) -> dict[str, torch.Tensor]:
    """Weights and scales of one fused group. *grouped*: rows are stored head by head (heads, head_dim)."""
    output: dict[str, torch.Tensor] = {}
    if scheme == "per_tensor":
        scale = reference_fp8.per_tensor_scale(*members)
        for name, member in zip(names, members, strict=True):
            output[name] = reference_fp8.cast_with_scale(member, scale)
            output[f"{name}_scale"] = scale.clone()
        return output
    for name, member in zip(names, members, strict=True):
        rows = omni_names.ungroup_qkv_rows(member, *grouped) if grouped else member
        data, scale = reference_fp8.per_block(rows, power_of_two=scheme == "block")
        output[name] = omni_names.group_qkv_rows(data, *grouped) if grouped else data
        output[f"{name}_scale_inv"] = scale
    return output
