"""The examples in docs/FORMAT.md are true."""

from __future__ import annotations

import doctest
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "FORMAT.md"


def test_examples_are_true() -> None:
    """Every example of the page gives what the page says."""
    result = doctest.testfile(str(DOC), module_relative=False)
    assert result.attempted > 15
    assert result.failed == 0
