"""Which tensors become FP8, and the reason for each: the user's globs, an engine's profile or the generic rule, groups.

The strongest wins: a recorded non-finite value, ``--keep``, ``--quantize``, the rule of the class (``rules.py``).
Then a fusion group with one member kept is kept as a whole, and so is whatever else must be treated alike.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from fp8fs.core.checkpoint import Component
from fp8fs.core.dtypes import QUANTIZABLE
from fp8fs.core.extra_layers import ExtraLayers
from fp8fs.core.header import Header, TensorEntry
from fp8fs.core.recipe import Decision, Recipe
from fp8fs.core.rules import Numbers, Rule, Ruling, split_numbers
from fp8fs.errors import UsageError

__all__ = [
    "LINEAR_MULTIPLE",
    "check_patterns",
    "select",
    "unquantizable",
]

LINEAR_MULTIPLE = 16
"""Both dimensions of a linear weight are multiples of this, or FP8 matrix kernels refuse it."""

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
    component: Component, headers: Mapping[str, Header], recipe: Recipe, rule: Rule
) -> list[Decision]:
    """Decide for every tensor of the component, in source order: shards as listed, offsets within.

    Cost: the rule is asked once per name template; about two microseconds per tensor.
    """
    names: list[str] = []
    verdicts: list[Verdict] = []
    sets = _Alike(names, verdicts)
    override = _Overrides(component, recipe)
    judge = _Judge(rule)
    extra = ExtraLayers(component.config)
    for path in component.shards:
        for name, entry in headers[path].tensors.items():
            if len(entry.shape) == 2 and name.endswith(_SUFFIX):
                ruling = judge(name[: -len(_SUFFIX)])
                verdict = (ruling.quantize, ruling.reason)
                why = _unfit(entry)
                if why and (ruling.quantize or entry.dtype not in QUANTIZABLE):
                    verdict = (False, why)
                elif ruling.quantize and extra.holds(name, judge.numbers):
                    verdict = (False, "MTP layer")
                # Every 2-D weight counts as a member, excluded or not: one kept member keeps its partners.
                sets.add(len(names), ruling, judge.numbers, entry.shape[1])
            else:
                verdict = (False, unquantizable(name, entry))
            if override.any:
                verdict = override.apply(name, entry, verdict)
            names.append(name)
            verdicts.append(verdict)
    group_of = sets.settle()
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


def _unfit(entry: TensorEntry) -> str:
    """Why a 2-D weight is not chosen, whatever the rule says; ``--quantize`` may force what only has odd sizes."""
    rows, cols = entry.shape
    if entry.dtype not in QUANTIZABLE:
        return f"dtype {entry.dtype}"
    if not rows or not cols:
        return "empty"
    if rows % LINEAR_MULTIPLE or cols % LINEAR_MULTIPLE:
        return f"{rows}x{cols} is not in multiples of {LINEAR_MULTIPLE}"
    return ""


class _Judge:
    """Asks a rule by module name. Neighbours in a checkpoint mostly share a parent, so that is split once."""

    __slots__ = ("_head", "_head_numbers", "_parent", "_rule", "numbers")

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._parent: str | None = None
        self._head = ""
        self._head_numbers: Numbers = ()
        self.numbers: Numbers = ()
        """Those in the name that was asked last."""

    def __call__(self, module: str) -> Ruling:
        parent, dot, leaf = module.rpartition(".")
        if parent != self._parent:
            self._parent = parent
            self._head, self._head_numbers = split_numbers(parent + dot)
        if leaf.isidentifier():
            self.numbers = self._head_numbers
        else:
            leaf, more = split_numbers(leaf)
            self.numbers = (*self._head_numbers, *more)
        return self._rule.judge(self._head + leaf, self.numbers)


_PARTNER = "group partner of"


class _Alike:
    """Sets of weights that are quantized as a whole or not at all: fusion groups, and what shares a fate otherwise."""

    def __init__(self, names: Sequence[str], verdicts: list[Verdict]) -> None:
        self._names = names
        self._verdicts = verdicts
        self._groups: dict[tuple[str, int], list[int]] = {}
        self._others: dict[str, list[int]] = {}

    def add(self, index: int, ruling: Ruling, numbers: Numbers, cols: int) -> None:
        """Put a weight into its sets. Rows of different length are never fused."""
        if ruling.group is not None:
            self._groups.setdefault((ruling.group.fill(numbers), cols), []).append(index)
        for pattern in ruling.together:
            self._others.setdefault(pattern.fill(numbers), []).append(index)

    def settle(self) -> dict[int, str]:
        """Change the verdicts until each set agrees. Returns tensor -> name of its fusion group."""
        groups = [
            (name, members) for (name, _), members in self._groups.items() if len(members) > 1
        ]
        sets = [members for _, members in groups]
        sets += [members for members in self._others.values() if len(members) > 1]
        changed = True
        while changed:
            changed = sum(map(self._keep_whole, sets)) > 0  # every set, each time
        return {index: name for name, members in groups for index in members}

    def _keep_whole(self, members: Sequence[int]) -> bool:
        """Keep all if one is kept. Returns whether that changed anything."""
        verdicts = self._verdicts
        kept = [i for i in members if not verdicts[i][0]]
        if not kept or len(kept) == len(members):
            return False
        reason = verdicts[kept[0]][1]
        if not reason.startswith(_PARTNER):
            reason = f"{_PARTNER} {self._names[kept[0]]}: {reason}"
        for i in members:
            if verdicts[i][0]:
                verdicts[i] = (False, reason)
        return True


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
