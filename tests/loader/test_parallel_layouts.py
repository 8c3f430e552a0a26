"""Every parallel layout of vLLM-Omni reads one cold mount: real gloo groups, the engine's own loader, all ranks at once.

What each rank must hold is worked out here: the source, quantized by the tests' oracle, brought into runtime layout and
cut by tables that were written by hand from what each layout means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import oracle
from tests.loader.engine_side import omni_names
from tests.loader.mounts import MountedView
from tests.loader.omni import Omni, Result, assert_right
from tests.loader.reference_pipeline import read_tensors

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

Mount = Callable[..., MountedView]
Source = Callable[[str], tuple[Path, dict[str, Any]]]
Tensors = dict[str, torch.Tensor]

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
COLUMNS = "columns"

# Tensor parallelism, by the end of a runtime module's name: of how many equal parts its rows consist, each of which is
# cut; or COLUMNS: the weight's columns are cut and its bias is whole. Every other tensor is whole on every rank.
CUTS: dict[str, dict[str, int | str]] = {
    "h3": {
        "attn.qkv_proj": 3,
        "attn.out_proj": COLUMNS,
        "mlp.fc1": 2,
        "mlp.fc2": COLUMNS,
        "adaln_proj.linear": 1,
        "time_embedder.proj_in": 1,
        "time_embedder.proj_out": COLUMNS,
        "condition_proj": 1,
        "video_patch_proj": 1,
        "audio_patch_proj": 1,
        "final_layer.video_out": 1,
        "final_layer.audio_out": 1,
    },
    "wan": {
        "attn1.to_qkv": 3,
        "attn2.to_q": 1,
        "attn2.to_k": 1,
        "attn2.to_v": 1,
        "norm_q": 1,
        "norm_k": 1,
        "to_out": COLUMNS,
        "ffn.net_0.proj": 1,
        "ffn.net_2": COLUMNS,
    },
}

# Pipeline parallelism with two stages: what only the first and only the last one has.
STAGES = {
    "wan": (
        ("blocks.0.", "blocks.1.", "patch_embedding."),
        ("blocks.2.", "blocks.3.", "output_scale_shift_prepare.", "proj_out."),
    )
}


@dataclass(frozen=True)
class Layout:
    """A way to spread a model over ranks, in the engine's own settings, and the groups that its last rank is in."""

    settings: Mapping[str, int | bool]
    world: int
    groups: Mapping[str, list[int]]

    @property
    def tensor_parallel(self) -> int:
        return int(self.settings.get("tensor_parallel_size", 1))


DATA = Layout({"data_parallel_size": 4}, 4, {"dp": [0, 1, 2, 3]})
SEQUENCE = Layout(
    {"ulysses_degree": 2, "ring_degree": 2},
    4,
    {"sp": [0, 1, 2, 3], "ulysses": [2, 3], "ring": [1, 3]},
)
GUIDANCE = Layout({"cfg_parallel_size": 2}, 2, {"cfg": [0, 1]})
PIPELINE = Layout({"pipeline_parallel_size": 2}, 2, {"pp": [0, 1]})
TENSOR = Layout({"tensor_parallel_size": 2}, 2, {"tp": [0, 1]})
TENSOR_GUIDANCE = Layout(
    {"tensor_parallel_size": 2, "cfg_parallel_size": 2}, 4, {"tp": [2, 3], "cfg": [1, 3]}
)
SEQUENCE_GUIDANCE = Layout(
    {"ulysses_degree": 2, "cfg_parallel_size": 2}, 4, {"ulysses": [2, 3], "cfg": [1, 3]}
)
HYBRID_SHARDED = Layout(
    {"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 2},
    4,
    {"fs": [2, 3], "replicate": [1, 3]},
)


HANDOFF: tuple[str, ...] = ()
LAZY = ("--serve", "inline", "--grain", "tensor")
"""Options of a mount: a shard is made when it is opened, or a tensor when it is read."""


class Expected:
    """What a model's ranks must hold, from the BF16 source alone; which tensors are FP8 is read in the view's headers."""

    def __init__(
        self, model: str, source: Path, view: Path, runtime_names: Mapping[str, str]
    ) -> None:
        self._model = model
        self._config = json.loads((source / "transformer" / "config.json").read_text())
        entries: dict[str, Any] = {}
        for path in sorted((view / "transformer").glob("*.safetensors")):
            entries |= oracle.read_header(path)[1]
        chosen = [name for name, entry in entries.items() if entry["dtype"] == "F8_E4M3"]
        bf16 = oracle.read_folder(source / "transformer")
        view_tensors = oracle.expected(bf16, chosen, "per_tensor", oracle.sibling_groups(chosen))
        self.stored = {name: as_tensor(stored) for name, stored in view_tensors.items()}
        self.fp8 = {
            name
            for name in runtime_names
            if self.whole(name).dtype == torch.float8_e4m3fn  # a runtime tensor of one dtype
        }
        self.names = {*runtime_names, *(f"{name}_scale" for name in self.fp8)}

    def whole(self, name: str) -> torch.Tensor:
        """A runtime tensor, all of it."""
        parts = [self.stored[part] for part in omni_names.checkpoint_names(self._model, name)]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._model == "h3" and name.endswith("qkv_proj.weight"):
            heads, head_dim = (
                self._config["num_attention_heads"],
                self._config["attention_head_dim"],
            )
            return omni_names.ungroup_qkv_rows(tensor, heads, head_dim)
        return tensor

    def part(self, name: str, rank: int, world: int) -> torch.Tensor:
        """What one rank of *world* tensor-parallel ones holds of a runtime tensor."""
        whole = self.whole(name)
        module, _, kind = name.rpartition(".")
        how = next((cut for end, cut in CUTS[self._model].items() if module.endswith(end)), None)
        if how is None or kind == "weight_scale" or (how, kind) == (COLUMNS, "bias"):
            return whole
        if how == COLUMNS:
            return whole.chunk(world, dim=1)[rank]
        return torch.cat([rows.chunk(world)[rank] for rows in whole.chunk(int(how))])


def as_tensor(stored: oracle.Stored) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(stored.data), dtype=DTYPES[stored.dtype])
    return flat.reshape(stored.shape)


def assert_same(name: str, held: torch.Tensor, expected: torch.Tensor) -> None:
    """The same dtype and bytes; one stored scale may stand for every part of a fused linear."""
    if name.endswith("_scale") and expected.numel() == 1:
        expected = expected.expand(held.numel())
    assert (name, held.dtype, held.numel()) == (name, expected.dtype, expected.numel())
    assert torch.equal(raw(held), raw(expected)), name


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def load(
    omni: Omni,
    layout: Layout,
    view: Path,
    workdir: Path,
    *options: object,
    script: str = "parallel_load",
) -> list[Result]:
    """Load a view with all ranks of a layout at once; the facts that each rank reports. Dumps lie in *workdir*."""
    facts = omni.load_layout(
        view, layout.settings, *options, world=layout.world, workdir=workdir, script=script
    )
    assert_grouped(facts, layout)
    return facts


def assert_grouped(facts: list[Result], layout: Layout) -> None:
    """The groups really are those of the layout, as collectives in them found."""
    for name, members in layout.groups.items():
        assert facts[-1]["groups"][name] == members


@pytest.mark.parametrize(
    ("layout", "model", "serve"),
    [
        pytest.param(DATA, "h3", HANDOFF, id="dp-h3"),
        pytest.param(DATA, "wan", LAZY, id="dp-wan-lazy"),
        pytest.param(SEQUENCE, "wan", HANDOFF, id="sp-wan"),
        pytest.param(GUIDANCE, "wan", HANDOFF, id="cfg-wan"),
        pytest.param(TENSOR, "wan", HANDOFF, id="tp-wan", marks=pytest.mark.engine_ci),
        pytest.param(TENSOR, "wan", LAZY, id="tp-wan-lazy"),
        pytest.param(TENSOR_GUIDANCE, "h3", HANDOFF, id="tp-cfg-h3"),
    ],
)
def test_ranks_that_hold_every_layer(
    layout: Layout,
    model: str,
    serve: tuple[str, ...],
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    tmp_path: Path,
) -> None:
    """Ranks that are replicas, or slices of tensors, hold exactly the source's FP8, and each unit is made once."""
    source, facts = omni_source(model)
    view = mounted(source, *serve)
    load(omni, layout, view.path, tmp_path / "ranks", "--model", model)
    view.assert_made_once()
    expected = Expected(model, source, view.path, facts["runtime_dtypes"])
    assert expected.fp8
    slices = layout.tensor_parallel
    for rank in range(layout.world):
        held = load_file(tmp_path / "ranks" / f"{rank}.safetensors")
        assert held.keys() == expected.names
        for name, tensor in held.items():
            assert_same(name, tensor, expected.part(name, rank % slices, slices))


@pytest.mark.parametrize("serve", [HANDOFF, LAZY], ids=["handoff", "lazy"])
def test_pipeline_stages(
    serve: tuple[str, ...], omni: Omni, mounted: Mount, omni_source: Source, tmp_path: Path
) -> None:
    """Each pipeline stage holds its own layers and no other, with the source's FP8; each unit is made once."""
    source, facts = omni_source("wan")
    view = mounted(source, *serve)
    load(omni, PIPELINE, view.path, tmp_path / "ranks", "--model", "wan")
    view.assert_made_once()
    expected = Expected("wan", source, view.path, facts["runtime_dtypes"])
    for stage, elsewhere in enumerate(reversed(STAGES["wan"])):
        held = load_file(tmp_path / "ranks" / f"{stage}.safetensors")
        assert held.keys() == {name for name in expected.names if not name.startswith(elsewhere)}
        assert len(held.keys() & expected.fp8) == len(expected.fp8) / 2
        for name, tensor in held.items():
            assert_same(name, tensor, expected.whole(name))


def test_hybrid_shards(omni: Omni, mounted: Mount, omni_source: Source, tmp_path: Path) -> None:
    """HSDP: every rank loads the source's FP8, keeps a shard of its rows, and gathers the same bytes from its group."""
    source, facts = omni_source("h3")
    view = mounted(source)
    reports = load(omni, HYBRID_SHARDED, view.path, tmp_path / "ranks", "--model", "h3")
    view.assert_made_once()
    expected = Expected("h3", source, view.path, facts["runtime_dtypes"])
    for rank, report in enumerate(reports):
        held = load_file(tmp_path / "ranks" / f"{rank}.safetensors")
        gathered = load_file(tmp_path / "ranks" / f"{rank}.gathered")
        assert held.keys() == gathered.keys() == expected.names
        assert expected.fp8 <= set(report["split"])
        for name, tensor in held.items():
            assert_same(name, tensor, expected.whole(name))
        for name, tensor in gathered.items():
            # Before sharding, the CPU build of vLLM moves an unquantized linear's weight into a form of its own.
            if tensor.numel() or name in expected.fp8:
                assert_same(name, tensor, expected.whole(name))


@pytest.mark.parametrize(
    ("layout", "gathering"),
    [
        pytest.param(SEQUENCE, 4, id="sp"),
        pytest.param(SEQUENCE_GUIDANCE, 2, id="sp-cfg"),
        pytest.param(GUIDANCE, 1, id="cfg"),
    ],
)
def test_ranks_that_stream_blocks(
    layout: Layout,
    gathering: int,
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """DLO maps the view and gathers each block in the sequence-parallel group: the source's FP8, each unit made once."""
    source, facts = omni_source("h3")
    view = mounted(source)
    results = omni.load(
        view.path,
        *("--layout", json.dumps(layout.settings)),
        model="h3",
        world=layout.world,
        workdir=tmp_path / "ranks",
        site=plugin,
    )
    view.assert_made_once()
    assert_grouped(results, layout)
    assert all(result["mapped"] and result["group_size"] == gathering for result in results)
    assert_right(results)  # against what the view stores, which is:
    expected = Expected("h3", source, view.path, facts["runtime_dtypes"]).stored
    shown = read_tensors(view.path / "transformer")
    assert shown.keys() == expected.keys()
    for name, tensor in shown.items():
        assert_same(name, tensor, expected[name])
