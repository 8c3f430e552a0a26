"""F5, F9: the kernels by themselves, and one tensor through a fresh mount."""

from __future__ import annotations

import time
from pathlib import Path

from figure import Line, at_least, at_most, told
from measure import files_below, median, settle, warm
from world import World

__all__ = ["kernels_alone", "one_tensor"]

_TENSOR = "model.layers.0.self_attn.o_proj.weight"
_SIDE = 5120  # 52 MB of BF16


def kernels_alone(world: World) -> list[Line]:
    """One thread on one core: each scheme's kernels over 256 MiB of BF16 in tiles of 4 MiB, against libc's memcpy of
    the same tiles into as many bytes, in turn, in one process; buffers were touched before, and are too large for
    any cache. per_tensor is both passes, amax over all tiles and then the cast over all tiles, as for a tensor that
    is larger than a cache. No reading, writing or digests.
    """
    answer = world.inside(
        world.subject, "time_kernels.py", "kernels", str(max(9, world.repetitions))
    )
    samples: dict[str, list[float]] = answer  # type: ignore[assignment]
    nbytes = 32_768 * 4_096 * 2
    memcpy = median(samples["memcpy"])
    lines = []
    for scheme, limit in (("per_tensor", 0.35), ("block", 0.35), ("per_channel", 0.3)):
        seconds = median(samples[scheme])
        lines.append(
            at_least(
                "F5",
                f"kernel {scheme}, quantize and amax / memcpy, one core",
                memcpy / seconds,
                "ratio",
                limit,
                f"{nbytes / seconds / 1e9:.1f} GB/s of BF16; memcpy {nbytes / memcpy / 1e9:.1f}",
                {scheme: samples[scheme], "memcpy": samples["memcpy"]},
            )
        )
    return lines


def one_tensor(world: World) -> list[Line]:
    """The first read of one 52 MB weight (5120 x 5120, per_channel) with pread through a fresh mount, ``--serve
    inline --grain tensor``, empty store, source in the page cache, less the time of the same kernel over the same
    weight alone on one thread. The read begins the moment that ``fp8fs mount`` returns. Cached: machine code of the
    kernels is on disk from an earlier run, and is loaded in the background from the mount on. Without: it is
    compiled in the background. Settled: cached, and two seconds after the mount.
    """
    source = world.llama(64 << 20, shards=1, hidden=_SIDE, layers=1, intermediate=512, vocab=64)
    kernel = median(
        world.inside(world.subject, "time_kernels.py", "tensor", str(_SIDE), str(_SIDE), "9")[
            "seconds"
        ]  # type: ignore[arg-type]
    )

    def take(*, cached: bool, wait_s: float) -> float:
        world.remove(world.store)
        if not cached:
            world.remove(world.kernel_cache)
        warm(files_below(source))
        settle()
        with world.mounted(source, "--serve", "inline", "--grain", "tensor") as mount:
            time.sleep(wait_s)
            path = str(Path(mount.path) / "model.safetensors")
            answer = world.inside(world.subject, "read_files.py", "tensor", path, _TENSOR)
            return answer["seconds"]

    samples: dict[str, list[float]] = {"cached": [], "settled": [], "without": []}
    for _ in range(world.repetitions):
        samples["cached"].append(take(cached=True, wait_s=0.0))
        samples["settled"].append(take(cached=True, wait_s=2.0))
    samples["without"] = [take(cached=False, wait_s=0.0) for _ in range(2)]
    world.remove(world.store)
    samples["kernel"] = [kernel]
    alone = f"the kernel alone takes {kernel * 1000:.1f} ms"
    return [
        at_most(
            "F9",
            "one 52 MB tensor through a fresh mount, more than the kernel alone, kernels cached",
            median(samples["cached"]) - kernel,
            "s",
            0.1,
            alone,
            samples,
        ),
        told(
            "F9",
            "the same, two seconds after the mount",
            median(samples["settled"]) - kernel,
            "s",
            alone,
        ),
        told(
            "F9",
            "the same, kernels compiled for the first time",
            median(samples["without"]) - kernel,
            "s",
            alone,
        ),
    ]
