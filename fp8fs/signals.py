"""Signals that end a process, as exceptions: what is half done is taken away on the way out."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["Ended", "handling", "ignore", "undisturbed", "unwinding"]

Handler = Callable[[int, FrameType | None], None]

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(SystemExit):
    """Signal *number* asked this process to end; unwinding cleans up first."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.exit = 128 + number


def ignore(number: int, frame: FrameType | None) -> None:
    """A signal that others handle, or that has said it all before."""


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like an exception inside, as Ctrl-C does anyway; the exit code is 128 + N."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Ended(number)

    with handling(dict.fromkeys(_ENDING, end)):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """No further signal breaks off what is being cleaned up; it takes seconds at most."""
    with handling(dict.fromkeys((*_ENDING, signal.SIGINT), ignore)):
        yield


@contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """These handlers inside, the old ones after. A signal that is ignored (nohup, background jobs) stays so.

    Outside of the main thread whoever owns it handles signals.
    """
    before = {}
    for number, handler in handlers.items():
        old = signal.getsignal(number)
        if old is signal.SIG_IGN or old is None:
            continue
        try:
            before[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread
            break
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
