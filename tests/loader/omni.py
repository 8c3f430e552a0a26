"""Loads of tiny diffusion pipelines by vLLM-Omni's DLO: ranks as forks of one process that has the engine imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.loader import harness
from tests.loader.forks import ForkedScripts

Result = dict[str, Any]


class Omni:
    """vLLM-Omni. Close it when done."""

    def __init__(self, log: Path) -> None:
        scripts = ("omni_load", "omni_make_source", "parallel_load", "parallel_experts")
        self._scripts = ForkedScripts("vllm-omni", *scripts, log=log)

    def load(
        self,
        pipeline: Path,
        *options: object,
        model: str,
        world: int,
        workdir: Path,
        site: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> list[Result]:
        """What each of *world* gloo ranks reports of a pipeline, loaded with DLO by all of them at once."""
        shared = (pipeline, "--model", model, "--world", world, "--port", harness.free_port())
        ranks = [(*shared, *options, "--rank", rank) for rank in range(world)]
        return self._scripts.run_all(
            "omni_load", ranks, workdir=workdir, site=site, settings=settings
        )

    def load_layout(
        self,
        checkpoint: Path,
        settings: Mapping[str, object],
        *options: object,
        world: int,
        workdir: Path,
        script: str = "parallel_load",
    ) -> list[Result]:
        """What each rank of a parallel layout reports; rank N writes the tensors that it holds to N.safetensors.

        ``settings``: the engine's names for the layout; ``script``: which of ``engine_side/`` loads the checkpoint.
        """
        layout = ("--layout", json.dumps(settings), "--world", world, "--port", harness.free_port())
        dumps = [("--rank", n, "--dump", workdir / f"{n}.safetensors") for n in range(world)]
        ranks = [(checkpoint, *options, *layout, *dump) for dump in dumps]
        return self._scripts.run_all(script, ranks, workdir=workdir)

    def make_source(self, model: str, pipeline: Path) -> dict[str, Any]:
        """Write the tiny BF16 pipeline of a model. Returns the facts about it."""
        arguments = (pipeline, "--model", model, "--port", harness.free_port())
        facts: dict[str, Any] = self._scripts.run(
            "omni_make_source", *arguments, workdir=pipeline.parent / "make"
        )
        return facts

    def close(self) -> None:
        self._scripts.close()


def quantize_online(**settings: object) -> tuple[str, str]:
    """The engine's option to quantize BF16 weights itself, with settings such as ``ignored_layers``."""
    return "--quantization", json.dumps({"quant_method": "fp8", **settings})


def assert_right(results: list[Result], *, same_bytes: bool = True) -> None:
    """Every rank saw the stored bytes everywhere, and every FP8 linear was called and is right."""
    for result in results:
        for part in (result["streamed"], result["resident"]):
            assert part["mismatched"] == [] or not same_bytes
            assert part["raised"] == {}
            assert part["wrong"] == []
        assert result["streamed"]["compared"] > 0
        called = result["streamed"]["called"] + result["resident"]["called"]
        assert called == len(result["fp8_linears"]) > 0


def digests(result: Result) -> tuple[str, str]:
    """Of all tensors inside the streamed blocks, and of all others: equal for equal loads, whatever the route."""
    return result["streamed"]["digest"], result["resident"]["digest"]
