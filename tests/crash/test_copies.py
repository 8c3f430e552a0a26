"""What ``build --to`` and ``--as normalized-cache`` give away has the right bytes, whatever became of the store's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fp8fs import api
from fp8fs.assembly import survey
from fp8fs.building import build_tree
from fp8fs.core.dtypes import FP8
from fp8fs.core.plan import Extent, Plan, ViewShard
from fp8fs.core.recipe import Recipe
from fp8fs.engine import Engine
from fp8fs.errors import StoreDamagedError
from fp8fs.export import export_tree
from fp8fs.normalized import build_normalized
from fp8fs.store.fsio import FsIo
from fp8fs.store.store import Store
from tests.acceptance.harness import Fp8fs
from tests.builders import h3_like
from tests.crash.flows import RECIPE, World, injected
from tests.oracle import read_folder
from tests.storing import snapshot

ROT = 1000


@pytest.fixture
def root(world: World, room: Path) -> Path:
    """A store with a finished tree whose shards are links to the objects."""
    build_tree(world.src, RECIPE, room / "store", device="cpu", workers=1)
    return room / "store"


@pytest.fixture
def plan(world: World, root: Path) -> Plan:
    with survey(world.src, RECIPE, root) as found:
        return found.plan


def rot(path: Path, at: int) -> None:
    """Zero some bytes as a bad disk would: size, mode and dates stay."""
    facts = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(ROT)
        assert before.strip(b"\0")
        file.seek(at)
        file.write(bytes(len(before)))
    path.chmod(facts.st_mode & 0o7777)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def object_of(root: Path, shard: ViewShard) -> Path:
    return root / "v1" / "objects" / shard.object_id[:2] / f"{shard.object_id}.safetensors"


def tree_of(root: Path, plan: Plan) -> Path:
    return root / "v1" / "trees" / plan.plan_id


def largest(shard: ViewShard) -> tuple[str, Extent]:
    """The weight with most bytes."""
    unit = max(shard.units, key=lambda unit: unit.data.length if unit.scheme else 0)
    return unit.name, unit.data


def shown(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def copy(world: World, root: Path, target: Path, told: list[str]) -> Path:
    return api.build(
        world.src, target, store=root, recipe=RECIPE, device="cpu", workers=1, note=told.append
    )


def test_a_copy_of_rotten_shards_has_the_right_bytes(
    world: World, root: Path, plan: Plan, room: Path
) -> None:
    """Each damaged shard is named with its tensor, set aside, made again; only then there is a copy; nothing else is made."""
    tensors = []
    for shard in plan.shards:
        name, data = largest(shard)
        rot(object_of(root, shard), data.start + data.length // 2)
        tensors.append(name)
    told: list[str] = []
    copy(world, root, room / "copy", told)
    assert shown(room / "copy") == world.bytes
    assert [line.split(": ")[:2] for line in told] == [
        [shard.path, name] for shard, name in zip(plan.shards, tensors, strict=True)
    ]
    damaged = {path.name.split(".", 1)[1] for path in root.glob("v1/damaged/*.safetensors")}
    assert damaged == {object_of(root, shard).name for shard in plan.shards}
    assert snapshot(tree_of(root, plan)) == world.tree
    assert shown(tree_of(root, plan)) == world.bytes


class NoLinks(FsIo):
    """A filesystem without hard links: a tree holds copies of the objects."""

    def link(self, source: object, dest: object, *, dest_dir_fd: int | None = None) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("object_too", [False, True])
def test_a_rotten_shard_of_a_tree_without_links(
    world: World, room: Path, monkeypatch: pytest.MonkeyPatch, object_too: bool
) -> None:
    """What was copied counts, the tree's file; its object is made again only if it is damaged itself."""
    root, told = room / "store", []
    with injected(NoLinks()):
        build_tree(world.src, RECIPE, root, device="cpu", workers=1)
        with survey(world.src, RECIPE, root) as found:
            plan = found.plan
        shard = plan.shards[0]
        places = [tree_of(root, plan) / shard.path, *[object_of(root, shard)] * object_too]

        def rotten(*args: object, **options: object) -> bool:
            while places:
                rot(places.pop(), largest(shard)[1].start)
            return export_tree(*args, **options)  # type: ignore[arg-type]

        assert places[0].stat().st_nlink == 1
        monkeypatch.setattr("fp8fs.copies.export_tree", rotten)
        copy(world, root, room / "copy", told)
    assert shown(room / "copy") == world.bytes
    assert [line.split(": ")[:2] for line in told] == [[shard.path, largest(shard)[0]]]
    assert len([*root.glob("v1/damaged/*.safetensors")]) == object_too


def test_the_trees_own_documents_are_not_copied_and_keep_nothing_from_it(
    world: World, root: Path, plan: Plan, room: Path
) -> None:
    """A plan.json that rotted is no damage of what is copied: nothing is made again for it."""
    rot(tree_of(root, plan) / ".fp8fs" / "plan.json", 50)
    told: list[str] = []
    copy(world, root, room / "copy", told)
    assert (shown(room / "copy"), told) == (world.bytes, [])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a_rotten_small_file_is_not_copied(
    world: World, root: Path, plan: Plan, room: Path, name: str
) -> None:
    """Same size, other bytes, in what the tree holds beside its shards."""
    before = (tree_of(root, plan) / name).read_bytes()
    place = tree_of(root, plan) / name
    facts = place.stat()
    place.chmod(0o600)
    place.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
    place.chmod(facts.st_mode & 0o7777)
    os.utime(place, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    told: list[str] = []
    copy(world, root, room / "copy", told)
    assert (room / "copy" / name).read_bytes() == before
    assert [line.split(":")[0] for line in told] == [name]


def test_what_rots_again_ends_with_its_name_and_no_copy(
    world: World, root: Path, plan: Plan, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that damages the same shard twice is not tried a third time: store.damaged, nothing at DIR or beside it."""
    name, data = largest(plan.shards[0])
    rounds = []

    def rotten(*args: object, **options: object) -> bool:
        rounds.append(1)
        rot(object_of(root, plan.shards[0]), data.start)
        return export_tree(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("fp8fs.copies.export_tree", rotten)
    with pytest.raises(StoreDamagedError, match=f"{plan.shards[0].path}: {name}: ") as raised:
        copy(world, root, room / "copy", [])
    assert raised.value.hint
    assert len(rounds) == 2
    assert sorted(path.name for path in room.iterdir()) == ["store"]


def test_a_read_only_store_is_not_healed_and_not_copied(
    world: World, root: Path, plan: Plan, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be made again in a store that cannot be written: shard and tensor are named, DIR stays away."""
    name, data = largest(plan.shards[0])
    rot(object_of(root, plan.shards[0]), data.start)
    opened = Store.open

    def read_only(place: Path, *, create: bool = True) -> Store:
        store = opened(place, create=create)
        store.writable, store.why_not = False, "the store is read-only"
        return store

    monkeypatch.setattr("fp8fs.assembly.Store.open", read_only)
    monkeypatch.setattr("fp8fs.building.build_tree", lambda *args, **options: tree_of(root, plan))
    with pytest.raises(StoreDamagedError, match=f"{plan.shards[0].path}: {name}: "):
        copy(world, root, room / "copy", [])
    assert sorted(path.name for path in room.iterdir()) == ["store"]


def test_a_user_gets_a_right_copy_and_one_line(
    world: World, root: Path, plan: Plan, room: Path
) -> None:
    """The command ends with 0, says what was damaged on stderr and prints DIR; without damage it says nothing of it."""
    user, scheme = Fp8fs(root), ("--scheme", RECIPE.scheme)
    name, data = largest(plan.shards[1])
    rot(object_of(root, plan.shards[1]), data.start)
    shown_once = user.run("build", world.src, *scheme, "--to", room / "one")
    assert f"{plan.shards[1].path}: {name}: its bytes are not" in shown_once.stderr
    assert shown_once.stdout == f"{room / 'one'}\n"
    assert shown(room / "one") == world.bytes
    shown_again = user.run("build", world.src, *scheme, "--to", room / "two")
    assert "made again" not in shown_again.stderr
    assert shown(room / "two") == world.bytes


def test_a_tree_that_others_give_up_is_completed_again(
    world: World, root: Path, plan: Plan, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that another process finds just after the filling, or just before the copy, ends neither build nor copy."""
    filled, surveyed, times = Engine.fill, survey, {"filled": 0, "surveyed": 0}

    def give_up(when: str) -> None:
        times[when] += 1
        if times[when] == 1:
            Store.open(root).tree(plan.plan_id).doubt()

    def fill(engine: Engine, *args: object) -> None:
        filled(engine, *args)  # type: ignore[arg-type]
        give_up("filled")

    def look(*args: object) -> object:
        give_up("surveyed")
        return surveyed(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "fill", fill)
    monkeypatch.setattr("fp8fs.copies.survey", look)
    copy(world, root, room / "copy", [])
    assert times == {"filled": 3, "surveyed": 2}
    assert shown(room / "copy") == world.bytes
    assert snapshot(tree_of(root, plan)) == world.tree


def test_many_at_once_each_get_a_right_copy(
    world: World, root: Path, plan: Plan, room: Path
) -> None:
    """Several commands meet the same damage, or a tree that another one has given up for it."""
    user = Fp8fs(root)
    for shard in plan.shards:
        rot(object_of(root, shard), largest(shard)[1].start)
    commands = [
        user.popen("build", world.src, "--scheme", RECIPE.scheme, "--to", room / f"copy{number}")
        for number in range(4)
    ]
    ends = [(command.communicate(timeout=120), command.returncode) for command in commands]
    assert [code for _, code in ends] == [0] * 4, ends
    for number in range(4):
        assert shown(room / f"copy{number}") == world.bytes
    assert "made again" in "".join(err for (_, err), _ in ends)


@pytest.mark.parametrize("links", [True, False])
def test_a_normalized_cache_of_rotten_shards_has_the_right_bytes(
    room: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Linked or copied, what the cache holds is what an undamaged store gives."""
    h3_like(room / "src", shards=12)

    def build(target: str, store: str, told: list[str]) -> dict[str, object]:
        place = build_normalized(
            room / "src",
            room / target,
            Recipe(),
            room / store,
            device="cpu",
            workers=1,
            note=told.append,
        )
        return dict(read_folder(place / "transformer"))

    if not links:
        monkeypatch.setattr("fp8fs.normalized._link", lambda sealed, target: False)
    wanted = build("right", "sound", [])
    build("first", "store", [])
    objects = sorted(room.glob("store/v1/objects/*/*.safetensors"), key=lambda p: p.stat().st_size)
    for path in (objects[0], objects[-1]):
        rot(path, path.stat().st_size - ROT)
    told: list[str] = []
    assert build("second", "store", told) == wanted
    assert len(told) == 2
    assert any(stored.dtype == FP8 for stored in wanted.values())  # type: ignore[attr-defined]
