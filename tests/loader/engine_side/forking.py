"""Serves scripts of this folder: imports them and their engine once, then forks a process for every run of a request.

A fork starts with what a fresh process has after its imports and nothing else, so no run sees what another one did. The
imports take longer than a tiny model does.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

import reporting


def run_in_child(script: Any, run: dict[str, Any], request: dict[str, Any]) -> NoReturn:
    """Run the script as if it had been started with these arguments; everything that it prints goes to the log."""
    try:
        with Path(run["log"]).open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(request["settings"])
        sys.path[:0] = request["packages"]
        reporting.run_and_report(script.main, script.arguments(), run["arguments"])
    finally:  # reached only if it raised: reporting leaves at once
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def answer(scripts: dict[str, Any], request: dict[str, Any]) -> list[int]:
    """The exit status of every run of a request; all go at the same time."""
    running: dict[int, int] = {}
    for number, run in enumerate(request["runs"]):
        child = os.fork()
        if not child:
            run_in_child(scripts[request["script"]], run, request)
        running[child] = number
    statuses = [0] * len(running)
    while running:
        child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        statuses[running.pop(child)] = code
        if code:  # one failed rank leaves the others waiting for it
            for left in running:
                os.kill(left, signal.SIGKILL)
    return statuses


def serve(scripts: dict[str, Any], requests: IO[str], replies: IO[str]) -> None:
    """One request and one reply a line: first null, when all is imported, then the exit statuses of the runs."""
    for script in scripts.values():
        script.load_engine()
    gc.freeze()  # what is imported stays: no fork has to look through it
    print(json.dumps(None), file=replies, flush=True)
    for line in requests:
        print(json.dumps(answer(scripts, json.loads(line))), file=replies, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "scripts", nargs="+", help="modules of this folder with load_engine, arguments and main"
    )
    scripts = {name: importlib.import_module(name) for name in parser.parse_args().scripts}
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what engines print is no reply
        serve(scripts, sys.stdin, replies)


if __name__ == "__main__":
    main()
