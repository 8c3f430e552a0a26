"""The FP8 numbers in plain torch: what vLLM's online quantizers make of a weight. The loader tests' oracle.

Shares nothing with fp8fs. Runs in the development environment and inside the engines' environments alike.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0


def largest_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """max(|min|, |max|) as a float32 scalar."""
    low, high = weight.aminmax()
    return torch.maximum(low.abs(), high.abs()).to(torch.float32)


def cast_with_scale(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3fn of weight x (1 / scale) in float32: saturating, NaN to the largest value, round to nearest even."""
    values = weight.to(torch.float32) * (1.0 / scale.to(torch.float32))
    values = torch.where(
        values.isnan(), torch.full_like(values, FP8_MAX), values.clamp(-FP8_MAX, FP8_MAX)
    )
    return values.to(torch.float8_e4m3fn)


def per_tensor_scale(*weights: torch.Tensor) -> torch.Tensor:
    """The scale [1] of one weight, or the one that the members of a fused group share."""
    amax = torch.stack([largest_magnitude(weight) for weight in weights]).max()
    return amax.reshape(1) / torch.tensor(FP8_MAX)  # a tensor divisor: true division


def per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale [1]: vLLM ``Fp8PerTensorOnlineLinearMethod``."""
    scale = per_tensor_scale(weight)
    return cast_with_scale(weight, scale), scale


def per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale [out, 1]: vLLM ``Fp8PtpcOnlineLinearMethod``."""
    low, high = weight.aminmax(dim=-1, keepdim=True)
    amax = torch.maximum(low.abs(), high.abs()).to(torch.float32)
    scale = (amax / torch.tensor(FP8_MAX)).clamp_min(float(1.0 / (torch.tensor(FP8_MAX) * 512)))
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def power_of_two_at_least(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each (positive) scale, exactly."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def per_block(
    weight: torch.Tensor, *, power_of_two: bool, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale [ceil(out / block), ceil(in / block)]: vLLM ``per_block_cast_to_fp8``."""
    rows, columns = weight.shape
    padded = torch.zeros(
        -(-rows // block) * block, -(-columns // block) * block, dtype=weight.dtype
    )
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scale = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / FP8_MAX
    if power_of_two:
        scale = power_of_two_at_least(scale)
    data = (
        (blocks * (1.0 / scale))
        .to(torch.float8_e4m3fn)
        .view_as(padded)[:rows, :columns]
        .contiguous()
    )
    return data, scale.view(blocks.shape[0], blocks.shape[2])


def dequantize(data: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """value = data x scale in float32, for a scale of any of the schemes."""
    if scale.numel() == 1:
        return data.float() * scale.float().reshape(())
    if scale.ndim == 2 and scale.shape == (data.shape[0], 1):
        return data.float() * scale.float()
    spread = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return data.float() * spread[: data.shape[0], : data.shape[1]]
