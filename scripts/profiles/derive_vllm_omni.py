#!/usr/bin/env python3
"""Derive which linears of each diffusion transformer vLLM-Omni builds as FP8, and what checkpoint tensors feed them.

    $(scripts/engines path vllm-omni) scripts/profiles/derive_vllm_omni.py [--check] [CLASS ...]

Every class is built on the meta device with a serialized FP8 config. Names are followed by sending the tensors of the
diffusers class of the same name, and spellings that the engine's own tables suggest, through its ``load_weights``.
That an ignore list of all recorded spellings leaves no FP8 linear is checked by building the class a second time.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
import textwrap
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE_SIDE = (
    REPOSITORY / "tests" / "loader" / "engine_side"
)  # how the tests bring the engine up on CPU
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ENGINE_SIDE), str(ENGINE_SIDE / "site")]

import torchvision_on_cpu  # noqa: E402

torchvision_on_cpu.install()

import derivation  # noqa: E402
import omni_cpu  # noqa: E402
import torch  # noqa: E402

ENGINE, VERSION, FILE = "vllm-omni", "0.30.0", "vllm_omni.json"
MODELS = "vllm_omni.diffusion.models."
CLASSES = (
    "anima.anima_transformer:AnimaTransformer3DModel",
    "auk.auk_transformer:AuKTransformer",
    "bagel.bagel_transformer:Bagel",
    "boogu_image.boogu_image_transformer:BooguImageTransformer2DModel",
    "cosmos3.transformer_cosmos3:Cosmos3VFMTransformer",
    "cosmos3.transformer_cosmos3:Cosmos3LanguageModel",
    "cosmos3.transformer_cosmos3_edge:Cosmos3EdgeLanguageModel",
    "cosyvoice3_audio.cosyvoice3_dit:DiT",
    "dreamzero.causal_wan_model:CausalWanModel",
    "ernie_image.ernie_image_transformer:ErnieImageTransformer2DModel",
    "flux.flux_transformer:FluxKontextTransformer2DModel",
    "flux.flux_transformer:FluxTransformer2DModel",
    "flux2.flux2_transformer:Flux2Transformer2DModel",
    "flux2_klein.flux2_klein_transformer:Flux2Transformer2DModel",
    "glm_image.glm_image_transformer:GlmImageTransformer2DModel",
    "helios.helios_transformer:HeliosTransformer3DModel",
    "hidream_image.hidream_image_transformer:HiDreamImageTransformer2DModel",
    "hidream_o1_image.hidream_o1_image_transformer:HiDreamO1ImageTransformer",
    "hunyuan_image3.hunyuan_image3_transformer:HunyuanImage3Model",
    "hunyuan_video.hunyuan_video_15_transformer:HunyuanVideo15Transformer3DModel",
    "krea2.krea2_transformer:Krea2Transformer2DModel",
    "lingbot_video.lingbot_video_transformer:LingBotVideoTransformer3DModel",
    "lingbot_world.transformer:CausalLingBotWorldTransformer3DModel",
    "longcat_image.longcat_image_transformer:LongCatImageTransformer2DModel",
    "longcat_video.longcat_video_avatar_transformer:LongCatVideoAvatarTransformer3DModel",
    "ltx2.ltx2_transformer:LTX2VideoTransformer3DModel",
    "magi2.modeling_magi2:Magi2PreviewTransformer",
    "ming_flash_omni.ming_zimage_transformer:MingZImageTransformer2DModel",
    "ming_image.transformer:MingImageTransformer2DModel",
    "minimax_h3.minimax_h3_transformer:MiniMaxH3DiTModel",
    "nextstep_1_1.modeling_nextstep:NextStepModel",
    "omnigen2.omnigen2_transformer:OmniGen2Transformer2DModel",
    "ovis_image.ovis_image_transformer:OvisImageTransformer2DModel",
    "qwen_image.qwen_image_transformer:QwenImageTransformer2DModel",
    "sana_video.transformer_sana_video:SanaVideoTransformer3DModel",
    "sana_wm.sana_wm_transformer:SanaWmTransformer3DModel",
    "sd3.sd3_transformer:SD3Transformer2DModel",
    "sdxl.sdxl_unet:SDXLUNet2DConditionModel",
    "sensenova_u1.sensenova_u1_transformer:SenseNovaU1Model",
    "stable_audio.stable_audio_transformer:StableAudioDiTModel",
    "wan2_2.wan2_2_s2v_transformer:WanS2VTransformer3DModel",
    "wan2_2.wan2_2_transformer:WanTransformer3DModel",
    "wan2_2.wan2_2_vace_transformer:WanVACETransformer3DModel",
    "z_image.z_image_transformer:ZImageTransformer2DModel",
)

# ``_class_name`` in a checkpoint's config.json, where it is not the engine's class name.
CHECKPOINT_CLASS_NAMES = {"MiniMaxH3DiTModel": ("MiniMaxH3DiT", "MiniMaxH3DiTModel")}
# The engine's adapter reorders these weights' rows while it binds them (heads x [q, k, v] to [Q; K; V]); scales not.
GROUPED_ROWS = {
    "MiniMaxH3DiTModel": (
        ".attn.qkv_proj",
        {"heads": "num_attention_heads", "head_dim": "attention_head_dim"},
    )
}
# Modules that the listed classes import and that are not needed to build a transformer.
ABSENT_MODULES = ("torchaudio", "torchaudio.transforms", "torchaudio.functional", "soundfile")
# Constructor arguments of classes whose defaults do not build, or build less than some checkpoints have.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 3,
        "num_single_layers": 3,
        "attention_head_dim": 128,
        "num_attention_heads": 20,
        "caption_channels": [4096, 4096],
        "text_emb_dim": 2048,
        "num_routed_experts": 4,
        "num_activated_experts": 2,
        "axes_dims_rope": (64, 32, 32),
        "max_resolution": (128, 128),
        "llama_layers": [0, 1, 2, 3, 4, 5, 6, 7],
    },
    # Everything that some checkpoint of the class has: image conditioning (2.1 I2V), control blocks.
    "WanTransformer3DModel": {"added_kv_proj_dim": 5120, "image_dim": 1280},
    "WanVACETransformer3DModel": {
        "added_kv_proj_dim": 5120,
        "image_dim": 1280,
        "vace_layers": [0, 5, 10],
        "vace_in_channels": 96,
    },
}


class AbsentModule(types.ModuleType):
    """Stands in for a package that is imported but not used here: every name in it is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in_for_absent_modules() -> None:
    for name in ABSENT_MODULES:
        module = AbsentModule(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    for name in [
        name for name in sys.modules if name.startswith("vllm_omni.diffusion.models.cosmos3")
    ]:
        del sys.modules[name]  # the test's stand-in: here the real one is wanted


def serialized_fp8(ignored: list[str]) -> Any:
    from vllm_omni.quantization import build_quant_config

    return build_quant_config(
        {
            "quant_method": "fp8",
            "is_checkpoint_fp8_serialized": True,
            "activation_scheme": "dynamic",
            "ignored_layers": ignored,
        }
    )


def diffusers_class(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name, None)


def default_config(name: str) -> dict[str, Any]:
    """The config that a checkpoint of the class would have: ours, or the diffusers class's defaults."""
    if name in ARGUMENTS:
        return dict(ARGUMENTS[name])
    cls = diffusers_class(
        "FluxTransformer2DModel" if name == "FluxKontextTransformer2DModel" else name
    )
    if cls is None:
        return {}
    with torch.device("meta"):
        return {key: value for key, value in dict(cls().config).items() if not key.startswith("_")}


class Builder:
    """Builds one transformer class of the engine on the meta device, any number of times."""

    def __init__(self, specification: str, pipeline_dir: Path) -> None:
        self.module, name = specification.split(":")
        self.cls = getattr(importlib.import_module(MODELS + self.module), name)
        self.name = name
        self._pipeline_dir = pipeline_dir

    def build(self, quantization: Any) -> torch.nn.Module:
        from vllm.utils.torch_utils import set_default_torch_dtype

        with omni_cpu.vllm_context(), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            return self.cls(**self._arguments(quantization))

    def _arguments(self, quantization: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        parameters = list(inspect.signature(self.cls.__init__).parameters.items())[1:]
        for name, parameter in parameters:
            if name == "quant_config":
                arguments[name] = quantization
            elif name == "od_config":
                arguments[name] = self._diffusion_config()
            elif name == "prefix" and parameter.default is parameter.empty:
                arguments[name] = ""
        accepted = {name for name, _ in parameters}
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for _, p in parameters)
        ours = ARGUMENTS.get(self.name, {}).items()
        return arguments | {k: v for k, v in ours if takes_all or k in accepted}

    def _diffusion_config(self) -> Any:
        from vllm_omni.diffusion.data import (
            DiffusionParallelConfig,
            OmniDiffusionConfig,
            TransformerConfig,
        )

        config = OmniDiffusionConfig(
            model=str(self._pipeline_dir),
            dtype=torch.bfloat16,
            parallel_config=DiffusionParallelConfig(),
            enforce_eager=True,
        )
        config.set_tf_model_config(TransformerConfig.from_dict(default_config(self.name)))
        return config

    def loading_hints(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """What the source of ``load_weights`` says: (fused, part) of its shard table, (old, new) of its renamings."""
        method = next(
            (c.__dict__["load_weights"] for c in self.cls.__mro__ if "load_weights" in c.__dict__),
            None,
        )
        fused: list[tuple[str, str]] = []
        renamed: list[tuple[str, str]] = []
        if method is not None:
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replace":
                    renamed += _string_pair(node.args)
                elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
                    fused += _string_pair(node.elts)
        for packed, parts in (getattr(self.cls, "packed_modules_mapping", None) or {}).items():
            fused += [(packed, part) for part in parts]
        return fused, renamed


def _string_pair(nodes: list[Any]) -> list[tuple[str, str]]:
    values = [
        node.value
        for node in nodes[:2]
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [(values[0], values[1])] if len(values) == 2 else []


def spelled_by_hints(
    runtime: str, fused: list[tuple[str, str]], renamed: list[tuple[str, str]]
) -> set[str]:
    """Checkpoint modules that might feed a runtime module, by the engine's own tables. Itself among them."""
    dotted = f".{runtime}."
    spellings = {dotted}
    for old, new in renamed:
        spellings |= {s.replace(new, old, 1) for s in list(spellings) if new and new in s}
    for whole, part in fused:
        pattern = re.compile(rf"\.?{re.escape(whole.strip('.'))}\.")
        spellings |= {
            pattern.sub(lambda match, part=part: f".{part.strip('.')}.", s, count=1)
            for s in list(spellings)
            if f".{whole.strip('.')}." in s
        }
    return {s.strip(".") for s in spellings}


def derive(builder: Builder) -> dict[str, Any]:
    """The profile of one class."""
    from vllm.model_executor.layers.linear import LinearBase

    model, prefixes = derivation.note_prefixes(lambda: builder.build(serialized_fp8([])))
    quantized = derivation.fp8_modules(model)
    ignored = builder.build(serialized_fp8([prefixes[id(module)] for module in quantized.values()]))
    if left := derivation.fp8_modules(ignored):
        raise RuntimeError(f"still FP8 with everything ignored: {sorted(left)[:3]}")

    plain = builder.build(None)
    parameters = dict(plain.named_parameters())
    pattern = derivation.IndexPatterns(parameters)

    def module_pattern(name: str) -> str:
        return pattern(f"{name}.weight").removesuffix(".weight")

    landed, unloaded = follow_names(builder, plain, pattern)
    linears: dict[str, list[dict[str, Any]]] = {}
    for name, module in model.named_modules():
        is_linear = isinstance(module, (LinearBase, torch.nn.Linear))
        if not is_linear or module_pattern(name) in linears:
            continue
        runtime = module_pattern(name)
        prefix = prefixes.get(id(module), name)
        prefix_pattern = runtime if prefix == name else prefix.replace(name, runtime)
        linears[runtime] = derivation.linear_record(
            runtime,
            fp8=name in quantized,
            sources=landed.get(runtime, []),
            ignore=(prefix_pattern,),
            shards=len(getattr(module, "logical_widths", [1])) if name in quantized else 1,
            together="",
        )
    suffix, rows = GROUPED_ROWS.get(builder.name, ("", {}))
    for runtime, lines in linears.items():
        if rows and runtime.endswith(suffix):
            for line in lines:
                line["grouped_rows"] = rows

    covered = {f"{runtime}.{leaf}" for runtime in linears for leaf in ("weight", "bias")}
    renames = {
        source: target
        for target, sources in unloaded["tensors"].items()
        if target not in covered
        for source in sources
    }
    stored = plain.state_dict(keep_vars=True)  # parameters, and the buffers that a checkpoint has
    dtypes = {
        pattern(name): str(tensor.dtype).removeprefix("torch.")
        for name, tensor in stored.items()
        if tensor.dtype != torch.bfloat16 and tensor.is_floating_point()
    }
    return {
        "class": builder.name,
        "module": MODELS + builder.module,
        "matches": list(CHECKPOINT_CLASS_NAMES.get(builder.name, (builder.name,))),
        "blocks": list(getattr(builder.cls, "_layerwise_offload_blocks_attrs", None) or []),
        "linears": [line for runtime in sorted(linears) for line in linears[runtime]],
        "renames": {
            source: target for source, target in sorted(renames.items()) if source != target
        },
        "dtypes": dict(sorted(dtypes.items())),
        "names_complete": unloaded["complete"],
    }


def follow_names(
    builder: Builder, plain: torch.nn.Module, pattern: derivation.IndexPatterns
) -> tuple[dict[str, list[tuple[str, ...]]], dict[str, Any]]:
    """Send checkpoint names through ``load_weights``.

    Returns, by runtime linear, the groups of checkpoint modules that feed it (diffusers' spelling first), and facts
    about all other tensors: which checkpoint tensor feeds which parameter, and whether nothing is left over.
    """
    parameters = dict(plain.named_parameters())
    recorded = derivation.RecordedLoads(plain)
    names: dict[str, torch.Size] = {}
    cls = diffusers_class(builder.name)
    if cls is not None:
        with torch.device("meta"):
            tensors = cls(**ARGUMENTS.get(builder.name, {})).state_dict()
        names = {name: tensor.shape for name, tensor in tensors.items()}
    checkpoint_pattern = derivation.IndexPatterns(names)

    feeds: dict[str, dict[str, int]] = {}  # parameter pattern -> checkpoint pattern -> position
    homeless: list[str] = []
    seen: set[str] = set()
    for name, shape in names.items():
        if checkpoint_pattern(name) in seen:
            continue
        seen.add(checkpoint_pattern(name))
        hits = recorded.landing(name, shape)
        if not hits:
            homeless.append(name)
        for parameter, facts in hits:
            place = feeds.setdefault(pattern(parameter), {})
            place.setdefault(checkpoint_pattern(name), derivation.shard_position(facts))

    groups: dict[str, list[tuple[str, ...]]] = {}
    fused, renamed = builder.loading_hints()
    done: set[str] = set()
    for parameter, tensor in parameters.items():
        runtime = pattern(parameter).removesuffix(".weight")
        if not parameter.endswith(".weight") or tensor.ndim != 2 or runtime in done:
            continue
        done.add(runtime)
        observed = feeds.get(f"{runtime}.weight", {})
        if observed:
            ordered = sorted(observed, key=observed.__getitem__)
            groups[runtime] = [tuple(name.removesuffix(".weight") for name in ordered)]
        module = parameter.removesuffix(".weight")
        spelled: dict[int, dict[str, int]] = {}
        for candidate in sorted(spelled_by_hints(module, fused, renamed)):
            for hit, facts in recorded.landing(f"{candidate}.weight", tensor.shape):
                if hit == parameter:
                    size = 1 if not facts else 2
                    spelled.setdefault(size, {})[candidate] = derivation.shard_position(facts)
        for size, members in spelled.items():
            alternatives = (
                [(m,) for m in members]
                if size == 1
                else [tuple(sorted(members, key=members.__getitem__))]
            )
            for alternative in alternatives:
                as_patterns = tuple(_like(member, module, runtime) for member in alternative)
                if as_patterns not in groups.setdefault(runtime, []):
                    groups[runtime].append(as_patterns)
    missing = {pattern(name) for name in parameters} - feeds.keys()
    complete = bool(names) and not homeless and not missing
    if (
        not names
    ):  # no diffusers class: the names are the runtime's own if every one of them is taken as it is
        complete = all(recorded.landing(name, tensor.shape) for name, tensor in parameters.items())
    return groups, {
        "tensors": {target: list(places) for target, places in feeds.items()},
        "complete": complete,
    }


def _like(member: str, module: str, runtime: str) -> str:
    """A concrete checkpoint module as a pattern, with the indices that vary in the runtime module."""
    concrete, general = module.split("."), runtime.split(".")
    values = [
        part for part, pattern in zip(concrete, general, strict=True) if pattern == derivation.INDEX
    ]
    path = member.split(".")
    for value in values:
        for at, part in enumerate(path):
            if part == value:
                path[at] = derivation.INDEX
                break
    return ".".join(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("classes", nargs="*")
    parser.add_argument(
        "--check", action="store_true", help="compare with the file that is checked in"
    )
    options = parser.parse_args()
    omni_cpu.bring_up()
    stand_in_for_absent_modules()
    omni_cpu.join_group(0, 1, 29300 + os.getpid() % 500)
    profiles, failed = [], {}
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Path(folder)
        (pipeline / "transformer").mkdir()
        (pipeline / "transformer" / "config.json").write_text(json.dumps(omni_cpu.CONFIGS["wan"]))
        (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
        for specification in CLASSES:
            name = specification.split(":")[1]
            if options.classes and name not in options.classes:
                continue
            try:
                profiles.append(derive(Builder(specification, pipeline)))
            except Exception as error:  # noqa: BLE001  (recorded: the class has no profile)
                failed[name] = f"{type(error).__name__}: {str(error)[:160]}"
            print(name, failed.get(name, "ok"), file=sys.stderr, flush=True)
    document = {
        "engine": ENGINE,
        "version": VERSION,
        "kind": "diffusers",
        "profiles": profiles,
        "not_derived": failed,
    }
    return derivation.write_or_check(document, FILE, check=options.check, classes=options.classes)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
