"""Block scales of weights that are no whole blocks: through every way of serving, in a real reader, and cut for ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.acceptance.harness import Fp8fs
from tests.builders import llama_like
from tests.checkpoints.looks import stored

SIZES = (80, 192, 576, 10944)


@pytest.mark.fuse
@pytest.mark.parametrize("scheme", ["block", "block_free"])
def test_odd_sizes_through_the_mount(place: Path, mount: Callable[..., Path], scheme: str) -> None:
    """Rows and columns of 80, 192, 576 and 10944 have a last block of their own, however the view is served."""
    wanted: dict[Path, dict[str, oracle.Stored]] = {}
    src = place / "src"
    for size in SIZES:
        folder = src / f"size{size}"
        tensors = llama_like(folder, layers=1, hidden=80, inter=size, heads=5, kv_heads=5, shards=1)
        linears = {name for name in tensors if ".mlp." in name or ".self_attn." in name}
        wanted[folder] = oracle.expected(stored(tensors), linears, scheme, {})
    view = mount(src, "--scheme", scheme)
    for folder, expected in wanted.items():
        assert oracle.read_file(view / folder.name / "model.safetensors") == expected


def test_plan_warns_of_cuts(fp8fs: Fp8fs, place: Path) -> None:
    """``plan --tp`` says per weight, in JSON, and in a few sentences, in the text, what N ranks cannot cut; exit 0."""
    src = place / "src"
    llama_like(src, layers=3, hidden=256, inter=576, heads=4, kv_heads=4)
    asked = ("plan", src, "--scheme", "block", "--tp", 2)
    document: Any = fp8fs.json(*asked)
    assert document["tp"] == 2
    found = {
        (s["tensor"].split(".", 3)[3], s["axis"], s["part"], s["problem"])
        for s in document["splits"]
    }
    assert found == {
        ("mlp.down_proj.weight", "columns", 288, "block"),
        ("mlp.gate_proj.weight", "rows", 288, "fused"),
        ("mlp.up_proj.weight", "rows", 288, "fused"),
    }
    assert len(document["splits"]) == 9
    text = fp8fs.run(*asked)
    said = [line for line in text.stderr.splitlines() if "--tp 2" in line]
    assert [line.split(" weights ")[0].split()[-1] for line in said] == ["3", "6"]
    assert fp8fs.json("plan", src, "--scheme", "per_channel", "--tp", 2)["splits"] == []


def test_without_the_option_nothing_is_said(fp8fs: Fp8fs, place: Path) -> None:
    """A plan for one process has no findings of that kind, and the option does not change the plan."""
    src = place / "src"
    llama_like(src, hidden=256, inter=576)
    plain = fp8fs.json("plan", src, "--scheme", "block")
    asked = fp8fs.json("plan", src, "--scheme", "block", "--tp", 2)
    assert (plain["tp"], plain["splits"]) == (None, [])
    assert asked["splits"]
    assert {**asked, "tp": None, "splits": []} == plain
