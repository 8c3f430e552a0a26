"""Fail the n-th system call of the store, over whole flows from SRC to the finished tree, n = 1, 2, ... until a run is clean.

A reader of a view gets the right bytes whatever the store does: no failure of the store is ever its failure. A build
ends well or with one clean error. Afterwards the store is sound, and everything can be finished.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fp8fs.errors import StoreError
from tests.crash.faults import SHORT, FaultyIo, HalvingIo
from tests.crash.flows import FLOWS, LONG, World, check_sound, injected

CODES = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EDQUOT": errno.EDQUOT,
    "EACCES": errno.EACCES,
    "EROFS": errno.EROFS,
    "EINTR": errno.EINTR,
    "short": SHORT,
}


def left_open(*below: Path) -> list[str]:
    """What this process has open below some folders."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(tuple(f"{folder}/" for folder in below))]


MOUNTS = ("mount", "tensor")
"""A store that fails is no reason to refuse a mount or a read."""


def steps(flow: str, code: str) -> Iterator[int]:
    """Which calls to fail: all, or in CI every so many, each flow and code beginning at another one."""
    stride = 1 if LONG else 3 if CODES[code] == SHORT else 29
    return itertools.count(1 + sum(map(ord, flow + code)) % stride, stride)


@pytest.mark.parametrize(
    ("code", "persistent"),
    [(code, False) for code in CODES] + [(code, True) for code in CODES if code != "EINTR"],
    ids=[f"{code} once" for code in CODES]
    + [f"{code} from then on" for code in CODES if code != "EINTR"],
)
@pytest.mark.parametrize("flow", FLOWS)
def test_the_nth_call_of_a_flow_fails(
    world: World,
    room: Path,
    flow: str,
    code: str,
    persistent: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """A mount is made and its readers get the right bytes, a build gets a clean error; no descriptor is left open; the store is sound."""
    run, template = FLOWS[flow]
    faults = 0
    for nth in steps(flow, code):
        root = world.fresh(template, room / "store")
        io = FaultyIo(nth, CODES[code], persistent=persistent)
        with injected(io):
            try:
                run(world, root)
            except StoreError:
                assert flow not in MOUNTS, (nth, io.failed)
                assert io.failed
        if not io.failed:
            break
        faults += 1
        assert left_open(room, world.src) == [], (nth, io.failed)
        check_sound(world, root, deep=faults % 10 == 0)
    assert faults > 0
    record_property("faults injected", faults)


@pytest.mark.parametrize("flow", FLOWS)
def test_short_and_interrupted_calls_change_nothing(world: World, room: Path, flow: str) -> None:
    """With every read and write short, and every third one interrupted, all ends well."""
    run, template = FLOWS[flow]
    root = world.fresh(template, room / "store")
    io = HalvingIo()
    with injected(io):
        run(world, root)
    assert io.calls > 20
    check_sound(world, root, deep=True)
