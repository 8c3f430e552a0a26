"""Every promise names tests that exist; tables in the documentation are what the code says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer

from fp8fs.cli.app import app
from fp8fs.errors import Fp8fsError

ROOT = Path(__file__).resolve().parents[2]
SEMANTICS = (ROOT / "docs" / "SEMANTICS.md").read_text()
CLI = (ROOT / "docs" / "CLI.md").read_text()
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")

PROMISES = re.findall(r"^- .+$", SEMANTICS, re.MULTILINE)


@cache
def functions(path: str) -> set[str]:
    """Names of the test functions in one file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_promises() -> None:
    """The page is read as it is meant to be."""
    assert len(PROMISES) > 30


@pytest.mark.parametrize("promise", PROMISES, ids=lambda p: p[2:42])
def test_a_promise_names_its_tests(promise: str) -> None:
    """Each names at least one test, and each of those exists."""
    named = REFERENCE.findall(promise)
    assert named
    for path, function in named:
        assert (ROOT / path).is_file(), path
        assert function in functions(path), f"{path}::{function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_exists(page: Path) -> None:
    """Tests and pages that a page refers to are there."""
    text = page.read_text()
    for path, function in REFERENCE.findall(text):
        assert (ROOT / path).is_file(), path
        assert not function or function in functions(path)
    for target in re.findall(r"\]\(([^)#:]+\.md)\)", text):
        assert (page.parent / target).is_file(), target


def error_classes() -> list[type[Fp8fsError]]:
    found: list[type[Fp8fsError]] = []
    todo = [Fp8fsError]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return found


def test_exit_codes_are_those_of_the_classes() -> None:
    """The table lists every error that a command can end with, with its number, and no other."""
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \|", CLI, re.MULTILINE)
    table = {code: int(number) for number, code in rows}
    classes = {c.code: c.exit for c in error_classes() if not c.code.startswith("view")}
    assert table == classes


def test_every_option_is_documented() -> None:
    """Whatever --help offers is on the page."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert name in CLI
        for parameter in command.params:
            for word in parameter.opts:
                if word.startswith("--"):
                    assert word in CLI, f"{name} {word}"
