"""vLLM-Omni on CPU with gloo ranks: what a test must supply from outside, since the engine expects an accelerator.

No file of the engine is edited or copied. ``bring_up`` replaces, in this process only, what raises or is missing on
CPU; the loader, the planner, the offload backend and the models are the engine's own.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import types
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault(
    "TORCH_COMPILE_DISABLE", "1"
)  # compiling takes longer than all that is computed

import missing_ops
import torch

HEAD_DIM = 128  # a multiple of the block size, so that block scales of q, k and v do not straddle
CONFIGS: dict[str, dict[str, Any]] = {
    "h3": {
        "_class_name": "MiniMaxH3DiT",
        "num_layers": 4,
        "token_refiner_num_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "attention_head_dim": HEAD_DIM,
        "ffn_hidden_size": 512,
        "text_dim": 128,
        "time_embed_hidden_size": 256,
        "time_embed_dim": 128,
        "adaln_out_features": 18 * 256,
        "final_adaln_out_features": 512,
        "rope_inv_freq_len": 8,
        "timestep_input_dim": 64,
    },
    "wan": {
        "_class_name": "WanTransformer3DModel",
        "patch_size": [1, 2, 2],
        "num_attention_heads": 2,
        "attention_head_dim": HEAD_DIM,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 128,
        "freq_dim": 64,
        "ffn_dim": 512,
        "num_layers": 4,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 64,
    },
    "qwen": {
        "_class_name": "QwenImageTransformer2DModel",
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 4,
        "attention_head_dim": HEAD_DIM,
        "num_attention_heads": 2,
        "joint_attention_dim": 128,
        "axes_dims_rope": [16, 56, 56],
        "guidance_embeds": False,
    },
}


CONFIGS["wan22"] = CONFIGS["wan"] | {"num_layers": 2}  # two experts
CONFIGS["h3-uneven"] = CONFIGS["h3"] | {
    "ffn_hidden_size": 320
}  # gate and up are two and a half blocks each


def components(model: str) -> tuple[str, ...]:
    """The folders of a pipeline's transformers, each with a config and weights of its own."""
    return ("transformer", "transformer_2") if model == "wan22" else ("transformer",)


@functools.cache
def bring_up() -> None:
    """Make this process able to run DLO on CPU. Call before anything else of the engine is imported. Repeatable."""
    _give_platform_a_cpu()
    _let_gloo_gather_fp8()
    _stand_in_for_cosmos3()
    missing_ops.fill()


def _give_platform_a_cpu() -> None:
    """One CPU "device", plain SDPA, and no-op synchronization: the generic platform raises or answers 0."""
    import vllm_omni  # noqa: F401
    from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    from vllm_omni.platforms import current_omni_platform

    platform = type(current_omni_platform)
    platform.synchronize = lambda self: None
    platform.empty_cache = lambda self: None
    platform.get_device_count = lambda self: 1
    platform.get_torch_device = lambda self, *args: torch.device("cpu")
    platform.set_device = lambda self, *args: None
    platform.get_diffusion_attn_backend_cls = classmethod(
        lambda cls, *args, **kwargs: DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()
    )
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None
        torch.accelerator.synchronize = lambda *args: None


def _let_gloo_gather_fp8() -> None:
    """gloo does not know float8 (NCCL does): gather the same bytes as uint8."""
    gather = torch.distributed.all_gather_into_tensor

    def all_gather_into_tensor(
        output: torch.Tensor, shard: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if shard.dtype == torch.float8_e4m3fn:
            output, shard = output.view(torch.uint8), shard.view(torch.uint8)
        return gather(output, shard, *args, **kwargs)

    torch.distributed.all_gather_into_tensor = all_gather_into_tensor


def _stand_in_for_cosmos3() -> None:
    """The adapter lookup imports every model it knows; Cosmos3 pulls in an API server that is not installed."""
    package = types.ModuleType("vllm_omni.diffusion.models.cosmos3")
    package.__path__ = []
    module = types.ModuleType("vllm_omni.diffusion.models.cosmos3.transformer_cosmos3")
    module.Cosmos3VFMTransformer = type("Cosmos3VFMTransformer", (torch.nn.Module,), {})
    sys.modules.setdefault(package.__name__, package)
    sys.modules.setdefault(module.__name__, module)


def announce_rank(rank: int, world: int, port: int) -> None:
    """Say in the environment, as torchrun does, which rank this process is and where the others meet."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def join_group(rank: int, world: int, port: int) -> None:
    """Join a gloo group through the engine's own set-up, all ranks data-parallel."""
    announce_rank(rank, world, port)
    from vllm_omni.diffusion.distributed import parallel_state

    parallel_state.init_distributed_environment(
        world_size=world, rank=rank, local_rank=rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel(
        data_parallel_size=world, sequence_parallel_size=1, backend="gloo"
    )


def vllm_context() -> AbstractContextManager[Any]:
    """The vLLM config that the engine's layers look up while they are built."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = types.SimpleNamespace(
        dtype=torch.bfloat16,
        hf_config=None,
        hf_text_config=None,
        is_encoder_decoder=False,
        enforce_eager=True,
        is_moe=False,
        quantization=None,
    )
    return set_current_vllm_config(config)


def diffusion_config(
    pipeline_dir: Path,
    *,
    world: int = 1,
    quantization: str | dict[str, Any] | None = None,
    all_gather: bool = True,
    offload: bool = True,
    parallel: Mapping[str, Any] | None = None,
) -> Any:
    """The engine's configuration for a pipeline folder, with DLO on unless *offload* says otherwise.

    ``parallel``: the engine's parallel settings; without them all ranks are data-parallel.
    """
    from vllm_omni.diffusion.data import (
        DiffusionParallelConfig,
        OmniDiffusionConfig,
        TransformerConfig,
    )

    config = OmniDiffusionConfig(
        model=str(pipeline_dir),
        dtype=torch.bfloat16,
        quantization_config=quantization,
        parallel_config=DiffusionParallelConfig(**(parallel or {"data_parallel_size": world})),
        enable_distributed_layerwise_offload=offload,
        dlo_use_allgather=all_gather,
        pin_cpu_memory=False,
    )
    config.set_tf_model_config(
        TransformerConfig.from_dict(read_json(pipeline_dir / "transformer" / "config.json"))
    )
    return config


def build_transformer(
    model: str, config: dict[str, Any], diffusion: Any, quantization: Any
) -> torch.nn.Module:
    """The engine's own transformer class at the size that *config* gives."""
    if model.startswith("h3"):
        from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTModel

        return MiniMaxH3DiTModel(diffusion, quant_config=quantization, diffusers_weights=False)
    if model.startswith("wan"):
        from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel

        return WanTransformer3DModel(
            **_constructor_arguments(WanTransformer3DModel, config), quant_config=quantization
        )
    from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import (
        QwenImageTransformer2DModel,
    )

    arguments = _constructor_arguments(QwenImageTransformer2DModel, config)
    return QwenImageTransformer2DModel(od_config=diffusion, **arguments, quant_config=quantization)


def _constructor_arguments(cls: type, config: dict[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(cls.__init__).parameters
    return {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in accepted}


def pipeline_class(model: str, pipeline_dir: Path) -> type[torch.nn.Module]:
    """A pipeline with nothing but its transformers, loaded the way the engine's pipelines load theirs."""

    class TinyPipeline(torch.nn.Module):
        def __init__(self, od_config: Any) -> None:
            super().__init__()
            from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

            self.weights_sources = []
            for component in components(model):
                source = DiffusersPipelineLoader.ComponentSource(
                    model_or_path=str(pipeline_dir),
                    subfolder=component,
                    revision=None,
                    prefix=f"{component}.",
                    fall_back_to_pt=False,
                )
                self.weights_sources.append(source)
                config = read_json(pipeline_dir / component / "config.json")
                quantization = component_quantization(model, component, config, od_config)
                transformer = build_transformer(model, config, od_config, quantization)
                self.add_module(component, transformer)

        def load_weights(self, weights: Any) -> Any:
            from vllm.model_executor.models.utils import AutoWeightsLoader

            return AutoWeightsLoader(self).load_weights(weights)

    return TinyPipeline


def component_quantization(
    model: str, component: str, config: dict[str, Any], diffusion: Any
) -> Any:
    """How a pipeline of that model resolves the quantization of one of its transformers: Wan looks at each config."""
    if not model.startswith("wan"):
        from vllm_omni.quantization.component_config import resolve_component_quant_config

        return resolve_component_quant_config(diffusion.quantization_config, component)
    from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import (
        resolve_wan_transformer_quant_config,
    )

    of_all = (
        None if diffusion.quantization_config_is_auto_detected else diffusion.quantization_config
    )
    return resolve_wan_transformer_quant_config(config, of_all, component)


def take_rows_as_stored() -> None:
    """Let no adapter of the engine reorder rows: a normalized cache has the runtime's. Call when plugins are loaded.

    No release of the engine has a loader of such caches. What one does on a hit (it binds the tensors by name, and
    finishes the linears) the plugin does for any class whose checkpoint it takes for a runtime layout.
    """
    from fp8fs.integrations import vllm_omni

    vllm_omni.RUNTIME_NAME_CLASSES |= {"MiniMaxH3DiTModel"}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
