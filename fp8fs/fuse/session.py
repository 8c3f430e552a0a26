"""Mount, find and unmount: the launcher's side. Imports neither libfuse nor kernels, so that it starts fast.

A mount is two processes. The *launcher* (this module, in the CLI's process) checks DST, starts the *server*
(``fp8fs.fuse.daemon``) by re-exec, waits for its one line on the readiness pipe, and goes. The server runs FUSE in
its foreground. Neither ever touches DST from the server's own process: that could wait on itself.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fp8fs.core.recipe import Recipe

__all__ = ["MountSpec", "Mounted", "UnmountReport", "find_mount", "list_mounts", "mount", "mount_foreground", "read_status", "unmount"]


class MountSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a server needs to know. Paths are absolute (``mount`` makes them so). ``workers`` 0: one per core.
    ``factory``: "module:function" that makes the view from a spec; tests put a fake engine there."""

    src: str
    dst: str
    store: str
    recipe: Recipe = Recipe()
    serve: str = "handoff"
    grain: str = "shard"
    device: str = "auto"
    workers: int = 0
    allow_other: bool = False
    log_path: str = ""
    factory: str = "fp8fs.fuse.daemon:assemble"


class Mounted(msgspec.Struct, frozen=True, kw_only=True):
    """One fp8fs mount. What ``mount`` returns, and what ``list_mounts`` knows (from mountinfo and the mount's state file).

    ``live``: its server runs. Without a readable state file, ``pid`` is 0 and the texts are "".
    ``bytes_source`` / ``bytes_view``: all shards before and after; ``shards`` / ``sealed``: view shards, and those that were
    sealed when the mount became ready.
    """

    dst: str
    src: str
    live: bool
    pid: int = 0
    pid_start: int = 0
    uid: int = 0
    store: str = ""
    tree: str = ""
    plan_id: str = ""
    serve: str = ""
    grain: str = ""
    log_path: str = ""
    device: str = ""
    bytes_source: int = 0
    bytes_view: int = 0
    shards: int = 0
    sealed: int = 0
    warnings: tuple[str, ...] = ()


class UnmountReport(msgspec.Struct, frozen=True, kw_only=True):
    """``stale``: the server was dead already. ``killed``: it had to be killed. ``held_by``: pids whose mount namespace still
    shows the mount (it lives on there until they end). ``users``: pids that use it (lazy unmount only)."""

    dst: str
    stale: bool
    killed: bool = False
    held_by: tuple[int, ...] = ()
    users: tuple[int, ...] = ()


def mount(spec: MountSpec, *, timeout_s: float = 3600.0) -> Mounted:
    """DST answers, binds are in place, the server runs in the background with its log in ``log_path``.

    Raises: MountPointError, UsageError, FuseMissingError; and whatever Fp8fsError the server meets before it is ready
    (same class, exit code, hint and facts as in the server). Nothing stays mounted then.
    """
    raise NotImplementedError


def mount_foreground(spec: MountSpec, *, on_ready: Callable[[Mounted], None], on_tick: Callable[[Mounted], None] | None = None) -> int:
    """Like ``mount``, then stays until the mount ends: forwards SIGTERM/SIGINT/SIGHUP, copies the log to stderr, calls
    ``on_tick`` about four times a second (progress: ``read_status``). Returns the server's exit code."""
    raise NotImplementedError


def unmount(dst: str, *, lazy: bool = False, timeout_s: float = 5.0) -> UnmountReport:
    """Nothing is mounted at *dst* any more, its server is gone, and the directory too if ``mount`` made it.

    Raises: NotMountedError; MountPointError if it is in use (names the processes) and not *lazy*, or owned by someone else.
    """
    raise NotImplementedError


def find_mount(dst: str) -> Mounted:
    """The fp8fs mount at *dst*. Raises: NotMountedError. Never touches DST itself."""
    raise NotImplementedError


def list_mounts() -> list[Mounted]:
    """Every fp8fs mount in this mount namespace, by mount point."""
    raise NotImplementedError


def read_status(dst: str) -> dict[str, object]:
    """``DST/.fp8fs/status.json`` of a live mount, parsed. Fields: docs/CLI.md (schema, src, dst, store, tree, plan_id, pid,
    started_ns, log, serve, grain, device, schemes, shards{total,sealed}, units{total,made,reused}, bytes{source,view,read,written},
    gb_per_s, eta_s, errors[], degraded, source_changes[], warnings[])."""
    raise NotImplementedError
