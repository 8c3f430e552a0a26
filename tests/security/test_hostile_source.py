"""An SRC that an attacker made: one clear answer, at once, and nothing touched that is none of its business."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.assembly import survey
from fp8fs.core.recipe import Recipe
from fp8fs.errors import Fp8fsError, SourceChangedError, SourceInvalidError
from fp8fs.source import Source
from fp8fs.source.scan import open_regular
from tests.builders import llama_like, raw_header, write_json, write_safetensors
from tests.security.tracing import SYSTEM, inside, touched_by

LIMIT = 100_000_000
FP8FS = (sys.executable, "-m", "fp8fs")


def claims_too_much(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", LIMIT + 1))
    os.truncate(path, LIMIT + 100)


def claims_everything(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**64 - 1) + b"{}")


def claims_a_hole(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", LIMIT))
    os.truncate(path, LIMIT + 100)


def only_spaces(path: Path) -> None:
    path.write_bytes(raw_header(b"{" + b" " * 10_000_000))


def deep_objects(path: Path) -> None:
    path.write_bytes(raw_header(b'{"a":' * 2_000_000))


def deep_arrays(path: Path) -> None:
    path.write_bytes(raw_header(b'{"a":{"dtype":"U8","shape":' + b"[" * 5_000_000))


def tensors(entry: str, count: int) -> bytes:
    return b"{" + ",".join(entry.replace("#", str(n)) for n in range(count)).encode() + b"}"


EMPTY = '"t#":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def too_many_tensors(path: Path) -> None:
    path.write_bytes(raw_header(tensors(EMPTY, 300_000)))


def twice(path: Path) -> None:
    path.write_bytes(raw_header(tensors(EMPTY.replace("#", ""), 250_000)))


def twice_at_the_very_end(path: Path) -> None:
    last = tensors(EMPTY, 200_000)[:-1] + b"," + EMPTY.replace("#", "0").encode() + b"}"
    path.write_bytes(raw_header(last))


def twice_by_an_escape(path: Path) -> None:
    last = tensors(EMPTY, 200_000)[:-1] + b"," + EMPTY.replace("#", "\\u0030").encode() + b"}"
    path.write_bytes(raw_header(last))


def millions_of_arrays(path: Path) -> None:
    path.write_bytes(raw_header(b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"))


def millions_of_names(path: Path) -> None:
    path.write_bytes(raw_header(b"{" + b'"a":0,' * 10_000_000 + b'"a":0}'))


def millions_of_dimensions(path: Path) -> None:
    shape = b"1," * 20_000_000 + b"1"
    entry = b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":[' + shape + b"]}}"
    path.write_bytes(raw_header(entry, b"1"))


def millions_of_metadata(path: Path) -> None:
    many = b'"a":"",' * 5_000_000 + b'"a":""'
    path.write_bytes(raw_header(b'{"__metadata__":{' + many + b"}}"))


def metadata_of_arrays(path: Path) -> None:
    path.write_bytes(raw_header(b'{"__metadata__":{"a":[' + b"[]," * 20_000_000 + b"[]]}}"))


def overflowing_shape(path: Path) -> None:
    shape = [2**32, 2**32, 2**32]
    path.write_bytes(raw_header({"a": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}))


def negative_offsets(path: Path) -> None:
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}
    path.write_bytes(raw_header({"a": entry}, b"1234"))


def offsets_beyond_the_file(path: Path) -> None:
    entry = {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}
    path.write_bytes(raw_header({"a": entry}, b"1234"))


def a_number_of_a_million_digits(path: Path) -> None:
    path.write_bytes(raw_header(b'{"a":' + b"9" * 1_000_000 + b"}"))


def no_utf8(path: Path) -> None:
    path.write_bytes(raw_header(b'{"\xff\xfe":1}'))


HEADERS = [
    claims_too_much,
    claims_everything,
    claims_a_hole,
    only_spaces,
    deep_objects,
    deep_arrays,
    too_many_tensors,
    twice,
    twice_at_the_very_end,
    twice_by_an_escape,
    millions_of_arrays,
    millions_of_names,
    millions_of_dimensions,
    millions_of_metadata,
    metadata_of_arrays,
    overflowing_shape,
    negative_offsets,
    offsets_beyond_the_file,
    a_number_of_a_million_digits,
    no_utf8,
]


@pytest.mark.parametrize("damage", HEADERS, ids=lambda f: f.__name__)
def test_headers(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Each hostile header is refused within a second's work, in one printable sentence that names the file."""
    llama_like(tmp_path, shards=1)
    damage(tmp_path / "model.safetensors")
    began = time.process_time()  # of all threads; the machine may have other work
    with pytest.raises(SourceInvalidError, match=r"^model\.safetensors: ") as caught:
        Source.open(tmp_path)
    assert time.process_time() - began < 1
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


MEMORY = """
import sys
from pathlib import Path
from fp8fs.source import Source
from fp8fs.errors import Fp8fsError
try:
    Source.open(Path(sys.argv[1]))
except Fp8fsError as err:
    lines = open("/proc/self/status").read().splitlines()  # ru_maxrss would count the parent's, too
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024)
"""


def spaces_to_the_limit(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", LIMIT) + b"{" + b" " * (LIMIT - 1))


@pytest.mark.parametrize(("damage", "limit_mb"), [(claims_a_hole, 100), (spaces_to_the_limit, 450)])
def test_headers_need_bounded_memory(
    tmp_path: Path, damage: Callable[[Path], None], limit_mb: int
) -> None:
    """Eight shards that each claim the largest header cost a few times one header, not eight times that."""
    llama_like(tmp_path, shards=1)
    (tmp_path / "model.safetensors").unlink()
    for number in range(8):
        path = tmp_path / f"model-{number + 1:05d}-of-00008.safetensors"
        if number:
            path.hardlink_to(tmp_path / "model-00001-of-00008.safetensors")
        else:
            damage(path)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < limit_mb


INDEXES = {
    "parent": "../secret.safetensors",
    "absolute": "/etc/passwd",
    "below": "a/b.safetensors",
    "empty": "",
    "dot": "..",
    "nul": "model\0.safetensors",
    "surrogate": "\ud800",
    "number": 7,
    "long": "n" * 10_000,
    "newline": "model\n.safetensors",
}


@pytest.mark.parametrize("case", INDEXES)
def test_index_names(tmp_path: Path, case: str) -> None:
    """An index that names anything but files beside it is refused, and what it names is not looked at."""
    src = tmp_path / "src"
    llama_like(src, shards=2)
    llama_like(tmp_path, shards=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "secret.safetensors")
    path = src / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    first = next(iter(index["weight_map"]))
    write_json(path, {**index, "weight_map": {**index["weight_map"], first: INDEXES[case]}})
    with pytest.raises(SourceInvalidError) as caught:
        Source.open(src)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text", [b"[" * 1_000_000, b'{"a":' * 1_000_000, b"\xff", b"9" * 1_000_000, b"[]", b""]
)
def test_json_files(tmp_path: Path, name: str, text: bytes) -> None:
    """A config or index that is deep, huge, binary or no object is one refusal within a second."""
    llama_like(tmp_path, shards=2)
    (tmp_path / name).write_bytes(text)
    began = time.perf_counter()
    with pytest.raises(SourceInvalidError, match=name):
        survey(tmp_path, Recipe(), None)
    assert time.perf_counter() - began < 1


ODD_NAMES = ["../../x.weight", "/etc/passwd", "a\nb", "\x1b]0;owned\x07", "\u202egpj.exe", "n" * 10_000, "a\0b", "[/red]", "[bold]x"]  # fmt: skip


def test_odd_tensor_names_are_only_names(tmp_path: Path) -> None:
    """Tensor names never become paths; printed, they move no cursor and forge no line."""
    src = tmp_path / "src"
    weights = llama_like(src, shards=1)
    odd = {name: ("U8", (4,), bytes([n] * 4)) for n, name in enumerate(ODD_NAMES)}
    write_safetensors(src / "model.safetensors", {**weights, **odd})
    environment = {**os.environ, "FP8FS_STORE": str(tmp_path / "store")}
    for command in (["plan", src], ["build", src, "--to", tmp_path / "out"]):
        done = subprocess.run(
            [*FP8FS, *command], env=environment, capture_output=True, timeout=60, check=True
        )
        printed = (done.stdout + done.stderr).decode()
        assert all(c.isprintable() or c == "\n" for c in printed)
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for number, name in enumerate(ODD_NAMES):
        begin, end = (8 + length + at for at in header[name]["data_offsets"])
        assert raw[begin:end] == bytes([number] * 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src", "store"]


def set_traps(src: Path, outside: Path) -> set[str]:
    """Everything but files that a folder can hold; the real paths of what must never be opened."""
    os.mkfifo(src / "pipe.json")
    os.mkfifo(src / "notes")
    outside.mkdir()
    os.mkfifo(outside / "pipe")
    (src / "to_pipe.txt").symlink_to(outside / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(src / "sock"))
    (src / "to_device.bin").symlink_to("/dev/zero")
    (src / "loop").symlink_to("loop")
    (src / "ring_a").symlink_to("ring_b")
    (src / "ring_b").symlink_to("ring_a")
    (src / "dangling").symlink_to(outside / "nothing")
    (src / "sub").mkdir()
    (src / "sub" / "up").symlink_to("..")
    (src / "here").symlink_to(".")
    traps = {str(src / "pipe.json"), str(src / "notes"), str(outside / "pipe"), str(src / "sock"), "/dev/zero"}  # fmt: skip
    if os.geteuid() == 0:
        os.mknod(src / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        traps.add(str(src / "device"))
    return traps


def test_only_src_and_store_are_touched(tmp_path: Path) -> None:
    """plan and build over a folder of FIFOs, devices, loops and links, watched from outside: no trap is opened,
    nothing outside of SRC, the store and the result is read or written, and SRC is not written."""
    src, outside, store, out = (tmp_path / n for n in ("src", "outside", "store", "out"))
    llama_like(src, shards=2)
    traps = set_traps(src, outside)
    (outside / "secret").write_bytes(b"secret")
    (outside / "linked.txt").write_bytes(b"followed")
    (src / "linked.txt").symlink_to(outside / "linked.txt")
    (src / "hard.txt").hardlink_to(outside / "secret")
    caches = tmp_path / "caches"
    environment = {
        "FP8FS_STORE": str(store),
        "NUMBA_CACHE_DIR": str(caches),
        "TMPDIR": str(tmp_path / "temporary"),
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(caches),
    }
    (tmp_path / "temporary").mkdir()
    (tmp_path / "home").mkdir()
    before = {p: p.lstat().st_mtime_ns for p in sorted(src.rglob("*"))}
    for number, command in enumerate((["plan", src], ["build", src, "--to", out])):
        seen = touched_by([*FP8FS, *command], tmp_path / f"trace{number}", env=environment)
        assert not (seen.read | seen.written | seen.pinned) & traps
        ours = [store, out, caches, tmp_path / "temporary", tmp_path / "home"]
        stage = {p for p in seen.written if Path(p).parent == tmp_path and ".tmp-" in p}
        written = {p for p in seen.written if not inside(p, [*ours, "/dev", *stage])}
        assert {p for p in written if not inside(p, SYSTEM) or inside(p, [tmp_path])} <= {
            str(tmp_path)
        }
        allowed = [*SYSTEM, src, *ours, *stage, "/dev"]
        read = {p for p in seen.read | seen.pinned if not inside(p, allowed)}
        # The one file that SRC leads to; plan and mount name it in a warning.
        assert read <= {str(outside / "linked.txt"), str(tmp_path), "/", "/tmp"}
    assert {p: p.lstat().st_mtime_ns for p in sorted(src.rglob("*"))} == before
    shown = {p.name for p in out.iterdir()}
    assert "linked.txt" in shown
    assert not shown & {"pipe.json", "notes", "sock", "device", "to_pipe.txt", "to_device.bin"}


WEIGHTS = {
    "fifo": lambda path, _: os.mkfifo(path),
    "link to fifo": lambda path, other: (os.mkfifo(other), path.symlink_to(other)),
    "loop": lambda path, _: path.symlink_to(path.name),
    "link to device": lambda path, _: path.symlink_to("/dev/zero"),
    "link to folder": lambda path, other: (other.mkdir(), path.symlink_to(other)),
    "folder": lambda path, _: path.mkdir(),
    "link to /proc": lambda path, _: path.symlink_to("/proc/self/environ"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_needed_files_that_are_none(tmp_path: Path, kind: str, name: str) -> None:
    """Where a shard or a config should be there is something else: it is refused or left out at once, never waited for."""
    src = tmp_path / "src"
    llama_like(src, shards=2)
    (src / name).unlink()
    WEIGHTS[kind](src / name, tmp_path / "other")
    began = time.perf_counter()
    said = ""
    try:
        survey(src, Recipe(), None).source.close()
    except Fp8fsError as err:
        said = str(err)
    assert said.isprintable()
    assert said or name == "config.json"
    assert time.perf_counter() - began < 1


def test_refs_main_that_is_a_fifo(tmp_path: Path) -> None:
    """A cache repository whose refs/main is a FIFO is read by its only snapshot; nobody waits for a writer."""
    repository = tmp_path / "models--org--tiny"
    llama_like(repository / "snapshots" / ("a" * 40))
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    os.mkfifo(repository / "refs" / "main")
    began = time.perf_counter()
    with Source.open(repository) as source:
        assert source.root.name == "a" * 40
    assert time.perf_counter() - began < 1


def test_swapped_between_scan_and_open(tmp_path: Path) -> None:
    """A file exchanged for a FIFO or another file after it was planned is an error, and the FIFO's writer never wakes."""
    llama_like(tmp_path, shards=1)
    with Source.open(tmp_path) as source:
        (tmp_path / "tokenizer.json").unlink()
        os.mkfifo(tmp_path / "tokenizer.json")
        with pytest.raises(SourceChangedError, match="regular file"):
            source.open_file("tokenizer.json")
        with pytest.raises(OSError, match="No such device"):  # a writer that finds no reader
            os.open(tmp_path / "tokenizer.json", os.O_WRONLY | os.O_NONBLOCK)
        (tmp_path / "config.json").write_bytes(b"{}")
        with pytest.raises(SourceChangedError, match="size was"):
            source.open_file("config.json")


def test_pinned_open(tmp_path: Path) -> None:
    """Only regular files are opened, through links too; anything else is ENXIO without being opened."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    fd = open_regular(str(tmp_path / "link"))
    assert os.read(fd, 2) == b"x"
    os.close(fd)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="No such device"):
            open_regular(str(path))
