"""One quantizer per implementation of the protocol."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fp8fs.core.quantizer import Quantizer


def _torch(device: str) -> Quantizer:
    pytest.importorskip("torch", reason="torch is not installed")
    from fp8fs.quant.cuda import TorchQuantizer

    return TorchQuantizer(device)


def _gpu() -> Quantizer:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        if "gpu" in os.environ.get("FP8FS_REQUIRE", "").split(","):
            pytest.fail("FP8FS_REQUIRE names gpu, and torch sees no CUDA device")
        pytest.skip("torch sees no CUDA device")
    return _torch("cuda:0")


def _child() -> Quantizer:
    pytest.importorskip("torch", reason="torch is not installed")
    from fp8fs.quant.proxy import ChildQuantizer

    return ChildQuantizer("cpu")


def _cpu() -> Quantizer:
    from fp8fs.quant.cpu import CpuQuantizer

    return CpuQuantizer()


@pytest.fixture(
    scope="package",
    params=["cpu", "torch", "child", pytest.param("gpu", marks=pytest.mark.gpu)],
)
def quantizer(request: pytest.FixtureRequest) -> Iterator[Quantizer]:
    """Each implementation of the protocol in turn."""
    made = {"cpu": _cpu, "torch": lambda: _torch("cpu"), "child": _child, "gpu": _gpu}[
        request.param
    ]()
    yield made
    made.close()
