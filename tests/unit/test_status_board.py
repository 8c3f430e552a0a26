"""What ``status`` promises of the time that is left."""

from __future__ import annotations

import pytest

from fp8fs.engine.stats import Counters
from fp8fs.fuse.spec import Mounted
from fp8fs.fuse.status import StatusBoard


@pytest.mark.parametrize("degraded", ["", "no space left"])
def test_time_is_left_only_while_what_is_made_is_kept(degraded: str) -> None:
    """At the same speed: a time while the store takes it; none while it does not, for then it never ends."""
    counters = Counters(shards_total=2, units_total=2, bytes_total=1000)
    counters.progressed(500_000)
    counters.made(1, 500_000, 500)
    board = StatusBoard(
        Mounted(dst="/view", src="/src", live=True, bytes_source=1_000_000, bytes_view=1000),
        {},
        lambda: counters.snapshot(bytes_failed=0, degraded=degraded),
        list,
    )
    left = board.document()["eta_s"]
    assert left is None if degraded else left > 0
