"""docs/SECURITY.md has a table of changes to a source shard and who notices them: each cell of it is tried."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.core.fingerprint import SAMPLE_BYTES, sample_offsets
from fp8fs.errors import SourceChangedError
from fp8fs.source import Source
from tests.builders import llama_like
from tests.oracle import read_header

SHARD = "model.safetensors"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "SECURITY.md"
ROW = re.compile(r"^\| ([^|]+) \| ((?:not )?seen)[^|]* \| ((?:not )?seen)[^|]* \| ((?:not )?seen)[^|]* \|$", re.M)  # fmt: skip
TABLE = {what: (first, again, live) for what, first, again, live in ROW.findall(PAGE.read_text())}


def places(path: Path) -> tuple[int, int]:
    """Where a sampled byte is, and one that is not sampled."""
    start, _, _ = read_header(path)
    sampled = sample_offsets(path.stat().st_size, start)
    free = next(a + SAMPLE_BYTES for a, b in itertools.pairwise(sampled) if b > a + SAMPLE_BYTES)
    return sampled[1], free


def flipped(path: Path, where: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    return bytes(data)


def in_place(path: Path, where: int) -> None:
    """One bit of the file is another, its size and date are not."""
    facts, data = path.stat(), flipped(path, where)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def as_new_file(path: Path, where: int) -> None:
    """The same in a new file that takes the name."""
    facts, new = path.stat(), path.with_suffix(".new")
    new.write_bytes(flipped(path, where))
    os.utime(new, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    new.rename(path)


def longer(path: Path) -> None:
    """Another valid shard of the name, with the date put back."""
    facts = path.stat()
    shutil.rmtree(path.parent)
    llama_like(path.parent, layers=1, hidden=256, inter=768, vocab=544, shards=1)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def copied(path: Path) -> None:
    new = path.with_suffix(".new")
    shutil.copy2(path, new)
    new.rename(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "another size or another header": longer,
    "another byte in a sampled page, date put back, written in place": lambda path: in_place(path, places(path)[0]),
    "another byte in a sampled page, date put back, as a new file": lambda path: as_new_file(path, places(path)[0]),
    "another byte outside the samples, date put back, written in place": lambda path: in_place(path, places(path)[1]),
    "another byte outside the samples, date put back, as a new file": lambda path: as_new_file(path, places(path)[1]),
    "another date (`touch`)": lambda path: os.utime(path),
    "another mode, owner or number of links": lambda path: path.chmod(0o600),
    "the same bytes as a new file with the old date (`cp -a`, `rsync -a`)": copied,
}  # fmt: skip


def test_the_table_is_complete() -> None:
    """Every row is tried, and everything tried is a row."""
    assert TABLE.keys() == CHANGES.keys()


@pytest.mark.parametrize("change", CHANGES)
def test_who_sees_a_change(tmp_path: Path, change: str) -> None:
    """On a first mount, on the next one on the same machine, and under a live mount: as the table says."""
    src = tmp_path / "src"
    llama_like(src, layers=1, hidden=256, inter=768, vocab=512, shards=1)
    (src / SHARD).chmod(0o644)
    with Source.open(src) as old:
        before, hints = old.checkpoint.shards[SHARD].identity, old.hints()
        CHANGES[change](src / SHARD)
        try:
            old.check(SHARD)
            live = "not seen"
        except SourceChangedError:
            live = "seen"
    with Source.open(src) as first, Source.open(src, hints=hints) as again:
        found = [source.checkpoint.shards[SHARD].identity for source in (first, again)]
    seen = ["not seen" if identity == before else "seen" for identity in found]
    assert (*seen, live) == TABLE[change]
