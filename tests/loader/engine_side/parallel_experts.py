"""One rank of an expert-parallel load: vLLM-Omni's groups, and vLLM's loader for a transformers model with experts.

Writes every tensor that this rank's model holds to ``--dump``, as the loader left it before it is processed for kernels,
and reports its groups; the test judges both.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import omni_cpu
import parallel_groups
import reporting
import torch

ENGINE_MODULES = (
    "vllm.engine.arg_utils",
    "vllm_omni.diffusion.data",
)


def load_engine() -> None:
    """Import what a run needs, made able to run on CPU."""
    omni_cpu.bring_up()
    for module in ENGINE_MODULES:
        importlib.import_module(module)
    from vllm.model_executor.models import ModelRegistry, qwen3_moe

    # By its class, or the engine would start one more process to import and inspect it.
    ModelRegistry.register_model("Qwen3MoeForCausalLM", qwen3_moe.Qwen3MoeForCausalLM)


def diffusion_config(directory: Path, layout: dict[str, Any]) -> Any:
    """The engine's configuration for a layout of a model with experts."""
    from vllm_omni.diffusion.data import (
        DiffusionParallelConfig,
        OmniDiffusionConfig,
        TransformerConfig,
    )

    config = OmniDiffusionConfig(
        model=str(directory),
        dtype=torch.bfloat16,
        parallel_config=DiffusionParallelConfig(**layout),
        pin_cpu_memory=False,
    )
    experts = omni_cpu.read_json(directory / "config.json")["num_local_experts"]
    config.set_tf_model_config(TransformerConfig.from_dict({"num_experts": experts}))
    return config


def vllm_config(directory: Path, parallel: Any) -> Any:
    """vLLM's configuration for the folder, with the layout written in as vLLM-Omni does for its models."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(directory), dtype="bfloat16", enforce_eager=True, max_model_len=128
    )
    config = arguments.create_engine_config()
    config.parallel_config.data_parallel_size = parallel.data_parallel_size
    config.parallel_config.enable_expert_parallel = parallel.enable_expert_parallel
    return config


def load(config: Any) -> dict[str, torch.Tensor]:
    """What vLLM's loader leaves in the model, just before its weights are processed for kernels."""
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    loaded: dict[str, torch.Tensor] = {}
    process = base_loader.process_weights_after_loading

    def observe(model: torch.nn.Module, *arguments: Any) -> None:
        loaded.update(parallel_groups.held_tensors(model, model.state_dict()))
        process(model, *arguments)

    base_loader.process_weights_after_loading = observe
    get_model_loader(config.load_config).load_model(
        vllm_config=config, model_config=config.model_config
    )
    return loaded


def main(options: argparse.Namespace) -> dict[str, Any]:
    load_engine()
    import amx_kernels
    from vllm.config import set_current_vllm_config
    from vllm_omni.diffusion.forward_context import set_forward_context

    amx_kernels.emulate()
    omni_cpu.announce_rank(options.rank, options.world, options.port)
    diffusion = diffusion_config(options.directory, options.layout)
    config = vllm_config(options.directory, diffusion.parallel_config)
    with (
        set_forward_context(vllm_config=config, omni_diffusion_config=diffusion),
        set_current_vllm_config(config),
    ):
        parallel_groups.join(diffusion, options.rank, options.world)
        members = parallel_groups.members()
        parallel_groups.write(options.dump, load(config))
        torch.distributed.barrier()
    return {"groups": members}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parallel_groups.add_arguments(parser)
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
