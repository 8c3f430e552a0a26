#!/usr/bin/env python3
"""Derive which linears of each model class vLLM builds as FP8, and what checkpoint tensors feed them.

    $(scripts/engines path vllm) scripts/profiles/derive_vllm.py [--check] [CLASS ...]

Every class is built at a tiny size on the meta device, from a config.json that says "serialized FP8", each in a
process of its own. Names are followed by sending likely checkpoint names (the engine's shard tables, its name mapper
backwards, experts one by one) through its ``load_weights``; what lands is recorded. That an ignore list of all
recorded checkpoint names leaves no FP8 linear is checked by building the class a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = (
    REPOSITORY / "tests" / "loader" / "engine_side" / "site"
)  # lets torchvision be imported beside torch's CPU build
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_TARGET_DEVICE="cpu",
    PYTHONPATH=str(SITE),  # the engine inspects model classes in processes of its own
)
sys.path[:0] = [str(Path(__file__).resolve().parent), str(SITE)]

import torchvision_on_cpu  # noqa: E402

torchvision_on_cpu.install()

import derivation  # noqa: E402
import torch  # noqa: E402

ENGINE, VERSION, FILE = "vllm", "0.32.0", "vllm.json"
TIMEOUT_S = 300

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
GROUPED_ROUTING = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEEPSEEK = {
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    **ROUTED,
    **GROUPED_ROUTING,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
VISION = {
    "depth": 2,
    "hidden_size": 256,
    "num_heads": 4,
    "intermediate_size": 512,
    "out_hidden_size": 256,
    "patch_size": 14,
    "fullatt_block_indexes": [1],
}
SIGLIP = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12]}

# Name of the profile -> (architecture, model_type, the rest of config.json). One class may have several layouts.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "greedy"},
    ),
    "DeepseekV2ForCausalLM without q_lora": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "greedy", "q_lora_rank": None},
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "Gemma2ForCausalLM": ("Gemma2ForCausalLM", "gemma2", BASE),
    "Gemma3ForCausalLM": ("Gemma3ForCausalLM", "gemma3_text", BASE),
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "text_config": {**BASE, "model_type": "gemma3_text"},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "Glm4MoeForCausalLM": ("Glm4MoeForCausalLM", "glm4_moe", {**BASE, **ROUTED, **GROUPED_ROUTING}),
    "GptOssForCausalLM": (
        "GptOssForCausalLM",
        "gpt_oss",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "LlamaForCausalLM": ("LlamaForCausalLM", "llama", BASE),
    "MiniMaxM2ForCausalLM": (
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {
            **BASE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "MistralForCausalLM": ("MistralForCausalLM", "mistral", BASE),
    "MixtralForCausalLM": (
        "MixtralForCausalLM",
        "mixtral",
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Phi3ForCausalLM": ("Phi3ForCausalLM", "phi3", {**BASE, "pad_token_id": 0}),
    "Qwen2ForCausalLM": ("Qwen2ForCausalLM", "qwen2", BASE),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "text_config": {
                **BASE,
                "model_type": "qwen2_5_vl_text",
                "rope_scaling": {**MROPE, "type": "mrope"},
            },
            "vision_config": VISION,
        },
    ),
    "Qwen3ForCausalLM": ("Qwen3ForCausalLM", "qwen3", BASE),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**BASE, **EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **BASE,
            **EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 256,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "text_config": {**BASE, "model_type": "qwen3_vl_text", "rope_scaling": MROPE},
            "vision_config": {
                **VISION,
                "patch_size": 16,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
        },
    ),
}

# Checkpoint names of one expert's matrices, by the shard that they fill.
EXPERT_LEAVES = {"w1": ("gate_proj", "w1"), "w3": ("up_proj", "w3"), "w2": ("down_proj", "w2")}


def write_model(folder: Path, name: str, ignored: list[str]) -> None:
    """A folder with nothing but the config of a tiny serialized FP8 checkpoint."""
    architecture, model_type, rest = MODELS[name]
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": ignored,
    }
    config = {
        **rest,
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if "vision_config" in rest:
        (folder / "preprocessor_config.json").write_text("{}")


class Builder:
    """Builds one class; the process group and patches are made once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._ready = False

    def build(self, ignored: list[str]) -> torch.nn.Module:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        write_model(self._folder, self.name, ignored)
        arguments = EngineArgs(
            model=str(self._folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=256,
            enforce_eager=True,
            dtype="bfloat16",
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            if not self._ready:
                self._join_group()
            with torch.device("meta"):
                return initialize_model(vllm_config=config)

    def _join_group(self) -> None:
        import vllm.model_executor.layers.quantization.fp8 as fp8
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

        address = f"tcp://127.0.0.1:{29000 + os.getpid() % 900}"
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=address
        )
        ensure_model_parallel_initialized(1, 1)
        # Which experts are FP8 is wanted, not how they would run: the CPU has no per-tensor FP8 kernel for them.
        fp8.select_fp8_moe_backend = lambda *args, **kwargs: (None, None)
        self._ready = True


def derive(name: str, folder: Path) -> dict[str, Any]:
    """The profile of one class."""
    from vllm.model_executor.layers.linear import LinearBase

    builder = Builder(name, folder)
    model, prefixes = derivation.note_prefixes(lambda: builder.build([]))
    methods = {n: type(getattr(m, "quant_method", None)).__name__ for n, m in model.named_modules()}
    module_pattern = derivation.IndexPatterns(methods)
    fused = fused_parts(model)
    recorded = derivation.RecordedLoads(model)
    lines: dict[str, list[dict[str, Any]]] = {}
    for runtime_name, module in model.named_modules():
        method = methods[runtime_name]
        runtime = module_pattern(runtime_name)
        if method.endswith("MoEMethod"):
            fp8 = method.startswith("Fp8")
            prefix = module_pattern(prefixes.get(id(module), runtime_name))
            for line in expert_lines(
                model, recorded, runtime_name, module_pattern, prefix, fp8=fp8
            ):
                known = lines.setdefault(line["runtime"], [])
                if line not in known:
                    known.append(line)
        elif isinstance(module, (LinearBase, torch.nn.Linear)) or method in (
            "UnquantizedEmbeddingMethod",
            "Fp8EmbeddingMethod",
        ):
            if runtime in lines:
                continue
            is_fp8 = method.startswith("Fp8") and isinstance(module, LinearBase)
            sources = linear_sources(model, recorded, runtime_name, runtime, fused)
            prefix = module_pattern(prefixes.get(id(module), runtime_name))
            lines[runtime] = derivation.linear_record(
                runtime,
                fp8=is_fp8,
                sources=sources,
                ignore=() if prefix == runtime else (prefix,),
                shards=len(getattr(module, "logical_widths", [1])) if is_fp8 else 1,
                together="",
            )
    check_ignorable(builder, lines)
    return {
        "class": name,
        "module": type(model).__module__,
        "matches": [MODELS[name][0]],
        "blocks": [],
        "linears": [line for runtime in sorted(lines) for line in lines[runtime]],
        "renames": {},
        "dtypes": {},
        "names_complete": False,
    }


def fused_parts(model: torch.nn.Module) -> dict[str, list[str]]:
    """Runtime leaf -> checkpoint leaves in row order, from the tables of the model and of its parts."""
    parts: dict[str, list[str]] = {}
    for module in model.modules():
        for packed, leaves in (getattr(type(module), "packed_modules_mapping", None) or {}).items():
            parts.setdefault(packed, list(leaves))
    for packed, leaves in (getattr(model, "packed_modules_mapping", None) or {}).items():
        parts[packed] = list(leaves)
    return parts


def checkpoint_spellings(model: torch.nn.Module, module: str) -> Iterator[str]:
    """Checkpoint modules whose weight the engine's mapper may turn into a runtime module's: itself, and its rules backwards."""
    yield module
    mapper = getattr(type(model), "hf_to_vllm_mapper", None)
    if mapper is None:
        return
    weight = f"{module}.weight"
    for old, new in mapper.orig_to_new_prefix.items():
        if new is not None and weight.startswith(new):
            yield f"{old}{weight.removeprefix(new)}".removesuffix(".weight")
    for old, new in mapper.orig_to_new_substr.items():
        if new and new in weight:
            yield weight.replace(new, old, 1).removesuffix(".weight")


def linear_sources(
    model: torch.nn.Module,
    recorded: derivation.RecordedLoads,
    runtime_name: str,
    runtime: str,
    fused: dict[str, list[str]],
) -> list[tuple[str, ...]]:
    """The groups of checkpoint modules (as patterns) that fill a runtime linear, canonical spelling first."""
    parameter = f"{runtime_name}.weight"
    weights = dict(model.named_parameters())
    if parameter not in weights:  # tied embeddings and the like
        return []
    shape = weights[parameter].shape
    stem, _, leaf = runtime_name.rpartition(".")
    found: list[tuple[str, ...]] = []
    for leaves in (fused.get(leaf, [leaf]), [leaf]):
        spellings = [
            list(checkpoint_spellings(model, f"{stem}.{part}" if stem else part)) for part in leaves
        ]
        for members in zip(*spellings, strict=True):
            landed = [recorded.landing(f"{member}.weight", shape) for member in members]
            if all(any(hit == parameter for hit, _ in hits) for hits in landed):
                patterns = tuple(as_pattern(member, runtime_name, runtime) for member in members)
                if patterns not in found:
                    found.append(patterns)
    # A checkpoint spells like transformers does: a mapped name before the runtime's own.
    found.sort(key=lambda group: group == (runtime,))
    return found


def as_pattern(member: str, runtime_name: str, runtime: str) -> str:
    """A concrete checkpoint module with the indices that vary in the runtime module replaced."""
    values = [
        part
        for part, general in zip(runtime_name.split("."), runtime.split("."), strict=True)
        if general == derivation.INDEX
    ]
    path = member.split(".")
    start = 0
    for value in values:
        at = path.index(value, start)
        path[at] = derivation.INDEX
        start = at + 1
    return ".".join(path)


def expert_lines(
    model: torch.nn.Module,
    recorded: derivation.RecordedLoads,
    runtime_name: str,
    module_pattern: derivation.IndexPatterns,
    prefix: str,
    *,
    fp8: bool,
) -> list[dict[str, Any]]:
    """Lines for the experts of one layer: gate and up of an expert share a scale, and all or none are FP8.

    *prefix* is the pattern by which the engine asks whether the layer's experts are ignored.
    """
    container = runtime_name.removesuffix(".routed_experts")
    together = module_pattern(container)
    ignore = () if prefix == together else (prefix,)
    last = 3  # the tiny models have four experts
    lines = []
    for merged, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        parameter = f"{runtime_name}.{merged}_weight"
        for spelling in (0, 1):
            members = []
            for shard in shards:
                for name in checkpoint_spellings(
                    model, f"{container}.{last}.{EXPERT_LEAVES[shard][spelling]}"
                ):
                    hits = recorded.landing(f"{name}.weight", torch.Size((256, 256)))
                    if any(hit == parameter and shard in facts for hit, facts in hits):
                        members.append(name)
                        break
            if len(members) == len(shards):
                runtime = f"{together}.{derivation.INDEX}.{merged}"
                sources = [
                    tuple(
                        as_pattern(m, f"{container}.{last}", f"{together}.{derivation.INDEX}")
                        for m in members
                    )
                ]
                lines += derivation.linear_record(
                    runtime,
                    fp8=fp8,
                    sources=sources,
                    ignore=ignore,
                    shards=len(shards),
                    together=together,
                )
    if (
        not lines and fp8
    ):  # stored as one tensor for all experts: the engine must be told to leave them alone
        lines.append(
            {
                "runtime": together,
                "fp8": True,
                "sources": [],
                "ignore": [together],
                "together": together,
            }
        )
    return lines


def check_ignorable(builder: Builder, lines: dict[str, list[dict[str, Any]]]) -> None:
    """Raise unless ignoring every first spelling leaves nothing FP8: that is what a view with no FP8 would write."""
    ignored = []
    for runtime_lines in lines.values():
        line = runtime_lines[0]
        if line["fp8"]:
            for pattern in line.get("ignore") or line.get("sources") or [line["runtime"]]:
                ignored += concrete(pattern)
    model = builder.build(ignored)
    left = sorted(derivation.fp8_modules(model))
    if left:
        raise RuntimeError(f"still FP8 with everything ignored: {left[:4]}")


def concrete(pattern: str, count: int = 4) -> list[str]:
    """A pattern with every index filled in up to the size of the tiny models."""
    head, mark, tail = pattern.partition(derivation.INDEX)
    if not mark:
        return [pattern]
    return [f"{head}{index}{rest}" for index in range(count) for rest in concrete(tail, count)]


def derive_in_own_process(name: str) -> dict[str, Any]:
    """The profile of one class, or {"failed": reason}. vLLM keeps global state: one class per process."""
    run = subprocess.run(
        [sys.executable, __file__, "--one", name],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    for line in run.stdout.splitlines():
        if line.startswith("PROFILE "):
            return json.loads(line.removeprefix("PROFILE "))
    return {
        "failed": run.stderr.strip().splitlines()[-1][:200] if run.stderr.strip() else "no output"
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("classes", nargs="*")
    parser.add_argument(
        "--check", action="store_true", help="compare with the file that is checked in"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print("PROFILE " + json.dumps(derive(options.one, Path(folder))), flush=True)
        return 0
    profiles, failed = [], {}
    for name in options.classes or MODELS:
        result = derive_in_own_process(name)
        if "failed" in result:
            failed[name] = result["failed"]
        else:
            profiles.append(result)
        print(name, failed.get(name, "ok"), file=sys.stderr, flush=True)
    document = {
        "engine": ENGINE,
        "version": VERSION,
        "kind": "transformers",
        "profiles": profiles,
        "not_derived": failed,
    }
    return derivation.write_or_check(document, FILE, check=options.check, classes=options.classes)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
