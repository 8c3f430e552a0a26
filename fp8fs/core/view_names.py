"""Show source tensors under an engine's own names, rows joined where the engine joins them.

The table is data: view tensor -> its source tensors in row order. One that is not named stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8fs.core.placement import ViewTensor
from fp8fs.errors import SourceInvalidError, UsageError

__all__ = ["ViewNames", "join_names"]

ViewNames = Mapping[str, tuple[str, ...]]


def join_names(shards: Sequence[Sequence[ViewTensor]], names: ViewNames) -> list[list[ViewTensor]]:
    """The view's tensors for the source's: each stands where the first of its parts stood.

    Raises: UsageError if parts are quantized only in part; SourceInvalidError if a part is missing or
    parts differ in dtype or in anything but rows, or if a new name is taken.
    """
    by_name = {tensor.name: tensor for tensors in shards for tensor in tensors}
    view_name = {part: name for name, parts in names.items() for part in parts}
    for name, parts in names.items():
        if name in by_name and name not in view_name:
            raise SourceInvalidError(f'tensor "{name}" exists already', tensor=name)
        for part in parts:
            if part not in by_name:
                raise SourceInvalidError(
                    f'tensor "{part}" is missing: "{name}" is made of it', tensor=part
                )
    first = {parts[0] for parts in names.values()}
    return [
        [
            tensor
            if tensor.name not in view_name
            else _join(view_name[tensor.name], [by_name[p] for p in names[view_name[tensor.name]]])
            for tensor in tensors
            if tensor.name not in view_name or tensor.name in first
        ]
        for tensors in shards
    ]


def _join(name: str, parts: Sequence[ViewTensor]) -> ViewTensor:
    head = parts[0]
    for part in parts[1:]:
        if (part.dtype, part.shape[1:]) != (head.dtype, head.shape[1:]) or not part.shape:
            raise SourceInvalidError(
                f'"{name}": "{part.name}" is {part.dtype}{list(part.shape)}, "{head.name}" {head.dtype}{list(head.shape)}',
                tensor=name,
            )
        if part.quantize != head.quantize:
            one, other = (head, part) if head.quantize else (part, head)
            raise UsageError(
                f'"{name}" joins "{one.name}", which is quantized, and "{other.name}", which is not',
                tensor=name,
            )
    rows = sum(part.shape[0] for part in parts) if len(parts) > 1 else 0
    return ViewTensor(
        name,
        head.quantize,
        head.dtype,
        (rows, *head.shape[1:]) if len(parts) > 1 else head.shape,
        sum(part.nbytes for part in parts),
        tuple(piece for part in parts for piece in part.pieces),
        head.group,
    )
