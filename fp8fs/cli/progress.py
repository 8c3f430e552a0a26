"""Progress on stderr: bars where somebody watches a terminal, silence everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from fp8fs.engine import EngineStats

__all__ = ["bar", "filling", "following"]


def _watched(*, quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


@contextmanager
def bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told the bytes of each step."""
    if not _watched(quiet=quiet):
        yield lambda step: None
        return
    with _bars() as bars:
        task = bars.add_task(what, total=total)
        yield lambda step: bars.advance(task, step)


@contextmanager
def following(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that is told (bytes done, bytes in all) now and then."""
    if not _watched(quiet=quiet):
        yield lambda done, total: None
        return
    with _bars() as bars:
        task = bars.add_task(what)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def filling(*, quiet: bool) -> Iterator[Callable[[EngineStats], None]]:
    """Yields a function that is told the engine's statistics now and then."""
    if not _watched(quiet=quiet):
        yield lambda stats: None
        return
    with _bars() as bars:
        task = bars.add_task("quantizing")

        def show(stats: EngineStats) -> None:
            bars.update(
                task,
                total=stats.bytes_total,
                completed=stats.bytes_out + stats.bytes_reused,
                description=f"shard {stats.shards_sealed}/{stats.shards_total}",
            )

        yield show
