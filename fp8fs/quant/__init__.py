"""Source bytes in, FP8 bytes and scales out. Torch and devices live here only."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from fp8fs.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from fp8fs.core.quantizer import Quantizer

__all__ = ["cuda_devices", "make_quantizer", "quantizer_factory"]

_DEVICE_FILE = re.compile(r"nvidia\d+")


def cuda_devices(dev: str = "/dev") -> int:
    """How many CUDA devices a process of ours would see. Asks the kernel, never torch."""
    try:
        present = sum(bool(_DEVICE_FILE.fullmatch(name)) for name in os.listdir(dev))
    except OSError:
        present = 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [word.strip() for word in visible.split(",")]
    hidden = next((i for i, word in enumerate(named) if word in {"", "-1"}), len(named))
    return min(present, hidden)


def quantizer_factory(device: str) -> Callable[[], Quantizer]:
    """What makes the quantizer for ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` once it is needed.

    *device* is checked now; nothing heavy is imported until the factory is called, and nothing is
    compiled or started until the quantizer works. ``auto`` is the first CUDA device where there is one
    and torch is installed, else the CPU. A CUDA quantizer hands its work to the CPU while its device
    fails.

    Raises: UsageError for another word; DeviceError where that device or torch is missing.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise UsageError(f'unknown device "{device}"', hint="auto, cpu, cuda or cuda:N")
    count = 0 if device == "cpu" else cuda_devices()
    has_torch = importlib.util.find_spec("torch") is not None
    if device == "cpu" or (device == "auto" and not (count and has_torch)):
        return _cpu
    index = int(match[1] or 0)
    if index >= count:
        raise DeviceError(
            f"{device} is not there: {count} CUDA devices are visible",
            hint="use --device cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES",
            device=device,
            devices=count,
        )
    if not has_torch:
        raise DeviceError(
            f"{device} needs torch, which is not installed",
            hint="pip install 'fp8fs[gpu]', or use --device cpu",
            device=device,
        )
    return functools.partial(_cuda, index)


def make_quantizer(device: str) -> Quantizer:
    """The quantizer of ``quantizer_factory``, at once."""
    return quantizer_factory(device)()


def _cpu() -> Quantizer:
    from fp8fs.quant.cpu import CpuQuantizer

    return CpuQuantizer()


def _cuda(index: int) -> Quantizer:
    from fp8fs.quant.proxy import ChildQuantizer, FallbackQuantizer

    return FallbackQuantizer(ChildQuantizer(f"cuda:{index}"), _cpu())
