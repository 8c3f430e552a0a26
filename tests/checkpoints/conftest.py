"""What the tests of real checkpoints share: a command line with a store of its own, both ways of serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.harness import Fp8fs, clean_up
from tests.checkpoints.looks import SERVE_MODES


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of this test's own; whatever it mounted below is gone afterwards."""
    yield tmp_path
    clean_up(tmp_path)


@pytest.fixture
def fp8fs(place: Path) -> Fp8fs:
    """The command line with a fresh store."""
    return Fp8fs(place / "store")


@pytest.fixture(params=SERVE_MODES)
def mount(fp8fs: Fp8fs, place: Path, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """``mount(src, *options)``: where the view of *src* is mounted, once for each way of serving."""
    made: list[Path] = []

    def at(src: Path, *options: object) -> Path:
        made.append(place / f"view{len(made)}")
        fp8fs.mount(src, made[-1], *SERVE_MODES[request.param], *options)
        return made[-1]

    return at
