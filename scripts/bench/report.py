"""From lines to what people read: the table on the terminal, docs/BENCHMARKS.md, its JSON and its picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from figure import Figure, Line

__all__ = ["BEGIN", "END", "print_table", "write_json", "write_markdown"]

BEGIN = "<!-- begin: written by make bench -->"
END = "<!-- end: written by make bench -->"


def print_table(lines: Sequence[Line]) -> None:
    """One line per figure, pass or miss first."""
    for line in lines:
        goal = f" (goal {line.goal})" if line.goal else ""
        print(f"{line.verdict:6} {line.figure:4} {line.shown:>10}{goal}  {line.what}", flush=True)
        more = [line.detail] if line.detail else []
        more += [f"spread {line.spread}"] if line.spread else []
        if more:
            print(f"{'':12}{'; '.join(more)}", flush=True)


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """The raw numbers: every sample of every line."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_markdown(
    path: Path,
    figures: Sequence[Figure],
    lines: Sequence[Line],
    machine: Mapping[str, object],
    notes: Sequence[str],
) -> None:
    """Replace what stands between the two marks of the document; the prose around them is people's."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the marks {BEGIN} and {END}")
    body = "\n\n".join(
        ["", _machine(machine), _table(lines), "![The ratios against their goals](benchmarks.svg)"]
        + [note.strip() for note in notes]
        + ["### How each figure is measured", _methods(figures), ""]
    )
    path.write_text(head + BEGIN + body + END + tail, encoding="utf-8")


def _machine(machine: Mapping[str, object]) -> str:
    rows = []
    for key, value in machine.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        rows.append(f"- {key.replace('_', ' ')}: {value}")
    return "\n".join(rows)


def _table(lines: Sequence[Line]) -> str:
    rows = [
        "| | figure | measured | spread | goal | | detail |",
        "|---|---|---:|---:|---|---|---|",
    ]
    rows += [
        f"| {line.figure} | {line.what} | {line.shown} | {line.spread} | {line.goal} | {line.verdict} | {line.detail} |"
        for line in lines
    ]
    return "\n".join(rows)


def _methods(figures: Sequence[Figure]) -> str:
    return "\n".join(f"- **{figure.name}** {figure.title}. {figure.method}" for figure in figures)
