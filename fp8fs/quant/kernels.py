"""The numba kernels: plain loops over codes that LLVM turns into vector code. Importing this imports numba.

The kernels are C functions over buffers of codes (fp8fs/quant/buffers.py); the codes' type selects the
dtype: uint16 is BF16, int16 is F16, uint32 is F32. Each kernel returns the largest magnitude code that
it saw, so that NaN and Inf cost no pass of their own. None allocates or raises.

Rules that keep them exact and fast:

- no fastmath: division stays division, products are rounded before they are added to;
- every integer step is cast back to its width, since numba widens to 64 bits and so would the vectors;
- the sub-matrices are slices, because an index that could be negative defeats the vectorizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numba.extending
import numpy as np

from fp8fs.core.recipe import BLOCK
from fp8fs.quant.machine_code import PARAMETERS, MachineCode
from fp8fs.quant.raw import PANEL
from fp8fs.quant.reference import BLOCK_AMAX_MIN, CHANNEL_SCALE_MIN, FP8_MAX

__all__ = ["KERNELS", "compile_code", "compile_ir"]

F = TypeVar("F", bound=Callable[..., Any])

njit: Any = numba.njit
types: Any = numba.types
overload: Any = numba.extending.overload
carray: Any = numba.carray  # type: ignore[attr-defined]
cfunc: Any = numba.cfunc

_OPTIONS = {"error_model": "numpy", "boundscheck": False}

_u8, _u16, _u32, _i32, _f32 = np.uint8, np.uint16, np.uint32, np.int32, np.float32
_ROWS, _COLS = BLOCK


def _helper(function: F) -> F:
    """*function*, compiled into every kernel that calls it."""
    return cast(F, njit(**_OPTIONS)(function))


def magnitude(code: Any) -> Any:
    """A code without its sign."""
    raise NotImplementedError("compiled code only")


def widen(code: Any) -> Any:
    """The float32 value of a code, exact."""
    raise NotImplementedError("compiled code only")


def _choose_magnitude(code: Any) -> Any:
    def long(code: Any) -> Any:
        return _u32(code & _u32(0x7FFF_FFFF))

    def short(code: Any) -> Any:
        return _u16(code & _u16(0x7FFF))

    return long if code == types.uint32 else short


def _choose_widen(code: Any) -> Any:
    def single(code: Any) -> Any:
        return _u32(code).view(np.float32)

    def brain(code: Any) -> Any:
        return _u32(_u32(code) << _u32(16)).view(np.float32)

    def half(code: Any) -> Any:
        # Subnormals go through an integer: as float32 bits they would be subnormal too, which some
        # processors multiply a hundred times slower.
        bare = _u32(code & _u16(0x7FFF))
        sign = _u32(_u32(code & _u16(0x8000)) << _u32(16))
        normal = _u32(_u32(bare << _u32(13)) + _u32(112 << 23))
        subnormal = _f32(_f32(_i32(bare)) * _f32(2.0**-24)).view(np.uint32)
        return _u32((subnormal if bare < _u32(0x400) else normal) | sign).view(np.float32)

    return {types.uint32: single, types.uint16: brain, types.int16: half}[code]


overload(magnitude)(_choose_magnitude)
overload(widen)(_choose_widen)


@_helper
def encode(value: Any) -> Any:
    """The e4m3fn byte of a float32, nearest even, clamped to +-448. A NaN gives 0x7E or 0xFE.

    Adding 2^20 times the value's own power of two leaves no bits below the third mantissa bit, so the
    float adder does the rounding; below 2^-6 the power is held, which is what e4m3fn subnormals are.
    """
    bits = _f32(value).view(np.uint32)
    bare = min(_u32(bits & _u32(0x7FFF_FFFF)), _u32(0x43E0_0000))  # bits of 448.0
    power = max(_u32(bare & _u32(0x7F80_0000)), _u32(0x3C80_0000))  # bits of 2^-6
    magic = _u32(power + _u32(20 << 23))
    rounded = _f32(_u32(bare).view(np.float32) + _u32(magic).view(np.float32)).view(np.uint32)
    eighths = _u32(rounded - magic)
    exponent = _u32(_u32(power - _u32(0x3C80_0000)) >> _u32(20))
    sign = _u32(_u32(bits & _u32(0x8000_0000)) >> _u32(24))
    return _u8(_u32(eighths + exponent) | sign)


@_helper
def largest(run: Any) -> Any:
    """Largest magnitude code of a run; 0 for an empty one."""
    peak = magnitude(run.dtype.type(0))
    for i in range(run.size):
        peak = max(peak, magnitude(run[i]))
    return peak


@_helper
def amplitude(peak: Any, run: Any) -> Any:
    """The float32 value of magnitude code *peak*, of the dtype that *run* has."""
    return widen(run.dtype.type(peak))


@_helper
def cast_divided(run: Any, scale: Any, out: Any) -> None:
    """out = fp8(run / scale)."""
    for i in range(run.size):
        out[i] = encode(widen(run[i]) / scale)


def amax(src: Any, count: Any) -> Any:
    """Largest magnitude code."""
    return largest(carray(src, count))


def cast_scaled(source: Any, count: Any, inverse: Any, data: Any) -> Any:
    """data = fp8(source * inverse)."""
    src, dst = carray(source, count), carray(data, count)
    peak = magnitude(src.dtype.type(0))
    for i in range(src.size):
        peak = max(peak, magnitude(src[i]))
        dst[i] = encode(widen(src[i]) * inverse)
    return peak


def amax_rows(source: Any, rows: Any, cols: Any, maxima: Any) -> Any:
    """Raise maxima[r] to the largest magnitude of row r."""
    src, out = carray(source, rows * cols), carray(maxima, rows)
    worst = magnitude(src.dtype.type(0))
    for r in range(rows):
        row = src[r * cols : (r + 1) * cols]
        peak = largest(row)
        worst = max(worst, peak)
        out[r] = max(out[r], amplitude(peak, row))
    return worst


def cast_rows(source: Any, rows: Any, cols: Any, maxima: Any, data: Any, scales: Any) -> Any:
    """per_channel from known row maxima."""
    src, dst = carray(source, rows * cols), carray(data, rows * cols)
    peaks, scale = carray(maxima, rows), carray(scales, rows)
    worst = magnitude(src.dtype.type(0))
    for r in range(rows):
        row = src[r * cols : (r + 1) * cols]
        worst = max(worst, largest(row))
        scale[r] = max(peaks[r] / FP8_MAX, CHANNEL_SCALE_MIN)
        cast_divided(row, scale[r], dst[r * cols : (r + 1) * cols])
    return worst


def quantize_rows(source: Any, rows: Any, cols: Any, data: Any, scales: Any) -> Any:
    """per_channel; a row is still in cache when it is read for the second time."""
    src, dst = carray(source, rows * cols), carray(data, rows * cols)
    scale = carray(scales, rows)
    worst = magnitude(src.dtype.type(0))
    for r in range(rows):
        row = src[r * cols : (r + 1) * cols]
        peak = largest(row)
        worst = max(worst, peak)
        scale[r] = max(amplitude(peak, row) / FP8_MAX, CHANNEL_SCALE_MIN)
        cast_divided(row, scale[r], dst[r * cols : (r + 1) * cols])
    return worst


def quantize_blocks(
    source: Any,
    rows: Any,
    cols: Any,
    data: Any,
    scales: Any,
    pow2: Any,
    scratch_peaks: Any,
    scratch_inverse: Any,
) -> Any:
    """block and block_free: panels of blocks are read row by row, then cast row by row."""
    src, dst = carray(source, rows * cols), carray(data, rows * cols)
    wide = (cols + _COLS - 1) // _COLS
    scale = carray(scales, (rows + _ROWS - 1) // _ROWS * wide)
    peaks, inverse = carray(scratch_peaks, PANEL), carray(scratch_inverse, PANEL)
    worst = _u32(0)
    for top in range(0, rows, _ROWS):
        bottom = min(top + _ROWS, rows)
        for left in range(0, wide, PANEL):
            right = min(left + PANEL, wide)
            for b in range(PANEL):
                peaks[b] = _u32(0)
            for r in range(top, bottom):
                for b in range(left, right):
                    start = r * cols + b * _COLS
                    peak = largest(src[start : min(start + _COLS, (r + 1) * cols)])
                    peaks[b - left] = max(peaks[b - left], _u32(peak))
            for b in range(left, right):
                worst = max(worst, peaks[b - left])
                one = max(amplitude(peaks[b - left], src), BLOCK_AMAX_MIN) / FP8_MAX
                if pow2:  # any mantissa bit carries into the exponent
                    up = _u32(_f32(one).view(np.uint32) + _u32(0x7F_FFFF))
                    one = _u32(up & _u32(0x7F80_0000)).view(np.float32)
                scale[(top // _ROWS) * wide + b] = one
                inverse[b - left] = _f32(1.0) / one
            for r in range(top, bottom):
                for b in range(left, right):
                    start = r * cols + b * _COLS
                    stop = min(start + _COLS, (r + 1) * cols)
                    run, out, factor = src[start:stop], dst[start:stop], inverse[b - left]
                    for i in range(run.size):
                        out[i] = encode(widen(run[i]) * factor)
    return worst


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (amax, cast_scaled, amax_rows, cast_rows, quantize_rows, quantize_blocks)
}
"""The kernels by name, not compiled."""


def _signature(name: str, dtype: str) -> Any:
    """The C type of kernel *name* for sources of *dtype*."""
    letters = {
        "s": types.CPointer({"BF16": types.uint16, "F16": types.int16, "F32": types.uint32}[dtype]),
        "d": types.CPointer(types.uint8),
        "f": types.CPointer(types.float32),
        "w": types.CPointer(types.uint32),
        "x": types.float32,
        "n": types.int64,
    }
    return types.uint32(*(letters[letter] for letter in PARAMETERS[name]))


def compile_ir(name: str, dtype: str) -> tuple[str, str]:
    """Kernel *name* for sources of *dtype* as optimized LLVM IR, and the symbol of its C function in it."""
    made = cfunc(_signature(name, dtype), **_OPTIONS)(KERNELS[name])
    return made.inspect_llvm(), made.native_name


def compile_code(name: str, dtype: str) -> MachineCode:
    """Kernel *name* for sources of *dtype* as machine code for this processor."""
    ir, symbol = compile_ir(name, dtype)
    module = llvm.parse_assembly(ir)
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    named = [*module.functions, *module.global_variables]
    missing = [it.name for it in named if it.is_declaration and not it.name.startswith("llvm.")]
    return MachineCode(name, dtype, symbol, tuple(missing), machine.emit_object(module))
