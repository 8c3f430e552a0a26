"""The ``quantization_config`` of a pipeline's component, as vLLM-Omni reads it.

vLLM-Omni passes the value to ``Fp8Config(**kwargs)``, so one key too many is a TypeError there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8fs.core.config_vllm import compressed_tensors
from fp8fs.core.recipe import BLOCK, BLOCK_SCHEMES

__all__ = ["quantization_config", "with_quantization"]


def quantization_config(scheme: str, ignored: Iterable[str]) -> dict[str, object]:
    """The value of ``quantization_config``; *ignored* are the module names of all weights left as they are.

    ``is_checkpoint_fp8_serialized`` is required: without it vLLM-Omni 0.30 takes the rest as a request
    to quantize online. per_channel is compressed-tensors, which vLLM-Omni refuses and diffusers reads.
    Source: vLLM-Omni 0.30 ``build_quant_config``.
    """
    names = list(dict.fromkeys(ignored))
    if scheme == "per_channel":
        return compressed_tensors(names)
    value: dict[str, object] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "is_checkpoint_fp8_serialized": True,
        "ignored_layers": names,
    }
    if scheme in BLOCK_SCHEMES:
        value["weight_block_size"] = list(BLOCK)
    return value


def with_quantization(
    config: Mapping[str, object], scheme: str, ignored: Iterable[str]
) -> dict[str, object]:
    """A new config that equals *config* but for ``quantization_config``."""
    return {**config, "quantization_config": quantization_config(scheme, ignored)}
