"""core/checkpoint.py and core/weightset.py: components, weight sets, doubles and defaults, from names and headers."""

from __future__ import annotations

import json

import pytest

from fp8fs.core.checkpoint import Component, SourceEntry, classify, text_files
from fp8fs.core.header import Header, TensorEntry
from fp8fs.core.weightset import weight_sets
from fp8fs.errors import SourceInvalidError

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
WAN = {"_class_name": "WanTransformer3DModel"}
T5 = {"architectures": ["T5EncoderModel"], "model_type": "t5"}
VAE = {"_class_name": "AutoencoderKLWan"}


def header(*names: str, dtype: str = "BF16") -> Header:
    """A header with one-element tensors of these names."""
    tensors = {n: TensorEntry(dtype, (1,), (2 * i, 2 * i + 2)) for i, n in enumerate(names)}
    return Header(tensors, {}, 4096)


class Tree:
    """A source as plain data: files by name, JSON where a dict is given, shards where tensor names are."""

    def __init__(self) -> None:
        self.entries: dict[str, SourceEntry] = {}
        self.texts: dict[str, bytes] = {}
        self.headers: dict[str, Header] = {}

    def add(self, path: str, content: object = None, kind: str = "file", link: str = "") -> Tree:
        self.entries[path] = SourceEntry(path, kind, 9, 1, 1, 0o644, 0, 0, 1, 1, link)
        if isinstance(content, bytes):
            self.texts[path] = content
        elif isinstance(content, dict):
            self.texts[path] = json.dumps(content).encode()
        elif isinstance(content, tuple):
            self.headers[path] = header(*content)
        elif isinstance(content, Header):
            self.headers[path] = content
        self.entries = dict(sorted(self.entries.items()))
        return self

    def index(self, path: str, **weight_map: str) -> Tree:
        return self.add(path, {"metadata": {}, "weight_map": weight_map})

    def classify(self) -> tuple[Component, ...]:
        return classify(weight_sets(self.entries, self.texts), self.texts, self.headers)

    def one(self) -> Component:
        (component,) = self.classify()
        return component

    def refusal(self) -> str:
        with pytest.raises(SourceInvalidError) as caught:
            self.classify()
        return caught.value.what


S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def llama() -> Tree:
    return Tree().add("config.json", LLAMA).add(S1, ("a", "b")).add(S2, ("c",))


def pipeline() -> Tree:
    tree = Tree().add("model_index.json", {"_class_name": "WanPipeline"})
    for folder, config, stem in (
        ("transformer", WAN, "diffusion_pytorch_model"),
        ("transformer_2", WAN, "diffusion_pytorch_model"),
        ("text_encoder", T5, "model"),
        ("vae", VAE, "diffusion_pytorch_model"),
    ):
        tree.add(folder, kind="dir").add(f"{folder}/config.json", config)
        tree.add(f"{folder}/{stem}.safetensors", ("x",))
    return tree.add("scheduler", kind="dir").add("scheduler/scheduler_config.json", {})


def test_a_transformers_model_at_the_root():
    """Kind, class, shards, map and default of the plainest case."""
    found = llama().index(INDEX, a=S1, b=S1, c=S2).one()
    assert (found.path, found.kind, found.class_name) == ("", "transformers", "LlamaForCausalLM")
    assert found.shards == (S1, S2)
    assert found.weight_map == {"a": S1, "b": S1, "c": S2}
    assert (found.index_path, found.config_path, found.config) == (INDEX, "config.json", LLAMA)
    assert found.default_quantized
    assert found.already_quantized == ""
    assert found.hidden == {}
    assert (found.notes, found.warnings) == ((), ())


def test_a_sharded_set_needs_no_index():
    """The same without one: the planner synthesizes it."""
    found = llama().one()
    assert (found.index_path, found.shards) == ("", (S1, S2))


def test_shards_are_ordered_by_number():
    """10 comes after 9 even where numbers are not padded, and whatever order the index has."""
    names = [f"model-{n}-of-11.safetensors" for n in range(1, 12)]
    tree = Tree().add("config.json", LLAMA)
    for n, name in enumerate(names):
        tree.add(name, (f"t{n}",))
    assert tree.one().shards == tuple(names)
    assert tree.index(
        INDEX, **{f"t{n}": names[n] for n in reversed(range(11))}
    ).one().shards == tuple(names)


def test_a_pipeline_quantizes_its_transformers_only():
    """Transformers by default; text encoder, VAE, scheduler and tokenizer never."""
    found = {c.path: c for c in pipeline().classify()}
    assert list(found) == ["text_encoder", "transformer", "transformer_2", "vae"]
    assert [p for p, c in found.items() if c.default_quantized] == ["transformer", "transformer_2"]
    assert found["transformer"].weight_map == {
        "x": "transformer/diffusion_pytorch_model.safetensors"
    }
    assert found["transformer"].config_path == "transformer/config.json"


@pytest.mark.parametrize(
    ("folder", "config", "default"),
    [
        ("dit", {"_class_name": "MiniMaxH3DiT"}, True),
        ("prior", {"_class_name": "FluxTransformer2DModel"}, True),
        ("unet", {"_class_name": "UNet2DConditionModel"}, False),
        ("transformer_ema", None, True),
        ("vae_decoder", {"_class_name": "WanTransformer3DModel"}, False),
        ("transformer_vae", {"_class_name": "AutoencoderKL"}, False),
        ("image_encoder", {"model_type": "clip"}, False),
        ("loras", None, False),
    ],
)
def test_defaults_of_a_pipeline_follow_folder_and_class(folder, config, default):
    """A transformer by its folder's name or its class; never a VAE or an encoder."""
    tree = Tree().add("model_index.json", {}).add(f"{folder}/model.safetensors", ("x",))
    if config is not None:
        tree.add(f"{folder}/config.json", config)
    assert tree.one().default_quantized is default


def test_a_nested_pipeline_is_a_pipeline():
    """Components below a subfolder's model_index.json follow the same rule."""
    tree = Tree().add("inner/model_index.json", {})
    tree.add("inner/vae/config.json", VAE).add("inner/vae/model.safetensors", ("v",))
    tree.add("inner/transformer/config.json", WAN).add(
        "inner/transformer/model.safetensors", ("t",)
    )
    assert {c.path: c.default_quantized for c in tree.classify()} == {
        "inner/transformer": True,
        "inner/vae": False,
    }


def test_a_folder_deep_in_a_pipeline_is_not_quantized():
    """Only the pipeline's transformers, not whatever lies below them."""
    tree = pipeline().add("transformer/lora/adapter.safetensors", ("l",))
    assert {c.path: c.default_quantized for c in tree.classify()}["transformer/lora"] is False


def test_src_may_be_one_component():
    """A diffusion transformer's folder by itself is quantized; a VAE's is not."""
    for config, default in ((WAN, True), (VAE, False)):
        found = (
            Tree()
            .add("config.json", config)
            .add("diffusion_pytorch_model.safetensors", ("x",))
            .one()
        )
        assert (found.kind, found.default_quantized) == ("diffusers", default)


def test_subfolders_count_only_if_the_root_has_no_weights():
    """Two expert folders without a pipeline: both; beside root weights: only the root."""
    tree = Tree()
    for folder in ("high_noise_model", "low_noise_model"):
        tree.add(f"{folder}/config.json", WAN).add(f"{folder}/model.safetensors", ("x",))
    assert all(c.default_quantized for c in tree.classify())
    tree.add("model.safetensors", ("y",))
    assert {c.path: c.default_quantized for c in tree.classify()} == {
        "": True,
        "high_noise_model": False,
        "low_noise_model": False,
    }


def test_a_folder_without_config_is_raw():
    """Files of any name, taken together; a config that names no class changes nothing."""
    tree = Tree().add("b.safetensors", ("b",)).add("a.safetensors", ("a",))
    for found in (tree.one(), tree.add("config.json", {"dim": 5}).one()):
        assert (found.kind, found.config, found.config_path) == ("raw", None, "")
        assert found.shards == ("a.safetensors", "b.safetensors")
        assert found.default_quantized


DOUBLES = {
    "consolidated.safetensors": True,
    "consolidated-00001-of-00002.safetensors": True,
    "consolidated.safetensors.index.json": True,
    "model.fp16.safetensors": True,
    "model-00001-of-00001.bf16.safetensors": True,
    "model.fp16-00001-of-00002.safetensors": True,
    "model.safetensors.index.fp16.json": True,
    "pytorch_model.bin": True,
    "pytorch_model-00001-of-00003.bin": True,
    "pytorch_model.bin.index.json": True,
    "pytorch_model.fp16.bin": True,
    "consolidated.00.pth": True,
    "model.pth": True,
    "tf_model.h5": True,
    "flax_model.msgpack": True,
    "models_t5_umt5-xxl-enc-bf16.pth": False,
    "Wan2.1_VAE.pth": False,
    "training_args.bin": False,
    "adapter_model.safetensors": False,
    "tokenizer.model": False,
}


@pytest.mark.parametrize("indexed", [True, False])
def test_the_same_weights_once_more_are_hidden(indexed):
    """Consolidated sets, variants and other formats are hidden; other files, weights or not, are left alone."""
    tree = llama()
    if indexed:
        tree.index(INDEX, a=S1, b=S1, c=S2)
    for name in DOUBLES:
        tree.add(
            name, {"metadata": {}, "weight_map": {"a": "x"}} if name.endswith(".json") else None
        )
    found = tree.one()
    assert found.shards == (S1, S2)
    assert set(found.hidden) == {name for name, double in DOUBLES.items() if double}


def test_a_single_file_beside_an_index_is_a_double():
    """The index decides; the single file of the same stem, and shards that it does not name, are hidden."""
    tree = llama().index(INDEX, a=S1, b=S1, c=S2)
    tree.add("model.safetensors", ("a",)).add("model-00003-of-00003.safetensors", ("z",))
    found = tree.one()
    assert found.shards == (S1, S2)
    assert found.hidden == dict.fromkeys(
        ("model-00003-of-00003.safetensors", "model.safetensors"), "the index does not name it"
    )


@pytest.mark.parametrize(
    ("names", "shards"),
    [
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (["model.fp16.safetensors", "model.bf16.safetensors"], ["model.bf16.safetensors"]),
        (["model.safetensors", "other.safetensors"], ["model.safetensors"]),
        (["model.safetensors", S1, S2], ["model.safetensors"]),
        (["x-00001-of-00001.safetensors"], ["x-00001-of-00001.safetensors"]),
        (["x.safetensors", "x.fp16.safetensors"], ["x.safetensors"]),
    ],
)
def test_the_set_in_use_by_names_alone(names, shards):
    """Usual stems before others, full sets before variants, anything if it is all there is."""
    tree = Tree()
    for name in names:
        tree.add(name, (name,))
    assert tree.one().shards == tuple(shards)
    (found,) = weight_sets(tree.entries, tree.texts)
    assert sorted(found.shards) == sorted(shards)


def test_an_index_is_found_below_any_stem():
    """A component whose set has a name of its own is read by its index."""
    tree = (
        Tree().add("a.safetensors", ("t",)).index("own.safetensors.index.json", t="a.safetensors")
    )
    found = tree.one()
    assert (found.index_path, found.shards) == ("own.safetensors.index.json", ("a.safetensors",))


def test_a_tensor_that_the_index_forgot_is_in_the_map():
    """Loaders that go by files read it, so the plan has it."""
    assert llama().index(INDEX, a=S1, c=S2).one().weight_map["b"] == S1


@pytest.mark.parametrize("kind", ["link", "other", ""])
def test_an_index_that_names_a_missing_shard_is_refused(kind):
    """The shard is named, and what stands in its place."""
    tree = Tree().add(S1, ("a",)).index(INDEX, a=S1, c=S2)
    if kind:
        tree.add(S2, kind=kind, link="nowhere" if kind == "link" else "")
    what = {
        "link": "is a symlink that leads to no file",
        "other": "is not a regular file",
        "": "is missing",
    }[kind]
    assert tree.refusal() == f"{INDEX}: names {S2}, which {what}"
    with pytest.raises(SourceInvalidError):
        weight_sets(tree.entries, tree.texts)


def test_an_index_without_any_file_is_refused():
    """An index alone is an unfinished download."""
    assert "which is missing" in Tree().index(INDEX, a=S1).refusal()
    assert "names no shard" in Tree().index(INDEX).refusal()
    assert "it holds model" in Tree().add(INDEX, kind="link", link="nowhere").refusal()


def test_a_numbered_set_must_be_complete():
    """Without an index, the numbers say what is missing."""
    assert "shard 2 of 2 of model is missing" in Tree().add(S1, ("a",)).refusal()
    assert "shard 1 of 2 of model is missing" in Tree().add("t/" + S2, ("a",)).refusal()
    beyond = Tree().add("m-1-of-1.safetensors").add("m-2-of-1.safetensors")
    assert "beyond their count of 1" in beyond.refusal()
    zero = "model-00000-of-00002.safetensors"
    assert Tree().add(zero, ("z",)).add(S1, ("a",)).add(S2, ("b",)).one().shards == (zero, S1, S2)
    assert "shard 2 of 2" in Tree().add(zero, ("z",)).add(S1, ("a",)).refusal()


def test_several_indexes_of_equal_standing_are_refused():
    """No rule tells which is meant, unless they name the same shards."""
    tree = Tree().add("a.safetensors", ("t",)).add("b.safetensors", ("t",))
    tree.index("p.safetensors.index.json", t="a.safetensors")
    tree.index("q.safetensors.index.json", t="b.safetensors")
    assert "p.safetensors.index.json, q.safetensors.index.json" in tree.refusal()


def test_a_tensor_in_two_shards_is_in_both():
    """The map has the one that the index names, else the last; it must be stated alike."""
    tree = Tree().add(S1, ("a",)).add(S2, ("a",))
    assert tree.one().weight_map == {"a": S2}
    assert '1 tensor ("a") in more than one shard' in tree.one().warnings[0]
    assert tree.index(INDEX, a=S1, x=S2).one().weight_map == {"a": S1}
    tree.add(S1, header("a", dtype="F16"))
    assert tree.refusal() == f'tensor "a" is in two shards, {S1} and {S2}, as F16[1] and BF16[1]'


def test_headers_beat_the_index():
    """A tensor is where its header is; what the index has wrong is said."""
    found = llama().index(INDEX, a=S2, c=S2, d=S1, e=S1).one()
    assert found.weight_map == {"a": S1, "b": S1, "c": S2}
    nowhere, elsewhere, lacks = found.warnings
    assert '2 tensors ("d" and others) in no shard' in nowhere
    assert 'another shard than the right one for 1 tensor ("a")' in elsewhere
    assert 'lacks 1 tensor ("b")' in lacks


def test_a_folder_of_adapters_is_no_component():
    """Files that state the same tensors, beside a model, are ordinary files; alone at the root they are refused."""
    tree = llama().add("loras/x.safetensors", ("l",)).add("loras/y.safetensors", ("l",))
    assert [c.path for c in tree.classify()] == [""]
    alone = Tree().add("x.safetensors", ("l",)).add("y.safetensors", ("l",))
    assert "is in two shards" in alone.refusal()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            'has a quantization_config (quant_method "fp8")',
        ),
        ({"quantization_config": {}}, "config.json has a quantization_config"),
        ({"compression_config": {"a": 1}}, "config.json has a compression_config"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, '"awq"'),
        ({"quantization_config": None}, ""),
    ],
)
def test_a_config_that_says_quantized_is_believed(config, said):
    """The reason names the key and the method; null is no config."""
    found = Tree().add("config.json", {**LLAMA, **config}).add("model.safetensors", ("a",)).one()
    assert said in found.already_quantized
    assert bool(found.already_quantized) is bool(said)


def test_an_fp8_tensor_says_quantized():
    """The reason names the tensor, the file and the dtype."""
    found = Tree().add("model.safetensors", header("w", dtype="F8_E4M3")).one()
    assert found.already_quantized == 'tensor "w" in model.safetensors is F8_E4M3'


def test_a_config_that_is_no_object_is_refused():
    """By name."""
    tree = Tree().add("config.json", b"[1]").add("model.safetensors", ("a",))
    assert tree.refusal() == "config.json: not a JSON object"


def test_without_safetensors_the_refusal_says_what_is_there():
    """Other weights first, else a few names, else that it is empty; private folders do not count."""
    nothing = "SRC has no safetensors weights"
    tree = Tree().add(".cache/model.safetensors", ("a",))
    assert tree.refusal() == f"{nothing}: it is empty"
    assert tree.add("README.md").refusal() == f"{nothing}: it holds README.md"
    assert tree.add("pytorch_model.bin").refusal() == f"{nothing}, only pytorch_model.bin"
    for name in "abcd":
        tree.add(f"{name}.gguf")
    assert tree.refusal() == f"{nothing}, only a.gguf, b.gguf, c.gguf, 2 more"


def test_the_small_files_to_read():
    """Configs, indexes and model_index.json at any depth; nothing private, nothing else."""
    tree = pipeline().index("transformer/diffusion_pytorch_model.safetensors.index.json")
    tree.add(".git/config.json").add("tokenizer.json").add("pytorch_model.bin.index.json")
    tree.add("x/config.json", kind="link")
    assert text_files(tree.entries) == [
        "model_index.json",
        "text_encoder/config.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "transformer_2/config.json",
        "vae/config.json",
    ]
