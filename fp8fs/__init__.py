"""fp8fs: show a BF16 checkpoint directory as the FP8 checkpoint that loaders want to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8fs.version import __version__

if TYPE_CHECKING:
    from fp8fs.api import build, mounted

__all__ = ["__version__", "build", "mounted"]


def __getattr__(name: str) -> Any:
    """Load the Python API on first use: ``import fp8fs`` alone stays free of everything else."""
    if name in ("build", "mounted"):
        from fp8fs import api

        return getattr(api, name)
    raise AttributeError(f"module 'fp8fs' has no attribute {name!r}")
