"""vLLM and transformers read a real mount, and compute what they compute from the BF16 source with online FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader.forks import ForkedScripts
from tests.loader.mounts import MountedView, cold_and_warm
from tests.loader.reference_llm import write_dequantized_model, write_fp8_model
from tests.loader.test_llm_harness import MODELS, ONLINE

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

Generate = Callable[..., dict[str, Any]]
Mount = Callable[..., MountedView]
Source = Callable[[str], Path]
VISION = "qwen2.5-vl"  # a wrapper around a text model; its tower stays BF16
EXPERTS = ("mixtral", "qwen3-moe")
CASES = [
    pytest.param(
        model,
        scheme,
        marks=[pytest.mark.engine_ci] if (model, scheme) == ("llama", "per_channel") else [],
    )
    for model in (*MODELS, VISION)
    for scheme in ONLINE
]


@pytest.mark.parametrize(("model", "scheme"), CASES)
def test_vllm_equals_its_online_fp8(
    model: str,
    scheme: str,
    mounted: Mount,
    llm_source: Source,
    generate: Generate,
    generate_from_source: Generate,
) -> None:
    """Cold and warm, a view gives the tokens and log probabilities of vLLM's own online quantization, bit for bit."""
    quantization, options = ONLINE[scheme]
    view = mounted(llm_source(model), "--scheme", scheme)
    stored = cold_and_warm(view, lambda path: generate(path, *options))
    assert stored == generate_from_source(model, "--quantization", quantization, *options)


def test_vllm_per_tensor_equals_online(
    mounted: Mount, llm_source: Source, generate: Generate, generate_from_source: Generate
) -> None:
    """A per-tensor view gives what vLLM's own online fp8 gives, with the operators that the CPU build lacks."""
    view = mounted(llm_source("llama"), "--scheme", "per_tensor")
    stored = cold_and_warm(view, lambda path: generate(path, "--shim"))
    assert stored == generate_from_source("llama", "--quantization", "fp8", "--shim")


@pytest.mark.parametrize("model", [*MODELS, VISION, "llama-edges"])
def test_vllm_block_equals_the_dequantized_model(
    model: str, mounted: Mount, llm_source: Source, generate: Generate, tmp_path: Path
) -> None:
    """With BF16 activations, as vLLM's own CPU kernel has them, a block view gives what its dequantized weights give."""
    write_dequantized_model(llm_source(model), tmp_path / "reference", scheme="block")
    view = mounted(llm_source(model), "--scheme", "block")
    stored = cold_and_warm(view, lambda path: generate(path, "--kernel", "amx-block"))
    assert stored == generate(tmp_path / "reference")


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of the log probabilities of the prompts' tokens."""
    pairs = zip(one["prompt_logprobs"], other["prompt_logprobs"], strict=True)
    return max(abs(a - b) for steps in pairs for a, b in zip(*steps, strict=True))


@pytest.mark.parametrize("model", EXPERTS)
def test_vllm_reads_experts(
    model: str,
    mounted: Mount,
    llm_source: Source,
    generate: Generate,
    generate_from_source: Generate,
    tmp_path: Path,
) -> None:
    """A block view of a mixture of experts gives what a checkpoint written offline gives, and its dequantized weights.

    The product of the engine's BF16 experts rounds elsewhere: near is ten times nearer than the BF16 source.
    """
    write_fp8_model(llm_source(model), tmp_path / "fp8", scheme="block")
    write_dequantized_model(llm_source(model), tmp_path / "reference", scheme="block")
    view = mounted(llm_source(model), "--scheme", "block")
    stored = cold_and_warm(view, lambda path: generate(path, "--kernel", "amx-block"))
    assert stored == generate(tmp_path / "fp8", "--kernel", "amx-block")
    reference = generate(tmp_path / "reference")
    assert 10 * distance(stored, reference) < distance(generate_from_source(model), reference)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        pytest.param("llama", "per_channel", marks=pytest.mark.engine_ci),
        ("llama", "block"),
        ("llama", "block_free"),
        *((model, "block") for model in EXPERTS),
    ],
)
def test_transformers_reads_the_view(
    model: str,
    scheme: str,
    mounted: Mount,
    llm_source: Source,
    transformers: ForkedScripts,
    tmp_path: Path,
) -> None:
    """transformers reads weights and scales of a view: dequantized, each equals the offline reference."""
    source = llm_source(model)
    write_dequantized_model(source, tmp_path / "reference", scheme=scheme)
    view = mounted(source, "--scheme", scheme)
    arguments = (tmp_path / "reference", view.path)
    result = cold_and_warm(
        view, lambda _: transformers.run("hf_logits", *arguments, workdir=tmp_path / "logits")
    )
    weights = result["weights"][str(view.path)]
    assert weights["compared"] > 0
    assert weights["worst"] < 0.004  # half a unit in the last place of BF16
    assert result["logits"][str(view.path)] < 0.1  # ignored scales give over 1
