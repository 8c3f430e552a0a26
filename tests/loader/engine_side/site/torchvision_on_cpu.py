"""Lets PyPI's torchvision, a CUDA build, be imported beside torch's CPU build.

Its C++ library cannot be loaded there, so the operators that its Python files register metadata for are declared just
before its first import, in whatever process that happens.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class DeclareOperatorsFirst(MetaPathFinder):
    """Finds nothing itself: it acts when torchvision is asked for, once, and steps aside."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            self.declare()
        return None

    def declare(self) -> None:
        import torch

        spec = importlib.util.find_spec("torchvision")
        if spec is None or not spec.submodule_search_locations or torch.version.cuda:
            return
        source = Path(spec.submodule_search_locations[0], "_meta_registrations.py").read_text()
        type(self).library = torch.library.Library(
            "torchvision", "DEF"
        )  # operators live as long as it does
        for operator in sorted({*re.findall(r"torchvision::(\w+)", source), "nms", "qnms"}):
            self.library.define(f"{operator}() -> ()")


def install() -> None:
    """Put the finder in place. Repeatable."""
    if not any(isinstance(finder, DeclareOperatorsFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeclareOperatorsFirst())
