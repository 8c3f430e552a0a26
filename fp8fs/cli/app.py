"""The typer application: every command by name, and how its run becomes an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8fs.cli.build import build, path
from fp8fs.cli.doctor import doctor
from fp8fs.cli.mount import mount, unmount
from fp8fs.cli.options import Json, Quiet, place
from fp8fs.cli.plan import plan
from fp8fs.cli.run import run
from fp8fs.cli.status import Request, show
from fp8fs.cli.stores import gc, ls, rm
from fp8fs.cli.verify import verify
from fp8fs.errors import UsageError

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
        Path | None,
        typer.Argument(metavar="[DST]", parser=place, help="The mount; without it: all mounts."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a mount is doing: shards and tensors made, speed, errors; or list all mounts."""
    show(Request(dst=str(dst or ""), as_json=as_json, quiet=quiet))


for command in (mount, unmount, plan, build, path, status, verify, ls, rm, gc, doctor, run):
    app.command()(command)
app.command("umount", hidden=True)(unmount)

_PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The parser's UsageError, which typer has from click, or in newer versions from a copy of its own."""


def run_app(arguments: Sequence[str]) -> int:
    """Run one command line. Raises: Fp8fsError, UsageError too for what the parser does not understand."""
    try:
        code = app(args=list(arguments or ["--help"]), prog_name="fp8fs", standalone_mode=False)
    except _PARSER_ERROR as err:
        raise _usage_error(err) from err
    if not arguments:
        return UsageError.exit
    return code if isinstance(code, int) else 0


def _usage_error(err: Any) -> UsageError:
    """The parser's complaint as one of ours: one line, the command's help as the hint."""
    command = err.ctx.command_path if err.ctx is not None else "fp8fs"
    said = str(err.format_message()).rstrip(".")
    hint = f"{command} --help"
    if command == "fp8fs run":
        hint += "; options of CMD come after --: fp8fs run SRC -- CMD {}"
    return UsageError(said[:1].lower() + said[1:], hint=hint)
