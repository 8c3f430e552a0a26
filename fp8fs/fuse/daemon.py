"""``python -m fp8fs.fuse.daemon DST FD LIFELINE``: the server of one mount, started by ``fp8fs.fuse.session``.

The spec comes as one JSON document on standard input; descriptor FD takes one line when the mount is ready,
``{"ok": Mounted}``, or why it never will be, ``{"error": {...}}``. Descriptor LIFELINE (-1: none) ends the server when
it becomes readable. DST is on the command line for people who look at ``ps``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import importlib
import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from fp8fs.engine.stats import EngineStats
from fp8fs.errors import Fp8fsError
from fp8fs.fuse.server import Factory, Served, serve
from fp8fs.fuse.spec import Mounted, MountSpec, decode
from fp8fs.fuse.status import StatusBoard

__all__ = ["assembled", "main"]

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 15, 38
_CRASH_EXIT = 70


def assembled(spec: MountSpec, *, bound: bool) -> Served:
    """The real thing: source, store, plan, engine and view, as ``fp8fs.assembly`` puts them together."""
    from fp8fs.assembly import assemble

    made = assemble(
        Path(spec.src),
        spec.recipe,
        Path(spec.store) if spec.store else None,
        device=spec.device,
        workers=spec.workers,
        grain=spec.grain,
        allow_unquantized=spec.allow_unquantized,
    )
    plan, source = made.survey.plan, made.survey.source
    # Without a tree there is nothing that a link could lead to.
    serve_as = spec.serve if made.tree is not None else "inline"
    handoff = serve_as == "handoff"
    tree = str(made.tree.path) if made.tree is not None else ""
    stats = made.engine.stats()
    facts = Mounted(
        dst=spec.dst,
        src=spec.src,
        live=False,
        store=spec.store,
        tree=tree,
        plan_id=plan.plan_id,
        serve=serve_as,
        grain=spec.grain,
        log_path=spec.log_path,
        device=spec.device,
        bytes_source=made.survey.source_bytes,
        bytes_view=made.survey.view_bytes,
        shards=stats.shards_total,
        sealed=stats.shards_sealed,
        created_dst=spec.created_dst,
        warnings=(*spec.warnings, *plan.warnings, *made.warnings),
    )

    def stats_now() -> EngineStats:
        made.engine.try_store_again()
        return made.engine.stats()

    board = StatusBoard(facts, dict(plan.schemes), stats_now, source.changes)
    view = made.view(serve=serve_as, grain=spec.grain, bound=bound, status=board.encode)
    binds = (tree, str(source.bind_root)) if handoff else ("", "")
    return Served(view, facts, *binds, made.close)


def main(arguments: list[str]) -> int:
    """Serve until the mount ends. Every failure before it is ready goes through the pipe, with its exit code."""
    started = time.monotonic()
    fd, lifeline = int(arguments[1]), int(arguments[2])
    for inherited in (fd, lifeline):
        if inherited >= 0:
            fcntl.fcntl(inherited, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    spec: MountSpec = decode(sys.stdin.buffer.read(), MountSpec)
    _settle(spec)
    bound = os.geteuid() == 0 and spec.serve == "handoff"

    def ready(mounted: Mounted) -> None:
        log.info("ready after %.2f s", time.monotonic() - started)
        _answer(fd, {"ok": msgspec.to_builtins(mounted)})

    served: Served | None = None
    try:
        factory = _load(spec.factory)
        served = factory(spec, bound=bound)
        return serve(served, spec, bound=bound, ready=ready, lifeline=lifeline)
    except Fp8fsError as err:
        log.log(err.level, "%s", err)
        _answer(fd, {"error": err.as_dict()})
        return err.exit
    except Exception as err:
        log.exception("bug")
        what = f"the server failed: {type(err).__name__}: {err}"
        _answer(fd, {"error": {"code": "error", "what": what, "hint": "", "facts": {}}})
        return _CRASH_EXIT
    finally:
        if served is not None:
            served.close(2.0)


def _load(name: str) -> Factory:
    module, _, function = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory


def _answer(fd: int, document: dict[str, Any]) -> None:
    """One line, once; a launcher that is gone does not matter."""
    try:
        os.write(fd, json.dumps(document).encode("ascii") + b"\n")
        os.close(fd)
    except OSError as err:
        log.debug("nobody reads the readiness pipe: %s", err)


def _settle(spec: MountSpec) -> None:
    """Logging, limits, name: what a server needs before any thread exists."""
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir("/")  # libfuse does it anyway; every path is absolute
    # numpy, if anything needs it, comes with a BLAS that starts a thread per core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.umask(0o077)  # what is made without a mode of its own (a kernel cache, a core) is ours alone
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, b"fp8fs", 0, 0, 0)
    if os.geteuid() == 0:  # anybody else needs the set-uid fusermount3, at the end too
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if spec.foreground:
        launcher = os.getppid()
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != launcher:  # it ended just before
            sys.exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
