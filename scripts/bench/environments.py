"""The two environments that a run compares: this clone installed as a user would, and its peers, pinned.

Both are made by the run, cached under the work folder by everything that decides their content, and installed with
low priority. pip's own configuration (indexes, proxies, constraints) is respected.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["PEER_PINS", "peers_python", "subject_python", "versions"]

PEER_PINS = (
    "llmcompressor==0.14.0.1",
    "torch==2.13.0",
    "safetensors==0.8.0",
    "matplotlib==3.11.2",
    "py-spy==0.4.3",
)
"""model_free_ptq, the torch that all loaders run on, and the tools for the plot and the profile."""

SUBJECT_EXTRAS = ("safetensors==0.8.0",)

_MARKER = "ready.json"


def peers_python(cache: Path) -> Path:
    """The Python of the peers' environment, made now if it is not there."""
    return _environment(cache, "peers", [list(PEER_PINS)], {})


def subject_python(cache: Path, clone: Path) -> Path:
    """The Python of an environment in which this clone is installed, not editable, as of now.

    Its dependencies are cached; fp8fs itself is installed anew for every run, for its sources may have changed.
    """
    pins = (clone / "pyproject.toml").read_text(encoding="utf-8")
    python = _environment(cache, "fp8fs", [[str(clone)], list(SUBJECT_EXTRAS)], {"project": pins})
    _pip(python, ["install", "--no-deps", "--force-reinstall", str(clone)])
    return python


def versions(python: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Installed versions of packages, "" where one is missing."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return ''\n"
        "print(json.dumps({n: v(n) for n in sys.argv[1:]} | {'python': sys.version.split()[0]}))"
    )
    done = subprocess.run(
        [str(python), "-c", code, *names], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _environment(cache: Path, name: str, installs: list[list[str]], facts: dict[str, str]) -> Path:
    wanted = json.dumps([installs, facts, sys.version_info[:2]], sort_keys=True)
    folder = cache / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w", encoding="ascii") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (folder / _MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run(
                [sys.executable, "-m", "venv", str(folder)], check=True, stdout=sys.stderr
            )
            for packages in installs:
                _pip(python, ["install", *packages])
            (folder / _MARKER).write_text(wanted, encoding="utf-8")
    return python


def _pip(python: Path, arguments: list[str]) -> None:
    command = ["nice", str(python), "-m", "pip", *arguments]
    command += ["--quiet", "--disable-pip-version-check"]
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)
