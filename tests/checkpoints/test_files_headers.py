"""Headers as writers leave them: metadata of every kind, odd starts, odd orders, odd names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from safetensors import safe_open

import fp8fs
from tests import oracle
from tests.builders import Tensor, named, raw_header, write_bytes, write_json
from tests.checkpoints.looks import LLM, SCHEMES, check_files, layer, look

FILE = "model.safetensors"
A, B, NORM = layer(0), layer(1), "model.norm.weight"
TENSORS = named(A, NORM, B)

COMFY = json.dumps({"transformer": {"depth": list(range(3000))}, "quote": '"\\', "é": "重み"})
"""A whole config in one value, as ComfyUI's checkpoints have it."""

METADATA: dict[str, object] = {
    "none": ...,
    "null": None,
    "empty": {},
    "without format": {"made_by": "somebody"},
    "another format": {"format": "mlx"},
    "long values": {"config": COMFY, "format": "pt", "": ""},
}


def file_with(
    tensors: Mapping[str, Tensor],
    *,
    metadata: object = ...,
    header_first: bool = True,
    reverse: bool = False,
    pad: int = 8,
) -> bytes:
    """A safetensors file with the data in the order of *tensors*, and a header in any shape."""
    entries: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        begin, end = end, end + len(data)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    if reverse:
        entries = dict(reversed(entries.items()))
    stated = {} if metadata is ... else {"__metadata__": metadata}
    header = {**stated, **entries} if header_first else {**entries, **stated}
    return raw_header(header, b"".join(data for _, _, data in tensors.values()), pad=pad)


def write(src: Path, data: bytes) -> Path:
    write_json(src / "config.json", LLM)
    return write_bytes(src / FILE, data)


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_is_kept_and_says_pt(tmp_path: Path, kind: str) -> None:
    """Every key of the source's, whatever it holds, and the format that PyTorch readers ask for."""
    given = METADATA[kind]
    write(tmp_path, file_with(TENSORS, metadata=given))
    shown = look(tmp_path).header(FILE)["__metadata__"]
    assert shown == {**(given if isinstance(given, dict) else {}), "format": "pt"}


def odd_start(length: int) -> Callable[[], bytes]:
    """A file whose data starts *length* bytes behind a multiple of 8."""

    def make() -> bytes:
        for spaces in range(8):
            text = json.loads(file_with(TENSORS)[8:].split(b"}}")[0] + b"}}")
            data = b"".join(data for _, _, data in TENSORS.values())
            header = json.dumps(text).encode() + b" " * spaces
            if (8 + len(header)) % 8 == length:
                return raw_header(header, data, pad=1)
        raise AssertionError

    return make


SHAPES: dict[str, Callable[[], bytes]] = {
    **{f"data at 8n+{n}": odd_start(n) for n in (1, 2, 4, 7)},
    "offsets against the order": lambda: file_with(TENSORS, reverse=True),
    "metadata at the end": lambda: file_with(TENSORS, metadata={"k": "v"}, header_first=False),
    "a page of padding": lambda: file_with(TENSORS, pad=65536),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_starts_and_orders_are_read_right(tmp_path: Path, shape: str, scheme: str) -> None:
    """The finished shard holds the oracle's bytes, starts its data at a multiple of 4096 and its tensors aligned."""
    path = write(tmp_path / "src", SHAPES[shape]())
    assert oracle.read_file(path).keys() == TENSORS.keys()
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    check_files(tree, {FILE: TENSORS}, {A, B}, scheme)
    start, entries, _ = oracle.read_header(tree / FILE)
    assert start % 4096 == 0
    assert [e["data_offsets"][0] for e in entries.values()] == sorted(
        e["data_offsets"][0] for e in entries.values()
    )


@pytest.mark.fuse
def test_odd_starts_and_orders_through_one_mount(mount: Callable[..., Path], place: Path) -> None:
    """Each in a folder of its own, read from the mount and by the reference reader."""
    for number, make in enumerate(SHAPES.values()):
        write(place / "src" / str(number), make())
    dst = mount(place / "src")
    for number in range(len(SHAPES)):
        check_files(dst / str(number), {FILE: TENSORS}, {A, B}, "per_channel")
        with safe_open(dst / str(number) / FILE, "pt") as reader:
            assert {*TENSORS} <= {*reader.keys()}


NAMES = {
    "dots": "model..layers.0...mlp.down_proj.weight",
    "no dots": "weight",
    "slashes": "model/layers/0/../../mlp/down_proj.weight",
    "spaces": " model . layers . 0 . mlp . down_proj.weight",
    "unicode": "模型.layers.0.größe.\U0001f9e0.weight",
    "quotes": 'model.layers.0."q\\uoted"\n\t\x7f.weight',
    "like a path": "../../etc/passwd.0.weight",
    "like a scale": "model.layers.0.weight_scale.weight",
    "like metadata": "__metadata__.0.x.weight",
    "glob": "model.layers.0.[a-z]*?.weight",
    "4 KB": "model.layers.0." + "x" * 4081 + ".weight",
    "null": "model.layers.0.\x00.weight",
    "empty": "",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_odd_names_go_through_everything(tmp_path: Path, scheme: str) -> None:
    """Header, journal, index of two shards and the reference reader: each tensor under its own name with its own bytes."""
    assert len(NAMES["4 KB"]) > 4096
    half = len(NAMES) // 2
    names = [*NAMES.values()]
    files = {
        "model-00001-of-00002.safetensors": named(*names[:half]),
        "model-00002-of-00002.safetensors": named(*names[half:]),
    }
    for file, tensors in files.items():
        write_bytes(tmp_path / "src" / file, file_with(tensors, metadata={"format": "pt"}))
    write_json(tmp_path / "src" / "config.json", LLM)
    seen = look(tmp_path / "src", scheme=scheme)
    assert NAMES["4 KB"] in seen.quantized
    assert NAMES["unicode"] in seen.quantized
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store", scheme=scheme)
    check_files(tree, files, seen.quantized, scheme)
    index = json.loads((tree / "model.safetensors.index.json").read_text())
    for file in files:
        with safe_open(tree / file, "pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a dict
                assert index["weight_map"][name] == file
                assert reader.get_tensor(name) is not None


def test_odd_names_can_be_kept_by_name(tmp_path: Path) -> None:
    """--keep finds a name whatever it is made of; what is a pattern in it must be escaped as in any glob."""
    write(tmp_path, file_with(named(NAMES["4 KB"], NAMES["unicode"], NAMES["glob"])))
    kept = (NAMES["4 KB"], NAMES["unicode"], NAMES["glob"].replace("[", "[[]"))
    assert look(tmp_path).quantized >= {NAMES["4 KB"], NAMES["unicode"]}
    assert look(tmp_path, keep=kept).quantized == set()


def test_a_file_without_tensors_is_a_shard_too(tmp_path: Path) -> None:
    """As some writers leave one at the end; its header is kept, and the rest is served."""
    src = tmp_path / "src"
    write_bytes(src / "model-00001-of-00002.safetensors", file_with(TENSORS))
    write_bytes(src / "model-00002-of-00002.safetensors", file_with({}, metadata={"k": "v"}))
    write_json(src / "config.json", LLM)
    tree = fp8fs.build(src, store=tmp_path / "store")
    files = {"model-00001-of-00002.safetensors": TENSORS, "model-00002-of-00002.safetensors": {}}
    check_files(tree, files, {A, B}, "per_channel")
    _, _, metadata = oracle.read_header(tree / "model-00002-of-00002.safetensors")
    assert metadata == {"k": "v", "format": "pt"}
