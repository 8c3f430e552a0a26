"""From lines to what people read: the table on the terminal, docs/BENCHMARKS.md, its JSON and its picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from figure import Figure, Line

__all__ = ["BEGIN", "END", "print_table", "with_results", "write_json"]

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


def with_results(
    text: str,
    figures: Sequence[Figure],
    lines: Sequence[Line],
    machine: Mapping[str, object],
    notes: Sequence[str],
) -> str:
    """The document with what stands between the two marks replaced; the prose around them is people's."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks the marks {BEGIN} and {END}")
    table = _table(lines, str(machine["commit"]))
    body = "\n\n".join(
        ["", _machine(machine), table, "![The ratios against their goals](benchmarks.svg)"]
        + [note.strip() for note in notes]
        + ["### How each figure is measured", _methods(figures), ""]
    )
    return head + BEGIN + body + END + tail


def _machine(machine: Mapping[str, object]) -> str:
    rows = []
    for key, value in machine.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        rows.append(f"- {key.replace('_', ' ')}: {value}")
    return "\n".join(rows)


def _table(lines: Sequence[Line], commit: str) -> str:
    """Lines that an earlier run left say of which commit they are."""
    rows = [
        "| | figure | measured | spread | goal | | detail |",
        "|---|---|---:|---:|---|---|---|",
    ]
    rows += [
        f"| {line.figure} | {line.what} | {line.shown} | {line.spread} | {line.goal} | {line.verdict} | {line.detail}{_age(line, commit)} |"
        for line in lines
    ]
    return "\n".join(rows)


def _age(line: Line, commit: str) -> str:
    if line.commit == commit:
        return ""
    said = f"measured at {line.commit[:7] or 'an earlier commit'}"
    return f"; {said}" if line.detail else said


def _methods(figures: Sequence[Figure]) -> str:
    return "\n".join(f"- **{figure.name}** {figure.title}. {figure.method}" for figure in figures)
