"""Normalized caches: bytes against numpy, what is a hit and what a miss, one valid artifact whatever happens beside."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8fs import normalized
from fp8fs.cli import main
from fp8fs.core.recipe import Recipe
from fp8fs.errors import UsageError
from fp8fs.normalized import build_normalized, look
from tests.builders import Tensor, bf16, h3_like, wan_like, write_bytes
from tests.oracle import Stored, quantized, read_file

FOLDER = "transformer"
INDEX = f"{FOLDER}/model.safetensors.index.json"
H3_KEPT = ("video_patch_proj", "audio_patch_proj", "time_embedder", "final_layer.video_out")
H3_KEPT += ("final_layer.audio_out",)


def build(src: Path, target: Path | None, root: Path, **recipe: Any) -> Path:
    return build_normalized(src, target, Recipe(**recipe), root, device="cpu", workers=1)


def contents(artifact: Path) -> dict[str, Stored]:
    """Every tensor, by way of the index, which has to be exact."""
    index = json.loads((artifact / INDEX).read_bytes())
    found: dict[str, Stored] = {}
    for file in sorted(set(index["weight_map"].values())):
        held = read_file(artifact / FOLDER / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(held)
        found |= held
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    assert index["metadata"] == {"total_size": sum(len(t.data) for t in found.values())}
    return found


def stacked(parts: list[Tensor]) -> Tensor:
    """Rows of all parts, one after the other (row-major, so bytes after bytes)."""
    rows = sum(shape[0] for _, shape, _ in parts)
    return parts[0][0], (rows, *parts[0][1][1:]), b"".join(data for _, _, data in parts)


def expect_fp8(found: dict[str, Stored], name: str, source: Tensor, slots: int) -> None:
    """The weight is the source's, quantized as one, and its scale is there *slots* times."""
    data, scale = quantized(Stored(*source), "per_tensor", [Stored(*source)])
    assert found.pop(name) == Stored("F8_E4M3", source[1], data)
    assert found.pop(f"{name}_scale") == Stored("F32", (slots,), scale.data * slots)


def test_h3_lies_in_runtime_rows(tmp_path: Path) -> None:
    """qkv rows are [Q; K; V] though stored head by head; scales fill their slots; kept tensors are the source's."""
    source = h3_like(tmp_path / "src")[FOLDER]
    found = contents(build(tmp_path / "src", tmp_path / "cache", tmp_path / "store"))
    for name, stored in source.items():
        if not name.endswith(".weight") or len(stored[1]) != 2 or name.startswith(H3_KEPT):
            assert found.pop(name) == Stored(*stored)
        elif name.endswith("qkv_proj.weight"):
            heads, dim, cols = 2, 32, 64
            grouped = np.frombuffer(stored[2], "<u2").reshape(heads, 3, dim, cols)
            rows = np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).tobytes()
            expect_fp8(found, name, ("BF16", stored[1], rows), 3)
        else:
            expect_fp8(found, name, stored, 2 if name.endswith("fc1.weight") else 1)
    assert found == {}


def test_wan_lies_under_runtime_names(tmp_path: Path) -> None:
    """q, k, v are one to_qkv, biases too; other tensors have the engine's names and dtype."""
    source = dict(wan_like(tmp_path / "src", shards=3)[FOLDER])
    found = contents(build(tmp_path / "src", tmp_path / "cache", tmp_path / "store"))
    for block in range(2):
        base = f"blocks.{block}"
        attn1 = f"{base}.attn1"
        for leaf in ("weight", "bias"):
            parts = [source.pop(f"{attn1}.{x}.{leaf}") for x in ("to_q", "to_k", "to_v")]
            source[f"{attn1}.to_qkv.{leaf}"] = stacked(parts)
            for old, new in (
                (f"{attn1}.to_out.0", f"{attn1}.to_out"),
                (f"{base}.attn2.to_out.0", f"{base}.attn2.to_out"),
                (f"{base}.ffn.net.0.proj", f"{base}.ffn.net_0.proj"),
                (f"{base}.ffn.net.2", f"{base}.ffn.net_2"),
            ):
                source[f"{new}.{leaf}"] = source.pop(f"{old}.{leaf}")
    source["output_scale_shift_prepare.scale_shift_table"] = source.pop("scale_shift_table")
    for name, (dtype, shape, data) in source.items():
        if name.endswith(".weight") and name.startswith("blocks") and len(shape) == 2:
            expect_fp8(found, name, (dtype, shape, data), 3 if "to_qkv" in name else 1)
        else:
            wanted = data if dtype == "BF16" else bf16(np.frombuffer(data, "<f4"))
            assert found.pop(name) == Stored("BF16", shape, wanted)
    assert found == {}


def test_the_documents_are_the_contracts(tmp_path: Path) -> None:
    """manifest.json has exactly the keys and values, worked out here; the marker its text; linked shards are the store's."""
    h3_like(tmp_path / "src", shards=12)
    artifact = build(tmp_path / "src", tmp_path / "cache", tmp_path / "store")
    assert (artifact / "COMPLETE").read_bytes() == b"phase1\n"
    folder = tmp_path / "src" / FOLDER
    (index,) = folder.glob("*.index.json")
    names = set(json.loads(index.read_bytes())["weight_map"].values())
    files = sorted(str(folder / name) for name in names)
    facts = [
        {"path": p, "size": os.stat(p).st_size, "mtime_ns": os.stat(p).st_mtime_ns} for p in files
    ]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    assert json.loads((artifact / "manifest.json").read_bytes()) == {
        "schema_version": 1,
        "cache_kind": "normalized_fp8_runtime",
        "component": FOLDER,
        "component_subfolder": FOLDER,
        "source_prefix": "transformer.",
        "quantization": {"method": "fp8", "serialized": True, "activation_scheme": "dynamic"},
        "tensor_count": len(contents(artifact)),
        "source_files": files,
        "source_fingerprint": hashlib.sha256(text.encode()).hexdigest(),
    }
    linked = [p for p in (artifact / FOLDER).glob("*.safetensors") if p.stat().st_nlink > 1]
    assert linked
    assert sorted(p.name for p in artifact.iterdir()) == ["COMPLETE", "manifest.json", FOLDER]


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    """A valid artifact, small."""
    h3_like(tmp_path / "src", layers=1, shards=1)
    return build(tmp_path / "src", tmp_path / "cache", tmp_path / "store")


def rewritten(name: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    """A change to one JSON file; what *change* returns, if anything, replaces all of it."""

    def apply(place: Path) -> None:
        whole = json.loads((place / name).read_bytes())
        result = change(whole)
        (place / name).write_text(json.dumps(whole if result is None else result))

    return apply


def manifest(**values: object) -> Callable[[Path], object]:
    return rewritten("manifest.json", lambda whole: whole.update(values))


def index_files(name: str) -> Callable[[Path], object]:
    def change(whole: Any) -> None:
        whole["weight_map"] = dict.fromkeys(whole["weight_map"], name)

    return rewritten(INDEX, change)


QUANTIZATION = {"method": "fp8", "serialized": True, "activation_scheme": "dynamic"}
MISSES: dict[str, Callable[[Path], object]] = {
    "no marker": lambda place: (place / "COMPLETE").unlink(),
    "empty marker": lambda place: (place / "COMPLETE").write_bytes(b""),
    "other marker": lambda place: (place / "COMPLETE").write_bytes(b"phase1"),
    "no manifest": lambda place: (place / "manifest.json").unlink(),
    "manifest is a folder": lambda place: ((place / "manifest.json").unlink(), (place / "manifest.json").mkdir()),
    "manifest is a pipe": lambda place: ((place / "manifest.json").unlink(), os.mkfifo(place / "manifest.json")),
    "manifest is a list": rewritten("manifest.json", lambda whole: [whole]),
    "manifest is no JSON": lambda place: (place / "manifest.json").write_bytes(b"{"),
    "manifest is no text": lambda place: (place / "manifest.json").write_bytes(b"\xff\xfe\xff"),
    "manifest is deep": lambda place: (place / "manifest.json").write_bytes(b"[" * 200_000),
    "version is true": manifest(schema_version=True),
    "version is a float": manifest(schema_version=1.0),
    "version 2": manifest(schema_version=2),
    "other kind": manifest(cache_kind="fp8"),
    "other component": manifest(component="vae"),
    "other folder": manifest(component_subfolder="vae"),
    "other prefix": manifest(source_prefix="transformer"),
    "quantization is text": manifest(quantization="fp8"),
    "quantization has more": manifest(quantization=QUANTIZATION | {"x": 1}),
    "quantization has 1 for true": manifest(quantization=QUANTIZATION | {"serialized": 1}),
    "a key more": manifest(extra=1),
    "a key less": rewritten("manifest.json", lambda whole: whole.pop("component") and None),
    "other count": manifest(tensor_count=1),
    "count is text": manifest(tensor_count="1"),
    "no sources": manifest(source_files=[]),
    "sources are text": manifest(source_files="/a"),
    "relative source": manifest(source_files=["a"]),
    "source with NUL": manifest(source_files=["/a\0"]),
    "source is a number": manifest(source_files=[1]),
    "source is gone": manifest(source_files=["/nonexistent/x"]),
    "other fingerprint": manifest(source_fingerprint="0" * 64),
    "fingerprint is null": manifest(source_fingerprint=None),
    "no index": lambda place: (place / INDEX).unlink(),
    "index is a list": rewritten(INDEX, lambda whole: [whole]),
    "map is a list": rewritten(INDEX, lambda whole: whole.update(weight_map=[])),
    "size is text": rewritten(INDEX, lambda whole: whole.update(metadata={"total_size": "1"})),
    "file in a folder": index_files("a/b.safetensors"),
    "file above": index_files("../x.safetensors"),
    "file is absolute": index_files("/x.safetensors"),
    "file of another kind": index_files("x.bin"),
    "file is missing": index_files("x.safetensors"),
    "shard is gone": lambda place: next((place / FOLDER).glob("*.safetensors")).unlink(),
    "source changed": lambda place: os.utime(next((place.parent / "src" / FOLDER).glob("*.safetensors"))),
    "source is longer": lambda place: write_bytes(next((place.parent / "src" / FOLDER).glob("*.safetensors")), b"x"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISSES)
def test_everything_else_is_a_miss(
    valid: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One departure from the contract, and ``verify`` calls it a miss with its exit code; never a crash."""
    assert look(valid).miss == ""
    MISSES[what](valid)
    assert look(valid).miss
    assert main(["verify", str(valid), "--json"]) == 50
    seen = json.loads(capsys.readouterr().out)
    assert seen["hit"] is False
    assert seen["miss"]


HITS: dict[str, Callable[[Path], object]] = {
    "as built": lambda place: None,
    "more files": lambda place: (place / FOLDER / "stray.safetensors").touch(),
    "more metadata": rewritten(INDEX, lambda whole: whole["metadata"].update(more=1)),
    "keys in another order": rewritten("manifest.json", lambda whole: dict(reversed(whole.items()))),
}  # fmt: skip


@pytest.mark.parametrize("what", HITS)
def test_what_the_contract_leaves_open_is_a_hit(
    valid: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``verify`` refuses nothing that the contract does not speak of."""
    HITS[what](valid)
    assert main(["verify", str(valid), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hit"] is True


def test_a_valid_one_is_kept_and_a_stale_one_replaced(valid: Path, tmp_path: Path) -> None:
    """Built again: the same directory; after a change of the source: a new, valid one, and nothing left beside."""
    before = valid.stat().st_ino
    assert build(tmp_path / "src", valid, tmp_path / "store") == valid
    assert valid.stat().st_ino == before
    h3_like(tmp_path / "src", layers=1, shards=1, seed=7)
    assert look(valid).miss
    build(tmp_path / "src", valid, tmp_path / "store")
    assert look(valid).miss == ""
    assert [p.name for p in tmp_path.iterdir() if ".tmp-" in p.name] == []


@pytest.mark.parametrize("stale", [False, True])
def test_publishers_at_once_end_with_one(tmp_path: Path, stale: bool) -> None:
    """Several publish at the same moment, over nothing or over a stale one: all succeed, one valid artifact."""
    h3_like(tmp_path / "src", layers=1, shards=2)
    target = tmp_path / "cache"
    if stale:
        build(tmp_path / "src", target, tmp_path / "store")
        (target / "COMPLETE").unlink()
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda i: build(tmp_path / "src", target, tmp_path / "store"), range(4))
        )
    assert set(made) == {target}
    assert look(target).miss == ""
    contents(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "src", "store"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails, neither a target nor a staged directory stays."""
    h3_like(tmp_path / "src", layers=1, shards=1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(normalized, "_copy", full)
    arguments = ["--as", "normalized-cache", "--to", str(tmp_path / "cache")]
    store = ["--store", str(tmp_path / "store"), "--device", "cpu"]
    assert main(["build", str(tmp_path / "src"), *arguments, *store]) == 22
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src", "store"]


def test_without_links_shards_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there can be no hard link, the bytes are the same and nothing is shared."""
    h3_like(tmp_path / "src", shards=12)
    linked = contents(build(tmp_path / "src", tmp_path / "a", tmp_path / "store"))
    monkeypatch.setattr(normalized, "_link", lambda sealed, target: False)
    copied = build(tmp_path / "src", tmp_path / "b", tmp_path / "store")
    assert contents(copied) == linked
    assert {p.stat().st_nlink for p in (copied / FOLDER).iterdir()} == {1}


def test_what_cannot_be_one_is_refused(tmp_path: Path) -> None:
    """Other schemes, a kept linear, an unknown class, foreign files at the target: refused, and nothing is written."""
    src = tmp_path / "src"
    h3_like(src, layers=1, shards=1)
    store, target = tmp_path / "store", tmp_path / "cache"
    for recipe in ({"scheme": "block"}, {"keep": ("*fc1*",)}, {"components": ("text_encoder",)}):
        with pytest.raises(UsageError):
            build(src, target, store, **recipe)
    assert not target.exists()
    mine = write_bytes(tmp_path / "mine" / "file", b"mine")
    with pytest.raises(UsageError):
        build(src, mine.parent, store)
    assert mine.read_bytes() == b"mine"
    (src / FOLDER / "config.json").write_text('{"_class_name": "Unheard"}')
    with pytest.raises(UsageError):
        build(src, target, store)


def test_the_default_place_is_in_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --to the printed path is below the store, and valid."""
    h3_like(tmp_path / "src", layers=1, shards=1)
    store = ["--store", str(tmp_path / "store"), "--device", "cpu", "--quiet"]
    assert main(["build", str(tmp_path / "src"), "--as", "normalized-cache", *store]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert made.is_relative_to(tmp_path / "store")
    assert look(made).miss == ""
    assert main(["build", str(tmp_path / "src"), "--as", "nonsense", *store]) == 2
