"""Selection: recipes that fit, the rule and reason for each tensor, globs, fusion groups."""

from __future__ import annotations

import pytest

from fp8fs.core.checkpoint import Checkpoint
from fp8fs.core.fusion import FUSIONS, Fusion, leaf_table
from fp8fs.core.recipe import Recipe, check_recipe, choose_components, recipe_id
from fp8fs.core.rules import GenericRule
from fp8fs.core.selection import select
from fp8fs.errors import SourceInvalidError, UsageError
from tests.planning import LLM, checkpoint, linears, make_plan

PIPELINE = {
    "model_index.json": {"_class_name": "TinyPipeline"},
    "transformer/config.json": {"_class_name": "WanTransformer3DModel"},
    "vae/config.json": {"_class_name": "AutoencoderKL"},
    "text_encoder/config.json": {"architectures": ["T5EncoderModel"], "model_type": "t5"},
}
PIPELINE_SHARDS = {
    "transformer/d.safetensors": linears("blocks.0.ffn.net.2"),
    "vae/d.safetensors": linears("decoder.mid.0.to_q.conv"),
    "text_encoder/model.safetensors": linears("encoder.block.0.layer.1.DenseReluDense.wo"),
}


def decisions(source: Checkpoint, **recipe: object) -> dict[str, tuple[bool, str]]:
    """Name -> (quantize, reason) by the generic rule, for a checkpoint of one component."""
    headers = {path: shard.header for path, shard in source.shards.items()}
    chosen = select(source.components[0], headers, Recipe(**recipe), GenericRule())  # type: ignore[arg-type]
    return {d.name: (d.quantize, d.reason) for d in chosen}


def model(*names: str, shape: tuple[int, int] = (32, 64), dtype: str = "BF16") -> Checkpoint:
    return checkpoint({"model.safetensors": linears(*names, shape=shape, dtype=dtype)})


def test_unknown_scheme_names_the_four() -> None:
    """An unknown scheme is a usage error that offers all four."""
    with pytest.raises(UsageError) as caught:
        check_recipe(Recipe(scheme="blok"))
    assert str(caught.value) == (
        'unknown scheme "blok". hint: per_tensor, per_channel, block or block_free'
    )
    assert caught.value.exit == 2


def test_unknown_names_are_refused() -> None:
    """--names takes checkpoint and runtime, nothing else."""
    with pytest.raises(UsageError, match="unknown names"):
        check_recipe(Recipe(names="engine"))


def test_runtime_names_need_a_table() -> None:
    """--names runtime for a model whose names are not known says which model."""
    with pytest.raises(UsageError, match="names of TinyForCausalLM"):
        make_plan(model("layers.0.fc"), names="runtime")


def test_recipe_id_is_of_the_meaning() -> None:
    """Order, repetition and the spelling of the root do not change a recipe's id; a choice does."""
    one = Recipe(keep=("a", "b"), components=("", "x/"))
    same = Recipe(keep=("b", "a", "b"), components=("x", "."))
    assert recipe_id(one) == recipe_id(same)
    assert len({recipe_id(one), recipe_id(Recipe()), recipe_id(Recipe(scheme="block"))}) == 3


def test_default_components_are_the_transformers() -> None:
    """A pipeline's transformer is quantized by default, its text encoder and VAE are not."""
    source = checkpoint(PIPELINE_SHARDS, PIPELINE)
    assert choose_components(source.components, Recipe())[0] == {"transformer"}
    planned = make_plan(source)
    assert planned.schemes == {"transformer": "per_tensor"}
    assert {s.path for s in planned.shards} == {"transformer/d.safetensors"}


def test_a_named_component_is_quantized_as_what_it_is() -> None:
    """--component text_encoder quantizes it, and only it, by a transformers model's default scheme."""
    source = checkpoint(PIPELINE_SHARDS, PIPELINE)
    assert make_plan(source, components=("text_encoder/",)).schemes == {
        "text_encoder": "per_channel"
    }


def test_unknown_component_lists_those_there_are() -> None:
    """A component that does not exist is a usage error that lists the others."""
    with pytest.raises(UsageError, match="text_encoder, transformer, vae"):
        make_plan(checkpoint(PIPELINE_SHARDS, PIPELINE), components=("unet",))


def test_the_root_has_two_spellings() -> None:
    """--component "" and "." both name the root."""
    for root in ("", ".", "./"):
        assert make_plan(model("layers.0.fc"), components=(root,)).schemes == {"": "per_channel"}


def quantized_source() -> Checkpoint:
    weights = {**linears("layers.0.fc"), **linears("layers.1.fc", dtype="F8_E4M3")}
    return checkpoint({"model.safetensors": weights})


def test_already_quantized_source_is_refused() -> None:
    """A model that is quantized already is refused, by default and when named."""
    for components in ((), ("",)):
        with pytest.raises(SourceInvalidError, match="already quantized"):
            make_plan(quantized_source(), components=components)


def test_already_quantized_component_passes_beside_a_fresh_one() -> None:
    """One quantized component of several is passed through with a warning, and refused when named."""
    texts = {**PIPELINE, "transformer_2/config.json": PIPELINE["transformer/config.json"]}
    shards = {**PIPELINE_SHARDS, "transformer_2/d.safetensors": linears("a.0.b", dtype="F8_E4M3")}
    source = checkpoint(shards, texts)
    planned = make_plan(source)
    assert planned.schemes == {"transformer": "per_tensor"}
    assert planned.entries["transformer_2/d.safetensors"].kind == "source"
    assert any(w.startswith("transformer_2: passed through") for w in planned.warnings)
    with pytest.raises(SourceInvalidError):
        make_plan(source, components=("transformer_2",))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.10.mlp.gate_proj",
        "model.layers.3.mlp.experts.127.up_proj",
        "model.layers.3.block_sparse_moe.experts.7.w2",
        "model.layers.3.mlp.shared_expert.down_proj",
        "model.layers.0.self_attn.kv_a_proj_with_mqa",
        "model.layers.0.linear_attn.in_proj_qkvz",
        "encoder.layer.0.attention.self.query",
        "encoder.layer.0.attention.output.dense",
        "encoder.layer.11.intermediate.dense",
        "encoder.block.0.layer.0.SelfAttention.k",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.ff.net.0.proj",
        "transformer_blocks.0.audio_attn1.to_q",
        "transformer_blocks.0.img_mlp.net.2",
        "single_transformer_blocks.0.proj_mlp",
        "blocks.0.ffn.2",
        "blocks.0.cross_attn.o",
        "blocks.0.attn.qkv_proj",
        "double_stream_blocks.0.block.ff_i.shared_experts.w1",
        "text_model.encoder.layers.0.self_attn.out_proj",
    ],
)
def test_linear_weights_of_blocks_are_quantized(name: str) -> None:
    """Attention and feed-forward weights of every family we know are quantized by the generic rule."""
    assert decisions(model(name))[f"{name}.weight"] == (True, "linear weight in a repeated block")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("blocks.0.adaln_proj.linear", "modulation"),
        ("layers.0.adaLN_modulation.1", "modulation"),
        ("transformer_blocks.0.norm1.linear", "modulation"),
        ("transformer_blocks.0.norm1_context.linear", "modulation"),
        ("transformer_blocks.0.img_mod.1", "modulation"),
        ("double_blocks.0.txt_mod.linear", "modulation"),
        ("context_embedder.token_refiner.refiner_blocks.0.attn.to_q", "embedding or embedder"),
        ("model.layers.0.pos_embed.proj", "embedding or embedder"),
        ("blocks.0.time_proj.linear", "embedding or embedder"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "position table"),
        ("blocks.0.norm_out.linear", "modulation"),
        ("blocks.0.proj_out", "first or final projection"),
        ("blocks.0.proj_in", "first or final projection"),
        ("final_layer.0.linear", "final projection"),
        ("model.layers.0.mlp.gate", "router or gate"),
        ("model.layers.0.mlp.router", "router or gate"),
        ("model.layers.0.mlp.router.classifier", "router or gate"),
        ("model.layers.0.mlp.shared_expert_gate", "router or gate"),
        ("visual.blocks.0.attn.qkv", "vision tower"),
        ("model.visual.blocks.0.mlp.linear_fc1", "vision tower"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "vision tower"),
        ("multi_modal_projector.layers.0.linear_1", "multimodal projector"),
        ("deepstack_merger_list.0.linear_fc1", "multimodal projector"),
        ("audio_tower.layers.0.fc1", "audio tower"),
        ("mtp.layers.0.self_attn.q_proj", "MTP layer"),
        ("model.layers.0.fc.lora_A", "LoRA weight"),
        ("lm_head", "output head"),
        ("model.embed_tokens", "embedding or embedder"),
        ("encoder.layer.0.pooler.dense", "output head"),
        ("time_projection.1", "embedding or embedder"),
        ("global_proj.0", "not inside a repeated block"),
        ("condition_proj", "not inside a repeated block"),
    ],
)
def test_excluded_words_keep_their_dtype(name: str, reason: str) -> None:
    """Layers that published FP8 recipes leave alone are kept, and the reason says why."""
    assert decisions(model(name))[f"{name}.weight"] == (False, reason)


def test_what_cannot_be_quantized_is_kept() -> None:
    """1-D, 3-D, integer, FP64, unnamed and odd-shaped tensors of a block are kept with a reason."""
    shapes = {
        "layers.0.a.bias": ("BF16", (64,)),
        "layers.0.b.weight": ("BF16", (4, 32, 64)),
        "layers.0.c.weight": ("I32", (32, 64)),
        "layers.0.d.weight": ("F64", (32, 64)),
        "layers.0.in_w": ("BF16", (32, 64)),
        "layers.0.e.weight": ("BF16", (24, 64)),
        "layers.0.f.weight": ("F16", (32, 64)),
    }
    found = decisions(checkpoint({"model.safetensors": shapes}))
    assert found == {
        "layers.0.a.bias": (False, "1-D"),
        "layers.0.b.weight": (False, "3-D"),
        "layers.0.c.weight": (False, "dtype I32"),
        "layers.0.d.weight": (False, "dtype F64"),
        "layers.0.in_w": (False, 'not named "*.weight"'),
        "layers.0.e.weight": (False, "24x64 is not in multiples of 16"),
        "layers.0.f.weight": (True, "linear weight in a repeated block"),
    }


def test_next_token_layers_behind_the_last_are_kept() -> None:
    """Layers numbered from num_hidden_layers on are MTP layers when the config counts such layers."""
    config = {**LLM["config.json"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    weights = linears("model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj")
    found = decisions(checkpoint({"model.safetensors": weights}, {"config.json": config}))
    assert found["model.layers.1.mlp.up_proj.weight"][0]
    assert found["model.layers.2.mlp.up_proj.weight"] == (False, "MTP layer")


@pytest.mark.parametrize("glob", ["layers.0.*", "layers.0.fc1", "layers.?.fc1.weight"])
def test_keep_globs_take_module_names_too(glob: str) -> None:
    """--keep matches the tensor's name and, without ".weight", its module's."""
    found = decisions(model("layers.0.fc1", "layers.0.fc2"), keep=(glob,))
    assert found["layers.0.fc1.weight"] == (False, f"--keep {glob}")


def test_globs_may_name_the_component() -> None:
    """ "component/name" globs mean that component alone."""
    source = checkpoint(PIPELINE_SHARDS, PIPELINE)
    planned = make_plan(source, quantize=("transformer/blocks.0.ffn.*",))
    assert {r.reason for r in planned.rows if r.component == "transformer"} == {
        "--quantize transformer/blocks.0.ffn.*"
    }


def test_keep_beats_quantize_beats_words() -> None:
    """--quantize lifts an exclusion; --keep and a scan's finding win over it."""
    source = model("layers.0.adaln", "layers.1.adaln", "layers.2.adaln", "layers.3.adaln")
    found = decisions(
        source,
        quantize=("layers.[012].*",),
        keep=("layers.1.*",),
        recorded_keep=("layers.2.adaln.weight",),
    )
    assert [found[f"layers.{i}.adaln.weight"] for i in range(4)] == [
        (True, "--quantize layers.[012].*"),
        (False, "--keep layers.1.*"),
        (False, "holds NaN or Inf"),
        (False, "modulation"),
    ]


@pytest.mark.parametrize("option", ["keep", "quantize"])
def test_a_glob_without_a_match_is_refused(option: str) -> None:
    """A glob that matches no tensor is a usage error that repeats it."""
    with pytest.raises(UsageError, match=f"--{option} nothing.*: matches no tensor"):
        make_plan(model("layers.0.fc"), **{option: ("nothing.*",)})


def test_a_glob_for_a_component_left_alone_names_the_remedy() -> None:
    """A glob that only matches a component that is not quantized says which --component to add."""
    source = checkpoint(PIPELINE_SHARDS, PIPELINE)
    with pytest.raises(UsageError, match="--component text_encoder"):
        make_plan(source, quantize=("text_encoder/*",))


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "why"),
    [
        ("layers.0.norm.weight", "BF16", (64,), "1-D"),
        ("layers.0.t.weight", "I32", (32, 64), "dtype I32"),
        ("layers.0.table", "BF16", (32, 64), "not named"),
        ("layers.0.none.weight", "BF16", (0, 64), "empty"),
    ],
)
def test_quantizing_the_impossible_says_why(
    name: str, dtype: str, shape: tuple[int, ...], why: str
) -> None:
    """--quantize of a tensor that cannot be FP8 is a usage error with the reason."""
    source = checkpoint({"model.safetensors": {name: (dtype, shape), **linears("layers.0.fc")}})
    with pytest.raises(UsageError, match=why):
        make_plan(source, quantize=(name,))


def test_a_wide_quantize_glob_takes_what_it_can() -> None:
    """--quantize over a whole layer quantizes its matrices and leaves its vectors."""
    shapes = {**linears("layers.0.adaln"), "layers.0.norm.weight": ("BF16", (64,))}
    planned = make_plan(checkpoint({"model.safetensors": shapes}), quantize=("layers.0.*",))
    assert [r.dtype_out for r in planned.rows] == ["F8_E4M3", "BF16"]


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "block", "block_free"])
def test_one_kept_member_keeps_its_group(scheme: str) -> None:
    """With --keep of v_proj, q_proj and k_proj stay too, in every scheme, and say whose partner they are."""
    names = [
        f"model.layers.{i}.self_attn.{leaf}"
        for i in (0, 1)
        for leaf in ("q_proj", "k_proj", "v_proj")
    ]
    planned = make_plan(model(*names), scheme=scheme, keep=("*.0.self_attn.v_proj",))
    rows = {row.name: row for row in planned.rows}
    assert rows["model.layers.0.self_attn.q_proj.weight"].reason == (
        "group partner of model.layers.0.self_attn.v_proj.weight: --keep *.0.self_attn.v_proj"
    )
    assert [row.dtype_out for row in planned.rows] == ["BF16"] * 3 + ["F8_E4M3"] * 3
    assert {row.group for row in planned.rows} == {
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.self_attn.qkv_proj",
    }


def test_dimensions_of_one_keep_the_group() -> None:
    """A member whose rows do not fit keeps its partners as well."""
    shapes = {
        **linears("layers.0.mlp.gate_proj", shape=(32, 64)),
        **linears("layers.0.mlp.up_proj", shape=(24, 64)),
    }
    found = decisions(checkpoint({"model.safetensors": shapes}))
    assert found["layers.0.mlp.gate_proj.weight"] == (
        False,
        "group partner of layers.0.mlp.up_proj.weight: 24x64 is not in multiples of 16",
    )


def test_members_need_one_parent_and_one_width() -> None:
    """Other layers, other experts and other numbers of columns make no group; a lone leaf neither."""
    shapes = {
        **linears("b.0.attn.to_k", "b.0.attn.to_v", shape=(64, 32)),
        **linears("b.0.attn.to_q", "b.1.attn.to_k", "b.0.e.0.w1", "b.0.e.1.w3", "b.0.e.1.w1"),
    }
    groups = {
        row.name: row.group for row in make_plan(checkpoint({"model.safetensors": shapes})).rows
    }
    assert groups == {
        "b.0.attn.to_k.weight": "b.0.attn.to_qkv",
        "b.0.attn.to_v.weight": "b.0.attn.to_qkv",
        "b.0.attn.to_q.weight": "",
        "b.1.attn.to_k.weight": "",
        "b.0.e.0.w1.weight": "",
        "b.0.e.1.w3.weight": "b.0.e.1.w13",
        "b.0.e.1.w1.weight": "b.0.e.1.w13",
    }


def test_fusion_leaves_are_unique() -> None:
    """No leaf name is in two fusions: the table is a map."""
    assert len(leaf_table(FUSIONS)) == sum(len(fusion.leaves) for fusion in FUSIONS)
    with pytest.raises(ValueError, match="two fusions"):
        leaf_table([Fusion("a", ("x", "y")), Fusion("b", ("x", "z"))])
