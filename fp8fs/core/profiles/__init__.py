"""What each engine does with each model class: which linears it builds as FP8 and which checkpoint tensors feed them.

The data (``vllm.json`` for transformers models, ``vllm_omni.json`` for diffusion transformers) is derived from the
engines themselves by ``scripts/profiles/``; ``quality.py`` is the table of exclusions on top.

    profile = find("LlamaForCausalLM", "transformers")
    profile.decide("model.layers.3.self_attn.q_proj")     -> Verdict(quantize=True, reason="...", group="model.layers.3.self_attn.qkv_proj")
    profile.decide("lm_head")                             -> Verdict(quantize=False, reason="...", group="")

Names are those of modules in a checkpoint: a weight's name without ``.weight``. In patterns ``{i}`` is an index; the
n-th ``{i}`` of one pattern of a linear has the value of the n-th of another.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import NamedTuple

import msgspec

from fp8fs.core.profiles.quality import exclusion

__all__ = ["Fusion", "Profile", "RuntimeTensor", "Verdict", "find", "known_classes"]

FILES = {"transformers": "vllm.json", "diffusers": "vllm_omni.json"}
INDEX = "{i}"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


class GroupedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of a fused q/k/v weight are stored head by head (its q, k, v rows), while the runtime has [Q; K; V].

    ``heads`` and ``head_dim`` are keys of the component's config. Scales are stored in runtime order.
    """

    heads: str
    head_dim: str


class Linear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One linear as the engine builds it, and one way in which a checkpoint names it.

    ``sources``: checkpoint modules that feed it, in row order; None if the runtime's own name does; empty if no
    checkpoint tensor can (fused experts). ``ignore``: the spelling in an ignore list that keeps it unquantized; None
    if the sources do. ``shards``: scale slots of the fused weight. ``together``: a runtime module whose linears are
    all FP8 or none (the experts of a layer).
    """

    runtime: str
    fp8: bool
    sources: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    shards: int = 1
    together: str = ""
    grouped_rows: GroupedRows | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """Patterns of the checkpoint modules that feed it, in row order."""
        return (self.runtime,) if self.sources is None else self.sources

    @property
    def ignore_names(self) -> tuple[str, ...]:
        """Patterns that keep it unquantized when an engine finds them in an ignore list."""
        return self.members if self.ignore is None else self.ignore


class Record(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"class_name": "class"}
):
    """The data of one class. ``matches``: class names in a checkpoint's config; ``blocks``: lists of repeated blocks;
    ``renames``: checkpoint tensor -> runtime tensor, where no linear says it; ``dtypes``: runtime tensors that are
    not BF16; ``names_complete``: every checkpoint tensor is known to land, and every runtime tensor to be fed."""

    class_name: str
    module: str
    matches: tuple[str, ...]
    blocks: tuple[str, ...]
    linears: tuple[Linear, ...]
    renames: dict[str, str]
    dtypes: dict[str, str]
    names_complete: bool


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's file. ``not_derived``: classes without a profile, and why."""

    engine: str
    version: str
    kind: str
    profiles: tuple[Record, ...]
    not_derived: dict[str, str]


class Verdict(NamedTuple):
    """Whether a weight becomes FP8, why, and the fused module whose members share one scale ("" if it is alone)."""

    quantize: bool
    reason: str
    group: str


class Fusion(NamedTuple):
    """The runtime module that a checkpoint module belongs to.

    ``siblings``: all checkpoint modules of it, in row order, the asked one among them. ``together``: the runtime
    module whose linears must all be treated alike, "" if none. ``grouped_rows``: how the rows are stored, if not as
    the runtime has them.
    """

    runtime: str
    siblings: tuple[str, ...]
    together: str
    grouped_rows: GroupedRows | None


class RuntimeTensor(NamedTuple):
    """What a checkpoint tensor is at run time: rows of part ``part`` of ``parts`` of ``name``, of that dtype."""

    name: str
    part: int
    parts: int
    dtype: str


class _Known(NamedTuple):
    """One checkpoint name in a profile: its pattern by parts, its linear, its place among the members, and why it is
    kept for quality ("" if it is not)."""

    path: tuple[str, ...]
    linear: Linear
    position: int
    kept_because: str


class _Place(NamedTuple):
    """A checkpoint module found in a profile: the same, with the values of its indices."""

    linear: Linear
    position: int
    values: tuple[str, ...]
    kept_because: str


class Profile:
    """What one engine's release does with one model class. Immutable.

    Several records of one class (layouts of it, or two pipelines that share its name) make one profile: the first
    that knows a name decides, and after ``for_checkpoint`` the first of whose group nothing is missing.
    """

    def __init__(self, document: Document, records: tuple[Record, ...]) -> None:
        self.engine = document.engine
        self.version = document.version
        self.kind = document.kind
        self.class_name = records[0].class_name
        self.blocks = tuple(dict.fromkeys(name for record in records for name in record.blocks))
        self.names_complete = all(record.names_complete for record in records)
        self.quantizes_nothing = not any(
            linear.fp8 for record in records for linear in record.linears
        )
        self.reorders_rows = any(
            linear.grouped_rows is not None for record in records for linear in record.linears
        )
        self._renames = {old: new for record in records for old, new in record.renames.items()}
        self._dtypes = {name: dtype for record in records for name, dtype in record.dtypes.items()}
        self._present: frozenset[str] | None = None
        self._places: dict[tuple[str, ...], list[_Known]] = {}
        for linear in (linear for record in records for linear in record.linears):
            names = linear.members or (linear.runtime,)
            kept_because = next(
                filter(None, (exclusion(self.kind, n.replace(INDEX, "0")) for n in names)), ""
            )
            for position, pattern in enumerate(names):
                known = _Known(tuple(pattern.split(".")), linear, position, kept_because)
                self._places.setdefault(_shape(pattern), []).append(known)

    def __repr__(self) -> str:
        return f"Profile({self.class_name}, {self.engine} {self.version})"

    def for_checkpoint(self, modules: Iterable[str]) -> Profile:
        """The same profile, which knows what modules a checkpoint has and so which of several layouts it is."""
        chosen = copy.copy(self)
        chosen._present = frozenset(modules)
        return chosen

    def decide(self, module: str) -> Verdict:
        """Whether the weight of a checkpoint module becomes FP8. Unknown modules, and tensors that are no linear, do not."""
        place = self._find(module)
        if place is None or not place.linear.members:
            return Verdict(
                quantize=False, reason=f"no linear of {self.class_name} in {self._who}", group=""
            )
        if not place.linear.fp8:
            return Verdict(quantize=False, reason=f"{self._who} builds it unquantized", group="")
        if place.kept_because:
            return Verdict(
                quantize=False, reason=f"kept for quality: {place.kept_because}", group=""
            )
        is_fused = len(place.linear.members) > 1
        group = _fill(place.linear.runtime, place.values) if is_fused else ""
        return Verdict(quantize=True, reason=f"{self._who} builds it FP8", group=group)

    def state(self, module: str) -> str:
        """What the engine itself does with a module: "quantized", "unquantized" or "unknown"."""
        place = self._find(module)
        if place is None:
            return "unknown"
        return "quantized" if place.linear.fp8 else "unquantized"

    def fixed_numbers(self, module: str) -> tuple[int, ...]:
        """Which numbers in a module's name say what it is (``net.0``), counted among its numbers from 0.

        Modules that differ in the other numbers alone are treated alike: their answers differ in those numbers only.
        """
        shape = _shape(module)
        paths = [known.path for known in self._places.get(shape, ())]
        numbers = [at for at, part in enumerate(shape) if part == "#"]
        return tuple(n for n, at in enumerate(numbers) if any(path[at] != INDEX for path in paths))

    def fusion_of(self, module: str) -> Fusion | None:
        """The runtime module that a checkpoint module feeds, or None if the profile does not know it."""
        place = self._find(module)
        return None if place is None else self._fusion(place)

    def scale_slots(self, module: str) -> int:
        """How many scales the engine's fused module has room for: 1 for a plain linear, or a module not known."""
        place = self._find(module)
        return 1 if place is None else place.linear.shards

    def ignored(self, kept: Iterable[str]) -> list[str]:
        """Names for an ignore list, in the engine's spelling, so that it builds none of the kept modules as FP8.

        Every kept module's own name is in it too: other readers match by that. Sorted, without repetition.
        """
        names: set[str] = set()
        for module in kept:
            names.add(module)
            container = module.rpartition(".")[0]
            for place in (self._find(module), self._find(container)):
                if place is not None and place.linear.fp8:
                    names.update(
                        _fill(pattern, place.values) for pattern in place.linear.ignore_names
                    )
        return sorted(names)

    def runtime_tensor(self, tensor: str) -> RuntimeTensor:
        """Name, part and dtype that a checkpoint tensor has at run time; itself if the profile has nothing to say."""
        module, _, leaf = tensor.rpartition(".")
        place = self._find(module) if leaf in ("weight", "bias") else None
        part, parts = 0, 1
        if place is not None and place.linear.members:
            name = f"{_fill(place.linear.runtime, place.values)}.{leaf}"
            part, parts = place.position, len(place.linear.members)
        else:
            name = _translate(tensor, self._renames)
        path = name.split(".")
        dtypes = (
            d for pattern, d in self._dtypes.items() if _match(pattern.split("."), path) is not None
        )
        dtype = next(dtypes, "bfloat16")
        return RuntimeTensor(name, part, parts, DTYPES[dtype])

    @property
    def _who(self) -> str:
        return f"{self.engine} {self.version}"

    def _find(self, module: str) -> _Place | None:
        path = module.split(".")
        first: _Place | None = None
        for known in self._places.get(_shape(module), ()):
            values = _match(known.path, path)
            if values is None:
                continue
            place = _Place(known.linear, known.position, values, known.kept_because)
            if self._present is None or self._present.issuperset(self._fusion(place).siblings):
                return place
            first = first or place
        return first

    @staticmethod
    def _fusion(place: _Place) -> Fusion:
        linear, values = place.linear, place.values
        return Fusion(
            _fill(linear.runtime, values),
            tuple(_fill(pattern, values) for pattern in linear.members),
            _fill(linear.together, values),
            linear.grouped_rows,
        )


def find(class_name: str, kind: str) -> Profile | None:
    """The profile of a component by the class name in its config, or None if no engine's is known.

    ``kind`` is the component's: "diffusers" components are read by vLLM-Omni, "transformers" by vLLM.
    """
    if kind not in FILES:
        return None
    return _profiles(kind).get(class_name)


def known_classes(kind: str) -> list[str]:
    """Class names, as checkpoints spell them, that ``find`` knows for a kind of component."""
    return sorted(_profiles(kind)) if kind in FILES else []


def parse_document(content: bytes) -> Document:
    """Decode one engine's file. Raises msgspec.ValidationError if it is not of this format."""
    return msgspec.json.decode(content, type=Document)


@functools.cache
def _profiles(kind: str) -> dict[str, Profile]:
    document = parse_document(resources.files(__package__).joinpath(FILES[kind]).read_bytes())
    by_name: dict[str, list[Record]] = {}
    for record in document.profiles:
        for name in record.matches:
            by_name.setdefault(name, []).append(record)
    return {name: Profile(document, tuple(records)) for name, records in by_name.items()}


def _shape(name: str) -> tuple[str, ...]:
    """A name or pattern with every index blotted out: what both have in common."""
    return tuple("#" if part.isdecimal() or part == INDEX else part for part in name.split("."))


def _match(pattern: Sequence[str], path: Sequence[str]) -> tuple[str, ...] | None:
    """The values of ``{i}`` in a name that the pattern fits, or None. Both are given by parts."""
    if len(pattern) != len(path):
        return None
    values = []
    for want, have in zip(pattern, path, strict=True):
        if want == INDEX and have.isdecimal():
            values.append(have)
        elif want != have:
            return None
    return tuple(values)


def _fill(pattern: str, values: tuple[str, ...]) -> str:
    """A pattern with its ``{i}`` replaced in order; it may have fewer than there are values."""
    remaining: Iterator[str] = iter(values)
    return ".".join([next(remaining) if part == INDEX else part for part in pattern.split(".")])


def _translate(name: str, table: dict[str, str]) -> str:
    """A name through a table of patterns; itself if none fits."""
    for old, new in table.items():
        values = _match(old.split("."), name.split("."))
        if values is not None:
            return _fill(new, values)
    return name
