"""SIGKILL at random points: no journaled unit is lost, no object is half, and whoever comes next finishes."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.store.store import Store
from tests.conftest import LONG
from tests.storing import Toy

RUNS = 60 if LONG else 14
UNITS = 60
SHARDS = 3

CHILD = f"""
import os, sys
from pathlib import Path
import fp8fs.store.partial
fp8fs.store.partial.BARRIER_S = 0.002
from fp8fs.store.store import Published, Store
from tests.storing import Toy
store = Store.open(Path(sys.argv[1]))
print("ready", flush=True)
for shard in range({SHARDS}):
    toy = Toy(f"aa{{shard:02}}", count={UNITS}, cols=3000)
    if store.find_object(toy.spec) is not None:
        continue
    try:
        with toy.open(store) as partial:
            for unit in range({UNITS}):
                if toy.make(partial, unit):
                    os.write(1, b"made %d %d\\n" % (shard, unit))
            partial.seal({{}})
    except Published:
        pass
    os.write(1, b"sealed %d\\n" % shard)
"""


def start(root: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHILD, str(root)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def kill_after(child: subprocess.Popen[bytes], lines: int, delay_s: float) -> list[list[str]]:
    """Kill the child a moment after it has said so many lines. Returns all that it said."""
    assert child.stdout is not None
    said = b""
    while said.count(b"\n") < lines:
        part = os.read(child.stdout.fileno(), 1 << 16) if _readable(child) else b""
        if not part:
            break
        said += part
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    said += child.stdout.read()
    child.wait()
    child.stdout.close()
    return [line.split() for line in said.decode().splitlines()]


def _readable(child: subprocess.Popen[bytes]) -> bool:
    return bool(select.select([child.stdout], [], [], 30)[0])


def toy_of(shard: int) -> Toy:
    return Toy(f"aa{shard:02}", count=UNITS, cols=3000)


def check(root: Path, said: list[list[str]]) -> None:
    """Every unit that the dead one said it made is in an object or a journal; then everything is finished."""
    store = Store.open(root)
    for shard in range(SHARDS):
        toy = toy_of(shard)
        made = {int(words[2]) for words in said if words[:2] == ["made", str(shard)]}
        found = store.find_object(toy.spec)
        if ["sealed", str(shard)] in said:
            assert found is not None
        if found is None:
            with toy.open(store) as partial:
                assert set(partial.records) >= made
        path, _ = toy.build(store)
        assert path.read_bytes() == toy.whole()
        assert store.verify_object(toy.spec.object_id, toy.spans) == []
    assert os.listdir(root / "v1" / "partial") == []


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_killed_builder_loses_no_journaled_unit(
    room: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Killed at a random moment, twice in a row: finished units stay, and nobody makes them again."""
    rng = random.Random(seed)
    said: list[list[str]] = []
    for _ in range(2):
        lines = rng.randrange(SHARDS * (UNITS + 1))
        said += kill_after(start(room / "store"), lines // 2, rng.random() * 0.004)
    units = [tuple(words) for words in said if words[0] == "made"]
    assert len(units) == len(set(units))
    check(room / "store", said)
    record_property("crashes", 2)


@pytest.mark.parametrize("seed", range(RUNS // 7))
def test_leases_die_with_their_holder(
    room: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Of three builders at one store, two are killed: the third goes on at once and finishes everything."""
    rng = random.Random(seed)
    children = [start(room / "store") for _ in range(3)]
    said = kill_after(children[0], rng.randrange(30), 0.0)
    said += kill_after(children[1], 0, rng.random() * 0.02)
    stdout, _ = children[2].communicate(timeout=30)
    said += [line.split() for line in stdout.decode().splitlines()]
    assert children[2].returncode == 0
    units = [tuple(words) for words in said if words[0] == "made"]
    assert len(units) == len(set(units))
    store = Store.open(room / "store")
    assert all(store.find_object(toy_of(shard).spec) is not None for shard in range(SHARDS))
    check(room / "store", said)
    record_property("crashes", 2)
