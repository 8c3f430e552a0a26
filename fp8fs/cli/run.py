"""``fp8fs run``: mount, run a command with the mount's path in it, unmount whatever happens."""

from __future__ import annotations

import sys
from typing import Annotated

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
    recipe_of,
    store_root,
)

__all__ = ["run"]


def run(
    src: Src,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- CMD...", help="The command; each {} in it becomes the mount's path."
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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Mount SRC, run CMD with {} replaced by the mount, unmount; exit with CMD's code.

    With --json what CMD prints goes to stderr, and its code is in the document.
    """
    from fp8fs.api import check_command, mounted, run_command
    from fp8fs.cli.output import Output
    from fp8fs.errors import UsageError

    output = Output(as_json=as_json, quiet=quiet)
    if not any("{}" in word for word in command):
        raise UsageError("no {} in the command", hint="fp8fs run SRC -- CMD {}")
    if "{}" not in command[0]:
        check_command(command[0])
    recipe = recipe_of(
        scheme=scheme,
        names=names,
        component=component,
        keep=keep,
        quantize=quantize,
        split_experts=split_experts,
    )
    with mounted(
        src,
        store=store_root(store),
        recipe=recipe,
        serve=serve,
        grain=grain,
        device=device,
        workers=workers,
        allow_other=allow_other,
        allow_unquantized=allow_unquantized,
    ) as dst:
        words = [word.replace("{}", str(dst)) for word in command]
        code = run_command(words, stdout=sys.stderr.fileno() if as_json else None)
    if as_json:
        output.document({"src": str(src), "dst": str(dst), "command": words, "exit": code})
    raise typer.Exit(code)
