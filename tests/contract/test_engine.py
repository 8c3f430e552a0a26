"""The engine with the real planner, source, store and CPU kernels, against bytes worked out by torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp8fs.core.layout import Plan, plan
from fp8fs.core.recipe import Recipe
from fp8fs.engine import Engine, NonFinite, scan
from fp8fs.engine.shard import shard_spec, unit_spans
from fp8fs.errors import SourceChangedError
from fp8fs.quant import make_quantizer, quantizer_factory
from fp8fs.source import Source
from fp8fs.store.store import Store
from tests import builders
from tests.builders import llama_like, wan_like, write_sharded
from tests.oracle import expected, read_file, read_folder, sibling_groups

WAIT_S = 60.0


def no_poll() -> None:
    """Never gives up."""


@contextmanager
def opened(src: Path, scheme: str = "") -> Iterator[tuple[Source, Plan]]:
    """A source and its plan."""
    with Source.open(src) as source:
        yield source, plan(source.checkpoint, Recipe(scheme=scheme), quantizer_version="1")


@contextmanager
def running(
    planned: Plan, source: Source, store: Store | None, **options: object
) -> Iterator[Engine]:
    """An engine with the CPU kernels, closed at the end."""
    options.setdefault("workers", 3)
    engine = Engine(planned, source, store, quantizer_factory("cpu"), **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def view_matches(src: Path, planned: Plan, paths: dict[int, Path]) -> None:
    """Every quantized component's sealed shards hold exactly what torch makes of the source."""
    for component, scheme in planned.schemes.items():
        original = read_folder(src / component)
        view = {}
        for shard in planned.order[component]:
            view |= read_file(paths[shard])
        chosen = [name for name, stored in view.items() if stored.dtype == "F8_E4M3"]
        assert chosen
        wanted = expected(original, chosen, scheme, sibling_groups(chosen))
        assert view == wanted


SCHEMES = ("per_tensor", "per_channel", "block", "block_free")
SHAPES: dict[str, Callable[..., object]] = {"llama": llama_like, "wan": wan_like}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_sealed_shards_equal_torch(tmp_path: Path, scheme: str, shape: str, dtype: str) -> None:
    """For each scheme, shape and dtype the objects hold torch's bytes, and the store's own digests agree."""
    src = tmp_path / "src"
    SHAPES[shape](src, hidden=144, inter=272, dtype=dtype)
    store = Store.open(tmp_path / "store")
    with opened(src, scheme) as (source, planned), running(planned, source, store) as engine:
        engine.fill()
        paths = {i: engine.ensure_sealed(i, no_poll) for i in range(len(planned.shards))}
        view_matches(src, planned, paths)
        for shard in planned.shards:
            assert store.verify_object(shard.object_id, unit_spans(shard)) == []
        assert engine.stats().units_made == engine.stats().units_total
    with opened(src, scheme) as (source, planned), running(planned, source, store) as engine:
        engine.fill()
        assert engine.stats().units_reused == engine.stats().units_total
        assert engine.stats().source_bytes_read == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inline_reads_equal_the_sealed_file(tmp_path: Path, scheme: str) -> None:
    """Grain tensor, tensor by tensor in reverse order, and a memory-only engine give the bytes that are sealed."""
    src = tmp_path / "src"
    llama_like(src)
    with opened(src, scheme) as (source, planned):
        with running(planned, source, Store.open(tmp_path / "store")) as engine:
            engine.fill()
            sealed = [engine.ensure_sealed(i, no_poll).read_bytes() for i in (0, 1)]
        for store in (Store.open(tmp_path / "other"), None):
            with running(planned, source, store, grain="tensor") as engine:
                for index, shard in enumerate(planned.shards):
                    reader = engine.open(index)
                    for unit in reversed(shard.units):
                        start, end = unit.data.start, unit.data.start + unit.data.length + 3
                        part = reader.pread(start, end - start, no_poll)
                        assert part == sealed[index][start:end]
                    assert reader.pread(0, shard.size, no_poll) == sealed[index]
                    reader.close()


WORKER = textwrap.dedent(
    """
    import json, sys, time
    from pathlib import Path
    from fp8fs.core.layout import plan
    from fp8fs.core.recipe import Recipe
    from fp8fs.engine import Engine
    from fp8fs.quant import make_quantizer
    from fp8fs.source import Source
    from fp8fs.store.store import Store

    class Slow:
        def __init__(self, inner): self.inner = inner
        def __getattr__(self, name): return getattr(self.inner, name)
        def quantize_rows(self, *args):
            time.sleep(0.02)
            return self.inner.quantize_rows(*args)

    source = Source.open(Path(sys.argv[1]))
    planned = plan(source.checkpoint, Recipe(scheme="per_channel"), quantizer_version="1")
    inner = make_quantizer("cpu")
    inner.warm()
    engine = Engine(planned, source, Store.open(Path(sys.argv[2])), lambda: Slow(inner), workers=2)
    print("ready", flush=True)
    sys.stdin.readline()
    engine.fill()
    stats = engine.stats()
    engine.close()
    print(json.dumps([stats.units_made, stats.units_reused, stats.bytes_in]), flush=True)
    """
)


def start(src: Path, store: Path) -> subprocess.Popen[str]:
    """A process that fills *store* once it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(src), str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(builders.__file__).parent.parent)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def big_linears(count: int) -> dict[str, builders.Tensor]:
    """Weights too large to share a claim."""
    return {
        f"model.layers.{i}.mlp.down_proj.weight": builders.tensor(i, "BF16", 384, 512)
        for i in range(count)
    }


def model(src: Path, tensors: dict[str, builders.Tensor], shards: int) -> None:
    llama_like(src)
    for old in src.glob("*.safetensors*"):
        old.unlink()
    write_sharded(src, tensors, shards)


def test_two_processes_make_each_unit_once(tmp_path: Path) -> None:
    """Two fills of one store at once: together they make every unit exactly once."""
    src, store = tmp_path / "src", tmp_path / "store"
    model(src, big_linears(24), 2)
    both = [start(src, store) for _ in range(2)]
    for process in both:
        go(process)
    results = [json.loads(process.communicate(timeout=WAIT_S)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(made for made, _, _ in results) == 24
    assert all(made + reused == 24 for made, reused, _ in results)
    assert min(made for made, _, _ in results) > 0


def test_a_killed_fill_is_taken_up(tmp_path: Path) -> None:
    """SIGKILL in the middle: what was journaled is reused, the rest is made, the bytes are right."""
    src, root = tmp_path / "src", tmp_path / "store"
    model(src, big_linears(24), 1)
    process = start(src, root)
    go(process)
    journal = None
    deadline = time.monotonic() + WAIT_S
    while journal is None or journal.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < deadline
        journal = next((root / "v1" / "partial").glob("*/journal"), None)
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    with (
        opened(src, "per_channel") as (source, planned),
        running(planned, source, Store.open(root)) as engine,
    ):
        path = engine.ensure_sealed(0, no_poll)
        stats = engine.stats()
        view_matches(src, planned, {0: path})
    assert stats.units_reused > 0
    assert stats.units_made > 0
    assert stats.units_made + stats.units_reused == 24


def test_a_changed_shard_is_made_again_alone(tmp_path: Path) -> None:
    """After one source shard changes, a new plan makes that shard's units only; the live one refuses by name."""
    src, store = tmp_path / "src", Store.open(tmp_path / "store")
    model(src, big_linears(8), 2)
    with opened(src) as (source, planned), running(planned, source, store) as engine:
        engine.ensure_sealed(0, no_poll)
        engine.fill()
    first, second = sorted(src.glob("*.safetensors"))
    data = bytearray(second.read_bytes())
    data[-2:] = b"\x80\x3f"
    second.write_bytes(data)
    with opened(src) as (source, planned), running(planned, source, store) as engine:
        second.write_bytes(data[:-2] + b"\x00\x3f")
        with pytest.raises(SourceChangedError, match=second.name):
            engine.ensure_sealed(1, no_poll)
        assert engine.ensure_sealed(0, no_poll)
    with opened(src) as (source, planned), running(planned, source, store) as engine:
        engine.fill()
        view_matches(src, planned, {i: engine.ensure_sealed(i, no_poll) for i in (0, 1)})
        assert engine.stats().units_made == len(planned.shards[1].units)
        assert engine.stats().units_reused == len(planned.shards[0].units)
        read = engine.stats().source_bytes_read
    assert read < second.stat().st_size + first.stat().st_size


def test_scan_names_what_the_kernels_refuse(tmp_path: Path) -> None:
    """An Inf in a weight that is to be quantized is found at its index, with the real kernels."""
    src = tmp_path / "src"
    tensors = big_linears(3)
    name = "model.layers.1.mlp.down_proj.weight"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, data[:2000] + b"\x80\xff" + data[2002:])
    model(src, tensors, 1)
    quantizer = make_quantizer("cpu")
    with opened(src) as (source, planned):
        found = scan(planned, source, quantizer, workers=2)
    assert found.non_finite == (NonFinite("", name, 1000),)
    quantizer.close()


def test_specs_say_what_the_plan_says(tmp_path: Path) -> None:
    """The store's view of a shard has the plan's key, size, preamble and one span per unit."""
    src = tmp_path / "src"
    llama_like(src)
    with opened(src) as (_, planned):
        shard = planned.shards[0]
        spec = shard_spec(shard)
        assert (spec.object_id, spec.size, spec.preamble) == (
            shard.object_id,
            shard.size,
            shard.preamble,
        )
        covered = len(shard.preamble) + sum(
            span.length + span.scale_length for span in unit_spans(shard)
        )
        assert covered == shard.size
        assert spec.unit_count == len(shard.units)
