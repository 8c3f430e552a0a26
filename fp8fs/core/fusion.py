"""Which weights an engine fuses into one matrix: they share one scale, or all stay as they are.

A loader that fuses q, k and v under one scale requantizes members whose scales differ; and a fused
matrix cannot be FP8 in one part and BF16 in another. So groups matter in two ways: members are
quantized all or none (every scheme), and share the largest amax (per_tensor).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

__all__ = ["FUSIONS", "Fusion", "leaf_table"]


class Fusion(msgspec.Struct, frozen=True):
    """Sibling modules that engines fuse: ``leaves`` under one parent become one matrix ``label``."""

    label: str
    leaves: tuple[str, ...]


FUSIONS: tuple[Fusion, ...] = (
    Fusion("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    Fusion("gate_up_proj", ("gate_proj", "up_proj")),
    Fusion("w13", ("w1", "w3")),
    Fusion("to_qkv", ("to_q", "to_k", "to_v")),
    Fusion("add_qkv_proj", ("add_q_proj", "add_k_proj", "add_v_proj")),
    Fusion("query_key_value", ("query", "key", "value")),
    Fusion("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    Fusion("wqkv", ("wq", "wk", "wv")),
    Fusion("qkv", ("q", "k", "v")),
    Fusion("wi", ("wi_0", "wi_1")),
    Fusion("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
)
"""Leaf module names, seen in the checkpoints that vLLM, vLLM-Omni and diffusers fuse at load.

A matrix that is fused on disk (``qkv_proj``, ``gate_up_proj``, ``to_qkv``) is one tensor and needs no group.
"""


def leaf_table(fusions: Iterable[Fusion]) -> Mapping[str, str]:
    """Leaf name -> label. Raises: ValueError if a leaf is in two fusions."""
    table: dict[str, str] = {}
    for fusion in fusions:
        for leaf in fusion.leaves:
            if leaf in table:
                raise ValueError(f"leaf {leaf!r} is in two fusions")
            table[leaf] = fusion.label
    return table
