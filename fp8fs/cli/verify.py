"""``fp8fs verify``: sealed bytes against their records, and against the source."""

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
    Store,
    Workers,
    place,
    recipe_of,
    store_root,
)

if TYPE_CHECKING:
    from fp8fs.adoption import Adoption
    from fp8fs.audit import Audit
    from fp8fs.cli.output import Output
    from fp8fs.core.recipe import Recipe

__all__ = ["verify"]


def verify(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="SRC|STORE|CACHE",
            parser=place,
            help="A checkpoint, a store, or a normalized cache.",
        ),
    ],
    deep: Annotated[
        bool, typer.Option("--deep", help="Quantize again from SRC and compare every byte.")
    ] = False,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Accept SRC as the source of what the store holds already."),
    ] = False,
    store: Store = None,
    scheme: Scheme = "",
    names: Names = "checkpoint",
    component: Component = None,
    keep: Keep = None,
    quantize: Quantize = None,
    split_experts: SplitExperts = False,
    device: Device = "cpu",
    workers: Workers = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check every sealed byte; exit 50 if something is damaged. Damaged objects are made again later."""
    from fp8fs.cli.output import Output
    from fp8fs.errors import UsageError

    output = Output(as_json=as_json, quiet=quiet)
    place = what.expanduser()
    if _is_normalized(place):
        if deep or adopt:
            raise UsageError("--deep and --adopt need SRC", hint="fp8fs verify SRC")
        _verify_normalized(place, output)
        return
    if _is_store(place):
        if deep or adopt:
            raise UsageError("--deep and --adopt need SRC, not a store", hint="fp8fs verify SRC")
        audit = _verify_store(place, output)
        adoption = None
    else:
        recipe = recipe_of(
            scheme=scheme,
            names=names,
            component=component,
            keep=keep,
            quantize=quantize,
            split_experts=split_experts,
        )
        root = store_root(store)
        adoption = _adopt(place, recipe, root, output) if adopt else None
        audit = _verify_plan(
            place, recipe, root, deep=deep, device=device, workers=workers, output=output
        )
    _report(audit, adoption, output)


def _is_store(place: Path) -> bool:
    return os.path.isdir(place / "v1" / "objects")  # False too where nobody lets us look


def _is_normalized(place: Path) -> bool:
    from fp8fs.normalized import looks_normalized

    return not _is_store(place) and looks_normalized(place)


def _verify_normalized(place: Path, output: Output) -> None:
    from fp8fs.core.text import counted
    from fp8fs.errors import VerifyFailedError
    from fp8fs.normalized import look

    found = look(place)
    if output.as_json:
        output.document({"hit": not found.miss, "miss": found.miss, "tensors": found.tensors})
    elif found.miss:
        output.line(f"a miss: {found.miss}")
    else:
        output.line(f"a hit: {counted(found.tensors, 'tensor')}, the source is unchanged")
    if found.miss:
        raise typer.Exit(VerifyFailedError.exit)


def _verify_store(place: Path, output: Output) -> Audit:
    from fp8fs.audit import check_store, set_aside
    from fp8fs.cli.progress import bar
    from fp8fs.store.store import Store as StoreDirectory

    opened = StoreDirectory.open(place, create=False)
    with bar("reading", opened.usage().object_bytes, quiet=output.quiet) as advance:
        audit = check_store(opened, progress=advance)
    if audit.damage and opened.writable:
        set_aside(opened, audit.damage)
    return audit


def _verify_plan(
    src: Path,
    recipe: Recipe,
    root: Path,
    *,
    deep: bool,
    device: str,
    workers: int,
    output: Output,
) -> Audit:
    from fp8fs.assembly import survey
    from fp8fs.audit import check_plan, set_aside
    from fp8fs.cli.progress import bar
    from fp8fs.errors import StoreError

    with (
        survey(src, recipe, root) as found,
        bar("reading", found.view_bytes, quiet=output.quiet) as advance,
    ):
        if found.store is None:  # "nothing made yet" would sound as if all were well
            raise StoreError(f"nothing can be verified: {found.why_no_store}")
        audit = check_plan(found, deep=deep, device=device, workers=workers, progress=advance)
        if audit.damage and found.store is not None and found.store.writable:
            set_aside(found.store, audit.damage)
        return audit


def _adopt(src: Path, recipe: Recipe, root: Path, output: Output) -> Adoption:
    from fp8fs.adoption import adopt
    from fp8fs.assembly import survey
    from fp8fs.cli.progress import bar

    with (
        survey(src, recipe, root) as found,
        bar("comparing", found.source_bytes, quiet=output.quiet) as advance,
    ):
        return adopt(found, progress=advance)


def _report(audit: Audit, adoption: Adoption | None, output: Output) -> None:
    from fp8fs.cli.output import format_bytes
    from fp8fs.core.text import counted

    adopted = adoption.adopted if adoption is not None else {}
    refused = adoption.refused if adoption is not None else {}
    unread = sum(not item.readable for item in audit.damage)
    if output.as_json:
        output.document(
            {
                "checked": audit.checked,
                "missing": audit.missing,
                "checked_bytes": audit.checked_bytes,
                "damage": audit.damage,
                "adopted": adopted,
                "refused": refused,
            }
        )
    else:
        for item in audit.damage:
            where = item.path or item.object_id or "the tree"
            if item.tree:
                where = f"tree {item.tree}: {where}"
            output.line(
                f"{where}: {item.tensor}: {item.what}" if item.tensor else f"{where}: {item.what}"
            )
        for path in adopted:
            output.line(f"{path}: adopted, its bytes are those that the store was made from")
        for path, difference in refused.items():
            where = f"{path}: {difference.tensor}" if difference.tensor else path
            output.line(f"{where}: not adopted: {difference.what}")
        missing = f", {audit.missing} not made yet" if audit.missing else ""
        output.line(
            f"{counted(audit.checked, 'shard')} checked ({format_bytes(audit.checked_bytes)}){missing}: "
            f"{len(audit.damage) - unread or 'no'} damaged"
            + (f", {unread} unreadable" * bool(unread))
        )
    code = _exit_code(damaged=len(audit.damage) - unread, unread=unread, refused=len(refused))
    if code:
        raise typer.Exit(code)


def _exit_code(*, damaged: int, unread: int, refused: int) -> int:
    """The worst of what was found, 0 for nothing."""
    from fp8fs.errors import SourceChangedError, StoreError, VerifyFailedError

    kinds = (
        (damaged, VerifyFailedError.exit),
        (unread, StoreError.exit),
        (refused, SourceChangedError.exit),
    )
    return next((code for count, code in kinds if count), 0)
