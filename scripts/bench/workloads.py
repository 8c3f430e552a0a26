"""Checkpoints that ``make_checkpoint.py`` does not make: a sparse giant, and many small tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["GIANT_SHARDS", "giant", "small_tensors"]

GIANT_SHARDS = 200
_LAYERS, _EXPERTS, _HIDDEN, _EXPERT_ROWS, _VOCAB = 50, 664, 4096, 1792, 151_936


def _config(layers: int, hidden: int, intermediate: int, experts: int, vocab: int) -> str:
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "model_type": "qwen3_moe" if experts else "llama",
        "num_attention_heads": max(1, hidden // 128),
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
    }
    if experts:
        config |= {
            "decoder_sparse_step": 1,
            "moe_intermediate_size": intermediate,
            "num_experts": experts,
            "num_experts_per_tok": 8,
        }
    return json.dumps(config, indent=1)


def _moe() -> Iterator[tuple[str, tuple[int, ...]]]:
    h, f = _HIDDEN, _EXPERT_ROWS
    yield "model.embed_tokens.weight", (_VOCAB, h)
    for layer in range(_LAYERS):
        p = f"model.layers.{layer}"
        yield f"{p}.input_layernorm.weight", (h,)
        for leaf, rows in (("q", h), ("k", 1024), ("v", 1024)):
            yield f"{p}.self_attn.{leaf}_proj.weight", (rows, h)
        yield f"{p}.self_attn.o_proj.weight", (h, h)
        yield f"{p}.self_attn.q_norm.weight", (128,)
        yield f"{p}.self_attn.k_norm.weight", (128,)
        yield f"{p}.post_attention_layernorm.weight", (h,)
        yield f"{p}.mlp.gate.weight", (_EXPERTS, h)
        for expert in range(_EXPERTS):
            q = f"{p}.mlp.experts.{expert}"
            yield f"{q}.gate_proj.weight", (f, h)
            yield f"{q}.up_proj.weight", (f, h)
            yield f"{q}.down_proj.weight", (h, f)
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (_VOCAB, h)


def _header(tensors: list[tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        nbytes = 2
        for side in shape:
            nbytes *= side
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def giant(folder: Path) -> Path:
    """200 shards, 100,000 tensors, 1.4 TB of BF16 whose data are holes: only headers take space."""
    tensors = list(_moe())
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(GIANT_SHARDS):
        first = len(tensors) * number // GIANT_SHARDS
        last = len(tensors) * (number + 1) // GIANT_SHARDS
        name = f"model-{number + 1:05d}-of-{GIANT_SHARDS:05d}.safetensors"
        preamble, data_bytes = _header(tensors[first:last])
        with open(folder / name, "wb") as file:
            file.write(preamble)
            file.truncate(len(preamble) + data_bytes)
        weight_map |= {tensor: name for tensor, _ in tensors[first:last]}
        total += data_bytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = _config(_LAYERS, _HIDDEN, _EXPERT_ROWS, _EXPERTS, _VOCAB)
    (folder / "config.json").write_text(config)
    return folder


def small_tensors(folder: Path, count: int, side: int = 64) -> Path:
    """About *count* square weights of *side* rows in one shard; values are pseudo-random finite BF16."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    leaves = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj")
    tensors: list[tuple[str, tuple[int, ...]]] = [
        (
            f"model.layers.{number // len(leaves)}.{leaves[number % len(leaves)]}.weight",
            (side, side),
        )
        for number in range(count)
    ]
    preamble, data_bytes = _header(tensors)
    # High bytes 0x3C..0x3F and 0xBC..0xBF: magnitudes from 0.008 to 2, never NaN or Inf.
    noise = bytearray(random.Random(0).randbytes(1 << 20))
    noise[1::2] = bytes((value & 0x83) | 0x3C for value in noise[1::2])
    with open(folder / "model.safetensors", "wb") as file:
        file.write(preamble)
        left = data_bytes
        while left:
            left -= file.write(noise[: min(left, len(noise))])
    config = _config(max(1, count // len(leaves)), side, side, 0, side)
    (folder / "config.json").write_text(config)
    return folder
