"""A4: kill -9 while filling loses nothing that was finished, and leaves nothing in the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import oracle
from tests.acceptance.harness import (
    Fp8fs,
    digests,
    make_checkpoint,
    mount_points,
    read_chars,
    servers,
    source_bytes,
    wait_for,
)

pytestmark = pytest.mark.fuse

ENOUGH_BYTES = 60 << 20
OVERHEAD_BYTES = 12 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough bytes that one worker is busy for a while."""
    return make_checkpoint(tmp_path_factory.mktemp("a04") / "llama", "llama", "500M")


def kept_and_largest(path: Path) -> tuple[int, int]:
    """Bytes of all kept tensors, and of the largest weight, of one view shard."""
    sizes: dict[bool, list[int]] = {True: [0], False: [0]}
    for entry in oracle.read_header(path)[1].values():
        begin, end = entry["data_offsets"]
        sizes[entry["dtype"] == "F8_E4M3"].append(end - begin)
    return sum(sizes[False]), max(sizes[True])


def staged_bytes(store: Path) -> int:
    """Bytes on disk of shards in the making: grows with every tensor."""
    sizes = []
    for data in store.glob("v1/partial/*/data"):
        try:
            sizes.append(data.stat().st_blocks * 512)
        except FileNotFoundError:  # sealed in between
            continue
    return sum(sizes)


def test_kill_while_filling_then_mount_over_it(fp8fs: Fp8fs, place: Path, source: Path) -> None:
    """Finished tensors are not made again, the bytes are right, one mount remains."""
    dst, store = place / "view", fp8fs.store
    wanted = digests(Fp8fs(place / "other").build(source))
    wanted = {name: value for name, value in wanted.items() if name.endswith(".safetensors")}

    server = fp8fs.mount(source, dst, "--workers", "1")["pid"]
    reader = subprocess.Popen(["cat", dst / sorted(wanted)[0]], stdout=subprocess.DEVNULL)
    wait_for(lambda: staged_bytes(store) > ENOUGH_BYTES)
    os.kill(server, signal.SIGKILL)
    reader.wait()
    assert wait_for(lambda: server not in servers(place))
    staged = staged_bytes(store)
    sealed_early = len(list(store.glob("v1/objects/*/*.safetensors")))
    assert sealed_early < len(wanted)
    assert len(mount_points(dst)) > 1, "the binds were in place when the server died"

    mounted = fp8fs.mount(source, dst, "--workers", "1")
    assert mounted["pid"] != server
    start = read_chars(mounted["pid"])
    assert {name: value for name, value in digests(dst).items() if name in wanted} == wanted
    status = json.loads((dst / ".fp8fs" / "status.json").read_text())
    units = status["units"]
    assert units["reused"] > 0
    assert units["made"] + units["reused"] == units["total"]
    # The first shard's kept tensors come first; what else was staged had two source bytes for each
    # byte. One weight may have been unfinished; the server read back what was staged to check it.
    kept, weight = kept_and_largest(dst / sorted(wanted)[0])
    spared = kept + 2 * (staged - kept - weight)
    read = read_chars(mounted["pid"]) - start
    assert read < source_bytes(source) - spared + staged + OVERHEAD_BYTES
    assert spared - staged > 2 * OVERHEAD_BYTES, "too little was finished to prove anything"

    assert mount_points(dst).count(str(dst)) == 1
    assert servers(place) == [mounted["pid"]]
    fp8fs.unmount(dst)
    assert mount_points(dst) == []
    assert servers(place) == []


def test_unmount_cleans_up_after_kill(fp8fs: Fp8fs, place: Path, source: Path) -> None:
    """``unmount`` takes a dead server's mount and binds away."""
    dst = place / "view"
    server = fp8fs.mount(source, dst)["pid"]
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: server not in servers(place))
    fp8fs.unmount(dst)
    assert mount_points(dst) == []
    fp8fs.run("unmount", dst, code=42)
