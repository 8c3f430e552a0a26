"""A world in memory where there is some, and quiet logs: these tests break thousands of stores."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.crash.flows")

from tests.crash.flows import World  # noqa: E402 - asserts in it are explained, too


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of injected faults would be logged; only what is wrong afterwards matters."""
    caplog.set_level(logging.CRITICAL, logger="fp8fs")


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory in memory where there is one."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """One small model, what its view must be, and stores in which something was left undone."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield World(Path(folder))
