"""docs/TROUBLESHOOTING.md knows every errno that a reader can get and every way in which a command can end."""

from __future__ import annotations

import ast
import errno
import re
from pathlib import Path

import pytest

from fp8fs.store.guard import _CANNOT_WRITE
from tests.docs.test_semantics import error_classes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "fp8fs").rglob("*.py")))
BY_THE_KERNEL = {"ENOTCONN", "ECONNABORTED", "EACCES", "ELOOP", "SIGBUS"}
"""What readers of a FUSE mount and of links get without anybody sending it."""


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def sent_by_the_adapter() -> set[str]:
    """Names of the errnos that stand in the one file that sends any."""
    tree = ast.parse((ROOT / "fp8fs" / "fuse" / "adapter.py").read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "errno"
        and node.attr.isupper()
    }


def test_every_errno_of_a_reader_is_explained() -> None:
    """Those of the error classes, those that the adapter sends, those that the kernel gives."""
    classes = {errno.errorcode[kind.errno] for kind in error_classes()}
    assert {"EIO", "ESTALE", "EINTR", "EROFS"} <= classes
    wanted = classes | sent_by_the_adapter() | BY_THE_KERNEL
    shown = set(
        re.findall(r"\b(?:E[A-Z]{2,}|SIGBUS)\b", " ".join(r[0] for r in rows("What a reader sees")))
    )
    assert wanted <= shown, wanted - shown


def test_every_errno_of_the_store_is_explained() -> None:
    """Each that means "cannot be written" has a row that says what a mount does then."""
    shown = " ".join(" ".join(row) for row in rows("What the store does"))
    for code in _CANNOT_WRITE:
        assert errno.errorcode[code] in shown, errno.errorcode[code]


def test_every_exit_code_is_explained() -> None:
    """Number and code of every class that a command can end with, and of no other."""
    table = {(int(row[0]), row[1].strip("`")) for row in rows("How a command ends")}
    assert table == {(c.exit, c.code) for c in error_classes() if not c.code.startswith("view")}


def said() -> list[str]:
    """What the page quotes: the log column, and what a command is "seen as"."""
    cells = [r[1] for name in ("What a reader sees", "What the store does") for r in rows(name)]
    cells += [row[2] for row in rows("How a command ends")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return sorted(
        {text for text in quoted if " " in text and not text.startswith(("fp8fs ", "--"))}
    )


@pytest.mark.parametrize("line", said())
def test_what_is_quoted_is_said(line: str) -> None:
    """Each quoted piece of a message stands in the code that says it."""
    pattern = ".{1,40}".join(re.escape(piece) for piece in line.split("..."))
    assert re.search(pattern, SOURCE), line
