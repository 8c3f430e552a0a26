"""Where compiled kernels are kept between runs: a directory that only its owner can write, or nowhere.

numba's cache is pickle, so whoever can write to it runs code in every process that loads from it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import platformdirs

__all__ = ["default_directory", "is_private", "numba_cache_at", "private_directory"]

log = logging.getLogger(__name__)


def default_directory() -> Path:
    """The directory for this user and this version of the kernels. It may not exist yet.

    The name holds a hash of the kernels' source: numba itself compares only size and date of the
    file, which two releases may share.
    """
    source = Path(__file__).with_name("kernels.py").read_bytes()
    version = blake2b(source, digest_size=8).hexdigest()
    return Path(platformdirs.user_cache_path("fp8fs")) / "kernels" / version


def private_directory(path: Path) -> Path | None:
    """*path*, made if needed with mode 0700 and resolved; None if it cannot be had or is not private."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
        usable = is_private(path) and os.access(path, os.R_OK | os.W_OK | os.X_OK)
    except OSError as err:
        log.info("kernels are not cached: %s", err)
        return None
    if not usable:
        log.warning("kernels are not cached: others than this user may write to %s", path)
        return None
    return path


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root can change what *path*, a resolved directory, holds.

    Every parent counts: who may rename a parent may put another directory in its place. A sticky
    parent such as /tmp is safe, for only the owner may rename what is in it.
    """
    trusted = {0, os.geteuid()}
    own = os.lstat(path)
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.geteuid() or own.st_mode & 0o022:
        return False
    for parent in path.parents:
        facts = os.lstat(parent)
        shared = facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
        if facts.st_uid not in trusted or shared:
            return False
    return True


@contextmanager
def numba_cache_at(path: Path) -> Iterator[None]:
    """Inside, dispatchers that enable their cache use *path*; other users of numba are not affected."""
    import numba

    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(path)
    try:
        yield
    finally:
        config.CACHE_DIR = before
