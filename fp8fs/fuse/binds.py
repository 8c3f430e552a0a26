"""mount(2) and umount2(2), in a process of their own.

    python -I -S binds.py attach DST TREE SRC    wait for the mount to answer; bind TREE and SRC below it ("" for none)
    python -I -S binds.py detach POINT FLAGS ... take each mount away, stop at the first that fails
    python -I -S binds.py probe DST              exit 0 if the server answers, 3 if it is dead
    python -I -S binds.py read PATH LIMIT        print the file, cut at LIMIT bytes

The server never looks up a path in its own mount: a thread of it would wait, holding the interpreter's lock, for another
that needs the lock to answer. And whoever waits for a hung server has to be a process that can be given up. So this file
runs as a script, by path; it imports nothing of fp8fs. Exit code 1: one line of JSON on stderr, {"errno", "what"}.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import time

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_RELATIME = 32, 1024, 2048, 4096, 1 << 21
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8

DEAD = 3
"""Exit code of ``probe`` for a mount without a server."""

_KEPT = ((os.ST_NOEXEC, MS_NOEXEC), (os.ST_NOATIME, MS_NOATIME), (os.ST_NODIRATIME, MS_NODIRATIME), (os.ST_RELATIME, MS_RELATIME))  # fmt: skip
_ANSWER_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def bind(source: str, target: str) -> None:
    """*target* shows *source*, read-only, without set-uid and devices. Nothing stays if that cannot be had."""
    raw = os.fsencode(target)
    _call(f"bind {source} to {target}", _libc.mount(os.fsencode(source), raw, None, MS_BIND, None))
    try:
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
        # A remount that drops a flag of the original is refused inside a user namespace.
        has = os.statvfs(target).f_flag
        flags |= sum(kept for shown, kept in _KEPT if has & shown)
        _call(f"make {target} read-only", _libc.mount(None, raw, None, flags, None))
    except OSError:
        detach(target, MNT_DETACH)
        raise


def detach(point: str, flags: int) -> None:
    """*point* is not mounted any more."""
    _call(f"unmount {point}", _libc.umount2(os.fsencode(point), flags | UMOUNT_NOFOLLOW))


def attach(dst: str, tree: str, source: str) -> None:
    """The server answers, and both binds are in place."""
    end = time.monotonic() + _ANSWER_S
    while not os.path.isdir(f"{dst}/.fp8fs/tree"):
        if time.monotonic() > end:
            raise OSError(errno.ETIMEDOUT, "the mount does not answer", dst)
        time.sleep(0.01)
    done = []
    try:
        for what, where in ((tree, "tree"), (source, "src")):
            if what:
                bind(what, f"{dst}/.fp8fs/{where}")
                done.append(f"{dst}/.fp8fs/{where}")
    except OSError:
        for point in reversed(done):
            detach(point, MNT_DETACH)
        raise


def probe(dst: str) -> int:
    """Whether somebody serves *dst*. A name that was never asked for is in no cache of the kernel."""
    try:
        os.stat(f"{dst}/.fp8fs/probe-{os.getpid()}-{time.monotonic_ns()}")
    except FileNotFoundError:
        return 0
    except OSError as err:
        return DEAD if err.errno in (errno.ENOTCONN, errno.ECONNABORTED) else 0
    return 0


def main(arguments: list[str]) -> int:
    verb, *rest = arguments
    try:
        if verb == "attach":
            attach(*rest)
        elif verb == "detach":
            for point, flags in zip(rest[::2], rest[1::2], strict=True):
                detach(point, int(flags))
        elif verb == "probe":
            return probe(*rest)
        elif verb == "read":
            with open(rest[0], "rb") as file:
                sys.stdout.buffer.write(file.read(int(rest[1])))
        else:
            raise OSError(errno.EINVAL, "unknown verb", verb)
    except OSError as err:
        where = f" ({err.filename})" if err.filename else ""
        print(json.dumps({"errno": err.errno, "what": f"{err.strerror}{where}"}), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
