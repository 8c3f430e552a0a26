"""Every example in the documentation runs, in order, beside a small checkpoint called ``model``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.harness import clean_up, make_checkpoint, mount_points

pytestmark = pytest.mark.fuse

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> list[tuple[str, str]]:
    """Kind and text of each block; doctests are left to tests/unit/test_format_doc.py."""
    found = BLOCK.findall(page.read_text())
    return [(kind, text) for kind, text in found if not text.startswith(">>> ")]


def test_the_readme_has_examples() -> None:
    """The pattern finds what it is meant to find."""
    kinds = {kind for kind, _ in examples(ROOT / "README.md")}
    assert kinds == {"console", "python"}


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: p.name)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    """Commands after "$ " succeed one after the other; Python blocks run as scripts."""
    make_checkpoint(tmp_path / "model", "llama", "2M")
    tools = tmp_path / "bin"
    tools.mkdir()
    launcher = tools / "fp8fs"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m fp8fs "$@"\n')
    launcher.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "FP8FS_STORE": str(tmp_path / "store"),
    }
    try:
        for kind, text in examples(page):
            if kind == "python":
                runs = [[sys.executable, "-c", text]]
            else:
                lines = [line for line in text.splitlines() if line]
                assert all(line.startswith("$ ") for line in lines), text
                runs = [["sh", "-ec", line[2:]] for line in lines]
            for command in runs:
                done = subprocess.run(
                    command, cwd=tmp_path, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert mount_points(tmp_path) == []
    finally:
        clean_up(tmp_path)
