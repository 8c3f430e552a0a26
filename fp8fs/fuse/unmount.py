"""Take a mount away, dead or alive, and say who is in the way. Finds it in mountinfo; never looks into it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterable

from fp8fs.errors import MountError, MountPointError, NotMountedError
from fp8fs.fuse import binds
from fp8fs.fuse.mountinfo import FSTYPE, Mount, below, find, read_mountinfo, resolve
from fp8fs.fuse.outside import (
    attach_command,
    detach_command,
    detach_gently_command,
    probe_command,
    run,
)
from fp8fs.fuse.polling import readable
from fp8fs.fuse.spec import Mounted, UnmountReport
from fp8fs.fuse.state import alive, list_states, read_state, remove_state

__all__ = [
    "clean_up_stale",
    "describe",
    "find_mount",
    "list_elsewhere",
    "list_mounts",
    "unmount",
]

_HELPER_S = 10.0
_PROBE_S = 2.0
_NAMED_USERS = 5


def list_mounts() -> list[Mounted]:
    """Every fp8fs mount in this mount namespace, by mount point."""
    mounts = read_mountinfo()
    points = sorted({mount.point for mount in mounts if mount.fstype == FSTYPE})
    tops = (find(point, mounts) for point in points)
    return [describe(mount) for mount in tops if mount is not None and mount.fstype == FSTYPE]


def list_elsewhere(here: Iterable[Mounted]) -> list[Mounted]:
    """Mounts of this user whose server runs, but for those *here* (``list_mounts``): they are in another mount namespace,
    or were detached while somebody used them."""
    pids = {mounted.pid for mounted in here}
    return [noted for noted in list_states(os.geteuid()) if noted.live and noted.pid not in pids]


def find_mount(dst: str) -> Mounted:
    """The fp8fs mount at *dst*. Raises: NotMountedError."""
    return describe(_mount_at(dst))


def describe(mount: Mount) -> Mounted:
    """What the mount's state file says, or what the kernel and a probe say where there is none."""
    uid = _owner(mount)
    known = read_state(mount.point, uid)
    if known is not None:
        return known
    return Mounted(dst=mount.point, src=mount.source, live=_answers(mount.point), uid=uid)


def unmount(dst: str, *, lazy: bool = False, timeout_s: float = 5.0) -> UnmountReport:
    """Nothing of fp8fs is mounted at *dst* any more, its server is gone, and the directory too if ``mount`` made it.

    Raises: NotMountedError; MountPointError if it is in use (naming the processes) and not *lazy*, or is another user's.
    """
    mount = _mount_at(dst)
    dst = mount.point
    if os.geteuid() not in (0, _owner(mount)):
        raise MountPointError(f"{dst} was mounted by uid {_owner(mount)}", hint="ask them, or root")
    known = describe(mount)
    users: list[int] = []
    if not known.live:
        _detach_all(dst)
    else:
        users = _users(dst) if lazy else []
        if lazy or not _detach_gently(known):
            _detach_all(dst)
    killed = _end_server(known, timeout_s)
    held_by = _holders(mount)
    _tidy(known)
    return UnmountReport(
        dst=dst,
        stale=not known.live,
        killed=killed,
        held_by=tuple(held_by),
        users=tuple(users),
    )


def clean_up_stale(dst: str) -> bool:
    """No dead fp8fs mount is left at *dst*, nor the directory if ``mount`` had made it. True if there was one; a live one is left alone."""
    found = False
    for _ in range(16):  # several may lie on one another
        mount = find(dst, read_mountinfo())
        if mount is None or mount.fstype != FSTYPE:
            return found
        known = describe(mount)
        if known.live:
            return found
        if os.geteuid() not in (0, _owner(mount)):
            raise MountPointError(
                f"{dst} holds a dead mount of uid {_owner(mount)}", hint="ask them, or root"
            )
        _detach_all(dst)
        _tidy(known)
        found = True
    raise MountError(f"{dst}: dead mounts cannot be taken away")


def _mount_at(dst: str) -> Mount:
    mounts = read_mountinfo()
    point = resolve(dst, mounts)
    mount = find(point, mounts)
    if mount is None or mount.fstype != FSTYPE:
        noted = read_state(point, os.geteuid())
        hint = "fp8fs status lists the mounts"
        if noted is not None and noted.live:
            hint = f"it is in another mount namespace, or detached and in use: kill {noted.pid} ends it"
        raise NotMountedError(f"no fp8fs mount at {point}", hint=hint)
    return mount


def _owner(mount: Mount) -> int:
    text = mount.super_option("user_id")
    return int(text) if text.isdigit() else 0


def _answers(dst: str) -> bool:
    """Whether anybody serves the mount; a server that is too slow to say so counts as one."""
    answer = run(probe_command(dst), _PROBE_S)
    return answer is None or answer.code != binds.DEAD


def _detach_all(dst: str) -> None:
    """Out of this namespace, binds and all, in use or not."""
    answer = run(detach_command(dst), _HELPER_S)
    if (answer is None or answer.code) and find(dst, read_mountinfo()) is not None:
        why = "no answer" if answer is None else answer.said or answer.code
        raise MountError(f"{dst} cannot be unmounted: {why}")


def _detach_gently(known: Mounted) -> bool:
    """Binds first, then the mount, each only if nobody uses it. False if the server is too hung to walk through."""
    dst = known.dst
    own = (f"{dst}/.fp8fs/tree", f"{dst}/.fp8fs/src")
    points = [mount.point for mount in below(dst, read_mountinfo()) if mount.point in own]
    answer = run(detach_gently_command(dst, points), _HELPER_S)
    if answer is None:
        return False
    if answer.code == 0 or find(dst, read_mountinfo()) is None:
        return True
    if answer.errno != errno.EBUSY and "busy" not in answer.said.lower():
        raise MountError(f"{dst} cannot be unmounted: {answer.said}")
    left = [mount.point for mount in below(dst, read_mountinfo())]
    _attach_again(known, left)
    raise MountPointError(
        f"{dst} is in use by {_name_users(dst, left)}", hint="end them, or unmount --lazy"
    )


def _attach_again(known: Mounted, left: list[str]) -> None:
    """What was taken away before somebody turned out to use the rest is put back.

    Only root's mounts have binds. What another user's state file says of binds is not believed: it would bind for them.
    """
    if known.uid != 0:
        return
    tree = "" if f"{known.dst}/.fp8fs/tree" in left or not known.bind_src else known.tree
    source = "" if f"{known.dst}/.fp8fs/src" in left else known.bind_src
    if tree or source:
        run(attach_command(known.dst, tree, source), _HELPER_S)


def _end_server(known: Mounted, timeout_s: float) -> bool:
    """The server is gone; True if it had to be killed. It ends by itself once its mount is gone: the signal hurries it."""
    try:
        server = os.pidfd_open(known.pid) if known.pid > 0 else -1
    except OSError:
        return False
    if server < 0:
        return False
    try:
        # Judged after the descriptor was taken: from here on the number cannot come to mean another process.
        if not alive(known.pid, known.pid_start, known.uid):
            return False
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(server, number)
            if readable([server], timeout_s):
                with contextlib.suppress(ChildProcessError):  # our own child, if we mounted it
                    os.waitpid(known.pid, os.WNOHANG)
                return number is signal.SIGKILL
    finally:
        os.close(server)
    raise MountError(f"the server of {known.dst}, pid {known.pid}, does not end")


def _tidy(known: Mounted) -> None:
    remove_state(known.dst, known.uid)
    if known.created_dst and find(known.dst, read_mountinfo()) is None:
        with contextlib.suppress(OSError):
            os.rmdir(known.dst)


def _name_users(dst: str, left: list[str]) -> str:
    pids = _users(dst)
    others = [point for point in left if not point.startswith(f"{dst}/.fp8fs/")]
    names = [f"pid {pid} ({_command(pid)})" for pid in pids[:_NAMED_USERS]]
    names += [f"the mount {point}" for point in others[:_NAMED_USERS]]
    more = len(pids) - len(names)
    if more > 0:
        names.append(f"{more} more")
    return ", ".join(names) or "somebody that /proc does not show"


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "gone"


def _users(dst: str) -> list[int]:
    """Processes with a file, mapping, root or working directory below *dst*. Reads names only, so it cannot block on DST."""
    return [pid for pid in _pids() if pid != os.getpid() and _uses(pid, dst)]


def _uses(pid: int, dst: str) -> bool:
    inside = dst.rstrip("/") + "/"
    links = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
    with contextlib.suppress(OSError):
        links += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    for link in links:
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target == dst or target.startswith(inside):
                return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        needle = os.fsencode(inside)
        return any(needle in line for line in file)
    return False


def _holders(gone: Mount) -> list[int]:
    """One process for each other mount namespace in which the filesystem is still mounted.

    Which namespace a process is in is not for everybody to see, but its mounts are, and their ids are unique in the whole
    system: what is mounted under an id of ours is in our namespace. A device number alone may be another mount's by now.
    """
    ours = {mount.mount_id for mount in read_mountinfo()}
    spaces, seen, holders = {_namespace("self")}, set[int](), []
    for pid in _pids():
        space = _namespace(str(pid))
        if space in spaces:
            continue
        if space:
            spaces.add(space)
        with contextlib.suppress(OSError):
            showing = {mount.mount_id for mount in read_mountinfo(pid) if _is_same(mount, gone)}
            if showing - ours - seen:
                holders.append(pid)
            seen |= showing
    return holders


def _is_same(mount: Mount, gone: Mount) -> bool:
    return (mount.device, mount.fstype, mount.source) == (gone.device, gone.fstype, gone.source)


def _namespace(pid: str) -> str:
    """Which mount namespace, "" if we may not know."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
