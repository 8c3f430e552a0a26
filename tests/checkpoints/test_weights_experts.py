"""Experts stacked in 3-D tensors: kept and ignored by default, one FP8 weight each with --split-experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import fp8fs
from fp8fs.errors import Fp8fsError, SourceInvalidError, UsageError
from tests import oracle
from tests.acceptance.harness import Fp8fs
from tests.builders import Tensor, named, tensor, write_json, write_sharded
from tests.checkpoints.looks import SCHEMES, check_index, look, stored

EXPERTS, HIDDEN, INNER = 3, 64, 48
MOE = "model.layers.0.mlp.experts"
DOWN, GATE_UP = f"{MOE}.down_proj", f"{MOE}.gate_up_proj"
ROUTER = "model.layers.0.mlp.gate.weight"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"
KEPT_ALWAYS = {ROUTER, "model.embed_tokens.weight"}

STRAIGHT = {DOWN: (EXPERTS, HIDDEN, INNER), GATE_UP: (EXPERTS, 2 * INNER, HIDDEN)}
TURNED = {DOWN: (EXPERTS, INNER, HIDDEN), GATE_UP: (EXPERTS, HIDDEN, 2 * INNER)}


def write(
    src: Path,
    shapes: Mapping[str, tuple[int, ...]],
    architecture: str = "Qwen3MoeForCausalLM",
    *,
    shards: int = 1,
) -> dict[str, Tensor]:
    """A checkpoint with stacked experts of these shapes."""
    stacked = {
        name: tensor(number, "BF16", *shape) for number, (name, shape) in enumerate(shapes.items())
    }
    tensors = named(*KEPT_ALWAYS, ATTENTION) | stacked
    write_sharded(src, dict(sorted(tensors.items())), shards)
    write_json(src / "config.json", {"architectures": [architecture], "model_type": "tiny"})
    return tensors


def one_by_one(
    tensors: Mapping[str, Tensor],
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    base: str = MOE,
) -> dict[str, Tensor]:
    """The same checkpoint with a weight for each expert, cut from the bytes by hand."""
    gate, up, down = leaves
    cut = {name: made for name, made in tensors.items() if not name.startswith(f"{base}.")}
    for name, parts in ((f"{base}.gate_up_proj", (gate, up)), (f"{base}.down_proj", (down,))):
        dtype, (experts, rows, cols), data = tensors[name]
        size = len(data) // experts // len(parts)
        for number in range(experts * len(parts)):
            expert, part = divmod(number, len(parts))
            shape = (rows // len(parts), cols)
            made = (dtype, shape, data[number * size : (number + 1) * size])
            cut[f"{base}.{expert}.{parts[part]}.weight"] = made
    return cut


def wanted(cut: Mapping[str, Tensor], scheme: str) -> dict[str, oracle.Stored]:
    """The view of the split checkpoint: all but embeddings and router is FP8, gate and up with one scale."""
    chosen = cut.keys() - KEPT_ALWAYS
    groups = {}
    for name in chosen:
        for one, other in ((".gate_proj.", ".up_proj."), (".w1.", ".w3.")):
            if one in name:
                pair = [name, name.replace(one, other)]
                groups |= dict.fromkeys(pair, pair)
    return oracle.expected(stored(cut), chosen, scheme, groups)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shapes", [STRAIGHT, TURNED], ids=["out, in", "in, out"])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "TinyModel"])
def test_by_default_they_stay_as_they_are(
    tmp_path: Path, architecture: str, shapes: dict[str, tuple[int, ...]], scheme: str
) -> None:
    """Stacked experts arrive bit for bit, whatever their orientation, and are on the ignore list; the rest is FP8."""
    tensors = write(tmp_path / "src", shapes, architecture)
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    expected = oracle.expected(stored(tensors), {ATTENTION}, scheme, {})
    assert oracle.read_folder(tree) == expected
    config = json.loads((tree / "config.json").read_text())["quantization_config"]
    assert MOE in config.get("ignore", config.get("modules_to_not_convert"))


def test_plan_says_it_in_one_line(fp8fs: Fp8fs, tmp_path: Path) -> None:
    """``plan`` has one note for all of them, as text and in JSON."""
    write(tmp_path / "src", STRAIGHT)
    said = fp8fs.run("plan", tmp_path / "src").stdout
    assert [line for line in said.splitlines() if "3-D" in line and line.startswith("note")] == [
        f'note: .: 2 tensors hold experts in 3-D ("{DOWN}" and others), kept in the source\'s dtype: '
        "--split-experts shows each expert as FP8 of its own"
    ]
    (note,) = fp8fs.json("plan", tmp_path / "src")["notes"]
    assert f"note: {note}" in said
    assert not look(tmp_path / "src", split_experts=True).noted("3-D")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["Llama4ForConditionalGeneration", "Qwen3MoeForCausalLM"])
def test_a_reader_that_finds_no_stacked_experts_is_named(
    tmp_path: Path, architecture: str, scheme: str
) -> None:
    """Llama4 with compressed-tensors: a warning says which scheme transformers reads, and there is none for others."""
    write(tmp_path / "src", TURNED, architecture)
    warned = look(tmp_path / "src", scheme=scheme).warned("Llama4", "--scheme block")
    assert warned is (architecture.startswith("Llama4") and scheme == "per_channel")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_split_they_are_the_readers_own_names(tmp_path: Path, scheme: str, shards: int) -> None:
    """Each expert is what the oracle makes of its rows, as if the checkpoint had always been stored so."""
    tensors = write(tmp_path / "src", STRAIGHT, shards=shards)
    tree = fp8fs.build(
        tmp_path / "src", store=tmp_path / "store", scheme=scheme, split_experts=True
    )
    assert oracle.read_folder(tree) == wanted(one_by_one(tensors), scheme)
    if shards > 1:
        check_index(tree / "model.safetensors.index.json")
    ignored = json.loads((tree / "config.json").read_text())["quantization_config"]
    assert not any("experts" in name for name in ignored.get("modules_to_not_convert", ()))


def test_split_experts_through_a_mount(mount: Callable[..., Path], tmp_path: Path) -> None:
    """The same in every way of serving."""
    tensors = write(tmp_path / "src", STRAIGHT, shards=2)
    view = mount(tmp_path / "src", "--split-experts")
    assert oracle.read_folder(view) == wanted(one_by_one(tensors), "per_channel")


@pytest.mark.parametrize("parent", ["block_sparse_moe", "mlp"])
def test_mixtrals_experts_have_its_names(tmp_path: Path, parent: str) -> None:
    """Readers of Mixtral know w1, w2, w3 of block_sparse_moe, whatever transformers calls that at run time."""
    base = f"model.layers.0.{parent}.experts"
    shapes = {f"{base}.down_proj": STRAIGHT[DOWN], f"{base}.gate_up_proj": STRAIGHT[GATE_UP]}
    tensors = write(tmp_path / "src", shapes, "MixtralForCausalLM")
    tree = fp8fs.build(
        tmp_path / "src", store=tmp_path / "store", scheme="per_tensor", split_experts=True
    )
    cut = {
        name.replace(f".{parent}.experts.", ".block_sparse_moe.experts."): made
        for name, made in one_by_one(tensors, ("w1", "w3", "w2"), base).items()
    }
    assert oracle.read_folder(tree) == wanted(cut, "per_tensor")


def test_globs_name_experts_as_the_view_does(tmp_path: Path) -> None:
    """--keep names one expert; all of its layer stay, since engines build a layer's experts alike."""
    write(tmp_path / "src", STRAIGHT)
    seen = look(tmp_path / "src", split_experts=True, keep=(f"{MOE}.1.up_proj",))
    assert seen.quantized == {ATTENTION}


def test_splitting_is_part_of_what_a_view_is(tmp_path: Path) -> None:
    """Split or not are two plans with two objects; the manifest says which one a tree is."""
    write(tmp_path / "src", STRAIGHT)
    plain, split = look(tmp_path / "src").plan, look(tmp_path / "src", split_experts=True).plan
    assert plain.plan_id != split.plan_id
    assert plain.shards[0].object_id != split.shards[0].object_id
    for option in (False, True):
        tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", split_experts=option)
        manifest = json.loads((tree / ".fp8fs" / "manifest.json").read_text())
        assert manifest["recipe"]["split_experts"] is option


REFUSED: dict[str, tuple[dict[str, tuple[int, ...]], str, type[Fp8fsError], str]] = {
    "gpt-oss": (TURNED, "GptOssForCausalLM", UsageError, "no reader of GptOssForCausalLM"),
    "an unknown class": (STRAIGHT, "TinyModel", UsageError, "no reader of TinyModel"),
    "[in, out]": (TURNED, "Qwen3MoeForCausalLM", UsageError, "[in, out]"),
    "no experts": ({}, "Qwen3MoeForCausalLM", UsageError, "no component"),
    "half of them": (
        {DOWN: STRAIGHT[DOWN]},
        "Qwen3MoeForCausalLM",
        SourceInvalidError,
        "has no counterpart",
    ),
    "odd shapes": (
        {DOWN: (3, 16, 32), GATE_UP: (3, 16, 32)},
        "Qwen3MoeForCausalLM",
        SourceInvalidError,
        "does not go with its counterpart",
    ),
    "taken": (
        {**STRAIGHT, f"{MOE}.0.up_proj.weight": (16, 32)},
        "Qwen3MoeForCausalLM",
        SourceInvalidError,
        "exists already",
    ),
    "other parts": (
        {f"{MOE}.w13": (3, 16, 32)},
        "Qwen3MoeForCausalLM",
        SourceInvalidError,
        "is no gate_up_proj",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_split_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    """One error names the option, what is wrong, and that without the option the experts stay as they are."""
    shapes, architecture, error, says = REFUSED[kind]
    write(tmp_path / "src", shapes, architecture)
    with pytest.raises(error) as caught:
        look(tmp_path / "src", split_experts=True)
    assert says in str(caught.value)
    assert "--split-experts out" in str(caught.value)
