"""Read or map files and say how long it took: what a loader does to them, without a loader's own work.

    read_files.py read|mmap FILE...        one answer: {"seconds": S, "bytes": N}
    read_files.py hold FILE...             map all, touch every page, say "ready", stay until stdin closes
    read_files.py tensor FILE NAME         read one tensor's bytes with pread

Opening the files is part of the time. Standard library only, so starting it costs nothing that is measured.
It stays on one processor, always the same one: where interrupts of the disk go to one of them, where the scheduler
happens to put a reader would else decide which of two equal readers is faster, and for minutes.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from contextlib import ExitStack

CHUNK_BYTES = 8 << 20


def read(path: str, buffer: bytearray) -> int:
    """All bytes of a file through read(2), 8 MiB at a time into one buffer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while count := os.preadv(fd, [buffer], done):
            done += count
        return done
    finally:
        os.close(fd)


def copy_mapped(path: str, buffer: bytearray) -> int:
    """All bytes of a file through a shared mapping, copied out 8 MiB at a time."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
        memoryview(buffer) as target,
    ):
        for at in range(0, len(view), CHUNK_BYTES):
            with view[at : at + CHUNK_BYTES] as part, target[: len(part)] as room:
                room[:] = part
        return len(view)


def hold(paths: list[str]) -> None:
    """Have every page of every file mapped and present, then wait."""
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(open(path, "rb"))
            mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            for at in range(0, len(mapped), mmap.PAGESIZE):
                mapped[at]
        print("ready", flush=True)
        sys.stdin.readline()


def read_tensor(path: str, name: str) -> int:
    """One tensor's bytes through pread, after the header."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        begin, end = json.loads(os.pread(fd, length, 8))[name]["data_offsets"]
        buffer = bytearray(end - begin)
        view = memoryview(buffer)
        done = 0
        while done < len(view):
            done += os.preadv(fd, [view[done:]], 8 + length + begin + done)
        return done
    finally:
        os.close(fd)


def main() -> None:
    mode, *words = sys.argv[1:]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if mode == "hold":
        hold(words)
        return
    buffer = bytearray(CHUNK_BYTES)
    started = time.perf_counter()
    if mode == "tensor":
        nbytes = read_tensor(*words)
    else:
        one = read if mode == "read" else copy_mapped
        nbytes = sum(one(path, buffer) for path in words)
    print(json.dumps({"seconds": time.perf_counter() - started, "bytes": nbytes}))


if __name__ == "__main__":
    main()
