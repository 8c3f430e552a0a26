"""What stands for the bytes of a source shard without reading all of them, and what differs between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

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


def header_digest(preamble: bytes) -> str:
    """Hex digest of a shard's preamble."""
    raise NotImplementedError


def sample_offsets(size: int, data_start: int) -> tuple[int, ...]:
    """File offsets of the pages to sample: first, last and up to 14 spread ones, inside [data_start, size).

    A page at offset o is the bytes [o, min(o + SAMPLE_BYTES, size)). Sorted, distinct, decided by the arguments alone.
    """
    raise NotImplementedError


def sample_digest(pages: Iterable[bytes]) -> str:
    """Hex digest of the sampled pages, in the order of ``sample_offsets``."""
    raise NotImplementedError


def identity(fingerprint: Fingerprint, salt: str = "") -> str:
    """32 hex digits that stand for the shard's bytes in every key of the store."""
    raise NotImplementedError


def resolve(shard_identity: str, adopted: Mapping[str, str]) -> str:
    """The identity under which the store knows these bytes: what ``verify --adopt`` proved equal, else the same."""
    raise NotImplementedError


def difference(old: Fingerprint, new: Fingerprint) -> str:
    """What differs, as one sentence ("size was 4976698672, is 4976701000"); "" if nothing."""
    raise NotImplementedError


def settle_hint(recorded: Hint | None, seen: Hint) -> Hint:
    """*seen* (salt "") with the salt that it must carry, given what the last mount recorded for the same path."""
    raise NotImplementedError


def encode_fingerprint(fingerprint: Fingerprint) -> bytes:
    """Versioned JSON."""
    raise NotImplementedError


def parse_fingerprint(data: bytes) -> Fingerprint | None:
    """The fingerprint, or None if *data* is damaged or of another version."""
    raise NotImplementedError


def encode_hints(hints: Mapping[str, Hint]) -> bytes:
    """Versioned JSON: shard path -> hint."""
    raise NotImplementedError


def parse_hints(data: bytes) -> dict[str, Hint]:
    """Hints by shard path; empty if *data* is damaged or of another version (a hint is never needed)."""
    raise NotImplementedError
