"""Whether a process that waits for us is about to end, or was interrupted by the person who runs it.

An interrupted FUSE request says only "some signal came". A timer or SIGCHLD must not make an open or a read fail:
programs that never expect EINTR from a file would. Ctrl-C and kill must not wait for a fill of minutes.
"""

from __future__ import annotations

import signal

__all__ = ["stop_pending", "wants_to_stop"]

INTERACTIVE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL)
"""Signals that stop a wait even if the program handles them."""

HARMLESS = (
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGURG,
    signal.SIGWINCH,
    signal.SIGSTOP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""Signals that end nothing by default."""


def _mask(signals: tuple[signal.Signals, ...]) -> int:
    return sum(1 << (number - 1) for number in signals)


_INTERACTIVE = _mask(INTERACTIVE)
_ENDING = ~_mask(HARMLESS)


def stop_pending(status: str) -> bool:
    """Whether the /proc/PID/status text shows a pending signal that ends the process or is meant to interrupt it."""
    sets = {
        key: int(value, 16)
        for key, _, value in (line.partition(":") for line in status.splitlines())
        if key in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    }
    pending = (sets.get("SigPnd", 0) | sets.get("ShdPnd", 0)) & ~sets.get("SigBlk", 0)
    fatal = _ENDING & ~sets.get("SigCgt", 0) & ~sets.get("SigIgn", 0)
    return bool(pending & (_INTERACTIVE | fatal))


def wants_to_stop(pid: int) -> bool:
    """Whether thread *pid* (as FUSE names the caller) should not be kept waiting.

    A caller that is gone does not wait. One in a pid namespace that we cannot see has number 0: it is let go, since
    a kill that does nothing is worse than an EINTR.
    """
    if pid <= 0:
        return True
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return stop_pending(file.read())
    except OSError:
        return True
