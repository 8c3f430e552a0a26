"""What SRC holds, as plain data: files, shards, components. ``source.py`` reads it; this decides what it means.

A *component* is a directory with safetensors weights: the root of a transformers model, or a
subfolder of a diffusers pipeline. Its ``path`` is relative to SRC, "" for the root.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from fp8fs.core.dtypes import QUANTIZED_SOURCES
from fp8fs.core.entries import SourceEntry, folder_of, is_private, join, name_of
from fp8fs.core.header import Header, TensorEntry
from fp8fs.core.text import brief, parse_object, quoted
from fp8fs.core.weightset import WeightSet, is_index_name
from fp8fs.errors import SourceInvalidError

__all__ = [
    "Checkpoint",
    "Component",
    "SourceEntry",
    "SourceShard",
    "classify",
    "text_files",
]


_PIPELINE = "model_index.json"
_PACKED_DTYPES = frozenset({"I32", "U8"})
_PACKED_NAME = re.compile(
    r"\.(qweight|weight_packed)$|_proj_blocks$|\.quant_state\.bitsandbytes__\w+$"
)
"""Tensors of GPTQ, AWQ, compressed-tensors, MXFP4 and bitsandbytes, whose configs may be in files of their own."""

_WEIGHT = ".weight"
_NO_DEFAULT_FOLDERS = (
    "audio_vae",
    "feature_extractor",
    "image_encoder",
    "image_processor",
    "safety_checker",
    "scheduler",
    "text_encoder",
    "tokenizer",
    "vae",
    "vocoder",
)
"""Folder names (or beginnings of them) that are never quantized unless the user names them."""

_DIFFUSION_TRANSFORMER = re.compile(r"Transformer\w*Model|Transformer[123]D|DiT")
_NEVER_DEFAULT_CLASS = re.compile(r"Autoencoder|VAE|VQModel|Vocoder")


class SourceShard(msgspec.Struct, frozen=True):
    """One source shard: its entry, checked header and identity.

    ``identity`` is the hex digest that stands for this shard's bytes in every key of the store
    (core/fingerprint.py says what it is made of); it contains no path and no inode.
    """

    entry: SourceEntry
    header: Header
    identity: str


class Component(msgspec.Struct, frozen=True):
    """One directory with weights.

    ``kind``: "diffusers" (config.json has ``_class_name``), "transformers" (``architectures`` or
    ``model_type``) or "raw" (no config.json, or one that names no class: it is left as it is). ``shards``: the paths of the weight set in use, in index order (or
    by name). ``weight_map``: tensor name -> shard path (complete and checked against the headers).
    ``index_path``: the index file in SRC, or "" (sharded without index: one is synthesized at
    ``<stem>.safetensors.index.json``); ``index_metadata``: what it says beside the weight map. ``config``: the parsed config.json, None for raw. ``class_name``:
    ``_class_name`` or the first of ``architectures``, else "". ``hidden``: files of competing weight sets, with the
    reason; they are hidden where the component is quantized. ``default_quantized``: whether it is quantized when the user
    names no component (a diffusion transformer of a pipeline; the whole of a transformers model at the root).
    ``already_quantized``: the reason, or "". ``beside``: modules of weights that are in the folder but not in the weight set,
    shown as they are: some loaders read every file of a folder, and have to be told that these are not FP8. ``notes`` and ``warnings``: what was decided here that ``plan`` has to say,
    one sentence each.
    """

    path: str
    kind: str
    shards: tuple[str, ...]
    weight_map: dict[str, str]
    index_path: str
    index_metadata: dict[str, object]
    config_path: str
    config: dict[str, object] | None
    class_name: str
    hidden: dict[str, str]
    default_quantized: bool
    already_quantized: str = ""
    beside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything the planner needs to know of SRC, and nothing of where SRC is.

    ``texts``: raw bytes of each small JSON the planner rewrites or reads (config.json, *.index.json,
    model_index.json), by path. ``entries`` by path, in sorted order, parents before children. ``shards`` by path:
    every safetensors file in a component's weight set. ``pipeline``: the root has model_index.json. ``warnings``: what
    a user should know of SRC as a whole, one sentence each.
    """

    entries: dict[str, SourceEntry]
    shards: dict[str, SourceShard]
    components: tuple[Component, ...]
    texts: dict[str, bytes]
    pipeline: bool
    warnings: tuple[str, ...] = ()


def text_files(entries: Mapping[str, SourceEntry]) -> list[str]:
    """The small JSON files that source.py must read into ``texts``: config.json, model_index.json, *.safetensors.index.json."""
    return [
        path
        for path, entry in entries.items()
        if entry.kind == "file" and not is_private(path) and _is_text_name(name_of(path))
    ]


def classify(
    sets: Sequence[WeightSet], texts: Mapping[str, bytes], headers: Mapping[str, Header]
) -> tuple[Component, ...]:
    """The components of SRC, root first, then by path. *headers*: of every shard, and of every extra that has one.

    A folder of files that no index ties together and that state one tensor twice (a collection of adapters, or of whole
    models) is no component: its files are ordinary files.

    Raises: SourceInvalidError: nothing but such a collection; two shards state one tensor differently; a config that is
    not a JSON object.
    """
    root_is_model = any(found.folder == "" and not found.adapter for found in sets)
    components = []
    collections: list[SourceInvalidError] = []
    for found in sets:
        try:
            components.append(_component(found, texts, headers, root_is_model=root_is_model))
        except _CollectionError as err:
            collections.append(err)
    if not components:
        raise collections[0]
    return tuple(components)


class _CollectionError(SourceInvalidError):
    """A folder holds several models' files side by side."""


def _component(
    found: WeightSet,
    texts: Mapping[str, bytes],
    headers: Mapping[str, Header],
    *,
    root_is_model: bool,
) -> Component:
    """What one folder's weight set means."""
    config_path = join(found.folder, "config.json")
    config = _config(config_path, texts)
    kind, class_name = _kind(config)
    if kind == "raw" or found.mistral:
        kind, class_name, config, config_path = "raw", "", None, ""
    weight_map, warnings = _weight_map(found, headers)
    hidden, beside, notes = _extras(found, weight_map, headers)
    notes += found.notes
    default = _is_default(
        name_of(found.folder),
        kind,
        class_name,
        in_pipeline=_in_pipeline(found.folder, texts),
        pipeline_root=join(found.folder, _PIPELINE) in texts,
    )
    if found.adapter:
        default = False
        notes.append("an adapter, no model of its own: shown as it is")
    elif found.mistral and default:
        default = False
        warnings.append(
            "consolidated weights with params.json, Mistral's own format: nothing in it says to a reader that weights"
            " are FP8, so it is shown as it is; use the checkpoint in Hugging Face's format"
        )
    elif default and found.folder and root_is_model and not _in_pipeline(found.folder, texts):
        default = False
        notes.append(
            f"a model below the one at the root, shown as it is: --component {brief(found.folder)} quantizes it"
        )
    return Component(
        path=found.folder,
        kind=kind,
        shards=found.shards,
        weight_map=weight_map,
        index_path=found.index_path,
        index_metadata=found.index_metadata,
        config_path=config_path,
        config=config,
        class_name=class_name,
        hidden={**found.hidden, **hidden},
        default_quantized=default,
        already_quantized=_already_quantized(config, config_path, found.shards, headers),
        beside=tuple(beside),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _is_text_name(name: str) -> bool:
    return name in ("config.json", _PIPELINE) or is_index_name(name)


def _in_pipeline(folder: str, texts: Mapping[str, bytes]) -> bool:
    """Whether a folder above has model_index.json."""
    while folder:
        folder = folder_of(folder)
        if join(folder, _PIPELINE) in texts:
            return True
    return False


def _is_default(
    name: str,
    kind: str,
    class_name: str,
    *,
    in_pipeline: bool,
    pipeline_root: bool,
) -> bool:
    """Whether a component is quantized when the user names none, by its names alone."""
    if name.startswith(_NO_DEFAULT_FOLDERS) or pipeline_root:
        return False
    if kind == "diffusers" and _NEVER_DEFAULT_CLASS.search(class_name):
        return False
    if in_pipeline:
        by_class = kind == "diffusers" and _DIFFUSION_TRANSFORMER.search(class_name) is not None
        return by_class or name.startswith("transformer")
    return True


def _config(path: str, texts: Mapping[str, bytes]) -> dict[str, object] | None:
    data = texts.get(path)
    return None if data is None else parse_object(data, path)


def _kind(config: Mapping[str, object] | None) -> tuple[str, str]:
    """(kind, class name) by the keys that the loaders themselves look at."""
    if config is None:
        return "raw", ""
    if isinstance(class_name := config.get("_class_name"), str):
        return "diffusers", class_name
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return "transformers", architectures[0]
    return ("transformers" if config.get("model_type") else "raw"), ""


def _already_quantized(
    config: Mapping[str, object] | None,
    config_path: str,
    shards: tuple[str, ...],
    headers: Mapping[str, Header],
) -> str:
    """Why a component needs no quantization, or ""."""
    nested = [value for value in (config or {}).values() if isinstance(value, dict)]
    for settings in (config or {}), *nested:
        for key in ("quantization_config", "compression_config"):
            if (found := settings.get(key)) is not None:
                method = found.get("quant_method") if isinstance(found, dict) else None
                said = f" (quant_method {quoted(method)})" if isinstance(method, str) else ""
                return f"{config_path} has a {key}{said}"
    for shard in shards:
        for name, entry in headers[shard].tensors.items():
            if entry.dtype in QUANTIZED_SOURCES:
                return f"tensor {quoted(name)} in {shard} is {entry.dtype}"
            if entry.dtype in _PACKED_DTYPES and _PACKED_NAME.search(name):
                return f"tensor {quoted(name)} in {shard} is {entry.dtype}, packed"
    return ""


def _weight_map(
    found: WeightSet, headers: Mapping[str, Header]
) -> tuple[dict[str, str], list[str]]:
    """Tensor name -> shard path, complete and true to the headers; and what the index or the shards have wrong.

    A tensor that two shards state alike is in both; the map has the one that the index names, else the last, which is
    the one that stays when a reader takes shard after shard.
    """
    weight_map: dict[str, str] = {}
    twice: list[str] = []
    for shard in found.shards:
        tensors = headers[shard].tensors
        again = [name for name in tensors if name in weight_map]
        for name in again:
            _check_alike(found, name, tensors[name], weight_map[name], shard, headers)
        twice += again
        weight_map |= dict.fromkeys(tensors, shard)
    warnings = []
    if twice:
        warnings.append(
            f"{_some(twice, 'tensor')} in more than one shard: all of them are shown; which one counts is up to the reader"
        )
    if found.indexed == weight_map:
        return weight_map, warnings
    nowhere, elsewhere = [], []
    for name, shard in found.indexed.items():
        if name not in weight_map:
            nowhere.append(name)
        elif name in headers[shard].tensors:
            weight_map[name] = shard
        else:
            elsewhere.append(name)
    if nowhere:
        warnings.append(
            f"{found.index_path} names {_some(nowhere, 'tensor')} in no shard; the view's index leaves them out"
        )
    if elsewhere:
        warnings.append(
            f"{found.index_path} names another shard than the right one for {_some(elsewhere, 'tensor')}; the view's index is right"
        )
    if found.index_path and (unlisted := weight_map.keys() - found.indexed.keys()):
        warnings.append(
            f"{found.index_path} lacks {_some(unlisted, 'tensor')} of its shards; the view's index has them"
        )
    return weight_map, warnings


def _extras(
    found: WeightSet, weight_map: Mapping[str, str], headers: Mapping[str, Header]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Of the files beside the weight set: those to hide, modules that stay as they are in the others, and what to say.

    Without an index, loaders that read every file of a folder would read the set's tensors twice.
    """
    hidden: dict[str, str] = {}
    beside: list[str] = []
    notes: list[str] = []
    for path in found.extras:
        header = headers.get(path)
        tensors = header.tensors if header is not None else {}
        if not found.index_path and tensors.keys() & weight_map.keys():
            hidden[path] = "holds tensors of the weight set once more"
            continue
        what = "not named by the index" if found.index_path else "not in the weight set"
        notes.append(f"{brief(path)}: {what}, shown as it is")
        beside += [
            name.removesuffix(_WEIGHT)
            for name, entry in tensors.items()
            if name.endswith(_WEIGHT) and len(entry.shape) > 1 and name not in weight_map
        ]
    return hidden, beside, notes


def _check_alike(
    found: WeightSet,
    name: str,
    entry: TensorEntry,
    other: str,
    shard: str,
    headers: Mapping[str, Header],
) -> None:
    """A tensor in two shards must be stated alike, and the shards must belong together."""
    said = f"tensor {quoted(name)} is in two shards, {brief(other)} and {brief(shard)}"
    if found.collection:
        raise _CollectionError(
            f"{said}, which no index ties together",
            hint="if these are several models, give each a folder of its own",
            tensor=brief(name),
        )
    known = headers[other].tensors[name]
    if (known.dtype, known.shape) != (entry.dtype, entry.shape):
        raise SourceInvalidError(
            f"{said}, as {known.dtype}{list(known.shape)} and {entry.dtype}{list(entry.shape)}",
            tensor=brief(name),
        )


def _some(names: Collection[str], what: str) -> str:
    """A count with the first name: '3 tensors ("a" and others)'."""
    more = f"s ({quoted(min(names))} and others)" if len(names) > 1 else f" ({quoted(min(names))})"
    return f"{len(names)} {what}{more}"
