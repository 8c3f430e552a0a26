"""Views that an engine's names and row order shape: bytes against numpy and torch, sealed, inline, verified, scanned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8fs.assembly import assemble, survey
from fp8fs.audit import check_plan, check_store
from fp8fs.core.recipe import Recipe
from fp8fs.engine import Engine, scan
from fp8fs.errors import NonFiniteTensorError
from fp8fs.quant import make_quantizer, quantizer_factory
from fp8fs.store.store import Store
from tests.builders import Tensor, h3_like, tensor, wan_like, write_json, write_sharded
from tests.oracle import Stored, quantized, read_file, scale_name

SCHEMES = ("per_tensor", "block", "block_free")
FOLDER = "transformer"


def no_poll() -> None:
    """Never gives up."""


def build(src: Path, root: Path, recipe: Recipe) -> tuple[dict[str, Stored], dict[str, str]]:
    """Every tensor of the built transformer and its index; the objects are verified, deeply too, on the way."""
    with assemble(src, recipe, root, device="cpu", workers=2) as made:
        made.engine.fill()
    with survey(src, recipe, root) as found:
        assert found.store is not None
        view: dict[str, Stored] = {}
        for number in found.plan.order[FOLDER]:
            path = found.store.object_path(found.plan.shards[number].object_id)
            view |= read_file(path)
        for deep in (False, True):
            audit = check_plan(found, deep=deep)
            assert (audit.damage, audit.missing) == ((), 0)
        assert check_store(found.store).damage == ()
        (index,) = (p for p in found.plan.entries if p.startswith(FOLDER) and "index" in p)
        return view, json.loads(found.plan.entries[index].content)["weight_map"]


def matrix(stored: Tensor) -> np.ndarray:
    """The raw elements, rows apart."""
    dtype, shape, data = stored
    return np.frombuffer(data, {"BF16": "<u2", "F32": "<u4"}[dtype]).reshape(shape)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts, one after the other."""
    rows = np.concatenate([matrix(part) for part in parts])
    return parts[0][0], rows.shape, rows.tobytes()


def in_bf16(stored: Tensor) -> Stored:
    """A kept tensor rounded by torch."""
    dtype, shape, data = stored
    values = Stored(dtype, shape, data).floats().to(torch.bfloat16)
    return Stored("BF16", shape, values.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_runtime_names_hold_joined_rows(tmp_path: Path, scheme: str, dtype: str) -> None:
    """Wan under runtime names: q, k and v are one matrix quantized as one, biases too, kept tensors are BF16."""
    source = wan_like(tmp_path / "src", hidden=144, inter=272, shards=3, dtype=dtype)[FOLDER]
    wanted: dict[str, Tensor] = dict(source)
    for block in range(2):
        base = f"blocks.{block}"
        for leaf in ("weight", "bias"):
            parts = [wanted.pop(f"{base}.attn1.{x}.{leaf}") for x in ("to_q", "to_k", "to_v")]
            wanted[f"{base}.attn1.to_qkv.{leaf}"] = joined(parts)
            for old, new in (
                ("attn1.to_out.0", "attn1.to_out"),
                ("attn2.to_out.0", "attn2.to_out"),
                ("ffn.net.0.proj", "ffn.net_0.proj"),
                ("ffn.net.2", "ffn.net_2"),
            ):
                wanted[f"{base}.{new}.{leaf}"] = wanted.pop(f"{base}.{old}.{leaf}")
    wanted["output_scale_shift_prepare.scale_shift_table"] = wanted.pop("scale_shift_table")
    expected: dict[str, Stored] = {}
    for name, stored in wanted.items():
        if name.startswith("blocks.") and name.endswith(".weight") and len(stored[1]) == 2:
            data, scale = quantized(Stored(*stored), scheme, [Stored(*stored)])
            expected[name] = Stored("F8_E4M3", stored[1], data)
            expected[scale_name(name, scheme)] = scale
        else:
            expected[name] = in_bf16(stored)

    recipe = Recipe(scheme=scheme, names="runtime")
    view, weight_map = build(tmp_path / "src", tmp_path / "store", recipe)
    assert view == expected
    assert set(weight_map) == set(expected)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("scheme", ["block", "block_free"])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 96), (3, 40), (2, 128), (1, 144), (5, 16)])
def test_h3_is_quantized_in_runtime_rows(
    tmp_path: Path, heads: int, head_dim: int, scheme: str, dtype: str
) -> None:
    """H3's qkv has the checkpoint's rows, each element scaled by its block of [Q; K; V], and scales in that order."""
    name, width = "blocks.0.attn.qkv_proj.weight", 3 * heads * head_dim
    head = tensor(1, dtype, width, 272, deviation=0.02)
    values = matrix(head).copy()  # another deviation in each row, so that a wrong block shows
    spread = Stored(*head).floats() * torch.exp(torch.linspace(-2, 2, width))[:, None]
    raw = spread.to(torch.bfloat16 if dtype == "BF16" else torch.float32)
    values[:] = raw.view(torch.uint16 if dtype == "BF16" else torch.uint32).numpy()
    write_sharded(
        tmp_path / "src" / FOLDER,
        {
            name: (dtype, head[1], values.tobytes()),
            "blocks.0.mlp.fc2.weight": tensor(2, dtype, 64, 64),
        },
        2,
        stem="diffusion_pytorch_model",
    )
    config = {
        "_class_name": "MiniMaxH3DiT",
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
    }
    write_json(tmp_path / "src" / FOLDER / "config.json", config)
    write_json(tmp_path / "src" / "model_index.json", {"_class_name": "TinyPipeline"})

    grouped = values.reshape(heads, 3, head_dim, 272)
    runtime = np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(width, 272)
    data, scale = quantized(Stored(dtype, runtime.shape, runtime.tobytes()), scheme, [])
    rows = np.frombuffer(data, np.uint8).reshape(3, heads, head_dim, 272)
    stored = np.ascontiguousarray(rows.transpose(1, 0, 2, 3)).tobytes()

    src = tmp_path / "src"
    recipe = Recipe(scheme=scheme, quantize=("*.qkv_proj",))  # whatever its size
    view, _ = build(src, tmp_path / "store", recipe)
    assert view[name] == Stored("F8_E4M3", (width, 272), stored)
    assert view[f"{name}_scale_inv"] == scale

    # Read piece by piece without a store, across the seams of heads and bands.
    with survey(src, recipe, None) as found:
        engine = Engine(
            found.plan, found.source, None, quantizer_factory("cpu"), workers=2, grain="tensor"
        )
        try:
            shard, unit = next(
                (i, u) for i, s in enumerate(found.plan.shards) for u in s.units if u.name == name
            )
            reader = engine.open(shard)
            got = b"".join(
                reader.pread(at, min(1009, unit.data.start + len(stored) - at), no_poll)
                for at in range(unit.data.start, unit.data.start + len(stored), 1009)
            )
            reader.close()
        finally:
            engine.close()
    assert got == stored


def test_large_reordered_weights(tmp_path: Path) -> None:
    """A qkv of many bands and of tiles that are cut across rows is put back right, and its digests can be read back."""
    heads, head_dim, cols = (
        3,
        100,
        66_000,
    )  # rows of more than one tile, heads that end within blocks
    name, width = "blocks.0.attn.qkv_proj.weight", 3 * heads * head_dim
    rng = np.random.default_rng(3)
    values = rng.integers(0x3A00, 0x3F00, (width, cols)).astype("<u2")
    src = tmp_path / "src"
    write_sharded(
        src / FOLDER,
        {name: ("BF16", values.shape, values.tobytes()), "x": tensor(1, "F32", 3)},
        2,
        stem="diffusion_pytorch_model",
    )
    config = {
        "_class_name": "MiniMaxH3DiT",
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
    }
    write_json(src / FOLDER / "config.json", config)
    write_json(src / "model_index.json", {"_class_name": "TinyPipeline"})
    runtime = values.reshape(heads, 3, head_dim, cols).transpose(1, 0, 2, 3).reshape(width, cols)
    data, scale = quantized(Stored("BF16", runtime.shape, runtime.tobytes()), "block", [])
    rows = np.frombuffer(data, np.uint8).reshape(3, heads, head_dim, cols)
    view, _ = build(src, tmp_path / "store", Recipe(scheme="block", quantize=("*.qkv_proj",)))
    assert view[name].data == np.ascontiguousarray(rows.transpose(1, 0, 2, 3)).tobytes()
    assert view[f"{name}_scale_inv"] == scale


def test_large_casts(tmp_path: Path) -> None:
    """A kept tensor of several bands is rounded like torch does, whatever it holds, and read back from memory too."""
    count = (9 << 20) // 4 + 5
    bits = np.random.default_rng(1).integers(0, 1 << 32, count, np.uint64).astype("<u4")
    bits[np.isnan(bits.view("<f4"))] = 0x7F80_0000  # torch's NaN depends on the processor
    src = tmp_path / "src"
    source = wan_like(src, hidden=64, shards=1)[FOLDER]
    source["patch_embedding.weight"] = ("F32", (count, 1, 1, 1, 1), bits.tobytes())
    write_sharded(src / FOLDER, source, 1, stem="diffusion_pytorch_model")
    recipe = Recipe(names="runtime")
    with assemble(src, recipe, tmp_path / "store", device="cpu", workers=2) as made:
        made.engine.fill()
        wanted = in_bf16(source["patch_embedding.weight"])
        path = made.engine.ensure_sealed(0, no_poll)
        assert read_file(path)["patch_embedding.weight"] == wanted
        assert check_plan(made.survey, deep=True).damage == ()
        assert check_store(Store.open(tmp_path / "store")).damage == ()


def test_a_bad_element_is_named_in_its_own_tensor(tmp_path: Path) -> None:
    """NaN in a reordered weight is reported at its place in the checkpoint, by the scan and by the engine."""
    src = tmp_path / "src"
    source = h3_like(src, layers=1, shards=1)[FOLDER]
    name = "blocks.0.attn.qkv_proj.weight"
    dtype, shape, data = source[name]
    bad = bytearray(data)
    bad[2 * (150 * 64 + 7) : 2 * (150 * 64 + 7) + 2] = b"\xff\x7f"
    write_sharded(
        src / FOLDER,
        {**source, name: (dtype, shape, bytes(bad))},
        1,
        stem="diffusion_pytorch_model",
    )
    recipe = Recipe(scheme="block")
    with survey(src, recipe, None) as found:
        (finding,) = scan(found.plan, found.source, make_quantizer("cpu"), workers=1).non_finite
        assert (finding.tensor, finding.index) == (name, 150 * 64 + 7)
        engine = Engine(
            found.plan, found.source, None, quantizer_factory("cpu"), workers=1, grain="tensor"
        )
        try:
            reader = engine.open(0)
            with pytest.raises(NonFiniteTensorError) as caught:
                reader.pread(0, found.plan.shards[0].size, no_poll)
            reader.close()
        finally:
            engine.close()
    assert caught.value.facts["index"] == 150 * 64 + 7
