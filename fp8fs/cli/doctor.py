"""``fp8fs doctor``: what this machine has and lacks for mounting, or which engine will read a view and how."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from fp8fs.cli.options import Json, Quiet, Store, place, store_root

__all__ = ["Finding", "doctor", "examine"]

_LOW_SPACE_BYTES = 10 * 10**9
_OLD_KERNEL = (4, 18)


class Finding(NamedTuple):
    """One thing that was looked at. ``level``: "ok", "note" (works, but) or "bad" (mounting fails)."""

    what: str
    level: str
    found: str
    remedy: str = ""


def doctor(
    engine: Annotated[
        Path | None,
        typer.Option(
            metavar="VIEW",
            parser=place,
            help="Say instead which installed engine reads this mount, tree or copy, and whether in FP8.",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", parser=place, help="With --engine: the Python that the engine runs in."
        ),
    ] = None,
    store: Store = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look at FUSE, kernel, rights, space and namespaces; exit 1 if mounting, or the engine, cannot work."""
    from fp8fs.cli.output import Output
    from fp8fs.errors import UsageError

    output = Output(as_json=as_json, quiet=quiet)
    if engine is not None:
        from fp8fs.cli.engine_check import check_engine

        check_engine(engine.expanduser(), python, output)
        return
    if python is not None:
        raise UsageError("--python goes with --engine", hint="fp8fs doctor --engine VIEW")
    findings = list(examine(store_root(store)))
    if as_json:
        output.document({"findings": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            output.line(f"{finding.level:4}  {finding.what}: {finding.found}")
            if finding.remedy:
                output.line(f"      remedy: {finding.remedy}")
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


def examine(root: Path) -> Iterator[Finding]:
    """Every check, in the order in which a mount would meet them."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _kernel,
        _fuse,
        _rights,
        _namespaces,
        lambda: _store(root),
        _gpu,
        _stale_mounts,
    )
    for check in checks:
        yield check()


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _kernel() -> Finding:
    release = platform.release()
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    if tuple(numbers) < _OLD_KERNEL:
        return Finding("kernel", "note", release, "Linux 4.18 or newer mounts in user namespaces")
    return Finding("kernel", "ok", release)


def _fuse() -> Finding:
    from fp8fs.errors import Fp8fsError
    from fp8fs.fuse.libfuse import check_fuse, find_libfuse

    try:
        check_fuse(allow_other=False)
        return Finding("fuse", "ok", f"/dev/fuse and {find_libfuse()}")
    except Fp8fsError as err:
        return Finding("fuse", "bad", err.what, err.hint)


def _rights() -> Finding:
    if os.geteuid() == 0:
        return Finding("rights", "ok", "root: links inside the mount stay inside the mount")
    found = "not root: links inside the mount are absolute, into your store"
    remedy = "for containers that see only the mount: run as root, or --serve inline"
    return Finding("rights", "note", found, remedy)


def _namespaces() -> Finding:
    from fp8fs.fuse.libfuse import in_user_namespace

    if not in_user_namespace():
        return Finding("namespaces", "ok", "the machine's own user namespace")
    found = "inside a user namespace (a rootless container)"
    return Finding("namespaces", "note", found, "if mounting fails: unshare --mount, or use build")


def _store(root: Path) -> Finding:
    place = root
    while not os.path.exists(place) and place != place.parent:  # nor where we may not look
        place = place.parent
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK | os.X_OK):
        remedy = "--store ROOT, or FP8FS_STORE, somewhere you may write"
        return Finding("store", "bad", f"{root} cannot be written", remedy)
    found = f"{root}, {free / 1e9:.1f} GB free"
    if free < _LOW_SPACE_BYTES:
        return Finding("store", "note", found, "fp8fs gc, or a store on another disk")
    return Finding("store", "ok", found)


def _gpu() -> Finding:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("gpu", "ok", "none: the CPU quantizes")
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", "note", "a GPU, but no torch", 'pip install "fp8fs[gpu]"')
    return Finding("gpu", "ok", "a GPU and torch: --device cuda works if torch sees it")


def _stale_mounts() -> Finding:
    from fp8fs.core.text import shell_word
    from fp8fs.fuse import session

    stale = [mounted.dst for mounted in session.list_mounts() if not mounted.live]
    if stale:
        found = f"stale: {', '.join(stale)}"
        return Finding("mounts", "note", found, f"fp8fs unmount {shell_word(stale[0])}")
    return Finding("mounts", "ok", f"{len(session.list_mounts())} live, none stale")
