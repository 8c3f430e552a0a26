"""What leaves the store: copies that no fp8fs looks at again, so that every byte is checked before it is given away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fp8fs.assembly import Survey, survey
from fp8fs.audit import Damage, check_copy, check_tree, of_tree, set_aside
from fp8fs.core.layout import RESERVED
from fp8fs.core.recipe import Recipe
from fp8fs.errors import StoreBusyError, StoreDamagedError, StoreError
from fp8fs.export import export_tree
from fp8fs.store.store import Store, Tree

__all__ = ["GiveAway", "copy_tree", "give_away"]

_ATTEMPTS = 10

Note = Callable[[str], None]

GiveAway = Callable[[Survey, Store, Tree], list[Damage]]
"""Give something made of the finished tree away, unless there is damage: then only say which."""


def copy_tree(
    src: Path,
    target: Path,
    recipe: Recipe,
    store_root: Path,
    make: Callable[[], object],
    note: Note | None = None,
) -> None:
    """*target* is a plain copy of SRC's finished tree, and its bytes are those that were made.

    Raises: what ``give_away`` and ``export_tree`` raise. Cost: the copy, and one read of its shards.
    """

    def copy(found: Survey, store: Store, tree: Tree) -> list[Damage]:
        damage = [item for item in check_tree(found) if not item.path.startswith(f"{RESERVED}/")]
        if damage:
            return damage
        shards = {shard.path: shard for shard in found.plan.shards}

        def is_right(path: str, copied: Path) -> bool:
            shard = shards.get(path)
            bad = check_copy(store, shard, copied) if shard is not None else []
            if bad and shard is not None and not tree.is_linked(path, shard.object_id):
                bad = check_copy(store, shard) or of_tree(found.plan.plan_id, bad)
            damage.extend(bad)
            return not bad

        export_tree(tree.path, target, check=is_right)
        return damage

    give_away(src, recipe, store_root, copy, make, note)


def give_away(
    src: Path,
    recipe: Recipe,
    store_root: Path,
    give: GiveAway,
    make: Callable[[], object],
    note: Note | None = None,
) -> None:
    """*give* found no damage in SRC's finished tree. What it finds is set aside and made again, then it is called again.

    *make* is ``build_tree`` of the same arguments. *note* is told of each damage.
    Raises: StoreDamagedError for what cannot be made again, or is damaged again; StoreError for what cannot be read;
    StoreBusyError if others take the tree away each time; what *give* and *make* raise.
    """
    healed: set[str] = set()
    lost = 0
    while lost < _ATTEMPTS:
        with survey(src, recipe, store_root) as found:
            store, tree = found.store, found.tree
            if store is None or tree is None:  # others found damage in it, or removed it
                lost += 1
            else:
                damage = give(found, store, tree)
                if not damage:
                    return
                _check_curable(damage, store, healed)
                if note is not None:
                    for item in damage:
                        note(f"{_sentence(item)}; made again")
                set_aside(store, damage)
                healed.update(_key(item) for item in damage)
        make()
    raise StoreBusyError("the tree goes from the store again and again", hint="build again")


def _check_curable(damage: Iterable[Damage], store: Store, healed: set[str]) -> None:
    for item in damage:
        if not item.readable:
            raise StoreError(_sentence(item))
        if not store.writable:
            raise StoreDamagedError(
                f"{_sentence(item)}, and {store.why_not}", hint="name another store with --store"
            )
        if _key(item) in healed:
            raise StoreDamagedError(
                f"{_sentence(item)}, though it was just made again",
                hint="look at the disk of the store, or name another store with --store",
            )


def _key(item: Damage) -> str:
    return item.object_id or item.path


def _sentence(item: Damage) -> str:
    return ": ".join(part for part in (item.path, item.tensor, item.what) if part)
