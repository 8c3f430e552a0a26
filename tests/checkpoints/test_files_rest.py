"""Everything that is not weights: byte for byte, with modes and dates, links and names of every kind."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fp8fs
from fp8fs.cli import main
from tests.acceptance.harness import Fp8fs, digest
from tests.builders import (
    named,
    wan_like,
    write_bytes,
    write_files,
    write_json,
    write_safetensors,
)
from tests.checkpoints.looks import LLM, check_files, layer, look
from tests.conftest import need_package

FILE = "model.safetensors"
A = layer(0)
GIBIBYTES_3 = 3 << 30
REWRITTEN = {"config.json", FILE}

ODD_JSON = b'\xef\xbb\xbf{ "b" :1,\t"a":[ NaN,1e400 ],\r\n}'
"""Not even JSON: a file that is passed through is nobody's to parse."""


def odd_tree(src: Path) -> None:
    """A model with the files that people have around it."""
    write_files(src, {FILE: named(A)}, LLM)
    write_bytes(src / "modeling_odd.py", b"from configuration_odd import SIZE\nprint(SIZE)\n")
    write_bytes(src / "configuration_odd.py", b"SIZE = 41 + 1\n")
    script = write_bytes(src / "bin" / "convert.sh", b"#!/bin/sh\necho converted\n")
    script.chmod(0o755)
    for name in ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        write_bytes(src / name, ODD_JSON)
    write_bytes(src / "sub" / "config.json", ODD_JSON)  # of nothing that has weights
    write_bytes(src / "chat_template.jinja", b"{{ messages }}\r\n\x00\xff")
    write_bytes(src / "tokenizer.model", bytes(range(256)) * 9000).chmod(0o600)  # over 2 MB
    write_bytes(src / "empty.txt", b"")
    write_bytes(src / ".gitattributes", b"* lfs\n")
    write_bytes(src / ".hidden" / "deep" / "x", b"x").chmod(0o444)
    (src / "no" / "files").mkdir(parents=True)
    (src / "no").chmod(0o750)
    write_bytes(src / os.fsdecode(b"caf\xe9.txt"), b"latin")
    write_bytes(src / os.fsdecode(b"d\xff") / os.fsdecode(b"\x80\n"), b"bytes")
    for number, path in enumerate(sorted(src.rglob("*"), reverse=True)):
        os.utime(path, ns=(1, 1_600_000_000_123_456_789 + number))


def walk(root: Path) -> dict[str, Path]:
    """Every name below, by relative path, folders reached through links too."""
    return {
        os.path.relpath(os.path.join(folder, name), root): Path(folder, name)
        for folder, folders, files in os.walk(root, followlinks=True)
        for name in (*folders, *files)
    }


def facts(path: Path) -> tuple[object, ...]:
    """What stat says of what a name leads to."""
    found = path.stat()
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), found.st_mtime_ns, size


def check_rest(src: Path, view: Path, *, rewritten: set[str] = REWRITTEN) -> None:
    """The same names; for what is not rewritten the same kind, mode, date, size and bytes."""
    wanted, shown = walk(src), walk(view)
    shown = {name: path for name, path in shown.items() if name.split("/")[0] != ".fp8fs"}
    assert shown.keys() == wanted.keys()
    for name in wanted.keys() - rewritten:
        assert facts(shown[name]) == facts(wanted[name]), name
        if wanted[name].is_file():
            assert digest(shown[name]) == digest(wanted[name]), name


@pytest.mark.fuse
def test_the_rest_is_byte_for_byte(mount: Callable[..., Path], place: Path) -> None:
    """Names, kinds, modes, dates, sizes and bytes; code runs from the mount and finds its siblings."""
    odd_tree(place / "src")
    dst = mount(place / "src")
    check_rest(place / "src", dst)
    check_files(dst, {FILE: named(A)}, {A}, "per_channel")
    said = subprocess.run(
        [sys.executable, "-B", dst / "modeling_odd.py"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "42\n"
    ran = subprocess.run([dst / "bin" / "convert.sh"], capture_output=True, text=True, check=True)
    assert ran.stdout == "converted\n"
    assert not os.access(dst / "configuration_odd.py", os.X_OK)


REMOTE_CODE = {
    "configuration_odd.py": """
from transformers import PretrainedConfig

class OddConfig(PretrainedConfig):
    model_type = "odd"
    size = 42
""",
    "layers_odd.py": "def answer(config):\n    return config.size\n",
    "modeling_odd.py": """
from transformers import PreTrainedModel
from .configuration_odd import OddConfig
from .layers_odd import answer

class OddModel(PreTrainedModel):
    config_class = OddConfig
    answer = property(lambda self: answer(self.config))
""",
}
REMOTE_READER = """
import sys
from transformers import AutoConfig, AutoModel
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
assert config.quantization_config["quant_method"] == "compressed-tensors"
del config.quantization_config
print(AutoModel.from_config(config, trust_remote_code=True).answer)
"""


@pytest.mark.fuse
@pytest.mark.loader
def test_remote_code_runs_from_the_mount(fp8fs: Fp8fs, place: Path) -> None:
    """transformers finds the model's own code, and that code its siblings."""
    need_package("transformers")
    classes = {"AutoConfig": "configuration_odd.OddConfig", "AutoModel": "modeling_odd.OddModel"}
    config = {"architectures": ["OddModel"], "model_type": "odd", "auto_map": classes}
    write_files(place / "src", {FILE: named(A)}, config)
    for name, code in REMOTE_CODE.items():
        write_bytes(place / "src" / name, code.encode())
    dst = place / "view"
    fp8fs.mount(place / "src", dst)
    said = subprocess.run(
        [sys.executable, "-c", REMOTE_READER, dst],
        env={**os.environ, "HF_HOME": str(place / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "42\n", said.stderr


def test_finished_trees_and_copies_hold_the_rest_too(fp8fs: Fp8fs, place: Path) -> None:
    """The tree in the store and what build --to makes of it are plain checkpoints."""
    odd_tree(place / "src")
    check_rest(place / "src", fp8fs.build(place / "src"))
    fp8fs.run("build", place / "src", "--to", place / "copy")
    check_rest(place / "src", place / "copy")
    assert not any(path.is_symlink() for path in (place / "copy").rglob("*"))


def test_plan_lists_names_that_are_not_utf8(fp8fs: Fp8fs, place: Path) -> None:
    """As JSON and as a table; nothing of it fails on a name."""
    odd_tree(place / "src")
    paths = {file["path"] for file in fp8fs.json("plan", place / "src")["files"]}
    assert os.fsdecode(b"caf\xe9.txt") in paths
    assert os.fsdecode(b"d\xff/\x80\n") in paths
    fp8fs.run("plan", place / "src")


def test_a_single_shard_may_have_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    """It needs no index, so nothing has to spell it."""
    name = os.fsdecode(b"mod\xe8le.safetensors")
    write_safetensors(tmp_path / "src" / name, named(A))
    write_json(tmp_path / "src" / "config.json", LLM)
    tree = fp8fs.build(tmp_path / "src", store=tmp_path / "store")
    check_files(tree, {name: named(A)}, {A}, "per_channel")


@pytest.mark.fuse
def test_a_large_file_is_served_in_place(
    mount: Callable[..., Path], fp8fs: Fp8fs, place: Path
) -> None:
    """3 GiB beside the weights: right size, right bytes at every place, copied nowhere."""
    src = place / "src"
    write_files(src, {FILE: named(A)}, LLM)
    with (src / "video.mp4").open("wb") as file:
        file.truncate(GIBIBYTES_3)
        for at in (0, (2 << 30) - 3, GIBIBYTES_3 - 6):
            file.seek(at)
            file.write(b"marked")
    dst = mount(src)
    assert (dst / "video.mp4").stat().st_size == GIBIBYTES_3
    fd = os.open(dst / "video.mp4", os.O_RDONLY)
    try:
        for at in (0, (2 << 30) - 3, GIBIBYTES_3 - 6):
            assert os.pread(fd, 6, at) == b"marked"
        assert os.pread(fd, 1 << 20, 1 << 30) == bytes(1 << 20)
        assert os.pread(fd, 100, GIBIBYTES_3 - 3) == b"ked"
        assert os.pread(fd, 1, GIBIBYTES_3) == b""
    finally:
        os.close(fd)
    used = subprocess.run(
        ["du", "-sB1", fp8fs.store], capture_output=True, text=True, check=True
    ).stdout
    assert int(used.split()[0]) < 64 << 20


# --- symlinks


def linked_tree(place: Path) -> Path:
    """A model with links of every kind; returns SRC."""
    src, away = place / "src", place / "away"
    write_files(src, {FILE: named(A)}, LLM)
    write_bytes(src / "real" / "vocab.txt", b"inside")
    write_bytes(away / "vocab.txt", b"outside")
    write_bytes(away / "deep" / "big.bin", bytes(range(256)) * 8192)  # 2 MB
    links = {
        "file_in": "real/vocab.txt",
        "file_in_absolute": f"{src}/real/vocab.txt",
        "file_out": "../away/vocab.txt",
        "big_out": f"{away}/deep/big.bin",
        "folder_in": "real",
        "folder_in_absolute": f"{src}/real",
        "folder_out": "../away",
        "sub/folder_up": "../real",
        "sub/folder_up_absolute": f"{src}/real",
        "dangling": "nowhere",
        "loop": "loop",
        "up": "..",
        "self": ".",
    }
    for name, text in links.items():
        (src / name).parent.mkdir(exist_ok=True)
        (src / name).symlink_to(text)
    (away / "back").symlink_to(src)
    (away / "again").symlink_to(".")
    return src


def test_links_are_planned_so_that_they_lead_to_the_view(tmp_path: Path) -> None:
    """Files are what the link leads to; folders in SRC stay links, relative ones; folders elsewhere are folders."""
    src = linked_tree(tmp_path)
    entries = look(src).plan.entries
    shown = {path: (entry.kind, entry.link) for path, entry in entries.items()}
    for name in ("file_in", "file_in_absolute", "file_out", "big_out"):
        assert shown[name] == ("source", "")
    assert shown["folder_in"] == ("link", "real")
    assert shown["folder_in_absolute"] == ("link", "real")
    assert shown["sub/folder_up"] == ("link", "../real")
    assert shown["sub/folder_up_absolute"] == ("link", "../real")
    assert shown["folder_out"] == ("dir", "")
    assert shown["folder_out/vocab.txt"] == ("source", "")
    assert shown["folder_out/deep/big.bin"] == ("source", "")
    assert shown["folder_out/back"] == ("link", "..")
    assert shown["folder_out/again"] == ("link", ".")
    assert shown["dangling"] == ("link", "nowhere")
    assert shown["loop"] == ("link", "loop")
    assert shown["self"] == ("link", ".")
    assert shown["up"] == ("link", str(tmp_path))


def test_a_link_to_a_huge_folder_stays_a_link(tmp_path: Path) -> None:
    """An absolute one: its text was right in SRC only; SRC is planned as if the folder were not there."""
    src = tmp_path / "src"
    write_files(src, {FILE: named(A)}, LLM)
    for number in range(10_100):
        (tmp_path / "huge").mkdir(exist_ok=True)
        (tmp_path / "huge" / str(number)).touch()
    (src / "data").symlink_to("../huge")
    entries = look(src).plan.entries
    assert (entries["data"].kind, entries["data"].link) == ("link", str(tmp_path / "huge"))
    assert len(entries) == 3


@pytest.mark.fuse
def test_links_lead_to_the_same_bytes(mount: Callable[..., Path], place: Path) -> None:
    """Whatever a name leads to in SRC, it leads to through the mount; the mount's links do not leave it without need."""
    src = linked_tree(place)
    dst = mount(src)
    for name in (
        "file_in",
        "file_in_absolute",
        "file_out",
        "big_out",
        "folder_in/vocab.txt",
        "folder_in_absolute/vocab.txt",
        "folder_out/vocab.txt",
        "folder_out/deep/big.bin",
        "sub/folder_up/vocab.txt",
        "sub/folder_up_absolute/vocab.txt",
        "folder_out/back/real/vocab.txt",
    ):
        assert (dst / name).read_bytes() == (src / name).read_bytes(), name
    assert os.path.realpath(dst / "folder_in_absolute") == str(dst / "real")
    assert not (dst / "dangling").exists()
    assert os.readlink(dst / "dangling") == "nowhere"
    assert (dst / "up" / "away" / "vocab.txt").read_bytes() == b"outside"


@pytest.mark.fuse
def test_links_in_a_copy_lead_nowhere_else(fp8fs: Fp8fs, place: Path) -> None:
    """build --to: what was linked from elsewhere is there in full; only folders in the copy are still linked."""
    src = linked_tree(place)
    (src / "up").unlink()
    fp8fs.run("build", src, "--to", place / "copy")
    (place / "away" / "vocab.txt").unlink()
    copy = place / "copy"
    assert (copy / "folder_out" / "vocab.txt").read_bytes() == b"outside"
    assert (copy / "file_out").read_bytes() == b"outside"
    left = {os.path.relpath(p, copy): os.readlink(p) for p in copy.rglob("*") if p.is_symlink()}
    assert not [text for text in left.values() if text.startswith("/")]
    assert json.loads((copy / "config.json").read_text())["quantization_config"]


OWN = {".fp8fs": "a view has its own folder of this name"}


@pytest.mark.parametrize("kind", ["folder", "file", "link", "pipe"])
def test_a_name_of_the_views_own_is_hidden_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """``.fp8fs`` in SRC, whatever it is: one entry among the hidden, in text and JSON; nothing of it is a file of the view."""
    src, own = tmp_path / "src", tmp_path / "src" / ".fp8fs"
    write_files(src, {FILE: named(A)}, LLM)
    if kind == "folder":
        write_files(own, {FILE: named(A)}, LLM)
        write_bytes(own / "deep" / "manifest.json", b"{}")
    elif kind == "file":
        write_bytes(own, b"mine")
    elif kind == "link":
        write_bytes(tmp_path / "elsewhere" / "x", b"x")
        own.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(own)
    assert main(["plan", str(src), "--store", str(tmp_path / "store"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["hidden"] == OWN
    assert sorted(file["path"] for file in said["files"]) == ["config.json", FILE]
    assert not [line for line in said["warnings"] if "not shown" in line]
    assert main(["plan", str(src), "--store", str(tmp_path / "store")]) == 0
    assert f"hidden: .fp8fs ({OWN['.fp8fs']})\n" in capsys.readouterr().out


def test_only_the_top_has_a_name_of_the_views_own(tmp_path: Path) -> None:
    """Further down ``.fp8fs`` is a name like any other; and what else is hidden, or is not, stays the same."""
    wan_like(tmp_path)
    write_bytes(tmp_path / "transformer" / "diffusion_pytorch_model.bin", b"x")
    write_bytes(tmp_path / "text_encoder" / "pytorch_model.bin", b"x")
    write_bytes(tmp_path / "text_encoder" / ".fp8fs" / "x", b"x")
    before = look(tmp_path).plan
    write_bytes(tmp_path / ".fp8fs" / "x", b"x")
    after = look(tmp_path).plan
    assert [*before.hidden] == ["transformer/diffusion_pytorch_model.bin"]
    assert after.hidden == {**before.hidden, **OWN}
    assert [*after.hidden] == sorted(after.hidden)
    assert after.entries == before.entries
    assert {"text_encoder/.fp8fs/x", "text_encoder/pytorch_model.bin"} <= after.entries.keys()
    assert after.plan_id == before.plan_id


def test_it_is_hidden_where_nothing_is_quantized_too(tmp_path: Path) -> None:
    """A view without FP8 has the folder as well."""
    write_files(tmp_path, {FILE: named(A)}, LLM)
    write_bytes(tmp_path / "pytorch_model.bin", b"x")
    write_bytes(tmp_path / ".fp8fs" / "x", b"x")
    plan = look(tmp_path, keep=("*",)).plan
    assert (plan.schemes, plan.hidden) == ({}, OWN)
    assert "pytorch_model.bin" in plan.entries
