"""SIGKILL at random points of whole flows: fill, publish, seal, recovery, gc. Nothing finished is lost, and nothing is half."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fp8fs.assembly import survey
from fp8fs.engine.shard import shard_spec, unit_spans
from fp8fs.store.store import Published, Store
from tests.crash.flows import FLOWS, LONG, RECIPE, World, check_sound

RUNS = 240 if LONG else 24
UNIT = re.compile(rb"^([0-9a-f]{8}) (\[(\d+),.*\])$")


class Zygote:
    """Forks processes that run a flow."""

    def __init__(self, base: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote", str(base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, flow: str, root: Path, *, nth: int = 0, after_s: float | None = None) -> int:
        """The exit code of a child that dies at its n-th call, or after some time, or not at all."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{flow} {root} {nth}\n")
        self.process.stdin.flush()
        pid = int(self._line())
        if after_s is not None:
            time.sleep(after_s)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return int(self._line())


@pytest.fixture(scope="module")
def zygote(world: World) -> Iterator[Zygote]:
    started = Zygote(world.base)
    yield started
    started.process.communicate()


def journaled(root: Path) -> dict[str, set[int]]:
    """object id -> units whose line stands whole in a journal. Read without our own code."""
    found: dict[str, set[int]] = {}
    for journal in root.glob("v1/partial/*/journal"):
        units = found.setdefault(journal.parent.name, set())
        for line in journal.read_bytes().split(b"\n"):
            match = UNIT.match(line)
            if match and int(match[1], 16) == zlib.crc32(match[2]):
                units.add(int(match[3]))
    return found


def check_nothing_lost(
    world: World, root: Path, before: dict[str, set[int]], sealed: set[str]
) -> None:
    """Sealed shards are there, and so is each unit that a journal listed when the process died."""
    store = Store.open(root)
    with survey(world.src, RECIPE, root) as found:
        for shard in found.plan.shards:
            path = store.find_object(shard_spec(shard))
            assert path is not None or shard.object_id not in sealed
            if path is None:
                with suppress(Published), store.partial(shard_spec(shard), unit_spans(shard)) as it:
                    assert set(it.records) >= before.get(shard.object_id, set())


def sealed_objects(root: Path) -> set[str]:
    return {path.stem for path in root.glob("v1/objects/*/*.safetensors")}


@pytest.mark.parametrize("seed", range(RUNS))
def test_killed_at_any_moment(
    world: World,
    room: Path,
    zygote: Zygote,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    """A process is killed, its successor too, in the middle of its recovery; the third finishes, and everything is right."""
    rng = random.Random(seed)
    flow = list(FLOWS)[seed % len(FLOWS)]
    root = world.fresh(FLOWS[flow][1], room / "store")

    crashes = 0
    for turn in range(rng.choice([1, 2, 2, 3])):
        if rng.random() < 0.7:
            code = zygote.run(flow, root, nth=rng.randrange(1, (400, 250, 150)[turn]))
        else:
            code = zygote.run(flow, root, after_s=rng.random() * 0.025)
        assert code in (0, -signal.SIGKILL)
        crashes += code != 0

        before, sealed = journaled(root), sealed_objects(root)
        if flow != "gc":
            look = room / "look"
            subprocess.run(["cp", "-a", root, look], check=True) if root.exists() else look.mkdir()
            check_nothing_lost(world, look, before, sealed)
            subprocess.run(["rm", "-rf", look], check=True)
    check_sound(world, root, deep=seed % 5 == 0)
    record_property("crashes", crashes)


def test_a_flow_that_is_left_alone_ends_well(world: World, room: Path, zygote: Zygote) -> None:
    """The processes that are killed above would have done their work."""
    for flow, (_, template) in FLOWS.items():
        root = world.fresh(template, room / "store")
        assert zygote.run(flow, root) == 0
        assert zygote.run(flow, world.fresh(template, root), nth=20) == -signal.SIGKILL
