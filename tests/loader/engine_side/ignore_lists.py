"""Asks vLLM's own matchers which modules an ignore list keeps unquantized, as each model class prepares it.

    ignore_lists.py QUESTIONS.json --result FILE

A question has a class, a ``quantization_config`` and module names of the checkpoint with whether they are FP8. The result
lists what is answered differently, by question.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "site"))

import torchvision_on_cpu

torchvision_on_cpu.install()

from reporting import run_and_report  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402
from vllm.model_executor.layers.quantization.compressed_tensors.utils import (  # noqa: E402
    should_ignore_layer,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # noqa: E402
    is_layer_skipped,
)
from vllm.model_executor.model_loader.utils import configure_quant_config  # noqa: E402
from vllm.model_executor.models.registry import ModelRegistry  # noqa: E402

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def runtime_names(model_class: Any, module: str) -> Iterator[str]:
    """What the class calls a module of the checkpoint, alone and fused; nothing if it has none."""
    mapper = getattr(model_class, "hf_to_vllm_mapper", None)
    names = [f"{module}.weight"]
    if mapper is not None:
        names = mapper.apply_list(names)
    for name in names:
        yield (alone := name.removesuffix(".weight"))
        parent, _, leaf = alone.rpartition(".")
        if leaf in FUSED and ".experts." not in alone:
            yield f"{parent}.{FUSED[leaf]}"


def is_ignored(config: Any, name: str) -> bool:
    """By the function with which the quantization method itself asks."""
    packed: Mapping[str, list[str]] = config.packed_modules_mapping
    if config.get_name() == "compressed-tensors":
        return bool(should_ignore_layer(name, ignore=config.ignore, fused_mapping=packed))
    return bool(
        is_layer_skipped(
            name,
            config.ignored_layers,
            packed,
            match_mode=config.ignored_layers_match_mode,
        )
    )


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The names that were asked for, and those of them whose answer is wrong."""
    model_class = ModelRegistry._try_load_model_cls(question["class"])
    settings = question["config"]
    config = get_quantization_config(settings["quant_method"]).from_config(settings)
    configure_quant_config(config, model_class)
    asked, wrong = 0, []
    for module, fp8 in question["modules"].items():
        for name in runtime_names(model_class, module):
            asked += 1
            if is_ignored(config, name) is fp8:
                wrong.append(name)
    return {"asked": asked, "wrong": wrong}


def main(options: argparse.Namespace) -> dict[str, Any]:
    questions = json.loads(options.questions.read_text())
    return {name: answer(question) for name, question in questions.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", type=Path)
    run_and_report(main, parser)
