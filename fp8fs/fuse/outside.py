"""Command lines for the work on a mount that has to be done by another process (``fp8fs.fuse.binds`` says why)."""

from __future__ import annotations

import os
import sys
from shutil import which

from fp8fs.fuse import binds

__all__ = ["attach_command", "detach_command", "detach_gently_command", "probe_command"]


def attach_command(dst: str, tree: str, source: str) -> list[str]:
    """Waits until the mount answers, then binds; "" binds nothing."""
    return _script("attach", dst, tree, source)


def detach_command(dst: str) -> list[str]:
    """Takes the mount and all below it out of the namespace at once, in use or not."""
    if os.geteuid() == 0:
        return _script("detach", dst, str(binds.MNT_DETACH))
    return [which("fusermount3") or "fusermount3", "-u", "-z", dst]


def detach_gently_command(dst: str, binds_below: list[str]) -> list[str]:
    """Takes away first the binds, then the mount, and stops at the first that is in use."""
    if os.geteuid() == 0:
        return _script("detach", *(word for point in (*binds_below, dst) for word in (point, "0")))
    return [which("fusermount3") or "fusermount3", "-u", dst]


def probe_command(dst: str) -> list[str]:
    """Exits with ``binds.DEAD`` if nobody serves the mount."""
    return _script("probe", dst)


def _script(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", binds.__file__, *arguments]
