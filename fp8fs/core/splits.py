"""What tensor parallelism makes of a plan: weights that N ranks cannot cut as their scheme needs.

An engine cuts a column-parallel linear (q, k, v, gate, up) into N runs of rows, a row-parallel one (o, down) into N runs
of columns, and each part of a fused linear by itself. What it does with a cut that does not fit was run with
vLLM 0.32's own layers and is in docs/CHECKPOINTS.md; ``_SAID`` has it in one sentence each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fp8fs.core.checkpoint import Component
from fp8fs.core.dtypes import FP8
from fp8fs.core.plan import Plan, TensorRow
from fp8fs.core.profiles import find
from fp8fs.core.recipe import BLOCK, BLOCK_SCHEMES
from fp8fs.core.selection import LINEAR_MULTIPLE
from fp8fs.core.text import counted, quoted

__all__ = ["Split", "split_problems", "split_warnings"]

_SAID = {
    "uneven": "do not divide: vLLM refuses to load them",
    "block": f"are cut inside a {BLOCK[0]}x{BLOCK[1]} block: vLLM refuses to load them",
    "fused": f"are parts of fused layers and cut inside a {BLOCK[0]}x{BLOCK[1]} block: "
    "vLLM fails to load them, or reads rows under the scale of their neighbours without a word",
    "narrow": f"give each rank a part that is no multiple of {LINEAR_MULTIPLE}: some FP8 kernels pad it, others refuse it",
}
_REMEDY = {
    "uneven": "another N",
    "block": "another N, or --scheme per_channel or per_tensor, which have no blocks",
    "fused": "another N, or --scheme per_channel or per_tensor, which have no blocks",
    "narrow": "another N, or --keep",
}

_BY_COLUMNS = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|to_out(\.0)?|to_add_out|w2|wo|w_out|o|down|fc2|linear_fc2|linear_out|proj_out|dense"
    r"|dense_4h_to_h|c_proj|net[._]2|(ffn|ff|mlp)\.2|attn\d*\.proj)$"
)
"""Linears that engines cut by columns, by the end of the module's name; the others are cut by rows."""

_WHOLE = re.compile(
    r"(^|\.)(q_a_proj|kv_a_proj_with_mqa|fused_qkv_a_proj|wq_a|wkv_a|gate|router|shared_expert_gate)$"
)
"""Linears of which each rank has all."""

_QUERY = re.compile(r"(^|\.)(self_attn|attn|attention)\.(q_proj|wq)$")
_KEY_VALUE = re.compile(r"(^|\.)(self_attn|attn|attention)\.(k_proj|v_proj|wk|wv)$")
_FUSED_ON_DISK = {"qkv_proj": 3, "to_qkv": 3, "gate_up_proj": 2}
"""Parts of a linear that is one tensor in the checkpoint, for classes without a profile."""


class Split(msgspec.Struct, frozen=True):
    """One weight that N ranks cannot cut well. ``axis``: rows or columns; ``part``: how many of them the engine would
    have to give each rank, of each part of a fused tensor (0: no whole number); ``problem``: a key of ``_SAID``."""

    component: str
    tensor: str
    shape: tuple[int, ...]
    axis: str
    part: int
    problem: str


def split_problems(plan: Plan, components: Iterable[Component], ranks: int) -> list[Split]:
    """Every FP8 weight of the plan that *ranks* ranks cannot cut as its scheme needs, in plan order.

    Blocks have to stay whole; without them a part is only asked to be a whole number and a multiple of 16. The parts
    of a fused layer are asked even of one rank, since their blocks lie side by side in one matrix.
    """
    by_path = {component.path: component for component in components}
    found = []
    for row in plan.rows:
        if row.dtype_out != FP8:
            continue
        module = row.name.removesuffix(".weight")
        blocks = plan.schemes[row.component] in BLOCK_SCHEMES
        for cut in _cuts(row, module, by_path[row.component], ranks):
            problem = _problem(cut, ranks, blocks=blocks)
            if problem:
                found.append(Split(row.component, row.name, row.shape, cut.axis, cut.part, problem))
                break
    return found


def split_warnings(problems: Sequence[Split], ranks: int) -> list[str]:
    """One sentence for each component and kind of problem, with the first weight of it."""
    kinds: dict[tuple[str, str], list[Split]] = {}
    for split in problems:
        kinds.setdefault((split.component, split.problem), []).append(split)
    said = []
    for (component, problem), splits in kinds.items():
        first = splits[0]
        shape = "x".join(map(str, first.shape))
        each = f", {first.part} {first.axis} each" if first.part else ""
        said.append(
            f"{component or '.'}: with --tp {ranks}, the {first.axis} of {counted(len(splits), 'weight')} {_SAID[problem]} "
            f"({quoted(first.tensor)}, {shape}{each}). hint: {_REMEDY[problem]}"
        )
    return said


class _Cut(NamedTuple):
    """How one tensor, or one part of a tensor that is fused on disk, is cut: ``part`` elements of ``axis`` for each rank.

    ``merged``: it is a part of a fused layer whose parts lie side by side in one matrix. ``expert``: of an expert.
    """

    axis: str
    part: int
    merged: bool
    expert: bool


def _problem(cut: _Cut, ranks: int, *, blocks: bool) -> str:
    if not cut.part:
        return "uneven"
    if blocks and (ranks > 1 or cut.merged) and cut.part % BLOCK[0]:
        # Layers of experts are checked by a rule of their own, which has no exception for fused ones.
        return "fused" if cut.merged and not cut.expert else "block"
    return "narrow" if cut.part % LINEAR_MULTIPLE else ""


def _cuts(row: TensorRow, module: str, component: Component, ranks: int) -> Iterator[_Cut]:
    rows, cols = row.shape
    if _WHOLE.search(module):
        return
    expert = ".experts." in f".{module}."
    if _BY_COLUMNS.search(module):
        yield _Cut("columns", _part(cols, ranks), merged=False, expert=expert)
        return
    heads, kv_heads = _heads(component.config)
    if _KEY_VALUE.search(module) and kv_heads:
        part = _head_part(rows, kv_heads, ranks, repeated=True)
        yield _Cut("rows", part, bool(row.group), expert=expert)
    elif _QUERY.search(module) and heads:
        part = _head_part(rows, heads, ranks, repeated=False)
        yield _Cut("rows", part, bool(row.group), expert=expert)
    elif row.group:
        yield _Cut("rows", _part(rows, ranks), merged=True, expert=expert)
    else:
        slots = _slots(module, component)
        if slots == _QKV and heads and kv_heads and not rows % (heads + 2 * kv_heads):
            head = rows // (heads + 2 * kv_heads)
            query = _head_part(heads * head, heads, ranks, repeated=False)
            yield _Cut("rows", query, merged=True, expert=expert)
            key = _head_part(kv_heads * head, kv_heads, ranks, repeated=True)
            yield _Cut("rows", key, merged=True, expert=expert)
        else:
            yield _Cut("rows", _part(rows, slots * ranks), merged=slots > 1, expert=expert)


_QKV = 3


def _part(size: int, ranks: int) -> int:
    """What each of *ranks* gets, or 0."""
    return 0 if size % ranks else size // ranks


def _head_part(rows: int, heads: int, ranks: int, *, repeated: bool) -> int:
    """Rows of the heads that each rank gets; a head is never cut, and several ranks have the same one if *repeated*."""
    if rows % heads:
        return _part(rows, ranks)
    if repeated and ranks > heads:
        return 0 if ranks % heads else rows // heads
    return 0 if heads % ranks else rows // ranks


def _slots(module: str, component: Component) -> int:
    """Parts of a tensor that is fused on disk, 1 for one that is not."""
    profile = find(component.class_name, component.kind)
    if profile is not None and profile.state(module) != "unknown":
        return profile.scale_slots(module)
    return _FUSED_ON_DISK.get(module.rpartition(".")[2], 1)


def _heads(config: Mapping[str, object] | None) -> tuple[int, int]:
    """Attention heads and key/value heads that a transformers config states, 0 for what it does not."""
    config = config or {}
    nested = config.get("text_config")
    for level in (config, nested if isinstance(nested, Mapping) else {}):
        heads, kv_heads = level.get("num_attention_heads"), level.get("num_key_value_heads")
        if isinstance(heads, int) and heads > 0:
            return heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads
    return 0, 0
