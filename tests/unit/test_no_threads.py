"""Where the system gives no more threads: on with fewer, and without any one line that says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.cli import main
from fp8fs.engine.pool import DEMAND, Pool, Task, Work
from fp8fs.errors import DeviceError
from tests.builders import llama_like

Limit = Callable[[int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Call it with how many threads can still be started."""
    start = threading.Thread.start

    def to(count: int) -> None:
        left = iter(range(count))

        def refused(thread: threading.Thread) -> None:
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refused)

    return to


class One(Work):
    """One task, that says when it runs; ``abandoned``: it never will."""

    def __init__(self) -> None:
        super().__init__(DEMAND)
        self.ran = threading.Event()
        self.abandoned = False

    def take(self) -> Task | None:
        self.finished = True
        return self.ran.set

    def abandon(self) -> None:
        super().abandon()
        self.abandoned = True


def test_a_pool_without_a_thread_refuses_work(limit: Limit) -> None:
    """Nobody waits for what no thread can do; the same pool works once there are threads again, and closes in any case."""
    pool = Pool(2, on_idle=lambda: None)
    first, second = One(), One()
    limit(0)
    with pytest.raises(DeviceError, match="can't start new thread") as raised:
        pool.add(first)
    assert raised.value.hint
    assert first.abandoned
    limit(2)
    pool.add(second)
    assert second.ran.wait(5)
    assert not first.ran.is_set()
    pool.close(5)


def test_a_pool_goes_on_with_the_threads_that_it_has(
    limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    """Of eight threads two can be had: they do the work, the log says it once."""
    pool = Pool(8, on_idle=lambda: None)
    works = [One() for _ in range(20)]
    limit(2)
    for work in works:
        pool.add(work)
    assert all(work.ran.wait(5) for work in works)
    assert pool.workers == 2
    pool.close(5)
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 8 workers: fp8fs-worker-2 cannot be started: can't start new thread"
    ]


@pytest.mark.parametrize("words", [["build"], ["plan", "--scan"]])
def test_without_a_thread_a_command_says_so(
    words: list[str],
    limit: Limit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit 31 with the document, no thread of ours left; the same command works when there are threads again."""
    monkeypatch.setenv("FP8FS_STORE", str(tmp_path / "store"))
    llama_like(tmp_path / "src")
    command = [*words, str(tmp_path / "src"), "--workers", "3", "--json"]
    limit(0)
    assert main(command) == 31
    seen = capsys.readouterr()
    error = json.loads(seen.out)["error"]
    assert error["code"] == "quant.device"
    assert "cannot be started: can't start new thread" in error["what"]
    assert "Traceback" not in seen.err
    assert not [t for t in threading.enumerate() if t.name.startswith("fp8fs-")]
    assert not list((tmp_path / "store").glob("v1/partial/*/data"))
    limit(1 << 20)
    assert main(command) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_scan_that_misses_a_thread_ends_those_that_run(
    count: int,
    limit: Limit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Headers are read on this thread then; what was begun on others is waited for before the error is said."""
    monkeypatch.setenv("FP8FS_STORE", str(tmp_path / "store"))
    llama_like(tmp_path / "src")
    limit(count)
    assert main(["plan", str(tmp_path / "src"), "--scan", "--workers", "3", "--json"]) == 31
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "quant.device"
    assert not [t for t in threading.enumerate() if t.name.startswith("fp8fs-")]
