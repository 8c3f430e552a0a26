"""``python -m tests.fuzz.guided TARGET CORPUS ...``: one target under atheris (see scripts/fuzz)."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["fp8fs.core", "fp8fs.fuse", "fp8fs.source", "fp8fs.store"]
):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.documents import GOOD


def main() -> None:
    """Fuzz, starting from the corpus and the good documents."""
    program, target, found, *rest = sys.argv
    for number, document in enumerate(GOOD[target]):
        Path(found, f"good-{number}").write_bytes(document)
    atheris.Setup([program, found, *rest], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
