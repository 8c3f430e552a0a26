"""Runs scripts inside an engine's own environment, in processes of their own, and brings back their JSON results.

The environments come from ``scripts/engines``. A missing one skips the test, unless ``FP8FS_REQUIRE`` names
``engines`` (or the engine): then it is a failure.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE_SIDE = Path(__file__).resolve().parent / "engine_side"
TIMEOUT_S = 300


@functools.cache
def engine_python(engine: str) -> Path:
    """The interpreter of an engine's environment; skips (or fails) the test if it is not installed."""
    found = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "engines", "path", engine],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        skip_or_fail(found.stderr.strip(), engine)
    return Path(found.stdout.strip())


def skip_or_fail(reason: str, name: str) -> NoReturn:
    """End a test that lacks something: a skip, unless ``FP8FS_REQUIRE`` names it or ``engines``."""
    required = os.environ.get("FP8FS_REQUIRE", "").split(",")
    if "engines" in required or name in required:
        pytest.fail(reason)
    pytest.skip(reason)


def run_script(
    engine: str, script: str, *arguments: object, workdir: Path, site: Path | None = None
) -> Any:
    """Run one script of ``engine_side/`` and return its result."""
    return run_scripts(engine, script, [arguments], workdir=workdir, site=site)[0]


def run_scripts(
    engine: str,
    script: str,
    argument_lists: Sequence[Sequence[object]],
    *,
    workdir: Path,
    site: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a script once per argument list, all at the same time, and return the results in order.

    ``site``: a folder with more packages, such as ``install_plugin`` makes; ``settings``: environment variables.
    Each process logs to ``workdir/logN.txt``.
    Raises: AssertionError with the end of the log if any process fails or is not done in time; all are ended then.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    variables = environment(site) | dict(settings or {})
    runs: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
    try:
        for number, arguments in enumerate(argument_lists):
            result, log_path = workdir / f"result{number}.json", workdir / f"log{number}.txt"
            command = [engine_python(engine), ENGINE_SIDE / script, *arguments, "--result", result]
            with log_path.open("w") as log:
                process = subprocess.Popen(
                    [str(part) for part in command], stdout=log, stderr=log, env=variables
                )
            runs.append((process, result, log_path))
        deadline = time.monotonic() + TIMEOUT_S
        while any(process.poll() is None for process, _, _ in runs):
            for process, _, log_path in runs:  # one failed rank leaves the others waiting for it
                assert not process.poll(), f"{script}: exit {process.poll()}:\n{end_of(log_path)}"
            assert time.monotonic() < deadline, (
                f"{script} took over {TIMEOUT_S} s:\n{end_of(log_path)}"
            )
            time.sleep(0.1)
        for process, _, log_path in runs:
            assert not process.poll(), f"{script}: exit {process.poll()}:\n{end_of(log_path)}"
        return [json.loads(result.read_text()) for _, result, _ in runs]
    finally:
        for process, _, _ in runs:
            if process.poll() is None:
                process.kill()
                process.wait()


def install_plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH in which fp8fs is installed: the package, and the entry points of pyproject.toml."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    metadata = folder / "fp8fs-0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "fp8fs").symlink_to(REPOSITORY / "fp8fs")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8fs\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def environment(site: Path | None = None) -> dict[str, str]:
    """The caller's environment without its Python settings, one thread per process, offline."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in (ENGINE_SIDE / "site", site) if path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }


def end_of(log_path: Path, size: int = 4000) -> str:
    """The last characters of a log, for a message."""
    return log_path.read_text(errors="replace")[-size:]
