"""The reference against torch: the same bytes as the engines' formulas wherever those are finite."""

from __future__ import annotations

import numpy as np
import pytest

from fp8fs.quant import reference
from tests.quant.weights import DTYPES, edge_weights, finite_codes, normal, ties

torch = pytest.importorskip("torch", reason="the oracle is written in torch")
from tests.quant import oracle  # noqa: E402


def same(found: reference.Quantized, expected: tuple[np.ndarray, np.ndarray]) -> None:
    data, scale = expected
    np.testing.assert_array_equal(found.scale.view(np.uint32), scale.view(np.uint32))
    np.testing.assert_array_equal(found.data, data)


def test_decode_equals_torch() -> None:
    """All 256 bytes mean what torch reads in them."""
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(reference.decode(codes), oracle.fp8_values(codes))


def test_encode_equals_torch() -> None:
    """Boundaries, their neighbours and two million values spread over all exponents round as in torch."""
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-14, 8.8, size=2_000_000)).astype(np.float32)
    spread = np.concatenate([ties(1.0), spread[spread <= 448], -spread[spread <= 448]])
    np.testing.assert_array_equal(
        reference.encode(spread), oracle.fp8_bytes(torch.from_numpy(spread))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_weights(dtype: str) -> None:
    """Every scheme equals its formula on every edge weight; per_tensor where its formula is finite."""
    compared = 0
    for name, weight in edge_weights(dtype).items():
        tensor = oracle.tensor_of(weight)
        same(reference.per_channel(weight), oracle.per_channel(tensor))
        same(reference.block_free(weight), oracle.per_block(tensor, pow2=False))
        same(reference.block(weight), oracle.per_block(tensor, pow2=True))
        scale = oracle.per_tensor(tensor)[1]
        if scale[0] > 2.0**-128:
            same(reference.per_tensor(weight), oracle.per_tensor(tensor))
            compared += 1
        else:
            assert name in {
                "zeros",
                "negative zeros",
                "smallest subnormals",
                "scale without reciprocal",
            }
    assert compared >= 9


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_code(dtype: str) -> None:
    """All finite 16-bit codes, cut into matrices by magnitude, come out as the formulas say."""
    codes = finite_codes(dtype)
    order = np.argsort(np.abs(reference.to_float32(codes)), kind="stable")
    for part in np.array_split(codes[order], 64):
        weight = part.reshape(-1, 2) if part.size % 2 == 0 else part[1:].reshape(-1, 2)
        tensor = oracle.tensor_of(weight)
        same(reference.per_channel(weight), oracle.per_channel(tensor))
        same(reference.block_free(weight), oracle.per_block(tensor, pow2=False))
        same(reference.block(weight), oracle.per_block(tensor, pow2=True))
        if reference.per_tensor(weight).scale[0] > reference.TENSOR_SCALE_MIN:
            same(reference.per_tensor(weight), oracle.per_tensor(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_plain_weights(dtype: str, seed: int) -> None:
    """Weights as networks have them, of every size of spread."""
    weight = normal(seed, dtype, 300 + seed, 500 + seed, deviation=10.0**-seed)
    tensor = oracle.tensor_of(weight)
    same(reference.per_tensor(weight), oracle.per_tensor(tensor))
    same(reference.per_channel(weight), oracle.per_channel(tensor))
    same(reference.block_free(weight), oracle.per_block(tensor, pow2=False))
    same(reference.block(weight), oracle.per_block(tensor, pow2=True))
