"""core/header.py against plain oracles: what is encoded is what safetensors reads, and hostile bytes never crash."""

from __future__ import annotations

import json
import struct

import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from fp8fs.core.header import encode_preamble, parse_header
from fp8fs.errors import SourceInvalidError

BYTES_OF = {"BOOL": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8, "F64": 8, "F8_E4M3": 1}

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Tensors one behind the other, as a correct writer lays them out."""
    entries, end = [], 0
    for name in draw(st.lists(names, unique=True, max_size=8)):
        dtype, shape = draw(st.sampled_from(sorted(BYTES_OF))), draw(shapes)
        length = BYTES_OF[dtype]
        for size in shape:
            length *= size
        entries.append((name, dtype, shape, end, end + length))
        end += length
    return entries


@given(layouts(), st.dictionaries(names, names, max_size=3))
def test_encoded_preambles_parse_back_and_satisfy_safetensors(entries, metadata):
    """parse(encode(x)) is x, and the reference reader finds the same names, dtypes and shapes."""
    preamble = encode_preamble(entries, metadata)
    size = entries[-1][4] if entries else 0
    header = parse_header(preamble, len(preamble) + size, "f")
    assert header.metadata == metadata
    found = [(n, t.dtype, t.shape, *t.data_offsets) for n, t in header.tensors.items()]
    # Empty tensors share an offset with their neighbour, so among equals only membership is defined.
    assert sorted(found) == sorted(entries)
    assert [f[3:] for f in found] == sorted(e[3:] for e in entries)
    reference = {n: t for n, t in safetensors.deserialize(preamble + bytes(size))}  # noqa: C416
    assert {n: (t["dtype"], tuple(t["shape"])) for n, t in reference.items()} == {
        e[0]: (e[1], e[2]) for e in entries
    }


def reference_accepts(whole: bytes) -> bool:
    try:
        safetensors.deserialize(whole)
    except SafetensorError:
        return False
    return True


@given(layouts(), st.data())
def test_what_we_accept_the_reference_reader_accepts(entries, data):
    """One value, one byte or the end of a good file is changed: an error of ours, or a file that safetensors reads."""
    header: dict[str, object] = {
        n: {"dtype": d, "shape": list(s), "data_offsets": [b, e]} for n, d, s, b, e in entries
    }
    size = entries[-1][4] if entries else 0
    if entries and data.draw(st.booleans()):
        name = data.draw(st.sampled_from([e[0] for e in entries]))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        values = (
            st.none()
            | st.sampled_from(["U8", "F64", "X"])
            | st.lists(st.integers(-2, 40), max_size=3)
        )
        header[name][field] = data.draw(values)  # type: ignore[index]
    text = bytearray(json.dumps(header).encode())
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.integers(0, 255))
    size = max(0, size + data.draw(st.sampled_from([0, 0, 0, -1, 1])))
    preamble = struct.pack("<Q", len(text)) + bytes(text)
    try:
        parse_header(preamble, len(preamble) + size, "f")
    except SourceInvalidError:
        return
    assert reference_accepts(preamble + bytes(size))


@given(st.binary(max_size=300), st.integers(0, 400))
def test_arbitrary_bytes_give_a_header_or_one_kind_of_error(noise, file_bytes):
    """Nothing but SourceInvalidError ever comes out."""
    for preamble in (
        noise,
        struct.pack("<Q", len(noise)) + noise,
        struct.pack("<Q", len(noise) + 1) + b"{" + noise,
    ):
        try:
            parse_header(preamble, file_bytes, "f")
        except SourceInvalidError:
            continue
