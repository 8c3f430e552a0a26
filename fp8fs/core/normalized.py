"""The normalized FP8 cache: a directory that a loader maps as it is, planned from a view and checked by its contract.

    DIR/COMPLETE, DIR/manifest.json, DIR/transformer/model.safetensors.index.json, DIR/transformer/*.safetensors

It states no ignore list, so every linear that the engine builds FP8 has to be FP8 in it. Weights lie in the engine's row
order and have one scale, repeated for each logical part of a fused module. Everything is bytes of the view's shards, moved.

A persistent buffer that no source has would be written under its runtime name; a class whose profile says that all
names are fed (``names_complete``) has none, and others are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fp8fs.core.checkpoint import Component
from fp8fs.core.dtypes import FP8
from fp8fs.core.header import TensorEntry, encode_preamble, parse_header
from fp8fs.core.placement import HeaderEntry, ViewTensor, scale_name
from fp8fs.core.plan import Extent, Piece, Plan, ViewShard
from fp8fs.core.profiles import Profile
from fp8fs.core.recipe import Recipe
from fp8fs.core.row_order import ungrouped
from fp8fs.core.view_names import runtime_names
from fp8fs.errors import UsageError

__all__ = [
    "COMPLETE",
    "COMPLETE_TEXT",
    "FOLDER",
    "INDEX",
    "MANIFEST",
    "Artifact",
    "ArtifactShard",
    "SourceFile",
    "encode_artifact_index",
    "encode_artifact_manifest",
    "fingerprint",
    "index_fault",
    "manifest_fault",
    "plan_artifact",
    "recipe_for",
]

FOLDER = "transformer"
COMPLETE, COMPLETE_TEXT = "COMPLETE", b"phase1\n"
MANIFEST = "manifest.json"
INDEX = f"{FOLDER}/model.safetensors.index.json"

SCHEME = "per_tensor"
_SUFFIX = ".weight"
_FIXED: Mapping[str, object] = {
    "schema_version": 1,
    "cache_kind": "normalized_fp8_runtime",
    "component": FOLDER,
    "component_subfolder": FOLDER,
    "source_prefix": f"{FOLDER}.",
    "quantization": {"method": "fp8", "serialized": True, "activation_scheme": "dynamic"},
}
_KEYS = frozenset({*_FIXED, "tensor_count", "source_files", "source_fingerprint"})


class SourceFile(NamedTuple):
    """A source file as the fingerprint counts it. ``path`` is absolute."""

    path: str
    size: int
    mtime_ns: int


class ArtifactShard(msgspec.Struct, frozen=True):
    """One shard: ``preamble``, then the bytes ``runs`` of view shard ``view_shard``, one after the other.

    ``same``: it is that view shard, byte for byte.
    """

    name: str
    view_shard: int
    preamble: bytes
    runs: tuple[Extent, ...]
    same: bool


class Artifact(msgspec.Struct, frozen=True):
    """All shards, and tensor -> name of its shard. ``total_size``: bytes of all tensors."""

    shards: tuple[ArtifactShard, ...]
    weight_map: dict[str, str]
    total_size: int


# --- from a view --------------------------------------------------------------------------------------------------


def recipe_for(component: Component, profile: Profile | None, recipe: Recipe) -> Recipe:
    """The recipe of the view that the artifact is made from: per_tensor, runtime names where the engine has others,
    and FP8 wherever the engine builds FP8, quality exclusions too.

    Raises: UsageError if the class is not known well enough, or the recipe asks for something else.
    """
    known = _known(component, profile)
    if recipe.scheme not in ("", SCHEME):
        raise UsageError(
            f"a normalized cache is {SCHEME}, not {recipe.scheme}", hint="leave --scheme out"
        )
    if recipe.components:
        raise UsageError(f"a normalized cache is of {FOLDER} alone", hint="leave --component out")
    kept = (
        name
        for name in component.weight_map
        if name.endswith(_SUFFIX) and known.state(name.removesuffix(_SUFFIX)) == "quantized"
        if not known.decide(name.removesuffix(_SUFFIX)).quantize
    )
    return msgspec.structs.replace(
        recipe,
        scheme=SCHEME,
        components=(FOLDER,),
        names="runtime" if runtime_names(known, component.weight_map) else "checkpoint",
        quantize=(*recipe.quantize, *(f"{FOLDER}/{_literal(name)}" for name in sorted(kept))),
    )


def plan_artifact(planned: Plan, component: Component, profile: Profile | None) -> Artifact:
    """The artifact for a view that was planned with ``recipe_for``'s recipe.

    Raises: UsageError if a linear is not as the engine builds it; SourceInvalidError if the config does not say its rows.
    """
    known = _known(component, profile)
    weights = _weights(planned, known)
    shards: list[ArtifactShard] = []
    weight_map: dict[str, str] = {}
    total = 0
    for number in planned.order[FOLDER]:
        shard, names, size = _arrange(
            number, planned.shards[number], weights, known, component.config
        )
        shards.append(shard)
        weight_map.update(dict.fromkeys(names, shard.name))
        total += size
    return Artifact(tuple(shards), weight_map, total)


def _known(component: Component, profile: Profile | None) -> Profile:
    if profile is None or not profile.names_complete:
        raise UsageError(
            f"a normalized cache of {component.class_name or 'this model'}: what its runtime is made of is not known",
            hint="fp8fs build SRC without --as",
        )
    if profile.quantizes_nothing:
        raise UsageError(
            f"{profile.engine} {profile.version} quantizes nothing in {profile.class_name}",
            hint="load SRC as it is",
        )
    return profile.for_checkpoint(name.rpartition(".")[0] for name in component.weight_map)


def _weights(planned: Plan, profile: Profile) -> dict[str, str]:
    """View name of each FP8 weight -> a checkpoint module of it. Refuses what the engine would build otherwise."""
    found: dict[str, str] = {}
    for row in planned.rows:
        module = row.name.removesuffix(_SUFFIX)
        if row.component != FOLDER or module == row.name:
            continue
        is_fp8, built_fp8 = row.dtype_out == FP8, profile.state(module) == "quantized"
        if is_fp8 != built_fp8:
            raise UsageError(
                f'"{row.name}" would be {row.dtype_out} ({row.reason}), but {profile.engine} {profile.version} builds it '
                f"{'FP8' if built_fp8 else 'unquantized'}, and a normalized cache has no ignore list",
                hint="fp8fs build SRC without --as",
                tensor=row.name,
            )
        if is_fp8:
            found.setdefault(row.view_name or row.name, module)
    return found


def _arrange(
    number: int,
    shard: ViewShard,
    weights: Mapping[str, str],
    profile: Profile,
    config: Mapping[str, object] | None,
) -> tuple[ArtifactShard, list[str], int]:
    """One shard of the artifact, its tensors' names and their bytes."""
    header = parse_header(shard.preamble, shard.size, shard.path)
    scales = {scale_name(name, SCHEME): module for name, module in weights.items()}
    entries: list[HeaderEntry] = []
    runs: list[Extent] = []
    end = 0
    for name, entry in header.tensors.items():
        start = header.preamble_bytes + entry.data_offsets[0]
        shape = entry.shape
        if name in weights:
            made = _rows(name, entry, start, weights[name], profile, config)
        elif name in scales:
            slots = profile.scale_slots(scales[name])
            shape, made = (slots,), [Extent(start, entry.nbytes)] * slots
        else:
            made = [Extent(start, entry.nbytes)] if entry.nbytes else []
        begin, end = end, end + sum(run.length for run in made)
        entries.append((name, entry.dtype, shape, begin, end))
        runs += made
    preamble = encode_preamble(entries, header.metadata)
    joined = _joined(runs)
    data = shard.size - header.preamble_bytes
    whole = [Extent(header.preamble_bytes, data)] if data else []
    same = joined == whole and preamble == shard.preamble
    file = shard.path.rpartition("/")[2]
    made_shard = ArtifactShard(file, number, preamble, tuple(joined), same)
    return made_shard, list(header.tensors), end


def _rows(
    name: str,
    entry: TensorEntry,
    start: int,
    module: str,
    profile: Profile,
    config: Mapping[str, object] | None,
) -> list[Extent]:
    """Where the weight's rows are in the view shard, in the engine's order."""
    fusion = profile.fusion_of(module)
    if fusion is None or fusion.grouped_rows is None:
        return [Extent(start, entry.nbytes)] if entry.nbytes else []
    whole = Piece(0, start, entry.nbytes, name)
    grouped = ViewTensor(
        name,
        quantize=True,
        dtype=FP8,
        shape=entry.shape,
        nbytes=entry.nbytes,
        pieces=(whole,),
        group="",
    )
    pieces = ungrouped(grouped, fusion.grouped_rows, config).pieces
    return [Extent(piece.file_offset, piece.nbytes) for piece in pieces]


def _joined(runs: Iterable[Extent]) -> list[Extent]:
    """The same bytes in as few runs as there can be."""
    joined: list[Extent] = []
    for run in runs:
        if joined and joined[-1].start + joined[-1].length == run.start:
            joined[-1] = Extent(joined[-1].start, joined[-1].length + run.length)
        else:
            joined.append(run)
    return joined


def _literal(name: str) -> str:
    """A glob that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


# --- the two documents --------------------------------------------------------------------------------------------


def fingerprint(files: Iterable[SourceFile]) -> str:
    """What the contract calls ``source_fingerprint``."""
    listed = [file._asdict() for file in sorted(files)]
    text = json.dumps(listed, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def encode_artifact_index(artifact: Artifact) -> bytes:
    """``model.safetensors.index.json``."""
    whole = {
        "metadata": {"total_size": artifact.total_size},
        "weight_map": dict(sorted(artifact.weight_map.items())),
    }
    return json.dumps(whole, indent=2).encode("ascii") + b"\n"


def encode_artifact_manifest(tensor_count: int, files: Sequence[SourceFile]) -> bytes:
    """``manifest.json``: exactly the keys of the contract."""
    whole = {
        **_FIXED,
        "tensor_count": tensor_count,
        "source_files": sorted(file.path for file in files),
        "source_fingerprint": fingerprint(files),
    }
    return json.dumps(whole, indent=2).encode("ascii") + b"\n"


def manifest_fault(manifest: object, tensor_count: int) -> str:
    """Why this is no manifest of the contract, "" if it is one. Sources are not looked at.

    Values are compared with their types: true is not 1, and 1.0 neither.
    """
    if not isinstance(manifest, dict):
        return "manifest.json is not an object"
    if odd := manifest.keys() ^ _KEYS:
        return f"manifest.json: {sorted(map(str, odd))[0]} is missing or not of the contract"
    for key, want in _FIXED.items():
        if not _equal(manifest[key], want):
            return f"manifest.json: {key} is not {json.dumps(want)}"
    if not _equal(manifest["tensor_count"], tensor_count):
        return f"manifest.json: tensor_count is not {tensor_count}, as the index has"
    files = manifest["source_files"]
    if not isinstance(files, list) or not files:
        return "manifest.json: source_files is not a list of files"
    if not all(isinstance(p, str) and p.startswith("/") and "\0" not in p for p in files):
        return "manifest.json: source_files are not all absolute paths"
    if not isinstance(manifest["source_fingerprint"], str):
        return "manifest.json: source_fingerprint is not text"
    return ""


def index_fault(index: object) -> str:
    """Why this is no index of the contract, "" if it is one. Whether its files exist is not looked at."""
    if not isinstance(index, dict):
        return "the index is not an object"
    metadata, weight_map = index.get("metadata"), index.get("weight_map")
    if not isinstance(metadata, dict) or type(metadata.get("total_size")) is not int:
        return "the index: metadata.total_size is not a whole number"
    if not isinstance(weight_map, dict):
        return "the index: weight_map is not an object"
    for file in weight_map.values():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            return "the index: weight_map names something that is no .safetensors file"
        if "/" in file or "\0" in file:
            return "the index: weight_map names a file with a directory part"
    return ""


def _equal(value: Any, want: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if type(value) is not type(want):
        return False
    if isinstance(want, dict):
        return value.keys() == want.keys() and all(_equal(value[k], want[k]) for k in want)
    return bool(value == want)
