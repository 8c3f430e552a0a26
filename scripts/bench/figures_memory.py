"""F10: memory while filling."""

from __future__ import annotations

import time

from figure import Line, at_most, told
from measure import drop_caches, files_below, peak_rss, resident_bytes, run, settle
from world import World

__all__ = ["filling_memory"]

_GB = 10**9
_MB = 10**6
_WATCH_S = 0.2


def filling_memory(world: World) -> list[Line]:
    """Checkpoints of 1, 4 and 16 GB, page cache dropped before. Peak RSS, mapped files and the interpreter included:
    of ``build``, as the kernel tells its parent at the end (ru_maxrss); of the daemon (VmHWM), after a program has
    read every shard through a fresh mount. And how much of the source is in the page cache, the most that was seen
    (mincore, five times a second) while building: pages are given back as they are consumed (this is the default,
    for a source is read once while what the page cache would lose for it, the engine's own files, is not).
    """
    if not world.root:
        return []
    sizes = (1, 2, 4) if world.quick else (1, 4, 16)
    peaks: dict[str, list[float]] = {"build": [], "daemon": [], "source_in_page_cache": []}
    for size in sizes:
        source = world.llama(size * _GB, shards=max(4, size))
        files = files_below(source, ".safetensors")
        world.remove(world.store)
        drop_caches()
        resident = 0

        def watch(_pid: int, files: list = files) -> None:  # type: ignore[type-arg]
            nonlocal resident
            resident = max(resident, resident_bytes(files))
            time.sleep(_WATCH_S)

        words = world.fp8fs("build", source, "--store", world.store, "--quiet")
        done = run(words, world.env, while_running=watch)
        peaks["build"].append(float(done.peak_rss_bytes))
        peaks["source_in_page_cache"].append(float(resident))
        world.remove(world.store)
        drop_caches()
        with world.mounted(source) as mount:
            world.inside(world.subject, "read_files.py", "read", *mount.shards)
            peaks["daemon"].append(float(peak_rss(mount.pid)))
        settle()
    world.remove(world.store)
    named = ", ".join(f"{size} GB" for size in sizes)

    def detail(key: str) -> str:
        return f"{named}: " + ", ".join(f"{peak / _MB:.0f} MB" for peak in peaks[key])

    largest = peaks["source_in_page_cache"]
    return [
        at_most(
            "F10",
            "peak RSS of build, any size",
            max(peaks["build"]) / _MB,
            "MB",
            400,
            detail("build"),
            {"build": peaks["build"]},
        ),
        at_most(
            "F10",
            "peak RSS of the daemon while filling, any size",
            max(peaks["daemon"]) / _MB,
            "MB",
            400,
            detail("daemon"),
            {"daemon": peaks["daemon"]},
        ),
        told(
            "F10",
            "source in the page cache while building, at most",
            max(largest) / _MB,
            "MB",
            detail("source_in_page_cache"),
            {"source_in_page_cache": largest},
        ),
    ]
