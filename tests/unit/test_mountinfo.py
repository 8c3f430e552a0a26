"""Mounts are found in the kernel's own words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8fs.fuse.mountinfo import Mount, below, find, parse_mountinfo, read_mountinfo, resolve

TEXT = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
42 27 0:39 / /mnt/a\040b\134c ro,nosuid,nodev,relatime shared:5 master:1 - fuse.fp8fs /src/x\054y\012z ro,user_id=65534,group_id=0,default_permissions
43 42 254:0 /store/tree /mnt/a\040b\134c/.fp8fs/tree ro - ext4 /dev/vda rw
44 42 254:0 /src /mnt/a\040b\134c/.fp8fs/src ro - ext4 /dev/vda rw
45 27 0:40 / /mnt/a\040b ro - fuse.fp8fs /src ro,user_id=0
46 27 0:41 / /mnt/a\040b ro - fuse.fp8fs /later ro,user_id=0
a line that means nothing
47 27 0:42 / /mnt/caf\303\251\377 ro - tmpfs none rw
"""


def test_parse() -> None:
    """Every field of a line is read, octal escapes undone, optional fields skipped, nonsense left out."""
    mounts = parse_mountinfo(TEXT)
    assert [mount.mount_id for mount in mounts] == [22, 42, 43, 44, 45, 46, 47]
    assert mounts[1] == Mount(
        42,
        27,
        "0:39",
        "/",
        "/mnt/a b\\c",
        "ro,nosuid,nodev,relatime",
        "fuse.fp8fs",
        "/src/x,y\nz",
        "ro,user_id=65534,group_id=0,default_permissions",
    )
    assert os.fsencode(mounts[-1].point) == b"/mnt/caf\xc3\xa9\xff"


def test_super_option() -> None:
    """The value of an option, empty for a flag or an absent one."""
    mount = parse_mountinfo(TEXT)[1]
    assert [mount.super_option(n) for n in ("user_id", "ro", "user", "fd")] == ["65534", "", "", ""]


def test_find_takes_the_topmost() -> None:
    """Of mounts stacked on one point the last counts, and only the exact point does."""
    mounts = parse_mountinfo(TEXT)
    assert [
        getattr(find(p, mounts), "source", None) for p in ("/mnt/a b", "/mnt", "/mnt/a b/")
    ] == [
        "/later",
        None,
        None,
    ]


def test_below_in_order_of_removal() -> None:
    """What is mounted deeper or later comes first; a longer name beside is not below."""
    assert [mount.mount_id for mount in below("/mnt/a b\\c", parse_mountinfo(TEXT))] == [44, 43]
    assert below("/mnt/a b", parse_mountinfo(TEXT)) == []
    assert [mount.mount_id for mount in below("/", parse_mountinfo(TEXT))][:2] == [44, 43]


@pytest.fixture
def mounted_at(tmp_path: Path) -> tuple[str, list[Mount]]:
    point = os.path.realpath(tmp_path) + "/mnt"
    return point, [Mount(1, 0, "0:1", "/", point, "", "fuse.fp8fs", "", "")]


def test_resolve_never_reads_a_mount_point(
    tmp_path: Path, mounted_at: tuple[str, list[Mount]]
) -> None:
    """A name that is a mount point is taken as it is, even if what lies there looks like a symlink."""
    point, mounts = mounted_at
    os.symlink("/nowhere", point)
    assert resolve(point, mounts) == point
    assert resolve(f"{tmp_path}/x/../mnt/", mounts) == point
    assert resolve(point, []) == "/nowhere"


def test_resolve_follows_links_to_a_mount_point(
    tmp_path: Path, mounted_at: tuple[str, list[Mount]]
) -> None:
    """Symlinks in the parent and as the name itself lead to the mount point."""
    point, mounts = mounted_at
    os.symlink(tmp_path, tmp_path / "parent")
    os.symlink("mnt", tmp_path / "name")
    os.symlink("name", tmp_path / "name2")
    for spelling in ("parent/mnt", "name", "name2", "parent/name2"):
        assert resolve(str(tmp_path / spelling), mounts) == point


def test_resolve_root_and_missing(tmp_path: Path) -> None:
    """The root is itself; a missing name stays as it is; a circle of links ends."""
    assert resolve("/", []) == "/"
    assert resolve(str(tmp_path / "no" / "such"), []) == os.path.realpath(tmp_path) + "/no/such"
    os.symlink("b", tmp_path / "a")
    os.symlink("a", tmp_path / "b")
    assert resolve(str(tmp_path / "a"), []).startswith(os.path.realpath(tmp_path))


def test_own_mountinfo_parses() -> None:
    """This process's mounts include a root and /proc."""
    points = {mount.point for mount in read_mountinfo()}
    assert {"/", "/proc"} <= points


def test_another_user_s_mount_forges_no_line() -> None:
    """A carriage return in the source, which the kernel does not escape, and a type that is no UTF-8 stay in their line."""
    forged = b"x\r36 35 0:99 / /etc ro - fuse.fp8fs y rw,user_id=0"
    text = b"70 35 0:50 / /home/u/m ro - fuse.\xff " + forged.replace(b" ", b"\\040") + b" rw\n"
    (mount,) = parse_mountinfo(text)
    assert mount.point == "/home/u/m"
    assert mount.fstype == "fuse.\udcff"
    assert mount.source == os.fsdecode(forged)
    assert find("/etc", [mount]) is None
