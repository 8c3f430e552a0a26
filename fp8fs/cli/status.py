"""``fp8fs status``: what a live mount is doing, or which mounts there are.

The only command that scripts poll, so it also runs without the option parser: ``quick_request``
understands the plain spellings and leaves everything else (and every mistake) to typer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Request", "quick_request", "show"]


@dataclass(frozen=True, slots=True)
class Request:
    """``dst`` "": all mounts."""

    dst: str = ""
    as_json: bool = False
    quiet: bool = False


def quick_request(arguments: Sequence[str]) -> Request | None:
    """The request that ``status [DST] [--json] [--quiet]`` spells, None for anything else."""
    if not arguments or arguments[0] != "status":
        return None
    options = {word for word in arguments[1:] if word.startswith("-")}
    places = [word for word in arguments[1:] if not word.startswith("-")]
    if not options <= {"--json", "--quiet", "-q"} or len(places) > 1 or "" in places:
        return None
    return Request(
        dst=places[0] if places else "",
        as_json="--json" in options,
        quiet=bool(options & {"--quiet", "-q"}),
    )


def show(request: Request) -> None:
    """Print one mount's status, or one line per mount."""
    from fp8fs.cli.output import Output

    output = Output(as_json=request.as_json, quiet=request.quiet)
    if request.dst:
        _show_one(request.dst, output)
    else:
        _show_all(output)


def _show_one(dst: str, output: Any) -> None:
    from fp8fs.fuse import session

    status = session.read_status(dst)
    if output.as_json:
        output.document(status)
        return
    for line in describe(status):
        output.line(line)


def _show_all(output: Any) -> None:
    from fp8fs.fuse import session

    mounts = session.list_mounts()
    elsewhere = session.list_elsewhere(mounts)
    if output.as_json:
        output.document({"mounts": mounts, "elsewhere": elsewhere})
        return
    for mounted in mounts:
        state = f"{mounted.sealed}/{mounted.shards} shards" if mounted.live else "stale"
        output.line(f"{mounted.dst}  {state}  from {mounted.src}")
    for mounted in elsewhere:
        output.line(
            f"{mounted.dst}  in another mount namespace, or detached  from {mounted.src}"
            f"  (kill {mounted.pid} ends it)"
        )
    if not mounts and not elsewhere:
        output.note("no fp8fs mounts")


def describe(status: dict[str, Any]) -> list[str]:
    """The status for people: what is done, how fast, what went wrong."""
    from fp8fs.cli.output import format_bytes, format_duration
    from fp8fs.core.text import counted

    shards, units, size = status["shards"], status["units"], status["bytes"]
    lines = [
        f"{status['dst']}: {status['src']} as FP8, "
        f"{format_bytes(size['source'])} -> {format_bytes(size['view'])}",
        f"shards  {shards['sealed']} of {shards['total']} sealed",
        f"tensors {units['made']} made, {units['reused']} reused, {units['total']} in all",
        f"moved   {format_bytes(size['read'])} read, {format_bytes(size['written'])} written"
        f", {status['gb_per_s']:.2f} GB/s on {status['device']}",
    ]
    if status.get("eta_s"):
        lines.append(f"left    {format_duration(float(status['eta_s']))}")
    if status.get("odd_scales"):
        lines.append(
            f"scales  {counted(status['odd_scales'], 'weight')} outside what vLLM loads unchanged; the log names them"
        )
    lines.append(f"served  {status['serve']}, grain {status['grain']}, pid {status['pid']}")
    lines.append(f"store   {status['store']}")
    lines.append(f"log     {status['log']}")
    if status.get("degraded"):
        lines.append(f"degraded: {status['degraded']}")
    for kind, label in (
        ("source_changes", "source changed"),
        ("warnings", "warning"),
        ("errors", "error"),
    ):
        lines += [f"{label}: {_sentence(item)}" for item in status.get(kind) or ()]
    return lines


def _sentence(item: object) -> str:
    if isinstance(item, dict):
        what, hint = item.get("what", item.get("message", "")), item.get("hint", "")
        return f"{what}. hint: {hint}" if hint else str(what)
    return str(item)
