"""The journal's lines and the digests: literal bytes in and out, and nothing in a journal makes reading it fail."""

from __future__ import annotations

import json
import zlib

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fp8fs.core.digest import TileDigester, bytes_digest, combine, shard_digest, tile_digest
from fp8fs.store.journal import barrier_line, encode_journal, scan_journal, unit_line
from fp8fs.store.types import ShardSpec, UnitRecord

A, B = "a" * 32, "0123456789abcdef" * 2

records = st.builds(
    UnitRecord,
    unit=st.integers(0, 9),
    amax=st.floats(0, 2.0**100, width=32),
    input_digest=st.just(A),
    data_digest=st.just(B),
    scale_digest=st.sampled_from(["", A]),
)


def line(body: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(body), body)


def test_unit_line_is_checksum_space_json() -> None:
    """The line of a unit is spelled as docs/FORMAT.md says."""
    body = b'[3,0.5,"%b","%b",""]' % (A.encode(), B.encode())
    assert unit_line(UnitRecord(3, 0.5, A, B, "")) == line(body)


def test_a_whole_journal_is_covered_by_its_barrier() -> None:
    """What encode_journal writes is read back as records that all stand before a barrier."""
    spec = ShardSpec("ab", 4096, b"x" * 4096, 10, 0, 0, 0, 0)
    wanted = [UnitRecord(unit, float(unit), A, B, A) for unit in range(4)]
    data = encode_journal(spec, wanted)
    scan = scan_journal(data, 0, 10)
    assert [record for _, record in scan.units] == wanted
    assert all(where < scan.covered for where, _ in scan.units)
    assert (scan.consumed, scan.bad_lines) == (len(data), 0)
    head = json.loads(data.split(b"\n")[0][9:])
    assert head == {
        "journal": 1,
        "object": "ab",
        "size": 4096,
        "preamble": bytes_digest(b"x" * 4096),
    }


@given(st.lists(records, max_size=6), st.data())
def test_a_torn_tail_costs_only_itself(wanted: list[UnitRecord], data: st.DataObject) -> None:
    """A journal cut anywhere, then appended to, gives the records before the cut and those after it."""
    whole = b"".join(b"\n" + unit_line(record) for record in wanted)
    cut = data.draw(st.integers(0, len(whole)))
    kept = [r for i, r in enumerate(wanted) if cut >= whole_length(wanted[: i + 1])]
    scan = scan_journal(whole[:cut], 0, 10)
    assert [record for _, record in scan.units] == kept
    later = UnitRecord(9, 1.0, B, A, "")
    scan = scan_journal(whole[:cut] + b"\n" + unit_line(later), 0, 10)
    # A line whose text was whole and only its newline was cut counts again.
    found = [record for _, record in scan.units]
    assert found[-1] == later
    assert found[:-1] in (kept, wanted[: len(kept) + 1])


def whole_length(wanted: list[UnitRecord]) -> int:
    return sum(1 + len(unit_line(record)) for record in wanted)


@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_a_flipped_bit_never_changes_a_record(
    wanted: list[UnitRecord], data: st.DataObject
) -> None:
    """One flipped bit loses records at most; it never makes one that was not written."""
    whole = bytearray(b"".join(b"\n" + unit_line(record) for record in wanted))
    where = data.draw(st.integers(0, len(whole) - 1))
    whole[where] ^= 1 << data.draw(st.integers(0, 7))
    for _, record in scan_journal(bytes(whole), 0, 10).units:
        assert record in wanted


hostile = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=40).map(line),
    st.sampled_from(
        [
            line(b"[" * 5000),
            line(b'{"barrier":' + b"[" * 5000),
            line(b'{"barrier":-1}'),
            line(b'{"barrier":1e400}'),
            line(b'{"barrier":99999999999999999999999}'),
            line(b'[1e99,0.5,"x","y",""]'),
            line(b'[-1,0.5,"%b","%b",""]' % (A.encode(), A.encode())),
            line(b'[11,0.5,"%b","%b",""]' % (A.encode(), A.encode())),
            line(b'[1,null,"%b","%b",""]' % (A.encode(), A.encode())),
            line(b'[1,0.5,"%b","../../etc","%b"]' % (A.encode(), A.encode())),
            line(b"\xff\xfe"),
            b"00000000 \n",
            b"0000000000000000\n",
            b"-0000001 x\n",
        ]
    ),
)


@given(st.lists(hostile, max_size=8))
def test_nothing_in_a_journal_makes_it_fail(parts: list[bytes]) -> None:
    """Hostile lines are no records: no exception, no unit out of range, no barrier ahead of itself."""
    data = b"".join(parts)
    scan = scan_journal(data, 0, 10)
    assert all(0 <= record.unit < 10 for _, record in scan.units)
    assert 0 <= scan.covered <= scan.consumed <= len(data)


def test_a_barrier_covers_only_what_stands_before_it() -> None:
    """A barrier that claims bytes behind itself counts as none."""
    assert scan_journal(barrier_line(0) + barrier_line(5), 0, 1).covered == 5
    assert scan_journal(barrier_line(10_000), 0, 1).covered == 0


def test_the_last_line_without_newline_waits() -> None:
    """What somebody may still be writing is not consumed."""
    text = unit_line(UnitRecord(0, 0.0, A, B, ""))
    scan = scan_journal(text + text[:-1], 100, 1)
    assert (len(scan.units), scan.consumed, scan.units[0][0]) == (1, len(text), 100)


def test_digests_are_hashes_of_tile_hashes() -> None:
    """Unit and shard digests equal plain xxh3-128 over the digests' raw bytes, however they are fed."""
    raw = [xxhash.xxh3_128(tile).digest() for tile in (b"one", b"two")]
    unit = xxhash.xxh3_128(raw[0] + raw[1]).hexdigest()
    digester = TileDigester()
    digester.add(b"one")
    digester.add_digest(tile_digest(memoryview(b"two")))
    assert digester.hexdigest() == combine(iter(raw)) == unit
    assert bytes_digest(b"") == ""
    assert bytes_digest(b"s") == xxhash.xxh3_128(b"s").hexdigest()
    joined = bytes.fromhex(A) + bytes.fromhex(unit) + bytes.fromhex(B) + bytes.fromhex(unit)
    assert shard_digest(A, [(unit, B), (unit, "")]) == xxhash.xxh3_128(joined).hexdigest()
