"""What becomes of each model class: FP8 or kept, groups, ignore lists, runtime names. The expectations are written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from fp8fs.core.dtypes import FP8
from fp8fs.core.plan import Plan
from fp8fs.core.profiles import Profile, Verdict
from fp8fs.errors import SourceInvalidError, UsageError
from tests.planning import Shapes, checkpoint, linears, make_plan, profile, unit_of

ONE = "model.safetensors"


def model(class_name: str, shapes: Shapes, *, kind: str = "transformers", **recipe: object) -> Plan:
    """The plan of a model of that class with these tensors in one shard."""
    config: dict[str, object] = (
        {"architectures": [class_name]} if kind == "transformers" else {"_class_name": class_name}
    )
    facts = recipe.pop("config", {})
    assert isinstance(facts, dict)
    return make_plan(checkpoint({ONE: shapes}, {"config.json": {**config, **facts}}), **recipe)  # type: ignore[arg-type]


def fp8(planned: Plan) -> set[str]:
    """Modules that become FP8."""
    return {r.name.removesuffix(".weight") for r in planned.rows if r.dtype_out == FP8}


def groups(planned: Plan) -> dict[str, str]:
    """Module -> its group, for the quantized ones that are in one."""
    return {
        r.name.removesuffix(".weight"): r.group
        for r in planned.rows
        if r.group and r.dtype_out == FP8
    }


def ignored(planned: Plan) -> set[str]:
    """The ignore list in config.json, whatever it is called."""
    settings = json.loads(planned.entries["config.json"].content)["quantization_config"]
    lists = [settings[k] for k in ("ignore", "ignored_layers") if k in settings]
    lists += [settings["modules_to_not_convert"]] if not lists else []
    assert len(lists) == 1
    assert len(lists[0]) == len(set(lists[0]))
    return set(lists[0])


def with_or_without_head(*modules: str) -> set[str]:
    """The names of modules of the text model in the whole model, and in the one that AutoModel loads."""
    return {*modules, *(module.removeprefix("model.") for module in modules)}


def attention(base: str, *more: str) -> tuple[str, ...]:
    return tuple(f"{base}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj", *more))


EMBEDDING: Shapes = {"model.embed_tokens.weight": ("BF16", (64, 64))}
NORM: Shapes = {"model.layers.0.input_layernorm.weight": ("BF16", (64,))}
ATTENTION = attention("model.layers.0.self_attn")
QKV = dict.fromkeys(ATTENTION[:3], "model.layers.0.self_attn.qkv_proj")
DENSE = ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_dense_models(name: str) -> None:
    """Every linear of a layer is FP8, q/k/v and gate/up are groups, embedding and head are ignored."""
    shapes = {**EMBEDDING, **NORM, **linears(*ATTENTION, *DENSE, DOWN, "lm_head")}
    planned = model(name, shapes)
    assert fp8(planned) == {*ATTENTION, *DENSE, DOWN}
    assert groups(planned) == {**QKV, **dict.fromkeys(DENSE, "model.layers.0.mlp.gate_up_proj")}
    assert ignored(planned) == {"model.embed_tokens", "lm_head"}
    assert planned.warnings == ()
    assert {r.reason for r in planned.rows if r.dtype_out == FP8} == {"vllm 0.32.0 builds it FP8"}


def experts(base: str, *leaves: str) -> list[str]:
    return [f"{base}.{i}.{leaf}" for i in (0, 11) for leaf in leaves]


def test_qwen3_moe() -> None:
    """Experts are FP8, gate and up of each a group; the router is kept and ignored, for vLLM would build it FP8."""
    moe = "model.layers.3.mlp"
    names = experts(f"{moe}.experts", "gate_proj", "up_proj", "down_proj")
    planned = model("Qwen3MoeForCausalLM", {**EMBEDDING, **linears(*names, f"{moe}.gate")})
    assert fp8(planned) == set(names)
    assert groups(planned) == {
        f"{moe}.experts.{i}.{leaf}": f"{moe}.experts.{i}.w13"
        for i in (0, 11)
        for leaf in ("gate_proj", "up_proj")
    }
    assert ignored(planned) == {
        "model.embed_tokens",
        "lm_head",
        *with_or_without_head(f"{moe}.gate"),
    }
    (router,) = (r for r in planned.rows if r.name == f"{moe}.gate.weight")
    assert router.reason == "kept for quality: expert router"


def test_mixtral() -> None:
    """Mixtral's w1 and w3 are a group, its router is kept."""
    moe = "model.layers.0.block_sparse_moe"
    names = experts(f"{moe}.experts", "w1", "w2", "w3")
    planned = model("MixtralForCausalLM", linears(*names, f"{moe}.gate", *ATTENTION))
    assert fp8(planned) == {*names, *ATTENTION}
    assert groups(planned)[f"{moe}.experts.11.w3"] == f"{moe}.experts.11.w13"
    assert f"{moe}.experts.11.w2" not in groups(planned)
    assert ignored(planned) == {"lm_head", *with_or_without_head(f"{moe}.gate")}


def test_experts_of_a_layer_stay_together() -> None:
    """One expert that must be kept keeps all of its layer, which the engine makes one tensor; other layers stay FP8."""
    names = [
        f"model.layers.{layer}.mlp.experts.{i}.{leaf}"
        for layer in (0, 1)
        for i in range(3)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    bad = "model.layers.0.mlp.experts.1.down_proj"
    planned = model("Qwen3MoeForCausalLM", linears(*names), recorded_keep=(f"{bad}.weight",))
    assert fp8(planned) == {name for name in names if ".layers.1." in name}
    assert ignored(planned) == {"lm_head", *(name for name in names if ".layers.0." in name)}
    reasons = {r.name: r.reason for r in planned.rows}
    assert reasons["model.layers.0.mlp.experts.2.up_proj.weight"] == (
        f"group partner of {bad}.weight: holds NaN or Inf"
    )


def test_phi3_is_fused_on_disk() -> None:
    """Phi-3's fused matrices are one tensor each, so there is nothing to share."""
    names = (
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        DOWN,
    )
    planned = model("Phi3ForCausalLM", linears(*names), scheme="per_tensor")
    assert fp8(planned) == set(names)
    assert groups(planned) == {}
    assert planned.groups == ()


def test_deepseek() -> None:
    """The low-rank projections that vLLM fuses share a scale though their rows differ; the MTP layer stays as it is."""
    attn = "model.layers.1.self_attn"
    names = [f"{attn}.{x}" for x in ("q_b_proj", "kv_b_proj", "o_proj")]
    fused = [f"{attn}.q_a_proj", f"{attn}.kv_a_proj_with_mqa"]
    mtp = "model.layers.2.self_attn.o_proj"
    planned = model(
        "DeepseekV3ForCausalLM",
        {
            **linears(*names, mtp, "model.layers.1.mlp.gate"),
            **linears(fused[0], shape=(48, 64)),
            **linears(fused[1], shape=(80, 64)),
            "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (8,)),
        },
        config={"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        scheme="per_tensor",
    )
    assert fp8(planned) == {*names, *fused}
    assert [g.name for g in planned.groups] == [f"{attn}.fused_qkv_a_proj"]
    assert ignored(planned) == {"lm_head", *with_or_without_head(mtp, "model.layers.1.mlp.gate")}


def test_qwen3_vl() -> None:
    """The language model under its checkpoint names is FP8; vision is kept, and ignored though vLLM would build it FP8."""
    text = attention("model.language_model.layers.0.self_attn")
    vision = ("model.visual.blocks.0.attn.qkv", "model.visual.merger.linear_fc1")
    planned = model(
        "Qwen3VLForConditionalGeneration",
        {**linears(*text, *vision, "lm_head", "model.language_model.embed_tokens")},
    )
    assert fp8(planned) == set(text)
    assert set(groups(planned)) == set(text[:3])
    assert len(set(groups(planned).values())) == 1
    assert ignored(planned) == {
        *with_or_without_head(*vision),
        "re:(.*\\.)?visual\\..*",
        "lm_head",
        "model.language_model.embed_tokens",
    }


# -- diffusion transformers --------------------------------------------------------------------------


def wan_block(base: str) -> dict[str, list[str]]:
    """Modules of a Wan block by what happens to them."""
    return {
        "qkv": [f"{base}.attn1.{x}" for x in ("to_q", "to_k", "to_v")],
        "alone": [f"{base}.attn2.{x}" for x in ("to_q", "to_k", "to_v")],
        "renamed": [
            f"{base}.{x}"
            for x in ("attn1.to_out.0", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2")
        ],
    }


WAN = wan_block("blocks.12")
WAN_OUTSIDE = ("condition_embedder.time_proj", "proj_out")


def biases(*names: str, dtype: str = "BF16") -> Shapes:
    return {f"{name}.bias": (dtype, (32,)) for name in names}


def test_wan() -> None:
    """Every linear of a block is FP8; self attention's q/k/v are a group, cross attention's are not."""
    names = [name for part in WAN.values() for name in part]
    planned = model("WanTransformer3DModel", linears(*names, *WAN_OUTSIDE), kind="diffusers")
    assert fp8(planned) == set(names)
    assert groups(planned) == dict.fromkeys(WAN["qkv"], "blocks.12.attn1.to_qkv")
    assert ignored(planned) == set(WAN_OUTSIDE)
    assert planned.warnings == ()


def test_what_is_kept_is_ignored_in_the_engines_spelling() -> None:
    """vLLM-Omni asks for fused and renamed modules by their own names, so a kept part brings those along."""
    planned = model(
        "WanTransformer3DModel",
        linears(*(name for part in WAN.values() for name in part)),
        kind="diffusers",
        keep=("*.attn1.*", "*.ffn.net.2"),
    )
    assert fp8(planned) == {*WAN["alone"], "blocks.12.attn2.to_out.0", "blocks.12.ffn.net.0.proj"}
    assert ignored(planned) == {
        *WAN["qkv"],
        "blocks.12.attn1.to_qkv",
        "blocks.12.attn1.to_out.0",
        "blocks.12.attn1.to_out",
        "blocks.12.ffn.net.2",
        "blocks.12.ffn.net_2",
    }


def test_h3() -> None:
    """Attention and MLPs are FP8; the adaln projections are kept, and ignored, for the engine would build them FP8."""
    names = ["blocks.0.attn.qkv_proj", "blocks.0.mlp.fc1", "token_refiner.blocks.0.mlp.fc2"]
    kept = ["blocks.0.adaln_proj.linear", "final_layer.adaln_proj.linear", "video_patch_proj"]
    planned = model("MiniMaxH3DiT", linears(*names, *kept), kind="diffusers")
    assert fp8(planned) == set(names)
    assert ignored(planned) == set(kept)


def test_flux_is_fp8_in_its_single_blocks_only() -> None:
    """A class that the engine quantizes in part is quantized in that part."""
    single = [f"single_transformer_blocks.0.{x}" for x in ("proj_mlp", "proj_out")]
    double = [f"transformer_blocks.0.attn.{x}" for x in ("to_q", "to_k", "to_v")]
    planned = model("FluxTransformer2DModel", linears(*single, *double), kind="diffusers")
    assert fp8(planned) == set(single)
    assert {*double, "transformer_blocks.0.attn.to_qkv"} == ignored(planned)


WITHOUT_FP8 = (
    "AnimaTransformer3DModel",
    "CausalWanModel",
    "HiDreamImageTransformer2DModel",
    "LingBotVideoTransformer3DModel",
    "LongCatImageTransformer2DModel",
    "LongCatVideoAvatarTransformer3DModel",
    "Magi2PreviewTransformer",
    "OvisImageTransformer2DModel",
    "SD3Transformer2DModel",
    "SDXLUNet2DConditionModel",
    "SanaVideoTransformer3DModel",
    "StableAudioDiTModel",
    "WanS2VTransformer3DModel",
)


@pytest.mark.parametrize("name", WITHOUT_FP8)
def test_a_class_without_fp8_is_served_unchanged(name: str) -> None:
    """Where the engine quantizes nothing the component stays as it is, config too, and one line says so."""
    planned = model(name, linears("transformer_blocks.0.attn.to_q"), kind="diffusers")
    assert fp8(planned) == set()
    assert planned.entries["config.json"].kind == "source"
    assert planned.entries[ONE].kind == "source"
    assert (planned.fp8_bytes, planned.weight_bytes) == (0, 32 * 64 * 2)
    assert planned.warnings == (
        f".: vllm-omni 0.30.0 quantizes nothing in {name}: served unchanged",
        "nothing is quantized: the view equals the source",
    )


def test_an_unknown_class_gets_the_generic_rule() -> None:
    """A class that no profile knows is quantized by the generic rule, with one warning, fused names ignored too."""
    qkv = [f"blocks.0.attn.{x}" for x in ("to_q", "to_k", "to_v")]
    planned = model(
        "NewTransformer3DModel", linears(*qkv, "blocks.0.fc"), kind="diffusers", keep=("*.to_k",)
    )
    assert fp8(planned) == {"blocks.0.fc"}
    assert ignored(planned) == {*qkv, "blocks.0.attn.to_qkv"}
    (warning,) = planned.warnings
    assert "no engine's profile of NewTransformer3DModel" in warning


def test_unknown_modules_of_a_known_class_are_kept_and_listed() -> None:
    """What the engine's release does not know may be built by a later one: it stays as it is, named in the ignore list."""
    planned = model("LlamaForCausalLM", linears(*ATTENTION, "model.layers.0.extra.fc"))
    assert fp8(planned) == set(ATTENTION)
    assert ignored(planned) == {"lm_head", *with_or_without_head("model.layers.0.extra.fc")}


def test_of_several_architectures_the_first_known_one_counts() -> None:
    """An architecture without a profile in first place does not hide one that has one."""
    planned = model(
        "MyLlamaForCausalLM",
        linears(*ATTENTION),
        config={"architectures": ["MyLlamaForCausalLM", "LlamaForCausalLM", "Phi3ForCausalLM"]},
    )
    assert fp8(planned) == set(ATTENTION)


def test_the_user_wins_over_the_profile() -> None:
    """--quantize forces what the engine builds unquantized, with a warning that counts it; --keep holds back."""
    gate = "model.layers.0.block_sparse_moe.gate"
    planned = model(
        "MixtralForCausalLM",
        linears(*ATTENTION, gate),
        quantize=("*.gate",),
        keep=("*.o_proj",),
    )
    assert fp8(planned) == {*ATTENTION[:3], gate}
    (warning,) = planned.warnings
    assert "FP8 because of --quantize: 1 weight (" in warning
    assert f"{gate}.weight" in warning


def test_one_spelling_for_all_keeps_all() -> None:
    """Where an engine can only be told to leave several linears alone at once, one kept keeps them all."""
    found = profile(
        {"runtime": "layers.{i}.a", "fp8": True, "ignore": ["layers.{i}"]},
        {"runtime": "layers.{i}.b", "fp8": True, "ignore": ["layers.{i}"]},
    )
    source = checkpoint({ONE: linears("layers.0.a", "layers.0.b", "layers.1.a")})
    planned = make_plan(source, profile=found, keep=("layers.0.a",))
    assert fp8(planned) == {"layers.1.a"}


def test_numbers_that_are_names_decide() -> None:
    """``net.0`` and ``net.1`` are different modules of one kind of name, ``layers.0`` and ``layers.1`` are not."""
    found = profile({"runtime": "layers.{i}.net.0", "fp8": True})
    names = [f"layers.{i}.net.{j}" for i in (0, 1, 10) for j in (0, 1, 10)]
    planned = make_plan(checkpoint({ONE: linears(*names)}), profile=found)
    assert fp8(planned) == {"layers.0.net.0", "layers.1.net.0", "layers.10.net.0"}


def test_a_profile_is_asked_once_for_each_kind_of_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning costs do not multiply with layers and experts: names that differ in numbers alone are one question."""
    asked: list[str] = []
    decide = Profile.decide

    def count(self: Profile, module: str) -> Verdict:
        asked.append(module)
        return decide(self, module)

    monkeypatch.setattr(Profile, "decide", count)
    names = [
        f"model.layers.{layer}.mlp.experts.{i}.{leaf}"
        for layer in range(12)
        for i in range(120)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    planned = model("Qwen3MoeForCausalLM", linears(*names))
    assert fp8(planned) == set(names)
    assert len(set(groups(planned).values())) == 12 * 120
    assert len(asked) == 3


def test_odd_names_do_not_confuse() -> None:
    """Percent signs and marks in names are letters like others."""
    found = profile(
        {
            "runtime": "l.{i}.c",
            "fp8": True,
            "sources": ["l.{i}.a", "l.{i}.b"],
            "ignore": ["l.{i}.c"],
        }
    )
    names = ["l.7.a", "l.7.b", "%s.7.a", "l.7.%s", "l.7.9.%", "%%.%d"]
    source = checkpoint({ONE: linears(*names)})
    planned = make_plan(source, profile=found)
    assert fp8(planned) == {"l.7.a", "l.7.b"}
    assert set(groups(planned).values()) == {"l.7.c"}
    generic = make_plan(checkpoint({ONE: linears("%s.7.q_proj", "%s.7.k_proj", "a%.1.%s.q")}))
    assert set(groups(generic).values()) == {"%s.7.qkv_proj"}


# -- runtime names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("WanTransformer3DModel", "blocks.12"),
        ("WanVACETransformer3DModel", "blocks.12"),
        ("WanVACETransformer3DModel", "vace_blocks.2"),
    ],
)
def test_runtime_names_of_wan(name: str, base: str) -> None:
    """Self attention is one matrix with one bias, other linears are renamed, scales follow, dtypes are the runtime's."""
    block = wan_block(base)
    names = [n for part in block.values() for n in part]
    planned = model(
        name,
        {
            **linears(*names, "proj_out"),
            **biases(*names, dtype="F32"),
            "scale_shift_table": ("F32", (1, 2, 64)),
            f"{base}.scale_shift_table": ("BF16", (1, 6, 64)),
        },
        kind="diffusers",
        names="runtime",
    )
    unit = unit_of(planned, f"{base}.attn1.to_qkv.weight")
    assert (unit.scheme, unit.rows, unit.cols) == ("per_tensor", 96, 64)
    assert [piece.tensor for piece in unit.pieces] == [f"{n}.weight" for n in block["qkv"]]
    bias = unit_of(planned, f"{base}.attn1.to_qkv.bias")
    assert (bias.scheme, bias.dtype, bias.rows, bias.cols) == ("cast", "F32", 1, 96)
    assert bias.data.length == 192
    assert [piece.tensor for piece in bias.pieces] == [f"{n}.bias" for n in block["qkv"]]
    renamed = [
        f"{base}.{x}" for x in ("attn1.to_out", "attn2.to_out", "ffn.net_0.proj", "ffn.net_2")
    ]
    weights = {f"{base}.attn1.to_qkv", *block["alone"], *renamed}
    assert {unit.name for unit in planned.shards[0].units} == {
        *(f"{n}.weight" for n in weights),
        *(f"{n}.bias" for n in weights),
        "proj_out.weight",
        "output_scale_shift_prepare.scale_shift_table",
        f"{base}.scale_shift_table",
    }
    header = json.loads(planned.shards[0].preamble[8:])
    assert {n for n in header if n.endswith("_scale")} == {f"{n}.weight_scale" for n in weights}
    assert {e["dtype"] for n, e in header.items() if n.endswith(("bias", "table"))} == {"BF16"}
    assert ignored(planned) == {"proj_out"}
    assert planned.groups == ()
    rows = {r.name: r for r in planned.rows}
    assert rows[f"{base}.attn1.to_k.weight"].view_name == f"{base}.attn1.to_qkv.weight"
    assert rows[f"{base}.attn1.to_k.bias"].dtype_out == "BF16"
    assert rows["proj_out.weight"].view_name == ""
    assert sum(r.bytes_out for r in planned.rows) == sum(
        e["data_offsets"][1] - e["data_offsets"][0]
        for n, e in header.items()
        if n != "__metadata__"
    )


def test_runtime_names_of_qwen_image() -> None:
    """Both attentions are joined, to_out loses its index, the rest keeps its names."""
    base = "transformer_blocks.3"
    image = [f"{base}.attn.{x}" for x in ("to_q", "to_k", "to_v")]
    text = [f"{base}.attn.{x}" for x in ("add_q_proj", "add_k_proj", "add_v_proj")]
    same = [f"{base}.attn.to_add_out", f"{base}.img_mlp.net.0.proj", f"{base}.txt_mlp.net.2"]
    planned = model(
        "QwenImageTransformer2DModel",
        {
            **linears(*image, *text, *same, f"{base}.attn.to_out.0", f"{base}.img_mod.1"),
            **biases(*text),
        },
        kind="diffusers",
        names="runtime",
        keep=("*.add_q_proj",),
    )
    assert {unit.name for unit in planned.shards[0].units} == {
        f"{base}.attn.to_qkv.weight",
        f"{base}.attn.add_kv_proj.weight",
        f"{base}.attn.add_kv_proj.bias",
        f"{base}.attn.to_out.weight",
        f"{base}.img_mod.1.weight",
        *(f"{n}.weight" for n in same),
    }
    assert unit_of(planned, f"{base}.attn.add_kv_proj.weight").scheme == ""
    assert ignored(planned) == {*text, f"{base}.attn.add_kv_proj", f"{base}.img_mod.1"}


def test_runtime_names_already_there() -> None:
    """A checkpoint in runtime names gives the same shards under both options."""
    shapes = {
        **linears("blocks.0.attn1.to_qkv", "blocks.0.attn1.to_out", "blocks.0.ffn.net_2"),
        **biases("blocks.0.attn1.to_qkv"),
        "output_scale_shift_prepare.scale_shift_table": ("BF16", (1, 2, 64)),
    }
    plans = [
        model("WanTransformer3DModel", shapes, kind="diffusers", names=names)
        for names in ("checkpoint", "runtime")
    ]
    assert plans[0].shards == plans[1].shards
    assert fp8(plans[0]) == {n.removesuffix(".weight") for n in shapes if n.endswith(".weight")}


def test_two_spellings_of_one_tensor_are_refused() -> None:
    """A checkpoint that has a tensor in both spellings cannot be shown under one name."""
    shapes = linears("blocks.0.attn1.to_out.0", "blocks.0.attn1.to_out")
    with pytest.raises(SourceInvalidError, match=r"to_out\.weight\" exists already"):
        model("WanTransformer3DModel", shapes, kind="diffusers", names="runtime")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("transformers", "LlamaForCausalLM"),
        ("diffusers", "FluxTransformer2DModel"),
        ("diffusers", "NewTransformer3DModel"),
    ],
)
def test_unknown_names_are_refused(kind: str, name: str) -> None:
    """Runtime names of a class whose names are not known completely are a usage error that names it."""
    shapes = linears(*ATTENTION, "single_transformer_blocks.0.proj_mlp")
    with pytest.raises(UsageError, match=f"names of {name}"):
        model(name, shapes, kind=kind, names="runtime")


def test_a_dtype_that_no_rounding_gives_is_refused() -> None:
    """A kept tensor that the runtime has in F32 and the checkpoint in BF16 is a usage error that names both."""
    shapes = linears("blocks.0.mlp.fc2", "video_patch_proj")
    with pytest.raises(UsageError, match=r'"video_patch_proj\.weight" is BF16 .*, F32 in'):
        model("MiniMaxH3DiT", shapes, kind="diffusers", names="runtime")


# -- H3's row order ----------------------------------------------------------------------------------

H3: Mapping[str, object] = {"num_attention_heads": 2, "attention_head_dim": 48}


def test_h3_blocks_follow_the_runtime_rows() -> None:
    """With blocks, the matrix is [Q; K; V] and each run of it goes back to its head; the header is unchanged."""
    shapes = linears("blocks.0.attn.qkv_proj", shape=(288, 64))
    planned = model("MiniMaxH3DiT", shapes, kind="diffusers", config=H3, scheme="block")
    unit = unit_of(planned, "blocks.0.attn.qkv_proj.weight")
    assert (unit.rows, unit.cols) == (288, 64)
    assert [tuple(run) for run in unit.row_runs] == [
        (0, 48, 0),
        (48, 48, 144),
        (96, 48, 48),
        (144, 48, 192),
        (192, 48, 96),
        (240, 48, 240),
    ]
    starts = [(piece.file_offset - 1000) // 128 for piece in unit.pieces]
    assert starts == [0, 144, 48, 192, 96, 240]
    assert {piece.nbytes for piece in unit.pieces} == {48 * 128}
    assert any("no multiple of 128" in warning for warning in planned.warnings)
    other = model(
        "MiniMaxH3DiT",
        shapes,
        kind="diffusers",
        config={**H3, "attention_head_dim": 24, "num_attention_heads": 4},
        scheme="block",
    )
    assert other.shards[0].preamble == planned.shards[0].preamble
    assert other.shards[0].object_id != planned.shards[0].object_id


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel"])
def test_other_schemes_keep_the_rows(scheme: str) -> None:
    """Where the scale does not depend on the order of rows, rows are made in file order, and need no config."""
    planned = model(
        "MiniMaxH3DiT",
        linears("blocks.0.attn.qkv_proj", shape=(96, 64)),
        kind="diffusers",
        scheme=scheme,
    )
    assert unit_of(planned, "blocks.0.attn.qkv_proj.weight").row_runs == ()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({}, "config.json does not say num_attention_heads"),
        ({**H3, "attention_head_dim": True}, "does not say attention_head_dim"),
        ({**H3, "attention_head_dim": 64}, "has 288 rows, but .* make 384"),
    ],
)
def test_h3_blocks_need_the_head_size(config: dict[str, object], what: str) -> None:
    """Rows that cannot be told apart are refused, with the tensor's name."""
    shapes = linears("blocks.0.attn.qkv_proj", shape=(288, 64))
    with pytest.raises(SourceInvalidError, match=what):
        model("MiniMaxH3DiT", shapes, kind="diffusers", config=config, scheme="block")


def test_one_head_needs_no_order() -> None:
    """With a single head both orders are the same."""
    planned = model(
        "MiniMaxH3DiT",
        linears("blocks.0.attn.qkv_proj", shape=(288, 64)),
        kind="diffusers",
        config={"num_attention_heads": 1, "attention_head_dim": 96},
        scheme="block_free",
    )
    unit = unit_of(planned, "blocks.0.attn.qkv_proj.weight")
    assert (unit.row_runs, len(unit.pieces)) == ((), 1)
