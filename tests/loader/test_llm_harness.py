"""vLLM and transformers read FP8 checkpoints that were written offline: proves the harness and the reference writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader import harness
from tests.loader.reference_llm import write_dequantized_model, write_fp8_model

pytestmark = [pytest.mark.loader, pytest.mark.slow]


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_vllm_per_channel_equals_online(
    model: str, llm_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """A per-channel checkpoint gives vLLM's tokens and log probabilities of its own online fp8_per_channel, bit for bit."""
    write_fp8_model(llm_source(model), tmp_path / "fp8", scheme="per_channel")
    stored = harness.generate(tmp_path / "fp8", workdir=tmp_path / "stored")
    online = harness.generate(
        llm_source(model), "--quantization", "fp8_per_channel", workdir=tmp_path / "online"
    )
    assert stored == online


def test_vllm_per_tensor_equals_online(llm_source: Callable[[str], Path], tmp_path: Path) -> None:
    """A per-tensor checkpoint whose fused siblings share scales gives what vLLM's own online fp8 gives (with the shim)."""
    write_fp8_model(llm_source("llama"), tmp_path / "fp8", scheme="per_tensor")
    stored = harness.generate(tmp_path / "fp8", "--shim", workdir=tmp_path / "stored")
    online = harness.generate(
        llm_source("llama"), "--quantization", "fp8", "--shim", workdir=tmp_path / "online"
    )
    assert stored == online


@pytest.mark.parametrize("scheme", ["per_channel", "block", "block_free"])
def test_transformers_reads_what_is_stored(
    scheme: str, llm_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers reads the stored weights and scales: dequantized, each equals the same weight dequantized offline."""
    write_dequantized_model(llm_source("llama"), tmp_path / "reference", scheme=scheme)
    write_fp8_model(llm_source("llama"), tmp_path / "fp8", scheme=scheme)
    arguments = (tmp_path / "reference", tmp_path / "fp8")
    result = harness.run_script("vllm", "hf_logits.py", *arguments, workdir=tmp_path / "logits")
    weights, logits = (
        result["weights"][str(tmp_path / "fp8")],
        result["logits"][str(tmp_path / "fp8")],
    )
    assert weights["compared"] > 0
    assert weights["worst"] < 0.004  # half a unit in the last place of BF16
    assert logits < 0.1  # activations are quantized too; ignored scales give over 1
