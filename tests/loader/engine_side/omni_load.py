"""One rank of a vLLM-Omni load with DLO: load a pipeline folder, stream its blocks, and look at every tensor.

Reports whether the checkpoint was mapped, which FP8 weights were copied out of the mapping, whether each tensor that a block sees after AllGather (and each resident
one) is the checkpoint's, byte for byte, whether every FP8 linear can be called and is right, and digests of all of it
that are comparable between routes (mapped, ordinary, online FP8).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import omni_cpu
import omni_names
import parallel_groups
import reference_fp8
import reporting
import torch

ENGINE_MODULES = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm_omni.diffusion.model_loader.diffusers_loader",
    "vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer",
    "vllm_omni.diffusion.models.qwen_image.qwen_image_transformer",
    "vllm_omni.diffusion.models.wan2_2.wan2_2_transformer",
    "vllm_omni.diffusion.offloader",
    "vllm_omni.engine.arg_utils",
    "vllm_omni.model_executor.models",
)
"""What a load imports sooner or later; a fork inherits it."""
LINEAR_TOLERANCE = 0.06  # of the largest output: activations are quantized too


class StoredCheckpoint:
    """The tensors of a pipeline's transformers, in runtime layout and by runtime name ("transformer.blocks...").

    ``runtime_rows``: rows are stored as the runtime has them, also where the model's own checkpoints differ.
    """

    def __init__(self, model: str, pipeline: Path, *, runtime_rows: bool) -> None:
        from safetensors import safe_open

        self._model = model
        self._grouped: tuple[int, int] | None = None
        if model.startswith("h3") and not runtime_rows:
            config = omni_cpu.CONFIGS[model]
            self._grouped = (config["num_attention_heads"], config["attention_head_dim"])
        self._handles: dict[str, Any] = {}
        for component in omni_cpu.components(model):
            for path in sorted((pipeline / component).glob("*.safetensors")):
                handle = safe_open(path, "pt")
                self._handles |= {f"{component}.{name}": handle for name in handle.keys()}  # noqa: SIM118

    def runtime_tensor(self, name: str) -> torch.Tensor | None:
        """The stored bytes behind a runtime tensor, or None if the checkpoint does not store it."""
        component, _, local_name = name.partition(".")
        names = [name]
        if name not in self._handles:
            stored = omni_names.checkpoint_names(self._model, local_name)
            names = [f"{component}.{n}" for n in stored]
        if not all(n in self._handles for n in names):
            return None
        parts = [self._handles[n].get_tensor(n.partition(".")[2]) for n in names]
        tensor = torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0]
        if self._grouped and name.endswith("qkv_proj.weight"):
            tensor = omni_names.ungroup_qkv_rows(tensor, *self._grouped)
        return tensor

    def dequantized(self, linear: str) -> torch.Tensor | None:
        """The stored weight of a linear as float32, or None if it is not stored as FP8."""
        weight = self.runtime_tensor(f"{linear}.weight")
        if weight is None or weight.dtype != torch.float8_e4m3fn:
            return None
        block_scale = self.runtime_tensor(f"{linear}.weight_scale_inv")
        if block_scale is not None:
            return reference_fp8.dequantize(weight, block_scale)
        scale = self.runtime_tensor(f"{linear}.weight_scale")
        return None if scale is None else reference_fp8.dequantize(weight, scale.max())


class Inspector:
    """Collects comparisons, linear calls and digests of one loaded pipeline."""

    def __init__(self, pipeline: torch.nn.Module, checkpoint: StoredCheckpoint) -> None:
        from vllm.model_executor.layers.linear import LinearBase

        self._checkpoint = checkpoint
        linears = {name: m for name, m in pipeline.named_modules() if isinstance(m, LinearBase)}
        self.fp8_linears = {
            n: m for n, m in linears.items() if "Fp8" in type(m.quant_method).__name__
        }
        # The CPU build repacks unquantized linears in the ordinary loader: not comparable between routes.
        self._left_out = {f"{name}." for name in linears if name not in self.fp8_linears}
        self._digests: list[tuple[str, str]] = []
        self.compared = self.fp8 = self.called = 0
        self.mismatched: list[str] = []
        self.worst_error = 0.0
        self.wrong: list[tuple[str, float]] = []
        self.raised: dict[str, str] = {}

    def look_at(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a tensor with what is stored and add it to the digest."""
        self.compared += 1
        self.fp8 += tensor.dtype == torch.float8_e4m3fn
        if f"{name.rpartition('.')[0]}." not in self._left_out:
            shape = list(tensor.shape) if tensor.numel() > 1 else []
            content = hashlib.sha256(raw_bytes(tensor).numpy().tobytes()).hexdigest()
            self._digests.append((name, f"{tensor.dtype} {shape} {content}"))
        stored = self._checkpoint.runtime_tensor(name)
        if (
            stored is not None
            and stored.dtype == tensor.dtype
            and tensor.numel()
            and not _same(tensor, stored)
        ):
            self.mismatched.append(name)

    def call(self, name: str) -> None:
        """Run one FP8 linear on seeded activations and compare with the dequantized checkpoint."""
        linear = self.fp8_linears[name]
        weight = self._checkpoint.dequantized(name)
        if weight is None:  # online quantization: the module's own weight is all there is
            # Processing left it as an (in, out) view of the rows: recognizable by its strides, also if it is square.
            rows = linear.weight.t() if linear.weight.stride(0) == 1 else linear.weight
            weight = rows.float() * linear.weight_scale.max()
        activations = torch.randn(
            8, linear.input_size, generator=torch.Generator().manual_seed(1)
        ).bfloat16()
        expected = activations.float() @ weight.t()
        bias = self._checkpoint.runtime_tensor(f"{name}.bias")
        if bias is not None and not linear.skip_bias_add:
            expected += bias.float()
        self.called += 1
        try:
            output = linear(activations)
        except Exception as error:  # noqa: BLE001  (the finding itself)
            self.raised[name] = f"{type(error).__name__}: {str(error)[:200]}"
            return
        output = output[0] if isinstance(output, tuple) else output
        deviation = ((output.float() - expected).abs().max() / expected.abs().max()).item()
        self.worst_error = max(self.worst_error, deviation)
        if not deviation < LINEAR_TOLERANCE:
            self.wrong.append((name, deviation))

    def report(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "fp8": int(self.fp8),
            "mismatched": self.mismatched,
            "called": self.called,
            "worst_error": self.worst_error,
            "wrong": self.wrong,
            "raised": self.raised,
            "digest": hashlib.sha256(repr(sorted(self._digests)).encode()).hexdigest()[:16],
        }


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as uint8, in row-major order of its shape."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    """Equal bytes, also where finishing transposed a weight or left one scalar of a scale."""
    if tensor.numel() == 1 and stored.numel() > 1:
        return torch.equal(raw_bytes(tensor), raw_bytes(stored.max()))
    if tensor.numel() > 1 and stored.numel() == 1:
        return torch.equal(raw_bytes(tensor), raw_bytes(stored.reshape(1).expand(tensor.numel())))
    if tensor.ndim == 2 and (
        tensor.shape != stored.shape or (tensor.stride(0) == 1 and tensor.shape[1] > 1)
    ):
        tensor = tensor.t()
    return torch.equal(raw_bytes(tensor), raw_bytes(stored))


def watch_copies(directory: Path) -> list[str]:
    """A list that gets, as soon as the pipeline is mapped, every FP8 linear whose weight is not in a file's mapping."""
    from vllm_omni.diffusion.offloader.distributed_layerwise_backend import (
        DistributedLayerwiseOffloadBackend as Backend,
    )

    load, copied = Backend._load_weights_via_mmap, []

    def load_and_look(self: Any, pipeline: torch.nn.Module, *rest: Any) -> None:
        load(self, pipeline, *rest)
        mappings = mapped_addresses(directory)
        for name, module in pipeline.named_modules():
            if "Fp8" in type(getattr(module, "quant_method", None)).__name__ and not any(
                module.weight.data_ptr() in mapping for mapping in mappings
            ):
                copied.append(name)

    Backend._load_weights_via_mmap = load_and_look
    return copied


def mapped_addresses(folder: Path) -> list[range]:
    """Where this process has the files below a folder in its memory."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if Path(path).is_relative_to(folder):
            start, end = addresses.split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def load_engine() -> None:
    """Import what a run needs, made able to run on CPU."""
    omni_cpu.bring_up()
    for module in ENGINE_MODULES:
        importlib.import_module(module)


def main(options: argparse.Namespace) -> dict[str, Any]:
    load_engine()
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()  # as the engine's worker does first; nothing happens if no plugin is installed
    if options.runtime_rows:
        omni_cpu.take_rows_as_stored()
    if options.kernel:
        import cuda_kernels
    from vllm.config.load import LoadConfig
    from vllm_omni.diffusion.model_loader import diffusers_loader
    from vllm_omni.diffusion.offloader import enable_offload_backend

    plans: list[Any] = []
    build_plan = diffusers_loader.build_checkpoint_mmap_plan

    def build_and_remember(*args: Any, **kwargs: Any) -> Any:
        if options.ordinary:
            kwargs["use_hsdp"] = True  # one of the engine's own reasons to map nothing
        plans.append(build_plan(*args, **kwargs))
        return plans[-1]

    diffusers_loader.build_checkpoint_mmap_plan = build_and_remember
    copied = watch_copies(options.directory)
    diffusion = omni_cpu.diffusion_config(
        options.directory,
        world=options.world,
        quantization=options.quantization,
        all_gather=not options.rank_local,
        parallel=options.layout,
    )
    omni_cpu.announce_rank(options.rank, options.world, options.port)
    parallel_groups.join(diffusion, options.rank, options.world)
    with omni_cpu.vllm_context():
        if options.kernel:
            cuda_kernels.emulate(options.kernel)
        loader = diffusers_loader.DiffusersPipelineLoader(LoadConfig(), diffusion)
        pipeline = loader.load_model(
            load_device="cpu",
            load_format="custom_pipeline",
            custom_pipeline_name=omni_cpu.pipeline_class(options.model, options.directory),
            device=torch.device("cpu"),
        )
        mapped = loader.host_weight_plan is not None
        pipeline, backend = enable_offload_backend(diffusion, pipeline, device=torch.device("cpu"))

    checkpoint = StoredCheckpoint(
        options.model, options.directory, runtime_rows=options.runtime_rows
    )
    streamed, resident = Inspector(pipeline, checkpoint), Inspector(pipeline, checkpoint)
    names = {id(module): name for name, module in pipeline.named_modules()}
    blocks = [block for stack in backend._blocks for block in stack]
    in_blocks: set[int] = set()
    # Twice around the rings of blocks: a slot that is reused must hold the right bytes too.
    for turn in range(2):
        for block in blocks:
            hook = block._hook_registry.get_hook("distributed_layerwise_offload")
            hook.pre_forward(block)
            for local_name, tensor in own_tensors(block):
                in_blocks.add(id(tensor))
                streamed.look_at(f"{names[id(block)]}.{local_name}", tensor.data)
            if turn == 0:
                for linear in streamed.fp8_linears:
                    if linear.startswith(f"{names[id(block)]}."):
                        streamed.call(linear)
            hook.post_forward(block, None)
    for name, tensor in own_tensors(pipeline):
        if id(tensor) not in in_blocks:
            resident.look_at(name, tensor.data)
    block_prefixes = tuple(f"{names[id(block)]}." for block in blocks)
    for linear in resident.fp8_linears:
        if not linear.startswith(block_prefixes):
            resident.call(linear)
    torch.distributed.barrier()
    any_linear = next(iter(streamed.fp8_linears.values()), None)
    return {
        "fallback_reason": plans[0].fallback_reason if plans else "no plan was attempted",
        "bindings": len(plans[0].plan.bindings) if plans and plans[0].plan else 0,
        "mapped": mapped,
        "copied": copied,
        "rank_local": backend._using_rank_local_mmap,
        "group_size": backend.dp_size,
        "groups": parallel_groups.members(),
        "fp8_linears": sorted(streamed.fp8_linears),
        "kernel": type(
            getattr(getattr(any_linear, "quant_method", None), "fp8_linear", None)
        ).__name__,
        "streamed": streamed.report(),
        "resident": resident.report(),
    }


def quantization(text: str) -> str | dict[str, Any]:
    """What the engine's flag of that name takes: a method, or a JSON object of its settings."""
    return dict(json.loads(text)) if text.startswith("{") else text


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=list(omni_cpu.CONFIGS), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--quantization", type=quantization, help="quantize online")
    parser.add_argument(
        "--rank-local", action="store_true", help="no AllGather: each rank reads all of it"
    )
    parser.add_argument("--ordinary", action="store_true", help="map nothing")
    parser.add_argument(
        "--runtime-rows", action="store_true", help="rows are stored in the runtime's order"
    )
    parser.add_argument(
        "--layout",
        type=json.loads,
        help="JSON: the engine's parallel settings; else all data-parallel",
    )
    parser.add_argument("--kernel", help="emulate a CUDA kernel class of vLLM (cuda_kernels.py)")
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
