"""Normalized FP8 caches of the tiny pipelines, mapped by vLLM-Omni as a loader of such caches maps a hit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.harness import Fp8fs
from tests.loader.omni import Omni, Result, assert_right, digests
from tests.loader.reference_pipeline import mark_as_view

pytestmark = [pytest.mark.loader, pytest.mark.slow]

PUBLISHERS = 3


def as_pipeline(source: Path, artifact: Path, pipeline: Path) -> Path:
    """The artifact's shards beside the source's config: what a loader puts together itself on a hit.

    The mark of a view lets the plugin finish the linears; no release of the engine has a loader that would.
    """
    folder = pipeline / "transformer"
    folder.mkdir(parents=True)
    for file in (artifact / "transformer").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "transformer" / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "is_checkpoint_fp8_serialized": True,
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (pipeline / "model_index.json").write_bytes((source / "model_index.json").read_bytes())
    mark_as_view(pipeline)
    return pipeline


@pytest.mark.parametrize("model", ["h3", "wan", "qwen"])
def test_a_hit_equals_online_fp8(
    model: str,
    omni: Omni,
    omni_source: Callable[[str], tuple[Path, dict[str, Any]]],
    omni_online: Callable[..., Result],
    plugin: Path,
    tmp_path: Path,
) -> None:
    """Publishers at once on an empty store end with one valid cache; two ranks map it, every tensor is as it is stored,
    no row is moved, and after the finish step it equals online FP8 with no layer ignored."""
    source, facts = omni_source(model)
    fp8fs, artifact = Fp8fs(tmp_path / "store"), tmp_path / "cache"
    command = ("build", source, "--as", "normalized-cache", "--to", artifact, "--quiet")
    publishers = [fp8fs.popen(*command) for _ in range(PUBLISHERS)]
    for publisher in publishers:
        out, err = publisher.communicate(timeout=300)
        assert (publisher.returncode, out) == (0, f"{artifact}\n"), err
    assert fp8fs.json("verify", artifact)["hit"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "store"}

    pipeline = as_pipeline(source, artifact, tmp_path / "hit")
    results = omni.load(
        pipeline, "--runtime-rows", model=model, world=2, workdir=tmp_path / "run", site=plugin
    )
    assert_right(results)
    online = omni_online(model)
    assert len(online["fp8_linears"]) == len(facts["fp8_linears"])
    for result in results:
        assert result["mapped"]
        assert result["fp8_linears"] == online["fp8_linears"]
        assert digests(result) == digests(online)
