"""``rm`` and ``gc``: which trees a word means, and which sizes there are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fp8fs.cli import main
from fp8fs.store.store import Store

PLAN_ID = "c0ffee" * 5 + "00"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with one tree that has nothing in it."""
    monkeypatch.setenv("FP8FS_STORE", str(tmp_path / "store"))
    opened = Store.open(tmp_path / "store")
    opened.tree(PLAN_ID).ensure_dir("", mode=0o755, uid=-1, gid=-1, mtime_ns=0)
    return opened


def trees_of(store: Store) -> list[str]:
    return [tree.plan_id for tree in store.list_trees()]


@pytest.mark.parametrize("word", ["", "c", "c0f"])
def test_rm_needs_more_than_a_few_characters(
    store: Store, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unset variable, or one letter, removes nothing, even where it could mean one tree only."""
    assert main(["rm", word, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["what"]) == ("usage", f'"{word}" is no id of a tree')
    assert "at least 4 characters" in error["hint"]
    assert trees_of(store) == [PLAN_ID]


@pytest.mark.parametrize("word", ["c0ff", PLAN_ID])
def test_rm_takes_an_id_or_its_beginning(
    store: Store, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four characters that begin one id alone are enough."""
    assert main(["rm", word, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [PLAN_ID]
    assert trees_of(store) == []


def test_one_tree_is_singular(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """What rm and gc say counts trees as one does."""
    assert main(["gc"]) == 0
    assert capsys.readouterr().err == "0 trees removed, 0 B freed, 0 B left\n"
    assert main(["gc", "--quota", "0"]) == 0
    assert capsys.readouterr().err == "0 trees removed, 0 B freed, 0 B left\n"
    assert main(["rm", PLAN_ID, PLAN_ID[:6]]) == 0
    assert capsys.readouterr().err == "1 tree removed, 0 B freed\n"


def test_free_is_what_users_may_take(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ls and doctor give the same figure, that of df: without the blocks that are reserved for root."""
    real = os.statvfs(store.root)
    reserving = list(real)
    reserving[1], reserving[3], reserving[4] = 4096, 80_000_000, 50_000_000
    monkeypatch.setattr(os, "statvfs", lambda place: os.statvfs_result(reserving))
    assert main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["free_bytes"] == 50_000_000 * 4096
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = (row["found"] for row in findings if row["what"] == "store")
    assert found.endswith(", 204.8 GB free")
