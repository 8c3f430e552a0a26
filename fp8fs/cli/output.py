"""What every command prints with: JSON and text results, notes, sizes, errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fp8fs.errors import Fp8fsError, UsageError

__all__ = [
    "Output",
    "format_bytes",
    "format_duration",
    "own_words",
    "printable",
    "report_bug",
    "report_error",
    "start_logging",
]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's words go. ``as_json``: one document on stdout; ``quiet``: no notes on stderr."""

    as_json: bool = False
    quiet: bool = False

    def document(self, value: object) -> None:
        """The result as one JSON document on stdout."""
        _write_json(value)

    def line(self, text: str) -> None:
        """One line of the result on stdout."""
        with _printing():
            print(printable(text), flush=True)

    def note(self, text: str) -> None:
        """Something good to know, on stderr; silent with --quiet."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()
    ) -> None:
        """Rows of cells under headings, each column as wide as its widest cell. A hundred thousand rows take a moment.

        *right*: the columns whose cells end in line. A terminal that is too narrow wraps the rows.
        """
        rows = [headings, *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        columns = "  ".join(
            f"{{:{'>' if heading in right else '<'}{width}}}"
            for heading, width in zip(headings, widths, strict=True)
        )
        with _printing():
            sys.stdout.writelines(columns.format(*row).rstrip() + "\n" for row in rows)
            sys.stdout.flush()

    def path(self, path: Path) -> None:
        """A path as the result, byte for byte as the filesystem spells it."""
        _write(os.fsencode(path))


def own_words(arguments: Sequence[str]) -> Sequence[str]:
    """The part of a command line that is ours: what follows "--" belongs to ``run``'s command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def start_logging(arguments: Sequence[str]) -> None:
    """Warnings go to stderr; with ``--quiet`` errors alone."""
    import logging

    quiet = {"--quiet", "-q"} & set(own_words(arguments))
    logging.basicConfig(
        level=logging.ERROR if quiet else logging.WARNING, format="%(levelname)s: %(message)s"
    )


def report_error(err: Fp8fsError, *, as_json: bool) -> None:
    """One line on stderr; with *as_json* also ``{"error": ...}`` on stdout."""
    if as_json:
        with suppress(UsageError):  # stdout may be what the error is about
            _write_json({"error": err.as_dict()})
    print(f"error: {printable(str(err))}", file=sys.stderr, flush=True)


def report_bug(err: Exception, *, as_json: bool) -> None:
    """With *as_json* the document of what nobody expected; its traceback is on stderr already."""
    if as_json:
        import traceback

        what = "".join(traceback.format_exception_only(err)).strip()
        bug = Fp8fsError(f"a bug: {what}", hint="please report the traceback on stderr")
        with suppress(UsageError, BrokenPipeError):  # stdout may be what the bug is about
            _write_json({"error": bug.as_dict()})


def _write_json(value: object) -> None:
    import msgspec

    try:
        data = msgspec.json.format(msgspec.json.encode(value), indent=2)
    except (
        UnicodeEncodeError
    ):  # names that are not UTF-8 arrive with surrogates, which msgspec neither writes nor reads
        import json

        data = json.dumps(msgspec.to_builtins(value), indent=2).encode("ascii")
    _write(data)


def _write(line: bytes) -> None:
    with _printing():
        sys.stdout.flush()
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


@contextmanager
def _printing() -> Iterator[None]:
    """Raises: UsageError if stdout takes nothing; BrokenPipeError if nobody reads it any more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as err:
        raise UsageError(
            f"stdout cannot be written: {err.strerror}", hint="look where it goes to"
        ) from err


def printable(text: str) -> str:
    """*text* as it may go to a terminal: undecodable bytes and control characters, line ends too, shown as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_bytes(count: int) -> str:
    """A size for people: three digits and a decimal unit ("90.9 MB")."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    return f"{value:.3g} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def format_duration(seconds: float) -> str:
    """A time for people ("0.42 s", "3 min 05 s", "2 h 10 min")."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
