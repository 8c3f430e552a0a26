"""Compiled kernels as bytes: what is kept of them, and how they become callable without numba.

``kernels.py`` (numba) makes a ``MachineCode`` once; every later process hands its object code to LLVM's
linker, which takes a millisecond, and calls it through ctypes, which drops the GIL meanwhile. numba alone
would take a quarter of a second to be imported.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import llvmlite.binding as llvm
import msgspec
import xxhash

__all__ = ["PARAMETERS", "Kernel", "MachineCode", "decode", "encode", "load", "processor"]

Kernel = Callable[..., int]
"""A loaded kernel: takes its PARAMETERS, pointers as integers; the largest magnitude code that it saw."""

PARAMETERS = {
    "amax": "sn",
    "cast_scaled": "snxd",
    "amax_rows": "snnf",
    "cast_rows": "snnfdf",
    "quantize_rows": "snndf",
    "quantize_blocks": "snndfnwf",
}
"""The parameters of each kernel: pointers to source codes (s), FP8 bytes (d), float32 (f) and uint32 (w);
a float32 (x) and an int64 (n) by value."""

_CTYPES: dict[str, Any] = {
    **dict.fromkeys("sdfw", ctypes.c_void_p),
    "x": ctypes.c_float,
    "n": ctypes.c_int64,
}
_DIGEST_BYTES = 16
_loads = itertools.count()
"""Numbers what is linked: LLVM takes a library's name once in a process, even when the library is gone."""


class MachineCode(msgspec.Struct, frozen=True):
    """One kernel for one dtype. ``symbol`` is its C function in ``object``, a relocatable object file.

    ``unused`` are functions of numba's that the object names for exceptions, and no kernel raises one.
    """

    name: str
    dtype: str
    symbol: str
    unused: tuple[str, ...]
    object: bytes


@cache
def processor() -> str:
    """The processor and its features, as code is compiled for: machine code of another may not run here."""
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def encode(code: MachineCode) -> bytes:
    """*code* as the bytes of a file, with a digest of them."""
    body = msgspec.msgpack.encode(code)
    return xxhash.xxh3_128_digest(body) + body


def decode(data: bytes) -> MachineCode | None:
    """What ``encode`` was given; None for bytes that a crash or a bad disk has changed."""
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(body):
        return None
    try:
        return msgspec.msgpack.decode(body, type=MachineCode)
    except msgspec.MsgspecError:
        return None


def load(code: MachineCode) -> Kernel:
    """*code*, ready to be called. It stays in memory until the process ends."""
    library = llvm.JITLibraryBuilder().add_object_img(code.object).add_current_process()
    for symbol in code.unused:
        library.import_symbol(symbol, _abort())
    linked = library.export_symbol(code.symbol).link(
        _linker(), f"{code.name}-{code.dtype}-{next(_loads)}"
    )
    types = [_CTYPES[letter] for letter in PARAMETERS[code.name]]
    kernel: Any = ctypes.CFUNCTYPE(ctypes.c_uint32, *types)(linked[code.symbol])
    kernel.linked = linked  # with it the code would go
    return cast("Kernel", kernel)


@cache
def _linker() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler()


@cache
def _abort() -> int:
    """The address of libc's ``abort``."""
    return ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value or 0
