"""Which files a command touched, in the kernel's words (strace)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

__all__ = ["SYSTEM", "Touched", "inside", "touched_by"]

_CALLS = [
    "open",
    "openat",
    "openat2",
    "creat",
    "unlink",
    "unlinkat",
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "rmdir",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "chmod",
    "fchmod",
    "fchmodat",
    "chown",
    "lchown",
    "fchown",
    "fchownat",
    "truncate",
    "ftruncate",
    "utimensat",
    "mknod",
    "mknodat",
]
_LINE = re.compile(
    r"^(?:\d+ +)?(?P<call>\w+)\((?P<args>.*)\) += (?P<result>-?\d+)(?:<(?P<path>.*)>)?"
)
_ARGUMENT = re.compile(
    r'(?:(?:AT_FDCWD|\d+)<(?P<at>[^>]*)>(?:, )?)?(?:"(?P<name>(?:[^"\\]|\\.)*)")?'
)
_WRITING = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")

SYSTEM = tuple(
    {
        *(
            "/usr",
            "/lib",
            "/lib64",
            "/bin",
            "/etc",
            "/proc",
            "/sys",
            "/dev/null",
            "/dev/urandom",
            "/opt",
        ),
        *(os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)),
        *(os.path.realpath(p) for p in sys.path if p),
        str(Path(__file__).resolve().parents[2]),
    }
)
"""Where the interpreter and its libraries are."""


@dataclass
class Touched:
    """Real paths. ``pinned``: opened with O_PATH only, which opens nothing but the name."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)


def inside(path: str, folders: Sequence[object]) -> bool:
    """Whether a path is one of the folders or below one."""
    return any(path == str(f) or path.startswith(f"{f}/") for f in folders)


def touched_by(
    command: Sequence[object], log: Path, *, code: int = 0, env: dict[str, str] | None = None
) -> Touched:
    """Run a command under strace, children too. It ends with *code*."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    traced = [strace, "-f", "-y", "-qq", "-s", "4096", "-e", f"trace={','.join(_CALLS)}", "-o", log]
    done = subprocess.run(
        [str(word) for word in (*traced, *command)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, **(env or {})},
        timeout=300,
        check=False,
    )
    if "ptrace" in done.stderr and not log.exists():
        pytest.skip(f"strace cannot trace here: {done.stderr.strip()}")
    assert done.returncode == code, done.stderr
    return _parse(log.read_text(errors="surrogateescape"))


def _parse(text: str) -> Touched:
    touched = Touched()
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None or found["result"].startswith("-"):
            continue
        call, arguments = found["call"], found["args"]
        if call in ("open", "openat", "openat2", "creat"):
            path = found["path"]
            if "O_PATH" in arguments:
                touched.pinned.add(path)
            elif call == "creat" or _WRITING.search(arguments):
                touched.written.add(path)
            else:
                touched.read.add(path)
        else:
            if call.startswith("symlink"):  # its first argument is a text, not a path
                arguments = arguments.partition('", ')[2]
            touched.written.update(_paths(arguments))
    return touched


def _paths(arguments: str) -> list[str]:
    """Every path among the arguments, names joined to the directories that they are relative to."""
    paths = []
    for part in _ARGUMENT.finditer(arguments):
        at, name = part["at"] or "", part["name"]
        if at or name:
            paths.append(os.path.normpath(os.path.join(at, name or "")))
    return paths
