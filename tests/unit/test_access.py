"""source/access.py: whoever is kept out of a file of SRC by more than its mode bits loses the bit."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from fp8fs.source import Source
from fp8fs.source.access import mode_on_the_way, shown_mode
from fp8fs.source.scan import scan
from tests.builders import llama_like

USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 1, 2, 4, 16, 32
NOBODY = 65534


def set_acl(path: Path) -> None:
    """rw-r--r--, but nothing for the user nobody."""
    entries = [(USER_OBJ, 6, -1), (USER, 0, NOBODY), (GROUP_OBJ, 4, -1), (MASK, 4, -1), (OTHER, 4, -1)]  # fmt: skip
    raw = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", raw)
    except OSError as err:
        pytest.skip(f"no access control lists here: {err.strerror}")


def test_a_list_leaves_the_owner_only(tmp_path: Path) -> None:
    """A file whose list denies somebody keeps its owner's bits, in the scan too; one without a list keeps all."""
    llama_like(tmp_path)
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    set_acl(tmp_path / "config.json")
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o644
    entries = scan(str(tmp_path))
    assert entries["config.json"].mode == 0o600
    assert entries["tokenizer.json"].mode == 0o644


def test_a_list_on_a_folder_counts(tmp_path: Path) -> None:
    """SRC's own list, which the view's root cannot show, closes it to all but its owner."""
    tmp_path.chmod(0o755)
    set_acl(tmp_path)
    assert shown_mode(str(tmp_path), tmp_path.stat()) == 0o600  # the list above grants no x


@pytest.mark.parametrize(
    ("door", "seen"),
    [(0o755, 0o644), (0o711, 0o644), (0o750, 0o640), (0o700, 0o600), (0o744, 0o600)],
)
def test_folders_on_the_way_to_a_link_s_target(tmp_path: Path, door: int, seen: int) -> None:
    """A public file behind a closed folder shows no more through a link than its folder lets through."""
    root, vault = tmp_path / "src", tmp_path / "vault" / "inner"
    vault.mkdir(parents=True)
    root.mkdir()
    secret = vault / "note.txt"
    secret.write_bytes(b"x")
    secret.chmod(0o644)
    (root / "note.txt").symlink_to(secret)
    vault.chmod(0o755)
    vault.parent.chmod(door)
    assert scan(str(root))["note.txt"].mode == seen


def test_another_group_or_owner_on_the_way(tmp_path: Path) -> None:
    """Rights of a folder's group or owner say nothing about the file's group or owner, if those are others."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    vault = tmp_path / "vault"
    vault.mkdir()
    secret = vault / "note.txt"
    secret.touch()
    os.chown(secret, NOBODY, NOBODY)
    secret.chmod(0o664)
    vault.chmod(0o750)
    src = tmp_path / "src"
    src.mkdir()
    assert mode_on_the_way(0o664, secret.stat(), str(secret), str(src)) == 0
    os.chown(vault, NOBODY, NOBODY)
    assert mode_on_the_way(0o664, secret.stat(), str(secret), str(src)) == 0o660


def test_linked_folder_behind_a_closed_door(tmp_path: Path) -> None:
    """A folder that SRC links to is shown no wider open than the way to it."""
    src, vault = tmp_path / "src", tmp_path / "vault"
    (vault / "encoder").mkdir(parents=True)
    (vault / "encoder").chmod(0o755)
    (vault / "encoder" / "a.txt").touch()
    src.mkdir()
    (src / "encoder").symlink_to(vault / "encoder")
    vault.chmod(0o700)
    entries = scan(str(src))
    assert (entries["encoder"].kind, entries["encoder"].mode) == ("dir", 0o700)
    assert "encoder/a.txt" in entries


def test_what_leads_out_is_named(tmp_path: Path) -> None:
    """A link that leaves SRC is followed, and there is one sentence that says where to; links inside are no news."""
    src = tmp_path / "src"
    llama_like(src)
    (src / "inside.json").symlink_to("config.json")
    with Source.open(src) as source:
        assert source.checkpoint.warnings == ()
    (tmp_path / "other.txt").touch()
    (src / "tokenizer.txt").symlink_to(tmp_path / "other.txt")
    (src / "b.txt").symlink_to(tmp_path / "other.txt")
    with Source.open(src) as source:
        (warning,) = source.checkpoint.warnings
    assert "b.txt leads out of SRC to" in warning
    assert str(tmp_path / "other.txt") in warning
    assert "1 more" in warning
