"""F1, F11, F12: reading what is made already."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from figure import Line, at_least, at_most, ratio, told
from measure import drop_caches, files_below, interleaved, median, pss, settle, warm
from world import World

__all__ = ["inline_reads", "readers_memory", "warm_reads"]

_READERS = 8


def _native(world: World) -> list[Path]:
    """The sealed files themselves, by their path in the finished tree."""
    tree = Path(world.build(world.main).stdout.strip())
    return files_below(tree, ".safetensors")


def warm_reads(world: World) -> list[Line]:
    """All shards of a finished checkpoint, opened and read (``read``: preadv of 8 MiB into one buffer; ``mmap``:
    shared mapping, copied out 8 MiB at a time) through the mount's paths and by the sealed files' own paths, by the
    same single-threaded program on the same processor, mount and native in turn. Hot: every page is in the page cache, which both share,
    for they are the same inodes. Dropped: sync and drop_caches before each sample. The mount is warm (it was
    mounted on a finished store) and hands the files over; opening the paths through FUSE is part of the time.
    """
    native = _native(world)
    lines = []
    with world.mounted(world.main) as mount:
        for how in ("read", "mmap"):
            for state in ("hot", "dropped"):
                if state == "dropped" and not world.root:
                    continue

                def take(files: list[Path], how: str = how, state: str = state) -> float:
                    if state == "dropped":
                        drop_caches()
                    else:
                        warm(native)
                    return world.inside(world.subject, "read_files.py", how, *files)["seconds"]

                views = mount.shards
                # Samples take a tenth of a second, or a second: more of them, for anything else that runs shows in them.
                samples = interleaved(
                    world.repetitions * (3 if state == "hot" else 2),
                    {"native": lambda t=take: t(native), "mount": lambda t=take, v=views: t(v)},
                )
                nbytes = sum(path.stat().st_size for path in native)
                speed = nbytes / median(samples["mount"]) / 1e9
                lines.append(
                    at_least(
                        "F1",
                        f"warm {how} through the mount / native, page cache {state}",
                        ratio(samples, "native", "mount"),
                        "ratio",
                        0.97,
                        f"{speed:.1f} GB/s through the mount",
                        samples,
                    )
                )
    return lines


def readers_memory(world: World) -> list[Line]:
    """Eight processes map every shard of a warm mount and touch every page; then the proportional set sizes (PSS,
    from smaps_rollup) of all eight are added, interpreters included, and divided by the bytes of one copy of the
    checkpoint's weights. One sample: memory does not scatter.
    """
    nbytes = sum(path.stat().st_size for path in _native(world))
    with world.mounted(world.main) as mount, contextlib.ExitStack() as stack:
        for _ in range(_READERS):
            stack.enter_context(world.ready(world.subject, "read_files.py", "hold", *mount.shards))
        children = [pid for pid in _children() if b"read_files.py" in _command(pid)]
        total = sum(pss(pid) for pid in children)
        if len(children) != _READERS:
            raise RuntimeError(f"{len(children)} readers instead of {_READERS}")
    return [
        at_most(
            "F11",
            "summed PSS of 8 readers on a warm mount / one copy",
            total / nbytes,
            "ratio",
            1.05,
            f"{total / 1e6:.0f} MB for {nbytes / 1e6:.0f} MB of weights",
            {"pss_bytes": [float(total)], "checkpoint_bytes": [float(nbytes)]},
        )
    ]


def _children() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _requests(pid: int) -> int:
    text = Path(f"/proc/{pid}/io").read_text()
    return int(text.split("syscr:")[1].split()[0])


def inline_reads(world: World) -> list[Line]:
    """A finished checkpoint, mounted with ``--serve inline``: every byte passes through the daemon once and is then
    in the kernel's page cache. First touch: drop_caches before each sample, inline and native in turn, the same
    program. Beside it: the daemon's CPU seconds and read calls during one sample, which are what bounds it.
    """
    if not world.root:
        return []
    native = _native(world)
    nbytes = sum(path.stat().st_size for path in native)
    lines = []
    with world.mounted(world.main, "--serve", "inline") as mount:
        spent: dict[str, list[float]] = {"cpu_s": [], "requests": []}

        def take(files: list[Path], how: str) -> float:
            settle()
            drop_caches()
            cpu_s, requests = _cpu_s(mount.pid), _requests(mount.pid)
            seconds = world.inside(world.subject, "read_files.py", how, *files)["seconds"]
            if files is not native:
                spent["cpu_s"].append(_cpu_s(mount.pid) - cpu_s)
                spent["requests"].append(float(_requests(mount.pid) - requests))
            return seconds

        views = mount.shards
        for how in ("read", "mmap"):
            spent["cpu_s"].clear()
            spent["requests"].clear()
            samples = interleaved(
                world.repetitions,
                {
                    "native": lambda h=how: take(native, h),
                    "inline": lambda h=how: take(views, h),
                },
            )
            speed = nbytes / median(samples["inline"]) / 1e9
            size = nbytes / max(1.0, median(spent["requests"])) / 1024
            busy = median(spent["cpu_s"]) / median(samples["inline"])
            lines.append(
                told(
                    "F12",
                    f"inline {how}, first touch / native, page cache dropped",
                    ratio(samples, "native", "inline"),
                    "ratio",
                    f"{speed:.2f} GB/s; requests of {size:.0f} KiB; "
                    f"the daemon is busy {busy:.0%} of the time on one core",
                    {**samples, **{k: list(v) for k, v in spent.items()}},
                )
            )
    return lines
