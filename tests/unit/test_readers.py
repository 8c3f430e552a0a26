"""``doctor --engine``: what is measured is said, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fp8fs.cli import engine_check, main
from fp8fs.core import readers
from fp8fs.core.readers import ViewFacts, advise
from fp8fs.errors import SourceInvalidError, UsageError
from fp8fs.integrations import vllm_omni

ALONE = {"vllm-omni": "0.30.0", "vllm": "0.30.0"}
OMNI = ALONE | {"fp8fs": "1"}


@pytest.mark.parametrize(
    ("kind", "scheme", "engine", "version", "applied", "change"),
    [
        ("transformers", "per_channel", "vllm", "0.32.0", "yes", ""),
        ("transformers", "block_free", "vllm", "0.32.0", "yes", "--scheme block"),
        ("transformers", "per_tensor", "transformers", "5.19.0", "wrong", "per_channel"),
        ("transformers", "block", "transformers", "5.19.0", "yes", ""),
        ("transformers", "block", "sglang", "0.5", "unknown", ""),
        ("transformers", "", "vllm", "0.32.0", "no", "plan"),
        ("diffusers", "per_channel", "vllm-omni", "0.30.0", "no", "--scheme per_tensor"),
    ],
)
def test_the_table(
    kind: str, scheme: str, engine: str, version: str, applied: str, change: str
) -> None:
    """Each measured pair gives its verdict and its remedy."""
    (advice,) = advise(ViewFacts(kind, scheme), {engine: version})
    assert (advice.engine, advice.version, advice.applied) == (engine, version, applied)
    assert change in advice.change
    assert bool(change) == bool(advice.change)


@pytest.mark.parametrize(
    ("installed", "names", "is_view", "missing"),
    [
        (OMNI, "runtime", True, ""),
        (OMNI, "checkpoint", True, "--names runtime"),
        (OMNI, "runtime", False, "a mount"),
        (ALONE, "runtime", True, "pip install"),
        (OMNI | {"vllm": "0.32.0"}, "runtime", True, "vllm 0.30.0"),
    ],
)
def test_direct_mmap_needs_names_plugin_and_known_releases(
    installed: dict[str, str], names: str, is_view: bool, missing: str
) -> None:
    """Whatever keeps DLO from mapping a Wan view is named; nothing is if nothing does."""
    view = ViewFacts("diffusers", "per_tensor", names, "WanTransformer3DModel", is_view)
    (advice,) = advise(view, installed)
    assert advice.applied == "yes"
    assert ("maps it directly" in advice.says) == (not missing)
    assert missing in advice.change
    assert bool(missing) == bool(advice.change)


@pytest.mark.parametrize(
    ("class_name", "scheme", "installed", "says", "change"),
    [
        ("MiniMaxH3DiTModel", "per_tensor", OMNI, "maps it directly", ""),
        ("MiniMaxH3DiTModel", "per_tensor", ALONE, "uses the ordinary loader", "for direct mmap"),
        ("MiniMaxH3DiTModel", "block", OMNI, "maps it directly", ""),
        ("MiniMaxH3DiTModel", "block", ALONE, "unordered rows", "start without DLO"),
        ("MiniMaxH3DiT", "block_free", ALONE, "unordered rows", "start without DLO"),
        ("QwenImageTransformer2DModel", "block", ALONE, "uses the ordinary loader", "--names"),
        ("FluxTransformer2DModel", "per_tensor", OMNI, "not measured with this class", ""),
        ("FluxTransformer2DModel", "block", ALONE, "not measured with this class", ""),
    ],
)
def test_direct_mmap_by_class(
    class_name: str, scheme: str, installed: dict[str, str], says: str, change: str
) -> None:
    """Direct mmap is promised for the measured classes alone; what each does without the plugin is what was measured."""
    view = ViewFacts("diffusers", scheme, "checkpoint", class_name, is_view=True)
    (advice,) = advise(view, installed)
    assert (advice.applied, says in advice.says) == ("yes", True), advice
    assert ("maps it directly" in advice.says) == (says == "maps it directly")
    assert change in advice.change


def test_another_release_is_said() -> None:
    """A verdict measured with another release says so."""
    (advice,) = advise(ViewFacts("transformers", "per_channel"), {"vllm": "0.99"})
    assert "measured with 0.32.0, not with 0.99" in advice.says


def test_the_plugin_and_the_table_know_the_same() -> None:
    """Releases and classes are those of the plugin."""
    assert {k: (v,) for k, v in readers.PLUGIN_NEEDS.items()} == vllm_omni.KNOWN_VERSIONS
    assert readers._RUNTIME_NAME_CLASSES == vllm_omni.RUNTIME_NAME_CLASSES


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_views_and_copies_are_told_apart(tmp_path: Path) -> None:
    """A manifest says scheme and names; a plain copy only what its config says."""
    write(tmp_path / "model_index.json", {})
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path / "transformer/config.json", {"_class_name": "X", "quantization_config": stated})
    assert engine_check.read_view(tmp_path) == ViewFacts("diffusers", "block", "", "X", False)
    manifest = {"schemes": {"transformer": "per_tensor"}, "recipe": {"names": "runtime"}}
    write(tmp_path / ".fp8fs/manifest.json", manifest)
    assert engine_check.read_view(tmp_path) == ViewFacts(
        "diffusers", "per_tensor", "runtime", "X", True
    )


@pytest.mark.parametrize("text", ["[]", "{", "\xff"])
def test_unreadable_configs_are_one_line(tmp_path: Path, text: str) -> None:
    """Broken JSON and other types are refused, never a crash."""
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(SourceInvalidError):
        engine_check.read_view(tmp_path)


def test_bad_places_and_pythons(tmp_path: Path) -> None:
    """No directory, no model, no Python: each one clear error."""
    with pytest.raises(UsageError):
        engine_check.read_view(tmp_path / "none")
    with pytest.raises(SourceInvalidError):
        engine_check.read_view(tmp_path)
    with pytest.raises(UsageError):
        engine_check.installed_packages(tmp_path / "python")
    assert main(["doctor", "--python", sys.executable]) == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON document; exit 1 where an installed engine would misread the view (transformers is installed here)."""
    stated = {"architectures": ["L"], "quantization_config": {"quant_method": "fp8"}}
    write(tmp_path / "config.json", stated)
    assert main(["doctor", "--engine", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["view"]["scheme"] == "per_tensor"
    verdicts = {row["engine"]: row["applied"] for row in document["engines"]}
    assert verdicts["transformers"] == "wrong"
    assert main(["doctor", "--engine", str(tmp_path)]) == 1
    assert "change: --scheme per_channel" in capsys.readouterr().out
