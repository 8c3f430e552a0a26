"""The plan that is kept with a finished tree: used only where planning anew gives the same, never trusted further."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fp8fs import assembly, plan_cache
from fp8fs.assembly import assemble, survey
from fp8fs.building import build_tree
from fp8fs.core.plan import Plan
from fp8fs.core.recipe import Recipe
from fp8fs.store.guard import encode_checked
from tests.builders import llama_like


@pytest.fixture
def src(tmp_path: Path) -> Path:
    llama_like(tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def root(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a finished tree of *src*, whose plan is kept."""
    monkeypatch.setattr(plan_cache, "MIN_TENSORS", 1)
    root = tmp_path / "store"
    build_tree(src, Recipe(), root, device="cpu")
    with assemble(src, Recipe(), root, device="cpu"):
        pass
    assert len(list((root / "v1" / "plans").iterdir())) == 1
    return root


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every plan that is made, not read."""
    made: list[Plan] = []
    real = assembly.plan

    def plan(*args: object, **options: object) -> Plan:
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(assembly, "plan", plan)
    return made


def plan_of(src: Path, root: Path | None, recipe: Recipe | None = None) -> Plan:
    with survey(src, recipe or Recipe(), root) as found:
        return found.plan


def test_a_kept_plan_is_the_plan(src: Path, root: Path, planned: list[Plan]) -> None:
    """What is read is equal to what planning gives, in every part, and planning is spared."""
    kept = plan_of(src, root)
    assert planned == []
    assert kept == plan_of(src, None)
    assert len(planned) == 1


def test_a_store_without_plans_is_not_asked_for_one(
    src: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make a key takes time, so it is made only where a plan may be found."""
    keys: list[str] = []
    real = assembly.plan_key
    monkeypatch.setattr(assembly, "plan_key", lambda *args: keys.append(real(*args)) or keys[-1])
    plan_of(src, tmp_path / "no store")
    with assemble(src, Recipe(), tmp_path / "new store", device="cpu"):
        assert keys == []
    plan_of(src, root)
    assert len(keys) == 1


CHANGES: dict[str, Callable[[Path], object]] = {
    "a config": lambda src: (src / "config.json").write_text(
        (src / "config.json").read_text().replace("{", '{"extra": 1,', 1)
    ),
    "a new file": lambda src: (src / "new.txt").write_text("new"),
    "a date": lambda src: os.utime(src / "config.json", ns=(1, 1)),
    "a mode": lambda src: (src / "config.json").chmod(0o600),
    "a shard": lambda src: os.utime(next(src.glob("*.safetensors")), ns=(1, 1)),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_changed_source_is_planned_anew(
    src: Path, root: Path, planned: list[Plan], change: str
) -> None:
    """Any change that a plan could depend on makes another one."""
    CHANGES[change](src)
    found = plan_of(src, root)
    assert planned == [found]
    assert found == plan_of(src, None)


def test_another_recipe_owner_or_planner_plans_anew(
    src: Path, root: Path, planned: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key holds what decides a plan beside the source."""
    plan_of(src, root, Recipe(keep=("*q_proj*",)))
    assert len(planned) == 1
    with monkeypatch.context() as patch:
        owner = assembly._owner()
        patch.setattr(assembly, "_owner", lambda: msgspec.structs.replace(owner, uid=4321))
        plan_of(src, root)
    assert len(planned) == 2
    monkeypatch.setattr(plan_cache, "_planner", lambda: "another")
    plan_of(src, root)
    assert len(planned) == 3


def blob(root: Path) -> Path:
    return next((root / "v1" / "trees").glob("*/.fp8fs/plan.bin"))


def fact(root: Path) -> Path:
    return next((root / "v1" / "plans").iterdir())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no plan": lambda root: blob(root).unlink(),
    "an empty plan": lambda root: blob(root).write_bytes(b""),
    "half a plan": lambda root: blob(root).write_bytes(blob(root).read_bytes()[:-9]),
    "another byte": lambda root: blob(root).write_bytes(blob(root).read_bytes()[:-1] + b"\x7f"),
    "a fact of no shape": lambda root: fact(root).write_bytes(encode_checked([1])),
    "a fact that leads away": lambda root: fact(root).write_bytes(
        encode_checked({"plan_id": "../../x", "digest": ""})
    ),
    "a fact of another tree": lambda root: fact(root).write_bytes(
        encode_checked({"plan_id": "ab" * 16, "digest": "cd" * 16})
    ),
    "a fact that is damaged": lambda root: fact(root).write_bytes(b"{}"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_kept_plan_that_is_not_whole_is_made_again(
    src: Path, root: Path, planned: list[Plan], damage: str
) -> None:
    """Damage of any kind costs the planning, and a mount keeps the plan anew."""
    DAMAGES[damage](root)
    found = plan_of(src, root)
    assert planned == [found]
    with assemble(src, Recipe(), root, device="cpu"):
        pass
    assert len(planned) == 2
    assert plan_of(src, root) == found
    assert len(planned) == 2


def test_small_plans_are_not_kept(src: Path, tmp_path: Path) -> None:
    """A checkpoint of few tensors leaves no plan in the store."""
    root = tmp_path / "store"
    build_tree(src, Recipe(), root, device="cpu")
    with assemble(src, Recipe(), root, device="cpu"):
        pass
    assert not list((root / "v1" / "plans").iterdir())
    assert not list((root / "v1" / "trees").glob("*/.fp8fs/plan.bin"))
