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


COMMANDS = {
    name: {word for parameter in command.params for word in parameter.opts if word[:1] == "-"}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
EVERYWHERE = {"--json", "--quiet", "-q"}


def documented_options() -> dict[str, set[str]]:
    """Command -> its options, as the blocks of section 1 list them.

    A heading names the commands of its block, unless a line begins with its own; "(mount)" and "(all but path)" narrow.
    """
    found: dict[str, set[str]] = {name: set(EVERYWHERE) for name in COMMANDS}
    section = CLI.partition("## 1.")[2].partition("## 2.")[0]
    for block in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
        heading, _, text = block.partition("\n")
        named = [name for name in COMMANDS if re.search(rf"\b{name}\b", heading)]
        for before, line in re.findall(r"^ {4}((?:[a-z]+,? )*)(--?[a-z].*)$", text, re.MULTILINE):
            spelled = set(re.findall(r"--?[a-z-]+", line.partition("  ")[0]))
            commands = re.findall(r"[a-z]+", before) or named
            if narrow := re.search(rf"\((all but )?({'|'.join(COMMANDS)})\)", line):
                commands = [c for c in commands if (c == narrow[2]) is not bool(narrow[1])]
            for command in commands:
                found[command] |= spelled
    found["umount"] = found["unmount"]
    return found


def test_the_page_lists_the_options_of_every_command() -> None:
    """Exactly those that the parser knows, command by command."""
    assert len(COMMANDS) > 10
    assert documented_options() == COMMANDS


def test_the_page_lists_every_command() -> None:
    """Each by its usage line (umount beside unmount), and no other."""
    listed = re.findall(r"^    fp8fs ([a-z]+)\b", CLI, re.MULTILINE)
    assert {*listed, "umount"} == set(COMMANDS)
