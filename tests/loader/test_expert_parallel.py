"""Expert parallelism: vLLM-Omni's groups and vLLM's loader spread the experts of one cold mount over ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import oracle
from tests.loader.omni import Omni
from tests.loader.test_parallel_layouts import Layout, Mount, Tensors, as_tensor, assert_same, load

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

RANKS = 2
EXPERTS = 4  # of the tiny model
LAYOUT = Layout(
    {"data_parallel_size": RANKS, "enable_expert_parallel": True},
    RANKS,
    {"dp": [0, 1], "ep": [0, 1]},
)
# What the engine fuses: the end of a runtime module's name -> what a checkpoint has, in row order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
OF_EXPERT = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


def stored_names(name: str, rank: int) -> list[list[str]]:
    """The checkpoint's tensors behind a runtime tensor of one rank: one list, in row order, for each expert in it."""
    if match := re.fullmatch(r"(.*\.experts)\.routed_experts\.(w13|w2)_(.*)", name):
        stem, part, kind = match.groups()
        own = range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
        return [[f"{stem}.{n}.{leaf}.{kind}" for leaf in OF_EXPERT[part]] for n in own]
    stem, _, kind = name.rpartition(".")
    block, _, leaf = stem.rpartition(".")
    return [[f"{block}.{part}.{kind}" for part in FUSED[leaf]] if leaf in FUSED else [name]]


def quantized_by_oracle(source: Path, view: Path) -> Tensors:
    """Every tensor that the view must hold, from the BF16 source; which are FP8 is read in the view's headers."""
    entries = {}
    for path in sorted(view.glob("*.safetensors")):
        entries |= oracle.read_header(path)[1]
    chosen = [name for name, entry in entries.items() if entry["dtype"] == "F8_E4M3"]
    assert len([name for name in chosen if ".experts." in name]) == 2 * EXPERTS * 3  # two layers
    expected = oracle.expected(oracle.read_folder(source), chosen, "block", {})
    return {name: as_tensor(stored) for name, stored in expected.items()}


def test_each_rank_holds_its_experts(
    omni: Omni, mounted: Mount, llm_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each expert is on exactly one rank, all else on every rank, with the source's FP8; each unit is made once."""
    source = llm_source("qwen3-moe")
    view = mounted(source, "--scheme", "block")
    load(omni, LAYOUT, view.path, tmp_path / "ranks", script="parallel_experts")
    view.assert_made_once()
    expected = quantized_by_oracle(source, view.path)
    experts = []
    for rank in range(RANKS):
        used = set()
        for name, tensor in load_file(tmp_path / "ranks" / f"{rank}.safetensors").items():
            if ".self_attn.attn." in name:
                continue  # scales of the KV cache: the engine's own, in no checkpoint
            names = stored_names(name, rank)
            parts = [torch.cat([expected[part] for part in parts]) for parts in names]
            assert_same(name, tensor, torch.stack(parts) if ".experts." in name else parts[0])
            used |= {part for parts in names for part in parts}
        experts.append({name for name in used if ".experts." in name})
        assert used - experts[rank] == {name for name in expected if ".experts." not in name}
    assert set.union(*experts) == {name for name in expected if ".experts." in name}
    assert not set.intersection(*experts)
