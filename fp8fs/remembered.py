"""What a store remembers of a source between starts: hints, dates of adopted shards, weights with NaN or Inf.

None of it decides a byte alone: hints are checked against the files, and the rest is kept by a shard's identity.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from fp8fs.core.checkpoint import Checkpoint
from fp8fs.core.fingerprint import Hint, encode_hints, parse_hints
from fp8fs.errors import Fp8fsError
from fp8fs.source import Source, hints_key
from fp8fs.store.store import Store

__all__ = [
    "Adopted",
    "read_hints",
    "read_scan",
    "recorded_keep",
    "with_adopted_dates",
    "write_hints",
    "write_scan",
]

log = logging.getLogger(__name__)

_SCAN_SCHEMA = 1
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_NO_DATE_NS = 2**62
"""Later (2116) than any file; some filesystems end not far behind."""


class Adopted(Mapping[str, str]):
    """identity -> the older identity that ``verify --adopt`` proved equal, read from the store when asked.

    ``dates`` collects the mtime that goes with each older identity that was asked for: a shard shows the
    date of the bytes that it was proved equal to, so that what is sealed already still fits.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.dates: dict[str, int] = {}

    def __getitem__(self, identity: str) -> str:
        value = self._store.read_adopted(identity)
        if not isinstance(value, dict):
            raise KeyError(identity)
        older, mtime_ns = value.get("identity"), value.get("mtime_ns")
        if not isinstance(older, str) or not _IDENTITY.fullmatch(older):
            raise KeyError(identity)
        if not isinstance(mtime_ns, int) or not 0 <= mtime_ns < _NO_DATE_NS:
            raise KeyError(identity)
        self.dates[older] = mtime_ns
        return older

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def with_adopted_dates(checkpoint: Checkpoint, dates: Mapping[str, int]) -> Checkpoint:
    """The checkpoint as it was dated when its adopted shards were first seen."""
    entries, shards = dict(checkpoint.entries), dict(checkpoint.shards)
    for path, shard in checkpoint.shards.items():
        if shard.identity in dates:
            entry = msgspec.structs.replace(shard.entry, mtime_ns=dates[shard.identity])
            entries[path] = entry
            shards[path] = msgspec.structs.replace(shard, entry=entry)
    return msgspec.structs.replace(checkpoint, entries=entries, shards=shards)


def read_hints(store: Store | None, src: Path) -> dict[str, Hint] | None:
    """What an earlier start learned of SRC's files; None without a store or a record that can be read."""
    value = store.read_hints(hints_key(src)) if store is not None else None
    return parse_hints(msgspec.json.encode(value)) if value is not None else None


def write_hints(store: Store, src: Path, source: Source) -> None:
    """Keep what this start learned of SRC's files; a store that cannot take it is logged, for nothing needs it."""
    try:
        store.write_hints(hints_key(src), msgspec.json.decode(encode_hints(source.hints())))
    except Fp8fsError as err:
        log.warning("hints not kept: %s", err)


def read_scan(store: Store, identity: str) -> dict[str, int]:
    """tensor -> index of its first NaN or Inf, as recorded for one source shard."""
    value = store.read_scan(identity)
    if not isinstance(value, dict) or value.get("schema") != _SCAN_SCHEMA:
        return {}
    found = value.get("non_finite")
    if not isinstance(found, dict):
        return {}
    return {str(k): v for k, v in found.items() if isinstance(v, int) and not isinstance(v, bool)}


def write_scan(store: Store, identity: str, non_finite: Mapping[str, int]) -> None:
    """Record what ``read_scan`` returns for one source shard."""
    store.write_scan(identity, {"schema": _SCAN_SCHEMA, "non_finite": dict(non_finite)})


def recorded_keep(store: Store | None, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Every weight of this checkpoint that a scan found to hold NaN or Inf, as the recipe names it."""
    if store is None:
        return ()
    keep: set[str] = set()
    for component in checkpoint.components:
        for path in component.shards:
            for tensor in read_scan(store, checkpoint.shards[path].identity):
                keep.add(f"{component.path}/{tensor}" if component.path else tensor)
    return tuple(sorted(keep))
