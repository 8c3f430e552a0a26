"""The engine's door: seal shards on demand, serve inline reads, fill everything, say how it goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8fs.core.layout import Plan
from fp8fs.core.quantizer import Quantizer
from fp8fs.engine.reader import ShardReader
from fp8fs.engine.stats import EngineStats
from fp8fs.source import Source
from fp8fs.store.store import Store

__all__ = ["Engine"]


class Engine:
    """Fills view shards on its own threads; callers only wait."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        store: Store | None,
        quantizer_factory: Callable[[], Quantizer],
        *,
        workers: int = 0,
        run_ahead: int = 2,
        memory_bytes: int = 96 << 20,
        grain: str = "shard",
        on_sealed: Callable[[int, Path], None] | None = None,
        drop_source: bool = True,
        why_no_store: str = "",
    ) -> None:
        """*workers* 0: one per CPU that this process may use, at most 16. *grain* ("shard" or "tensor") says what
        ``open`` begins. *on_sealed(shard, object path)* links the object into the mount's tree; it runs once per
        shard, before anybody is told that the shard is sealed."""
        raise NotImplementedError

    def sealed(self, shard: int) -> Path | None:
        """The published object, if there is one. Costs at most one look into the store; waits for nothing."""
        raise NotImplementedError

    def ensure_sealed(self, shard: int, poll: Callable[[], None]) -> Path:
        """The published object, made first if need be; the shards after it are begun too (run-ahead).

        *poll* runs at least every 0.1 s while waiting and may raise; the work goes on.
        Raises: StoreError when the store cannot be written now: serve this shard inline, which always works.
        NonFiniteTensorError, SourceChangedError, SourceInvalidError, DeviceError: the shard cannot be made.
        """
        raise NotImplementedError

    def open(self, shard: int) -> ShardReader:
        """A reader for inline serving. Waits for nothing; with grain "shard" the shard's fill begins."""
        raise NotImplementedError

    def fill(
        self,
        progress: Callable[[EngineStats], None] | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        """Seal every shard, in order. One bad shard does not stop the others; the first failure is raised at the end."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the workers after the tile in work; unfinished units stay unmade. Repeatable."""
        raise NotImplementedError
