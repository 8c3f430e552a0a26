"""One rank of a vLLM-Omni load in a parallel layout: the engine's groups, the engine's loader.

Writes every tensor that this rank's transformer holds to ``--dump`` and reports its groups; the test judges both. What
is written is what the loader left behind, before quantization methods reorder it for their kernels. With HSDP a second
file has what FSDP2's AllGather puts together again out of the shards.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import omni_cpu
import omni_load
import parallel_groups
import reporting
import torch


def load_engine() -> None:
    """Import what a run needs, made able to run on CPU."""
    omni_load.load_engine()
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def load(model: str, directory: Path, diffusion: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The pipeline by the engine's loader, and what it holds just before its weights are processed for kernels."""
    from vllm.config.load import LoadConfig
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    loaded: dict[str, torch.Tensor] = {}

    class ObservedLoader(DiffusersPipelineLoader):
        def _process_weights_after_loading(self, pipeline: Any, target: torch.device) -> None:
            transformer = pipeline.transformer
            loaded.update(parallel_groups.held_tensors(transformer, transformer.state_dict()))
            super()._process_weights_after_loading(pipeline, target)

    pipeline = ObservedLoader(LoadConfig(), diffusion).load_model(
        load_device="cpu",
        load_format="custom_pipeline",
        custom_pipeline_name=omni_cpu.pipeline_class(model, directory),
        device=torch.device("cpu"),
    )
    return pipeline, loaded


def gather_shards(transformer: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Every parameter whole, after FSDP2's AllGather, and the names of those of which this rank held some rows only."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    persistent = list(transformer.state_dict())  # asked now, since asking shards them again
    split = [
        name
        for name, parameter in transformer.named_parameters()
        if isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel()
    ]
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return parallel_groups.held_tensors(transformer, persistent), split


def main(options: argparse.Namespace) -> dict[str, Any]:
    load_engine()
    omni_cpu.announce_rank(options.rank, options.world, options.port)
    diffusion = omni_cpu.diffusion_config(options.directory, parallel=options.layout, offload=False)
    with omni_cpu.vllm_context():
        parallel_groups.join(diffusion, options.rank, options.world)
        facts: dict[str, Any] = {"groups": parallel_groups.members()}
        pipeline, loaded = load(options.model, options.directory, diffusion)
    parallel_groups.write(options.dump, loaded)
    if diffusion.parallel_config.use_hsdp:
        gathered, facts["split"] = gather_shards(pipeline.transformer)
        parallel_groups.write(options.dump.with_suffix(".gathered"), gathered)
    torch.distributed.barrier()
    return facts


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parallel_groups.add_arguments(parser)
    parser.add_argument("--model", choices=list(omni_cpu.CONFIGS), required=True)
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
