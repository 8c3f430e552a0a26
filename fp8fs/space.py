"""Whether what is still to be made has room in the store: asked before filling, not found out in the middle."""

from __future__ import annotations

from typing import NamedTuple

from fp8fs.core.plan import Plan
from fp8fs.errors import StoreError, StoreFullError
from fp8fs.store.store import Store

__all__ = ["Room", "check_room", "room_for", "shortage"]

_SLACK_BYTES = 1 << 20
"""Journals, records, copies of small files."""


class Room(NamedTuple):
    """``needed_bytes``: what the unsealed shards of a plan still take; ``free_bytes``: what there is, None if unknown."""

    needed_bytes: int
    free_bytes: int | None

    @property
    def enough(self) -> bool:
        return self.free_bytes is None or self.needed_bytes <= self.free_bytes


def room_for(plan: Plan, store: Store) -> Room:
    """What the plan still needs, finished units of its partial shards not counted. Cost: a stat per shard."""
    begun: dict[str, int] = {}
    for partial in store.list_partials():
        begun[partial.object_id] = max(begun.get(partial.object_id, 0), partial.allocated_bytes)
    sizes = {shard.object_id: shard.size for shard in plan.shards}
    left = sum(
        max(0, size - begun.get(object_id, 0))
        for object_id, size in sizes.items()
        if not store.object_path(object_id).exists()
    )
    return Room(left + _SLACK_BYTES if left else 0, store.free_bytes())


def check_room(plan: Plan, store: Store) -> None:
    """Raises: StoreFullError, with both numbers, if the rest of the plan does not fit."""
    room = room_for(plan, store)
    if not room.enough:
        raise StoreFullError(
            _sentence(store, room),
            hint="free some space (fp8fs gc), or name another store with --store",
            needed_bytes=room.needed_bytes,
            free_bytes=room.free_bytes,
        )


def shortage(plan: Plan, store: Store) -> str:
    """The same as a warning, "" if there is room enough or nobody can tell."""
    try:
        room = room_for(plan, store)
    except StoreError:
        return ""
    if room.enough:
        return ""
    return f"{_sentence(store, room)}; what does not fit is made in memory at each read"


def _sentence(store: Store, room: Room) -> str:
    return (
        f"the store {str(store.root)!r} needs {room.needed_bytes:,} bytes more for all of this view, "
        f"{room.free_bytes:,} are free"
    )
