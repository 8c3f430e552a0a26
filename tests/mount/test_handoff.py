"""Sealed shards are handed over: one slow open, then a native file."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.mount.conftest import SIZES, FakeMount, MountFake, finish, python, until
from tests.mount.fakes import pattern

pytestmark = pytest.mark.fuse

FIRST = "model-1.safetensors"
OPEN_AND_TELL = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
print(os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_dev, os.fstat(fd).st_ino)
"""
# In a new mount namespace: DST is bound elsewhere, and everything that it was made from is hidden.
ELSEWHERE = """
set -e
mount --rbind "$1" /mnt
mount -t tmpfs none "$2"
shift 2
cd /mnt
exec cat -- "$@"
"""


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("bind mounts need root")


def test_first_open_gives_the_store_file(mount_fake: MountFake) -> None:
    """The very first open of a shard ends on the store's own inode, not on a FUSE file."""
    fake = mount_fake()
    fake.release()
    _, device, inode = finish(python(OPEN_AND_TELL, fake.dst / FIRST)).split()
    sealed = os.stat(fake.store / "tree" / FIRST)
    assert (int(device), int(inode)) == (sealed.st_dev, sealed.st_ino)
    assert os.stat(fake.dst / FIRST).st_dev == sealed.st_dev


def test_open_waits_for_the_seal(mount_fake: MountFake) -> None:
    """An open of an unsealed shard neither fails nor returns before the shard is sealed; stat shows a file meanwhile."""
    fake = mount_fake()
    opener = python(OPEN_AND_TELL, fake.dst / FIRST)
    assert not until(lambda: opener.poll() is not None, 0.5)
    assert not os.path.islink(fake.dst / FIRST)
    assert os.stat(fake.dst / FIRST).st_size == SIZES[FIRST]
    fake.release(0)
    finish(opener)
    assert os.path.islink(fake.dst / FIRST)


def test_a_walk_that_takes_long_is_not_broken_by_the_turn(mount_fake: MountFake) -> None:
    """Between the lookup of a cold shard and its open a process may be held up, until what it knows of the file runs out.

    The kernel must not ask again then, for it takes the link's attributes for an error.
    """
    fake = mount_fake()
    found = os.open(fake.dst / FIRST, os.O_PATH)
    try:
        sealed = (
            fake.store / "tree" / FIRST
        )  # by another process: nobody walks to it through this mount
        sealed.parent.mkdir(parents=True, exist_ok=True)
        sealed.write_bytes(pattern(0, SIZES[FIRST]))
        time.sleep(1.2)  # longer than a name is believed
        assert os.fstat(found).st_size == SIZES[FIRST]
    finally:
        os.close(found)
    assert (fake.dst / FIRST).read_bytes() == pattern(0, SIZES[FIRST])


def test_openers_at_once(mount_fake: MountFake) -> None:
    """Many openers that wait for one shard all get the native file."""
    fake = mount_fake()
    openers = [python(OPEN_AND_TELL, fake.dst / FIRST) for _ in range(6)]
    assert not until(lambda: any(opener.poll() is not None for opener in openers), 0.5)
    fake.release(0)
    inode = os.stat(fake.store / "tree").st_dev
    assert {finish(opener).split()[1] for opener in openers} == {str(inode)}


def test_links_resolve_in_another_namespace(mount_fake: MountFake) -> None:
    """A container that is given DST alone reads cold weights and large and small files that pass through."""
    needs_root()
    fake = mount_fake()
    fake.release(0)
    names = [FIRST, "vae/vae.safetensors", "tokenizer.txt"]
    inside = ["sh", "-c", ELSEWHERE, "sh", fake.dst, fake.src.parent, *names]
    command = ["unshare", "--mount", "--propagation", "private", *inside]
    read = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    assert read == pattern(0, SIZES[FIRST]) + pattern(99, 2_000_000) + b"hello\n"


def test_mapping_survives_the_server(mount_fake: MountFake) -> None:
    """A shard that was opened stays readable when the server is killed."""
    fake = mount_fake()
    fake.release()
    with open(fake.dst / FIRST, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:  # fmt: skip
        os.kill(fake.mounted.pid, signal.SIGKILL)
        os.waitpid(fake.mounted.pid, 0)
        assert mapped[:] == pattern(0, SIZES[FIRST])
        assert file.read() == pattern(0, SIZES[FIRST])


def test_large_source_files_are_links(mount_fake: MountFake) -> None:
    """Unchanged weights are read from SRC itself; small files are served."""
    fake = mount_fake()
    assert os.path.islink(fake.dst / "vae/vae.safetensors")
    assert os.stat(fake.dst / "vae/vae.safetensors").st_dev == os.stat(fake.src).st_dev
    assert not os.path.islink(fake.dst / "tokenizer.txt")


def test_full_store_serves_inline(mount_fake: MountFake) -> None:
    """Where the store cannot take a shard, open gives a working file; it stays one until the last handle is closed."""
    fake = mount_fake()
    fake.release()
    fake.say("full", 0)
    path, want = fake.dst / FIRST, pattern(0, SIZES[FIRST])
    with open(path, "rb") as held:
        assert held.read(5000) == want[:5000]
        fake.retract("full", 0)
        seal_behind_the_view(fake)
        assert not os.path.islink(path)
        with open(path, "rb") as second:
            assert second.read() == want
        assert held.read() == want[5000:]
    assert until(lambda: os.path.islink(path))
    assert path.read_bytes() == want


def seal_behind_the_view(fake: FakeMount) -> None:
    """As another mount on the same store would."""
    staged = fake.store / "staged"
    staged.write_bytes(pattern(0, SIZES[FIRST]))
    (fake.store / "tree").mkdir(exist_ok=True)
    staged.rename(fake.store / "tree" / FIRST)


def test_shard_that_cannot_be_made(mount_fake: MountFake) -> None:
    """A shard with a bad weight answers EIO at open and names itself in the log; the others are served."""
    fake = mount_fake()
    fake.release()
    fake.say("broken", 0)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is the point
        (fake.dst / FIRST).read_bytes()
    assert caught.value.errno == errno.EIO
    assert until(lambda: f"{FIRST}: not finite" in fake.log.read_text())
    assert (fake.dst / "model-2.safetensors").read_bytes() == pattern(1, 700_000)


def test_recursive_tools_cold(mount_fake: MountFake, tmp_path: Path) -> None:
    """tar -h over a mount where nothing is sealed yet packs the right bytes."""
    fake = mount_fake()
    fake.release()
    archive = tmp_path / "all.tar"
    subprocess.run(["tar", "-C", fake.dst, "-chf", archive, "."], check=True, timeout=30)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "out", "-xf", archive], check=True, timeout=30)
    for number, (name, size) in enumerate(SIZES.items()):
        assert (tmp_path / "out" / name).read_bytes() == pattern(number, size)
