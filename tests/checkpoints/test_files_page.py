"""docs/CHECKPOINTS.md: each kind names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "CHECKPOINTS.md").read_text()
ENTRIES = re.findall(r"^- .+(?:\n(?:  .*)?)*", PAGE, re.MULTILINE)
"""With the indented lines that go on with them."""
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions(path: str) -> set[str]:
    """Names of the test functions in one file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[2:42])
def test_a_kind_names_its_tests(entry: str) -> None:
    """At least one, and all of them exist."""
    named = REFERENCE.findall(entry)
    assert named
    for path, function in named:
        assert function in functions(path), f"{path} has no {function}"
