"""The journal of one partial shard: which units are finished, and what is known to be on the disk.

A text file, only ever appended to (recovery writes a new one and renames it into place). Each line is

    crc32 of the JSON, 8 hex digits | space | JSON | newline

    {"journal":1,"object":ID,"size":N,"preamble":DIGEST}     the first line
    [unit,amax,input digest,data digest,scale digest]        a finished unit (UnitRecord)
    {"barrier":N}                                            what lines before byte N of this file say is on the disk

Every append is one write and starts with a newline, so a line that was torn by a crash never swallows the next;
empty lines mean nothing. A line whose checksum is wrong never happened.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from fp8fs.core.digest import bytes_digest
from fp8fs.store.fsio import FsIo
from fp8fs.store.types import ShardSpec, UnitRecord

__all__ = ["Journal", "JournalScan", "barrier_line", "encode_journal", "scan_journal", "unit_line"]

JOURNAL_VERSION = 1

_DIGEST = re.compile(r"[0-9a-f]{32}")
_LINE = re.compile(rb"[0-9a-f]{8} ")


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    journal: int
    object: str
    size: int
    preamble: str


class _Barrier(msgspec.Struct, forbid_unknown_fields=True):
    barrier: int


_records = msgspec.json.Decoder(UnitRecord)
_barriers = msgspec.json.Decoder(_Barrier)
_heads = msgspec.json.Decoder(_Head)


class JournalScan(NamedTuple):
    """What a run of journal bytes says. ``units``: (offset of the line in the file, record), in file order;
    ``covered``: the largest barrier; ``consumed``: bytes up to the last newline; ``bad_lines``: how many never happened."""

    units: list[tuple[int, UnitRecord]]
    covered: int
    consumed: int
    bad_lines: int


def _line(value: object) -> bytes:
    body = msgspec.json.encode(value)
    return b"%08x %b\n" % (zlib.crc32(body), body)


def unit_line(record: UnitRecord) -> bytes:
    """The line of one finished unit."""
    return _line(record)


def barrier_line(covered: int) -> bytes:
    """The line that says: what the lines before byte *covered* say is on the disk."""
    return _line(_Barrier(covered))


def head_line(spec: ShardSpec) -> bytes:
    """The first line of a journal."""
    digest = bytes_digest(spec.preamble)
    return _line(_Head(JOURNAL_VERSION, spec.object_id, spec.size, digest))


def encode_journal(spec: ShardSpec, records: Iterable[UnitRecord]) -> bytes:
    """A whole journal whose records are all on the disk."""
    lines = head_line(spec) + b"".join(map(unit_line, records))
    return lines + barrier_line(len(lines))


def _body(line: bytes) -> bytes | None:
    """The JSON of a line (without its newline) if the checksum is right."""
    if not _LINE.match(line) or int(line[:8], 16) != zlib.crc32(line[9:]):
        return None
    return line[9:]


def _decode_unit(body: bytes, unit_count: int) -> UnitRecord | None:
    try:
        record = _records.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    good = (
        0 <= record.unit < unit_count
        and _DIGEST.fullmatch(record.input_digest)
        and _DIGEST.fullmatch(record.data_digest)
        and (not record.scale_digest or _DIGEST.fullmatch(record.scale_digest))
    )
    return record if good else None


def scan_journal(data: bytes, file_offset: int, unit_count: int) -> JournalScan:
    """Read journal bytes that begin at *file_offset* on a line's start. Pure; nothing in *data* makes it fail.

    What stands behind the last newline is left for later: somebody may still be writing it.
    """
    units: list[tuple[int, UnitRecord]] = []
    covered = bad = 0
    end = data.rfind(b"\n") + 1
    start = 0
    while start < end:
        stop = data.index(b"\n", start)
        line = data[start:stop]
        if line:
            body = _body(line)
            record = _decode_unit(body, unit_count) if body and body.startswith(b"[") else None
            if record is not None:
                units.append((file_offset + start, record))
            elif body and body.startswith(b'{"barrier"'):
                covered = max(covered, _decode_barrier(body, limit=file_offset + start))
            elif not (file_offset + start == 0 and body and body.startswith(b'{"journal"')):
                bad += 1
        start = stop + 1
    return JournalScan(units, covered, end, bad)


def _decode_barrier(body: bytes, *, limit: int) -> int:
    """Where the barrier says it stands; 0 if it claims lines that come after it."""
    try:
        barrier = _barriers.decode(body).barrier
    except (msgspec.MsgspecError, RecursionError):
        return 0
    return barrier if 0 <= barrier <= limit else 0


class Journal:
    """An open journal. Not thread-safe by itself, except that ``append`` may run beside anything."""

    def __init__(self, io: FsIo, fd: int, unit_count: int) -> None:
        self.fd = fd
        self._io = io
        self._unit_count = unit_count
        self._consumed = 0

    def is_for(self, spec: ShardSpec) -> bool:
        """Whether the first line is the one of this shard, in a version that we write."""
        head = head_line(spec)
        return self._io.pread(self.fd, len(head), 0) == head

    def read_all(self) -> JournalScan:
        """Everything in the journal."""
        return self._scan(0)

    def read_new(self) -> dict[int, UnitRecord]:
        """Records that were appended since the last call; the last one of a unit counts."""
        scan = self._scan(self._consumed)
        self._consumed += scan.consumed
        return {record.unit: record for _, record in scan.units}

    def _scan(self, file_offset: int) -> JournalScan:
        size = self._io.fstat(self.fd).st_size
        data = (
            self._io.pread(self.fd, size - file_offset, file_offset) if size > file_offset else b""
        )
        return scan_journal(data, file_offset, self._unit_count)

    def size(self) -> int:
        """Bytes so far: every line in them was appended after the data that it speaks of was written."""
        return self._io.fstat(self.fd).st_size

    def append(self, lines: bytes) -> None:
        """The lines are in the journal, in one write."""
        self._io.append(self.fd, b"\n" + lines)
