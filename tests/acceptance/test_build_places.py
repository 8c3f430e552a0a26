"""Where ``build`` writes and where it need not: a finished store that is read-only, a copy inside the store."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import Fp8fs, digests


def test_a_finished_read_only_store_is_enough(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Nothing is left to make: build prints the tree's path and copies it. What is missing there: exit 22, as ever."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    src = checkpoint("llama")
    made = fp8fs.json("build", src)
    subprocess.run(["mount", "--bind", fp8fs.store, fp8fs.store], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", fp8fs.store], check=True)
        assert fp8fs.json("build", src) == made
        assert fp8fs.run("build", src, "-q").stderr == ""
        copy = fp8fs.build(src, "--to", place / "copy")
        assert digests(copy) == digests(Path(made["path"]))
        error = fp8fs.json("build", src, "--scheme", "block", code=22)["error"]
        assert "the store cannot be written" in error["what"]
        shard = next(Path(made["path"]).glob("*.safetensors"))
        subprocess.run(["mount", "-o", "remount,rw,bind", fp8fs.store], check=True)
        shard.unlink()
        subprocess.run(["mount", "-o", "remount,ro,bind", fp8fs.store], check=True)
        assert fp8fs.json("build", src, code=22)["error"]["code"] == "store.full"
    finally:
        subprocess.run(["umount", fp8fs.store], check=True)


@pytest.mark.parametrize("form", ["tree", "normalized-cache"])
def test_a_copy_inside_the_store_is_refused(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], form: str
) -> None:
    """As mount refuses it for DST, by whatever name: nothing is made, neither there nor in the store. Nor around the store."""
    src = checkpoint("wan")
    (place / "link").symlink_to(fp8fs.store)
    (fp8fs.store / "v1").mkdir(parents=True)
    for inside in (fp8fs.store / "v1" / "x", fp8fs.store / "x", place / "link" / "v1" / "x"):
        error = fp8fs.json("build", src, "--to", inside, "--as", form, code=2)["error"]
        assert error["what"] == f"{inside} is inside the store {fp8fs.store}"
        assert error["hint"] == "choose a place outside of it"
    assert [path for path in fp8fs.store.rglob("*") if path.name != "v1"] == []
    around, fp8fs.store = place / "new", place / "new" / "store"
    error = fp8fs.json("build", src, "--to", around, "--as", form, code=2)["error"]
    assert error["what"] == f"the store {fp8fs.store} is inside {around}"
    assert not around.exists()
