"""Fixtures of the acceptance tests: a command line with its own store, checkpoints made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.harness import Fp8fs, clean_up, make_checkpoint

SIZES = {"llama": "6M", "wan": "12M", "h3": "12M"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of this test's own; whatever it mounted below is gone afterwards."""
    yield tmp_path
    clean_up(tmp_path)


@pytest.fixture
def fp8fs(place: Path) -> Fp8fs:
    """The command line with a fresh store."""
    return Fp8fs(place / "store")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(kind)``: a small seeded checkpoint that no test may change."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("source") / kind
            made[kind] = make_checkpoint(folder, kind, SIZES[kind])
        return made[kind]

    return make
