"""The quantizer that fills on the CPU. LLVM is loaded by the first kernel that is needed; numba by one that is not kept."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fp8fs.core.quantizer import Buffer
from fp8fs.quant import raw

if TYPE_CHECKING:
    from fp8fs.quant.machine_code import Kernel

__all__ = ["CpuQuantizer"]

log = logging.getLogger(__name__)

_FP8_MAX = 448.0
_TENSOR_SCALE_MIN = 2.0**-128 + 2.0**-149
"""FP8_MAX and TENSOR_SCALE_MIN of reference.py, which needs numpy."""

_WARM = {
    "per_tensor": ("amax", "cast_scaled"),
    "per_channel": ("quantize_rows", "amax_rows", "cast_rows"),
    "block": ("quantize_blocks",),
    "block_free": ("quantize_blocks",),
}
"""Kernels that each scheme needs."""


class CpuQuantizer:
    """Compiled kernels on raw buffers; any number of threads may call at once, and none holds the GIL.

    Machine code is kept in *cache* (default: the user's cache directory) if only its owner can write
    there. Scratch memory: a few KiB per call.
    """

    name = "cpu"
    note = ""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache_wanted = cache
        self._lock = threading.Lock()  # guards what follows; held while a kernel compiles
        self._ready: dict[tuple[str, str], Kernel] = {}
        self._cache: Path | None = None
        self._cache_known = False

    def tensor_scale(self, amax: float) -> float:
        """As the reference has it: a quotient of float32 values is rounded once, by way of float64 too."""
        if amax == 0.0:
            return 1.0
        return max(raw.float32(raw.float32(amax) / _FP8_MAX), _TENSOR_SCALE_MIN)

    def amax(self, src: Buffer, dtype: str) -> float:
        codes = raw.source(src, dtype)
        return raw.magnitude(self._run("amax", dtype, codes, codes.elems), dtype)

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        codes = raw.source(src, dtype)
        single = raw.float32(scale)
        if not _TENSOR_SCALE_MIN <= single < math.inf:
            raise ValueError(f"{scale!r} is no per_tensor scale")
        inverse = raw.float32(1.0 / single)
        data = raw.target_bytes(dst, codes.elems)
        self._run("cast_scaled", dtype, codes, codes.elems, inverse, data)

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        codes = raw.source(src, dtype)
        cols = raw.row_length(codes.elems, rows)
        self._run("amax_rows", dtype, codes, rows, cols, raw.target_floats(out, rows))

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        codes = raw.source(src, dtype)
        cols = raw.row_length(codes.elems, rows)
        peaks = raw.row_maxima(amax, rows)
        data = raw.target_bytes(dst, codes.elems)
        scales = raw.target_floats(scale, rows)
        self._run("cast_rows", dtype, codes, rows, cols, peaks, data, scales)

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        codes = raw.source(src, dtype)
        cols = raw.row_length(codes.elems, rows)
        data = raw.target_bytes(dst, codes.elems)
        scales = raw.target_floats(scale, rows)
        self._run("quantize_rows", dtype, codes, rows, cols, data, scales)

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
        codes = raw.source(src, dtype)
        high, wide = raw.block_grid(codes.elems, rows, cols)
        data = raw.target_bytes(dst, codes.elems)
        scales = raw.target_floats(scale, high * wide)
        scratch = [raw.target_floats(bytearray(4 * raw.PANEL), raw.PANEL) for _ in range(2)]
        self._run("quantize_blocks", dtype, codes, rows, cols, data, scales, int(pow2), *scratch)

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        from fp8fs.quant import buffers

        buffers.round_bf16(src, dtype, dst)

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Compile or load the kernels of *schemes* (none: all) for *dtypes*; others follow on first use."""
        for dtype in dtypes:
            for scheme in schemes or tuple(_WARM):
                for kernel in _WARM[scheme]:
                    self._kernel(kernel, dtype)

    def close(self) -> None:
        """Nothing to give back: compiled code stays for the next call."""

    def _run(self, kernel: str, dtype: str, codes: raw.Raw, *arguments: raw.Raw | float) -> int:
        """Run one kernel; the largest magnitude code it saw. Raises: NonFiniteTensorError."""
        plain = [a.address if isinstance(a, raw.Raw) else a for a in arguments]
        peak = self._kernel(kernel, dtype)(codes.address, *plain)
        if peak >= raw.INFINITE[dtype]:
            from fp8fs.quant import buffers

            raise buffers.nonfinite(buffers.source_codes(raw.contents(codes, dtype), dtype), dtype)
        return peak

    def _kernel(self, name: str, dtype: str) -> Kernel:
        ready = self._ready.get((name, dtype))
        if ready is not None:
            return ready
        with self._lock:
            if (name, dtype) not in self._ready:
                self._ready[name, dtype] = self._load(name, dtype)
            return self._ready[name, dtype]

    def _load(self, name: str, dtype: str) -> Kernel:
        """The kernel as it was kept; else compiled, and kept."""
        from fp8fs.quant import kernel_cache, machine_code

        if not self._cache_known:
            wanted = self._cache_wanted or kernel_cache.default_directory()
            self._cache = kernel_cache.private_directory(wanted)
            self._cache_known = True
        if self._cache is not None:
            kept = kernel_cache.read(self._cache, name, dtype)
            if kept is not None:
                try:
                    return machine_code.load(kept)
                except RuntimeError as err:
                    log.warning("kernel %s is compiled again: %s", name, err)
        from fp8fs.quant import kernels

        code = kernels.compile_code(name, dtype)
        if self._cache is not None:
            kernel_cache.write(self._cache, code)
        return machine_code.load(code)
