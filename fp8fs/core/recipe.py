"""Which choices decide bytes: the recipe, its checks and its identity. Names and shapes only, never values.

What the recipe means for each tensor is in ``selection.py`` and ``fusion.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import msgspec

from fp8fs.core.checkpoint import Component
from fp8fs.errors import SourceInvalidError, UsageError

__all__ = [
    "BLOCK",
    "BLOCK_SCHEMES",
    "SCHEMES",
    "Decision",
    "Recipe",
    "check_recipe",
    "choose_components",
    "recipe_id",
    "scheme_of",
]

SCHEMES = ("per_tensor", "per_channel", "block", "block_free")
BLOCK_SCHEMES = frozenset({"block", "block_free"})
BLOCK = (128, 128)
"""Rows and columns of one block, in elements."""

NAMES = ("checkpoint", "runtime")


class Recipe(msgspec.Struct, frozen=True):
    """Every choice that decides bytes. ``scheme`` "" means the default of each component's kind
    (diffusers: per_tensor, transformers and raw: per_channel).

    ``components``: paths named by --component ("" and "." are the root), empty for the default ones. ``keep`` and ``quantize``: the
    user's globs over tensor names ("component/name" or "name"). ``recorded_keep``: tensors ("component/name", exact) that a
    scan found non-finite. ``split_experts``: experts that are stacked in 3-D tensors are shown as one weight each.
    """

    scheme: str = ""
    names: str = "checkpoint"
    components: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    quantize: tuple[str, ...] = ()
    recorded_keep: tuple[str, ...] = ()
    split_experts: bool = False


class Decision(msgspec.Struct, frozen=True, gc=False):
    """What happens to one source tensor, and why. ``group`` names the fusion group ("" if alone)."""

    name: str
    quantize: bool
    reason: str
    group: str = ""


def check_recipe(recipe: Recipe) -> None:
    """Accept a recipe whose words all exist. Raises: UsageError naming the word and the choices."""
    if recipe.scheme and recipe.scheme not in SCHEMES:
        raise UsageError(
            f'unknown scheme "{recipe.scheme}"',
            hint=f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}",
            scheme=recipe.scheme,
        )
    if recipe.names not in NAMES:
        raise UsageError(
            f'unknown names "{recipe.names}"', hint=" or ".join(NAMES), names=recipe.names
        )


def recipe_id(recipe: Recipe) -> str:
    """Hex digest that is equal for recipes that mean the same: order and repetition of lists do not count."""
    facts = [
        recipe.scheme,
        recipe.names,
        sorted({normal_component(path) for path in recipe.components}),
        sorted(set(recipe.keep)),
        sorted(set(recipe.quantize)),
        sorted(set(recipe.recorded_keep)),
        *(
            ["split_experts"] if recipe.split_experts else ()
        ),  # the ids of all others stay what they were
    ]
    return hashlib.blake2b(json.dumps(facts).encode("ascii"), digest_size=16).hexdigest()


def normal_component(path: str) -> str:
    """The component's path as ``Component.path`` spells it: no "." parts, no trailing slash."""
    return "/".join(part for part in path.split("/") if part not in ("", "."))


def scheme_of(component: Component, recipe: Recipe) -> str:
    """The scheme asked for, or the one that the usual readers of this kind of component take."""
    if recipe.scheme:
        return recipe.scheme
    return "per_tensor" if component.kind == "diffusers" else "per_channel"


def choose_components(
    components: Iterable[Component], recipe: Recipe
) -> tuple[frozenset[str], list[str]]:
    """Paths of the components to quantize, and warnings about those that are left out.

    Raises: UsageError for a component that does not exist; SourceInvalidError if one that was asked
    for, or every default one, is quantized already.
    """
    by_path = {component.path: component for component in components}
    if recipe.components:
        chosen: list[Component] = []
        for asked in recipe.components:
            found = by_path.get(normal_component(asked))
            if found is None:
                known = ", ".join(sorted(path or "." for path in by_path))
                raise UsageError(
                    f'no component "{asked}"', hint=f"components with weights: {known}"
                )
            if found.already_quantized:
                raise _already_quantized(found)
            chosen.append(found)
        return frozenset(component.path for component in chosen), []
    default = [component for component in by_path.values() if component.default_quantized]
    fresh = [component for component in default if not component.already_quantized]
    if default and not fresh:
        raise _already_quantized(default[0])
    warnings = [
        f"{shown(component)}: passed through, already quantized ({component.already_quantized})"
        for component in default
        if component.already_quantized
    ]
    if not default:
        warnings.append(
            f"no component is quantized by default; name one with --component ({', '.join(sorted(p or '.' for p in by_path))})"
        )
    return frozenset(component.path for component in fresh), warnings


def shown(component: Component) -> str:
    """The component's path as messages spell it."""
    return component.path or "."


def _already_quantized(component: Component) -> SourceInvalidError:
    return SourceInvalidError(
        f"{shown(component)}: already quantized ({component.already_quantized})",
        hint="fp8fs needs the BF16, FP16 or FP32 checkpoint",
        component=component.path,
    )
