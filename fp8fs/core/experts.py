"""Experts that a checkpoint stacks in one 3-D tensor, and their split into the 2-D weights that readers know as FP8.

    experts.gate_up_proj  [E, 2I, H]  ->  experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight [I, H], ...
    experts.down_proj     [E, H, I]   ->  experts.0.down_proj.weight [H, I], ...

No scheme covers a 3-D tensor, so by default they stay as they are. Split, each expert is a run of bytes of the tensor:
everything behind this module takes it for a tensor of its own. Of classes that store their experts as [E, in, out], it is
a window of lines, read as its transpose (``TurnedEntry``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from fp8fs.core.checkpoint import Component
from fp8fs.core.dtypes import QUANTIZABLE, nbytes
from fp8fs.core.header import Header, TensorEntry
from fp8fs.core.text import quoted
from fp8fs.errors import SourceInvalidError, UsageError

__all__ = [
    "OPTION",
    "Leaves",
    "TurnedEntry",
    "expert_leaves",
    "experts_note",
    "experts_warning",
    "is_stacked",
    "split_experts",
    "split_warning",
]

OPTION = "--split-experts"

_STACKED = re.compile(r"(?P<experts>(?:.+\.)?experts)\.(?P<leaf>\w+?)(?P<suffix>\.weight)?")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_RUNTIME = ".mlp.experts"


class TurnedEntry(TensorEntry, frozen=True, gc=False):
    """A matrix [out, in] of which the file holds the transpose: ``in`` lines of ``out`` elements, ``pitch`` elements from
    one to the next. ``data_offsets`` begin with the first line and count the matrix's own bytes."""

    pitch: int


class Leaves(NamedTuple):
    """What readers of a class call one expert's weights, and the module that they know as ``mlp`` ("": by that name)."""

    gate: str
    up: str
    down: str
    parent: str = ""


_USUAL = Leaves("gate_proj", "up_proj", "down_proj")
_MIXTRAL = Leaves("w1", "w3", "w2", "block_sparse_moe")
_READERS: tuple[tuple[str, Leaves], ...] = (
    (r"Mixtral|MiniMaxM|MiniMaxFor|Phi-?moe|PhiMoE", _MIXTRAL),
    (r"Qwen\d\w*Moe|Qwen3Next|Deepseek_?V[23]|Glm\w*Moe|Ernie4_5\w*Moe|Olmoe|FlexOlmo", _USUAL),
    (r"HunYuan|Dots1|ExaoneMoe|SolarOpen|BailingMoe|Jamba|Llama4", _USUAL),
)
"""Class names and what an expert's weights are called where a reader takes them one by one: vLLM 0.32's
``RoutedExperts.load_weights`` and ``get_expert_mapping``, transformers 5's converters from ``experts.*.<leaf>.weight``.
Of any other class no reader is known to: gpt-oss has its gate and up rows in turns, and biases with them."""

_TURNED = re.compile(r"Llama4|Qwen3VLMoe")
"""Class names whose checkpoints hold [E, in, out], gate before up in each line: ``Llama4TextExperts`` of transformers 5,
and what its converters and vLLM 0.32's loaders transpose."""


def is_stacked(name: str, entry: TensorEntry) -> bool:
    """Whether a tensor holds one matrix for each expert of a layer."""
    return (
        len(entry.shape) == 3
        and entry.dtype in QUANTIZABLE
        and _STACKED.fullmatch(name) is not None
    )


def expert_leaves(class_name: str) -> Leaves | None:
    """What one expert's weights are called in checkpoints of a class; None if no reader is known to take them so."""
    return next((leaves for words, leaves in _READERS if re.search(words, class_name)), None)


def experts_note(component: Component, headers: Mapping[str, Header]) -> str:
    """What is done with stacked experts by default, in one line; "" if there are none."""
    stacked = [name for name, _ in _stacked_of(component, headers)]
    if not stacked:
        return ""
    more = f" ({quoted(stacked[0])} and others)" if len(stacked) > 1 else f" ({quoted(stacked[0])})"
    what = "tensors hold" if len(stacked) > 1 else "tensor holds"
    advice = (
        f"{OPTION} shows each expert as FP8 of its own"
        if expert_leaves(component.class_name) is not None
        else f"no reader of {component.class_name or 'this model'} is known to take them one by one"
    )
    return f"{len(stacked)} {what} experts in 3-D{more}, kept in the source's dtype: {advice}"


def experts_warning(component: Component, headers: Mapping[str, Header], scheme: str) -> str:
    """What a reader makes of stacked experts that are kept, if it is not good; else "".

    Source: transformers 5 builds Llama4's experts one by one for compressed-tensors, whatever the ignore list says.
    """
    if scheme != "per_channel" or not component.class_name.startswith("Llama4"):
        return ""
    if next(_stacked_of(component, headers), None) is None:
        return ""
    return (
        "transformers does not find the stacked experts of Llama4 beside compressed-tensors and makes up"
        f" others; it reads them with --scheme block, or with {OPTION}"
    )


def split_warning(component: Component) -> str:
    """What a reader makes of experts that were split, if it is not good; else "".

    Source: transformers 5 has no converter from single experts for Qwen3VLMoe, as it has for Qwen3Moe.
    """
    if not component.class_name.startswith("Qwen3VLMoe"):
        return ""
    return (
        f"transformers does not find the experts of Qwen3VLMoe one by one and makes up others; with {OPTION}"
        " the view is for vLLM"
    )


def split_experts(
    component: Component, headers: Mapping[str, Header]
) -> tuple[Component, dict[str, Header]]:
    """The component with one weight for each expert and part, and its shards' headers; both as if it were stored so.

    Raises: UsageError for a class whose readers take no such names, or that is not known to store experts [E, in, out];
    SourceInvalidError for shapes that do not go together, or a name that is taken.
    """
    leaves = expert_leaves(component.class_name)
    if leaves is None:
        raise UsageError(
            f"{OPTION}: no reader of {component.class_name or 'this model'} is known to take its experts one by one",
            hint=f"leave {OPTION} out: they stay in the source's dtype",
        )
    entries = dict(_stacked_of(component, headers))
    taken = component.weight_map
    weight_map = dict(taken)
    split: dict[str, Header] = {}
    for path in component.shards:
        header = headers[path]
        tensors: dict[str, TensorEntry] = {}
        for name, entry in header.tensors.items():
            if name not in entries:
                tensors[name] = entry
                continue
            where = weight_map.pop(name, path)
            for part, piece in _parts(name, entry, leaves, entries, component):
                if part in taken:
                    raise SourceInvalidError(
                        f"{path}: tensor {quoted(part)} exists already, beside {quoted(name)}",
                        hint=f"leave {OPTION} out",
                        tensor=part,
                    )
                tensors[part] = piece
                weight_map[part] = where
        split[path] = msgspec.structs.replace(header, tensors=tensors)
    return msgspec.structs.replace(component, weight_map=weight_map), split


def _stacked_of(
    component: Component, headers: Mapping[str, Header]
) -> Iterator[tuple[str, TensorEntry]]:
    for path in component.shards:
        for name, entry in headers[path].tensors.items():
            if is_stacked(name, entry):
                yield name, entry


def _parts(
    name: str,
    entry: TensorEntry,
    leaves: Leaves,
    stacked: Mapping[str, TensorEntry],
    component: Component,
) -> Iterator[tuple[str, TensorEntry]]:
    """Each expert's weights that one tensor holds, in the order of their bytes."""
    found = _STACKED.fullmatch(name)
    leaf = found["leaf"] if found else ""
    base, suffix = (found["experts"], found["suffix"] or "") if found else ("", "")
    if leaf not in (_GATE_UP, _DOWN):
        raise _unknown(name, entry, "is no gate_up_proj and no down_proj")
    other = stacked.get(f"{base}.{_DOWN if leaf == _GATE_UP else _GATE_UP}{suffix}")
    if other is None:
        raise _unknown(name, entry, "has no counterpart")
    (gate_up, down) = (entry, other) if leaf == _GATE_UP else (other, entry)
    turned = _is_turned(name, entry, gate_up.shape, down.shape, component)
    if leaves.parent and base.endswith(_RUNTIME):
        base = f"{base.removesuffix(_RUNTIME)}.{leaves.parent}.experts"
    names = (leaves.gate, leaves.up) if leaf == _GATE_UP else (leaves.down,)
    count, out, inputs = entry.shape
    pitch = 0
    if turned:
        inputs, out, pitch = out, inputs, inputs
    shape = (out // len(names), inputs)
    size = entry.nbytes // (count * len(names)) if count else 0
    step = nbytes(entry.dtype, (shape[0],)) if turned else size
    for expert in range(count):
        begin = entry.data_offsets[0] + expert * len(names) * size
        for part in names:
            offsets = (begin, begin + size)
            made = TensorEntry(entry.dtype, shape, offsets)
            if turned:
                made = TurnedEntry(entry.dtype, shape, offsets, pitch)
            yield f"{base}.{expert}.{part}.weight", made
            begin += step


def _is_turned(
    name: str,
    entry: TensorEntry,
    gate_up: tuple[int, ...],
    down: tuple[int, ...],
    component: Component,
) -> bool:
    """Whether the experts' matrices are stored [in, out]. No two shapes go together both ways, unless they are empty."""
    count, hidden, inner = down
    if gate_up == (count, 2 * inner, hidden):
        return False
    _, inner, hidden = down
    if gate_up != (count, hidden, 2 * inner):
        raise _unknown(name, entry, f"does not go with its counterpart: {_shapes(gate_up, down)}")
    if not _TURNED.search(component.class_name):
        raise UsageError(
            f"{OPTION}: {quoted(name)} holds its experts as [in, out], which {component.class_name} is not known to do",
            hint=f"leave {OPTION} out: they stay in the source's dtype",
            tensor=name,
        )
    stated = _hidden_size(component.config or {})
    if stated not in (None, hidden):
        raise _unknown(
            name,
            entry,
            f"has experts of {hidden} inputs, but config.json says hidden_size {stated}",
        )
    return True


def _hidden_size(config: Mapping[str, object]) -> object:
    """What the config says of the language model's width, if anything."""
    text = config.get("text_config")
    return (text if isinstance(text, dict) else config).get("hidden_size")


def _shapes(gate_up: Iterable[int], down: Iterable[int]) -> str:
    return f"{_GATE_UP} is {list(gate_up)}, {_DOWN} {list(down)}"


def _unknown(name: str, entry: TensorEntry, why: str) -> SourceInvalidError:
    return SourceInvalidError(
        f"{OPTION}: {quoted(name)} {list(entry.shape)} {why}",
        hint=f"leave {OPTION} out: it stays in the source's dtype",
        tensor=name,
    )
