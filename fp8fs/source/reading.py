"""The few bytes of SRC that are read at mount: small JSON files, headers, sampled pages."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock
from typing import NamedTuple

from fp8fs.core.checkpoint import SourceEntry
from fp8fs.core.entries import name_of
from fp8fs.core.fingerprint import (
    SAMPLE_BYTES,
    Fingerprint,
    header_digest,
    sample_digest,
    sample_offsets,
)
from fp8fs.core.header import Header, header_length, parse_header
from fp8fs.core.text import brief
from fp8fs.errors import Fp8fsError, SourceChangedError, SourceInvalidError
from fp8fs.source.scan import changed, difference, open_planned

__all__ = [
    "ReadShard",
    "read_shards",
    "read_text",
    "refuse_unfinished",
    "try_read_headers",
    "unfinished",
]

_FIRST_READ = 64 << 10
"""Covers nearly every header in one call."""

_LARGE_BYTES = 4 << 20
_MAX_TEXT_BYTES = 100_000_000
_READERS = 8
_LFS = b"version https://git-lfs"
_LOCAL_DOWNLOADS = "/.cache/huggingface/download/"
"""Where a download into a plain folder keeps what has not arrived in full."""

_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class ReadShard(NamedTuple):
    """What was read of one shard."""

    header: Header
    fingerprint: Fingerprint


def refuse_unfinished(entries: Iterable[SourceEntry]) -> None:
    """Refuse by name what a download left behind half-way."""
    for entry in entries:
        linked = entry.kind == "file" and entry.link.endswith(".incomplete")
        named = entry.path.endswith(".incomplete") and (
            entry.path.endswith(".safetensors.incomplete") or _LOCAL_DOWNLOADS in f"/{entry.path}"
        )
        if linked or named:
            raise unfinished(entry.path)


def unfinished(path: str) -> SourceInvalidError:
    """The refusal of a download that has not ended."""
    return SourceInvalidError(
        f"{brief(path)}: the download of it is not finished",
        hint="finish the download, or remove this file if nothing is missing",
        file=brief(path),
    )


def read_text(root: str, entry: SourceEntry) -> bytes:
    """All of a small JSON file. Raises: SourceInvalidError, SourceChangedError."""
    if entry.size > _MAX_TEXT_BYTES:
        raise SourceInvalidError(
            f"{brief(entry.path)}: has {entry.size} bytes, the limit for a JSON file is {_MAX_TEXT_BYTES}"
        )
    fd = open_planned(root, entry)
    try:
        data = _read(fd, entry, entry.size, 0)
        _refuse_pointer(data, entry)
        return data
    finally:
        os.close(fd)


def read_shards(root: str, entries: Iterable[SourceEntry]) -> dict[str, ReadShard]:
    """Header and fingerprint of each shard, by path, read by a few threads.

    Raises: SourceInvalidError or SourceChangedError for the first (by order) that is not right.
    """
    planned = list(entries)
    large = Lock()

    def read(entry: SourceEntry) -> ReadShard:
        return _read_shard(root, entry, large)

    found: Iterator[ReadShard]
    with ThreadPoolExecutor(min(_READERS, len(planned) or 1), "fp8fs-headers") as pool:
        try:
            found = pool.map(read, planned)
        except RuntimeError:  # the system gives us no more threads: read on this one
            found = map(read, planned)
        return {entry.path: read for entry, read in zip(planned, found, strict=True)}


def try_read_headers(root: str, entries: Iterable[SourceEntry]) -> dict[str, Header]:
    """The headers of those files that have one: of files that are not made into anything, none is asked to be right."""
    headers: dict[str, Header] = {}
    large = Lock()
    for entry in entries:
        try:
            headers[entry.path] = _read_shard(root, entry, large).header
        except (SourceInvalidError, SourceChangedError):
            continue
    return headers


def _read_shard(root: str, entry: SourceEntry, large: Lock) -> ReadShard:
    try:
        return _read_checked(root, entry, large)
    except Fp8fsError as err:
        # Its frames and its cause hold all that was read; of many hostile shards that would be many times 100 MB.
        traceback.clear_frames(err.__traceback__)
        err.__cause__ = err.__context__ = None
        raise


def _read_checked(root: str, entry: SourceEntry, large: Lock) -> ReadShard:
    """*large* is held while a header is decoded that takes many times its size meanwhile: one of them at a time."""
    fd = open_planned(root, entry)
    try:
        # Without this, each sampled page would bring its read-ahead, 32 times its size, along.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        shown = brief(entry.path)
        preamble = _read(fd, entry, min(_FIRST_READ, entry.size), 0)
        _refuse_pointer(preamble, entry)
        length = 8 + header_length(preamble[:9], entry.size, shown)
        with large if length > _LARGE_BYTES else nullcontext():
            if length > len(preamble):
                preamble += _read(fd, entry, length - len(preamble), len(preamble))
            preamble = preamble[:length]
            header = parse_header(preamble, entry.size, shown)
        pages = [
            _read(fd, entry, min(SAMPLE_BYTES, entry.size - offset), offset)
            for offset in sample_offsets(entry.size, length)
        ]
        if what := difference(entry, os.fstat(fd)):
            raise changed(entry, what)
    finally:
        os.close(fd)
    fingerprint = Fingerprint(
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        header_digest=header_digest(preamble),
        sample_digest=sample_digest(pages),
        blob=_blob(entry),
    )
    return ReadShard(header, fingerprint)


def _read(fd: int, entry: SourceEntry, length: int, file_offset: int) -> bytes:
    """Exactly *length* bytes."""
    parts: list[bytes] = []
    try:
        while length > 0:
            part = os.pread(fd, length, file_offset)
            if not part:
                raise changed(entry, f"size was {entry.size}, ends at byte {file_offset}")
            parts.append(part)
            length -= len(part)
            file_offset += len(part)
    except OSError as err:
        raise SourceInvalidError(
            f"{brief(entry.path)}: cannot be read at byte {file_offset}: {os.strerror(err.errno or 0)}"
        ) from err
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _refuse_pointer(data: bytes, entry: SourceEntry) -> None:
    if data.startswith(_LFS):
        raise SourceInvalidError(
            f"{brief(entry.path)}: is a Git LFS pointer, not the file itself",
            hint="git lfs pull",
            file=brief(entry.path),
        )


def _blob(entry: SourceEntry) -> str:
    """The hash that names the file in an HF cache, "" elsewhere."""
    folder, _, name = entry.link.rpartition("/")
    return name if name_of(folder) == "blobs" and _BLOB.fullmatch(name) else ""
