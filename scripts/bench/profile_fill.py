"""Where a cold fill spends its time, against what memory and disk can do in the same minutes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from measure import files_below, run, settle, warm
from world import World

__all__ = ["profile_fill", "roofline"]

# Leaf functions of ours that each call one thing outside Python, and what that thing is.
STAGES = (
    ("read source from the page cache", ("pread_into", "read_run")),
    ("load the kernels", ("_kernel", "_load", "load", "read")),
    ("quantize", ("_run",)),
    ("digest", ("tile_digest", "bytes_digest", "combine", "digest", "add", "_combine")),
    ("write into the page cache", ("pwrite_once", "pwrite", "ftruncate", "allocate")),
    ("sync to disk", ("fdatasync", "fsync", "fsync_dir", "start_writing")),
    ("give source pages back", ("drop",)),
    ("wait for work", ("wait", "_serve", "acquire", "__enter__")),
)
_OTHER = "all other Python"
_RATE_HZ = 250


def roofline(world: World) -> dict[str, float]:
    """GB/s of memory, of the page cache and of the disk that holds the store, measured now."""
    return world.inside(world.subject, "time_kernels.py", "bandwidth", world.scratch)


def profile_fill(world: World, roof: Mapping[str, float]) -> str:
    """The document's section about one cold fill: stages by thread time, CPU by user and system, system calls."""
    source = world.main
    nbytes = sum(path.stat().st_size for path in files_below(source, ".safetensors"))
    _prepare(world, source)
    plain = world.build(source)
    written = sum(
        path.stat().st_size for path in files_below(Path(plain.stdout.strip()), ".safetensors")
    )
    cores = int(max(int(key.split("_")[1]) for key in roof if key.startswith("memcpy_")))
    text = [
        "### Where a cold fill spends its time",
        f"One `build` of {nbytes / 1e9:.2f} GB into {written / 1e9:.2f} GB, source in the page cache: "
        f"{plain.wall_s:.2f} s, {plain.user_s:.2f} s of CPU in user and {plain.system_s:.2f} s in the kernel "
        f"({(plain.user_s + plain.system_s) / plain.wall_s:.2f} cores busy). "
        "In the same minutes this machine did:",
        _roof_table(roof, nbytes, written),
    ]
    floor_s = nbytes / roof["page_cache_read"] / 1e9 / cores + written / roof["disk_write"] / 1e9
    text.append(
        f"Reading the source once and writing the result once with its sync would take {floor_s:.2f} s at "
        f"these rates: {floor_s / plain.wall_s:.0%} of the build."
    )
    stages = _stages(world, source)
    if stages:
        total = sum(stages.values())
        text.append("Samples of the worker threads of one build, by what they were in:")
        rows = ["| in | share of thread time |", "|---|---:|"]
        rows += [f"| {name} | {count / total:.1%} |" for name, count in stages.items() if count]
        text.append("\n".join(rows))
    world.remove(world.store)
    return "\n\n".join(text)


def _prepare(world: World, source: Path) -> None:
    world.remove(world.store)
    warm(files_below(source))
    settle()


def _roof_table(roof: Mapping[str, float], nbytes: int, written: int) -> str:
    names = {
        "page_cache_write": ("write into the page cache", written),
        "disk_write": ("the same with its sync", written),
        "page_cache_read": ("read from the page cache, one thread", nbytes),
        "disk_read": ("read from the disk, one thread", nbytes),
    }
    rows = ["| | GB/s | the fill's bytes at that rate |", "|---|---:|---:|"]
    for key, rate in roof.items():
        if key.startswith("memcpy_"):
            threads = key.split("_")[1]
            rows.append(f"| memcpy, {threads} threads | {rate:.1f} | {nbytes / rate / 1e9:.2f} s |")
        else:
            what, amount = names[key]
            rows.append(f"| {what} | {rate:.1f} | {amount / rate / 1e9:.2f} s |")
    return "\n".join(rows)


def _stages(world: World, source: Path) -> dict[str, int]:
    """Samples by stage, from py-spy; empty where it cannot run."""
    if world.peers is None:
        return {}
    _prepare(world, source)
    spy = world.peers.parent / "py-spy"
    raw = world.scratch / "profile.txt"
    command = [spy, "record", "--format", "raw", "--output", raw, "--rate", str(_RATE_HZ)]
    command += ["--threads", "--idle", "--nonblocking", "--"]
    build = world.fp8fs("build", source, "--store", world.store, "--quiet")
    try:
        run([*command, world.subject, *build], world.env)
    except (RuntimeError, subprocess.SubprocessError) as err:
        world.say(f"no profile by stage: {err}")
        return {}
    return count_stages(raw.read_text(encoding="utf-8").splitlines())


def count_stages(lines: Iterable[str]) -> dict[str, int]:
    """Samples of worker threads by stage. A line is ``thread;frame;frame... count``, outermost first."""
    counts = {name: 0 for name, _ in STAGES} | {_OTHER: 0}
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if "fp8fs-worker" not in stack or not count.isdigit():
            continue
        leaf = re.match(r"[^ ]*?([\w<>]+) \(", stack.split(";")[-1])  # Class.method (file:line)
        name = leaf[1] if leaf else ""
        stage = next((stage for stage, leaves in STAGES if name in leaves), _OTHER)
        counts[stage] += int(count)
    return counts
