"""Which tensors become FP8, under which scheme, in which groups. Names and shapes only, never values."""

from __future__ import annotations

import msgspec

__all__ = ["SCHEMES", "Decision", "Recipe"]

SCHEMES = ("per_tensor", "per_channel", "block", "block_free")
BLOCK = (128, 128)
"""Rows and columns of one block, in elements."""


class Recipe(msgspec.Struct, frozen=True):
    """Every choice that decides bytes. ``scheme`` "" means the default of each component's kind
    (diffusers: per_tensor, transformers and raw: per_channel).

    ``components``: paths named by --component ("" and "." are the root), empty for the default ones. ``keep`` and ``quantize``: the
    user's globs over tensor names ("component/name" or "name"). ``recorded_keep``: tensors ("component/name", exact) that a
    scan found non-finite.
    """

    scheme: str = ""
    names: str = "checkpoint"
    components: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    quantize: tuple[str, ...] = ()
    recorded_keep: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True, gc=False):
    """What happens to one source tensor, and why. ``group`` names the fusion group ("" if alone)."""

    name: str
    quantize: bool
    reason: str
    group: str = ""


# To be written here (pure):
#   parse_recipe / check: UsageError for an unknown scheme (names the four), names, component that does not exist, pattern that matches nothing.
#   select(component, headers, recipe) -> list[Decision] in source order (index order of shards, offset order within)
#   is_linear_weight, EXCLUDED_WORDS (a readable table: pattern, reason), FUSIONS (table of sibling leaf names)
#   recipe_id(recipe) -> str
