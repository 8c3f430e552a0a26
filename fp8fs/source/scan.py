"""Where SRC is, what names are below it, and how a name is opened without ever opening the wrong thing."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from fp8fs.core.checkpoint import SourceEntry
from fp8fs.core.entries import folder_of
from fp8fs.core.text import brief, counted
from fp8fs.errors import SourceChangedError, SourceInvalidError
from fp8fs.source.access import mode_on_the_way, shown_mode

__all__ = [
    "Location",
    "changed",
    "count_snapshots",
    "difference",
    "leading_out",
    "locate",
    "open_planned",
    "open_regular",
    "scan",
    "unfinished_blobs",
]

_MAX_ENTRIES = 1_000_000
"""More names than any checkpoint has; stops a walk over "/"."""

_MAX_LINKED_ENTRIES = 10_000
"""A linked folder outside SRC with more names than this is shown as a link, not as a folder."""

_MAX_NESTED_LINKS = 8

_REMOUNT = "unmount and mount again"


class Location(NamedTuple):
    """SRC found: its folder, and the folder that has to be bound for its symlinks to resolve."""

    root: str
    bind_root: str
    bind_prefix: str


def locate(path: str) -> Location:
    """The checkpoint folder that *path* means: itself, or the snapshot of an HF cache repository.

    Raises: SourceInvalidError, also for a mounted view: to open its shards, were it only to refuse them, makes them.
    """
    try:
        root = os.path.realpath(path, strict=True)
        mode = os.stat(root).st_mode
    except OSError as err:
        raise SourceInvalidError(f"{brief(path)}: {os.strerror(err.errno or 0)}") from err
    if not stat.S_ISDIR(mode):
        raise SourceInvalidError(
            f"{brief(path)}: is not a directory",
            hint="give the directory that holds the checkpoint",
        )
    _refuse_view(root)
    if _is_repository(root):
        root = _snapshot(root)
    else:
        _refuse_cache(root)
    above = root
    while above != "/":
        above, name = os.path.split(above)
        if name == "snapshots" and _is_repository(above):
            return Location(root, above, os.path.relpath(root, above))
    return Location(root, root, "")


def _refuse_view(root: str) -> None:
    """Refuse a folder of a mounted view, without a look at its shards."""
    mount = root
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    try:
        with open(os.path.join(mount, ".fp8fs", "status.json"), "rb") as file:
            status = json.load(file)
    except (OSError, ValueError):
        return
    shown = status.get("src") if isinstance(status, dict) else None
    raise SourceInvalidError(
        f"{brief(root)}: already quantized: it is a view that fp8fs serves",
        hint=f"give its source, {brief(str(shown))}" if shown else "give its source",
    )


def _is_repository(folder: str) -> bool:
    """Whether a folder is laid out as a repository of the HF cache; a copy that followed its links may have no blobs."""
    has = {part for part in ("blobs", "refs", "snapshots") if os.path.isdir(f"{folder}/{part}")}
    return "snapshots" in has and len(has) > 1


def _refuse_cache(folder: str) -> None:
    """Refuse a whole HF cache: it holds many models, and none of them by itself."""
    models = sorted(
        entry.name
        for entry in _listed(folder)
        if entry.name.startswith("models--") and _is_repository(entry.path)
    )
    if models:
        shown = ", ".join(map(brief, models[:3])) + (", ..." if len(models) > 3 else "")
        raise SourceInvalidError(
            f"{brief(folder)}: is a Hugging Face cache with {counted(len(models), 'model')}: {shown}",
            hint=f"name one of them: {os.path.join(brief(folder), brief(models[0]))}",
        )


def unfinished_blobs(location: Location) -> list[str]:
    """Blobs of an HF cache repository whose download has not ended, by path in the repository."""
    try:
        names = set(os.listdir(os.path.join(location.bind_root, "blobs")))
    except OSError:
        return []
    if not location.bind_prefix:
        return []
    return sorted(
        f"blobs/{name}"
        for name in names
        if name.endswith(".incomplete") and name.partition(".")[0] not in names
    )


def count_snapshots(location: Location) -> int:
    """Revisions in an HF cache repository."""
    return sum(entry.is_dir() for entry in _listed(os.path.join(location.bind_root, "snapshots")))


def _snapshot(repository: str) -> str:
    """The snapshot to use: what refs/main says, else the only one."""
    snapshots = os.path.join(repository, "snapshots")
    try:
        with open(open_regular(os.path.join(repository, "refs", "main")), "rb") as file:
            revision = file.read(200).decode("ascii").strip()
    except (OSError, ValueError):
        revision = ""
    found = sorted(entry.name for entry in _listed(snapshots) if entry.is_dir())
    if revision in found:
        return os.path.join(snapshots, revision)
    if len(found) == 1:
        return os.path.join(snapshots, found[0])
    if not found:
        raise SourceInvalidError(
            f"{brief(repository)}: has no snapshot", hint="download the model first"
        )
    raise SourceInvalidError(
        f"{brief(repository)}: has {len(found)} snapshots and no refs/main among them: {', '.join(map(brief, found))}",
        hint="name one of them: " + os.path.join(brief(snapshots), "<revision>"),
    )


def _listed(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder. Raises: SourceInvalidError if it cannot be listed."""
    try:
        with os.scandir(folder) as listing:
            return list(listing)
    except OSError as err:
        raise _not_listed(folder, err) from err


def _not_listed(folder: str, err: OSError) -> SourceInvalidError:
    return SourceInvalidError(f"{brief(folder)}: cannot be listed: {os.strerror(err.errno or 0)}")


def scan(root: str) -> dict[str, SourceEntry]:
    """Every name below *root*, sorted, parents first.

    A symlink to a folder inside SRC stays one; its text is made relative, so that in the view it leads to the view's
    folder. One to a folder outside is walked as if the folder were there. Where that has no end or too many names, the
    link stays, with an absolute text.
    Raises: SourceInvalidError for a folder that cannot be listed.
    """
    entries: dict[str, SourceEntry] = {}
    if not _walk(root, "", entries, _MAX_ENTRIES, {root: ""}):
        raise SourceInvalidError(
            f"{brief(root)}: holds more than {_MAX_ENTRIES} names, no checkpoint does"
        )
    return dict(sorted(entries.items()))


def _walk(
    root: str, start: str, entries: dict[str, SourceEntry], limit: int, roots: dict[str, str]
) -> bool:
    """Add every name below *start*; False if there are more than *limit*. *roots*: folders under way, real path -> path."""
    folders = [start]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as listing:
                for found in listing:
                    path = f"{folder}/{found.name}" if folder else found.name
                    entry = _entry(root, path, found)
                    if entry is None:
                        continue
                    if entry.kind == "link" and os.path.isdir(found.path):
                        entry = _linked_folder(root, entry, entries, roots)
                    elif entry.kind == "dir":
                        folders.append(path)
                    entries[path] = entry
        except OSError as err:
            raise _not_listed(folder or root, err) from err
        if len(entries) > limit:
            return False
    return True


def _linked_folder(
    root: str, entry: SourceEntry, entries: dict[str, SourceEntry], roots: dict[str, str]
) -> SourceEntry:
    """What a symlink to a folder is in the view; what is below it is added where it is shown as a folder."""
    target = os.path.realpath(os.path.join(root, entry.path))
    for real, shown in roots.items():
        if _is_inside(target, real):
            below = os.path.normpath(os.path.join(shown or ".", os.path.relpath(target, real)))
            here = folder_of(entry.path)
            if os.path.normpath(os.path.join(here, entry.link)) == below:
                return entry
            return msgspec.structs.replace(entry, link=os.path.relpath(below, here or "."))
    if len(roots) <= _MAX_NESTED_LINKS and not any(_is_inside(real, target) for real in roots):
        linked: dict[str, SourceEntry] = {}
        try:
            facts = os.stat(target)
            complete = _walk(
                root, entry.path, linked, _MAX_LINKED_ENTRIES, {**roots, target: entry.path}
            )
        except (OSError, SourceInvalidError):
            complete = False
        if complete:
            entries.update(linked)
            mode = mode_on_the_way(shown_mode(target, facts), facts, target, root)
            return _describe(entry.path, "dir", facts, mode, entry.link)
    return msgspec.structs.replace(entry, link=target)


def _is_inside(path: str, folder: str) -> bool:
    """Whether *path* is *folder* or below it; both real."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _entry(root: str, path: str, found: os.DirEntry[str]) -> SourceEntry | None:
    """One name as it is now; None if it went away while the folder was listed."""
    try:
        facts, link = found.stat(follow_symlinks=False), ""
        if stat.S_ISLNK(facts.st_mode):
            link = os.readlink(found.path)
    except FileNotFoundError:
        return None
    kind = _kind(facts.st_mode)
    if link:
        try:
            target = os.stat(found.path)
        except OSError:  # dangling, a loop, or not ours to follow
            target = facts
        if not stat.S_ISDIR(target.st_mode) and not stat.S_ISLNK(target.st_mode):
            facts, kind = target, _kind(target.st_mode)
    mode = stat.S_IMODE(facts.st_mode) if kind == "link" else shown_mode(found.path, facts)
    if link and kind == "file":
        mode = mode_on_the_way(mode, facts, os.path.realpath(found.path), root)
    return _describe(path, kind, facts, mode, link)


def _describe(path: str, kind: str, facts: os.stat_result, mode: int, link: str) -> SourceEntry:
    """The entry for a name with these stat facts."""
    return SourceEntry(
        path=path,
        kind=kind,
        size=facts.st_size,
        mtime_ns=facts.st_mtime_ns,
        ctime_ns=facts.st_ctime_ns,
        mode=mode,
        uid=facts.st_uid,
        gid=facts.st_gid,
        dev=facts.st_dev,
        ino=facts.st_ino,
        link=link,
    )


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "link" if stat.S_ISLNK(mode) else "other"


def leading_out(location: Location, entries: Iterable[SourceEntry]) -> list[str]:
    """Paths of what is read through links that leave SRC (in an HF cache: its repository)."""
    bind_root = os.path.realpath(location.bind_root)
    return [
        entry.path
        for entry in entries
        if entry.link
        and entry.kind in ("file", "dir")
        and not _is_inside(os.path.realpath(os.path.join(location.root, entry.path)), bind_root)
    ]


def difference(entry: SourceEntry, facts: os.stat_result) -> str:
    """What differs between a planned file and what is there now, as one clause; "" if nothing."""
    if not stat.S_ISREG(facts.st_mode):
        return "was a regular file, is none now"
    compared = (
        ("size", entry.size, facts.st_size),
        ("mtime_ns", entry.mtime_ns, facts.st_mtime_ns),
        ("inode", entry.ino, facts.st_ino),
        ("device", entry.dev, facts.st_dev),
        ("ctime_ns", entry.ctime_ns, facts.st_ctime_ns),
    )
    for what, was, now in compared:
        if was != now:
            return f"{what} was {was}, is {now}"
    return ""


def changed(entry: SourceEntry, what: str) -> SourceChangedError:
    """The error for a file that is not the planned one."""
    path = brief(entry.path)
    return SourceChangedError(f"{path}: {what}", hint=_REMOUNT, file=path)


def open_regular(path: str) -> int:
    """A read-only descriptor of a regular file. Raises: OSError, ENXIO for anything else, which is never opened.

    Opening a device or a FIFO can do things (rewind a tape, wake a writer), so the name is only pinned first; what it is
    then opened through the pin, where nobody can exchange it any more.
    """
    pin = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(pin).st_mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
        return os.open(f"/proc/self/fd/{pin}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(pin)


def open_planned(root: str, entry: SourceEntry) -> int:
    """A read-only descriptor of the file that *entry* describes, and of no other.

    Raises: SourceChangedError if it is another file now; SourceInvalidError if it cannot be opened.
    """
    try:
        fd = open_regular(os.path.join(root, entry.path))
    except OSError as err:
        if err.errno == errno.ENXIO:
            raise changed(entry, "was a regular file, is none now") from err
        if err.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP):
            raise changed(entry, "was there, is gone") from err
        why = os.strerror(err.errno or 0)
        raise SourceInvalidError(f"{brief(entry.path)}: cannot be opened: {why}") from err
    try:
        if what := difference(entry, os.fstat(fd)):
            raise changed(entry, what)
    except BaseException:
        os.close(fd)
        raise
    return fd
