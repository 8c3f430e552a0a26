"""F2, F3, F4, F13: making a checkpoint for the first time."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from figure import Line, at_least, at_most, ratio, told
from measure import (
    drop_caches,
    files_below,
    interleaved,
    median,
    run,
    settle,
    streamed,
    warm,
    written,
)
from workloads import small_tensors
from world import World

__all__ = ["against_copy", "against_peers", "cold_load", "growth"]

_GB = 10**9
_TRIAL_BYTES = 1 << 30


def against_copy(world: World) -> list[Line]:
    """Wall time of the whole ``fp8fs build`` process (start, plan, fill, every sync, published tree) over that of
    ``cp -r SRC COPY`` followed by ``sync -f COPY``, on the same disk, in turn. Before each sample: results of the
    last one removed, the source read into the page cache, sync. Kernels are compiled already (F9 tells what the
    first run ever costs). What the build writes is smaller than the copy; that is part of what it is. Beside
    them, in the same turns: one thread that writes as many bytes as the view has from one warm buffer, and syncs them.
    """
    copy, plain = world.scratch / "copy", world.scratch / "plain"
    view_bytes = 0

    def take_build() -> float:
        nonlocal view_bytes
        seconds = world.cold_build(world.main)
        view_bytes = _view_bytes(world)
        return seconds

    def take_write() -> float:
        world.remove(plain)
        return written(plain, view_bytes)

    def take_copy() -> float:
        world.remove(copy)
        warm(files_below(world.main))
        settle()
        return run(
            ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "-", world.main, copy], world.env
        ).wall_s

    samples = interleaved(
        world.repetitions, {"build": take_build, "copy": take_copy, "write": take_write}
    )
    world.remove(copy, plain)
    gigabytes = _total_bytes(world.main) / _GB
    detail = (
        f"{median(samples['build']):.2f} s against {median(samples['copy']):.2f} s; "
        f"{gigabytes / median(samples['build']):.2f} GB/s of source; one thread that writes and syncs as many bytes: "
        f"{median(samples['write']):.2f} s, {ratio(samples, 'write', 'copy'):.2f} of the copy"
    )
    value = ratio(samples, "build", "copy")
    return [at_most("F2", "cold build / cp -r and sync", value, "ratio", 0.6, detail, samples)]


def against_peers(world: World) -> list[Line]:
    """llm-compressor's ``model_free_ptq`` on the same checkpoint, CPU, same layers left out, in turn with our build:
    FP8_DYNAMIC against scheme per_channel, FP8_BLOCK against block_free (both: free scales, 128 x 128). The peer's
    seconds are those of its call alone: its imports and process start are not counted and it syncs nothing, while
    ours is the whole process with every sync. Its worker count is the best of 1, 2 and 4, each tried once before on
    1 GB. And a plain torch script (load a shard, quantize, save), timed in the same way. Half of the main checkpoint's
    size, because the peer takes ten times as long; on a smaller one our fixed costs weigh more, not less. Sources in
    the page cache.
    """
    if world.peers is None:
        return []
    peers, out = world.peers, world.scratch / "peer"
    small = world.llama(min(world.size_bytes, _TRIAL_BYTES), shards=4)
    main = world.llama(max(world.size_bytes // 2, _TRIAL_BYTES), shards=4)

    def take(script: str, *options: str, source: Path = main) -> float:
        world.remove(out)
        warm(files_below(source))
        settle()
        return world.inside(peers, script, source, out, *options)["seconds"]

    lines = []
    tried = {
        workers: take("quantize_model_free.py", "FP8_DYNAMIC", str(workers), source=small)
        for workers in (1, 2, 4)
    }
    best = min(tried, key=lambda workers: tried[workers])
    for theirs, ours in (("FP8_DYNAMIC", "per_channel"), ("FP8_BLOCK", "block_free")):
        variants = {
            "build": lambda ours=ours: world.cold_build(main, "--scheme", ours),
            "peer": lambda theirs=theirs: take("quantize_model_free.py", theirs, str(best)),
        }
        samples = interleaved(world.repetitions, variants)
        lines.append(
            at_least(
                "F3",
                f"model_free_ptq {theirs} / cold build {ours}",
                ratio(samples, "peer", "build"),
                "times",
                10,
                f"{median(samples['peer']):.1f} s with {best} workers "
                f"against {median(samples['build']):.2f} s",
                {**samples, **{f"peer_{w}_workers": [s] for w, s in tried.items()}},
            )
        )
    samples = interleaved(
        world.repetitions,
        {
            "build": lambda: world.cold_build(main, "--scheme", "per_channel"),
            "torch": lambda: take("quantize_torch.py"),
        },
    )
    lines.append(
        told(
            "F3",
            "plain torch script / cold build per_channel",
            ratio(samples, "torch", "build"),
            "times",
            f"{median(samples['torch']):.1f} s against {median(samples['build']):.2f} s",
            samples,
        )
    )
    world.remove(out)
    return lines


def cold_load(world: World) -> list[Line]:
    """A loader (safetensors and torch, every tensor of every shard copied out once, shards in index order) that has
    its imports behind it. A: empty store; ``fp8fs mount`` (handoff), then the load through the mount, which makes
    every shard. B: empty store; ``fp8fs build``, then the load from the finished tree. Both from the start of the
    first command to the last tensor, in turn, source in the page cache, kernels compiled, sync before.
    """
    if world.peers is None:
        return []
    peers = world.peers
    inner: dict[str, list[float]] = {"load_through_mount": [], "load_native": []}

    def prepare() -> None:
        world.remove(world.store)
        warm(files_below(world.main))
        settle()

    def through_mount() -> float:
        prepare()
        with world.ready(peers, "load_torch.py") as load:
            started = time.perf_counter()
            with world.mounted(world.main) as mount:
                inner["load_through_mount"].append(json.loads(load(str(mount.path)))["seconds"])
                return time.perf_counter() - started

    def build_then_load() -> float:
        prepare()
        with world.ready(peers, "load_torch.py") as load:
            started = time.perf_counter()
            tree = world.build(world.main).stdout.strip()
            inner["load_native"].append(json.loads(load(tree))["seconds"])
            return time.perf_counter() - started

    samples = interleaved(
        world.repetitions, {"mount_and_load": through_mount, "build_and_load": build_then_load}
    )
    detail = (
        f"{median(samples['mount_and_load']):.2f} s (of which the load "
        f"{median(inner['load_through_mount']):.2f} s) against {median(samples['build_and_load']):.2f} s"
    )
    return [
        at_most(
            "F4",
            "mount and cold first load / build and native load",
            ratio(samples, "mount_and_load", "build_and_load"),
            "ratio",
            1.1,
            detail,
            {**samples, **inner},
        )
    ]


def growth(world: World) -> list[Line]:
    """Cold builds of 1, 4 and 16 GB (Llama-shaped), and of one-shard checkpoints with 1e3, 1e4 and 1e5 weights of
    64 x 64, source in the page cache. The price of a further GB (or tensor) between the first two sizes is compared
    with that between the last two: the fixed cost of a process cancels, and anything that grows faster than the
    checkpoint shows. Where the largest checkpoint and its result do not fit into memory together, all three are read
    from the disk (page cache dropped before each). Beside the gigabytes, in the same turns: the machine's own growth,
    one thread that reads the source and one that writes and syncs as many bytes as the view has. Peak memory of the
    1, 4 and 16 GB builds is F10's.
    """
    sizes = (1, 2, 4) if world.quick else (1, 4, 16)
    counts = (1_000, 4_000, 16_000) if world.quick else (1_000, 10_000, 100_000)
    gigabytes = {n: world.llama(n * _GB, shards=max(4, n)) for n in sizes}
    tensors = {n: small_tensors(world.scratch / "src" / f"small-{n}", n) for n in counts}
    by_size, by_count = _grown(world, gigabytes), _grown(world, tensors)
    world.remove(*tensors.values(), world.store)
    machine = _Prices.of(by_size["machine"])
    return [
        _Prices.of(by_size["build"]).line("GB", "s", 1, by_size, f"; {machine.told('s', 1)}"),
        _Prices.of(by_count["build"]).line("tensor", "us", 1e6, by_count),
    ]


def _grown(world: World, sources: dict[int, Path]) -> dict[str, dict[int, list[float]]]:
    """Samples of "build" and "machine" for each size, in turn."""
    samples: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in sources} for name in ("build", "machine")
    }
    fits = max(map(_total_bytes, sources.values())) * 1.6 < 0.8 * _memory_bytes()
    plain = world.scratch / "plain"

    def prepare(source: Path) -> None:
        if fits or not world.root:
            warm(files_below(source))
        else:
            drop_caches()
        settle()

    for _ in range(world.repetitions):
        for size, source in sources.items():
            world.remove(world.store)
            prepare(source)
            samples["build"][size].append(world.build(source).wall_s)
            nbytes = _view_bytes(world)
            world.remove(world.store, plain)
            prepare(source)
            samples["machine"][size].append(streamed(files_below(source), plain, nbytes))
    world.remove(plain)
    return samples


@dataclass(frozen=True)
class _Prices:
    """Median seconds of each size, and what one more of the unit costs between the sizes."""

    seconds: dict[int, float]
    early: float
    late: float

    @classmethod
    def of(cls, samples: dict[int, list[float]]) -> _Prices:
        seconds = {size: median(many) for size, many in samples.items()}
        first, second, third = seconds
        return cls(
            seconds,
            (seconds[second] - seconds[first]) / (second - first),
            (seconds[third] - seconds[second]) / (third - second),
        )

    def told(self, unit: str, scale: float) -> str:
        return f"the machine alone {self.early * scale:.3g} and {self.late * scale:.3g} {unit}: {self.late / self.early:.2f}"

    def line(
        self,
        what: str,
        unit: str,
        scale: float,
        samples: dict[str, dict[int, list[float]]],
        bound: str = "",
    ) -> Line:
        first, second, third = self.seconds
        whole = ", ".join(f"{size}: {s:.2f} s" for size, s in self.seconds.items())
        return at_most(
            "F13",
            f"price of a further {what}: {second} to {third} / {first} to {second}",
            self.late / self.early,
            "ratio",
            1.15,
            f"{self.early * scale:.3g} and {self.late * scale:.3g} {unit}; whole builds {whole}{bound}",
            {
                f"{name}, {size} {what}": many
                for name, of_size in samples.items()
                for size, many in of_size.items()
            },
        )


def _view_bytes(world: World) -> int:
    """The bytes of what was sealed in the store."""
    shards = files_below(world.store / "v1" / "objects", ".safetensors")
    return sum(path.stat().st_size for path in shards)


def _total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_below(folder))


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
