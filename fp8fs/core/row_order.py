"""Weights whose rows an engine reorders while it loads them, but not their scales.

Such an engine reads block scales in its own row order, so blocks are cut in that order too: the unit's matrix has the
rows as the engine will have them, and ``row_runs`` puts each row back where the checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fp8fs.core.dtypes import DTYPES
from fp8fs.core.placement import ViewTensor
from fp8fs.core.plan import Piece, RowRun
from fp8fs.core.profiles import GroupedRows
from fp8fs.errors import SourceInvalidError

__all__ = ["QKV", "ungrouped"]

QKV = 3
"""Parts of such a weight: q, k and v."""


def ungrouped(
    tensor: ViewTensor, order: GroupedRows, config: Mapping[str, object] | None
) -> ViewTensor:
    """The same tensor, made from the matrix [Q; K; V] and stored head by head (its q, k, v rows) as in the checkpoint.

    Raises: SourceInvalidError if the component's config does not say how many rows a head has, or says it wrong.
    """
    heads, head_dim = (_count(tensor, config, key) for key in (order.heads, order.head_dim))
    rows, cols = tensor.shape
    if rows != QKV * heads * head_dim:
        raise SourceInvalidError(
            f'"{tensor.name}" has {rows} rows, but {order.heads} {heads} and {order.head_dim} {head_dim} '
            f"make {QKV * heads * head_dim}",
            hint=f"--keep {tensor.name}",
            tensor=tensor.name,
        )
    if heads == 1:
        return tensor
    (whole,) = tensor.pieces
    run_bytes = head_dim * cols * DTYPES[tensor.dtype].bits // 8
    pieces: list[Piece] = []
    runs: list[RowRun] = []
    for part in range(QKV):
        for head in range(heads):
            place = head * QKV + part
            offset = whole.file_offset + place * run_bytes
            pieces.append(Piece(whole.shard, offset, run_bytes, whole.tensor))
            runs.append(RowRun((part * heads + head) * head_dim, head_dim, place * head_dim))
    return msgspec.structs.replace(tensor, pieces=tuple(pieces), row_runs=tuple(runs))


def _count(tensor: ViewTensor, config: Mapping[str, object] | None, key: str) -> int:
    value = (config or {}).get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceInvalidError(
            f'"{tensor.name}" is stored head by head, but config.json does not say {key}',
            hint=f"--keep {tensor.name}",
            tensor=tensor.name,
        )
    return value
