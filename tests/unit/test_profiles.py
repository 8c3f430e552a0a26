"""Profiles: which linears become FP8, which share a scale, how they are ignored and renamed."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from fp8fs.core import profiles
from fp8fs.core.profiles import Verdict, find, known_classes
from fp8fs.core.profiles.quality import exclusion

KINDS = ("diffusers", "transformers")
CLASSES = [(kind, name) for kind in KINDS for name in known_classes(kind)]


def profile(name: str, kind: str = "transformers") -> profiles.Profile:
    found = find(name, kind)
    assert found is not None
    return found


def test_fused_siblings_share_a_group() -> None:
    """q, k and v of a layer name the same group, in row order, and another layer names another."""
    llama = profile("LlamaForCausalLM")
    names = [f"model.layers.7.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]
    assert {llama.decide(name).group for name in names} == {"model.layers.7.self_attn.qkv_proj"}
    fusion = llama.fusion_of(names[1])
    assert fusion is not None
    assert list(fusion.siblings) == names
    assert (
        llama.decide("model.layers.8.self_attn.q_proj").group == "model.layers.8.self_attn.qkv_proj"
    )


def test_what_is_alone_has_no_group() -> None:
    """A linear that feeds a runtime module by itself shares its scale with nobody, also when it is fused on disk."""
    assert profile("LlamaForCausalLM").decide("model.layers.0.self_attn.o_proj") == Verdict(
        quantize=True, reason="vllm 0.32.0 builds it FP8", group=""
    )
    assert profile("Phi3ForCausalLM").decide("model.layers.0.self_attn.qkv_proj").group == ""


@pytest.mark.parametrize(
    ("kind", "name", "module", "reason"),
    [
        ("transformers", "LlamaForCausalLM", "lm_head", "builds it unquantized"),
        ("transformers", "LlamaForCausalLM", "model.layers.0.input_layernorm", "no linear"),
        ("transformers", "LlamaForCausalLM", "model.layers.x.mlp.down_proj", "no linear"),
        ("transformers", "Qwen3MoeForCausalLM", "model.layers.1.mlp.gate", "expert router"),
        (
            "transformers",
            "Qwen3VLForConditionalGeneration",
            "model.visual.blocks.0.attn.qkv",
            "vision tower",
        ),
        ("diffusers", "MiniMaxH3DiT", "blocks.2.adaln_proj.linear", "adaptive norm"),
        (
            "diffusers",
            "FluxTransformer2DModel",
            "transformer_blocks.0.attn.to_q",
            "builds it unquantized",
        ),
    ],
)
def test_kept_with_a_reason(kind: str, name: str, module: str, reason: str) -> None:
    """What stays unquantized says whether the engine, the quality table or ignorance decided."""
    verdict = profile(name, kind).decide(module)
    assert not verdict.quantize
    assert verdict.group == ""
    assert reason in verdict.reason


def test_unknown_class_has_no_profile() -> None:
    """A class or kind without data is None, so that the generic rules decide."""
    assert find("NoSuchModel", "transformers") is None
    assert find("LlamaForCausalLM", "raw") is None
    assert find("LlamaForCausalLM", "diffusers") is None


def test_classes_that_quantize_nothing() -> None:
    """The thirteen diffusion classes whose linears take no quantization say so."""
    nothing = [
        name for name in known_classes("diffusers") if profile(name, "diffusers").quantizes_nothing
    ]
    assert len(nothing) == 13
    assert "SD3Transformer2DModel" in nothing


def test_experts_pair_up_and_stay_together() -> None:
    """Gate and up of one expert share a scale; the experts of a layer are FP8 all or none."""
    fusion = profile("MixtralForCausalLM").fusion_of("model.layers.1.block_sparse_moe.experts.3.w3")
    assert fusion is not None
    assert fusion.siblings == tuple(
        f"model.layers.1.block_sparse_moe.experts.3.{w}" for w in ("w1", "w3")
    )
    assert fusion.together == "model.layers.1.block_sparse_moe.experts"


def test_ignore_list_uses_the_engines_spelling() -> None:
    """A kept module is listed under its own name and under whatever name the engine asks for."""
    wan = profile("WanTransformer3DModel", "diffusers")
    kept = [f"blocks.4.attn1.{leaf}" for leaf in ("to_q", "to_k", "to_v")]
    assert wan.ignored(kept) == sorted([*kept, "blocks.4.attn1.to_qkv"])
    qwen = profile("QwenImageTransformer2DModel", "diffusers")
    assert qwen.ignored(["transformer_blocks.0.attn.to_out"]) == [
        "transformer_blocks.0.attn.to_out",
        "transformer_blocks.0.attn.to_out.0",
    ]
    experts = profile("MiniMaxM2ForCausalLM").ignored(
        ["model.layers.0.block_sparse_moe.experts.2.w1"]
    )
    assert "model.layers.0.mlp.experts" in experts
    fused_on_disk = profile("GptOssForCausalLM").ignored(
        ["model.layers.0.mlp.experts.gate_up_proj"]
    )
    assert "model.layers.0.mlp.experts" in fused_on_disk


def test_layout_follows_the_checkpoint() -> None:
    """One class, two layouts: with or without a query LoRA, the fusion group is the one that the checkpoint has."""
    deepseek = profile("DeepseekV2ForCausalLM")
    key = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    with_lora = deepseek.for_checkpoint([key, "model.layers.0.self_attn.q_a_proj"])
    assert with_lora.decide(key).group == "model.layers.0.self_attn.fused_qkv_a_proj"
    assert deepseek.for_checkpoint([key, "model.layers.0.self_attn.q_proj"]).decide(key).group == ""


def test_runtime_names_of_wan() -> None:
    """Weights and biases of q, k, v become parts of one runtime tensor; the renamed ones are renamed."""
    wan = profile("WanTransformer3DModel", "diffusers")
    assert wan.names_complete
    assert wan.runtime_tensor("blocks.3.attn1.to_v.bias") == (
        "blocks.3.attn1.to_qkv.bias",
        2,
        3,
        "BF16",
    )
    assert wan.runtime_tensor("blocks.3.attn2.to_v.weight").name == "blocks.3.attn2.to_v.weight"
    assert (
        wan.runtime_tensor("blocks.3.ffn.net.0.proj.weight").name
        == "blocks.3.ffn.net_0.proj.weight"
    )
    assert (
        wan.runtime_tensor("scale_shift_table").name
        == "output_scale_shift_prepare.scale_shift_table"
    )
    assert wan.runtime_tensor("blocks.3.scale_shift_table").name == "blocks.3.scale_shift_table"


def test_runtime_dtypes_and_row_order_of_h3() -> None:
    """MiniMax-H3 keeps some projections in F32 at run time and stores q, k, v rows head by head."""
    h3 = profile("MiniMaxH3DiT", "diffusers")
    assert h3.runtime_tensor("video_patch_proj.weight").dtype == "F32"
    assert h3.runtime_tensor("blocks.0.mlp.fc1.weight").dtype == "BF16"
    fusion = h3.fusion_of("blocks.0.attn.qkv_proj")
    assert fusion is not None
    assert fusion.grouped_rows is not None
    assert fusion.grouped_rows.heads == "num_attention_heads"


@pytest.mark.parametrize(("kind", "name"), CLASSES)
def test_data_is_consistent(kind: str, name: str) -> None:
    """In every profile a name has one answer, siblings agree with each other, and every index can be filled."""
    found = profile(name, kind)
    document = profiles.parse_document(_content(kind))
    for record in document.profiles:
        if name not in record.matches:
            continue
        verdicts: dict[str, bool] = {}
        for linear in record.linears:
            for pattern in linear.members:
                assert verdicts.setdefault(pattern, linear.fp8) == linear.fp8
            needed = [*linear.ignore_names, linear.runtime, linear.together]
            counts = {pattern.count("{i}") for pattern in linear.members}
            assert len(counts) <= 1
            assert all(pattern.count("{i}") <= max(counts, default=99) for pattern in needed)
            answers = {found.decide(pattern.replace("{i}", "1")) for pattern in linear.members}
            assert len({answer.quantize for answer in answers}) <= 1


def test_files_refuse_what_they_do_not_define() -> None:
    """A field that this version does not know is an error, not something to ignore."""
    with pytest.raises(msgspec.ValidationError):
        profiles.parse_document(
            b'{"engine": "x", "version": "1", "kind": "diffusers", "profiles": [], "more": 1}'
        )


@pytest.mark.parametrize(
    ("kind", "module", "kept"),
    [
        ("transformers", "model.layers.0.mlp.gate_proj", False),
        ("transformers", "model.layers.0.mlp.gate", True),
        ("transformers", "mtp.layers.0.mlp.up_proj", True),
        ("diffusers", "transformer_blocks.0.attn.to_gate", False),
        ("diffusers", "transformer_blocks.0.ff.gate", False),
        ("diffusers", "transformer_blocks.0.norm1.linear", True),
        ("diffusers", "single_transformer_blocks.0.proj_out", False),
        ("diffusers", "proj_out", True),
        ("diffusers", "x_embedder", True),
        ("diffusers", "time_text_embed.timestep_embedder.linear_1", True),
        ("diffusers", "context_refiner.0.attention.to_q", False),
        ("diffusers", "transformer_blocks.0.img_mod.1", True),
    ],
)
def test_quality_table(kind: str, module: str, kept: bool) -> None:
    """The exclusions hit routers, modulation, embedders and heads, and not the matrices that resemble them by name."""
    assert bool(exclusion(kind, module)) is kept


def _content(kind: str) -> bytes:
    from importlib import resources

    return resources.files("fp8fs.core.profiles").joinpath(profiles.FILES[kind]).read_bytes()


def test_every_class_is_listed_once_per_engine() -> None:
    """No class is both derived and listed as not derived."""
    for kind in KINDS:
        document = profiles.parse_document(_content(kind))
        derived = set(itertools.chain.from_iterable(record.matches for record in document.profiles))
        assert not derived & document.not_derived.keys()
