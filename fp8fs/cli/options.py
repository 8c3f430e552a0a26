"""Options that several commands share, defined once. All recipe options mean the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fp8fs.core.recipe import Recipe

__all__ = [
    "AllowOther",
    "AllowUnquantized",
    "Component",
    "Device",
    "Grain",
    "Json",
    "Keep",
    "Names",
    "Quantize",
    "Quiet",
    "Scheme",
    "Serve",
    "SplitExperts",
    "Src",
    "Store",
    "Workers",
    "place",
    "recipe_of",
    "store_root",
]


def place(text: str) -> Path:
    """A path from the command line; whether it can be read is for those to say who read it.

    Raises: BadParameter for an empty one, which would be the current directory.
    """
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


Src = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="The BF16, FP16 or FP32 checkpoint directory.", parser=place
    ),
]
Scheme = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="per_tensor, per_channel, block or block_free. Default: per_tensor for diffusers "
        "pipelines, per_channel for transformers models.",
        rich_help_panel="Recipe",
    ),
]
Names = Annotated[
    str,
    typer.Option(
        metavar="WHICH",
        help="checkpoint: the source's tensor names. runtime: those of the engine's own module, "
        "fused and in its dtypes (Wan, Qwen-Image and others).",
        rich_help_panel="Recipe",
    ),
]
Component = Annotated[
    list[str] | None,
    typer.Option(
        "--component",
        metavar="NAME",
        help="Quantize this component (repeatable; '.' is the root). Default: a pipeline's "
        "diffusion transformers, or the whole of a transformers model.",
        rich_help_panel="Recipe",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="GLOB",
        help="Keep matching tensors in the source's dtype (repeatable).",
        rich_help_panel="Recipe",
    ),
]
Quantize = Annotated[
    list[str] | None,
    typer.Option(
        "--quantize",
        metavar="GLOB",
        help="Quantize matching tensors against the rules (repeatable).",
        rich_help_panel="Recipe",
    ),
]
SplitExperts = Annotated[
    bool,
    typer.Option(
        "--split-experts",
        help="Show experts that are stacked in 3-D tensors as one FP8 weight each, under the names "
        "that readers know. Default: they stay in the source's dtype.",
        rich_help_panel="Recipe",
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        "--store",
        metavar="ROOT",
        parser=place,
        envvar="FP8FS_STORE",
        help="The directory that holds stores. Default: fp8fs in your cache directory.",
    ),
]
Device = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N: what quantizes."),
]
Workers = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=256,
        help="Threads that quantize, 256 at most; 0: one per available core, 16 at most.",
    ),
]
Serve = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="handoff: finished shards become links into the store, at native speed. "
        "inline: everything stays a regular file.",
    ),
]
Grain = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="shard: the first open makes the whole shard. tensor: a read makes only what it "
        "covers (with --serve inline).",
    ),
]
AllowOther = Annotated[
    bool,
    typer.Option("--allow-other", help="Let other users read the mount, by the files' own modes."),
]
AllowUnquantized = Annotated[
    bool,
    typer.Option("--allow-unquantized", help="Mount SRC even if none of its weights becomes FP8."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress on stderr.")]


def recipe_of(
    *,
    scheme: str,
    names: str,
    component: list[str] | None,
    keep: list[str] | None,
    quantize: list[str] | None,
    split_experts: bool,
) -> Recipe:
    """The recipe that the shared options spell. Raises: UsageError."""
    from fp8fs.assembly import recipe_from

    return recipe_from(
        scheme=scheme,
        names=names,
        components=tuple(component or ()),
        keep=tuple(keep or ()),
        quantize=tuple(quantize or ()),
        split_experts=split_experts,
    )


def store_root(chosen: Path | None) -> Path:
    """--store, else FP8FS_STORE (typer reads it), else the user's cache directory."""
    from fp8fs.assembly import default_store_root

    return chosen.expanduser().absolute() if chosen is not None else default_store_root()
