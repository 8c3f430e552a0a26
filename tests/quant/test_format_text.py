"""docs/FORMAT.md, "From a weight to FP8": numpy written from that text alone gives every byte that the kernels give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fp8fs.building import build_tree
from fp8fs.core.quantizer import Quantizer
from fp8fs.core.recipe import Recipe
from tests.builders import llama_like
from tests.oracle import Stored, read_folder, scale_name, sibling_groups
from tests.quant.weights import edge_weights, from_float32, normal, ties

SCHEMES = ("per_tensor", "per_channel", "block_free", "block")
DTYPES = ("BF16", "F16", "F32")
TEXT = " ".join((Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text().split())
F32 = np.float32


# --- the text, in numpy; nothing of fp8fs, and no constant that the text does not give


def magnitude(byte: int) -> float:
    e, m = byte >> 3 & 15, byte & 7
    return m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)


VALUES = np.array([magnitude(byte) for byte in range(0x7F)])


def fp8(x: np.ndarray) -> np.ndarray:
    bare = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    step = np.ldexp(1.0, np.maximum(np.frexp(bare)[1] - 1, -6) - 3)
    nearest = np.rint(bare / step) * step  # ties to even; exact, since all is far inside of float64
    byte = np.searchsorted(VALUES, nearest)
    assert (VALUES[byte] == nearest).all()
    return (byte + 128 * np.signbit(x)).astype(np.uint8)


def bits(code: int) -> np.float32:
    return np.array([code], dtype=np.uint32).view(F32)[0]


def power_of_two_from(x: np.float32) -> np.float32:
    power = F32(2.0**-126)
    while power < x:
        power = power * F32(2)
    return power


def scale_of(scheme: str, amax: np.float32) -> np.float32:
    if scheme == "per_tensor":
        return F32(1) if amax == 0 else max(amax / F32(448), bits(0x00200001))
    if scheme == "per_channel":
        return max(amax / F32(448), bits(0x36924925))
    free = max(amax, bits(0x38D1B717)) / F32(448)
    return free if scheme == "block_free" else power_of_two_from(free)


def written(scheme: str, w: np.ndarray, group: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scales of the float32 matrix *w*; *group*: all that share its scale under per_tensor, *w* too."""
    high, wide = {"per_tensor": w.shape, "per_channel": (1, w.shape[1])}.get(scheme, (128, 128))
    data = np.zeros(w.shape, dtype=np.uint8)
    scales = []
    for top in range(0, w.shape[0], high):
        for left in range(0, w.shape[1], wide):
            part = np.s_[top : top + high, left : left + wide]
            over = group if scheme == "per_tensor" else [w[part]]
            s = scale_of(scheme, max(F32(np.abs(values).max()) for values in over))
            data[part] = fp8(w[part] / s if scheme == "per_channel" else w[part] * (F32(1) / s))
            scales.append(s)
    return data, np.array(scales, dtype=F32)


# --- the kernels


def made(quantizer: Quantizer, scheme: str, weight: np.ndarray, dtype: str) -> list[bytes]:
    rows, cols = weight.shape
    data = bytearray(weight.size)
    src = weight.tobytes()
    if scheme == "per_tensor":
        s = quantizer.tensor_scale(quantizer.amax(src, dtype))
        quantizer.cast_tensor(src, dtype, s, data)
        return [bytes(data), F32(s).tobytes()]
    if scheme == "per_channel":
        scale = bytearray(4 * rows)
        quantizer.quantize_rows(src, dtype, rows, data, scale)
    else:
        scale = bytearray(4 * -(-rows // 128) * -(-cols // 128))
        pow2 = scheme == "block"
        quantizer.quantize_blocks(src, dtype, rows, cols, data, scale, pow2=pow2)
    return [bytes(data), bytes(scale)]


def value(weight: np.ndarray) -> np.ndarray:
    """BF16 is the upper half of a float32; F16 and F32 are themselves."""
    if weight.dtype == np.uint16:
        return (weight.astype(np.uint32) << np.uint32(16)).view(F32)
    return weight.astype(F32)


def check(quantizer: Quantizer, scheme: str, weight: np.ndarray, dtype: str) -> None:
    data, scale = written(scheme, value(weight), [value(weight)])
    assert made(quantizer, scheme, weight, dtype) == [data.tobytes(), scale.tobytes()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_weights(quantizer: Quantizer, dtype: str, scheme: str) -> None:
    """Zeros of both signs, subnormals, the largest values, ties, odd shapes: every byte and scale is as the text says."""
    for weight in edge_weights(dtype).values():
        check(quantizer, scheme, weight, dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_weights(quantizer: Quantizer, dtype: str, scheme: str) -> None:
    """Weights as networks have them at scales from the floors to the top, values on and beside what rounding turns at,
    and finite bit patterns of any kind."""
    rng = np.random.default_rng(7)
    for deviation in (1e-9, 1e-6, 1e-4, 2e-3, 0.02, 1.0, 300.0):
        rows, cols = rng.integers(1, 300, size=2)
        check(quantizer, scheme, normal(int(rows), dtype, rows, cols, deviation), dtype)
    for amax in rng.uniform(0.01, 500, size=20).astype(F32):
        near = ties(float(scale_of(scheme, amax)))
        rows = np.resize(near[np.abs(near) <= amax], (3, 1000))
        rows[:, 0] = amax
        check(quantizer, scheme, from_float32(rows, dtype), dtype)
    width, infinite = (
        (32, 0x7F80_0000) if dtype == "F32" else (16, 0x7F80 if dtype == "BF16" else 0x7C00)
    )
    for top in (infinite, infinite // 2, infinite // 4, infinite // 100):
        codes = (
            rng.integers(0, top, size=(131, 259)) | rng.integers(0, 2, size=(131, 259)) << width - 1
        )
        weight = codes.astype(f"u{width // 8}")
        check(
            quantizer, scheme, weight if dtype == "BF16" else weight.view(f"f{width // 8}"), dtype
        )


def around(number: np.float32) -> list[np.float32]:
    return [np.nextafter(number, F32(0)), number, np.nextafter(number, F32(np.inf))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scales_at_floors_and_powers_of_two(quantizer: Quantizer, scheme: str) -> None:
    """Largest magnitudes on, just above and just below what makes a floor act or a power of two be left."""
    smallest = [F32(2.0**-149), F32(2.0**-126)]
    turns = [bits(0x00200001) * F32(448), bits(0x36924925) * F32(448), bits(0x38D1B717)]
    turns += [F32(448 * 2.0**e) for e in (-130, -22, -21, -3, 0, 5, 100)]
    for amax in (*smallest, *(near for turn in turns for near in around(turn))):
        weight = np.array([[amax, -amax, amax / F32(3), F32(-0.0), amax * F32(0.7)]], dtype=F32)
        check(quantizer, scheme, weight, "F32")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_and_signs(quantizer: Quantizer, scheme: str) -> None:
    """A weight of zeros has the scale that the text names; what rounds to zero, and zero, keeps its sign."""
    codes, scale = made(quantizer, scheme, np.array([[0.0, -0.0]], dtype=F32), "F32")
    assert codes == b"\x00\x80"
    named = {"per_tensor": 0x3F800000, "per_channel": 0x36924925}
    named |= {"block_free": 0x346FACAD, "block": 0x34800000}
    assert scale == bits(named[scheme]).tobytes()
    codes, _ = made(quantizer, scheme, np.array([[448.0, 1e-6, -1e-6]], dtype=F32), "F32")
    assert codes == b"\x7e\x00\x80"


def test_products_and_quotients_differ(quantizer: Quantizer) -> None:
    """Where the text multiplies by the reciprocal, a division gives other bytes, and the other way round."""
    weight = np.arange(0x3000, 0x3F85, dtype=np.uint16)[None]  # BF16, to 1.03125
    w = value(weight)
    tensor, channel = (scale_of(scheme, w.max()) for scheme in ("per_tensor", "per_channel"))
    assert tensor == channel
    product, quotient = fp8(w * (F32(1) / tensor)), fp8(w / tensor)
    assert (product != quotient).any()
    assert made(quantizer, "per_tensor", weight, "BF16")[0] == product.tobytes()
    assert made(quantizer, "block_free", weight[:, -128:], "BF16")[0] == product[:, -128:].tobytes()
    assert made(quantizer, "per_channel", weight, "BF16")[0] == quotient.tobytes()


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_kept_tensors_shown_in_bf16(quantizer: Quantizer, dtype: str) -> None:
    """Nearest, ties to even; too large becomes infinite; a NaN becomes 0x7FC0."""
    odd = [1.0, -1.0, 1.00390625, 1.01171875, -0.0, 3.4e38, np.inf, -np.inf, np.nan, -np.nan, 6e-8]
    rng = np.random.default_rng(3)
    values = np.concatenate([np.array(odd), rng.standard_normal(1000)])
    with np.errstate(over="ignore"):
        weight = values.astype({"F16": np.float16, "F32": F32}[dtype])
    target = bytearray(2 * weight.size)
    quantizer.cast_bf16(weight.tobytes(), dtype, target)
    wide = np.abs(weight.astype(np.float64))
    finite = np.where(np.isfinite(wide), wide, 1.0)
    step = np.ldexp(1.0, np.maximum(np.frexp(finite)[1] - 1, -126) - 7)
    nearest = np.where(np.isinf(wide), np.inf, np.rint(finite / step) * step)
    with np.errstate(over="ignore"):
        upper = np.where(nearest >= 2.0**128, np.inf, nearest).astype(F32).view(np.uint32) >> 16
    wanted = np.where(np.isnan(wide), 0x7FC0, upper + 0x8000 * np.signbit(weight))
    assert bytes(target) == wanted.astype(np.uint16).tobytes()


# --- whole views


def as_matrix(stored: Stored) -> np.ndarray:
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": F32}[stored.dtype]
    return value(np.frombuffer(stored.data, kind)).reshape(stored.shape)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("zeros", ["none", "one of a group", "a group"])
def test_views(tmp_path: Path, scheme: str, zeros: str) -> None:
    """Every FP8 weight of a built model and its scale; under per_tensor those that are fused have one, over shards."""
    src = tmp_path / "src"
    llama_like(src, layers=2, hidden=192, inter=320, vocab=32, shards=3, dtype="F16")
    _clear(
        src,
        {"none": (), "one of a group": ("0.mlp.gate",), "a group": ("0.mlp.gate", "0.mlp.up")}[
            zeros
        ],
    )
    view = read_folder(
        build_tree(src, Recipe(scheme=scheme), tmp_path / "s", device="cpu", workers=1)
    )
    source = read_folder(src)
    names = [name for name, stored in view.items() if stored.dtype == "F8_E4M3"]
    groups = sibling_groups(names)
    assert len(names) == 14
    for name in names:
        w = as_matrix(source[name])
        data, scale = written(scheme, w, [as_matrix(source[member]) for member in groups[name]])
        assert view[name] == Stored("F8_E4M3", w.shape, data.tobytes())
        assert view[scale_name(name, scheme)].data == scale.tobytes()
    gate, up = (f"model.layers.0.mlp.{leaf}_proj.weight_scale" for leaf in ("gate", "up"))
    if scheme == "per_tensor":
        assert view[gate] == view[up]
        assert (view[gate].data == F32(1).tobytes()) == (zeros == "a group")


def _clear(src: Path, parts: tuple[str, ...]) -> None:
    """Zeros for the weights whose names hold one of *parts*."""
    for path in src.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        length = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if any(part in name for part in parts):
                begin, end = (8 + length + at for at in entry["data_offsets"])
                content[begin:end] = bytes(end - begin)
        path.write_bytes(content)


# --- the page


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("0x00200001", "2^-128 + 2^-149"),
        ("0x36924925", "1 / 229376"),
        ("0x38D1B717", "1e-4"),
        ("0x346FACAD", "1e-4 / 448"),
        ("0x34800000", "2^-22"),
    ],
)
def test_the_text_gives_the_constants(code: str, number: str) -> None:
    """The bit patterns that this file uses are on the page, beside the numbers that they are."""
    assert f"{number} (`{code}`)" in TEXT
    exact: Callable[[], np.float32] = {
        "2^-128 + 2^-149": lambda: F32(2.0**-128 + 2.0**-149),
        "1 / 229376": lambda: F32(1) / F32(229376),
        "1e-4": lambda: F32(1e-4),
        "1e-4 / 448": lambda: F32(1e-4) / F32(448),
        "2^-22": lambda: F32(2.0**-22),
    }[number]
    assert exact() == bits(int(code, 16))
