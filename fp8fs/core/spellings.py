"""Names that readers have for a module of a checkpoint: an ignore list has to say each, or one of them misses it.

A multimodal model has been renamed several times: ``visual.`` became ``model.visual.``, ``language_model.model.layers.``
became ``model.language_model.layers.``, and its text-only class says ``model.layers.``. Loaders rename the weights as they
read them, but compare an ignore list with the names of their own modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

__all__ = ["ONE_EXPERT", "other_spellings", "tower_patterns"]

_TEXT_ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
"""What stands before ``layers.0`` in wrappers, text-only models and models without a head, new and old."""

_WRAPPERS = ("thinker.", "model.", "")
ONE_EXPERT = re.compile(r"(^|\.)experts\.\d")
"""In the name of a module of a single expert."""

_NO_LINEAR = re.compile(r"embed[^.]*$|(norm|conv)[^.]*$")
"""What no reader takes for a linear."""

_HEAD = "lm_head"
_HEAD_ROOTS = ("", "language_model.", "model.language_model.")
_TEXT_PARTS = ("layers", "embed_tokens", "mtp")
_TEXT = re.compile(
    rf"(?:(?:model|language_model|text_model|llm)\.)*(?P<rest>(?:{'|'.join(_TEXT_PARTS)})(?:\.|$).*)"
)


def other_spellings(
    kept: Iterable[str], quantized: Iterable[str], config: Mapping[str, object] | None
) -> list[str]:
    """More names of the kept modules, sorted; none that a reader could take for a quantized module's.

    transformers also takes an ignored name for the end of a longer one, so such names are left out.
    """
    known = set(kept)
    spell = _in_wrappers if _is_wrapper(config) else _without_head
    # A single expert has no module of its own in readers that rename.
    linears = [m for m in known if not (ONE_EXPERT.search(m) or _NO_LINEAR.search(m))]
    found = {name for module in linears for name in spell(module)}
    found -= known
    return sorted(found - _taken(found, quantized)) if found else []


def tower_patterns(kept: Iterable[str], quantized: Collection[str]) -> list[str]:
    """A pattern for each part of the model that is kept as a whole, whatever stands before its name.

    Such a part is the first word of a name that none of the text model has (``visual``, ``multi_modal_projector``).
    Readers that fuse its layers under names of their own find those too.
    """
    towers = {tower for module in kept if (tower := _tower(module)) and tower not in _TEXT_PARTS}
    whole = [t for t in sorted(towers) if not any(f".{t}." in f".{name}" for name in quantized)]
    return [f"re:(.*\\.)?{re.escape(tower)}\\..*" for tower in whole]


def _is_wrapper(config: Mapping[str, object] | None) -> bool:
    """Whether a model is made of several, each with a config of its own."""
    return any(
        key.endswith("_config") and isinstance(value, dict) for key, value in (config or {}).items()
    )


def _without_head(module: str) -> Iterable[str]:
    """What the model without a head calls it: AutoModel loads such a one from the same files."""
    return [module.removeprefix("model.")]


def _in_wrappers(module: str) -> Iterable[str]:
    """What wrappers, old and new, and the text-only model call it."""
    if module.rpartition(".")[2] == _HEAD:
        return [root + _HEAD for root in _HEAD_ROOTS]
    if found := _TEXT.fullmatch(module):
        return [root + found["rest"] for root in _TEXT_ROOTS]
    for wrapper in _WRAPPERS:
        if module.startswith(wrapper):
            rest = module[len(wrapper) :]
            return [rest, f"model.{rest}"]
    return []


def _taken(names: Collection[str], quantized: Iterable[str]) -> set[str]:
    """Those of *names* with which the name of a quantized module ends."""
    by_leaf: dict[str, list[str]] = {name.rpartition(".")[2]: [] for name in names}
    for module in quantized:
        like = by_leaf.get(module.rpartition(".")[2])
        if like is not None:
            like.append(module)
    return {
        name
        for name in names
        if any(module.endswith(name) for module in by_leaf[name.rpartition(".")[2]])
    }


def _tower(module: str) -> str:
    """The part of a model that a module is in, "" if it is in none or is one itself."""
    for wrapper in _WRAPPERS:
        if module.startswith(wrapper):
            head, dot, _ = module[len(wrapper) :].partition(".")
            return head if dot and not head.isdecimal() else ""
    return ""
