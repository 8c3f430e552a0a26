"""Experts stored [E, in, out]: with --split-experts each is the transpose of its slice, as if it had been stored [out, in]."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fp8fs
from fp8fs.errors import SourceInvalidError
from tests import oracle
from tests.acceptance.harness import Fp8fs
from tests.builders import Tensor, named, tensor, write_json, write_sharded
from tests.checkpoints.looks import SCHEMES, check_index, look, stored
from tests.checkpoints.test_weights_experts import ATTENTION, KEPT_ALWAYS, ROUTER, wanted

QWEN, LLAMA = "Qwen3VLMoeForConditionalGeneration", "Llama4ForConditionalGeneration"
BASES = {
    QWEN: "model.language_model.layers.0.mlp.experts",
    LLAMA: "language_model.model.layers.0.feed_forward.experts",
}
BASE = BASES[LLAMA]
KINDS = {1: "u1", 2: "<u2", 4: "<u4"}


def write(
    src: Path,
    hidden: int,
    inner: int,
    *,
    experts: int = 3,
    dtype: str = "BF16",
    architecture: str = LLAMA,
    shards: int = 1,
    bad: tuple[str, int] | None = None,
    **config: object,
) -> dict[str, Tensor]:
    """A checkpoint with such experts; *bad*: one of their tensors, and the element of it that is NaN."""
    base = BASES[architecture]
    tensors = named(*KEPT_ALWAYS, ATTENTION) | {
        f"{base}.gate_up_proj": tensor(1, dtype, experts, hidden, 2 * inner),
        f"{base}.down_proj": tensor(2, dtype, experts, inner, hidden),
    }
    if bad is not None:
        name, element = bad
        kind, shape, data = tensors[name]
        codes = np.frombuffer(data, "<u2").copy()
        codes[element] = 0x7FC0
        tensors[name] = (kind, shape, codes.tobytes())
    write_sharded(src, dict(sorted(tensors.items())), shards)
    write_json(
        src / "config.json", {"architectures": [architecture], "model_type": "tiny", **config}
    )
    return tensors


def one_by_one(tensors: dict[str, Tensor], base: str = BASE) -> dict[str, Tensor]:
    """The same checkpoint with each expert's matrices transposed by numpy, a weight each."""
    cut = {name: made for name, made in tensors.items() if not name.startswith(f"{base}.")}
    for leaf, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        dtype, (experts, lines, width), data = tensors[f"{base}.{leaf}"]
        codes = np.frombuffer(data, KINDS[len(data) // (experts * lines * width)])
        for expert, matrix in enumerate(codes.reshape(experts, lines, width)):
            for part, window in zip(parts, np.split(matrix, len(parts), axis=1), strict=True):
                turned = np.ascontiguousarray(np.transpose(window))
                made = (dtype, turned.shape, turned.tobytes())
                cut[f"{base}.{expert}.{part}.weight"] = made
    return cut


def build(src: Path, scheme: str, **options: object) -> Path:
    """The finished tree, in a store beside the source."""
    return fp8fs.build(
        src,
        store=src.parent / "store",
        scheme=scheme,
        split_experts=True,
        **options,  # type: ignore[arg-type]
    )


SIZES: dict[str, tuple[int, int, int]] = {
    "small": (64, 48, 3),
    "blocks cut at both edges": (400, 208, 2),
    "square": (64, 32, 2),
    "several bands": (16400, 528, 1),
    "rows cut in tiles": (65552, 32, 1),
}
"""hidden, intermediate, experts."""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_each_expert_is_its_transposed_slice(tmp_path: Path, size: str, scheme: str) -> None:
    """Data and scales are what the oracle makes of the transpose; the index names them; a second look at all is clean."""
    hidden, inner, experts = SIZES[size]
    tensors = write(tmp_path / "src", hidden, inner, experts=experts, shards=2)
    tree = build(tmp_path / "src", scheme)
    assert oracle.read_folder(tree) == wanted(one_by_one(tensors), scheme)
    check_index(tree / "model.safetensors.index.json")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_dtypes_are_turned_too(tmp_path: Path, dtype: str, scheme: str) -> None:
    """Elements of two and of four bytes."""
    tensors = write(tmp_path / "src", 144, 80, dtype=dtype, architecture=QWEN)
    expected = wanted(one_by_one(tensors, BASES[QWEN]), scheme)
    assert oracle.read_folder(build(tmp_path / "src", scheme)) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_turned_experts_through_a_mount(
    mount: Callable[..., Path], tmp_path: Path, scheme: str
) -> None:
    """The same in every way of serving, with and without a gate and up that share a scale."""
    tensors = write(tmp_path / "src", 144, 80)
    view = mount(tmp_path / "src", "--split-experts", "--scheme", scheme)
    assert oracle.read_folder(view) == wanted(one_by_one(tensors), scheme)


def test_a_read_in_the_middle_of_a_large_expert(mount: Callable[..., Path], tmp_path: Path) -> None:
    """Bytes that are asked for alone, across bands, are the same bytes."""
    tensors = write(tmp_path / "src", 16400, 528, experts=1)
    expected = wanted(one_by_one(tensors), "block")
    view = mount(tmp_path / "src", "--split-experts", "--scheme", "block")
    path = view / "model.safetensors"
    start, entries, _ = oracle.read_header(path)
    with path.open("rb") as file:
        for part in ("up_proj", "down_proj"):
            name = f"{BASE}.0.{part}.weight"
            begin, end = entries[name]["data_offsets"]
            middle = (end - begin) // 2
            at = os.pread(file.fileno(), 3 << 20, start + begin + middle)
            assert at == expected[name].data[middle : middle + (3 << 20)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_verify_makes_them_again(fp8fs: Fp8fs, tmp_path: Path, scheme: str) -> None:
    """``verify --deep`` finds nothing after a build, kept experts too; a source that was changed is another one."""
    src = tmp_path / "src"
    write(src, 144, 80)
    for options in ((), ("--keep", f"{BASE}.1.up_proj")):
        words = (src, "--split-experts", "--scheme", scheme, *options)
        fp8fs.run("build", *words)
        fp8fs.run("verify", *words, "--deep")
    assert fp8fs.json("verify", fp8fs.store)["checked"] == 2
    (shard,) = src.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x01\x02")
    stale = fp8fs.json("verify", src, "--split-experts", "--scheme", scheme, "--deep")
    assert (stale["checked"], stale["missing"]) == (0, 1)


def test_damage_of_a_turned_expert_is_found(fp8fs: Fp8fs, tmp_path: Path) -> None:
    """``verify --deep`` names an expert whose sealed bytes are not what the source gives."""
    src = tmp_path / "src"
    write(src, 144, 80)
    tree = Path(fp8fs.run("build", src, "--split-experts", "--scheme", "block").stdout.strip())
    path = (tree / "model.safetensors").resolve()
    name = f"{BASE}.2.up_proj.weight"
    start, entries, _ = oracle.read_header(path)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(start + entries[name]["data_offsets"][0] + 100)
        file.write(b"\x55\xaa\x55")
    path.chmod(0o444)
    said = fp8fs.run(
        "verify", src, "--split-experts", "--scheme", "block", "--deep", code=50
    ).stdout
    assert name in said


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_nan_keeps_the_layers_experts(tmp_path: Path, scheme: str) -> None:
    """An expert with NaN is named, and its layer kept: each expert its transposed slice in the source's dtype."""
    hidden, inner, expert, line, column = 144, 80, 1, 17, 80 + 5
    element = (expert * hidden + line) * 2 * inner + column
    tensors = write(tmp_path / "src", hidden, inner, bad=(f"{BASE}.gate_up_proj", element))
    notes: list[str] = []
    tree = build(tmp_path / "src", scheme, note=notes.append)
    assert any(f"{BASE}.1.up_proj.weight" in note for note in notes)
    expected = oracle.expected(stored(one_by_one(tensors)), {ATTENTION}, scheme, {})
    assert oracle.read_folder(tree) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scan_says_where_the_nan_is(fp8fs: Fp8fs, tmp_path: Path, scheme: str) -> None:
    """``plan --scan`` names the view's tensor and the flat index in its [out, in]."""
    hidden, inner, expert, line, column = 144, 80, 1, 17, 80 + 5
    element = (expert * hidden + line) * 2 * inner + column
    write(tmp_path / "src", hidden, inner, bad=(f"{BASE}.gate_up_proj", element))
    words = (tmp_path / "src", "--split-experts", "--scheme", scheme)
    assert fp8fs.json("plan", *words, "--scan")["non_finite"] == [
        {"component": "", "tensor": f"{BASE}.1.up_proj.weight", "index": 5 * hidden + line}
    ]


def test_turned_or_not_are_two_objects(tmp_path: Path) -> None:
    """The same bytes of SRC under the same header, read as [in, out] and as [out, in], have two keys."""
    keys = set()
    for number, (hidden, inner, architecture) in enumerate(
        [(64, 32, LLAMA), (64, 48, LLAMA), (64, 32, QWEN)]
    ):
        write(tmp_path / str(number), hidden, inner, architecture=architecture)
        (shard,) = look(tmp_path / str(number), split_experts=True).plan.shards
        keys.add(shard.object_id)
    assert len(keys) == 3


@pytest.mark.parametrize("architecture", BASES)
def test_a_reader_that_takes_no_single_experts_is_named(tmp_path: Path, architecture: str) -> None:
    """Qwen3-VL-MoE, split: a warning says that transformers does not find them; there is none for Llama 4, or unsplit."""
    write(tmp_path / "src", 64, 48, architecture=architecture)
    split = look(tmp_path / "src", split_experts=True)
    assert split.warned("Qwen3VLMoe", "makes up others") is (architecture == QWEN)
    assert not look(tmp_path / "src").warned("Qwen3VLMoe", "makes up others")


def test_the_config_must_agree(tmp_path: Path) -> None:
    """Shapes that are not what config.json says of the model's width are refused; right ones are not."""
    write(tmp_path / "right", 64, 48, text_config={"hidden_size": 64})
    seen = look(tmp_path / "right", split_experts=True)
    assert f"{BASE}.0.up_proj.weight" in seen.quantized
    assert ROUTER not in seen.quantized
    write(tmp_path / "wrong", 64, 48, text_config={"hidden_size": 96})
    with pytest.raises(SourceInvalidError, match="hidden_size 96"):
        look(tmp_path / "wrong", split_experts=True)
