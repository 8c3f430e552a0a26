"""What a run was made on: everything that its numbers depend on and that is not in the repository."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

from environments import versions
from world import World

__all__ = ["describe", "load"]


def describe(world: World) -> dict[str, object]:
    """Commit, CPU, memory, kernel, libfuse, disk, versions."""
    found: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git(world.clone, "rev-parse", "HEAD") or "not a git clone",
        "changed_since_commit": bool(_git(world.clone, "status", "--porcelain", "--", "fp8fs")),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "other_work": f"load average {load()} before the first sample",
        "kernel": platform.release(),
        "libfuse": _libfuse(),
        "disk": _disk(world.scratch),
        "fp8fs": versions(world.subject, ("fp8fs", "numba", "numpy", "mfusepy", "xxhash")),
    }
    if world.peers is not None:
        names = ("llmcompressor", "compressed-tensors", "torch", "safetensors")
        found["peers"] = versions(world.peers, names)
    return found


def load() -> str:
    """How busy the machine is with other work, for whoever reads a noisy sample."""
    return Path("/proc/loadavg").read_text(encoding="ascii").rsplit(maxsplit=2)[0]


def _git(clone: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(clone), *words], check=False, capture_output=True, text=True
    )
    return done.stdout.strip()


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = {
        key: match[1]
        for key in ("model name", "cpu family", "model", "cpu MHz")
        if (match := re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE))
    }
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_bf16") if f" {flag} " in text]
    return (
        f"{found.get('model name', platform.machine())} "
        f"(family {found.get('cpu family', '?')}, model {found.get('model', '?')}; {' '.join(vectors)})"
    )


def _libfuse() -> str:
    try:
        done = subprocess.run(
            ["fusermount3", "--version"], check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "none"
    return done.stdout.strip().rpartition(" ")[2]


def _disk(folder: Path) -> str:
    """Filesystem, device and whether it turns, of the mount that *folder* is on."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = source = ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            kind, source = after.split()[:2]
    queue = Path(f"/sys/dev/block/{number}/queue/rotational")
    turns = {"0": ", solid state", "1": ", rotational by its own word"}
    spins = turns.get(queue.read_text().strip(), "") if queue.exists() else ""
    return f"{kind} on {source}{spins}"
