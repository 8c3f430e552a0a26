"""Source, store, plan, engine and tree put together: what every command and the daemon start from.

    survey(src, recipe, store)  -> Survey     headers only: what the view will be (plan, path, verify)
    assemble(src, ...)          -> Assembled  ready to fill: engine running, tree prepared (mount, build)
    Assembled.view(...)         -> View       the tree that the FUSE adapter serves

The daemon calls ``assemble`` and then ``Assembled.view``; nothing else wires these rooms.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from fp8fs.core.attributes import Owner
from fp8fs.core.checkpoint import Checkpoint
from fp8fs.core.layout import plan
from fp8fs.core.manifest import (
    Manifest,
    ManifestSource,
    describe_plan,
    encode_manifest,
    encode_plan,
)
from fp8fs.core.plan import Plan
from fp8fs.core.quantizer import QUANTIZER_VERSION
from fp8fs.core.recipe import Recipe, check_recipe
from fp8fs.engine import Engine, NonFinite
from fp8fs.errors import (
    Fp8fsError,
    NothingQuantizedError,
    StoreError,
    StoreFullError,
    UsageError,
)
from fp8fs.plan_cache import keep_plan, kept_plan, plan_key
from fp8fs.quant import quantizer_factory
from fp8fs.remembered import (
    Adopted,
    read_hints,
    read_scan,
    recorded_keep,
    with_adopted_dates,
    write_hints,
    write_scan,
)
from fp8fs.source import Source
from fp8fs.space import shortage
from fp8fs.store.store import Pin, Store, Tree
from fp8fs.tree import TreeKeeper, tree_faults
from fp8fs.version import __version__
from fp8fs.view import View

__all__ = [
    "Assembled",
    "Survey",
    "assemble",
    "default_store_root",
    "recipe_from",
    "record_non_finite",
    "survey",
]

log = logging.getLogger(__name__)


def default_store_root() -> Path:
    """Where stores are when the user names no place."""
    import platformdirs

    return Path(platformdirs.user_cache_path("fp8fs"))


def recipe_from(
    *,
    scheme: str = "",
    names: str = "checkpoint",
    components: tuple[str, ...] = (),
    keep: tuple[str, ...] = (),
    quantize: tuple[str, ...] = (),
    split_experts: bool = False,
) -> Recipe:
    """A checked recipe. Raises: UsageError."""
    recipe = Recipe(
        scheme=scheme,
        names=names,
        components=components,
        keep=keep,
        quantize=quantize,
        split_experts=split_experts,
    )
    check_recipe(recipe)
    return recipe


@dataclass(frozen=True, slots=True)
class Survey:
    """SRC as planned: everything that headers, configs, recipe and recorded facts decide.

    ``checkpoint`` is the source's, with the dates of adopted shards. ``recipe`` includes the keep list
    that earlier scans recorded. ``store`` is None where it cannot
    be used at all, with the reason in ``why_no_store``. ``plan_is_kept``: the plan was found in the store.
    """

    source: Source
    checkpoint: Checkpoint
    recipe: Recipe
    plan: Plan
    store: Store | None
    why_no_store: str
    plan_is_kept: bool = False

    @property
    def manifest(self) -> Manifest:
        """What a tree of this plan says of itself, digests left out."""
        shards = self.checkpoint.shards
        sources = [
            ManifestSource(
                path=path,
                identity=identity,
                size=shards[path].entry.size,
                mtime_ns=shards[path].entry.mtime_ns,
            )
            for path, identity in zip(
                self.plan.source_shards, self.plan.source_identities, strict=True
            )
        ]
        return describe_plan(
            self.plan,
            self.recipe,
            name=self.source.root.name,
            version=__version__,
            sources=sources,
        )

    def planned_as(self, recipe: Recipe) -> Plan | None:
        """The plan as another recipe words it; None if that gives another view, or none."""
        if recipe == self.recipe:
            return self.plan
        try:
            with _uncollected():
                other = plan(
                    self.checkpoint, recipe, quantizer_version=QUANTIZER_VERSION, owner=_owner()
                )
        except Fp8fsError:
            return None
        return other if other.plan_id == self.plan.plan_id else None

    @property
    def source_bytes(self) -> int:
        """Bytes of the source shards that view shards are made from."""
        shards = self.checkpoint.shards
        return sum(shards[path].entry.size for path in self.plan.source_shards)

    @property
    def view_bytes(self) -> int:
        """Bytes of the view shards."""
        return sum(shard.size for shard in self.plan.shards)

    @property
    def tree(self) -> Tree | None:
        """The plan's tree if it is finished, else None."""
        if self.store is None:
            return None
        tree = self.store.tree(self.plan.plan_id)
        return tree if tree.is_complete() else None

    def close(self) -> None:
        """Close SRC. Repeatable."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Assembled:
    """A survey with its engine running and its tree prepared.

    ``tree`` is None where the store cannot be written and holds no finished tree of this plan: then
    nothing can be handed over, and the view has to be served inline. ``warnings``: what is worse than the
    user may expect, one sentence each.
    """

    survey: Survey
    engine: Engine
    tree: Tree | None
    pin: Pin | None
    warnings: tuple[str, ...] = ()

    def view(
        self, *, serve: str, grain: str, bound: bool, status: Callable[[], bytes] | None = None
    ) -> View:
        """The tree to serve. *bound*: the store's tree and SRC are bound inside the mount."""
        manifest, planned = self.survey.manifest, self.survey.plan
        return View(
            planned,
            self.engine,
            self.survey.source,
            serve=serve if self.tree is not None else "inline",
            grain=grain,
            bound=bound,
            tree=str(self.tree.path) if self.tree is not None else "",
            status=status,
            documents={
                "manifest.json": lambda: encode_manifest(manifest),
                "plan.json": lambda: encode_plan(planned),
            },
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop filling, unpin the tree, close SRC. Repeatable."""
        self.engine.close(timeout_s)
        if self.pin is not None:
            self.pin.close()
        self.survey.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: a plan is a million objects that all stay, and looking through them takes a while."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_uncollected()
def survey(src: Path, recipe: Recipe, store_root: Path | None, *, create: bool = False) -> Survey:
    """Open SRC and plan its view. Reads headers, configs and a few sampled pages.

    *store_root* None: no store at all. *create*: make the store if there is none yet.
    Raises: UsageError, SourceInvalidError, SourceChangedError.
    """
    check_recipe(recipe)
    if store_root is not None:
        _refuse_store_inside(store_root, src)
    store, why_no_store = _open_store(store_root, create=create)
    adopted = Adopted(store) if store is not None else None
    source = Source.open(src, hints=read_hints(store, src), adopted=adopted)
    try:
        if store_root is not None:
            _refuse_store_inside(store_root, source.root)
        checkpoint = source.checkpoint
        if adopted is not None and adopted.dates:
            checkpoint = with_adopted_dates(checkpoint, adopted.dates)
        full = msgspec.structs.replace(recipe, recorded_keep=recorded_keep(store, checkpoint))
        kept = None
        if store is not None and store.keeps_plans():
            kept = kept_plan(store, plan_key(checkpoint, source.fingerprints, full, _owner()))
        planned = kept or plan(
            checkpoint, full, quantizer_version=QUANTIZER_VERSION, owner=_owner()
        )
    except BaseException:
        source.close()
        raise
    return Survey(source, checkpoint, full, planned, store, why_no_store, kept is not None)


def _require_fp8(planned: Plan) -> None:
    """Raises: NothingQuantizedError if the view has no FP8 weight."""
    if planned.fp8_bytes:
        return
    why = f" ({planned.warnings[0]})" if planned.warnings else ""
    raise NothingQuantizedError(
        f"0 of {planned.weight_bytes:,} bytes of weights become FP8{why}",
        hint="fp8fs plan SRC gives the reason for each tensor; --allow-unquantized mounts it as it is",
        fp8_bytes=0,
        weight_bytes=planned.weight_bytes,
    )


def assemble(
    src: Path,
    recipe: Recipe,
    store_root: Path | None,
    *,
    device: str = "auto",
    workers: int = 0,
    grain: str = "shard",
    need_store: bool = False,
    allow_unquantized: bool = True,
    expected: tuple[type[Fp8fsError], ...] = (),
) -> Assembled:
    """Survey SRC, start an engine on it and bring the tree up to what is sealed already.

    *need_store*: a store that cannot be written is an error instead of a degraded start. Without
    *allow_unquantized* so is a plan in which no weight becomes FP8. *expected*: as ``Engine`` takes it.
    Raises: what ``survey`` raises; DeviceError; with *need_store* StoreError; NothingQuantizedError.
    """
    quantizer = quantizer_factory(device)  # a wrong device is refused before SRC is read
    found = survey(src, recipe, store_root, create=True)
    pin: Pin | None = None
    engine: Engine | None = None
    try:
        store = found.store
        if not allow_unquantized:
            _require_fp8(found.plan)
        if need_store and (store is None or not store.writable):
            why = store.why_not if store is not None else found.why_no_store
            # Why a store cannot be opened may be a whole sentence with a hint of its own.
            hint = "" if ". hint: " in why else "--store ROOT"
            raise StoreFullError(f"the store cannot be written: {why}", hint=hint)
        keeper: TreeKeeper | None = None
        warnings = _store_warnings(found, asked=store_root is not None)
        if store is not None:
            with suppress(StoreError):  # a read-only store is never collected by us
                pin = store.pin(found.plan.plan_id)
            if store.writable:
                write_hints(store, src, found.source)
                warnings += filter(None, [shortage(found.plan, store)])
            keeper = _prepared_tree(found, store, warnings, need_store=need_store)
        engine = Engine(
            found.plan,
            found.source,
            store,
            quantizer,
            workers=workers,
            grain=grain,
            on_sealed=keeper.link if keeper is not None else None,
            is_there=keeper.is_there if keeper is not None else os.path.lexists,
            why_no_store=found.why_no_store,
            expected=expected,
        )
        # Asked for all: that links what is there already, and completes the tree if that is all.
        sealed = [engine.sealed(shard) is not None for shard in range(len(found.plan.shards))]
        if not all(sealed):
            _warm(engine, found.plan)
        elif store is not None and store.writable and not found.plan_is_kept:
            fingerprints = found.source.fingerprints
            key = plan_key(found.checkpoint, fingerprints, found.recipe, _owner())
            keep_plan(store, key, found.plan)
        tree = keeper.tree if keeper is not None else _finished_tree(found, warnings)
        return Assembled(found, engine, tree, pin, tuple(warnings))
    except BaseException:
        if engine is not None:
            engine.close()
        if pin is not None:
            pin.close()
        found.close()
        raise


def _warm(engine: Engine, planned: Plan) -> None:
    """Load the kernels that this plan needs on a thread of its own, before the first tile waits for them.

    Only those of the CPU: what a device takes, its users would miss, until somebody reads.
    """
    made = {(unit.dtype, unit.scheme) for shard in planned.shards for unit in shard.units}
    dtypes = tuple(sorted({dtype for dtype, scheme in made if scheme}))
    schemes = tuple(sorted({scheme for _, scheme in made if scheme}))

    def load() -> None:
        try:
            quantizer = engine.quantizer()
            if quantizer.name == "cpu":
                quantizer.warm(dtypes, schemes)
        except Exception:  # the first tile meets it again, and whoever waits is told
            log.debug("kernels could not be loaded ahead", exc_info=True)

    if dtypes:
        with suppress(RuntimeError):  # no more threads for us: the first tile loads them
            threading.Thread(target=load, name="fp8fs-warm", daemon=True).start()


def record_non_finite(found: Survey, bad: Iterable[NonFinite]) -> int:
    """Remember weights with NaN or Inf for every later plan of the same bytes; how many were new.

    Kept by source shard, not by checkpoint: whatever view is made of that shard knows them.
    """
    store = found.store
    if store is None or not store.writable:
        raise StoreFullError(
            f"findings cannot be recorded: {found.why_no_store or (store.why_not if store else '')}",
            hint="--store ROOT, or give --keep",
        )
    places = {(finding.component, finding.tensor): finding.index for finding in bad}
    by_shard: dict[str, dict[str, int]] = {}
    for shard in found.plan.shards:
        for unit in shard.units:
            for piece in unit.pieces:
                index = places.get((shard.component, piece.tensor))
                if index is not None:
                    path = found.plan.source_shards[piece.shard]
                    by_shard.setdefault(path, {})[piece.tensor] = index
    new = 0
    for path, tensors in by_shard.items():
        identity = found.checkpoint.shards[path].identity
        known = read_scan(store, identity)
        new += len(tensors.keys() - known.keys())
        write_scan(store, identity, known | tensors)
    return new


def _finished_tree(found: Survey, warnings: list[str]) -> Tree | None:
    """The plan's tree if it is finished and a look finds nothing wrong with it: nobody here can set it right.

    A store that cannot be read is no reason to refuse a mount.
    """
    try:
        tree = found.tree
        faults = tree_faults(found.plan, found.source, tree) if tree is not None else {}
    except StoreError as err:
        log.warning("%s", err)
        return None
    for path, what in faults.items():
        log.warning("tree %s: %s: %s; not used", found.plan.plan_id, path, what)
    if faults:
        path, what = next(iter(faults.items()))
        warnings.append(f"served inline, since the store's tree is damaged: {path}: {what}")
        return None
    return tree


def _store_warnings(found: Survey, *, asked: bool) -> list[str]:
    """One line if a store was *asked* for and nothing can be kept in it."""
    why = found.store.why_not if found.store is not None else found.why_no_store
    return [f"nothing is kept: the store cannot be written: {why}"] if asked and why else []


def _prepared_tree(
    found: Survey, store: Store, warnings: list[str], *, need_store: bool
) -> TreeKeeper | None:
    """The keeper of a prepared tree; None if the tree can neither be made nor is finished."""
    if not store.writable:
        return None
    keeper = TreeKeeper(found.plan, found.source, store, found.manifest)
    try:
        keeper.prepare()
    except StoreError as err:
        if need_store:
            raise
        log.warning("no tree in the store: %s", err)
        warnings.append(f"served inline, since the store takes no tree: {err.what}")
        return None
    return keeper


def _open_store(root: Path | None, *, create: bool) -> tuple[Store | None, str]:
    if root is None:
        return None, "no store was asked for"
    try:
        return Store.open(root, create=create), ""
    except StoreError as err:
        return None, str(err)


def _owner() -> Owner:
    """Whom files that we make can belong to."""
    return Owner(
        uid=os.geteuid(),
        gid=os.getegid(),
        privileged=os.geteuid() == 0,
        groups=frozenset(os.getgroups()),
    )


def _refuse_store_inside(store_root: Path, src: Path) -> None:
    store, source = store_root.resolve(), src.resolve()
    if store == source or source in store.parents:
        raise UsageError(
            f"the store {store_root} is inside SRC {src}",
            hint="choose --store ROOT outside of it",
        )
