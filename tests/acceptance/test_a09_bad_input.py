"""A9: bad input gives one clear error, its exit code, and leaves no mount."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.acceptance.harness import Fp8fs, make_checkpoint, mount_points, servers

pytestmark = pytest.mark.fuse

SHARD = "model-00002-of-00003.safetensors"


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header, data left as it is."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def no_safetensors(src: Path) -> None:
    for path in src.glob("*.safetensors"):
        path.unlink()


def truncated(src: Path) -> None:
    os.truncate(src / SHARD, (src / SHARD).stat().st_size - 100)


def header_longer_than_the_file(src: Path) -> None:
    raw = (src / SHARD).read_bytes()
    (src / SHARD).write_bytes(struct.pack("<Q", len(raw) * 2) + raw[8:])


def overlapping_offsets(src: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        names = [name for name in header if name != "__metadata__"]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]

    with_header(src / SHARD, change)


def missing_shard(src: Path) -> None:
    (src / SHARD).unlink()


def already_quantized(src: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        for entry in header.values():
            if entry.get("dtype") == "BF16" and len(entry["shape"]) == 2:
                entry["dtype"] = "F8_E4M3"
                entry["shape"][1] *= 2

    for path in src.glob("*.safetensors"):
        with_header(path, change)


BAD_SOURCES: list[tuple[Callable[[Path], None], str]] = [
    (no_safetensors, "safetensors"),
    (truncated, SHARD),
    (header_longer_than_the_file, SHARD),
    (overlapping_offsets, SHARD),
    (missing_shard, SHARD),
    (already_quantized, "quantized"),
]


def refused(process: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr that says what is wrong."""
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in process.stderr
    for word in words:
        assert word in lines[0]


def nothing_left(place: Path) -> None:
    assert mount_points(place) == []
    assert servers(place) == []


@pytest.mark.parametrize(("damage", "word"), BAD_SOURCES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_bad_source_is_refused(
    fp8fs: Fp8fs, place: Path, damage: Callable[[Path], None], word: str
) -> None:
    """``mount`` and ``plan`` exit with 10 and name the file or the reason; DST is as before."""
    src, dst = make_checkpoint(place / "src", "llama", "1M"), place / "view"
    damage(src)
    refused(fp8fs.run("mount", src, dst, code=10), word)
    assert not dst.exists()
    nothing_left(place)
    refused(fp8fs.run("plan", src, code=10), word)
    error = json.loads(fp8fs.run("mount", src, dst, "--json", code=10).stdout)["error"]
    assert error["code"] == "source.invalid"


def test_a_model_without_fp8_needs_a_word(fp8fs: Fp8fs, place: Path) -> None:
    """Where no weight becomes FP8, ``mount`` says how many bytes that are, and why, and exits with 12 unless told to go on."""
    src, dst = make_checkpoint(place / "src", "llama", "1M"), place / "view"
    keep = ("--keep", "*")
    total = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for path in src.glob("*.safetensors")
        for entry in oracle.read_header(path)[1].values()
    )
    refused(fp8fs.run("mount", src, dst, *keep, code=12), f"0 of {total:,} bytes", "no tensor")
    assert not dst.exists()
    nothing_left(place)
    refused(fp8fs.run("run", src, *keep, "--", "ls", "{}", code=12), "--allow-unquantized")
    refused(fp8fs.run("build", src, *keep, code=12), "--allow-unquantized")
    fp8fs.run("mount", src, dst, *keep, "--allow-unquantized")
    for path in src.glob("*.safetensors"):
        assert (dst / path.name).read_bytes() == path.read_bytes()
    assert (dst / "config.json").read_bytes() == (src / "config.json").read_bytes()
    fp8fs.run("unmount", dst)
    nothing_left(place)


def test_dst_must_be_empty(fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]) -> None:
    """A directory with something in it is not hidden by a mount."""
    dst = place / "view"
    dst.mkdir()
    (dst / "mine").touch()
    refused(fp8fs.run("mount", checkpoint("llama"), dst, code=40), str(dst), "empty")
    assert (dst / "mine").exists()
    nothing_left(place)


def test_dst_inside_src(fp8fs: Fp8fs, place: Path) -> None:
    """The view cannot be a part of what it shows."""
    src = make_checkpoint(place / "src", "llama", "1M")
    refused(fp8fs.run("mount", src, src / "fp8", code=40), str(src / "fp8"))
    assert not (src / "fp8").exists()
    nothing_left(place)


def test_store_inside_src(fp8fs: Fp8fs, place: Path) -> None:
    """Nothing is ever written below SRC."""
    src = make_checkpoint(place / "src", "llama", "1M")
    for command in (("mount", src, place / "view"), ("build", src)):
        done = fp8fs.popen(*command, "--store", src / "store")
        out, err = done.communicate(timeout=60)
        assert done.returncode in (2, 40)
        refused(subprocess.CompletedProcess([], done.returncode, out, err), "store")
    assert not (src / "store").exists()
    nothing_left(place)


def test_no_dev_fuse(place: Path, checkpoint: Callable[[str], Path]) -> None:
    """Without the device the error names it, and the remedy."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to hide the device")
    hide = (
        "mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && "
        'mknod -m 666 /dev/urandom c 1 9 && exec "$@"'
    )
    inside = Fp8fs(
        place / "store", command=("unshare", "-m", "sh", "-c", hide, "sh", *Fp8fs(place).command)
    )
    refused(inside.run("mount", checkpoint("llama"), place / "view", code=41), "/dev/fuse", "hint:")
    nothing_left(place)


def test_no_libfuse(place: Path, checkpoint: Callable[[str], Path]) -> None:
    """Without libfuse 3 the error says what to install."""
    bare = Fp8fs(place / "store", env={"FUSE_LIBRARY_PATH": "/nonexistent/libfuse3.so.3"})
    refused(bare.run("mount", checkpoint("llama"), place / "view", code=41), "libfuse", "fuse3")
    nothing_left(place)


@pytest.mark.parametrize(
    "wrong",
    [
        ("--scheme", "blok"),
        ("--component", "nonesuch"),
        ("--device", "tpu"),
        ("--serve", "sideways"),
        ("--grain", "tensor"),
        ("--keep", "no.such.tensor.*"),
    ],
    ids=lambda wrong: "".join(wrong),
)
def test_words_that_do_not_exist(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], wrong: tuple[str, str]
) -> None:
    """Exit 2, one line, and it quotes the word."""
    done = fp8fs.run("mount", checkpoint("llama"), place / "view", *wrong, code=2)
    refused(done, wrong[1], "hint:")
    nothing_left(place)


def test_a_weight_with_nan_is_named_and_build_keeps_it(fp8fs: Fp8fs, place: Path) -> None:
    """A mount answers EIO and ``status`` names the tensor; ``build`` records it, keeps it and goes on."""
    src, dst = make_checkpoint(place / "src", "llama", "2M"), place / "view"
    name = "model.layers.0.mlp.down_proj.weight"
    home = next(p for p in src.glob("*.safetensors") if name in oracle.read_header(p)[1])
    start, entries, _ = oracle.read_header(home)
    with home.open("r+b") as file:
        file.seek(start + entries[name]["data_offsets"][0] + 2 * 77)
        file.write(struct.pack("<H", 0x7FC0))
    fp8fs.mount(src, dst)
    with pytest.raises(OSError, match=r"Input/output error"):
        (dst / home.name).read_bytes()
    errors = fp8fs.status(dst)["errors"]
    assert any(e["facts"].get("tensor") == name and e["facts"].get("index") == 77 for e in errors)
    assert any("--keep" in e["hint"] for e in errors)
    fp8fs.unmount(dst)

    tree = fp8fs.build(src)
    kept = oracle.read_file(tree / home.name)[name]
    assert kept == oracle.read_file(home)[name]
    fp8fs.mount(src, dst)
    assert oracle.read_file(dst / home.name)[name] == kept
