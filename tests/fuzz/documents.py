"""Hostile bytes for each target: good documents, and what an attacker makes of them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

from hypothesis import strategies as st

from fp8fs.core.fingerprint import Fingerprint, Hint, encode_fingerprint, encode_hints
from fp8fs.core.manifest import SCHEMA, Manifest, ManifestShard, ManifestSource, encode_manifest
from fp8fs.core.recipe import Recipe
from fp8fs.fuse.spec import Mounted, encode
from fp8fs.store.guard import encode_checked
from fp8fs.store.journal import encode_journal
from tests.storing import Toy

__all__ = ["GOOD", "HOSTILE", "documents"]

HEADER = {
    "__metadata__": {"format": "pt"},
    "model.layers.0.mlp.up_proj.weight": {
        "dtype": "BF16",
        "shape": [16, 32],
        "data_offsets": [0, 1024],
    },
    "model.norm.weight": {"dtype": "F32", "shape": [16], "data_offsets": [1024, 1088]},
}
INDEX = {
    "metadata": {"total_size": 1088},
    "weight_map": {
        "model.layers.0.mlp.up_proj.weight": "model.safetensors",
        "model.norm.weight": "model.safetensors",
    },
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
PIPELINE = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
HINT = Hint(1, 2, 3, 4, 5, "ab" * 16, "c0ffee")
FINGERPRINT = Fingerprint(1088, 10**18, "ab" * 16, "cd" * 16, "ef" * 32)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _manifest() -> bytes:
    shard = ManifestShard("model.safetensors", "", "ab" * 16, 4096, 2, ("model.safetensors",), "cd")
    source = ManifestSource("model.safetensors", "ab" * 16, 1088, 10**18)
    return encode_manifest(
        Manifest(
            schema=SCHEMA,
            name="tiny",
            version="1",
            plan_id="ab" * 16,
            quantizer="1",
            recipe=Recipe(),
            schemes={"": "per_channel"},
            dialects={"": "compressed-tensors"},
            bytes_source=1088,
            bytes_view=4096,
            shards=(shard,),
            sources=(source,),
        )
    )


def _journal() -> bytes:
    toy = Toy()
    return encode_journal(toy.spec, [toy.record(unit) for unit in range(5)])


GOOD: dict[str, list[bytes]] = {
    "header": [_json(HEADER)],
    "index": [_json(INDEX)],
    "config": [_json(CONFIG), json.dumps(CONFIG, indent=2).encode(), b"\xef\xbb\xbf{}"],
    "manifest": [_manifest()],
    "journal": [_journal()],
    "facts": [
        encode_hints({"model.safetensors": HINT}),
        encode_fingerprint(FINGERPRINT),
        encode_checked({"non_finite": {"x": 1}}),
        encode(Mounted(dst="/mnt", src="/src", live=True)),
        b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime - fuse.fp8fs /src ro,user_id=0\n",
    ],
    "text": [b"model.layers.0", "\u202e\u0000\x1b[2J\r\n\u2028".encode()],
    "checkpoint": [
        b"\n%%\n".join([_json(HEADER), _json(INDEX), _json(CONFIG)]),
        b"\n%%\n".join(
            [_json(HEADER), b"", _json({**CONFIG, "_class_name": "X"}), _json(PIPELINE)]
        ),
    ],
}
"""One or more documents of each target that it accepts."""

HOSTILE: list[object] = [
    *(-1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 1e308, 0.5),
    *(float("nan"), float("inf"), None, True, False, "", [], {}, [[]], {"": {}}),
    *(
        "..",
        "/",
        "/etc/passwd",
        "../../etc/passwd",
        "a/../../b",
        ".",
        "a\0b",
        "a\nb",
        "\x1b]0;x\x07",
    ),
    *("\ud800", "\u202egnp", "n" * 10_000, "BF16", "F8_E4M3", "__metadata__", "1" * 5000),
    *([2**32, 2**32], [2**62, 4], [-1, -1], [0] * 200, [0, 2**63], [10, 0], ["0", "4"], [1.0, 2.0]),
]
"""Values that decoders stumble over: huge and negative numbers, wrong kinds, names that lead elsewhere."""


def _replaced(value: object, draw: Callable[[st.SearchStrategy], object]) -> object:
    """The document with one node of it exchanged, doubled, nested or removed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        change = draw(st.sampled_from(["inside", "inside", "key", "drop", "add"]))
        if change == "inside":
            return {**value, key: _replaced(value[key], draw)}
        if change == "drop":
            return {k: v for k, v in value.items() if k != key}
        odd = draw(st.sampled_from([x for x in HOSTILE if isinstance(x, str)]))
        return {**({} if change == "key" else value), odd: value[key]}
    if isinstance(value, list) and value and draw(st.integers(0, 2)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _replaced(value[at], draw), *value[at + 1 :]]
    return draw(st.sampled_from(HOSTILE))


@st.composite
def _values(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """A good JSON document with nodes exchanged."""
    raw = draw(st.sampled_from(good))
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except ValueError:
        return raw
    for _ in range(draw(st.integers(1, 3))):
        value = _replaced(value, draw)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    return text.encode("utf-8", "surrogatepass")


@st.composite
def _texts(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """A good document with bytes changed, repeated, cut out, and brackets piled up."""
    raw = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        to = draw(st.integers(at, min(len(raw), at + 60)))
        part = draw(
            st.sampled_from([b"", raw[at:to] * 2, b"[" * 3000, b'{"a":' * 3000, b"\0", b"\\ud800"])
            | st.sampled_from([b"\n%%\n", b"9" * 400, b"-", b"1e999", b'"', b"\\", b"\xff", b"}"])
            | st.binary(max_size=6)
        )
        raw = raw[:at] + part + raw[to:]
    return raw


@st.composite
def _checksummed(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """Bytes whose checksum is right: an attacker, or a bug of an older version, can compute it too."""
    body = draw(_values(good) | _texts(good))
    if draw(st.booleans()):
        return b'{"crc32":"%08x","value":%b}\n' % (zlib.crc32(body), body)
    lines = [body.replace(b"\n", b" "), b'{"barrier":99999}', b'[4,0.0,"","",""]', b"[9,1e999]"]
    return b"".join(b"%08x %b\n" % (zlib.crc32(line), line) for line in lines)


def documents(target: str) -> st.SearchStrategy[bytes]:
    """Bytes for a target: mostly near what it accepts."""
    good = GOOD[target]
    if target == "checkpoint":
        parts = [documents("header"), documents("index"), documents("config"), documents("config")]
        kept = [st.just(part) for part in (_json(HEADER), b"", _json(CONFIG), b"")]
        mixed = [st.one_of(a, b) for a, b in zip(kept, parts, strict=True)]
        return st.tuples(*mixed).map(b"\n%%\n".join) | _texts(good)
    near = [_values(good), _texts(good), st.sampled_from(good)]
    if target in ("journal", "facts", "manifest"):
        near.append(_checksummed(good))
    return st.one_of(*near, st.binary(max_size=200))
