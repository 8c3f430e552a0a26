"""Names from outside made fit to print: a shell is the oracle of what may be pasted back."""

from __future__ import annotations

import os
import subprocess

import pytest

from fp8fs.core.text import counted, shell_word


@pytest.mark.parametrize(
    "name",
    [
        b"/plain/path",
        b"/a b/o'clock",
        b"/$HOME/`x`/\\n",
        b"/two\nlines",
        b"/it's\n\\two\\lines",
        b"/\x1b[31mred\x07",
        b"/octal\n7",
        b"/not utf-8 \xff1\xfe",
        "/ümläut\nzwei".encode(),
        "/no-break\u00a0space".encode(),
    ],
)
def test_a_shell_reads_the_word_as_the_name(name: bytes) -> None:
    """Whatever is in a name: one line that can be shown, and bash reads the same bytes out of it."""
    word = shell_word(os.fsdecode(name))
    assert word.isprintable()
    command = ["bash", "-c", f"printf '%s\\0' {word}"]
    assert subprocess.run(command, capture_output=True, check=True).stdout == name + b"\0"


@pytest.mark.parametrize(("count", "said"), [(0, "0 trees"), (1, "1 tree"), (2, "2 trees")])
def test_one_is_singular(count: int, said: str) -> None:
    """One of them has no plural."""
    assert counted(count, "tree") == said
