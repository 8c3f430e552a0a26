"""The engine's door: seal shards on demand, serve inline reads, fill everything, say how it goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fp8fs.core.layout import Plan
from fp8fs.core.quantizer import Quantizer
from fp8fs.engine.amax import AmaxTable
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.fill import Filler, Refused
from fp8fs.engine.materialize import Materializer
from fp8fs.engine.matrix import SourceReader, view_bytes
from fp8fs.engine.memory import MemoryServer
from fp8fs.engine.once import OnceTable, Outcome, Poll, closing_error
from fp8fs.engine.pool import AHEAD, DEMAND, Pool, default_workers
from fp8fs.engine.reader import ShardReader
from fp8fs.engine.shard import ShardState
from fp8fs.engine.stats import Counters, EngineStats
from fp8fs.engine.trouble import StoreTrouble
from fp8fs.engine.works import Fill, UnitRequest
from fp8fs.errors import Fp8fsError, UsageError
from fp8fs.source import Source
from fp8fs.store.store import Store

__all__ = ["DEFAULT_MEMORY_BYTES", "GRAINS", "Engine"]

DEFAULT_MEMORY_BYTES = 96 << 20
"""Scratch for tiles; and as much again for units served from memory, while the store cannot be written."""

GRAINS = ("shard", "tensor")


class Engine:
    """Fills view shards on its own threads; callers only wait. Thread-safe.

    A shard is filled claim by claim, each under the store's lease, so that processes and threads share the work and
    every unit is made once. Locks, in this order: a claim's lease, a group's slot (both in the store, held over the
    work that they stand for); a reader's lock; the pool's lock (scheduling and shard states); leaf locks of counters,
    buffers and tables. No lock of this process is held while bytes are read, quantized or written.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        store: Store | None,
        quantizer_factory: Callable[[], Quantizer],
        *,
        workers: int = 0,
        run_ahead: int = 2,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        grain: str = "shard",
        on_sealed: Callable[[int, Path], Path | None] | None = None,
        is_there: Callable[[Path], bool] = os.path.lexists,
        drop_source: bool = True,
        why_no_store: str = "",
        expected: tuple[type[Fp8fsError], ...] = (),
    ) -> None:
        """*workers* 0: one per CPU that this process may use, at most 16. *grain* ("shard" or "tensor") says what
        ``open`` begins. *on_sealed(shard, object path)* links the object into the mount's tree and says where; it runs
        before anybody is told that the shard is sealed, never twice at once for a shard, and again only if it raised or
        if *is_there(place)* says that what was at that place was removed: asked at each look at the shard.
        *drop_source*: give the page cache back what was read for the last time. *expected*: failures that the caller
        deals with, which are no matter for the log."""
        if grain not in GRAINS:
            raise UsageError(f'unknown grain "{grain}"', hint=" or ".join(GRAINS))
        self._plan = plan
        self._grain = grain
        self._run_ahead = run_ahead
        self._factory = quantizer_factory
        self._quantizers: OnceTable[str, Quantizer] = OnceTable()
        self._counters = Counters(
            shards_total=len(plan.shards),
            units_total=sum(len(shard.units) for shard in plan.shards),
            bytes_total=sum(view_bytes(u) for shard in plan.shards for u in shard.units),
        )
        buffers = BufferPool(memory_bytes)
        self._pool = Pool(workers or default_workers(), on_idle=buffers.trim)
        reader = SourceReader(source, plan.source_shards, self._counters, drop=drop_source)
        amaxes = AmaxTable(plan, reader, buffers, self._pool, store, self.quantizer)
        materializer = Materializer(
            plan, reader, buffers, self._pool, self._counters, amaxes, self.quantizer
        )
        self._trouble = StoreTrouble(store, why_no_store)
        self._filler = Filler(
            plan,
            store,
            self._pool,
            self._counters,
            materializer,
            self._trouble,
            on_sealed,
            is_there,
            expected,
        )
        self._filler.on_complete = self._fill_later
        self._memory = MemoryServer(materializer, self._pool, memory_bytes)
        self._states: dict[int, ShardState] = {}
        self._fills: dict[int, Fill] = {}
        self._store = store
        self._again = Outcome()
        self._again.finish()
        self._places = {
            shard: (component, place)
            for component, order in plan.order.items()
            for place, shard in enumerate(order)
        }

    def sealed(self, shard: int) -> Path | None:
        """The published object, if there is one: as long as nobody removes it from the store behind our back.

        Costs at most one look into the store; waits for nothing.
        """
        return self._filler.look(self._state(shard))

    def ensure_sealed(self, shard: int, poll: Poll) -> Path:
        """The published object, made first if need be; the shards after it are begun too (run-ahead).

        *poll* runs at least every 0.1 s while waiting and may raise; the work goes on.
        Raises: StoreError when the store cannot be written now: serve this shard inline, which always works.
        NonFiniteTensorError, SourceChangedError, SourceInvalidError, DeviceError: the shard cannot be made.
        """
        path = self.sealed(shard)
        if path is None:
            if not self._trouble.usable():
                raise self._trouble.error()
            fill = self._demand(shard)
            self._begin_ahead(shard)
            self._wait(fill.outcome, poll)
            path = self.sealed(shard)
            if path is None:
                raise self._trouble.error()
        elif not self._trouble.reason:
            self._begin_ahead(shard)
        return path

    def open(self, shard: int) -> ShardReader:
        """A reader for inline serving. Waits for nothing; with grain "shard" the shard's fill begins.

        While the store is in trouble an open tries it again now and then: it may have room by now.
        """
        state = self._state(shard)
        with self._pool.changed:
            self._filler.moment += 1
        reader = ShardReader(self._filler, self._memory, state, self._request)
        if self._grain == "shard" and self._trouble.usable():
            if self.sealed(shard) is None:
                self._demand(shard)
            self._begin_ahead(shard)
        return reader

    def fill(
        self,
        progress: Callable[[EngineStats], None] | None = None,
        poll: Poll | None = None,
    ) -> None:
        """Seal every shard, in order. One bad shard does not stop the others; the first failure is raised at the end.

        *progress* and *poll* run on this thread, about every 0.1 s and at the end.
        """

        def tick() -> None:
            if poll is not None:
                poll()
            if progress is not None:
                progress(self.stats())

        first: Fp8fsError | None = None
        waits: list[tuple[int, Fill]] = []
        for order in self._plan.order.values():
            for shard in order:
                if self.sealed(shard) is None:
                    waits.append((shard, self._demand(shard)))
        for shard, fill in waits:
            try:
                self._wait(fill.outcome, tick)
                if self.sealed(shard) is None:
                    raise self._trouble.error()
            except Fp8fsError as err:
                first = first or err
                if self._pool.closing:
                    break
        tick()
        if first is not None:
            raise first

    def try_store_again(self) -> None:
        """While the store is in trouble, what it refused last is tried once more, if there is room for it now.

        At most every few seconds, however often this is called. Waits for nothing. Readers try too; but who has what it
        wants from memory, or from the kernel's cache, may not come back for long.
        """
        refused = self._filler.refused
        if refused is None or not self._trouble.reason or not self._again.done:
            return
        if not self._has_room(refused) or not self._trouble.usable():
            return
        state, units = refused
        if self.sealed(state.index) is not None or refused.is_there:
            self._trouble.worked()
        elif units is None:
            self._fill_later(state)
        else:
            request = UnitRequest(self._filler, state, units, self._filler.moment, AHEAD)
            self._again = request.outcome
            self._pool.add(request)

    def stats(self) -> EngineStats:
        """How far it is and what it does. Cheap; never waits for work."""
        with self._pool.changed:
            failed = sum(state.failed_bytes() for state in self._states.values())
        return self._counters.snapshot(bytes_failed=failed, degraded=self._trouble.reason)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the workers after the tile in work; unfinished units stay unmade. Repeatable.

        Whoever still waits gets an error at once. Readers of what is made go on reading.
        """
        self._pool.close(timeout_s)
        with self._pool.changed:
            partials = [state.partial for state in self._states.values() if not state.users]
            for state in self._states.values():
                if not state.users:
                    state.partial = None
        for partial in partials:
            if partial is not None:
                partial.close()
        for quantizer in self._quantizers.drain():
            quantizer.close()

    def _state(self, shard: int) -> ShardState:
        with self._pool.changed:
            state = self._states.get(shard)
            if state is None:
                state = self._states[shard] = ShardState(self._plan, shard)
            return state

    def quantizer(self) -> Quantizer:
        """The one quantizer, made by the first thread that needs it."""
        return self._quantizers.get("", self._factory, self._pool.check)

    def _demand(self, shard: int) -> Fill:
        """The shard's fill, begun or moved forward; a failure before now is tried again."""
        with self._pool.changed:
            self._filler.moment += 1
            fill = self._fills.get(shard)
            if fill is not None and not fill.finished and not fill.outcome.done:
                self._pool.promote(fill, DEMAND)
                return fill
            return self._add_fill(Fill(self._filler, self._state(shard), DEMAND))

    def _add_fill(self, fill: Fill) -> Fill:
        self._fills[fill.state.index] = fill
        self._pool.add(fill)
        return fill

    def _begin_ahead(self, shard: int) -> None:
        """Begin the component's next few shards; forget older ones that nobody asked for."""
        component, place = self._places[shard]
        order = self._plan.order[component]
        ahead = order[place + 1 : place + 1 + self._run_ahead]
        with self._pool.changed:
            for other, fill in list(self._fills.items()):
                if fill.finished:
                    del self._fills[other]
                elif (
                    fill.priority == AHEAD
                    and other not in ahead
                    and self._places[other][0] == component
                ):
                    self._pool.remove(fill)
                    del self._fills[other]
            for other in ahead:
                if other not in self._fills and self._state(other).object is None:
                    fill = Fill(self._filler, self._state(other), AHEAD)
                    if (
                        not self._trouble.reason
                    ):  # asked after the fill has noted the failures so far
                        self._add_fill(fill)

    def _has_room(self, refused: Refused) -> bool:
        """Whether the store's disk has as much free as the units still take; True if nobody can tell."""
        state, units = refused
        wanted = range(len(state.shard.units)) if units is None else units
        with self._pool.changed:
            missing = sum(view_bytes(state.shard.units[u]) for u in wanted if not state.counted[u])
        free = self._store.free_bytes() if self._store is not None else 0
        return free is None or free >= missing

    def _fill_later(self, state: ShardState) -> None:
        """Seal the shard, its units made first if need be, when there is time."""
        with self._pool.changed:
            fill = self._fills.get(state.index)
            if fill is None or fill.finished or fill.outcome.done:
                self._add_fill(Fill(self._filler, state, AHEAD))

    def _request(self, request: UnitRequest, poll: Poll) -> None:
        self._pool.add(request)
        self._wait(request.outcome, poll)

    def _wait(self, outcome: Outcome, poll: Poll) -> None:
        if self._pool.closing and not outcome.done:
            raise closing_error()
        self._counters.waiting(1)
        try:
            outcome.wait(poll)
        finally:
            self._counters.waiting(-1)
