"""``plan --scan`` and ``build`` say which weights are odd; what is odd about a scale is what FP16 does not bear."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8fs.core.scale_range import HIGHEST, LOWEST, OddScale, scales_sentence
from tests.acceptance.harness import Fp8fs, objects
from tests.builders import Tensor, safetensors_bytes, tensor, wan_like, write_files
from tests.checkpoints.looks import LLM, layer

FILE = "model.safetensors"
GATE, UP = (f"model.layers.9.mlp.{leaf}_proj.weight" for leaf in ("gate", "up"))


def normal(amax: float, seed: int = 3) -> torch.Tensor:
    """Normal values whose largest magnitude is *amax*, in F32 so that any magnitude will do."""
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
    return values * (amax / values.abs().max())


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A model with every kind of odd weight, and sound ones beside them."""
    folder = tmp_path / "src"
    write_files(folder, {}, LLM)
    bad = normal(1.0)
    bad[3, 5] = float("-inf")
    tensors = {
        layer(0): normal(0.1),
        layer(1): torch.zeros(64, 64),
        layer(2): bad,
        layer(3): normal(448 * 2e-9),
        layer(4): normal(448 * 300.0),
        layer(5): normal(448 * 3.2e-5),
        layer(6): normal(448 * 150.0),
        GATE: normal(448 * 1e-6),
        UP: normal(448 * 1e-5, seed=4),
    }
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


ODD = {layer(3): 2e-9, layer(4): 300.0, GATE: 1e-5, UP: 1e-5}
"""Weight -> its scale: gate and up share the larger one."""


def scales_in(document: Any) -> dict[str, float]:
    assert {odd["component"] for odd in document["odd_scales"]} <= {""}
    return {odd["tensor"]: float(f"{odd['scale']:.5g}") for odd in document["odd_scales"]}


def test_a_scan_finds_what_is_odd(fp8fs: Fp8fs, src: Path) -> None:
    """NaN and Inf, weights of zeros, and per_tensor scales that FP16 does not bear, each by name; nothing is made."""
    found = fp8fs.json("plan", src, "--scan", "--scheme", "per_tensor")
    assert found["scanned"]
    assert found["non_finite"] == [{"component": "", "tensor": layer(2), "index": 3 * 64 + 5}]
    assert found["zeros"] == [{"component": "", "tensor": layer(1)}]
    assert scales_in(found) == ODD
    assert objects(fp8fs.store) == {}


@pytest.mark.parametrize("scheme", ["per_channel", "block", "block_free"])
def test_other_schemes_have_no_odd_scales(fp8fs: Fp8fs, src: Path, scheme: str) -> None:
    """Their scales are read as they are, or in FP32."""
    found = fp8fs.json("plan", src, "--scan", "--scheme", scheme)
    assert found["odd_scales"] == []
    assert len(found["zeros"]) == len(found["non_finite"]) == 1


def test_a_scan_says_how_to_keep_them(fp8fs: Fp8fs, src: Path) -> None:
    """The text has --keep for what is odd; with it nothing odd is left."""
    told = fp8fs.run("plan", src, "--scan", "--scheme", "per_tensor").stderr
    (line,) = [line for line in told.splitlines() if "outside" in line]
    words = line.partition("hint: ")[2].split()
    assert words == [word for name in ODD for word in ("--keep", name)]
    again = fp8fs.json("plan", src, "--scan", "--scheme", "per_tensor", *words)
    assert again["odd_scales"] == []
    kept = {row["name"] for row in again["tensors"] if row["dtype_out"] == "F32"}
    assert kept == {*ODD, layer(2)}


def test_a_plan_without_a_scan_knows_nothing(fp8fs: Fp8fs, src: Path) -> None:
    """It says that it did not look."""
    found = fp8fs.json("plan", src)
    assert found["scanned"] is False
    assert found["non_finite"] == found["zeros"] == found["odd_scales"] == []


def test_a_build_says_the_same_each_time(fp8fs: Fp8fs, src: Path) -> None:
    """A line for each odd weight that is made, the count and the names at the end; the next build, which makes nothing,
    has them at the end too."""
    made = fp8fs.run("build", src, "--scheme", "per_tensor", "--json")
    lines = made.stderr.splitlines()
    for name in ODD:
        assert sum(f"{name}: its scale" in line for line in lines) == 1
    assert sum("4 weights have scales outside" in line for line in lines) == 1
    again = fp8fs.json("build", src, "--scheme", "per_tensor")
    assert scales_in(again) == ODD
    assert fp8fs.json("build", src, "--scheme", "block")["odd_scales"] == []


def test_a_build_that_keeps_nan_reports_no_error(fp8fs: Fp8fs, src: Path) -> None:
    """NaN and Inf, which a build deals with, are a sentence that says so, and no error with advice that is not needed."""
    told = fp8fs.run("build", src).stderr
    assert f"{layer(2)}: NaN or Inf at index 197; kept as it is" in told
    assert "ERROR" not in told
    assert "--keep" not in told


@pytest.mark.fuse
def test_status_counts_them(fp8fs: Fp8fs, src: Path, tmp_path: Path) -> None:
    """A mount warns in its log when it makes one, and status counts."""
    fp8fs.json("plan", src, "--scan", "--scheme", "per_tensor")
    mounted = fp8fs.mount(src, tmp_path / "view", "--scheme", "per_tensor")
    assert fp8fs.status(tmp_path / "view")["odd_scales"] == 0
    (tmp_path / "view" / FILE).read_bytes()
    assert fp8fs.status(tmp_path / "view")["odd_scales"] == len(ODD)
    assert "scales  4 weights" in fp8fs.run("status", tmp_path / "view").stdout
    log = Path(mounted["log_path"]).read_text()
    assert all(f"{name}: its scale" in log for name in ODD)
    fp8fs.unmount(tmp_path / "view")


def test_the_range_is_what_fp16_bears() -> None:
    """Every code survives vLLM's way through FP16 under scales inside the range, and some does not right outside."""

    def survives(scale: float) -> bool:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        codes = codes[~codes.float().isnan()]
        product = codes.to(torch.float16) * torch.tensor(scale)
        assert product.dtype == torch.float16
        again = (product.float() * (1.0 / torch.tensor(scale))).clamp(-448, 448)
        return torch.equal(again.to(torch.float8_e4m3fn).view(torch.uint8), codes.view(torch.uint8))

    inside = torch.logspace(0, 1, 2000, base=HIGHEST / LOWEST) * LOWEST
    assert all(survives(float(scale)) for scale in inside[:-1])
    assert survives(LOWEST)
    assert not survives(HIGHEST)
    assert not any(survives(LOWEST * 2.0**-n * 0.9) for n in range(20))
    assert not any(survives(HIGHEST * 2.0**n) for n in range(20))


def test_many_odd_weights_are_one_sentence() -> None:
    """It names a few, and says how many more there are."""
    found = [OddScale("transformer", f"blocks.{i}.to_q.weight", 1e-7 * (i + 1)) for i in range(50)]
    said = scales_sentence(found)
    assert said.startswith("50 weights have scales outside [3.05e-05, 157.5] (1e-07 to 5e-06)")
    assert said.count("--keep transformer/blocks.") == 8
    assert said.endswith("and 42 more")
    assert scales_sentence(found[:1]).startswith(
        "transformer/blocks.0.to_q.weight: its scale 1e-07"
    )


def test_a_scan_needs_little_memory(tmp_path: Path) -> None:
    """Reading a gigabyte of weights takes a few buffers, not a gigabyte; the last element is seen all the same."""
    src, rows, cols = tmp_path / "src", 16384, 32768
    size = rows * cols * 2
    write_files(src, {}, LLM)
    head: dict[str, Tensor] = {layer(0): tensor(1, "BF16", 16, 16)}
    header = safetensors_bytes(head)
    text = header[8 : 8 + int.from_bytes(header[:8], "little")].rstrip()[:-1]
    text += (
        f', "{layer(1)}": {{"dtype": "BF16", "shape": [{rows}, {cols}], '
        f'"data_offsets": [512, {512 + size}]}}}}'
    ).encode()
    with (src / FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + head[layer(0)][2])
        file.truncate(8 + len(text) + 512 + size)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", 0x7F80))
    # VmHWM: ru_maxrss would be the larger of this and what the process that starts it has.
    code = (
        "import re, sys; from pathlib import Path; from fp8fs.cli import main; code = main(sys.argv[1:]);"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1], file=sys.stderr);"
        "sys.exit(code)"
    )
    fp8fs = Fp8fs(tmp_path / "store")
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", str(src), "--scan", "--json", "--device", "cpu"],
        env=fp8fs.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert f'"index": {rows * cols - 1}' in ran.stdout
    assert int(ran.stderr.split()[-1]) << 10 < 300e6


def poisoned(weight: Tensor, element: int) -> Tensor:
    """A BF16 tensor with +Inf at that place."""
    dtype, shape, data = weight
    return dtype, shape, data[: 2 * element] + b"\x80\x7f" + data[2 * element + 2 :]


@pytest.mark.parametrize("how", ["plan", "build"])
@pytest.mark.parametrize("names", ["checkpoint", "runtime"])
def test_a_bad_weight_of_a_component(fp8fs: Fp8fs, place: Path, how: str, names: str) -> None:
    """A weight of a pipeline's transformer that holds Inf is found, and kept from then on, with what is fused with it."""
    src, stem = place / "src", "diffusion_pytorch_model.safetensors"
    weights = wan_like(src, layers=1, shards=1)["transformer"]
    bad = {name: f"blocks.0.{name}.weight" for name in ("attn1.to_k", "ffn.net.2")}
    broken = {name: poisoned(weights[name], 7) for name in bad.values()}
    write_files(src / "transformer", {stem: weights | broken})
    options = ("--names", names)
    if how == "plan":
        found = fp8fs.json("plan", src, "--scan", *options)["non_finite"]
        assert {(f["component"], f["tensor"], f["index"]) for f in found} == {
            ("transformer", name, 7) for name in bad.values()
        }
    else:
        told = fp8fs.run("build", src, *options).stderr
        assert all(f"{name}: NaN or Inf at index 7; kept as it is" in told for name in bad.values())
    rows = fp8fs.json("plan", src, *options)["tensors"]
    kept = {row["name"] for row in rows if "NaN or Inf" in row["reason"]}
    assert kept == {*bad.values(), *(f"blocks.0.attn1.to_{part}.weight" for part in "qv")}


@pytest.mark.parametrize("how", ["plan", "build"])
def test_a_bad_expert_of_stacked_ones(fp8fs: Fp8fs, place: Path, how: str) -> None:
    """With --split-experts an expert that holds Inf is found in its slice, and the layer's experts are kept with it."""
    src, experts = place / "src", "model.layers.0.mlp.experts"
    stacked = {
        f"{experts}.down_proj": poisoned(tensor(1, "BF16", 3, 64, 48), 64 * 48 + 5),
        f"{experts}.gate_up_proj": tensor(2, "BF16", 3, 96, 64),
        "model.layers.0.self_attn.o_proj.weight": tensor(3, "BF16", 64, 64),
    }
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    write_files(src, {FILE: stacked}, config)
    fp8fs.run(how, src, "--split-experts", *(("--scan",) if how == "plan" else ()))
    rows = fp8fs.json("plan", src, "--split-experts")["tensors"]
    reasons = {row["name"]: row["reason"] for row in rows if row["dtype_out"] == "BF16"}
    assert reasons[f"{experts}.1.down_proj.weight"] == "holds NaN or Inf"
    assert len(reasons) == 9


@pytest.mark.fuse
def test_no_time_is_promised_for_what_cannot_be_made(fp8fs: Fp8fs, tmp_path: Path) -> None:
    """Once a shard is known to hold NaN, status counts none of its bytes as still to come, and names the weight."""
    src, view = tmp_path / "src", tmp_path / "view"
    write_files(src, {}, LLM)
    bad = torch.ones(4096, 4096)
    bad[0, 0] = float("nan")
    for number, weight in enumerate((bad, torch.ones(2048, 2048)), 1):
        save_file({layer(number): weight}, src / f"model-{number:05d}-of-00002.safetensors")
    fp8fs.mount(src, view)
    with pytest.raises(OSError, match="Input/output error"):
        (view / "model-00001-of-00002.safetensors").read_bytes()
    (view / "model-00002-of-00002.safetensors").read_bytes()
    status = fp8fs.status(view)
    assert status["shards"] == {"total": 2, "sealed": 1}
    assert status["gb_per_s"] > 0
    assert not status["eta_s"]
    assert [layer(1) in error["what"] for error in status["errors"]] == [True]
    fp8fs.unmount(view)
