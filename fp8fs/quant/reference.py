"""The definition of every number fp8fs writes: plain numpy, slow, one function per scheme.

Weights are numpy arrays: uint16 holds the bits of BF16, float16 is F16, float32 is F32. FP8 is OCP
e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits, largest value 448, no infinity; 0x7F and 0xFF are
NaN and are never written. All arithmetic is IEEE float32 with subnormals, round to nearest even.
``w / s`` and ``w * (1 / s)`` are different numbers; each scheme uses the one that its engine uses.

Decisions where the engines' own formula breaks down:

- A per_tensor weight of zeros gets scale 1.0. (The formula gives scale 0, then 0 x inf = NaN.)
- A per_tensor scale is at least ``TENSOR_SCALE_MIN``, the smallest float32 whose reciprocal is finite.
  Only weights whose largest magnitude is below 1.4e-36 ever meet that floor.
- Zeros keep their sign: -0.0 becomes 0x80, which is -0.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fp8fs.core.recipe import BLOCK
from fp8fs.errors import NonFiniteTensorError

__all__ = [
    "BLOCK_AMAX_MIN",
    "CHANNEL_SCALE_MIN",
    "FP8_MAX",
    "SCHEME_FUNCTIONS",
    "TENSOR_SCALE_MIN",
    "Quantized",
    "Weight",
    "block",
    "block_free",
    "block_scales",
    "cast_tensor",
    "channel_scales",
    "decode",
    "encode",
    "per_channel",
    "per_tensor",
    "pow2_ceil",
    "tensor_scale",
    "to_bf16",
    "to_float32",
]

Weight = npt.NDArray[np.uint16] | npt.NDArray[np.float16] | npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FP8_MAX = np.float32(448.0)
"""Largest e4m3fn value, byte 0x7E."""

TENSOR_SCALE_MIN = np.float32(2.0**-128 + 2.0**-149)
"""Smallest float32 with a finite float32 reciprocal."""

CHANNEL_SCALE_MIN = np.float32(1.0) / np.float32(448.0 * 512.0)
"""Floor of a per_channel scale."""

BLOCK_AMAX_MIN = np.float32(1e-4)
"""Floor of the largest magnitude of a block, before it becomes a scale."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """One quantized weight: e4m3fn bytes in the weight's shape, float32 scales; value = data x scale."""

    data: Bytes
    scale: Floats


def decode(codes: Bytes) -> Floats:
    """The float32 values of e4m3fn *codes*, any shape; NaN for 0x7F and 0xFF."""
    exponent = (codes.astype(np.int32) >> 3) & 0xF
    mantissa = (codes & 0x7).astype(np.float64)
    magnitude = np.where(
        exponent == 0,
        mantissa * 2.0**-9,
        (1.0 + mantissa / 8.0) * np.exp2(exponent.astype(np.float64) - 7.0),
    )
    magnitude = np.where((codes & 0x7F) == 0x7F, np.nan, magnitude)
    values: Floats = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    return values


_MAGNITUDES = decode(np.arange(0x7F, dtype=np.uint8)).astype(np.float64)
_MIDPOINTS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2.0


def encode(values: Floats) -> Bytes:
    """The e4m3fn bytes nearest to *values*, ties to the even byte, clamped to +-448; any shape.

    Raises: ValueError on NaN. The result never holds a NaN byte.
    """
    if np.isnan(values).any():
        raise ValueError("NaN has no FP8 value here")
    magnitude = np.abs(values.astype(np.float64))
    code = np.searchsorted(_MIDPOINTS, magnitude, side="left")  # a tie lands on the lower neighbour
    tie = magnitude == _MIDPOINTS[np.minimum(code, _MIDPOINTS.size - 1)]
    code = code + (tie & (code % 2 == 1))
    data: Bytes = (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)
    return data


def to_float32(weight: Weight) -> Floats:
    """*weight* in float32, exact. Raises: NonFiniteTensorError with the first NaN's or Inf's flat index."""
    if weight.dtype == np.uint16:
        values = (weight.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = weight.astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        index = int(np.argmin(finite.reshape(-1)))
        raise NonFiniteTensorError(f"element {index} is NaN or Inf", index=index)
    return values


def to_bf16(weight: Weight) -> npt.NDArray[np.uint16]:
    """The BF16 bits nearest to *weight*, ties to the even ones: too large becomes Inf, NaN becomes 0x7FC0.

    Equals ``torch.Tensor.to(torch.bfloat16)`` for all that is not NaN.
    """
    if weight.dtype == np.uint16:
        return weight.astype(np.uint16)
    bits = weight.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    codes: npt.NDArray[np.uint16] = np.where(np.isnan(weight), np.uint32(0x7FC0), rounded).astype(
        np.uint16
    )
    return codes


def _amax(values: Floats) -> np.float32:
    return np.float32(np.abs(values).max(initial=np.float32(0.0)))


def _clamp(values: Floats) -> Floats:
    clamped: Floats = np.clip(values, -FP8_MAX, FP8_MAX)
    return clamped


def tensor_scale(amax: float) -> np.float32:
    """The per_tensor scale of a tensor, or of a fused group, whose largest magnitude is *amax*."""
    if amax == 0.0:
        return np.float32(1.0)
    return max(np.float32(amax) / FP8_MAX, TENSOR_SCALE_MIN)


def cast_tensor(weight: Weight, scale: np.float32) -> Bytes:
    """The per_tensor bytes of *weight* under a scale from ``tensor_scale``: clamp(w x (1/scale))."""
    inverse = np.float32(1.0) / scale
    with np.errstate(over="ignore"):  # a foreign, smaller scale saturates
        scaled = to_float32(weight) * inverse
    return encode(_clamp(scaled))


def per_tensor(weight: Weight) -> Quantized:
    """Quantize a weight of any shape with one scale, [1].

    Source: equals vLLM ``Fp8PerTensorOnlineLinearMethod`` (``scaled_fp8_quant`` with a static scale),
    except for weights of zeros and scales below ``TENSOR_SCALE_MIN``.
    """
    scale = tensor_scale(float(_amax(to_float32(weight))))
    return Quantized(cast_tensor(weight, scale), np.array([scale], dtype=np.float32))


def channel_scales(amax: Floats) -> Floats:
    """The per_channel scales of rows whose largest magnitudes are *amax*."""
    scale: Floats = np.maximum(amax / FP8_MAX, CHANNEL_SCALE_MIN)
    return scale


def per_channel(weight: Weight) -> Quantized:
    """Quantize a weight (out, in) with one scale per row, [out, 1].

    Source: equals vLLM ``Fp8PtpcOnlineLinearMethod`` (true division by the scale).
    """
    values = to_float32(weight)
    amax = np.abs(values).max(axis=1, keepdims=True, initial=np.float32(0.0))
    scale = channel_scales(amax)
    return Quantized(encode(_clamp(values / scale)), scale)


def pow2_ceil(scale: Floats) -> Floats:
    """The smallest powers of two that are not below *scale* (positive, normal), exactly."""
    mantissa, exponent = np.frexp(scale)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    power: Floats = np.ldexp(np.ones_like(scale), exponent)
    return power


def block_scales(amax: Floats, *, pow2: bool) -> Floats:
    """The block scales of blocks whose largest magnitudes are *amax*."""
    scale: Floats = np.divide(np.maximum(amax, BLOCK_AMAX_MIN), FP8_MAX)
    return pow2_ceil(scale) if pow2 else scale


def _blocks(weight: Weight, *, pow2: bool) -> Quantized:
    values = to_float32(weight)
    rows, cols = values.shape
    grid = (-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))
    data = np.zeros((rows, cols), dtype=np.uint8)
    scale = np.zeros(grid, dtype=np.float32)
    for i, j in np.ndindex(*grid):
        part = np.s_[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]]
        scale[i, j] = block_scales(np.array(_amax(values[part])), pow2=pow2)
        data[part] = encode(np.multiply(values[part], np.float32(1.0) / scale[i, j]))
    return Quantized(data, scale)


def block_free(weight: Weight) -> Quantized:
    """Quantize a weight (out, in) with one scale per 128x128 block, [ceil(out/128), ceil(in/128)].

    Source: equals vLLM ``per_block_cast_to_fp8`` with float32 scales and a true division by 448.
    """
    return _blocks(weight, pow2=False)


def block(weight: Weight) -> Quantized:
    """Quantize a weight (out, in) with one power-of-two scale per 128x128 block.

    Source: equals vLLM ``per_block_cast_to_fp8`` with ``use_ue8m0``, its scales stored as float32.
    """
    return _blocks(weight, pow2=True)


SCHEME_FUNCTIONS = {
    "per_tensor": per_tensor,
    "per_channel": per_channel,
    "block": block,
    "block_free": block_free,
}
"""The definition of each scheme, by its name."""
