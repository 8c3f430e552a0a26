"""What launcher, server and command line tell one another about a mount, as plain data."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from fp8fs.core.recipe import Recipe
from fp8fs.errors import Fp8fsError, MountError

__all__ = ["MountSpec", "Mounted", "UnmountReport", "decode", "encode", "error_from"]


class MountSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a server needs to know. Paths are absolute (``mount`` makes them so). ``workers`` 0: one per core.
    ``store`` "": no store, everything is made in memory as it is read. ``factory``: "module:function" that makes what is
    served from a spec (server.Factory); tests put a fake engine there. ``foreground``: the server ends with its
    launcher. ``created_dst``: ``mount`` made the directory DST; ``warnings``: what it has changed in the spec.
    ``allow_unquantized``: mount SRC even if none of its weights becomes FP8."""

    src: str
    dst: str
    store: str
    recipe: Recipe = Recipe()
    serve: str = "handoff"
    grain: str = "shard"
    device: str = "auto"
    workers: int = 0
    allow_other: bool = False
    allow_unquantized: bool = False
    log_path: str = ""
    factory: str = "fp8fs.fuse.daemon:assembled"
    foreground: bool = False
    created_dst: bool = False
    warnings: tuple[str, ...] = ()


class Mounted(msgspec.Struct, frozen=True, kw_only=True):
    """One fp8fs mount: what ``mount`` returns, and what ``list_mounts`` knows (from mountinfo and the mount's state file).

    ``live``: its server runs. Without a readable state file, ``pid`` is 0 and the texts are "".
    ``pid_start``: the server's start time in clock ticks since boot: a number alone may be another process by now.
    ``tree``: the store's tree for this plan; ``bind_src``: the directory bound at ``.fp8fs/src``, "" without binds.
    ``bytes_source`` / ``bytes_view``: all shards before and after; ``shards`` / ``sealed``: view shards, and those
    that were sealed when the mount became ready.
    """

    dst: str
    src: str
    live: bool
    pid: int = 0
    pid_start: int = 0
    uid: int = 0
    store: str = ""
    tree: str = ""
    bind_src: str = ""
    plan_id: str = ""
    serve: str = ""
    grain: str = ""
    log_path: str = ""
    device: str = ""
    bytes_source: int = 0
    bytes_view: int = 0
    shards: int = 0
    sealed: int = 0
    created_dst: bool = False
    warnings: tuple[str, ...] = ()


class UnmountReport(msgspec.Struct, frozen=True, kw_only=True):
    """``stale``: the server was dead already. ``killed``: it had to be killed. ``held_by``: one pid for each other mount
    namespace that still shows the mount (there it is dead now, but for what is sealed and open). ``users``: pids that used it (lazy only)."""

    dst: str
    stale: bool
    killed: bool = False
    held_by: tuple[int, ...] = ()
    users: tuple[int, ...] = ()


def encode(value: msgspec.Struct) -> bytes:
    """One line of JSON. Paths with undecodable bytes survive, which msgspec's own encoder does not allow."""
    return json.dumps(msgspec.to_builtins(value)).encode("ascii")


def decode(line: bytes, kind: type[Any]) -> Any:
    """The inverse of ``encode``. Raises: ValueError (msgspec.ValidationError is one) for anything else."""
    return msgspec.convert(json.loads(line), kind)


def error_from(data: dict[str, Any]) -> Fp8fsError:
    """The exception whose ``as_dict`` was sent by another process: same class, hint and facts."""
    kinds: dict[str, type[Fp8fsError]] = {}
    todo: list[type[Fp8fsError]] = [Fp8fsError]
    while todo:
        kind = todo.pop()
        kinds[kind.code] = kind
        todo += kind.__subclasses__()
    facts = {key: value for key, value in data["facts"].items() if key not in ("what", "hint")}
    return kinds.get(data["code"], MountError)(data["what"], hint=data["hint"], **facts)
