"""What every decoder of outside bytes has to hold, as functions of those bytes.

``TARGETS``: name -> function(bytes). A function returns if the property held and raises if not: nothing but the
decoder's documented errors comes out, and what comes out accepted is sound. hypothesis, the kept corpus and
``scripts/fuzz`` (coverage-guided) all call the same functions.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from fp8fs.assembly import survey
from fp8fs.core.dtypes import DTYPES
from fp8fs.core.fingerprint import parse_fingerprint, parse_hints
from fp8fs.core.header import MAX_HEADER_BYTES, encode_preamble, header_length, parse_header
from fp8fs.core.index import encode_index, parse_index
from fp8fs.core.json_text import set_key
from fp8fs.core.manifest import decode_manifest, encode_manifest
from fp8fs.core.recipe import Recipe
from fp8fs.core.text import brief, parse_object
from fp8fs.errors import Fp8fsError, SourceInvalidError, StoreError
from fp8fs.fuse.mountinfo import parse_mountinfo
from fp8fs.fuse.spec import Mounted, decode
from fp8fs.store.guard import decode_checked
from fp8fs.store.journal import scan_journal

__all__ = ["TARGETS", "sound_message"]


def sound_message(error: Fp8fsError) -> None:
    """One line, printable, of bounded length: it goes to a terminal and a log."""
    text = str(error)
    assert text
    assert len(text) < 3000, len(text)
    assert text.isprintable(), repr(text)


def header(data: bytes) -> None:
    """A header is refused in one sentence, or describes exactly the bytes of the file."""
    for preamble in (data, struct.pack("<Q", len(data)) + data):
        claimed = int.from_bytes(preamble[:8], "little")
        for size in {len(preamble), len(preamble) + 64, _true_size(preamble)}:
            try:
                assert header_length(preamble[:8], size, "f") == claimed <= MAX_HEADER_BYTES
                found = parse_header(preamble, size, "f")
            except SourceInvalidError as err:
                sound_message(err)
                continue
            end = len(preamble)
            for name, entry in found.tensors.items():
                name.encode()
                begin, stop = entry.data_offsets
                assert end == len(preamble) + begin
                assert stop - begin == _nbytes(entry.dtype, entry.shape)
                end = len(preamble) + stop
            assert end == size
            entries = [(n, t.dtype, t.shape, *t.data_offsets) for n, t in found.tensors.items()]
            again = encode_preamble(entries, found.metadata)
            assert parse_header(again, len(again) + found.data_bytes, "f").tensors == found.tensors


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].bits // 8


def _true_size(preamble: bytes) -> int:
    """The file's size that would make the last tensor end where the file does, if any can."""
    try:
        entries = json.loads(preamble[8:])
        ends = [e["data_offsets"][1] for e in entries.values() if "data_offsets" in e]
        return min(len(preamble) + max([0, *ends]), 1 << 62)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return len(preamble) + 1


def index(data: bytes) -> None:
    """An index is refused in one sentence, or names plain files only and can be written again."""
    try:
        found = parse_index(data, "model.safetensors.index.json")
    except SourceInvalidError as err:
        sound_message(err)
        return
    for shard in found.weight_map.values():
        assert os.path.basename(shard) == shard not in ("", ".", "..")
        assert "\0" not in shard
    again = parse_index(encode_index(found.metadata, found.weight_map, 7), "f")
    assert again.weight_map == found.weight_map
    assert again.metadata["total_size"] == 7


def config(data: bytes) -> None:
    """A config that is read can be edited, and then differs in the one key only."""
    try:
        old = parse_object(data, "config.json")
    except SourceInvalidError as err:
        sound_message(err)
        return
    value = {"quant_method": "fp8", "ignored_layers": ['a"\\', "\u00e9"]}
    try:
        new = json.loads(set_key(data, "quantization_config", value).decode("utf-8-sig"))
    except ValueError:
        return  # documented; the planner makes it a refusal
    assert new.pop("quantization_config") == value
    old.pop("quantization_config", None)
    assert json.dumps(new) == json.dumps(old)


def manifest(data: bytes) -> None:
    """A manifest is refused as the store's own error, or is written and read back."""
    try:
        found = decode_manifest(data)
    except StoreError:
        return
    assert decode_manifest(encode_manifest(found)) == found


def journal(data: bytes) -> None:
    """Nothing makes the reader of a journal fail, and what it believes has a right checksum and is in range."""
    for offset in (0, 1000):
        found = scan_journal(data, offset, 5)
        assert 0 <= found.consumed <= len(data)
        assert 0 <= found.covered <= offset + len(data)
        for where, record in found.units:
            assert offset <= where < offset + len(data)
            assert 0 <= record.unit < 5
    # A torn tail changes nothing before it.
    cut = data[: len(data) // 2]
    whole, part = scan_journal(data, 0, 5), scan_journal(cut, 0, 5)
    assert part.units == whole.units[: len(part.units)]


def facts(data: bytes) -> None:
    """Fingerprints, hints, checked files, state files and mount tables: absent or sound, never an exception."""
    parse_fingerprint(data)
    for hint in parse_hints(data).values():
        assert isinstance(hint.identity, str)
    decode_checked(data)
    parse_mountinfo(data)
    try:
        decode(data, Mounted)
    except (ValueError, RecursionError):
        return


def text(data: bytes) -> None:
    """Whatever is printed of an outside name is one printable line of bounded length."""
    for shown in (data.decode("utf-8", "surrogateescape"), data.decode("latin-1")):
        said = brief(shown)
        assert said.isprintable()
        assert len(said) <= 2400


def checkpoint(data: bytes) -> None:
    """A whole SRC, its files made from the bytes: refused in one sentence, or planned without gap, and never touched.

    The bytes are parts between lines of ``%%``: header of the one shard, index, config.json, model_index.json.
    """
    parts = [*data.split(b"\n%%\n"), b"", b"", b"", b""]
    with tempfile.TemporaryDirectory(prefix="fp8fs-fuzz-") as folder:
        src = Path(folder, "src")
        src.mkdir()
        preamble = struct.pack("<Q", len(parts[0])) + parts[0]
        shard = src / "model.safetensors"
        shard.write_bytes(preamble)
        os.truncate(shard, min(_true_size(preamble), len(preamble) + (1 << 20)))
        names = ("model.safetensors.index.json", "config.json", "model_index.json")
        for name, part in zip(names, parts[1:], strict=False):
            if part:
                (src / name).write_bytes(part)
        before = _listing(src)
        try:
            found = survey(src, Recipe(), None)
        except Fp8fsError as err:
            sound_message(err)
        else:
            with found.source:
                for path, entry in found.plan.entries.items():
                    assert not path.startswith("/")
                    assert ".." not in path.split("/")
                    assert entry.size >= 0
                for view in found.plan.shards:
                    assert view.size == found.plan.entries[view.path].size
        assert _listing(src) == before


def _listing(folder: Path) -> list[tuple[str, int, int, int]]:
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns, stat.S_IMODE(path.stat().st_mode))
        for path in sorted(folder.iterdir())
    ]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "index": index,
    "config": config,
    "manifest": manifest,
    "journal": journal,
    "facts": facts,
    "text": text,
    "checkpoint": checkpoint,
}
