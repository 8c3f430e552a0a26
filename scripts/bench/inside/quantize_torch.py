"""The script that anybody would write: load each shard, per-channel FP8 for linears, save. SRC DST.

Answers {"seconds": S}: the work alone, torch's import and the process's start not counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8_MAX = 448.0


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / FP8_MAX
    data = (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return data, scale


def main() -> None:
    src, dst = map(Path, sys.argv[1:])
    started = time.perf_counter()
    dst.mkdir()
    for shard in sorted(src.glob("*.safetensors")):
        out = {}
        for name, tensor in load_file(shard).items():
            if tensor.ndim == 2 and ".layers." in name:
                out[name], out[name + "_scale"] = quantize(tensor)
            else:
                out[name] = tensor
        save_file(out, dst / shard.name, metadata={"format": "pt"})
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
