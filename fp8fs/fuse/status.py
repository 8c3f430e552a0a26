"""``status.json``: what a mount is doing, made anew at each open."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fp8fs.engine.stats import EngineStats
from fp8fs.fuse.spec import Mounted

__all__ = ["SCHEMA", "StatusBoard"]

SCHEMA = 1
"""Raised when a field changes its meaning or goes; new fields may come at any time."""

_CHANGES_EVERY_S = 2.0


class StatusBoard:
    """Puts the mount's facts and the engine's numbers together. Thread-safe; the lock covers the cached look at SRC only.

    SRC's files are looked at no more often than every two seconds, however many readers ask.
    """

    def __init__(
        self,
        facts: Mounted,
        schemes: Mapping[str, str],
        stats: Callable[[], EngineStats],
        changes: Callable[[], list[str]],
    ) -> None:
        self._facts = facts
        self._schemes = dict(schemes)
        self._stats = stats
        self._changes = changes
        self._started_ns = time.time_ns()
        self._lock = threading.Lock()
        self._seen: list[str] = []
        self._seen_at = -_CHANGES_EVERY_S

    def encode(self) -> bytes:
        """One JSON document, ending in a newline."""
        return json.dumps(self.document(), indent=1).encode("ascii") + b"\n"

    def document(self) -> dict[str, Any]:
        """The fields of docs/CLI.md, "status"."""
        facts, stats = self._facts, self._stats()
        done = stats.bytes_out + stats.bytes_reused + stats.bytes_failed
        share = done / stats.bytes_total if stats.bytes_total else 1.0
        left = (1.0 - share) * facts.bytes_source
        keeps = not stats.degraded  # else what is missing may never be finished
        return {
            "schema": SCHEMA,
            "dst": facts.dst,
            "src": facts.src,
            "store": facts.store,
            "tree": facts.tree,
            "plan_id": facts.plan_id,
            "pid": os.getpid(),
            "started_ns": self._started_ns,
            "log": facts.log_path,
            "serve": facts.serve,
            "grain": facts.grain,
            "device": facts.device,
            "schemes": self._schemes,
            "shards": {"total": stats.shards_total, "sealed": stats.shards_sealed},
            "units": {
                "total": stats.units_total,
                "made": stats.units_made,
                "reused": stats.units_reused,
                "in_flight": stats.in_flight,
            },
            "bytes": {
                "source": facts.bytes_source,
                "view": facts.bytes_view,
                "read": stats.source_bytes_read,
                "written": stats.bytes_out,
                "reused": stats.bytes_reused,
            },
            "waiting": stats.waiting,
            "odd_scales": stats.odd_scales,
            "gb_per_s": round(stats.rate_bytes_s / 1e9, 3),
            "eta_s": round(left / stats.rate_bytes_s, 1)
            if keeps and stats.rate_bytes_s > 0
            else None,
            "errors": [msgspec.to_builtins(note) for note in stats.last_errors],
            "degraded": stats.degraded,
            "source_changes": self._source_changes(),
            "warnings": list(facts.warnings),
        }

    def _source_changes(self) -> list[str]:
        with self._lock:
            now = time.monotonic()
            if now - self._seen_at >= _CHANGES_EVERY_S:
                self._seen, self._seen_at = self._changes(), now
            return list(self._seen)
