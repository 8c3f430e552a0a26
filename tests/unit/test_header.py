"""core/header.py: what is accepted, what is refused and in which words, and what is written."""

from __future__ import annotations

import json
import struct

import pytest

from fp8fs.core.header import (
    MAX_HEADER_BYTES,
    TensorEntry,
    encode_preamble,
    header_length,
    parse_header,
)
from fp8fs.errors import SourceInvalidError
from tests.builders import raw_header

FILE = "model.safetensors"


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def parse(header: object, data_bytes: int) -> object:
    preamble = raw_header(header)
    return parse_header(preamble, len(preamble) + data_bytes, FILE)


def refusal(header: object, data_bytes: int) -> str:
    with pytest.raises(SourceInvalidError) as caught:
        parse(header, data_bytes)
    assert caught.value.what.startswith(f"{FILE}: ")
    return caught.value.what


def test_literal_bytes_parse_to_the_header_they_state():
    """A file written by hand, byte for byte, gives its tensors, metadata and data start."""
    text = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}'
    )
    header = parse_header(struct.pack("<Q", len(text)) + text, 8 + len(text) + 12, FILE)
    assert header.tensors == {"w": TensorEntry("BF16", (2, 3), (0, 12))}
    assert header.metadata == {"format": "pt"}
    assert header.preamble_bytes == 8 + len(text)
    assert header.data_bytes == 12
    assert header.tensors["w"].nbytes == 12


def test_tensors_come_in_the_order_of_their_data():
    """The order of the JSON does not matter, that of the offsets does."""
    header = parse({"b": entry("U8", [4], 6, 10), "a": entry("U8", [6], 0, 6)}, 10)
    assert list(header.tensors) == ["a", "b"]


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "note": 'a "quoted" \\ word'}])
def test_metadata_may_be_absent_null_or_strings(metadata):
    """null and {} count as no metadata; strings are kept, escapes and all."""
    found = parse({"__metadata__": metadata, "a": entry("U8", [1], 0, 1)}, 1)
    assert found.metadata == (metadata or {})
    assert parse({"a": entry("U8", [1], 0, 1)}, 1).metadata == {}


def test_metadata_is_found_wherever_it_stands():
    """Metadata behind the tensors, or the only thing in the header, is read as well."""
    found = parse({"a": entry("U8", [1], 0, 1), "__metadata__": {"k": "v"}}, 1)
    assert (list(found.tensors), found.metadata) == (["a"], {"k": "v"})
    alone = parse(b'{ "__metadata__" : {"k":"v"} }', 0)
    assert (alone.tensors, alone.metadata) == ({}, {"k": "v"})


def test_scalars_empty_tensors_and_wide_types_are_fine():
    """0-dim, zero elements anywhere, F64, and sub-byte types that fill whole bytes."""
    header = parse(
        {
            "empty_first": entry("F32", [0, 7], 0, 0),
            "scalar": entry("F64", [], 0, 8),
            "empty_between": entry("I64", [3, 0], 8, 8),
            "packed": entry("F4", [2, 2], 8, 10),
            "empty_last": entry("BF16", [0], 10, 10),
        },
        10,
    )
    assert [t.nbytes for t in header.tensors.values()] == [0, 8, 0, 2, 0]


def test_escaped_and_foreign_names_are_read():
    """Names with escapes take the exact way and come out as the text they mean."""
    for name in (
        "a\nb",
        'quote"d',
        "back\\slash",
        "größe",
        "重み",
        "dtype",
        "shape",
        "data_offsets",
    ):
        assert list(parse({name: entry("U8", [1], 0, 1)}, 1).tensors) == [name]


def test_unknown_keys_of_an_entry_are_ignored():
    """The reference reader ignores them, so do we."""
    assert parse(
        {"a": {**entry("U8", [1], 0, 1), "extra": [1, {"deep": 2}]}}, 1
    ).tensors.keys() == {"a"}


GOOD = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
DUPLICATES = [
    b"{" + GOOD + b"," + GOOD + b"}",
    b'{"a":{},' + GOOD + b"}",
    b'{"a":null,' + GOOD + b"}",
    b"{" + GOOD + b',"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    b'{"a":{"dtype":"U8","shape":[1],"d\\u0061ta_offsets":[0,1]},' + GOOD + b"}",
    b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
    b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}',
    b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,9],"data_offsets":[0,1]}}',
    b'{"__metadata__":{},"__metadata__":{},' + GOOD + b"}",
    b'{"__metadata__":{},"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
]


@pytest.mark.parametrize("text", DUPLICATES)
def test_a_key_stated_twice_is_refused(text):
    """However it is spelled: two readers could take different ones."""
    assert any(w in refusal(text, 1) for w in ("twice", "is not an object", "is not described"))


@pytest.mark.parametrize(
    ("header", "data_bytes", "said"),
    [
        ({"a": entry("F33", [1], 0, 1)}, 1, 'tensor "a" has unknown dtype "F33"'),
        ({"a": entry("U8", [-1, -1], 0, 1)}, 1, 'tensor "a" has impossible shape [-1, -1]'),
        ({"a": entry("U8", [2**62, 4], 0, 1)}, 1, "more elements than 63 bits count"),
        ({"a": entry("U8", [2**63, 0], 0, 0)}, 0, "impossible shape"),
        ({"a": entry("U8", [1] * 65, 0, 1)}, 1, "impossible shape"),
        ({"a": entry("F4", [3], 0, 2)}, 2, "not whole bytes"),
        ({"a": entry("BF16", [2, 3], 0, 13)}, 13, 'tensor "a" has 13 bytes, BF16[2, 3] needs 12'),
        ({"a": entry("U8", [4], 4, 0)}, 4, 'tensor "a" has -4 bytes, U8[4] needs 4'),
        ({"a": entry("U8", [4], -4, 0)}, 4, "begins at data byte -4 and overlaps"),
        ({"a": entry("U8", [4], 1, 5)}, 5, 'tensor "a" begins at data byte 1 and leaves a gap at'),
        (
            {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)},
            7,
            'tensor "b" begins at data byte 3 and overlaps the one before it, which ends at data byte 4',
        ),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 2, 2)}, 4, "overlaps"),
        ([1, 2], 0, "does not start with a brace"),
        ({"a": [1]}, 0, 'tensor "a" is not an object'),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "is not described"),
        ({"a": entry("U8", [1.0], 0, 1)}, 1, "is not described"),
        ({"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, 1, "is not described"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, 1, "is not described"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1, "is not described"),
        ({"__metadata__": {"n": 1}}, 0, '__metadata__ "n" is not a string'),
        ({"__metadata__": ["a"]}, 0, "__metadata__ is not an object"),
        (b'{"a": ', 0, "is not JSON"),
        (b'{"a":' * 50_000, 0, "is not JSON"),
        (b"{} {}", 0, "is not JSON"),
        (b'{"\xff":1}', 0, "is not UTF-8 at byte 10"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "not valid text"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', 1, "not"),
        (b'{,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "is not JSON"),
        (b'{"__metadata__":{},,' + GOOD + b"}", 1, "is not JSON"),
        (b'{"__metadata__":{},}', 0, "is not JSON"),
        (b'{"__metadata__":{}' + GOOD + b"}", 1, "is not JSON"),
        (b'{"__metadata__" {}}', 0, "is not JSON"),
    ],
)
def test_a_wrong_header_is_refused_in_one_sentence(header, data_bytes, said):
    """Each kind of damage has its own words, with what was expected and what was found."""
    assert said in refusal(header, data_bytes)


def test_a_shard_cut_short_names_the_tensor_and_both_ends():
    """The message says where the tensor ends and where the file does."""
    preamble = raw_header({"x": entry("U8", [100], 0, 100)})
    with pytest.raises(SourceInvalidError) as caught:
        parse_header(preamble, len(preamble) + 88, FILE)
    end, has = len(preamble) + 100, len(preamble) + 88
    assert caught.value.what == f'{FILE}: tensor "x" ends at byte {end}, file has {has}'


def test_bytes_behind_the_last_tensor_are_refused():
    """Readers refuse such a file, so the planner must not build on it."""
    assert "the tensors end at byte" in refusal({"a": entry("U8", [1], 0, 1)}, 2)


def test_the_length_is_checked_before_anything_is_read():
    """A claim past the limit, or past the file, never leads to a read or an allocation."""
    with pytest.raises(
        SourceInvalidError, match="claims a header of 100000001 bytes, the limit is"
    ):
        header_length(struct.pack("<Q", MAX_HEADER_BYTES + 1), 10**12, FILE)
    with pytest.raises(SourceInvalidError, match="the header ends at byte 108, file has 107"):
        header_length(struct.pack("<Q", 100), 107, FILE)
    with pytest.raises(SourceInvalidError, match="5 bytes are too few"):
        header_length(b"12345", 5, FILE)
    assert header_length(struct.pack("<Q", 100), 108, FILE) == 100


def test_hostile_names_cannot_break_the_line():
    """A name with control characters, or a very long one, is shown escaped and cut."""
    said = refusal({"\x1b[31m\n" + "x" * 10_000: entry("F33", [1], 0, 1)}, 1)
    assert "\x1b" not in said
    assert "\n" not in said
    assert len(said) < 400


def test_the_preamble_is_readable_and_aligned():
    """encode_preamble: metadata first, entries in the given order, data at a multiple of 4096."""
    entries = [
        ("z", "F32", (2,), 0, 8),
        ('a"\n', "BF16", (), 8, 10),
        ("größe", "U8", (0, 3), 10, 10),
    ]
    preamble = encode_preamble(entries, {"format": "pt", "k": "v"})
    assert len(preamble) % 4096 == 0
    length = struct.unpack("<Q", preamble[:8])[0]
    assert length == len(preamble) - 8
    assert preamble[8:9] == b"{"
    shown = json.loads(preamble[8:])
    assert list(shown) == ["__metadata__", "z", 'a"\n', "größe"]
    assert shown["__metadata__"] == {"format": "pt", "k": "v"}
    assert shown["z"] == entry("F32", [2], 0, 8)
    assert set(preamble[8 + len(preamble[8:].rstrip(b" ")) :]) <= {0x20}


def test_the_preamble_honours_other_alignments():
    """data_align is the caller's choice."""
    assert len(encode_preamble([], {}, data_align=8)) % 8 == 0
    assert len(encode_preamble([], {}, data_align=8)) == 32


def test_a_name_given_twice_is_a_bug_of_the_caller():
    """The planner must never emit one, and cannot do so unnoticed."""
    with pytest.raises(ValueError, match="twice"):
        encode_preamble([("a", "U8", (1,), 0, 1), ("a", "U8", (1,), 1, 2)], {})


def test_a_header_that_no_reader_takes_is_refused():
    """Past the readers' limit, the plan is refused instead of a file that cannot be opened."""
    long_name = "x" * (MAX_HEADER_BYTES // 2)
    with pytest.raises(SourceInvalidError, match="readers accept 100000000"):
        encode_preamble([(long_name, "U8", (1,), 0, 1), (long_name + "y", "U8", (1,), 1, 2)], {})


def test_metadata_with_escapes_costs_the_tensors_nothing() -> None:
    """Escaped metadata, as trainers write it, is decoded, and names that look like structure stay names."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    metadata = {"config": json.dumps({"a": [1, '\u4e2d\\"']}), "\u00e9": "}{,:"}
    names = ["},", ":{", "},:{a", "dtype", "shape", "data_offsets", "a,b", "__metadata__ ", " "]
    for blank in ("", " ", "\n\t"):
        text = json.dumps(
            {"__metadata__": metadata, **dict.fromkeys(names, entry)},
            separators=("," + blank, blank + ":" + blank),
        )
        preamble = len(text.encode()).to_bytes(8, "little") + text.encode()
        header = parse_header(preamble, len(preamble), "f")
        assert dict(header.metadata) == metadata
        assert set(header.tensors) == set(names)
