"""vLLM-Omni's DLO reads a real mount, cold and warm, and computes what it computes with its own online FP8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loader.mounts import MountedView, cold_and_warm
from tests.loader.omni import Omni, Result, assert_right, digests
from tests.loader.reference_pipeline import read_tensors, write_fp8_pipeline

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

Mount = Callable[..., MountedView]
Source = Callable[[str], tuple[Path, dict[str, Any]]]
Online = Callable[..., Result]

RUNTIME = ("--names", "runtime")
MAPPED: dict[str, tuple[str, ...]] = {"h3": (), "wan": RUNTIME, "wan22": RUNTIME, "qwen": RUNTIME}
"""Model -> the options of a mount that DLO can map. wan22 has two transformers, the others one."""

KEPT = {
    "h3": {
        "condition_proj",
        "final_layer.adaln_proj.linear",
        *(f"blocks.{number}.adaln_proj.linear" for number in range(4)),
    }
}
"""Model -> linears that stay for quality, although the engine would build them as FP8."""

COPIED = {"h3": ["transformer.token_refiner.blocks.0.attn.qkv_proj"]}
"""Model -> linears outside of the streamed blocks whose rows are put in order: no view of the file can show those."""


def everything(facts: dict[str, Any]) -> list[str]:
    """Options with which a view quantizes every linear that the engine builds as FP8, quality exclusions too."""
    return [word for linear in facts["fp8_linears"] for word in ("--quantize", f"{linear}.weight")]


def assert_as_written_offline(
    view: MountedView,
    model: str,
    source: Path,
    facts: dict[str, Any],
    offline: Path,
    *,
    scheme: str,
    runtime_names: bool,
) -> None:
    """The view of blocks has the tests' own conversion of the source, byte for byte: scales in the runtime's row order.

    What an engine computes with cannot tell: it is right with any scale that fits the bytes stored beside it.
    """
    chosen = {"fp8_linears": set(facts["fp8_linears"]) - KEPT.get(model, set())}
    write_fp8_pipeline(
        source,
        offline,
        model=model,
        scheme=scheme,
        facts=facts | chosen,
        runtime_names=runtime_names,
    )
    expected = read_tensors(offline / "transformer")
    shown = read_tensors(view.path / "transformer")
    assert shown.keys() == expected.keys()
    for name, tensor in shown.items():
        assert (name, tensor.dtype, tensor.shape) == (
            name,
            expected[name].dtype,
            expected[name].shape,
        )
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    "model", [pytest.param("h3", marks=pytest.mark.engine_ci), "wan", "wan22", "qwen"]
)
def test_it_is_mapped_cold_and_warm_and_equals_online_fp8(
    model: str,
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    omni_online: Online,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """Two ranks at once map an empty store's view, and each tensor is made once; warm, nothing is made. Both loads
    equal online FP8 of the same linears: all that the engine would quantize, but for the quality exclusions."""
    source, facts = omni_source(model)
    view = mounted(source, "--scheme", "per_tensor", *MAPPED[model])
    cold = omni.load(view.path, model=model, world=2, workdir=tmp_path / "cold", site=plugin)
    assert_right(cold)
    assert all(result["mapped"] and result["group_size"] == 2 for result in cold)
    view.assert_made_once()
    shown = [name for folder in view.path.glob("transformer*") for name in read_tensors(folder)]
    weights = [name for name in shown if not name.endswith(".weight_scale")]
    assert view.status()["units"]["made"] == len(weights) > len(facts["fp8_linears"])
    online = omni_online(model, view.ignored_layers())
    view.remount()
    warm = omni.load(view.path, model=model, world=2, workdir=tmp_path / "warm", site=plugin)
    assert_right(warm)
    assert all(result["mapped"] for result in warm)
    view.assert_nothing_made()
    assert_right([online])
    built = {name.partition(".")[2] for name in online["fp8_linears"]}
    assert built == set(facts["fp8_linears"]) - KEPT.get(model, set())
    for result in (*cold, *warm):
        assert result["copied"] == COPIED.get(model, [])
        assert result["fp8_linears"] == online["fp8_linears"]
        assert digests(result) == digests(online)


def test_h3_without_exclusions_equals_online_fp8(
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    omni_online: Online,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """A view that quantizes all that the engine would has the digest of online FP8 with no layer ignored."""
    source, facts = omni_source("h3")
    view = mounted(source, "--scheme", "per_tensor", *everything(facts))
    mapped = omni.load(view.path, model="h3", world=2, workdir=tmp_path / "mapped", site=plugin)
    assert_right(mapped)
    online = omni_online("h3")
    for result in mapped:
        assert result["mapped"]
        assert result["fp8_linears"] == online["fp8_linears"]
        assert digests(result) == digests(online)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("h3", ()),
        ("h3", ("--serve", "inline")),
        ("wan", ()),
        ("wan", RUNTIME),
        ("wan22", ()),
        ("qwen", ()),
        ("qwen", RUNTIME),
    ],
)
def test_ordinary_loader_without_the_plugin(
    model: str,
    options: tuple[str, ...],
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    omni_online: Online,
    tmp_path: Path,
) -> None:
    """Without the plugin the ordinary loader reads a view, cold and warm, of either names and serve mode, and ends with
    the tensors of online FP8."""
    view = mounted(omni_source(model)[0], "--scheme", "per_tensor", *options)
    (result,) = cold_and_warm(
        view, lambda path: omni.load(path, model=model, world=1, workdir=tmp_path / "ordinary")
    )
    assert not result["mapped"]
    assert_right([result])
    assert digests(result) == digests(omni_online(model, view.ignored_layers()))


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("model", ["h3", "wan", "qwen"])
def test_world_sizes(
    model: str,
    world: int,
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    omni_online: Online,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """One rank and four at once map a view, cold and warm, and compute what online FP8 does; each tensor is made once."""
    view = mounted(omni_source(model)[0], "--scheme", "per_tensor", *MAPPED[model])
    results = cold_and_warm(
        view,
        lambda path: omni.load(
            path, model=model, world=world, workdir=tmp_path / "run", site=plugin
        ),
    )
    assert_right(results)
    assert all(result["mapped"] and result["group_size"] == world for result in results)
    online = omni_online(model, view.ignored_layers())
    assert {digests(result) for result in results} == {digests(online)}


@pytest.mark.parametrize("model", ["h3", "wan22", "qwen"])
def test_rank_local(
    model: str,
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    omni_online: Online,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """Without AllGather each of two ranks maps all of a view, cold and warm, with the same ends; each tensor is made
    once."""
    view = mounted(omni_source(model)[0], "--scheme", "per_tensor", *MAPPED[model])
    results = cold_and_warm(
        view,
        lambda path: omni.load(
            path, "--rank-local", model=model, world=2, workdir=tmp_path / "run", site=plugin
        ),
    )
    assert_right(results)
    assert all(result["mapped"] and result["rank_local"] for result in results)
    assert all(result["copied"] == COPIED.get(model, []) for result in results)
    online = omni_online(model, view.ignored_layers())
    assert {digests(result) for result in results} == {digests(online)}


@pytest.mark.parametrize(
    ("model", "kernel", "scheme"),
    [
        ("h3", "cutlass-block", "block"),
        ("h3", "triton-block", "block"),
        ("h3", "deepgemm-block", "block"),
        ("wan", "triton-block", "block"),
        ("qwen", "cutlass-block", "block"),
        ("h3", "triton-block", "block_free"),
    ],
)
def test_block_is_mapped(
    model: str,
    kernel: str,
    scheme: str,
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """A view with block scales is mapped, cold and warm, and the CUDA kernel classes compute right with it."""
    source, facts = omni_source(model)
    view = mounted(source, "--scheme", scheme, *MAPPED[model])
    kernel_option = ("--kernel", kernel)
    results = cold_and_warm(
        view,
        lambda path: omni.load(
            path, *kernel_option, model=model, world=2, workdir=tmp_path / "run", site=plugin
        ),
    )
    # DeepGEMM halves the scale of a block whose largest value was rounded down to a power of two, and doubles its bytes.
    assert_right(results, same_bytes=kernel != "deepgemm-block")
    copied = results[0]["fp8_linears"] if kernel == "deepgemm-block" else COPIED.get(model, [])
    assert all(result["mapped"] and sorted(result["copied"]) == copied for result in results)
    names = MAPPED[model] == RUNTIME
    assert_as_written_offline(
        view, model, source, facts, tmp_path / "offline", scheme=scheme, runtime_names=names
    )


@pytest.mark.parametrize(
    ("model", "options", "scheme"),
    [
        ("h3", ("--ordinary",), "block"),
        ("wan", (), "block"),
        ("qwen", (), "block"),
        ("wan", (), "block_free"),
    ],
)
def test_block_loads_without_the_plugin(
    model: str,
    options: tuple[str, ...],
    scheme: str,
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    tmp_path: Path,
) -> None:
    """The ordinary loader reads a view with block scales under the checkpoint's names, cold and warm."""
    source, facts = omni_source(model)
    view = mounted(source, "--scheme", scheme)
    kernel = ("--kernel", "triton-block")
    (result,) = cold_and_warm(
        view,
        lambda path: omni.load(
            path, *kernel, *options, model=model, world=1, workdir=tmp_path / "run"
        ),
    )
    assert not result["mapped"]
    assert_right([result])
    assert_as_written_offline(
        view, model, source, facts, tmp_path / "offline", scheme=scheme, runtime_names=False
    )


def test_h3_block_without_the_plugin_shows_the_engines_own_fault(
    omni: Omni, mounted: Mount, omni_source: Source, tmp_path: Path
) -> None:
    """0.30.0 maps block scales by itself, and leaves the rows of the resident qkv as they are stored: those alone, and
    it does so with the BF16 source as well."""
    source, _ = omni_source("h3")
    view = mounted(source, "--scheme", "block")
    kernel = ("--kernel", "triton-block")
    for place, options in ((view.path, kernel), (source, ())):
        (result,) = omni.load(place, *options, model="h3", world=1, workdir=tmp_path / place.name)
        assert result["mapped"]
        assert result["streamed"]["mismatched"] == result["streamed"]["wrong"] == []
        assert result["resident"]["mismatched"] == [
            "transformer.token_refiner.blocks.0.attn.qkv_proj.weight"
        ]
