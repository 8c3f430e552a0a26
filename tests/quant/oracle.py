"""The engines' formulas spelled in torch. Shares nothing with fp8fs; CPU tensors only.

On the CPU torch divides by a number with a true division, and float8_e4m3fn conversion rounds to
nearest even; both are what vLLM's own quantizers rely on.
"""

from __future__ import annotations

import numpy as np
import torch


def tensor_of(weight: np.ndarray) -> torch.Tensor:
    """uint16 holds BF16 bits; float16 and float32 are themselves."""
    if weight.dtype == np.uint16:
        return torch.from_numpy(weight.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(weight.copy())


def fp8_bytes(values: torch.Tensor) -> np.ndarray:
    """The bytes of torch's own conversion."""
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def fp8_values(codes: np.ndarray) -> np.ndarray:
    """What torch reads in e4m3fn bytes."""
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()


def per_tensor(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """amax / 448, then w * (1 / scale), clamped."""
    low, high = torch.aminmax(weight)
    scale = torch.max(low.abs(), high.abs()).float().reshape(1) / torch.tensor(448.0)
    scaled = weight.float() * (1.0 / scale)
    return fp8_bytes(scaled.clamp(-448.0, 448.0)), scale.numpy()


def per_channel(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """amax of each row / 448, at least 1 / (448 * 512); then w / scale, clamped."""
    scale = weight.abs().amax(dim=1, keepdim=True).float() / torch.tensor(448.0)
    scale = scale.clamp_min(float(1.0 / (torch.tensor(448.0) * 512)))
    return fp8_bytes((weight / scale).clamp(-448.0, 448.0)), scale.numpy()


def per_block(weight: torch.Tensor, *, pow2: bool) -> tuple[np.ndarray, np.ndarray]:
    """Zero-padded 128x128 blocks: amax, at least 1e-4, / 448; then w * (1 / scale), not clamped."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % 128, 0, -rows % 128))
    blocks = padded.unfold(0, 128, 128).unfold(1, 128, 128)  # (high, wide, 128, 128)
    scale = blocks.float().abs().amax(dim=(2, 3)).clamp_min(1e-4) / 448.0
    if pow2:
        exponent = torch.ceil(torch.log2(scale.double()))
        scale = torch.exp2(exponent).float()
    inverse = (1.0 / scale).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return fp8_bytes((padded * inverse)[:rows, :cols]), scale.numpy()
