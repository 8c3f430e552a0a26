"""What loaders do to the file system: their system calls on a cold view, against ``system_calls.json``.

A difference means that a release does something new: see that the view serves it, then write it down.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loader import harness
from tests.loader.forks import ForkedScripts
from tests.loader.mounts import MountedView
from tests.loader.omni import Omni
from tests.loader.system_calls import read_calls

pytestmark = [pytest.mark.loader, pytest.mark.fuse, pytest.mark.slow]

EXPECTED: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("system_calls.json").read_text()
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Calls of several threads are put together, advice is laid to the file that it is about, other files are left out."""
    shard, record = tmp_path / "a.safetensors", tmp_path / "strace.txt"
    shard.write_bytes(bytes(10))
    record.write_text(
        f"""7 openat(AT_FDCWD</>, "{shard}", O_RDWR|O_CLOEXEC <unfinished ...>
8 openat(AT_FDCWD</>, "/etc/hosts", O_RDONLY) = 4</etc/hosts>
7 <... openat resumed>) = 3<{shard}>
7 mmap(NULL, 10, PROT_READ, MAP_SHARED, 3<{shard}>, 0) = 0x7000
8 mmap(NULL, 10, PROT_READ, MAP_SHARED, 4</etc/hosts>, 0) = 0x9000
8 madvise(0x7000, 10, MADV_WILLNEED) = 0
8 madvise(0x9000, 10, MADV_SEQUENTIAL) = 0
7 pread64(3<{shard}>, "", 4, 2) = 4
7 newfstatat(AT_FDCWD</>, "{tmp_path}/b.json", 0x7ffc, 0) = -1 ENOENT (No such file or directory)
"""
    )
    assert read_calls(record, tmp_path) == {
        "shards": [
            "madvise MADV_WILLNEED",
            "mmap PROT_READ MAP_SHARED whole",
            "open O_RDWR|O_CLOEXEC",
            "pread",
        ],
        "files": [],
        "folders": [],
        "absent": ["b.json"],
    }


@pytest.fixture
def recorded(
    mounted: Callable[..., MountedView], llm_source: Callable[[str], Path], tmp_path: Path
) -> Callable[..., dict[str, list[str]]]:
    """``recorded(run)``: the calls on a cold view, of Llama if not told otherwise, while ``run(view, *options,
    workdir=...)`` reads it."""
    if shutil.which("strace") is None:
        harness.skip_or_fail("strace is not installed", "strace")

    def record(run: Callable[..., Any], source: Path | None = None) -> dict[str, list[str]]:
        view, output = mounted(source or llm_source("llama")), tmp_path / "strace.txt"
        run(view.path, "--strace", output, workdir=tmp_path / "run")
        view.assert_made_once()
        return read_calls(output, view.path)

    return record


@pytest.mark.parametrize("reader", ["mmap", "pread", "fastsafetensors", "runai"])
def test_readers_do_to_a_view_what_is_known(
    reader: str, recorded: Callable[..., dict[str, list[str]]]
) -> None:
    """A reader of safetensors makes the calls that are written down for it, and no others."""

    def run(folder: Path, *options: object, workdir: Path) -> None:
        arguments = (folder, "--reader", reader, *options)
        harness.run_script("vllm", "read_tensors.py", *arguments, workdir=workdir)

    found = recorded(run)
    assert {kind: found[kind] for kind in ("shards", "files")} == EXPECTED[reader]


def test_transformers_does_to_a_view_what_is_known(
    recorded: Callable[..., dict[str, list[str]]],
    transformers: ForkedScripts,
    llm_source: Callable[[str], Path],
) -> None:
    """transformers makes the calls that are written down for it, and no others."""

    def run(folder: Path, *options: object, workdir: Path) -> None:
        arguments = (llm_source("llama"), folder, *options)
        transformers.run("hf_logits", *arguments, workdir=workdir)

    assert recorded(run) == EXPECTED["transformers"]


def test_vllm_does_to_a_view_what_is_known(
    recorded: Callable[..., dict[str, list[str]]], vllm: ForkedScripts
) -> None:
    """vLLM makes the calls that are written down for it, and no others."""

    def run(folder: Path, *options: object, workdir: Path) -> None:
        vllm.run("vllm_generate", folder, *options, workdir=workdir)

    assert recorded(run) == EXPECTED["vllm"]


def test_vllm_omni_does_to_a_view_what_is_known(
    recorded: Callable[..., dict[str, list[str]]],
    omni: Omni,
    omni_source: Callable[[str], tuple[Path, dict[str, Any]]],
    plugin: Path,
) -> None:
    """DLO makes the calls that are written down for it while it maps a pipeline, and no others; what the run itself reads
    to compare, by safetensors and config, is among them."""

    def run(folder: Path, *options: object, workdir: Path) -> None:
        (result,) = omni.load(folder, *options, model="h3", world=1, workdir=workdir, site=plugin)
        assert result["mapped"]

    assert recorded(run, omni_source("h3")[0]) == EXPECTED["vllm-omni"]
