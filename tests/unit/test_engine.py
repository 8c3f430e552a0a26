"""The engine on fakes: right bytes, each unit once, waiting, failing, degrading, closing."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fp8fs.core.layout import Plan
from fp8fs.engine import Engine, NonFinite, materialize, scan, trouble
from fp8fs.errors import (
    Fp8fsError,
    InterruptedWaitError,
    NonFiniteTensorError,
    SourceChangedError,
    StoreError,
    UsageError,
)
from tests.engine_world import (
    FakeQuantizer,
    FakeSource,
    FakeStore,
    Weight,
    World,
    make_engine,
    make_world,
    no_poll,
)

WAIT_S = 20.0


@contextmanager
def engine_of(
    world: World, store: FakeStore | None, quantizer: FakeQuantizer | None = None, **options: object
) -> Iterator[Engine]:
    engine = make_engine(world, store, quantizer, **options)
    try:
        yield engine
    finally:
        engine.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition; fail if it does not come."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@functools.cache
def schemes_world(scheme: str) -> World:
    """Two shards: kept tensors, vectors, several tiles, rows split over tiles, pieces, groups in and across shards."""
    grouped = "g" if scheme == "per_tensor" else ""
    across = "x" if scheme == "per_tensor" else ""
    return make_world(
        [
            [
                Weight("norm", 1, 40, ""),
                Weight("table", 1, 4_300_000, ""),
                Weight("q", 160, 48, scheme, grouped),
                Weight("k", 32, 48, scheme, grouped),
                Weight("joined", 300, 64, scheme, pieces=3),
                Weight("vector", 1, 48, scheme),
                Weight("left", 16, 16, scheme, across),
            ],
            [
                Weight("tall", 1300, 2048, scheme),
                Weight("wide", 130, 66_000, scheme),
                Weight("right", 16, 32, scheme, across),
                Weight("bias", 1, 8, ""),
            ],
        ]
    )


SCHEMES = ("per_tensor", "per_channel", "block", "block_free")


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sealed_shards_hold_the_expected_bytes(tmp_path: Path, scheme: str, workers: int) -> None:
    """Whatever the scheme and the number of workers, the objects are byte for byte what whole matrices give."""
    world, store = schemes_world(scheme), FakeStore(tmp_path)
    with engine_of(world, store, workers=workers) as engine:
        engine.fill()
        for shard, expected in enumerate(world.expected):
            path = engine.sealed(shard)
            assert path is not None
            assert path.read_bytes() == expected
        stats = engine.stats()
    assert stats.shards_sealed == 2
    assert stats.units_made == stats.units_total == 11
    assert stats.bytes_out == stats.bytes_total
    assert set(store.commits().values()) == {1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_small_and_large_ways_make_the_same_records(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and digests do not depend on whether units were made in one go or band by band."""
    world = schemes_world(scheme)
    made = []
    for name, limit in (("small", 64 << 20), ("large", 0)):
        monkeypatch.setattr(materialize, "SMALL_BYTES", limit)
        (tmp_path / name).mkdir()
        store = FakeStore(tmp_path / name)
        with engine_of(world, store, workers=2) as engine:
            engine.fill()
            made.append([path.read_bytes() for path in map(engine.sealed, (0, 1)) if path])
        made.append([shared.records for _, shared in sorted(store.shared.items())])
    assert made[0] == made[2] == world.expected
    assert made[1] == made[3]


@pytest.mark.parametrize("degraded", [False, True])
@pytest.mark.parametrize("grain", ["shard", "tensor"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inline_reads_equal_the_file(
    tmp_path: Path, scheme: str, grain: str, degraded: bool
) -> None:
    """Reads at random offsets, from a cold shard, a partial, an object or memory, give the file's bytes."""
    world = schemes_world(scheme)
    store = None if degraded else FakeStore(tmp_path)
    rng = random.Random(1)
    with engine_of(world, store, workers=3, grain=grain) as engine:
        for shard, expected in enumerate(world.expected):
            reader = engine.open(shard)
            for _ in range(12):
                offset = rng.randrange(len(expected) + 100)
                length = rng.choice([1, 100, 5000, 300_000])
                assert reader.pread(offset, length, no_poll) == expected[offset : offset + length]
            assert reader.pread(0, len(expected) + 5, no_poll) == expected
            reader.close()


def test_threads_at_once_make_each_unit_once(tmp_path: Path) -> None:
    """Sixteen threads that open, read and seal the same cold shards at once: every unit is journaled once."""
    world = make_world(
        [
            [
                *(Weight(f"s{s}n{i}", 1, 64, "") for i in range(300)),
                *(Weight(f"s{s}w{i}", 256, 600, group=f"s{s}g{i // 3}") for i in range(9)),
            ]
            for s in range(3)
        ]
    )
    store = FakeStore(tmp_path)
    linked = []
    slow = FakeQuantizer(lambda _call: time.sleep(0.001))
    barrier = threading.Barrier(16)

    def work(engine: Engine, number: int) -> None:
        barrier.wait()
        shard = number % 3
        if number % 2:
            path = engine.ensure_sealed(shard, no_poll)
            assert path.read_bytes() == world.expected[shard]
        else:
            reader = engine.open(shard)
            offset = number * 1000
            assert (
                reader.pread(offset, 200_000, no_poll)
                == world.expected[shard][offset : offset + 200_000]
            )
            reader.close()

    with engine_of(
        world, store, slow, workers=16, on_sealed=lambda shard, _path: linked.append(shard)
    ) as engine:
        with ThreadPoolExecutor(16) as threads:
            for done in [threads.submit(work, engine, number) for number in range(16)]:
                done.result(WAIT_S)
        engine.fill()
    assert set(store.commits().values()) == {1}
    assert len(store.commits()) == 3 * 309
    assert sorted(linked) == [0, 1, 2]
    assert slow.elements["amax"] == slow.elements["cast"] == 27 * 256 * 600
    assert slow.closed == 1


class _LastMoment:
    """A lock that lets *before* happen when this thread asks for it the second time; for the rest what it stands for."""

    def __init__(self, lock: Any, before: Callable[[], object]) -> None:
        self._lock = lock
        self._before = before
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> Any:
        if threading.current_thread() is threading.main_thread():
            self._asked += 1
            if self._asked == 2:
                self._before()
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._lock.__exit__(*error)


class _Instead:
    """Another object with some attributes replaced."""

    def __init__(self, other: Any, **replaced: Any) -> None:
        self._other = other
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def test_a_shard_sealed_while_a_read_looks_for_its_file_is_not_made_in_memory(
    tmp_path: Path,
) -> None:
    """Between the making of a unit and the look for the file that holds it, others may seal the shard."""
    world = make_world([[Weight("a", 300, 600), Weight("b", 3000, 1600)]])
    quantizer = FakeQuantizer()
    with engine_of(world, FakeStore(tmp_path), quantizer, grain="tensor") as engine:
        reader = engine.open(0)
        filler = reader._filler
        looked = _LastMoment(filler.pool.changed, lambda: engine.ensure_sealed(0, no_poll))
        reader._filler = _Instead(filler, pool=_Instead(filler.pool, changed=looked))
        assert reader.pread(100, 1000, no_poll) == world.expected[0][100:1100]
        assert looked._asked == 2
        reader.close()
    assert quantizer.elements["cast"] == 300 * 600 + 3000 * 1600


def test_two_engines_on_one_store_share_the_work(tmp_path: Path) -> None:
    """Claims decide between processes: each unit is journaled once, both end with the same object."""
    world = make_world([[Weight(f"w{i}", 300, 600) for i in range(12)]])
    store = FakeStore(tmp_path)
    slow = [FakeQuantizer(lambda _call: time.sleep(0.002)) for _ in range(2)]
    with (
        engine_of(world, store, slow[0], workers=2) as one,
        engine_of(world, store, slow[1], workers=2) as two,
        ThreadPoolExecutor(2) as threads,
    ):
        paths = list(threads.map(lambda e: e.ensure_sealed(0, no_poll), (one, two)))
        made = [one.stats().units_made, two.stats().units_made]
        known = [s.units_made + s.units_reused for s in (one.stats(), two.stats())]
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == world.expected[0]
    assert sum(made) == 12
    assert known == [12, 12]
    assert min(made) > 0
    assert set(store.commits().values()) == {1}


def test_a_held_lease_does_not_hold_up_the_other_claims(tmp_path: Path) -> None:
    """While another process holds one claim, everything else is made; then that one is waited for and reused or made."""
    world = make_world([[Weight(f"w{i}", 300, 600) for i in range(4)]])
    store = FakeStore(tmp_path)
    with engine_of(world, store, workers=2) as engine, ThreadPoolExecutor(1) as threads:
        shared = store.share(engine._state(0).spec)
        with shared.locks[1]:
            sealing = threads.submit(engine.ensure_sealed, 0, no_poll)
            until(lambda: len(store.commits()) == 3)
            assert not sealing.done()
        assert sealing.result(WAIT_S).read_bytes() == world.expected[0]


def test_a_shard_sealed_by_another_process_is_taken(tmp_path: Path) -> None:
    """The object appears while our fill waits for the lease: nothing is made twice, the path is the same."""
    world = make_world([[Weight("a", 300, 600)]])
    store = FakeStore(tmp_path)
    with (
        engine_of(world, store, workers=2) as other,
        engine_of(world, store, workers=2) as engine,
        ThreadPoolExecutor(1) as threads,
    ):
        shared = store.share(engine._state(0).spec)
        with shared.locks[0]:
            reader = engine.open(0)
            sealing = threads.submit(engine.ensure_sealed, 0, no_poll)
            until(lambda: engine.stats().waiting == 1)
        path = other.ensure_sealed(0, no_poll)
        assert sealing.result(WAIT_S) == path
        assert reader.pread(0, 10**9, no_poll) == world.expected[0]
        reader.close()
    assert set(store.commits().values()) == {1}


class Gate:
    """A quantizer hook that holds every call until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, _call: str) -> None:
        self.reached.set()
        assert self.open.wait(WAIT_S)


def test_an_interrupted_waiter_leaves_and_the_fill_goes_on(tmp_path: Path) -> None:
    """poll raises: the opener is free within a fraction of a second, the shard is sealed all the same."""
    world, gate = make_world([[Weight("w", 300, 600)]]), Gate()
    with engine_of(world, FakeStore(tmp_path), FakeQuantizer(gate), workers=1) as engine:

        def killed() -> None:
            if gate.reached.is_set():
                raise InterruptedWaitError("killed")

        with pytest.raises(InterruptedWaitError):
            engine.ensure_sealed(0, killed)
        reader = engine.open(0)
        with pytest.raises(InterruptedWaitError):
            reader.pread(64, 10, killed)
        reader.close()
        assert engine.stats().waiting == 0
        gate.open.set()
        until(lambda: engine.sealed(0) is not None)


def test_nothing_else_waits_behind_blocked_openers(tmp_path: Path) -> None:
    """While 32 callers wait for a fill: stats, sealed, open, and a read of the preamble answer at once."""
    world, gate = make_world([[Weight("w", 300, 600)], [Weight("v", 300, 600)]]), Gate()
    store = FakeStore(tmp_path)
    with (
        engine_of(world, store, FakeQuantizer(gate), workers=2) as engine,
        ThreadPoolExecutor(32) as threads,
    ):
        waits = [threads.submit(engine.ensure_sealed, i % 2, no_poll) for i in range(32)]
        until(lambda: engine.stats().waiting == 32 and engine.stats().in_flight == 2)
        began = time.monotonic()
        assert engine.sealed(0) is None
        reader = engine.open(1)
        assert reader.pread(0, 64, no_poll) == world.expected[1][:64]
        reader.close()
        assert engine.stats().in_flight == 2
        assert time.monotonic() - began < 0.1
        gate.open.set()
        for wait in waits:
            wait.result(WAIT_S)


def test_closing_is_prompt_and_leaves_units_whole_or_unmade(tmp_path: Path) -> None:
    """close() during a long fill returns soon, waiters get an error, and the next engine makes only the rest."""
    world = make_world([[Weight(f"w{i}", 300, 600) for i in range(200)]])
    store = FakeStore(tmp_path)
    engine = make_engine(world, store, FakeQuantizer(lambda _c: time.sleep(0.01)), workers=2)
    with ThreadPoolExecutor(1) as threads:
        sealing = threads.submit(engine.ensure_sealed, 0, no_poll)
        until(lambda: len(store.commits()) > 5)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 1.0
        with pytest.raises(Fp8fsError, match="unmounted"):
            sealing.result(WAIT_S)
    engine.close()
    with pytest.raises(Fp8fsError, match="unmounted"):
        engine.ensure_sealed(0, no_poll)
    before = len(store.commits())
    with engine_of(world, store, workers=2) as again:
        assert again.ensure_sealed(0, no_poll).read_bytes() == world.expected[0]
        assert again.stats().units_reused == before
        assert again.stats().units_made == 200 - before
    assert set(store.commits().values()) == {1}


def test_run_ahead_is_bounded_and_follows_the_latest_open(tmp_path: Path) -> None:
    """Opening shard 0 makes 0, 1 and 2 and stops; opening 4 goes on with 5."""
    world = make_world([[Weight(f"w{s}", 64, 64)] for s in range(7)])
    source = FakeSource(world.files)
    with engine_of(world, FakeStore(tmp_path), source=source, workers=2) as engine:
        engine.ensure_sealed(0, no_poll)
        until(lambda: engine.stats().shards_sealed == 3)
        engine.ensure_sealed(4, no_poll)
        until(lambda: engine.stats().shards_sealed == 6)
        until(lambda: engine.stats().in_flight == 0)
        assert set(source.read_bytes) == {f"s{i}.safetensors" for i in (0, 1, 2, 4, 5, 6)}
        assert engine.sealed(3) is None


def test_grain_tensor_makes_only_what_is_read(tmp_path: Path) -> None:
    """Opening makes nothing; one tensor makes itself (its partners are only measured, once); all read: sealed."""
    world = make_world(
        [
            [
                Weight("norm", 1, 4000, ""),
                Weight("q", 256, 600, group="g"),
                Weight("k", 256, 600, group="g"),
                Weight("other", 256, 600),
            ],
            [Weight("next", 64, 64)],
        ]
    )
    store, source = FakeStore(tmp_path), FakeSource(world.files)
    units = world.plan.shards[0].units
    with engine_of(world, store, source=source, workers=2, grain="tensor") as engine:
        reader = engine.open(0)
        assert reader.pread(0, 64, no_poll) == world.expected[0][:64]
        assert not source.read_bytes
        start = units[2].data.start
        assert reader.pread(start, 10, no_poll) == world.expected[0][start : start + 10]
        assert set(store.shared[world.plan.shards[0].object_id].records) == {2}
        one = world.unit_bytes("k")
        assert source.read_bytes["s0.safetensors"] == 3 * one
        start = units[1].data.start
        assert reader.pread(start, 10, no_poll) == world.expected[0][start : start + 10]
        assert source.read_bytes["s0.safetensors"] == 4 * one
        assert engine.sealed(0) is None
        assert reader.pread(0, 10**9, no_poll) == world.expected[0]
        until(lambda: engine.sealed(0) is not None)
        assert reader.pread(0, 10**9, no_poll) == world.expected[0]
        reader.close()
        assert "s1.safetensors" not in source.read_bytes


def test_a_group_across_shards_is_measured_once(tmp_path: Path) -> None:
    """Two shards of one group: each weight is read twice in all, by one engine or by two after each other."""
    for restart in (False, True):
        world = make_world(
            [[Weight(f"w{s}", 1500, 3000, group="g")] for s in range(2)], seed=int(restart)
        )
        root = tmp_path / str(restart)
        root.mkdir()
        store, source = FakeStore(root), FakeSource(world.files)
        for shards in ((0,), (1,)) if restart else ((0, 1),):
            with engine_of(world, store, source=source, workers=3, run_ahead=0) as engine:
                for shard in shards:
                    path = engine.ensure_sealed(shard, no_poll)
                    assert path.read_bytes() == world.expected[shard]
        assert dict(source.read_bytes) == {
            f"s{s}.safetensors": 2 * world.unit_bytes(f"w{s}") for s in range(2)
        }


def test_consumed_source_is_dropped_from_the_page_cache(tmp_path: Path) -> None:
    """After a fill all bytes that the units have were given back, some twice; with drop_source=False none."""
    world = schemes_world("per_tensor")
    total = sum(world.unit_bytes(w.name) for shard in world.weights for w in shard)
    for drop, expected in ((True, total), (False, 0)):
        root = tmp_path / str(drop)
        root.mkdir()
        source = FakeSource(world.files)
        with engine_of(world, FakeStore(root), source=source, drop_source=drop) as engine:
            engine.fill()
        assert sum(source.dropped.values()) >= expected
        assert bool(source.dropped) is drop


BAD = [
    [Weight("fine", 300, 600), Weight("sick", 300, 600, group="g", bad=777), Weight("c", 9, 16)],
    [Weight("healthy", 300, 600)],
]


def test_a_bad_weight_is_named_and_stops_only_its_shard(tmp_path: Path) -> None:
    """Every waiter of the shard hears tensor, index and remedy; status keeps it; the other shard is sealed."""
    world = make_world(BAD)
    with engine_of(world, FakeStore(tmp_path), workers=2) as engine:
        with ThreadPoolExecutor(4) as threads:
            waits = [threads.submit(engine.ensure_sealed, 0, no_poll) for _ in range(4)]
            for wait in waits:
                error = wait.exception(WAIT_S)
                assert isinstance(error, NonFiniteTensorError)
                assert error.facts["tensor"] == "part/sick"
                assert error.facts["index"] == 777
                assert "--keep 'part/sick'" in error.hint
        assert engine.ensure_sealed(1, no_poll).read_bytes() == world.expected[1]
        assert engine.stats().last_errors[0].code == "quant.nonfinite"
        with pytest.raises(NonFiniteTensorError):
            engine.fill()
        assert engine.stats().shards_sealed == 1


def test_a_failure_is_remembered_until_the_next_open(tmp_path: Path) -> None:
    """A handle that saw the failure gets it again without work; a later open tries again."""
    world = make_world(BAD)
    source = FakeSource(world.files)
    with engine_of(
        world, FakeStore(tmp_path), source=source, workers=1, grain="tensor", memory_bytes=1 << 20
    ) as engine:
        sick = world.plan.shards[0].units[1].data.start
        reader = engine.open(0)
        for _ in range(2):
            with pytest.raises(NonFiniteTensorError):
                reader.pread(sick, 4, no_poll)
        read = source.read_bytes["s0.safetensors"]
        with pytest.raises(NonFiniteTensorError):
            reader.pread(sick, 4, no_poll)
        assert source.read_bytes["s0.safetensors"] == read
        fine = world.plan.shards[0].units[0].data.start
        assert reader.pread(fine, 4, no_poll) == world.expected[0][fine : fine + 4]
        reader.close()
        healed = make_world([[Weight(w.name, w.rows, w.cols, group=w.group) for w in BAD[0]]])
        source.files = healed.files
        again = engine.open(0)
        assert again.pread(sick, 4, no_poll) == healed.expected[0][sick : sick + 4]
        again.close()


def test_a_source_that_changes_while_it_is_read_is_never_journaled(tmp_path: Path) -> None:
    """The check after the last read refuses: nothing of that unit is committed, readers get the error."""
    world, store = (
        make_world([[Weight("w", 300, 600)], [Weight("v", 300, 600)]]),
        FakeStore(tmp_path),
    )
    source = FakeSource(world.files)

    def change(path: str) -> None:
        if path == "s0.safetensors":
            source.changed.add(path)

    source.on_read = change
    with engine_of(world, store, source=source, workers=2) as engine:
        with pytest.raises(SourceChangedError, match="s0"):
            engine.ensure_sealed(0, no_poll)
        reader = engine.open(0)
        with pytest.raises(SourceChangedError):
            reader.pread(64, 10, no_poll)
        reader.close()
        assert engine.ensure_sealed(1, no_poll).read_bytes() == world.expected[1]
    assert not store.shared[world.plan.shards[0].object_id].records


@pytest.mark.parametrize("operation", ["partial", "claim", "pwrite", "commit", "seal"])
def test_a_store_that_fails_is_served_around_and_comes_back(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk full at any step: sealing says so, reads go on from memory, status says why; later all is sealed."""
    monkeypatch.setattr(trouble, "_RETRY_S", 0.0)
    world, store = schemes_world("per_tensor"), FakeStore(tmp_path)
    store.failing = {operation}
    with engine_of(world, store, workers=2, memory_bytes=8 << 20) as engine:
        with pytest.raises(StoreError, match="no space left"):
            engine.ensure_sealed(1, no_poll)
        reader = engine.open(1)
        assert reader.pread(0, 10**9, no_poll) == world.expected[1]
        assert "no space left" in engine.stats().degraded
        with pytest.raises(StoreError):
            engine.fill()
        store.failing = set()
        assert engine.ensure_sealed(1, no_poll).read_bytes() == world.expected[1]
        assert reader.pread(0, 10**9, no_poll) == world.expected[1]
        reader.close()
        assert engine.stats().degraded == ""
        engine.fill()
    assert set(store.commits().values()) == {1}


def test_a_store_in_trouble_is_not_tried_at_every_read(tmp_path: Path) -> None:
    """Within the retry interval reads and opens leave the store alone."""
    world, store = schemes_world("per_channel"), FakeStore(tmp_path)
    store.failing, touched = {"pwrite"}, []
    with engine_of(world, store, workers=2) as engine:
        with pytest.raises(StoreError):
            engine.ensure_sealed(0, no_poll)
        until(lambda: engine.stats().in_flight == 0)
        store.on_touch = touched.append
        reader = engine.open(1)
        for offset in range(0, 2000, 100):
            assert reader.pread(offset, 9, no_poll) == world.expected[1][offset : offset + 9]
        reader.close()
        with pytest.raises(StoreError):
            engine.ensure_sealed(0, no_poll)
        assert not touched


@pytest.mark.parametrize("operation", ["partial", "claim", "pwrite", "commit", "seal"])
def test_what_the_store_refused_is_tried_again(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any reader: nothing is tried while there is no room for it; then the shard is sealed and all is well."""
    monkeypatch.setattr(trouble, "_RETRY_S", 0.0)
    world, store = schemes_world("per_tensor"), FakeStore(tmp_path)
    store.failing, touched = {operation}, []
    with engine_of(world, store, workers=2, run_ahead=0) as engine:
        with pytest.raises(StoreError):
            engine.ensure_sealed(1, no_poll)
        until(lambda: engine.stats().in_flight == 0)
        store.failing, store.free, store.on_touch = set(), 0, touched.append
        if operation != "seal":  # all units are made then, and take no more room
            engine.try_store_again()
            time.sleep(0.1)
            assert not touched
            assert engine.stats().degraded != ""
        store.free = world.plan.shards[1].size

        def well() -> bool:
            engine.try_store_again()
            return engine.stats().degraded == "" and engine.sealed(1) is not None

        until(well)
        assert engine.ensure_sealed(1, no_poll).read_bytes() == world.expected[1]
        assert engine.sealed(0) is None


def test_no_more_is_tried_than_the_store_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensor: the tensor that was read from memory is made, and no other."""
    monkeypatch.setattr(trouble, "_RETRY_S", 0.0)
    world = make_world([[Weight("a", 600, 600), Weight("b", 600, 600)]])
    store = FakeStore(tmp_path)
    store.failing = {"partial"}
    with engine_of(world, store, workers=2, grain="tensor") as engine:
        reader, at = engine.open(0), world.plan.shards[0].units[1].data.start
        assert reader.pread(at, 9, no_poll) == world.expected[0][at : at + 9]
        store.failing = set()

        def well() -> bool:
            engine.try_store_again()
            return engine.stats().degraded == ""

        until(well)
        reader.close()
    assert set(store.commits()) == {(world.plan.shards[0].object_id, 1)}


def test_what_somebody_asked_for_is_tried_again_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that were begun ahead are refused too, and later: all the same it is the one asked for that is tried."""
    monkeypatch.setattr(trouble, "_RETRY_S", 0.0)
    world = make_world([[Weight(name, 64, 64)] for name in "abc"])
    store, all_begun = FakeStore(tmp_path), threading.Event()
    store.failing, store.on_touch = {"partial"}, lambda _operation: all_begun.wait(WAIT_S)
    with engine_of(world, store, workers=1, run_ahead=2) as engine:
        with pytest.raises(StoreError):
            engine.ensure_sealed(0, all_begun.set)
        until(lambda: not any(engine._pool._works))
        store.failing = set()
        engine.try_store_again()
        until(lambda: engine.stats().degraded == "")
        until(lambda: engine.sealed(0) is not None)
        assert engine.sealed(1) is engine.sealed(2) is None


def test_status_tries_the_store_now_and_then(tmp_path: Path) -> None:
    """However often it is asked: within the retry interval the store is left alone."""
    world, store = schemes_world("per_channel"), FakeStore(tmp_path)
    store.failing, touched = {"pwrite"}, []
    with engine_of(world, store, workers=2) as engine:
        with pytest.raises(StoreError):
            engine.ensure_sealed(0, no_poll)
        until(lambda: engine.stats().in_flight == 0)
        store.on_touch = touched.append
        for _ in range(100):
            engine.try_store_again()
        time.sleep(0.1)
        assert not touched


def test_without_a_store_sealing_says_why(tmp_path: Path) -> None:
    """No store at all: StoreError with the reason, and status shows it."""
    world = make_world([[Weight("w", 64, 64)]])
    with engine_of(world, None, why_no_store="the disk is read-only") as engine:
        with pytest.raises(StoreError, match="the disk is read-only"):
            engine.ensure_sealed(0, no_poll)
        assert engine.sealed(0) is None
        assert "read-only" in engine.stats().degraded


def test_a_link_that_fails_leaves_the_shard_served_inline(tmp_path: Path) -> None:
    """on_sealed raises: sealed() says no, ensure_sealed StoreError, a reader reads the object; later it is linked."""
    world = make_world([[Weight("w", 64, 64)]])
    full, linked = [True], []

    def link(shard: int, path: Path) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        linked.append((shard, path))

    with engine_of(world, FakeStore(tmp_path), on_sealed=link) as engine:
        with pytest.raises(StoreError):
            engine.ensure_sealed(0, no_poll)
        assert engine.sealed(0) is None
        reader = engine.open(0)
        assert reader.pread(0, 10**9, no_poll) == world.expected[0]
        reader.close()
        full[0] = False
        path = engine.sealed(0)
        assert linked == [(0, path)]


def test_a_bug_in_a_worker_reaches_the_waiter_and_kills_nobody(tmp_path: Path) -> None:
    """An unexpected exception is an internal error for the shard; the worker goes on with others."""
    world = make_world([[Weight("w", 300, 600)], [Weight("v", 300, 600)]])
    broken = [True]

    def bug(_call: str) -> None:
        if broken[0]:
            raise ZeroDivisionError("oops")

    with engine_of(
        world, FakeStore(tmp_path), FakeQuantizer(bug), workers=1, run_ahead=0
    ) as engine:
        with pytest.raises(Fp8fsError, match=r"internal error.*oops"):
            engine.ensure_sealed(0, no_poll)
        broken[0] = False
        assert engine.ensure_sealed(1, no_poll).read_bytes() == world.expected[1]
        assert engine.ensure_sealed(0, no_poll).read_bytes() == world.expected[0]


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """fill() reports along the way, and at last that everything is sealed."""
    world = schemes_world("block")
    seen = []
    with engine_of(world, FakeStore(tmp_path), workers=2) as engine:
        engine.fill(seen.append)
    assert seen[-1].shards_sealed == seen[-1].shards_total == 2
    assert seen[-1].in_flight == seen[-1].waiting == 0


def test_an_unknown_grain_is_refused() -> None:
    """Not silently the other one."""
    with pytest.raises(UsageError, match="tensors"):
        make_engine(make_world([[Weight("w", 64, 64)]]), None, grain="tensors")


def test_scan_finds_every_bad_weight_with_its_first_bad_element() -> None:
    """Kept tensors are not looked at; each weight is read once; pieces are tensors of their own."""
    world = make_world(
        [
            [
                Weight("kept", 1, 99, ""),
                Weight("ok", 300, 600),
                Weight("late", 1500, 2000, bad=2_900_001),
                Weight("joined", 30, 16, pieces=3, bad=10 * 16 + 5),
            ],
            [Weight("first", 16, 16, bad=0)],
        ]
    )
    source, seen = FakeSource(world.files), []
    found = scan(world.plan, source, FakeQuantizer(), workers=3, progress=lambda *p: seen.append(p))
    assert found.non_finite == (
        NonFinite("part", "late", 2_900_001),
        NonFinite("part", "joined.1", 5),
        NonFinite("part", "first", 0),
    )
    total = sum(world.unit_bytes(w.name) for s in world.weights for w in s if w.scheme)
    assert sum(source.read_bytes.values()) == total
    assert seen[-1] == (total, total)


def test_scan_ends_when_progress_raises_or_the_source_changes() -> None:
    """The caller's interrupt stops the threads; a changed source is an error, not a finding."""
    world = make_world([[Weight("w", 300, 600)]])

    def stop(*_progress: int) -> None:
        raise InterruptedWaitError("ctrl-c")

    with pytest.raises(InterruptedWaitError):
        scan(world.plan, FakeSource(world.files), FakeQuantizer(), progress=stop)
    source = FakeSource(world.files)
    source.on_read = source.changed.add
    with pytest.raises(SourceChangedError):
        scan(world.plan, source, FakeQuantizer())


def test_an_empty_shard_is_sealed(tmp_path: Path) -> None:
    """A shard without units is its preamble."""
    world = make_world([[]])
    assert isinstance(world.plan, Plan)
    with engine_of(world, FakeStore(tmp_path)) as engine:
        assert engine.ensure_sealed(0, no_poll).read_bytes() == world.expected[0]
