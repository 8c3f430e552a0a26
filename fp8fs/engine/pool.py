"""Worker threads, and the order in which they take work."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

from fp8fs.engine.once import Stopped
from fp8fs.errors import DeviceError

__all__ = ["AHEAD", "DEMAND", "URGENT", "Pool", "Task", "Work", "default_workers", "start"]

log = logging.getLogger(__name__)

Task = Callable[[], None]

URGENT, DEMAND, AHEAD = 0, 1, 2
"""Priorities: a read that waits; a shard that somebody wants; a shard that somebody may want next."""

_PRIORITIES = 3
_MAX_WORKERS = 16
_RETRY_S = 0.05
_TRIM_AFTER_S = 5.0


def default_workers() -> int:
    """One per CPU that this process may use, at most 16."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))


def start(thread: threading.Thread) -> None:
    """The thread runs. Raises: DeviceError if the system gives us no more threads."""
    try:
        thread.start()
    except RuntimeError as err:
        raise DeviceError(
            f"{thread.name} cannot be started: {err}",
            hint="fewer --workers, or a larger ulimit -u or -v",
        ) from err


class Work(ABC):
    """A source of tasks. All its methods run with the pool's lock held, so they only decide.

    ``running``: its tasks that have been taken and have not ended. ``finished``: no task will come from it any
    more; the pool forgets it.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.running = 0
        self.finished = False

    @abstractmethod
    def take(self) -> Task | None:
        """The next task, or None if there is none now."""

    def abandon(self) -> None:
        """The pool closes: let waiters go."""
        self.finished = True


class _Batch(Work):
    """The numbers 0 to count - 1, each run once, by whichever worker is free. Stops at the first failure.

    Numbers are given out in order, so the failure with the smallest number is the same however many workers there are.
    """

    def __init__(self, pool: Pool, count: int, run: Callable[[int], None], priority: int) -> None:
        super().__init__(priority)
        self._pool = pool
        self._count = count
        self._run = run
        self._next = 0
        self._failed_at = count
        self.error: BaseException | None = None

    def take(self) -> Task | None:
        if self._pool.closing and self.error is None:
            self.error = Stopped()
        if self.error is not None or self._next == self._count:
            self.finished = True
            return None
        number = self._next
        self._next += 1
        self.running += 1
        return partial(self._one, number)

    def _one(self, number: int) -> None:
        error: BaseException | None = None
        try:
            self._run(number)
        except BaseException as failure:  # noqa: BLE001 - it is raised by whoever leads the batch
            error = failure
        with self._pool.changed:
            self.running -= 1
            if error is not None and number < self._failed_at:
                self.error, self._failed_at = error, number
            if not self.running:
                self._pool.changed.notify_all()


class Pool:
    """``workers`` threads that take tasks from works: by priority, then first come, first served.

    Lock order: ``changed`` (the engine's one lock: it guards the works and the shard states) is never held while a task
    runs, and no other lock is taken while it is held, except the leaf locks of counters and buffers.
    """

    def __init__(self, workers: int, *, on_idle: Callable[[], None]) -> None:
        """*on_idle* runs when a worker has found nothing to do for some seconds; it must be quick."""
        self.workers = workers
        self.changed = threading.Condition(threading.RLock())
        self.closing = False
        self._on_idle = on_idle
        self._works: tuple[deque[Work], ...] = tuple(deque() for _ in range(_PRIORITIES))
        self._threads: list[threading.Thread] = []
        self._deferred = False

    def add(self, work: Work) -> None:
        """Take tasks from *work* from now on. Raises: DeviceError if there is no thread that could; it is abandoned then."""
        with self.changed:
            if self.closing:
                work.abandon()
                return
            try:
                self._start_threads()
            except DeviceError:
                work.abandon()
                raise
            self._works[work.priority].append(work)
            self.changed.notify_all()

    def promote(self, work: Work, priority: int) -> None:
        """Move *work* to the end of a more urgent queue."""
        with self.changed:
            if work.priority > priority and work in self._works[work.priority]:
                self._works[work.priority].remove(work)
                work.priority = priority
                self._works[priority].append(work)
                self.changed.notify_all()

    def remove(self, work: Work) -> None:
        """Take no more tasks from *work*."""
        with self.changed:
            work.finished = True
            if work in self._works[work.priority]:
                self._works[work.priority].remove(work)

    def defer(self) -> None:
        """Called by a work's ``take``: it has something to do, but not before a moment has passed."""
        self._deferred = True

    def check(self) -> None:
        """Raises: Stopped once the pool is closing. Long tasks call it between steps."""
        if self.closing:
            raise Stopped

    def parallel(self, count: int, run: Callable[[int], None], priority: int) -> None:
        """run(0) ... run(count - 1), on this worker thread and on idle ones; returns when all are done.

        Raises: the error of the smallest failing number; Stopped.
        """
        batch = _Batch(self, count, run, priority)
        with self.changed:
            if count > 1 and self.workers > 1:
                self._works[priority].appendleft(batch)
                self.changed.notify_all()
        while True:
            with self.changed:
                task = batch.take()
            if task is None:
                break
            task()
        with self.changed:
            while batch.running:
                self.changed.wait()
            if batch in self._works[priority]:
                self._works[priority].remove(batch)
        if batch.error is not None:
            raise batch.error

    def close(self, timeout_s: float) -> None:
        """Stop: no new task begins, those in work end at their next check. Returns once they have, or late."""
        with self.changed:
            self.closing = True
            for queue in self._works:
                while queue:
                    queue.popleft().abandon()
            threads, self._threads = self._threads, []
            self.changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still works after %.0f s", thread.name, timeout_s)

    def _start_threads(self) -> None:
        while len(self._threads) < self.workers:
            name = f"fp8fs-worker-{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                start(thread)
            except DeviceError as err:
                if not self._threads:
                    raise
                log.warning("%d of %d workers: %s", len(self._threads), self.workers, err.what)
                self.workers = len(self._threads)
                return
            self._threads.append(thread)

    def _serve(self) -> None:
        while True:
            with self.changed:
                task = self._next()
                idle = False
                while task is None:
                    if self.closing:
                        return
                    wait_s = _RETRY_S if self._deferred else None if idle else _TRIM_AFTER_S
                    if not self.changed.wait(wait_s) and wait_s == _TRIM_AFTER_S:
                        idle = True
                        self._on_idle()
                    task = self._next()
            task()

    def _next(self) -> Task | None:
        """Of the most urgent works that have a task, the first that nobody works on; else the first.

        Workers on one file wait for each other in the kernel, which lets one at a time write to it.
        """
        self._deferred = False
        if self.closing:
            return None
        for queue in self._works:
            for work in sorted(queue, key=lambda work: work.running > 0):
                task = work.take()
                if work.finished and work in queue:
                    queue.remove(work)
                if task is not None:
                    return task
        return None
