"""Where compiled kernels are kept between runs: a directory that only its owner can write, or nowhere.

What is kept is machine code, so whoever can write there runs code in every process that loads from it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import stat
import threading
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import platformdirs

from fp8fs.quant import machine_code
from fp8fs.quant.machine_code import MachineCode

__all__ = ["default_directory", "is_private", "private_directory", "read", "write"]

log = logging.getLogger(__name__)


def default_directory() -> Path:
    """The directory for this user and this version of the kernels. It may not exist yet.

    The name holds a hash of the kernels' source.
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


def read(directory: Path, name: str, dtype: str) -> MachineCode | None:
    """The kernel as this processor and the installed compiler make it; None if it is not there or damaged."""
    path = _path(directory, name, dtype)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as err:
        log.warning("%s cannot be read: %s; compiled again", path, err.strerror)
        return None
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            log.warning("%s is not this user's alone; compiled again", path)
            return None
        code = machine_code.decode(file.read())
    if code is None or (code.name, code.dtype) != (name, dtype):
        log.warning("%s is damaged; compiled again", path)
        return None
    return code


def write(directory: Path, code: MachineCode) -> None:
    """The kernel is kept, whole or not at all. What cannot be kept is compiled again next time."""
    path = _path(directory, code.name, code.dtype)
    staged = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(machine_code.encode(code))
        staged.replace(path)
    except OSError as err:
        log.warning("compiled kernels are not kept: %s", err)
        with suppress(OSError):
            staged.unlink()


def _path(directory: Path, name: str, dtype: str) -> Path:
    return directory / f"{name}-{dtype}-{_toolchain()}.code"


@cache
def _toolchain() -> str:
    """A hash of what decides machine code beside the kernels' source: numba, LLVM, the processor."""
    facts = [_version("numba"), _version("llvmlite"), machine_code.processor()]
    return blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


def _version(package: str) -> str:
    """What tells one release of an installed package from another, without the cost of importing it."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin:
        with suppress(OSError):
            return Path(spec.origin).with_name("_version.py").read_text()
    return importlib.metadata.version(package)
