"""Scales under which vLLM's load-time requantization changes weights, and how that is told.

vLLM multiplies per_tensor weights by their scale in FP16 and quantizes the product again. So it changes nothing as long
as FP16 can hold every product of a code and the scale. The other schemes are read as they are, or requantized in FP32.
What was measured, and what follows for readers, is in docs/CHECKPOINTS.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

import msgspec

from fp8fs.core.plan import Unit
from fp8fs.core.text import brief

__all__ = ["HIGHEST", "LOWEST", "OddScale", "odd_scales_of", "scales_sentence"]

LOWEST = 2.0**-24 / 2.0**-9
"""The smallest FP16 number is the smallest FP8 code under this scale (3.05e-05): the codes below 2 are still told apart."""

HIGHEST = 65520.0 / 416.0
"""The second largest code under this scale (157.5) is rounded to infinity in FP16, and infinity becomes the largest code."""

_FP8_MAX = 448.0
_SHOWN = 8


class OddScale(msgspec.Struct, frozen=True):
    """A weight, by its name in SRC, under a scale that FP16 arithmetic does not bear."""

    component: str
    tensor: str
    scale: float


def odd_scales_of(component: str, unit: Unit, amax: float) -> list[OddScale]:
    """The source tensors of a unit whose largest magnitude (its group's) is *amax*, if its scale is out of range."""
    scale = amax / _FP8_MAX
    if unit.scheme != "per_tensor" or not amax or LOWEST <= scale < HIGHEST:
        return []
    names = dict.fromkeys(piece.tensor for piece in unit.pieces)
    return [OddScale(component, name, scale) for name in names]


def scales_sentence(found: Sequence[OddScale]) -> str:
    """What is to be known of these weights (at least one), and what keeps them from it."""
    names = [f"{odd.component}/{odd.tensor}" if odd.component else odd.tensor for odd in found]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    if len(found) == 1:
        return (
            f"{brief(names[0])}: its scale {found[0].scale:.3g} is outside [{LOWEST:.3g}, {HIGHEST:.4g}], "
            f"so vLLM changes it when it loads it through FP16. hint: --keep {quote(brief(names[0]))}"
        )
    least = min(found, key=lambda odd: odd.scale).scale
    most = max(found, key=lambda odd: odd.scale).scale
    keep = " ".join(f"--keep {quote(brief(name))}" for name in names[:_SHOWN])
    return (
        f"{len(names)} weights have scales outside [{LOWEST:.3g}, {HIGHEST:.4g}] ({least:.3g} to {most:.3g}), "
        f"which vLLM changes when it loads them through FP16. hint: {keep}{more}"
    )
