"""Whatever was not synced is dropped, cut short or torn: what survives is what the store promises.

Promised (docs/DESIGN.md, D5): a shard that was sealed is there, whole; a unit behind a barrier is not made again; a tree
that was completed is complete; all else is whole or absent, and can be made now. Checked at every moment of a flow.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fp8fs.assembly import survey
from fp8fs.engine.shard import shard_spec, unit_spans
from fp8fs.store.partial import Partial
from fp8fs.store.store import Published, Store
from tests.crash.flows import FLOWS, LONG, RECIPE, World, check_sound, injected
from tests.crash.powerloss import WAYS, Call, Disk, Recorder

STRIDE = 1 if LONG else 7
ROUNDS = 200 if LONG else 12


def record(
    world: World, top: Path, flow: str, monkeypatch: pytest.MonkeyPatch, *, barrier_s: float = 0.0
) -> Recorder:
    """The calls of one flow, with a mark where something is promised."""
    io = Recorder(top)
    seal, barrier = Partial.seal, Partial._barrier

    def marked_seal(self: Partial, *args: Any, **options: Any) -> Path:
        path = seal(self, *args, **options)
        io.mark("sealed", self.spec.object_id)
        return path

    def marked_barrier(self: Partial) -> None:
        before = frozenset(self.records)
        barrier(self)
        io.mark("safe", self.spec.object_id, before)

    monkeypatch.setattr("fp8fs.store.partial.BARRIER_S", barrier_s)
    monkeypatch.setattr(Partial, "seal", marked_seal)
    monkeypatch.setattr(Partial, "_barrier", marked_barrier)
    with injected(io):
        FLOWS[flow][0](world, top / "store")
    io.mark("done", flow)
    monkeypatch.undo()
    return io


def promises(calls: Iterable[Call]) -> tuple[set[str], dict[str, frozenset[int]], set[str]]:
    """Objects that are sealed, units that are safe, flows that have ended."""
    sealed: set[str] = set()
    safe: dict[str, frozenset[int]] = {}
    done: set[str] = set()
    for call in calls:
        if call.kind == "mark":
            what, fact, *rest = call.what
            if what == "sealed":
                sealed.add(fact)
            elif what == "done":
                done.add(fact)
            else:
                safe[fact] = safe.get(fact, frozenset()) | rest[0]
    return sealed, safe, done


def check_kept(world: World, root: Path, calls: Iterable[Call]) -> None:
    """Everything that was promised up to this moment is there."""
    sealed, safe, done = promises(calls)
    store = Store.open(root)
    with survey(world.src, RECIPE, root) as found:
        for shard in found.plan.shards:
            path = store.find_object(shard_spec(shard))
            if shard.object_id in sealed:
                assert path is not None
            if path is not None:
                assert path.read_bytes() == world.bytes[shard.path]
                continue
            wanted = safe.get(shard.object_id, frozenset())
            try:
                with store.partial(shard_spec(shard), unit_spans(shard)) as partial:
                    assert wanted <= set(partial.records)
            except Published:
                raise AssertionError("published, but not found") from None
        if "build" in done:
            assert store.tree(found.plan.plan_id).is_complete()


def lose_power(calls: list[Call], top: Path, way: str, seed: object) -> Path:
    """The store that is found after the power failed behind these calls."""
    if top.exists():
        shutil.rmtree(top)
    Disk.after(calls).write_out(top, way, random.Random(f"{seed}"))
    return top / "store"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flow", ["build", "recovery", "publish", "gc"])
def test_power_fails_at_every_moment(
    world: World,
    room: Path,
    monkeypatch: pytest.MonkeyPatch,
    flow: str,
    way: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Promises are kept and the store is sound, at whichever call of a flow the power fails."""
    top = room / "top"
    top.mkdir()
    world.fresh(FLOWS[flow][1], top / "store")
    io = record(world, top, flow, monkeypatch)
    calls = io.calls
    moments = [*range(io.begun, len(calls), STRIDE), len(calls)]
    assert len(moments) > 3
    for moment in moments:
        root = lose_power(calls[:moment], room / "after", way, moment)
        check_kept(world, root, calls[:moment])
        check_sound(world, root, deep=moment % 10 == 0)
    record_property("power losses", len(moments))


@pytest.mark.parametrize("way", WAYS)
def test_power_fails_again_and_again(
    world: World,
    room: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Each recovery is cut off by the next power loss; what one left is enough for the next, and it ends well."""
    for seed in range(ROUNDS):
        rng = random.Random(f"{way}/{seed}")
        top = room / "top"
        if top.exists():
            shutil.rmtree(top)
        top.mkdir()
        for turn in range(4):
            barrier_s = rng.choice([0.0, 1e9])
            io = record(world, top, "build", monkeypatch, barrier_s=barrier_s)
            calls = io.calls[: rng.randrange(io.begun, len(io.calls) + 1)]
            lose_power(calls, room / "after", way, f"{seed}/{turn}")
            look = shutil.copytree(room / "after", room / "look", symlinks=True)
            check_kept(world, look / "store", calls)
            shutil.rmtree(look)
            shutil.rmtree(top)
            (room / "after").rename(top)
        check_sound(world, top / "store", deep=True)
    record_property("power losses", 4 * ROUNDS)
