"""What becomes of one component: chosen weights, names, row order, ignore list, warnings, by its class's profile.

Where no engine's profile is known of a class, the generic rule chooses and nothing is renamed or reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fp8fs.core.checkpoint import Component
from fp8fs.core.header import Header
from fp8fs.core.placement import ViewTensor
from fp8fs.core.profiles import Profile
from fp8fs.core.recipe import BLOCK_SCHEMES, Decision, Recipe, scheme_of, shown
from fp8fs.core.row_order import ungrouped
from fp8fs.core.rules import GenericRule, ProfileRule, Rule
from fp8fs.core.selection import select
from fp8fs.core.spellings import ONE_EXPERT, other_spellings, tower_patterns
from fp8fs.core.text import counted
from fp8fs.core.texts import (
    edge_block_warning,
    fused_block_warning,
    kept_groups,
    kept_modules,
    quantized_modules,
    scheme_warning,
)
from fp8fs.core.view_names import as_at_run_time
from fp8fs.errors import UsageError

__all__ = ["ComponentView", "FindProfile"]

FindProfile = Callable[[str, str], Profile | None]
"""The profile of a class name in a component of a kind, or None."""

_SUFFIX = ".weight"


class ComponentView:
    """One component that is to be quantized, under one recipe. Immutable."""

    def __init__(self, component: Component, recipe: Recipe, find_profile: FindProfile) -> None:
        self.scheme = scheme_of(component, recipe)
        self._component = component
        self._recipe = recipe
        self._profile = _profile_of(component, find_profile)

    def decide(self, headers: Mapping[str, Header]) -> list[Decision]:
        """What happens to each source tensor, in source order."""
        profile = self._profile
        rule: Rule = (
            GenericRule(self._component.class_name) if profile is None else ProfileRule(profile)
        )
        return select(self._component, headers, self._recipe, rule)

    def arrange(self, shards: list[list[ViewTensor]]) -> list[list[ViewTensor]]:
        """The source's tensors as the view has them: *shards* itself if nothing changes.

        Raises: UsageError for names or dtypes that are not known; SourceInvalidError for parts that do not fit.
        """
        profile = self._profile
        if self._recipe.names == "runtime":
            if profile is None or not profile.names_complete:
                raise UsageError(
                    f"--names runtime: the names of {self._component.class_name or 'this model'} "
                    f"({shown(self._component)}) are not known",
                    hint="--names checkpoint",
                )
            shards = as_at_run_time(shards, profile)
        if profile is None or not profile.reorders_rows or self.scheme not in BLOCK_SCHEMES:
            return shards
        return [[self._in_row_order(tensor, profile) for tensor in tensors] for tensors in shards]

    def ignored(
        self, sources: Sequence[Sequence[ViewTensor]], view: Sequence[Sequence[ViewTensor]]
    ) -> list[str]:
        """Names for the ignore list: of every kept module, in the checkpoint's, the view's and the readers' spellings."""
        kept = dict.fromkeys((*kept_modules(sources), *self._component.beside))
        if view is not sources:
            kept.update(dict.fromkeys(kept_modules(view)))
        # Engines ask for fused modules by their own names; an expert's are only ever asked for with all of its layer.
        kept.update((name, None) for name in kept_groups(sources) if not ONE_EXPERT.search(name))
        names = list(kept) if self._profile is None else self._profile.ignored(kept)
        if self._component.kind != "transformers":
            return names
        quantized = quantized_modules(sources)
        names += other_spellings(names, quantized, self._component.config)
        if self.scheme == "per_channel":
            names += tower_patterns(kept, quantized)
        return names

    def unquantized_warning(self) -> str:
        """Why no tensor is quantized."""
        profile = self._profile
        if profile is not None and profile.quantizes_nothing:
            return f"{_who(profile)} quantizes nothing in {profile.class_name}: served unchanged"
        return "no tensor is quantized; passed through"

    def warnings(
        self, decisions: Iterable[Decision], view: Sequence[Sequence[ViewTensor]]
    ) -> Iterator[str]:
        """What may surprise the view's readers."""
        component, profile = self._component, self._profile
        if profile is None and component.kind != "raw":
            yield (
                f"no engine's profile of {component.class_name or 'a model without a class'} is known: "
                "a generic rule chose what becomes FP8; compare fp8fs plan with what your engine builds"
            )
        if profile is not None and (forced := self._forced(decisions, profile)):
            yield (
                f"FP8 because of --quantize: {counted(len(forced), 'weight')} ({forced[0]}), which "
                f"{_who(profile)} does not build so and may refuse or misread"
            )
        for warning in (
            scheme_warning(component, self.scheme),
            fused_block_warning(view, self.scheme, profile),
            edge_block_warning(component, view, self.scheme),
        ):
            if warning:
                yield warning

    def _forced(self, decisions: Iterable[Decision], profile: Profile) -> list[str]:
        """Quantized weights that the engine builds unquantized, or does not know."""
        if not self._recipe.quantize:
            return []
        return [
            decision.name
            for decision in decisions
            if decision.quantize
            and profile.state(decision.name.removesuffix(_SUFFIX)) != "quantized"
        ]

    def _in_row_order(self, tensor: ViewTensor, profile: Profile) -> ViewTensor:
        """A weight whose rows, but not scales, the engine reorders: its blocks follow the engine's order."""
        if not tensor.quantize:
            return tensor
        fusion = profile.fusion_of(tensor.name.removesuffix(_SUFFIX))
        if fusion is None or fusion.grouped_rows is None:
            return tensor
        return ungrouped(tensor, fusion.grouped_rows, self._component.config)


def _profile_of(component: Component, find_profile: FindProfile) -> Profile | None:
    """The profile of the component's class: of several classes, the first that has one."""
    more = (component.config or {}).get("architectures")
    for name in [component.class_name, *(more if isinstance(more, list) else ())]:
        found = find_profile(name, component.kind) if isinstance(name, str) else None
        if found is not None:
            return found
    return None


def _who(profile: Profile) -> str:
    return f"{profile.engine} {profile.version}"
