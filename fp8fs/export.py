"""A finished tree as a plain, self-contained directory: no links, no store, no mount needed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from fp8fs.errors import StoreFullError, UsageError
from fp8fs.staging import staging

__all__ = [
    "check_apart",
    "check_no_mount_point",
    "check_parent",
    "check_target",
    "export_tree",
    "mount_point_error",
]

_COPY_BYTES = 64 << 20
_META = ".fp8fs"

Check = Callable[[str, Path], bool]
"""Whether the copy of the file of that relative path is right."""


def check_target(target: Path, src: Path) -> None:
    """Refuse a target that ``export_tree`` could not fill, before any work is done. Raises: UsageError."""
    if os.path.lexists(target):
        if target.is_symlink() or not os.path.isdir(target):
            raise UsageError(f"{target} is not a directory", hint="choose a new directory")
        if _holds_something(target):
            raise UsageError(f"{target} is not empty", hint="choose a new or an empty directory")
        check_no_mount_point(target)
    check_parent(target)
    inside, source = target.resolve(), src.resolve()
    if inside == source or source in inside.parents:
        raise UsageError(f"{target} is inside SRC {src}", hint="choose a place outside of it")


def check_parent(target: Path) -> None:
    """Raises: UsageError if there is no directory that *target* could be in."""
    parent = target.absolute().parent
    try:
        known = stat.S_ISDIR(os.stat(parent).st_mode)
    except PermissionError as err:
        raise UsageError(f"{parent}: {err.strerror}", hint="choose a place of yours") from err
    except OSError:
        known = False
    if not known:
        raise UsageError(f"{parent} does not exist", hint="create it first")


def check_apart(target: Path, store_root: Path) -> None:
    """Neither of *target* and the store is inside the other. Raises: UsageError."""
    copy, store = target.resolve(), store_root.resolve()
    if copy == store or store in copy.parents:
        raise UsageError(
            f"{target} is inside the store {store_root}", hint="choose a place outside of it"
        )
    if copy in store.parents:
        raise UsageError(f"the store {store_root} is inside {target}", hint="choose --store ROOT")


def _holds_something(target: Path) -> bool:
    try:
        return any(target.iterdir())
    except OSError as err:
        raise UsageError(
            f"{target} cannot be listed: {err.strerror}", hint="choose a new directory"
        ) from err


def export_tree(
    tree: Path,
    target: Path,
    *,
    progress: Callable[[int], None] | None = None,
    check: Check | None = None,
) -> bool:
    """*target* is a plain copy of *tree*: symlinks followed, attributes kept, all of it or nothing.

    The copy is staged beside *target* and renamed when it is durable. Blocks are shared with the store
    where the filesystem can. *progress* is told the bytes of each step. False, and nothing is there, if *check*
    finds a copy of a file that is not right.
    Raises: UsageError for an unfit target; StoreFullError if it cannot be written.
    """
    target = target.absolute()
    copying = _Copying(tree, progress or (lambda step: None), check or (lambda path, copy: True))
    try:
        with staging(target.parent) as stage:
            copy = stage / "copy"
            copy.mkdir(0o700)
            copying.directory(tree, copy)
            if not copying.right:
                return False
            os.rename(
                copy, target
            )  # over an empty directory too, never over what appeared meanwhile
            _sync(target.parent)
    except OSError as err:
        if err.errno == errno.EBUSY:
            raise mount_point_error(target) from err
        raise _cannot_write(target, err) from err
    return True


class _Copying:
    """One copy of *tree*. ``right``: *check* found nothing wrong so far; it sees every file, to tell all that is."""

    def __init__(self, tree: Path, progress: Callable[[int], None], check: Check) -> None:
        self._tree = tree
        self._progress = progress
        self._check = check
        self.right = True

    def directory(self, source: Path, target: Path) -> None:
        with os.scandir(source) as scan:
            names = sorted(scan, key=lambda entry: entry.name)
        for entry in names:
            place, copy = Path(entry.path), target / entry.name
            if entry.name == _META and source == self._tree:
                continue
            if entry.is_dir(follow_symlinks=False):
                copy.mkdir(mode=0o700)
                self.directory(place, copy)
            elif _leads_to_file(entry):
                _copy_file(place, copy, self._progress)
                if not self._check(str(place.relative_to(self._tree)), copy):
                    self.right = False
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), copy)  # to a directory, or dangling: as in SRC
        _copy_attributes(source, target)
        _sync(target)


def _leads_to_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file(follow_symlinks=True)
    except OSError:  # a link that leads to itself
        return False


def _copy_file(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _copy_bytes(reading, writing, os.fstat(reading).st_size, progress)
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    _copy_attributes(source, target)


def _copy_bytes(reading: int, writing: int, size: int, progress: Callable[[int], None]) -> None:
    """copy_file_range shares blocks or copies in the kernel; where it cannot, plain reads and writes."""
    at, in_kernel = 0, True
    while at < size:
        step = min(_COPY_BYTES, size - at)
        moved = 0
        if in_kernel:
            try:
                moved = os.copy_file_range(reading, writing, step, at, at)
            except OSError:
                in_kernel = False
                continue
        else:
            chunk = os.pread(reading, min(step, 4 << 20), at)
            moved = len(chunk)
            for done in range(0, moved, 1 << 20):
                _write_all(writing, chunk[done : done + (1 << 20)], at + done)
        if not moved:
            raise OSError(f"the file ends at byte {at}, expected {size}")
        at += moved
        progress(moved)


def _write_all(fd: int, data: bytes, file_offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, file_offset)
        view, file_offset = view[written:], file_offset + written


def _copy_attributes(source: Path, target: Path) -> None:
    found = source.stat()
    if os.geteuid() == 0:
        os.chown(target, found.st_uid, found.st_gid)
    os.chmod(target, stat.S_IMODE(found.st_mode) | (0o700 if target.is_dir() else 0))
    os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns))


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_no_mount_point(target: Path) -> None:
    """Raises: UsageError for a mount point, which nothing can be renamed over."""
    if os.path.ismount(target.absolute()):
        raise mount_point_error(target)


def mount_point_error(target: Path) -> UsageError:
    """A copy onto what turned out to be a mount point: said in the same words before and after the work."""
    return UsageError(
        f"{target} is a mount point, and a finished copy cannot take its place",
        hint=f"choose a new directory in it, as {target / 'model'}",
    )


def _cannot_write(place: Path, err: OSError) -> StoreFullError:
    what = err.strerror or str(err)
    named = os.fsdecode(err.filename) if isinstance(err.filename, str | bytes) else ""
    where = f" ({named})" if named and not named.startswith(f"{place.parent}/") else ""
    return StoreFullError(
        f"{place} cannot be written: {what}{where}", hint="check space and rights"
    )
