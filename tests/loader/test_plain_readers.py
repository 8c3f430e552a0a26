"""safetensors' own readers on a real mount, several processes at once included."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader.mounts import MountedView

torch = pytest.importorskip("torch")

from tests import oracle  # noqa: E402  (it needs torch)

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
    """Tensor-parallel ranks that slice a cold view at once read the oracle's bytes, and each unit is made once."""
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
    view = mounted(source, "--scheme", "per_channel")
    found = read_at_once(view.path / "model.safetensors", world)
    view.assert_made_once()
    stored = oracle.expected(
        oracle.read_file(source / "model.safetensors"), tensors, "per_channel", groups={}
    )
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    save_file(
        {
            name: torch.frombuffer(bytearray(t.data), dtype=dtypes[t.dtype]).reshape(t.shape)
            for name, t in stored.items()
        },
        tmp_path / "expected.safetensors",
    )
    assert found == read_at_once(tmp_path / "expected.safetensors", world)
    assert all(len(digest.strip()) == hashlib.sha256().digest_size * 2 for digest in found)
