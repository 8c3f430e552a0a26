"""Load checkpoints with transformers' ``from_pretrained`` and report how far their logits are from the first one's.

A quantized checkpoint is read twice: as it is (activations are quantized too, so its logits only come near), and with
the request to dequantize, where its weights can be compared with the reference's one by one.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import reporting
import torch

INPUT_IDS = torch.arange(40, 48).reshape(1, -1)


def load_engine() -> None:
    """Import what every run needs."""
    from transformers import AutoModelForCausalLM  # noqa: F401


def dequantizing(checkpoint: str) -> Any:
    """What to pass as quantization_config so that transformers dequantizes, or None for an unquantized checkpoint."""
    import transformers

    config = json.loads(Path(checkpoint, "config.json").read_text()).get("quantization_config")
    if config is None:
        return None
    if config["quant_method"] == "fp8":
        return transformers.FineGrainedFP8Config(dequantize=True)
    return transformers.CompressedTensorsConfig(run_compressed=False)


def load(checkpoint: str, quantization: Any = None) -> Any:
    import transformers

    chosen = {} if quantization is None else {"quantization_config": quantization}
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, **chosen
    ).eval()


def relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


@torch.no_grad()
def main(options: argparse.Namespace) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    reference = load(options.checkpoints[0])
    logits, weights = {}, {}
    for checkpoint in options.checkpoints[1:]:
        output = load(checkpoint)(INPUT_IDS).logits
        logits[checkpoint] = relative_difference(output, reference(INPUT_IDS).logits)
        quantization = dequantizing(checkpoint)
        if quantization is not None:
            dequantized = load(checkpoint, quantization).state_dict()
            differences = [
                relative_difference(dequantized[name], w)
                for name, w in reference.state_dict().items()
            ]
            weights[checkpoint] = {"compared": len(differences), "worst": max(differences)}
    return {"logits": logits, "weights": weights}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", help="the first is the reference")
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
