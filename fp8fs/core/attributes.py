"""Mode, owner and mtime of what is made from several source files: never more readers than each source has."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fp8fs.core.checkpoint import SourceEntry

__all__ = ["ROOT", "Attributes", "Owner", "strictest"]


class Owner(msgspec.Struct, frozen=True):
    """Who the files of the store can belong to. ``privileged`` (root): anybody; else only ``uid`` itself, and of the
    groups only ``gid`` and those in ``groups``."""

    uid: int
    gid: int
    privileged: bool = False
    groups: frozenset[int] = frozenset()


ROOT = Owner(uid=0, gid=0, privileged=True)


class Attributes(msgspec.Struct, frozen=True):
    """What ``stat`` says of a made file, in the view and sealed. ``mode`` has read bits only."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int


def strictest(sources: Sequence[SourceEntry], owner: Owner) -> Attributes:
    """Attributes that let nobody but *owner* read what it could not read in every one of *sources*.

    Owner and group are the sources' where they agree and the filesystem lets *owner* set them; a class of
    readers that changes with them loses its bit.
    """
    first = sources[0]
    mode = 0o444
    for source in sources:
        mode &= source.mode
    same_uid = all(source.uid == first.uid for source in sources)
    same_gid = all(source.gid == first.gid for source in sources)
    if not (same_uid and same_gid):
        mode &= 0o400
    keeps_uid = same_uid and (owner.privileged or first.uid == owner.uid)
    keeps_gid = same_gid and (
        owner.privileged or first.gid == owner.gid or first.gid in owner.groups
    )
    if not keeps_gid:
        # The old group's members are "other" now: what their own bit denied them stays denied.
        mode &= 0o400 if not mode & 0o040 else ~0o040
    if not keeps_uid:
        mode |= 0o400  # it reads every source already, or there would be no plan
    return Attributes(
        mode=mode,
        uid=first.uid if keeps_uid else owner.uid,
        gid=first.gid if keeps_gid else owner.gid,
        mtime_ns=max(source.mtime_ns for source in sources),
    )
