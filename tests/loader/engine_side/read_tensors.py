"""Read every tensor of a folder's safetensors files with one of the readers that engines use, and say what it gave."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reporting
import torch

Tensors = Iterator[tuple[str, torch.Tensor]]


def mapped(files: list[str], backend: str = "mmap") -> Tensors:
    """safetensors, tensor by tensor."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt", backend=backend) as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                yield name, file.get_tensor(name)


def preads(files: list[str]) -> Tensors:
    """safetensors without a mapping."""
    return mapped(files, "pread")


def whole_files(files: list[str]) -> Tensors:
    """safetensors on a file's content."""
    from safetensors.torch import load

    for path in files:
        yield from load(Path(path).read_bytes()).items()


def slices(files: list[str]) -> Tensors:
    """safetensors' slices, two halves of the last dimension, as column-parallel layers are cut."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                part = file.get_slice(name)
                middle = part.get_shape()[-1] // 2
                halves = (part[..., :middle], part[..., middle:])
                yield (
                    name,
                    torch.cat([half.view(torch.uint8) for half in halves], -1).view(
                        halves[0].dtype
                    ),
                )


def fastsafetensors(files: list[str]) -> Tensors:
    """As vLLM's ``--load-format fastsafetensors`` calls it, without GPUDirect."""
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    loader = ParallelLoader(pg=SingleGroup(), hf_weights_files=files, device="cpu", nogds=True)
    yield from loader.iterate_weights()
    loader.close()


def runai(files: list[str]) -> Tensors:
    """As vLLM's ``--load-format runai_streamer`` calls it."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=False)
        for name, tensor in streamer.get_tensors():
            yield name, tensor.clone()


READERS: dict[str, Callable[[list[str]], Tensors]] = {
    "mmap": mapped,
    "pread": preads,
    "whole-file": whole_files,
    "slices": slices,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
}


def main(options: argparse.Namespace) -> dict[str, Any]:
    files = sorted(map(str, options.folder.glob("*.safetensors")))
    found = {}
    for name, tensor in READERS[options.reader](files):
        if name in found:
            raise ValueError(f"{name}: twice")
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = [str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()]
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reader", choices=list(READERS), required=True)
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
