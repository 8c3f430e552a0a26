"""The typer application: every command by name, and how its run becomes an exit code."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

import typer

from fp8fs.cli.build import build, path
from fp8fs.cli.doctor import doctor
from fp8fs.cli.mount import mount, unmount
from fp8fs.cli.options import Json, Quiet
from fp8fs.cli.plan import plan
from fp8fs.cli.run import run
from fp8fs.cli.status import Request, show
from fp8fs.cli.stores import gc, ls, rm
from fp8fs.cli.verify import verify

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="fp8fs",
    help="Show a BF16 checkpoint directory as the FP8 checkpoint that loaders want to read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from fp8fs import __version__

        print(f"fp8fs {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Show a BF16 checkpoint directory as the FP8 checkpoint that loaders want to read."""


def status(
    dst: Annotated[
        str, typer.Argument(metavar="[DST]", help="The mount; without it: all mounts.")
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a mount is doing: shards and tensors made, speed, errors; or list all mounts."""
    show(Request(dst=dst, as_json=as_json))


for command in (mount, unmount, plan, build, path, status, verify, ls, rm, gc, doctor):
    app.command()(command)
app.command("umount", hidden=True)(unmount)
app.command(context_settings={"ignore_unknown_options": True})(run)


def run_app(arguments: Sequence[str]) -> int:
    """Run one command line. Fp8fsError passes through; usage mistakes print themselves and give 2."""
    quiet = {"--quiet", "-q"} & set(arguments)
    logging.basicConfig(
        level=logging.ERROR if quiet else logging.WARNING, format="%(levelname)s: %(message)s"
    )
    try:
        app(args=list(arguments), prog_name="fp8fs")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
