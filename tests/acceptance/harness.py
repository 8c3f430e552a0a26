"""The command line as a user has it, and looks at the system from outside of our own counters."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAKE_CHECKPOINT = ROOT / "scripts" / "make_checkpoint.py"
TIMEOUT_S = 300


@dataclass
class Fp8fs:
    """``fp8fs`` with one store. ``user``: a uid to run as (None: this one)."""

    store: Path
    command: Sequence[str] = (sys.executable, "-m", "fp8fs")
    user: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/")

    def environment(self) -> dict[str, str]:
        return {**os.environ, "FP8FS_STORE": str(self.store), **self.env}

    def popen(self, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Start a command; output goes to pipes unless told otherwise."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        if self.user is not None:
            options |= {"user": self.user, "group": self.user, "extra_groups": []}
        return subprocess.Popen(
            [*self.command, *map(str, arguments)],
            env=self.environment(),
            cwd=self.cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def run(self, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command that must end with *code*."""
        process = self.popen(*arguments)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        assert process.returncode == code, (
            f"{arguments}: exit {process.returncode}, expected {code}\n{out}\n{err}"
        )
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *arguments: object, code: int = 0) -> Any:
        """The document that ``--json`` prints."""
        return json.loads(self.run(*arguments, "--json", code=code).stdout)

    def mount(self, src: Path, dst: Path, *options: object) -> dict[str, Any]:
        """Mount; what ``mount --json`` says of it."""
        mounted: dict[str, Any] = self.json("mount", src, dst, *options)
        return mounted

    def unmount(self, dst: Path) -> None:
        self.run("unmount", dst)

    def status(self, dst: Path) -> dict[str, Any]:
        status: dict[str, Any] = self.json("status", dst)
        return status

    def build(self, src: Path, *options: object) -> Path:
        """Build; the path that it prints."""
        return Path(self.run("build", src, *options).stdout.rstrip("\n"))


def make_checkpoint(directory: Path, kind: str, size: str, *options: object) -> Path:
    """A seeded checkpoint by the script that users have."""
    command = [sys.executable, MAKE_CHECKPOINT, directory, "--kind", kind, "--size", size]
    subprocess.run(
        [str(word) for word in (*command, *options)], check=True, stdout=subprocess.DEVNULL
    )
    return directory


def mount_points(below: Path) -> list[str]:
    """Everything mounted at or below a path, innermost last. Touches no mount."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4].encode().decode("unicode_escape")
        if point == str(below) or point.startswith(f"{below}/"):
            points.append(point)
    return points


def clean_up(below: Path) -> None:
    """Take every mount below a test's folder away and end the servers whose command line names it."""
    for pid in servers(below):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for point in reversed(mount_points(below)):
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)
    deadline = time.monotonic() + 5
    while (left := servers(below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def servers(below: Path) -> list[int]:
    """Processes that serve a mount below a path."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):
                words = (directory / "cmdline").read_bytes().decode().split("\0")
                if "fp8fs.fuse.daemon" in words and any(w.startswith(str(below)) for w in words):
                    found.append(int(directory.name))
    return found


# --- looks from outside ---------------------------------------------------------------------------


def objects(store: Path) -> dict[str, tuple[int, int, str]]:
    """Every sealed object: name -> inode, mtime, digest. Equal before and after: nothing was made again."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, digest(path))
        for path in store.glob("v1/objects/*/*.safetensors")
    }


def digest(path: Path) -> str:
    """sha256 of a file, links followed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_chars(pid: int) -> int:
    """Bytes that a process has asked the kernel to read so far."""
    match = re.search(r"^rchar: (\d+)$", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def settle(pid: int, quiet_s: float = 1.0) -> None:
    """Wait until a process reads nothing and uses no processor: a new server loads its kernels beside serving."""
    seen, since = (-1, ""), time.monotonic()
    deadline = since + TIMEOUT_S
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, f"pid {pid} is never idle"
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        now = (read_chars(pid), " ".join(ticks))
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.05)


def files(root: Path) -> dict[str, Path]:
    """Every file that a recursive walk shows, by relative path."""
    return {
        os.path.relpath(os.path.join(folder, name), root): Path(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
    }


def digests(root: Path) -> dict[str, str]:
    """Relative path -> digest of every file that a walk shows, links followed, .fp8fs/ left out."""
    shown = sorted(files(root).items())
    return {name: digest(path) for name, path in shown if not name.startswith(".fp8fs/")}


def source_bytes(src: Path) -> int:
    """Bytes of all safetensors files below SRC."""
    return sum(p.stat().st_size for p in src.rglob("*.safetensors"))


def wait_for(what: Any, timeout_s: float = 60.0, every_s: float = 0.005) -> Any:
    """The first true answer of a function."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(every_s)
    raise AssertionError(f"nothing after {timeout_s} s")
