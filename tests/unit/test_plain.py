"""Plain command lines, called without the option parser: the parser is the oracle."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import typer

from fp8fs.cli.build import build
from fp8fs.cli.mount import mount
from fp8fs.cli.plain import plain_call
from fp8fs.cli.plan import plan

COMMANDS = {"build": build, "mount": mount, "plan": plan}


def parsed(words: list[str]) -> dict[str, Any]:
    """What typer calls the command with."""
    found: list[dict[str, Any]] = []
    command = COMMANDS[words[0]]

    @functools.wraps(command)
    def record(**given: Any) -> None:
        found.append(given)

    app = typer.Typer()
    app.command(words[0])(record)
    app.command("other")(lambda: None)
    app(args=words, standalone_mode=False)
    return found[0]


def understood(words: list[str]) -> dict[str, Any] | None:
    """What the command is called with without it; None where it is left to the parser."""
    call: Any = plain_call(words)
    if call is None:
        return None
    command, given = call.args
    assert command is COMMANDS[words[0]]
    defaults = command.__defaults__
    names = command.__code__.co_varnames[: command.__code__.co_argcount]
    return dict(zip(names[-len(defaults) :], defaults, strict=True)) | given


@pytest.fixture(autouse=True)
def no_store_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8FS_STORE", raising=False)


@pytest.mark.parametrize(
    "line",
    [
        "build src",
        "build src --store st --quiet",
        "build src --store=st -q --json --scheme block",
        "build --to out src --keep *.a --keep=b* --component . --quantize x",
        "build src --as normalized-cache --workers 3 --device cpu --split-experts",
        "mount src dst --serve inline --grain tensor --allow-other --allow-unquantized -f",
        "mount --names runtime src dst",
        "plan src --scan --tp 4",
        "plan src --workers 0 --scheme=per_tensor",
        "build src --workers 256",
        "plan a=b",
    ],
)
def test_a_plain_line_means_what_the_parser_reads(line: str) -> None:
    """Every parameter has the value that typer gives it."""
    assert understood(line.split(" ")) == parsed(line.split(" "))


@pytest.mark.parametrize(
    "line",
    [
        "status",
        "nothing",
        "build",
        "build a b",
        "build src --",
        "build src --help",
        "build src --unknown",
        "build src --store",
        "build src --store --quiet",
        "build src --store=",
        "build src --quiet=yes",
        "build src --scheme a --scheme b",
        "build src --workers -1",
        "build src --workers 257",
        "build src --workers x",
        "build src --workers \u0663",
        "build src -qf",
        "build src --stor st",
        "mount src",
        "plan src --tp 0",
        "-q plan src",
    ],
)
def test_anything_else_is_left_to_the_parser(line: str) -> None:
    """Mistakes, help, repeated or unknown words, other commands: nothing is called."""
    assert plain_call(line.split(" ")) is None


def test_no_words_and_empty_words_are_left_to_the_parser() -> None:
    """Nor is an empty path a path."""
    assert plain_call([]) is None
    assert plain_call(["build", ""]) is None


def test_a_store_named_by_the_environment_is_left_to_the_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a variable gives an option, the parser reads it."""
    monkeypatch.setenv("FP8FS_STORE", "there")
    assert plain_call(["build", "src"]) is None


def test_a_plain_line_needs_no_parser(tmp_path) -> None:
    """The parser's machinery is not imported, and a command's own exit code arrives."""
    script = (
        "import sys\n"
        "from fp8fs.cli import main\n"
        f"code = main(['plan', {str(tmp_path / 'none')!r}])\n"
        "print(code, 'typer._adapters' in sys.modules, 'fp8fs.cli.app' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["10", "False", "False"]
    assert done.stderr.startswith("error: ")
