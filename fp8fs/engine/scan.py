"""Find the weights that cannot be quantized because they hold NaN or Inf, before anything is mounted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fp8fs.core.layout import Plan
from fp8fs.core.quantizer import Quantizer
from fp8fs.source import Source

__all__ = ["NonFinite", "scan"]


class NonFinite(msgspec.Struct, frozen=True):
    """A source tensor that holds NaN or Inf; ``index`` is the flat index of the first such element."""

    component: str
    tensor: str
    index: int


def scan(
    plan: Plan,
    source: Source,
    quantizer: Quantizer,
    *,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[NonFinite]:
    """Read every weight that is to be quantized once; list those that hold NaN or Inf, in plan order.

    *progress*: called now and then on this thread with (source bytes read, source bytes in all).
    Raises: SourceChangedError, DeviceError.
    """
    raise NotImplementedError
