"""Which files are the weights: indexes and shards of every kind, doubles, adapters, several models in one tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import fp8fs
from fp8fs.errors import SourceInvalidError
from tests.acceptance.harness import Fp8fs
from tests.builders import (
    Tensor,
    hf_cache,
    llama_like,
    named,
    wan_like,
    write_bytes,
    write_files,
    write_index,
    write_json,
    write_safetensors,
)
from tests.checkpoints.looks import DIT, LLM, SCHEMES, check_files, check_index, layer, look

S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
A, B, C = layer(0), layer(1), layer(2)
NORM = "model.norm.weight"

Files = Mapping[str, Mapping[str, Tensor]]


# --- one line for each kind of index and shards; each returns the shards that the view must show


def no_index(src: Path) -> Files:
    return write_files(src, {S1: named(A, NORM), S2: named(B)}, LLM)


def stale_index(src: Path) -> Files:
    write_index(src / INDEX, {A: S2, B: S1, "model.gone.weight": S1}, total_size=7)
    return no_index(src)


def subset_index(src: Path) -> Files:
    write_index(src / INDEX, {A: S1, B: S2})
    return no_index(src)


def key_in_two_shards(src: Path) -> Files:
    write_index(src / INDEX, {A: S1, B: S2, C: S1})
    return write_files(src, {S1: named(A, C), S2: named(B, C)}, LLM)


def key_in_two_shards_with_other_values(src: Path) -> Files:
    write_index(src / INDEX, {A: S1, B: S2, C: S1})
    return write_files(src, {S1: named(A, C), S2: {**named(B), **named(C, seed=9)}}, LLM)


def unnamed_shard(src: Path) -> Files:
    write_index(src / INDEX, {A: S1, B: S2})
    write_files(src, {"model-00003-of-00003.safetensors": named(C)})
    return write_files(src, {S1: named(A), S2: named(B)}, LLM)


def two_indexes(src: Path) -> Files:
    write_index(src / "diffusion_pytorch_model.safetensors.index.json", {A: S1, B: S2})
    write_index(src / INDEX, {A: S1, B: S2})
    return write_files(src, {S1: named(A), S2: named(B)}, LLM)


def names_without_numbers(src: Path) -> Files:
    return write_files(src, {"early.safetensors": named(A), "late.safetensors": named(B)}, LLM)


def one_named_like_many(src: Path) -> Files:
    return write_files(src, {"model-00001-of-00001.safetensors": named(A, NORM)}, LLM)


def single_file(src: Path) -> Files:
    return write_files(src, {"model.safetensors": named(A, NORM)}, LLM)


def only_variants(src: Path) -> Files:
    write_files(src, {"model.fp16.safetensors": named(A, dtype="F16")})
    return write_files(src, {"model.bf16.safetensors": named(A)}, LLM)


def only_a_sharded_variant(src: Path) -> Files:
    names = [f"model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
    files = {names[0]: named(A, dtype="F16"), names[1]: named(B, dtype="F16")}
    return write_files(src, files, LLM)


def mixed_dtypes(src: Path) -> Files:
    return write_files(src, {S1: named(A, NORM, dtype="F32"), S2: named(B, dtype="F16")}, LLM)


KINDS: dict[str, Callable[[Path], Files]] = {
    make.__name__: make
    for make in (
        no_index,
        stale_index,
        subset_index,
        key_in_two_shards,
        key_in_two_shards_with_other_values,
        unnamed_shard,
        two_indexes,
        names_without_numbers,
        one_named_like_many,
        single_file,
        only_variants,
        only_a_sharded_variant,
        mixed_dtypes,
    )
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_served_as_the_oracle_says(tmp_path: Path, kind: str, scheme: str) -> None:
    """The finished tree has these shards, no others, each tensor as the oracle makes it, and an index that is right."""
    files = KINDS[kind](tmp_path / "src")
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    assert {path.name for path in tree.glob("*.safetensors")} == files.keys()
    check_files(tree, files, {A, B, C}, scheme)
    indexes = list(tree.glob("*.index*.json"))
    assert len(indexes) == (0 if kind in ("single_file", "only_variants") else 1)
    for index in indexes:
        check_index(index)


@pytest.mark.fuse
def test_every_kind_through_one_mount(mount: Callable[..., Path], place: Path) -> None:
    """All of them in one tree, each a model of its own: what is read is what the oracle says, doubles are not there."""
    files = {kind: make(place / "src" / kind) for kind, make in KINDS.items()}
    dst = mount(place / "src", "--scheme", "block")
    for kind, wanted in files.items():
        assert {path.name for path in (dst / kind).glob("*.safetensors")} == wanted.keys()
        check_files(dst / kind, wanted, {A, B, C}, "block")
        for index in (dst / kind).glob("*.index*.json"):
            check_index(index)


def test_a_missing_index_is_made_and_noted(tmp_path: Path) -> None:
    """Where several shards, or one with a number, have none; a variant's under the name that loaders look for."""
    for make, index in (
        (no_index, INDEX),
        (one_named_like_many, INDEX),
        (names_without_numbers, INDEX),
        (only_a_sharded_variant, "model.safetensors.index.fp16.json"),
    ):
        make(tmp_path / make.__name__)
        seen = look(tmp_path / make.__name__)
        assert seen.json(index)["weight_map"][A]
        assert seen.noted("has no index", f"{index} is made")


def test_a_stale_index_is_put_right_and_said(tmp_path: Path) -> None:
    """Tensors in another shard, in none, or not listed: one warning each, by name and number."""
    stale_index(tmp_path)
    seen = look(tmp_path)
    assert seen.warned(INDEX, '1 tensor ("model.gone.weight") in no shard')
    assert seen.warned(INDEX, "another shard than the right one", "2 tensors")
    assert seen.warned(INDEX, f'lacks 1 tensor ("{NORM}")')
    assert seen.json(INDEX)["weight_map"][A] == S1


def test_a_key_in_two_shards_stays_in_both(tmp_path: Path) -> None:
    """The index goes on naming the one that it named; without an index the last counts, as for sequential readers."""
    key_in_two_shards(tmp_path)
    seen = look(tmp_path)
    assert seen.shards == {S1: {A, C}, S2: {B, C}}
    assert seen.json(INDEX)["weight_map"][C] == S1
    assert seen.json(INDEX)["weight_map"][C.replace("weight", "weight_scale")] == S1
    assert seen.warned(f'1 tensor ("{C}") in more than one shard')
    (tmp_path / INDEX).unlink()
    assert look(tmp_path).json(INDEX)["weight_map"][C] == S2


def test_a_key_that_two_shards_state_differently_is_refused(tmp_path: Path) -> None:
    """Two readers would see two different models."""
    write_files(tmp_path, {S1: named(A), S2: named(A, dtype="F16")}, LLM)
    with pytest.raises(SourceInvalidError, match=r"in two shards, .*BF16\[32, 64\] and F16"):
        look(tmp_path)


def test_shared_scales_span_copies_in_two_shards(tmp_path: Path) -> None:
    """per_tensor: a fused weight that two shards hold has one scale in both, the largest of all."""
    q, k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    files = write_files(tmp_path / "src", {S1: named(q, k), S2: {**named(v), **named(q)}}, LLM)
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme="per_tensor")
    check_files(tree, files, {q, k, v}, "per_tensor", {name: [q, k, v] for name in (q, k, v)})


def test_shards_that_the_index_does_not_name(tmp_path: Path) -> None:
    """One of the same set is hidden; one of another name is shown as it is, and noted."""
    unnamed_shard(tmp_path)
    write_files(tmp_path, {"extra.safetensors": named("x")})
    seen = look(tmp_path)
    assert seen.plan.hidden == {"model-00003-of-00003.safetensors": "the index does not name it"}
    assert "extra.safetensors" in seen.names
    assert seen.noted("extra.safetensors: not named by the index, shown as it is")


def test_weights_beside_a_set_without_index_are_on_the_ignore_list(tmp_path: Path) -> None:
    """vLLM reads every file of such a folder: what is not made FP8 must be known not to be."""
    single_file(tmp_path)
    extra = ("mtp.layers.0.fc.weight", "mtp.norm.weight", "mtp.scale")
    write_files(tmp_path, {"mtp.safetensors": named(*extra)})
    write_bytes(tmp_path / "broken.safetensors", b"no header")
    seen = look(tmp_path)
    assert list(seen.shards) == ["model.safetensors"]
    assert {"mtp.safetensors", "broken.safetensors"} <= {*seen.names}
    assert seen.noted("mtp.safetensors: not in the weight set, shown as it is")
    ignored = seen.json("config.json")["quantization_config"]["ignore"]
    assert "mtp.layers.0.fc" in ignored
    assert not [name for name in ignored if "norm" in name or "scale" in name]
    assert A.removesuffix(".weight") not in ignored


def test_a_copy_beside_a_set_without_index_is_hidden(tmp_path: Path) -> None:
    """Or readers of every file would read tensors twice, FP8 and not. With an index they do not."""
    files = single_file(tmp_path)
    write_files(tmp_path, {"model_old.safetensors": named(A, seed=3)})
    seen = look(tmp_path)
    assert seen.plan.hidden == {
        "model_old.safetensors": "holds tensors of the weight set once more"
    }
    write_index(tmp_path / INDEX, dict.fromkeys(files["model.safetensors"], "model.safetensors"))
    seen = look(tmp_path)
    assert seen.plan.hidden == {}
    assert seen.noted("model_old.safetensors: not named by the index")
    ignored = seen.json("config.json")["quantization_config"]["ignore"]
    assert A.removesuffix(".weight") not in ignored


@pytest.mark.parametrize(
    ("config", "used"),
    [(LLM, INDEX), (DIT, "diffusion_pytorch_model.safetensors.index.json")],
    ids=["transformers", "diffusers"],
)
def test_of_two_indexes_the_loaders_own_is_used(
    tmp_path: Path, config: dict[str, object], used: str
) -> None:
    """Which one follows from the config's kind; the other, which lacks the scales, is hidden."""
    two_indexes(tmp_path)
    write_json(tmp_path / "config.json", config)
    seen = look(tmp_path)
    assert [name for name in seen.names if name.endswith(".index.json")] == [used]
    ((other, why),) = seen.plan.hidden.items()
    assert other != used
    assert other.endswith(".index.json")
    assert why == "another index"


def test_two_whole_sets_in_one_folder(tmp_path: Path) -> None:
    """The one that the folder's loader looks for is used, the other one hidden."""
    files = {"diffusion_pytorch_model.safetensors": named(A), "model.safetensors": named(A)}
    write_files(tmp_path, files, DIT)
    seen = look(tmp_path)
    assert list(seen.shards) == ["diffusion_pytorch_model.safetensors"]
    assert seen.plan.hidden == {"model.safetensors": "another weight set"}


def test_variants_beside_the_full_set_are_hidden(tmp_path: Path) -> None:
    """.fp16. and .bf16. files, sharded or not, and their indexes; a name with a dot of its own is no variant."""
    single_file(tmp_path)
    doubles = ["model.fp16.safetensors", "model.bf16.safetensors", "model.non_ema.safetensors"]
    doubles += [f"model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)]
    write_files(tmp_path, {name: named(A, dtype="F16") for name in doubles})
    write_index(tmp_path / "model.safetensors.index.fp16.json", {A: doubles[-1]})
    write_files(tmp_path, {"model.visual.safetensors": named("visual.x")})
    seen = look(tmp_path)
    assert seen.plan.hidden == dict.fromkeys(
        sorted([*doubles, "model.safetensors.index.fp16.json"]), "a variant of model"
    )
    assert "model.visual.safetensors" in seen.names


def test_of_variants_alone_one_is_used(tmp_path: Path) -> None:
    """bf16 before fp16, under its own name."""
    only_variants(tmp_path)
    seen = look(tmp_path)
    assert list(seen.shards) == ["model.bf16.safetensors"]
    assert seen.plan.hidden == {"model.fp16.safetensors": "another variant of model.bf16"}


# --- Mistral, first publications, other formats


def test_consolidated_weights_beside_shards_are_hidden(tmp_path: Path) -> None:
    """vLLM would read them instead of the FP8 shards, and find no FP8 in params.json."""
    no_index(tmp_path)
    write_files(tmp_path, {"consolidated.safetensors": named("layers.0.attention.wq.weight")})
    write_json(tmp_path / "params.json", {"dim": 64})
    seen = look(tmp_path)
    assert list(seen.shards) == [S1, S2]
    assert seen.plan.hidden == {
        "consolidated.safetensors": "the same weights in Mistral's own format"
    }
    assert "params.json" in seen.names


@pytest.mark.parametrize("shards", [1, 2])
def test_mistrals_own_format_alone_is_shown_as_it_is(tmp_path: Path, shards: int) -> None:
    """Nothing in it can say FP8, so a reader would take FP8 for BF16; --component quantizes it all the same."""
    wq, wo = (f"layers.{n}.attention.wo.weight" for n in (0, 1))
    names = ["consolidated.safetensors"]
    if shards == 2:
        names = [f"consolidated-0000{n}-of-00002.safetensors" for n in (1, 2)]
        write_index(tmp_path / "consolidated.safetensors.index.json", {wq: names[0], wo: names[1]})
    files = {names[0]: named(wq)} if shards == 1 else {names[0]: named(wq), names[1]: named(wo)}
    write_files(tmp_path, files)
    write_json(tmp_path / "params.json", {"dim": 64})
    seen = look(tmp_path)
    assert seen.quantized == set()
    assert seen.warned("params.json, Mistral's own format", "shown as it is")
    assert {*names, "params.json"} <= {*seen.names}
    assert look(tmp_path, components=(".",)).quantized >= {wq}


@pytest.mark.fuse
def test_a_mount_of_mistrals_own_format_says_why_not(fp8fs: Fp8fs, place: Path) -> None:
    """The refusal names params.json; --allow-unquantized serves the source as it is."""
    name = "consolidated.safetensors"
    write_files(place / "src", {name: named("layers.0.attention.wo.weight")})
    write_json(place / "src" / "params.json", {"dim": 64})
    assert "Mistral's own format" in fp8fs.run("mount", place / "src", place / "m", code=12).stderr
    fp8fs.mount(place / "src", place / "m", "--allow-unquantized")
    assert (place / "m" / name).read_bytes() == (place / "src" / name).read_bytes()


def test_consolidated_weights_without_params_are_a_model_like_any_other(tmp_path: Path) -> None:
    """The name alone says nothing."""
    write_files(tmp_path, {"consolidated.safetensors": named(A)}, LLM)
    assert look(tmp_path).quantized == {A}


def test_the_first_publication_is_hidden(tmp_path: Path) -> None:
    """original/: weights in it are the model's once more, small files are not."""
    no_index(tmp_path)
    write_bytes(tmp_path / "original" / "consolidated.00.pth", b"x")
    write_json(tmp_path / "original" / "params.json", {"dim": 64})
    write_json(tmp_path / "original" / "config.json", {"dim": 64})
    write_files(tmp_path / "original", {"model.safetensors": named("block.0.mlp.w1.weight")})
    seen = look(tmp_path)
    assert list(seen.shards) == [S1, S2]
    assert seen.plan.hidden == dict.fromkeys(
        ("original/consolidated.00.pth", "original/model.safetensors"),
        "the same weights as they were first published",
    )
    assert {"original/params.json", "original/config.json"} <= {*seen.names}


def test_src_may_be_the_first_publication_itself(tmp_path: Path) -> None:
    """A folder of that name, or one that has no weights beside it, is nothing special."""
    write_files(tmp_path / "original", {"model.safetensors": named(A)}, LLM)
    assert look(tmp_path / "original").quantized == {A}
    assert look(tmp_path).quantized == {A}


def test_the_same_weights_in_other_formats(tmp_path: Path) -> None:
    """Those that a loader could fall back to are hidden; gguf, onnx and files of unknown stem are shown and noted."""
    no_index(tmp_path)
    hidden = ["consolidated.00.pth", "flax_model.msgpack", "model.pth", "pytorch_model.bin"]
    hidden += ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "tf_model.h5"]
    shown = ["tiny.Q4_K_M.gguf", "model.onnx", "Wan2.1_VAE.pth"]
    for name in (*hidden, *shown, "training_args.bin", "onnx/model.onnx"):
        write_bytes(tmp_path / name, b"{}")
    seen = look(tmp_path)
    assert seen.plan.hidden == dict.fromkeys(sorted(hidden), "the same weights in another format")
    for name in shown:
        assert name in seen.names
        assert seen.noted(f"{name}: weights in another format")
    assert {"training_args.bin", "onnx/model.onnx"} <= {*seen.names}
    assert not seen.noted("training_args")


def test_nothing_is_hidden_where_nothing_is_quantized(tmp_path: Path) -> None:
    """A text encoder that passes through keeps its variants and its pickles."""
    wan_like(tmp_path)
    write_files(tmp_path / "text_encoder", {"model.fp16.safetensors": named("x")})
    write_bytes(tmp_path / "text_encoder" / "pytorch_model.bin", b"x")
    write_bytes(tmp_path / "transformer" / "diffusion_pytorch_model.bin", b"x")
    seen = look(tmp_path)
    assert list(seen.plan.hidden) == ["transformer/diffusion_pytorch_model.bin"]
    named_too = look(tmp_path, components=("text_encoder",))
    assert {*named_too.plan.hidden} == {
        "text_encoder/model.fp16.safetensors",
        "text_encoder/pytorch_model.bin",
    }


# --- adapters


LORA = "base_model.model.layers.0.mlp.down_proj.lora_A.weight"
SAVED = "base_model.model.layers.0.mlp.down_proj.weight"


def adapter(folder: Path, stem: str = "adapter_model") -> None:
    write_files(folder, {f"{stem}.safetensors": named(LORA, SAVED)})
    write_json(folder / "adapter_config.json", {"peft_type": "LORA"})


@pytest.mark.parametrize("stem", ["adapter_model", "pytorch_lora_weights"])
def test_an_adapter_alone_is_shown_as_it_is(tmp_path: Path, stem: str) -> None:
    """Not even the whole weights that it may hold are quantized, nor is what stands beside it hidden."""
    adapter(tmp_path, stem)
    write_bytes(tmp_path / "pytorch_model.bin", b"x")
    seen = look(tmp_path)
    assert seen.quantized == set()
    assert seen.noted("an adapter, no model of its own")
    assert not seen.plan.hidden


def test_an_adapter_beside_or_below_a_model_is_shown_as_it_is(tmp_path: Path) -> None:
    """The model is quantized; adapters in its folder and in folders below are ordinary files."""
    single_file(tmp_path)
    adapter(tmp_path)
    adapter(tmp_path / "adapters" / "one")
    for name in "xy":
        write_files(tmp_path / "loras", {f"{name}.safetensors": named(LORA)})
    seen = look(tmp_path)
    assert seen.quantized == {A}
    assert list(seen.shards) == ["model.safetensors"]
    assert seen.noted("adapter_model.safetensors: an adapter, shown as it is")
    assert seen.noted("adapters/one", "an adapter, no model of its own")
    assert {"adapters/one/adapter_model.safetensors", "loras/x.safetensors"} <= {*seen.names}


def test_an_adapter_at_the_root_does_not_keep_models_below_from_being_quantized(
    tmp_path: Path,
) -> None:
    """It is no model, so the folders below are not below a model."""
    adapter(tmp_path)
    single_file(tmp_path / "base")
    assert list(look(tmp_path).shards) == ["base/model.safetensors"]


# --- several models, pipelines in folders


def test_several_models_in_one_tree_are_each_quantized(tmp_path: Path) -> None:
    """Each under its own config, in the dialect of its own kind."""
    llama_like(tmp_path / "big")
    wan_like(tmp_path / "video" / "wan")
    write_files(tmp_path / "dit", {"model.safetensors": named("blocks.0.ffn.2.weight")}, DIT)
    seen = look(tmp_path)
    assert seen.plan.schemes == {
        "big": "per_channel",
        "dit": "per_tensor",
        "video/wan/transformer": "per_tensor",
    }
    assert "quantization_config" in seen.json("big/config.json")
    assert seen.plan.entries["video/wan/vae/config.json"].kind == "source"


def test_models_below_a_model_are_shown_as_they_are(tmp_path: Path) -> None:
    """The note says how to get them quantized, and that works."""
    single_file(tmp_path)
    single_file(tmp_path / "draft")
    seen = look(tmp_path)
    assert list(seen.shards) == ["model.safetensors"]
    assert seen.noted("draft", "--component draft quantizes it")
    assert list(look(tmp_path, components=("draft",)).shards) == ["draft/model.safetensors"]


def test_a_folder_full_of_models_is_refused(tmp_path: Path) -> None:
    """Files that no index ties together and that state the same tensors: which is meant cannot be known."""
    for name in "xy":
        write_safetensors(tmp_path / f"{name}.safetensors", named(A))
    with pytest.raises(SourceInvalidError) as caught:
        look(tmp_path)
    assert "x.safetensors and y.safetensors, which no index ties together" in caught.value.what
    assert caught.value.hint == "if these are several models, give each a folder of its own"


def test_single_files_at_a_pipelines_root_are_ordinary_files(tmp_path: Path) -> None:
    """As published beside SDXL and Flux: the pipeline is quantized, they are shown as they are."""
    wan_like(tmp_path)
    write_files(tmp_path, {"wan_full.safetensors": named(A), "wan_full_0.9.safetensors": named(A)})
    seen = look(tmp_path)
    assert list(seen.plan.schemes) == ["transformer"]
    assert {"wan_full.safetensors", "wan_full_0.9.safetensors"} <= {*seen.names}


def test_a_component_may_be_a_link_to_a_folder_elsewhere(tmp_path: Path) -> None:
    """Pipelines that are put together from links are planned as if the folders were there."""
    written = wan_like(tmp_path / "real")
    (tmp_path / "src").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "src" / path.name).symlink_to(path)
    seen, real = look(tmp_path / "src"), look(tmp_path / "real")
    assert seen.quantized == real.quantized
    assert seen.quantized
    assert seen.names == real.names
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store")
    shards = {path.name: path for path in (tree / "transformer").glob("*.safetensors")}
    chosen = {
        n for n in written["transformer"] if re.match(r"blocks.*(to_\w+|0|proj|2)\.weight$", n)
    }
    assert chosen >= seen.quantized
    assert len(shards) == 2


def test_a_whole_cache_is_refused_with_a_model_to_name(tmp_path: Path) -> None:
    """A Hugging Face cache holds many models; the hint names one of them."""
    single_file(tmp_path / "m")
    for name in ("org/one", "org/two"):
        hf_cache(tmp_path / "hub", tmp_path / "m", name=name)
    with pytest.raises(SourceInvalidError) as caught:
        look(tmp_path / "hub")
    assert "is a Hugging Face cache with 2 models: models--org--one, models--org--two" in (
        caught.value.what
    )
    assert caught.value.hint.endswith("hub/models--org--one")
