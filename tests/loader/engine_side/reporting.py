"""How a script inside an engine's environment hands its result to the test that started it: one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import tracing


def run_and_report(
    main: Callable[[argparse.Namespace], dict[str, Any]],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Run *main*, write what it returns to ``--result``, and leave at once: engines keep threads that never end.

    ``arguments``: those of the command line if None.
    """
    code = 1
    try:
        parser.add_argument("--result", type=Path, required=True)
        parser.add_argument("--strace", type=Path, help="record the system calls there")
        options = parser.parse_args(arguments)
        with tracing.recorded(options.strace) if options.strace else nullcontext():
            result = main(options)
        options.result.write_text(json.dumps(result))
        code = 0
    except BaseException:  # noqa: BLE001  (said in the log, whatever it is)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
