"""Which files of a folder are its weights, and which are the same weights once more.

A folder may hold several weight sets: HF shards beside ``consolidated.safetensors``, a ``.fp16.`` variant
beside the full set, ``pytorch_model.bin`` beside both. A loader reads one of them; here it is decided which,
from names and the index alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fp8fs.core.entries import SourceEntry, folder_of, is_private, join, name_of
from fp8fs.core.index import parse_index
from fp8fs.core.text import brief
from fp8fs.errors import SourceInvalidError

__all__ = ["WeightSet", "is_index_name", "weight_sets"]

_SUFFIX = ".safetensors"
_INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?P<variant>\.[\w-]+)?\.json")
_SHARD = re.compile(r"(?P<stem>.+?)-(?P<number>\d+)-of-(?P<count>\d+)(?P<variant>\.[^.]+)?")
_USUAL_STEMS = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Stems that loaders look for, in this order; any other is used only if none of these is there."""

_VARIANTS = ("bf16", "fp32", "fp16", "non_ema")
"""Of a model that has only variants, the one to take: the earliest here."""

_OTHER_FORMAT = re.compile(
    r"(?P<stem>.+?)(-\d+-of-\d+)?(\.[\w-]+)?\.(bin|pt|pth|h5|msgpack|ot)(\.index(\.[\w-]+)?\.json)?"
)
_OTHER_STEMS = frozenset({*_USUAL_STEMS, "consolidated", "tf_model", "flax_model", "rust_model"})
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


class WeightSet(msgspec.Struct, frozen=True):
    """The weights of one folder. Paths are relative to SRC.

    ``shards`` by name, numbers in them by value. ``index_path``: the index that names them, or "".
    ``indexed``: what the index says, tensor -> shard path. ``hidden``: the files of competing sets.
    """

    folder: str
    shards: tuple[str, ...]
    index_path: str
    indexed: dict[str, str]
    hidden: tuple[str, ...]


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
    return tuple(_choose(f, folders[f], entries, texts) for f in sorted(with_weights))


def _choose(
    folder: str,
    names: Sequence[str],
    entries: Mapping[str, SourceEntry],
    texts: Mapping[str, bytes],
) -> WeightSet:
    """The weight set of one folder."""
    candidates = _candidates(folder, names, texts)
    competing = _competing(candidates)
    left = {stem: c for stem, c in candidates.items() if stem not in competing}
    indexed = [stem for stem, c in left.items() if c.index]
    usual = [stem for stem in _USUAL_STEMS if stem in left]
    if len(indexed) > 1 and not usual:
        raise SourceInvalidError(
            f"{_where(folder)} has several indexes and no rule to choose: "
            + ", ".join(left[stem].index for stem in indexed),
            hint="remove all but one",
        )
    chosen = usual[:1] or indexed or list(left)
    index_path, where = "", dict[str, str]()
    shards: list[str] = []
    for stem in chosen:
        candidate = left[stem]
        if candidate.index:
            index_path = join(folder, candidate.index)
            index = parse_index(texts[index_path], index_path)
            where = {tensor: join(folder, name) for tensor, name in index.weight_map.items()}
            shards += sorted(set(index.weight_map.values()))
        elif candidate.single:
            shards.append(candidate.single)
        else:
            shards += _numbered(folder, stem, candidate.sharded)
    if not shards:
        raise SourceInvalidError(f"{index_path}: names no shard")
    for name in shards:
        _check_there(join(folder, name), index_path, entries)
    stems = {*chosen, *(_stem(name) for name in shards)}
    hidden = {
        name
        for stem, candidate in candidates.items()
        if stem in competing or stem in stems
        for name in candidate.files()
    }
    hidden |= {name for name in names if _is_other_format(name, stems)}
    hidden -= {*shards, name_of(index_path)}
    return WeightSet(
        folder,
        tuple(join(folder, name) for name in sorted(shards, key=_natural)),
        index_path,
        where,
        tuple(join(folder, name) for name in sorted(hidden)),
    )


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


def _competing(stems: Iterable[str]) -> set[str]:
    """Stems that hold the weights of another stem once more."""
    every = set(stems)
    competing = {stem for stem in every if stem.startswith("consolidated")}
    if competing == every:
        competing = set()
    variants: dict[str, list[str]] = {}
    for stem in every - competing:
        base, dot, variant = stem.rpartition(".")
        if dot and base in every:
            competing.add(stem)
        elif dot and variant in _VARIANTS:
            variants.setdefault(base, []).append(stem)
    for alike in variants.values():
        alike.sort(key=lambda stem: _VARIANTS.index(stem.rpartition(".")[2]))
        competing.update(alike[1:])
    return competing


def _numbered(folder: str, stem: str, sharded: Mapping[int, Mapping[int, str]]) -> list[str]:
    """The files of a set without an index, told from their "-3-of-7": the first complete one."""
    for count, shards in sorted(sharded.items()):
        if set(shards) == set(range(1, count + 1)):
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
    """Whether a file holds the same weights in another format."""
    match = _OTHER_FORMAT.fullmatch(name)
    if match is None:
        return False
    return match["stem"].partition(".")[0] in _OTHER_STEMS or match["stem"] in stems


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
