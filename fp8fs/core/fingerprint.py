"""What stands for the bytes of a source shard without reading all of them, and what differs between two of them.

*Identity* goes into every key of the store, so it may hold nothing that is local to one machine: it is made
of the size, a digest of the header, a digest of sampled pages and mtime_ns. In an HF cache the blob's name is
the hash of all its bytes; there it stands instead of mtime_ns, and a second download keeps its identity.

*Hints* are local, and never identity by themselves. They close one hole: a rewrite of the same size, with its
mtime put back, that misses the sampled pages. The kernel's ctime cannot be put back. So, when a mount meets the
inode that the last mount met and only its ctime has moved, the shard gets a salt and its identity becomes a
new one: it is a miss, and made again. A chmod does the same, needlessly but harmlessly. The salt is kept for as
long as the ctime is, so the shard is made once, not at every mount. A store that is carried to another
machine leaves its hints behind; there the samples alone decide, as on a first mount.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from fp8fs.core.text import is_text

__all__ = [
    "SAMPLE_BYTES",
    "Fingerprint",
    "Hint",
    "difference",
    "encode_fingerprint",
    "encode_hints",
    "header_digest",
    "identity",
    "parse_fingerprint",
    "parse_hints",
    "resolve",
    "sample_digest",
    "sample_offsets",
    "settle_hint",
]

SAMPLE_BYTES = 4096
"""Bytes of one sampled page."""

_SAMPLES = 16
_VERSION = 1


class Fingerprint(msgspec.Struct, frozen=True):
    """Cheap identity of one shard. Digests are hex. ``blob``: the blob's hash in an HF cache, else ""."""

    size: int
    mtime_ns: int
    header_digest: str
    sample_digest: str
    blob: str = ""


class Hint(msgspec.Struct, frozen=True):
    """Local stat facts of one shard as the last mount saw them. ``identity`` is the unsalted one."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    identity: str
    salt: str = ""


class _FingerprintFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    fingerprint: Fingerprint


class _HintsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    hints: dict[str, Hint]


def header_digest(preamble: bytes) -> str:
    """Hex digest of a shard's preamble."""
    return hashlib.blake2b(preamble, digest_size=16).hexdigest()


def sample_offsets(size: int, data_start: int) -> tuple[int, ...]:
    """File offsets of the pages to sample: first, last and up to 14 spread ones, inside [data_start, size).

    A page at offset o is the bytes [o, min(o + SAMPLE_BYTES, size)). Sorted, distinct, decided by the arguments
    alone. Data of up to 16 pages is sampled whole. Between first and last, each of 14 equal stretches gives one
    page at a place that looks random, so that no regular layout can hide between the samples.
    """
    pages = -(-(size - data_start) // SAMPLE_BYTES)
    if pages <= _SAMPLES:
        return tuple(data_start + page * SAMPLE_BYTES for page in range(pages))
    stretches = _SAMPLES - 2
    chosen = {0, pages - 1}
    for number in range(stretches):
        begin = 1 + number * (pages - 2) // stretches
        end = 1 + (number + 1) * (pages - 2) // stretches
        seed = f"{size} {data_start} {number}".encode()
        spread = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
        chosen.add(begin + spread % (end - begin))
    return tuple(data_start + page * SAMPLE_BYTES for page in sorted(chosen))


def sample_digest(pages: Iterable[bytes]) -> str:
    """Hex digest of the sampled pages, in the order of ``sample_offsets``."""
    digest = hashlib.blake2b(digest_size=16)
    for page in pages:
        digest.update(page)
    return digest.hexdigest()


def identity(fingerprint: Fingerprint, salt: str = "") -> str:
    """32 hex digits that stand for the shard's bytes in every key of the store."""
    when = f"blob {fingerprint.blob}" if fingerprint.blob else f"mtime_ns {fingerprint.mtime_ns}"
    lines = (
        "fp8fs source shard 1",
        f"size {fingerprint.size}",
        f"header {fingerprint.header_digest}",
        f"sample {fingerprint.sample_digest}",
        when,
        f"salt {salt}",
    )
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def resolve(shard_identity: str, adopted: Mapping[str, str]) -> str:
    """The identity under which the store knows these bytes: what ``verify --adopt`` proved equal, else the same."""
    met = {shard_identity}
    while (older := adopted.get(shard_identity)) is not None and older not in met:
        met.add(older)
        shard_identity = older
    return shard_identity


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """What differs, as one sentence ("size was 4976698672, is 4976701000"); "" if nothing.

    The first of these that differs is the news: size, header, blob, sampled pages, mtime.
    """
    if old.size != new.size:
        return f"size was {old.size}, is {new.size}"
    if old.header_digest != new.header_digest:
        return f"header digest was {old.header_digest}, is {new.header_digest}"
    if old.blob != new.blob:
        return f"blob was {old.blob or 'none'}, is {new.blob or 'none'}"
    if old.sample_digest != new.sample_digest:
        return f"digest of the sampled pages was {old.sample_digest}, is {new.sample_digest}"
    if old.mtime_ns != new.mtime_ns:
        return f"mtime_ns was {old.mtime_ns}, is {new.mtime_ns}"
    return ""


def settle_hint(recorded: Hint | None, seen: Hint) -> Hint:
    """*seen* (salt "") with the salt that it must carry, given what the last mount recorded for the same path.

    ctime as recorded: nothing happened to the inode, the recorded salt stays (device numbers may change at a
    reboot, so they are not asked). The recorded inode with another ctime: a new salt. Another inode that
    looks the same: a copy, taken for what it seems; but if the recorded one was salted, nobody can say which of
    the two contents was copied, so the copy gets a salt of its own.
    """
    if recorded is None or recorded.identity != seen.identity:
        return seen
    if recorded.ctime_ns == seen.ctime_ns:
        return msgspec.structs.replace(seen, salt=recorded.salt)
    if recorded.ino == seen.ino or recorded.salt:
        return msgspec.structs.replace(seen, salt=f"{seen.ctime_ns:x}")
    return seen


def encode_fingerprint(fingerprint: Fingerprint) -> bytes:
    """Versioned JSON."""
    return msgspec.json.encode(_FingerprintFile(_VERSION, fingerprint))


def parse_fingerprint(data: bytes) -> Fingerprint | None:
    """The fingerprint, or None if *data* is damaged or of another version."""
    try:
        whole = msgspec.json.decode(data, type=_FingerprintFile)
    except (ValueError, RecursionError):
        return None
    return whole.fingerprint if whole.version == _VERSION else None


def encode_hints(hints: Mapping[str, Hint]) -> bytes:
    """Versioned JSON: shard path -> hint. Paths that are not valid text are left out: a hint is never needed."""
    return msgspec.json.encode(_HintsFile(_VERSION, {p: h for p, h in hints.items() if is_text(p)}))


def parse_hints(data: bytes) -> dict[str, Hint]:
    """Hints by shard path; empty if *data* is damaged or of another version (a hint is never needed)."""
    try:
        whole = msgspec.json.decode(data, type=_HintsFile)
    except (ValueError, RecursionError):
        return {}
    return whole.hints if whole.version == _VERSION else {}
