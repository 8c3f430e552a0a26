"""The command line: one file per command. Results on stdout, progress and logs on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

__all__ = ["main"]

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code says how it ended (docs/CLI.md).

    An expected failure is one line on stderr, and with ``--json`` the same as data on stdout.
    Anything else is a bug: a traceback, the same document and exit code 70. Without *argv* this is the process's own command
    line, and the process ends here.
    """
    if argv is None:
        _open_streams()
        code = EXIT_INTERRUPTED
        with suppress(KeyboardInterrupt):  # before and after what _run catches
            from fp8fs.signals import unwinding

            with unwinding():
                code = _run(sys.argv[1:])
        _leave(code)
    return _run(list(argv or ()))


def _open_streams() -> None:
    """Descriptors 0 to 2 are open: what we open later must not become the stdout of somebody that we start."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _leave(code: int) -> NoReturn:
    """End the process at once: to take the interpreter apart, with numba in it, costs a tenth of a second."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads any more
        code = code or EXIT_BROKEN_PIPE
    os._exit(code)


def _run(arguments: list[str]) -> int:
    from fp8fs.errors import Fp8fsError
    from fp8fs.signals import Ended

    try:
        return _command(arguments)
    except Fp8fsError as err:
        from fp8fs.cli.output import own_words, report_error

        report_error(err, as_json="--json" in own_words(arguments))
        return err.exit
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Ended as end:
        return end.exit
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads any more; the interpreter must not complain at exit
        return EXIT_BROKEN_PIPE
    except Exception as err:  # noqa: BLE001 - the one place where a bug becomes an exit code
        import traceback

        from fp8fs.cli.output import own_words, report_bug

        traceback.print_exc()
        report_bug(err, as_json="--json" in own_words(arguments))
        return EXIT_BUG


def _command(arguments: list[str]) -> int:
    from fp8fs.cli import status

    try:
        if (request := status.quick_request(arguments)) is not None:
            status.show(request)
            return 0
        from fp8fs.cli.output import start_logging

        start_logging(arguments)
        from fp8fs.cli.plain import plain_call

        if (call := plain_call(arguments)) is not None:
            return call()
        from fp8fs.cli.app import run_app

        return run_app(arguments)
    except FileNotFoundError as err:
        from fp8fs.errors import UsageError

        if _stands_somewhere():
            raise
        raise UsageError("the current directory is gone", hint="cd to another one") from err


def _stands_somewhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
