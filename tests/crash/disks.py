"""Small filesystems of a test's own: tmpfs, ext4 on a loop device, overlayfs, read-only ones. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

__all__ = ["KINDS", "disk", "fill_up", "remount"]

KINDS = ("tmpfs", "ext4", "overlay")


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def _tmpfs(point: Path, size: int) -> None:
    _run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", point)


def _ext4(point: Path, size: int) -> None:
    image = point.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size)
    _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-N", "512", image)
    _run("mount", "-o", "loop", image, point)


def _overlay(point: Path, size: int) -> None:
    base = point.with_suffix(".layers")
    base.mkdir()
    _tmpfs(base, size)
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    _run("mount", "-t", "overlay", "-o", layers, "overlay", point)


_MAKERS: dict[str, Callable[[Path, int], None]] = {
    "tmpfs": _tmpfs,
    "ext4": _ext4,
    "overlay": _overlay,
}


@contextmanager
def disk(point: Path, kind: str, size: int) -> Iterator[Path]:
    """A filesystem of *size* bytes at *point*, taken away again."""
    if os.geteuid() != 0:
        skip_or_fail("root", "only root can mount filesystems")
    for tool in ("mount", "mkfs.ext4") if kind == "ext4" else ("mount",):
        if shutil.which(tool) is None:
            skip_or_fail("root", f"no {tool} here")
    point.mkdir()
    with ExitStack() as stack:
        base = point.with_suffix(".layers")
        try:
            stack.callback(lambda: subprocess.run(["umount", "-l", base], capture_output=True))
            stack.callback(lambda: subprocess.run(["umount", "-l", point], capture_output=True))
            _MAKERS[kind](point, size)
        except subprocess.CalledProcessError as err:
            pytest.skip(f"{kind} cannot be mounted here: {err.stderr.decode().strip()}")
        yield point


def remount(point: Path, options: str) -> None:
    _run("mount", "-o", f"remount,{options}", point)


def fill_up(point: Path, *, leave: int = 0) -> Path:
    """A file that takes all space of the filesystem but *leave* bytes; remove it to free the space."""
    ballast = point / "ballast"
    with ballast.open("wb", buffering=0) as file:
        left = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize - leave
        chunk = 1 << 16
        while chunk >= 1024:
            try:
                while left > 0:
                    left -= file.write(bytes(min(chunk, left)))
                break
            except OSError:
                chunk //= 4
    return ballast
