"""Manifest and plan as JSON: round trip, refusals, totals."""

from __future__ import annotations

import json

import pytest

from fp8fs.core.manifest import (
    SCHEMA,
    Manifest,
    ManifestSource,
    decode_manifest,
    describe_plan,
    encode_manifest,
    encode_plan,
    parse_manifest,
    with_digests,
)
from fp8fs.core.recipe import Recipe
from fp8fs.errors import StoreDamagedError, StoreVersionError
from tests.planning import checkpoint, linears, make_plan

ODD = "sub/m\udcff.safetensors"


def example(path: str = "model.safetensors", folder: str = "") -> Manifest:
    texts = {f"{folder}config.json": {"model_type": "llama"}}
    source = checkpoint({path: {**linears("layers.0.fc"), "norm.weight": ("BF16", (64,))}}, texts)
    planned = make_plan(source, keep=("norm.*",))
    sources = [
        ManifestSource(path=p, identity=i, size=7, mtime_ns=10)
        for p, i in zip(planned.source_shards, planned.source_identities, strict=True)
    ]
    recipe = Recipe(keep=("norm.*",))
    return describe_plan(planned, recipe, name="tiny", version="0.1.0", sources=sources)


def test_round_trip() -> None:
    """What is encoded decodes to the same manifest."""
    manifest = example()
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.schema == SCHEMA
    assert manifest.schemes == {"": "per_channel"}
    assert manifest.dialects == {"": "compressed-tensors"}
    assert manifest.bytes_source == 32 * 64 * 2 + 64 * 2
    assert [(s.path, s.tensors, s.digest) for s in manifest.shards] == [
        ("model.safetensors", 2, "")
    ]


def test_undecodable_names_round_trip() -> None:
    """A shard whose name is not UTF-8 keeps its name through manifest and plan."""
    manifest = example(ODD, "sub/")
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.shards[0].path == ODD


def test_digests_are_filled_in_by_object() -> None:
    """A sealed shard's digest goes to its object; others keep theirs."""
    manifest = example()
    key = manifest.shards[0].object_id
    sealed = with_digests(manifest, {key: "abc"})
    assert sealed.shards[0].digest == "abc"
    assert with_digests(sealed, {"other": "x"}) == sealed


def test_a_newer_schema_is_left_alone() -> None:
    """A manifest of a newer schema is no damage: it says so and names both."""
    newer = json.dumps({"schema": SCHEMA + 1, "unknown": {}}).encode()
    with pytest.raises(StoreVersionError, match=f"schema {SCHEMA + 1}"):
        decode_manifest(newer)
    assert parse_manifest(newer) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"schema": "1"}',
        b'{"schema": true}',
        b'{"schema": 0}',
        b'{"schema": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_nonsense_is_damage(data: bytes) -> None:
    """Bytes that are no manifest are damage, whatever they are."""
    with pytest.raises(StoreDamagedError):
        decode_manifest(data)
    assert parse_manifest(data) is None


def test_a_field_of_a_wrong_type_is_damage() -> None:
    """A manifest with one field of another type is damage, not a guess."""
    facts = json.loads(encode_manifest(example()))
    facts["shards"][0]["size"] = "big"
    with pytest.raises(StoreDamagedError, match="size"):
        decode_manifest(json.dumps(facts).encode())


def test_the_plan_as_json() -> None:
    """plan.json has a row for each tensor, totals for each component, and what is hidden."""
    shapes = {**linears("layers.0.fc"), "norm.weight": ("BF16", (64,))}
    planned = make_plan(checkpoint({"model.safetensors": shapes}), scheme="block")
    facts = json.loads(encode_plan(planned))
    assert facts["components"] == {
        "": {
            "scheme": "block",
            "tensors": 2,
            "quantized": 1,
            "bytes_in": 4096 + 128,
            "bytes_out": 2048 + 4 + 128,
        }
    }
    assert facts["tensors"][0] == {
        "component": "",
        "name": "layers.0.fc.weight",
        "shape": [32, 64],
        "dtype_in": "BF16",
        "dtype_out": "F8_E4M3",
        "bytes_in": 4096,
        "bytes_out": 2052,
        "group": "",
        "reason": "linear weight in a repeated block",
        "view_name": "",
    }
    assert facts["plan_id"] == planned.plan_id
    assert facts["hidden"] == {}
