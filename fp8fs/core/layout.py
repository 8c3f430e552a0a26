"""The plan: every name, size, header byte and offset of the view, from headers and a recipe alone.

``plan`` is a pure function. Nothing here reads a weight, and nothing a weight holds can change a plan.

    view file = preamble | kept tensors whose length is a multiple of 8 | weight, scale, weight, scale, ... | other kept tensors
                ^ padded so that the data section starts at a multiple of 4096

A *unit* is the smallest thing that is made at once: a kept tensor (copied), or a weight with its scale.
The types are in ``plan.py``, the order inside a shard in ``placement.py``, the choice in ``selection.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fp8fs.core.attributes import ROOT, Owner, strictest
from fp8fs.core.checkpoint import Checkpoint, Component, SourceEntry
from fp8fs.core.component_view import ComponentView, FindProfile
from fp8fs.core.dtypes import FP8, nbytes
from fp8fs.core.experts import (
    OPTION,
    TurnedEntry,
    experts_note,
    experts_warning,
    is_stacked,
    split_experts,
    split_warning,
)
from fp8fs.core.identity import digest_bytes, group_id, object_id, plan_id
from fp8fs.core.placement import Placed, Scales, ViewTensor, place, scale_name
from fp8fs.core.plan import (
    Cut,
    Cutter,
    Extent,
    Group,
    Piece,
    Plan,
    TensorRow,
    Tile,
    Unit,
    ViewEntry,
    ViewShard,
    data_rows,
    tiles,
)
from fp8fs.core.profiles import find
from fp8fs.core.recipe import Decision, Recipe, check_recipe, choose_components, shown
from fp8fs.core.selection import check_patterns
from fp8fs.core.texts import index_path, view_config, view_index
from fp8fs.errors import SourceInvalidError, UsageError

__all__ = [
    "Cut",
    "Cutter",
    "Extent",
    "Group",
    "Owner",
    "Piece",
    "Plan",
    "TensorRow",
    "Tile",
    "Unit",
    "ViewEntry",
    "ViewShard",
    "data_rows",
    "plan",
    "tiles",
]


def plan(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    quantizer_version: str,
    owner: Owner | None = None,
    find_profile: FindProfile = find,
) -> Plan:
    """The whole view of *checkpoint* under *recipe*.

    *owner*: whom made files can belong to (None: root, anybody).
    Raises: UsageError for a recipe that does not fit; SourceInvalidError for a source that cannot be quantized.
    Cost:   no I/O beyond the profiles, which are read once; about 8 microseconds per tensor.
    """
    check_recipe(recipe)
    return _Planner(checkpoint, recipe, quantizer_version, owner or ROOT, find_profile).plan()


RESERVED = ".fp8fs"
"""The view's own folder: one of that name in SRC (a store's tree, a copy of one) is hidden."""


class _Draft(msgspec.Struct):
    """A view shard that still lacks its attributes and key. ``sources`` grows by group partners."""

    path: str
    component: str
    placed: Placed
    sources: set[int]


class _Planner:
    """One run of ``plan``: collects what the parts of the view have in common."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        quantizer_version: str,
        owner: Owner,
        find_profile: FindProfile,
    ) -> None:
        self.checkpoint = checkpoint
        self.recipe = recipe
        self.quantizer_version = quantizer_version
        self.owner = owner
        self.find_profile = find_profile
        self.components = sorted(checkpoint.components, key=lambda component: component.path)
        self.headers = {path: shard.header for path, shard in checkpoint.shards.items()}
        self.source_shards: list[str] = []
        self.identities: list[str] = []
        self.drafts: list[_Draft] = []
        self.group_names: list[str] = []
        self.texts: dict[str, ViewEntry] = {}
        self.schemes: dict[str, str] = {}
        self.order: dict[str, tuple[int, ...]] = {}
        self.rows: list[TensorRow] = []
        self.warnings: list[str] = list(checkpoint.warnings)
        self.notes: list[str] = []

    def plan(self) -> Plan:
        for component in self.components:
            self.warnings += [f"{shown(component)}: {said}" for said in component.warnings]
            self.notes += [f"{shown(component)}: {said}" for said in component.notes]
        chosen, warnings = choose_components(self.components, self.recipe)
        self.warnings += warnings
        if self.recipe.split_experts:
            self._split_experts(chosen)
        check_patterns(self.components, chosen, self.headers, self.recipe)
        for component in self.components:
            if component.path in chosen:
                self._quantize(component)
            else:
                self._pass_through(component)
        if not self.schemes:
            self.warnings.append("nothing is quantized: the view equals the source")
        groups = self._groups()
        shards = self._shards(groups)
        hidden: dict[str, str] = {}
        for component in self.components:
            # Where all is in the source's dtype, no weight set is in another's way.
            if component.path in self.schemes:
                hidden |= component.hidden
        if RESERVED in self.checkpoint.entries:
            hidden[RESERVED] = "a view has its own folder of this name"
        entries = self._entries(shards, hidden)
        return Plan(
            plan_id=plan_id(entries, shards, self._source_digests(), self.quantizer_version),
            entries=entries,
            shards=shards,
            groups=groups,
            source_shards=tuple(self.source_shards),
            source_identities=tuple(self.identities),
            schemes=self.schemes,
            order=self.order,
            rows=tuple(self.rows),
            hidden=dict(sorted(hidden.items())),
            warnings=tuple(self.warnings),
            notes=tuple(self.notes),
        )

    def _split_experts(self, chosen: frozenset[str]) -> None:
        """Take each expert of the chosen components for a tensor of its own."""
        stacked = {
            component.path
            for component in self.components
            if component.path in chosen
            and any(
                is_stacked(name, entry)
                for path in component.shards
                for name, entry in self.headers[path].tensors.items()
            )
        }
        if not stacked:
            raise UsageError(
                f"{OPTION}: no component that is quantized has experts in 3-D tensors",
                hint=f"leave {OPTION} out",
            )
        for i, component in enumerate(self.components):
            if component.path in stacked:
                self.components[i], headers = split_experts(component, self.headers)
                self.headers |= headers
                self._warn(component, split_warning(component))

    # -- components ---------------------------------------------------------------------------------

    def _pass_through(self, component: Component) -> None:
        reason = "its component is not quantized"
        if component.already_quantized:
            reason = f"already quantized ({component.already_quantized})"
        decisions = [
            Decision(name, quantize=False, reason=reason)
            for path in component.shards
            for name in self.headers[path].tensors
        ]
        self._report(component, decisions, "", {})

    def _quantize(self, component: Component) -> None:
        """Plan the component's shards, index and config; or pass it through if no tensor of it is quantized."""
        view = ComponentView(component, self.recipe, self.find_profile)
        decisions = view.decide(self.headers)
        if not any(decision.quantize for decision in decisions):
            self._report(component, decisions, "", {})
            self._warn(component, view.unquantized_warning())
            return
        first_source, first_draft = len(self.source_shards), len(self.drafts)
        sources = self._source_tensors(component, decisions)
        tensors = view.arrange(sources)
        in_view: Mapping[str, ViewTensor] = {}
        taken = component.weight_map
        if tensors is not sources:
            in_view = {p.tensor: t for of_shard in tensors for t in of_shard for p in t.pieces}
            taken = {
                t.name: path
                for path, of_shard in zip(component.shards, tensors, strict=True)
                for t in of_shard
            }
        self._report(component, decisions, view.scheme, in_view)
        _check_scale_names(tensors, view.scheme, taken)
        per_tensor = view.scheme == "per_tensor"
        shared = self._shared_groups(component, tensors) if per_tensor else {}
        for i, (path, members) in enumerate(zip(component.shards, tensors, strict=True)):
            placed = place(members, view.scheme, self.headers[path].metadata, shared)
            needed = {piece.shard for tensor in members for piece in tensor.pieces}
            needed.add(first_source + i)  # its header decides the preamble
            self.drafts.append(_Draft(path, component.path, placed, needed))
        self.schemes[component.path] = view.scheme
        self.order[component.path] = tuple(range(first_draft, len(self.drafts)))
        self._write_texts(component, tensors, view.scheme, view.ignored(sources, tensors))
        for warning in view.warnings(decisions, tensors):
            self._warn(component, warning)
        self._warn(component, experts_warning(component, self.headers, view.scheme))
        if note := experts_note(component, self.headers):
            self.notes.append(f"{shown(component)}: {note}")

    def _warn(self, component: Component, warning: str) -> None:
        if warning:
            self.warnings.append(f"{shown(component)}: {warning}")

    def _report(
        self,
        component: Component,
        decisions: Iterable[Decision],
        scheme: str,
        in_view: Mapping[str, ViewTensor],
    ) -> None:
        """Add the rows of ``fp8fs plan`` for every tensor of the component.

        *in_view*: the tensors that hold them, where those are not the source's.
        """
        add = self.rows.append
        scales = Scales(scheme)
        chosen = iter(decisions)
        for path in component.shards:
            for name, entry in self.headers[path].tensors.items():
                decision = next(chosen)
                begin, end = entry.data_offsets
                dtype_out, bytes_out, view_name = entry.dtype, end - begin, ""
                holder = in_view.get(name)
                if decision.quantize:
                    rows, cols = entry.shape
                    dtype_out, bytes_out = FP8, rows * cols
                    if holder is None:
                        bytes_out += scales[entry.shape][1]
                    elif holder.pieces[0].tensor == name:  # the scale of all counts for the first
                        bytes_out += scales[holder.shape][1]
                elif holder is not None and holder.cast:
                    dtype_out, bytes_out = holder.cast, nbytes(holder.cast, entry.shape)
                if holder is not None and holder.name != name:
                    view_name = holder.name
                add(
                    TensorRow(
                        component.path,
                        name,
                        entry.shape,
                        entry.dtype,
                        dtype_out,
                        end - begin,
                        bytes_out,
                        decision.group,
                        decision.reason,
                        view_name,
                    )
                )

    def _source_tensors(
        self, component: Component, decisions: Iterable[Decision]
    ) -> list[list[ViewTensor]]:
        """The tensors of each source shard, as they are."""
        shards: list[list[ViewTensor]] = []
        chosen = iter(decisions)
        for path in component.shards:
            shard = self.checkpoint.shards[path]
            index = len(self.source_shards)
            self.source_shards.append(path)
            self.identities.append(shard.identity)
            header = self.headers[path]
            base = header.preamble_bytes
            tensors: list[ViewTensor] = []
            for name, entry in header.tensors.items():
                decision = next(chosen)
                begin, end = entry.data_offsets
                size = end - begin
                piece = Piece(index, base + begin, size, name)
                tensors.append(
                    ViewTensor(
                        name,
                        decision.quantize,
                        entry.dtype,
                        entry.shape,
                        size,
                        (piece,),
                        decision.group,
                        pitch=entry.pitch if isinstance(entry, TurnedEntry) else 0,
                    )
                )
            shards.append(tensors)
        return shards

    def _shared_groups(
        self, component: Component, shards: Iterable[Iterable[ViewTensor]]
    ) -> dict[str, int]:
        """Number the groups whose members share a scale: those that are more than one tensor of the view."""
        sizes = Counter(tensor.group for tensors in shards for tensor in tensors if tensor.quantize)
        shared: dict[str, int] = {}
        for group, size in sizes.items():
            if group and size > 1:
                shared[group] = len(self.group_names)
                self.group_names.append(f"{component.path}/{group}" if component.path else group)
        return shared

    def _write_texts(
        self,
        component: Component,
        tensors: Sequence[Sequence[ViewTensor]],
        scheme: str,
        ignored: Sequence[str],
    ) -> None:
        """Rewrite the component's index and config."""
        entries, texts = self.checkpoint.entries, self.checkpoint.texts
        shards = [entries[path] for path in component.shards]
        made_ns = max(shard.mtime_ns for shard in shards)  # both texts repeat what headers say
        index = index_path(component)
        if index:
            content = view_index(component, tensors, scheme)
            readers = [entries[component.index_path]] if component.index_path else shards
            if not component.index_path:
                self.notes.append(f"{shown(component)}: has no index; {index} is made")
            self._write_text(index, content, readers, made_ns)
        if component.config is not None:
            path = component.config_path
            content = view_config(component, texts[path], ignored, scheme)
            self._write_text(path, content, [entries[path]], made_ns)

    def _write_text(
        self, path: str, content: bytes, readers: Sequence[SourceEntry], made_ns: int
    ) -> None:
        attributes = strictest(readers, self.owner)
        self.texts[path] = ViewEntry(
            path=path,
            kind="text",
            size=len(content),
            mode=attributes.mode,
            uid=attributes.uid,
            gid=attributes.gid,
            mtime_ns=max(attributes.mtime_ns, made_ns),
            content=content,
        )

    # -- shards and entries -------------------------------------------------------------------------

    def _groups(self) -> tuple[Group, ...]:
        """The groups with their members, wherever those are; partners' shards become sources of each other's."""
        members: list[list[tuple[int, int]]] = [[] for _ in self.group_names]
        for shard, draft in enumerate(self.drafts):
            for i, unit in enumerate(draft.placed.units):
                if unit.group >= 0:
                    members[unit.group].append((shard, i))
        groups: list[Group] = []
        for name, where in zip(self.group_names, members, strict=True):
            units = [self.drafts[shard].placed.units[i] for shard, i in where]
            holders = {shard for shard, _ in where}
            if len(holders) > 1:
                sources = {piece.shard for unit in units for piece in unit.pieces}
                for shard in holders:
                    self.drafts[shard].sources |= sources
            groups.append(
                Group(name, group_id(units, self.identities), tuple(where), len(holders) > 1)
            )
        return tuple(groups)

    def _shards(self, groups: Sequence[Group]) -> tuple[ViewShard, ...]:
        shards: list[ViewShard] = []
        for draft in self.drafts:
            sources = tuple(sorted(draft.sources))
            attributes = strictest(
                [self.checkpoint.entries[self.source_shards[i]] for i in sources], self.owner
            )
            placed = draft.placed
            shards.append(
                ViewShard(
                    path=draft.path,
                    component=draft.component,
                    preamble=placed.preamble,
                    size=placed.size,
                    units=placed.units,
                    sources=sources,
                    object_id=object_id(
                        placed, attributes, groups, self.identities, self.quantizer_version
                    ),
                    mode=attributes.mode,
                    uid=attributes.uid,
                    gid=attributes.gid,
                    mtime_ns=attributes.mtime_ns,
                )
            )
        return tuple(shards)

    def _entries(
        self, shards: Sequence[ViewShard], hidden: Mapping[str, str]
    ) -> dict[str, ViewEntry]:
        """Every name of the view, sorted: parents come before children."""
        made = dict(self.texts)
        for i, shard in enumerate(shards):
            made[shard.path] = ViewEntry(
                path=shard.path,
                kind="shard",
                size=shard.size,
                mode=shard.mode,
                uid=shard.uid,
                gid=shard.gid,
                mtime_ns=shard.mtime_ns,
                shard=i,
            )
        entries: dict[str, ViewEntry] = {}
        for path in sorted({*self.checkpoint.entries, *made} - hidden.keys()):
            source = self.checkpoint.entries.get(path)
            if path.startswith(f"{RESERVED}/"):
                continue
            if path in made or source is None:
                entries[path] = made[path]
            elif source.kind == "other":
                self.warnings.append(f"{path}: a FIFO, socket or device, not shown")
            else:
                entries[path] = ViewEntry(
                    path=path,
                    kind={"dir": "dir", "link": "link"}.get(source.kind, "source"),
                    size=source.size,
                    mode=source.mode,
                    uid=source.uid,
                    gid=source.gid,
                    mtime_ns=source.mtime_ns,
                    link=source.link if source.kind == "link" else "",
                )
        return entries

    def _source_digests(self) -> dict[str, str]:
        """What is known of the bytes of files in SRC: shards' identities, digests of the small texts."""
        digests = {path: shard.identity for path, shard in self.checkpoint.shards.items()}
        for path, content in self.checkpoint.texts.items():
            digests[path] = digest_bytes(content)
        return digests


def _check_scale_names(
    shards: Iterable[Iterable[ViewTensor]], scheme: str, taken: Mapping[str, str]
) -> None:
    """Refuse a component in which a scale's name is taken. *taken*: tensor name -> shard path."""
    suffix = scale_name("", scheme)
    weights = {name.removesuffix(suffix) for name in taken if name.endswith(suffix)}
    if not weights:
        return
    for tensors in shards:
        for tensor in tensors:
            if tensor.quantize and tensor.name in weights:
                scale = tensor.name + suffix
                raise SourceInvalidError(
                    f'{taken[scale]}: tensor "{scale}" exists already, where the scale of "{tensor.name}" would go',
                    hint=f"--keep {tensor.name}",
                    tensor=scale,
                )
