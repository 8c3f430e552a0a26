"""What every quantizer promises: the reference's bytes, from raw buffers, on every device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fp8fs.core.quantizer import Quantizer
from fp8fs.errors import NonFiniteTensorError
from fp8fs.quant import reference
from fp8fs.quant.reference import Quantized, Weight
from tests.quant.weights import DTYPES, edge_weights, finite_codes, from_float32, normal, ties

SCALES = [
    *(float(np.float32(m * 2.0**e)) for e in range(-120, 120, 16) for m in (1.0, 1.37)),
    *(float(np.float32(m)) for m in np.linspace(1e-5, 1e-2, 24)),
    float(reference.TENSOR_SCALE_MIN),
    float(np.float32(2.0**-127)),
    7.6e35,
]


def run(quantizer: Quantizer, scheme: str, weight: Weight, dtype: str) -> Quantized:
    """*weight* under *scheme* through the protocol, as the engine calls it for one tile."""
    rows, cols = weight.shape
    data = bytearray(b"\xff" * weight.size)
    source = weight.tobytes()
    if scheme == "per_tensor":
        scale = np.float32(quantizer.tensor_scale(quantizer.amax(source, dtype))).reshape(1)
        quantizer.cast_tensor(source, dtype, float(scale[0]), data)
    elif scheme == "per_channel":
        scale = np.full((rows, 1), np.nan, dtype=np.float32)
        quantizer.quantize_rows(source, dtype, rows, data, memoryview(scale))
    else:
        scale = np.full((-(-rows // 128), -(-cols // 128)), np.nan, dtype=np.float32)
        quantizer.quantize_blocks(
            source, dtype, rows, cols, data, memoryview(scale), pow2=scheme == "block"
        )
    return Quantized(np.frombuffer(data, dtype=np.uint8).reshape(weight.shape), scale)


def same(found: Quantized, expected: Quantized) -> None:
    np.testing.assert_array_equal(found.scale.view(np.uint32), expected.scale.view(np.uint32))
    np.testing.assert_array_equal(found.data, expected.data)


def cast(quantizer: Quantizer, weight: Weight, dtype: str, scale: float) -> np.ndarray:
    data = np.full(weight.shape, 0xFF, dtype=np.uint8)
    quantizer.cast_tensor(memoryview(weight), dtype, scale, memoryview(data))
    return data


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_code_under_many_scales(quantizer: Quantizer, dtype: str) -> None:
    """All finite 16-bit codes give the reference's bytes under every scale, and never a NaN byte."""
    codes = finite_codes(dtype)
    for scale in SCALES:
        found = cast(quantizer, codes, dtype, scale)
        np.testing.assert_array_equal(found, reference.cast_tensor(codes, np.float32(scale)))
        assert not ((found & 0x7F) == 0x7F).any()


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.37, 3e-5, 2.0**60, float(np.float32(2.0**-127))])
def test_rounding_boundaries(quantizer: Quantizer, scale: float) -> None:
    """float32 values on and next to every boundary between two FP8 values are rounded to even."""
    scale = float(np.float32(scale))
    values = ties(scale)
    expected = reference.cast_tensor(values, np.float32(scale))
    np.testing.assert_array_equal(cast(quantizer, values, "F32", scale), expected)


def test_dense_float32(quantizer: Quantizer) -> None:
    """A million float32 values of all exponents, subnormals included, give the reference's bytes."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, size=1_000_000, dtype=np.uint32)
    values = bits[(bits & 0x7FFFFFFF) < 0x7F800000].view(np.float32)
    for scale in (1.0, 1e-37, 1e37):
        expected = reference.cast_tensor(values, np.float32(scale))
        np.testing.assert_array_equal(cast(quantizer, values, "F32", scale), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", sorted(reference.SCHEME_FUNCTIONS))
def test_edge_weights(quantizer: Quantizer, scheme: str, dtype: str) -> None:
    """Every scheme on every edge weight: the reference's bytes and scales, bit for bit."""
    for weight in edge_weights(dtype).values():
        same(run(quantizer, scheme, weight, dtype), reference.SCHEME_FUNCTIONS[scheme](weight))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("scheme", ["per_channel", "block", "block_free"])
def test_every_code_under_its_own_scale(quantizer: Quantizer, scheme: str, dtype: str) -> None:
    """All finite codes as rows of neighbours in magnitude, so that rows and blocks have all scales."""
    codes = finite_codes(dtype)
    order = np.argsort(np.abs(reference.to_float32(codes)), kind="stable")
    weight = codes[order][: codes.size // 128 * 128].reshape(-1, 128)
    same(run(quantizer, scheme, weight, dtype), reference.SCHEME_FUNCTIONS[scheme](weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (127, 129), (128, 128), (256, 4224), (3, 8200), (300, 31)]
)
def test_shapes(quantizer: Quantizer, shape: tuple[int, int], dtype: str) -> None:
    """Shapes around the block size and the vector width."""
    weight = normal(4, dtype, *shape)
    for scheme, define in reference.SCHEME_FUNCTIONS.items():
        same(run(quantizer, scheme, weight, dtype), define(weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(quantizer: Quantizer, dtype: str) -> None:
    """The largest magnitude is exact, of either sign, at either end, and 0 of nothing."""
    for weight in edge_weights(dtype).values():
        expected = float(np.abs(reference.to_float32(weight)).max())
        assert quantizer.amax(weight.tobytes(), dtype) == expected
        assert quantizer.amax(weight.ravel()[::-1].tobytes(), dtype) == expected
    assert quantizer.amax(b"", dtype) == 0.0


def test_tensor_scale(quantizer: Quantizer) -> None:
    """The scale of an amax is the reference's, for ordinary, zero and tiny ones."""
    for amax in (0.0, 2.0**-149, 1e-36, 1.5, 3.38e38):
        assert quantizer.tensor_scale(amax) == float(reference.tensor_scale(amax))


def test_shared_scale(quantizer: Quantizer) -> None:
    """A group's scale is that of its largest member; a smaller, foreign scale saturates."""
    small = normal(6, "BF16", 8, 40, deviation=0.01)
    scale = quantizer.tensor_scale(1.75)
    expected = reference.cast_tensor(small, np.float32(scale))
    np.testing.assert_array_equal(cast(quantizer, small, "BF16", scale), expected)
    big = from_float32(np.array([3e38, -3e38]), "F32")
    assert cast(quantizer, big, "F32", 1e-30).tolist() == [0x7E, 0xFE]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_cut_into_tiles(quantizer: Quantizer, dtype: str) -> None:
    """Row maxima of column tiles, then casts of the tiles, equal per_channel of the whole rows."""
    weight = normal(7, dtype, 33, 500)
    weight[5] = 0
    expected = reference.per_channel(weight)
    tiles = [np.ascontiguousarray(t) for t in np.array_split(weight, 3, axis=1)]
    amax = np.zeros(33, dtype=np.float32)
    for tile in tiles:
        quantizer.amax_rows(memoryview(tile), dtype, 33, memoryview(amax))
    np.testing.assert_array_equal(amax, np.abs(reference.to_float32(weight)).max(axis=1))
    columns, scale = [], np.zeros((33, 1), dtype=np.float32)
    for tile in tiles:
        data = np.zeros(tile.shape, dtype=np.uint8)
        quantizer.cast_rows(
            memoryview(tile), dtype, 33, memoryview(amax), memoryview(data), memoryview(scale)
        )
        columns.append(data)
    same(Quantized(np.concatenate(columns, axis=1), scale), expected)


def test_amax_rows_only_raises(quantizer: Quantizer) -> None:
    """A maximum that is already larger stays."""
    out = np.array([5.0, 0.5], dtype=np.float32)
    weight = np.array([[1.0, -2.0], [3.0, 0.0]], dtype=np.float32)
    quantizer.amax_rows(weight.tobytes(), "F32", 2, memoryview(out))
    assert out.tolist() == [5.0, 3.0]


def test_nothing_to_do(quantizer: Quantizer) -> None:
    """Empty tiles are fine; rows of no elements have the floor as scale."""
    quantizer.cast_tensor(b"", "BF16", 1.0, bytearray())
    quantizer.quantize_blocks(b"", "BF16", 0, 0, bytearray(), bytearray(), pow2=True)
    scale = np.zeros(2, dtype=np.float32)
    quantizer.quantize_rows(b"", "BF16", 2, bytearray(), memoryview(scale))
    assert (scale == reference.CHANNEL_SCALE_MIN).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite(quantizer: Quantizer, dtype: str, bad: float) -> None:
    """Every method names the flat index of the first NaN or Inf, wherever it is."""
    for at in (0, 200, 130 * 140 - 1):
        values = np.random.default_rng(at).standard_normal((130, 140)).astype(np.float32)
        values.reshape(-1)[at] = bad
        values.reshape(-1)[at + 1 :: 999] = np.nan
        weight = from_float32(values, dtype)
        source, data, floats = weight.tobytes(), bytearray(weight.size), bytearray(4 * 130)
        calls = (
            lambda s=source: quantizer.amax(s, dtype),
            lambda s=source, d=data: quantizer.cast_tensor(s, dtype, 1.0, d),
            lambda s=source: quantizer.amax_rows(s, dtype, 130, bytearray(4 * 130)),
            lambda s=source, d=data, f=floats: quantizer.cast_rows(
                s, dtype, 130, bytes(4 * 130), d, f
            ),
            lambda s=source, d=data, f=floats: quantizer.quantize_rows(s, dtype, 130, d, f),
            lambda s=source, d=data: quantizer.quantize_blocks(
                s, dtype, 130, 140, d, bytearray(16), pow2=False
            ),
        )
        for call in calls:
            with pytest.raises(NonFiniteTensorError) as caught:
                call()
            assert caught.value.facts["index"] == at


def test_nonfinite_far_out(quantizer: Quantizer) -> None:
    """The index is right in tiles of millions of elements too."""
    weight = np.zeros(3_000_000, dtype=np.uint16)
    weight[2_500_000:] = 0x7FC0
    with pytest.raises(NonFiniteTensorError) as caught:
        quantizer.amax(memoryview(weight), "BF16")
    assert caught.value.facts["index"] == 2_500_000


def test_sources_without_alignment(quantizer: Quantizer) -> None:
    """A source at an odd address, read-only or not, is read all the same."""
    weight = normal(8, "F32", 16, 64)
    shifted = b"\0" + weight.tobytes()
    data, scale = bytearray(weight.size), bytearray(4 * 16)
    quantizer.quantize_rows(memoryview(shifted)[1:], "F32", 16, data, scale)
    assert bytes(data) == reference.per_channel(weight).data.tobytes()


def test_threads(quantizer: Quantizer) -> None:
    """Eight threads at once get what one gets."""
    weights = [normal(seed, "BF16", 64 + seed, 300) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda w: run(quantizer, "per_channel", w, "BF16"), weights * 3))
    for one, weight in zip(found, weights * 3, strict=True):
        same(one, reference.per_channel(weight))


def test_warm(quantizer: Quantizer) -> None:
    """Warming is repeatable, for any set of source dtypes."""
    quantizer.warm()
    quantizer.warm(("F32", "BF16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_tensors_are_rounded(quantizer: Quantizer, dtype: str) -> None:
    """BF16 values are the reference's for every kind of bits, NaN and Inf too, at any address and in any size."""
    item = 4 if dtype == "F32" else 2
    raw = np.random.default_rng(5).bytes(item * 70_001)
    weight = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype])
    found = bytearray(2 * weight.size + 1)
    quantizer.cast_bf16(raw, dtype, memoryview(found)[1:])
    assert bytes(found[1:]) == reference.to_bf16(weight).astype("<u2").tobytes()
    with pytest.raises(ValueError, match="BF16 buffer must"):
        quantizer.cast_bf16(raw, dtype, bytearray(2 * weight.size - 2))
