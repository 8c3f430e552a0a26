"""``fp8fs run`` and ``fp8fs.mounted``: whatever ends them, nothing stays mounted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.harness import Fp8fs, mount_points, servers, wait_for

pytestmark = pytest.mark.fuse


def mounts_of(src: Path) -> list[str]:
    """Mount points that show SRC, wherever they are."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split(" ")[4] for line in lines if f" fuse.fp8fs {src} " in line]


def test_run_gives_the_commands_code_and_unmounts(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """{} is the mount, options before -- are ours and after it the command's; the code is the command's."""
    src = checkpoint("llama")
    script = 'cat "$1"/config.json && cp "$1"/config.json "$2" && exit 7'
    done = fp8fs.run(
        "run", src, "--scheme", "block", "--", "sh", "-c", script, "sh", "{}", place / "c", code=7
    )
    assert '"weight_block_size"' in done.stdout
    assert "weight_block_size" in (place / "c").read_text()
    assert mounts_of(src) == []


def test_run_as_json_is_one_document(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """With --json stdout holds the document alone: what the command prints goes to stderr, its --json is its own."""
    src = checkpoint("llama")
    done = fp8fs.run("run", src, "--json", "--", "sh", "-c", "ls {}; exit 3", "--json", code=3)
    said = json.loads(done.stdout)
    assert (said["src"], said["exit"], said["command"][0]) == (str(src), 3, "sh")
    assert said["dst"] in said["command"][2]
    assert "config.json" in done.stderr
    empty = place / "empty"
    empty.mkdir()
    refused = fp8fs.run("run", empty, "--json", "--", "ls", "{}", code=10)
    assert json.loads(refused.stdout)["error"]["code"] == "source.invalid"


def test_what_cannot_be_run_is_a_usage_error(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """A file that the kernel does not execute: said in one line, and nothing stays mounted."""
    src = checkpoint("llama")
    script = place / "script"
    script.write_text("no magic\n")
    script.chmod(0o755)
    done = fp8fs.run("run", src, "--", script, "{}", code=2)
    assert done.stderr.startswith(f'error: "{script}" cannot be run')
    assert mounts_of(src) == []


WITH_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of shells start with it ignored
os.execv(sys.executable, [sys.executable, "-m", "fp8fs", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_unmounts(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], number: signal.Signals
) -> None:
    """SIGTERM and SIGHUP end the command; Ctrl-C reaches it by the terminal. Either way we unmount."""
    src, flag = checkpoint("wan"), place / "flag"
    script = f"trap 'exit 3' INT TERM; touch {flag}; while :; do sleep 0.05; done # {{}}"
    fp8fs.command = (sys.executable, "-c", WITH_INTERRUPTS)
    process = fp8fs.popen(
        "run", src, "--", "sh", "-c", script, start_new_session=number == signal.SIGINT
    )
    wait_for(flag.exists)
    assert mounts_of(src)
    if number == signal.SIGINT:  # what a terminal does: the whole foreground group gets it
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (3 if number == signal.SIGINT else 128 + number)
    assert mounts_of(src) == []


def test_mounted_is_a_context_manager(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """The Python API yields the mount's path, passes exceptions on, and leaves nothing behind."""
    src = checkpoint("llama")
    script = (
        "import fp8fs, sys\n"
        "try:\n"
        "    with fp8fs.mounted(sys.argv[1], scheme='block') as path:\n"
        "        assert (path / 'model-00001-of-00003.safetensors').read_bytes()\n"
        "        raise KeyError('mine')\n"
        "except KeyError:\n"
        "    print(path.exists(), path.parent.exists())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, src],
        env=fp8fs.environment(),
        cwd="/",
        check=True,
        text=True,
        capture_output=True,
    )
    assert done.stdout == "False False\n"
    assert mounts_of(src) == []


def test_foreground_stays_until_the_mount_ends(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """``mount --foreground`` serves, and ends cleanly when somebody unmounts."""
    src, dst = checkpoint("llama"), place / "view"
    process = fp8fs.popen("mount", src, dst, "--foreground")
    wait_for(lambda: mount_points(dst))
    wait_for(lambda: dst.is_dir() and any(dst.iterdir()))
    assert (dst / "model-00002-of-00003.safetensors").read_bytes()
    fp8fs.unmount(dst)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert servers(place) == []
