"""One view shard on its way to being sealed: what the store must know of it, its claims, what is made, what failed."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from fp8fs.core.layout import Cutter, Plan, Unit, ViewShard
from fp8fs.engine.matrix import data_item_bytes, item_bytes, source_bytes, view_bytes
from fp8fs.engine.once import fresh
from fp8fs.errors import Fp8fsError
from fp8fs.store.store import Partial, ShardSpec, UnitSpan

__all__ = ["Phase", "ShardState", "claims_of", "seal_facts", "shard_spec", "unit_spans"]

_SMALL_UNIT_BYTES = 256 << 10
_BATCH_BYTES = 1 << 20
_BATCH_UNITS = 256


def shard_spec(shard: ViewShard) -> ShardSpec:
    """The shard as the store knows it."""
    return ShardSpec(
        object_id=shard.object_id,
        size=shard.size,
        preamble=shard.preamble,
        unit_count=len(shard.units),
        mode=shard.mode,
        uid=shard.uid,
        gid=shard.gid,
        mtime_ns=shard.mtime_ns,
    )


def unit_spans(shard: ViewShard) -> list[UnitSpan]:
    """Where each unit's bytes are and how they are digested, for the store's recovery and ``verify``."""
    return [_unit_span(index, unit) for index, unit in enumerate(shard.units)]


def _unit_span(index: int, unit: Unit) -> UnitSpan:
    """Columns are counted in bytes of the view, so tiles are cut where the source's are whatever an element has there."""
    item = data_item_bytes(unit)
    return UnitSpan(
        unit=index,
        start=unit.data.start,
        length=unit.data.length,
        rows=unit.rows,
        cols=unit.cols * item,
        item_bytes=item_bytes(unit.dtype) // item,
        scale_start=unit.scale.start if unit.scale else 0,
        scale_length=unit.scale.length if unit.scale else 0,
        row_runs=unit.row_runs,
    )


def seal_facts(plan: Plan, shard: ViewShard) -> dict[str, object]:
    """What goes into the object's record for people and ``verify``: no paths, so that equal objects have equal facts."""
    return {
        "sources": [plan.source_identities[index] for index in shard.sources],
        "units": [
            {
                "name": unit.name,
                "scheme": unit.scheme,
                "dtype": unit.dtype,
                "group": plan.groups[unit.group].id if unit.group >= 0 else "",
                **({"row_runs": unit.row_runs} if unit.row_runs else {}),
                **({"pitch": unit.pitch} if unit.pitch else {}),
            }
            for unit in shard.units
        ],
    }


def claims_of(plan: Plan, index: int) -> dict[int, array[int]]:
    """The shard's units by claim: a claim is what is made under one lease, and its number is its first unit.

    Units that share a scale are in one claim, unless their group crosses shards; small ones share a claim with other
    small ones, so that a hundred thousand tiny tensors cost a few hundred leases and journal writes. Pure: all
    processes cut a shard alike.
    """
    units = plan.shards[index].units
    group_bytes: dict[int, int] = {}
    for unit in units:
        if unit.group >= 0:
            group_bytes[unit.group] = group_bytes.get(unit.group, 0) + source_bytes(unit)
    claims: dict[int, array[int]] = {}
    of_group: dict[int, int] = {}
    batch, batch_bytes = -1, 0
    for number, unit in enumerate(units):
        if unit.group in of_group:
            claims[of_group[unit.group]].append(number)
            continue
        nbytes = group_bytes[unit.group] if unit.group >= 0 else source_bytes(unit)
        claim = number
        if nbytes <= _SMALL_UNIT_BYTES:
            if (
                batch < 0
                or batch_bytes + nbytes > _BATCH_BYTES
                or len(claims[batch]) >= _BATCH_UNITS
            ):
                batch, batch_bytes = number, 0
            claim = batch
            batch_bytes += nbytes
        if unit.group >= 0:
            of_group[unit.group] = claim
        claims.setdefault(claim, array("I")).append(number)
    return claims


class Phase(enum.Enum):
    """COLD: nothing is known. OPENING: a worker looks into the store. OPEN: a partial is being filled. SEALED: published."""

    COLD = enum.auto()
    OPENING = enum.auto()
    OPEN = enum.auto()
    SEALED = enum.auto()


class ShardState:
    """What this process knows of a view shard. Guarded by the pool's lock, except what never changes.

    ``made[u]`` is 1 once unit u's bytes can be read from the partial. ``busy``: claims in work in this process;
    ``elsewhere``: claim -> time before which its lease, held by another process, is not tried again.
    ``object``: the sealed file; ``linked``: it is in the mount's tree too, at ``place``. ``users``: tasks that use the partial.
    ``suspect``: the store failed while it was used, so it is opened anew before it is written again.
    """

    def __init__(self, plan: Plan, index: int) -> None:
        self.index = index
        self.shard = plan.shards[index]
        self.spec = shard_spec(self.shard)
        self.phase = Phase.COLD
        self.generation = 0
        self.partial: Partial | None = None
        self.claims: dict[int, array[int]] = {}
        self.claim_of: array[int] = array("I")
        self.made = bytearray()
        self.unmade = len(self.shard.units)
        self.busy: set[int] = set()
        self.elsewhere: dict[int, float] = {}
        self.retry_at = 0.0
        self.sealing = False
        self.object: Path | None = None
        self.linked = False
        self.place: Path | None = None
        self.linking = False
        self.users = 0
        self.suspect = False
        self.lost = 0
        self.counted = bytearray(len(self.shard.units))
        self._failures: dict[int, tuple[int, Fp8fsError]] = {}

    @cached_property
    def cutter(self) -> Cutter:
        """Which units a read touches."""
        return Cutter(self.shard)

    def opened(self, plan: Plan, partial: Partial) -> None:
        """A partial is there: its finished units count as made."""
        self.partial = partial
        self.claims = claims_of(plan, self.index)
        self.claim_of = array("I", bytes(4 * len(self.shard.units)))
        for claim, units in self.claims.items():
            for unit in units:
                self.claim_of[unit] = claim
        self.made = bytearray(len(self.shard.units))
        self.unmade = len(self.shard.units)
        self.busy, self.elsewhere = set(), {}
        self.sealing = self.suspect = False
        self.generation += 1
        self.phase = Phase.OPEN
        self.mark_made(partial.records)

    def sealed(self, path: Path) -> None:
        """The object is there: what was needed to make it is let go."""
        self.object = path
        self.phase = Phase.SEALED
        self.claims, self.elsewhere, self._failures = {}, {}, {}
        self.claim_of = array("I")
        self.unmade = 0

    def unsealed(self) -> Partial | None:
        """The object is gone. Returns the partial to be closed, if it is still held."""
        self.object = self.place = None
        self.linked = False
        self.unmade = len(self.shard.units)
        return self.reset()

    def reset(self) -> Partial | None:
        """Start over. Returns the partial to be closed."""
        partial, self.partial = self.partial, None
        self.suspect = False
        self.phase = Phase.COLD
        self.generation += 1
        return partial

    def mark_made(self, units: Iterable[int]) -> None:
        """These units' bytes can be read."""
        for unit in units:
            if not self.made[unit]:
                self.made[unit] = 1
                self.unmade -= 1

    def all_made(self, units: Iterable[int]) -> bool:
        """Whether the bytes of all these units can be read."""
        made = self.made
        return self.phase is Phase.SEALED or (
            self.phase is Phase.OPEN and all(made[unit] for unit in units)
        )

    def count(self, units: Iterable[int]) -> tuple[int, int]:
        """Number and view bytes of those units that were in no count before; now they are."""
        number = nbytes = 0
        for unit in units:
            if not self.counted[unit]:
                self.counted[unit] = 1
                number += 1
                nbytes += view_bytes(self.shard.units[unit])
        return number, nbytes

    def fail(self, claim: int, moment: int, error: Fp8fsError) -> None:
        """Remember why a claim cannot be made. *moment*: the number of opens so far."""
        self._failures[claim] = (moment, fresh(error))

    def failure(self, claim: int, since: int) -> Fp8fsError | None:
        """Why a claim failed after open number *since* began; older failures are tried again."""
        moment, error = self._failures.get(claim, (-1, None))
        return error if moment >= since else None

    def failed_bytes(self) -> int:
        """View bytes that are not made, if a claim of the shard failed: then no fill goes on to the others either."""
        if not self._failures:
            return 0
        units = zip(self.shard.units, self.counted, strict=True)
        return sum(view_bytes(unit) for unit, counted in units if not counted)

    def forgive(self, claim: int) -> None:
        """The claim was made after all."""
        self._failures.pop(claim, None)

    def claims_with(self, units: Iterable[int]) -> dict[int, list[int]]:
        """These units by the claims that they are in. The shard is open."""
        found: dict[int, list[int]] = {}
        for unit in units:
            found.setdefault(self.claim_of[unit], []).append(unit)
        return found
