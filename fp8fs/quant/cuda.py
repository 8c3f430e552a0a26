"""The torch kernels, for a GPU (or torch's own CPU device, which tests use). Only this module imports torch.

Every step is an elementwise float32 operation that IEEE defines, so the bytes are those of the
reference on every device. Scales are computed on the host by the reference itself. Two traps are
avoided: on CUDA torch divides by a Python number by multiplying with its reciprocal, and the float8
conversion of older versions gives NaN above 464, so values are clamped first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fp8fs.core.quantizer import Buffer
from fp8fs.core.recipe import BLOCK
from fp8fs.errors import DeviceError
from fp8fs.quant import buffers, raw, reference
from fp8fs.quant.buffers import Floats

__all__ = ["TorchQuantizer"]

_TYPE = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_BITS = {"BF16": np.int16, "F16": np.int16, "F32": np.int32}


class TorchQuantizer:
    """torch operations on one device, in this process. Device memory: about 9 bytes per element of a tile."""

    note = ""

    def __init__(self, device: str) -> None:
        self.name = device
        with self._device_errors(0):
            self._device = torch.device(device)
            if self._device.type == "cuda":
                torch.cuda.get_device_properties(self._device)

    def tensor_scale(self, amax: float) -> float:
        return float(reference.tensor_scale(amax))

    def amax(self, src: Buffer, dtype: str) -> float:
        codes = buffers.source_codes(src, dtype)
        if not codes.size:
            return 0.0
        with self._device_errors(codes.nbytes):
            peak = float(self._load(codes, dtype).abs().max().item())
        if not np.isfinite(peak):
            raise buffers.nonfinite(codes, dtype)
        return peak

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        codes = buffers.source_codes(src, dtype)
        data = buffers.target_bytes(dst, codes.size)
        inverse = np.full(1, buffers.inverse_scale(scale), dtype=np.float32)
        if not codes.size:
            return
        with self._device_errors(codes.nbytes):
            weight = self._load(codes, dtype)
            finite = bool(weight.isfinite().all().item())
            if finite:
                self._store(weight.float() * self._put(inverse), data)
        if not finite:
            raise buffers.nonfinite(codes, dtype)

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        codes = buffers.source_codes(src, dtype)
        cols = raw.row_length(codes.size, rows)
        peaks = buffers.target_floats(out, rows)
        if not codes.size:
            return
        with self._device_errors(codes.nbytes):
            seen = self._row_maxima(self._load(codes, dtype).view(rows, cols))
        self._require_finite(seen, codes, dtype)
        np.maximum(peaks, seen, out=peaks)

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        peaks = buffers.row_maxima(amax, rows)
        self._rows(src, dtype, rows, peaks, dst, scale)

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        self._rows(src, dtype, rows, None, dst, scale)

    def quantize_blocks(
        self,
        src: Buffer,
        dtype: str,
        rows: int,
        cols: int,
        dst: Buffer,
        scale: Buffer,
        *,
        pow2: bool,
    ) -> None:
        codes = buffers.source_codes(src, dtype)
        high, wide = raw.block_grid(codes.size, rows, cols)
        data = buffers.target_bytes(dst, codes.size)
        scales = buffers.target_floats(scale, high * wide)
        if not codes.size:
            return
        with self._device_errors(codes.nbytes):
            weight = torch.zeros(
                (high * BLOCK[0], wide * BLOCK[1]), dtype=_TYPE[dtype], device=self._device
            )
            weight[:rows, :cols] = self._load(codes, dtype).view(rows, cols)
            tiles = weight.view(high, BLOCK[0], wide, BLOCK[1])
            seen = tiles.abs().amax(dim=(1, 3)).float().cpu().numpy()
            if np.isfinite(seen).all():
                found = reference.block_scales(seen, pow2=pow2)
                scales[:] = found.reshape(-1)
                inverse = self._put(np.float32(1.0) / found).view(high, 1, wide, 1)
                whole = (tiles.float() * inverse).view(weight.shape)
                self._store(whole[:rows, :cols], data)
        self._require_finite(seen, codes, dtype)

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        """On the CPU: kept tensors are few, and rounding is cheaper than the way to the device."""
        buffers.round_bf16(src, dtype, dst)

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Make the device's context and load its kernels."""
        for dtype in dtypes:
            self.quantize_rows(
                bytes(buffers.CODE[dtype].itemsize), dtype, 1, bytearray(1), bytearray(4)
            )

    def close(self) -> None:
        """Return cached device memory. The context itself goes with the process."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _rows(
        self, src: Buffer, dtype: str, rows: int, amax: Floats | None, dst: Buffer, scale: Buffer
    ) -> None:
        codes = buffers.source_codes(src, dtype)
        cols = raw.row_length(codes.size, rows)
        data = buffers.target_bytes(dst, codes.size)
        scales = buffers.target_floats(scale, rows)
        if not codes.size:
            scales[:] = reference.channel_scales(
                np.zeros(rows, np.float32) if amax is None else amax
            )
            return
        with self._device_errors(codes.nbytes):
            weight = self._load(codes, dtype).view(rows, cols)
            seen = self._row_maxima(weight)
            if np.isfinite(seen).all():
                scales[:] = reference.channel_scales(seen if amax is None else amax)
                self._store(weight.float() / self._put(scales).view(rows, 1), data)
        self._require_finite(seen, codes, dtype)

    def _load(self, codes: buffers.Codes, dtype: str) -> torch.Tensor:
        """The tile on the device, in its own dtype, flat."""
        tile = torch.empty(codes.size, dtype=_TYPE[dtype])
        bits = tile.view(torch.int32 if dtype == "F32" else torch.int16).numpy()
        np.copyto(bits, codes.view(_BITS[dtype]))
        return tile.to(self._device)

    def _put(self, values: Floats) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _row_maxima(self, weight: torch.Tensor) -> Floats:
        maxima: Floats = weight.abs().amax(dim=1).float().cpu().numpy()
        return maxima

    def _store(self, values: torch.Tensor, data: buffers.Bytes) -> None:
        """Write the FP8 bytes of finite float32 *values* to *data*."""
        limit = float(reference.FP8_MAX)
        encoded = values.clamp(-limit, limit).to(torch.float8_e4m3fn).contiguous()
        data[:] = encoded.view(torch.uint8).reshape(-1).cpu().numpy()

    def _require_finite(self, peaks: Floats, codes: buffers.Codes, dtype: str) -> None:
        if not np.isfinite(peaks).all():
            raise buffers.nonfinite(codes, dtype)

    @contextmanager
    def _device_errors(self, asked_bytes: int) -> Iterator[None]:
        """Whatever torch says about the device becomes a DeviceError, and cached memory is returned."""
        try:
            yield
        except (RuntimeError, AssertionError) as err:  # torch without CUDA raises AssertionError
            first_line = str(err).partition("\n")[0]
            if self.name.startswith("cuda"):
                torch.cuda.empty_cache()
            raise DeviceError(
                f"{self.name}: {first_line}", device=self.name, asked_bytes=asked_bytes
            ) from err
