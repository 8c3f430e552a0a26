"""``fp8fs build`` and ``fp8fs path``: a finished tree without a mount."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8fs.cli.options import (
    Component,
    Device,
    Json,
    Keep,
    Names,
    Quantize,
    Quiet,
    Scheme,
    SplitExperts,
    Src,
    Store,
    Workers,
    place,
    recipe_of,
    store_root,
)

if TYPE_CHECKING:
    from fp8fs.core.scale_range import OddScale

__all__ = ["build", "path"]

_FORMS = ("tree", "normalized-cache")


def build(
    src: Src,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=place,
            help="Also copy the result to DIR: plain and self-contained.",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="FORM",
            help="tree, or normalized-cache: a directory that a loader maps as it is, at DIR or in the store.",
        ),
    ] = "tree",
    store: Store = None,
    scheme: Scheme = "",
    names: Names = "checkpoint",
    component: Component = None,
    keep: Keep = None,
    quantize: Quantize = None,
    split_experts: SplitExperts = False,
    device: Device = "auto",
    workers: Workers = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Quantize all of SRC into the store without FUSE; print the path of the finished tree."""
    # numpy comes with a BLAS that starts a thread per core, and none of them ever has anything to do here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    from fp8fs.api import build as build_checkpoint
    from fp8fs.cli.output import Output
    from fp8fs.cli.progress import filling
    from fp8fs.core.scale_range import scales_sentence
    from fp8fs.errors import UsageError

    output = Output(as_json=as_json, quiet=quiet)
    if form not in _FORMS:
        raise UsageError(f'unknown form "{form}"', hint=" or ".join(_FORMS))
    recipe = recipe_of(
        scheme=scheme,
        names=names,
        component=component,
        keep=keep,
        quantize=quantize,
        split_experts=split_experts,
    )
    odd_scales: list[OddScale] = []
    with filling(quiet=quiet) as progress:
        if form == "tree":
            finished = build_checkpoint(
                src,
                to,
                store=store_root(store),
                recipe=recipe,
                device=device,
                workers=workers,
                progress=progress,
                note=output.note,
                report=odd_scales.extend,
            )
        else:
            from fp8fs.normalized import build_normalized

            finished = build_normalized(
                src.expanduser(),
                to.expanduser() if to is not None else None,
                recipe,
                store_root(store),
                device=device,
                workers=workers,
                progress=progress,
                note=output.note,
            )
    if odd_scales:
        output.note(f"warning: {scales_sentence(odd_scales)}")
    if as_json:
        output.document({"path": str(finished), "odd_scales": odd_scales})
    else:
        output.path(finished)


def path(
    src: Src,
    store: Store = None,
    scheme: Scheme = "",
    names: Names = "checkpoint",
    component: Component = None,
    keep: Keep = None,
    quantize: Quantize = None,
    split_experts: SplitExperts = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the path of SRC's finished tree; exit 1 if the store does not hold all of it."""
    from fp8fs.building import finished_tree
    from fp8fs.cli.output import Output

    output = Output(as_json=as_json, quiet=quiet)
    recipe = recipe_of(
        scheme=scheme,
        names=names,
        component=component,
        keep=keep,
        quantize=quantize,
        split_experts=split_experts,
    )
    tree = finished_tree(src.expanduser(), recipe, store_root(store))
    if as_json:
        output.document({"path": str(tree) if tree is not None else None})
    elif tree is not None:
        output.path(tree)
    else:
        output.note("not complete in the store; fp8fs build makes it")
    if tree is None:
        raise typer.Exit(1)
