"""The definition of the FP8 bytes, against literal numbers and plain arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fp8fs.errors import NonFiniteTensorError
from fp8fs.quant import reference
from fp8fs.quant.reference import SCHEME_FUNCTIONS, TENSOR_SCALE_MIN


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def exact(code: int) -> Fraction:
    """The magnitude of an e4m3fn byte, from the format's definition."""
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


def nearest(value: float) -> int:
    """The byte nearest to *value*, the even one of two equally near; by trying all."""
    magnitude = abs(Fraction(value))
    code = min(range(0x7F), key=lambda c: (abs(exact(c) - magnitude), c & 1))
    return code | (0x80 if np.signbit(value) else 0)


def test_decode_literals() -> None:
    """A few bytes whose values the format's specification states."""
    found = reference.decode(np.array([0x00, 0x80, 0x01, 0x08, 0x38, 0xB8, 0x7E], dtype=np.uint8))
    np.testing.assert_array_equal(found, f32(0, -0.0, 2**-9, 2**-6, 1, -1, 448))
    assert np.signbit(found[1])
    assert np.isnan(reference.decode(np.array([0x7F, 0xFF], dtype=np.uint8))).all()


def test_encode_literals() -> None:
    """Ties go to the even byte, zeros keep their sign, everything above 448 is 448."""
    values = f32(0, -0.0, 2**-10, 3 * 2**-10, 1, 1.0625, 1.1875, 448, 464, 465, -1e30, np.inf)
    expected = [0x00, 0x80, 0x00, 0x02, 0x38, 0x38, 0x3A, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E]
    assert reference.encode(values).tolist() == expected


def test_encode_round_trip() -> None:
    """Every number byte encodes to itself."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8)
    np.testing.assert_array_equal(reference.encode(reference.decode(codes)), codes)


def test_encode_is_nearest() -> None:
    """Random float32 values of all sizes encode to the nearest byte, found by trying all of them."""
    rng = np.random.default_rng(5)
    values = (np.exp2(rng.uniform(-13, 9, 400)) * rng.choice([-1, 1], 400)).astype(np.float32)
    assert reference.encode(values).tolist() == [nearest(float(v)) for v in values]


def test_encode_refuses_nan() -> None:
    """A NaN never becomes a byte."""
    with pytest.raises(ValueError, match="NaN"):
        reference.encode(f32(1.0, np.nan))


def test_per_tensor_literal() -> None:
    """Scale amax / 448; the largest value becomes 448, half of it 224."""
    weight = f32(3.5, -7.0, 0.0).reshape(1, 3)
    found = reference.per_tensor(weight)
    assert found.scale.tolist() == [0.015625]
    assert found.data.tolist() == [[0x76, 0xFE, 0x00]]


def test_true_division_is_not_reciprocal_multiplication() -> None:
    """per_channel divides by the scale, per_tensor multiplies by its reciprocal: they differ somewhere."""
    codes = np.arange(0x3C00, 0x3C80, dtype=np.uint16)
    differ = 0
    for top in codes:
        weight = np.stack([codes, np.full_like(codes, top)], axis=1)
        weight = weight[codes <= top]
        whole = reference.per_tensor(weight).data
        rows = reference.per_channel(weight).data
        differ += int((whole != rows).sum())
    assert differ > 0


def test_bf16_bits() -> None:
    """uint16 weights are BF16 bits: 0x3F80 is 1.0."""
    values = reference.to_float32(np.array([0x3F80, 0xC000, 0x0001], dtype=np.uint16))
    np.testing.assert_array_equal(values, f32(1.0, -2.0, 2.0**-133))


def test_zero_weights() -> None:
    """A weight of zeros has zero bytes and a positive scale under every scheme."""
    for quantize in SCHEME_FUNCTIONS.values():
        found = quantize(np.zeros((3, 5), dtype=np.float32))
        assert not found.data.any()
        assert (found.scale > 0).all()
    assert reference.per_tensor(np.zeros((2, 2), dtype=np.uint16)).scale.tolist() == [1.0]


def test_floors() -> None:
    """Where a scale would be too small, each scheme has its own floor."""
    tiny = np.full((1, 2), 2.0**-133, dtype=np.float32)
    assert reference.per_tensor(tiny).scale[0] == TENSOR_SCALE_MIN
    assert reference.per_channel(tiny).scale[0, 0] == np.float32(1) / np.float32(229376)
    assert reference.block_free(tiny).scale[0, 0] == np.float32(1e-4) / np.float32(448)


def test_smallest_tensor_scale() -> None:
    """The floor of a per_tensor scale is the smallest float32 whose reciprocal is finite."""
    below = np.nextafter(TENSOR_SCALE_MIN, np.float32(0))
    assert np.isfinite(np.float32(1) / TENSOR_SCALE_MIN)
    with np.errstate(over="ignore", divide="ignore"):
        assert np.isinf(np.float32(1) / below)


def test_tiny_weights_keep_their_values() -> None:
    """Weights of BF16 subnormals still dequantize to themselves within FP8's precision."""
    weight = (np.arange(1, 128, dtype=np.uint16)).reshape(1, -1)
    found = reference.per_tensor(weight)
    back = reference.decode(found.data).astype(np.float64) * np.float64(found.scale[0])
    true = reference.to_float32(weight).astype(np.float64)
    assert (np.abs(back - true) <= true / 16 + 2.0**-138).all()


def test_pow2_scales() -> None:
    """The power-of-two scale is a power of two, at least the free scale and below twice it."""
    rng = np.random.default_rng(1)
    weight = (np.exp2(rng.uniform(-20, 20, (3, 4))).repeat(128, 0).repeat(128, 1)).astype(
        np.float32
    )
    weight[:128, :128] = 448 * 0.25  # a free scale that is a power of two stays
    free, power = reference.block_free(weight).scale, reference.block(weight).scale
    assert (np.frexp(power)[0] == 0.5).all()
    assert ((power >= free) & (power < 2 * free)).all()
    assert power[0, 0] == free[0, 0] == 0.25


def test_block_grid_counts_edges() -> None:
    """Edge blocks have scales of their own, made from the elements that exist."""
    weight = np.ones((129, 257), dtype=np.float32)
    weight[128, 256] = 448.0
    found = reference.block_free(weight)
    assert found.scale.shape == (2, 3)
    assert found.scale[1, 2] == 1.0
    assert found.data[128, 256] == 0x7E


@pytest.mark.parametrize("scheme", sorted(SCHEME_FUNCTIONS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_is_refused(scheme: str, bad: float) -> None:
    """A NaN or Inf is an error that names the first one's flat index."""
    weight = np.ones((4, 6), dtype=np.float32)
    weight[2, 3] = weight[3, 3] = bad
    with pytest.raises(NonFiniteTensorError) as caught:
        SCHEME_FUNCTIONS[scheme](weight)
    assert caught.value.facts["index"] == 15


@pytest.mark.parametrize("scheme", sorted(SCHEME_FUNCTIONS))
def test_never_nan_never_zero_scale(scheme: str) -> None:
    """Weights of every magnitude that BF16 has give finite bytes and positive, finite scales."""
    for exponent in range(0, 0x7F80, 0x80):
        codes = (exponent + np.arange(16, dtype=np.uint16) * 8).reshape(4, 4)
        found = SCHEME_FUNCTIONS[scheme](codes)
        assert not ((found.data & 0x7F) == 0x7F).any()
        assert (np.isfinite(found.scale) & (found.scale > 0)).all()


def test_bf16_is_the_nearest_even_one() -> None:
    """Rounding to BF16: ties go to even bits, too large becomes Inf, NaN is one NaN, signs and small values stay."""
    bits = np.array(
        [
            0x3F80_8000,  # halfway between 0x3F80 and 0x3F81
            0x3F81_8000,  # halfway between 0x3F81 and 0x3F82
            0x3F80_8001,
            0x3F80_7FFF,
            0x7F7F_FFFF,
            0xFF80_0000,
            0x7F80_0001,
            0xFFFF_FFFF,
            0x8000_0000,
            0x0000_8001,
        ],
        dtype=np.uint32,
    )
    found = reference.to_bf16(bits.view(np.float32))
    assert [hex(code) for code in found] == [
        hex(code)
        for code in (
            0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7FC0, 0x8000, 0x0001,
        )
    ]  # fmt: skip


def test_bf16_of_other_dtypes() -> None:
    """F16 is widened first, BF16 stays as it is."""
    assert list(reference.to_bf16(np.array([1.0, -65504.0], np.float16))) == [0x3F80, 0xC780]
    codes = np.array([0x7FFF, 0x0001], np.uint16)
    assert list(reference.to_bf16(codes)) == [0x7FFF, 0x0001]
