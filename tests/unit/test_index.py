"""core/index.py: what an index may say, and how it is written."""

from __future__ import annotations

import json

import pytest

from fp8fs.core.index import encode_index, parse_index
from fp8fs.errors import SourceInvalidError

FILE = "model.safetensors.index.json"


def test_an_index_keeps_its_order_and_its_metadata():
    """Names, files and every metadata key come out as they went in."""
    index = parse_index(
        b'{"metadata":{"total_size":12,"made_by":"x"},"weight_map":{"b":"2.safetensors","a":"1.safetensors"}}',
        FILE,
    )
    assert list(index.weight_map.items()) == [("b", "2.safetensors"), ("a", "1.safetensors")]
    assert index.metadata == {"total_size": 12, "made_by": "x"}


@pytest.mark.parametrize("text", [b'{"weight_map":{}}', b'{"metadata":null,"weight_map":{}}'])
def test_metadata_may_be_missing(text):
    """Some writers leave it out."""
    assert parse_index(text, FILE).metadata == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "has no weight_map object"),
        (b'{"weight_map":[]}', "has no weight_map object"),
        (b'{"metadata":[],"weight_map":{}}', "metadata is not an object"),
        (b'{"metadata":{"n":"\\ud800"},"weight_map":{}}', "cannot be written again"),
        (b'{"weight_map":{"a":1}}', 'the file of tensor "a" is not a string'),
        (b'{"weight_map":{"a":""}}', "not a plain file name"),
        (b'{"weight_map":{"a":".."}}', "not a plain file name"),
        (b'{"weight_map":{"a":"../x.safetensors"}}', 'names "../x.safetensors", which is not'),
        (b'{"weight_map":{"a":"/etc/passwd"}}', "not a plain file name"),
        (b'{"weight_map":{"a":"x\\u0000.safetensors"}}', "not a plain file name"),
        (b'{"weight_map":{"\\ud800":"x"}}', "not valid text"),
    ],
)
def test_a_wrong_index_is_refused_by_name(text, said):
    """One sentence, with the index's name in front."""
    with pytest.raises(SourceInvalidError) as caught:
        parse_index(text, FILE)
    assert caught.value.what.startswith(f"{FILE}: ")
    assert said in caught.value.what


def test_the_written_index_is_sorted_and_has_its_own_total():
    """weight_map by tensor name, total_size replaced, other metadata kept, as text a person can read."""
    data = encode_index({"total_size": 1, "made_by": "größe"}, {"b": "2", "a": "1"}, 99)
    assert data.decode() == (
        '{\n  "metadata": {\n    "total_size": 99,\n    "made_by": "größe"\n  },\n'
        '  "weight_map": {\n    "a": "1",\n    "b": "2"\n  }\n}\n'
    )
    assert json.loads(encode_index({}, {}, 0)) == {"metadata": {"total_size": 0}, "weight_map": {}}


def test_a_written_index_parses_back():
    """parse(encode(x)) is x, sorted."""
    index = parse_index(encode_index({"k": [1, "a"]}, {"t\n": "f.safetensors"}, 5), FILE)
    assert index.weight_map == {"t\n": "f.safetensors"}
    assert index.metadata == {"k": [1, "a"], "total_size": 5}
