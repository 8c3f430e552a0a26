"""Which files of a folder are its weights, and which are the same weights once more.

A folder may hold several weight sets: HF shards beside ``consolidated.safetensors``, a ``.fp16.`` variant
beside the full set, ``pytorch_model.bin`` beside both. A loader reads one of them; here it is decided which,
from names and the index alone. docs/CHECKPOINTS.md lists the kinds and the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fp8fs.core.entries import SourceEntry, folder_of, is_private, join, name_of
from fp8fs.core.index import parse_index
from fp8fs.core.text import brief
from fp8fs.errors import SourceInvalidError

__all__ = ["VARIANTS", "WeightSet", "is_index_name", "weight_sets"]

_SUFFIX = ".safetensors"
_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[\w-]+)?\.json")
_SHARD = re.compile(r"(?P<stem>.+?)-(?P<number>\d+)-of-(?P<count>\d+)(?P<variant>\.[^.]+)?")
_USUAL_STEMS = ("model", "diffusion_pytorch_model", "pytorch_model")
"""Stems that loaders look for, in this order; any other is used only if none of these is there."""

_DIFFUSERS_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
_DIFFUSERS_KEY = b'"_class_name"'
"""A config.json that holds it is read by diffusers, which looks for its own stem first."""

VARIANTS = ("bf16", "fp32", "fp16", "non_ema", "ema")
"""Of a model that has only variants, the one to take: the earliest here."""

_ADAPTER_STEMS = frozenset({"adapter_model", "adapter", "pytorch_lora_weights"})
_CONSOLIDATED = "consolidated"
_MISTRAL_CONFIG = "params.json"
_ORIGINAL = "original"
"""Folder of a model's first publication, beside the weights that loaders read."""

_OTHER_FORMAT = re.compile(
    r"(?P<stem>.+?)(-\d+-of-\d+)?(\.[\w-]+)?\.(bin|pt|pth|h5|msgpack|ot)(\.index(\.[\w-]+)?\.json)?"
)
_OTHER_STEMS = frozenset({*_USUAL_STEMS, _CONSOLIDATED, "tf_model", "flax_model", "rust_model"})
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Left behind by a trainer, under suffixes of weights."""


class WeightSet(msgspec.Struct, frozen=True):
    """The weights of one folder. Paths are relative to SRC.

    ``shards`` by name, numbers in them by value. ``index_path``: the index that names them, or "".
    ``indexed``: what the index says, tensor -> shard path; ``index_metadata``: its other part. ``hidden``: the files of competing sets, with the reason.
    ``extras``: other safetensors files, that no loader is sure to read or to leave alone. ``notes``: what else was
    decided, one sentence each. ``collection``: files under several names that no index ties together. ``adapter``: these are not a model's weights but what is added to them. ``mistral``: Mistral's own format,
    which is described by params.json.
    """

    folder: str
    shards: tuple[str, ...]
    index_path: str
    indexed: dict[str, str]
    index_metadata: dict[str, object]
    hidden: dict[str, str]
    extras: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    collection: bool = False
    adapter: bool = False
    mistral: bool = False


class _Candidate:
    """All files of one stem, in one folder: ``model.safetensors``, ``model-*-of-*``, their index."""

    def __init__(self) -> None:
        self.index = ""
        self.single = ""
        self.sharded: dict[int, dict[int, str]] = {}

    def files(self) -> list[str]:
        names = [name for shards in self.sharded.values() for name in shards.values()]
        return [name for name in (self.index, self.single, *names) if name]


def is_index_name(name: str) -> bool:
    """Whether a file name is that of a safetensors index."""
    return _INDEX.fullmatch(name) is not None


def weight_sets(
    entries: Mapping[str, SourceEntry], texts: Mapping[str, bytes]
) -> tuple[WeightSet, ...]:
    """The weight set of every folder that has one, the root's first.

    A folder "original" beside weights is the same model as it was first published; it is no set of its own.

    Raises: SourceInvalidError: no safetensors at all; a shard that an index names or that a numbered set needs is not
    there, or is no regular file; several indexes of equal standing.
    """
    folders: dict[str, list[str]] = {}
    with_weights: set[str] = set()
    for path, entry in entries.items():
        if entry.kind == "dir" or is_private(path):
            continue
        folder, name = folder_of(path), name_of(path)
        folders.setdefault(folder, []).append(name)
        if name.endswith(_SUFFIX) or (path in texts and is_index_name(name)):
            with_weights.add(folder)
    if not with_weights:
        raise _nothing(entries)
    originals = {
        folder
        for folder in folders
        if name_of(folder) == _ORIGINAL and folder_of(folder) in with_weights
    }
    found = []
    for folder in sorted(with_weights - originals):
        chosen = _choose(folder, folders[folder], entries, texts)
        original = join(folder, _ORIGINAL)
        if original in originals and not chosen.adapter:
            chosen.hidden.update(
                {
                    join(original, name): "the same weights as they were first published"
                    for name in sorted(folders[original])
                    if name.endswith((_SUFFIX, *_OTHER_WEIGHTS)) or is_index_name(name)
                }
            )
        found.append(chosen)
    return tuple(found)


def _choose(
    folder: str,
    names: Sequence[str],
    entries: Mapping[str, SourceEntry],
    texts: Mapping[str, bytes],
) -> WeightSet:
    """The weight set of one folder."""
    candidates = _candidates(folder, names, texts)
    doubles = _doubles(candidates)
    left = {stem: c for stem, c in candidates.items() if stem not in doubles}
    chosen = _chosen_stems(folder, left, texts)
    index_path, indexed, metadata = "", dict[str, str](), dict[str, object]()
    shards: list[str] = []
    for stem in chosen:
        candidate = left[stem]
        if candidate.index:
            index_path = join(folder, candidate.index)
            index = parse_index(texts[index_path], index_path)
            paths = {name: join(folder, name) for name in sorted(set(index.weight_map.values()))}
            indexed = {tensor: paths[name] for tensor, name in index.weight_map.items()}
            metadata = index.metadata
            shards += paths
        elif candidate.single:
            shards.append(candidate.single)
        else:
            shards += _numbered(folder, stem, candidate.sharded)
    if not shards:
        raise SourceInvalidError(f"{index_path}: names no shard")
    for name in shards:
        _check_there(join(folder, name), index_path, entries)
    used = {*shards, name_of(index_path)}
    hidden = _hidden(names, candidates, doubles, chosen, shards, indexed=bool(index_path))
    known = {*used, *hidden}
    extras = [name for name in names if name.endswith(_SUFFIX) and name not in known]
    return WeightSet(
        folder,
        tuple(join(folder, name) for name in sorted(shards, key=_natural)),
        index_path,
        indexed,
        metadata,
        {join(folder, name): why for name, why in sorted(hidden.items()) if name not in used},
        tuple(join(folder, name) for name in sorted(extras) if not _is_adapter(_stem(name))),
        _notes(folder, names, known),
        collection=len(chosen) > 1,
        adapter=all(_is_adapter(stem) for stem in chosen),
        mistral=(
            all(stem.startswith(_CONSOLIDATED) for stem in chosen)
            and join(folder, _MISTRAL_CONFIG) in entries
        ),
    )


def _chosen_stems(
    folder: str, left: Mapping[str, _Candidate], texts: Mapping[str, bytes]
) -> list[str]:
    """The stem that loaders look for, else the one that has an index, else every one but an adapter's."""
    diffusers = _DIFFUSERS_KEY in texts.get(join(folder, "config.json"), b"")
    for usual in _DIFFUSERS_STEMS if diffusers else _USUAL_STEMS:
        for stem in left:
            if stem == usual or _base(stem) == usual:
                return [stem]
    indexed = [stem for stem, candidate in left.items() if candidate.index]
    if indexed:
        named = {
            frozenset(parse_index(texts[path], path).weight_map.values())
            for path in (join(folder, left[stem].index) for stem in indexed)
        }
        if len(named) > 1:
            raise SourceInvalidError(
                f"{_where(folder)} has several indexes and no rule to choose: "
                + ", ".join(left[stem].index for stem in indexed),
                hint="remove all but one",
            )
        return indexed[:1]
    return [stem for stem in left if not _is_adapter(stem)] or list(left)


def _hidden(
    names: Iterable[str],
    candidates: Mapping[str, _Candidate],
    doubles: Mapping[str, str],
    chosen: Sequence[str],
    shards: Sequence[str],
    *,
    indexed: bool,
) -> dict[str, str]:
    """Files of the folder that hold its weights once more, each with the reason; those in use may be among them."""
    hidden: dict[str, str] = {}
    of_shards = {_stem(name) for name in shards}
    for stem, candidate in candidates.items():
        if stem in doubles:
            hidden |= dict.fromkeys(candidate.files(), doubles[stem])
        elif stem in chosen or stem in of_shards:
            why = "the index does not name it" if indexed else "the same weights, cut otherwise"
            hidden |= dict.fromkeys(candidate.files(), why)
        elif candidate.index or stem in _USUAL_STEMS or _base(stem) in _USUAL_STEMS:
            hidden |= dict.fromkeys(candidate.files(), "another weight set")
        if candidate.index and stem not in chosen and stem not in doubles:
            hidden[candidate.index] = "another index"
    if all(_is_adapter(stem) for stem in chosen):
        return hidden  # what is there in other formats is not the same
    known = {*chosen, *of_shards}
    if indexed or any(_base(stem) in _OTHER_STEMS or stem in _OTHER_STEMS for stem in known):
        known |= _OTHER_STEMS
    return hidden | {
        name: "the same weights in another format"
        for name in names
        if _is_other_format(name, known)
    }


def _notes(folder: str, names: Iterable[str], known: set[str]) -> tuple[str, ...]:
    """What is said of weights that are neither used nor hidden, extras apart."""
    notes = []
    for name in sorted(set(names) - known):
        if name.endswith(_SUFFIX) and _is_adapter(_stem(name)):
            notes.append(f"{brief(join(folder, name))}: an adapter, shown as it is")
        elif name.endswith(_OTHER_WEIGHTS) and name not in _NO_WEIGHTS:
            notes.append(
                f"{brief(join(folder, name))}: weights in another format, shown as they are"
            )
    return tuple(notes)


def _candidates(
    folder: str, names: Iterable[str], texts: Mapping[str, bytes]
) -> dict[str, _Candidate]:
    """The folder's safetensors files and indexes by stem; a variant ("model.fp16") is a stem of its own."""
    candidates: dict[str, _Candidate] = {}
    for name in names:
        if match := _INDEX.fullmatch(name):
            if join(folder, name) in texts:
                stem = match["stem"] + (match["variant"] or "")
                candidates.setdefault(stem, _Candidate()).index = name
        elif name.endswith(_SUFFIX):
            candidate = candidates.setdefault(_stem(name), _Candidate())
            if match := _SHARD.fullmatch(name.removesuffix(_SUFFIX)):
                numbered = candidate.sharded.setdefault(int(match["count"]), {})
                numbered[int(match["number"])] = name
            else:
                candidate.single = name
    return candidates


def _stem(name: str) -> str:
    """The stem of a safetensors file's name, with its variant, without its number."""
    bare = name.removesuffix(_SUFFIX)
    match = _SHARD.fullmatch(bare)
    return match["stem"] + (match["variant"] or "") if match else bare


def _doubles(stems: Iterable[str]) -> dict[str, str]:
    """Stems that hold the weights of another stem once more, with the reason."""
    every = set(stems)
    doubles: dict[str, str] = {}
    consolidated = {stem for stem in every if stem.startswith(_CONSOLIDATED)}
    if any(not _is_adapter(stem) for stem in every - consolidated):
        doubles = dict.fromkeys(consolidated, "the same weights in Mistral's own format")
    variants: dict[str, list[str]] = {}
    for stem in every - doubles.keys():
        if base := _base(stem):
            if base in every:
                doubles[stem] = f"a variant of {brief(base)}"
            else:
                variants.setdefault(base, []).append(stem)
    for alike in variants.values():
        alike.sort(key=lambda stem: VARIANTS.index(stem.rpartition(".")[2]))
        doubles |= dict.fromkeys(alike[1:], f"another variant of {brief(alike[0])}")
    return doubles


def _base(stem: str) -> str:
    """The stem of which this one is a variant ("model" of "model.fp16"), or ""."""
    base, _, variant = stem.rpartition(".")
    return base if variant in VARIANTS else ""


def _is_adapter(stem: str) -> bool:
    return stem in _ADAPTER_STEMS


def _numbered(folder: str, stem: str, sharded: Mapping[int, Mapping[int, str]]) -> list[str]:
    """The files of a set without an index, told from their "-3-of-7": the first complete one.

    Some count from 0 to 7. From 0 to 6 may be all or not.
    """
    for count, shards in sorted(sharded.items()):
        if set(shards) - {0} == set(range(1, count + 1)):
            return list(shards.values())
    count, shards = min(sharded.items())
    missing = next((n for n in range(1, count + 1) if n not in shards), None)
    raise SourceInvalidError(
        f"{_where(folder)}: shard {missing} of {count} of {brief(stem)} is missing"
        if missing is not None
        else f"{_where(folder)}: {brief(stem)} has shards numbered beyond their count of {count}",
        hint="finish the download, or add the index",
    )


def _check_there(path: str, index_path: str, entries: Mapping[str, SourceEntry]) -> None:
    """A shard must be a regular file."""
    entry = entries.get(path)
    if entry is not None and entry.kind == "file":
        return
    if entry is None:
        what = "is missing"
    elif entry.kind == "link":
        what = "is a symlink that leads to no file"
    else:
        what = "is not a regular file"
    said = f"{index_path}: names {brief(name_of(path))}, which" if index_path else brief(path)
    raise SourceInvalidError(f"{said} {what}", hint="finish the download", file=brief(path))


def _is_other_format(name: str, stems: set[str]) -> bool:
    """Whether a file holds the weights of one of *stems* in another format."""
    match = _OTHER_FORMAT.fullmatch(name)
    return match is not None and (
        match["stem"] in stems or match["stem"].partition(".")[0] in stems
    )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key under which 2 comes before 10."""
    parts = re.split(r"([0-9]+)", name)
    return [
        (p.isascii() and p.isdigit(), int(p) if p.isascii() and p.isdigit() else 0, p)
        for p in parts
    ]


def _where(folder: str) -> str:
    return f"{brief(folder)}/" if folder else "SRC"


def _nothing(entries: Mapping[str, SourceEntry]) -> SourceInvalidError:
    """No safetensors at all: say what is there instead."""
    files = [path for path, e in entries.items() if e.kind != "dir" and not is_private(path)]
    other = [path for path in files if path.endswith(_OTHER_WEIGHTS)]
    shown = [brief(path) for path in (other or files)[:3]]
    more = len(other or files) - len(shown)
    if more:
        shown.append(f"{more} more")
    if other:
        return SourceInvalidError(
            f"SRC has no safetensors weights, only {', '.join(shown)}",
            hint="convert them to safetensors first",
        )
    found = f"it holds {', '.join(shown)}" if shown else "it is empty"
    return SourceInvalidError(f"SRC has no safetensors weights: {found}")
