"""What a process did to the files below a folder, out of strace's record of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_LINE = re.compile(r"^(\d+) +(.*)$")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\w+)(?:<.*>)?(?: (E\w+))?")
_FILE = re.compile(r'\d+<(/[^>]*)>|"(/[^"]*)"')
_UNFINISHED = " <unfinished ...>"

# Calls that say nothing about what a file system has to do, or that differ between releases of Python's own files.
IGNORED = {"close", "dup", "dup2", "fcntl", "getcwd", "ioctl", "lseek", "munmap"}
STATUS = {"stat", "lstat", "newfstatat", "statx", "fstat"}
NAMES = {"pread64": "pread", "getdents64": "list", "fadvise64": "fadvise", "openat": "open"}


@dataclass
class FileCalls:
    """Calls by what they were made on, each once, sorted: shards, other files, folders; and names that are not there."""

    root: Path
    shards: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    def add(self, path: Path, call: str, error: str) -> None:
        if error == "ENOENT":
            self.absent.add(str(path.relative_to(self.root)))
        elif path.suffix == ".safetensors":
            self.shards.add(call)
        elif path.is_dir():
            self.folders.add(call)
        else:
            self.files.add(f"{call} {error}".rstrip())

    def as_lists(self) -> dict[str, list[str]]:
        return {
            "shards": sorted(self.shards),
            "files": sorted(self.files),
            "folders": sorted(self.folders),
            "absent": sorted(self.absent),
        }


def read_calls(record: Path, root: Path) -> dict[str, list[str]]:
    """The calls of a record of strace (``-f -y``) on what is at or below *root*, which is still there."""
    found = FileCalls(root)
    mappings: dict[int, tuple[int, Path]] = {}  # address -> length, file
    for line in _whole_lines(record.read_text(errors="replace").splitlines()):
        match = _CALL.match(line)
        if match is None:
            continue
        name, arguments, result, error = match[1], match[2], match[3], match[4] or ""
        words = [word.strip() for word in arguments.split(",")]
        if name in ("madvise", "munmap"):
            start = int(words[0], 16)
            at = next((a for a, (size, _) in mappings.items() if a <= start < a + size), None)
            if at is not None and name == "madvise":
                found.add(mappings[at][1], f"madvise {words[2]}", error)
            elif at is not None:
                del mappings[at]
            continue
        path = _path(arguments, root)
        if path is None or name in IGNORED:
            continue
        if name == "mmap" and not error:
            mappings[int(result, 16)] = int(words[1]), path
        found.add(path, _describe(name, arguments, path), error)
    return found.as_lists()


def _whole_lines(lines: list[str]) -> list[str]:
    """Calls in one piece each, without the process that made them."""
    whole: list[str] = []
    begun: dict[str, str] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        process, text = match[1], match[2]
        if resumed := _RESUMED.match(text):
            text = begun.pop(process, "") + resumed[1]
        if text.endswith(_UNFINISHED):
            begun[process] = text.removesuffix(_UNFINISHED)
        else:
            whole.append(text)
    return whole


def _path(arguments: str, root: Path) -> Path | None:
    """The file below *root* that a call is about."""
    for match in _FILE.finditer(arguments):
        path = Path(match[1] or match[2])
        if path.is_relative_to(root):
            return path
    return None


def _describe(name: str, arguments: str, path: Path) -> str:
    """The call in the words of the expectation: what differs between C libraries has one name."""
    words = [word.strip() for word in arguments.split(",")]
    if name in STATUS:
        if name == "fstat" or "AT_EMPTY_PATH" in arguments:
            return "fstat"
        return "lstat" if name == "lstat" or "NOFOLLOW" in arguments else "stat"
    name = NAMES.get(name, name)
    if name == "open":
        return f"open {words[2]}"
    if name == "mmap":
        is_whole = int(words[1]) >= path.stat().st_size and int(words[5], 0) == 0
        return f"mmap {words[2]} {words[3]} {'whole' if is_whole else 'part'}"
    if name in ("fadvise", "access"):
        return f"{name} {words[-1]}"
    return name
