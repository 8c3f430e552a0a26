"""The quantizer that writes zeros: what remains of a read's cost with it is FUSE and the store."""

from __future__ import annotations

from fp8fs.core.quantizer import Buffer
from fp8fs.quant import buffers, raw

__all__ = ["ZerosQuantizer"]


class ZerosQuantizer:
    """Writes zero bytes and scales of 1.0 without looking at the source. For measurements only:
    what it makes must never reach a store that anybody else uses.
    """

    name = "zeros"
    note = "writes zeros: for measurements only"

    def tensor_scale(self, amax: float) -> float:
        return 1.0

    def amax(self, src: Buffer, dtype: str) -> float:
        return 0.0

    def cast_tensor(self, src: Buffer, dtype: str, scale: float, dst: Buffer) -> None:
        buffers.target_bytes(dst, buffers.source_codes(src, dtype).size).fill(0)

    def amax_rows(self, src: Buffer, dtype: str, rows: int, out: Buffer) -> None:
        """Every row's maximum is 0, which raises nothing."""

    def cast_rows(
        self, src: Buffer, dtype: str, rows: int, amax: Buffer, dst: Buffer, scale: Buffer
    ) -> None:
        self.quantize_rows(src, dtype, rows, dst, scale)

    def quantize_rows(self, src: Buffer, dtype: str, rows: int, dst: Buffer, scale: Buffer) -> None:
        buffers.target_bytes(dst, buffers.source_codes(src, dtype).size).fill(0)
        buffers.target_floats(scale, rows).fill(1.0)

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
        high, wide = raw.block_grid(buffers.source_codes(src, dtype).size, rows, cols)
        buffers.target_bytes(dst, rows * cols).fill(0)
        buffers.target_floats(scale, high * wide).fill(1.0)

    def cast_bf16(self, src: Buffer, dtype: str, dst: Buffer) -> None:
        buffers.target_bytes(dst, 2 * buffers.source_codes(src, dtype).size).fill(0)

    def warm(self, dtypes: tuple[str, ...] = ("BF16",), schemes: tuple[str, ...] = ()) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to give back."""
