"""What docs/TROUBLESHOOTING.md says of copying tools and of an overlayfs above a mount."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.harness import Fp8fs
from tests.conftest import skip_or_fail

pytestmark = pytest.mark.fuse

INLINE = ("--serve", "inline")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def bound() -> bool:
    """Whether a mount of ours binds the store's tree, so that its links are relative."""
    return os.geteuid() == 0


@pytest.mark.parametrize("tool", [("cp", "-r"), ("cp", "-a"), ("rsync", "-a")], ids=" ".join)
def test_tools_that_copy_links_end_well_and_copy_links(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], tool: tuple[str, str]
) -> None:
    """Of a warm mount: exit 0, and links for shards; root's dangle, those of others lead into the store."""
    tree = fp8fs.build(checkpoint("llama"))
    fp8fs.mount(checkpoint("llama"), place / "view")
    try:
        subprocess.run([*tool, f"{place}/view/", f"{place}/copy"], check=True)
    except FileNotFoundError:
        pytest.skip(f"{tool[0]} is not installed")
    copies = shards(place / "copy")
    assert [path.name for path in copies] == [path.name for path in shards(tree)]
    assert all(path.is_symlink() for path in copies)
    if bound():
        assert [os.readlink(path) for path in copies] == [
            f".fp8fs/tree/{path.name}" for path in copies
        ]
        assert not any(path.exists() for path in copies)
    else:
        assert [path.resolve() for path in copies] == shards(tree.resolve())


def test_cp_that_follows_links_copies_a_warm_mount(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path]
) -> None:
    """``cp -rL`` when all is sealed: files, with the view's bytes."""
    tree = fp8fs.build(checkpoint("llama"))
    fp8fs.mount(checkpoint("llama"), place / "view")
    subprocess.run(["cp", "-rL", place / "view", place / "copy"], check=True)
    copies = shards(place / "copy")
    assert not any(path.is_symlink() for path in copies)
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in shards(tree)]


@contextmanager
def overlay(place: Path, lower: Path) -> Iterator[Path]:
    """A read-only overlayfs with *lower* as its upmost layer."""
    if not bound():
        skip_or_fail("root", "only root can mount an overlayfs")
    above, empty = place / "above", place / "empty"
    above.mkdir()
    empty.mkdir()
    layers = f"lowerdir={lower}:{empty}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "-o", layers, "overlay", above], capture_output=True, text=True
    )
    if done.returncode:
        skip_or_fail("root", f"no overlayfs here: {done.stderr}")
    try:
        yield above
    finally:
        subprocess.run(["umount", above], check=True)


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_an_overlay_above_a_mount_finds_no_shards(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], state: str
) -> None:
    """ESTALE for what becomes a link while it is opened, ENOENT for what is a link already; other files can be read."""
    if state == "warm":
        fp8fs.build(checkpoint("llama"))
    fp8fs.mount(checkpoint("llama"), place / "view")
    config = (place / "view" / "config.json").read_bytes()
    with overlay(place, place / "view") as above:
        assert (above / "config.json").read_bytes() == config
        seen = shards(above)
        assert [path.is_symlink() for path in seen] == [state == "warm"] * len(seen)
        code = {"cold": errno.ESTALE, "warm": errno.ENOENT}[state]
        for path in seen:
            with pytest.raises(OSError, match=rf"\[Errno {code}\]"):
                path.read_bytes()


@pytest.mark.parametrize("way", ["an inline mount", "the finished tree"])
def test_an_overlay_above_what_has_no_links_has_the_views_bytes(
    fp8fs: Fp8fs, place: Path, checkpoint: Callable[[str], Path], way: str
) -> None:
    """The two remedies: ``--serve inline``, or the tree itself as the lower layer."""
    lower = place / "view"
    if way == "an inline mount":
        fp8fs.mount(checkpoint("llama"), lower, *INLINE)
    tree = fp8fs.build(checkpoint("llama"))
    with overlay(place, lower if way == "an inline mount" else tree) as above:
        found = [path.read_bytes() for path in shards(above)]
    assert found == [path.read_bytes() for path in shards(tree)]
