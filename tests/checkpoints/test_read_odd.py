"""transformers reads views with sizes that are no whole blocks and with odd values as the dequantized weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.harness import ROOT, Fp8fs
from tests.conftest import need_package
from tests.loader.harness import engine_python, environment

pytestmark = [pytest.mark.fuse, pytest.mark.loader, pytest.mark.slow]

CLOSE = 0.01
"""Of the largest number: what computing in BF16 may make of it."""
FAR = 0.2
"""Of the largest logit: more than FP8 makes of it."""
WARNED = "weights end in a smaller block"


def run_side(*arguments: object, python: Path, env: dict[str, str]) -> str:
    """What ``odd_side.py`` prints, in a process of its own."""
    done = subprocess.run(
        [python, "-m", "tests.checkpoints.odd_side", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("scheme", ["block", "block_free"])
@pytest.mark.parametrize("intermediate", [80, 192, 256])
def test_odd_blocks_in_a_real_reader(
    fp8fs: Fp8fs, place: Path, scheme: str, intermediate: int
) -> None:
    """transformers reads weights of one small block or of whole ones, with zeros, tiny values or an outlier too, as the
    oracle does; those that it misreads are warned of, and no others."""
    src, view, python = place / "src", place / "view", engine_python("vllm")
    run_side("make", src, intermediate, python=python, env=environment())
    warnings = fp8fs.mount(src, view, "--scheme", scheme)["warnings"]
    result = json.loads(run_side("read", src, view, scheme, python=python, env=environment()))
    right = result["off"] <= CLOSE * result["largest"]
    assert right == (intermediate != 192)
    assert any(WARNED in warning for warning in warnings) == (not right)
    assert (
        result["drift"] > 0
    )  # the outlier's block has little precision left: that is FP8, in any reader
    fp8fs.unmount(view)


def test_odd_rows_in_a_real_reader(fp8fs: Fp8fs, place: Path) -> None:
    """Rows and whole weights of zeros, tiny ones and an outlier give the logits of the dequantized reference."""
    need_package("transformers")
    need_package("compressed_tensors")
    src, view, python, env = place / "src", place / "view", Path(sys.executable), environment()
    run_side("make", src, 192, python=python, env=env)
    fp8fs.mount(src, view, "--scheme", "per_channel")
    result = json.loads(run_side("read", src, view, "per_channel", python=python, env=env))
    assert result["off"] <= CLOSE * result["largest"]
    assert 0 < result["drift"] <= FAR * result["largest"]
    fp8fs.unmount(view)
