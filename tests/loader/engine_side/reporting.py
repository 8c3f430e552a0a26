"""How a script inside an engine's environment hands its result to the test that started it: one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_and_report(
    main: Callable[[argparse.Namespace], dict[str, Any]], parser: argparse.ArgumentParser
) -> None:
    """Run *main*, write what it returns to ``--result``, and leave at once: engines keep threads that never end."""
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    result = main(options)
    options.result.write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
