"""What vLLM's load-time requantization makes of FP8 weights under scales of any size: bytes changed, error before and after."""

from __future__ import annotations

import argparse
import json
from typing import Any

import missing_ops
import reference_fp8
import reporting
import torch

BLOCK = 128


def error(weight: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> float:
    if scale.numel() > 1:
        rows, cols = data.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    difference = data.double() * scale.double() - weight.double()
    return float(difference.norm() / weight.double().norm())


def measured(
    weight: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    loaded: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, float]:
    differ = stored[0].view(torch.uint8) != loaded[0].view(torch.uint8)
    return {
        "changed": float(differ.double().mean()),
        "stored": error(weight, *stored),
        "loaded": error(weight, *loaded),
    }


def load_tensor(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``Fp8LinearMethod`` does with a linear that is not fused on disk."""
    from vllm.model_executor.layers.quantization.utils.w8a8_utils import requantize_with_max_scale

    largest, weight = requantize_with_max_scale(data.clone(), scale.reshape(1), [data.shape[0]])
    return weight, largest.reshape(1)


def load_block(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the DeepGEMM kernel does."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    weight, scales = data.clone(), scale.clone()
    requant_weight_ue8m0_inplace(weight, scales, (BLOCK, BLOCK))
    return weight, scales


def main(options: argparse.Namespace) -> dict[str, Any]:
    missing_ops.fill()
    base = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    base /= base.abs().max()
    found: dict[str, list[dict[str, float]]] = {"per_tensor": [], "block": [], "block_free": []}
    for scale in json.loads(options.scales):
        weight = base * (448.0 * scale)
        one = reference_fp8.per_tensor_scale(weight)
        stored = reference_fp8.cast_with_scale(weight, one), one
        found["per_tensor"].append(measured(weight, stored, load_tensor(*stored)))
        for scheme in ("block", "block_free"):
            stored = reference_fp8.per_block(weight, power_of_two=scheme == "block")
            found[scheme].append(measured(weight, stored, load_block(*stored)))
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scales", help="JSON: the per_tensor scales of normal weights")
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
