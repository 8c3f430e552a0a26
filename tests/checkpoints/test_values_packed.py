"""Sources that are quantized already: refused with the reason, or passed through beside a component that is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fp8fs.errors import SourceInvalidError
from tests import oracle
from tests.acceptance.harness import Fp8fs, digests, mount_points, objects
from tests.builders import Tensor, llama_like, tensor, wan_like, write_files
from tests.checkpoints.looks import LLM, SCHEMES, look, stored

MODULE = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.0.mlp.experts"


def raw(dtype: str, *shape: int, bits: int = 8) -> Tensor:
    """A tensor of any dtype."""
    size = bits
    for length in shape:
        size *= length
    return dtype, shape, bytes(i % 251 for i in range(size // 8))


PACKED: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {
            f"{MODULE}.qweight": raw("I32", 16, 64, bits=32),
            f"{MODULE}.qzeros": raw("I32", 1, 8, bits=32),
            f"{MODULE}.scales": tensor(1, "F16", 1, 64),
            f"{MODULE}.g_idx": raw("I32", 128, bits=32),
        },
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
        {
            f"{MODULE}.qweight": raw("I32", 128, 8, bits=32),
            f"{MODULE}.qzeros": raw("I32", 1, 8, bits=32),
            f"{MODULE}.scales": tensor(1, "F16", 1, 64),
        },
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            f"{MODULE}.weight": raw("U8", 2048, 1),
            f"{MODULE}.weight.absmax": raw("U8", 64),
            f"{MODULE}.weight.quant_map": tensor(1, "F32", 16),
            f"{MODULE}.weight.quant_state.bitsandbytes__nf4": raw("U8", 90),
        },
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {
            f"{EXPERTS}.gate_up_proj_blocks": raw("U8", 2, 64, 2, 16),
            f"{EXPERTS}.gate_up_proj_scales": raw("U8", 2, 64, 2),
            f"{EXPERTS}.gate_up_proj_bias": tensor(1, "BF16", 2, 64),
        },
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {
            f"{MODULE}.weight_packed": raw("I32", 64, 8, bits=32),
            f"{MODULE}.weight_scale": tensor(1, "BF16", 64, 1),
            f"{MODULE}.weight_shape": raw("I64", 2, bits=64),
        },
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {
            f"{MODULE}.weight": raw("F8_E4M3", 128, 128),
            f"{MODULE}.weight_scale_inv": tensor(1, "F32", 1, 1),
        },
    ),
}
"""Method -> what config.json says of it, and its tensors."""

DTYPES: dict[str, Tensor] = {
    "F8_E4M3": raw("F8_E4M3", 64, 64),
    "F8_E5M2": raw("F8_E5M2", 64, 64),
    "F8_E8M0": raw("F8_E8M0", 64, 64),
    "F8_E4M3FNUZ": raw("F8_E4M3FNUZ", 64, 64),
    "F8_E5M2FNUZ": raw("F8_E5M2FNUZ", 64, 64),
    "F4": raw("F4", 64, 64, bits=4),
    "F6_E2M3": raw("F6_E2M3", 64, 64, bits=6),
    "F6_E3M2": raw("F6_E3M2", 64, 64, bits=6),
}


def checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any] | None = None
) -> Path:
    """A model with those tensors beside a linear that could become FP8."""
    config = {**LLM, **({} if quantization is None else {"quantization_config": quantization})}
    other = {"model.layers.1.mlp.down_proj.weight": tensor(2, "BF16", 64, 64)}
    write_files(folder, {"model.safetensors": {**tensors, **other}}, config)
    return folder


def refusal(fp8fs: Fp8fs, place: Path, src: Path) -> str:
    """The one sentence with which plan, build and mount refuse; nothing is mounted or made."""
    said = {
        json.loads(fp8fs.run(*command, "--json", code=10).stdout)["error"]["what"]
        for command in (("plan", src), ("build", src), ("mount", src, place / "view"))
    }
    assert mount_points(place) == []
    assert objects(fp8fs.store) == {}
    (sentence,) = said
    return str(sentence)


@pytest.mark.parametrize("method", ["gptq", "mxfp4"])
def test_what_a_config_says_is_quantized(fp8fs: Fp8fs, place: Path, method: str) -> None:
    """A model whose config names a quantization is refused, by its method, whatever else it holds."""
    quantization, tensors = PACKED[method]
    said = refusal(fp8fs, place, checkpoint(place / "src", tensors, quantization))
    assert "already quantized" in said
    assert f'quant_method "{method}"' in said


@pytest.mark.parametrize("method", PACKED)
def test_what_only_tensors_say(tmp_path: Path, method: str) -> None:
    """Without a word in the config (GPTQ once had a file of its own) a packed tensor is the reason, by name."""
    _, tensors = PACKED[method]
    with pytest.raises(SourceInvalidError, match="already quantized") as refused:
        look(checkpoint(tmp_path / "src", tensors))
    said = refused.value.what
    assert any(f'tensor "{name}" in model.safetensors is ' in said for name in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_dtype_says(tmp_path: Path, dtype: str) -> None:
    """One tensor in a dtype that only quantizers write is enough."""
    with pytest.raises(SourceInvalidError, match=f"already quantized .* is {dtype}"):
        look(checkpoint(tmp_path / "src", {f"{MODULE}.weight": DTYPES[dtype]}))


def test_integers_alone_are_no_quantization(tmp_path: Path) -> None:
    """Buffers of integers, under any other name, do not stop the weights beside them."""
    buffers = {
        f"{MODULE}.positions": raw("I32", 64, 64, bits=32),
        f"{MODULE}.num_blocks": raw("U8", 64),
        f"{MODULE}.weight": raw("U8", 64, 64),
    }
    seen = look(checkpoint(tmp_path / "src", buffers))
    assert seen.quantized == {"model.layers.1.mlp.down_proj.weight"}


@pytest.mark.fuse
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "per_channel"])
@pytest.mark.parametrize("method", ["bitsandbytes", "fp8"])
def test_one_component_is_quantized_already(
    fp8fs: Fp8fs, place: Path, mount: Callable[..., Path], method: str, scheme: str
) -> None:
    """A pipeline's second transformer that is packed passes through byte for byte, with the reason; the first is FP8."""
    src = place / "src"
    first = wan_like(src, layers=1, shards=1)["transformer"]
    quantization, packed = PACKED[method]
    config = {"_class_name": "WanTransformer3DModel", "quantization_config": quantization}
    name = "diffusion_pytorch_model.safetensors"
    write_files(src / "transformer_2", {name: packed}, config)
    planned = fp8fs.json("plan", src, "--scheme", scheme)
    assert any(
        "transformer_2: passed through, already quantized" in warning and f'"{method}"' in warning
        for warning in planned["warnings"]
    )
    rows = [row for row in planned["tensors"] if row["component"] == "transformer_2"]
    assert all(row["dtype_in"] == row["dtype_out"] for row in rows)
    assert all(f'quant_method "{method}"' in row["reason"] for row in rows)
    view = mount(src, "--scheme", scheme)
    assert digests(view / "transformer_2") == digests(src / "transformer_2")
    found = oracle.read_file(view / "transformer" / name)
    chosen = {weight for weight, tensor_ in found.items() if tensor_.dtype == "F8_E4M3"}
    groups = oracle.sibling_groups(chosen)
    assert len(chosen) >= 10
    assert found == oracle.expected(stored(first), chosen, scheme, groups)


@pytest.mark.fuse
def test_a_view_is_refused_before_its_shards_are_opened(fp8fs: Fp8fs, place: Path) -> None:
    """A mounted view as SRC, cold or warm, or a folder of it, is quantized already: said at once, nothing is made."""
    src, view = place / "src", place / "view"
    llama_like(src)
    fp8fs.mount(src, view)
    for _ in ("cold", "warm"):
        before = objects(fp8fs.store)
        for command in (("plan", view), ("build", view), ("mount", view, place / "again")):
            error = json.loads(fp8fs.run(*command, "--json", code=10).stdout)["error"]
            assert error["what"] == f"{view}: already quantized: it is a view that fp8fs serves"
            assert error["hint"] == f"give its source, {src}"
        assert objects(fp8fs.store) == before
        for shard in view.glob("*.safetensors"):
            shard.read_bytes()
    fp8fs.unmount(view)


@pytest.mark.fuse
def test_a_copy_of_a_view_is_refused_by_its_config(fp8fs: Fp8fs, place: Path) -> None:
    """A finished tree, or a copy of one, is refused as any other FP8 checkpoint is."""
    src = place / "src"
    llama_like(src)
    tree = fp8fs.build(src, "--to", place / "copy")
    for quantized in (tree, place / "copy"):
        error = json.loads(fp8fs.run("plan", quantized, "--json", code=10).stdout)["error"]
        assert (
            'already quantized (config.json has a quantization_config (quant_method "'
            in error["what"]
        )
