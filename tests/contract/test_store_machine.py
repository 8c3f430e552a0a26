"""The store against a dict: any order of making, sealing, dying, damaging and collecting."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from fp8fs.errors import StoreError
from fp8fs.store.store import Partial, Published, Store
from tests.storing import Toy

TOYS = [Toy("aa01", count=3), Toy("aa02", count=2)]
toys = st.sampled_from(TOYS)


class StoreMachine(RuleBasedStateMachine):
    """``finished``: per shard, the units that must still be there. ``sealed``: shards that must be served."""

    partials = Bundle("partials")

    def __init__(self) -> None:
        super().__init__()
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.room = Path(tempfile.mkdtemp(dir=where))
        self.store = Store.open(self.room / "store")
        self.finished: dict[str, set[int]] = {toy.spec.object_id: set() for toy in TOYS}
        self.sealed: set[str] = set()
        self.open: list[tuple[Toy, Partial]] = []

    def teardown(self) -> None:
        for _, partial in self.open:
            partial.close()
        shutil.rmtree(self.room)

    @rule(target=partials, toy=toys)
    def open_partial(self, toy: Toy) -> tuple[Toy, Partial] | None:
        """Opening shows exactly the finished units; a sealed shard is Published."""
        key = toy.spec.object_id
        try:
            partial = toy.open(self.store)
        except Published:
            assert key in self.sealed
            return None
        assert key not in self.sealed
        assert set(partial.records) == self.finished[key]
        self.open.append((toy, partial))
        return toy, partial

    @rule(opened=partials, unit=st.integers(0, 2))
    def make(self, opened: tuple[Toy, Partial] | None, unit: int) -> None:
        """A unit is made once; a partial whose shard was published says so."""
        if opened is None or opened not in self.open:
            return
        toy, partial = opened
        unit %= toy.spec.unit_count
        key = toy.spec.object_id
        try:
            made = toy.make(partial, unit)
        except Published:
            return
        assert key not in self.sealed
        assert made == (unit not in self.finished[key])
        self.finished[key].add(unit)

    @rule(opened=partials)
    def seal(self, opened: tuple[Toy, Partial] | None) -> None:
        """Sealing works exactly when every unit is there, or the shard is sealed already."""
        if opened is None or opened not in self.open:
            return
        toy, partial = opened
        key = toy.spec.object_id
        whole = len(self.finished[key]) == toy.spec.unit_count
        try:
            path = partial.seal({})
        except Published:
            assert key not in self.sealed
            return
        except StoreError:
            assert not whole
            return
        assert whole or key in self.sealed
        assert path.read_bytes() == toy.whole()
        self.sealed.add(key)

    @rule(opened=consumes(partials), politely=st.booleans())
    def leave(self, opened: tuple[Toy, Partial] | None, politely: bool) -> None:
        """One user of a partial goes, with or without closing it."""
        if opened is None or opened not in self.open:
            return
        self.open.remove(opened)
        if politely:
            opened[1].close()
        else:
            opened[1]._open_fds.close()  # what the kernel does for a killed process

    @rule()
    def kill_and_reopen(self) -> None:
        """Everybody dies; the store is opened anew."""
        for _, partial in self.open:
            partial._open_fds.close()
        self.open.clear()
        self.store = Store.open(self.room / "store")

    @rule(toy=toys, harm=st.sampled_from(["cut", "preamble", "record", "aside"]))
    def damage(self, toy: Toy, harm: str) -> None:
        """A damaged object is a miss, and everything of it is made again."""
        key = toy.spec.object_id
        if key not in self.sealed:
            return
        path = self.store.object_path(key)
        path.chmod(0o600)
        if harm == "cut":
            os.truncate(path, toy.spec.size - 1)
        elif harm == "preamble":
            with path.open("r+b") as file:
                file.write(b"x")
        elif harm == "record":
            path.with_suffix(".json").write_bytes(b"{}")
        else:
            self.store.set_aside(key, "test")
        self.sealed.discard(key)
        self.finished[key] = set()
        assert self.store.find_object(toy.spec) is None

    @rule(toy=toys)
    def collect(self, toy: Toy) -> None:
        """Everything but one shard is collected; what somebody has open stays."""
        keep = toy.spec.object_id
        self.store.collect(keep=[keep], grace_s=0)
        for other in TOYS:
            key = other.spec.object_id
            if key == keep:
                continue
            if key in self.sealed or not any(
                key == t.spec.object_id and p._is_current() for t, p in self.open
            ):
                self.finished[key] = set()
            self.sealed.discard(key)

    @invariant()
    def served_as_the_model_says(self) -> None:
        for toy in TOYS:
            path = self.store.find_object(toy.spec)
            assert (path is not None) == (toy.spec.object_id in self.sealed)
            assert path is None or path.read_bytes() == toy.whole()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
