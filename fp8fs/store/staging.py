"""The directory of a partial shard: made, recovered, removed. What it is for: partial.py."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import closing_fd, remove_tree, replace_file, temporary_name
from fp8fs.store.holder import holder_text
from fp8fs.store.journal import Journal, encode_journal, head_line
from fp8fs.store.lease import PRESENCE, Claims, LocksUnavailable
from fp8fs.store.places import Places
from fp8fs.store.readback import holds
from fp8fs.store.types import Poll, ShardSpec, UnitSpan

__all__ = ["create", "has_data", "open_data", "recover", "retire", "try_retire"]

log = logging.getLogger(__name__)


def has_data(io: FsIo, dir_fd: int) -> bool:
    try:
        io.lstat("data", dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True


def open_data(io: FsIo, path: Path, dir_fd: int) -> int:
    try:
        return io.open("data", os.O_RDWR, dir_fd=dir_fd)
    except PermissionError:  # a crash after the seal took our right to write, before the rename
        io.chmod(path / "data", 0o600)
        return io.open("data", os.O_RDWR, dir_fd=dir_fd)


def create(io: FsIo, places: Places, spec: ShardSpec, path: Path, *, shared: bool) -> None:
    """A directory with an empty partial exists at *path*: ours, or one that somebody else made meanwhile.

    Raises: LocksUnavailable if it is to be *shared* and cannot be; then nothing is left of it.
    """
    staged = places.tmp / temporary_name(spec.object_id)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        io.mkdir(staged)
        with closing_fd(io, io.open(staged / "lock", flags)) as fd:
            if shared:
                Claims(io, fd).try_presence(exclusive=True)
            else:
                io.pwrite(fd, holder_text(), 0)
        with closing_fd(io, io.open(staged / "data", flags)) as fd:
            io.ftruncate(fd, spec.size)
            io.pwrite(fd, spec.preamble, 0)
        with closing_fd(io, io.open(staged / "journal", flags)) as fd:
            io.pwrite(fd, head_line(spec), 0)
        io.rename(staged, path)
    except (OSError, LocksUnavailable) as err:
        with suppress(OSError):
            remove_tree(io, staged)
        if not (isinstance(err, OSError) and err.errno in (errno.ENOTEMPTY, errno.EEXIST)):
            raise


def recover(
    io: FsIo,
    spec: ShardSpec,
    path: Path,
    fd: int,
    journal: Journal,
    spans: Sequence[UnitSpan],
    *,
    tmp: Path,
    poll: Poll,
) -> bool:
    """Make data and journal agree after whatever happened. The caller is alone. Returns whether the journal was replaced.

    Nothing is lost by an interruption: the new journal takes its place in one step, after the data is on the disk.
    """
    size_right = io.fstat(fd).st_size == spec.size
    preamble_right = io.pread(fd, len(spec.preamble), 0) == spec.preamble
    trusted = size_right and preamble_right and journal.is_for(spec)
    scan = journal.read_all()
    last = {record.unit: (where, record) for where, record in scan.units}
    uncertain = {unit for unit, (where, _) in last.items() if not trusted or where >= scan.covered}
    if trusted and not uncertain and not scan.bad_lines and scan.consumed == journal.size():
        return False

    if not size_right:
        io.ftruncate(fd, spec.size)
    if not preamble_right:
        io.pwrite(fd, spec.preamble, 0)
    by_unit = {span.unit: span for span in spans}
    lost = {
        unit
        for unit in uncertain
        if unit not in by_unit or not holds(io, fd, by_unit[unit], last[unit][1], poll)
    }
    if lost:
        log.warning(
            "shard %s: %d of %d journaled units did not reach the disk; they are made again",
            spec.object_id,
            len(lost),
            len(last),
        )
    kept = [record for unit, (_, record) in sorted(last.items()) if unit not in lost]
    io.fdatasync(fd)
    replace_file(io, path / "journal", encode_journal(spec, kept), tmp=tmp)
    return True


def retire(io: FsIo, places: Places, path: Path) -> None:
    """The directory of a partial that nobody needs is gone; what cannot be removed now is removed by ``collect``.

    The caller is alone, or holds every claim; whoever still has it open finds out by its name (``_is_current``).
    """
    gone = places.tmp / temporary_name(path.name)
    try:
        io.rename(path, gone)
        remove_tree(io, gone)
    except OSError as err:
        log.debug("cannot remove %s: %s", path, err)


def try_retire(io: FsIo, places: Places, path: Path) -> bool:
    """Remove a partial directory unless somebody has it open. Returns whether it is gone."""
    try:
        # Made if missing: after a power loss a directory can be there without it.
        fd = io.open(path / "lock", os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return True
    with closing_fd(io, fd):
        try:
            alone = io.try_lock_range(fd, PRESENCE, 1, exclusive=True)
        except OSError:
            return False  # without locks nobody can know
        if alone:
            retire(io, places, path)
        return alone
