"""Fixtures of the loader tests: tiny sources made once per session, and an installed plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.harness import clean_up
from tests.loader import harness
from tests.loader.forks import ForkedScripts
from tests.loader.mounts import MountedView
from tests.loader.omni import Omni, Result, quantize_online


@pytest.fixture(scope="session")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Omni]:
    """vLLM-Omni, imported once."""
    with closing(Omni(tmp_path_factory.mktemp("omni") / "log.txt")) as engine:
        yield engine


@pytest.fixture(scope="session")
def omni_source(
    omni: Omni, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """``omni_source(model)``: the folder of a tiny BF16 pipeline and the facts about it."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(model: str) -> tuple[Path, dict[str, Any]]:
        if model not in made:
            pipeline = tmp_path_factory.mktemp(f"{model}-source") / "bf16"
            made[model] = (pipeline, omni.make_source(model, pipeline))
        return made[model]

    return make


@pytest.fixture(scope="session")
def omni_online(
    omni: Omni,
    omni_source: Callable[[str], tuple[Path, dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Result]:
    """``omni_online(model, ignored)``: the BF16 source, quantized by the engine itself in its ordinary loader.

    Without the plugin, and once for equal arguments. ``ignored``: the layers that it is told to leave alone.
    """
    made: dict[tuple[str, ...], Result] = {}

    def load(model: str, ignored: Sequence[str] = ()) -> Result:
        key = (model, *sorted(ignored))
        if key not in made:
            source, _ = omni_source(model)
            options = quantize_online(ignored_layers=list(ignored))
            workdir = tmp_path_factory.mktemp("online")
            (made[key],) = omni.load(source, *options, model=model, world=1, workdir=workdir)
        return made[key]

    return load


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedScripts]:
    """vLLM, imported once."""
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with closing(ForkedScripts("vllm", "vllm_generate", log=log)) as scripts:
        yield scripts


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedScripts]:
    """transformers, imported once."""
    log = tmp_path_factory.mktemp("transformers") / "log.txt"
    with closing(ForkedScripts("vllm", "hf_logits", "llm_make_source", log=log)) as scripts:
        yield scripts


@pytest.fixture(scope="session")
def llm_source(
    transformers: ForkedScripts, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``llm_source(model)``: the folder of a tiny BF16 transformers model."""
    made: dict[str, Path] = {}

    def make(model: str) -> Path:
        if model not in made:
            folder = tmp_path_factory.mktemp(f"{model}-source")
            arguments = (folder / "bf16", "--model", model)
            transformers.run("llm_make_source", *arguments, workdir=folder / "make")
            made[model] = folder / "bf16"
        return made[model]

    return make


@pytest.fixture(scope="session")
def generate(
    vllm: ForkedScripts, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """``generate(checkpoint, *options)``: tokens and log probabilities of vLLM for a checkpoint."""

    def run(checkpoint: Path, *options: object) -> dict[str, Any]:
        workdir = tmp_path_factory.mktemp("generate")
        result: dict[str, Any] = vllm.run("vllm_generate", checkpoint, *options, workdir=workdir)
        return result

    return run


@pytest.fixture(scope="session")
def generate_from_source(
    generate: Callable[..., dict[str, Any]], llm_source: Callable[[str], Path]
) -> Callable[..., dict[str, Any]]:
    """``generate_from_source(model, *options)``: the same from the BF16 source, once for equal arguments."""
    made: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(model: str, *options: str) -> dict[str, Any]:
        if (model, *options) not in made:
            made[(model, *options)] = generate(llm_source(model), *options)
        return made[(model, *options)]

    return run


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with fp8fs installed, entry points included."""
    return harness.install_plugin(tmp_path_factory.mktemp("site"))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., MountedView]]:
    """``mounted(source, *options)``: a view served by a process of its own, on a store that starts empty."""
    views: list[MountedView] = []

    def mount(source: Path, *options: object) -> MountedView:
        views.append(MountedView(source, tmp_path / f"mount{len(views)}", options))
        return views[-1]

    try:
        yield mount
        for view in views:
            view.unmount()
    finally:
        clean_up(tmp_path)
