"""Layers behind the last one that a model runs: MTP (nextn) layers that are numbered on, which engines read unquantized."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ExtraLayers"]

_COUNT = "num_hidden_layers"
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "language_model_config")
"""Keys under which multimodal models keep their language model's config."""

_LAYER = re.compile(
    r"(?:(?:model|language_model|text_model|llm|transformer|backbone)\.)*layers\.\d+\."
)
"""A layer of a model's main stack. Encoders, decoders and towers have counts of their own, under other keys."""

_MAX_DIGITS = 9
"""A longer number is no layer's, and may be one that takes long to read."""


class ExtraLayers:
    """Knows by a component's config which layers are behind the last real one. Immutable."""

    def __init__(self, config: Mapping[str, object] | None) -> None:
        # Configs of several parts may each state a count: only what is behind all of them is surely no layer of any.
        self._count = max(_counts(config or {}), default=0)

    def holds(self, name: str, numbers: Sequence[str]) -> bool:
        """Whether the tensor of that name, with these numbers in it, belongs to such a layer."""
        if not self._count or not numbers or len(numbers[0]) > _MAX_DIGITS:
            return False
        return int(numbers[0]) >= self._count and _LAYER.match(name) is not None


def _counts(config: Mapping[str, object]) -> Iterator[int]:
    count = config.get(_COUNT)
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        yield count
    for key in _TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, dict):
            yield from _counts(nested)
