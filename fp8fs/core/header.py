"""The preamble of a safetensors file: bytes to a typed header and back, with every format check.

The format: 8 bytes little-endian length N, N bytes of JSON (padded with spaces), then the data.
Each entry is ``name: {"dtype", "shape", "data_offsets": [begin, end]}`` with offsets relative to
the data section; entries cover the data section without gap or overlap.
Source: the format section of safetensors 0.8.0's README and its ``validate``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import msgspec

from fp8fs.core.dtypes import DTYPES, element_count, nbytes
from fp8fs.core.text import brief, is_text, quoted
from fp8fs.errors import SourceInvalidError

__all__ = [
    "MAX_HEADER_BYTES",
    "Header",
    "TensorEntry",
    "encode_preamble",
    "header_length",
    "parse_header",
]

MAX_HEADER_BYTES = 100_000_000
"""The reader's own limit in safetensors; a larger claim is refused before anything is read."""

_METADATA = "__metadata__"
_MAX_ELEMENTS = 2**63 - 1
_MAX_TENSORS = 250_000
"""More than the largest models have in all their shards together; bounds what a header costs to decode."""
_MAX_METADATA = 100_000
"""Entries of the metadata; the largest known have hundreds."""
_MAX_EXACT = 600_000
"""JSON values of a header that is decoded one by one, because plain decoding found something odd: about a second."""
_STRINGS_OF_A_TENSOR = 5  # its name, three keys, its dtype
_COMMAS_OF_A_TENSOR = 12  # as many as a tensor of nine dimensions has
_MAX_RANK = 64
"""More dimensions than any reader can hold; bounds the work that a hostile shape can cause."""
_UNDECODABLE = (ValueError, RecursionError, msgspec.MsgspecError)
"""What the JSON decoders raise for damaged, absurd or too deeply nested text."""


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor as the header states it. ``data_offsets`` are bytes relative to the data section."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class Header(msgspec.Struct, frozen=True):
    """A checked header. ``tensors`` is in the order of the offsets; ``preamble_bytes`` is 8 + N.

    A tensor's bytes are at file offset ``preamble_bytes + data_offsets[0]``.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    preamble_bytes: int

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section."""
        return max((t.data_offsets[1] for t in self.tensors.values()), default=0)


_TENSORS = msgspec.json.Decoder(dict[str, TensorEntry])
_ANY = json.JSONDecoder()
_BLANK = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(
    r'"([^"]*)"([ \t\n\r]*:[ \t\n\r]*\{)?'
)  # of a text without backslashes, one after the other


def header_length(first: bytes, file_bytes: int, file: str) -> int:
    """The N of a safetensors file, checked against MAX_HEADER_BYTES and the file's size.

    *first*: 8 bytes of the file or more; one more tells a file of zeros from a header before 100 MB of it are read.
    Raises: SourceInvalidError naming *file*.
    """
    if len(first) < 8 or file_bytes < 8:
        raise SourceInvalidError(
            f"{file}: {file_bytes} bytes are too few for a safetensors file, which starts with 8 bytes of length",
            file=file,
        )
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise SourceInvalidError(
            f"{file}: claims a header of {length} bytes, the limit is {MAX_HEADER_BYTES}", file=file
        )
    if 8 + length > file_bytes:
        raise SourceInvalidError(
            f"{file}: the header ends at byte {8 + length}, file has {file_bytes}", file=file
        )
    if length and first[8:9] not in (b"", b"{"):
        raise SourceInvalidError(f"{file}: the header does not start with a brace", file=file)
    return length


def parse_header(preamble: bytes, file_bytes: int, file: str) -> Header:
    """A header whose every statement has been checked; tensors in the order of their data.

    *preamble* is the first 8 + N bytes of the file, *file_bytes* its whole size.
    Raises: SourceInvalidError naming *file*, the tensor, what was expected and found.
    Cost:   about 1 microsecond for each tensor where names need no escapes.
    """
    length = header_length(preamble, file_bytes, file)
    if len(preamble) != 8 + length:
        raise SourceInvalidError(
            f"{file}: the preamble has {8 + length} bytes, {len(preamble)} were read", file=file
        )
    try:
        text = str(memoryview(preamble)[8:], "utf-8")
    except UnicodeDecodeError as err:
        raise SourceInvalidError(
            f"{file}: the header is not UTF-8 at byte {8 + err.start}", file=file
        ) from err
    if not text.startswith("{"):
        raise SourceInvalidError(f"{file}: the header does not start with a brace", file=file)
    _check_cost(text, file)
    decoded = _decode_plain(text, file) or _decode_exact(text, file)
    tensors = dict(sorted(decoded[0].items(), key=lambda item: item[1].data_offsets))
    _check_layout(tensors, len(preamble), file_bytes, file)
    return Header(tensors, decoded[1], len(preamble))


def _check_cost(text: str, file: str) -> None:
    """Refuse, before anything is decoded, a text that says more than a header has to say."""
    count = text.count('"data_offsets"')
    if count > _MAX_TENSORS:
        raise SourceInvalidError(
            f"{file}: the header describes {count} tensors, the limit is {_MAX_TENSORS}", file=file
        )
    strings = (text.count('"') - text.count('\\"')) // 2 - _STRINGS_OF_A_TENSOR * count
    if strings > 2 * _MAX_METADATA:
        raise SourceInvalidError(
            f"{file}: the header holds {strings} strings beside its tensors, the limit is {2 * _MAX_METADATA}",
            file=file,
        )


def _decode_plain(text: str, file: str) -> tuple[dict[str, TensorEntry], dict[str, str]] | None:
    """Header text as nearly every writer makes it, decoded in C; None if it needs a closer look.

    Sound against duplicate keys without looking at them one by one: without a backslash, a key can be
    spelled in one way only, each entry has each of its three keys at least once, and so equal counts
    leave no room for a second one. Names that imitate keys only lead to the exact way.
    """
    metadata: dict[str, str] = {}
    if (where := text.find(f'"{_METADATA}"')) >= 0:
        if text[:where].strip(_BLANK) != "{":
            return None
        taken = _take_metadata(text, where + len(_METADATA) + 2)
        if taken is None:
            return None
        metadata, text = taken
    count = text.count('"data_offsets"')
    if "\\" in text or text.count(",") > _COMMAS_OF_A_TENSOR * count + _MAX_EXACT:
        return None
    try:
        tensors = _TENSORS.decode(text)
    except _UNDECODABLE:
        return None
    keys = ('"dtype"', '"shape"', '"data_offsets"')
    if _METADATA in tensors or any(text.count(key) != len(tensors) for key in keys):
        seen: set[str] = set()
        for found in _STRING.finditer(text):  # the first tensor named twice, where one is
            if found[2]:
                _see(found[1], seen, file)
        return None
    return tensors, metadata


def _take_metadata(text: str, position: int) -> tuple[dict[str, str], str] | None:
    """The strings of the object behind a colon at *position*, and the header text without it; None if it is anything else.

    Decoded string by string, so that a hostile text costs no more than as many of them as ``_check_cost`` allows.
    """
    metadata: dict[str, str] = {}
    position = _skip(text, position)
    if text[position : position + 1] != ":":
        return None
    position = _skip(text, position + 1)
    if text[position : position + 1] != "{":
        return None
    position = _skip(text, position + 1)
    while text[position : position + 1] == '"':
        try:
            key, position = _ANY.raw_decode(text, position)
            position = _skip(text, position)
            start = _skip(text, position + 1)
            if text[position : position + 1] != ":" or text[start : start + 1] != '"':
                return None
            value, position = _ANY.raw_decode(text, start)
        except ValueError:
            return None
        if not (is_text(key) and is_text(value)):
            return None
        metadata[key] = value
        position = _skip(text, position)
        if text[position : position + 1] != ",":
            break
        position = _skip(text, position + 1)
        if text[position : position + 1] != '"':
            return None
    if text[position : position + 1] != "}":
        return None
    rest = text[_skip(text, position + 1) :]
    if rest.startswith(",") and rest[_skip(rest, 1) :][:1] == '"':
        return metadata, "{" + rest[1:]
    return (metadata, "{" + rest) if rest.startswith("}") else None


def _skip(text: str, position: int) -> int:
    """The first position from *position* on that is no white space."""
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _see(name: str, seen: set[str], file: str) -> None:
    """Raises: SourceInvalidError for a name that was seen before."""
    if name in seen:
        raise SourceInvalidError(
            f"{file}: the header names {quoted(name)} twice", file=file, tensor=brief(name)
        )
    seen.add(name)


def _decode_exact(text: str, file: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Any header text, each key seen, each failure named."""
    values = text.count(",") + text.count("[") + text.count("{")
    if values > _MAX_EXACT:
        raise SourceInvalidError(
            f"{file}: the header is not in order, and with {values} values too long to say where",
            file=file,
        )
    try:
        pairs = _EXACT.decode(text)
    except _UNDECODABLE as err:
        raise SourceInvalidError(f"{file}: the header is not JSON: {err}", file=file) from err
    if not isinstance(pairs, _Pairs):
        raise SourceInvalidError(f"{file}: the header is not a JSON object", file=file)
    metadata: dict[str, str] = {}
    tensors: dict[str, TensorEntry] = {}
    seen: set[str] = set()
    for name, value in pairs:
        _see(name, seen, file)
        if name == _METADATA:
            metadata = _metadata(value, file)
        else:
            tensors[name] = _entry(name, value, file)
    return tensors, metadata


class _Pairs(list[tuple[str, object]]):
    """A JSON object with every key that was written, told apart from a JSON array."""


_EXACT = json.JSONDecoder(object_pairs_hook=_Pairs)


def _metadata(value: object, file: str) -> dict[str, str]:
    """The metadata of the exact way; null counts as none."""
    if value is None:
        return {}
    if not isinstance(value, _Pairs):
        raise SourceInvalidError(f"{file}: {_METADATA} is not an object", file=file)
    metadata: dict[str, str] = {}
    for key, text in value:
        if not isinstance(text, str) or not (is_text(key) and is_text(text)):
            raise SourceInvalidError(
                f"{file}: {_METADATA} {quoted(key)} is not a string of valid text", file=file
            )
        metadata[key] = text
    return metadata


def _entry(name: str, value: object, file: str) -> TensorEntry:
    """One tensor of the exact way."""
    if not is_text(name):
        raise SourceInvalidError(f"{file}: tensor name {quoted(name)} is not valid text", file=file)
    if not isinstance(value, _Pairs):
        raise SourceInvalidError(
            f"{file}: tensor {quoted(name)} is not an object", file=file, tensor=brief(name)
        )
    fields = dict(value)
    if len(fields) != len(value):
        raise SourceInvalidError(
            f"{file}: tensor {quoted(name)} states a key twice", file=file, tensor=brief(name)
        )
    try:
        if any(isinstance(inner, _Pairs) for inner in fields.values()):
            raise ValueError("an object where a list or a string belongs")
        return msgspec.convert(fields, TensorEntry)
    except _UNDECODABLE as err:
        raise SourceInvalidError(
            f"{file}: tensor {quoted(name)} is not described as dtype, shape and data_offsets: {err}",
            file=file,
            tensor=brief(name),
        ) from err


def _check_layout(
    tensors: Mapping[str, TensorEntry], data_start: int, file_bytes: int, file: str
) -> None:
    """Every tensor's length follows from its shape, and together they cover the data section exactly."""
    lengths: dict[tuple[str, tuple[int, ...]], int] = {}
    expected = 0
    for name, entry in tensors.items():
        begin, end = entry.data_offsets
        kind = (entry.dtype, entry.shape)
        length = lengths.get(kind)
        if length is None:
            length = lengths[kind] = _tensor_bytes(name, entry, file)
        if end - begin != length:
            raise SourceInvalidError(
                f"{file}: tensor {quoted(name)} has {end - begin} bytes, {entry.dtype}{_shape(entry)} needs {length}",
                file=file,
                tensor=brief(name),
            )
        if begin != expected:
            trouble = (
                "overlaps the one before it, which ends" if begin < expected else "leaves a gap"
            )
            raise SourceInvalidError(
                f"{file}: tensor {quoted(name)} begins at data byte {begin} and {trouble} at data byte {expected}",
                file=file,
                tensor=brief(name),
            )
        expected = end
    end_of_data = data_start + expected
    if end_of_data < file_bytes:
        raise SourceInvalidError(
            f"{file}: the tensors end at byte {end_of_data}, file has {file_bytes}", file=file
        )
    if end_of_data > file_bytes:
        cut = next(n for n, t in tensors.items() if data_start + t.data_offsets[1] > file_bytes)
        cut_end = data_start + tensors[cut].data_offsets[1]
        raise SourceInvalidError(
            f"{file}: tensor {quoted(cut)} ends at byte {cut_end}, file has {file_bytes}",
            hint="the file is cut short: download or copy it again",
            file=file,
            tensor=brief(cut),
        )


def _shape(entry: TensorEntry) -> str:
    shown = str(list(entry.shape[:_MAX_RANK]))
    return brief(shown if len(entry.shape) <= _MAX_RANK else f"{shown} and more")


def _tensor_bytes(name: str, entry: TensorEntry, file: str) -> int:
    """Bytes of a tensor by its dtype and shape, both checked."""
    described = f"{file}: tensor {quoted(name)}"
    if entry.dtype not in DTYPES:
        raise SourceInvalidError(
            f"{described} has unknown dtype {quoted(entry.dtype)}", file=file, tensor=brief(name)
        )
    if len(entry.shape) > _MAX_RANK or any(not 0 <= n <= _MAX_ELEMENTS for n in entry.shape):
        raise SourceInvalidError(
            f"{described} has impossible shape {_shape(entry)}", file=file, tensor=brief(name)
        )
    if element_count(entry.shape) > _MAX_ELEMENTS:
        raise SourceInvalidError(
            f"{described} has shape {_shape(entry)}, more elements than 63 bits count",
            file=file,
            tensor=brief(name),
        )
    try:
        return nbytes(entry.dtype, entry.shape)
    except ValueError as err:
        raise SourceInvalidError(
            f"{described}: {brief(str(err))}", file=file, tensor=brief(name)
        ) from err


def encode_preamble(
    entries: Iterable[tuple[str, str, tuple[int, ...], int, int]],
    metadata: Mapping[str, str],
    *,
    data_align: int = 4096,
) -> bytes:
    """Length, JSON and padding, so that the data section starts at a multiple of *data_align*.

    *entries*: (name, dtype, shape, begin, end), written in the given order after ``__metadata__``.
    Raises: SourceInvalidError if no reader would accept so long a header; ValueError for a name given twice.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)}
    count = 1
    for name, dtype, shape, begin, end in entries:
        header[name] = TensorEntry(dtype, shape, (begin, end))
        count += 1
    if len(header) != count:
        raise ValueError("a tensor name is given twice")
    text = msgspec.json.encode(header)
    length = len(text) + -(8 + len(text)) % data_align
    if length > MAX_HEADER_BYTES:
        raise SourceInvalidError(
            f"a shard with {count - 1} tensors would need a header of {length} bytes, readers accept {MAX_HEADER_BYTES}",
            hint="split the shard into several",
        )
    return length.to_bytes(8, "little") + text.ljust(length)
