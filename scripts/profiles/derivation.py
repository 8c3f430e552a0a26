"""What both derivation scripts share: index patterns, recorded loads, and the profile format (fp8fs/core/profiles).

Runs inside an engine's environment, on models on the meta device: nothing is loaded, only names are followed.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

PROFILES = Path(__file__).resolve().parents[2] / "fp8fs" / "core" / "profiles"
INDEX = "{i}"
REPEATED = ("layers", "blocks", "merger_list")
SHARD_ORDER = {"q": 0, "k": 1, "v": 2, "w1": 0, "w3": 1, "w2": 0}


class IndexPatterns:
    """Turns names into patterns: an index becomes ``{i}`` where it counts repeated modules, and stays where it does not.

    ``blocks.0.attn.to_out.0`` -> ``blocks.{i}.attn.to_out.0``: only the first index takes several values.
    """

    def __init__(self, names: Iterable[str]) -> None:
        shapes: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
        for name in names:
            path = name.split(".")
            shapes[self._shape(path)].append(path)
        self._varies = {
            shape: [
                part == "#"
                and (len({path[at] for path in paths}) > 1 or shape[at - 1].endswith(REPEATED))
                for at, part in enumerate(shape)
            ]
            for shape, paths in shapes.items()
        }

    @staticmethod
    def _shape(path: list[str]) -> tuple[str, ...]:
        return tuple("#" if part.isdigit() else part for part in path)

    def __call__(self, name: str) -> str:
        path = name.split(".")
        varies = self._varies.get(self._shape(path), [part.isdigit() for part in path])
        return ".".join(INDEX if vary else part for part, vary in zip(path, varies, strict=True))


class RecordedLoads:
    """A model whose parameters only note that they would have been loaded, and from which shard."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self._model = model
        self._hits: list[tuple[str, tuple[str, ...]]] = []
        for name, parameter in model.named_parameters():
            self._intercept(name, parameter, default_weight_loader)

    def _intercept(self, name: str, parameter: Any, default: Callable[..., Any]) -> None:
        def note(*arguments: Any, **keywords: Any) -> bool:
            """Callers pass (parameter, tensor, ...) by position or by name; the rest says which shard it is."""
            positional = [part for part in arguments if isinstance(part, str | int)]
            named = [
                keywords[key]
                for key in ("shard_id", "loaded_shard_id", "expert_id")
                if key in keywords
            ]
            self._hits.append((name, tuple(str(part) for part in (*positional, *named))))
            return True

        try:
            parameter.weight_loader = note
        except AttributeError:  # vLLM's parameter classes have a read-only property
            parameter._weight_loader = note

    def landing(self, name: str, shape: torch.Size) -> list[tuple[str, tuple[str, ...]]]:
        """Where the engine's ``load_weights`` puts a checkpoint tensor of that name: (parameter, shard facts)."""
        self._hits.clear()
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        with contextlib.suppress(Exception):  # a name that the loader does not take lands nowhere
            self._model.load_weights(iter([(name, tensor)]))
        return list(self._hits)


def note_prefixes(build: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, dict[int, str]]:
    """Build a model and note by which prefix each layer asked for its quantization method: ignore lists match that."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    prefixes: dict[int, str] = {}
    original = Fp8Config.get_quant_method

    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        prefixes[id(layer)] = prefix
        return original(self, layer, prefix)

    Fp8Config.get_quant_method = get_quant_method
    try:
        return build(), prefixes
    finally:
        Fp8Config.get_quant_method = original


def fp8_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that the engine built as FP8, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__
        in ("Fp8LinearMethod", "Fp8MoEMethod")
    }


def shard_position(facts: tuple[str, ...]) -> int:
    """The place of a checkpoint tensor among the row blocks of a fused parameter."""
    for fact in facts:
        if fact in SHARD_ORDER:
            return SHARD_ORDER[fact]
    return next((int(fact) for fact in facts if fact.isdigit()), 0)


def linear_record(
    runtime: str,
    *,
    fp8: bool,
    sources: Iterable[tuple[str, ...]],
    ignore: tuple[str, ...],
    shards: int,
    together: str,
) -> list[dict[str, Any]]:
    """The profile's lines for one runtime linear: one for each way a checkpoint may name it, or one alone."""
    lines = []
    for members in list(sources) or [(runtime,)]:
        line: dict[str, Any] = {"runtime": runtime, "fp8": fp8}
        if members != (runtime,):
            line["sources"] = list(members)
        if fp8 and ignore and ignore != members:
            line["ignore"] = list(ignore)
        if shards > 1:
            line["shards"] = shards
        if together:
            line["together"] = together
        lines.append(line)
    return lines


def readable_json(value: Any, indent: str = "", width: int = 150) -> str:
    """JSON for people who read diffs: what fits on a line is on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(flat) <= width or not isinstance(value, dict | list):
        return flat
    deeper = indent + " "
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)}: {readable_json(item, deeper, width)}"
            for key, item in value.items()
        ]
    else:
        items = [readable_json(item, deeper, width) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(items) + f"\n{indent}{closing}"


def only(document: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """What the document says of some classes."""
    profiles = [profile for profile in document["profiles"] if profile["class"] in classes]
    failed = {name: why for name, why in document["not_derived"].items() if name in classes}
    return document | {"profiles": profiles, "not_derived": failed}


def write_or_check(
    document: dict[str, Any], file_name: str, *, check: bool, classes: Sequence[str] = ()
) -> int:
    """Write the profiles, or compare them with the file that is checked in. Returns the exit code.

    ``classes``: those alone, where not all were derived: they are compared, or printed.
    """
    if classes and not check:
        print(json.dumps(document, indent=1))
        return 0
    path = PROFILES / file_name
    text = readable_json(document) + "\n"
    if not check:
        path.write_text(text)
        print(
            f"wrote {path}: {len(document['profiles'])} classes, not derived: {sorted(document['not_derived'])}"
        )
        return 0
    stored = json.loads(path.read_text())
    if classes:
        stored = only(stored, classes)
    if classes and not stored["profiles"]:
        print(f"{file_name}: no class {' or '.join(classes)}", file=sys.stderr)
        return 1
    if stored == document:
        print(f"{file_name}: {len(document['profiles'])} classes as checked in")
        return 0
    for key in document:
        if document[key] != stored.get(key) and key != "profiles":
            print(f"{file_name}: {key} was {stored.get(key)}, is {document[key]}", file=sys.stderr)
    was, now = (
        {profile["class"]: profile for profile in d["profiles"]} for d in (stored, document)
    )
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            print(f"{file_name}: {name} differs from what the engine builds", file=sys.stderr)
    return 1
