"""SRC opened: its bytes while a view is served, and whether they still are what was planned."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from fp8fs.core.checkpoint import (
    Checkpoint,
    SourceEntry,
    SourceShard,
    classify,
    text_files,
)
from fp8fs.core.fingerprint import Fingerprint, Hint, identity, resolve, settle_hint
from fp8fs.core.text import brief
from fp8fs.core.weightset import weight_sets
from fp8fs.errors import SourceInvalidError
from fp8fs.source.handles import Handles
from fp8fs.source.reading import (
    read_shards,
    read_text,
    refuse_unfinished,
    try_read_headers,
    unfinished,
)
from fp8fs.source.scan import (
    Location,
    changed,
    count_snapshots,
    difference,
    leading_out,
    locate,
    open_planned,
    scan,
    unfinished_blobs,
)

__all__ = ["Source", "hints_key"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_FOLIO = 2 << 20
_PROBES = 48


def hints_key(path: Path) -> str:
    """The store's key for the hints of the SRC at *path*: local to this machine."""
    real = os.path.realpath(path)
    return hashlib.blake2b(os.fsencode(real), digest_size=16).hexdigest()


class Source:
    """An opened SRC. Thread-safe; nothing below SRC is ever written.

    ``root``: the directory that the view mirrors, absolute, symlinks resolved (in an HF cache: the snapshot).
    ``bind_root``: the directory to bind for large files, so that the symlinks in them resolve (HF cache: the
    repository folder, else ``root``); ``bind_prefix``: ``root`` below it ("snapshots/<rev>", else "").
    ``checkpoint``: everything the planner needs. ``fingerprints``: by shard path.
    """

    root: Path
    bind_root: Path
    bind_prefix: str
    checkpoint: Checkpoint
    fingerprints: dict[str, Fingerprint]

    def __init__(
        self,
        location: Location,
        checkpoint: Checkpoint,
        fingerprints: dict[str, Fingerprint],
        hints: dict[str, Hint],
        max_open_files: int,
    ) -> None:
        """Use ``Source.open``."""
        self.root = Path(location.root)
        self.bind_root = Path(location.bind_root)
        self.bind_prefix = location.bind_prefix
        self.checkpoint = checkpoint
        self.fingerprints = fingerprints
        self._hints = hints
        self._handles = Handles(self.open_file, max_open_files)
        self._found_cached: dict[str, bool] = {}  # by shard, asked before its first read

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        hints: Mapping[str, Hint] | None = None,
        adopted: Mapping[str, str] | None = None,
        max_open_files: int = 64,
    ) -> Self:
        """Scan, read headers and JSONs, check, fingerprint.

        *hints*: what ``hints()`` gave at the last mount. *adopted*: identity -> the older identity proved equal; only
        asked by key, so it may look things up when asked.
        Raises: SourceInvalidError, one sentence; SourceChangedError if SRC is written at this moment.
        """
        location = locate(os.fspath(path))
        entries = scan(location.root)
        refuse_unfinished(entries.values())
        texts = {text: read_text(location.root, entries[text]) for text in text_files(entries)}
        awaited = unfinished_blobs(location)
        if awaited and count_snapshots(location) == 1:
            raise unfinished(awaited[0])
        try:
            sets = weight_sets(entries, texts)
        except SourceInvalidError as err:
            raise (unfinished(awaited[0]) if awaited else err) from err
        read = read_shards(
            location.root, [entries[shard] for found in sets for shard in found.shards]
        )
        headers = {path: found.header for path, found in read.items()}
        headers |= try_read_headers(
            location.root, [entries[path] for found in sets for path in found.extras]
        )
        components = classify(sets, texts, headers)
        settled: dict[str, Hint] = {}
        shards: dict[str, SourceShard] = {}
        for shard in sorted(shard for component in components for shard in component.shards):
            hint = _hint(entries[shard], identity(read[shard].fingerprint))
            settled[shard] = settle_hint((hints or {}).get(shard), hint)
            salted = identity(read[shard].fingerprint, settled[shard].salt)
            shards[shard] = SourceShard(
                entries[shard],
                read[shard].header,
                resolve(salted, adopted if adopted is not None else {}),
            )
        pipeline = "model_index.json" in texts
        return cls(
            location,
            Checkpoint(
                entries, shards, components, texts, pipeline, _warnings(location, entries, awaited)
            ),
            {shard: read[shard].fingerprint for shard in shards},
            settled,
            max_open_files,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def hints(self) -> dict[str, Hint]:
        """Local facts to keep for the next mount, by shard path (core.fingerprint.encode_hints)."""
        return dict(self._hints)

    def pread_into(self, shard_path: str, buffer: Buffer, file_offset: int) -> None:
        """Fill all of *buffer* from the shard. The file is the planned one; that it was not written since
        it was opened is for ``check`` to say, after the bytes were read.

        Raises: SourceChangedError if the file ends early or is another; SourceInvalidError if it cannot be read.
        """
        entry = self._entry(shard_path)
        view = memoryview(buffer).cast("B")
        with self._handles.borrow(shard_path) as fd:
            if shard_path not in self._found_cached:
                self._found_cached[shard_path] = _is_cached(fd, entry.size)
            done = 0
            while done < len(view):
                try:
                    count = os.preadv(fd, [view[done:]], file_offset + done)
                except OSError as err:
                    why = os.strerror(err.errno or 0)
                    raise SourceInvalidError(
                        f"{brief(shard_path)}: cannot be read at byte {file_offset + done}: {why}"
                    ) from err
                if not count:
                    size = os.fstat(fd).st_size
                    raise changed(
                        entry,
                        f"size was {entry.size}, is {size}; byte {file_offset + done} was asked for",
                    )
                done += count

    def check(self, path: str) -> None:
        """Compare the file with the facts of plan time: those of whatever has its name, and the open descriptor's.

        Raises: SourceChangedError naming the file and the difference.
        """
        entry = self._entry(path)
        # By name first: it tells a replaced file from one whose link count, and so its ctime, has changed.
        if what := self._difference_by_name(entry):
            raise changed(entry, what)
        with self._handles.borrow_open(path) as fd:
            if fd is not None and (what := difference(entry, os.fstat(fd))):
                raise changed(entry, what)

    def open_file(self, path: str) -> int:
        """A new read-only descriptor of any regular file of SRC, checked against plan time. The caller closes it."""
        return open_planned(os.fspath(self.root), self._entry(path))

    def drop(self, shard_path: str, file_offset: int, length: int) -> None:
        """Give the page cache back what was consumed. Never fails.

        A shard that was there as a whole before our first read stays: somebody else put it there, and we would
        pay for taking it away.

        What the kernel keeps as one piece, 2 MiB at most, goes as one piece or not at all. So the piece in which the
        range begins goes too, the one in which it ends stays for the next range: bytes are consumed in order.
        """
        if self._found_cached.get(shard_path):
            return
        begin = file_offset // _FOLIO * _FOLIO
        end = file_offset + length
        if end < self._entry(shard_path).size:
            end = end // _PAGE * _PAGE
        if end <= begin:
            return
        with self._handles.borrow_open(shard_path) as fd:
            if fd is None:
                return
            try:
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            except OSError:
                return  # advice only: some filesystems have no page cache to drop

    def changes(self) -> list[str]:
        """One sentence for each planned file that is not what it was: stats only."""
        if not self.root.is_dir():
            return [f"{brief(str(self.root))}: was there, is gone"]
        return [
            f"{brief(entry.path)}: {what}"
            for entry in self.checkpoint.entries.values()
            if entry.kind == "file" and (what := self._difference_by_name(entry))
        ]

    def close(self) -> None:
        """Close every descriptor. Repeatable; reads under way finish first, later ones fail."""
        self._handles.close()

    def _entry(self, path: str) -> SourceEntry:
        entry = self.checkpoint.entries.get(path)
        if entry is None or entry.kind != "file":
            raise SourceInvalidError(f"{brief(path)}: is no file of SRC")
        return entry

    def _difference_by_name(self, entry: SourceEntry) -> str:
        try:
            facts = os.stat(os.path.join(self.root, entry.path))
        except OSError as err:
            return f"was there, now: {os.strerror(err.errno or 0)}"
        return difference(entry, facts)


def _warnings(
    location: Location, entries: Mapping[str, SourceEntry], awaited: Sequence[str]
) -> tuple[str, ...]:
    """What a user should know of SRC as a whole, one sentence each."""
    warnings = [
        # They do not seem to be part of this snapshot, which is one of several.
        f"{path}: a download that is not finished; it is taken for another revision's"
        for path in awaited[:1]
    ]
    outside = leading_out(location, entries.values())
    if outside:
        where = brief(os.path.realpath(location.root + "/" + outside[0]))
        more = f", and {len(outside) - 1} more lead out of SRC" if len(outside) > 1 else ""
        warnings.append(f"{brief(outside[0])} leads out of SRC to {where}, and is read there{more}")
    return tuple(warnings)


def _is_cached(fd: int, size: int) -> bool:
    """Whether a file of *size* bytes is in the page cache as a whole, by probes that never wait for a disk."""
    byte = bytearray(1)
    for probe in range(_PROBES):
        try:
            if not os.preadv(fd, [byte], size * (2 * probe + 1) // (2 * _PROBES), os.RWF_NOWAIT):
                return False
        except OSError:  # it would have to wait, or the filesystem cannot tell
            return False
    return True


def _hint(entry: SourceEntry, unsalted: str) -> Hint:
    return Hint(entry.dev, entry.ino, entry.size, entry.mtime_ns, entry.ctime_ns, unsalted)
