"""Fill a whole store without FUSE: every shard sealed, weights with NaN or Inf kept and remembered, odd scales told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fp8fs.assembly import Assembled, Survey, assemble, record_non_finite, survey
from fp8fs.core.plan import Plan, ViewShard
from fp8fs.core.recipe import Recipe
from fp8fs.core.scale_range import OddScale, odd_scales_of
from fp8fs.engine import EngineStats, Findings, NonFinite, scan, shard_spec
from fp8fs.errors import (
    Fp8fsError,
    NonFiniteTensorError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from fp8fs.quant import make_quantizer
from fp8fs.space import check_room
from fp8fs.store.store import Store, Tree
from fp8fs.tree import pin_for_good, tree_faults

__all__ = ["build_tree", "finished_tree", "odd_scales", "scan_values"]

_ATTEMPTS = 10
"""How often a tree that others give up is completed again."""

Progress = Callable[[EngineStats], None]
Report = Callable[[list[OddScale]], None]


def build_tree(
    src: Path,
    recipe: Recipe,
    store_root: Path,
    *,
    device: str = "auto",
    workers: int = 0,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> Path:
    """The finished tree's path, made now as far as it is missing; kept from gc from now on.

    A weight with NaN or Inf stops its shard; it is recorded as kept, the view is planned again, and the
    rest goes on. *note* is told of each such weight; *report* at the end, once, of all weights under scales that vLLM
    does not load unchanged, made now or before. Resumable at any point. A store that cannot be written is enough if nothing
    is missing there.
    Raises: what ``assemble`` raises, NothingQuantizedError if no weight becomes FP8.
    """
    given_up = 0
    while True:
        try:
            assembled = assemble(
                src,
                recipe,
                store_root,
                device=device,
                workers=workers,
                need_store=True,
                allow_unquantized=False,
                expected=(NonFiniteTensorError,),
            )
        except StoreFullError:
            path = _nothing_to_write(src, recipe, store_root, report)
            if path is None:
                raise
            return path
        with assembled:
            if (store := assembled.survey.store) is not None:
                check_room(assembled.survey.plan, store)
            try:
                assembled.engine.fill(progress)
            except NonFiniteTensorError as err:
                if not _keep_non_finite(assembled, err, note):
                    raise
                continue
            if _is_given_up(assembled) and given_up < _ATTEMPTS:
                given_up += 1
                continue
            tree = _finished(assembled)
            if report is not None and store is not None:
                report(odd_scales(assembled.survey.plan, store))
            return tree


def _nothing_to_write(
    src: Path, recipe: Recipe, store_root: Path, report: Report | None
) -> Path | None:
    """The path of a tree that is finished and whole in a store that cannot be written, else None."""
    with survey(src, recipe, store_root) as found:
        store, tree = found.store, found.tree
        if store is None or store.writable or tree is None or not _looks_whole(found, tree):
            return None
        if report is not None:
            report(odd_scales(found.plan, store))
        return tree.path


def scan_values(
    found: Survey,
    *,
    device: str = "auto",
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Findings:
    """Read every weight that is to be quantized; record those that hold NaN or Inf, and return all that was found."""
    quantizer = make_quantizer(device)
    try:
        seen = scan(found.plan, found.source, quantizer, workers=workers, progress=progress)
    finally:
        quantizer.close()
    if seen.non_finite:
        record_non_finite(found, seen.non_finite)
    return seen


def odd_scales(plan: Plan, store: Store) -> list[OddScale]:
    """Weights of sealed shards whose scales vLLM does not load unchanged, by what the store's records say of them."""
    found: dict[OddScale, None] = {}
    for shard in plan.shards:
        record = store.record(shard.object_id) if _has_tensor_scales(shard) else None
        for line in record.records if record is not None else ():
            odd = odd_scales_of(shard.component, shard.units[line.unit], line.amax)
            found.update(dict.fromkeys(odd))
    return list(found)


def _has_tensor_scales(shard: ViewShard) -> bool:
    return any(unit.scheme == "per_tensor" for unit in shard.units)


def finished_tree(src: Path, recipe: Recipe, store_root: Path) -> Path | None:
    """The finished tree's path (kept from gc from now on), or None if some of its bytes are still missing.

    Where only the tree itself is missing (a source with new dates was adopted) it is made: nothing is quantized.
    """
    with survey(src, recipe, store_root) as found:
        store, tree = found.store, found.tree
        if store is None:
            return None
        if tree is not None:
            if not _looks_whole(found, tree):
                return None
            if store.writable:
                pin_for_good(tree)
            return tree.path
        # One that is there and not finished is left to build, which knows what is wrong with it.
        begun = os.path.lexists(store.tree(found.plan.plan_id).path)
        if begun or not store.writable or not _all_sealed(found, store):
            return None
    return build_tree(src, recipe, store_root)


def _all_sealed(found: Survey, store: Store) -> bool:
    shards = found.plan.shards
    return bool(shards) and all(store.find_object(shard_spec(shard)) for shard in shards)


def _looks_whole(found: Survey, tree: Tree) -> bool:
    """Whether a finished tree is whole as far as a look tells: a path is given away only then."""
    store = found.store
    return (
        store is not None
        and all(store.find_object(shard_spec(shard)) for shard in found.plan.shards)
        and not tree_faults(found.plan, found.source, tree)
    )


def _keep_non_finite(
    assembled: Assembled, raised: NonFiniteTensorError, note: Callable[[str], None] | None
) -> bool:
    """Record every NaN or Inf that this run met; whether the next plan will differ."""
    bad: dict[tuple[str, str], NonFinite] = {}
    failures: list[Fp8fsError] = [raised]
    for seen in assembled.engine.stats().last_errors:
        if seen.code == NonFiniteTensorError.code:
            failures.append(NonFiniteTensorError(seen.what, hint=seen.hint, **seen.facts))
    for failure in failures:
        finding = _finding(failure)
        if finding is not None:
            bad[(finding.component, finding.tensor)] = finding
    if note is not None:
        for finding in bad.values():
            note(f"{finding.tensor}: NaN or Inf at index {finding.index}; kept as it is")
    return record_non_finite(assembled.survey, list(bad.values())) > 0


def _finding(failure: Fp8fsError) -> NonFinite | None:
    """The weight that the failure is about, None if it says nothing of one."""
    component, name = failure.facts.get("component"), failure.facts.get("tensor")
    index = failure.facts.get("index")
    if isinstance(component, str) and isinstance(name, str) and isinstance(index, int):
        prefix = f"{component}/" if component else ""
        return NonFinite(component, name.removeprefix(prefix), index)
    return None


def _is_given_up(assembled: Assembled) -> bool:
    """Whether all was sealed, and the tree is not complete: others have found damage in it since."""
    tree, stats = assembled.tree, assembled.engine.stats()
    sealed = stats.shards_sealed == stats.shards_total and not stats.degraded
    return sealed and tree is not None and not tree.is_complete()


def _finished(assembled: Assembled) -> Path:
    tree = assembled.tree
    if tree is None or not tree.is_complete():
        stats = assembled.engine.stats()
        if stats.degraded:
            raise StoreError(f"the tree is not complete: {stats.degraded}")
        raise StoreBusyError(
            f"the tree is not complete: {stats.shards_sealed} of {stats.shards_total} shards",
            hint="run build again",
        )
    pin_for_good(tree)
    return tree.path
