"""Runs in a process of its own: makes tiny checkpoints of real transformers classes, and reads views of them.

    python -m tests.checkpoints.read_side make FOLDER       -> FOLDER/<kind>/config.json, model.safetensors
    python -m tests.checkpoints.read_side read JOBS.json    -> one JSON result per job, on stdout
    python -m tests.checkpoints.read_side match JOBS.json   -> the same, of views with block scales; no weight is loaded

A job has a source, a view of it and a class; its result is what loading the view said, and how far its outputs are from
those of the dequantized reference and of the source.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from tests import oracle

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_HEAD_DIM = {key: value for key, value in TEXT.items() if key != "head_dim"}
MOE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}

KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**TEXT)),
    "llama tied": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**TEXT, tie_word_embeddings=True),
    ),
    "phi3": ("Phi3ForCausalLM", lambda: transformers.Phi3Config(**NO_HEAD_DIM)),
    "qwen2 moe": (
        "Qwen2MoeForCausalLM",
        lambda: transformers.Qwen2MoeConfig(
            **NO_HEAD_DIM, **MOE, shared_expert_intermediate_size=48
        ),
    ),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(**TEXT, **MOE),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4),
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(**{**NO_HEAD_DIM, **LATENT}, **ROUTED),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        lambda: transformers.Llama4TextConfig(
            **TEXT, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=2
        ),
    ),
    "qwen2.5 vl": (
        "Qwen2_5_VLForConditionalGeneration",
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={**QWEN_VISION, "fullatt_block_indexes": [1]},
        ),
    ),
    "qwen3 vl moe": (
        "Qwen3VLMoeForConditionalGeneration",
        lambda: transformers.Qwen3VLMoeConfig(
            text_config={**TEXT, **MOE, "rope_parameters": MROPE},
            vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        ),
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        lambda: transformers.Qwen3_5Config(
            text_config={**TEXT, **LINEAR_ATTENTION, "rope_parameters": MROPE},
            vision_config=QWEN_VISION,
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(text_config=TEXT, vision_config=VISION),
    ),
    "t5": (
        "T5EncoderModel",
        lambda: transformers.T5Config(
            d_model=64, d_ff=96, d_kv=16, num_layers=2, num_heads=4, vocab_size=96
        ),
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT),
            vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        ),
    ),
}
STACKED = ("qwen3 moe", "mixtral")
"""Kinds that are also written as the classes have them at run time: all experts of a layer in one tensor."""


def make(folder: Path) -> None:
    """One checkpoint of each kind, seeded."""
    for kind, (name, config) in KINDS.items():
        torch.manual_seed(0)
        model = getattr(transformers, name)(config()).to(torch.bfloat16)
        model.save_pretrained(folder / kind)
        if kind in STACKED:
            model.save_pretrained(folder / f"{kind} stacked", save_original_format=False)


def _dequantized(view: Path, scheme: str) -> dict[str, torch.Tensor]:
    """The view's tensors with every FP8 weight multiplied out in F32, scales left out."""
    files = oracle.read_folder(view)
    plain: dict[str, torch.Tensor] = {}
    for name, stored in files.items():
        scale = files.get(oracle.scale_name(name, scheme))
        if stored.dtype != "F8_E4M3":
            if "_scale" not in name:
                plain[name] = stored.floats().clone()
            continue
        assert scale is not None, name
        raw = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8)
        values = raw.view(torch.float8_e4m3fn).reshape(stored.shape).float()
        plain[name] = values * scale.floats()
    return plain


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that are a weight each, put back into the [E, in, out] that Llama 4's class has."""
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    plain = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            plain[name] = tensor
        else:
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor.T
    for base, parts in experts.items():
        layer = [parts[number] for number in sorted(parts)]
        gate_up = [torch.cat([part["gate_proj"], part["up_proj"]], dim=1) for part in layer]
        plain[f"{base}.gate_up_proj"] = torch.stack(gate_up)
        plain[f"{base}.down_proj"] = torch.stack([part["down_proj"] for part in layer])
    return plain


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model.eval()(input_ids=torch.arange(3, 19).reshape(1, 16))
    found: torch.Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found


def read(job: dict[str, str]) -> dict[str, Any]:
    """What the class makes of the view, beside the dequantized reference and the source."""
    reader = getattr(transformers, job["class"])
    view, source = Path(job["view"]), Path(job["source"])
    options = {"dtype": torch.float32, "output_loading_info": True}
    # Weights are multiplied out at load: else activations are quantized too, and nothing is equal any more.
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model, said = reader.from_pretrained(view, quantization_config=settings, **options)
    found = _logits(model)
    with tempfile.TemporaryDirectory(dir=job["scratch"]) as scratch:
        reference = Path(scratch)
        (reference / "config.json").write_bytes((source / "config.json").read_bytes())
        tensors = _dequantized(view, "per_channel")
        if job["class"].startswith("Llama4"):
            tensors = _stacked(tensors)
        save_file(tensors, reference / "model.safetensors", metadata={"format": "pt"})
        wanted = _logits(reader.from_pretrained(reference, dtype=torch.float32))
    plain = _logits(reader.from_pretrained(source, dtype=torch.float32))
    return {
        "class": type(model).__name__,
        "wrong": {key: sorted(map(str, value)) for key, value in said.items() if value},
        "largest": float(wanted.abs().max()),
        "off": float((found - wanted).abs().max()),
        "drift": float((found - plain).abs().max()),
    }


def match(job: dict[str, str]) -> dict[str, list[str]]:
    """Modules that transformers' own FP8 quantizer makes FP8 by the view's config, and those that are FP8 in the view."""
    view, source = Path(job["view"]), Path(job["source"])
    settings = json.loads((view / "config.json").read_text())["quantization_config"]
    reader = getattr(transformers, job["class"])
    with torch.device("meta"):
        model = reader(reader.config_class.from_pretrained(source))
    del settings["quant_method"]
    quantizer = FineGrainedFP8HfQuantizer(
        transformers.FineGrainedFP8Config(**settings), pre_quantized=True
    )
    quantizer._process_model_before_weight_loading(model)
    built = {name.rpartition(".")[0] for name in model.state_dict() if name.endswith("_scale_inv")}
    stored = set()
    for name in oracle.read_folder(view):
        if name.endswith("_scale_inv"):
            name = name.removesuffix("_scale_inv")
            for rename in get_model_conversion_mapping(model):
                name, _ = rename.rename_source_key(name)
            stored.add(re.sub(r"(\.experts)\..*|\.weight$", r"\1", name))
    return {"built": sorted(built), "stored": sorted(stored)}


def main(command: str, argument: Path) -> None:
    """One command."""
    if command == "make":
        make(argument)
    else:
        work = {"read": read, "match": match}[command]
        json.dump([work(job) for job in json.loads(argument.read_text())], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
