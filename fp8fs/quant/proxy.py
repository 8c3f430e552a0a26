"""Quantizing in another process, and on the CPU when that fails.

A CUDA context costs hundreds of megabytes of the memory that an engine is about to fill, and cannot
be given back by the process that made it. So the device lives in a child that is started on first
use, ends after an idle time, is reaped, and is started again when needed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from fp8fs.core.quantizer import Buffer, Quantizer
from fp8fs.errors import DeviceError, NonFiniteTensorError
from fp8fs.quant import buffers, child, reference
from fp8fs.quant.lane import Call, Lane, LaneClosedError, Reply

__all__ = ["ChildQuantizer", "FallbackQuantizer"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_COMMAND = (sys.executable, "-P", "-m", "fp8fs.quant.child")
_STARTS = 3  # an idle child may end just as a call is sent; it then gets the call again
_REAP_S = 5.0


class _Part(NamedTuple):
    """One buffer of a call; ``read`` and ``written`` say what the child does with it."""

    buffer: Buffer
    read: bool
    written: bool


def _read(buffer: Buffer) -> _Part:
    return _Part(buffer, read=True, written=False)


def _written(buffer: Buffer) -> _Part:
    return _Part(buffer, read=False, written=True)


class _Child:
    """One running child: its lanes, and the thread that reaps it."""

    def __init__(self, command: Sequence[str], device: str, idle_s: float, lanes: int) -> None:
        self._free: queue.SimpleQueue[Lane | None] = queue.SimpleQueue()  # None: no more lanes
        self._ended = threading.Event()
        self._lanes: list[Lane] = []
        theirs: list[socket.socket] = []
        argv = [*command, "--device", device, "--idle", str(idle_s)]
        try:
            for _ in range(lanes):
                mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.append(other)
                self._lanes.append(Lane(mine, os.memfd_create("fp8fs-tiles")))
                argv += ["--lane", f"{other.fileno()}:{self._lanes[-1].memory_fd}"]
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",  # holds no mount busy
                start_new_session=True,  # a Ctrl-C in the terminal is the daemon's
                pass_fds=[
                    *(other.fileno() for other in theirs),
                    *(lane.memory_fd for lane in self._lanes),
                ],
            )
        except OSError as err:
            for lane in self._lanes:
                lane.close()
            raise DeviceError(f"{device}: no quantizer process: {err}", device=device) from err
        finally:
            for other in theirs:
                other.close()
        for lane in self._lanes:
            self._free.put(lane)
        threading.Thread(target=self._reap, name="fp8fs-reap", daemon=True).start()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def call(self, call: Call, parts: Sequence[_Part], limit_s: float) -> Reply:
        """Have the child do *call* on copies of *parts*; copy back what it writes.

        Raises: LaneClosedError if the child ends first; TimeoutError after *limit_s*.
        """
        lane = self._free.get()
        try:
            if lane is None:
                raise LaneClosedError
            shared = lane.buffers(call.lengths, grow=True)
            for there, part in zip(shared, parts, strict=True):
                if part.read:  # numpy copies without the GIL
                    np.copyto(there, np.frombuffer(memoryview(part.buffer), dtype=np.uint8))
            lane.connection.settimeout(limit_s)
            lane.send(call)
            reply = msgspec.msgpack.decode(lane.receive(), type=Reply)
            if not reply.error:
                for there, part in zip(shared, parts, strict=True):
                    if part.written:
                        np.copyto(np.frombuffer(memoryview(part.buffer), dtype=np.uint8), there)
            return reply
        finally:
            self._free.put(lane)

    def exit_status(self) -> int | None:
        """The status of the child once it is reaped; None if it does not end."""
        self._ended.wait(_REAP_S)
        return self.process.returncode

    def stop(self) -> None:
        """Let the child end: at once if it is idle, by force if it does not."""
        for lane in self._lanes:
            with contextlib.suppress(OSError):
                lane.connection.shutdown(socket.SHUT_RDWR)
        if not self._ended.wait(_REAP_S):
            self.kill()

    def kill(self) -> None:
        """End the child now, and wait until it is reaped."""
        self.process.kill()
        self._ended.wait(_REAP_S)

    def _reap(self) -> None:
        """Wait for the end of the child, then take every lane from its caller and close it."""
        self.process.wait()
        self._ended.set()
        for _ in self._lanes:
            lane = self._free.get()
            if lane is not None:
                lane.close()
        self._free.put(None)


class ChildQuantizer:
    """The quantizer protocol, done by a child process on *device*; any number of threads may call.

    *lanes* calls overlap in copying; the child works on one at a time. Each lane keeps shared memory
    of about the largest tile's source plus result while the child lives. *limit_s* bounds one call.
    """

    note = ""

    def __init__(
        self,
        device: str,
        *,
        idle_s: float = 30.0,
        limit_s: float = 300.0,
        lanes: int = 2,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self.name = device
        self._start = functools.partial(_Child, command, device, idle_s, lanes)
        self._limit_s = limit_s
        self._lock = threading.Lock()  # guards what follows
        self._child: _Child | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        running = self._child
        return running.process.pid if running is not None and running.running else None

    def tensor_scale(self, amax: float) -> float:
        return float(reference.tensor_scale(amax))

    def amax(self, src: Buffer, dtype: str) -> float:
        return self._call("amax", dtype, [_read(src)])

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        self._call("cast_tensor", dtype, [_read(src), _written(dst)], scale=scale)

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        raised = _Part(out, read=True, written=True)
        self._call("amax_rows", dtype, [_read(src), raised], rows=rows)

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        parts = [_read(src), _read(amax), _written(dst), _written(scale)]
        self._call("cast_rows", dtype, parts, rows=rows)

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        parts = [_read(src), _written(dst), _written(scale)]
        self._call("quantize_rows", dtype, parts, rows=rows)

    def quantize_blocks(
        self,
        src: Buffer,
        dtype: str,
        rows: int,
        cols: int,
        dst: Buffer,
        scale: Buffer,
        *,
        pow2: bool,
    ) -> None:
        parts = [_read(src), _written(dst), _written(scale)]
        self._call("quantize_blocks", dtype, parts, rows=rows, cols=cols, pow2=pow2)

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        """Here, without the child: rounding is cheaper than the copies."""
        buffers.round_bf16(src, dtype, dst)

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Start the child and make its device ready."""
        for dtype in dtypes:
            self._call("warm", dtype, [])

    def close(self) -> None:
        """End the child and reap it. Later calls fail."""
        with self._lock:
            self._closed = True
            running, self._child = self._child, None
        if running is not None:
            running.stop()

    def _call(
        self,
        method: str,
        dtype: str,
        parts: Sequence[_Part],
        *,
        rows: int = 0,
        cols: int = 0,
        scale: float = 0.0,
        pow2: bool = False,
    ) -> float:
        sizes = tuple(memoryview(part.buffer).nbytes for part in parts)
        call = Call(method, dtype, sizes, rows=rows, cols=cols, scale=scale, pow2=pow2)
        for _ in range(_STARTS):
            running = self._running()
            try:
                reply = running.call(call, parts, self._limit_s)
            except LaneClosedError as err:
                status = running.exit_status()
                if status == child.EXIT_IDLE:
                    continue
                raise DeviceError(
                    f"{self.name}: the quantizer process ended with status {status}",
                    device=self.name,
                    status=status,
                ) from err
            except TimeoutError as err:
                running.kill()
                raise DeviceError(
                    f"{self.name}: no answer within {self._limit_s:g} s", device=self.name
                ) from err
            if reply.error == "nonfinite":
                raise NonFiniteTensorError(reply.what, index=reply.index)
            if reply.error:
                raise DeviceError(reply.what, device=self.name)
            return reply.value
        raise DeviceError(
            f"{self.name}: the quantizer process ends before it works", device=self.name
        )

    def _running(self) -> _Child:
        with self._lock:
            if self._closed:
                raise DeviceError(f"{self.name}: the quantizer is closed", device=self.name)
            if self._child is None or not self._child.running:
                self._child = self._start()
            return self._child


class FallbackQuantizer:
    """The *primary* quantizer while its device works, else the *spare*; both make the same bytes.

    A DeviceError moves the work to *spare* for *retry_s* seconds; ``note`` then says so. The
    device is tried again after that, since what took its memory may be gone.
    """

    def __init__(self, primary: Quantizer, spare: Quantizer, *, retry_s: float = 60.0) -> None:
        self.name = primary.name
        self.note = ""
        self._primary = primary
        self._spare = spare
        self._retry_s = retry_s
        self._retry_at = (
            0.0  # set under the lock; read without it, a late reader only tries once more
        )
        self._lock = threading.Lock()

    def tensor_scale(self, amax: float) -> float:
        return float(reference.tensor_scale(amax))

    def amax(self, src: Buffer, dtype: str) -> float:
        return self._first(lambda q: q.amax(src, dtype))

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        self._first(lambda q: q.cast_tensor(src, dtype, scale, dst))

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        self._first(lambda q: q.amax_rows(src, dtype, rows, out))

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        self._first(lambda q: q.cast_rows(src, dtype, rows, amax, dst, scale))

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        self._first(lambda q: q.quantize_rows(src, dtype, rows, dst, scale))

    def quantize_blocks(
        self,
        src: Buffer,
        dtype: str,
        rows: int,
        cols: int,
        dst: Buffer,
        scale: Buffer,
        *,
        pow2: bool,
    ) -> None:
        self._first(lambda q: q.quantize_blocks(src, dtype, rows, cols, dst, scale, pow2=pow2))

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        self._first(lambda q: q.cast_bf16(src, dtype, dst))

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Make the primary ready, or the spare where that fails."""
        self._first(lambda q: q.warm(dtypes, schemes))

    def close(self) -> None:
        self._primary.close()
        self._spare.close()

    def _first(self, work: Callable[[Quantizer], T]) -> T:
        if time.monotonic() >= self._retry_at:
            try:
                done = work(self._primary)
            except DeviceError as err:
                self._fall_back(err)
            else:
                self._recovered()
                return done
        return work(self._spare)

    def _fall_back(self, err: DeviceError) -> None:
        with self._lock:
            self._retry_at = time.monotonic() + self._retry_s
            if not self.note:
                self.note = f"falling back to the CPU: {err}"
                log.warning("%s", self.note)

    def _recovered(self) -> None:
        with self._lock:
            if self.note and time.monotonic() >= self._retry_at:
                self.note = ""
                log.info("%s works again", self.name)
