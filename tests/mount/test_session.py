"""Mounting, finding and unmounting: what is refused, what is cleaned up, what is reported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fp8fs.cli import main
from fp8fs.errors import (
    Fp8fsError,
    MountError,
    MountPointError,
    NonFiniteTensorError,
    NotMountedError,
    UsageError,
)
from fp8fs.fuse import session
from fp8fs.fuse import unmount as unmounting
from fp8fs.fuse.mountinfo import read_mountinfo
from tests.mount.conftest import (
    REPOSITORY,
    SIZES,
    FakeMount,
    MountFake,
    end_process,
    finish,
    make_source,
    python,
    until,
)
from tests.mount.fakes import pattern

pytestmark = pytest.mark.fuse

FIRST = "model-1.safetensors"
HOLD = "import sys, time\nfile = open(sys.argv[1], 'rb')\nprint('open', flush=True)\ntime.sleep(60)"


def spec_of(fake: FakeMount, **changes: object) -> session.MountSpec:
    spec = session.MountSpec(
        src=str(fake.src),
        dst=str(fake.dst),
        store=str(fake.store),
        log_path=str(fake.log),
        factory="tests.mount.fakes:factory",
    )
    return msgspec.structs.replace(spec, **changes)


def ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0] == "Z"
    except FileNotFoundError:
        return True


def test_mount_and_unmount(mount_fake: MountFake) -> None:
    """After unmount there is no mount, no bind, no server, no directory that mount had made; and again works."""
    for _ in range(2):
        fake = mount_fake()
        assert fake.mounted.live
        assert fake.mounted.created_dst
        if os.geteuid() == 0:
            below = {f"{fake.dst}/.fp8fs/tree", f"{fake.dst}/.fp8fs/src"}
            assert set(fake.points()) == {str(fake.dst), *below}
            options = {m.point: m.options for m in read_mountinfo()}
            for point in below:
                assert {"ro", "nosuid", "nodev"} <= set(options[point].split(","))
        report = session.unmount(str(fake.dst))
        assert (report.stale, report.killed, report.held_by) == (False, False, ())
        assert fake.points() == []
        assert ended(fake.mounted.pid)
        assert not fake.dst.exists()


def test_existing_directory_stays(mount_fake: MountFake, tmp_path: Path) -> None:
    """A directory that was there before the mount is there after it, with its mode."""
    (tmp_path / "mnt").mkdir(mode=0o750)
    fake = mount_fake()
    session.unmount(str(fake.dst))
    assert (tmp_path / "mnt").stat().st_mode & 0o777 == 0o750


def test_mounts_are_found_by_any_spelling(mount_fake: MountFake, tmp_path: Path) -> None:
    """find, list and unmount agree, through symlinks and relative paths too."""
    fake = mount_fake()
    (tmp_path / "link").symlink_to(fake.dst)
    relative = os.path.relpath(fake.dst)
    for spelling in (str(fake.dst), f"{fake.dst}/", relative, str(tmp_path / "link")):
        assert session.find_mount(spelling) == fake.mounted
    assert fake.mounted in session.list_mounts()
    session.unmount(str(tmp_path / "link"))
    assert fake.points() == []


def test_odd_names(mount_fake: MountFake) -> None:
    """Spaces, commas, backslashes and newlines in SRC and DST work, and show as they are."""
    fake = mount_fake("a b,c=\\d\n\u00e9")
    mount = next(m for m in read_mountinfo() if m.point == str(fake.dst))
    assert mount.source == str(fake.src)
    assert session.read_status(str(fake.dst))["pid"] == fake.mounted.pid
    assert session.unmount(str(fake.dst)).dst == str(fake.dst)


@pytest.mark.parametrize("what", ["not empty", "not a directory", "inside SRC", "SRC inside", "store inside SRC", "store inside DST", "in a store", "no parent"])  # fmt: skip
def test_places_are_refused(tmp_path: Path, what: str) -> None:
    """Each impossible DST or store is one MountPointError, and nothing is mounted or made."""
    src = make_source(tmp_path / "src")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    dst, store = {
        "not empty": ("full", "store"),
        "not a directory": ("file", "store"),
        "inside SRC": ("src/empty", "store"),
        "SRC inside": (".", "store"),
        "store inside SRC": ("mnt", "src/store"),
        "store inside DST": ("mnt", "mnt/store"),
        "in a store": ("store/mnt", "store"),
        "no parent": ("no/mnt", "store"),
    }[what]
    before = sorted(tmp_path.rglob("*"))
    spec = session.MountSpec(
        src=str(src), dst=str(tmp_path / dst), store=str(tmp_path / store), factory="none:none"
    )
    with pytest.raises(MountPointError):
        session.mount(spec)
    assert sorted(tmp_path.rglob("*")) == before


def test_choices_are_checked(tmp_path: Path) -> None:
    """Unknown or contradicting options are usage errors before anything happens."""
    src = make_source(tmp_path / "src")
    for options in ({"serve": "x"}, {"grain": "x"}, {"grain": "tensor"}):
        spec = session.MountSpec(src=str(src), dst=str(tmp_path / "m"), store="", **options)
        with pytest.raises(UsageError):
            session.mount(spec)
    assert not (tmp_path / "m").exists()


def test_second_mount_is_refused(mount_fake: MountFake) -> None:
    """A live mount is not covered by another."""
    fake = mount_fake()
    with pytest.raises(MountPointError, match="already mounted"):
        session.mount(spec_of(fake))
    assert session.find_mount(str(fake.dst)).pid == fake.mounted.pid


def test_mounts_at_once(mount_fake: MountFake) -> None:
    """Of several mounts started at the same moment on one directory exactly one wins; the others say so."""
    fake = mount_fake()
    session.unmount(str(fake.dst))
    fake.dst.mkdir()
    text = json.dumps(msgspec.to_builtins(spec_of(fake)))
    racers = [python(RACER, text) for _ in range(4)]
    answers = sorted(finish(racer) for racer in racers)
    assert answers == ["MountPointError"] * 3 + ["mounted"]
    assert fake.points().count(str(fake.dst)) == 1
    session.unmount(str(fake.dst))
    fake.dst.rmdir()


RACER = """
import json, sys, msgspec
from fp8fs.fuse import session
from fp8fs.errors import Fp8fsError
try:
    session.mount(msgspec.convert(json.loads(sys.argv[1]), session.MountSpec))
    print("mounted")
except Fp8fsError as err:
    print(type(err).__name__)
"""


def test_read_ahead(mount_fake: MountFake, tmp_path: Path) -> None:
    """Root asks for large requests where whole shards are made, and leaves the kernel's default where tensors are."""
    if os.geteuid() != 0:
        pytest.skip("only root may")
    found = []
    for name, options in {"shard": {}, "tensor": {"serve": "inline", "grain": "tensor"}}.items():
        fake = mount_fake(name, **options)
        device = next(m.device for m in read_mountinfo() if m.point == str(fake.dst))
        found.append(int(Path(f"/sys/class/bdi/{device}/read_ahead_kb").read_text()))
    assert found == [1024, 128]


def test_nothing_mounted(tmp_path: Path) -> None:
    """Unmounting or asking about what is no mount of ours is NotMountedError."""
    for path in (tmp_path, tmp_path / "missing", Path("/proc")):
        with pytest.raises(NotMountedError):
            session.unmount(str(path))
        with pytest.raises(NotMountedError):
            session.read_status(str(path))


def failing(spec: session.MountSpec, *, bound: bool) -> object:
    raise NonFiniteTensorError('a.b: tensor "x" is bad', hint="--keep x", index=7)


def crashing(spec: session.MountSpec, *, bound: bool) -> object:
    raise RuntimeError("oops")


def test_errors_of_the_server_arrive(mount_fake: MountFake, tmp_path: Path) -> None:
    """What the server meets before it is ready is raised here: class, hint, facts; and nothing is left."""
    fake = mount_fake()
    session.unmount(str(fake.dst))
    with pytest.raises(NonFiniteTensorError) as caught:
        session.mount(spec_of(fake, factory="tests.mount.test_session:failing"))
    assert caught.value.as_dict() == {
        "code": "quant.nonfinite",
        "what": 'a.b: tensor "x" is bad',
        "hint": "--keep x",
        "facts": {"index": 7},
    }
    with pytest.raises(Fp8fsError, match="RuntimeError: oops"):
        session.mount(spec_of(fake, factory="tests.mount.test_session:crashing"))
    assert not fake.dst.exists()
    assert "Traceback" in fake.log.read_text()


def test_mount_over_a_dead_one(mount_fake: MountFake) -> None:
    """After kill -9 with binds in place the same command mounts again; nothing of the dead mount remains."""
    fake = mount_fake()
    fake.release(0)
    (fake.dst / FIRST).read_bytes()
    end_process(fake.mounted.pid)
    assert not session.find_mount(str(fake.dst)).live
    with pytest.raises(NotMountedError):
        session.read_status(str(fake.dst))
    again = mount_fake()
    assert again.mounted.created_dst  # as the dead one had
    assert len(again.points()) == len(set(again.points()))
    assert (again.dst / FIRST).read_bytes() == pattern(0, SIZES[FIRST])
    session.unmount(str(again.dst))
    assert again.points() == []


def test_unmount_of_a_dead_one(mount_fake: MountFake) -> None:
    """A dead mount goes, binds and all, and the report says that it was dead; without its state file too."""
    for known in (True, False):
        fake = mount_fake()
        end_process(fake.mounted.pid)
        if not known:
            for state in state_files(fake):
                state.unlink()
        assert session.unmount(str(fake.dst)).stale
        assert fake.points() == []


def state_files(fake: FakeMount) -> list[Path]:
    folders = [
        Path("/run/fp8fs"),
        *Path("/tmp").glob("fp8fs-*"),
        *Path("/run/user").glob("*/fp8fs"),
    ]
    files = [path for folder in folders if folder.is_dir() for path in folder.glob("*.json")]
    return [path for path in files if json.loads(path.read_bytes())["dst"] == str(fake.dst)]


def test_busy_mount_names_its_users(mount_fake: MountFake) -> None:
    """Unmount refuses while a process reads, through the handoff too, and leaves the mount whole; lazy does not wait."""
    fake = mount_fake()
    fake.release()
    for name in ("tokenizer.txt", FIRST):
        holder = python(HOLD, fake.dst / name)
        assert holder.stdout is not None
        holder.stdout.readline()
        points = fake.points()
        with pytest.raises(MountPointError, match=f"in use by pid {holder.pid}"):
            session.unmount(str(fake.dst))
        assert sorted(fake.points()) == sorted(points)
        assert (fake.dst / "model-2.safetensors").read_bytes() == pattern(1, 700_000)
        holder.kill()
        holder.communicate()
    holder = python(HOLD, fake.dst / "tokenizer.txt")
    assert holder.stdout is not None
    holder.stdout.readline()
    report = session.unmount(str(fake.dst), lazy=True)
    assert (report.users, fake.points()) == ((holder.pid,), [])
    assert ended(fake.mounted.pid)
    holder.kill()
    holder.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_signals_end_the_server(mount_fake: MountFake, number: int, serve: str) -> None:
    """A signal to the server takes mount, binds and directory away within 5 s though readers are blocked; it exits 0."""
    fake = mount_fake(serve=serve)
    reader = python("import sys; open(sys.argv[1], 'rb').read(10)", fake.dst / FIRST)
    assert not until(lambda: reader.poll() is not None, 0.3)
    start = time.monotonic()
    os.kill(fake.mounted.pid, number)
    _, status = os.waitpid(fake.mounted.pid, 0)
    assert time.monotonic() - start < 5
    assert os.waitstatus_to_exitcode(status) == 0
    assert fake.points() == []
    assert not fake.dst.exists()
    assert state_files(fake) == []
    reader.communicate(timeout=5)
    assert reader.returncode != 0


def test_umount_by_hand_ends_the_server(mount_fake: MountFake) -> None:
    """Plain umount -R, or fusermount3 -u, is understood too."""
    fake = mount_fake(serve="inline")
    subprocess.run(["umount", "-R", fake.dst], check=True)
    assert until(lambda: ended(fake.mounted.pid), 5)
    assert state_files(fake) == []


@pytest.mark.parametrize("readable", [True, False])
def test_other_namespaces_are_reported(
    mount_fake: MountFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """Unmount says which process's namespace still shows the mount, even if it may not see which namespace that is."""
    if os.geteuid() != 0:
        pytest.skip("needs mount namespaces")
    (tmp_path / "mnt").mkdir()  # one that mount has made is removed, which detaches it everywhere
    fake = mount_fake()
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        "echo in; exec sleep 60",
    ]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    if not readable:
        hide_namespaces(monkeypatch)
    report = session.unmount(str(fake.dst))
    assert report.held_by == (holder.pid,)
    assert ended(fake.mounted.pid)
    holder.kill()
    holder.communicate()


ELSEWHERE = """
import json, sys, msgspec
from fp8fs.fuse import session
print(session.mount(msgspec.convert(json.loads(sys.argv[1]), session.MountSpec)).pid)
"""


def test_a_mount_in_a_namespace_that_is_left_can_be_found_and_ended(
    mount_fake: MountFake, capsys: pytest.CaptureFixture[str]
) -> None:
    """``unshare -m``, a mount, and the shell ends: status tells the server from those here, SIGTERM ends it."""
    if os.geteuid() != 0:
        pytest.skip("needs mount namespaces")
    fake = mount_fake()
    assert fake.dst not in [Path(m.dst) for m in session.list_elsewhere(session.list_mounts())]
    session.unmount(str(fake.dst))
    shell = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", ELSEWHERE]
    said = subprocess.run(
        [*shell, json.dumps(msgspec.to_builtins(spec_of(fake)))], check=True, capture_output=True
    )
    pid = int(said.stdout)
    try:
        mounts = session.list_mounts()
        assert str(fake.dst) not in [mounted.dst for mounted in mounts]
        assert (str(fake.dst), pid) in [(m.dst, m.pid) for m in session.list_elsewhere(mounts)]
        assert main(["status"]) == 0
        assert f"{fake.dst}  in another mount namespace" in capsys.readouterr().out
        with pytest.raises(NotMountedError, match=f"kill {pid} ends it"):
            session.find_mount(str(fake.dst))
    finally:
        os.kill(pid, signal.SIGTERM)
    assert until(lambda: ended(pid))
    assert state_files(fake) == []
    assert str(fake.dst) not in [m.dst for m in session.list_elsewhere([])]


def hide_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an unprivileged user sees of other users' processes."""
    monkeypatch.setattr(unmounting, "_namespace", lambda pid: "ours" if pid == "self" else "")


def test_processes_of_this_namespace_hold_nothing(
    mount_fake: MountFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose namespace is not for us to see, and is ours, is not said to be in another one."""
    if os.geteuid() != 0:
        pytest.skip("needs bind mounts")
    fake = mount_fake(serve="inline")
    (tmp_path / "again").mkdir()
    subprocess.run(["mount", "--bind", fake.dst, tmp_path / "again"], check=True)
    try:
        hide_namespaces(monkeypatch)
        assert session.unmount(str(fake.dst)).held_by == ()
    finally:
        subprocess.run(["umount", "-l", tmp_path / "again"], check=True)


FOREGROUND = """
import json, sys, msgspec
from fp8fs.fuse import session
spec = msgspec.convert(json.loads(sys.argv[1]), session.MountSpec)
code = session.mount_foreground(spec, on_ready=lambda m: print("ready", m.pid, flush=True), on_tick=lambda m: None)
print("code", code)
"""


@pytest.mark.parametrize("end", ["signal", "unmount", "kill"])
def test_foreground(mount_fake: MountFake, end: str) -> None:
    """In the foreground the launcher stays, passes signals on and logs to stderr; if it dies, the mount goes too."""
    fake = mount_fake()
    session.unmount(str(fake.dst))
    launcher = python(FOREGROUND, json.dumps(msgspec.to_builtins(spec_of(fake))))
    assert launcher.stdout is not None
    word, pid = launcher.stdout.readline().split()
    assert word == "ready"
    assert session.find_mount(str(fake.dst)).pid == int(pid)
    if end == "signal":
        launcher.send_signal(signal.SIGINT)
    elif end == "unmount":
        session.unmount(str(fake.dst))
    else:
        launcher.kill()
    out, err = launcher.communicate(timeout=10)
    assert "serving" in err
    assert end == "kill" or out == "code 0\n"
    assert until(lambda: ended(int(pid)) and fake.points() == [])


@pytest.fixture
def nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of nobody's, with /dev/fuse open to all as distributions have it."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    try:
        finish(python("import fp8fs", user=65534, group=65534, extra_groups=[], cwd="/"))
    except (OSError, AssertionError):
        pytest.skip("nobody cannot run this interpreter; tests/acceptance brings one of its own")
    mode = os.stat("/dev/fuse").st_mode & 0o777
    os.chmod("/dev/fuse", 0o666)
    folder = Path("/tmp") / f"fp8fs-pytest-nobody-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    yield folder
    os.chmod("/dev/fuse", mode)
    shutil.rmtree(folder)
    shutil.rmtree("/tmp/fp8fs-65534", ignore_errors=True)


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from tests.mount.conftest import make_source, SIZES
from tests.mount.fakes import pattern
from fp8fs.fuse import session
from fp8fs.errors import MountError
base = Path(sys.argv[1])
src = make_source(base / "src")
spec = session.MountSpec(src=str(src), dst=str(base / "mnt"), store=str(base / "store"), serve=sys.argv[2], log_path=str(base / "log"), factory="tests.mount.fakes:factory")
for shard in range(len(SIZES)):
    (src / "gates" / str(shard)).touch()
mounted = session.mount(spec)
for number, (name, size) in enumerate(SIZES.items()):
    assert (base / "mnt" / name).read_bytes() == pattern(number, size), name
assert (base / "mnt/vae/vae.safetensors").read_bytes() == pattern(99, 2_000_000)
print(os.path.islink(base / "mnt" / "model-1.safetensors"), mounted.uid)
assert session.read_status(str(base / "mnt"))["pid"] == mounted.pid
report = session.unmount(str(base / "mnt"))
print(report.stale, report.killed, (base / "mnt").exists())
"""


@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_without_root(nobody: Path, serve: str) -> None:
    """An ordinary user mounts, reads everything and unmounts; with the handoff through absolute links."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(nobody)}
    environment.pop("XDG_RUNTIME_DIR", None)
    out = finish(
        python(
            UNPRIVILEGED,
            nobody,
            serve,
            user=65534,
            group=65534,
            extra_groups=[],
            env=environment,
            cwd="/",
        ),
        60,
    )
    assert out.splitlines() == [f"{serve == 'handoff'} 65534", "False False False"]


def test_allow_other_needs_permission(nobody: Path) -> None:
    """Without root and without user_allow_other the refusal comes before the mount and names the remedy."""
    code = UNPRIVILEGED.replace("serve=sys.argv[2]", "allow_other=True").replace(
        "mounted = session.mount(spec)",
        "try:\n    session.mount(spec)\nexcept MountError as err:\n    print(err)\n    sys.exit()",
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(nobody)}
    conf = Path("/etc/fuse.conf")
    if conf.exists() and "\nuser_allow_other" in conf.read_text():
        pytest.skip("allowed on this machine")
    out = finish(python(code, nobody, "x", user=65534, group=65534, extra_groups=[], env=environment, cwd="/"))  # fmt: skip
    assert "user_allow_other" in out
    assert issubclass(MountError, Fp8fsError)
