"""What the store holds, and what of it may go: lists, removal of trees, collection of what no tree needs."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from fp8fs.store.fsio import FsIo
from fp8fs.store.guard import closing_fd, remove_tree, storing, temporary_name
from fp8fs.store.holder import filesystem_now_ns, is_abandoned
from fp8fs.store.lease import PRESENCE, locked_file
from fp8fs.store.places import Places
from fp8fs.store.staging import try_retire
from fp8fs.store.trees import Tree, read_references
from fp8fs.store.types import ObjectInfo, PartialInfo, TreeInfo, Usage, no_poll

__all__ = ["Collector"]

PRIVATE_GRACE_S = 24 * 3600.0
"""Age after which a partial without locks counts as left behind, even if its holder is there."""

TEMPORARY_GRACE_S = 3600.0
"""Age after which what is in tmp/ counts as left behind: nothing is staged that long."""


class Collector:
    """Lists and removes. Thread-safe; what disappears meanwhile is no error."""

    def __init__(self, io: FsIo, places: Places) -> None:
        self._io = io
        self._places = places

    # -- what is there --------------------------------------------------------------------

    def objects(self) -> list[ObjectInfo]:
        with storing("cannot list the objects"):
            return [
                ObjectInfo(path.stem, info.st_size, info.st_nlink - 1, info.st_ctime_ns)
                for folder, _ in self._entries(self._places.objects)
                for path, info in self._entries(folder)
                if path.suffix == ".safetensors" and stat.S_ISREG(info.st_mode)
            ]

    def partials(self) -> list[PartialInfo]:
        with storing("cannot list the partial shards"):
            return [
                PartialInfo(
                    path.name.partition(".")[0],
                    *self._data_size(path / "data"),
                    in_use=self._in_use(path),
                )
                for path, info in self._entries(self._places.partials)
                if stat.S_ISDIR(info.st_mode)
            ]

    def trees(self) -> list[TreeInfo]:
        with storing("cannot list the trees"):
            return [
                TreeInfo(
                    path.name,
                    complete=Tree(self._io, self._places, path.name, writable=False).is_complete(),
                    pinned=self._is_pinned(path.name),
                    size=sum(i.st_size for i in self._walk(path) if stat.S_ISREG(i.st_mode)),
                    changed_ns=info.st_ctime_ns,
                    object_ids=read_references(self._io, path),
                )
                for path, info in self._entries(self._places.trees)
                if stat.S_ISDIR(info.st_mode)
            ]

    def usage(self) -> Usage:
        with storing("cannot measure the store"):
            return Usage(
                object_bytes=self._allocated(self._places.objects),
                partial_bytes=self._allocated(self._places.partials),
                damaged_bytes=self._allocated(self._places.damaged),
                free_bytes=self.free_bytes() or 0,
            )

    def _allocated(self, folder: Path) -> int:
        return sum(info.st_blocks * 512 for info in self._walk(folder))

    def free_bytes(self) -> int | None:
        """Bytes free on the store's filesystem, what it reserves for root left out, as df says it; None if unknown."""
        try:
            found = os.statvfs(self._places.home)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    # -- removal --------------------------------------------------------------------------

    def remove_tree(self, plan_id: str) -> None:
        """The tree is gone. Raises: StoreBusyError if it is pinned."""
        lock = self._places.tree_lock(plan_id)
        what = f"tree {plan_id}"
        with storing(f"cannot remove {what}"), ExitStack() as held:
            held.enter_context(
                locked_file(self._io, lock, no_poll, what=what, timeout_s=0.0, required=True)
            )
            self._discard(self._places.tree(plan_id))
            with suppress(FileNotFoundError):
                self._io.unlink(lock)

    def collect(self, *, keep: Collection[str], grace_s: float) -> int:
        """Remove what no tree refers to or links, that nobody uses and is old enough. Returns the bytes freed.

        refer() waits while this runs, so that no object goes between the look at the references and its removal.
        """
        with storing("cannot collect"), ExitStack() as held:
            held.enter_context(
                locked_file(self._io, self._places.guard, no_poll, what="the store (gc)")
            )
            needed = set(keep)
            for path, info in self._entries(self._places.trees):
                if stat.S_ISDIR(info.st_mode):
                    needed |= read_references(self._io, path)
            return (
                self._collect_objects(needed, grace_s)
                + self._collect_partials(needed, grace_s)
                + self._collect_old(self._places.damaged, grace_s)
                + self._collect_old(self._places.tmp, max(grace_s, TEMPORARY_GRACE_S))
            )

    def _collect_objects(self, needed: set[str], grace_s: float) -> int:
        freed = 0
        for folder, _ in self._entries(self._places.objects):
            for path, info in self._entries(folder):
                key = path.stem
                if key in needed or info.st_nlink > 1 or _age_s(info) < grace_s:
                    continue
                if path.suffix == ".json" and os.path.lexists(folder / f"{key}.safetensors"):
                    continue
                freed += self._unlink(path, info)
                if path.suffix == ".safetensors":
                    with suppress(FileNotFoundError):
                        record = folder / f"{key}.json"
                        freed += self._unlink(record, self._io.lstat(record))
        return freed

    def _collect_partials(self, needed: set[str], grace_s: float) -> int:
        freed = 0
        for path, info in self._entries(self._places.partials):
            idle_s = self._idle_s(path, info)
            if path.name in needed or idle_s < grace_s:
                continue
            allocated = self._allocated(path)
            if "." in path.name:  # private: made where nothing can be locked
                now_ns = filesystem_now_ns(self._io, self._places.tmp)
                if idle_s >= PRIVATE_GRACE_S or is_abandoned(self._io, path, now_ns):
                    freed += self._discard(path)
            elif try_retire(self._io, self._places, path):
                freed += allocated
        return freed

    def _collect_old(self, folder: Path, grace_s: float) -> int:
        freed = 0
        for path, info in self._entries(folder):
            if path.name == "lock" or _age_s(info) < grace_s:
                continue
            if stat.S_ISDIR(info.st_mode):
                freed += remove_tree(self._io, path)
            else:
                freed += self._unlink(path, info)
        return freed

    def _discard(self, path: Path) -> int:
        gone = self._places.tmp / temporary_name(path.name)
        try:
            with closing_fd(self._io, self._io.open_dir(path)) as fd:
                self._io.fchmod(fd, 0o700)  # moving a directory takes the right to write in it
            self._io.rename(path, gone)
        except FileNotFoundError:
            return 0
        return remove_tree(self._io, gone)

    def _unlink(self, path: Path, info: os.stat_result) -> int:
        try:
            self._io.unlink(path)
        except FileNotFoundError:
            return 0
        return info.st_blocks * 512 if info.st_nlink == 1 else 0

    # -- looking --------------------------------------------------------------------------

    def _entries(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            names = self._io.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            path = folder / name
            try:
                info = self._io.lstat(path)
            except FileNotFoundError:
                continue
            yield path, info

    def _walk(self, folder: Path) -> Iterator[os.stat_result]:
        for path, info in self._entries(folder):
            yield info
            if stat.S_ISDIR(info.st_mode):
                yield from self._walk(path)

    def _data_size(self, path: Path) -> tuple[int, int]:
        try:
            info = self._io.lstat(path)
        except FileNotFoundError:
            return 0, 0
        return info.st_size, info.st_blocks * 512

    def _idle_s(self, path: Path, info: os.stat_result) -> float:
        """Seconds since a partial's newest change."""
        return min(_age_s(inner) for inner in [info, *self._walk(path)])

    def _in_use(self, path: Path) -> bool:
        try:
            fd = self._io.open(path / "lock", os.O_RDWR)
        except OSError:
            return False
        with closing_fd(self._io, fd):
            try:
                return not self._io.try_lock_range(fd, PRESENCE, 1, exclusive=True)
            except OSError:
                return False

    def _is_pinned(self, plan_id: str) -> bool:
        try:
            fd = self._io.open(self._places.tree_lock(plan_id), os.O_RDONLY)
        except OSError:
            return False
        with closing_fd(self._io, fd):
            try:
                return not self._io.try_flock(fd, exclusive=True)
            except OSError:
                return False


def _age_s(info: os.stat_result) -> float:
    """Seconds since the inode changed; the change time of the future counts as now."""
    return max(0.0, time.time() - info.st_ctime)
