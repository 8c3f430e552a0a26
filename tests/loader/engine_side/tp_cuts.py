"""What vLLM's own linears do with block scales whose rows or columns N ranks have to share.

Each case builds one layer as a rank of N would, without a process group, and loads a weight in which every block of rows
has a value of its own, under scales of the same values: a row whose value is not its scale is under a wrong one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import reporting
import torch

BLOCK = 128


def prepare() -> Any:
    """A vLLM configuration; no FP8 kernel is chosen, since nothing is multiplied."""
    import vllm.model_executor.layers.quantization.fp8 as fp8
    from vllm.config import VllmConfig

    fp8.init_fp8_linear_kernel = lambda **_: SimpleNamespace()
    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=torch.bfloat16))
    return config


def be_rank(rank: int, ranks: int) -> None:
    """What the layers take for their place among the ranks from now on."""
    import vllm.distributed
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.parameter as parameter

    for module in (linear, parameter, vllm.distributed):
        module.get_tensor_model_parallel_world_size = lambda: ranks
        module.get_tensor_model_parallel_rank = lambda: rank


def part(rows: int, cols: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and the scales of one part of a layer, as a checkpoint holds them."""
    values = 2.0 ** (3.0 * number - 3.0 + torch.arange(-(-rows // BLOCK)) % 3)
    weight = values.repeat_interleave(BLOCK)[:rows, None].expand(rows, cols)
    scales = values[:, None].expand(len(values), -(-cols // BLOCK))
    return weight.to(torch.float8_e4m3fn), scales.clone()


def parts_of(kind: str, sizes: list[int]) -> Iterator[tuple[tuple[object, ...], int, int]]:
    """Which shard of the layer, and its rows and columns."""
    if kind == "qkv":
        head, heads, kv_heads = sizes
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield (name,), head * count, 256
    elif kind == "merged":
        for number, rows in enumerate(sizes):
            yield (number,), rows, 256
    else:
        yield (), sizes[0], sizes[1]


def build(kind: str, sizes: list[int]) -> Any:
    import vllm.model_executor.layers.linear as linear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    common: dict[str, Any] = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "prefix": kind,
        "quant_config": Fp8Config(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="dynamic",
            weight_block_size=[BLOCK, BLOCK],
        ),
    }
    if kind == "merged":
        return linear.MergedColumnParallelLinear(256, sizes, **common)
    if kind == "qkv":
        return linear.QKVParallelLinear(256, *sizes, **common)
    rows, cols = sizes
    made = linear.RowParallelLinear if kind == "row" else linear.ColumnParallelLinear
    return made(cols, rows, **common)


def outcome(kind: str, sizes: list[int], ranks: int) -> str:
    """ "right", "wrong" (some rank has rows under another's scale), or the exception."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape_moe

    wrong = False
    for rank in range(ranks):
        be_rank(rank, ranks)
        try:
            if kind == "experts":
                validate_fp8_block_shape_moe(sizes[0] // ranks, [BLOCK, BLOCK])
                continue
            layer = build(kind, sizes)
            for number, (shard, rows, cols) in enumerate(parts_of(kind, sizes)):
                weight, scales = part(rows, cols, number)
                layer.weight.weight_loader(layer.weight, weight, *shard)
                layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scales, *shard)
        except (AssertionError, RuntimeError, ValueError) as err:
            return type(err).__name__
        values = layer.weight.data.float()[:, 0]
        scales = layer.weight_scale_inv.data[:, 0].repeat_interleave(BLOCK)[: len(values)]
        wrong = wrong or not torch.equal(values, scales)
    return "wrong" if wrong else "right"


def main(options: argparse.Namespace) -> dict[str, list[str]]:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(prepare()):
        cases = json.loads(options.cases)
        return {"outcomes": [outcome(kind, sizes, ranks) for kind, sizes, ranks in cases]}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", help="JSON: [kind, sizes, ranks] of each")
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
