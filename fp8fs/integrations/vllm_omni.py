"""vLLM-Omni plugin: lets DLO map an fp8fs view directly and run what it mapped.

vLLM-Omni's distributed layerwise offload (DLO) can map a serialized checkpoint instead of loading it, but 0.30.0
skips the step that finishes FP8 linears after such a load, forgets layout transforms of modules outside the streamed
blocks, and refuses per-tensor scales of shape [1] on fused linears. Installed through the entry point
``vllm_omni.general_plugins``, ``register`` wraps three functions of the engine in memory; no file of it is edited.

Active only for a model path that is a view or a finished tree of fp8fs (``.fp8fs/manifest.json`` is there), and only
with the engine versions in ``KNOWN_VERSIONS``. ``FP8FS_VLLM_OMNI=0`` turns it off. What it cannot finish goes through
the engine's ordinary loader: slower, never wrong.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["KNOWN_VERSIONS", "register"]

KNOWN_VERSIONS = {"vllm-omni": ("0.30.0",), "vllm": ("0.30.0",)}
"""Releases (without local suffix) whose internals this module was tested with."""

SWITCH = "FP8FS_VLLM_OMNI"
MANIFEST = Path(".fp8fs/manifest.json")

# Transformers whose checkpoint must carry the runtime's own (fused) names to be mapped: ``--names runtime``.
RUNTIME_NAME_CLASSES = frozenset(
    {"WanTransformer3DModel", "WanVACETransformer3DModel", "QwenImageTransformer2DModel"}
)

# Kernels whose finishing step only transposes the weight and touches nothing but scales and flags.
TRANSPOSING_KERNELS = frozenset(
    {
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
        "CutlassFP8ScaledMMLinearKernel",
        "FlashInferFP8ScaledMMLinearKernel",
        "PerTensorTorchFP8ScaledMMLinearKernel",
        "RowWiseTorchFP8ScaledMMLinearKernel",
    }
)
# Block-scale kernels whose finishing step changes no byte (on CUDA).
UNCHANGING_BLOCK_KERNELS = frozenset(
    {
        "BlockWiseTorchFP8ScaledMMLinearKernel",
        "CutlassFp8BlockScaledMMKernel",
        "FlashInferFp8BlockScaledMMKernel",
        "TritonFp8BlockScaledMMKernel",
    }
)

Transform = Callable[[torch.Tensor], torch.Tensor]

log = logging.getLogger("vllm_omni.fp8fs")

_planning_a_view: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "fp8fs_planning_a_view", default=False
)


# --- when the plugin acts ---------------------------------------------------------------------------------------


def register() -> None:
    """Hook into vLLM-Omni unless switched off or the engine is unknown. May be called any number of times."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    unknown = [
        f"{package} {found or 'missing'}"
        for package, found in ((package, _engine_version(package)) for package in KNOWN_VERSIONS)
        if found not in KNOWN_VERSIONS[package]
    ]
    if unknown:
        tested = ", ".join(
            f"{package} {' or '.join(versions)}" for package, versions in KNOWN_VERSIONS.items()
        )
        log.warning("fp8fs plugin is not active: %s (tested with %s)", ", ".join(unknown), tested)
        return
    from vllm_omni.diffusion.model_loader import diffusers_loader, host_weight_plan
    from vllm_omni.diffusion.offloader.distributed_layerwise_backend import (
        DistributedLayerwiseOffloadBackend,
    )

    if getattr(host_weight_plan.build_checkpoint_mmap_plan, "fp8fs", False):
        return
    host_weight_plan.get_direct_mmap_adapter = _wrap_adapter_lookup(
        host_weight_plan.get_direct_mmap_adapter
    )
    build = _wrap_plan_builder(host_weight_plan.build_checkpoint_mmap_plan)
    host_weight_plan.build_checkpoint_mmap_plan = build
    diffusers_loader.build_checkpoint_mmap_plan = build
    DistributedLayerwiseOffloadBackend._load_weights_via_mmap = _wrap_mmap_load(
        DistributedLayerwiseOffloadBackend._load_weights_via_mmap
    )
    log.debug("fp8fs plugin registered")


def _engine_version(package: str) -> str:
    """The installed release of an engine, without local suffix; "" if it is not installed. vLLM has several builds."""
    for distribution in (package, f"{package}-cpu") if package == "vllm" else (package,):
        try:
            return metadata.version(distribution).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return ""


def is_view(model_path: str | os.PathLike[str]) -> bool:
    """Whether a local model path, or the model that a component folder belongs to, is a view or tree of fp8fs."""
    path = Path(model_path)
    return (path / MANIFEST).is_file() or (path.parent / MANIFEST).is_file()


# --- the three hooks --------------------------------------------------------------------------------------------


def _wrap_plan_builder(build: Callable[..., Any]) -> Callable[..., Any]:
    """Plan with our adapters for a view; refuse what could not be finished, so that the ordinary loader takes it."""

    @functools.wraps(build)
    def build_checkpoint_mmap_plan(
        pipeline: Any,
        *,
        dit_modules: Sequence[tuple[str, Any]],
        sources: Sequence[object],
        **rest: Any,
    ) -> Any:
        from vllm_omni.diffusion.model_loader.host_weight_plan import HostWeightPlanResult

        ours = bool(sources) and all(
            is_view(getattr(source, "model_or_path", "")) for source in sources
        )
        token = _planning_a_view.set(ours)
        try:
            result = build(pipeline, dit_modules=dit_modules, sources=sources, **rest)
        finally:
            _planning_a_view.reset(token)
        if not ours:
            return result
        if result.plan is None:
            log.info("fp8fs view goes through the ordinary loader: %s", result.fallback_reason)
            return result
        if methods := unfinishable_methods(module for _, module in dit_modules):
            reason = f"fp8fs cannot finish {', '.join(methods)} under direct mmap"
            log.info("fp8fs view goes through the ordinary loader: %s", reason)
            return HostWeightPlanResult(None, reason)
        return dataclasses.replace(result, plan=_mark(result.plan))

    build_checkpoint_mmap_plan.fp8fs = True  # type: ignore[attr-defined]
    return build_checkpoint_mmap_plan


def _wrap_adapter_lookup(lookup: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give a view's pipeline an adapter that knows runtime names and scales of shape [1]."""

    @functools.wraps(lookup)
    def get_direct_mmap_adapter(pipeline: Any) -> Any:
        if not _planning_a_view.get():
            return lookup(pipeline)
        if any(type(module).__name__ in RUNTIME_NAME_CLASSES for module in pipeline.modules()):
            return ViewAdapter(None)
        inner = lookup(pipeline)
        return None if inner is None else ViewAdapter(inner)

    return get_direct_mmap_adapter


def _wrap_mmap_load(load: Callable[..., None]) -> Callable[..., None]:
    """After the engine has bound a view's tensors: finish what the ordinary loader would have finished."""

    @functools.wraps(load)
    def _load_weights_via_mmap(self: Any, pipeline: Any, dits: tuple[Any, ...], plan: Any) -> None:
        load(self, pipeline, dits, plan)
        if _is_marked(plan):
            with torch.no_grad():
                Finisher(self._mmap_transforms_by_tensor_id, dits).finish()

    return _load_weights_via_mmap


def _mark(plan: Any) -> Any:
    """The same plan, of a subclass that says it was made from a view (a copy by the engine stays marked)."""
    view_plan = type("ViewPlan", (type(plan),), {"fp8fs_view": True})
    return view_plan(
        **{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    )


def _is_marked(plan: Any) -> bool:
    return bool(getattr(plan, "fp8fs_view", False))


# --- planning ---------------------------------------------------------------------------------------------------


class ViewAdapter:
    """Per-tensor policies for a view, on top of the engine's own adapter for the model (or none).

    Without an inner adapter the view carries the runtime's names, and the plan itself proves name, shape and dtype of
    every tensor. In both cases one stored scale may stand for all logical shards of a fused linear: the ordinary
    loader takes only that shape, while the plan compares with the runtime's one slot per shard.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def policy_for(self, runtime_name: str, target: torch.Tensor) -> Any:
        """The engine's policy for one runtime tensor, or None if it must not be mapped."""
        from vllm_omni.diffusion.model_loader.checkpoint_adapters.direct_mmap import (
            DirectMmapTensorPolicy,
        )

        policy = (
            DirectMmapTensorPolicy(allow_custom_loader=True)
            if self._inner is None
            else self._inner.policy_for(runtime_name, target)
        )
        is_scale = runtime_name.endswith(".weight_scale") and target.ndim == 1
        if policy is None or policy.transform is not None or not is_scale:
            return policy
        return dataclasses.replace(
            policy, transform=functools.partial(_fill_scale_slots, slots=target.shape[0])
        )


def _fill_scale_slots(scale: torch.Tensor, *, slots: int) -> torch.Tensor:
    """One scale shown in every slot; a scale that already has one value per slot is left alone."""
    return scale.reshape(1).expand(slots) if scale.numel() == 1 else scale


def unfinishable_methods(modules: Iterable[Any]) -> list[str]:
    """Names of the quantization methods below *modules* that ``Finisher`` does not know how to finish."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    names = set()
    for root in modules:
        for module in root.modules():
            method = getattr(module, "quant_method", None)
            if not isinstance(method, QuantizeMethodBase) or type(method).__name__.startswith(
                "Unquantized"
            ):
                continue
            if not isinstance(method, Fp8LinearMethod) or method.use_marlin:
                names.add(type(method).__name__)
    return sorted(names)


# --- finishing --------------------------------------------------------------------------------------------------


class Finisher:
    """Brings mapped modules into the state that the ordinary loader leaves, without copying what can stay mapped.

    ``transforms`` is the engine's table of deferred layout changes by tensor id. For a tensor inside a streamed block
    an entry stays in it (the engine applies it while packing the block); for a resident tensor it is applied here.
    """

    def __init__(self, transforms: dict[int, Transform], dits: Sequence[Any]) -> None:
        self._transforms = transforms
        self._roots = [component.module for component in dits]
        self._streamed = {
            id(module) for component in dits for module in _streamed_modules(component)
        }

    def finish(self) -> None:
        """Finish every FP8 linear and apply every transform of a resident tensor, each once."""
        from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

        as_views = as_copies = transformed = 0
        for module in _unique_modules(self._roots):
            streamed = id(module) in self._streamed
            if isinstance(getattr(module, "quant_method", None), Fp8LinearMethod):
                if self._finish_linear(module, streamed=streamed):
                    as_views += 1
                else:
                    as_copies += 1
                module._already_called_process_weights_after_loading = True
            if not streamed:
                transformed += self._transform_resident(module)
        log.info(
            "fp8fs view: finished %d FP8 linears as mapped views, %d as copies; transformed %d resident tensors",
            as_views,
            as_copies,
            transformed,
        )

    def _finish_linear(self, linear: Any, *, streamed: bool) -> bool:
        """Finish one FP8 linear. Returns whether its weight is still backed by the file."""
        kernel = type(linear.quant_method.fp8_linear).__name__
        if not linear.quant_method.block_quant:
            return self._finish_per_tensor(linear, kernel, streamed=streamed)
        if kernel in UNCHANGING_BLOCK_KERNELS:
            if not hasattr(linear, "input_scale"):
                linear.input_scale = None
            return True
        self._finish_block_as_copy(linear)
        return False

    def _finish_per_tensor(self, linear: Any, kernel: str, *, streamed: bool) -> bool:
        """One scalar scale and a transposed view of the weight, through the kernel's own processing."""
        method = linear.quant_method
        transform = self._transforms.pop(id(linear.weight), None)
        self._transforms.pop(id(linear.weight_scale), None)
        scale = linear.weight_scale.data
        if scale.numel() > 1 and not bool((scale == scale.flatten()[0]).all()):
            transform = _then(
                transform,
                functools.partial(_requantize, scales=scale.clone(), widths=linear.logical_widths),
            )
        linear.weight_scale.data = (
            scale.max()
        )  # with a scalar, the engine's processing leaves the bytes alone
        if method.act_q_static:
            linear.input_scale.data = linear.input_scale.data.reshape(-1)
        is_view = kernel in TRANSPOSING_KERNELS and all(
            size % 16 == 0 for size in linear.weight.shape
        )
        if (
            transform is not None and not is_view
        ):  # the kernel reads the final bytes: they must exist first
            linear.weight.data, transform = transform(linear.weight.data), None
        method.process_weights_after_loading(linear)
        if transform is not None:
            transposed = functools.partial(_transposed, transform=transform)
            if streamed:
                self._transforms[id(linear.weight)] = transposed
            else:
                linear.weight.data = transposed(linear.weight.data)
        return is_view

    def _finish_block_as_copy(self, linear: Any) -> None:
        """For kernels that repack block-scaled weights (DeepGEMM, CPU): copy to the device, process, copy back."""
        from vllm_omni.platforms import current_omni_platform

        transform = self._transforms.pop(id(linear.weight), None)
        weight = linear.weight.data
        linear.weight.data = weight.clone() if transform is None else transform(weight)
        linear.weight_scale_inv.data = linear.weight_scale_inv.data.clone()
        linear.to(current_omni_platform.get_torch_device())
        linear.quant_method.process_weights_after_loading(linear)
        linear.to("cpu")

    def _transform_resident(self, module: Any) -> int:
        """Apply the transforms of a resident module's own tensors. Returns how many."""
        count = 0
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            transform = None if tensor is None else self._transforms.pop(id(tensor), None)
            if transform is not None:
                tensor.data = transform(tensor.data)
                count += 1
        return count


def _streamed_modules(component: Any) -> Iterable[Any]:
    """All modules inside the repeated blocks of a component and of its nested components."""
    if component.selected:
        for stack in component.stacks:
            for block in stack.blocks:
                yield from block.modules()
    for child in component.children:
        yield from _streamed_modules(child)


def _unique_modules(roots: Iterable[Any]) -> Iterable[Any]:
    """Every module below *roots* once, also where one root contains another."""
    seen: set[int] = set()
    for root in roots:
        for module in list(root.modules()):
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def _then(first: Transform | None, second: Transform) -> Transform:
    """Both transforms, one after the other."""
    return second if first is None else lambda tensor: second(first(tensor))


def _transposed(weight: torch.Tensor, *, transform: Transform) -> torch.Tensor:
    """The transform of an (out, in) weight, applied to its (in, out) view."""
    return transform(weight.t()).t()


def _requantize(
    weight: torch.Tensor, *, scales: torch.Tensor, widths: Sequence[int]
) -> torch.Tensor:
    """Logical shards under different scales, brought under the largest.

    The same bytes as vLLM's ``requantize_with_max_scale`` makes when the ordinary loader meets such a checkpoint:
    through FP16, then by the reciprocal of the largest scale, saturating.
    """
    if weight.is_meta:
        return weight
    inverse = 1.0 / scales.max()
    result = torch.empty_like(weight)
    start = 0
    for scale, width in zip(scales, widths, strict=True):
        rows = slice(start, start + width)
        values = (weight[rows].to(torch.float16) * scale).to(torch.float32) * inverse
        values = torch.where(values.isnan(), values.new_tensor(448.0), values.clamp(-448.0, 448.0))
        result[rows] = values.to(torch.float8_e4m3fn)
        start += width
    return result
