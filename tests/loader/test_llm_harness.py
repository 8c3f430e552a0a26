"""vLLM and transformers read FP8 checkpoints that were written offline: proves the harness and the reference writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader.forks import ForkedScripts
from tests.loader.reference_llm import write_dequantized_model, write_fp8_model

pytestmark = [pytest.mark.loader, pytest.mark.slow]

Generate = Callable[..., dict[str, Any]]

# Dense decoders; phi3 is fused on disk, llama-tied and gemma3 share their embedding with the head.
MODELS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma3", "phi3")
# Scheme -> vLLM's online quantization of the same numbers, and what the CPU build needs to run it: its own block
# kernel wants AMX, so a CUDA kernel class with a reference product stands in on both sides.
ONLINE: dict[str, tuple[str, tuple[str, ...]]] = {
    "per_channel": ("fp8_per_channel", ()),
    "block_free": ("fp8_per_block", ("--kernel", "triton-block")),
}


@pytest.mark.parametrize("scheme", list(ONLINE))
@pytest.mark.parametrize("model", MODELS)
def test_vllm_equals_its_online_fp8(
    model: str,
    scheme: str,
    llm_source: Callable[[str], Path],
    generate: Generate,
    generate_from_source: Generate,
    tmp_path: Path,
) -> None:
    """A stored checkpoint gives the tokens and log probabilities of vLLM's own online quantization, bit for bit."""
    quantization, options = ONLINE[scheme]
    write_fp8_model(llm_source(model), tmp_path / "fp8", scheme=scheme)
    online = generate_from_source(model, "--quantization", quantization, *options)
    assert generate(tmp_path / "fp8", *options) == online


def test_vllm_per_tensor_equals_online(
    llm_source: Callable[[str], Path],
    generate: Generate,
    generate_from_source: Generate,
    tmp_path: Path,
) -> None:
    """A per-tensor checkpoint whose fused siblings share scales gives what vLLM's own online fp8 gives (with the shim)."""
    write_fp8_model(llm_source("llama"), tmp_path / "fp8", scheme="per_tensor")
    online = generate_from_source("llama", "--quantization", "fp8", "--shim")
    assert generate(tmp_path / "fp8", "--shim") == online


@pytest.mark.parametrize("scheme", ["per_channel", "block", "block_free"])
def test_transformers_reads_what_is_stored(
    scheme: str,
    llm_source: Callable[[str], Path],
    transformers: ForkedScripts,
    tmp_path: Path,
) -> None:
    """transformers reads the stored weights and scales: dequantized, each equals the same weight dequantized offline."""
    write_dequantized_model(llm_source("llama"), tmp_path / "reference", scheme=scheme)
    write_fp8_model(llm_source("llama"), tmp_path / "fp8", scheme=scheme)
    arguments = (tmp_path / "reference", tmp_path / "fp8")
    result = transformers.run("hf_logits", *arguments, workdir=tmp_path / "logits")
    weights, logits = (
        result["weights"][str(tmp_path / "fp8")],
        result["logits"][str(tmp_path / "fp8")],
    )
    assert weights["compared"] > 0
    assert weights["worst"] < 0.004  # half a unit in the last place of BF16
    assert logits < 0.1  # activations are quantized too; ignored scales give over 1
