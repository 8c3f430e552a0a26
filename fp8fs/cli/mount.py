"""``fp8fs mount`` and ``fp8fs unmount``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8fs.cli.options import (
    AllowOther,
    AllowUnquantized,
    Component,
    Device,
    Grain,
    Json,
    Keep,
    Names,
    Quantize,
    Quiet,
    Scheme,
    Serve,
    SplitExperts,
    Src,
    Store,
    Workers,
    place,
    recipe_of,
    store_root,
)

if TYPE_CHECKING:
    from fp8fs.cli.output import Output
    from fp8fs.fuse.session import Mounted, MountSpec

__all__ = ["mount", "unmount"]


def mount(
    src: Src,
    dst: Annotated[
        Path,
        typer.Argument(
            metavar="DST", parser=place, help="The mount point: an empty or a new directory."
        ),
    ],
    store: Store = None,
    scheme: Scheme = "",
    names: Names = "checkpoint",
    component: Component = None,
    keep: Keep = None,
    quantize: Quantize = None,
    split_experts: SplitExperts = False,
    serve: Serve = "handoff",
    grain: Grain = "shard",
    device: Device = "auto",
    workers: Workers = 0,
    allow_other: AllowOther = False,
    allow_unquantized: AllowUnquantized = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay until the mount ends, with progress.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show SRC at DST as an FP8 checkpoint; nothing is quantized before something reads it."""
    from fp8fs.cli.output import Output
    from fp8fs.fuse import session

    spec = session.MountSpec(
        src=str(src.expanduser()),
        dst=str(dst.expanduser()),
        store=str(store_root(store)),
        recipe=recipe_of(
            scheme=scheme,
            names=names,
            component=component,
            keep=keep,
            quantize=quantize,
            split_experts=split_experts,
        ),
        serve=serve,
        grain=grain,
        device=device,
        workers=workers,
        allow_other=allow_other,
        allow_unquantized=allow_unquantized,
    )
    output = Output(as_json=as_json, quiet=quiet)
    if foreground:
        raise typer.Exit(_stay(spec, output))
    _announce(session.mount(spec), output)


def unmount(
    dst: Annotated[Path, typer.Argument(metavar="DST", parser=place, help="The mount point.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-l", help="Detach now even if it is in use.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take the mount at DST away, a stale one too; the store stays."""
    from fp8fs.cli.output import Output
    from fp8fs.fuse import session

    output = Output(as_json=as_json, quiet=quiet)
    report = session.unmount(str(dst.expanduser()), lazy=lazy)
    if as_json:
        output.document(report)
        return
    if report.stale:
        output.note(f"{report.dst}: its server was gone already; cleaned up")
    if report.killed:
        output.note(f"{report.dst}: the server did not end in time and was killed")
    if report.users:
        output.note(
            f"{report.dst}: detached while used by {_pids(report.users)}: what was handed over stays open, other reads end"
        )
    if report.held_by:
        output.note(f"{report.dst}: other mount namespaces still show it: {_pids(report.held_by)}")


def _pids(pids: tuple[int, ...]) -> str:
    return "process " + ", ".join(str(pid) for pid in pids)


def _announce(mounted: Mounted, output: Output) -> None:
    """Before and after, where, and what to do next."""
    from fp8fs.cli.output import format_bytes
    from fp8fs.core.text import shell_word

    if output.as_json:
        output.document(mounted)
        return
    if not output.quiet:
        ready = f"{mounted.sealed} of {mounted.shards} shards ready"
        finished = mounted.sealed == mounted.shards
        then = "nothing is left to quantize" if finished else "the first access quantizes"
        log = f"   (log: {mounted.log_path})" if mounted.log_path else ""
        output.line(
            f"{mounted.dst}: {format_bytes(mounted.bytes_source)} -> "
            f"{format_bytes(mounted.bytes_view)} of weights, {ready}"
        )
        output.line(f"point the model path at {mounted.dst}; {then}")
        output.line(f"when done: fp8fs unmount {shell_word(mounted.dst)}{log}")
    for warning in mounted.warnings:
        output.note(f"warning: {warning}")


def _stay(spec: MountSpec, output: Output) -> int:
    """Mount and stay, with a bar that follows the mount's status."""
    from fp8fs.cli.progress import following
    from fp8fs.errors import Fp8fsError
    from fp8fs.fuse import session

    with following("quantizing", quiet=output.quiet) as update:

        def on_ready(mounted: Mounted) -> None:
            _announce(mounted, output)
            update(0, mounted.bytes_view)

        def on_tick(mounted: Mounted) -> None:
            try:
                size = session.read_status(mounted.dst)["bytes"]
            except Fp8fsError:
                return  # it is going away, or busy: the next tick asks again
            if isinstance(size, dict):
                update(int(size.get("written", 0)), mounted.bytes_view)

        def on_log(line: str) -> None:
            if not (output.quiet and _is_information(line)):
                print(line, file=sys.stderr, flush=True)

        return session.mount_foreground(spec, on_ready=on_ready, on_tick=on_tick, on_log=on_log)


def _is_information(line: str) -> bool:
    """Whether a line of the server's log says that all is well: date, time, level, logger, text."""
    return line.split(" ", 3)[2:3] == ["INFO"]
