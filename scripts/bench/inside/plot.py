"""benchmarks.json to benchmarks.svg: JSON SVG. Every judged line as a bar of how far within its goal it is."""

from __future__ import annotations

import json
import sys

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"pass": "#2a7f4f", "miss": "#b3382c"}


def main() -> None:
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        document = json.load(file)
    lines = [line for line in document["lines"] if line["limit"] and line["value"] == line["value"]]
    lines.reverse()
    plt.rcParams.update({"svg.hashsalt": "fp8fs", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(lines) + 1.2))
    for at, line in enumerate(lines):
        used = line["value"] / line["limit"]
        if line["sense"] == ">=":
            used = 1 / used if used else float("inf")
        axes.barh(at, min(used, 1.6), color=COLOURS[line["verdict"]], height=0.62)
        unit = {"ratio": "", "times": "x"}.get(line["unit"], f" {line['unit']}")
        label = f"{line['value']:.3g}{unit}  (goal {line['sense']} {line['limit']:g}{unit})"
        axes.text(min(used, 1.6) + 0.01, at, label, va="center")
    axes.set_yticks(range(len(lines)), [f"{ln['figure']}  {ln['what']}" for ln in lines])
    axes.axvline(1.0, color="#444", linewidth=1)
    axes.set_xlim(0, 2.0)
    axes.set_xlabel("share of the goal that is used up: shorter is better, 1 is the goal")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    machine = document["machine"]
    axes.set_title(f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit'][:10]}")
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
