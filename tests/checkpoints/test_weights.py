"""Which weights of real checkpoints become FP8, and that the others arrive bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fp8fs
from tests import oracle
from tests.checkpoints.looks import LLM, SCHEMES, layer, look

FILE = "model.safetensors"


def write(src: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    """A checkpoint of one shard."""
    src.mkdir()
    (src / "config.json").write_text(json.dumps(config))
    save_file(tensors, src / FILE, metadata={"format": "pt"})
    return src


def weight(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols)).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_mtp_layers_and_odd_ones_arrive_bit_for_bit(tmp_path: Path, scheme: str) -> None:
    """Layers behind the last real one, gates, correction biases, embeddings and lm_head are as in the source."""
    gate = "model.layers.0.mlp.gate"
    tensors = {
        layer(0): weight(64, 32),
        layer(1): weight(64, 32),
        f"{gate}.weight": weight(16, 32),
        f"{gate}.e_score_correction_bias": weight(1, 16, torch.float32).reshape(16),
        "model.embed_tokens.weight": weight(48, 32),
        "lm_head.weight": weight(48, 32),
    }
    config = {**LLM, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    src = write(tmp_path / "src", tensors, config)
    source = oracle.read_file(src / FILE)
    found = oracle.read_file(fp8fs.build(src, store=tmp_path / "store", scheme=scheme) / FILE)
    assert found == oracle.expected(source, {layer(0)}, scheme, {})


def test_a_tied_head_is_not_added(tmp_path: Path) -> None:
    """A checkpoint without lm_head has none in the view."""
    tensors = {layer(0): weight(64, 32), "model.embed_tokens.weight": weight(48, 32)}
    seen = look(write(tmp_path / "src", tensors, {**LLM, "tie_word_embeddings": True}))
    assert seen.shards == {FILE: tensors.keys()}
    assert seen.quantized == {layer(0)}


@pytest.mark.parametrize("scheme", ["block", "block_free"])
@pytest.mark.parametrize("odd", [80, 192, 576, 10944])
def test_edge_blocks_are_counted_by_ceiling_division(tmp_path: Path, odd: int, scheme: str) -> None:
    """Rows that are no multiple of 128 end in a smaller block with a scale of its own."""
    src = write(tmp_path / "src", {layer(0): weight(odd, 144)}, dict(LLM))
    source = oracle.read_file(src / FILE)
    found = oracle.read_file(fp8fs.build(src, store=tmp_path / "store", scheme=scheme) / FILE)
    assert found[oracle.scale_name(layer(0), scheme)].shape == (-(-odd // 128), 2)
    assert found == oracle.expected(source, {layer(0)}, scheme, {})
