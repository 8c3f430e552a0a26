"""vLLM's own matchers, in the engine's environment, over the ignore lists of views of published models' names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.checkpoints.kinds import Kind, write_kind
from tests.checkpoints.looks import look
from tests.checkpoints.test_weights_llm import GATES, HEADS, MTP, TOWERS
from tests.loader.harness import run_script

pytestmark = [pytest.mark.loader, pytest.mark.slow]

KINDS = {**TOWERS, **GATES, **HEADS, **MTP}
SCHEMES = ("per_tensor", "per_channel")
"""A dialect each; block schemes differ from per_tensor in the list's name only."""

CLASSES = frozenset(
    {
        "DeepseekOCRForCausalLM",
        "DeepseekV3ForCausalLM",
        "GraniteMoeForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "InternVLChatModel",
        "KimiVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlamaForCausalLM",
        "LlavaForConditionalGeneration",
        "MiMoForCausalLM",
        "MiniCPMV",
        "MiniMaxM2ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Step3p5ForCausalLM",
    }
)
"""Those that vLLM 0.32 has, but for Molmo, whose projector is renamed and merged under a name that no rule can know."""


def _class(kind: Kind) -> str:
    (name,) = kind.config["architectures"]  # type: ignore[misc]
    return str(name)


ASKED = [name for name, kind in KINDS.items() if _class(kind) in CLASSES]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the matchers make of every kind's config in each dialect."""
    place = tmp_path_factory.mktemp("ignore")
    questions = {}
    for number, name in enumerate(ASKED):
        kind, src = KINDS[name], place / f"src{number}"
        write_kind(src, kind)
        for scheme in SCHEMES:
            config = look(src, scheme=scheme).json("config.json")
            modules = {weight.removesuffix(".weight"): True for weight in kind.quantized}
            modules |= {weight.removesuffix(".weight"): False for weight in kind.kept}
            questions[f"{name}/{scheme}"] = {
                "class": _class(kind),
                "config": config["quantization_config"],
                "modules": modules,
            }
    (place / "questions.json").write_text(json.dumps(questions))
    found: dict[str, Any] = run_script(
        "vllm", "ignore_lists.py", place / "questions.json", workdir=place
    )
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ASKED)
def test_vllm_ignores_what_is_kept_and_nothing_else(
    name: str, scheme: str, answers: dict[str, Any]
) -> None:
    """By the name of its own module, alone and fused, each kept weight is ignored and no FP8 one is."""
    answer = answers[f"{name}/{scheme}"]
    assert answer["asked"] >= len(KINDS[name].quantized)
    assert answer["wrong"] == []
