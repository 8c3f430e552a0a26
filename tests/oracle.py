"""What a view has to contain, worked out with torch and json alone: shares nothing with fp8fs.

``read_file`` parses safetensors by hand; ``quantized`` is the torch spelling of each scheme. Which
tensors are quantized is read from the view's own headers (the tests state separately which must be);
what their bytes are is decided here, from the source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FP8_MAX = 448.0
SCALE_MIN = 2.0**-128 + 2.0**-149
"""A smaller float32 has no finite reciprocal."""
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def floats(self) -> torch.Tensor:
        """The values in the stored dtype."""
        flat = torch.frombuffer(bytearray(self.data), dtype=TORCH_DTYPES[self.dtype])
        return flat.reshape(self.shape)


def read_header(path: Path) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Where the data starts, the entries, the metadata."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", {})
    return 8 + length, entries, metadata


def read_file(path: Path) -> dict[str, Stored]:
    """Every tensor of one file."""
    start, entries, _ = read_header(path)
    whole = path.read_bytes()
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        found[name] = Stored(
            entry["dtype"], tuple(entry["shape"]), whole[start + begin : start + end]
        )
    return found


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of one component's folder."""
    tensors: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read_file(path)
    return tensors


def scale_name(weight: str, scheme: str) -> str:
    """The name under which readers look for a weight's scale."""
    stem = weight.removesuffix(".weight")
    return f"{stem}.weight_scale_inv" if scheme.startswith("block") else f"{stem}.weight_scale"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _largest(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([w.abs().max().float() for w in weights]).max()


def _fp8(values: torch.Tensor) -> bytes:
    return _bytes(values.to(torch.float8_e4m3fn))


def _per_tensor(weight: torch.Tensor, group: list[torch.Tensor]) -> tuple[bytes, torch.Tensor]:
    scale = _largest(group) / torch.tensor(FP8_MAX)
    if scale == 0:
        return _fp8(weight.float()), torch.ones(1)
    scale = scale.clamp_min(SCALE_MIN)
    values = weight.float() * (torch.tensor(1.0) / scale)
    return _fp8(values.clamp(-FP8_MAX, FP8_MAX)), scale.reshape(1)


def _per_channel(weight: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    scale = weight.abs().amax(-1, keepdim=True).float() / torch.tensor(FP8_MAX)
    scale = scale.clamp_min(float(torch.tensor(1.0) / torch.tensor(FP8_MAX * 512)))
    return _fp8((weight.float() / scale).clamp(-FP8_MAX, FP8_MAX)), scale


def _block(weight: torch.Tensor, *, power_of_two: bool) -> tuple[bytes, torch.Tensor]:
    rows, cols = weight.shape
    high, wide = math.ceil(rows / 128), math.ceil(cols / 128)
    padded = torch.zeros(high * 128, wide * 128)
    padded[:rows, :cols] = weight.float()
    blocks = padded.view(high, 128, wide, 128)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-4) / torch.tensor(FP8_MAX)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    values = (blocks * (1.0 / scale)).view(high * 128, wide * 128)[:rows, :cols]
    return _fp8(values), scale.view(high, wide)


def quantized(weight: Stored, scheme: str, group: list[Stored]) -> tuple[bytes, Stored]:
    """The FP8 bytes and the scale tensor of one weight whose scale is shared with *group*."""
    values = weight.floats()
    if scheme == "per_tensor":
        data, scale = _per_tensor(values, [member.floats() for member in group])
    elif scheme == "per_channel":
        data, scale = _per_channel(values)
    else:
        data, scale = _block(values, power_of_two=scheme == "block")
    return data, Stored("F32", tuple(scale.shape), _bytes(scale.float()))


def _rows(weight: Stored, order: torch.Tensor) -> Stored:
    """The same tensor with other rows first: row i is row order[i] of *weight*."""
    raw = torch.frombuffer(bytearray(weight.data), dtype=torch.uint8).view(weight.shape[0], -1)
    return Stored(weight.dtype, weight.shape, _bytes(raw[order]))


def head_by_head(rows: int, heads: int) -> torch.Tensor:
    """Where each row of [Q; K; V] is in a matrix that holds q, k and v of one head after the other."""
    return torch.arange(rows).view(heads, 3, -1).transpose(0, 1).reshape(-1)


def expected(
    source: Mapping[str, Stored],
    quantized_names: Iterable[str],
    scheme: str,
    groups: Mapping[str, list[str]],
    *,
    heads: Mapping[str, int] | None = None,
) -> dict[str, Stored]:
    """Every tensor that the view of one component holds. *groups*: weight -> all members of its group.

    *heads*: weight -> number of heads, for q/k/v that is stored head by head while the engine reads block scales of
    [Q; K; V].
    """
    view: dict[str, Stored] = {}
    chosen = set(quantized_names)
    for name, stored in source.items():
        if name not in chosen:
            view[name] = stored
            continue
        members = [source[m] for m in groups.get(name, [name])]
        if heads and name in heads and scheme.startswith("block"):
            order = head_by_head(stored.shape[0], heads[name])
            data, scale = quantized(_rows(stored, order), scheme, members)
            data = _rows(Stored("F8_E4M3", stored.shape, data), order.argsort()).data
        else:
            data, scale = quantized(stored, scheme, members)
        view[name] = Stored("F8_E4M3", stored.shape, data)
        view[scale_name(name, scheme)] = scale
    return view


SIBLINGS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v"),
    ("DenseReluDense.wi_0", "DenseReluDense.wi_1"),
)
"""Modules that engines fuse, by the end of their names."""


def sibling_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """weight -> the weights that must share its scale, by SIBLINGS; a weight alone is its own group."""
    known = sorted(names)
    groups: dict[str, list[str]] = {}
    for name in known:
        groups[name] = [name]
        for leaves in SIBLINGS:
            for leaf in leaves:
                ending = f".{leaf}.weight"
                if name.endswith(ending):
                    stem = name.removesuffix(ending)
                    family = [f"{stem}.{other}.weight" for other in leaves]
                    groups[name] = [member for member in family if member in known]
    return groups
