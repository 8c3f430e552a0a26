"""What SRC holds, as plain data: files, shards, components. ``source.py`` reads it; this decides what it means.

A *component* is a directory with safetensors weights: the root of a transformers model, or a
subfolder of a diffusers pipeline. Its ``path`` is relative to SRC, "" for the root.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fp8fs.core.header import Header

__all__ = [
    "Checkpoint",
    "Component",
    "SourceEntry",
    "SourceShard",
    "classify",
    "text_files",
    "weight_files",
]


class SourceEntry(msgspec.Struct, frozen=True):
    """One name below SRC. ``path`` is relative, "/"-separated, undecodable bytes as surrogates.

    ``kind``: "file" (after following symlinks), "dir", "link" (a symlink that is dangling or leads to a
    directory: shown as the link it is), "other" (FIFO, device, socket: never opened).
    ``mode`` is permission bits only (0o7777); ``link`` the symlink's text if the name itself is a symlink
    (for kind "file" too, as in an HF cache), else "".
    """

    path: str
    kind: str
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int
    dev: int
    ino: int
    link: str = ""


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
    ``model_type``) or "raw" (no config.json). ``shards``: the paths of the weight set in use, in index order (or
    by name). ``weight_map``: tensor name -> shard path (complete and checked against the headers).
    ``index_path``: the index file in SRC, or "" (sharded without index: one is synthesized at
    ``<stem>.safetensors.index.json``). ``config``: the parsed config.json, None for raw. ``class_name``:
    ``_class_name`` or the first of ``architectures``, else "". ``hidden``: files of competing weight sets.
    ``default_quantized``: whether it is quantized when the user names no component (a diffusion transformer of a
    pipeline; the whole of a transformers model at the root). ``already_quantized``: the reason, or "".
    """

    path: str
    kind: str
    shards: tuple[str, ...]
    weight_map: dict[str, str]
    index_path: str
    config_path: str
    config: dict[str, object] | None
    class_name: str
    hidden: tuple[str, ...]
    default_quantized: bool
    already_quantized: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything the planner needs to know of SRC, and nothing of where SRC is.

    ``texts``: raw bytes of each small JSON the planner rewrites or reads (config.json, *.index.json,
    model_index.json), by path. ``entries`` by path, in sorted order, parents before children. ``shards`` by path:
    every safetensors file in a component's weight set. ``pipeline``: the root has model_index.json.
    """

    entries: dict[str, SourceEntry]
    shards: dict[str, SourceShard]
    components: tuple[Component, ...]
    texts: dict[str, bytes]
    pipeline: bool


def text_files(entries: Mapping[str, SourceEntry]) -> list[str]:
    """The small JSON files that source.py must read into ``texts``: config.json, model_index.json, *.safetensors.index.json."""
    raise NotImplementedError


def weight_files(entries: Mapping[str, SourceEntry], texts: Mapping[str, bytes]) -> list[str]:
    """The shards whose headers must be read before ``classify``: every component's weight set in use, sorted.

    Raises: SourceInvalidError as ``classify`` does, for what is wrong before any header is read.
    """
    raise NotImplementedError


def classify(
    entries: Mapping[str, SourceEntry], texts: Mapping[str, bytes], headers: Mapping[str, Header]
) -> tuple[Component, ...]:
    """The components of SRC, root first, then by path.

    Raises: SourceInvalidError: no safetensors at all (says what was found instead); an index names a missing shard; a
    tensor in two shards; an index entry for a tensor that its shard has not; a config that is not a JSON object.
    """
    raise NotImplementedError
