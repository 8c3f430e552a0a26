"""Load every tensor of a checkpoint directory with safetensors and torch, as a loader does: each copied out once.

Says "ready" when everything is imported, then takes DIR as a line on stdin and answers {"seconds": S, "bytes": N}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open


def load(folder: Path) -> int:
    nbytes = 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in sorted(set(index.values())):
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                nbytes += file.get_tensor(name).clone().nbytes
    return nbytes


def main() -> None:
    torch.zeros(1).clone()
    print("ready", flush=True)
    folder = Path(sys.stdin.readline().rstrip("\n"))
    started = time.perf_counter()
    nbytes = load(folder)
    print(json.dumps({"seconds": time.perf_counter() - started, "bytes": nbytes}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
