"""Which tensors become FP8, and the reason for each: the user's globs, exclusion words, the generic rule, groups.

The strongest wins: a recorded non-finite value, ``--keep``, ``--quantize``, exclusion words, the
generic rule. Then a fusion group with one member kept is kept as a whole.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from fp8fs.core.checkpoint import Component
from fp8fs.core.dtypes import QUANTIZABLE
from fp8fs.core.fusion import FUSIONS, Fusion, leaf_table
from fp8fs.core.header import Header, TensorEntry
from fp8fs.core.recipe import Decision, Recipe
from fp8fs.errors import UsageError

__all__ = [
    "EXCLUDED_WORDS",
    "LINEAR_MULTIPLE",
    "check_patterns",
    "select",
    "unquantizable",
]

LINEAR_MULTIPLE = 16
"""Both dimensions of a linear weight are multiples of this, or FP8 matrix kernels refuse it."""

EXCLUDED_WORDS: tuple[tuple[str, str], ...] = (
    (r"ada_?ln|ada_?norm|modulation|scale_shift", "modulation"),
    (r"(^|[._])mod(\.|$)", "modulation"),  # img_mod.1, txt_mod.linear
    (r"norm[^.]*\.linear(_#+)?$", "modulation"),  # norm1.linear, norm1_context.linear
    (r"embed", "embedding or embedder"),
    (r"(^|\.)(wte|wpe)$", "embedding or embedder"),
    (r"relative_attention_bias|position_bias|rel_pos", "position table"),
    (r"(^|\.)(time|text|timestep|caption|guidance)_proj[^.]*(\.|$)", "embedding or embedder"),
    (r"(^|\.)norm_out(\.|$)", "final projection"),
    (r"(^|\.)(final_[^.]*|head|heads)(\.|$)", "final projection"),
    (r"(^|\.)proj_(in|out)$", "first or final projection"),
    (r"norm[^.]*$", "norm"),
    (r"(^|\.)ln(_[^.]*)?$", "norm"),
    (r"(^|\.)gate$|router|shared_expert_gate$", "router or gate"),
    (r"(^|\.)(visual|vision[^.]*|vit|image_encoder|image_model)(\.|$)", "vision tower"),
    (r"(^|\.)(multi_modal|mm|vision|image)_proj[^.]*(\.|$)|merger", "multimodal projector"),
    (r"(^|\.)(audio|speech)_(tower|model|encoder|proj[^.]*)(\.|$)", "audio tower"),
    (r"(^|\.)(mtp|nextn)[^.]*(\.|$)", "MTP layer"),
    (r"(^|\.)(lm_head|score|cls|pooler|[^.]*classifier|qa_outputs)(\.|$)", "output head"),
    (r"(^|\.)lora", "LoRA weight"),
    (r"(^|\.)indexer\.weights_proj$", "kept by engines"),
)
"""(pattern, reason): a weight whose module name matches keeps its dtype.

Searched in the module name in lower case with every digit as "#". Published FP8 recipes keep these layers
because they are small and their errors are not averaged away, or because engines build them unquantized.
"""

_TEMPLATE = str.maketrans(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", "#" * 10 + "abcdefghijklmnopqrstuvwxyz"
)
_WORDS = tuple((re.compile(pattern), reason) for pattern, reason in EXCLUDED_WORDS)
_SUFFIX = ".weight"

Verdict = tuple[bool, str]


def unquantizable(name: str, entry: TensorEntry) -> str:
    """Why this tensor cannot become FP8 whoever asks, or ""."""
    if len(entry.shape) != 2:
        return f"{len(entry.shape)}-D"
    if entry.dtype not in QUANTIZABLE:
        return f"dtype {entry.dtype}"
    if not name.endswith(_SUFFIX):
        return f'not named "*{_SUFFIX}"'
    if 0 in entry.shape:
        return "empty"
    return ""


def select(
    component: Component,
    headers: Mapping[str, Header],
    recipe: Recipe,
    fusions: Iterable[Fusion] = FUSIONS,
) -> list[Decision]:
    """Decide for every tensor of the component, in source order: shards as listed, offsets within.

    Cost: the rule runs once per name template, dtype and shape; about a microsecond per tensor.
    """
    leaves = leaf_table(fusions)
    names: list[str] = []
    verdicts: list[Verdict] = []
    groups: dict[tuple[str, str, int], list[int]] = {}
    known: dict[tuple[str, str, tuple[int, ...]], Verdict] = {}
    override = _Overrides(component, recipe)
    mtp = _mtp_prefixes(component.config)
    for path in component.shards:
        for name, entry in headers[path].tensors.items():
            key = (name.translate(_TEMPLATE), entry.dtype, entry.shape)
            verdict = known.get(key)
            if verdict is None:
                verdict = known[key] = _rule(key[0], entry)
            if mtp and verdict[0] and name.startswith(mtp):
                verdict = (False, "MTP layer")
            if override.any:
                verdict = override.apply(name, entry, verdict)
            # Every 2-D weight counts as a member, excluded or not: one kept member keeps its partners.
            if len(entry.shape) == 2 and name.endswith(_SUFFIX):
                parent, _, leaf = name[: -len(_SUFFIX)].rpartition(".")
                label = leaves.get(leaf)
                if label is not None:
                    groups.setdefault((parent, label, entry.shape[1]), []).append(len(names))
            names.append(name)
            verdicts.append(verdict)
    group_of = _keep_whole_groups(groups, names, verdicts)
    return [
        Decision(name, verdict[0], verdict[1], group_of.get(i, ""))
        for i, (name, verdict) in enumerate(zip(names, verdicts, strict=True))
    ]


def check_patterns(
    components: Sequence[Component],
    chosen: frozenset[str],
    headers: Mapping[str, Header],
    recipe: Recipe,
) -> None:
    """Accept ``--keep`` and ``--quantize`` globs that each do something in a component that is quantized.

    Raises: UsageError for a glob that matches no tensor there, or, for ``--quantize``, none that can be quantized.
    """
    for option, patterns in (("--keep", recipe.keep), ("--quantize", recipe.quantize)):
        for pattern in patterns:
            _check_pattern(option, pattern, components, chosen, headers)


def _check_pattern(
    option: str,
    pattern: str,
    components: Sequence[Component],
    chosen: frozenset[str],
    headers: Mapping[str, Header],
) -> None:
    refused = elsewhere = ""
    for component in components:
        glob = _Glob(pattern, component.path)
        for path in component.shards:
            for name, entry in headers[path].tensors.items():
                if not glob.matches(name):
                    continue
                if component.path not in chosen:
                    elsewhere = elsewhere or component.path or "."
                    continue
                why = unquantizable(name, entry) if option == "--quantize" else ""
                if not why:
                    return
                refused = refused or f'"{name}" cannot be quantized: {why}'
    if refused:
        raise UsageError(f"{option} {pattern}: {refused}", hint="2-D BF16, F16 or F32 weights can")
    hint = (
        f"name its component: --component {elsewhere}"
        if elsewhere
        else "fp8fs plan lists the names"
    )
    raise UsageError(f"{option} {pattern}: matches no tensor of a quantized component", hint=hint)


def _rule(template: str, entry: TensorEntry) -> Verdict:
    """The verdict of exclusion words and generic rule."""
    why = unquantizable(template, entry)
    if why:
        return False, why
    module = template[: -len(_SUFFIX)]
    for pattern, reason in _WORDS:
        if pattern.search(module):
            return False, reason
    # A number in last place is a position in a Sequential (time_projection.1), not a repeated block.
    if not any(part and not part.strip("#") for part in module.split(".")[:-1]):
        return False, "not inside a repeated block"
    rows, cols = entry.shape
    if rows % LINEAR_MULTIPLE or cols % LINEAR_MULTIPLE:
        return False, f"{rows}x{cols} is not in multiples of {LINEAR_MULTIPLE}"
    return True, "linear weight in a repeated block"


def _mtp_prefixes(config: Mapping[str, object] | None) -> tuple[str, ...]:
    """Name prefixes of next-token prediction layers that are numbered on behind the last real layer."""
    config = config or {}
    count, real = config.get("num_nextn_predict_layers"), config.get("num_hidden_layers")
    if not isinstance(count, int) or not isinstance(real, int) or not 0 < count <= 64:
        return ()
    return tuple(f"model.layers.{layer}." for layer in range(real, real + count))


def _keep_whole_groups(
    groups: Mapping[tuple[str, str, int], list[int]], names: list[str], verdicts: list[Verdict]
) -> dict[int, str]:
    """Change *verdicts* so that each group is quantized as a whole or not at all; tensor -> group name."""
    group_of: dict[int, str] = {}
    for (parent, label, _cols), members in groups.items():
        if len(members) < 2:
            continue
        group = f"{parent}.{label}" if parent else label
        kept = next((i for i in members if not verdicts[i][0]), None)
        for i in members:
            group_of[i] = group
            if kept is not None and verdicts[i][0]:
                verdicts[i] = (False, f"group partner of {names[kept]}: {verdicts[kept][1]}")
    return group_of


class _Glob:
    """One pattern over the names of one component: "component/name" or "name", with or without ".weight"."""

    def __init__(self, pattern: str, component: str) -> None:
        self.pattern = pattern
        self._match = re.compile(fnmatch.translate(pattern)).match
        self._prefix = f"{component}/" if component else ""

    def matches(self, name: str) -> bool:
        if self._match(name) or (self._prefix and self._match(self._prefix + name)):
            return True
        if not name.endswith(_SUFFIX):
            return False
        module = name[: -len(_SUFFIX)]
        return bool(self._match(module) or (self._prefix and self._match(self._prefix + module)))


class _Overrides:
    """What the user and an earlier scan say about the tensors of one component."""

    def __init__(self, component: Component, recipe: Recipe) -> None:
        prefix = f"{component.path}/" if component.path else ""
        self._recorded = {
            name.removeprefix(prefix) for name in recipe.recorded_keep if name.startswith(prefix)
        }
        self._keep = [_Glob(pattern, component.path) for pattern in recipe.keep]
        self._quantize = [_Glob(pattern, component.path) for pattern in recipe.quantize]
        self.any = bool(self._recorded or self._keep or self._quantize)

    def apply(self, name: str, entry: TensorEntry, verdict: Verdict) -> Verdict:
        if name in self._recorded:
            return False, "holds NaN or Inf"
        for glob in self._keep:
            if glob.matches(name):
                return False, f"--keep {glob.pattern}"
        for glob in self._quantize:
            if glob.matches(name) and not unquantizable(name, entry):
                return True, f"--quantize {glob.pattern}"
        return verdict
