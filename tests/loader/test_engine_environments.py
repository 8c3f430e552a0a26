"""What the loader tests need is there, or it is said: nothing that CI asks for is skipped silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.loader import harness

pytestmark = [pytest.mark.loader, pytest.mark.engine_ci]


@pytest.mark.parametrize(
    ("required", "outcome"), [("engines", "failed"), ("vllm-omni", "failed"), ("", "skipped")]
)
def test_a_required_engine_that_is_missing_fails(
    required: str, outcome: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without its environment an engine's tests are skipped, or failed if FP8FS_REQUIRE names engines; both say why."""
    monkeypatch.setenv("FP8FS_ENGINES", str(tmp_path))
    monkeypatch.setenv("FP8FS_REQUIRE", required)
    expected = pytest.fail.Exception if outcome == "failed" else pytest.skip.Exception
    harness.engine_python.cache_clear()
    try:
        with pytest.raises(expected, match="vllm-omni is not installed: run scripts/engines"):
            harness.engine_python("vllm-omni")
    finally:
        harness.engine_python.cache_clear()


@pytest.mark.parametrize("what", ["fuse", "gpu", "transformers"])
def test_a_required_machine_that_is_missing_fails(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FP8FS_REQUIRE names is never skipped."""
    monkeypatch.setenv("FP8FS_REQUIRE", f"engines,{what}")
    with pytest.raises(pytest.fail.Exception, match=f"names {what}, but: none here"):
        conftest.skip_or_fail(what, "none here")
    monkeypatch.setenv("FP8FS_REQUIRE", "engines")
    with pytest.raises(pytest.skip.Exception, match="none here"):
        conftest.skip_or_fail(what, "none here")


def test_a_failed_install_says_so_and_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """An install that pip cannot do ends with exit 1 and one line, and the engine is still missing."""
    nothing_to_install_from = {
        "FP8FS_ENGINES": str(tmp_path / "engines"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    script = harness.REPOSITORY / "scripts" / "engines"
    environment = os.environ | nothing_to_install_from
    install = subprocess.run(
        [sys.executable, script, "install", "vllm"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert install.returncode == 1
    assert install.stderr.splitlines()[-1].startswith("error: vllm could not be installed: ")
    assert "Traceback" not in install.stderr
    path = subprocess.run(
        [sys.executable, script, "path", "vllm"], env=environment, capture_output=True, check=False
    )
    assert path.returncode == 1
