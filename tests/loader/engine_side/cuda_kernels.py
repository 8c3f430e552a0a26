"""CUDA kernel classes of vLLM on CPU: their Python code runs (processing, parameters, asserts), the GEMM is torch's.

So a test can see whether what a loader leaves in a linear is what that kernel expects, without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

KERNELS = ("cutlass", "cutlass-block", "triton-block", "deepgemm-block")
BLOCK = 128


def emulate(name: str) -> None:
    """Make the named kernel class the only one that vLLM finds for FP8 linears. Call inside the vLLM context."""
    import vllm._custom_ops as ops
    import vllm.model_executor.kernels.linear as linear_kernels
    import vllm.model_executor.layers.quantization.fp8 as fp8
    import vllm.model_executor.layers.quantization.utils.fp8_utils as fp8_utils
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass, deep_gemm, triton
    from vllm.platforms.interface import PlatformEnum

    kernel = {
        "cutlass": cutlass.CutlassFP8ScaledMMLinearKernel,
        "cutlass-block": cutlass.CutlassFp8BlockScaledMMKernel,
        "triton-block": triton.TritonFp8BlockScaledMMKernel,
        "deepgemm-block": deep_gemm.DeepGemmFp8BlockScaledMMKernel,
    }[name]
    kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    kernel.can_implement = classmethod(lambda cls, config: (True, None))
    linear_kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [kernel]
    linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [kernel]
    fp8.cutlass_fp8_supported = lambda: True

    def cutlass_scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if b.stride(0) != 1:
            raise ValueError("the weight must be column-major")
        if name != "cutlass":
            return block_scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype)
        if scale_b.numel() != 1:
            raise ValueError(f"a per-tensor weight needs one scale, got {tuple(scale_b.shape)}")
        product = (a.float() * scale_a.float()) @ (b.float() * scale_b.float())
        return (product if bias is None else product + bias.float()).to(out_dtype)

    def fp8_gemm_nt(a: Any, b: Any, out: torch.Tensor, **_: Any) -> None:
        out.copy_(block_scaled_mm(a[0], b[0], a[1], b[1], out.dtype))

    ops.cutlass_scaled_mm = cutlass_scaled_mm
    fp8_utils.w8a8_triton_block_scaled_mm = lambda a, b, scale_a, scale_b, block, out: (
        block_scaled_mm(a, b, scale_a, scale_b, out)
    )
    deep_gemm.fp8_gemm_nt = fp8_gemm_nt
    deep_gemm.is_deep_gemm_e8m0_used = lambda: True
    deep_gemm.is_deep_gemm_supported = lambda: True
    fp8_utils.transform_sf_into_required_layout = lambda sf, **_: (
        sf
    )  # Hopper takes float32 scales as they are


def block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] with scales [M, K/128], b [N, K] with scales [N/128, K/128]."""
    expected = (-(-b.shape[0] // BLOCK), -(-b.shape[1] // BLOCK))
    if not b.is_contiguous() or scale_b.dtype != torch.float32 or tuple(scale_b.shape) != expected:
        raise ValueError(
            f"block scales {scale_b.dtype} {tuple(scale_b.shape)} for a weight {tuple(b.shape)}"
        )
    left = a.float() * scale_a.float().repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    spread = scale_b.repeat_interleave(BLOCK, 0)[: b.shape[0]].repeat_interleave(BLOCK, 1)[
        :, : b.shape[1]
    ]
    return (left @ (b.float() * spread).t()).to(out_dtype)
