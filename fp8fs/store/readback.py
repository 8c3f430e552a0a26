"""Digest what is on the disk: a unit's data and scale, read back tile by tile."""

from __future__ import annotations

import xxhash

from fp8fs.core.digest import TileDigester, bytes_digest
from fp8fs.core.layout import data_rows, tiles
from fp8fs.store.fsio import FsIo
from fp8fs.store.types import Poll, UnitRecord, UnitSpan

__all__ = ["holds"]


def holds(io: FsIo, fd: int, span: UnitSpan, record: UnitRecord, poll: Poll) -> bool:
    """Whether the file holds the bytes that *record* was made for. Cost: one read of the unit; memory: one tile."""
    scale = io.pread(fd, span.scale_length, span.scale_start) if span.scale_length else b""
    if len(scale) != span.scale_length or bytes_digest(scale) != record.scale_digest:
        return False
    return _data_digest(io, fd, span, poll) == record.data_digest


def _data_digest(io: FsIo, fd: int, span: UnitSpan, poll: Poll) -> str:
    digester = TileDigester()
    for tile in tiles(span.rows, span.cols, span.item_bytes):
        poll()
        if not span.row_runs and (tile.cols == span.cols or tile.rows == 1):
            first = span.start + tile.row * span.cols + tile.col
            digester.add(io.pread(fd, tile.rows * tile.cols, first))
            continue
        parts = xxhash.xxh3_128()
        for data_row, rows in data_rows(span.row_runs, tile.row, tile.rows):
            first = span.start + data_row * span.cols + tile.col
            if tile.cols == span.cols:
                parts.update(io.pread(fd, rows * tile.cols, first))
                continue
            for row in range(rows):
                parts.update(io.pread(fd, tile.cols, first + row * span.cols))
        digester.add_digest(parts.digest())
    return digester.hexdigest()
