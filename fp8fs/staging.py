"""A place beside a target where it is made before it gets its name, gone afterwards whatever ends the work.

    PARENT/.fp8fs.tmp-<16 hex digits>/
        lock     held (flock) by the process that works there; its content is the host's name
        ...      what is being made

Whoever stages in the same parent removes what killed processes left: a directory of this name, of this user, whose lock
file says this host and is held by nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp8fs.signals import undisturbed

__all__ = ["staging"]

_NAME = re.compile(r"\.fp8fs\.tmp-[0-9a-f]{16}")
_LOCK = "lock"
_LOCK_MAX_BYTES = 256


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A new private directory in *parent*; what is in it at the end, and leftovers of killed processes, are removed.

    Raises: OSError if it cannot be made.
    """
    _remove_leftovers(parent)
    stage = parent / f".fp8fs.tmp-{secrets.token_hex(8)}"
    held = -1
    try:  # from here on: a signal may come at any time
        stage.mkdir(0o700)
        held = os.open(
            stage / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        if _locked(held):
            os.write(held, _host())  # without it nobody takes the directory for a leftover
        yield stage
    finally:
        with undisturbed():
            shutil.rmtree(stage, ignore_errors=True)
            if held >= 0:
                os.close(held)


def _remove_leftovers(parent: Path) -> None:
    try:
        names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with suppress(OSError):
            _remove_if_dead(parent / name)


def _remove_if_dead(stage: Path) -> None:
    if stage.lstat().st_uid != os.geteuid() or stage.is_symlink():
        return
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    held = os.open(stage / _LOCK, flags)
    try:
        if _locked(held) and os.read(held, _LOCK_MAX_BYTES) == _host():
            shutil.rmtree(stage, ignore_errors=True)
    finally:
        os.close(held)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _host() -> bytes:
    return os.fsencode(os.uname().nodename)
