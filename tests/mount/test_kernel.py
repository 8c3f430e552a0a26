"""What the kernel makes of the mount: reads, maps, lists, refusals."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import SIZES, FakeMount, MountFake, until
from tests.mount.fakes import MTIME_NS, pattern

pytestmark = pytest.mark.fuse

FIRST = "model-1.safetensors"


@pytest.fixture(params=["inline", "handoff"])
def ready(request: pytest.FixtureRequest, mount_fake: MountFake) -> FakeMount:
    fake = mount_fake(serve=request.param)
    fake.release()
    return fake


def test_whole_reads(ready: FakeMount) -> None:
    """Every shard and every file that passes through reads as its oracle."""
    for number, (name, size) in enumerate(SIZES.items()):
        assert (ready.dst / name).read_bytes() == pattern(number, size)
    assert (ready.dst / "tokenizer.txt").read_bytes() == b"hello\n"
    assert (ready.dst / "vae/vae.safetensors").read_bytes() == pattern(99, 2_000_000)
    assert (ready.dst / "config.json").read_bytes() == b'{"a": 1}'


def test_reads_at_random_offsets(ready: FakeMount) -> None:
    """pread(n, offset) is the oracle's slice, across and beyond the end too."""
    want, choose = pattern(0, SIZES[FIRST]), random.Random(7)
    fd = os.open(ready.dst / FIRST, os.O_RDONLY)
    try:
        for _ in range(200):
            offset = choose.randrange(len(want) + 5000)
            length = choose.choice([1, 100, 4096, 65536, 1 << 20])
            assert os.pread(fd, length, offset) == want[offset : offset + length]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("flags", "protection"),
    [
        (mmap.MAP_SHARED, mmap.PROT_READ),
        (mmap.MAP_PRIVATE, mmap.PROT_READ),
        (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE),
    ],
    ids=["shared-read", "private-read", "private-write"],
)
def test_maps(ready: FakeMount, flags: int, protection: int) -> None:
    """A shard can be mapped as loaders map it, and a private write stays private."""
    want = pattern(0, SIZES[FIRST])
    fd = os.open(ready.dst / FIRST, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, flags=flags, prot=protection) as mapped:
            assert mapped[:] == want
            if protection & mmap.PROT_WRITE:
                mapped[0:4] = b"mine"
                assert mapped[0:4] == b"mine"
        assert os.pread(fd, 16, 0) == want[:16]
    finally:
        os.close(fd)


def test_sixteen_threads_on_one_descriptor(ready: FakeMount) -> None:
    """Readers of one handle do not disturb one another."""
    want = pattern(0, SIZES[FIRST])
    fd = os.open(ready.dst / FIRST, os.O_RDONLY)
    wrong: list[int] = []

    def read(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            offset = choose.randrange(len(want))
            if os.pread(fd, 50_000, offset) != want[offset : offset + 50_000]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert wrong == []


def test_walk_shows_the_plan(ready: FakeMount) -> None:
    """A walk finds exactly the planned names, and .fp8fs only who asks for it."""
    found = {
        os.path.relpath(os.path.join(folder, name), ready.dst)
        for folder, folders, files in os.walk(ready.dst)
        for name in folders + files
    }
    assert found == {*SIZES, "sub", "vae", "empty", "config.json", "tokenizer.txt", "vae/vae.safetensors"}  # fmt: skip
    inside = ["manifest.json", "plan.json", "src", "status.json", "tree"]
    assert sorted(os.listdir(ready.dst / ".fp8fs")) == inside
    with pytest.raises(FileNotFoundError):
        (ready.dst / ".fp8fs" / "nothing").read_bytes()


def test_status_is_whole_at_each_open(ready: FakeMount) -> None:
    """status.json is made anew at each open and never cut, though its size changes every time."""
    path = ready.dst / ".fp8fs/status.json"
    ages = []
    for _ in range(20):
        ages.append(json.loads(path.read_bytes())["age"])
        ages.append(json.loads(subprocess.check_output(["cat", path]))["age"])
    assert ages == sorted(set(ages))


def test_attributes(ready: FakeMount) -> None:
    """Size, mode, owner and mtime are the planned ones, followed or not, before and after the first open."""
    path = ready.dst / FIRST
    for _ in range(2):
        stat = os.stat(path)
        assert (stat.st_size, stat.st_mtime_ns, stat.st_mode & 0o7777, stat.st_uid) == (
            SIZES[FIRST],
            MTIME_NS,
            0o444,
            os.geteuid(),
        )
        path.read_bytes()


REFUSED: dict[str, Callable[[Path], object]] = {
    "open for writing": lambda at: os.open(at / FIRST, os.O_WRONLY),
    "open for both": lambda at: os.open(at / "config.json", os.O_RDWR),
    "open with truncation": lambda at: os.open(at / "config.json", os.O_RDONLY | os.O_TRUNC),
    "create": lambda at: os.open(at / "new", os.O_CREAT | os.O_RDONLY),
    "mkdir": lambda at: os.mkdir(at / "new"),
    "mkfifo": lambda at: os.mkfifo(at / "new"),
    "unlink": lambda at: os.unlink(at / "config.json"),
    "rmdir": lambda at: os.rmdir(at / "empty"),
    "rename": lambda at: os.rename(at / "config.json", at / "other"),
    "link": lambda at: os.link(at / "config.json", at / "other"),
    "symlink": lambda at: os.symlink("x", at / "other"),
    "chmod": lambda at: os.chmod(at / "config.json", 0o600),
    "chown": lambda at: os.chown(at / "config.json", 1, 1),
    "truncate": lambda at: os.truncate(at / "config.json", 0),
    "utime": lambda at: os.utime(at / "config.json"),
    "setxattr": lambda at: os.setxattr(at / "config.json", "user.a", b"b"),
    "removexattr": lambda at: os.removexattr(at / "config.json", "user.a"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_write_is_refused(mount_fake: MountFake, what: str) -> None:
    """Whatever would change the tree answers EROFS."""
    fake = mount_fake(serve="inline")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is the point
        REFUSED[what](fake.dst)
    assert caught.value.errno == errno.EROFS


def test_extended_attributes(ready: FakeMount) -> None:
    """There are none: asking for one says so, listing is empty, and ls and cp -a are content."""
    path = ready.dst / "config.json"
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is the point
        os.getxattr(path, "user.a")
    assert caught.value.errno == errno.ENODATA
    assert os.listxattr(path) == []
    assert subprocess.run(["ls", "-l", ready.dst], capture_output=True, check=True).stderr == b""
    copy = ready.src.parent / "copy"
    assert subprocess.run(["cp", "-a", path, copy], capture_output=True, check=True).stderr == b""


def test_statvfs(ready: FakeMount) -> None:
    """The mount says that it is read-only, and how large its source's filesystem is."""
    stat = os.statvfs(ready.dst)
    assert stat.f_flag & os.ST_RDONLY
    assert stat.f_blocks * stat.f_frsize == os.statvfs(ready.src).f_blocks * os.statvfs(ready.src).f_frsize  # fmt: skip


def test_no_descriptor_leaks(mount_fake: MountFake) -> None:
    """A thousand opens later the server holds no more descriptors and no more handles than before."""
    fake = mount_fake(serve="inline")
    fake.release()
    names = ["config.json", "tokenizer.txt", FIRST, "vae/vae.safetensors", ".fp8fs/plan.json"]

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{fake.mounted.pid}/fd"))

    def handles() -> int:
        held: int = json.loads((fake.dst / ".fp8fs/status.json").read_bytes())["handles"]
        return held

    for name in names:
        (fake.dst / name).read_bytes()
    assert until(lambda: handles() <= 1)
    before = descriptors()
    for turn in range(1000):
        with open(fake.dst / names[turn % len(names)], "rb") as file:
            file.read(100)
    assert until(lambda: handles() <= 1)
    assert until(lambda: descriptors() <= before)


def test_changed_source_file_is_an_error(mount_fake: MountFake) -> None:
    """A file that passes through is never a mix: once it has changed, what is not cached answers EIO."""
    fake = mount_fake(serve="inline")
    (fake.src / "tokenizer.txt").write_bytes(b"other, longer")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is the point
        (fake.dst / "tokenizer.txt").read_bytes()
    assert caught.value.errno == errno.EIO
    assert until(lambda: "tokenizer.txt: size was 6, is 13" in fake.log.read_text())


def test_log_is_quiet(ready: FakeMount) -> None:
    """libfuse accepts every option without a complaint, and an ordinary session logs no warning."""
    for name in SIZES:
        (ready.dst / name).read_bytes()
    lines = ready.log.read_text().splitlines()
    assert [line for line in lines if " INFO " not in line] == []
