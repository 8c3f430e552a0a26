"""Clocks, page cache and process facts: what every figure measures with. Linux, standard library only."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CommandError",
    "Run",
    "can_drop_caches",
    "drop_caches",
    "interleaved",
    "median",
    "peak_rss",
    "pss",
    "resident_bytes",
    "run",
    "settle",
    "spread",
    "streamed",
    "warm",
    "written",
]

_READ_BYTES = 8 << 20
_DROP = "/proc/sys/vm/drop_caches"


class CommandError(RuntimeError):
    """A command that was to be measured failed; the message holds the end of what it said."""


@dataclass(frozen=True)
class Run:
    """One finished command. ``wall_s``: from spawn to reaped; the rest is of it and its children."""

    wall_s: float
    user_s: float
    system_s: float
    peak_rss_bytes: int
    stdout: str


def run(
    command: Sequence[str | Path],
    env: Mapping[str, str],
    *,
    while_running: Callable[[int], None] | None = None,
) -> Run:
    """Run *command* to its end; *while_running* is called with its pid meanwhile, as often as it returns.

    Output goes to files, so that nothing waits for a pipe. Raises: CommandError if the command fails.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        pid = 0
        while while_running is not None and not pid:
            while_running(process.pid)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not pid:
            _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            said = (err.read() or out.read())[-2000:]
            words = " ".join(str(word) for word in command)
            raise CommandError(f"{words}: exit {process.returncode}: {said}")
        return Run(wall_s, usage.ru_utime, usage.ru_stime, usage.ru_maxrss << 10, out.read())


def median(samples: Sequence[float]) -> float:
    """The median; NaN for none."""
    return statistics.median(samples) if samples else float("nan")


def spread(samples: Sequence[float]) -> float:
    """How far the middle half of the samples lies apart, over their median; 0 for fewer than three."""
    if len(samples) < 3 or not median(samples):
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / median(samples)


def interleaved(
    repetitions: int, variants: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Samples of each variant, taken A B B A A B ..., so that slow minutes hit all alike, and none is always first."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for _ in range(repetitions):
        for name in order:
            samples[name].append(variants[name]())
        order.reverse()
    return samples


# -- the page cache -----------------------------------------------------------------------


def can_drop_caches() -> bool:
    """Whether this process may empty the kernel's caches (root, outside most containers)."""
    return os.access(_DROP, os.W_OK)


def settle() -> None:
    """Nothing is left to be written back: the next sample does not pay for the last one."""
    os.sync()


def drop_caches() -> None:
    """Page cache, dentries and inodes are empty; dirty pages are written first."""
    os.sync()
    with open(_DROP, "w", encoding="ascii") as file:
        file.write("3\n")


def files_below(folder: Path, suffix: str = "") -> list[Path]:
    """Regular files (and links to them) of a folder tree, sorted."""
    return sorted(p for p in folder.rglob(f"*{suffix}") if p.is_file())


def warm(files: Iterable[Path]) -> None:
    """Every page of *files* is in the page cache."""
    buffer = bytearray(_READ_BYTES)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def written(path: Path, nbytes: int) -> float:
    """Seconds of writing a new file of *nbytes* from one warm buffer, its fsync included."""
    buffer = memoryview(bytearray(_READ_BYTES))
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for at in range(0, nbytes, len(buffer)):
            file.write(buffer[: nbytes - at])
        os.fsync(file.fileno())
    return time.perf_counter() - started


def streamed(sources: Iterable[Path], target: Path, nbytes: int) -> float:
    """Seconds of reading *sources* whole while another thread writes *target* of *nbytes* and syncs it."""
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(written, target, nbytes)
        warm(sources)
        writing.result()
    return time.perf_counter() - started


def resident_bytes(files: Iterable[Path]) -> int:
    """How much of *files* is in the page cache now (mincore on a fresh mapping, which loads nothing)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        with open(path, "rb") as file:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap of {path}")
        vector = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        failed = libc.mincore(address, size, vector)
        libc.munmap(address, size)
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        raw = vector.raw[: -(-size // mmap.PAGESIZE)]
        pages += len(raw) - raw.count(0)
    return pages * mmap.PAGESIZE


# -- processes ----------------------------------------------------------------------------


def _kilobytes(text: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def peak_rss(pid: int) -> int:
    """The most resident memory that a live process has had (VmHWM), mapped files included."""
    return _kilobytes(Path(f"/proc/{pid}/status").read_text(), "VmHWM")


def pss(pid: int) -> int:
    """Resident memory of a process, each shared page divided by the number of its sharers."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss")
