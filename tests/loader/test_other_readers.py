"""The readers of safetensors files that engines can be told to use, on a real mount: each gives the oracle's bytes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader import harness
from tests.loader.mounts import MountedView, cold_and_warm

torch = pytest.importorskip("torch")

from tests import oracle  # noqa: E402  (it needs torch)

pytestmark = [pytest.mark.loader, pytest.mark.fuse]

# Reader of engine_side/read_tensors.py -> the engine's environment that has it (None: this one).
READERS = {
    "mmap": None,
    "pread": None,
    "whole-file": None,
    "slices": None,
    "fastsafetensors": "vllm",
    "runai": "vllm",
}
TORCH_NAMES = {"BF16": "torch.bfloat16", "F32": "torch.float32", "F8_E4M3": "torch.float8_e4m3fn"}
LINEARS = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (384, 256),
    "mlp.up_proj": (384, 256),
    "mlp.down_proj": (256, 384),
}
SCHEME = "per_channel"
UNTOUCHED = "extra_state.pth"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Llama's names in two shards with an index, and a pickle that is no double of them."""
    from safetensors.torch import save_file

    folder = tmp_path / "bf16"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    index = {}
    for shard in range(2):
        shapes = {
            f"model.layers.{2 * shard + layer}.{module}.weight": shape
            for layer in range(2)
            for module, shape in LINEARS.items()
        }
        shapes[("model.embed_tokens.weight", "lm_head.weight")[shard]] = (512, 256)
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        tensors = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    document = {"metadata": {"total_size": 0}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    state = {"steps": torch.arange(9), "noise": torch.randn(64, 64, generator=generator)}
    torch.save(state, folder / UNTOUCHED)
    return folder


def expected(source: Path) -> dict[str, list[Any]]:
    """What a reader has to report of the view: every tensor's dtype, shape and digest."""
    stored = oracle.read_folder(source)
    linears = [name for name in stored if "_proj." in name]
    view = oracle.expected(stored, linears, SCHEME, oracle.sibling_groups(stored))
    return {
        name: [
            TORCH_NAMES[tensor.dtype],
            list(tensor.shape),
            hashlib.sha256(tensor.data).hexdigest(),
        ]
        for name, tensor in view.items()
    }


def read(reader: str, folder: Path, workdir: Path) -> Any:
    """What *reader* gives of a folder, in a process of its own."""
    arguments = (folder, "--reader", reader)
    engine = READERS[reader]
    if engine:
        return harness.run_script(engine, "read_tensors.py", *arguments, workdir=workdir)
    script, result = harness.ENGINE_SIDE / "read_tensors.py", workdir / "result.json"
    command = [sys.executable, script, *arguments, "--result", result]
    subprocess.run([str(word) for word in command], check=True, timeout=harness.TIMEOUT_S)
    return json.loads(result.read_text())


@pytest.mark.parametrize("reader", list(READERS))
def test_a_reader_gives_the_oracles_bytes(
    reader: str, source: Path, mounted: Callable[..., MountedView], tmp_path: Path
) -> None:
    """Cold and warm, a reader of the view gives every tensor with the dtype, shape and bytes that the source implies."""
    view = mounted(source, "--scheme", SCHEME)
    found = cold_and_warm(view, lambda path: read(reader, path, tmp_path))
    assert found == expected(source)


def test_torch_maps_untouched_pickles(source: Path, mounted: Callable[..., MountedView]) -> None:
    """torch.load with and without mmap gives from the view what it gives from the source, and nothing is quantized."""
    view = mounted(source)
    assert (view.path / UNTOUCHED).read_bytes() == (source / UNTOUCHED).read_bytes()
    original = torch.load(source / UNTOUCHED, weights_only=True)
    for is_mapped in (True, False):
        state = torch.load(view.path / UNTOUCHED, mmap=is_mapped, weights_only=True)
        assert state.keys() == original.keys()
        assert all(torch.equal(state[name], original[name]) for name in original)
    assert view.status()["units"]["made"] == 0
