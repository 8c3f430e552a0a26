"""Import before vllm_omni: lets PyPI's torchvision, a CUDA build, be imported beside torch's CPU build.

Its C++ library cannot be loaded there, so the operators that its Python files register metadata for are declared here.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")


def declare_operators() -> None:
    """Declare every torchvision operator that its own import expects. Repeatable."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return
    source = Path(spec.submodule_search_locations[0], "_meta_registrations.py").read_text()
    for operator in sorted({*re.findall(r"torchvision::(\w+)", source), "nms", "qnms"}):
        try:
            _LIBRARY.define(f"{operator}() -> ()")
        except RuntimeError:  # declared already
            continue


declare_operators()
