"""A parallel layout of vLLM-Omni: its groups, set up with the engine's own calls, and what a rank holds and hands over."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch


def join(diffusion: Any, rank: int, world: int) -> None:
    """Initialize the layout's groups with the calls of the engine's worker; gloo, since there is no accelerator."""
    from vllm_omni.diffusion.distributed import parallel_state

    parallel = diffusion.parallel_config
    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel(
        data_parallel_size=parallel.data_parallel_size,
        cfg_parallel_size=parallel.cfg_parallel_size,
        sequence_parallel_size=parallel.sequence_parallel_size,
        ulysses_degree=parallel.ulysses_degree,
        ring_degree=parallel.ring_degree,
        allgather_degree=parallel.allgather_degree,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        fully_shard_degree=parallel.hsdp_shard_size if parallel.use_hsdp else 1,
        enable_expert_parallel=parallel.enable_expert_parallel,
        use_hsdp=parallel.use_hsdp,
        backend="gloo",
    )


def members() -> dict[str, list[int]]:
    """Name -> the ranks of each of this rank's groups, as told by one collective in it."""
    import vllm.distributed.parallel_state as vllm_state
    from vllm_omni.diffusion.distributed import parallel_state

    sequence = parallel_state.get_sp_group()
    groups = {
        "dp": parallel_state.get_dp_group().device_group,
        "cfg": parallel_state.get_cfg_group().device_group,
        "pp": parallel_state.get_pp_group().device_group,
        "tp": vllm_state.get_tp_group().device_group,
        "sp": sequence.device_group,
        "ulysses": sequence.ulysses_group,
        "ring": sequence.ring_group,
    }
    if vllm_state._EP is not None:
        groups["ep"] = vllm_state.get_ep_group().device_group
    if parallel_state._FS is not None:
        groups["fs"] = parallel_state.get_fs_group().device_group
    if parallel_state._HSDP_REPLICATE is not None:
        groups["replicate"] = parallel_state.get_hsdp_replicate_group().device_group
    return {name: _ranks_of(group) for name, group in groups.items()}


def _ranks_of(group: Any) -> list[int]:
    own = torch.tensor([torch.distributed.get_rank()])
    found = [torch.zeros_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(found, own, group=group)
    return [int(rank) for rank in found]


def held_tensors(module: torch.nn.Module, persistent: Collection[str]) -> dict[str, torch.Tensor]:
    """A copy of each parameter and each buffer that *persistent* names."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named if name in persistent}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One safetensors file for the test to read."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every rank of a layout is told."""
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--layout", type=json.loads, required=True, help="JSON: the engine's parallel settings"
    )
    parser.add_argument("--dump", type=Path, required=True, help="where to write what is held")
