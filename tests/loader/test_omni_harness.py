"""vLLM-Omni's DLO reads FP8 checkpoints that were written offline: proves the harness and the plugin, without a mount."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader.omni import Omni, Result, assert_right, digests
from tests.loader.reference_pipeline import mark_as_view, write_fp8_pipeline

pytestmark = [pytest.mark.loader, pytest.mark.slow]

Source = Callable[[str], tuple[Path, dict[str, Any]]]
Online = Callable[..., Result]


@pytest.fixture
def view(tmp_path: Path, omni_source: Source) -> Callable[..., Path]:
    """``view(model, scheme, ...)``: an FP8 pipeline that the plugin takes for a view."""

    def make(model: str, scheme: str, *, runtime_names: bool = False, marked: bool = True) -> Path:
        source, facts = omni_source(model)
        target = tmp_path / "view"
        write_fp8_pipeline(
            source, target, model=model, scheme=scheme, facts=facts, runtime_names=runtime_names
        )
        if marked:
            mark_as_view(target)
        return target

    return make


@pytest.mark.parametrize(("model", "runtime_names"), [("h3", False), ("wan", True), ("qwen", True)])
def test_per_tensor_is_mapped_and_equals_online_fp8(
    model: str,
    runtime_names: bool,
    view: Callable[..., Path],
    omni: Omni,
    omni_online: Online,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """With the plugin, a per-tensor view is mapped by two ranks, and what they compute with equals online FP8."""
    pipeline = view(model, "per_tensor", runtime_names=runtime_names)
    mapped = omni.load(pipeline, model=model, world=2, workdir=tmp_path / "mapped", site=plugin)
    assert_right(mapped)
    assert all(result["mapped"] and result["group_size"] == 2 for result in mapped)
    online = omni_online(model)
    assert not online["mapped"]
    assert_right([online])
    assert {digests(result) for result in mapped} == {digests(online)}


@pytest.mark.parametrize("model", ["h3", "wan", "qwen"])
def test_per_tensor_loads_without_the_plugin(
    model: str, view: Callable[..., Path], omni: Omni, omni_online: Online, tmp_path: Path
) -> None:
    """Without the plugin, the ordinary loader reads the same view and ends with the same tensors as online FP8."""
    (ordinary,) = omni.load(
        view(model, "per_tensor"), model=model, world=1, workdir=tmp_path / "ordinary"
    )
    assert not ordinary["mapped"]
    assert_right([ordinary])
    assert digests(ordinary) == digests(omni_online(model))


def test_rank_local_reads_the_mapping(
    view: Callable[..., Path], omni: Omni, plugin: Path, tmp_path: Path
) -> None:
    """Without AllGather each rank streams from the mapping itself, with the same bytes."""
    pipeline = view("h3", "per_tensor")
    results = omni.load(
        pipeline, "--rank-local", model="h3", world=2, workdir=tmp_path / "run", site=plugin
    )
    assert_right(results)
    assert all(result["mapped"] and result["rank_local"] for result in results)


@pytest.mark.parametrize("kernel", ["cutlass-block", "triton-block", "deepgemm-block"])
def test_block_scales_suit_the_cuda_kernels(
    kernel: str, view: Callable[..., Path], omni: Omni, plugin: Path, tmp_path: Path
) -> None:
    """MiniMax-H3 with block scales in runtime row order is mapped, and each CUDA kernel class computes right with it."""
    results = omni.load(
        view("h3", "block"),
        "--kernel",
        kernel,
        model="h3",
        world=2,
        workdir=tmp_path / "run",
        site=plugin,
    )
    # DeepGEMM halves the scale of a block whose largest value was rounded down to a power of two, and doubles its bytes.
    assert_right(results, same_bytes=kernel != "deepgemm-block")
    assert all(result["mapped"] for result in results)


def test_cutlass_takes_the_finished_per_tensor_linears(
    view: Callable[..., Path], omni: Omni, plugin: Path, tmp_path: Path
) -> None:
    """The kernel of most GPUs finds the state that its own processing would have left."""
    results = omni.load(
        view("h3", "per_tensor"),
        "--kernel",
        "cutlass",
        model="h3",
        world=2,
        workdir=tmp_path / "run",
        site=plugin,
    )
    assert_right(results)
    assert all(result["mapped"] for result in results)


def test_plugin_leaves_foreign_checkpoints_alone(
    view: Callable[..., Path], omni: Omni, plugin: Path, tmp_path: Path
) -> None:
    """A checkpoint without fp8fs's manifest is treated as if the plugin were not installed."""
    pipeline = view("h3", "per_tensor", marked=False)
    results = omni.load(pipeline, model="h3", world=1, workdir=tmp_path / "run", site=plugin)
    assert not results[0]["mapped"]
    assert_right(results)


def test_plugin_can_be_switched_off(
    view: Callable[..., Path], omni: Omni, plugin: Path, tmp_path: Path
) -> None:
    """With FP8FS_VLLM_OMNI=0 a view goes through the ordinary loader."""
    results = omni.load(
        view("h3", "per_tensor"),
        model="h3",
        world=1,
        workdir=tmp_path / "run",
        site=plugin,
        settings={"FP8FS_VLLM_OMNI": "0"},
    )
    assert not results[0]["mapped"]
    assert_right(results)


@pytest.mark.parametrize("model", ["wan", "qwen"])
def test_checkpoint_names_fall_back(
    model: str, view: Callable[..., Path], omni: Omni, plugin: Path, tmp_path: Path
) -> None:
    """A view of Wan or Qwen-Image that keeps the checkpoint's names cannot be mapped, and loads all the same."""
    results = omni.load(
        view(model, "per_tensor"), model=model, world=1, workdir=tmp_path / "run", site=plugin
    )
    assert not results[0]["mapped"]
    assert "no checkpoint binding" in results[0]["fallback_reason"]
    assert_right(results)
