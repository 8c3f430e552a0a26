"""The device's process: started on use, gone when idle or orphaned, replaced by the CPU when it fails."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fp8fs.errors import DeviceError, NonFiniteTensorError
from fp8fs.quant.cpu import CpuQuantizer
from fp8fs.quant.proxy import ChildQuantizer, FallbackQuantizer

FAKE = """
import os, sys, time
from fp8fs.errors import DeviceError
from fp8fs.quant.child import main
from fp8fs.quant.cpu import CpuQuantizer

class Fake(CpuQuantizer):
    def amax(self, src, dtype):
        mode = open({mode!r}).read()
        if mode == "oom":
            raise DeviceError("fake: out of memory")
        if mode == "bug":
            raise KeyError("bug")
        if mode == "slow":
            open({started!r}, "w").close()
            time.sleep(60)
        return super().amax(src, dtype)

sys.exit(main(sys.argv[1:], make=lambda device: Fake()))
"""

ONES = np.ones(64, dtype=np.float32).tobytes()


class FakeDevice:
    """A child program without torch, whose mood a file decides: "", "oom", "bug" or "slow"."""

    def __init__(self, folder: Path) -> None:
        self._mode = folder / "mode"
        self.started = folder / "started"
        program = folder / "fake_device.py"
        program.write_text(FAKE.format(mode=str(self._mode), started=str(self.started)))
        self.command = (sys.executable, str(program))
        self.be("")

    def be(self, mode: str) -> None:
        self._mode.write_text(mode)


@pytest.fixture
def fake(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path)


@pytest.fixture
def child(fake: FakeDevice) -> Iterator[ChildQuantizer]:
    quantizer = ChildQuantizer("fake", idle_s=60, command=fake.command)
    yield quantizer
    quantizer.close()


def until(what: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether *pid* is no process any more, not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


def descriptors() -> set[tuple[str, str]]:
    """What is open: numbers, and what they lead to. Threads of earlier tests may still close what was theirs."""
    gc.collect()  # errors of earlier tests hold frames, and those hold mappings
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_started_on_first_use(child: ChildQuantizer) -> None:
    """Making the quantizer starts nothing; the first call starts one process, the next reuse it."""
    assert child.pid is None
    assert child.tensor_scale(448.0) == 1.0
    assert child.pid is None
    assert child.amax(ONES, "F32") == 1.0
    pid = child.pid
    assert child.amax(ONES, "F32") == 1.0
    assert child.pid == pid is not None


def test_idle_child_ends_is_reaped_and_comes_back(fake: FakeDevice) -> None:
    """After the idle time the process is gone without a zombie or descriptors left; a call starts another."""
    quantizer = ChildQuantizer("fake", idle_s=0.2, command=fake.command)
    before = descriptors()
    assert quantizer.amax(ONES, "F32") == 1.0
    first = quantizer.pid
    assert first is not None
    until(lambda: gone(first))
    until(lambda: not descriptors() - before)
    assert quantizer.pid is None
    assert quantizer.amax(ONES, "F32") == 1.0
    assert quantizer.pid not in {None, first}
    quantizer.close()


def test_call_races_the_idle_exit(fake: FakeDevice) -> None:
    """A call that is sent just as the idle child ends is answered by the next child."""
    quantizer = ChildQuantizer("fake", idle_s=0.05, command=fake.command)
    quantizer.amax(ONES, "F32")
    for pause_s in np.linspace(0.045, 0.065, 6):
        time.sleep(float(pause_s))
        assert quantizer.amax(ONES, "F32") == 1.0
    quantizer.close()


def test_close_ends_the_child(child: ChildQuantizer) -> None:
    """close reaps the child, may be repeated, and is final."""
    child.amax(ONES, "F32")
    pid = child.pid
    assert pid is not None
    child.close()
    assert gone(pid)
    child.close()
    with pytest.raises(DeviceError, match="closed"):
        child.amax(ONES, "F32")


def test_killed_in_the_middle(fake: FakeDevice, child: ChildQuantizer) -> None:
    """kill -9 while two callers wait fails both with the status; the next call has a new child."""
    child.amax(ONES, "F32")
    pid = child.pid
    assert pid is not None
    fake.be("slow")
    errors: list[Exception] = []

    def call() -> None:
        try:
            child.amax(ONES, "F32")
        except DeviceError as err:
            errors.append(err)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    until(fake.started.exists)
    fake.be("")
    os.kill(pid, signal.SIGKILL)
    for caller in callers:
        caller.join(20)
    assert 1 <= len(errors) <= 3
    assert "status -9" in str(errors[0])
    assert child.amax(ONES, "F32") == 1.0
    assert child.pid != pid
    assert gone(pid)


def test_call_has_a_limit(fake: FakeDevice) -> None:
    """A device that does not answer is given up and its process ended."""
    quantizer = ChildQuantizer("fake", idle_s=60, limit_s=2.0, command=fake.command)
    quantizer.amax(ONES, "F32")
    pid = quantizer.pid
    assert pid is not None
    fake.be("slow")
    with pytest.raises(DeviceError, match="no answer within 2 s"):
        quantizer.amax(ONES, "F32")
    assert gone(pid)
    quantizer.close()


def test_bug_in_the_child_is_a_device_error(fake: FakeDevice, child: ChildQuantizer) -> None:
    """An unexpected exception ends the child with a traceback; the caller gets a DeviceError."""
    fake.be("bug")
    with pytest.raises(DeviceError, match="status 1"):
        child.amax(ONES, "F32")


def test_missing_program() -> None:
    """A program that cannot be started is a DeviceError, and leaks no descriptor."""
    before = descriptors()
    quantizer = ChildQuantizer("fake", command=("/nonexistent/python",))
    with pytest.raises(DeviceError, match="no quantizer process"):
        quantizer.amax(ONES, "F32")
    assert not descriptors() - before


def test_tiles_grow_and_shrink(child: ChildQuantizer) -> None:
    """Shared memory follows the largest tile; results never mix with an earlier, larger tile's."""
    for count in (10, 3_000_000, 7, 100_000):
        values = np.arange(1, count + 1, dtype=np.float32)
        data, expected = bytearray(count), bytearray(count)
        child.cast_tensor(values.tobytes(), "F32", 10.0, data)
        CpuQuantizer().cast_tensor(values.tobytes(), "F32", 10.0, expected)
        assert data == expected


def test_nonfinite_crosses_the_boundary(child: ChildQuantizer) -> None:
    """The child's NonFiniteTensorError arrives with its index and is no reason to fall back."""
    fallback = FallbackQuantizer(child, CpuQuantizer())
    values = np.ones(100, dtype=np.float32)
    values[42] = np.nan
    with pytest.raises(NonFiniteTensorError) as caught:
        fallback.amax(values.tobytes(), "F32")
    assert caught.value.facts["index"] == 42
    assert fallback.note == ""


def test_out_of_memory_falls_back(
    fake: FakeDevice, child: ChildQuantizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of memory: the CPU does the work, one line says so, and status has the note."""
    fallback = FallbackQuantizer(child, CpuQuantizer())
    fake.be("oom")
    with caplog.at_level(logging.INFO, logger="fp8fs"):
        assert [fallback.amax(ONES, "F32") for _ in range(3)] == [1.0, 1.0, 1.0]
    lines = [
        record.getMessage() for record in caplog.records if "falling back" in record.getMessage()
    ]
    assert lines == ["falling back to the CPU: fake: out of memory"]
    assert fallback.note == lines[0]


def test_device_is_tried_again(
    fake: FakeDevice, child: ChildQuantizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the retry time is over and the device works, the note is gone."""
    fallback = FallbackQuantizer(child, CpuQuantizer(), retry_s=0.2)
    fake.be("oom")
    fallback.amax(ONES, "F32")
    assert fallback.note
    fake.be("")
    time.sleep(0.25)
    with caplog.at_level(logging.INFO, logger="fp8fs"):
        fallback.amax(ONES, "F32")
    assert fallback.note == ""
    assert "works again" in caplog.text


def test_death_falls_back(child: ChildQuantizer) -> None:
    """A child killed between two calls costs nothing but the change to the CPU."""
    fallback = FallbackQuantizer(child, CpuQuantizer())
    fallback.amax(ONES, "F32")
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert fallback.amax(ONES, "F32") == 1.0
    fallback.close()


@pytest.mark.parametrize("busy", [False, True])
def test_no_orphan(fake: FakeDevice, busy: bool) -> None:
    """When the daemon is killed, its idle child ends at once; a busy one when its call is over."""
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from fp8fs.quant.proxy import ChildQuantizer\n"
            f"q = ChildQuantizer('fake', idle_s=60, command={fake.command!r})\n"
            "q.amax(bytes(4), 'F32')\n"
            "print(q.pid, flush=True)\n"
            "q.warm() if sys.argv[1:] else None\n"
            "time.sleep(60)\n",
            *(["busy"] if busy else []),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None
    pid = int(daemon.stdout.readline())
    daemon.kill()
    daemon.wait()
    daemon.stdout.close()
    until(lambda: _ended(pid))


def _ended(pid: int) -> bool:
    """Gone, or a zombie that waits for whoever adopts orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
