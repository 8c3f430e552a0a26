"""Sealed objects: the cheap check at every use, the full check on demand, setting aside, publishing."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from fp8fs.core.digest import bytes_digest, shard_digest
from fp8fs.errors import StoreDamagedError
from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import (
    closing_fd,
    decode_checked,
    encode_checked,
    read_small,
    replace_file,
    storing,
)
from fp8fs.store.places import Places
from fp8fs.store.readback import holds
from fp8fs.store.types import (
    PREAMBLE,
    SCHEMA,
    ObjectRecord,
    Poll,
    ShardSpec,
    UnitRecord,
    UnitSpan,
)

__all__ = ["Objects", "sealed_mode"]

log = logging.getLogger(__name__)

_NOT_OURS = {errno.ELOOP, errno.ENXIO, errno.EISDIR}


def sealed_mode(mode: int) -> int:
    """The mode of sealed bytes: who may read, and nothing else of SRC's mode. Nobody may write what is published."""
    return mode & 0o555


class Objects:
    """objects/: read by anybody, written only through ``publish``. Thread-safe; ``writable`` False only reads."""

    def __init__(self, io: FsIo, places: Places, *, writable: bool) -> None:
        self._io = io
        self._places = places
        self._writable = writable

    # -- reading --------------------------------------------------------------------------

    def find(self, spec: ShardSpec) -> Path | None:
        """The object, if a cheap check finds nothing wrong with it. Cost: two opens, two small reads."""
        path = self._places.object(spec.object_id)
        with storing(f"cannot read object {spec.object_id}"):
            fd = self._open(path)
            if fd is None:
                return None
            with closing_fd(self._io, fd):
                info = self._io.fstat(fd)
                fault = self._fault(fd, info, spec)
                if not fault:
                    return path if self._attributes_right(fd, info, spec) else None
            if self._writable:
                self.set_aside(spec.object_id, fault, inode=info.st_ino)
            else:
                log.warning("object %s: %s; not used", spec.object_id, fault)
        return None

    def record(self, object_id: str) -> ObjectRecord | None:
        """The record beside an object; None if missing or damaged."""
        with storing(f"cannot read the record of object {object_id}"):
            data = read_small(self._io, self._places.record(object_id))
        value = decode_checked(data) if data is not None else None
        if value is None:
            return None
        try:
            record = msgspec.json.decode(value, type=ObjectRecord)
        except (msgspec.MsgspecError, RecursionError):
            return None
        good = record.schema == SCHEMA and record.object_id == object_id
        return record if good else None

    def verify(
        self, object_id: str, spans: Iterable[UnitSpan], poll: Poll, *, copy: Path | None = None
    ) -> list[int]:
        """Units whose bytes are not what the record says, PREAMBLE first, in the object or in a *copy* of it.

        Cost: reads the whole file.
        """
        record = self.record(object_id)
        if record is None:
            raise StoreDamagedError(f"object {object_id} has no readable record", object=object_id)
        by_unit = {unit.unit: unit for unit in record.records}
        with storing(f"cannot read object {object_id}"):
            fd = self._open(copy or self._places.object(object_id))
            if fd is None:
                raise StoreDamagedError(f"object {object_id} is missing", object=object_id)
            with closing_fd(self._io, fd):
                found = self._io.fstat(fd).st_size
                if found != record.size:
                    raise StoreDamagedError(
                        f"object {object_id} has {found} bytes, its record says {record.size}",
                        object=object_id,
                        expected=record.size,
                        found=found,
                    )
                damaged = []
                if (
                    bytes_digest(self._io.pread(fd, record.preamble_bytes, 0))
                    != record.preamble_digest
                ):
                    damaged.append(PREAMBLE)
                for span in spans:
                    unit = by_unit.get(span.unit)
                    if unit is None or not holds(self._io, fd, span, unit, poll):
                        damaged.append(span.unit)
        return damaged

    def _open(self, path: Path) -> int | None:
        try:
            return self._io.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            if err.errno in _NOT_OURS and self._writable:
                self._move_to_damaged(path)
            if err.errno in _NOT_OURS:
                return None
            raise

    def _fault(self, fd: int, info: os.stat_result, spec: ShardSpec) -> str:
        """What is wrong with an open object, "" for nothing."""
        if not stat.S_ISREG(info.st_mode):
            return "not a regular file"
        if info.st_size != spec.size:
            return f"{info.st_size} bytes, expected {spec.size}"
        if self._io.pread(fd, len(spec.preamble), 0) != spec.preamble:
            return "another preamble than planned"
        record = self.record(spec.object_id)
        if record is None:
            return "its record is missing or damaged"
        if (record.size, record.preamble_digest) != (spec.size, bytes_digest(spec.preamble)):
            return "its record is of another shard"
        if [unit.unit for unit in record.records] != list(range(spec.unit_count)):
            return "its record does not name every unit"
        if record.shard_digest != _digest_of(record.preamble_digest, record.records):
            return "its record contradicts itself"
        return ""

    def _attributes_right(self, fd: int, info: os.stat_result, spec: ShardSpec) -> bool:
        """Whether the file grants no more than SRC does; a copied store may have lost mode, owner and time."""
        mode = sealed_mode(spec.mode)
        right = (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (mode, spec.uid, spec.gid)
        if right and info.st_mtime_ns == spec.mtime_ns:
            return True
        if self._writable:
            with suppress(OSError):
                self._set_attributes(fd, info, spec)
                return True
        grants_more = stat.S_IMODE(info.st_mode) & ~mode
        return not grants_more and info.st_uid in (spec.uid, os.geteuid())

    # -- setting aside --------------------------------------------------------------------

    def set_aside(self, object_id: str, reason: str, *, inode: int | None = None) -> None:
        """The object (if it is still that inode) and its record are in damaged/; never served again."""
        with storing(f"cannot set object {object_id} aside"):
            path = self._places.object(object_id)
            with closing_fd(self._io, self._open_guard()) as guard:
                # Under this lock nobody else moves objects away, so the inode that was judged is the one that goes.
                while not self._io.try_flock(guard, exclusive=True):
                    time.sleep(0.005)
                try:
                    found = self._io.lstat(path).st_ino
                except FileNotFoundError:
                    return
                if inode is not None and found != inode:
                    return
                log.warning(
                    "object %s is damaged (%s): set aside, to be made again", object_id, reason
                )
                self._move_to_damaged(path)
                self._move_to_damaged(self._places.record(object_id))
                # Else a power loss would bring it back, and a cheap check might not see what a full one saw.
                self._io.fsync_dir(path.parent)

    def _open_guard(self) -> int:
        return self._io.open(self._places.damaged / "lock", os.O_RDWR | os.O_CREAT)

    def _move_to_damaged(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            self._io.rename(path, self._places.damaged / f"{time.time_ns()}.{path.name}")

    # -- publishing -----------------------------------------------------------------------

    def publish(
        self,
        spec: ShardSpec,
        records: Iterable[UnitRecord],
        facts: Any,
        *,
        fd: int,
        partial_dir_fd: int,
    ) -> Path:
        """The staged file ``data`` of the partial's directory has its final name; power loss cannot undo it.

        The caller holds every claim and has synced the data. At any moment the object is whole or absent.
        """
        path = self._places.object(spec.object_id)
        self._ensure_folder(path.parent)
        self._set_attributes(fd, self._io.fstat(fd), spec)  # seal: before the name exists
        self._io.fsync(fd)
        content = _encode_record(spec, tuple(records), facts)
        record = self._places.record(spec.object_id)
        replace_file(self._io, record, content, tmp=self._places.tmp)  # durable before the object
        self._io.rename("data", path, source_dir_fd=partial_dir_fd)  # the one atomic step
        self._io.fsync_dir(path.parent)
        return path

    def _ensure_folder(self, folder: Path) -> None:
        try:
            self._io.mkdir(folder)
        except FileExistsError:
            return
        self._io.fsync_dir(folder.parent)

    def _set_attributes(self, fd: int, info: os.stat_result, spec: ShardSpec) -> None:
        if (info.st_uid, info.st_gid) != (spec.uid, spec.gid):
            self._io.fchown(fd, spec.uid, spec.gid)
        self._io.fchmod(fd, sealed_mode(spec.mode))
        self._io.futime(fd, spec.mtime_ns)


def _digest_of(preamble_digest: str, records: Iterable[UnitRecord]) -> str:
    return shard_digest(preamble_digest, ((r.data_digest, r.scale_digest) for r in records))


def _encode_record(spec: ShardSpec, records: tuple[UnitRecord, ...], facts: Any) -> bytes:
    """The record as checked JSON. ``facts`` is encoded first, so that a bad value of the caller costs nothing."""
    preamble_digest = bytes_digest(spec.preamble)
    return encode_checked(
        ObjectRecord(
            schema=SCHEMA,
            object_id=spec.object_id,
            size=spec.size,
            preamble_bytes=len(spec.preamble),
            preamble_digest=preamble_digest,
            shard_digest=_digest_of(preamble_digest, records),
            mode=sealed_mode(spec.mode),
            uid=spec.uid,
            gid=spec.gid,
            mtime_ns=spec.mtime_ns,
            facts=msgspec.Raw(msgspec.json.encode(facts)),
            records=records,
        )
    )
