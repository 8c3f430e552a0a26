"""A2: every byte of the view is what the oracle says, however it is read, under every scheme."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import oracle
from tests.acceptance.harness import Fp8fs, digest, digests, files

pytestmark = pytest.mark.fuse

KINDS = ("llama", "wan", "h3")
SCHEMES = ("per_tensor", "per_channel", "block", "block_free")

QUANTIZED_COMPONENT = {"llama": "", "wan": "transformer", "h3": "transformer"}

MUST_BE_QUANTIZED = {
    "llama": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight",
    "wan": r"blocks\.\d+\.(attn[12]\.to_(q|k|v|out\.0)|ffn\.net\.(0\.proj|2))\.weight",
    "h3": r"(token_refiner\.)?blocks\.\d+\.(attn\.(qkv|out)_proj|mlp\.fc[12])\.weight",
}

DIALECTS = {
    ("llama", "per_tensor"): "fp8",
    ("llama", "per_channel"): "compressed-tensors",
    ("wan", "per_tensor"): "fp8",
    ("h3", "per_tensor"): "fp8",
}


def expected_view(src: Path, kind: str, scheme: str) -> dict[str, oracle.Stored]:
    """What the quantized component holds, by the oracle alone."""
    source = oracle.read_folder(src / QUANTIZED_COMPONENT[kind])
    chosen = [name for name in source if re.fullmatch(MUST_BE_QUANTIZED[kind], name)]
    assert chosen
    groups = oracle.sibling_groups(chosen) if scheme == "per_tensor" else {}
    config = json.loads((src / QUANTIZED_COMPONENT[kind] / "config.json").read_text())
    fused = [name for name in chosen if name.endswith("attn.qkv_proj.weight")]
    heads = dict.fromkeys(fused, config["num_attention_heads"])  # as H3's engine reorders them
    return oracle.expected(source, chosen, scheme, groups, heads=heads)


def safetensors_bytes(path: Path) -> dict[str, bytes]:
    """Every tensor as the safetensors library reads it, whole and in slices."""
    found = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            tensor = file.get_tensor(name)
            found[name] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            shape = file.get_slice(name).get_shape()
            if len(shape) == 2 and shape[0] > 1:
                half = shape[0] // 2
                parts = [file.get_slice(name)[:half], file.get_slice(name)[half:]]
                sliced = b"".join(
                    part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts
                )
                assert sliced == found[name], name
    return found


def check_all_ways_of_reading(path: Path) -> None:
    """mmap (shared, private, private read-write) and pread at random offsets give the same file."""
    whole = path.read_bytes()
    assert len(whole) == path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        dice = random.Random(len(whole))
        for _ in range(50):
            at = dice.randrange(len(whole))
            length = dice.choice((1, 7, 4096, 100_000, len(whole)))
            assert os.pread(fd, length, at) == whole[at : at + length]
        for flags, prot in (
            (mmap.MAP_SHARED, mmap.PROT_READ),
            (mmap.MAP_PRIVATE, mmap.PROT_READ),
            (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE),
        ):
            with mmap.mmap(fd, 0, flags=flags, prot=prot) as mapped:
                assert mapped[:] == whole
                if prot & mmap.PROT_WRITE:
                    mapped[-1:] = b"x"
    finally:
        os.close(fd)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("serve", ["handoff", "inline", "tensor"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_equals_the_oracle(
    fp8fs: Fp8fs,
    place: Path,
    checkpoint: Callable[[str], Path],
    kind: str,
    scheme: str,
    serve: str,
) -> None:
    """Read through the mount, every tensor of the view has the oracle's bytes, dtype and shape."""
    src, dst = checkpoint(kind), place / "view"
    options = ["--scheme", scheme]
    if serve != "handoff":
        options += ["--serve", "inline"]
    if serve == "tensor":
        options += ["--grain", "tensor"]
    fp8fs.mount(src, dst, *options)
    folder = dst / QUANTIZED_COMPONENT[kind]
    wanted = expected_view(src, kind, scheme)
    seen: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        stored = oracle.read_file(path)
        by_library = safetensors_bytes(path)
        for name, tensor in stored.items():
            assert tensor == wanted[name], name
            assert by_library[name] == tensor.data, name
        seen |= stored.keys()
        check_all_ways_of_reading(path)
    assert seen == wanted.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_the_tree_equals_the_source(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], kind: str
) -> None:
    """A walk shows exactly the plan's files; what is not quantized has the source's bytes."""
    src, dst = checkpoint(kind), place / "view"
    fp8fs.mount(src, dst)
    planned = fp8fs.json("plan", src)
    shown = files(dst)
    assert shown.keys() == {f["path"] for f in planned["files"] if f["kind"] != "dir"}
    component = QUANTIZED_COMPONENT[kind]
    for name, path in files(src).items():
        inside = component == "" or name.startswith(f"{component}/")
        rewritten = inside and re.search(r"(^|/)config\.json$|\.index\.json$|\.safetensors$", name)
        if not rewritten:
            assert digest(shown[name]) == digest(path), name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_index_and_config_describe_the_view(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], kind: str, scheme: str
) -> None:
    """The index names every tensor's file and the true size; the config only gains its quantization."""
    src, dst = checkpoint(kind), place / "view"
    fp8fs.mount(src, dst, "--scheme", scheme)
    component = QUANTIZED_COMPONENT[kind]
    index_path = next((dst / component).glob("*.index.json"))
    index = json.loads(index_path.read_text())
    where, total = {}, 0
    for path in (dst / component).glob("*.safetensors"):
        start, entries, metadata = oracle.read_header(path)
        assert metadata["format"] == "pt"
        assert start % 4096 == 0
        where |= dict.fromkeys(entries, path.name)
        total += path.stat().st_size - start
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == total

    config = json.loads((dst / component / "config.json").read_text())
    original = json.loads((src / component / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == original
    if scheme.startswith("block"):
        assert quantization["quant_method"] == "fp8"
        assert quantization["weight_block_size"] == [128, 128]
    elif (kind, scheme) in DIALECTS:
        assert quantization["quant_method"] == DIALECTS[kind, scheme]
    if quantization["quant_method"] == "fp8":
        assert quantization["activation_scheme"] == "dynamic"
    if kind != "llama" and quantization["quant_method"] == "fp8":
        assert quantization["is_checkpoint_fp8_serialized"] is True
        assert quantization.keys() <= {
            "quant_method",
            "activation_scheme",
            "is_checkpoint_fp8_serialized",
            "ignored_layers",
            "weight_block_size",
        }


@pytest.mark.parametrize(
    "how", ["tar", "rsync", "copytree", "build --to"], ids=lambda how: how.replace(" ", "")
)
def test_copies_of_a_cold_view_are_the_view(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], how: str
) -> None:
    """tar -h, rsync -aL, copytree and build --to, each from a cold store, give the same bytes."""
    src, dst, copy = checkpoint("wan"), place / "view", place / "copy"
    if how == "build --to":
        fp8fs.run("build", src, "--to", copy)
        assert not any(path.is_symlink() for path in copy.rglob("*"))
        fp8fs.mount(src, dst)
    else:
        fp8fs.mount(src, dst)
        if how == "tar":
            copy.mkdir()
            subprocess.run(f"tar -C {dst} -hcf - . | tar -C {copy} -xf -", shell=True, check=True)
        elif how == "rsync":
            if shutil.which("rsync") is None:
                pytest.skip("rsync is not installed")
            subprocess.run(["rsync", "-aL", f"{dst}/", f"{copy}/"], check=True)
        else:
            shutil.copytree(dst, copy)
    assert digests(copy) == digests(dst)
    wanted = expected_view(src, "wan", "per_tensor")
    assert oracle.read_folder(copy / "transformer") == wanted


def test_a_sealed_shard_looks_like_the_view_of_it(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Size, mtime, mode and owner are the same before and after a shard is made."""
    src, dst = checkpoint("llama"), place / "view"
    fp8fs.mount(src, dst)
    paths = sorted(dst.glob("*.safetensors"))
    assert not any(path.is_symlink() for path in paths)

    def facts(path: Path) -> tuple[int, int, int, int, int]:
        found = path.stat()
        return found.st_size, found.st_mtime_ns, found.st_mode, found.st_uid, found.st_gid

    cold = {path: facts(path) for path in paths}
    for path in paths:
        path.read_bytes()
    assert all(path.is_symlink() for path in paths)
    assert {path: facts(path) for path in paths} == cold
