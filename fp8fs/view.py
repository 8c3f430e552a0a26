"""The mounted tree as a plain object: lookup, list, readlink, open, pread. Raises only Fp8fsError. Knows no FUSE.

    View(plan, engine, source, serve=..., grain=..., bound=..., tree=...)

Paths are relative to the mount, "/"-separated, "" for the root. Beside the planned entries there is ``.fp8fs/``,
reachable by name and never listed in the root: ``status.json`` (live), ``manifest.json``, ``plan.json``, and two empty
directories, ``tree`` and ``src``, that the store's tree and SRC are bound to.

The handoff (serve "handoff"): the kernel marks an inode bad whose type changes while a handle is open on it. So a shard
turns from file to link only while no handle is open on the file, and no handle is ever opened on a shard that can still
be sealed: ``open`` seals it and raises HandedOverError. Only where the store cannot take the shard does ``open`` give a
handle; the shard then stays a file until its last handle is released, sealed meanwhile or not.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from fp8fs.core.layout import Plan, ViewEntry
from fp8fs.core.text import brief
from fp8fs.errors import (
    BadHandleError,
    HandedOverError,
    IsADirectoryInViewError,
    NoSuchPathError,
    NotADirectoryInViewError,
    SourceChangedError,
    StoreError,
    UsageError,
)
from fp8fs.source.access import shown_mode

__all__ = ["Attrs", "Fill", "Poll", "Reader", "SourceFiles", "View"]

log = logging.getLogger(__name__)

Poll = Callable[[], None]
"""Called at least ten times a second while something waits; may raise InterruptedWaitError."""

LINK_MIN_BYTES = 1 << 20
"""Unchanged files of this size and more are links in handoff mode: worth a native read, too big to copy."""

META = ".fp8fs"
_STATUS = f"{META}/status.json"
_MOUNT_POINTS = (f"{META}/tree", f"{META}/src")
_MAX_LINK_HOPS = 40


class Attrs(NamedTuple):
    """What stat shows. ``kind``: "dir", "file" or "link"; ``mode``: permission bits; ``size``: bytes."""

    kind: str
    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int


class Reader(Protocol):
    """One inline handle on a view shard."""

    def pread(self, offset: int, length: int, poll: Poll) -> bytes: ...

    def close(self) -> None: ...


class Fill(Protocol):
    """What the view needs of the engine."""

    def ensure_sealed(self, shard: int, poll: Poll) -> Path:
        """Wait until the shard is published. Raises: StoreError if the store cannot take it."""
        ...

    def sealed(self, shard: int) -> Path | None:
        """Without waiting; once a path, always a path, unless it is removed from the store behind our back: looked at each time."""
        ...

    def open(self, shard: int) -> Reader: ...


class SourceFiles(Protocol):
    """What the view needs of the source."""

    @property
    def root(self) -> Path: ...

    @property
    def bind_root(self) -> Path: ...

    @property
    def bind_prefix(self) -> str: ...

    def open_file(self, path: str) -> int: ...


class _Content:
    """A handle on bytes that were made at open."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def pread(self, offset: int, length: int, poll: Poll) -> bytes:
        return self._content[offset : offset + length]

    def close(self) -> None:
        pass


class _Passthrough:
    """A handle on a file of SRC. Bytes that were read before a change was seen are not handed out."""

    def __init__(self, path: str, fd: int, size: int, mtime_ns: int) -> None:
        self._path, self._fd, self._size, self._mtime_ns = path, fd, size, mtime_ns

    def pread(self, offset: int, length: int, poll: Poll) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
            now = os.fstat(self._fd)
        except OSError as err:
            raise SourceChangedError(
                f"{brief(self._path)}: cannot be read: {err.strerror}", file=self._path
            ) from err
        if (now.st_size, now.st_mtime_ns) != (self._size, self._mtime_ns):
            fact, was, is_now = ("size", self._size, now.st_size)
            if was == is_now:
                fact, was, is_now = ("mtime_ns", self._mtime_ns, now.st_mtime_ns)
            raise SourceChangedError(
                f"{brief(self._path)}: {fact} was {was}, is {is_now}",
                hint="unmount and mount again",
                file=self._path,
                fact=fact,
                was=was,
                now=is_now,
            )
        return data

    def close(self) -> None:
        os.close(self._fd)


class _Handle(NamedTuple):
    reader: Reader
    attrs: Attrs
    shard: int  # -1 unless an inline handle on a shard


class View:
    """Thread-safe. Lock order: ``_lock`` alone; nothing slow happens under it.

    *bound*: the store's tree and SRC are (or will be) bound at ``.fp8fs/tree`` and ``.fp8fs/src``, so that links are
    relative and resolve in any mount namespace that sees the mount. Otherwise links are absolute, into *tree* (the
    path of the store's tree for this plan) and into SRC. *status* makes the live ``status.json``; *documents*
    makes the other files of ``.fp8fs/``, each once, when first asked for.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Fill,
        source: SourceFiles,
        *,
        serve: str,
        grain: str = "shard",
        bound: bool,
        tree: str = "",
        status: Callable[[], bytes] | None = None,
        documents: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        if serve not in ("handoff", "inline"):
            raise UsageError(f'unknown --serve "{serve}"', hint="handoff or inline")
        if grain not in ("shard", "tensor"):
            raise UsageError(f'unknown --grain "{grain}"', hint="shard or tensor")
        if grain == "tensor" and serve != "inline":
            raise UsageError("--grain tensor needs --serve inline", hint="add --serve inline")
        self._engine = engine
        self._source = source
        self._handoff = serve == "handoff"
        self._bound = bound
        self._tree = tree
        self._status = status or (lambda: b"{}")
        self._documents = {"plan.json": lambda: msgspec.json.encode(plan.rows), **(documents or {})}
        self._made: dict[str, bytes] = {}
        self._root_attrs = self._attrs_of_root(plan)
        self._entries: dict[str, ViewEntry] = {}
        self._children: dict[str, list[str]] = {"": []}
        self._links: dict[str, str] = {}  # fixed link texts, by path
        self._lock = threading.Lock()
        self._handles: dict[int, _Handle] = {}
        self._next_handle = 1
        self._inline: dict[int, int] = {}  # shard -> open (or opening) inline handles
        self._build(plan)

    @property
    def handoff(self) -> bool:
        """Whether sealed shards are links."""
        return self._handoff

    def lookup(self, path: str) -> Attrs:
        """Attributes of a name, as of now. Raises: NoSuchPathError."""
        if path == "":
            return self._root_attrs
        entry = self._entries.get(path)
        if entry is None:
            return self._lookup_meta(path)
        if entry.kind == "dir":
            return Attrs("dir", entry.mode, 0, entry.mtime_ns, entry.uid, entry.gid)
        text = self._link_text(entry)
        if text is not None:
            return Attrs(
                "link", 0o777, len(os.fsencode(text)), entry.mtime_ns, entry.uid, entry.gid
            )
        return Attrs("file", entry.mode, entry.size, entry.mtime_ns, entry.uid, entry.gid)

    def list(self, path: str) -> list[tuple[str, Attrs]]:
        """Names and attributes below a directory, in plan order."""
        if path == META:
            names = sorted({_STATUS, *_MOUNT_POINTS, *(f"{META}/{n}" for n in self._documents)})
            return [(name.rpartition("/")[2], self.lookup(name)) for name in names]
        children = self._children.get(path)
        if children is None:
            if self.lookup(path).kind == "dir":
                return []
            raise NotADirectoryInViewError(f'"{path}" is not a directory', path=path)
        return [(child.rpartition("/")[2], self.lookup(child)) for child in children]

    def readlink(self, path: str, poll: Poll | None = None) -> str:
        """The text of a link.

        The kernel may ask for what was one a moment ago, and whose sealed file somebody has removed since. With *poll*
        the shard is then sealed again, if the store can take it.
        Raises: HandedOverError (look the path up again: it is a file now); NoSuchPathError if it never was a link.
        """
        entry = self._entries.get(path)
        text = self._link_text(entry) if entry is not None else None
        if text is None and entry is not None and entry.kind == "shard" and self._handoff:
            text = self._link_again(entry, poll)
        if text is None:
            raise NoSuchPathError(f'"{path}" is not a link', path=path)
        return text

    def open(self, path: str, poll: Poll) -> int:
        """A handle for pread. Waits for the fill of a shard in handoff mode.

        Raises: HandedOverError (look the path up again: it is a link now); InterruptedWaitError from *poll*;
        SourceChangedError, NonFiniteTensorError and other reasons why the file cannot be had.
        """
        entry = self._entries.get(path)
        if entry is None:
            attrs = self._lookup_meta(path)
            if attrs.kind == "dir":
                raise IsADirectoryInViewError(f'"{path}" is a directory', path=path)
            content = self._meta_content(path)
            return self._add(_Handle(_Content(content), attrs._replace(size=len(content)), -1))
        if entry.kind == "shard":
            return self._open_shard(entry, poll)
        attrs = self.lookup(path)
        if attrs.kind == "dir":
            raise IsADirectoryInViewError(f'"{path}" is a directory', path=path)
        if attrs.kind == "link":
            raise HandedOverError(f'"{path}" is a link', path=path)
        if entry.kind == "text":
            return self._add(_Handle(_Content(entry.content), attrs, -1))
        fd = self._source.open_file(path)
        return self._add(
            _Handle(_Passthrough(path, fd, entry.size, entry.mtime_ns), attrs, -1),
        )

    def pread(self, handle: int, offset: int, length: int, poll: Poll) -> bytes:
        """Exactly the bytes [offset, offset + length) of the file, cut at its end."""
        held = self._held(handle)
        if offset < 0 or length <= 0:
            return b""
        return held.reader.pread(offset, length, poll)

    def attrs(self, handle: int) -> Attrs:
        """Attributes of an open handle: those of the file that it reads, whatever its path shows now."""
        return self._held(handle).attrs

    def release(self, handle: int) -> None:
        """The handle is gone. Called once per handle."""
        with self._lock:
            held = self._handles.pop(handle, None)
        if held is None:
            raise BadHandleError(f"no handle {handle}")
        held.reader.close()
        if held.shard >= 0:
            self._leave_inline(held.shard)

    def is_live(self, path: str) -> bool:
        """Whether the content changes from open to open, so that nobody may cache it."""
        return path == _STATUS

    def statfs(self) -> dict[str, int]:
        """Space of SRC's filesystem, in the fields of statvfs."""
        try:
            stat = os.statvfs(self._source.root)
        except OSError as err:
            raise SourceChangedError(f"{self._source.root}: statvfs: {err.strerror}") from err
        return {
            "f_bsize": stat.f_bsize,
            "f_frsize": stat.f_frsize,
            "f_blocks": stat.f_blocks,
            "f_bfree": stat.f_bfree,
            "f_bavail": stat.f_bavail,
            "f_files": stat.f_files,
            "f_ffree": stat.f_ffree,
            "f_favail": stat.f_favail,
            "f_flag": os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV,
            "f_namemax": stat.f_namemax,
        }

    def open_handles(self) -> int:
        """How many handles are open."""
        with self._lock:
            return len(self._handles)

    def _attrs_of_root(self, plan: Plan) -> Attrs:
        entry = plan.entries.get("")
        if entry is not None:
            return Attrs("dir", entry.mode, 0, entry.mtime_ns, entry.uid, entry.gid)
        root = self._source.root
        facts = os.stat(root)
        mode = shown_mode(str(root), facts)
        return Attrs("dir", mode, 0, facts.st_mtime_ns, facts.st_uid, facts.st_gid)

    def _build(self, plan: Plan) -> None:
        for path, entry in plan.entries.items():
            if path == "" or path == META or path.startswith(f"{META}/"):
                continue
            self._entries[path] = entry
            if entry.kind == "dir":
                self._children.setdefault(path, [])
            self._children.setdefault(path.rpartition("/")[0], []).append(path)
            if entry.kind == "link":
                self._links[path] = entry.link
            elif entry.kind == "source" and self._handoff:
                text = self._source_link(entry)
                if text is not None:
                    self._links[path] = text

    def _source_link(self, entry: ViewEntry) -> str | None:
        """The link that stands for an unchanged file, None to serve it as a file."""
        large = entry.size >= LINK_MIN_BYTES or entry.path.endswith(".safetensors")
        if not large:
            return None
        if not self._bound:
            return f"{self._source.root}/{entry.path}"
        if not _resolves_inside(self._source.root / entry.path, self._source.bind_root):
            return None
        inside = f"{self._source.bind_prefix}/{entry.path}".lstrip("/")
        return f"{_up(entry.path)}{META}/src/{inside}"

    def _link_text(self, entry: ViewEntry) -> str | None:
        if entry.kind != "shard":
            return self._links.get(entry.path)
        if not self._handoff or self._engine.sealed(entry.shard) is None:
            return None
        with self._lock:
            if self._inline.get(entry.shard):
                return None
        base = f"{_up(entry.path)}{META}/tree" if self._bound else self._tree
        return f"{base}/{entry.path}"

    def _link_again(self, entry: ViewEntry, poll: Poll | None) -> str:
        """A text after all. The kernel repeats a walk once: so an open that began at a link has to end at one, or at a file
        that stays one, and not at a file whose open hands it over."""
        text = None
        with self._lock:
            stays_file = bool(self._inline.get(entry.shard))
        if poll is not None and not stays_file:
            try:
                self._engine.ensure_sealed(entry.shard, poll)
            except StoreError as err:
                log.debug("%s: no link any more: %s", entry.path, err)
            else:
                text = self._link_text(entry)
        if text is None:
            raise HandedOverError(f'"{entry.path}" is a file now', path=entry.path)
        return text

    def _open_shard(self, entry: ViewEntry, poll: Poll) -> int:
        shard = entry.shard
        if self._handoff:
            self._hand_over(entry, poll)
        else:
            self._enter_inline(shard)
        try:
            reader = self._engine.open(shard)
        except BaseException:
            self._leave_inline(shard)
            raise
        attrs = Attrs("file", entry.mode, entry.size, entry.mtime_ns, entry.uid, entry.gid)
        return self._add(_Handle(reader, attrs, shard))

    def _hand_over(self, entry: ViewEntry, poll: Poll) -> None:
        """Raise HandedOverError once the shard is sealed. Returns, counted as inline, if it cannot be."""
        shard = entry.shard
        with self._lock:
            if self._inline.get(shard):  # it is a file for as long as that other handle lives
                self._inline[shard] += 1
                return
        try:
            self._engine.ensure_sealed(shard, poll)
        except StoreError as err:
            log.warning("%s: served without the store: %s", entry.path, err)
        else:
            raise HandedOverError(f'"{entry.path}" is sealed', path=entry.path)
        # Count first, then look again: a lookup that has answered "link" in between saw the shard
        # sealed and no handle, so it is seen sealed here too.
        if self._enter_inline(shard) == 1 and self._engine.sealed(shard) is not None:
            self._leave_inline(shard)
            raise HandedOverError(f'"{entry.path}" is sealed', path=entry.path)

    def _enter_inline(self, shard: int) -> int:
        with self._lock:
            self._inline[shard] = self._inline.get(shard, 0) + 1
            return self._inline[shard]

    def _leave_inline(self, shard: int) -> None:
        with self._lock:
            self._inline[shard] -= 1
            if not self._inline[shard]:
                del self._inline[shard]

    def _lookup_meta(self, path: str) -> Attrs:
        root = self._root_attrs
        if path == META or path in _MOUNT_POINTS:
            return root._replace(mode=root.mode & 0o555)
        if path == _STATUS or path.removeprefix(f"{META}/") in self._documents:
            size = len(self._meta_content(path))
            return root._replace(kind="file", mode=root.mode & 0o444, size=size)
        raise NoSuchPathError(f'no "{path}"', path=path)

    def _meta_content(self, path: str) -> bytes:
        if path == _STATUS:
            return self._status()
        name = path.removeprefix(f"{META}/")
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._documents[name]()
        return made

    def _add(self, held: _Handle) -> int:
        with self._lock:
            handle = self._next_handle
            self._next_handle += 1
            self._handles[handle] = held
        return handle

    def _held(self, handle: int) -> _Handle:
        with self._lock:
            held = self._handles.get(handle)
        if held is None:
            raise BadHandleError(f"no handle {handle}")
        return held


def _up(path: str) -> str:
    """The relative way from the directory of *path* to the root of the mount."""
    return "../" * path.count("/")


def _resolves_inside(path: Path, root: Path) -> bool:
    """Whether *path* leads to a file below *root* by relative symlinks alone, none of which leaves *root* on the way."""
    base = os.path.realpath(root)
    at = os.path.join(os.path.realpath(path.parent), path.name)
    for _ in range(_MAX_LINK_HOPS):
        if os.path.commonpath([base, at]) != base:
            return False
        try:
            text = os.readlink(at)
        except OSError:
            return True  # not a symlink
        if os.path.isabs(text):
            return False
        target = os.path.normpath(os.path.join(os.path.dirname(at), text))
        at = os.path.join(os.path.realpath(os.path.dirname(target)), os.path.basename(target))
    return False
