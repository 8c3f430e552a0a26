"""Whatever ends a mount, a run or a server: nothing of it stays, however often it happens."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp8fs.fuse import session
from fp8fs.fuse.mountinfo import read_mountinfo
from scripts.make_checkpoint import main as make_checkpoint
from tests.builders import llama_like
from tests.conftest import LONG
from tests.mount.conftest import REPOSITORY, MountFake, end_process, python, until

pytestmark = pytest.mark.fuse

ROUNDS = 20 if LONG else 3
FIRST = "model-1.safetensors"
READ = "import sys\nopen(sys.argv[1], 'rb').read()"


def processes(below: Path) -> list[int]:
    """Servers and helpers whose command line names the place."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"fp8fs" in line and os.fsencode(below) in line:
                found.append(int(folder.name))
    return found


def state_files(below: Path) -> list[Path]:
    """State files of mounts at or below a place; other tests may be running beside this one."""
    folders = [
        Path("/run/fp8fs"),
        *Path("/tmp").glob("fp8fs-*"),
        *Path("/run/user").glob("*/fp8fs"),
    ]
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.json*")]
    return [file for file in files if os.fsencode(below) in content(file)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Fails if a mount, a bind, a process or a state file of this test is left."""

    def check() -> None:
        assert [m.point for m in read_mountinfo() if m.source.startswith(f"{tmp_path}/")] == []
        assert [m.point for m in read_mountinfo() if m.point.startswith(f"{tmp_path}/")] == []
        assert until(lambda: processes(tmp_path) == [], 5), processes(tmp_path)
        assert state_files(tmp_path) == []

    yield check
    check()


@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_sigterm_again_and_again(
    mount_fake: MountFake, nothing_left: Callable[[], None], serve: str
) -> None:
    """With readers blocked, each SIGTERM ends server, mount, binds and readers within 5 s."""
    for _ in range(ROUNDS):
        fake = mount_fake(serve=serve)
        readers = [python(READ, fake.dst / FIRST) for _ in range(4)]
        assert until(lambda fake=fake: session.read_status(str(fake.dst))["age"] > 0.2)
        began = time.monotonic()
        end = fake.mounted.pid
        os.kill(end, signal.SIGTERM)
        os.waitpid(end, 0)
        assert time.monotonic() - began < 5
        for reader in readers:
            reader.communicate(timeout=5)
            assert reader.returncode
        assert not fake.dst.exists()
        nothing_left()


def test_killed_and_mounted_again_and_again(
    mount_fake: MountFake, nothing_left: Callable[[], None]
) -> None:
    """Mounts over mounts whose servers were killed never pile up, and the last unmount leaves nothing."""
    for _ in range(ROUNDS):
        fake = mount_fake()
        reader = python(READ, fake.dst / FIRST)
        end_process(fake.mounted.pid)
        reader.communicate(timeout=5)
        assert fake.points().count(str(fake.dst)) == 1
    assert session.unmount(str(fake.dst)).stale
    nothing_left()


@pytest.mark.slow
def test_sigterm_while_filling(tmp_path: Path, nothing_left: Callable[[], None]) -> None:
    """With a fill in work and readers waiting for it, SIGTERM ends all of it within 5 s; the store goes on from there."""
    make_checkpoint([str(tmp_path / "src"), "--size", "150M", "--shards", "2"])
    spec = session.MountSpec(
        src=str(tmp_path / "src"),
        dst=str(tmp_path / "mnt"),
        store=str(tmp_path / "store"),
        log_path=str(tmp_path / "log"),
        workers=1,
    )
    rounds = 20 if LONG else 2
    for number in range(rounds):
        mounted = session.mount(spec)
        shards = sorted(Path(mounted.dst).glob("*.safetensors"))
        readers = [python(READ, shards[0]) for _ in range(4)]
        time.sleep(0.05 + 0.2 * number / rounds)
        began = time.monotonic()
        os.kill(mounted.pid, signal.SIGTERM)
        _, status = os.waitpid(mounted.pid, 0)
        assert time.monotonic() - began < 5
        assert os.waitstatus_to_exitcode(status) == 0
        for reader in readers:
            reader.communicate(timeout=5)
        nothing_left()
        if number % 4 == 3:
            shutil.rmtree(tmp_path / "store")
    mounted = session.mount(spec)
    assert all(path.read_bytes() for path in Path(mounted.dst).glob("*.safetensors"))
    assert session.read_status(mounted.dst)["errors"] == []
    session.unmount(mounted.dst)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    llama_like(tmp_path / "src")
    return tmp_path / "src"


HEARS_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of shells start with it ignored
os.execv(sys.executable, [sys.executable, "-m", "fp8fs", *sys.argv[1:]])
"""


def run_command(place: Path, script: str) -> subprocess.Popen[str]:
    """``fp8fs run`` of a shell script in which $1 is the mount and $2 a flag to be touched."""
    command = [
        *(sys.executable, "-c", HEARS_INTERRUPTS, "run", str(place / "src")),
        *("--store", str(place / "store")),
        *("--", "sh", "-c", script, "sh", "{}", str(place / "flag")),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(place)},
    )


STAY = 'echo $$ "$1"; touch "$2"; while :; do sleep 0.05; done'


@pytest.mark.parametrize(
    "how",
    ["TERM", "HUP", "INT", "KILL", "TERM TERM INT", "child TERM", "child KILL", "unmounted"],
)
def test_run_ends(source: Path, tmp_path: Path, nothing_left: Callable[[], None], how: str) -> None:
    """However ``fp8fs run`` or its command ends, mount, server, folder and state are gone; the command too."""
    process = run_command(tmp_path, STAY)
    assert until((tmp_path / "flag").exists, 30)
    assert process.stdout is not None
    child, mount = process.stdout.readline().split()
    assert any(m.point == mount for m in read_mountinfo())
    numbers = [getattr(signal, f"SIG{name}") for name in how.split() if name.isupper()]
    if how == "unmounted":
        session.unmount(mount, lazy=True)
        os.kill(int(child), signal.SIGTERM)
    elif how.startswith("child"):
        os.kill(int(child), numbers[0])
    elif how == "INT":  # a terminal sends it to both
        os.killpg(process.pid, signal.SIGINT)
    else:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.02)
    assert process.wait(20) != 0
    if how == "KILL":  # nobody is left to end it
        os.kill(int(child), signal.SIGKILL)
        assert until(lambda: not any(m.point == mount for m in read_mountinfo()), 8)
    assert until(lambda: not Path(f"/proc/{child}").exists(), 5)
    process.communicate(timeout=5)
    assert not Path(mount).exists()
    nothing_left()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 9", 9), ("kill -9 $$", 137), ('ls "$1"/no', 2)]
)
def test_run_gives_back_how_the_command_ended(
    source: Path, tmp_path: Path, nothing_left: Callable[[], None], script: str, code: int
) -> None:
    """A command that ends well, badly or by a signal leaves nothing, and its code is ours."""
    process = run_command(tmp_path, script)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    nothing_left()


def test_run_whose_mount_fails(tmp_path: Path, nothing_left: Callable[[], None]) -> None:
    """Where nothing can be mounted nothing is run, and no temporary folder stays."""
    (tmp_path / "src").mkdir()
    process = run_command(tmp_path, 'touch "$2"')
    process.communicate(timeout=60)
    assert process.returncode == 10
    assert not (tmp_path / "flag").exists()
    assert list(tmp_path.glob("fp8fs-*")) == []
    nothing_left()


NEVER_READY = """
import signal, sys
from fp8fs.cli import main
from fp8fs.fuse import session
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
made = session.MountSpec
session.MountSpec = lambda **options: made(**options, factory="tests.mount.fakes:never")
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("option", ["--foreground", "--json"])
def test_a_signal_before_the_mount_is_ready(
    source: Path,
    tmp_path: Path,
    nothing_left: Callable[[], None],
    number: signal.Signals,
    option: str,
) -> None:
    """Whatever ends ``mount`` while its server still starts: 128 + N, no traceback, no server, DST as it was."""
    words = ["mount", source, tmp_path / "mnt", "--store", tmp_path / "store", option]
    process = subprocess.Popen(
        [sys.executable, "-c", NEVER_READY, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert until((source / "begun").exists, 30)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (128 + number, "", "")
    assert not (tmp_path / "mnt").exists()
    nothing_left()


FORKING = """
import os, sys, time
import fp8fs
with fp8fs.mounted(sys.argv[1], store=sys.argv[2]) as path:
    print(path, flush=True)
    time.sleep(60)
"""


def test_a_program_that_is_killed_takes_its_mount_along(
    source: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    """``fp8fs.mounted`` in a program that gets SIGKILL: the server notices and unmounts."""
    program = python(
        FORKING, source, tmp_path / "store", env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert program.stdout is not None
    mount = program.stdout.readline().strip()
    assert any(m.point == mount for m in read_mountinfo())
    program.kill()
    program.communicate(timeout=10)
    assert until(lambda: not any(m.point == mount for m in read_mountinfo()), 8)
    nothing_left()


MANY = """
import os, sys
import fp8fs
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with fp8fs.mounted(sys.argv[1], store=sys.argv[2]) as path:
    print(len(os.listdir(path)))
"""


def test_a_program_with_many_open_files(
    source: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    """Mounting works for a program that has more files open than select(2) can count."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n{MANY}"
    program = python(limit, source, tmp_path / "store")
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert int(out) > 2
