"""What a store says of itself: the manifest of a finished tree, and the plan as JSON.

A manifest names everything that decided the tree and every object in it, so that a tree that was copied
elsewhere can be checked without the source. Readers refuse a newer schema and never guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fp8fs.core.dtypes import FP8
from fp8fs.core.plan import Plan
from fp8fs.core.quantizer import QUANTIZER_VERSION
from fp8fs.core.recipe import Recipe
from fp8fs.errors import StoreDamagedError, StoreError, StoreVersionError

__all__ = [
    "SCHEMA",
    "Manifest",
    "ManifestShard",
    "ManifestSource",
    "decode_manifest",
    "describe_plan",
    "encode_manifest",
    "encode_plan",
    "parse_manifest",
    "plan_document",
    "with_digests",
]

SCHEMA = 1
"""Raised when a reader of the old schema would misread the new one."""


class ManifestSource(msgspec.Struct, frozen=True):
    """One source shard as it was when the tree was planned. ``identity`` stands for its bytes."""

    path: str
    identity: str
    size: int
    mtime_ns: int


class ManifestShard(msgspec.Struct, frozen=True):
    """One view shard. ``digest`` is that of the sealed bytes, "" until they are. ``sources``: paths of the
    source shards that decide them. ``tensors`` counts what is copied and what is quantized, scales apart."""

    path: str
    component: str
    object_id: str
    size: int
    tensors: int
    sources: tuple[str, ...]
    digest: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """Everything that decided a tree, and every object in it.

    ``name``: SRC's folder name, for people. ``version``: of fp8fs; ``quantizer``: of the quantizers.
    ``schemes`` and ``dialects`` by component. ``bytes_source``: of the tensors that are read; ``bytes_view``: of the
    view shards.
    """

    schema: int
    name: str
    version: str
    plan_id: str
    quantizer: str
    recipe: Recipe
    schemes: dict[str, str]
    dialects: dict[str, str]
    bytes_source: int
    bytes_view: int
    shards: tuple[ManifestShard, ...]
    sources: tuple[ManifestSource, ...]


def describe_plan(
    plan: Plan,
    recipe: Recipe,
    *,
    name: str,
    version: str,
    sources: Sequence[ManifestSource],
    quantizer: str = QUANTIZER_VERSION,
) -> Manifest:
    """The manifest of a plan, its shards not sealed yet (``digest`` "")."""
    return Manifest(
        schema=SCHEMA,
        name=name,
        version=version,
        plan_id=plan.plan_id,
        quantizer=quantizer,
        recipe=recipe,
        schemes=dict(plan.schemes),
        dialects={path: _dialect(plan, path) for path in plan.schemes},
        bytes_source=sum(
            piece.nbytes for shard in plan.shards for unit in shard.units for piece in unit.pieces
        ),
        bytes_view=sum(shard.size for shard in plan.shards),
        shards=tuple(
            ManifestShard(
                path=shard.path,
                component=shard.component,
                object_id=shard.object_id,
                size=shard.size,
                tensors=len(shard.units),
                sources=tuple(plan.source_shards[i] for i in shard.sources),
            )
            for shard in plan.shards
        ),
        sources=tuple(sources),
    )


def with_digests(manifest: Manifest, digests: Mapping[str, str]) -> Manifest:
    """The manifest with the digests of sealed shards filled in, by object id."""
    shards = tuple(
        msgspec.structs.replace(shard, digest=digests.get(shard.object_id, shard.digest))
        for shard in manifest.shards
    )
    return msgspec.structs.replace(manifest, shards=shards)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, for ``.fp8fs/manifest.json``."""
    return json.dumps(msgspec.to_builtins(manifest), indent=2).encode("ascii") + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """A manifest that this version understands.

    Raises: StoreVersionError for a newer schema; StoreDamagedError for anything that is no manifest.
    """
    try:
        facts: Any = json.loads(data)
        schema = facts["schema"]
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise TypeError(f"schema is {schema!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise StoreDamagedError(f"manifest.json is no manifest: {err}") from err
    if schema > SCHEMA:
        raise StoreVersionError(
            f"manifest.json has schema {schema}, this version reads up to {SCHEMA}",
            hint="use a newer fp8fs",
            schema=schema,
        )
    try:
        return msgspec.convert(facts, Manifest)
    except ValueError as err:  # a ValidationError, or a key that is no valid text
        raise StoreDamagedError(f"manifest.json is no manifest: {err}") from err


def parse_manifest(data: bytes) -> Manifest | None:
    """The manifest, or None for one that ``decode_manifest`` refuses: to look through many trees."""
    try:
        return decode_manifest(data)
    except StoreError:
        return None


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan as JSON-ready data: totals, schemes, what is hidden and why, warnings, notes, one row per source tensor."""
    totals: dict[str, list[int]] = {}
    for row in plan.rows:
        sums = totals.setdefault(row.component, [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += row.dtype_out == FP8
        sums[2] += row.bytes_in
        sums[3] += row.bytes_out
    return {
        "schema": SCHEMA,
        "plan_id": plan.plan_id,
        "components": {
            path: {
                "scheme": plan.schemes.get(path, ""),
                "tensors": sums[0],
                "quantized": sums[1],
                "bytes_in": sums[2],
                "bytes_out": sums[3],
            }
            for path, sums in totals.items()
        },
        "shards": [
            {
                "path": shard.path,
                "size": shard.size,
                "object_id": shard.object_id,
                "tensors": len(shard.units),
            }
            for shard in plan.shards
        ],
        "hidden": plan.hidden,
        "warnings": plan.warnings,
        "notes": plan.notes,
        "tensors": plan.rows,
    }


def encode_plan(plan: Plan) -> bytes:
    """``plan_document`` as JSON, for ``fp8fs plan --json`` and ``.fp8fs/plan.json``."""
    return _encode(plan_document(plan)) + b"\n"


def _encode(value: object) -> bytes:
    """JSON; a name with undecodable bytes is written with its surrogates escaped, which msgspec alone refuses."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode("ascii")


def _dialect(plan: Plan, component: str) -> str:
    """The ``quant_method`` that the component's config states in the view; "" if it has no config."""
    entry = plan.entries.get(f"{component}/config.json" if component else "config.json")
    if entry is None or entry.kind != "text":
        return ""
    config = json.loads(entry.content.decode("utf-8-sig"))
    return str(config["quantization_config"]["quant_method"])
