"""``fp8fs ls``, ``rm`` and ``gc``: what the store holds, and making room in it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8fs.cli.options import Json, Quiet, Store, store_root

if TYPE_CHECKING:
    from fp8fs.store.store import Store as StoreDirectory
    from fp8fs.store.store import TreeInfo

__all__ = ["gc", "ls", "rm"]

_SHORTEST_BEGINNING = 4
"""Of an id: what is shorter may be a slip, or an unset variable, and says nothing of which tree is meant."""

_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _open(root: Path | None) -> StoreDirectory:
    from fp8fs.store.store import Store as StoreDirectory

    return StoreDirectory.open(store_root(root), create=False)


def ls(store: Store = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """List the trees in the store: size, age, whether complete, in use or kept."""
    from fp8fs.cli.output import Output, format_bytes, format_duration, printable
    from fp8fs.tree import is_pinned_for_good, origin_of

    output = Output(as_json=as_json, quiet=quiet)
    opened = _open(store)
    usage = opened.usage()
    trees = sorted(opened.list_trees(), key=lambda tree: -tree.changed_ns)
    rows = [
        {
            "plan_id": tree.plan_id,
            "src": origin_of(opened.tree(tree.plan_id).path),
            "path": str(opened.tree(tree.plan_id).path),
            "complete": tree.complete,
            "in_use": tree.pinned,
            "kept": is_pinned_for_good(opened.tree(tree.plan_id).path),
            "size": tree.size,
            "changed_ns": tree.changed_ns,
        }
        for tree in trees
    ]
    if as_json:
        output.document({"store": str(opened.root), "usage": usage, "trees": rows})
        return
    headings = ("tree", "size", "age", "state", "made from")
    cells = []
    for row, tree in zip(rows, trees, strict=True):
        states = ["complete" if row["complete"] else "partial"]
        states += [word for word, on in (("in use", row["in_use"]), ("kept", row["kept"])) if on]
        age = format_duration(max(0.0, time.time() - tree.changed_ns / 1e9))
        source = printable(str(row["src"]))
        cells.append((tree.plan_id[:12], format_bytes(tree.size), age, ", ".join(states), source))
    output.table(headings, cells, right=("size",))
    output.line(
        f"{opened.root}: {format_bytes(usage.object_bytes)} sealed, "
        f"{format_bytes(usage.partial_bytes)} in the making, {format_bytes(usage.free_bytes)} free"
    )


def rm(
    trees: Annotated[
        list[str],
        typer.Argument(metavar="TREE...", help="Ids from ls, or their beginnings (4 characters)."),
    ],
    store: Store = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove trees and what only they need; never one that is in use."""
    from fp8fs.cli.output import Output, format_bytes
    from fp8fs.core.text import counted

    output = Output(as_json=as_json, quiet=quiet)
    opened = _open(store)
    known = opened.list_trees()
    chosen = list(dict.fromkeys(_chosen(word, known).plan_id for word in trees))
    for plan_id in chosen:
        _remove(opened, plan_id)
    freed = opened.collect(grace_s=0)
    if as_json:
        output.document({"removed": chosen, "freed_bytes": freed})
    else:
        output.note(f"{counted(len(chosen), 'tree')} removed, {format_bytes(freed)} freed")


def _remove(opened: StoreDirectory, plan_id: str) -> None:
    """The tree is gone. Raises: StoreBusyError, naming the mount or the process that uses it."""
    from fp8fs.core.text import shell_word
    from fp8fs.errors import StoreBusyError
    from fp8fs.fuse import session

    try:
        opened.remove_tree(plan_id)
    except StoreBusyError as err:
        path = str(opened.tree(plan_id).path)
        for mounted in session.list_mounts():
            if mounted.live and mounted.tree == path:
                raise StoreBusyError(
                    f"tree {plan_id} is in use by the mount {mounted.dst}, pid {mounted.pid}",
                    hint=f"fp8fs unmount {shell_word(mounted.dst)}",
                    **err.facts,
                ) from err
        raise


def gc(
    quota: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Remove the oldest trees until sealed bytes fit (500G)."),
    ] = None,
    store: Store = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove what no tree needs, and with --quota the trees that changed longest ago.

    Never removed: a tree in use, and one whose path `build` or `path` printed (use rm for those).
    """
    from fp8fs.cli.output import Output, format_bytes
    from fp8fs.core.text import counted

    output = Output(as_json=as_json, quiet=quiet)
    opened = _open(store)
    limit = _size(quota) if quota is not None else None
    removed, freed = _collect(opened, limit)
    used = opened.usage().object_bytes
    if as_json:
        output.document({"removed": removed, "freed_bytes": freed, "object_bytes": used})
    else:
        output.note(
            f"{counted(len(removed), 'tree')} removed, {format_bytes(freed)} freed, {format_bytes(used)} left"
        )
        if limit is not None and used > limit:
            output.note("still over the quota: the rest is in use or kept")


def _collect(opened: StoreDirectory, limit: int | None) -> tuple[list[str], int]:
    from fp8fs.errors import StoreBusyError
    from fp8fs.tree import is_pinned_for_good

    removed: list[str] = []
    if not opened.list_trees() and not opened.list_objects() and not opened.writable:
        return removed, 0  # no store there yet: nothing to collect
    freed = opened.collect()
    if limit is None:
        return removed, freed
    for tree in sorted(opened.list_trees(), key=lambda tree: tree.changed_ns):
        if opened.usage().object_bytes <= limit:
            break
        if tree.pinned or is_pinned_for_good(opened.tree(tree.plan_id).path):
            continue
        try:
            opened.remove_tree(tree.plan_id)
        except StoreBusyError:  # somebody began to use it a moment ago
            continue
        removed.append(tree.plan_id)
        freed += opened.collect(grace_s=0)
    return removed, freed


def _chosen(word: str, known: list[TreeInfo]) -> TreeInfo:
    """The tree whose id begins with *word*. Raises: UsageError if that is not exactly one, or *word* is short."""
    from fp8fs.errors import UsageError

    if len(word) < _SHORTEST_BEGINNING:
        raise UsageError(
            f'"{word}" is no id of a tree',
            hint=f"at least {_SHORTEST_BEGINNING} characters of one; fp8fs ls lists them",
        )
    found = [tree for tree in known if tree.plan_id.startswith(word)]
    if len(found) != 1:
        how_many = "no tree" if not found else f"{len(found)} trees"
        raise UsageError(f'{how_many} "{word}" in the store', hint="fp8fs ls lists them")
    return found[0]


def _size(text: str) -> int:
    """Bytes; K, M, G, T are decimal. Raises: UsageError for what is no size, infinite or less than nothing."""
    from fp8fs.errors import UsageError

    number, factor = text, 1
    if text and text[-1].upper() in _UNITS:
        number, factor = text[:-1], _UNITS[text[-1].upper()]
    try:
        value = float(number) * factor
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f'"{text}" is not a size', hint="500G, or bytes")
    return int(value)
