"""Checkpoints in memory: headers and configs without a file, for tests of the pure planner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod

from fp8fs.core.checkpoint import Checkpoint, SourceEntry, SourceShard, classify
from fp8fs.core.header import Header, TensorEntry
from fp8fs.core.layout import Plan, Unit, plan
from fp8fs.core.profiles import Profile, parse_document
from fp8fs.core.recipe import Recipe
from fp8fs.core.weightset import weight_sets

__all__ = ["LLM", "Shapes", "checkpoint", "linears", "make_plan", "profile", "unit_of"]

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> dtype and shape."""

ITEM_BYTES = {
    "U8": 1,
    "BOOL": 1,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "F32": 4,
    "I32": 4,
    "I64": 8,
    "F64": 8,
    "F8_E4M3": 1,
}

LLM = {"config.json": {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}}
"""A class that no profile knows: the generic rule decides."""


def linears(*names: str, shape: tuple[int, int] = (32, 64), dtype: str = "BF16") -> Shapes:
    """Weights of linear layers, all of one shape."""
    return {f"{name}.weight": (dtype, shape) for name in names}


def checkpoint(
    shards: Mapping[str, Shapes],
    texts: Mapping[str, object] = LLM,
    *,
    facts: Mapping[str, Mapping[str, int]] | None = None,
    extra: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    salt: str = "",
    reverse: bool = False,
) -> Checkpoint:
    """A checkpoint of these shards. *texts*: JSON values, or bytes as they are. *facts*: stat fields by path.

    *extra*: other names and their kind ("file", "dir", "link:TEXT", "other"). *salt* changes every identity.
    *reverse*: every dict is built in the opposite order.
    """
    entries: dict[str, SourceEntry] = {}

    def add(path: str, kind: str, size: int = 0, link: str = "") -> None:
        parent = path.rpartition("/")[0]
        if parent and parent not in entries:
            add(parent, "dir")
        fields = {"size": size, "mtime_ns": 10, "ctime_ns": 11, "mode": 0o644, "uid": 0, "gid": 0}
        fields |= {"dev": 1, "ino": len(entries)}
        if kind == "dir":
            fields["mode"] = 0o755
        fields.update((facts or {}).get(path, {}))
        entries[path] = SourceEntry(path=path, kind=kind, link=link, **fields)

    encoded = {
        p: t if isinstance(t, bytes) else json.dumps(t, indent=2).encode() for p, t in texts.items()
    }
    headers: dict[str, Header] = {}
    for path, shapes in shards.items():
        tensors, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            begin, end = end, end + ITEM_BYTES[dtype] * prod(shape)
            tensors[name] = TensorEntry(dtype, shape, (begin, end))
        headers[path] = Header(tensors, dict(metadata or {"format": "pt"}), 1000)
        add(path, "file", 1000 + end)
    for path, data in encoded.items():
        add(path, "file", len(data))
    for path, kind in (extra or {}).items():
        add(path, kind.partition(":")[0], 3, kind.partition(":")[2])
    order = sorted(entries, reverse=reverse)
    entries = {path: entries[path] for path in order}
    sets = weight_sets({path: entries[path] for path in sorted(entries)}, encoded)
    components = classify(sets, encoded, headers)
    used = {path for component in components for path in component.shards}
    made = {
        path: SourceShard(entries[path], headers[path], _identity(path + salt))
        for path in order
        if path in used
    }
    if reverse:
        components, encoded = components[::-1], dict(reversed(encoded.items()))
    return Checkpoint(entries, made, components, encoded, "model_index.json" in encoded)


def _identity(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def make_plan(source: Checkpoint, *, profile: Profile | None = None, **recipe: object) -> Plan:
    """The plan of a checkpoint under a recipe given by its fields. *profile*: that of every component, in place of the real ones."""
    more = {} if profile is None else {"find_profile": lambda _name, _kind: profile}
    return plan(source, Recipe(**recipe), quantizer_version="1", **more)  # type: ignore[arg-type]


def profile(*linears: Mapping[str, object], **facts: object) -> Profile:
    """A profile of these linears, for a class that no engine has."""
    record = {
        "class": "TinyModel",
        "module": "tiny",
        "matches": ["TinyModel"],
        "blocks": [],
        "linears": linears,
        "renames": {},
        "dtypes": {},
        "names_complete": True,
        **facts,
    }
    content = {"engine": "engine", "version": "1.0", "kind": "diffusers", "not_derived": {}}
    document = parse_document(json.dumps({**content, "profiles": [record]}).encode())
    return Profile(document, document.profiles)


def unit_of(planned: Plan, name: str) -> Unit:
    """The unit of that name, wherever it is."""
    return next(unit for shard in planned.shards for unit in shard.units if unit.name == name)
