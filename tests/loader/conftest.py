"""Fixtures of the loader tests: tiny sources made once per session, and an installed plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.harness import clean_up
from tests.loader import harness
from tests.loader.mounts import MountedView


@pytest.fixture(scope="session")
def omni_source(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """``omni_source(model)``: the folder of a tiny BF16 pipeline and the facts about it."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(model: str) -> tuple[Path, dict[str, Any]]:
        if model not in made:
            pipeline = tmp_path_factory.mktemp(f"{model}-source") / "bf16"
            made[model] = (pipeline, harness.make_omni_source(model, pipeline))
        return made[model]

    return make


@pytest.fixture(scope="session")
def llm_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``llm_source(model)``: the folder of a tiny BF16 transformers model."""
    made: dict[str, Path] = {}

    def make(model: str) -> Path:
        if model not in made:
            made[model] = tmp_path_factory.mktemp(f"{model}-source") / "bf16"
            harness.make_llm_source(model, made[model])
        return made[model]

    return make


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
