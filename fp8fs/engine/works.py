"""What waits for a shard: a fill that seals it, or a request for some of its units. Decides; runs nothing itself."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from fp8fs.engine.fill import Filler, Refused
from fp8fs.engine.once import Outcome, closing_error
from fp8fs.engine.pool import AHEAD, Task, Work
from fp8fs.engine.shard import Phase, ShardState
from fp8fs.errors import Fp8fsError, StoreError

__all__ = ["Fill", "UnitRequest"]


class _ShardWork(Work):
    """Hands out the steps that a shard still needs, in order, each to one worker.

    ``outcome`` is set when there is nothing left to do, or with the first error.
    """

    def __init__(self, filler: Filler, state: ShardState, priority: int) -> None:
        super().__init__(priority)
        self.state = state
        self.outcome = Outcome()
        self._filler = filler
        self._since = filler.moment
        self._store_failures = filler.trouble.failures
        self._error: Fp8fsError | None = None
        self._pending: deque[int] = deque()
        self._generation = -1

    def take(self) -> Task | None:
        state = self.state
        if self.finished or self._settled():
            return None
        if self._error is None and self._filler.trouble.failures != self._store_failures:
            self._fail(self._filler.trouble.error())
        if self._error is not None:
            self.finished = not self.running
            return None
        if state.phase is Phase.COLD:
            if time.monotonic() < state.retry_at:
                self._filler.pool.defer()
                return None
            state.phase = Phase.OPENING
            return self._step(partial(self._filler.open_partial, state))
        if state.phase is not Phase.OPEN:
            return None
        if state.suspect:
            if state.users:
                return None
            stale = state.reset()
            state.phase = Phase.OPENING
            return self._step(partial(self._filler.reopen, state, stale))
        return self._next_claim() or self._after_claims()

    def abandon(self) -> None:
        super().abandon()
        self.outcome.finish(closing_error())

    @abstractmethod
    def _refused(self) -> Refused:
        """What is to be tried again if the store failed."""

    @abstractmethod
    def _settled(self) -> bool:
        """Whether all is done already; finishes if so."""

    @abstractmethod
    def _wanted(self) -> Iterable[int]:
        """The claims to make; the shard is open."""

    @abstractmethod
    def _units(self, claim: int) -> Iterable[int]:
        """The units to make of a claim."""

    @abstractmethod
    def _after_claims(self) -> Task | None:
        """What to do once no claim can be taken."""

    def _next_claim(self) -> Task | None:
        state = self.state
        if self._generation != state.generation:
            self._pending = deque(self._wanted())
            self._generation = state.generation
        for _ in range(len(self._pending)):
            claim = self._pending.popleft()
            units = [unit for unit in self._units(claim) if not state.made[unit]]
            if not units:
                continue
            error = state.failure(claim, self._since)
            if error is not None:
                self._fail(error)
                return None
            if claim in state.busy:
                self._pending.append(claim)
            elif time.monotonic() < state.elsewhere.get(claim, 0.0):
                self._pending.append(claim)
                self._filler.pool.defer()
            else:
                state.busy.add(claim)
                self._pending.append(claim)  # looked at again when it is no longer busy
                return self._step(
                    partial(self._filler.make_claim, state, claim, units, self.priority), claim
                )
        return None

    def _step(self, step: Callable[[], Fp8fsError | None], claim: int | None = None) -> Task:
        """A task that runs one step and notes how it ended."""
        self.running += 1

        def task() -> None:
            error = step()
            with self._filler.pool.changed:
                self.running -= 1
                if claim is not None:
                    self.state.busy.discard(claim)
                if error is not None:
                    self._fail(error)
                self._filler.pool.changed.notify_all()

        return task

    def _fail(self, error: Fp8fsError) -> None:
        """Tell the waiters at once; steps that run now run to their end."""
        if self._error is None:
            self._error = error
            self.outcome.finish(error)
            self._note(error)
        self.finished = not self.running

    def _note(self, error: Fp8fsError) -> None:
        """What is to be tried again: what somebody asked for, rather than what was begun ahead."""
        refused, before = self._refused(), self._filler.refused
        if not isinstance(error, StoreError):
            if before == refused:
                self._filler.refused = None
        elif self.priority < AHEAD or before is None or before.is_there:
            self._filler.refused = refused

    def _finish(self, error: Fp8fsError | None = None) -> None:
        self.finished = True
        self.outcome.finish(error)


class Fill(_ShardWork):
    """Makes every unit of a shard, seals it and links it. Stops at the first unit that cannot be made."""

    def _refused(self) -> Refused:
        return Refused(self.state, None)

    def _settled(self) -> bool:
        state = self.state
        if state.phase is not Phase.SEALED:
            return False
        if not state.linking and not self.running:
            self._finish(None if state.linked else self._error or self._filler.trouble.error())
        return True

    def _wanted(self) -> Iterable[int]:
        return self.state.claims

    def _units(self, claim: int) -> Iterable[int]:
        return self.state.claims[claim]

    def _after_claims(self) -> Task | None:
        state = self.state
        if self._error is not None or self._pending or self.running or state.sealing:
            return None
        state.sealing = True
        return self._step(partial(self._filler.seal, state))


class UnitRequest(_ShardWork):
    """Makes some units of a shard, and as much of their claims as that needs."""

    def __init__(
        self, filler: Filler, state: ShardState, units: Iterable[int], since: int, priority: int
    ) -> None:
        super().__init__(filler, state, priority)
        self._requested = tuple(units)
        self._since = since
        self._by_claim: dict[int, list[int]] = {}

    def _refused(self) -> Refused:
        return Refused(self.state, self._requested)

    def _settled(self) -> bool:
        if not self.state.all_made(self._requested):
            return False
        self._finish()
        return True

    def _wanted(self) -> Iterable[int]:
        self._by_claim = self.state.claims_with(self._requested)
        return self._by_claim

    def _units(self, claim: int) -> Iterable[int]:
        return self._by_claim[claim]

    def _after_claims(self) -> Task | None:
        return None
