"""The quantizer that fills on the CPU. numba is imported by the first kernel that is needed, not before."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fp8fs.core.quantizer import Buffer
from fp8fs.quant import buffers, kernel_cache, reference

__all__ = ["CpuQuantizer"]

log = logging.getLogger(__name__)

_WARM = {
    "per_tensor": ("amax", "cast_scaled"),
    "per_channel": ("quantize_rows", "amax_rows", "cast_rows"),
    "block": ("quantize_blocks",),
    "block_free": ("quantize_blocks",),
}
"""Kernels that each scheme needs."""

_CACHE_TROUBLE = (
    OSError,
    EOFError,
    pickle.PickleError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)
"""What unpickling a damaged file may raise, and what a full or vanished directory does raise."""


class CpuQuantizer:
    """numba kernels on raw buffers; any number of threads may call at once, and none holds the GIL.

    Machine code is kept in *cache* (default: the user's cache directory) if only its owner can write
    there. Scratch memory: a few KiB per call.
    """

    name = "cpu"
    note = ""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache_wanted = cache
        self._lock = threading.Lock()  # guards what follows; held while a kernel compiles
        self._ready: dict[tuple[str, str], Callable[..., Any]] = {}
        self._cache: Path | None = None
        self._cache_known = False

    def tensor_scale(self, amax: float) -> float:
        return float(reference.tensor_scale(amax))

    def amax(self, src: Buffer, dtype: str) -> float:
        codes = buffers.source_codes(src, dtype)
        peak = self._run("amax", dtype, codes)
        return buffers.code_to_float(peak, dtype)

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        codes = buffers.source_codes(src, dtype)
        inverse = buffers.inverse_scale(scale)
        self._run("cast_scaled", dtype, codes, inverse, buffers.target_bytes(dst, codes.size))

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        codes = buffers.source_codes(src, dtype)
        cols = buffers.row_length(codes.size, rows)
        self._run("amax_rows", dtype, codes, cols, buffers.target_floats(out, rows))

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        codes = buffers.source_codes(src, dtype)
        cols = buffers.row_length(codes.size, rows)
        peaks = buffers.row_maxima(amax, rows)
        data = buffers.target_bytes(dst, codes.size)
        scales = buffers.target_floats(scale, rows)
        self._run("cast_rows", dtype, codes, cols, peaks, data, scales)

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        codes = buffers.source_codes(src, dtype)
        cols = buffers.row_length(codes.size, rows)
        data = buffers.target_bytes(dst, codes.size)
        self._run("quantize_rows", dtype, codes, cols, data, buffers.target_floats(scale, rows))

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
        high, wide = buffers.block_grid(codes.size, rows, cols)
        data = buffers.target_bytes(dst, codes.size)
        scales = buffers.target_floats(scale, high * wide)
        self._run("quantize_blocks", dtype, codes, rows, cols, data, scales, pow2)

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        buffers.round_bf16(src, dtype, dst)

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Compile or load the kernels of *schemes* (none: all) for *dtypes*; others follow on first use."""
        for dtype in dtypes:
            for scheme in schemes or tuple(_WARM):
                for kernel in _WARM[scheme]:
                    self._kernel(kernel, dtype)

    def close(self) -> None:
        """Nothing to give back: compiled code stays for the next call."""

    def _run(self, kernel: str, dtype: str, codes: buffers.Codes, *arguments: object) -> int:
        """Run one kernel; the largest magnitude code it saw. Raises: NonFiniteTensorError."""
        peak = int(self._kernel(kernel, dtype)(codes, *arguments))
        if peak >= buffers.INFINITE[dtype]:
            raise buffers.nonfinite(codes, dtype)
        return peak

    def _kernel(self, name: str, dtype: str) -> Callable[..., Any]:
        ready = self._ready.get((name, dtype))
        if ready is not None:
            return ready
        with self._lock:
            if (name, dtype) not in self._ready:
                self._ready[name, dtype] = self._compile(name, dtype)
            return self._ready[name, dtype]

    def _compile(self, name: str, dtype: str) -> Callable[..., Any]:
        from fp8fs.quant import kernels

        types = kernels.signature(name, dtype)
        cache = self._cache_directory()
        if cache is not None:
            try:
                with kernel_cache.numba_cache_at(cache):
                    kernel = kernels.build(name, cached=True)
                if Path(kernel.stats.cache_path).is_relative_to(cache):
                    kernel.compile(types)
                    return cast("Callable[..., Any]", kernel)
            except _CACHE_TROUBLE as err:
                log.warning(
                    "kernels are compiled again: the cache %s is damaged or full: %r", cache, err
                )
                shutil.rmtree(cache, ignore_errors=True)
            self._cache = None
        kernel = kernels.build(name, cached=False)
        kernel.compile(types)
        return cast("Callable[..., Any]", kernel)

    def _cache_directory(self) -> Path | None:
        if not self._cache_known:
            wanted = self._cache_wanted or kernel_cache.default_directory()
            self._cache = kernel_cache.private_directory(wanted)
            self._cache_known = True
        return self._cache
