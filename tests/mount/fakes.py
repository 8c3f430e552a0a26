"""A checkpoint, an engine and a source out of plain dictionaries, served by the real view, adapter and server.

The engine makes nothing until it is told to: shard *n* is held back while ``SRC/gates/n`` is missing, fails as a full
store would while ``SRC/full/n`` exists, and fails for good while ``SRC/broken/n`` exists. Bytes of shard *n* are
``pattern(n, size)``; files that pass through SRC are real files there.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

from fp8fs.core.layout import Plan, ViewEntry
from fp8fs.errors import NonFiniteTensorError, StoreFullError
from fp8fs.fuse.server import Served
from fp8fs.fuse.spec import Mounted, MountSpec
from fp8fs.view import Poll, View

MTIME_NS = 1_600_000_000_123_456_789


def pattern(shard: int, size: int) -> bytes:
    """The oracle: bytes that differ from page to page and from shard to shard."""
    return random.Random(shard).randbytes(size)


class FakeSource:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.bind_root = root
        self.bind_prefix = ""

    def open_file(self, path: str) -> int:
        return os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC)


class FakeReader:
    def __init__(self, engine: FakeEngine, shard: int) -> None:
        self._engine, self._shard = engine, shard

    def pread(self, offset: int, length: int, poll: Poll) -> bytes:
        self._engine.wait(self._shard, poll)
        return self._engine.content[self._shard][offset : offset + length]

    def close(self) -> None:
        pass


class FakeEngine:
    """``content``: bytes by shard. ``tree``: where sealed shards appear, under their names."""

    def __init__(self, control: Path, content: list[bytes], names: list[str], tree: Path) -> None:
        self.control, self.content, self.names, self.tree = control, content, names, tree
        self._lock = threading.Lock()
        self.closed = False

    def _says(self, what: str, shard: int) -> bool:
        return (self.control / what / str(shard)).exists()

    def wait(self, shard: int, poll: Poll) -> None:
        while not self._says("gates", shard):
            poll()
            if self.closed:
                raise StoreFullError("closed")
            time.sleep(0.02)
        if self._says("broken", shard):
            raise NonFiniteTensorError(f"{self.names[shard]}: not finite", index=0)

    def sealed(self, shard: int) -> Path | None:
        path = self.tree / self.names[shard]
        return path if path.exists() else None

    def ensure_sealed(self, shard: int, poll: Poll) -> Path:
        path = self.tree / self.names[shard]
        if path.exists():
            return path
        self.wait(shard, poll)
        if self._says("full", shard):
            raise StoreFullError("no room")
        with self._lock:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                staged = path.with_suffix(".staged")
                staged.write_bytes(self.content[shard])
                os.chmod(staged, 0o444)
                os.utime(staged, ns=(MTIME_NS, MTIME_NS))
                staged.rename(path)
        return path

    def open(self, shard: int) -> FakeReader:
        return FakeReader(self, shard)

    def close(self, timeout_s: float) -> None:
        self.closed = True


def make_plan(root: Path, shards: dict[str, int]) -> Plan:
    """The real files of *root* (but for the folders that steer the fake), and *shards*: path -> size."""
    own = {"uid": os.geteuid(), "gid": os.getegid(), "mtime_ns": MTIME_NS}
    entries: dict[str, ViewEntry] = {}
    for number, (path, size) in enumerate(shards.items()):
        entries[path] = ViewEntry(path, "shard", size, 0o444, shard=number, **own)
    for folder, folders, files in os.walk(root):
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        if relative == ".":
            folders[:] = [f for f in folders if f not in ("gates", "full", "broken")]
        for name in folders:
            entries[prefix + name] = ViewEntry(prefix + name, "dir", 0, 0o755, **own)
        for name in files:
            stat = os.stat(os.path.join(folder, name))
            if prefix + name in ("fake.json",):
                continue
            entries[prefix + name] = ViewEntry(
                prefix + name,
                "source",
                stat.st_size,
                0o644,
                stat.st_uid,
                stat.st_gid,
                stat.st_mtime_ns,
            )
    text = b'{"a": 1}'
    entries["config.json"] = ViewEntry("config.json", "text", len(text), 0o644, content=text, **own)
    for path in list(entries):
        for depth in range(1, path.count("/") + 1):
            parent = "/".join(path.split("/")[:depth])
            entries.setdefault(parent, ViewEntry(parent, "dir", 0, 0o755, **own))
    ordered = dict(sorted(entries.items()))
    return Plan("fake", ordered, (), (), (), (), {}, {}, (), (), ())


def factory(spec: MountSpec, *, bound: bool) -> Served:
    """``fake.json`` in SRC: {"shards": {path: size}}."""
    root = Path(spec.src)
    shards: dict[str, int] = json.loads((root / "fake.json").read_text())["shards"]
    tree = Path(spec.store) / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    content = [pattern(number, size) for number, size in enumerate(shards.values())]
    engine = FakeEngine(root, content, list(shards), tree)
    facts = Mounted(dst=spec.dst, src=spec.src, live=False, store=spec.store, tree=str(tree),
                    serve=spec.serve, grain=spec.grain, log_path=spec.log_path,
                    created_dst=spec.created_dst, warnings=spec.warnings)  # fmt: skip
    started = time.monotonic()

    def status() -> bytes:
        padding = "x" * random.randrange(5000)  # a size that nobody may rely on
        body = {"pid": os.getpid(), "age": time.monotonic() - started, "padding": padding}
        return json.dumps({**body, "handles": view.open_handles()}).encode()

    view = View(
        make_plan(root, shards),
        engine,
        FakeSource(root),
        serve=spec.serve,
        grain=spec.grain,
        bound=bound,
        tree=str(tree),
        status=status,
        documents={"manifest.json": lambda: b"{}"},
    )
    return Served(view, facts, str(tree), str(root), engine.close)


def never(spec: MountSpec, *, bound: bool) -> Served:
    """A server that is never ready; ``SRC/begun`` says that it has come here."""
    (Path(spec.src) / "begun").touch()
    time.sleep(60)
    return factory(spec, bound=bound)
