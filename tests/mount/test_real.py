"""The real rooms behind a mount: permissions, and an end in the middle of the work."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from fp8fs.errors import NotMountedError
from fp8fs.fuse import session
from scripts.make_checkpoint import main as make_checkpoint
from tests.builders import llama_like
from tests.mount.conftest import finish, python, until

pytestmark = pytest.mark.fuse

READ = "import sys\nprint(len(open(sys.argv[1], 'rb').read()))"


@pytest.fixture
def place(tmp_path: Path, no_mount_left: None) -> Iterator[Path]:
    yield tmp_path
    with contextlib.suppress(NotMountedError):
        session.unmount(str(tmp_path / "mnt"), lazy=True)


def spec_of(place: Path, **options: object) -> session.MountSpec:
    fields = {"src": "src", "dst": "mnt", "store": "store", "log_path": "log"}
    paths = {name: str(place / below) for name, below in fields.items()}
    return session.MountSpec(**paths, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_others_read_no_private_source(place: Path, serve: str) -> None:
    """With --allow-other somebody else reads what SRC lets everybody read, and no shard of a 0600 source, cold or sealed."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    for folder in (place, *place.parents[:2]):
        folder.chmod(0o755)
    llama_like(place / "src", shards=2)
    for path in (place / "src").iterdir():
        path.chmod(0o644)
    first, second = sorted(path.name for path in (place / "src").glob("*.safetensors"))
    (place / "src" / first).chmod(0o600)
    mounted = session.mount(spec_of(place, serve=serve, allow_other=True))

    def as_nobody(name: str) -> int:
        """Exit code of a reader that is nobody."""
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat", f"{mounted.dst}/{name}"]  # fmt: skip
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode

    assert as_nobody("config.json") == 0
    assert as_nobody(first) != 0
    assert as_nobody(second) == 0
    Path(mounted.dst, first).read_bytes()
    assert as_nobody(first) != 0
    assert as_nobody(f".fp8fs/tree/{first}") != 0
    assert as_nobody(second) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_in_the_middle_of_a_fill(place: Path, number: int) -> None:
    """A server that is ended while readers wait takes them with it; the next mount of the same command finishes the work."""
    make_checkpoint([str(place / "src"), "--size", "120M", "--shards", "2"])
    mounted = session.mount(spec_of(place, workers=1))
    shards = sorted(Path(mounted.dst).glob("*.safetensors"))
    readers = [python(READ, shards[0]) for _ in range(4)]
    made = place / "store/v1/partial"
    assert until(lambda: any(made.iterdir()), 30)
    start = time.monotonic()
    os.kill(mounted.pid, number)
    os.waitpid(mounted.pid, 0)
    assert time.monotonic() - start < 5
    for reader in readers:
        reader.communicate(timeout=10)
    again = session.mount(spec_of(place))
    for shard in shards:
        with safe_open(shard, "np") as file:
            assert len(list(file.keys())) > 10
    assert until(lambda: session.read_status(again.dst)["shards"] == {"total": 2, "sealed": 2})
    assert session.read_status(again.dst)["errors"] == []
    assert not session.unmount(again.dst).stale


def test_tool_imports_stay_light(place: Path) -> None:
    """The launcher imports neither the FUSE binding nor kernels nor numpy nor torch."""
    code = "import sys, fp8fs.fuse.session\nprint([m for m in ('mfusepy', 'numba', 'numpy', 'torch', 'fp8fs.engine') if m in sys.modules])"  # fmt: skip
    assert finish(python(code)) == "[]"


def test_server_is_light(place: Path) -> None:
    """A server that fills on the CPU never loads torch."""
    llama_like(place / "src")
    mounted = session.mount(spec_of(place))
    for shard in Path(mounted.dst).glob("*.safetensors"):
        shard.read_bytes()
    maps = Path(f"/proc/{mounted.pid}/maps").read_text()
    assert "torch" not in maps
