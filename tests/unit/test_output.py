"""What commands print their results with."""

from __future__ import annotations

import pytest

from fp8fs.cli.output import Output


def test_a_table_has_columns_as_wide_as_their_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells of a column start, or end where it says so, in one place; braces are text; no line ends in blanks."""
    rows = [("a{0}", "1", "x"), ("long name", "1000", "")]
    Output().table(("name", "bytes", "reason"), rows, right=("bytes",))
    assert capsys.readouterr().out == (
        "name       bytes  reason\n"
        "a{0}           1  x\n"
        "long name   1000\n"
    )  # fmt: skip


def test_a_table_without_rows_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    """No rows: one line."""
    Output().table(("a", "b"), [])
    assert capsys.readouterr().out == "a  b\n"
