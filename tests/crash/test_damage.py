"""Bytes flipped, files cut, swapped and lost: ``verify`` names what it is, and exactly that is made again."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8fs.assembly import survey
from fp8fs.audit import Audit, check_plan, check_store, set_aside
from fp8fs.building import build_tree, finished_tree
from fp8fs.core.plan import Plan, ViewShard
from fp8fs.errors import StoreError
from fp8fs.store.fsio import FsIo, StrPath
from fp8fs.store.store import Store
from fp8fs.tree import tree_faults
from tests.acceptance.harness import Fp8fs
from tests.crash.flows import LONG, RECIPE, World, check_sound, injected, read_view, reading

FLIPS = 600 if LONG else 60


@pytest.fixture
def root(world: World, room: Path) -> Path:
    """A store with two finished trees."""
    return world.fresh("two", room / "store")


@pytest.fixture
def plan(world: World, root: Path) -> Iterator[Plan]:
    with survey(world.src, RECIPE, root) as found:
        yield found.plan


def flip(path: Path, at: int) -> None:
    """Change one bit behind everybody's back: mode and dates stay."""
    facts = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))
    path.chmod(facts.st_mode & 0o7777)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def record_of(root: Path, shard: ViewShard) -> Path:
    return object_of(root, shard).with_suffix(".json")


def object_of(root: Path, shard: ViewShard) -> Path:
    return root / "v1" / "objects" / shard.object_id[:2] / f"{shard.object_id}.safetensors"


def inodes(root: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_ino for path in root.glob("v1/objects/*/*.safetensors")}


def verify(world: World, root: Path) -> Audit:
    """``fp8fs verify SRC``: what it finds is set aside."""
    with survey(world.src, RECIPE, root) as found:
        audit = check_plan(found)
        assert found.store is not None
        set_aside(found.store, audit.damage)
        return audit


def heal_and_check(world: World, root: Path, before: dict[str, int], damaged: set[str]) -> None:
    """A view on the store, read: the right bytes, and only what was damaged has new inodes."""
    with reading(world, root, serve="handoff", grain="shard") as (made, view):
        assert read_view(view, world.bytes) == world.bytes
        assert made.engine.stats().degraded == ""
    after = inodes(root)
    assert {key for key in before if before[key] != after[key]} == damaged
    assert verify(world, root).damage == ()
    with survey(world.src, RECIPE, root) as found:
        assert found.tree is not None
        shown = {path.name: path.read_bytes() for path in found.tree.path.glob("*.safetensors")}
        assert shown == world.bytes


@pytest.mark.parametrize("part", ["data", "scale"])
def test_a_flipped_weight_is_named_and_made_again(
    world: World, root: Path, plan: Plan, part: str
) -> None:
    """Of whichever tensor: verify says shard and tensor, the shard leaves the store, a mount makes that one again."""
    before = inodes(root)
    rng = random.Random(part)
    for shard in plan.shards:
        for unit in rng.sample(shard.units, 3):
            extent = unit.data if part == "data" else unit.scale
            if extent is None:
                continue
            flip(object_of(root, shard), extent.start + rng.randrange(extent.length))
            (damage,) = verify(world, root).damage
            assert (damage.path, damage.tensor) == (shard.path, unit.name)
            heal_and_check(world, root, before, {shard.object_id})
            before = inodes(root)


HARMS: dict[str, Callable[[Path, ViewShard], None]] = {
    "header flipped": lambda root, shard: flip(object_of(root, shard), 40),
    "cut short": lambda root, shard: os.truncate(object_of(root, shard), shard.size - 1),
    "grown": lambda root, shard: os.truncate(object_of(root, shard), shard.size + 1),
    "empty": lambda root, shard: os.truncate(object_of(root, shard), 0),
    "a folder": lambda root, shard: (object_of(root, shard).unlink(), object_of(root, shard).mkdir())[0],
    "a link": lambda root, shard: (
        object_of(root, shard).unlink(),
        object_of(root, shard).symlink_to("/etc/hostname"),
    )[0],
    "record flipped": lambda root, shard: flip(record_of(root, shard), 30),
    "record cut": lambda root, shard: os.truncate(record_of(root, shard), 50),
    "record gone": lambda root, shard: record_of(root, shard).unlink(),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_what_a_cheap_check_sees_is_made_again_at_the_next_use(
    world: World, root: Path, plan: Plan, harm: str
) -> None:
    """Size, header and record are looked at by every mount: no verify is needed, and only that shard is made again."""
    before = inodes(root)
    HARMS[harm](root, plan.shards[1])
    heal_and_check(world, root, before, {plan.shards[1].object_id})


@pytest.mark.parametrize("harm", HARMS)
def test_verify_calls_it_damage(world: World, root: Path, plan: Plan, harm: str) -> None:
    """What the cheap check refuses is damage for verify, too, not "not made yet"."""
    HARMS[harm](root, plan.shards[1])
    audit = verify(world, root)
    assert [(d.path, d.tensor, d.readable) for d in audit.damage] == [
        (plan.shards[1].path, "", True)
    ]
    assert audit.missing == 0
    assert finished_tree(world.src, RECIPE, root) is None


def test_two_shards_swapped(world: World, root: Path, plan: Plan) -> None:
    """Objects under each other's name, or records beside the wrong object: both shards are made again."""
    one, two = plan.shards[0], plan.shards[1]
    for place in (object_of, record_of):
        before = inodes(root)
        aside = root / "aside"
        place(root, one).rename(aside)
        place(root, two).rename(place(root, one))
        aside.rename(place(root, two))
        heal_and_check(world, root, before, {one.object_id, two.object_id})


def test_two_links_of_a_tree_swapped(world: World, root: Path, plan: Plan) -> None:
    """A finished tree whose shards have each other's name is set right by the next mount."""
    with survey(world.src, RECIPE, root) as found:
        assert found.tree is not None
        tree = found.tree.path
    one, two = (tree / shard.path for shard in plan.shards)
    aside = root / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    heal_and_check(world, root, inodes(root), set())


# -- trees whose shards are no links of the objects (a copied store, a filesystem without hard links) --------------


@pytest.fixture
def copied(world: World, root: Path, plan: Plan) -> Path:
    """The finished tree of a store that was copied without its hard links."""
    tree = finished_tree(world.src, RECIPE, root)
    assert tree is not None
    for shard in plan.shards:
        assert not (tree / shard.path).samefile(object_of(root, shard))
    return tree


def test_a_copied_trees_own_bytes_are_read(
    world: World, root: Path, plan: Plan, copied: Path
) -> None:
    """A weight flipped in the tree alone: verify of SRC, deep too, and of the store names it, blames no object, and the
    path is not given away; the next mount puts the sound object there."""
    shard, before = plan.shards[1], inodes(root)
    unit = shard.units[2]
    flip(copied / shard.path, unit.data.start + 3)
    with survey(world.src, RECIPE, root) as found:
        deep = check_plan(found, deep=True)
    store = check_store(Store.open(root, create=False))
    for audit in (deep, store, verify(world, root)):
        (damage,) = audit.damage
        assert (damage.path, damage.tensor, damage.object_id) == (shard.path, unit.name, "")
        assert damage.tree == plan.plan_id
    assert finished_tree(world.src, RECIPE, root) is None
    heal_and_check(world, root, before, set())


OWN_HARMS: dict[str, Callable[[Path], None]] = {
    "another size": lambda place: os.truncate(place, place.stat().st_size - 1),
    "another header": lambda place: flip(place, 40),
    "open to all": lambda place: place.chmod(0o666),
    "gone": lambda place: place.unlink(),
    "a link": lambda place: (place.unlink(), place.symlink_to("/etc/hostname"))[0],
    "a folder": lambda place: (place.unlink(), place.mkdir())[0],
}


@pytest.mark.parametrize(
    "harm", ["another size", "another header", "open to all", "gone", "a link"]
)
def test_what_a_look_at_a_copied_tree_sees_is_set_right(
    world: World, root: Path, plan: Plan, copied: Path, harm: str
) -> None:
    """Kind, size and header of a tree's own shards are looked at by every use: no path is given away, and a mount heals it."""
    before = inodes(root)
    OWN_HARMS[harm](copied / plan.shards[0].path)
    assert finished_tree(world.src, RECIPE, root) is None
    heal_and_check(world, root, before, set())


def test_small_files_of_a_copied_tree_get_their_modes_and_dates_back(
    world: World, root: Path, plan: Plan, copied: Path
) -> None:
    """What a copy opened to others is seen by every use, and set right by one that can write, folders too."""
    places = [
        copied / path for path, entry in plan.entries.items() if entry.kind in ("text", "dir")
    ]
    before = [place.stat() for place in places]
    for place in places:
        place.chmod(0o777)
        os.utime(place, ns=(1, 1))
    assert finished_tree(world.src, RECIPE, root) is None
    build_tree(world.src, RECIPE, root, device="cpu")
    assert finished_tree(world.src, RECIPE, root) == copied
    for place, facts in zip(places, before, strict=True):
        now = place.stat()
        assert (now.st_mode, now.st_mtime_ns) == (facts.st_mode, facts.st_mtime_ns), place


class NoLinks(FsIo):
    """A filesystem that has no hard links."""

    def link(self, source: StrPath, dest: StrPath, *, dest_dir_fd: int | None = None) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("at", [40, -1])
def test_where_there_are_no_hard_links_a_tree_is_checked_and_healed(
    world: World, root: Path, plan: Plan, copied: Path, at: int
) -> None:
    """Header or weight: verify names the tree's shard, and the next use copies the sound object again, and only that."""
    shard, before = plan.shards[0], inodes(root)
    kept = (copied / plan.shards[1].path).stat().st_ino
    flip(copied / shard.path, at % shard.size)
    with injected(NoLinks()):
        (damage,) = verify(world, root).damage
        assert (damage.path, damage.object_id, damage.tree) == (shard.path, "", plan.plan_id)
        heal_and_check(world, root, before, set())
    assert not (copied / shard.path).samefile(object_of(root, shard))
    assert (copied / plan.shards[1].path).stat().st_ino == kept


@pytest.mark.parametrize("harm", OWN_HARMS)
def test_verify_calls_a_trees_wrong_shard_damage(
    world: World, root: Path, plan: Plan, copied: Path, harm: str
) -> None:
    """Of SRC and of the store: the shard of the tree is named, and the object stays."""
    OWN_HARMS[harm](copied / plan.shards[0].path)
    for audit in (check_store(Store.open(root, create=False)), verify(world, root)):
        assert [(d.path, d.tensor, d.object_id) for d in audit.damage] == [
            (plan.shards[0].path, "", "")
        ]
    assert audit.checked == len(plan.shards)


@pytest.mark.parametrize("harm", OWN_HARMS)
def test_a_read_only_store_does_not_serve_a_tree_that_looks_wrong(
    world: World,
    root: Path,
    plan: Plan,
    copied: Path,
    harm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be set right is not handed over: the view is served inline from the sound objects, and says why."""
    OWN_HARMS[harm](copied / plan.shards[0].path)
    monkeypatch.setattr("fp8fs.store.places.os.access", lambda *args, **options: False)
    with reading(world, root, serve="handoff", grain="shard") as (made, view):
        assert not view.handoff
        assert read_view(view, world.bytes) == world.bytes
        assert made.engine.stats().source_bytes_read == 0
        assert any(plan.shards[0].path in line for line in made.warnings)


def test_a_read_only_store_hands_a_sound_copied_tree_over(
    world: World, root: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That its shards are no links of the objects is no reason to serve it inline."""
    monkeypatch.setattr("fp8fs.store.places.os.access", lambda *args, **options: False)
    with reading(world, root, serve="handoff", grain="shard") as (made, view):
        assert view.handoff
        assert made.tree is not None
        assert made.tree.path == copied
        assert read_view(view, world.bytes) == world.bytes


def test_a_look_at_a_tree_reads_headers_at_most(world: World, root: Path, plan: Plan) -> None:
    """Of a shard that is a link of its object nothing is read for the tree's sake, of one of its own its header, once."""
    tree = finished_tree(world.src, RECIPE, root)
    assert tree is not None
    place = tree / plan.shards[0].path
    place.unlink()
    os.link(object_of(root, plan.shards[0]), place)
    io = Watching("trees")
    with injected(io), survey(world.src, RECIPE, root) as found:
        assert found.tree is not None
        assert tree_faults(found.plan, found.source, found.tree) == {}
    other = plan.shards[1]
    assert io.read == {Path(other.path).stem: set(range(len(other.preamble)))}


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_the_small_files_of_a_tree(world: World, root: Path, name: str, harm: str) -> None:
    """Cut or gone: seen and healed at the next use, and no path is given away before. Flipped: named by verify, then healed."""
    tree = finished_tree(world.src, RECIPE, root)
    assert tree is not None
    place = tree / name
    wanted = place.read_bytes()
    if harm == "flip":
        flip(place, len(wanted) // 2)
        (damage,) = verify(world, root).damage
        assert (damage.path, damage.object_id) == (name, "")
    elif harm == "cut":
        os.truncate(place, len(wanted) - 1)
    else:
        place.unlink()
    assert finished_tree(world.src, RECIPE, root) is None
    assert build_tree(world.src, RECIPE, root, device="cpu") == tree
    assert place.read_bytes() == wanted
    assert finished_tree(world.src, RECIPE, root) == tree
    assert verify(world, root).damage == ()


def test_a_damaged_manifest_is_named_and_written_again(world: World, root: Path) -> None:
    """One number in manifest.json is another: verify says so, the next build writes it anew."""
    tree = finished_tree(world.src, RECIPE, root)
    assert tree is not None
    place = tree / ".fp8fs" / "manifest.json"
    document = json.loads(place.read_bytes())
    document["shards"][0]["size"] += 1
    place.write_text(json.dumps(document))
    flip(tree / ".fp8fs" / "plan.json", 100)
    damage = verify(world, root).damage
    assert [item.path for item in damage] == [".fp8fs/manifest.json", ".fp8fs/plan.json"]
    build_tree(world.src, RECIPE, root, device="cpu")
    assert verify(world, root).damage == ()


@pytest.mark.parametrize("template", ["half", "unsealed", "two"])
def test_any_bit_of_any_file(
    world: World, room: Path, template: str, record_property: Callable[[str, object], None]
) -> None:
    """One bit anywhere in a store: what is read is right, or it is a sealed weight, and then verify names the shard."""
    rng = random.Random(template)
    for _ in range(FLIPS):
        root = world.fresh(template, room / "store")
        files = [p for p in sorted(root.rglob("*")) if p.is_file() and not p.is_symlink()]
        target = rng.choice([path for path in files if path.stat().st_size])
        flip(target, rng.randrange(target.stat().st_size))
        with reading(world, root, serve="handoff", grain="shard") as (_, view):
            wrong = {n for n, d in read_view(view, world.bytes).items() if d != world.bytes[n]}
        if wrong:
            assert target.suffix == ".safetensors" or target.name == "data", target
            damage = verify(world, root).damage
            assert {item.path for item in damage} == wrong, target
            assert all(item.tensor for item in damage), target
        set_aside(Store.open(root), check_store(Store.open(root)).damage)
        verify(world, root)
        check_sound(world, root)
    record_property("faults injected", FLIPS)


def test_a_journal_with_any_damage_gives_no_wrong_unit(
    world: World, room: Path, record_property: Callable[[str, object], None]
) -> None:
    """Flipped, cut, doubled or shuffled lines: units that the journal still names have their bytes, the rest is made again."""
    rng = random.Random(5)
    for _ in range(FLIPS):
        root = world.fresh("unsealed", room / "store")
        for journal in root.glob("v1/partial/*/journal"):
            data = bytearray(journal.read_bytes())
            kind = rng.randrange(4)
            if kind == 0:
                for _ in range(rng.randrange(1, 6)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del data[rng.randrange(len(data)) :]
            elif kind == 2:
                lines = bytes(data).split(b"\n")
                rng.shuffle(lines)
                data = bytearray(b"\n".join(lines))
            else:
                at = rng.randrange(len(data))
                data[at:at] = data[at : at + rng.randrange(200)]
            journal.write_bytes(data)
        check_sound(world, root)
    record_property("faults injected", FLIPS)


class Watching(FsIo):
    """Notes which bytes of sealed objects are read, or of the shards in *trees*."""

    def __init__(self, folder: str = "objects") -> None:
        self._folder = folder
        self.read: dict[str, set[int]] = {}

    def pread_once(self, fd: int, length: int, file_offset: int) -> bytes:
        data = super().pread_once(fd, length, file_offset)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".safetensors" and self._folder in path.parts:
            seen = self.read.setdefault(path.stem, set())
            seen.update(range(file_offset, file_offset + len(data)))
        return data


def test_a_start_reads_headers_and_verify_reads_all(world: World, root: Path, plan: Plan) -> None:
    """A mount looks at size, preamble and record of each sealed shard and at no weight; only ``verify`` reads every byte."""
    io = Watching()
    with injected(io), reading(world, root, serve="handoff", grain="shard") as (_, view):
        assert {view.lookup(name).kind for name in world.bytes} == {"link"}
    headers = {shard.object_id: set(range(len(shard.preamble))) for shard in plan.shards}
    assert io.read == headers
    with injected(io):
        assert verify(world, root).damage == ()
    assert io.read == {shard.object_id: set(range(shard.size)) for shard in plan.shards}


# -- a bad disk is not corruption ------------------------------------------------------------------


class Unreadable(FsIo):
    """Reads of one object's weights fail, as from a bad sector."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path, self._begin = str(path), begin

    def pread_once(self, fd: int, length: int, file_offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == self._path and file_offset >= self._begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread_once(fd, length, file_offset)


@pytest.mark.parametrize("begin", [0, 8192])
def test_a_bad_sector_is_not_called_corruption(
    world: World, root: Path, plan: Plan, begin: int
) -> None:
    """EIO: verify says that it cannot be read, sets nothing aside, and a mount gives the right bytes all the same."""
    before = inodes(root)
    io = Unreadable(object_of(root, plan.shards[0]), begin)
    with injected(io):
        audit = verify(world, root)
        (damage,) = audit.damage
        assert (damage.path, damage.readable) == (plan.shards[0].path, False)
        assert "Input/output error" in damage.what
        assert [d.readable for d in check_store(Store.open(root)).damage] == [False]
        with reading(world, root, serve="inline", grain="shard") as (_, view):
            assert read_view(view, world.bytes) == world.bytes
    assert inodes(root) == before
    assert list((root / "v1" / "damaged").glob("*.safetensors")) == []


def test_exit_codes_tell_damage_from_a_bad_disk(
    world: World, root: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """``fp8fs verify``: 0 for a sound store, 50 for damage, 29 for what cannot be read."""
    from fp8fs.cli import main

    def run() -> tuple[int, Any]:
        code = main(
            [
                "verify",
                str(world.src),
                "--store",
                str(root),
                "--scheme",
                RECIPE.scheme,
                "--json",
                "-q",
            ]
        )
        return code, json.loads(capsys.readouterr().out)

    assert run()[0] == 0
    with injected(Unreadable(object_of(root, plan.shards[0]), 8192)):
        code, document = run()
    assert code == StoreError.exit == 29
    assert [item["readable"] for item in document["damage"]] == [False]
    flip(object_of(root, plan.shards[0]), plan.shards[0].size - 1)
    code, document = run()
    assert code == 50
    assert [item["path"] for item in document["damage"]] == [plan.shards[0].path]
    assert run()[0] == 0


def test_a_store_that_cannot_be_looked_at_is_not_called_sound(world: World, room: Path) -> None:
    """``fp8fs verify SRC`` of a store that is refused, or does not answer, ends with its reason and 29, not with "no damaged"."""
    store = room / "store"
    store.write_text("no store")
    shown = Fp8fs(store).run("verify", world.src, code=29)
    assert "is not a directory" in shown.stderr
    assert shown.stdout == ""


def test_the_command_line_heals(world: World, root: Path, plan: Plan) -> None:
    """verify, then build, as a user does it: exit 50 once, then everything is right again."""
    user = Fp8fs(root)
    flip(object_of(root, plan.shards[1]), plan.shards[1].size - 1)
    user.run("verify", world.src, "--scheme", RECIPE.scheme, code=50)
    tree = user.build(world.src, "--scheme", RECIPE.scheme)
    assert {path.name: path.read_bytes() for path in tree.glob("*.safetensors")} == world.bytes
    user.run("verify", world.src, "--scheme", RECIPE.scheme, "--deep")
    user.run("verify", root)


def test_a_copied_store_is_used_and_a_moved_one_too(world: World, root: Path, room: Path) -> None:
    """Without modes, owners and dates (cp -r) nothing is made again."""
    copy = shutil.copytree(root, room / "copy", symlinks=True, copy_function=shutil.copyfile)
    with reading(world, copy, serve="handoff", grain="shard") as (made, view):
        assert read_view(view, world.bytes) == world.bytes
        assert made.engine.stats().source_bytes_read == 0
