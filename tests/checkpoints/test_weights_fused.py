"""Weights that are fused on disk: q, k and v or gate and up in one tensor, which then has one scale of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8fs
from tests import oracle
from tests.builders import h3_like
from tests.checkpoints.kinds import FILE, Kind, write_kind
from tests.checkpoints.looks import SCHEMES, check_files, look


def llm(architecture: str, base: str, *leaves: str) -> Kind:
    """A model with these linears in its first layer."""
    config = {"architectures": [architecture], "model_type": "tiny"}
    return Kind(config, [f"{base}.0.{leaf}.weight" for leaf in leaves], ["lm_head.weight"])


PHI3 = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
KINDS = {
    "Phi-3": llm("Phi3ForCausalLM", "model.layers", *PHI3),
    "the same of an unknown class": llm("NewForCausalLM", "model.layers", *PHI3),
    "Falcon": llm(
        "FalconForCausalLM",
        "transformer.h",
        *("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h"),
    ),
    "MPT": llm("MPTForCausalLM", "transformer.blocks", "attn.Wqkv", "attn.out_proj", "ffn.up_proj"),
    "InternLM": llm(
        "InternLM2ForCausalLM", "model.layers", "attention.wqkv", "attention.wo", "feed_forward.w2"
    ),
    "DeepSeek, by its engine's name": llm(
        "DeepseekV3ForCausalLM",
        "model.layers",
        *("self_attn.fused_qkv_a_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", KINDS)
def test_a_fused_weight_is_a_weight_like_any_other(tmp_path: Path, name: str, scheme: str) -> None:
    """Its rows are quantized together, by the oracle, under the name that it has."""
    kind = KINDS[name]
    tensors = write_kind(tmp_path / "src", kind)
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    check_files(tree, {FILE: tensors}, kind.quantized, scheme)


@pytest.mark.parametrize("name", KINDS)
def test_it_has_one_scale(tmp_path: Path, name: str) -> None:
    """per_tensor: the scale's shape is [1], however many layers are fused in the weight, and it is shared with none."""
    kind = KINDS[name]
    write_kind(tmp_path / "src", kind)
    seen = look(tmp_path / "src", scheme="per_tensor")
    header = seen.header(FILE)
    for weight in kind.quantized:
        assert header[oracle.scale_name(weight, "per_tensor")]["shape"] == [1]
    assert seen.plan.groups == ()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_minimax_h3_is_fused_on_disk(tmp_path: Path, scheme: str) -> None:
    """qkv_proj and fc1 hold several layers: one scale [1] each, and block scales of qkv in the engine's row order."""
    tensors = h3_like(tmp_path / "src", shards=1)["transformer"]
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    source = oracle.read_folder(tmp_path / "src" / "transformer")
    found = oracle.read_folder(tree / "transformer")
    leaves = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    chosen = {name for name in tensors if name.removesuffix(".weight").endswith(leaves)}
    heads = {name: 2 for name in chosen if "qkv_proj" in name}
    assert found == oracle.expected(source, chosen, scheme, {}, heads=heads)
    if scheme == "per_tensor":
        scales = [found[oracle.scale_name(name, scheme)] for name in chosen]
        assert {scale.shape for scale in scales} == {(1,)}
