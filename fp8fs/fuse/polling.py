"""Wait for descriptors of any number: select(2) fails from 1024 on, and a program that mounts may have more open."""

from __future__ import annotations

import select
from collections.abc import Iterable

__all__ = ["readable"]


def readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Those that can be read, or whose other end is gone; empty after the time (None: none)."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)}
