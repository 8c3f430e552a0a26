"""vLLM and transformers read a real mount, and compute what they compute from the BF16 source with online FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader import harness
from tests.loader.mounts import MountedView
from tests.loader.reference_llm import write_dequantized_model
from tests.loader.test_llm_harness import MODELS, ONLINE

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

Mount = Callable[..., MountedView]
CASES = [
    pytest.param(
        model,
        scheme,
        marks=[pytest.mark.engine_ci] if (model, scheme) == ("llama", "per_channel") else [],
    )
    for model in MODELS
    for scheme in ONLINE
]


@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_vllm_equals_its_online_fp8(
    model: str,
    scheme: str,
    mounted: Mount,
    llm_source: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Cold and warm, a view gives the tokens and log probabilities of vLLM's own online quantization, bit for bit."""
    quantization, options = ONLINE[scheme]
    source = llm_source(model)
    online = harness.generate(
        source, "--quantization", quantization, *options, workdir=tmp_path / "online"
    )
    view = mounted(source, "--scheme", scheme)
    assert harness.generate(view.path, *options, workdir=tmp_path / "cold") == online
    view.assert_made_once()
    view.remount()
    assert harness.generate(view.path, *options, workdir=tmp_path / "warm") == online
    view.assert_nothing_made()


def test_vllm_per_tensor_equals_online(
    mounted: Mount, llm_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """A per-tensor view gives what vLLM's own online fp8 gives, with the operators that the CPU build lacks."""
    source = llm_source("llama")
    view = mounted(source, "--scheme", "per_tensor")
    stored = harness.generate(view.path, "--shim", workdir=tmp_path / "stored")
    online = harness.generate(
        source, "--quantization", "fp8", "--shim", workdir=tmp_path / "online"
    )
    assert stored == online


@pytest.mark.parametrize(
    "scheme", [pytest.param("per_channel", marks=pytest.mark.engine_ci), "block", "block_free"]
)
def test_transformers_reads_the_view(
    scheme: str, mounted: Mount, llm_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers reads weights and scales of a cold view: dequantized, each equals the offline reference."""
    source = llm_source("llama")
    write_dequantized_model(source, tmp_path / "reference", scheme=scheme)
    view = mounted(source, "--scheme", scheme)
    arguments = (tmp_path / "reference", view.path)
    result = harness.run_script("vllm", "hf_logits.py", *arguments, workdir=tmp_path / "logits")
    weights = result["weights"][str(view.path)]
    assert weights["compared"] > 0
    assert weights["worst"] < 0.004  # half a unit in the last place of BF16
    assert result["logits"][str(view.path)] < 0.1  # ignored scales give over 1
    view.assert_made_once()
