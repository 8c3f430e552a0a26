"""F6, F7, F8: how soon a mount answers, and how soon commands do."""

from __future__ import annotations

import json
from pathlib import Path

from figure import Line, at_most, told
from measure import median, peak_rss, run, settle
from workloads import giant
from world import World

__all__ = ["commands", "mount_empty", "mount_warm"]

_MB = 10**6


def _source(world: World) -> Path:
    return giant(world.scratch / "src" / "giant")


def _mounts(world: World, source: Path, store: Path, *, fresh: bool) -> dict[str, list[float]]:
    """Time to answer and the daemon's peak memory, some times over."""
    path = world.scratch / "mnt"
    command = world.fp8fs("mount", source, path, "--store", store, "--json")
    samples: dict[str, list[float]] = {"seconds": [], "peak_rss_bytes": []}
    for _ in range(world.repetitions):
        if fresh:
            world.remove(store)
        settle()
        try:
            samples["seconds"].append(world.until_mounted(command, path))
            status = json.loads(run(world.fp8fs("status", path, "--json"), world.env).stdout)
            samples["peak_rss_bytes"].append(float(peak_rss(status["pid"])))
        finally:
            world.unmount(path)
    return samples


def mount_empty(world: World) -> list[Line]:
    """``fp8fs mount`` of a checkpoint with 200 shards, 100,000 tensors and 1.4 TB (sparse files: headers, index and
    config are real, data are holes) on an empty store: from spawning the command to another process seeing the
    mount answer ``stat`` (polled every millisecond from outside). Headers and Python's files are in the page cache,
    as they are at a second try. Peak RSS is the daemon's VmHWM, mapped files included, right after.
    """
    samples = _mounts(world, _source(world), world.scratch / "giant-store", fresh=True)
    world.remove(world.scratch / "giant-store")
    return _lines("F6", "store empty", samples, 1.5)


def mount_warm(world: World) -> list[Line]:
    """As F6, on a complete store. No machine makes 700 GB for a benchmark: the store is completed by its own journal
    and publishing code, with sparse shards of the right size and records of the right number (their digests are
    invented; a mount does not read data). The first mount, which links the tree, is not measured.
    """
    source, store = _source(world), world.scratch / "giant-store"
    world.remove(store)
    run(
        [world.subject, Path(__file__).parent / "inside" / "seal_sparse.py", source, store],
        world.env,
    )
    path = world.scratch / "mnt"
    try:
        run(world.fp8fs("mount", source, path, "--store", store), world.env)
        status = json.loads(run(world.fp8fs("status", path, "--json"), world.env).stdout)
    finally:
        world.unmount(path)
    shards = status["shards"]
    if shards["sealed"] != shards["total"]:
        raise RuntimeError(f"the store is not complete: {shards}")
    samples = _mounts(world, source, store, fresh=False)
    world.remove(store)
    return _lines("F7", "complete store", samples, 1.0)


def _lines(figure: str, what: str, samples: dict[str, list[float]], limit_s: float) -> list[Line]:
    rss = max(samples["peak_rss_bytes"]) / _MB
    return [
        at_most(
            figure,
            f"mount answers, 1.4 TB in 100,000 tensors, {what}",
            median(samples["seconds"]),
            "s",
            limit_s,
            f"best {min(samples['seconds']):.2f} s, worst {max(samples['seconds']):.2f} s",
            samples,
        ),
        at_most(figure, f"its peak RSS, {what}", rss, "MB", 400, "the worst of all samples"),
    ]


def commands(world: World) -> list[Line]:
    """Wall time of whole commands: ``status --json`` of F6's mount while it is idle (20 samples), and ``plan --json``
    and ``plan`` of its source, output to a file, no store. Python's own files are in the page cache.
    """
    source, store = _source(world), world.scratch / "giant-store"
    world.remove(store)
    with world.mounted(source, store=store) as mount:
        status = [
            run(world.fp8fs("status", mount.path, "--json"), world.env).wall_s for _ in range(20)
        ]
    options = ("--store", world.scratch / "no-store")
    as_json = [
        run(world.fp8fs("plan", source, *options, "--json"), world.env).wall_s
        for _ in range(world.repetitions)
    ]
    table = [run(world.fp8fs("plan", source, *options), world.env).wall_s for _ in range(1)]
    python = [run([world.subject, "-c", "pass"], world.env).wall_s for _ in range(20)]
    bare = f"of which {median(python) * 1000:.0f} ms are Python's own start"
    world.remove(store)
    return [
        at_most(
            "F8", "status --json", median(status), "s", 0.1, bare, {"s": status, "python": python}
        ),
        at_most(
            "F8", "plan --json of F6's source", median(as_json), "s", 1.5, "", {"seconds": as_json}
        ),
        told("F8", "plan of F6's source, as a table", median(table), "s", "", {"seconds": table}),
    ]
