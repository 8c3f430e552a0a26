"""Weights that tensor parallelism cannot cut: which, why, and how they are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8fs.core.layout import plan
from fp8fs.core.recipe import Recipe
from fp8fs.core.splits import Split, split_problems, split_warnings
from fp8fs.source import Source
from tests.builders import tensor, write_files

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYER = "model.layers.0"


def problems(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    ranks: int,
    *,
    config: Mapping[str, object] = LLAMA,
    **recipe: object,
) -> list[Split]:
    """What stands in the way of *ranks* ranks, of a checkpoint with weights of these shapes."""
    tensors = {f"{LAYER}.{name}.weight": tensor(1, "BF16", *s) for name, s in shapes.items()}
    write_files(folder, {"model.safetensors": tensors}, config)
    with Source.open(folder) as source:
        planned = plan(source.checkpoint, Recipe(**recipe), quantizer_version="1")  # type: ignore[arg-type]
        return split_problems(planned, source.checkpoint.components, ranks)


def said(found: list[Split]) -> dict[str, tuple[str, int, str]]:
    return {
        split.tensor.removeprefix(f"{LAYER}.").removesuffix(".weight"): (
            split.axis,
            split.part,
            split.problem,
        )
        for split in found
    }


@pytest.mark.parametrize(
    ("cols", "ranks", "problem"),
    [
        (80, 1, ""),
        (192, 1, ""),
        (256, 2, ""),
        (10944, 1, ""),
        (192, 2, "block"),
        (384, 2, "block"),
        (576, 2, "block"),
        (10944, 4, "block"),
        (256, 3, "uneven"),
    ],
)
def test_row_parallel_columns(tmp_path: Path, cols: int, ranks: int, problem: str) -> None:
    """Columns of down_proj are cut into N runs, which have to be whole blocks if there are several."""
    found = said(problems(tmp_path, {"mlp.down_proj": (256, cols)}, ranks, scheme="block"))
    part = 0 if cols % ranks else cols // ranks
    assert found == ({"mlp.down_proj": ("columns", part, problem)} if problem else {})


@pytest.mark.parametrize(
    ("rows", "ranks", "problem"),
    [
        (256, 2, ""),
        (512, 4, ""),
        (384, 2, "fused"),
        (576, 2, "fused"),
        (576, 1, "fused"),
        (10944, 8, "fused"),
        (256, 3, "uneven"),
    ],
)
def test_parts_of_fused_layers(tmp_path: Path, rows: int, ranks: int, problem: str) -> None:
    """Each part of gate/up is cut by itself; one that is no whole block is a problem of one rank too."""
    shapes = {"mlp.gate_proj": (rows, 64), "mlp.up_proj": (rows, 64)}
    found = said(problems(tmp_path, shapes, ranks, scheme="block_free"))
    part = 0 if rows % ranks else rows // ranks
    wanted = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ("rows", part, problem))
    assert found == (wanted if problem else {})


@pytest.mark.parametrize("on_disk", ["apart", "fused"])
@pytest.mark.parametrize(
    ("head", "ranks", "wanted"),
    [
        (128, 1, {}),
        (128, 4, {}),
        (64, 1, {}),
        (64, 2, {"k": 64}),
        (64, 4, {"q": 64, "k": 64}),
        (128, 8, {"q": 0}),
        (80, 1, {"q": 320, "k": 160}),
    ],
)
def test_heads_stay_whole(
    tmp_path: Path, on_disk: str, head: int, ranks: int, wanted: dict[str, int]
) -> None:
    """q is cut by heads; k and v by theirs, of which each rank has at least one."""
    sizes = {"q": 4 * head, "k": 2 * head, "v": 2 * head}
    if on_disk == "apart":
        shapes = {f"self_attn.{part}_proj": (rows, 64) for part, rows in sizes.items()}
        found = said(problems(tmp_path, shapes, ranks, scheme="block"))
        parts = {**wanted, **({"v": wanted["k"]} if "k" in wanted else {})}
        assert found == {
            f"self_attn.{name}_proj": ("rows", part, "fused" if part else "uneven")
            for name, part in parts.items()
        }
    else:
        config = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
        shapes = {"self_attn.qkv_proj": (sum(sizes.values()), 64)}
        found = said(problems(tmp_path, shapes, ranks, config=config, scheme="block"))
        assert [part for _, part, _ in found.values()] == list(wanted.values())[:1]


def test_experts_are_refused(tmp_path: Path) -> None:
    """Of experts, gate and up have to be whole blocks even for one rank, and there is no exception for fused ones."""
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    shapes = {f"block_sparse_moe.experts.0.w{n}": s for n, s in ((1, (192, 64)), (3, (192, 64)))}
    shapes["block_sparse_moe.experts.0.w2"] = (64, 192)
    found = said(problems(tmp_path, shapes, 1, config=config, scheme="block"))
    assert set(found.values()) == {("rows", 192, "block")}
    assert len(found) == 2


@pytest.mark.parametrize("scheme", ["per_channel", "per_tensor"])
def test_schemes_without_blocks(tmp_path: Path, scheme: str) -> None:
    """Without blocks any part will do that is a multiple of 16."""
    shapes = {"mlp.down_proj": (64, 96), "self_attn.o_proj": (64, 80)}
    assert said(problems(tmp_path, shapes, 2, scheme=scheme)) == {
        "self_attn.o_proj": ("columns", 40, "narrow")
    }


def test_a_forced_weight_of_odd_size(tmp_path: Path) -> None:
    """A dimension that is no multiple of 16 is told of one rank too."""
    found = problems(
        tmp_path, {"mlp.down_proj": (64, 72)}, 1, scheme="per_channel", quantize=("*",)
    )
    assert said(found) == {"mlp.down_proj": ("columns", 72, "narrow")}


def test_what_is_not_cut(tmp_path: Path) -> None:
    """The small projections of latent attention are whole on every rank."""
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    shapes = {"self_attn.q_a_proj": (128, 64), "self_attn.kv_a_proj_with_mqa": (192, 64)}
    assert problems(tmp_path, shapes, 8, config=config, scheme="block") == []


def test_many_problems_are_a_few_sentences() -> None:
    """Each kind of problem is one sentence, with a count and an example."""
    found = [
        Split("transformer", f"blocks.{i}.ffn.net.2.weight", (64, 96), "columns", 48, "block")
        for i in range(40)
    ]
    found.append(Split("transformer", "blocks.0.to_k.weight", (10, 64), "rows", 0, "uneven"))
    first, second = split_warnings(found, 2)
    assert "40 weights" in first
    assert '"blocks.0.ffn.net.2.weight", 64x96, 48 columns each' in first
    assert "do not divide" in second
    assert split_warnings([], 2) == []
