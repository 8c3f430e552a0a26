"""Show source tensors under an engine's own names: rows joined where the engine joins them, dtypes as it has them.

The table is data: view tensor -> its source tensors in row order. One that is not named stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fp8fs.core.dtypes import QUANTIZABLE
from fp8fs.core.placement import ViewTensor
from fp8fs.core.profiles import Profile
from fp8fs.errors import SourceInvalidError, UsageError

__all__ = ["ViewNames", "as_at_run_time", "join_names", "runtime_names"]

ViewNames = Mapping[str, tuple[str, ...]]

_CASTS = frozenset({("F32", "BF16"), ("F16", "BF16")})
"""Dtype in the checkpoint and at run time, of tensors that are shown rounded."""


def as_at_run_time(
    shards: Sequence[Sequence[ViewTensor]], profile: Profile
) -> list[list[ViewTensor]]:
    """The component's tensors as the engine has them: names, joined rows, dtypes of what is not quantized.

    Raises: as ``join_names``; UsageError for a dtype that no rounding gives.
    """
    names = runtime_names(profile, (tensor.name for tensors in shards for tensor in tensors))
    dtypes: dict[str, str] = {}
    for tensors in shards:
        for tensor in tensors:
            found = profile.runtime_tensor(tensor.name)
            dtypes.setdefault(found.name, found.dtype)
    return [
        [_cast(tensor, dtypes[tensor.name], profile) for tensor in tensors]
        for tensors in join_names(shards, names)
    ]


def runtime_names(profile: Profile, tensors: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The table for these source tensors; those that have their runtime name already are not in it.

    Raises: SourceInvalidError if two tensors are the same one at run time.
    """
    names: dict[str, tuple[str, ...]] = {}
    for tensor in tensors:
        found = profile.runtime_tensor(tensor)
        parts: tuple[str, ...] = (tensor,)
        if found.parts > 1:
            module, _, leaf = tensor.rpartition(".")
            fusion = profile.fusion_of(module)
            siblings = fusion.siblings if fusion is not None else (module,)
            parts = tuple(f"{sibling}.{leaf}" for sibling in siblings)
        elif found.name == tensor:
            continue
        if names.setdefault(found.name, parts) != parts:
            raise SourceInvalidError(
                f'"{tensor}" and "{names[found.name][0]}" are both "{found.name}" at run time',
                tensor=tensor,
            )
    return names


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
    if len(parts) == 1:
        return msgspec.structs.replace(head, name=name)
    for part in parts:
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
    return ViewTensor(
        name,
        head.quantize,
        head.dtype,
        (sum(part.shape[0] for part in parts), *head.shape[1:]),
        sum(part.nbytes for part in parts),
        tuple(piece for part in parts for piece in part.pieces),
        head.group,
    )


def _cast(tensor: ViewTensor, dtype: str, profile: Profile) -> ViewTensor:
    """A kept tensor in the runtime's dtype. Integers and the like are the engine's own affair."""
    if tensor.quantize or tensor.dtype == dtype or tensor.dtype not in QUANTIZABLE:
        return tensor
    if (tensor.dtype, dtype) not in _CASTS:
        raise UsageError(
            f'--names runtime: "{tensor.name}" is {tensor.dtype} in the checkpoint, {dtype} in {profile.engine} {profile.version}',
            hint="--names checkpoint",
            tensor=tensor.name,
        )
    return msgspec.structs.replace(tensor, cast=dtype)
