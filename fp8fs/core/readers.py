"""Which engine reads which view: what docs/ENGINES.md measured, as a table that ``fp8fs doctor --engine`` answers from.

Pure: facts about a view and about installed packages in, advice out. A pair that is not in the table was not measured,
and the advice says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["ENGINES", "Advice", "ViewFacts", "advise", "view_from_config", "view_from_manifest"]

ENGINES: Mapping[str, str] = {
    "vllm-omni": "diffusers",
    "vllm": "transformers",
    "transformers": "transformers",
    "sglang": "transformers",
}
"""Engine -> the kind of view that it reads."""

MEASURED: Mapping[str, str] = {"vllm-omni": "0.30.0", "vllm": "0.32.0", "transformers": "5.19.0"}
"""The release that the table was measured with."""

PLUGIN_NEEDS: Mapping[str, str] = {"vllm-omni": "0.30.0", "vllm": "0.30.0"}
"""The releases with which the vLLM-Omni plugin acts."""

_RUNTIME_NAME_CLASSES = frozenset(
    {"WanTransformer3DModel", "WanVACETransformer3DModel", "QwenImageTransformer2DModel"}
)
"""Classes that direct mmap takes under the runtime's own names only."""

_CHECKPOINT_NAME_CLASSES = frozenset({"MiniMaxH3DiT", "MiniMaxH3DiTModel"})
"""Classes that the engine itself maps under a checkpoint's names."""

_SCHEMES_OF_CONFIG = {"fp8": "per_tensor", "compressed-tensors": "per_channel"}


class ViewFacts(NamedTuple):
    """What a view says of itself. ``kind``: "diffusers" or "transformers"; ``scheme`` "": nothing is quantized;
    ``names``: "checkpoint", "runtime" or "" (not recorded); ``is_view``: a mount or tree of fp8fs, no plain copy."""

    kind: str
    scheme: str
    names: str = ""
    class_name: str = ""
    is_view: bool = False


class Advice(NamedTuple):
    """One installed engine and one view. ``applied``: "yes" (FP8 is computed with), "no" (the engine refuses),
    "wrong" (it reads the view and computes nonsense) or "unknown" (not measured). ``change``: "" if nothing."""

    engine: str
    version: str
    applied: str
    says: str
    change: str = ""


class _Row(NamedTuple):
    applied: str
    says: str
    change: str = ""


_TABLE: Mapping[tuple[str, str], _Row] = {
    ("vllm", "per_channel"): _Row("yes", "compressed-tensors, equal to its online FP8"),
    ("vllm", "block"): _Row("yes", "block scales, powers of two already, as DeepGEMM wants them"),
    ("vllm", "block_free"): _Row(
        "yes",
        "block scales; with DeepGEMM (Hopper and later) it rounds them to powers of two and loses precision",
        "on Hopper and later: --scheme block",
    ),
    ("vllm", "per_tensor"): _Row("yes", "one scale per fused weight; its CPU build cannot run it"),
    ("transformers", "per_channel"): _Row("yes", "compressed-tensors"),
    ("transformers", "block"): _Row("yes", "block scales"),
    ("transformers", "block_free"): _Row("yes", "block scales"),
    ("transformers", "per_tensor"): _Row(
        "wrong", "it ignores per-tensor scales without a word", "--scheme per_channel"
    ),
    ("vllm-omni", "per_channel"): _Row(
        "no", "it refuses compressed-tensors: Unknown quantization method", "--scheme per_tensor"
    ),
    ("vllm-omni", "per_tensor"): _Row("yes", "serialized FP8, equal to its online FP8"),
    ("vllm-omni", "block"): _Row("yes", "block scales"),
    ("vllm-omni", "block_free"): _Row(
        "yes",
        "block scales; the ordinary loader with DeepGEMM rounds them to powers of two and loses precision",
        "on Hopper and later: --scheme block",
    ),
}
"""(engine, scheme) -> what happens."""


def view_from_manifest(manifest: Mapping[str, object], kind: str, class_name: str) -> ViewFacts:
    """A view by its ``.fp8fs/manifest.json``. A manifest without schemes is of a view in which nothing is quantized."""
    schemes, recipe = manifest.get("schemes"), manifest.get("recipe")
    found = next(iter(schemes.values()), "") if isinstance(schemes, dict) else ""
    names = recipe.get("names", "") if isinstance(recipe, dict) else ""
    return ViewFacts(kind, str(found), str(names), class_name, is_view=True)


def view_from_config(config: Mapping[str, object], kind: str, class_name: str) -> ViewFacts:
    """A plain copy of a view, by the ``quantization_config`` of its quantized component's config.json."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict):
        return ViewFacts(kind, "", class_name=class_name)
    scheme = _SCHEMES_OF_CONFIG.get(str(stated.get("quant_method")), "other")
    if scheme == "per_tensor" and stated.get("weight_block_size"):
        scheme = "block"
    return ViewFacts(kind, scheme, class_name=class_name)


def advise(view: ViewFacts, installed: Mapping[str, str]) -> list[Advice]:
    """What each installed engine that reads this kind of view will make of it.

    *installed*: package -> release without local suffix; "fp8fs" among them where the plugin can be found.
    """
    return [
        _advise(view, engine, installed)
        for engine, kind in ENGINES.items()
        if kind == view.kind and engine in installed
    ]


def _advise(view: ViewFacts, engine: str, installed: Mapping[str, str]) -> Advice:
    version = installed[engine]
    if not view.scheme:
        return Advice(
            engine, version, "no", "no weight of this view is FP8", "fp8fs plan SRC says why"
        )
    row = _TABLE.get((engine, view.scheme))
    if row is None:
        return Advice(engine, version, "unknown", f"{view.scheme} was not measured with it")
    says, change = [row.says], [row.change] if row.change else []
    if engine == "vllm-omni" and row.applied == "yes":
        _direct_mmap(view, installed, says, change)
    if version != MEASURED[engine]:
        says.append(f"measured with {MEASURED[engine]}, not with {version}")
    return Advice(engine, version, row.applied, "; ".join(says), "; ".join(change))


def _direct_mmap(
    view: ViewFacts, installed: Mapping[str, str], says: list[str], change: list[str]
) -> None:
    """Say whether DLO will map the view, and what keeps it from doing so."""
    if view.class_name not in _RUNTIME_NAME_CLASSES | _CHECKPOINT_NAME_CLASSES:
        says.append(
            "DLO was not measured with this class: it uses the ordinary loader for most of them"
        )
        return
    missing: list[str] = []
    if view.class_name in _RUNTIME_NAME_CLASSES and view.names != "runtime":
        missing.append("--names runtime")
    if not view.is_view:
        missing.append("a mount instead of a plain copy (the plugin acts on mounts alone)")
    if "fp8fs" not in installed:
        missing.append('pip install "fp8fs[vllm-omni]" beside the engine')
    wrong = [f"{name} {want}" for name, want in PLUGIN_NEEDS.items() if installed.get(name) != want]
    if wrong:
        missing.append(f"{' and '.join(wrong)} (what the plugin knows)")
    if not missing:
        says.append("DLO maps it directly")
    elif view.scheme.startswith("block") and view.class_name in _CHECKPOINT_NAME_CLASSES:
        says.append("DLO maps it and computes with unordered rows outside of the streamed blocks")
        change.append(f"with DLO: {', '.join(missing)}; or start without DLO")
    else:
        says.append("DLO uses the ordinary loader")
        change.append(f"for direct mmap: {', '.join(missing)}")
