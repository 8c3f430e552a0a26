"""Diffusion transformers: blocks become FP8, everything around them stays; which components of a pipeline are quantized."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import fp8fs
from tests import oracle
from tests.acceptance.harness import Fp8fs
from tests.builders import named, wan_like, write_json, write_sharded
from tests.checkpoints.kinds import Kind, write_kind
from tests.checkpoints.looks import SCHEMES, check_files, look

STEM = "diffusion_pytorch_model"
FILE = f"{STEM}.safetensors"
QKV = ("to_q", "to_k", "to_v")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
FF = ("net.0.proj", "net.2")


def weights(base: str, *leaves: str) -> list[str]:
    return [f"{base}.{leaf}.weight" for leaf in leaves]


def embedders(base: str, *names: str) -> list[str]:
    return [w for name in names for w in weights(f"{base}.{name}", "linear_1", "linear_2")]


KINDS: dict[str, tuple[Kind, Sequence[tuple[str, tuple[str, ...]]]]] = {
    "Flux": (
        Kind(
            {"_class_name": "FluxTransformer2DModel"},
            [
                *weights("single_transformer_blocks.0.attn", *QKV),
                *weights("single_transformer_blocks.0", "proj_mlp", "proj_out"),
            ],
            [
                *weights("single_transformer_blocks.0", "norm.linear"),
                *weights("transformer_blocks.0", "norm1.linear", "norm1_context.linear"),
                *embedders(
                    "time_text_embed", "timestep_embedder", "guidance_embedder", "text_embedder"
                ),
                *("context_embedder.weight", "x_embedder.weight"),
                *("norm_out.linear.weight", "proj_out.weight"),
            ],
        ),
        [("single_transformer_blocks.0.attn", QKV)],
    ),
    "Flux 2": (
        Kind(
            {"_class_name": "Flux2Transformer2DModel"},
            [
                *weights("transformer_blocks.0.attn", *QKV, *ADDED, "to_out.0", "to_add_out"),
                *weights("transformer_blocks.0", "ff.linear_in", "ff_context.linear_out"),
                *weights("single_transformer_blocks.0.attn", "to_qkv_mlp_proj", "to_out"),
            ],
            [
                "double_stream_modulation_img.linear.weight",
                "single_stream_modulation.linear.weight",
                *embedders("time_guidance_embed", "timestep_embedder", "guidance_embedder"),
                *("context_embedder.weight", "x_embedder.weight", "proj_out.weight"),
            ],
        ),
        [("transformer_blocks.0.attn", QKV), ("transformer_blocks.0.attn", ADDED)],
    ),
    "Wan": (
        Kind(
            {"_class_name": "WanTransformer3DModel"},
            [
                *weights("blocks.0.attn1", *QKV, "to_out.0"),
                *weights("blocks.0.attn2", *QKV, "to_out.0", "add_k_proj"),
                *weights("blocks.0.ffn", *FF),
            ],
            [
                *embedders("condition_embedder", "time_embedder", "text_embedder"),
                *weights("condition_embedder", "time_proj", "image_embedder.ff.net.2"),
                "proj_out.weight",
            ],
            {
                "patch_embedding.weight": ("BF16", (32, 16, 1, 2, 2)),
                "scale_shift_table": ("F32", (1, 2, 32)),
                "blocks.0.scale_shift_table": ("F32", (1, 6, 32)),
            },
        ),
        [("blocks.0.attn1", QKV)],
    ),
    "Qwen-Image": (
        Kind(
            {"_class_name": "QwenImageTransformer2DModel"},
            [
                *weights("transformer_blocks.0.attn", *QKV, *ADDED, "to_out.0", "to_add_out"),
                *weights("transformer_blocks.0.img_mlp", *FF),
                *weights("transformer_blocks.0.txt_mlp", *FF),
            ],
            [
                *weights("transformer_blocks.0", "img_mod.1", "txt_mod.1"),
                *embedders("time_text_embed", "timestep_embedder"),
                *("img_in.weight", "txt_in.weight", "norm_out.linear.weight", "proj_out.weight"),
            ],
        ),
        [("transformer_blocks.0.attn", QKV), ("transformer_blocks.0.attn", ADDED)],
    ),
    "HunyuanVideo 1.5": (
        Kind(
            {"_class_name": "HunyuanVideo15Transformer3DModel"},
            [
                *weights("transformer_blocks.0.attn", *QKV, *ADDED, "to_out.0"),
                *weights("transformer_blocks.0.ff", *FF),
            ],
            [
                *weights("transformer_blocks.0", "norm1.linear", "norm1_context.linear"),
                *weights("context_embedder.token_refiner.refiner_blocks.0.attn", *QKV),
                *weights("context_embedder_2", "linear_1", "linear_3"),
                *embedders("time_embed", "timestep_embedder"),
                *("image_embedder.linear_1.weight", "norm_out.linear.weight", "proj_out.weight"),
            ],
            {"x_embedder.proj.weight": ("BF16", (32, 16, 1, 1, 1))},
        ),
        [("transformer_blocks.0.attn", QKV), ("transformer_blocks.0.attn", ADDED)],
    ),
    "LTX 2": (
        Kind(
            {"_class_name": "LTX2VideoTransformer3DModel"},
            [
                *weights("transformer_blocks.0.attn1", *QKV, "to_out.0"),
                *weights("transformer_blocks.0.audio_to_video_attn", *QKV),
                *weights("transformer_blocks.0.audio_ff", *FF),
            ],
            [
                *weights("time_embed", "linear", "emb.timestep_embedder.linear_1"),
                *weights("av_cross_attn_video_a2v_gate", "linear"),
                *weights("av_cross_attn_audio_scale_shift", "linear"),
                *embedders("", "caption_projection", "audio_caption_projection"),
                *("proj_in.weight", "audio_proj_in.weight", "audio_proj_out.weight"),
            ],
            {"transformer_blocks.0.scale_shift_table": ("F32", (6, 32))},
        ),
        [("transformer_blocks.0.attn1", QKV)],
    ),
    "GLM-Image": (
        Kind(
            {"_class_name": "GlmImageTransformer2DModel"},
            [
                *weights("transformer_blocks.0.attn1", *QKV, "to_out.0"),
                *weights("transformer_blocks.0.ff", *FF),
            ],
            [
                *weights("transformer_blocks.0", "norm1.linear"),
                *embedders("time_condition_embed", "timestep_embedder", "condition_embedder"),
                *("norm_out.linear.weight", "proj_out.weight"),
            ],
        ),
        [("transformer_blocks.0.attn1", QKV)],
    ),
    "Krea 2, whose engine would take its embedders too": (
        Kind(
            {"_class_name": "Krea2Transformer2DModel"},
            [
                *weights("transformer_blocks.0.attn", *QKV, "to_gate", "to_out.0"),
                *weights("transformer_blocks.0.ff", "gate", "up", "down"),
            ],
            [
                *embedders("", "time_embed", "txt_in"),
                *("time_mod_proj.weight", "img_in.weight", "final_layer.linear.weight"),
            ],
        ),
        [],
    ),
    "Sana WM, the same": (
        Kind(
            {"_class_name": "SanaWmTransformer3DModel"},
            weights("blocks.0", "attn.qkv", "attn.proj", "cross_attn.q_linear"),
            [
                *weights("y_embedder.y_proj", "fc1", "fc2"),
                *("t_embedder.mlp.0.weight", "t_block.1.weight", "final_layer.linear.weight"),
            ],
        ),
        [],
    ),
    "LingBot World, the same": (
        Kind(
            {"_class_name": "CausalLingBotWorldTransformer3DModel"},
            [*weights("blocks.0.self_attn", "q", "k", "v", "o"), *weights("blocks.0.ffn", "0")],
            [
                *("c2ws_hidden_states_layer1.weight", "c2ws_hidden_states_layer2.weight"),
                *("time_embedding.0.weight", "time_projection.1.weight", "head.head.weight"),
            ],
        ),
        [("blocks.0.self_attn", ("q", "k", "v"))],
    ),
    "HunyuanVideo, not known": (
        Kind(
            {"_class_name": "HunyuanVideoTransformer3DModel"},
            [
                *weights("transformer_blocks.0.attn", *QKV, *ADDED, "to_add_out"),
                *weights("transformer_blocks.0.ff_context", *FF),
                *weights("single_transformer_blocks.0", "proj_mlp", "attn.to_q"),
            ],
            [
                *weights("transformer_blocks.0", "norm1.linear", "norm1_context.linear"),
                *weights("single_transformer_blocks.0", "norm.linear", "proj_out"),
                *weights("context_embedder.token_refiner.refiner_blocks.0.attn", *QKV),
                *embedders("time_text_embed", "timestep_embedder", "guidance_embedder"),
                *("norm_out.linear.weight", "proj_out.weight"),
            ],
        ),
        [("transformer_blocks.0.attn", QKV), ("transformer_blocks.0.attn", ADDED)],
    ),
    "LTX, not known": (
        Kind(
            {"_class_name": "LTXVideoTransformer3DModel"},
            [
                *weights("transformer_blocks.0.attn1", *QKV, "to_out.0"),
                *weights("transformer_blocks.0.ff", *FF),
            ],
            [
                *weights("adaln_single", "linear", "emb.timestep_embedder.linear_2"),
                *embedders("", "caption_projection"),
                *("proj_in.weight", "proj_out.weight"),
            ],
            {"transformer_blocks.0.scale_shift_table": ("BF16", (6, 32))},
        ),
        [("transformer_blocks.0.attn1", QKV)],
    ),
    "SDXL, not known": (
        Kind(
            {"_class_name": "UNet2DConditionModel"},
            [
                *weights("down_blocks.1.attentions.0.transformer_blocks.0.attn1", *QKV),
                *weights("down_blocks.1.attentions.0.transformer_blocks.0.ff", *FF),
            ],
            [
                *weights("down_blocks.1.attentions.0", "proj_in", "proj_out"),
                *weights("down_blocks.1.resnets.0", "time_emb_proj"),
                *weights("input_blocks.1.0.emb_layers", "1"),
                *embedders("", "time_embedding", "add_embedding"),
            ],
            {
                "conv_in.weight": ("BF16", (32, 4, 3, 3)),
                "down_blocks.1.resnets.0.conv_shortcut.weight": ("BF16", (32, 32, 1, 1)),
            },
        ),
        [("down_blocks.1.attentions.0.transformer_blocks.0.attn1", QKV)],
    ),
    "Lumina 2, not known": (
        Kind(
            {"_class_name": "Lumina2Transformer2DModel"},
            [
                *weights("layers.0.attn", *QKV, "to_out.0"),
                *weights("layers.0.feed_forward", "linear_1", "linear_2"),
            ],
            [
                *weights("layers.0", "norm1.linear"),
                *weights("context_refiner.0.attn", *QKV),
                *embedders("time_caption_embed", "timestep_embedder"),
                *weights("norm_out", "linear_1", "linear_2"),
                "x_embedder.weight",
            ],
        ),
        [("layers.0.attn", QKV)],
    ),
    "a first publication's names": (
        Kind(
            {"_class_name": "HYVideoDiffusionTransformer"},
            [
                *weights("double_blocks.0", "img_attn_qkv", "txt_attn_proj", "img_mlp.fc1"),
                *weights("single_blocks.0", "linear1", "linear2"),
            ],
            [
                *weights("double_blocks.0", "img_mod.linear", "txt_mod.lin"),
                *weights("single_blocks.0", "modulation.linear"),
                *weights("txt_in.individual_token_refiner.blocks.0", "self_attn_qkv", "mlp.fc1"),
                *weights("txt_in", "input_embedder", "t_embedder.mlp.0", "c_embedder.linear_1"),
                *("time_in.mlp.0.weight", "vector_in.in_layer.weight", "guidance_in.mlp.2.weight"),
                *weights("distilled_guidance_layer.layers.0", "in_layer"),
                *weights("final_layer", "linear", "adaLN_modulation.1"),
            ],
            {"img_in.proj.weight": ("BF16", (32, 16, 1, 2, 2))},
        ),
        [],
    ),
    "any class": (
        Kind(
            {"_class_name": "NewTransformer2DModel"},
            [
                *weights("layers.0.attention", *QKV, "to_out.0"),
                *weights("layers.0.feed_forward", "w1", "w2", "w3"),
            ],
            [
                *weights("layers.0", "adaLN_modulation.0", "norm1.linear", "ada_norm.proj"),
                *weights("blocks.0", "time_mod_proj", "conv_norm.linear"),
                *("t_embedder.mlp.0.weight", "cap_embedder.1.weight", "y_embedder.weight"),
                *("time_projection.1.weight", "text_embedding.0.weight", "head.head.weight"),
                *("patch_embed.proj.weight", "pos_embed.weight", "final_layer.linear.weight"),
            ],
            {
                "layers.0.conv1.weight": ("BF16", (32, 32, 3)),
                "layers.0.conv2.weight": ("BF16", (32, 32, 3, 3)),
                "layers.0.conv3.weight": ("BF16", (32, 32, 1, 3, 3)),
            },
        ),
        [("layers.0.attention", QKV), ("layers.0.feed_forward", ("w1", "w3"))],
    ),
}


def _named(kind: Kind) -> Kind:
    """Names of modules at the top, which ``embedders`` gives with a dot in front."""
    return Kind(kind.config, kind.quantized, [n.removeprefix(".") for n in kind.kept], kind.more)


def write_pipeline(src: Path, transformers: Mapping[str, Kind]) -> None:
    """A pipeline of these transformers, with a text encoder and a VAE."""
    index = {"_class_name": "TinyPipeline", "vae": ["diffusers", "AutoencoderTiny"]}
    for name, kind in transformers.items():
        index[name] = ["diffusers", kind.config["_class_name"]]
        write_kind(src / name, kind, stem=STEM)
    write_json(src / "model_index.json", index)
    write_sharded(src / "vae", named("decoder.up.0.to_q.weight"), 1, stem=STEM)
    write_json(src / "vae" / "config.json", {"_class_name": "AutoencoderTiny"})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", KINDS)
def test_blocks_become_fp8_and_nothing_around_them(tmp_path: Path, name: str, scheme: str) -> None:
    """Attention and feed-forward are the oracle's FP8, fused ones with one scale; the rest arrives bit for bit."""
    found, fused = KINDS[name]
    kind = _named(found)
    write_pipeline(tmp_path / "src", {"transformer": kind})
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    groups = {}
    for base, leaves in fused:
        members = weights(base, *leaves)
        groups |= dict.fromkeys(members, members)
    check_files(tree / "transformer", {FILE: kind.tensors()}, kind.quantized, scheme, groups)
    config = json.loads((tree / "transformer" / "config.json").read_text())["quantization_config"]
    ignored = set(config.get("ignore", config.get("ignored_layers")))
    assert {n.removesuffix(".weight") for n in kind.kept} <= ignored
    assert not {n.removesuffix(".weight") for n in kind.quantized} & ignored
    assert oracle.read_folder(tree / "vae") == oracle.read_folder(tmp_path / "src" / "vae")


def test_a_class_that_its_engine_builds_unquantized_stays(tmp_path: Path) -> None:
    """SD3 is served as it is, with the reason: its engine knows no FP8 for it."""
    kind = Kind(
        {"_class_name": "SD3Transformer2DModel"},
        [],
        weights("transformer_blocks.0", "attn.to_q", "ff.net.2", "norm1.linear"),
    )
    write_pipeline(tmp_path / "src", {"transformer": kind})
    seen = look(tmp_path / "src")
    assert not seen.plan.shards
    assert seen.warned("transformer", "quantizes nothing in SD3Transformer2DModel")


def two_transformers(src: Path) -> None:
    """Wan 2.2: two transformers, one for each half of the steps, and a text encoder."""
    wan_like(src)
    wan_like(src.with_name("second"), seed=9)
    (src.with_name("second") / "transformer").rename(src / "transformer_2")
    index = json.loads((src / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    write_json(src / "model_index.json", index)


def test_two_transformers_are_two_components(tmp_path: Path) -> None:
    """By default both are quantized, each by its own config; nothing else of the pipeline is."""
    src = tmp_path / "src"
    two_transformers(src)
    tree = fp8fs.build(src, store=tmp_path / "store")
    for name in ("transformer", "transformer_2"):
        source, found = oracle.read_folder(src / name), oracle.read_folder(tree / name)
        chosen = {n for n, t in found.items() if t.dtype == "F8_E4M3"}
        assert chosen
        assert all(n.startswith("blocks.") for n in chosen)
        groups = oracle.sibling_groups(chosen)
        assert found == oracle.expected(source, chosen, "per_tensor", groups)
        assert "quantization_config" in json.loads((tree / name / "config.json").read_text())
    first, second = (oracle.read_folder(tree / n) for n in ("transformer", "transformer_2"))
    assert first.keys() == second.keys()
    assert first != second
    for name in ("text_encoder", "vae"):
        assert oracle.read_folder(tree / name) == oracle.read_folder(src / name)
        plain = (src / name / "config.json").read_bytes()
        assert (tree / name / "config.json").read_bytes() == plain


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_text_encoder_is_quantized_as_what_it_is(tmp_path: Path, scheme: str) -> None:
    """--component text_encoder: the transformers model becomes FP8 in its own dialect, the transformers stay."""
    src = tmp_path / "src"
    two_transformers(src)
    options = {"scheme": scheme, "components": ("text_encoder",)}
    tree = fp8fs.build(src, store=tmp_path / "store", **options)  # type: ignore[arg-type]
    source = oracle.read_folder(src / "text_encoder")
    chosen = {name for name in source if "SelfAttention" in name}
    groups = oracle.sibling_groups(chosen)
    wanted = oracle.expected(source, chosen, scheme, groups)
    assert oracle.read_folder(tree / "text_encoder") == wanted
    config = json.loads((tree / "text_encoder" / "config.json").read_text())
    settings = config["quantization_config"]
    assert "is_checkpoint_fp8_serialized" not in settings  # what a pipeline's components say
    method = "compressed-tensors" if scheme == "per_channel" else "fp8"
    assert settings["quant_method"] == method
    for name in ("transformer", "transformer_2"):
        assert oracle.read_folder(tree / name) == oracle.read_folder(src / name)


def seen_cold(view: Path) -> dict[str, bytes]:
    """What a loader looks at before it reads weights: every name, every small file, every header."""
    found: dict[str, bytes] = {}
    for path in sorted(view.rglob("*")):
        name = str(path.relative_to(view))
        if path.is_dir():
            found[name] = b"folder"
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                length = file.read(8)
                found[name] = length + file.read(int.from_bytes(length, "little"))
        else:
            found[name] = path.read_bytes()
    return found


def test_tree_and_configs_are_the_same_cold_and_warm(
    mount: Callable[..., Path], fp8fs: Fp8fs, tmp_path: Path
) -> None:
    """Names, configs, indexes and headers are byte for byte the same before anything is made, after, and mounted again."""
    src = tmp_path / "src"
    two_transformers(src)
    view = mount(src)
    configs = {path: path.read_bytes() for path in view.rglob("*.json")}
    assert fp8fs.status(view)["units"]["made"] == 0
    cold = seen_cold(view)
    for path in view.rglob("*.safetensors"):
        path.read_bytes()
    assert {path: path.read_bytes() for path in configs} == configs
    assert seen_cold(view) == cold
    fp8fs.unmount(view)
    assert seen_cold(mount(src)) == cold
