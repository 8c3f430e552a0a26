"""vLLM's block FP8 kernel classes for CPUs with AMX, on any CPU: their Python code runs, torch computes the product.

Weights only are FP8 there, activations stay BF16. Linears and experts. Packing leaves the plain layout.
"""

from __future__ import annotations

from typing import Any

import reference_fp8
import torch
from torch.nn import functional


def emulate() -> None:
    """Make these classes the ones that vLLM finds, in this process only."""
    import vllm.model_executor.kernels.linear as linear_kernels
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms.interface import PlatformEnum

    kernel = cpu.CPUFp8BlockScaledMMKernel
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [kernel]
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    cpu_moe.fused_experts_cpu = fused_experts
    torch.ops._C.convert_weight_packed = lambda weight: weight.as_subclass(torch.Tensor)
    torch.ops._C.fp8_scaled_mm_cpu = scaled_mm


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: list[int]) -> torch.Tensor:
    """The BF16 weight nearest to FP8 data and block scales."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    if block != [128, 128] or scale.dtype != torch.float32 or scale.shape != (rows, columns):
        raise ValueError(
            f"scales {scale.dtype} {tuple(scale.shape)} for {tuple(weight.shape)}, {block}"
        )
    return reference_fp8.dequantize(weight, scale).to(torch.bfloat16)


def scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: list[int],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    is_packed: object,
) -> torch.Tensor:
    """The operator ``fp8_scaled_mm_cpu``."""
    return functional.linear(x, dequantized(weight, scale, block), bias).to(out_dtype)


def fused_experts(
    output: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    method: object,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    *rest: Any,
) -> None:
    """The operator ``fused_experts_cpu``: SwiGLU experts, gate rows before up rows."""
    block = rest[2]
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(
            x[tokens], dequantized(w13[expert], w13_scale[expert], block)
        ).chunk(2, dim=-1)
        hidden = functional.linear(
            functional.silu(gate) * up, dequantized(w2[expert], w2_scale[expert], block)
        )
        total.index_add_(0, tokens, hidden.float() * topk_weights[tokens, places].float()[:, None])
    output.copy_(total)
