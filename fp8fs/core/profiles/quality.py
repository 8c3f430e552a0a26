"""What stays in the source's dtype for quality, although an engine could run it in FP8.

A readable table on top of the derived profiles: published FP8 checkpoints keep the same kinds of layers. A row
applies to a checkpoint module by search, anywhere in its dotted name. If one member of a fused group is excluded,
the whole group is.
"""

from __future__ import annotations

import functools
import re

import msgspec

__all__ = ["EXCLUSIONS", "Exclusion", "exclusion"]


class Exclusion(msgspec.Struct, frozen=True):
    """``kind``: component kind that the row is for, "" for all. ``pattern``: searched in a module's dotted name."""

    kind: str
    pattern: str
    reason: str


EXCLUSIONS = (
    Exclusion("", r"(^|\.)lm_head$", "output head"),
    Exclusion("", r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings)$", "embedding"),
    Exclusion(
        "",
        r"(^|\.)(mlp|block_sparse_moe|moe|ffn|feed_forward)\.(gate|router)(\.|$)",
        "expert router",
    ),
    Exclusion("", r"(^|\.)(router|shared_expert_gate)(\.|$)", "expert router"),
    Exclusion(
        "transformers",
        r"(^|\.)(visual|vision_\w+|multi_modal_projector|mm_projector)\.",
        "vision tower",
    ),
    Exclusion(
        "transformers", r"(^|\.)(audio_tower|audio_model|audio_\w*projector)\.", "audio tower"
    ),
    Exclusion("transformers", r"(^|[._])(mtp|nextn)[^.]*(\.|$)", "multi-token prediction layer"),
    Exclusion("transformers", r"(^|\.)linear_attn\.in_proj_(ba|a|b)$", "gates of linear attention"),
    Exclusion("diffusers", r"(^|\.)ada_?ln(_|\.|$)", "adaptive norm"),
    Exclusion("diffusers", r"(^|\.)adaLN_modulation(\.|$)", "adaptive norm"),
    Exclusion("diffusers", r"(^|\.)(norm\w*)\.linear$", "adaptive norm"),
    Exclusion(
        "diffusers", r"(^|\.)(\w*_mod|\w*modulation\w*|time_mod_proj|t_block)(\.|$)", "modulation"
    ),
    Exclusion("diffusers", r"^(x|t|y|cap)_embedder(\.|$)", "embedder"),
    Exclusion(
        "diffusers",
        r"^\w*(time|text|context|condition|caption|image|patch)\w*_?embed(der|ding)?(_\d+)?(\.|$)",
        "embedder",
    ),
    Exclusion(
        "diffusers", r"^(\w*caption_projection|\w*condition_proj|\w*patch_proj)(\.|$)", "embedder"
    ),
    Exclusion(
        "diffusers", r"^(img_in|txt_in|proj_in|\w*_proj_in|c2ws_\w+)(\.|$)", "input projection"
    ),
    Exclusion("diffusers", r"^(proj_out|\w*_proj_out|final_layer)(\.|$)", "final projection"),
)


@functools.cache
def _compiled(kind: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple(
        (re.compile(row.pattern), row.reason) for row in EXCLUSIONS if row.kind in ("", kind)
    )


def exclusion(kind: str, module: str) -> str:
    """Why a module of a component of that kind stays unquantized, or ""."""
    return next((reason for pattern, reason in _compiled(kind) if pattern.search(module)), "")
