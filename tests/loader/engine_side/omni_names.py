"""How the tiny pipelines' runtime tensors relate to those of a checkpoint: the tests' own tables, written by hand.

Shares nothing with fp8fs and imports no engine: runs in the development environment and in vLLM-Omni's alike.
"""

from __future__ import annotations

import re

import torch

# Runtime leaf -> the checkpoint leaves that it is made of, in row order.
UNFUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
# Model -> (pattern in a runtime name, what a checkpoint has instead).
RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "h3": (),
    "wan": (
        (r"(\.attn[12]\.to_out)\.", r"\1.0."),
        (r"\.ffn\.net_(\d)\.", r".ffn.net.\1."),
        (r"^output_scale_shift_prepare\.", ""),
    ),
    "qwen": ((r"(\.attn\.to_out)\.", r"\1.0."),),
}


RENAMES["wan22"] = RENAMES["wan"]
RENAMES["h3-uneven"] = RENAMES["h3"]


def checkpoint_names(model: str, runtime_name: str) -> list[str]:
    """The checkpoint tensors that one runtime tensor is made of, in row order; nearly always one."""
    name = runtime_name
    for pattern, replacement in RENAMES[model]:
        name = re.sub(pattern, replacement, name)
    path = name.split(".")
    leaf = path[-2] if len(path) > 1 else ""
    if model.startswith("h3") or leaf not in UNFUSED:
        return [name]
    return [".".join([*path[:-2], part, path[-1]]) for part in UNFUSED[leaf]]


def ungroup_qkv_rows(rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """MiniMax-H3's checkpoint order (head by head: its q, k, v rows) to the runtime's [Q; K; V]."""
    grouped = rows.reshape(heads, 3, head_dim, *rows.shape[1:])
    return torch.cat(
        [grouped[:, part].reshape(heads * head_dim, *rows.shape[1:]) for part in range(3)]
    )


def group_qkv_rows(rows: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """The inverse of ``ungroup_qkv_rows``."""
    parts = [part.reshape(heads, head_dim, *rows.shape[1:]) for part in rows.chunk(3)]
    return torch.cat(parts, 1).reshape(rows.shape)
