"""Which pending signals end a wait."""

from __future__ import annotations

import os
import signal

import pytest

from fp8fs.fuse.pending import stop_pending, wants_to_stop


def status(*, pending: int = 0, shared: int = 0, blocked: int = 0, ignored: int = 0, caught: int = 0) -> str:  # fmt: skip
    fields = {"SigPnd": pending, "ShdPnd": shared, "SigBlk": blocked, "SigIgn": ignored, "SigCgt": caught}  # fmt: skip
    lines = [f"{name}:\t{1 << number - 1 if number else 0:016x}" for name, number in fields.items()]
    return "\n".join(["Name:\tpython", "State:\tS (sleeping)", *lines, "Seccomp:\t0"])


@pytest.mark.parametrize(
    ("number", "handled", "stops"),
    [
        (signal.SIGKILL, False, True),
        (signal.SIGTERM, False, True),
        (signal.SIGTERM, True, True),
        (signal.SIGINT, True, True),
        (signal.SIGHUP, True, True),
        (signal.SIGQUIT, True, True),
        (signal.SIGALRM, True, False),
        (signal.SIGALRM, False, True),
        (signal.SIGPROF, True, False),
        (signal.SIGUSR1, True, False),
        (signal.SIGSEGV, False, True),
        (signal.SIGCHLD, False, False),
        (signal.SIGCHLD, True, False),
        (signal.SIGWINCH, False, False),
        (signal.SIGTSTP, False, False),
        (signal.SIGRTMIN, True, False),
        (signal.SIGRTMAX, False, True),
    ],
)
def test_pending_signal(number: int, handled: bool, stops: bool) -> None:
    """Ctrl-C and kill always stop a wait; other signals only where they end the program."""
    caught = number if handled else 0
    assert stop_pending(status(pending=number, caught=caught)) is stops
    assert stop_pending(status(shared=number, caught=caught)) is stops


def test_nothing_pending_blocked_or_ignored() -> None:
    """A signal that is not delivered stops nothing."""
    assert not stop_pending(status())
    assert not stop_pending(status(pending=signal.SIGTERM, blocked=signal.SIGTERM))
    assert not stop_pending(status(pending=signal.SIGUSR1, ignored=signal.SIGUSR1))
    assert not stop_pending("")


def test_processes() -> None:
    """A live caller waits; one that is gone, or whose number we cannot see, does not."""
    assert not wants_to_stop(os.getpid())
    assert wants_to_stop(0)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert wants_to_stop(child)
