#!/usr/bin/env python3
"""Write a seeded checkpoint of any size with realistic names and shapes; numpy only, bounded memory.

    scripts/make_checkpoint.py DIR --kind llama --size 4G --shards 8
    scripts/make_checkpoint.py DIR --kind wan   --size 200M
    scripts/make_checkpoint.py DIR --kind h3    --size 200M

The same arguments give the same bytes. Weights are normal with a width-dependent deviation, a few
large outlier columns per matrix (as trained weights have), and norms near one. ``--size`` decides
width and depth; ``--hidden``, ``--layers``, ``--intermediate`` and ``--vocab`` set them by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

CHUNK_ELEMS = 4 << 20
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Spec:
    """One tensor to write. ``role`` decides its values: "linear", "embed", "norm" or "bias"."""

    name: str
    shape: tuple[int, ...]
    role: str = "linear"
    dtype: str = ""

    def nbytes(self, default_dtype: str) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype or default_dtype]


@dataclass(frozen=True)
class Shape:
    """Width and depth of one model."""

    hidden: int
    layers: int
    intermediate: int
    vocab: int

    @property
    def heads(self) -> int:
        return max(1, self.hidden // min(128, max(16, self.hidden // 4)))

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)


# --- families: names and shapes -----------------------------------------------------------------


def llama(s: Shape) -> Iterator[Spec]:
    """Llama as transformers saves it: separate q/k/v and gate/up."""
    h, kv, f = s.hidden, s.kv_heads * s.head_dim, s.intermediate
    yield Spec("model.embed_tokens.weight", (s.vocab, h), "embed")
    for i in range(s.layers):
        p = f"model.layers.{i}"
        yield Spec(f"{p}.input_layernorm.weight", (h,), "norm")
        yield Spec(f"{p}.self_attn.q_proj.weight", (h, h))
        yield Spec(f"{p}.self_attn.k_proj.weight", (kv, h))
        yield Spec(f"{p}.self_attn.v_proj.weight", (kv, h))
        yield Spec(f"{p}.self_attn.o_proj.weight", (h, h))
        yield Spec(f"{p}.post_attention_layernorm.weight", (h,), "norm")
        yield Spec(f"{p}.mlp.gate_proj.weight", (f, h))
        yield Spec(f"{p}.mlp.up_proj.weight", (f, h))
        yield Spec(f"{p}.mlp.down_proj.weight", (h, f))
    yield Spec("model.norm.weight", (h,), "norm")
    yield Spec("lm_head.weight", (s.vocab, h), "embed")


def umt5(s: Shape) -> Iterator[Spec]:
    """The text encoder of Wan: UMT5 with gated feed-forward."""
    h, f = s.hidden, s.intermediate
    yield Spec("shared.weight", (s.vocab, h), "embed")
    for i in range(s.layers):
        p = f"encoder.block.{i}"
        for leaf in "qkvo":
            yield Spec(f"{p}.layer.0.SelfAttention.{leaf}.weight", (h, h))
        yield Spec(
            f"{p}.layer.0.SelfAttention.relative_attention_bias.weight", (32, s.heads), "embed"
        )
        yield Spec(f"{p}.layer.0.layer_norm.weight", (h,), "norm")
        yield Spec(f"{p}.layer.1.DenseReluDense.wi_0.weight", (f, h))
        yield Spec(f"{p}.layer.1.DenseReluDense.wi_1.weight", (f, h))
        yield Spec(f"{p}.layer.1.DenseReluDense.wo.weight", (h, f))
        yield Spec(f"{p}.layer.1.layer_norm.weight", (h,), "norm")
    yield Spec("encoder.final_layer_norm.weight", (h,), "norm")


def _linear(name: str, rows: int, cols: int) -> Iterator[Spec]:
    yield Spec(f"{name}.weight", (rows, cols))
    yield Spec(f"{name}.bias", (rows,), "bias")


def wan(s: Shape) -> Iterator[Spec]:
    """WanTransformer3DModel as diffusers saves it."""
    h, f = s.hidden, s.intermediate
    yield Spec("scale_shift_table", (1, 2, h), "bias")
    yield Spec("patch_embedding.weight", (h, 16, 1, 2, 2))
    yield Spec("patch_embedding.bias", (h,), "bias")
    yield from _linear("condition_embedder.time_embedder.linear_1", h, 256)
    yield from _linear("condition_embedder.time_embedder.linear_2", h, h)
    yield from _linear("condition_embedder.time_proj", 6 * h, h)
    yield from _linear("condition_embedder.text_embedder.linear_1", h, h)
    yield from _linear("condition_embedder.text_embedder.linear_2", h, h)
    for i in range(s.layers):
        p = f"blocks.{i}"
        yield Spec(f"{p}.scale_shift_table", (1, 6, h), "bias")
        for attn in ("attn1", "attn2"):
            for leaf in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _linear(f"{p}.{attn}.{leaf}", h, h)
            yield Spec(f"{p}.{attn}.norm_q.weight", (h,), "norm")
            yield Spec(f"{p}.{attn}.norm_k.weight", (h,), "norm")
        yield Spec(f"{p}.norm2.weight", (h,), "norm")
        yield Spec(f"{p}.norm2.bias", (h,), "bias")
        yield from _linear(f"{p}.ffn.net.0.proj", f, h)
        yield from _linear(f"{p}.ffn.net.2", h, f)
    yield from _linear("proj_out", 64, h)


def _h3_block(p: str, s: Shape, modulated: int) -> Iterator[Spec]:
    h, f = s.hidden, s.intermediate
    if modulated:
        yield from _linear(f"{p}.adaln_proj.linear", modulated * h, h)
    yield Spec(f"{p}.attn.qkv_proj.weight", (3 * h, h))
    yield Spec(f"{p}.attn.q_norm.weight", (s.head_dim,), "norm")
    yield Spec(f"{p}.attn.k_norm.weight", (s.head_dim,), "norm")
    yield Spec(f"{p}.attn.out_proj.weight", (h, h))
    yield Spec(f"{p}.mlp.fc1.weight", (2 * f, h))
    yield Spec(f"{p}.mlp.fc2.weight", (h, f))


def h3(s: Shape) -> Iterator[Spec]:
    """MiniMax-H3's diffusion transformer: qkv and gate/up fused on disk."""
    h = s.hidden
    yield from _linear("video_patch_proj", h, 192)
    yield from _linear("audio_patch_proj", h, 64)
    yield from _linear("condition_proj", h, h)
    yield from _linear("time_embedder.proj_in", h, 256)
    yield from _linear("time_embedder.proj_out", h, h)
    for i in range(2):
        yield from _h3_block(f"token_refiner.blocks.{i}", s, 0)
    for i in range(s.layers):
        yield from _h3_block(f"blocks.{i}", s, 6)
    yield from _linear("final_layer.adaln_proj.linear", 2 * h, h)
    yield from _linear("final_layer.video_out", 192, h)
    yield from _linear("final_layer.audio_out", 64, h)


def vae(s: Shape) -> Iterator[Spec]:
    """A small convolutional autoencoder in F32: nothing in it is quantized."""
    c = max(16, s.hidden // 16 * 16)
    for side in ("encoder", "decoder"):
        yield Spec(f"{side}.conv_in.weight", (c, 3, 3, 3, 3), dtype="F32")
        yield Spec(f"{side}.conv_in.bias", (c,), "bias", "F32")
        for i in range(s.layers):
            p = f"{side}.blocks.{i}.resnets.0"
            yield Spec(f"{p}.norm1.gamma", (c, 1, 1, 1), "norm", "F32")
            yield Spec(f"{p}.conv1.weight", (c, c, 3, 3, 3), dtype="F32")
            yield Spec(f"{p}.conv1.bias", (c,), "bias", "F32")
    yield Spec("quant_conv.weight", (32, 32, 1, 1, 1), dtype="F32")


# --- families: configs --------------------------------------------------------------------------


def llama_config(s: Shape, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.intermediate,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": s.vocab,
    }


def umt5_config(s: Shape, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["UMT5EncoderModel"],
        "d_ff": s.intermediate,
        "d_kv": s.head_dim,
        "d_model": s.hidden,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": True,
        "model_type": "umt5",
        "num_heads": s.heads,
        "num_layers": s.layers,
        "torch_dtype": dtype,
        "vocab_size": s.vocab,
    }


def wan_config(s: Shape, dtype: str) -> dict[str, object]:
    return {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": "0.35.0",
        "attention_head_dim": s.head_dim,
        "ffn_dim": s.intermediate,
        "in_channels": 16,
        "num_attention_heads": s.heads,
        "num_layers": s.layers,
        "out_channels": 16,
        "patch_size": [1, 2, 2],
        "text_dim": s.hidden,
    }


def h3_config(s: Shape, dtype: str) -> dict[str, object]:
    return {
        "_class_name": "MiniMaxH3DiTModel",
        "_diffusers_version": "0.35.0",
        "attention_head_dim": s.head_dim,
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_attention_heads": s.heads,
        "num_hidden_layers": s.layers,
        "num_refiner_layers": 2,
    }


def vae_config(s: Shape, dtype: str) -> dict[str, object]:
    return {"_class_name": "AutoencoderKLWan", "_diffusers_version": "0.35.0", "z_dim": 16}


@dataclass(frozen=True)
class Family:
    """One component's names, config and file stem."""

    tensors: Callable[[Shape], Iterator[Spec]]
    config: Callable[[Shape, str], dict[str, object]]
    stem: str
    ratio: float  # intermediate / hidden


LLAMA = Family(llama, llama_config, "model", 3.5)
UMT5 = Family(umt5, umt5_config, "model", 2.5)
WAN = Family(wan, wan_config, "diffusion_pytorch_model", 4.0)
H3 = Family(h3, h3_config, "diffusion_pytorch_model", 2.75)
VAE = Family(vae, vae_config, "diffusion_pytorch_model", 1.0)

PIPELINES: dict[str, dict[str, object]] = {
    "wan": {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.35.0",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    },
    "h3": {
        "_class_name": "MiniMaxH3Pipeline",
        "_diffusers_version": "0.35.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "LlamaForCausalLM"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["minimax_h3", "MiniMaxH3DiTModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    },
}


def total_bytes(family: Family, shape: Shape, dtype: str) -> int:
    return sum(t.nbytes(dtype) for t in family.tensors(shape))


def choose_shape(family: Family, size: int, dtype: str, fixed: argparse.Namespace) -> Shape:
    """The widest model of at least four layers within *size*, then as many layers as fit."""

    def shaped(hidden: int, layers: int) -> Shape:
        hidden = fixed.hidden or hidden
        intermediate = fixed.intermediate or round(hidden * family.ratio / 16) * 16
        vocab = fixed.vocab or max(64, min(32000, hidden * 8))
        return Shape(hidden, fixed.layers or layers, intermediate, vocab)

    widths = (32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192)
    fitting = [w for w in widths if total_bytes(family, shaped(w, 4), dtype) <= size]
    hidden = max(fitting, default=widths[0])
    one = total_bytes(family, shaped(hidden, 1), dtype)
    per_layer = total_bytes(family, shaped(hidden, 2), dtype) - one
    layers = 1 if per_layer <= 0 else max(1, 1 + (size - one) // per_layer)
    return shaped(hidden, layers)


# --- values and files ---------------------------------------------------------------------------


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to BF16 bits, round to nearest even (finite inputs)."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return to_bf16(values).tobytes()
    return values.astype(np.float16 if dtype == "F16" else np.float32).tobytes()


def write_values(out: BinaryIO, spec: Spec, dtype: str, seed: int) -> None:
    """The tensor's bytes, CHUNK_ELEMS at a time; decided by seed and name alone."""
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=16).digest()
    rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
    elems = math.prod(spec.shape)
    cols = spec.shape[-1] if len(spec.shape) > 1 else 1
    fan_in = math.prod(spec.shape[1:]) if len(spec.shape) > 1 else 1
    deviation = {"norm": 0.05, "bias": 0.02, "embed": 0.02}.get(spec.role, 0.8 / math.sqrt(fan_in))
    outliers = rng.integers(0, cols, size=2) if spec.role == "linear" and cols >= 16 else []
    step = max(cols, CHUNK_ELEMS // cols * cols)
    for start in range(0, elems, step):
        values = rng.standard_normal(min(step, elems - start), dtype=np.float32)
        values *= np.float32(deviation)
        if spec.role == "norm":
            values += np.float32(1.0)
        if len(outliers):
            values.reshape(-1, cols)[:, outliers] *= np.float32(6.0)
        out.write(encode(values, dtype))


def write_shard(path: Path, specs: list[Spec], dtype: str, seed: int) -> None:
    """One safetensors file, tensors ordered as safetensors does: widest dtype first, then by name."""
    ordered = sorted(specs, key=lambda t: (-ITEM_BYTES[t.dtype or dtype], t.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in ordered:
        end = at + spec.nbytes(dtype)
        header[spec.name] = {
            "dtype": spec.dtype or dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for spec in ordered:
            write_values(out, spec, spec.dtype or dtype, seed)


def cut_into_shards(specs: list[Spec], count: int, dtype: str) -> list[list[Spec]]:
    """At most *count* runs of about equal size, in order; never an empty one."""
    whole = sum(t.nbytes(dtype) for t in specs)
    shards: list[list[Spec]] = [[]]
    done = 0
    for left, spec in zip(range(len(specs), 0, -1), specs, strict=True):
        full = done >= whole * len(shards) / count
        if shards[-1] and len(shards) < count and (full or left <= count - len(shards)):
            shards.append([])
        shards[-1].append(spec)
        done += spec.nbytes(dtype)
    return shards


def dump_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_component(
    folder: Path, family: Family, shape: Shape, dtype: str, shards: int, seed: int
) -> None:
    """Weights, index (if more than one shard) and config of one component."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = cut_into_shards(list(family.tensors(shape)), shards, dtype)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(runs, 1):
        name = f"{family.stem}.safetensors"
        if len(runs) > 1:
            name = f"{family.stem}-{number:05d}-of-{len(runs):05d}.safetensors"
        write_shard(folder / name, specs, dtype, seed)
        weight_map |= {spec.name: name for spec in specs}
    if len(runs) > 1:
        total = total_bytes(family, shape, dtype)
        dump_json(
            folder / f"{family.stem}.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    torch_dtype = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    dump_json(folder / "config.json", family.config(shape, torch_dtype))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer that transformers loads."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, min(vocab, 512))}
    dump_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
        },
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    dump_json(folder / "special_tokens_map.json", special)
    dump_json(
        folder / "tokenizer_config.json",
        special | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048},
    )


def write_model(root: Path, args: argparse.Namespace) -> None:
    """A transformers model."""
    shape = choose_shape(LLAMA, args.size, args.dtype, args)
    write_component(root, LLAMA, shape, args.dtype, args.shards, args.seed)
    dump_json(root / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_tokenizer(root, shape.vocab)


def write_pipeline(root: Path, args: argparse.Namespace) -> None:
    """A diffusers pipeline: three quarters of the bytes in the transformer."""
    free = argparse.Namespace(hidden=0, layers=0, intermediate=0, vocab=args.vocab)
    parts = {
        "transformer": (WAN if args.kind == "wan" else H3, 0.75, args.shards, args),
        "text_encoder": (UMT5 if args.kind == "wan" else LLAMA, 0.2, min(2, args.shards), free),
        "vae": (VAE, 0.05, 1, argparse.Namespace(hidden=0, layers=2, intermediate=0, vocab=64)),
    }
    for name, (family, share, shards, fixed) in parts.items():
        shape = choose_shape(family, int(args.size * share), args.dtype, fixed)
        write_component(root / name, family, shape, args.dtype, shards, args.seed)
    scheduler = PIPELINES[args.kind]["scheduler"]
    assert isinstance(scheduler, list)
    dump_json(
        root / "scheduler" / "scheduler_config.json",
        {"_class_name": scheduler[1], "num_train_timesteps": 1000},
    )
    write_tokenizer(root / "tokenizer", 512)
    dump_json(root / "model_index.json", PIPELINES[args.kind])


def parse_size(text: str) -> int:
    """Bytes, with an optional K, M, G or T (binary)."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 0)
    try:
        return int(float(text[:-1]) * factor) if factor else int(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 4G") from err


def main(argv: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=("llama", "wan", "h3"), default="llama")
    parser.add_argument("--size", type=parse_size, default=parse_size("64M"))
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", type=str.upper, choices=tuple(ITEM_BYTES), default="BF16")
    for knob in ("hidden", "layers", "intermediate", "vocab"):
        parser.add_argument(f"--{knob}", type=int, default=0, help="set by --size if not given")
    args = parser.parse_args(argv)
    if args.directory.exists() and any(args.directory.iterdir()):
        parser.error(f"{args.directory} is not empty")
    write = write_model if args.kind == "llama" else write_pipeline
    write(args.directory, args)
    written = sum(p.stat().st_size for p in args.directory.rglob("*") if p.is_file())
    print(f"{args.directory}: {written} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
