"""The parts of the engine that decide without doing: bands, claims, buffers, waiting, source layout."""

from __future__ import annotations

import threading

import pytest

from fp8fs.core.layout import Extent, Piece, Unit, tiles
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.matrix import Bands, element_position, item_bytes
from fp8fs.engine.memory import _Latest
from fp8fs.engine.once import OnceTable, Outcome, Stopped
from fp8fs.engine.pool import AHEAD, DEMAND, Pool, Work
from fp8fs.engine.shard import claims_of
from fp8fs.engine.trouble import StoreTrouble
from fp8fs.errors import Fp8fsError, InterruptedWaitError, NonFiniteTensorError, StoreFullError
from tests.engine_world import FakeStore, Weight, make_world, no_poll


def unit(scheme: str, rows: int, cols: int, dtype: str = "BF16") -> Unit:
    size = 1 if dtype == "U8" else 2
    pieces = (Piece(0, 0, rows * cols * size, "w"),)
    return Unit("w", scheme, dtype, rows, cols, pieces, Extent(0, rows * cols), None, -1)


SHAPES = [
    ("", 1, 11 << 20, "U8"),
    ("per_tensor", 5000, 1024, "BF16"),
    ("per_tensor", 1, 5 << 20, "BF16"),
    ("per_channel", 300, 70_000, "BF16"),
    ("per_channel", 1, 5 << 20, "BF16"),
    ("block", 300, 70_000, "BF16"),
    ("block", 1000, 4096, "BF16"),
    ("block_free", 1, 5 << 20, "BF16"),
    ("per_tensor", 129, 16, "BF16"),
]


@pytest.mark.parametrize(("scheme", "rows", "cols", "dtype"), SHAPES)
def test_bands_are_the_tiles_in_order(scheme: str, rows: int, cols: int, dtype: str) -> None:
    """The tiles of all bands are the tiles of the format, numbered in order; data and scales of bands leave no gap."""
    cut = Bands(unit(scheme, rows, cols, dtype))
    numbered = [pair for band in range(cut.count) for pair in cut.tiles(band)]
    assert [number for number, _ in numbered] == list(range(cut.tile_count))
    assert [tile for _, tile in numbered] == list(tiles(rows, cols, item_bytes(dtype)))
    ends = [cut.data(band) for band in range(cut.count)]
    assert [start for start, _ in ends] == [0, *(start + n for start, n in ends[:-1])]
    assert sum(n for _, n in ends) == rows * cols
    scales = [cut.scale(band) for band in range(cut.count)]
    expected = {
        "": 0,
        "per_tensor": 0,
        "per_channel": rows * 4,
    }.get(scheme, -(-rows // 128) * -(-cols // 128) * 4)
    assert sum(n for _, n in scales) == expected
    if expected:
        assert [start for start, _ in scales] == [0, *(start + n for start, n in scales[:-1])]


def test_a_bad_element_is_named_in_its_own_source_tensor() -> None:
    """Element 70 of a matrix of two pieces of 64 is element 6 of the second tensor."""
    pieces = (Piece(0, 500, 128, "q"), Piece(0, 0, 128, "k"))
    joined = Unit("qk", "per_tensor", "BF16", 8, 16, pieces, Extent(0, 128), None, -1)
    assert element_position(joined, 63) == ("q", 63)
    assert element_position(joined, 70) == ("k", 6)


def test_claims_keep_groups_together_and_gather_small_units() -> None:
    """Each unit is in one claim, named after its first unit; a group is never cut; a large unit is alone."""
    world = make_world(
        [
            [
                Weight("norm", 1, 40, ""),
                Weight("q", 16, 16, group="g"),
                Weight("big", 1024, 256),
                Weight("k", 16, 16, group="g"),
                Weight("tail", 1, 8, ""),
            ]
        ]
    )
    claims = {claim: list(units) for claim, units in claims_of(world.plan, 0).items()}
    assert claims == {0: [0, 1, 3, 4], 2: [2]}


def test_a_claim_holds_at_most_256_small_units() -> None:
    """600 tiny tensors are made under three leases, not 600 and not one."""
    world = make_world([[Weight(f"w{i}", 1, 8, "") for i in range(600)]])
    assert [len(units) for units in claims_of(world.plan, 0).values()] == [256, 256, 88]


def test_buffers_stay_within_the_budget_and_are_reused() -> None:
    """A borrower waits while the budget is lent out, and gets the freed memory."""
    pool = BufferPool(2 << 20)
    got = threading.Event()

    def borrow() -> None:
        with pool.lend(1 << 20):
            got.set()

    with pool.lend(1 << 20, 1 << 20) as (first, second):
        assert len(first) == len(second) == 1 << 20
        thread = threading.Thread(target=borrow)
        thread.start()
        assert not got.wait(0.05)
    thread.join(5)
    assert got.is_set()
    assert pool._lent_bytes == 0
    assert pool._free_bytes <= 2 << 20


def test_a_request_above_the_budget_is_served_alone() -> None:
    """Progress is certain: one borrower may exceed the budget when nobody else holds anything."""
    pool = BufferPool(1 << 20)
    with pool.lend(3 << 20) as (buffer,):
        assert len(buffer) == 3 << 20
    assert pool._free_bytes == 0


def test_differently_sized_buffers_do_not_pile_up() -> None:
    """Kept buffers of sizes that nobody wants any more make room."""
    pool = BufferPool(8 << 20)
    for size in (1, 2, 3, 4, 5, 6, 7):
        with pool.lend(size << 20):
            assert pool._lent_bytes + pool._free_bytes <= 8 << 20
    pool.trim()
    assert pool._free_bytes == 0


def test_a_wait_ends_when_poll_raises_and_others_go_on_waiting() -> None:
    """An interrupted waiter leaves; the outcome still reaches the rest."""
    outcome = Outcome()

    def interrupted() -> None:
        raise InterruptedWaitError("killed")

    with pytest.raises(InterruptedWaitError):
        outcome.wait(interrupted)
    outcome.finish()
    outcome.wait(interrupted)


def test_each_waiter_gets_its_own_copy_of_the_error() -> None:
    """Threads that raise one error at once do not share a traceback, and facts survive."""
    outcome = Outcome()
    outcome.finish(NonFiniteTensorError("bad", hint="keep it", tensor="w", index=3))
    caught = []
    for _ in range(2):
        with pytest.raises(NonFiniteTensorError) as info:
            outcome.wait(no_poll)
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert caught[0].as_dict() == caught[1].as_dict()
    assert caught[0].facts == {"tensor": "w", "index": 3}


def test_a_value_is_computed_once_however_many_ask() -> None:
    """Eight threads ask for one key: one computes while the others wait."""
    table: OnceTable[str, int] = OnceTable()
    asked = threading.Barrier(8)
    calls = []

    def compute() -> int:
        calls.append(1)
        return 7

    results = []

    def ask() -> None:
        asked.wait()
        results.append(table.get("key", compute, no_poll))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [7] * 8
    assert len(calls) == 1


def test_a_failed_computation_is_tried_again() -> None:
    """Failures are not kept."""
    table: OnceTable[str, int] = OnceTable()

    def fail() -> int:
        raise Fp8fsError("no")

    with pytest.raises(Fp8fsError):
        table.get("key", fail, no_poll)
    assert table.get("key", lambda: 3, no_poll) == 3


class _Leader(Work):
    """One task."""

    def __init__(self, task: object, priority: int = DEMAND) -> None:
        super().__init__(priority)
        self._task = task

    def take(self):  # type: ignore[no-untyped-def]
        self.finished = True
        return self._task


def test_a_batch_reports_its_smallest_failure() -> None:
    """Numbers 3 and 5 of 8 fail: whoever runs them, the caller hears of 3."""
    pool = Pool(4, on_idle=lambda: None)
    failures: list[BaseException] = []
    done = threading.Event()

    def run(number: int) -> None:
        if number in (3, 5):
            raise Fp8fsError(str(number))

    def lead() -> None:
        try:
            pool.parallel(8, run, DEMAND)
        except Fp8fsError as err:
            failures.append(err)
        done.set()

    pool.add(_Leader(lead))
    assert done.wait(5)
    pool.close(5)
    assert [str(f) for f in failures] == ["3"]


def test_what_is_demanded_comes_before_what_is_made_ahead() -> None:
    """With one worker, a demanded work that comes later is taken first."""
    pool = Pool(1, on_idle=lambda: None)
    started, release, order = threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        release.wait(5)

    finished = threading.Event()
    pool.add(_Leader(first))
    assert started.wait(5)
    pool.add(_Leader(lambda: (order.append("ahead"), finished.set()), AHEAD))
    pool.add(_Leader(lambda: order.append("demand")))
    release.set()
    assert finished.wait(5)
    pool.close(5)
    assert order == ["demand", "ahead"]


def test_each_worker_has_a_work_of_its_own_while_there_are_enough() -> None:
    """Of two works with many tasks two workers take one each; alone, it is worked on by both."""
    pool = Pool(2, on_idle=lambda: None)
    together, order = threading.Barrier(2), list[str]()
    finished = threading.Semaphore(0)

    class Many(Work):
        def __init__(self, name: str, tasks: int) -> None:
            super().__init__(DEMAND)
            self.name, self.left = name, tasks

        def take(self):
            if not self.left:
                self.finished = True
                return None
            self.left -= 1
            self.running += 1
            return self.task

        def task(self) -> None:
            order.append(self.name)
            together.wait(5)
            with pool.changed:
                self.running -= 1
            finished.release()

    with pool.changed:
        pool.add(Many("a", 3))
        pool.add(Many("b", 5))
    for _ in range(8):
        assert finished.acquire(timeout=5)
    pool.close(5)
    assert [sorted(order[at : at + 2]) for at in (0, 2, 4, 6)] == [["a", "b"]] * 3 + [["b", "b"]]


def test_a_closing_pool_stops_long_tasks_at_their_next_check() -> None:
    """check() raises Stopped once the pool closes, and close() returns then."""
    pool = Pool(1, on_idle=lambda: None)
    started, stopped = threading.Event(), threading.Event()

    def task() -> None:
        started.set()
        try:
            while True:
                pool.check()
        except Stopped:
            stopped.set()

    pool.add(_Leader(task))
    assert started.wait(5)
    pool.close(5)
    assert stopped.is_set()


def test_the_latest_bands_are_kept_within_their_budget() -> None:
    """What was used last stays; the bytes kept never exceed the budget, but for one value that is longer."""
    latest: _Latest[str, bytes] = _Latest(100)
    for key in ("a", "b"):
        latest.put(key, bytes(50))
    assert latest.get("a")
    latest.put("c", bytes(50))
    assert latest.get("b") is None
    assert latest.get("a")
    assert latest.get("c")
    latest.put("huge", bytes(101))
    assert latest.get("huge")
    assert latest.get("a") is None
    latest.put("d", bytes(50))
    assert latest.get("huge") is None
    assert latest._used == 50


def test_a_failed_store_is_tried_by_one_caller_at_a_time(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure nobody tries, then one does per interval; success makes it usable for all."""
    trouble = StoreTrouble(FakeStore(tmp_path), "")
    assert trouble.usable()
    assert trouble.failed(StoreFullError("disk full"))
    assert not trouble.failed(StoreFullError("disk full"))
    assert not trouble.usable()
    monkeypatch.setattr(trouble, "_retry_at", 0.0)
    assert trouble.usable()
    assert not trouble.usable()
    assert "disk full" in trouble.reason
    trouble.worked()
    assert trouble.usable()
    assert trouble.reason == ""
