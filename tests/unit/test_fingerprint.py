"""core/fingerprint.py: what an identity is made of, what it leaves out, and what a hint adds."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from fp8fs.core.fingerprint import (
    SAMPLE_BYTES,
    Fingerprint,
    Hint,
    difference,
    encode_fingerprint,
    encode_hints,
    header_digest,
    identity,
    parse_fingerprint,
    parse_hints,
    resolve,
    sample_digest,
    sample_offsets,
    settle_hint,
)

BASE = Fingerprint(size=100, mtime_ns=5, header_digest="aa", sample_digest="bb")
CACHED = msgspec.structs.replace(BASE, blob="c" * 64)


def with_(base, **changes):
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 101},
        {"mtime_ns": 6},
        {"header_digest": "ab"},
        {"sample_digest": "bc"},
        {"blob": "c" * 64},
    ],
)
def test_each_fact_decides_the_identity(changes):
    """Another size, mtime, header, sample or blob is another identity."""
    assert identity(with_(BASE, **changes)) != identity(BASE)


def test_the_identity_is_stable_and_short():
    """Keys of stores on disk are made of it: this literal (printf ... | b2sum -l 128) changes only with the store's format."""
    assert identity(BASE) == "4c8df82c59adb53d357a0cce4a87548e"
    assert identity(BASE, "1f") != identity(BASE)
    assert len(identity(BASE, "1f")) == 32


def test_in_an_hf_cache_the_blob_stands_for_the_mtime():
    """A second download of the same blob, at another time, is the same source."""
    assert identity(with_(CACHED, mtime_ns=6)) == identity(CACHED)
    assert identity(with_(CACHED, blob="d" * 64)) != identity(CACHED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"size": 101, "mtime_ns": 6}, "size was 100, is 101"),
        ({"mtime_ns": 6}, "mtime_ns was 5, is 6"),
        ({"header_digest": "ab"}, "header digest was aa, is ab"),
        ({"sample_digest": "bc", "mtime_ns": 6}, "digest of the sampled pages was bb, is bc"),
        ({"blob": "c"}, "blob was none, is c"),
    ],
)
def test_the_difference_is_said_in_one_sentence(changes, said):
    """The most telling fact that differs, with both values."""
    assert difference(BASE, with_(BASE, **changes)) == said


@pytest.mark.parametrize("data_start", [0, 8, 4096, 60_001])
@pytest.mark.parametrize(
    "data_bytes", [0, 1, 4095, 4096, 4097, 65_536, 65_537, 70_000, 10**6, 7 * 10**9]
)
def test_samples_stay_inside_the_data_and_cover_its_ends(data_start, data_bytes):
    """First and last byte are sampled, no page overlaps another, at most 16 pages, small data whole."""
    size = data_start + data_bytes
    offsets = sample_offsets(size, data_start)
    pages = [(o, min(o + SAMPLE_BYTES, size)) for o in offsets]
    assert all(data_start <= begin < end <= size for begin, end in pages)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(pages))
    assert len(pages) <= 16
    if data_bytes:
        assert (pages[0][0], pages[-1][1]) == (data_start, size)
    if data_bytes <= 16 * SAMPLE_BYTES:
        assert sum(end - begin for begin, end in pages) == data_bytes
    else:
        assert len(pages) == 16
    assert offsets == sample_offsets(size, data_start)


def test_samples_are_spread_over_the_whole_file():
    """No stretch longer than two fourteenths of the data is without a sample."""
    offsets = sample_offsets(7 * 10**9, 60_000)
    assert max(b - a for a, b in itertools.pairwise(offsets)) <= 10**9


def test_digests_depend_on_every_byte_and_on_nothing_else():
    """Pages are digested in order; how they are cut does not matter."""
    assert sample_digest([b"ab", b"c"]) == sample_digest([b"abc"]) != sample_digest([b"abd"])
    assert header_digest(b"x") != header_digest(b"y")
    assert len(header_digest(b"")) == 32


def test_adopted_identities_lead_to_the_oldest():
    """What verify --adopt proved equal is followed, chains included; a ring ends."""
    assert resolve("a", {}) == "a"
    assert resolve("a", {"a": "b", "b": "c"}) == "c"
    assert resolve("a", {"a": "b", "b": "a"}) == "b"


SEEN = Hint(dev=1, ino=2, size=100, mtime_ns=5, ctime_ns=0x77, identity="i")


def test_without_a_record_there_is_no_salt():
    """A first mount takes the source for what it seems."""
    assert settle_hint(None, SEEN) == SEEN


def test_an_untouched_inode_keeps_its_salt():
    """ctime as recorded: the shard is what it was, salted or not, whatever number the device has now."""
    assert settle_hint(with_(SEEN, dev=9), SEEN).salt == ""
    assert settle_hint(with_(SEEN, dev=9, salt="ab"), SEEN) == with_(SEEN, salt="ab")


def test_a_moved_ctime_on_the_same_inode_is_a_miss():
    """A same-size rewrite with its mtime put back that the samples missed: made again, then stable."""
    settled = settle_hint(with_(SEEN, ctime_ns=0x66), SEEN)
    assert settled == with_(SEEN, salt="77")
    assert settle_hint(settled, SEEN) == settled


def test_a_copy_is_taken_for_what_it_seems():
    """Another inode with the same identity is a copy with its dates kept."""
    assert settle_hint(with_(SEEN, ino=3, ctime_ns=0x66), SEEN).salt == ""


def test_a_copy_of_a_doubtful_shard_is_doubtful():
    """If the recorded one was salted, the copy may hold either content: it is made again."""
    assert settle_hint(with_(SEEN, ino=3, ctime_ns=0x66, salt="66"), SEEN).salt == "77"


def test_another_identity_needs_no_salt():
    """A change that the identity shows is a miss already."""
    assert settle_hint(with_(SEEN, ctime_ns=0x66, identity="j", salt="66"), SEEN).salt == ""


def test_fingerprints_and_hints_survive_encoding():
    """parse(encode(x)) is x; names that cannot be encoded are left out."""
    assert parse_fingerprint(encode_fingerprint(CACHED)) == CACHED
    hints = {"transformer/a.safetensors": with_(SEEN, salt="1f"), "bad\udcff": SEEN}
    assert parse_hints(encode_hints(hints)) == {
        "transformer/a.safetensors": hints["transformer/a.safetensors"]
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"version":1}',
        b'{"version":2,"hints":{}}',
        b'{"version":2,"fingerprint":{}}',
    ],
)
def test_a_damaged_or_newer_record_counts_as_none(data):
    """A hint is never needed, so nothing about it is ever an error."""
    assert parse_hints(data) == {}
    assert parse_fingerprint(data) is None
