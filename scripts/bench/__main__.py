"""Measure fp8fs against its peers and the machine, on this machine, now.

    make bench                         everything, and docs/BENCHMARKS.md from it
    scripts/bench --quick              1 GB, 3 repetitions, nothing written to docs/
    scripts/bench --only F2,F6         some figures, nothing written to docs/
    scripts/bench --only F2 --out docs some figures, put in the place of their lines in docs/
    scripts/bench --size 8G            another checkpoint

Exit code 1 if one of F1 to F4 misses its goal, else 0: the other goals name what this machine allows.
Needs Python 3.11+, /dev/fuse and about 30 GB below --work; root for the figures that empty the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

from environments import peers_python, subject_python
from figure import Figure, Line, told
from figures_building import against_copy, against_peers, cold_load, growth
from figures_kernels import kernels_alone, one_tensor
from figures_memory import filling_memory
from figures_reading import inline_reads, readers_memory, warm_reads
from figures_starting import commands, mount_empty, mount_warm
from machine import describe, load
from measure import CommandError, can_drop_caches, run
from profile_fill import profile_fill, roofline
from report import print_table, with_results, write_json
from world import INSIDE, World

CLONE = Path(__file__).resolve().parents[2]
DOCS = CLONE / "docs"

FIGURES = (
    Figure("F1", "Warm reads through the mount", warm_reads, must=True),
    Figure("F2", "A cold build against a copy", against_copy, must=True),
    Figure("F3", "A cold build against its peers", against_peers, must=True),
    Figure("F4", "A cold first load through the mount", cold_load, must=True),
    Figure("F5", "The kernels alone", kernels_alone),
    Figure("F6", "A mount on an empty store", mount_empty),
    Figure("F7", "A mount on a complete store", mount_warm),
    Figure("F8", "Commands", commands),
    Figure("F9", "One tensor through a fresh mount", one_tensor),
    Figure("F10", "Memory while filling", filling_memory),
    Figure("F11", "Eight readers", readers_memory),
    Figure("F12", "Inline serving", inline_reads),
    Figure("F13", "Growth", growth),
)


def parse_size(text: str) -> int:
    """Bytes, with an optional K, M, G or T (binary)."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper(), 0)
    try:
        return int(float(text[:-1]) * factor) if factor else int(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 4G") from err


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=parse_size, default=0, help="of the checkpoint (4G)")
    parser.add_argument("--repetitions", type=int, default=0, help="of each sample (5)")
    parser.add_argument("--only", default="", help="figures, with commas between")
    parser.add_argument("--quick", action="store_true", help="1G, 3 repetitions")
    parser.add_argument("--no-peers", action="store_true", help="without F3, F4 and the picture")
    parser.add_argument("--python", type=Path, help="measure the fp8fs of this environment")
    parser.add_argument("--profile", action="store_true", help="only the profile of a cold fill")
    parser.add_argument("--out", type=Path, help="write the documents here")
    cache = os.environ.get("FP8FS_BENCH") or "~/.cache/fp8fs-bench"
    parser.add_argument("--work", type=Path, default=Path(cache).expanduser())
    return parser.parse_args()


def make_world(asked: argparse.Namespace) -> World:
    """Environments made, scratch folder empty, kernels compiled."""
    work: Path = asked.work.absolute()
    scratch = work / f"run-{os.getpid()}"
    scratch.mkdir(parents=True)
    (scratch / "src").mkdir()
    subject = asked.python or subject_python(work / "environments", CLONE)
    peers = None if asked.no_peers else peers_python(work / "environments")
    return World(
        clone=CLONE,
        scratch=scratch,
        subject=subject,
        peers=peers,
        size_bytes=asked.size or (1 << (30 if asked.quick else 32)),
        repetitions=asked.repetitions or (3 if asked.quick else 5),
        quick=asked.quick,
        root=can_drop_caches(),
    )


def measure(world: World, figures: list[Figure]) -> list[Line]:
    """Every line of these figures, printed as it comes. A figure that fails is a miss with its reason."""
    lines: list[Line] = []
    for figure in figures:
        world.say(f"{figure.name} {figure.title} (load {load()})")
        started = time.monotonic()
        try:
            found = figure.measure(world)
            if not found:
                found = [told(figure.name, f"{figure.title}: not measured here", 0.0, "")]
        except (CommandError, RuntimeError, OSError) as err:
            nothing = float("nan")
            found = [Line(figure.name, figure.title, nothing, "", f"failed: {err}", 0.0)]
        world.remove(world.store)
        print_table(found)
        world.say(f"  {time.monotonic() - started:.0f} s")
        lines += found
    return lines


def kept_lines(path: Path, chosen: list[Figure]) -> list[Line]:
    """Lines of an earlier run's document for figures that were not measured now."""
    if not path.exists():
        return []
    names = {figure.name for figure in chosen}
    kept = json.loads(path.read_text(encoding="utf-8"))["lines"]
    known = {field.name for field in fields(Line)}
    return [
        Line(**{key: value for key, value in line.items() if key in known})
        for line in kept
        if line["figure"] not in names
    ]


def main() -> int:
    asked = arguments()
    names = [name.strip().upper() for name in asked.only.split(",") if name.strip()]
    unknown = set(names) - {figure.name for figure in FIGURES}
    if unknown:
        print(f"no such figure: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    world = make_world(asked)
    try:
        world.compile_kernels()
        machine = describe(world)
        roof = roofline(world)
        if asked.profile:
            print(profile_fill(world, roof))
            return 0
        chosen = [figure for figure in FIGURES if not names or figure.name in names]
        lines = [replace(line, commit=str(machine["commit"])) for line in measure(world, chosen)]
        whole = not names and not asked.quick and not asked.no_peers
        out = asked.out or (DOCS if whole else None)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            notes = [profile_fill(world, roof)]
            lines = kept_lines(out / "benchmarks.json", chosen) + lines
            lines.sort(key=lambda line: [figure.name for figure in FIGURES].index(line.figure))
            document = {
                "schema": 1,
                "machine": machine,
                "size_bytes": world.size_bytes,
                "repetitions": world.repetitions,
                "bandwidth_gb_per_s": roof,
                "lines": [line.as_dict() for line in lines],
                "profile": notes[0],
            }
            write_json(out / "benchmarks.json", document)
            if world.peers is not None:
                plot = [INSIDE / "plot.py", out / "benchmarks.json", out / "benchmarks.svg"]
                run([world.peers, *plot], world.env)
            page = out / "BENCHMARKS.md"
            text = (page if page.exists() else DOCS / page.name).read_text(encoding="utf-8")
            page.write_text(with_results(text, FIGURES, lines, machine, notes), encoding="utf-8")
        must = {figure.name for figure in FIGURES if figure.must}
        missed = [line for line in lines if line.verdict == "miss"]
        print(f"{sum(line.verdict == 'pass' for line in lines)} pass, {len(missed)} miss")
        return int(any(line.figure in must for line in missed))
    finally:
        shutil.rmtree(world.scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
