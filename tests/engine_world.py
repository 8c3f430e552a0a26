"""A checkpoint, a store and a quantizer that exist in memory only, and the view bytes that must come of them.

The plan is written by hand, the expected bytes are computed from whole matrices with numpy, the store is a dict: nothing
here goes through the planner, the kernels or the real store. The quantizer's numbers are made up but depend on the amax,
row maximum or block maximum exactly as the real schemes do, so a wrong tile, row or group shows.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fp8fs.core.layout import Extent, Group, Piece, Plan, Unit, ViewShard
from fp8fs.engine import Engine
from fp8fs.errors import NonFiniteTensorError, SourceChangedError, StoreBusyError, StoreFullError
from fp8fs.store.store import Published, ShardSpec, UnitRecord

INFINITE = 0x7F80
GAP = 24


def no_poll() -> None:
    """Never gives up."""


@dataclass(frozen=True)
class Weight:
    """One unit of a hand-made plan. ``scheme`` "" is a kept tensor of ``cols`` bytes."""

    name: str
    rows: int
    cols: int
    scheme: str = "per_tensor"
    group: str = ""
    pieces: int = 1
    bad: int = -1


@dataclass
class World:
    """A plan, its source files, and what each view shard must be."""

    plan: Plan
    files: dict[str, bytes]
    expected: list[bytes]
    weights: list[list[Weight]]
    partners: dict[str, list[str]] = field(default_factory=dict)

    def unit_bytes(self, name: str) -> int:
        """Source bytes of a unit."""
        weight = next(w for shard in self.weights for w in shard if w.name == name)
        return weight.rows * weight.cols * (2 if weight.scheme else 1)


def make_world(shards: Sequence[Sequence[Weight]], *, seed: int = 0) -> World:
    """Plan, source and expected bytes of these view shards; view shard i is made from source file i."""
    rng = np.random.default_rng(seed)
    files: dict[str, bytes] = {}
    matrices: dict[str, np.ndarray] = {}
    laid: list[list[tuple[Weight, tuple[Piece, ...]]]] = []
    for number, weights in enumerate(shards):
        content = bytearray(rng.bytes(GAP))
        units = []
        for weight in weights:
            matrix = _values(rng, weight)
            matrices[weight.name] = matrix
            units.append((weight, _put(content, number, weight, matrix)))
        files[f"s{number}.safetensors"] = bytes(content)
        laid.append(units)
    group_names = sorted({w.group for shard in shards for w in shard if w.group})
    members: dict[str, list[tuple[int, int]]] = {name: [] for name in group_names}
    view: list[ViewShard] = []
    for number, units in enumerate(laid):
        preamble = bytes([number + 1]) * 64
        made, end = [], len(preamble)
        for index, (weight, pieces) in enumerate(units):
            if weight.group:
                members[weight.group].append((number, index))
            nbytes = weight.rows * weight.cols
            data = Extent(end, nbytes)
            end += nbytes
            scale = None
            if weight.scheme:
                scale = Extent(end, len(_scales(weight, matrices[weight.name], 1.0)))
                end += scale.length
            made.append(
                Unit(
                    weight.name,
                    weight.scheme,
                    "BF16" if weight.scheme else "U8",
                    weight.rows,
                    weight.cols,
                    pieces,
                    data,
                    scale,
                    group_names.index(weight.group) if weight.group else -1,
                )
            )
        view.append(
            ViewShard(
                f"v{number}.safetensors",
                "part",
                preamble,
                end,
                tuple(made),
                (number,),
                f"{number:032x}",
                0o444,
                0,
                0,
                1,
            )
        )
    groups = tuple(
        Group(name, f"{i:032x}", tuple(members[name]), len({s for s, _ in members[name]}) > 1)
        for i, name in enumerate(group_names)
    )
    plan = Plan(
        plan_id="0" * 32,
        entries={},
        shards=tuple(view),
        groups=groups,
        source_shards=tuple(files),
        source_identities=tuple(f"{i:064x}" for i in range(len(files))),
        schemes={"part": "per_tensor"},
        order={"part": tuple(range(len(view)))},
        rows=(),
        hidden=(),
        warnings=(),
    )
    partners = {
        w.name: [o.name for s in shards for o in s if o.group == w.group] if w.group else [w.name]
        for shard in shards
        for w in shard
    }
    expected = [
        shard.preamble + b"".join(_view_bytes(w, matrices, partners[w.name]) for w in weights)
        for shard, weights in zip(view, shards, strict=True)
    ]
    return World(plan, files, expected, [list(s) for s in shards], partners)


def _values(rng: np.random.Generator, weight: Weight) -> np.ndarray:
    if not weight.scheme:
        return rng.integers(0, 256, (weight.rows, weight.cols), np.uint8)
    codes = rng.integers(0, INFINITE, (weight.rows, weight.cols), np.uint16)
    codes |= rng.integers(0, 2, codes.shape, np.uint16) << 15
    if weight.bad >= 0:
        codes.reshape(-1)[weight.bad] = INFINITE
    return codes


def _put(content: bytearray, shard: int, weight: Weight, matrix: np.ndarray) -> tuple[Piece, ...]:
    """Write a matrix into a source file, its pieces in reverse order with gaps between."""
    parts = np.array_split(matrix, weight.pieces)
    pieces = []
    for number, part in reversed(list(enumerate(parts))):
        name = weight.name if weight.pieces == 1 else f"{weight.name}.{number}"
        pieces.append(Piece(shard, len(content), part.nbytes, name))
        content += part.tobytes()
        if weight.pieces > 1:
            content += b"\xff" * GAP
    return tuple(reversed(pieces))


def _magnitude(matrix: np.ndarray) -> np.ndarray:
    return matrix & 0x7FFF


def _scales(weight: Weight, matrix: np.ndarray, amax: float) -> bytes:
    """The scales of a whole matrix, as the view holds them."""
    if weight.scheme == "per_tensor":
        return np.float32(amax + 1).tobytes()
    magnitude = _magnitude(matrix)
    if weight.scheme == "per_channel":
        return magnitude.max(axis=1).astype("<f4").tobytes()
    high, wide = -(-weight.rows // 128), -(-weight.cols // 128)
    scales = np.zeros((high, wide), "<f4")
    for row in range(high):
        for col in range(wide):
            block = magnitude[row * 128 : (row + 1) * 128, col * 128 : (col + 1) * 128]
            scales[row, col] = block.max()
    return scales.tobytes()


def _view_bytes(weight: Weight, matrices: dict[str, np.ndarray], partners: list[str]) -> bytes:
    """Data and scales of a unit, from whole matrices."""
    matrix = matrices[weight.name]
    if not weight.scheme:
        return matrix.tobytes()
    amax = float(max(_magnitude(matrices[name]).max() for name in partners))
    scales = _scales(weight, matrix, amax)
    values = np.frombuffer(scales, "<f4")
    if weight.scheme == "per_tensor":
        keys = np.full(matrix.shape, int(values[0]))
    elif weight.scheme == "per_channel":
        keys = np.repeat(values.astype(int)[:, None], weight.cols, 1)
    else:
        grid = values.reshape(-(-weight.rows // 128), -1).astype(int)
        keys = np.repeat(np.repeat(grid, 128, 0), 128, 1)[: weight.rows, : weight.cols]
    return _mixed(matrix, keys).tobytes() + scales


def _mixed(codes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(3 x code + 5 x key) modulo 256."""
    return codes.astype(np.uint8) * np.uint8(3) + keys.astype(np.uint8) * np.uint8(5)


class FakeQuantizer:
    """Made-up numbers, whole protocol. ``before`` runs at the start of each call, with the GIL held or not as it likes."""

    name = "fake"

    def __init__(self, before: Callable[[str], None] = lambda _call: None) -> None:
        self._before = before
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.closed = 0
        self._lock = threading.Lock()

    def _codes(self, call: str, src: memoryview, dtype: str) -> np.ndarray:
        if dtype != "BF16":
            raise ValueError(dtype)
        codes = np.frombuffer(src, "<u2")
        with self._lock:
            self.calls[call] += 1
            self.elements[call] += codes.size
        self._before(call)
        bad = np.flatnonzero(_magnitude(codes) >= INFINITE)
        if bad.size:
            raise NonFiniteTensorError("bad", index=int(bad[0]))
        return codes

    def tensor_scale(self, amax: float) -> float:
        return amax + 1

    def amax(self, src: memoryview, dtype: str) -> float:
        codes = self._codes("amax", src, dtype)
        return float(_magnitude(codes).max()) if codes.size else 0.0

    def cast_tensor(self, src: memoryview, dtype: str, scale: float, dst: memoryview) -> None:
        self._store(self._codes("cast", src, dtype), np.array(int(scale)), dst)

    def amax_rows(self, src: memoryview, dtype: str, rows: int, out: memoryview) -> None:
        codes = self._codes("amax_rows", src, dtype).reshape(rows, -1)
        maxima = np.frombuffer(out, "<f4")
        np.maximum(maxima, _magnitude(codes).max(axis=1), out=maxima)

    def cast_rows(
        self,
        src: memoryview,
        dtype: str,
        rows: int,
        amax: memoryview,
        dst: memoryview,
        scale: memoryview,
    ) -> None:
        codes = self._codes("cast", src, dtype).reshape(rows, -1)
        maxima = np.frombuffer(amax, "<f4")
        np.frombuffer(scale, "<f4")[:] = maxima
        self._store(codes, maxima.astype(int)[:, None], dst)

    def quantize_rows(
        self, src: memoryview, dtype: str, rows: int, dst: memoryview, scale: memoryview
    ) -> None:
        codes = self._codes("cast", src, dtype).reshape(rows, -1)
        maxima = _magnitude(codes).max(axis=1)
        np.frombuffer(scale, "<f4")[:] = maxima
        self._store(codes, maxima.astype(int)[:, None], dst)

    def quantize_blocks(
        self,
        src: memoryview,
        dtype: str,
        rows: int,
        cols: int,
        dst: memoryview,
        scale: memoryview,
        *,
        pow2: bool,
    ) -> None:
        codes = self._codes("cast", src, dtype).reshape(rows, cols)
        grid = np.frombuffer(scale, "<f4").reshape(-(-rows // 128), -(-cols // 128))
        for row in range(grid.shape[0]):
            for col in range(grid.shape[1]):
                cut = np.s_[row * 128 : (row + 1) * 128, col * 128 : (col + 1) * 128]
                grid[row, col] = _magnitude(codes[cut]).max()
        keys = np.repeat(np.repeat(grid.astype(int), 128, 0), 128, 1)[:rows, :cols]
        self._store(codes, keys, dst)

    @staticmethod
    def _store(codes: np.ndarray, keys: np.ndarray, dst: memoryview) -> None:
        np.frombuffer(dst, np.uint8)[:] = _mixed(codes, keys).reshape(-1)

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


class FakeSource:
    """Source files in memory. ``changed``: paths that ``check`` refuses; ``on_read`` runs before each read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.changed: set[str] = set()
        self.on_read: Callable[[str], None] = lambda _path: None
        self.read_bytes: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def pread_into(self, shard_path: str, buffer: memoryview, file_offset: int) -> None:
        self.on_read(shard_path)
        data = self.files[shard_path][file_offset : file_offset + len(buffer)]
        if len(data) != len(buffer):
            raise SourceChangedError(f"{shard_path}: ends early")
        buffer[:] = data
        with self._lock:
            self.read_bytes[shard_path] += len(data)

    def check(self, path: str) -> None:
        if path in self.changed:
            raise SourceChangedError(f"{path}: size was 1, is 2")

    def drop(self, shard_path: str, file_offset: int, length: int) -> None:
        with self._lock:
            self.dropped[shard_path] += length


class _Shared:
    """What all openers of one partial shard share."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self.path = path
        self.spec = spec
        self.records: dict[int, UnitRecord] = {}
        self.locks = [threading.Lock() for _ in range(max(1, spec.unit_count))]
        self.commits: Counter[int] = Counter()
        self.published = False


class FakePartial:
    def __init__(self, store: FakeStore, shared: _Shared) -> None:
        self._store = store
        self._shared = shared
        self.records = dict(shared.records)
        self.fd = os.open(shared.path, os.O_RDWR)

    @contextmanager
    def claim(
        self, claim: int, *, poll: Callable[[], None], timeout_s: float | None = None
    ) -> Iterator[None]:
        self._store.touch("claim")
        lock = self._shared.locks[claim]
        if not lock.acquire(blocking=timeout_s is None):
            raise StoreBusyError(f"claim {claim} is held")
        try:
            if self._shared.published:
                raise Published
            self.records = dict(self._shared.records)
            yield
        finally:
            lock.release()

    def pwrite(self, data: memoryview, file_offset: int) -> None:
        self._store.touch("pwrite")
        os.pwrite(self.fd, data, file_offset)

    def expect(self, file_offset: int, length: int) -> None:
        """A hint that a fake need not take."""

    def commit(self, *records: UnitRecord) -> None:
        self._store.touch("commit")
        with self._store.lock:
            for record in records:
                self._shared.commits[record.unit] += 1
                self._shared.records[record.unit] = record
            self.records = dict(self._shared.records)

    def seal(
        self, facts: object, *, poll: Callable[[], None], timeout_s: float | None = None
    ) -> Path:
        self._store.touch("seal")
        with self._store.sealing:
            if self._shared.published:
                return self._store.objects[self._shared.spec.object_id]
            return self._publish()

    def _publish(self) -> Path:
        missing = [u for u in range(self._shared.spec.unit_count) if u not in self._shared.records]
        if missing:
            raise AssertionError(f"sealed with {missing} missing")
        return self._store.publish(self._shared)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class FakeSlot:
    value: float | None = None

    def put(self, value: float) -> None:
        self.value = value


class FakeStore:
    """Objects and partial shards as plain files below *root*. ``failing``: operations that answer StoreFullError;
    ``free``: what it says is free."""

    writable = True
    why_not = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = threading.Lock()
        self.sealing = threading.Lock()
        self.objects: dict[str, Path] = {}
        self.shared: dict[str, _Shared] = {}
        self.slots: dict[str, tuple[threading.Lock, FakeSlot]] = {}
        self.failing: set[str] = set()
        self.free: int | None = None
        self.on_touch: Callable[[str], None] = lambda _operation: None

    def touch(self, operation: str) -> None:
        self.on_touch(operation)
        if operation in self.failing:
            raise StoreFullError(f"no space left for {operation}")

    def free_bytes(self) -> int | None:
        return self.free

    def find_object(self, spec: ShardSpec) -> Path | None:
        return self.objects.get(spec.object_id)

    def share(self, spec: ShardSpec) -> _Shared:
        with self.lock:
            shared = self.shared.get(spec.object_id)
            if shared is None:
                path = self.root / f"{spec.object_id}.partial"
                path.write_bytes(spec.preamble + bytes(spec.size - len(spec.preamble)))
                shared = self.shared[spec.object_id] = _Shared(path, spec)
            return shared

    def partial(
        self,
        spec: ShardSpec,
        spans: object,
        *,
        poll: Callable[[], None],
        timeout_s: float | None = None,
    ) -> FakePartial:
        self.touch("partial")
        shared = self.share(spec)
        if shared.published:
            raise Published
        return FakePartial(self, shared)

    @contextmanager
    def group_amax(self, group_id: str, *, poll: Callable[[], None]) -> Iterator[FakeSlot]:
        self.touch("group_amax")
        with self.lock:
            lock, slot = self.slots.setdefault(group_id, (threading.Lock(), FakeSlot()))
        with lock:
            yield slot

    def publish(self, shared: _Shared) -> Path:
        path = self.root / f"{shared.spec.object_id}.safetensors"
        os.rename(shared.path, path)
        with self.lock:
            shared.published = True
            self.objects[shared.spec.object_id] = path
        return path

    def commits(self) -> Counter[tuple[str, int]]:
        """How often each unit of each object was journaled."""
        return Counter(
            {(key, unit): n for key, s in self.shared.items() for unit, n in s.commits.items()}
        )


def make_engine(
    world: World, store: FakeStore | None, quantizer: FakeQuantizer | None = None, **options: object
) -> Engine:
    """An engine on fakes; ``source`` and every Engine option can be given."""
    source = options.pop("source", None) or FakeSource(world.files)
    made = quantizer or FakeQuantizer()
    return Engine(world.plan, source, store, lambda: made, **options)  # type: ignore[arg-type]
