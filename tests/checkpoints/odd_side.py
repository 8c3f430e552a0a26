"""Runs in a process of its own: a tiny Llama of odd sizes with odd values, and what transformers makes of a view of it.

python -m tests.checkpoints.odd_side make FOLDER INTERMEDIATE
python -m tests.checkpoints.odd_side read SOURCE VIEW SCHEME    -> JSON on stdout
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests import oracle

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@torch.no_grad()
def make(folder: Path, intermediate: int) -> None:
    """Sizes of 80 and *intermediate*; rows, blocks and a weight of zeros, and one outlier."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=80,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=5,
        vocab_size=96,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    first, second = model.model.layers
    first.self_attn.q_proj.weight[3:9] = 0
    first.mlp.down_proj.weight[:, -40:] = 0
    first.mlp.gate_proj.weight[5, 7] = 100.0
    second.mlp.up_proj.weight[:] = 0
    second.self_attn.o_proj.weight *= 2.0**-30
    model.save_pretrained(folder)


def dequantized(view: Path, scheme: str) -> dict[str, torch.Tensor]:
    """The view's tensors, FP8 weights multiplied out in F32."""
    found = oracle.read_folder(view)
    plain: dict[str, torch.Tensor] = {}
    for name, stored in found.items():
        if stored.dtype == "F8_E4M3":
            raw = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8)
            scale = found[oracle.scale_name(name, scheme)].floats()
            if scheme.startswith("block"):
                scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                scale = scale[: stored.shape[0], : stored.shape[1]]
            plain[name] = raw.view(torch.float8_e4m3fn).reshape(stored.shape).float() * scale
        elif "_scale" not in name:
            plain[name] = stored.floats().clone()
    return plain


def load(folder: Path, dtype: torch.dtype, quantization: Any = None) -> Any:
    chosen = {} if quantization is None else {"quantization_config": quantization}
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **chosen).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of sixteen tokens."""
    found: torch.Tensor = model(torch.arange(3, 19).reshape(1, 16)).logits.float()
    return found


def read(source: Path, view: Path, scheme: str) -> dict[str, float]:
    """How far the view's logits are from the dequantized reference's, and from the source's."""
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        reference = Path(scratch)
        (reference / "config.json").write_bytes((source / "config.json").read_bytes())
        save_file(
            dequantized(view, scheme), reference / "model.safetensors", metadata={"format": "pt"}
        )
        wanted = logits(load(reference, torch.float32))
    if scheme.startswith("block"):
        settings = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        settings = transformers.CompressedTensorsConfig(dequantize=True)
    found = logits(load(view, torch.float32, settings))
    return {
        "largest": float(wanted.abs().max()),
        "off": float((found - wanted).abs().max()),
        "drift": float((found - logits(load(source, torch.float32))).abs().max()),
    }


def main(command: str, *arguments: str) -> None:
    """One command."""
    if command == "make":
        make(Path(arguments[0]), int(arguments[1]))
    else:
        json.dump(read(Path(arguments[0]), Path(arguments[1]), arguments[2]), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
