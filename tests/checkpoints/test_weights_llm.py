"""Language and multimodal models: which weights become FP8, by published names; the others arrive bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

import fp8fs
from tests import oracle
from tests.checkpoints.kinds import FILE, Kind, attention, mlp, write_kind
from tests.checkpoints.looks import SCHEMES, check_files, look

EMBED = "model.embed_tokens.weight"


def _config(architecture: str, **more: object) -> dict[str, object]:
    return {"architectures": [architecture], "model_type": "tiny", **more}


def _decoder(base: str, count: int = 1) -> list[str]:
    """The linears of *count* layers."""
    return [
        name
        for layer in range(count)
        for name in attention(f"{base}.{layer}.self_attn") + mlp(f"{base}.{layer}.mlp")
    ]


_TEXT = {"num_hidden_layers": 1}

MTP = {
    "numbered on": Kind(
        _config("DeepseekV3ForCausalLM", **_TEXT, num_nextn_predict_layers=1),
        mlp("model.layers.0.mlp"),
        [
            *mlp("model.layers.1.mlp", "model.layers.1.mlp.experts.0"),
            "model.layers.1.eh_proj.weight",
            "model.layers.1.shared_head.head.weight",
            "model.layers.1.embed_tokens.weight",
        ],
    ),
    "numbered on, no count of them": Kind(
        _config("Step3p5ForCausalLM", **_TEXT),
        _decoder("model.layers"),
        attention("model.layers.1.self_attn", "model.layers.2.self_attn"),
    ),
    "numbered on, nested config": Kind(
        _config("KimiVLForConditionalGeneration", text_config=dict(_TEXT)),
        _decoder("language_model.model.layers"),
        [*mlp("language_model.model.layers.1.mlp"), "language_model.lm_head.weight"],
    ),
    "numbered on, llm_config": Kind(
        _config("TinyChatModel", llm_config={**_TEXT, "num_nextn_predict_layers": 1}),
        _decoder("language_model.model.layers"),
        mlp("language_model.model.layers.1.mlp"),
    ),
    "mtp.": Kind(
        _config("Qwen3NextForCausalLM", num_hidden_layers=2, mtp_num_hidden_layers=1),
        attention("model.layers.1.self_attn"),
        ["mtp.fc.weight", *attention("mtp.layers.0.self_attn"), *mlp("mtp.layers.0.mlp")],
    ),
    "model.mtp.": Kind(
        _config("LongcatFlashForCausalLM"),
        mlp("model.layers.0.mlps.0"),
        [
            "model.mtp.layers.0.eh_proj.weight",
            *mlp("model.mtp.layers.0.transformer_layer.mlp"),
        ],
    ),
    "mtp_layers": Kind(
        _config("MiMoForCausalLM", **_TEXT, num_nextn_predict_layers=1),
        _decoder("model.layers"),
        ["model.mtp_layers.0.input_proj.weight", *attention("model.mtp_layers.0.self_attn")],
    ),
    "mtp_block": Kind(
        _config("ErnieForCausalLM", **_TEXT),
        _decoder("model.layers"),
        [*mlp("model.mtp_block.0.mlp"), "model.mtp_linear_proj.0.weight"],
    ),
    "nextn": Kind(
        _config("TinyForCausalLM", **_TEXT),
        _decoder("model.layers"),
        [*mlp("model.nextn_layers.0.mlp"), "nextn.layers.0.fc.weight"],
    ),
    "num_mtp_modules": Kind(
        _config("MiniMaxM2ForCausalLM", **_TEXT, num_mtp_modules=2),
        attention("model.layers.0.self_attn"),
        attention("model.layers.1.self_attn", "model.layers.2.self_attn"),
    ),
}

_LANGUAGE = _decoder("language_model.model.layers")
_NEW = _decoder("model.language_model.layers")

TOWERS = {
    "visual": Kind(
        _config("Qwen2_5_VLForConditionalGeneration", vision_config={"depth": 1}),
        _decoder("model.layers"),
        [
            "visual.blocks.0.attn.qkv.weight",
            "visual.blocks.0.attn.proj.weight",
            *mlp("visual.blocks.0.mlp"),
            "visual.merger.mlp.0.weight",
            "lm_head.weight",
        ],
        {"visual.patch_embed.proj.weight": ("BF16", (32, 3, 2, 4, 4))},
    ),
    "model.visual": Kind(
        _config("Qwen3VLForConditionalGeneration", text_config={}),
        _NEW,
        [
            "model.visual.blocks.0.attn.qkv.weight",
            "model.visual.blocks.0.mlp.linear_fc1.weight",
            "model.visual.deepstack_merger_list.0.linear_fc1.weight",
            "model.visual.merger.linear_fc2.weight",
            "model.visual.pos_embed.weight",
        ],
    ),
    "vision_tower": Kind(
        _config("LlavaForConditionalGeneration", text_config={}),
        _LANGUAGE,
        [
            *attention("vision_tower.vision_model.encoder.layers.0.self_attn"),
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.linear_1.weight",
            "language_model.lm_head.weight",
        ],
    ),
    "vision_model": Kind(
        _config("Llama4ForConditionalGeneration", text_config={}),
        attention("language_model.model.layers.0.self_attn"),
        [
            *attention("vision_model.model.layers.0.self_attn"),
            "vision_model.vision_adapter.mlp.fc1.weight",
            "multi_modal_projector.linear_1.weight",
        ],
    ),
    "InternVL": Kind(
        _config("InternVLChatModel", llm_config={}),
        _LANGUAGE,
        ["vision_model.encoder.layers.0.attn.qkv.weight", "mlp1.1.weight", "mlp1.3.weight"],
    ),
    "MiniCPM-V": Kind(
        _config("MiniCPMV"),
        _decoder("llm.model.layers"),
        [
            "vpm.encoder.layers.0.mlp.fc1.weight",
            "apm.layers.0.fc1.weight",
            "resampler.kv_proj.weight",
            "resampler.layers.0.fc.weight",
            *mlp("tts.model.layers.0.mlp"),
        ],
    ),
    "DeepSeek-OCR": Kind(
        _config("DeepseekOCRForCausalLM", language_config={}),
        _decoder("model.layers"),
        [
            "model.sam_model.blocks.0.attn.qkv.weight",
            "model.vision_model.transformer.layers.0.mlp.fc1.weight",
            "model.projector.layers.weight",
        ],
    ),
    "Molmo": Kind(
        _config("MolmoForCausalLM"),
        ["model.transformer.blocks.0.att_proj.weight", "model.transformer.blocks.0.ff_out.weight"],
        [
            "model.vision_backbone.image_vit.transformer.resblocks.0.feed_forward.w1.weight",
            "model.vision_backbone.image_projector.w1.weight",
        ],
    ),
    "Idefics": Kind(
        _config("Idefics2ForConditionalGeneration", text_config={}),
        _decoder("model.text_model.layers"),
        [
            *attention("model.vision_model.encoder.layers.0.self_attn"),
            *attention("model.connector.perceiver_resampler.layers.0.self_attn"),
            *mlp("model.connector.modality_projection"),
        ],
    ),
    "audio": Kind(
        _config("Qwen3OmniMoeForConditionalGeneration", thinker_config={}),
        attention("thinker.model.layers.0.self_attn"),
        [
            "thinker.audio_tower.layers.0.fc1.weight",
            "thinker.visual.blocks.0.attn.qkv.weight",
            "code2wav.pre_transformer.layers.0.mlp.up_proj.weight",
            "audio_projector.layers.0.linear_1.weight",
        ],
    ),
}

_SCORES = "e_score_correction_bias"

GATES = {
    "mlp.gate": Kind(
        _config("DeepseekV3ForCausalLM", num_hidden_layers=8),
        mlp("model.layers.3.mlp.experts.0", "model.layers.3.mlp.shared_experts"),
        ["model.layers.3.mlp.gate.weight", EMBED, "lm_head.weight"],
        {f"model.layers.3.mlp.gate.{_SCORES}": ("F32", (32,))},
    ),
    "the same of an unknown class": Kind(
        _config("TinyMoeForCausalLM"),
        mlp("model.layers.0.mlp.experts.0"),
        ["model.layers.0.mlp.gate.weight", EMBED],
        {
            f"model.layers.0.mlp.gate.{_SCORES}": ("F32", (32,)),
            "model.layers.0.mlp.experts.0.down_proj.bias": ("F32", (32,)),
            f"model.layers.0.mlp.moe_statics.{_SCORES}": ("F32", (1, 32)),
        },
    ),
    "shared_expert_gate": Kind(
        _config("Qwen2MoeForCausalLM"),
        mlp("model.layers.0.mlp.shared_expert"),
        ["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight"],
    ),
    "Qwen3 MoE, whose engine would take them too": Kind(
        _config("Qwen3MoeForCausalLM"),
        mlp("model.layers.0.mlp.experts.0"),
        ["model.layers.0.mlp.gate.weight"],
    ),
    "linear attention, the same": Kind(
        _config("Qwen3NextForCausalLM"),
        [f"model.layers.0.linear_attn.{leaf}.weight" for leaf in ("in_proj_qkvz", "out_proj")],
        ["model.layers.0.linear_attn.in_proj_ba.weight", "model.layers.0.mlp.gate.weight"],
        {"model.layers.0.linear_attn.conv1d.weight": ("BF16", (64, 1, 4))},
    ),
    "block_sparse_moe": Kind(
        _config("MixtralForCausalLM"),
        mlp("model.layers.0.block_sparse_moe.experts.0", leaves=("w1", "w2", "w3")),
        ["model.layers.0.block_sparse_moe.gate.weight"],
    ),
    "block_sparse_moe with scores": Kind(
        _config("MiniMaxM2ForCausalLM"),
        mlp("model.layers.0.block_sparse_moe.experts.0", leaves=("w1", "w2", "w3")),
        ["model.layers.0.block_sparse_moe.gate.weight"],
        {f"model.layers.0.block_sparse_moe.{_SCORES}": ("F32", (32,))},
    ),
    "router": Kind(
        _config("GraniteMoeForCausalLM"),
        attention("model.layers.0.self_attn"),
        [
            "model.layers.0.block_sparse_moe.router.layer.weight",
            "model.layers.1.mlp.router.weight",
            "model.layers.2.mlp.router.classifier.weight",
            "model.layers.3.feed_forward.router.weight",
        ],
        {"model.layers.2.mlp.router.e_score_correction_bias": ("F32", (32,))},
    ),
    "gates by other names": Kind(
        _config("HunYuanMoEV1ForCausalLM"),
        mlp("model.layers.0.mlp.shared_mlp"),
        [
            "model.layers.0.mlp.gate.wg.weight",
            "layers.1.ffn.gate.weight",
            "model.layers.2.moe.gate.weight",
            "model.layers.3.mlp.vision_experts_gate.weight",
            "model.layers.4.mlp.gating.weight",
        ],
    ),
    "DBRX": Kind(
        _config("DbrxForCausalLM"),
        ["transformer.blocks.0.norm_attn_norm.attn.Wqkv.weight"],
        ["transformer.blocks.0.ffn.router.layer.weight", "transformer.wte.weight"],
    ),
}

HEADS = {
    "a head of its own": Kind(
        _config("LlamaForCausalLM", tie_word_embeddings=False),
        _decoder("model.layers"),
        [EMBED, "lm_head.weight"],
    ),
    "tied": Kind(
        _config("LlamaForCausalLM", tie_word_embeddings=True), _decoder("model.layers"), [EMBED]
    ),
    "tied, and there all the same": Kind(
        _config("Qwen2ForCausalLM", tie_word_embeddings=True),
        _decoder("model.layers"),
        [EMBED, "lm_head.weight"],
    ),
    "other names": Kind(
        _config("GPTTinyForCausalLM"),
        ["transformer.h.0.mlp.dense_h_to_4h.weight"],
        ["transformer.word_embeddings.weight", "transformer.wpe.weight", "score.weight"],
    ),
}

OTHERS = {
    "Conv1D beside a linear": Kind(
        _config("GPT2LMHeadModel"),
        ["transformer.h.0.extra.dense.weight"],
        [
            *("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight"),
            *("transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"),
        ],
    ),
    "a number that is no layer": Kind(
        _config("TinyForCausalLM", **_TEXT), [f"model.layers.{'9' * 5000}.fc.weight"], [EMBED]
    ),
    "linears by Conv1D's names": Kind(
        _config("Starcoder2ForCausalLM"),
        [*attention("model.layers.0.self_attn"), "model.layers.0.mlp.c_fc.weight"],
        [EMBED],
    ),
}

ALL = {**MTP, **TOWERS, **GATES, **HEADS, **OTHERS}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ALL)
def test_the_right_weights_become_fp8(tmp_path: Path, kind: str, scheme: str) -> None:
    """Linears of the language model are the oracle's FP8; everything else is there, bit for bit, and nothing more."""
    made = ALL[kind]
    tensors = write_kind(tmp_path / "src", made)
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    groups = {**oracle.sibling_groups(made.quantized), **_pairs(made.quantized)}
    check_files(tree, {FILE: tensors}, made.quantized, scheme, groups)


def _pairs(names: Sequence[str]) -> dict[str, list[str]]:
    """w1 and w3 of an expert, gate and up of any other feed-forward module: one scale."""
    pairs = {}
    for one, other in ((".w1.", ".w3."), (".gate_proj.", ".up_proj.")):
        for name in names:
            if one in name and (partner := name.replace(one, other)) in names:
                pairs[name] = pairs[partner] = [name, partner]
    return pairs


@pytest.mark.parametrize("kind", ALL)
def test_every_kept_weight_is_on_the_ignore_list(tmp_path: Path, kind: str) -> None:
    """The config lists each kept weight's module and none that is FP8."""
    made = ALL[kind]
    write_kind(tmp_path / "src", made)
    ignored = set(look(tmp_path / "src").json("config.json")["quantization_config"]["ignore"])
    modules = {name.removesuffix(".weight") for name in made.kept}
    assert modules <= ignored
    assert not taken_for_ignored(made.quantized, ignored)


def taken_for_ignored(quantized: Iterable[str], ignored: Iterable[str]) -> list[str]:
    """FP8 modules that a reader would leave alone: by name, by a name's end (transformers) or by a pattern."""
    return [
        module
        for module in (name.removesuffix(".weight") for name in quantized)
        for name in ignored
        if module.endswith(name)
        or (name.startswith("re:") and re.match(name.removeprefix("re:"), module))
    ]


def test_a_spelling_that_means_another_module_is_left_out(tmp_path: Path) -> None:
    """Of two stacks in one model, one kept and one not, no other name of the kept one means the one that is not."""
    kind = Kind(
        _config("TinyOmniModel", talker_config={}, text_config={}),
        [*mlp("talker.model.layers.0.mlp"), *attention("visual_talker.layers.0.self_attn")],
        [*mlp("model.layers.0.mlp"), "visual.layers.0.fc.weight"],
    )
    write_kind(tmp_path / "src", kind)
    seen = look(tmp_path / "src", keep=("model.layers.*",))
    ignored = seen.json("config.json")["quantization_config"]["ignore"]
    assert seen.quantized == set(kind.quantized)
    assert "model.layers.0.mlp.up_proj" in ignored
    assert "re:(.*\\.)?visual\\..*" in ignored
    assert "language_model.model.layers.0.mlp.up_proj" in ignored
    others = set(ignored) - {name.removesuffix(".weight") for name in kind.kept}
    assert not taken_for_ignored(kind.quantized, others)
