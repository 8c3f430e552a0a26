"""Weights that are hard to quantize, as the arrays that the reference takes."""

from __future__ import annotations

import itertools

import numpy as np

from fp8fs.quant.reference import Weight

DTYPES = ("BF16", "F16", "F32")


def from_float32(values: np.ndarray, dtype: str) -> Weight:
    """*values* in *dtype*; BF16 by truncation, which is as good a choice of values as any."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16) if dtype == "F16" else values


def normal(seed: int, dtype: str, rows: int, cols: int, deviation: float = 0.02) -> Weight:
    """A weight as networks have them."""
    values = np.random.default_rng(seed).standard_normal((rows, cols)) * deviation
    return from_float32(values, dtype)


def finite_codes(dtype: str) -> Weight:
    """Every finite value of a 16-bit dtype, once."""
    codes = np.arange(0x10000, dtype=np.uint16)
    infinity = 0x7F80 if dtype == "BF16" else 0x7C00
    codes = codes[(codes & 0x7FFF) < infinity]
    return codes if dtype == "BF16" else codes.view(np.float16)


def ties(scale: float) -> np.ndarray:
    """float32 values around every e4m3fn rounding boundary under *scale*: exactly on it, and next to it."""
    steps = [i * 2.0**-9 for i in range(8)]
    steps += [(1 + i / 8) * 2.0**e for e in range(-6, 9) for i in range(8)]
    steps = [s for s in steps if s <= 448]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    exact = (np.array(steps + middles, dtype=np.float64) * scale).astype(np.float32)
    near = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))]
    return np.concatenate([*near, *(-n for n in near)])


def edge_weights(dtype: str) -> dict[str, Weight]:
    """Named matrices: odd shapes, zeros, signed zeros, subnormals, huge and tiny values, one spike."""
    largest = {"BF16": 3.38e38, "F16": 65504.0, "F32": 3.4028235e38}[dtype]
    smallest = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}[dtype]
    plain = normal(1, "F32", 130, 257)
    rng = np.random.default_rng(2)
    spike = plain * np.float32(1e-3)
    spike[129, 256] = 30.0
    sparse = plain.copy()
    sparse[3:70] = 0.0
    sparse[100, :] = -0.0
    tiny = smallest * rng.integers(-3, 4, size=(5, 300)).astype(np.float64)
    spread = np.exp2(rng.uniform(-14, 14, size=(140, 150))) * rng.choice([-1, 1], size=(140, 150))
    huge = np.linspace(-1, 1, 129 * 3).reshape(129, 3).astype(np.float32) * np.float32(largest)
    named = {
        "plain": plain,
        "one row": plain[:1],
        "one column": plain[:, :1],
        "one block": plain[:128, :128],
        "spike": spike,
        "sparse": sparse,
        "zeros": np.zeros((129, 128), dtype=np.float32),
        "negative zeros": np.full((2, 3), -0.0, dtype=np.float32),
        "smallest subnormals": tiny.astype(np.float32),
        "wide range": spread.astype(np.float32),
        "largest values": huge,
        "ties": np.resize(ties(0.0625), (7, 431)),
    }
    if dtype != "F16":
        named["scale without reciprocal"] = plain * np.float32(2.0**-122)
        named["subnormal scale"] = plain * np.float32(2.0**-115)
    return {name: from_float32(values, dtype) for name, values in named.items()}
