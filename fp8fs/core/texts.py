"""The JSON files that the view rewrites: a component's index and its config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fp8fs.core import config_diffusers, config_vllm
from fp8fs.core.checkpoint import Component
from fp8fs.core.index import encode_index
from fp8fs.core.json_text import set_key
from fp8fs.core.placement import Scales, ViewTensor
from fp8fs.core.profiles import Profile
from fp8fs.core.recipe import BLOCK, BLOCK_SCHEMES
from fp8fs.core.row_order import QKV
from fp8fs.core.text import counted, quoted
from fp8fs.core.weightset import VARIANTS
from fp8fs.errors import SourceInvalidError

__all__ = [
    "edge_block_warning",
    "fused_block_warning",
    "index_path",
    "kept_groups",
    "kept_modules",
    "quantized_modules",
    "scheme_warning",
    "view_config",
    "view_index",
]

_SHARD_NUMBER = re.compile(r"-\d+-of-\d+(?=(\.[^.]+)?$)")
_WEIGHT = ".weight"
_HALVES = 2
"""Scale slots of gate and up in one tensor, which are alike; of q, k and v in one, only the config knows the rows."""
_EXPERTS = re.compile(r"((?:.+?\.)?experts)\.(?!\d)")
"""The module of all experts, in the name of a tensor that is not one expert's."""
_STEMS = {"diffusers": "diffusion_pytorch_model"}


def scheme_warning(component: Component, scheme: str) -> str:
    """What a usual reader of this kind of component makes of the scheme, if it is not good; else ""."""
    if component.config is None:
        return f"no config.json that names a model class: no reader is told that the weights are FP8 ({scheme})"
    if component.kind == "diffusers" and scheme == "per_channel":
        return "vLLM-Omni refuses per_channel (compressed-tensors) in a pipeline; per_tensor and block it reads"
    if component.kind == "transformers" and scheme == "per_tensor":
        return "transformers ignores per_tensor scales without a word; vLLM and SGLang read them"
    return ""


def edge_block_warning(
    component: Component, shards: Iterable[Iterable[ViewTensor]], scheme: str
) -> str:
    """Weights of several blocks with a smaller one at the edge, where transformers is the reader; else "".

    Source: transformers 5.19 ``Fp8Dequantize`` takes rows / blocks for the height of a block, which is not 128 then.
    """
    if component.kind != "transformers" or scheme not in BLOCK_SCHEMES:
        return ""
    edged = [
        tensor
        for tensors in shards
        for tensor in tensors
        if tensor.quantize
        and any(n > b and n % b for n, b in zip(tensor.shape, BLOCK, strict=True))
    ]
    if not edged:
        return ""
    shape = "x".join(map(str, edged[0].shape))
    return (
        f"{counted(len(edged), 'weight')} {'ends' if len(edged) == 1 else 'end'} in a smaller block ({quoted(edged[0].name)}, {shape}): transformers, where it "
        "dequantizes (always without a GPU), refuses or misreads that; per_channel it reads right"
    )


def fused_block_warning(
    shards: Iterable[Iterable[ViewTensor]], scheme: str, profile: Profile | None
) -> str:
    """Fused layers that are no whole blocks, or "": a part's last blocks would reach into the next part.

    ``profile``: of the class, it knows which tensors are two halves (gate and up) in one.
    Source: vLLM 0.32 ``ColumnParallelLinear`` lets them pass its check, and ``adjust_block_scale_shard`` then puts the
    scales of a part where the rows before it end, rounded up: past the end, or under rows of the part before.
    """
    if scheme not in BLOCK_SCHEMES:
        return ""
    uneven = {
        tensor.group or tensor.name
        for tensors in shards
        for tensor in tensors
        if tensor.quantize and _is_uneven(tensor, profile)
    }
    if not uneven:
        return ""
    return (
        f"{len(uneven)} fused layers have parts whose rows are no multiple of {BLOCK[0]} ({min(uneven)}): "
        "vLLM fails to load them, or reads rows under the scale of their neighbours without a word; "
        "per_channel and per_tensor have no such limit"
    )


def _is_uneven(tensor: ViewTensor, profile: Profile | None) -> bool:
    """Whether an engine looks for scales of a fused layer's part where this tensor has none, or another part's."""
    if parts := _part_rows(tensor):
        return any(rows % BLOCK[0] for rows in parts)
    slots = 1 if profile is None else profile.scale_slots(tensor.name.removesuffix(_WEIGHT))
    # Two halves in one tensor have the blocks of the whole; the engine counts those of each half, rounded up.
    rows = tensor.shape[0]
    return slots == _HALVES and _HALVES * _blocks(rows // _HALVES) != _blocks(rows)


def _blocks(rows: int) -> int:
    return -(-rows // BLOCK[0])


def _part_rows(tensor: ViewTensor) -> Sequence[int]:
    """Rows of each part of a fused layer that this tensor was put together from; none if it was not."""
    rows = tensor.shape[0]
    if tensor.row_runs:
        return (rows // QKV,)
    if len(tensor.pieces) > 1:
        row_bytes = tensor.nbytes // rows
        return [piece.nbytes // row_bytes for piece in tensor.pieces]
    return (rows,) if tensor.group else ()


def index_path(component: Component) -> str:
    """Where the component's index is, or is to be made: "" for a single file without a number and without one.

    A variant's is named as loaders look for it: model.safetensors.index.fp16.json for model.fp16-00001-of-00002
    and for model-00001-of-00002.fp16.
    """
    if component.index_path:
        return component.index_path
    names = [path.rpartition("/")[2].removesuffix(".safetensors") for path in component.shards]
    if len(names) == 1 and not _SHARD_NUMBER.search(names[0]):
        return ""
    stems = {_SHARD_NUMBER.sub("", name) for name in names}
    stem = stems.pop() if len(stems) == 1 else _STEMS.get(component.kind, "model")
    base, dot, variant = stem.rpartition(".")
    if dot and variant in VARIANTS:
        return _below(component, f"{base}.safetensors.index.{variant}.json")
    return _below(component, f"{stem}.safetensors.index.json")


def view_index(component: Component, shards: Sequence[Sequence[ViewTensor]], scheme: str) -> bytes:
    """The index of the view's tensors: scales added, ``total_size`` right, other metadata as in SRC's.

    Raises: SourceInvalidError for a shard that JSON cannot name.
    """
    prefix = len(_below(component, ""))
    scales = Scales(scheme)
    weight_map: dict[str, str] = {}
    count = total = 0
    for path, tensors in zip(component.shards, shards, strict=True):
        names: list[str] = []
        for tensor in tensors:
            names.append(tensor.name)
            if tensor.quantize:
                names.append(tensor.name + scales.suffix)
                shape = tensor.shape
                total += shape[0] * shape[1] + scales[shape][1]
            else:
                total += tensor.kept_bytes
        weight_map |= dict.fromkeys(names, path[prefix:])
        count += len(names)
    if len(weight_map) < count:
        # A tensor that several shards hold is where the component's map says, its scale beside it.
        for name, path in component.weight_map.items():
            for each in (name, name + scales.suffix):
                if each in weight_map:
                    weight_map[each] = path[prefix:]
    try:
        return encode_index(component.index_metadata, weight_map, total)
    except UnicodeEncodeError as err:
        odd = err.object.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise SourceInvalidError(
            f'the name "{odd}" is not UTF-8, so no index can hold it', hint="rename the file"
        ) from err


def view_config(component: Component, source: bytes, ignored: Iterable[str], scheme: str) -> bytes:
    """The config's text with ``quantization_config`` in the component's dialect, all else untouched."""
    if component.kind == "diffusers":
        value = config_diffusers.quantization_config(scheme, ignored)
    else:
        value = config_vllm.quantization_config(scheme, ignored)
    return set_key(source, "quantization_config", value)


def kept_modules(shards: Iterable[Iterable[ViewTensor]]) -> list[str]:
    """Modules whose weight stays as it is and that an engine could take for a quantized layer, in source order.

    That is every kept ``*.weight`` of two dimensions or more, linear or not; and the ``experts`` module of
    stacked expert weights, which are mostly named without ".weight".
    """
    found: dict[str, None] = {}
    for tensors in shards:
        for tensor in tensors:
            if tensor.quantize or len(tensor.shape) < 2:
                continue
            if tensor.name.endswith(_WEIGHT):
                found[tensor.name[: -len(_WEIGHT)]] = None
                if len(tensor.shape) != 3:
                    continue
            if (experts := _EXPERTS.match(tensor.name)) is not None:
                found[experts[1]] = None
    return list(found)


def quantized_modules(shards: Iterable[Iterable[ViewTensor]]) -> list[str]:
    """Modules whose weight becomes FP8, in source order."""
    return [t.name[: -len(_WEIGHT)] for tensors in shards for t in tensors if t.quantize]


def kept_groups(shards: Iterable[Iterable[ViewTensor]]) -> list[str]:
    """Fused modules whose parts stay as they are, in source order."""
    found = {t.group: None for tensors in shards for t in tensors if t.group and not t.quantize}
    return list(found)


def _below(component: Component, name: str) -> str:
    return f"{component.path}/{name}" if component.path else name
