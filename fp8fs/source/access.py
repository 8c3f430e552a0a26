"""Who can reach a name of SRC: what its mode bits alone do not say.

The view and the store keep mode and owner, nothing else. Whatever else the system asks for before it lets somebody in
(an access control list, the folders on the way to a link's target) is turned into fewer bits here, so that nobody
reads through a mount what it could not read in SRC.
"""

from __future__ import annotations

import os
import stat

__all__ = ["mode_on_the_way", "shown_mode"]

_ACL = "system.posix_acl_access"


def shown_mode(path: str, facts: os.stat_result) -> int:
    """Permission bits of an existing file or folder; those of its owner alone where a list says more than bits can."""
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o077 and _has_acl(path):
        return mode & 0o7700
    return mode


def mode_on_the_way(mode: int, facts: os.stat_result, target: str, root: str) -> int:
    """*mode* without the classes of readers that some folder on the way from SRC to a link's *target* keeps out.

    Both paths real. Folders above both are not asked: who can enter SRC is decided where DST is.
    """
    shared = os.path.commonpath([root, target])
    folder = os.path.dirname(target)
    while len(folder) > len(shared):
        try:
            door = os.stat(folder)
        except OSError:
            return mode & 0o7700
        bits = shown_mode(folder, door)
        if not bits & 0o001:
            mode &= ~0o007
            if not (bits & 0o010 and door.st_gid == facts.st_gid):
                mode &= ~0o070
            if not (bits & 0o100 and door.st_uid == facts.st_uid):
                mode &= ~0o700
        folder = os.path.dirname(folder)
    # Whatever the bits say, it is read by us and by root.
    return mode | (stat.S_IMODE(facts.st_mode) & 0o700 if facts.st_uid in (0, os.geteuid()) else 0)


def _has_acl(path: str) -> bool:
    try:
        return bool(os.getxattr(path, _ACL))
    except OSError:
        return False  # none, or a filesystem without them
