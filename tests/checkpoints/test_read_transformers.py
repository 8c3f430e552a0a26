"""transformers reads mounted views of its own classes, and computes what it computes from the dequantized weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fp8fs
from tests.acceptance.harness import ROOT, Fp8fs, clean_up
from tests.conftest import need_package

pytestmark = [pytest.mark.fuse, pytest.mark.loader, pytest.mark.slow]


@dataclass(frozen=True)
class Reading:
    """One kind of ``read_side.py``, how it is mounted, and the class that reads it."""

    kind: str
    reader: str
    options: tuple[str, ...] = ()


READINGS = {
    "Llama": Reading("llama", "LlamaForCausalLM"),
    "Llama, tied": Reading("llama tied", "LlamaForCausalLM"),
    "Llama, no head": Reading("llama", "LlamaModel"),
    "fused on disk": Reading("phi3", "Phi3ForCausalLM"),
    "shared_expert_gate": Reading("qwen2 moe", "Qwen2MoeForCausalLM"),
    "shared_expert_gate, no head": Reading("qwen2 moe", "Qwen2MoeModel"),
    "experts one by one": Reading("qwen3 moe", "Qwen3MoeForCausalLM"),
    "w1, w2, w3": Reading("mixtral", "MixtralForCausalLM"),
    "correction biases": Reading("deepseek", "DeepseekV3ForCausalLM"),
    "stacked experts, kept": Reading("gpt-oss", "GptOssForCausalLM"),
    "stacked experts beside a tower, kept": Reading(
        "qwen3 vl moe", "Qwen3VLMoeForConditionalGeneration"
    ),
    "stacked experts, kept, that could be split": Reading(
        "qwen3 moe stacked", "Qwen3MoeForCausalLM"
    ),
    "stacked experts, split": Reading(
        "qwen3 moe stacked", "Qwen3MoeForCausalLM", ("--split-experts",)
    ),
    "Mixtral's experts, split": Reading(
        "mixtral stacked", "MixtralForCausalLM", ("--split-experts",)
    ),
    "experts that are stored [in, out], split": Reading(
        "llama4", "Llama4ForCausalLM", ("--split-experts",)
    ),
    "visual, read as model.visual": Reading("qwen2.5 vl", "Qwen2_5_VLForConditionalGeneration"),
    "visual, no head": Reading("qwen2.5 vl", "Qwen2_5_VLModel"),
    "wrapper": Reading("qwen3.5", "Qwen3_5ForConditionalGeneration"),
    "text-only model of a wrapper": Reading("qwen3.5", "AutoModelForCausalLM"),
    "a pipeline's text encoder": Reading("t5", "T5EncoderModel"),
    "vision_tower": Reading("gemma3", "Gemma3ForConditionalGeneration"),
    "vision_tower and projector": Reading("llava", "LlavaForConditionalGeneration"),
}
CLOSE = 0.005
"""Of the largest output: what rounding to BF16 may make of it, on which a wrong scale is far from."""
FAR = 0.2
"""Of the largest output: more than FP8 makes of it, and less than a part at the wrong place does."""


def run_side(*arguments: object) -> str:
    """What ``read_side.py`` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoints.read_side", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind."""
    need_package("transformers")
    need_package("compressed_tensors")
    folder = tmp_path_factory.mktemp("kinds")
    run_side("make", folder)
    return folder


@pytest.fixture(scope="module")
def results(
    sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, Any]]]:
    """Every reading, from a live mount."""
    place = tmp_path_factory.mktemp("read")
    command = Fp8fs(place / "store")
    views: dict[tuple[str, tuple[str, ...]], Path] = {}
    jobs = []
    try:
        for reading in READINGS.values():
            source, key = sources / reading.kind, (reading.kind, reading.options)
            if key not in views:
                views[key] = place / f"view{len(views)}"
                command.mount(source, views[key], *reading.options)
            jobs.append(
                {
                    "source": str(source),
                    "view": str(views[key]),
                    "class": reading.reader,
                    "scratch": str(place),
                }
            )
        (place / "jobs.json").write_text(json.dumps(jobs))
        found = json.loads(run_side("read", place / "jobs.json"))
        yield dict(zip(READINGS, found, strict=True))
    finally:
        clean_up(place)


@pytest.mark.parametrize("name", READINGS)
def test_the_class_reads_the_view(name: str, results: dict[str, dict[str, Any]]) -> None:
    """No tensor is missing, left over or of another shape; outputs equal the dequantized reference's, near the source's."""
    result = results[name]
    headless = READINGS[name].reader.endswith("Model")
    allowed = {"unexpected_keys": ["lm_head.weight"]} if headless else {}
    assert result["wrong"] in ({}, allowed)
    assert result["off"] <= CLOSE * result["largest"]
    assert 0 < result["drift"] <= FAR * result["largest"]


WHOLE = {
    name: reading
    for name, reading in READINGS.items()
    if "For" in reading.reader and not reading.reader.startswith("Auto")
}


@pytest.fixture(scope="module")
def matches(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers' FP8 quantizer makes of the config of each whole model."""
    place = tmp_path_factory.mktemp("match")
    jobs = []
    for reading in WHOLE.values():
        tree = fp8fs.build(
            sources / reading.kind,
            store=place / "store",
            scheme="block",
            split_experts="--split-experts" in reading.options,
        )
        source = str(sources / reading.kind)
        jobs.append({"source": source, "view": str(tree), "class": reading.reader})
    (place / "jobs.json").write_text(json.dumps(jobs))
    return dict(zip(WHOLE, json.loads(run_side("match", place / "jobs.json")), strict=True))


@pytest.mark.parametrize("name", WHOLE)
def test_what_the_reader_builds_as_fp8_is_fp8(name: str, matches: dict[str, Any]) -> None:
    """By its own matching of the ignore list the class has FP8 modules where the view has FP8 weights, and nowhere else."""
    assert matches[name]["built"]
    assert matches[name]["built"] == matches[name]["stored"]
