"""Sources that fp8fs knows too little of, or has nothing to do for, and plugins that know too little of the engine:
each one clear line, and a load that is right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader import harness
from tests.loader.mounts import MountedView
from tests.loader.omni import Omni, Result, assert_right, digests
from tests.loader.reference_pipeline import write_runtime_pipeline

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

Mount = Callable[..., MountedView]
Source = Callable[[str], tuple[Path, dict[str, Any]]]
Online = Callable[..., Result]


def of_class(source: Path, class_name: str, target: Path) -> Path:
    """A copy of a pipeline whose transformer says that it is of another class."""
    shutil.copytree(source, target)
    path = target / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"_class_name": class_name}))
    return target


def warnings(view: MountedView) -> list[str]:
    """What the mount warned of."""
    found: list[str] = view.status()["warnings"]
    return found


@pytest.mark.parametrize("model", ["h3", "wan", "qwen"])
def test_an_unknown_class_loads_right(
    model: str, omni: Omni, mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """Of a class that fp8fs has no profile of, a generic rule chooses, and one line says so: what the engine builds of
    the view is right."""
    source = of_class(omni_source(model)[0], "UnheardTransformer3DModel", tmp_path / "source")
    view = mounted(source, "--scheme", "per_tensor")
    (line,) = [w for w in warnings(view) if "UnheardTransformer3DModel" in w]
    assert "no engine's profile" in line
    results = omni.load(view.path, model=model, world=1, workdir=tmp_path / "run", site=plugin)
    assert_right(results)
    view.assert_made_once()


def test_a_class_without_fp8_is_the_source(
    omni: Omni, mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """Of a class in which the engine quantizes nothing, the view is the source, and loads as the source does."""
    source = of_class(omni_source("wan")[0], "SD3Transformer2DModel", tmp_path / "source")
    view = mounted(source, "--scheme", "per_tensor", "--allow-unquantized")
    (line,) = [w for w in warnings(view) if "SD3Transformer2DModel" in w]
    assert "quantizes nothing" in line
    found = [
        omni.load(place, model="wan", world=1, workdir=tmp_path / name, site=plugin)[0]
        for name, place in (("view", view.path), ("source", source))
    ]
    for result in found:
        assert result["fp8_linears"] == []
        assert result["streamed"]["mismatched"] == result["resident"]["mismatched"] == []
        assert result["streamed"]["compared"] > 0
    assert digests(found[0]) == digests(found[1])


def test_uneven_halves_are_said_and_mapped_right(
    omni: Omni, mounted: Mount, omni_source: Source, plugin: Path, tmp_path: Path
) -> None:
    """MiniMax-H3 whose gate and up are no whole blocks: with block scales one line names the layer, the ordinary loader
    fails and direct mmap is right; per tensor there is no such line, and the ordinary loader is right."""
    source, _ = omni_source("h3-uneven")
    block = mounted(source, "--scheme", "block")
    (line,) = [w for w in warnings(block) if "no multiple of 128" in w]
    assert ".mlp.fc1" in line
    kernel = ("--kernel", "triton-block")
    whole = mounted(source, "--scheme", "per_tensor")
    assert not any("no multiple of 128" in w for w in warnings(whole))
    for view, options in ((block, kernel), (whole, ("--ordinary",))):
        (result,) = omni.load(
            view.path,
            *options,
            model="h3-uneven",
            world=1,
            workdir=tmp_path / options[0],
            site=plugin,
        )
        assert result["mapped"] == (view is block)
        assert_right([result])
    with pytest.raises(AssertionError, match="exceeds dimension size"):
        omni.load(
            block.path,
            *kernel,
            "--ordinary",
            model="h3-uneven",
            world=1,
            workdir=tmp_path / "ordinary",
            site=plugin,
        )


@pytest.mark.parametrize("model", ["wan", "qwen"])
@pytest.mark.parametrize("options", [(), ("--names", "runtime")])
def test_a_source_in_runtime_names_is_mapped_as_it_is(
    model: str,
    options: tuple[str, ...],
    omni: Omni,
    mounted: Mount,
    omni_source: Source,
    omni_online: Online,
    plugin: Path,
    tmp_path: Path,
) -> None:
    """A checkpoint that has the runtime's names keeps them, asked for or not, and is read like any other."""
    source, facts = omni_source(model)
    renamed = tmp_path / "renamed"
    write_runtime_pipeline(source, renamed, model=model, facts=facts)
    view = mounted(renamed, "--scheme", "per_tensor", *options)
    (result,) = omni.load(view.path, model=model, world=1, workdir=tmp_path / "run", site=plugin)
    assert result["mapped"]
    assert_right([result])
    online = omni_online(model, view.ignored_layers())
    assert result["fp8_linears"] == online["fp8_linears"]
    assert digests(result) == digests(online)


def test_a_plugin_that_does_not_know_the_engine_steps_aside(
    omni: Omni, mounted: Mount, omni_source: Source, tmp_path: Path
) -> None:
    """With a release that it was not tested with, the plugin says so in one line, and the view loads without it."""
    site = harness.install_plugin(tmp_path / "site")
    other = site / "vllm_omni-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 9.9.9\n")
    view = mounted(omni_source("h3")[0], "--scheme", "per_tensor")
    (result,) = omni.load(view.path, model="h3", world=1, workdir=tmp_path / "run", site=site)
    assert not result["mapped"]
    assert_right([result])
    log = (tmp_path / "run" / "log0.txt").read_text()
    assert log.count("fp8fs plugin is not active: vllm-omni 9.9.9") == 1
