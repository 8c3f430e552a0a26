"""Write a tiny BF16 transformers model with random weights, a byte-level tokenizer and, if it sees, a processor."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import reporting
import torch

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
VISION_TOKENS = {  # key of the config -> token
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PATCH, MERGE = 14, 2
HIDDEN = 256
BASE = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Name -> (config class, model class, what differs from BASE).
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    # Of o_proj the rows, of q, k, v, gate and up the columns end in half a block.
    "llama-edges": ("LlamaConfig", "LlamaForCausalLM", {"hidden_size": HIDDEN + 64}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"tie_word_embeddings": True, "sliding_window": 64},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": HIDDEN,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_heads": 4,
                "patch_size": PATCH,
                "spatial_merge_size": MERGE,
                "window_size": 4 * PATCH * MERGE,
                "out_hidden_size": HIDDEN,
                "fullatt_block_indexes": [1],
            },
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        },
    ),
}


def load_engine() -> None:
    """Import what every run needs."""
    import tokenizers  # noqa: F401
    from transformers import PreTrainedModel  # noqa: F401


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A byte-level tokenizer without merges. Returns the ids of the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*SPECIAL_TOKENS, *VISION_TOKENS.values()]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(
        zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True)
    )
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {token: vocabulary[token] for token in special}


def write_processor(folder: Path) -> None:
    """The settings of an image and video processor that makes one token of everything."""
    pixels = (PATCH * MERGE) ** 2
    settings = {
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
    }
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(settings | kind))


def main(options: argparse.Namespace) -> dict[str, Any]:
    import transformers

    options.directory.mkdir(parents=True)
    ids = write_tokenizer(options.directory)
    config_class, model_class, changes = MODELS[options.model]
    tokens = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"], "pad_token_id": ids["<pad>"]}
    if "vision_config" in changes:
        tokens |= {key: ids[token] for key, token in VISION_TOKENS.items()}
        write_processor(options.directory)
    config = getattr(transformers, config_class)(**(BASE | changes | tokens))
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            if parameter.ndim >= 2:  # different amax for different tensors
                spread = 0.05 * (1 + position % 5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(options.directory)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
