"""The ``quantization_config`` of a transformers model, as vLLM, transformers and SGLang read it.

Two dialects: compressed-tensors (per_channel), and ``quant_method: fp8`` (per_tensor and blocks), whose
readers know the ignore list under two names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8fs.core.recipe import BLOCK, BLOCK_SCHEMES

__all__ = [
    "ALWAYS_IGNORED",
    "compressed_tensors",
    "quantization_config",
    "with_quantization",
]

ALWAYS_IGNORED = ("lm_head",)
"""Named even where the checkpoint has none: a tied head is built by engines all the same."""


def quantization_config(scheme: str, ignored: Iterable[str]) -> dict[str, object]:
    """The value of ``quantization_config``; *ignored* are the module names of all weights left as they are.

    Source: vLLM 0.32 ``Fp8Config.from_config`` and ``CompressedTensorsConfig``, transformers 5.19 ``FineGrainedFP8Config``.
    """
    names = list(dict.fromkeys((*ignored, *ALWAYS_IGNORED)))
    if scheme == "per_channel":
        return compressed_tensors(names)
    value: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if scheme in BLOCK_SCHEMES:
        value["weight_block_size"] = list(BLOCK)
    else:
        value["ignored_layers"] = names
    value["modules_to_not_convert"] = names
    return value


def compressed_tensors(ignored: Iterable[str]) -> dict[str, object]:
    """compressed-tensors for FP8 weights with one static scale per row, activations dynamic per token."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
        "ignore": list(dict.fromkeys(ignored)),
    }


def with_quantization(
    config: Mapping[str, object], scheme: str, ignored: Iterable[str]
) -> dict[str, object]:
    """A new config that equals *config* but for ``quantization_config``."""
    return {**config, "quantization_config": quantization_config(scheme, ignored)}
