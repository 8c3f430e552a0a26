"""The largest magnitude behind each per_tensor scale: measured once per group, by whoever needs it first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from fp8fs.core.layout import Group, Plan, Unit
from fp8fs.core.quantizer import Quantizer
from fp8fs.engine.buffers import BufferPool
from fp8fs.engine.cast import bad_index, nonfinite_error
from fp8fs.engine.matrix import SourceReader, item_bytes, source_bytes, stored_element
from fp8fs.engine.once import OnceTable
from fp8fs.engine.pool import Pool
from fp8fs.errors import NonFiniteTensorError, StoreError
from fp8fs.store.store import AmaxSlot, Store, UnitRecord

__all__ = ["AmaxTable", "Member"]

_CHUNK_BYTES = 4 << 20

Member = tuple[int, int]
"""A unit: view shard index, unit index."""


class AmaxTable:
    """amax by group (or by unit where nothing is shared), kept in memory, in the journal and in the store's slots.

    Several shards of one group at once: the first measures, the others wait without holding a lock. Order: a claim's
    lease is held by the caller, then the group's slot in the store, then scratch buffers.
    """

    def __init__(
        self,
        plan: Plan,
        reader: SourceReader,
        buffers: BufferPool,
        pool: Pool,
        store: Store | None,
        quantizer: Callable[[], Quantizer],
    ) -> None:
        self._plan = plan
        self._reader = reader
        self._buffers = buffers
        self._pool = pool
        self._store = store
        self._quantizer = quantizer
        self._groups: OnceTable[int, float] = OnceTable()
        self._units: OnceTable[Member, float] = OnceTable()

    def members(self, member: Member) -> tuple[Member, ...]:
        """All units that share this unit's scale, itself too."""
        group = self._unit(member).group
        return (member,) if group < 0 else self._plan.groups[group].members

    def known(self, member: Member, records: Mapping[int, UnitRecord]) -> float | None:
        """The amax if nothing must be read for it. *records*: the finished units of the member's shard."""
        shard, index = member
        group = self._unit(member).group
        if group < 0:
            found = records.get(index)
            return found.amax if found is not None else self._units.known(member)
        value = self._groups.known(group)
        if value is None:
            for other_shard, other in self._plan.groups[group].members:
                record = records.get(other) if other_shard == shard else None
                if record is not None:
                    value = record.amax
                    self._groups.put(group, value)
                    break
        return value

    def put(self, member: Member, value: float) -> None:
        """Keep what was measured on the way, from the bytes of all members."""
        group = self._unit(member).group
        if group >= 0:
            self._groups.put(group, value)

    def get(self, member: Member, records: Mapping[int, UnitRecord], priority: int) -> float:
        """The amax, measured now if need be, on this worker thread and idle ones.

        Raises: NonFiniteTensorError naming the first bad member; SourceChangedError; Stopped.
        """
        value = self.known(member, records)
        if value is not None:
            return value
        index = self._unit(member).group
        if index < 0:
            alone = partial(self._measure, (member,), priority)
            return self._units.get(member, alone, self._pool.check)
        group = self._plan.groups[index]
        if group.crosses:
            shared = partial(self._shared, group, priority)
            return self._groups.get(index, shared, self._pool.check)
        together = partial(self._measure, group.members, priority)
        return self._groups.get(index, together, self._pool.check)

    def forget(self, member: Member) -> None:
        """A lone unit is made: its amax is in the journal."""
        self._units.pop(member)

    def _shared(self, group: Group, priority: int) -> float:
        """Of a group that crosses shards: from its slot, else measured and put there."""
        with ExitStack() as stack:
            slot: AmaxSlot | None = None
            if self._store is not None and self._store.writable:
                with suppress(StoreError):  # else each process measures for itself
                    opened = self._store.group_amax(group.id, poll=self._pool.check)
                    slot = stack.enter_context(opened)
            if slot is not None and slot.value is not None:
                return slot.value
            value = self._measure(group.members, priority)
            if slot is not None:
                with suppress(StoreError):
                    slot.put(value)
            return value

    def _measure(self, members: Iterable[Member], priority: int) -> float:
        """Read all members once. The source is checked around it, so a value never mixes two versions of it."""
        chunks: list[tuple[Member, int, int]] = []
        sources: set[int] = set()
        for member in members:
            unit = self._unit(member)
            sources.update(piece.shard for piece in unit.pieces)
            whole = source_bytes(unit)
            chunks += [
                (member, at, min(_CHUNK_BYTES, whole - at)) for at in range(0, whole, _CHUNK_BYTES)
            ]
        maxima = [0.0] * len(chunks)

        def measure(number: int) -> None:
            member, start, nbytes = chunks[number]
            unit = self._unit(member)
            with self._buffers.lend(nbytes) as (buffer,):
                self._reader.read_bytes(unit, start, buffer)
                maxima[number] = self.measure(member, start, buffer)

        self._reader.check(sources)
        self._pool.parallel(len(chunks), measure, priority)
        self._reader.check(sources)
        return max(maxima, default=0.0)

    def measure(self, member: Member, start: int, buffer: memoryview) -> float:
        """The amax of bytes of a unit's source matrix that ``read_bytes`` gave from byte *start*."""
        unit = self._unit(member)
        try:
            return self._quantizer().amax(buffer, unit.dtype)
        except NonFiniteTensorError as err:
            element = stored_element(unit, start // item_bytes(unit.dtype) + bad_index(err))
            component = self._plan.shards[member[0]].component
            raise nonfinite_error(component, unit, element, err) from None

    def _unit(self, member: Member) -> Unit:
        return self._plan.shards[member[0]].units[member[1]]
