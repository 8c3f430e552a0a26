"""Looks at a plan and at finished files, and what both have to be by the oracle.

A plan is looked at through its bytes: headers, indexes and configs are parsed here by json alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8fs.core.layout import Plan, plan
from fp8fs.core.recipe import Recipe
from fp8fs.source import Source
from tests import oracle
from tests.builders import Tensor

SCHEMES = ("per_tensor", "per_channel", "block", "block_free")
SERVE_MODES = {
    "handoff": ("--serve", "handoff"),
    "inline": ("--serve", "inline"),
    "tensor": ("--serve", "inline", "--grain", "tensor"),
}

LLM: dict[str, object] = {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}
DIT: dict[str, object] = {"_class_name": "TinyTransformer3DModel"}


def layer(number: int) -> str:
    """The name of a weight that is quantized and fused with no other."""
    return f"model.layers.{number}.mlp.down_proj.weight"


@dataclass(frozen=True)
class Looked:
    """A plan as its files show it."""

    plan: Plan

    @property
    def names(self) -> list[str]:
        """Every name of the view but folders."""
        return [path for path, entry in self.plan.entries.items() if entry.kind != "dir"]

    def text(self, path: str) -> bytes:
        """The content of a file that the view rewrites."""
        entry = self.plan.entries[path]
        assert entry.kind == "text", path
        return entry.content

    def json(self, path: str) -> Any:
        return json.loads(self.text(path).decode("utf-8-sig"))

    def header(self, path: str) -> dict[str, Any]:
        """The header of a view shard."""
        (preamble,) = [shard.preamble for shard in self.plan.shards if shard.path == path]
        return dict(json.loads(preamble[8:]))

    @property
    def shards(self) -> dict[str, set[str]]:
        """View shard -> names of its tensors, scales left out."""
        return {
            shard.path: {
                name
                for name in self.header(shard.path)
                if name != "__metadata__" and "_scale" not in name
            }
            for shard in self.plan.shards
        }

    @property
    def quantized(self) -> set[str]:
        """Names of the tensors that become FP8."""
        return {
            name
            for shard in self.plan.shards
            for name, entry in self.header(shard.path).items()
            if entry.get("dtype") == "F8_E4M3"
        }

    def warned(self, *words: str) -> bool:
        """Whether one warning holds all the words."""
        return any(all(word in warning for word in words) for warning in self.plan.warnings)

    def noted(self, *words: str) -> bool:
        """Whether one note holds all the words."""
        return any(all(word in note for word in words) for note in self.plan.notes)


def look(src: Path, **recipe: object) -> Looked:
    """The plan of a folder."""
    with Source.open(src) as source:
        planned = plan(source.checkpoint, Recipe(**recipe), quantizer_version="1")  # type: ignore[arg-type]
    return Looked(planned)


def stored(tensors: Mapping[str, Tensor]) -> dict[str, oracle.Stored]:
    """What a builder wrote, as the oracle takes it."""
    return {name: oracle.Stored(*tensor) for name, tensor in tensors.items()}


def check_files(
    tree: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    chosen: Collection[str],
    scheme: str,
    groups: Mapping[str, list[str]] | None = None,
) -> None:
    """Each file of *tree* holds what the oracle makes of *files*; *chosen* weights are quantized, no others."""
    everything = {name: t for tensors in files.values() for name, t in stored(tensors).items()}
    for file, tensors in files.items():
        found = oracle.read_file(tree / file)
        here = [name for name in tensors if name in chosen]
        wanted = oracle.expected({**everything, **stored(tensors)}, here, scheme, groups or {})
        names = {*tensors, *(oracle.scale_name(name, scheme) for name in here)}
        assert found == {name: wanted[name] for name in names}, file


def check_index(path: Path) -> None:
    """The index names each tensor of its folder's shards, in a file that has it, and their size."""
    index = json.loads(path.read_text())
    held: dict[str, set[str]] = {}
    total = 0
    for file in sorted({*index["weight_map"].values()}):
        start, entries, _ = oracle.read_header(path.parent / file)
        total += (path.parent / file).stat().st_size - start
        for name in entries:
            held.setdefault(name, set()).add(file)
    assert index["weight_map"].keys() == held.keys()
    assert all(file in held[name] for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == total
