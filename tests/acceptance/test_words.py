"""What a user reads: true, complete, and to be pasted back as it stands."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8fs.store.store import Store
from tests.acceptance.harness import Fp8fs, mount_points, wait_for

pytestmark = pytest.mark.fuse


def hint_of(line: str, word: str) -> list[str]:
    """The command that follows *word* in a line, as a shell reads it."""
    command = line.partition(word)[2].partition("   (log")[0]
    read = subprocess.run(["bash", "-c", rf"printf '%s\0' {command}"], stdout=-1, check=True)
    return [os.fsdecode(word) for word in read.stdout.split(b"\0")[:-1]]


def test_the_banner_says_what_is_left_to_do(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Cold: the first access quantizes. Finished: nothing is left. With -q not a word."""
    src, dst = checkpoint("llama"), place / "view"
    cold = fp8fs.run("mount", src, dst)
    assert "0 of 3 shards ready" in cold.stdout
    assert "the first access quantizes" in cold.stdout
    fp8fs.unmount(dst)
    fp8fs.build(src)
    warm = fp8fs.run("mount", src, dst)
    assert "3 of 3 shards ready" in warm.stdout
    assert "nothing is left to quantize" in warm.stdout
    fp8fs.unmount(dst)
    quiet = fp8fs.run("mount", src, dst, "-q")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    assert mount_points(dst)
    fp8fs.unmount(dst)


@pytest.mark.parametrize("name", ["o'clock view", "two\nlines 'n \\n"])
def test_hints_can_be_pasted(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], name: str
) -> None:
    """A mount point with a blank, a quote or a line end in its name: the commands that we print take it away."""
    src, dst = checkpoint("llama"), place / name
    said = fp8fs.run("mount", src, dst).stdout
    again = fp8fs.run("mount", src, dst, code=40).stderr
    for line, word in ((said.splitlines()[2], "when done: fp8fs "), (again, "hint: fp8fs ")):
        assert hint_of(line.strip(), word) == ["unmount", str(dst)]
    fp8fs.run(*hint_of(again.strip(), "hint: fp8fs "))
    assert mount_points(place) == []


def test_a_quiet_foreground_is_silent(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """``mount -f -q`` says nothing as long as all is well; without -q it says where it serves."""
    src, dst = checkpoint("llama"), place / "view"
    for options, wanted in ((("-q",), False), ((), True)):
        process = fp8fs.popen("mount", src, dst, "-f", *options)
        wait_for(lambda: dst.is_dir() and any(dst.iterdir()))
        fp8fs.unmount(dst)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert (f"serving {dst}" in err, bool(out)) == (wanted, wanted)


def test_the_hint_fits_what_is_wrong_with_dst(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """A missing folder is to be made; in one that takes no directories it would not help."""
    src, dst = checkpoint("llama"), place / "view"
    assert "make the directory above" in fp8fs.run("mount", src, place / "no/view", code=40).stderr
    fp8fs.mount(src, dst)
    said = fp8fs.run("mount", src, dst / "sub", code=40).stderr
    assert "Read-only file system. hint: choose a directory that you may write" in said
    fp8fs.unmount(dst)


def test_a_user_namespace_without_mount_rights(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Root of a rootless container that may not mount is told why, and what works there."""
    inside = ("unshare", "--user", "--map-root-user")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    fp8fs.command = (*inside, *fp8fs.command)
    error = fp8fs.json("mount", checkpoint("llama"), place / "view", code=49)["error"]
    assert "unshare --mount" in error["hint"]
    assert "fp8fs build" in error["hint"]
    assert not (place / "view").exists()
    assert fp8fs.build(checkpoint("llama")).is_dir()


@pytest.mark.parametrize("form", ["tree", "normalized-cache"])
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_copy_onto_a_mount_point_is_refused(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], form: str, kind: str
) -> None:
    """An empty mount point for --to: said by name, with what to do; nothing is left beside it."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    target, other = place / "target", place / "other"
    target.mkdir()
    other.mkdir()
    how = ["-t", "tmpfs", "tmpfs"] if kind == "tmpfs" else ["--bind", other]
    subprocess.run(["mount", *how, target], check=True)
    try:
        words = ("build", checkpoint("wan"), "--to", target, "--as", form)
        error = fp8fs.json(*words, code=2)["error"]
        assert f"{target} is a mount point" in error["what"]
        assert str(target / "model") in error["hint"]
        assert list(place.glob(".fp8fs*")) == list(target.iterdir()) == []
    finally:
        subprocess.run(["umount", target], check=True)


def test_rm_names_who_uses_a_tree(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """A tree in use is refused with the mount's place and pid, or with the process that holds it."""
    src, dst = checkpoint("llama"), place / "a view"
    mounted = fp8fs.mount(src, dst)
    error = fp8fs.json("rm", mounted["plan_id"], code=20)["error"]
    assert f"{dst}, pid {mounted['pid']}" in error["what"]
    assert shlex.split(error["hint"]) == ["fp8fs", "unmount", str(dst)]
    fp8fs.unmount(dst)
    with Store.open(fp8fs.store).pin(mounted["plan_id"]):
        error = fp8fs.json("rm", mounted["plan_id"], code=20)["error"]
        assert f"by pid {os.getpid()} on" in error["what"]
    assert fp8fs.json("rm", mounted["plan_id"])["removed"] == [mounted["plan_id"]]
