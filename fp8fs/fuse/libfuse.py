"""Find libfuse 3 and its binding, and say what to install where they are missing."""

from __future__ import annotations

import os
from ctypes import CDLL
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from fp8fs.errors import FuseMissingError, MountError

__all__ = ["LibFuse", "check_fuse", "check_request_timeouts", "find_libfuse", "load_libfuse"]

DEVICE = "/dev/fuse"
_REMEDY = "apt-get install fuse3"
_SONAMES = ("libfuse3.so.3", "libfuse3.so.4")
_TIMEOUTS = ("default_request_timeout", "max_request_timeout")
_LONGEST_FILL_S = 3600


@dataclass(frozen=True, slots=True)
class LibFuse:
    """The loaded library (``library``, a ctypes handle) and the Python binding on it."""

    binding: Any
    library: CDLL
    minor: int


def check_fuse(*, allow_other: bool, conf: Path = Path("/etc/fuse.conf")) -> None:
    """This process may mount FUSE filesystems, and the kernel lets a request take as long as a fill.

    Raises: FuseMissingError for the device, the library or the helper; MountError for what an administrator has set.
    """
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError as err:
        raise FuseMissingError(
            f"{DEVICE} does not exist",
            hint="modprobe fuse; in a container add --device /dev/fuse --cap-add SYS_ADMIN",
        ) from err
    except OSError as err:
        raise FuseMissingError(
            f"{DEVICE} cannot be opened: {err.strerror}",
            hint=f"chmod 0666 {DEVICE}, as root" if os.geteuid() else "allow this device",
        ) from err
    find_libfuse()
    if os.geteuid() != 0:
        if which("fusermount3") is None:
            raise FuseMissingError(
                "fusermount3 is not on the PATH; mounting without root needs it", hint=_REMEDY
            )
        if allow_other and not _user_allow_other(conf):
            raise MountError(
                f"--allow-other without root needs the line user_allow_other in {conf}",
                hint=f"echo user_allow_other >> {conf}, as root",
            )
    check_request_timeouts(Path("/proc/sys/fs/fuse"))


def check_request_timeouts(folder: Path) -> None:
    """No limit on a request's time, or one longer than any fill. Raises: MountError."""
    for name in _TIMEOUTS:
        try:
            seconds = int((folder / name).read_text())
        except (OSError, ValueError):
            continue  # older kernels have no such limit
        if 0 < seconds < _LONGEST_FILL_S:
            raise MountError(
                f"fs.fuse.{name} is {seconds} s, a fill may take {_LONGEST_FILL_S} s",
                hint=f"sysctl fs.fuse.{name}=0",
                seconds=seconds,
            )


def in_user_namespace() -> bool:
    """Whether this process is root, or anybody, of a part of the machine only (a rootless container)."""
    try:
        text = Path("/proc/self/uid_map").read_text(encoding="ascii")
    except OSError:
        return False
    return text.split() != ["0", "0", "4294967295"]


def find_libfuse() -> str:
    """Name or path of libfuse 3 for dlopen. Raises: FuseMissingError saying what was probed."""
    chosen = os.environ.get("FUSE_LIBRARY_PATH")
    if chosen:
        candidates = [chosen]
    else:
        found = find_library("fuse3")
        candidates = [*([found] if found else []), *_SONAMES]
    answers = []
    for candidate in dict.fromkeys(candidates):
        try:
            version = int(CDLL(candidate).fuse_version())
        except (OSError, AttributeError) as err:
            answers.append(f"{candidate}: {err}")
            continue
        if version // (10 if version < 100 else 100) == 3:
            return candidate
        answers.append(f"{candidate}: is version {version}, not 3")
    raise FuseMissingError(f"libfuse 3 was not found ({'; '.join(answers)})", hint=_REMEDY)


def load_libfuse() -> LibFuse:
    """The binding, on libfuse 3 and never on a libfuse 2 that lies beside it. Raises: FuseMissingError."""
    os.environ["FUSE_LIBRARY_PATH"] = path = find_libfuse()
    try:
        import mfusepy
    except (ImportError, OSError, AttributeError) as err:
        raise FuseMissingError(
            f"mfusepy cannot be loaded on {path}: {err}", hint="pip install mfusepy"
        ) from err
    major, minor = mfusepy.fuse_version_major, mfusepy.fuse_version_minor
    if major != 3:
        raise FuseMissingError(f"mfusepy loaded libfuse {major}.{minor}, not 3", hint=_REMEDY)
    return LibFuse(mfusepy, CDLL(path), minor)


def _user_allow_other(conf: Path) -> bool:
    try:
        lines = conf.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)
