"""One small file per mount, beside the kernel's own record of it: which process serves it, from what, logging where.

    /run/fp8fs/<hash of DST>.json                        mounts made by root
    $XDG_RUNTIME_DIR/fp8fs/..., /run/user/UID/fp8fs/..., /tmp/fp8fs-UID/...    the first that its owner can write

The kernel's mountinfo decides what is mounted; a state file without its mount means nothing. A file is believed only
if it belongs to the user who, says the kernel, made the mount.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat

import msgspec

from fp8fs.errors import MountError
from fp8fs.fuse.spec import Mounted, decode, encode

__all__ = ["alive", "process_start", "read_state", "remove_state", "write_state"]

_MAX_BYTES = 1 << 16


def write_state(mounted: Mounted) -> str:
    """The mount's state file is *mounted*; returns its path. Raises: MountError if no place for it can be written."""
    answers = []
    for folder in _folders(os.geteuid()):
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if not _belongs_to(os.lstat(folder), os.geteuid()):
                answers.append(f"{folder} belongs to somebody else")
                continue
            path = f"{folder}/{_name(mounted.dst)}"
            staged = f"{path}.{os.getpid()}"
            with open(staged, "wb", opener=_create) as file:
                file.write(encode(mounted))
            os.replace(staged, path)
        except OSError as err:
            answers.append(f"{folder}: {err.strerror}")
        else:
            return path
    raise MountError(f"no place for the mount's state file ({'; '.join(answers)})")


def read_state(dst: str, uid: int) -> Mounted | None:
    """What user *uid* has noted about a mount at *dst*, None if nothing that can be believed."""
    for folder in _folders(uid):
        path = f"{folder}/{_name(dst)}"
        try:
            with open(path, "rb", opener=_read_only) as file:
                if not _belongs_to(os.fstat(file.fileno()), uid):
                    continue
                mounted = decode(file.read(_MAX_BYTES), Mounted)
        except (OSError, ValueError, msgspec.ValidationError):
            continue
        if mounted.dst == dst and isinstance(mounted, Mounted):
            return msgspec.structs.replace(
                mounted, uid=uid, live=alive(mounted.pid, mounted.pid_start)
            )
    return None


def remove_state(dst: str, uid: int, *, pid: int = 0) -> None:
    """No state file of *dst* is left (with *pid*: unless it speaks of another server by now)."""
    known = read_state(dst, uid)
    if pid and known is not None and known.pid != pid:
        return
    for folder in _folders(uid):
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{_name(dst)}")


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none or it has ended (a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, start: int) -> bool:
    """Whether the very process that had this number at that time still runs."""
    return pid > 0 and start > 0 and process_start(pid) == start


def _folders(uid: int) -> list[str]:
    if uid == 0:
        return ["/run/fp8fs", "/tmp/fp8fs-0"]
    own = os.environ.get("XDG_RUNTIME_DIR", "") if uid == os.geteuid() else ""
    return [
        *([f"{own}/fp8fs"] if os.path.isabs(own) else []),
        f"/run/user/{uid}/fp8fs",
        f"/tmp/fp8fs-{uid}",
    ]


def _name(dst: str) -> str:
    return hashlib.sha256(os.fsencode(dst)).hexdigest()[:32] + ".json"


def _belongs_to(facts: os.stat_result, uid: int) -> bool:
    return (
        facts.st_uid == uid
        and not facts.st_mode & 0o022
        and (stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode))
    )


def _create(path: str, _flags: int) -> int:
    return os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )


def _read_only(path: str, _flags: int) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
