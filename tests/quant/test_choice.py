"""Which quantizer a --device word gives, without torch or a GPU to ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8fs import quant
from fp8fs.errors import DeviceError, UsageError
from fp8fs.quant.cpu import CpuQuantizer
from fp8fs.quant.proxy import FallbackQuantizer
from fp8fs.quant.zeros import ZerosQuantizer


def with_devices(monkeypatch: pytest.MonkeyPatch, count: int, *, torch: bool = True) -> None:
    monkeypatch.setattr(quant, "cuda_devices", lambda: count)
    monkeypatch.setattr(quant.importlib.util, "find_spec", lambda name: object() if torch else None)


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto is CUDA where there is a device and torch, else the CPU."""
    with_devices(monkeypatch, 0)
    assert isinstance(quant.make_quantizer("auto"), CpuQuantizer)
    with_devices(monkeypatch, 1, torch=False)
    assert isinstance(quant.make_quantizer("auto"), CpuQuantizer)
    with_devices(monkeypatch, 2)
    chosen = quant.make_quantizer("auto")
    assert isinstance(chosen, FallbackQuantizer)
    assert chosen.name == "cuda:0"


def test_cpu_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpu is the CPU wherever it is asked for."""
    with_devices(monkeypatch, 4)
    assert quant.make_quantizer("cpu").name == "cpu"


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda and cuda:N name a device that is there; another is a DeviceError with a hint."""
    with_devices(monkeypatch, 2)
    assert quant.make_quantizer("cuda").name == "cuda:0"
    assert quant.make_quantizer("cuda:1").name == "cuda:1"
    with pytest.raises(DeviceError, match="cuda:3 is not there: 2 CUDA devices") as caught:
        quant.quantizer_factory("cuda:3")
    assert "--device cpu" in caught.value.hint


def test_cuda_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without torch says what to install."""
    with_devices(monkeypatch, 1, torch=False)
    with pytest.raises(DeviceError, match="needs torch") as caught:
        quant.quantizer_factory("cuda")
    assert "fp8fs[gpu]" in caught.value.hint


@pytest.mark.parametrize("word", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "cpu\n", "mps"])
def test_unknown_word(word: str) -> None:
    """Any other word is a usage error that lists the right ones."""
    with pytest.raises(UsageError, match="unknown device") as caught:
        quant.quantizer_factory(word)
    assert caught.value.hint == "auto, cpu, cuda or cuda:N"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("1,0", 2),
        ("0,-1,1", 1),
        ("0,1,2", 2),
        ("GPU-ab", 1),
    ],
)
def test_visible_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    """Devices are those with a node in /dev that CUDA_VISIBLE_DEVICES leaves visible."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert quant.cuda_devices(str(tmp_path)) == count
    assert quant.cuda_devices(str(tmp_path / "missing")) == 0


def test_zeros() -> None:
    """The zeros quantizer fills everything it is given, under every scheme."""
    zeros = ZerosQuantizer()
    assert zeros.tensor_scale(zeros.amax(bytes(8), "BF16")) == 1.0
    one = b"\0\0\x80\x3f"
    for write in (
        lambda d, s: zeros.quantize_rows(bytes(12), "BF16", 2, d, s),
        lambda d, s: zeros.cast_rows(bytes(12), "BF16", 2, bytes(8), d, s),
        lambda d, s: zeros.quantize_blocks(bytes(12), "BF16", 2, 3, d, s[:4], pow2=True),
    ):
        data, scale = bytearray(b"\xff" * 6), memoryview(bytearray(8))
        write(data, scale)
        assert data == bytes(6)
        assert bytes(scale[:4]) == one
    data = bytearray(b"\xff" * 6)
    zeros.cast_tensor(bytes(12), "BF16", 1.0, data)
    assert data == bytes(6)
