"""The protocol between the engine and whatever turns source bytes into FP8 bytes.

Buffers are C-contiguous, row-major, little-endian; sources are BF16, F16 or F32 (by dtype name), data
is one e4m3fn byte per element, scales are float32. The numbers are defined by fp8fs/quant/reference.py.
"""

from __future__ import annotations

from typing import Protocol

from typing_extensions import Buffer

__all__ = ["QUANTIZER_VERSION", "Buffer", "Quantizer"]

QUANTIZER_VERSION = "1"
"""Part of every object's key: raised whenever any scheme's bytes change."""


class Quantizer(Protocol):
    """Turns tiles of a source matrix into FP8. Thread-safe; every method releases the GIL while it works.

    Raises (all methods that look at values): NonFiniteTensorError with fact ``index``, the flat index in *src* of the
    first NaN or Inf; what was written to *dst* is then meaningless. DeviceError if the device fails.
    """

    name: str

    def tensor_scale(self, amax: float) -> float:
        """The per_tensor scale of a tensor or group whose largest magnitude is *amax* (a float32 value); 1.0 for 0."""
        ...

    def amax(self, src: Buffer, dtype: str) -> float:
        """Largest magnitude of all elements, exact in float32; 0.0 for none."""
        ...

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        """per_tensor: dst = fp8(clamp(src * (1 / scale))) with a scale from ``tensor_scale``."""
        ...

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        """Raise out[r] (float32) to the largest magnitude of row r. For rows that are cut into several tiles."""
        ...

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        """per_channel, from known row maxima: writes scale[r] and the row's FP8 bytes."""
        ...

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        """per_channel for whole rows: both passes while the tile is in cache."""
        ...

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
        """block and block_free for a tile that starts on a block boundary; scale is (ceil(rows/128), ceil(cols/128))."""
        ...

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        """dst = BF16(src), for tensors that are kept. NaN and Inf are values like others here."""
        ...

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Compile or load whatever the first call would wait for. No *schemes*: for all of them."""
        ...

    def close(self) -> None:
        """Give back threads, processes and device memory. Repeatable."""
        ...
