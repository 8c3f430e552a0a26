"""A1: the quickstart works from a fresh clone, and its second run quantizes nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.harness import ROOT, make_checkpoint, mount_points, objects

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

SOURCE_BYTES = 90_868_376


def run(clone: Path, store: Path, *arguments: str) -> str:
    """The script's output; it has to succeed."""
    environment = {**os.environ, "FP8FS_STORE": str(store)}
    done = subprocess.run(
        [clone / "scripts" / "quickstart", *arguments],
        env=environment,
        cwd="/",
        text=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone of what is committed."""
    clone = tmp_path_factory.mktemp("quickstart") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, clone], check=True)
    return clone


def test_quickstart_from_nothing_then_again(place: Path, clone: Path) -> None:
    """From a clone alone: bytes before and after, fast second mount; then nothing is made again."""
    store = place / "store"
    first = run(clone, store)
    match = re.search(r"bytes before: (\d+), after: (\d+)", first)
    assert match is not None, first
    before, after = int(match[1]), int(match[2])
    assert before == SOURCE_BYTES
    assert after < before * 0.7
    counts = [int(n) for n in re.findall(r"quantized or copied by this mount: (\d+);", first)]
    assert counts[0] > 0
    assert counts[1:] == [0]
    made = objects(store)
    assert len(made) == 1

    second = run(clone, store)
    counts = [int(n) for n in re.findall(r"quantized or copied by this mount: (\d+);", second)]
    assert counts == [0, 0]
    assert f"bytes before: {before}, after: {after}" in second
    assert objects(store) == made
    assert mount_points(place) == []


def test_quickstart_leaves_the_users_checkpoint_mounted(place: Path, clone: Path) -> None:
    """With SRC the view stays mounted beside it, a second run uses that mount, and both say how to unmount it."""
    src = make_checkpoint(place / "my model", "llama", "2M")
    dst = place / "my model-fp8"
    first = run(clone, place / "store", str(src))
    points = mount_points(dst)
    again = run(clone, place / "store", str(src))
    assert mount_points(dst) == points != []
    assert f"{src} is mounted at {dst} already" in again
    for out in (first, again):
        command = shlex.split(out.partition("to unmount: ")[2])
        assert command[1:] == ["unmount", str(dst)]
    subprocess.run(command, check=True)
    assert mount_points(place) == []
