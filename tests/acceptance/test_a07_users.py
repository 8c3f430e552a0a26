"""A7: other users, other namespaces, and many blocked readers at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acceptance.harness import (
    ROOT,
    Fp8fs,
    clean_up,
    digest,
    digests,
    make_checkpoint,
    mount_points,
    servers,
)

pytestmark = pytest.mark.fuse

NOBODY = 65534
OPENERS = 64

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """A folder that every user can enter (pytest's own are private)."""
    folder = Path(tempfile.mkdtemp(prefix="fp8fs-users-"))
    folder.chmod(0o755)
    yield folder
    clean_up(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def installed(public: Path) -> Path:
    """fp8fs installed for the system's own Python, where anybody can read it."""
    venv = public / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", venv], check=True)
    source = public / "package"  # pip builds in the source folder, which must stay clean
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "fp8", "tests")
    )
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", source], check=True)
    subprocess.run(["chmod", "-R", "a+rX", venv], check=True)
    return venv


@pytest.fixture
def open_device() -> Iterator[None]:
    """/dev/fuse open to all, as distributions have it."""
    mode = os.stat("/dev/fuse").st_mode & 0o777
    os.chmod("/dev/fuse", 0o666)
    yield
    os.chmod("/dev/fuse", mode)


@needs_root
@pytest.mark.slow
@pytest.mark.usefixtures("open_device")
@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_nobody_mounts_reads_and_unmounts(public: Path, installed: Path, serve: str) -> None:
    """An unprivileged user with its own store gets the same bytes."""
    home = public / f"nobody-{serve}"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    source = make_checkpoint(public / f"source-{serve}", "wan", "4M")
    private = {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": ""}
    fp8fs = Fp8fs(
        home / "store",
        command=(str(installed / "bin" / "fp8fs"),),
        user=NOBODY,
        env=private,
    )
    dst = home / "view"
    fp8fs.mount(source, dst, "--serve", serve)
    script = (
        "import hashlib, json, os, sys\n"
        "print(json.dumps({os.path.relpath(os.path.join(d, n), sys.argv[1]):"
        " hashlib.sha256(open(os.path.join(d, n), 'rb').read()).hexdigest()"
        " for d, _, names in os.walk(sys.argv[1]) for n in names}))"
    )
    read = subprocess.run(
        ["/usr/bin/python3", "-c", script, dst],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(read.stdout)
    fp8fs.unmount(dst)
    assert mount_points(home) == []
    wanted = digests(Fp8fs(public / f"root-store-{serve}").build(source))
    assert seen == wanted


@needs_root
@pytest.mark.usefixtures("open_device")
@pytest.mark.parametrize("closed", ["store", "above"])
def test_what_nobody_may_not_read_is_said_by_what_reads_it(public: Path, closed: str) -> None:
    """A store of root's alone: a mount serves all the same, build says that it cannot be written. SRC: refused, in a line."""
    if subprocess.run([sys.executable, "-c", "import fp8fs.cli"], user=NOBODY, cwd="/").returncode:
        pytest.skip("nobody may not run this Python")
    place = public / f"closed-{closed}"
    home, vault = place / "home", place / "vault"
    home.mkdir(parents=True)
    os.chown(home, NOBODY, NOBODY)
    vault.mkdir(mode=0o700)
    source = make_checkpoint(place / "source", "llama", "1M")
    private = {"HOME": str(home), "XDG_CACHE_HOME": "", "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": ""}
    store = vault if closed == "store" else vault / "store"
    fp8fs = Fp8fs(store, user=NOBODY, env=private)
    for words in (("build", source), ("ls",), ("gc",)):
        assert "Permission denied" in fp8fs.json(*words, code=22)["error"]["what"]
    findings = {row["what"]: row for row in fp8fs.json("doctor", code=1)["findings"]}
    assert findings["store"]["found"] == f"{store} cannot be written"
    assert fp8fs.json("path", source, code=1) == {"path": None}
    mounted = fp8fs.mount(source, home / "view")
    assert any("nothing is kept" in line for line in mounted["warnings"])
    assert mounted["serve"] == "inline"
    fp8fs.unmount(home / "view")
    for words in (("plan", vault), ("mount", vault, home / "view"), ("verify", vault)):
        fp8fs.store = home / "store"
        error = fp8fs.json(*words, code=10)["error"]
        assert error["what"] == f"{vault}: cannot be listed: Permission denied"
    for form in ("tree", "normalized-cache"):
        copy = fp8fs.json("build", source, "--to", vault / "a" / "b", "--as", form, code=2)
        assert copy["error"]["what"] == f"{vault / 'a'}: Permission denied"
    for words in (("doctor", "--engine", vault / "view"), ("run", vault / "x", "--", "ls", "{}")):
        assert fp8fs.run(*words, code=2 if words[0] == "doctor" else 10).stderr.count("\n") == 1


@needs_root
def test_a_namespace_that_sees_only_the_mount(public: Path) -> None:
    """With DST alone bound into a new root, weights, VAE and tokenizer are all readable."""
    if shutil.which("unshare") is None or shutil.which("chroot") is None:
        pytest.skip("needs unshare and chroot")
    place = public / "namespace"
    place.mkdir()
    fp8fs = Fp8fs(place / "store")
    source, dst, root = make_checkpoint(place / "source", "wan", "12M"), place / "v", place / "r"
    fp8fs.mount(source, dst)
    system = [Path(name) for name in ("/usr", "/lib", "/lib64", "/bin") if Path(name).exists()]
    lines = [f"mount --rbind {dst} {root}/m"]
    (root / "m").mkdir(parents=True)
    for folder in system:
        (root / folder.name).mkdir()
        lines.append(f"mount --bind {folder} {root}/{folder.name}")
    lines.append(f"exec chroot {root} /usr/bin/find -L /m -type f -exec sha256sum {{}} +")
    seen = subprocess.run(
        ["unshare", "-m", "sh", "-ec", "\n".join(lines)], capture_output=True, text=True
    )
    assert seen.returncode == 0, seen.stderr
    inside = {line[66:].removeprefix("/m/"): line[:64] for line in seen.stdout.splitlines()}
    assert inside == digests(dst)
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert inside[vae] == digest(source / vae)
    assert "tokenizer/tokenizer.json" in inside
    fp8fs.unmount(dst)


@needs_root
def test_allow_other_gives_nobody_nothing_that_the_source_denies(public: Path) -> None:
    """A 0600 source stays unreadable to others through the mount, cold and sealed."""
    place = public / "private"
    place.mkdir()
    fp8fs = Fp8fs(place / "store")
    source, dst = make_checkpoint(place / "source", "llama", "2M"), place / "view"
    for path in source.glob("*.safetensors"):
        path.chmod(0o600)
    fp8fs.mount(source, dst, "--allow-other")
    shard = dst / "model-00001-of-00003.safetensors"

    def tried() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/bin/head", "-c", "8", shard],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
        )

    assert "Permission denied" in tried().stderr
    shard.read_bytes()
    assert shard.is_symlink()
    assert "Permission denied" in tried().stderr
    opened = subprocess.run(
        ["/usr/bin/head", "-c", "8", dst / "config.json"],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        check=True,
        capture_output=True,
    )
    assert opened.stdout == (dst / "config.json").read_bytes()[:8]
    fp8fs.unmount(dst)


READER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
while os.read(fd, 1 << 20):
    pass
"""


def first_mebibyte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 20)


def timed(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_nothing_waits_behind_blocked_readers(place: Path, serve: str) -> None:
    """With 64 readers of unmade shards waiting, stat, listing, a warm read and status answer at once.

    Killed, the readers are gone within a second.
    """
    source = make_checkpoint(
        place / "source", "llama", "2G", "--hidden", "512", "--shards", str(OPENERS + 1)
    )
    fp8fs, dst = Fp8fs(place / "store"), place / "view"
    fp8fs.mount(source, dst, "--workers", "1", "--serve", serve, "--scheme", "per_tensor")
    shards = sorted(dst.glob("*.safetensors"))
    warm = shards[0]
    first_mebibyte(warm)
    readers = [
        subprocess.Popen([sys.executable, "-S", "-c", READER, path])
        for path in reversed(shards[1:])
    ]
    try:
        status = dst / ".fp8fs" / "status.json"
        deadline = time.monotonic() + 30
        while json.loads(status.read_bytes())["waiting"] < OPENERS // 2:
            assert time.monotonic() < deadline, "the readers did not get to wait"
            time.sleep(0.01)
        answers: dict[str, list[float]] = {"stat": [], "list": [], "read": [], "status": []}
        for _ in range(10):
            answers["stat"].append(timed(lambda: os.stat(dst / "config.json")))
            answers["list"].append(timed(lambda: os.listdir(dst)))
            answers["read"].append(timed(lambda: first_mebibyte(warm)))
            answers["status"].append(timed(status.read_bytes))
        waiting = sum(reader.poll() is None for reader in readers)
        assert waiting > OPENERS // 4, "too few readers were still waiting to prove anything"
        for what, times in answers.items():
            assert statistics.median(times) < 0.1, (what, times)
        began = time.monotonic()
        for reader in readers:
            with suppress(ProcessLookupError):
                reader.send_signal(signal.SIGKILL)
        for reader in readers:
            reader.wait(5)
        assert time.monotonic() - began < 1.0
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    fp8fs.unmount(dst)
    assert servers(place) == []
