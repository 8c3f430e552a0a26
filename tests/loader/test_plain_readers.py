"""safetensors' own readers on a real mount, several processes at once included."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader.mounts import MountedView

pytestmark = [pytest.mark.loader, pytest.mark.fuse]

# Prints a digest of all tensors' bytes; with a rank and a world, of that rank's rows, read as slices.
READ = """
import hashlib, sys
import torch
from safetensors import safe_open
path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
total = hashlib.sha256()
with safe_open(path, "pt") as file:
    for name in sorted(file.keys()):
        part = file.get_slice(name)
        rows = part.get_shape()[0] if part.get_shape() else 1
        step = -(-rows // world)
        tensor = part[rank * step : (rank + 1) * step] if world > 1 and part.get_shape() else file.get_tensor(name)
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
print(total.hexdigest())
"""


def read_at_once(path: Path, world: int) -> list[str]:
    """What each of *world* processes, started together, reads."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", READ, path, str(rank), str(world)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * world
    return outputs


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sliced_reads_of_a_cold_view(
    world: int, mounted: Callable[..., MountedView], tmp_path: Path
) -> None:
    """Tensor-parallel ranks that slice a cold view at once read the bytes of its copy, and each unit is made once."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    source = tmp_path / "bf16"
    source.mkdir()
    (source / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layer}.{linear}_proj.weight": torch.randn(
            256, 256, generator=generator
        ).bfloat16()
        for layer in range(4)
        for linear in ("self_attn.o", "mlp.down")
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    view = mounted(source)
    found = read_at_once(view.path / "model.safetensors", world)
    view.assert_made_once()
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((view.path / "model.safetensors").read_bytes())
    assert found == read_at_once(copy, world)
    assert all(len(digest.strip()) == hashlib.sha256().digest_size * 2 for digest in found)
