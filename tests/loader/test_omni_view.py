"""vLLM-Omni's DLO reads a real mount, cold and warm, and computes what it computes with its own online FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader import harness
from tests.loader.mounts import MountedView
from tests.loader.test_omni_harness import Source, assert_right, digests

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

Mount = Callable[..., MountedView]
OPTIONS: dict[str, tuple[str, ...]] = {
    "h3": (),
    "wan": ("--names", "runtime"),
    "qwen": ("--names", "runtime"),
}


def everything(facts: dict[str, Any]) -> list[str]:
    """Options with which a view quantizes every linear that the engine builds as FP8, quality exclusions too."""
    return [word for linear in facts["fp8_linears"] for word in ("--quantize", f"{linear}.weight")]


@pytest.mark.parametrize("model", [pytest.param("h3", marks=pytest.mark.engine_ci), "wan", "qwen"])
def test_per_tensor_is_mapped_cold_and_warm(
    model: str, mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """Two ranks at once map an empty store's view, make each tensor once, and see the same again when it is warm."""
    source, _ = omni_source(model)
    view = mounted(source, "--scheme", "per_tensor", *OPTIONS[model])
    cold = harness.run_omni_ranks(
        view.path, model=model, world=2, workdir=tmp_path / "cold", site=plugin
    )
    assert_right(cold)
    assert all(result["mapped"] and result["group_size"] == 2 for result in cold)
    view.assert_made_once()
    view.remount()
    warm = harness.run_omni_ranks(
        view.path, model=model, world=2, workdir=tmp_path / "warm", site=plugin
    )
    assert_right(warm)
    assert all(result["mapped"] for result in warm)
    view.assert_nothing_made()
    assert len({digests(result) for result in (*cold, *warm)}) == 1


@pytest.mark.engine_ci
def test_h3_equals_online_fp8(
    mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """A view that quantizes all that the engine would has the digest of online FP8 through the ordinary loader."""
    source, facts = omni_source("h3")
    view = mounted(source, "--scheme", "per_tensor", *everything(facts))
    mapped = harness.run_omni_ranks(
        view.path, model="h3", world=2, workdir=tmp_path / "mapped", site=plugin
    )
    assert_right(mapped)
    assert all(result["mapped"] for result in mapped)
    online = harness.run_omni_ranks(
        source, "--quantization", "fp8", model="h3", world=1, workdir=tmp_path / "online"
    )
    assert mapped[0]["fp8_linears"] == online[0]["fp8_linears"]
    assert {digests(result) for result in mapped} == {digests(online[0])}


@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_ordinary_loader_without_the_plugin(
    serve: str, mounted: Mount, omni_source: Source, tmp_path: Path
) -> None:
    """Without the plugin the ordinary loader reads the same view, in either serve mode."""
    source, _ = omni_source("h3")
    view = mounted(source, "--scheme", "per_tensor", "--serve", serve)
    results = harness.run_omni_ranks(view.path, model="h3", world=1, workdir=tmp_path / "ordinary")
    assert not results[0]["mapped"]
    assert_right(results)


@pytest.mark.parametrize("world", [1, 4])
def test_world_sizes(
    world: int, mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """One rank and four at once read a cold view; each tensor is made once."""
    view = mounted(omni_source("h3")[0], "--scheme", "per_tensor")
    results = harness.run_omni_ranks(
        view.path, model="h3", world=world, workdir=tmp_path / "run", site=plugin
    )
    assert_right(results)
    assert all(result["group_size"] == world for result in results)
    view.assert_made_once()


def test_rank_local(mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path) -> None:
    """Without AllGather each of two ranks reads all of a cold view; each tensor is made once."""
    view = mounted(omni_source("h3")[0], "--scheme", "per_tensor")
    results = harness.run_omni_ranks(
        view.path, "--rank-local", model="h3", world=2, workdir=tmp_path / "run", site=plugin
    )
    assert_right(results)
    assert all(result["mapped"] and result["rank_local"] for result in results)
    view.assert_made_once()


@pytest.mark.parametrize("kernel", ["cutlass-block", "triton-block"])
def test_h3_block(
    kernel: str, mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """MiniMax-H3 with block scales is mapped, and the CUDA kernel classes compute right with it."""
    view = mounted(omni_source("h3")[0], "--scheme", "block")
    results = harness.run_omni_ranks(
        view.path, "--kernel", kernel, model="h3", world=2, workdir=tmp_path / "run", site=plugin
    )
    assert_right(results)
    assert all(result["mapped"] for result in results)
