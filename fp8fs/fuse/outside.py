"""Command lines for the work on a mount that has to be done by another process (``fp8fs.fuse.binds`` says why)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from shutil import which
from typing import NamedTuple

from fp8fs.fuse import binds

__all__ = [
    "Answer",
    "attach_command",
    "detach_command",
    "detach_gently_command",
    "probe_command",
    "read_command",
    "run",
]

_DIE_S = 0.2


class Answer(NamedTuple):
    """How a helper ended. ``said``: why it failed, in words; ``errno``: the same as a number, 0 if it gave none."""

    code: int
    out: bytes
    said: str
    errno: int


def run(command: list[str], timeout_s: float) -> Answer | None:
    """The helper's answer, None if it does not answer in time.

    Then it is killed and left behind: one that waits for a hung server does not even die before the server does.
    """
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.wait(_DIE_S)
        except subprocess.TimeoutExpired:
            child.returncode = -9  # Popen is not to wait for it, nor to complain
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        return None
    said = err.decode("utf-8", "replace").strip()
    try:
        told = json.loads(said)
        return Answer(child.returncode, out, str(told["what"]), int(told["errno"]))
    except (ValueError, KeyError, TypeError):  # fusermount3's own words
        return Answer(child.returncode, out, said, 0)


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


def read_command(path: str, limit: int) -> list[str]:
    """Prints the file, cut at *limit* bytes."""
    return _script("read", path, str(limit))


def _script(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", binds.__file__, *arguments]
