"""The FP8 quantization operators for which vLLM's CPU build has placeholders only."""

from __future__ import annotations

import reference_fp8
import torch


def fill() -> None:
    """From now on, in this process only, they give the reference's numbers."""
    import vllm._custom_ops as ops

    def scaled_fp8_quant(
        input: torch.Tensor,  # noqa: A002  (the name that the engine passes)
        scale: torch.Tensor | None = None,
        num_token_padding: int | None = None,
        scale_ub: torch.Tensor | None = None,
        use_per_token_if_dynamic: bool = False,
        output: torch.Tensor | None = None,
        group_shape: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scale is not None:
            return reference_fp8.cast_with_scale(input, scale), scale
        return (
            reference_fp8.per_channel(input)
            if use_per_token_if_dynamic
            else reference_fp8.per_tensor(input)
        )

    ops.scaled_fp8_quant = scaled_fp8_quant
