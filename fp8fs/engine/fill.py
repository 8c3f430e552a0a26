"""From a cold shard to a sealed object: look, open, make claims, seal, link. Tasks for worker threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fp8fs.core.layout import Plan
from fp8fs.engine.materialize import Materializer, Sink
from fp8fs.engine.once import Stopped, told
from fp8fs.engine.pool import Pool
from fp8fs.engine.shard import Phase, ShardState, seal_facts, unit_spans
from fp8fs.engine.stats import Counters
from fp8fs.engine.trouble import StoreTrouble
from fp8fs.errors import Fp8fsError, StoreBusyError, StoreDamagedError, StoreError
from fp8fs.store.store import Partial, Published, Store

__all__ = ["Filler", "Refused"]

log = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 1.0
_ELSEWHERE_S = 0.05
_MAX_LOST = 5


class Refused(NamedTuple):
    """What the store did not take when it failed last: these units of the shard, or (None) the shard."""

    state: ShardState
    units: tuple[int, ...] | None

    @property
    def is_there(self) -> bool:
        """Whether the store has it by now."""
        return self.state.linked if self.units is None else self.state.all_made(self.units)


class Filler:
    """The steps that bring a shard nearer to its sealed object.

    Every step runs without the pool's lock and takes it only to note what it found. Lease order: a claim of the
    partial, then a group's slot; sealing takes all claims and no slot.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store | None,
        pool: Pool,
        counters: Counters,
        materializer: Materializer,
        trouble: StoreTrouble,
        on_sealed: Callable[[int, Path], Path | None] | None,
        is_there: Callable[[Path], bool],
        expected: tuple[type[Fp8fsError], ...] = (),
    ) -> None:
        """*expected*: failures that the caller deals with, so that they are no matter for the log."""
        self.pool = pool
        self.trouble = trouble
        self.moment = 0
        self.refused: Refused | None = None
        self._plan = plan
        self._store = store
        self._counters = counters
        self._materializer = materializer
        self._on_sealed = on_sealed
        self._is_there = is_there
        self._expected = expected
        self.on_complete: Callable[[ShardState], None] = lambda _state: None
        """Called when the last unit of a shard is made."""

    # -- looking ------------------------------------------------------------------------------

    def look(self, state: ShardState) -> Path | None:
        """The published and linked object, if there is one. One look into the store at most; never waits."""
        with self.pool.changed:
            linked, place = state.linked, state.place
        if linked and (place is None or self._is_there(place) or not self._forget(state)):
            return state.object
        with self.pool.changed:
            if self._store is None or state.linking:
                return None
            state.linking = True
            found = state.object
        try:
            if found is None:
                found = self._store.find_object(state.spec)
            if found is not None:
                self._take_object(state, found)
                self.trouble.worked()
        except StoreError as err:
            self._store_failed(state, err)
            if found is not None:
                self.refused = Refused(state, None)
        finally:
            with self.pool.changed:
                state.linking = False
                self.pool.changed.notify_all()
        return found if state.linked else None

    def _forget(self, state: ShardState) -> bool:
        """The sealed file was removed behind our back: the shard is cold again. False if it cannot be now."""
        with self.pool.changed:
            if not state.linked or state.users:
                return False
            stale = state.unsealed()
            self.pool.changed.notify_all()
        self._counters.sealed(-1)
        log.warning("%s: its sealed file is gone from the store", state.shard.path)
        if stale is not None:
            stale.close()
        return True

    def _adopt(self, state: ShardState, path: Path) -> None:
        """The object at *path* is the shard. Waits for whoever is linking it just now."""
        with self.pool.changed:
            while state.linking:
                self.pool.changed.wait()
            if state.linked:
                return
            state.linking = True
        try:
            self._take_object(state, path)
        finally:
            with self.pool.changed:
                state.linking = False
                self.pool.changed.notify_all()

    def _take_object(self, state: ShardState, path: Path) -> None:
        """Note the object and link it into the tree. The caller has set ``linking``. Raises: StoreError."""
        with self.pool.changed:
            news = state.object is None
            if news:
                state.sealed(path)
                reused, reused_bytes = state.count(range(len(state.shard.units)))
                self.pool.changed.notify_all()
        if news:
            self._counters.reused(reused, reused_bytes)
            self._counters.sealed(1)
            self._close_unused(state)
        place: Path | None = path
        if self._on_sealed is not None:
            try:
                place = self._on_sealed(state.index, path)
            except OSError as err:
                raise StoreError(f"{state.shard.path}: cannot be linked: {err.strerror}") from err
        with self.pool.changed:
            state.linked, state.place = True, place

    # -- steps --------------------------------------------------------------------------------

    def open_partial(self, state: ShardState) -> Fp8fsError | None:
        """COLD to SEALED if the object is there, else to OPEN. Returns what went wrong."""
        store = self._store
        if store is None:
            return self._cold(state, self.trouble.error())
        try:
            path = store.find_object(state.spec)
            if path is not None:
                self._adopt(state, path)
                return None
            partial = store.partial(
                state.spec,
                unit_spans(state.shard),
                poll=self.pool.check,
                timeout_s=_OPEN_TIMEOUT_S,
            )
        except (Published, StoreBusyError):
            return self._cold(state, None)
        except StoreError as err:
            self._store_failed(state, err)
            return self._cold(state, err)
        except Exception as err:  # noqa: BLE001 - a worker reports to those who wait
            return self._cold(state, self._reported(err))
        with self.pool.changed:
            wanted = state.phase is Phase.OPENING  # else somebody found the object meanwhile
            if wanted:
                state.opened(self._plan, partial)
            reused, reused_bytes = state.count(partial.records)
            self.pool.changed.notify_all()
        self._counters.reused(reused, reused_bytes)
        if not wanted:
            partial.close()
        elif not state.unmade:
            self.on_complete(state)
        return None

    def reopen(self, state: ShardState, stale: Partial | None) -> Fp8fsError | None:
        """Close a partial that met with trouble and open it anew, recovered."""
        if stale is not None:
            stale.close()
        return self.open_partial(state)

    def make_claim(
        self, state: ShardState, claim: int, units: Sequence[int], priority: int
    ) -> Fp8fsError | None:
        """Make these units of a claim, unless they are made. Returns why the claim failed.

        A lease that another process holds is no failure: the claim is tried again later.
        """
        with self.pool.changed:
            partial, generation = state.partial, state.generation
            if partial is None or state.phase is not Phase.OPEN:
                return None
            state.users += 1
        self._counters.in_flight(1)
        try:
            with partial.claim(claim, poll=self.pool.check, timeout_s=0):
                self._make(state, partial, generation, units, priority)
        except Published:
            return self._republished(state)
        except StoreBusyError:
            with self.pool.changed:
                state.elsewhere[claim] = time.monotonic() + _ELSEWHERE_S
            return None
        except StoreError as err:
            state.suspect = True
            self._store_failed(state, err)
            return err
        except Exception as err:  # noqa: BLE001 - a worker reports to those who wait
            return self._failed(state, claim, err)
        finally:
            self._counters.in_flight(-1)
            self._leave(state)
        with self.pool.changed:
            state.elsewhere.pop(claim, None)
            state.forgive(claim)
        return None

    def _make(
        self,
        state: ShardState,
        partial: Partial,
        generation: int,
        units: Sequence[int],
        priority: int,
    ) -> None:
        """Make what the journal does not list. The claim's lease is held."""
        records = partial.records
        there = [unit for unit in units if unit in records]
        missing = [unit for unit in units if unit not in records]

        def note(done: Sequence[int], *, by_us: bool) -> None:
            complete = False
            with self.pool.changed:
                if state.generation == generation and state.phase is Phase.OPEN:
                    state.mark_made(done)
                    complete = not state.unmade
                number, nbytes = state.count(done)
                self.pool.changed.notify_all()
            if not by_us:
                self._counters.reused(number, nbytes)
            if complete:
                self.on_complete(state)

        if there:
            note(there, by_us=False)
        if missing:
            sink = Sink(partial, lambda done: note(done, by_us=True))
            self._materializer.make(state.index, missing, sink, priority)
            self.trouble.worked()

    def seal(self, state: ShardState) -> Fp8fsError | None:
        """Publish a shard whose units are all made, and link it. Returns what went wrong."""
        with self.pool.changed:
            partial = state.partial
            if partial is None or state.phase is not Phase.OPEN:
                state.sealing = False
                return None
            state.users += 1
        try:
            path = partial.seal(seal_facts(self._plan, state.shard), poll=self.pool.check)
            self._adopt(state, path)
        except Published:
            return self._republished(state)
        except StoreBusyError as err:
            return err
        except StoreError as err:
            state.suspect = True
            self._store_failed(state, err)
            return err
        except Exception as err:  # noqa: BLE001 - a worker reports to those who wait
            return self._reported(err)
        finally:
            with self.pool.changed:
                state.sealing = False
            self._leave(state)
        self.trouble.worked()
        return None

    # -- outcomes -----------------------------------------------------------------------------

    def _cold(self, state: ShardState, error: Fp8fsError | None) -> Fp8fsError | None:
        """Opening came to nothing; not tried again at once."""
        with self.pool.changed:
            if state.phase is Phase.OPENING:
                state.phase = Phase.COLD
            state.retry_at = time.monotonic() + _ELSEWHERE_S
            self.pool.changed.notify_all()
        return error

    def _republished(self, state: ShardState) -> Fp8fsError | None:
        """Somebody else sealed the shard. If the object is not to be found all the same, begin again."""
        store = self._store
        if store is None:
            return self.trouble.error()
        try:
            path = store.find_object(state.spec)
            if path is not None:
                self._adopt(state, path)
                return None
        except StoreError as err:
            self._store_failed(state, err)
            return err
        with self.pool.changed:
            stale = state.reset() if state.phase is Phase.OPEN else None
            state.lost += 1
        if stale is not None:
            stale.close()
        return self._lost(state)

    def _lost(self, state: ShardState) -> Fp8fsError | None:
        if state.lost <= _MAX_LOST:
            return None
        error = StoreDamagedError(f"{state.shard.path}: published again and again, but not found")
        self._store_failed(state, error)
        return error

    def _failed(self, state: ShardState, claim: int, failure: Exception) -> Fp8fsError:
        error = self._reported(failure)
        if not isinstance(failure, Stopped):
            with self.pool.changed:
                state.fail(claim, self.moment, error)
        return error

    def _reported(self, failure: Exception) -> Fp8fsError:
        """The failure as it is told to those who wait, noted for ``status`` and the log."""
        error = told(failure)
        if isinstance(failure, Stopped):
            return error
        if isinstance(failure, Fp8fsError):
            log.log(
                logging.DEBUG if isinstance(failure, self._expected) else error.level, "%s", error
            )
        else:
            log.error("a bug in a worker", exc_info=failure)
        self._counters.failed(error)
        return error

    def _store_failed(self, state: ShardState, error: StoreError) -> None:
        """Degrade: readers are served from memory until the store works again."""
        if self.trouble.failed(error):
            log.warning("%s: serving from memory, the store failed: %s", state.shard.path, error)
            self._counters.failed(error)

    def _leave(self, state: ShardState) -> None:
        """A task no longer uses the partial."""
        with self.pool.changed:
            state.users -= 1
        self._close_unused(state)

    def _close_unused(self, state: ShardState) -> None:
        with self.pool.changed:
            partial = None
            if state.phase is Phase.SEALED and not state.users:
                partial, state.partial = state.partial, None
        if partial is not None:
            partial.close()
