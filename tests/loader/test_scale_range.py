"""What vLLM's load-time requantization does to weights under very small and very large scales: the measurement."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fp8fs.core.scale_range import HIGHEST, LOWEST
from tests.loader import harness

pytestmark = [pytest.mark.loader, pytest.mark.slow]

SCALES = (
    1e-11,
    1e-9,
    1e-8,
    3e-8,
    1e-7,
    1e-6,
    1e-5,
    3.1e-5,
    1e-3,
    1.0,
    100.0,
    157.0,
    158.0,
    200.0,
    300.0,
    1000.0,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[float, Any]]:
    """Scheme -> scale -> bytes changed, error before and after, with vLLM's own functions."""
    workdir = tmp_path_factory.mktemp("requantize")
    result = harness.run_script("vllm", "requantize.py", json.dumps(SCALES), workdir=workdir)
    return {scheme: dict(zip(SCALES, each, strict=True)) for scheme, each in result.items()}


def test_inside_the_range_nothing_changes(found: dict[str, dict[float, Any]]) -> None:
    """per_tensor weights have the bytes of the view, and outside of the range some have not."""
    for scale, measured in found["per_tensor"].items():
        inside = LOWEST <= scale < HIGHEST
        assert (measured["changed"] == 0.0) == inside, scale


def test_little_is_lost_just_outside(found: dict[str, dict[float, Any]]) -> None:
    """The error is that of FP8 itself down to scales of 1e-7; below 1e-8 and above 200 it grows fast."""
    grown = {s: m["loaded"] / m["stored"] for s, m in found["per_tensor"].items()}
    assert all(grown[scale] < 1.01 for scale in SCALES if 3e-8 <= scale < 160)
    assert 1.05 < grown[1e-8] < 1.5
    assert grown[1e-9] > 5
    assert grown[1e-11] > 30  # nothing is left: an error of 1
    assert 1.1 < grown[200.0] < 2
    assert grown[300.0] > 5


def test_block_scales_have_no_such_range(found: dict[str, dict[float, Any]]) -> None:
    """Power-of-two scales change no value at any size; free ones lose the same at every size above the floor.

    A block whose largest code is below 256 gets half the scale and codes of twice the value: the same numbers.
    """
    assert all(measured["loaded"] == measured["stored"] for measured in found["block"].values())
    grown = {s: m["loaded"] / m["stored"] for s, m in found["block_free"].items() if s > 1e-6}
    assert 1.25 < min(grown.values()) <= max(grown.values()) < 1.6
