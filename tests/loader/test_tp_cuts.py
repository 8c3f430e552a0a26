"""``plan --tp N`` says of block scales what vLLM's own layers do with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8fs.core.layout import plan
from fp8fs.core.recipe import Recipe
from fp8fs.core.splits import split_problems
from fp8fs.source import Source
from tests.builders import tensor, write_files
from tests.loader import harness

pytestmark = [pytest.mark.loader, pytest.mark.slow]

Case = tuple[str, list[int], int]

CASES: list[Case] = [
    *(("row", [256, cols], 1) for cols in (80, 192, 576)),
    *(("row", [256, cols], 2) for cols in (80, 192, 256, 384, 576, 10944)),
    ("row", [256, 256], 3),
    *(("column", [rows, 256], 1) for rows in (80, 192, 576, 10944)),
    *(("column", [rows, 256], 2) for rows in (80, 192, 256, 384, 576)),
    *(("merged", [rows, rows], 1) for rows in (80, 128, 192, 576, 10944)),
    *(("merged", [rows, rows], 2) for rows in (256, 384, 512, 576)),
    *(("qkv", [128, 8, 2], ranks) for ranks in (1, 2, 4, 8)),
    *(("qkv", [64, 4, 1], ranks) for ranks in (1, 2, 4, 8)),
    ("qkv", [64, 4, 2], 1),
    ("qkv", [80, 4, 2], 2),
    *(("experts", [rows], ranks) for rows in (192, 256, 576) for ranks in (1, 2)),
]
"""Layer, sizes (rows, columns; rows of each part; head size, heads, key/value heads; intermediate size), ranks."""

MEANS = {
    "": {"right"},
    "uneven": {"AssertionError"},
    "block": {"ValueError"},
    "fused": {"wrong", "RuntimeError"},
}
"""What fp8fs says, and what vLLM may do then."""


def problem(folder: Path, case: Case) -> str:
    """What fp8fs says of a checkpoint with that layer."""
    kind, sizes, ranks = case
    config: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if kind == "row":
        shapes = {"mlp.down_proj": sizes}
    elif kind == "column":
        config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        shapes = {"self_attn.kv_b_proj": sizes}
    elif kind == "merged":
        shapes = {"mlp.gate_proj": [sizes[0], 256], "mlp.up_proj": [sizes[1], 256]}
    elif kind == "experts":
        config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        layer = "block_sparse_moe.experts.0"
        shapes = {f"{layer}.{leaf}": [sizes[0], 256] for leaf in ("w1", "w3")}
        shapes[f"{layer}.w2"] = [256, sizes[0]]
    else:
        head, heads, kv_heads = sizes
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes = {f"self_attn.{p}_proj": [n * head, 256] for p, n in counts.items()}
    tensors = {
        f"model.layers.0.{name}.weight": tensor(1, "BF16", *shape) for name, shape in shapes.items()
    }
    write_files(folder, {"model.safetensors": tensors}, config)
    with Source.open(folder) as source:
        planned = plan(source.checkpoint, Recipe(scheme="block"), quantizer_version="1")
        found = split_problems(planned, source.checkpoint.components, ranks)
    kinds = {split.problem for split in found}
    return next((kind for kind in ("uneven", "block", "fused") if kind in kinds), "")


def test_it_says_what_vllm_does(tmp_path: Path) -> None:
    """vLLM loads what fp8fs warns of nothing for, and fails or misreads what it warns of, as it says."""
    workdir = tmp_path / "vllm"
    outcomes = harness.run_script("vllm", "tp_cuts.py", json.dumps(CASES), workdir=workdir)[
        "outcomes"
    ]
    said = [problem(tmp_path / str(number), case) for number, case in enumerate(CASES)]
    wrong = [
        (case, word, outcome)
        for case, word, outcome in zip(CASES, said, outcomes, strict=True)
        if outcome not in MEANS[word]
    ]
    assert wrong == []
    assert set(outcomes) == set().union(*MEANS.values())
