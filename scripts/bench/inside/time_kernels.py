"""The CPU kernels by themselves, on one core, and the machine's limits in the same process.

    time_kernels.py kernels REPETITIONS          seconds per pass over 256 MiB of BF16, kernels and memcpy in turn
    time_kernels.py tensor ROWS COLS REPS        one weight of that shape through quantize_rows, whole
    time_kernels.py bandwidth FOLDER             GB/s of memory (one and two threads) and of FOLDER's disk

Work is done tile by tile, in the tiles that the fill engine uses, over 256 MiB, so that neither side finds its bytes
in a cache. Buffers are touched before. The memcpy is libc's, of the same tiles, into as many bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fp8fs.quant import make_quantizer

ROWS, COLS = 32_768, 4_096
TILE_ROWS = 512  # 4 MiB of BF16
_WRITE_BYTES = 2 << 30
_PART_BYTES = 8 << 20


def weight(rows: int, cols: int) -> np.ndarray:
    """BF16 codes of a normal weight, as raw bytes."""
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * 0.02
    codes = (values.view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(codes, rows * cols).view(np.uint8)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def kernels(repetitions: int) -> dict[str, list[float]]:
    """Seconds of each kernel and of memcpy for one pass over the weight, interleaved."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    quantizer = make_quantizer("cpu")
    source = weight(ROWS, COLS)
    copy = np.zeros_like(source)
    data = np.zeros(ROWS * COLS, np.uint8)
    scales = np.zeros(ROWS * COLS // 16, np.float32)
    step = TILE_ROWS * COLS

    def each(work: Callable[[memoryview, memoryview, int], object]) -> Callable[[], None]:
        def whole() -> None:
            for row in range(0, ROWS, TILE_ROWS):
                at = row * COLS
                work(
                    memoryview(source)[at * 2 : (at + step) * 2],
                    memoryview(data)[at : at + step],
                    row,
                )

        return whole

    def memcpy() -> None:
        to, origin = copy.ctypes.data, source.ctypes.data
        for at in range(0, source.nbytes, step * 2):
            ctypes.memmove(to + at, origin + at, step * 2)

    peak = each(lambda src, _dst, _row: quantizer.amax(src, "BF16"))
    cast = each(lambda src, dst, _row: quantizer.cast_tensor(src, "BF16", 0.01, dst))
    blocks = (TILE_ROWS // 128) * (COLS // 128)

    def by_block(src: memoryview, dst: memoryview, _row: int) -> None:
        out = memoryview(scales[:blocks]).cast("B")
        quantizer.quantize_blocks(src, "BF16", TILE_ROWS, COLS, dst, out, pow2=True)

    def by_row(src: memoryview, dst: memoryview, _row: int) -> None:
        quantizer.quantize_rows(
            src, "BF16", TILE_ROWS, dst, memoryview(scales[:TILE_ROWS]).cast("B")
        )

    def per_tensor() -> None:
        peak()
        cast()

    work = {
        "memcpy": memcpy,
        "amax": peak,
        "cast": cast,
        "per_tensor": per_tensor,
        "per_channel": each(by_row),
        "block": each(by_block),
    }
    for warm_up in work.values():
        warm_up()
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repetitions):
        for name, run in work.items():
            samples[name].append(timed(run))
    return samples


def tensor(rows: int, cols: int, repetitions: int) -> dict[str, object]:
    """Seconds of ``quantize_rows`` for one whole weight, one thread, kernels loaded before."""
    quantizer = make_quantizer("cpu")
    source = weight(rows, cols)
    data, scales = np.zeros(rows * cols, np.uint8), np.zeros(rows, np.float32)

    def once() -> None:
        quantizer.quantize_rows(
            source, "BF16", rows, memoryview(data), memoryview(scales).cast("B")
        )

    once()
    return {"seconds": [timed(once) for _ in range(repetitions)]}


def in_threads(count: int, work: Callable[[int], None]) -> float:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]

    def whole() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(whole)


def memory_bandwidth(threads: int) -> float:
    """GB/s of libc's memcpy, bytes copied (each is one read and one write of memory)."""
    nbytes = 256 << 20
    pairs = [(np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(threads)]

    def copy(number: int) -> None:
        source, target = pairs[number]
        for _ in range(4):
            ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)

    return threads * 4 * nbytes / in_threads(threads, copy) / 1e9


def disk_bandwidth(folder: Path) -> dict[str, float]:
    """GB/s of a new file of 2 GiB: written into the page cache, with its sync, read back hot, read back dropped."""
    path = folder / "bandwidth"
    buffer = np.random.default_rng(0).integers(0, 256, _PART_BYTES, np.uint8)
    os.sync()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def write() -> None:
        for at in range(0, _WRITE_BYTES, _PART_BYTES):
            os.pwrite(fd, buffer, at)

    def read() -> None:
        for at in range(0, _WRITE_BYTES, _PART_BYTES):
            os.preadv(fd, [buffer], at)

    try:
        written_s = timed(write)
        synced_s = timed(lambda: os.fdatasync(fd))
        hot_s = timed(read)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        dropped_s = timed(read)
    finally:
        os.close(fd)
        path.unlink()
    return {
        "page_cache_write": _WRITE_BYTES / written_s / 1e9,
        "disk_write": _WRITE_BYTES / (written_s + synced_s) / 1e9,
        "page_cache_read": _WRITE_BYTES / hot_s / 1e9,
        "disk_read": _WRITE_BYTES / dropped_s / 1e9,
    }


def main() -> None:
    mode, *words = sys.argv[1:]
    if mode == "kernels":
        print(json.dumps(kernels(int(words[0]))))
    elif mode == "tensor":
        print(json.dumps(tensor(*map(int, words))))
    else:
        found = {f"memcpy_{n}": memory_bandwidth(n) for n in (1, len(os.sched_getaffinity(0)))}
        print(json.dumps(found | disk_bandwidth(Path(words[0]))))


if __name__ == "__main__":
    main()
