"""What a mount's owner may make others believe, and what the server keeps of the rights that it was started with."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fp8fs.errors import MountError, NotMountedError
from fp8fs.fuse import session, state, unmount
from fp8fs.fuse.spec import Mounted
from tests.mount.conftest import FakeMount, MountFake, make_source

pytestmark = pytest.mark.fuse

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to play somebody else")


def spec_of(fake: FakeMount, **changes: object) -> session.MountSpec:
    spec = session.MountSpec(
        src=str(fake.src),
        dst=str(fake.dst),
        store=str(fake.store),
        log_path=str(fake.log),
        factory="tests.mount.fakes:factory",
    )
    return msgspec.structs.replace(spec, **changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for state files, as /tmp/fp8fs-UID is: a name in a directory that others write to as well."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    place = shared / "fp8fs-state"
    monkeypatch.setattr(state, "_folders", lambda uid: [str(place)])
    return place


def noted(dst: Path, **facts: object) -> Mounted:
    return Mounted(dst=str(dst), src="/src", live=False, **facts)  # type: ignore[arg-type]


def test_state_is_private_and_comes_back(folder: Path, tmp_path: Path) -> None:
    """The state file holds paths, so that only its owner may read it, under any umask; it is read back, and goes."""
    before = os.umask(0)
    try:
        path = Path(state.write_state(noted(tmp_path / "mnt", plan_id="p")))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    known = state.read_state(str(tmp_path / "mnt"), os.geteuid())
    assert known is not None
    assert known.plan_id == "p"
    state.remove_state(str(tmp_path / "mnt"), os.geteuid())
    assert list(folder.iterdir()) == []


def test_a_folder_behind_a_symlink_is_not_ours(folder: Path, tmp_path: Path) -> None:
    """Whoever puts a symlink where the folder would be makes us neither write, nor believe, nor delete anything."""
    elsewhere = tmp_path / "elsewhere"
    folder.symlink_to(elsewhere)
    elsewhere.mkdir(mode=0o700)
    bait = elsewhere / state._name(str(tmp_path / "mnt"))
    bait.write_bytes(msgspec.json.encode(noted(tmp_path / "mnt")))
    bait.chmod(0o600)
    with pytest.raises(MountError):
        state.write_state(noted(tmp_path / "mnt"))
    assert state.read_state(str(tmp_path / "mnt"), os.geteuid()) is None
    state.remove_state(str(tmp_path / "mnt"), os.geteuid())
    assert list(elsewhere.iterdir()) == [bait]


@needs_root
@pytest.mark.parametrize("trick", ["owner", "group-writable"])
def test_a_folder_of_somebody_else_is_not_ours(folder: Path, tmp_path: Path, trick: str) -> None:
    """A folder that another user owns, or can write to, holds nothing that we believe, and gets nothing."""
    folder.mkdir(mode=0o700)
    bait = folder / state._name(str(tmp_path / "mnt"))
    bait.write_bytes(msgspec.json.encode(noted(tmp_path / "mnt")))
    if trick == "owner":
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder.chmod(0o770)
    with pytest.raises(MountError):
        state.write_state(noted(tmp_path / "mnt"))
    assert state.read_state(str(tmp_path / "mnt"), 0) is None
    state.remove_state(str(tmp_path / "mnt"), 0)
    assert list(folder.iterdir()) == [bait]


@pytest.mark.parametrize("kind", ["fifo", "symlink", "deep", "huge", "list", "wrong", "empty"])
def test_state_that_is_none(folder: Path, tmp_path: Path, kind: str) -> None:
    """Whatever lies under the state file's name is read within bounds, at once, and believed only if it is one."""
    folder.mkdir(mode=0o700)
    path = folder / state._name(str(tmp_path / "mnt"))
    good = msgspec.json.encode(noted(tmp_path / "mnt"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        (tmp_path / "real").write_bytes(good)
        path.symlink_to(tmp_path / "real")
    else:
        texts = {
            "deep": b"[" * 60_000,
            "huge": b" " * (1 << 20) + good,
            "list": b"[]",
            "wrong": msgspec.json.encode(noted(tmp_path / "other")),
            "empty": b"",
        }
        path.write_bytes(texts[kind])
    began = time.monotonic()
    assert state.read_state(str(tmp_path / "mnt"), os.geteuid()) is None
    assert time.monotonic() - began < 1


@needs_root
def test_root_signals_no_process_that_another_user_names(tmp_path: Path) -> None:
    """The state file of nobody's mount names a process of root's: unmount leaves that process alone."""
    victim = subprocess.Popen(["sleep", "60"])
    try:
        known = noted(
            tmp_path, pid=victim.pid, pid_start=state.process_start(victim.pid), uid=NOBODY
        )
        assert not state.alive(known.pid, known.pid_start, NOBODY)
        assert state.alive(known.pid, known.pid_start, 0)
        assert unmount._end_server(known, 0.5) is False
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@needs_root
def test_root_binds_nothing_that_another_user_names(tmp_path: Path) -> None:
    """Binds are put back after a refused unmount for root's own mounts only: others could name any directory."""
    (tmp_path / ".fp8fs" / "tree").mkdir(parents=True)
    known = noted(tmp_path, tree="/etc", bind_src="/etc", uid=NOBODY)
    unmount._attach_again(known, [])
    assert not (tmp_path / ".fp8fs" / "tree" / "passwd").exists()


def test_logs_are_private(mount_fake: MountFake, tmp_path: Path) -> None:
    """Logs name files, so that only their owner may read them, even one that an older umask left open."""
    (tmp_path / "log").touch()
    (tmp_path / "log").chmod(0o644)
    fake = mount_fake()
    assert stat.S_IMODE(fake.log.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["symlink", "fifo", "hard link", "directory"])
def test_log_that_is_something_else(mount_fake: MountFake, tmp_path: Path, kind: str) -> None:
    """A log that leads elsewhere is refused before the mount, and what it leads to is not touched."""
    fake = mount_fake()
    session.unmount(str(fake.dst))
    other = tmp_path / "precious"
    other.write_bytes(b"mine")
    fake.log.unlink()
    {
        "symlink": lambda: fake.log.symlink_to(other),
        "fifo": lambda: os.mkfifo(fake.log),
        "hard link": lambda: fake.log.hardlink_to(other),
        "directory": fake.log.mkdir,
    }[kind]()
    with pytest.raises(MountError, match="log"):
        session.mount(spec_of(fake))
    assert other.read_bytes() == b"mine"
    assert fake.points() == []


def test_names_do_not_forge_log_lines(mount_fake: MountFake, tmp_path: Path) -> None:
    """A name with a newline stays on one line of the log."""
    forged = "x\n2031-01-01 ERROR all is lost"
    src = make_source(tmp_path / "src")
    (src / forged).write_bytes(b"1" * 5000)
    fake = mount_fake(serve="inline")
    with (fake.dst / forged).open("rb", buffering=0) as file:
        os.truncate(src / forged, 1)
        with pytest.raises(OSError, match="Input/output"):
            file.read()
    log = fake.log.read_text()
    assert "all is lost" in log
    assert not any(line.startswith("2031") for line in log.splitlines())


def test_the_server_keeps_little(mount_fake: MountFake, tmp_path: Path) -> None:
    """It holds no descriptor of its parent's, no controlling terminal, no directory, a strict umask, and as root no way to new rights."""
    secret = tmp_path / "secret"
    secret.touch()
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        fake = mount_fake()
    proc = Path(f"/proc/{fake.mounted.pid}")
    held = {os.readlink(link) for link in (proc / "fd").iterdir()}
    assert str(secret) not in held
    assert os.readlink(proc / "cwd") == "/"
    assert os.readlink(proc / "fd/0") == "/dev/null"
    fields = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    assert fields["Umask"] == "0077"
    assert fields["NoNewPrivs"] == ("1" if os.geteuid() == 0 else "0")
    assert os.getsid(fake.mounted.pid) == fake.mounted.pid


def test_spec_is_no_secret_channel(mount_fake: MountFake) -> None:
    """The command line shows DST and nothing else: the spec goes through a pipe."""
    fake = mount_fake()
    words = Path(f"/proc/{fake.mounted.pid}/cmdline").read_bytes().split(b"\0")
    assert os.fsencode(fake.dst) in words
    assert not any(os.fsencode(fake.src) in word for word in words)


HUNG = """
import os, sys, time
import mfusepy
class Hung(mfusepy.Operations):
    use_ns = True
    def getattr(self, path, fh=None):
        if path != "/":
            time.sleep(60)
        return {"st_mode": 0o40755, "st_nlink": 2}
mfusepy.FUSE(Hung(), sys.argv[1], foreground=True, subtype="fp8fs", fsname="x")
"""


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A mount that calls itself ours and never answers."""
    dst = tmp_path / "hung"
    dst.mkdir()
    environment = {**os.environ, "FUSE_LIBRARY_PATH": "libfuse3.so.3"}
    server = subprocess.Popen([sys.executable, "-c", HUNG, dst], env=environment)
    end = time.monotonic() + 10
    while not any(m.dst == str(dst) for m in _mounts()) and time.monotonic() < end:
        time.sleep(0.05)
    yield dst
    server.kill()
    server.wait()
    subprocess.run(["umount", "-l", dst], check=False, capture_output=True)


def _mounts() -> list[Mounted]:
    return session.list_mounts()


def test_a_mount_that_never_answers_hangs_nobody(
    hung: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's program may call its mount ours: listing, status and unmount end in time all the same."""
    monkeypatch.setattr(session, "_STATUS_S", 0.5)
    began = time.monotonic()
    with pytest.raises(MountError, match="no status"):
        session.read_status(str(hung))
    session.unmount(str(hung), lazy=True)
    with pytest.raises(NotMountedError):
        session.find_mount(str(hung))
    assert time.monotonic() - began < 10


def test_a_server_killed_before_it_was_ready_leaves_nothing(
    mount_fake: MountFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server dies between mounting and answering, the dead mount goes with the failed command."""
    fake = mount_fake()
    session.unmount(str(fake.dst))
    with pytest.raises(MountError, match="before it was ready"):
        session.mount(spec_of(fake, factory="tests.mount.test_trust:dying"))
    assert fake.points() == []
    assert not fake.dst.exists()


def dying(spec: session.MountSpec, *, bound: bool) -> object:
    """A server that mounts and is gone before the launcher hears of it."""
    import fp8fs.fuse.server as server
    from tests.mount.fakes import factory

    def die(*_arguments: object, **_options: object) -> None:
        os.kill(os.getpid(), 9)

    server._attach = die  # type: ignore[assignment]
    return factory(spec, bound=bound)


def test_status_says_stale(mount_fake: MountFake, capfd: pytest.CaptureFixture[str]) -> None:
    """``fp8fs status`` lists a mount whose server was killed as stale, and with --json as not live."""
    fake = mount_fake()
    os.kill(fake.mounted.pid, 9)
    os.waitpid(fake.mounted.pid, 0)
    command = [sys.executable, "-m", "fp8fs", "status"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert any("stale" in line for line in said.splitlines() if str(fake.dst) in line)
    listed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    found = {mount["dst"]: mount["live"] for mount in json.loads(listed)["mounts"]}
    assert found[str(fake.dst)] is False
    one = subprocess.run([*command, str(fake.dst)], capture_output=True, text=True, check=False)
    assert one.returncode == NotMountedError.exit
    assert f"unmount {fake.dst}" in one.stderr
