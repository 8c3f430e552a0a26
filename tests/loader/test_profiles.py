"""The profiles that are checked in are what the installed engines build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.loader import harness

pytestmark = [pytest.mark.loader, pytest.mark.slow]

# Of each engine: fused and alone, renamed, in part, nothing at all; a class takes seconds, all of them minutes.
DERIVED = {
    "vllm": ("derive_vllm.py", ("LlamaForCausalLM", "Qwen3MoeForCausalLM")),
    "vllm-omni": (
        "derive_vllm_omni.py",
        (
            "MiniMaxH3DiTModel",
            "WanTransformer3DModel",
            "QwenImageTransformer2DModel",
            "SD3Transformer2DModel",
        ),
    ),
}


def check(engine: str, root: Path) -> subprocess.CompletedProcess[str]:
    """The engine's script below *root*, comparing."""
    script, classes = DERIVED[engine]
    return subprocess.run(
        [harness.engine_python(engine), root / "scripts/profiles" / script, "--check", *classes],
        env=harness.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=harness.TIMEOUT_S,
    )


@pytest.mark.parametrize("engine", list(DERIVED))
def test_the_engine_builds_what_is_checked_in(engine: str) -> None:
    """Deriving the classes again gives what is checked in."""
    done = check(engine, harness.REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert f"{len(DERIVED[engine][1])} classes as checked in" in done.stdout


def test_a_difference_is_named(tmp_path: Path) -> None:
    """A profile that says otherwise than the engine is named, and only that one."""
    for folder in ("scripts/profiles", "fp8fs/core/profiles", "tests/loader/engine_side"):
        shutil.copytree(harness.REPOSITORY / folder, tmp_path / folder)
    stored = tmp_path / "fp8fs/core/profiles/vllm_omni.json"
    text = stored.read_text()
    assert "blocks.{i}.attn2.to_q" in text
    stored.write_text(text.replace("blocks.{i}.attn2.to_q", "blocks.{i}.attn2.to_other"))
    done = check("vllm-omni", tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "differs" in line]
    assert line == "vllm_omni.json: WanTransformer3DModel differs from what the engine builds"
