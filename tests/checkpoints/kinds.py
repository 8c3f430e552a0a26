"""Kinds of checkpoints, one line of names each: which weights have to be FP8, and which must not.

The names are those of published models. Shapes are tiny and the values seeded, so a kind is the same bytes always.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.builders import Tensor, named, tensor, write_json, write_sharded

__all__ = ["Kind", "attention", "mlp", "write_kind"]

FILE = "model.safetensors"


@dataclass(frozen=True)
class Kind:
    """``quantized`` and ``kept``: names of weights; ``more``: tensors of other dtypes or shapes, kept as well."""

    config: Mapping[str, object]
    quantized: Sequence[str]
    kept: Sequence[str] = ()
    more: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, in an order that mixes what is kept with what is not."""
        other = {
            name: tensor(zlib.crc32(name.encode()), dtype, *shape)
            for name, (dtype, shape) in self.more.items()
        }
        return dict(sorted({**named(*self.quantized, *self.kept), **other}.items()))


def write_kind(
    folder: Path, kind: Kind, *, stem: str = "model", shards: int = 1
) -> dict[str, Tensor]:
    """A checkpoint of that kind; returns its tensors."""
    tensors = kind.tensors()
    write_sharded(folder, tensors, shards, stem=stem)
    write_json(folder / "config.json", dict(kind.config))
    return tensors


def attention(
    *bases: str, leaves: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> list[str]:
    """The four weights of each attention module."""
    return [f"{base}.{leaf}.weight" for base in bases for leaf in leaves]


def mlp(*bases: str, leaves: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> list[str]:
    """The three weights of each gated feed-forward module."""
    return [f"{base}.{leaf}.weight" for base in bases for leaf in leaves]
