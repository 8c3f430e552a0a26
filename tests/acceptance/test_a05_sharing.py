"""A5: two mounts and a build, at once on one store, make each tensor once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.harness import (
    Fp8fs,
    digests,
    make_checkpoint,
    objects,
    read_chars,
    source_bytes,
)

pytestmark = pytest.mark.fuse

BUILD_AND_COUNT = """
import sys
from fp8fs.cli import main
code = main(sys.argv[1:])
print(open("/proc/self/io").read(), file=sys.stderr)
sys.exit(code)
"""


def build_read_chars(process: subprocess.Popen[str]) -> int:
    """Bytes that a finished counting build has read."""
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    match = re.search(r"^rchar: (\d+)$", err, re.MULTILINE)
    assert match is not None
    return int(match[1])


def test_three_at_once_make_each_tensor_once(place: Path) -> None:
    """The three processes together read the source's bytes once, and all show the same result."""
    source = make_checkpoint(place / "llama", "llama", "300M", "--shards", "6")
    fp8fs = Fp8fs(place / "store")
    counting = Fp8fs(fp8fs.store, command=(sys.executable, "-c", BUILD_AND_COUNT))
    views = [place / "one", place / "two"]
    pids = [fp8fs.mount(source, view)["pid"] for view in views]
    before = [read_chars(pid) for pid in pids]
    build = counting.popen("build", source)
    readers = [
        subprocess.Popen(f"cat {view}/*.safetensors > /dev/null", shell=True) for view in views
    ]
    assert [reader.wait(300) for reader in readers] == [0, 0]
    read = build_read_chars(build)
    read += sum(read_chars(pid) - start for pid, start in zip(pids, before, strict=True))

    made = objects(fp8fs.store)
    again = build_read_chars(counting.popen("build", source))
    assert objects(fp8fs.store) == made
    assert len(made) == 6
    # What a build reads that makes nothing (Python's modules, headers) is not the source's weights.
    assert read - again < source_bytes(source) * 1.2
    assert digests(views[0]) == digests(views[1])

    units = [fp8fs.status(view)["units"] for view in views]
    assert sum(unit["made"] for unit in units) <= units[0]["total"]
