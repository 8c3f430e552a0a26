"""``fp8fs plan``: the whole view and the reason for each tensor, before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
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
    recipe_of,
    store_root,
)
from fp8fs.core.text import brief

if TYPE_CHECKING:
    from fp8fs.assembly import Survey
    from fp8fs.cli.output import Output
    from fp8fs.core.plan import Plan, TensorRow
    from fp8fs.core.splits import Split
    from fp8fs.engine import Findings

__all__ = ["plan"]


def plan(
    src: Src,
    scan: Annotated[
        bool,
        typer.Option("--scan", help="Read the weights too: NaN, Inf, zeros, odd scales."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--tp",
            metavar="N",
            min=1,
            help="Warn of weights that tensor parallelism over N ranks cannot cut as the scheme needs.",
        ),
    ] = None,
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
    """Print the whole view of SRC: each tensor's shape, dtypes, bytes, group and reason."""
    from fp8fs.assembly import survey
    from fp8fs.cli.output import Output
    from fp8fs.core.splits import split_problems, split_warnings

    output = Output(as_json=as_json, quiet=quiet)
    recipe = recipe_of(
        scheme=scheme,
        names=names,
        component=component,
        keep=keep,
        quantize=quantize,
        split_experts=split_experts,
    )
    root = store_root(store)
    findings: Findings | None = None
    found = survey(src.expanduser(), recipe, root, create=scan)
    try:
        if scan:
            findings = _scan(found, device=device, workers=workers, output=output)
            if findings.non_finite:
                found.close()
                found = survey(src.expanduser(), recipe, root)
        problems = split_problems(found.plan, found.checkpoint.components, ranks) if ranks else []
        if as_json:
            output.document(_document(found, findings, ranks, problems))
        else:
            _table(found, output)
            for warning in split_warnings(problems, ranks) if ranks else ():
                output.note(f"warning: {warning}")
            if findings is not None:
                _tell(findings, output)
    finally:
        found.close()


def _scan(found: Survey, *, device: str, workers: int, output: Output) -> Findings:
    from fp8fs.building import scan_values
    from fp8fs.cli.progress import bar

    with bar("reading", found.source_bytes, quiet=output.quiet) as advance:
        done = 0

        def progress(read: int, total: int) -> None:
            nonlocal done
            advance(read - done)
            done = read

        return scan_values(found, device=device, workers=workers, progress=progress)


def _tell(findings: Findings, output: Output) -> None:
    """What a scan found, on stderr: a line for each weight that is kept or holds nothing, one for all odd scales."""
    from fp8fs.core.scale_range import scales_sentence

    for bad in findings.non_finite:
        output.note(f"{bad.tensor}: NaN or Inf at index {bad.index}; recorded, kept as it is")
    for empty in findings.zeros:
        output.note(f"{empty.tensor}: all zero; quantized to zeros")
    if findings.odd_scales:
        output.note(f"warning: {scales_sentence(findings.odd_scales)}")


def _document(
    found: Survey, findings: Findings | None, ranks: int | None, problems: list[Split]
) -> dict[str, object]:
    from fp8fs.core.manifest import plan_document

    return {
        **plan_document(found.plan),
        "recipe": found.recipe,
        "files": [
            {"path": path, "kind": entry.kind, "size": entry.size}
            for path, entry in found.plan.entries.items()
            if path
        ],
        "scanned": findings is not None,
        "non_finite": findings.non_finite if findings is not None else (),
        "zeros": findings.zeros if findings is not None else (),
        "odd_scales": findings.odd_scales if findings is not None else (),
        "tp": ranks,
        "splits": problems,
    }


def _cells(row: TensorRow) -> tuple[str, ...]:
    """The columns of one tensor."""
    name = f"{row.component}/{row.name}" if row.component else row.name
    if row.view_name:
        name = f"{name} -> {row.view_name}"
    changed = row.dtype_in != row.dtype_out
    return (
        brief(name),
        "x".join(map(str, row.shape)),
        f"{row.dtype_in} -> {row.dtype_out}" if changed else row.dtype_in,
        f"{row.bytes_in} -> {row.bytes_out}" if changed else str(row.bytes_in),
        brief(row.group),
        brief(row.reason),
    )


def _table(found: Survey, output: Output) -> None:
    from fp8fs.cli.output import format_bytes

    headings = ("tensor", "shape", "dtype", "bytes", "group", "reason")
    output.table(headings, [_cells(row) for row in found.plan.rows], right=("bytes",))
    output.line("")
    for component, total in _totals(found.plan).items():
        output.line(
            f"{component or '.'}: {total.quantized} of {total.tensors} tensors quantized"
            f" ({found.plan.schemes.get(component, 'no scheme')}), "
            f"{format_bytes(total.bytes_in)} -> {format_bytes(total.bytes_out)}"
        )
    for path, why in found.plan.hidden.items():
        output.line(f"hidden: {path} ({why})")
    for note in found.plan.notes:
        output.line(f"note: {note}")
    for warning in found.plan.warnings:
        output.note(f"warning: {warning}")


@dataclass(slots=True)
class _Total:
    tensors: int = 0
    quantized: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


def _totals(plan: Plan) -> dict[str, _Total]:
    """Sums per component."""
    from fp8fs.core.dtypes import FP8

    totals: dict[str, _Total] = {}
    for row in plan.rows:
        total = totals.setdefault(row.component, _Total())
        total.tensors += 1
        total.quantized += row.dtype_out == FP8
        total.bytes_in += row.bytes_in
        total.bytes_out += row.bytes_out
    return totals
