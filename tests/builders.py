"""Tiny checkpoints in one line each, written with nothing but struct, json and numpy.

Every builder is seeded: the same arguments give the same bytes. Weights are normal with a deviation of
0.02, as trained ones roughly are; each builder returns the tensors that it wrote, by component, so that a
test has an oracle that never went through the code under test.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

__all__ = [
    "Tensor",
    "bf16",
    "h3_like",
    "hf_cache",
    "llama_like",
    "named",
    "raw_header",
    "safetensors_bytes",
    "tensor",
    "wan_like",
    "write_bytes",
    "write_files",
    "write_index",
    "write_json",
    "write_safetensors",
    "write_sharded",
]

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype as a safetensors header names it, shape, little-endian row-major bytes."""

Tensors = Mapping[str, Tensor]


def bf16(values: np.ndarray) -> bytes:
    """float32 values rounded to the nearest BF16, ties to even (finite values only)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def tensor(seed: int, dtype: str, *shape: int, deviation: float = 0.02) -> Tensor:
    """A tensor of normal values in BF16, F16, F32 or F64 (or small whole numbers in I64, I32, U8)."""
    rng = np.random.default_rng(seed)
    if dtype in ("I64", "I32", "U8"):
        whole = {"I64": "<i8", "I32": "<i4", "U8": "u1"}[dtype]
        return dtype, shape, rng.integers(0, 100, shape).astype(whole).tobytes()
    values = rng.standard_normal(shape, np.float32) * np.float32(deviation)
    if dtype == "BF16":
        return dtype, shape, bf16(values)
    return dtype, shape, values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).tobytes()


def raw_header(header: object, data: bytes = b"", *, pad: int = 8) -> bytes:
    """A safetensors file with any JSON for a header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % pad)
    return struct.pack("<Q", len(text)) + text + data


def safetensors_bytes(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole safetensors file, tensors in the given order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        begin, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return raw_header(header, b"".join(data for _, _, data in tensors.values()))


def write_bytes(path: Path, data: bytes) -> Path:
    """A file with these bytes, its folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def write_json(path: Path, value: object) -> Path:
    """A JSON file, its folders made."""
    return write_bytes(path, json.dumps(value, indent=2).encode())


def write_safetensors(
    path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None
) -> Path:
    """One safetensors file, its folders made; metadata defaults to what transformers writes."""
    return write_bytes(path, safetensors_bytes(tensors, metadata or {"format": "pt"}))


def write_sharded(
    folder: Path, tensors: Tensors, shards: int, *, stem: str = "model", index: bool = True
) -> list[Path]:
    """A weight set of *shards* files (one: no index), cut where the bytes say; returns the files."""
    if shards == 1:
        return [write_safetensors(folder / f"{stem}.safetensors", tensors)]
    total = sum(len(data) for _, _, data in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    seen = 0
    for name, value in tensors.items():
        parts[min(shards - 1, seen * shards // max(1, total))][name] = value
        seen += len(value[2])
    names = [f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    files = [write_safetensors(folder / n, part) for n, part in zip(names, parts, strict=True)]
    if index:
        where = {t: n for n, part in zip(names, parts, strict=True) for t in part}
        write_json(
            folder / f"{stem}.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": where},
        )
    return files


def named(*names: str, seed: int = 0, dtype: str = "BF16") -> dict[str, Tensor]:
    """A tensor for each name, its values decided by name and seed: (64,) for norms and biases, (32, 64) for the rest."""
    return {
        name: tensor(
            zlib.crc32(name.encode()) + seed,
            dtype,
            *((64,) if name.endswith((".bias", "norm.weight")) else (32, 64)),
        )
        for name in names
    }


def write_index(path: Path, where: Mapping[str, str], **metadata: object) -> Path:
    """An index that says *where*, right or wrong: tensor -> file name."""
    return write_json(path, {"metadata": metadata, "weight_map": dict(where)})


def write_files(
    folder: Path, files: Mapping[str, Tensors], config: Mapping[str, object] | None = None
) -> dict[str, Tensors]:
    """Shards by file name and, if given, a config.json; returns *files*."""
    for name, tensors in files.items():
        write_safetensors(folder / name, tensors)
    if config is not None:
        write_json(folder / "config.json", config)
    return dict(files)


class _Weights:
    """Collects named tensors, each with its own seed."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.seed, self.dtype, self.all = seed * 1_000_003, dtype, dict[str, Tensor]()

    def add(self, name: str, *shape: int, dtype: str = "") -> None:
        self.seed += 1
        self.all[name] = tensor(self.seed, dtype or self.dtype, *shape)

    def linear(self, name: str, out: int, into: int, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", out, into)
        if bias:
            self.add(f"{name}.bias", out)


def _llama_weights(
    weights: _Weights, layers: int, hidden: int, inter: int, heads: int, kv_heads: int, vocab: int
) -> None:
    head = hidden // heads
    weights.add("model.embed_tokens.weight", vocab, hidden)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        weights.add(f"{base}.input_layernorm.weight", hidden)
        weights.linear(f"{base}.mlp.down_proj", hidden, inter)
        weights.linear(f"{base}.mlp.gate_proj", inter, hidden)
        weights.linear(f"{base}.mlp.up_proj", inter, hidden)
        weights.add(f"{base}.post_attention_layernorm.weight", hidden)
        weights.linear(f"{base}.self_attn.k_proj", kv_heads * head, hidden)
        weights.linear(f"{base}.self_attn.o_proj", hidden, hidden)
        weights.linear(f"{base}.self_attn.q_proj", hidden, hidden)
        weights.linear(f"{base}.self_attn.v_proj", kv_heads * head, hidden)
    weights.add("model.norm.weight", hidden)
    weights.add("lm_head.weight", vocab, hidden)


def _tokenizer(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(folder / "tokenizer.json", {"version": "1.0", "model": {"type": "BPE", "vocab": {}}})


def llama_like(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    inter: int = 160,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 96,
    shards: int = 2,
    dtype: str = "BF16",
    index: bool = True,
    seed: int = 0,
) -> dict[str, Tensor]:
    """A transformers model at the root: config, tokenizer, weights in *shards* files."""
    weights = _Weights(seed, dtype)
    _llama_weights(weights, layers, hidden, inter, heads, kv_heads, vocab)
    write_sharded(folder, weights.all, shards, index=index)
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inter,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "tie_word_embeddings": False,
            "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": 2})
    _tokenizer(folder)
    return weights.all


def _around(
    folder: Path, transformer_class: str, *, dtype: str, seed: int
) -> dict[str, dict[str, Tensor]]:
    """The rest of a pipeline: model_index, text encoder, VAE, scheduler, tokenizer."""
    write_json(
        folder / "model_index.json",
        {
            "_class_name": "TinyPipeline",
            "_diffusers_version": "0.35.0",
            "transformer": ["diffusers", transformer_class],
            "text_encoder": ["transformers", "T5EncoderModel"],
            "vae": ["diffusers", "AutoencoderTiny"],
            "tokenizer": ["transformers", "T5TokenizerFast"],
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        },
    )
    text = _Weights(seed + 101, dtype)
    text.add("shared.weight", 96, 64)
    for block in range(2):
        for leaf in ("q", "k", "v", "o"):
            text.linear(f"encoder.block.{block}.layer.0.SelfAttention.{leaf}", 64, 64)
    write_sharded(folder / "text_encoder", text.all, 2)
    write_json(
        folder / "text_encoder" / "config.json",
        {"architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 64},
    )
    vae = _Weights(seed + 202, "F32")
    vae.add("decoder.conv_in.weight", 32, 16, 3, 3)
    vae.add("decoder.conv_in.bias", 32)
    stem = "diffusion_pytorch_model"
    write_sharded(folder / "vae", vae.all, 1, stem=stem)
    write_json(folder / "vae" / "config.json", {"_class_name": "AutoencoderTiny"})
    write_json(
        folder / "scheduler" / "scheduler_config.json", {"_class_name": "UniPCMultistepScheduler"}
    )
    _tokenizer(folder / "tokenizer")
    write_bytes(folder / "README.md", b"# tiny\n")
    return {"text_encoder": text.all, "vae": vae.all}


def wan_like(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    inter: int = 160,
    shards: int = 2,
    dtype: str = "BF16",
    index: bool = True,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """A diffusers pipeline with Wan's names: separate to_q/to_k/to_v, biases, F32 modulation tables."""
    weights = _Weights(seed, dtype)
    weights.add("condition_embedder.text_embedder.linear_1.weight", hidden, 64)
    weights.add("condition_embedder.time_proj.weight", 6 * hidden, hidden)
    weights.add("patch_embedding.weight", hidden, 16, 1, 2, 2)
    weights.add("scale_shift_table", 1, 2, hidden, dtype="F32")
    for block in range(layers):
        base = f"blocks.{block}"
        for attn in ("attn1", "attn2"):
            for leaf in ("to_q", "to_k", "to_v", "to_out.0"):
                weights.linear(f"{base}.{attn}.{leaf}", hidden, hidden, bias=True)
            weights.add(f"{base}.{attn}.norm_q.weight", hidden)
            weights.add(f"{base}.{attn}.norm_k.weight", hidden)
        weights.linear(f"{base}.ffn.net.0.proj", inter, hidden, bias=True)
        weights.linear(f"{base}.ffn.net.2", hidden, inter, bias=True)
        weights.add(f"{base}.scale_shift_table", 1, 6, hidden, dtype="F32")
    weights.linear("proj_out", 64, hidden, bias=True)
    target = folder / "transformer"
    write_sharded(target, weights.all, shards, stem="diffusion_pytorch_model", index=index)
    write_json(
        target / "config.json",
        {"_class_name": "WanTransformer3DModel", "num_layers": layers, "ffn_dim": inter},
    )
    rest = _around(folder, "WanTransformer3DModel", dtype=dtype, seed=seed)
    return {"transformer": weights.all, **rest}


def h3_like(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    inter: int = 160,
    shards: int = 3,
    dtype: str = "BF16",
    index: bool = True,
    seed: int = 0,
) -> dict[str, dict[str, Tensor]]:
    """A diffusers pipeline with MiniMax-H3's names: qkv and gate/up fused on disk, adaln projections."""
    weights = _Weights(seed, dtype)
    weights.linear("video_patch_proj", hidden, 64, bias=True)
    weights.linear("audio_patch_proj", hidden, 64, bias=True)
    weights.linear("condition_proj", hidden, 64, bias=True)
    weights.linear("time_embedder.proj_in", hidden, 64, bias=True)
    weights.linear("time_embedder.proj_out", hidden, hidden, bias=True)
    for base in ["token_refiner.blocks.0", *(f"blocks.{i}" for i in range(layers))]:
        if base.startswith("blocks"):
            weights.linear(f"{base}.adaln_proj.linear", 6 * hidden, hidden, bias=True)
        weights.linear(f"{base}.attn.qkv_proj", 3 * hidden, hidden)
        weights.add(f"{base}.attn.q_norm.weight", 32)
        weights.add(f"{base}.attn.k_norm.weight", 32)
        weights.linear(f"{base}.attn.out_proj", hidden, hidden)
        weights.linear(f"{base}.mlp.fc1", 2 * inter, hidden)
        weights.linear(f"{base}.mlp.fc2", hidden, inter)
    weights.linear("final_layer.adaln_proj.linear", 2 * hidden, hidden, bias=True)
    weights.linear("final_layer.video_out", 64, hidden, bias=True)
    weights.linear("final_layer.audio_out", 64, hidden, bias=True)
    target = folder / "transformer"
    write_sharded(target, weights.all, shards, stem="diffusion_pytorch_model", index=index)
    write_json(
        target / "config.json",
        {
            "_class_name": "MiniMaxH3DiT",
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": 2,
            "attention_head_dim": hidden // 2,
        },
    )
    rest = _around(folder, "MiniMaxH3DiT", dtype=dtype, seed=seed)
    return {"transformer": weights.all, **rest}


def hf_cache(cache: Path, checkpoint: Path, *, name: str = "org/tiny", revision: str = "") -> Path:
    """A Hugging Face cache repository with *checkpoint*'s files as blobs; returns the repository folder.

    The snapshot is ``snapshots/<revision>``, each file a relative symlink to ``blobs/<64 hex digits>``.
    """
    repository = cache / ("models--" + name.replace("/", "--"))
    revision = revision or hashlib.sha1(name.encode()).hexdigest()
    for file in _files(checkpoint):
        below = file.relative_to(checkpoint)
        data = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(data).hexdigest()
        if not blob.exists():
            write_bytes(blob, data)
        link = repository / "snapshots" / revision / below
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(below.parts) + 1), "blobs", blob.name))
    write_bytes(repository / "refs" / "main", revision.encode())
    return repository


def _files(folder: Path) -> Iterable[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())
