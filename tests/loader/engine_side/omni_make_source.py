"""Write a tiny BF16 pipeline whose transformer is the engine's own class at a small size, with random weights.

Names, shapes and dtypes of a real checkpoint: q, k, v apart and diffusers' module names for Wan and Qwen-Image, the
native fused layout for MiniMax-H3. The result lists the linears that the engine itself builds as FP8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import omni_cpu
import omni_names
import reporting
import torch

SHARDS = 2


def load_engine() -> None:
    """Import what a run needs, made able to run on CPU."""
    omni_cpu.bring_up()


def main(options: argparse.Namespace) -> dict[str, Any]:
    load_engine()
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_omni.quantization import build_quant_config

    config = omni_cpu.CONFIGS[options.model]
    for component in omni_cpu.components(options.model):
        folder = options.directory / component
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    (options.directory / "model_index.json").write_text(json.dumps({"_class_name": "TinyPipeline"}))
    omni_cpu.join_group(0, 1, options.port)
    serialized_fp8 = build_quant_config(
        {
            "quant_method": "fp8",
            "is_checkpoint_fp8_serialized": True,
            "activation_scheme": "dynamic",
        }
    )
    with omni_cpu.vllm_context(), set_default_torch_dtype(torch.bfloat16):
        diffusion = omni_cpu.diffusion_config(options.directory)
        plain = omni_cpu.build_transformer(options.model, config, diffusion, None)
        quantized = omni_cpu.build_transformer(options.model, config, diffusion, serialized_fp8)
    for seed, component in enumerate(omni_cpu.components(options.model)):
        _write_weights(options.model, plain, options.directory / component, seed)
    return {
        "fp8_linears": [
            name.removesuffix(".weight_scale")
            for name, _ in quantized.named_parameters()
            if name.endswith(".weight_scale")
        ],
        "runtime_dtypes": {
            name: str(target.dtype).removeprefix("torch.")
            for name, target in _persistent_tensors(plain)
        },
    }


def _write_weights(model: str, plain: torch.nn.Module, folder: Path, seed: int) -> None:
    """Random weights for every tensor of a transformer, in shards with an index."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for position, (name, target) in enumerate(_persistent_tensors(plain)):
        spread = 0.02 + 0.03 * (position % 4)  # different amax for different tensors
        values = (torch.randn(target.shape, generator=generator) * spread).to(target.dtype)
        tensors.update(_checkpoint_tensors(model, name, values))
    names = sorted(tensors)
    per_shard = -(-len(names) // SHARDS)
    weight_map = {}
    for shard in range(SHARDS):
        file_name = f"diffusion_pytorch_model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        members = names[shard * per_shard : (shard + 1) * per_shard]
        save_file(
            {n: tensors[n].contiguous() for n in members},
            folder / file_name,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(members, file_name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps(index, indent=1)
    )


def _persistent_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and the buffers that a checkpoint holds."""
    saved = set(model.state_dict())
    return [
        *model.named_parameters(),
        *((name, buffer) for name, buffer in model.named_buffers() if name in saved),
    ]


def _checkpoint_tensors(
    model: str, runtime_name: str, values: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A runtime tensor under the name or names that a checkpoint of the model has for it."""
    names = omni_names.checkpoint_names(model, runtime_name)
    return dict(zip(names, values.chunk(len(names)), strict=True))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=list(omni_cpu.CONFIGS), required=True)
    parser.add_argument("--port", type=int, required=True)
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
