"""One small file per mount, beside the kernel's own record of it: which process serves it, from what, logging where.

    /run/fp8fs/<hash of DST>.json                        mounts made by root
    $XDG_RUNTIME_DIR/fp8fs/..., /run/user/UID/fp8fs/..., /tmp/fp8fs-UID/...    the first that its owner can write

The kernel's mountinfo decides what is mounted; a state file without its mount means nothing. A file is believed only
if it belongs to the user who, says the kernel, made the mount, in a folder of that user that is reached through no
symlink. And it is only that user's word: root must not take a process number from it for granted (``alive``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator

import msgspec

from fp8fs.errors import MountError
from fp8fs.fuse.spec import Mounted, decode, encode

__all__ = ["alive", "list_states", "process_start", "read_state", "remove_state", "write_state"]

_MAX_BYTES = 1 << 16


def write_state(mounted: Mounted) -> str:
    """The mount's state file is *mounted*; returns its path. Raises: MountError if no place for it can be written."""
    answers = []
    name = _name(mounted.dst)
    staged = f"{name}.{os.getpid()}"
    for folder in _folders(os.geteuid()):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            with _opened(folder, os.geteuid()) as fd:
                with open(_create(staged, fd), "wb") as file:
                    file.write(encode(mounted))
                os.replace(staged, name, src_dir_fd=fd, dst_dir_fd=fd)
        except OSError as err:
            answers.append(f"{folder}: {err.strerror}")
        else:
            return f"{folder}/{name}"
    raise MountError(f"no place for the mount's state file ({'; '.join(answers)})")


def read_state(dst: str, uid: int) -> Mounted | None:
    """What user *uid* has noted about a mount at *dst*, None if nothing that can be believed."""
    for folder in _folders(uid):
        with contextlib.suppress(OSError), _opened(folder, uid) as fd:
            mounted = _believed(_name(dst), fd, uid)
            if mounted is not None:
                return mounted
    return None


def list_states(uid: int) -> list[Mounted]:
    """All that user *uid* has noted and that can be believed, by mount point; what is mounted in other namespaces too."""
    found: dict[str, Mounted] = {}
    for folder in reversed(_folders(uid)):
        with contextlib.suppress(OSError), _opened(folder, uid) as fd:
            known = (_believed(name, fd, uid) for name in os.listdir(fd))
            found |= {mounted.dst: mounted for mounted in known if mounted is not None}
    return [found[dst] for dst in sorted(found)]


def remove_state(dst: str, uid: int, *, pid: int = 0) -> None:
    """No state file of *dst* is left (with *pid*: unless it speaks of another server by now)."""
    known = read_state(dst, uid)
    if pid and known is not None and known.pid != pid:
        return
    for folder in _folders(uid):
        with contextlib.suppress(OSError), _opened(folder, uid) as fd:
            os.unlink(_name(dst), dir_fd=fd)


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none or it has ended (a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, start: int, uid: int) -> bool:
    """Whether the very process that had this number at that time still runs, and belongs to *uid*.

    The owner is asked because number and time may be another user's words: root would otherwise signal whatever
    process that user had written down.
    """
    return pid > 0 and start > 0 and process_start(pid) == start and _real_uid(pid) == uid


def _real_uid(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((line for line in file if line.startswith(b"Uid:")), b"Uid:\t-1")
    except OSError:
        return -1
    return int(line.split()[1])


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
    return facts.st_uid == uid and not facts.st_mode & 0o022


@contextlib.contextmanager
def _opened(folder: str, uid: int) -> Iterator[int]:
    """The folder itself, of that user, in which nobody else can put or replace a name. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not _belongs_to(os.fstat(fd), uid):
            raise PermissionError(errno.EPERM, "belongs to somebody else")
        yield fd
    finally:
        os.close(fd)


def _create(path: str, folder: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600, dir_fd=folder)


def _believed(name: str, folder: int, uid: int) -> Mounted | None:
    """What the state file of that name says, if it is one."""
    try:
        mounted = decode(_read(name, folder, uid), Mounted)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(mounted, Mounted) or _name(mounted.dst) != name:
        return None
    live = alive(mounted.pid, mounted.pid_start, uid)
    return msgspec.structs.replace(mounted, uid=uid, live=live)


def _read(name: str, folder: int, uid: int) -> bytes:
    """A small regular file of that user. Raises: OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, flags, dir_fd=folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or not _belongs_to(facts, uid):
            raise PermissionError(errno.EPERM, "belongs to somebody else")
        return os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)
