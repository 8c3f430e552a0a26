"""Everything about DST that can be refused before a mount exists."""

from __future__ import annotations

import os

from fp8fs.core.text import shell_word
from fp8fs.errors import MountPointError, UsageError
from fp8fs.fuse.mountinfo import FSTYPE, Mount, find

__all__ = ["check_choices", "check_places", "ensure_directory"]

SERVE = ("handoff", "inline")
GRAINS = ("shard", "tensor")


def check_choices(serve: str, grain: str) -> None:
    """--serve and --grain exist and go together. Raises: UsageError."""
    if serve not in SERVE:
        raise UsageError(f'unknown --serve "{serve}"', hint=" or ".join(SERVE))
    if grain not in GRAINS:
        raise UsageError(f'unknown --grain "{grain}"', hint=" or ".join(GRAINS))
    if grain == "tensor" and serve != "inline":
        raise UsageError("--grain tensor needs --serve inline", hint="add --serve inline")


def check_places(src: str, dst: str, store: str) -> None:
    """None of the three lies where it would show up inside another. All absolute and resolved; *store* "" for none.

    Raises: MountPointError.
    """
    if _inside(dst, src):
        raise MountPointError(f"{dst} is inside SRC {src}", hint="mount somewhere else")
    if _inside(src, dst):
        raise MountPointError(f"SRC {src} is inside {dst}", hint="mount somewhere else")
    if not store:
        return
    if _inside(store, src):
        raise MountPointError(f"the store {store} is inside SRC {src}", hint="choose --store ROOT")
    if _inside(store, dst):
        raise MountPointError(f"the store {store} is inside {dst}", hint="choose --store ROOT")
    if _inside(dst, store):
        raise MountPointError(f"{dst} is inside the store {store}", hint="mount somewhere else")


def ensure_directory(dst: str, mounts: list[Mount]) -> bool:
    """DST is an empty directory that we may mount on; True if it was made here. No fp8fs mount is there.

    Only the last component is made: a missing parent is more likely a typing mistake.
    """
    mount = find(dst, mounts)
    if mount is not None and mount.fstype == FSTYPE:
        raise MountPointError(
            f"{dst} is already mounted, from {mount.source}",
            hint=f"fp8fs unmount {shell_word(dst)}",
        )
    try:
        os.mkdir(dst, 0o755)
    except FileExistsError:
        pass
    except OSError as err:
        hint = "choose a directory that you may write"
        if isinstance(err, FileNotFoundError):
            hint = "make the directory above it first"
        raise MountPointError(f"{dst} cannot be made: {err.strerror}", hint=hint) from err
    else:
        return True
    try:
        with os.scandir(dst) as entries:
            first = next(entries, None)
    except NotADirectoryError as err:
        raise MountPointError(
            f"{dst} is not a directory", hint="choose an empty directory"
        ) from err
    except OSError as err:
        raise MountPointError(f"{dst} cannot be listed: {err.strerror}") from err
    if first is not None:
        raise MountPointError(f"{dst} is not empty", hint="choose an empty directory")
    if os.geteuid() != 0 and not os.access(dst, os.W_OK):
        raise MountPointError(
            f"{dst} is not writable for uid {os.geteuid()}: without root one mounts on one's own directories",
            hint="choose a directory of yours",
        )
    return False


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
