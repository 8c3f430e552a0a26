"""The rooms put together, without a mount: build, path, keep lists, verify, adoption, degraded stores."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

import fp8fs
from fp8fs.adoption import Adoption, Difference, adopt
from fp8fs.assembly import assemble, survey
from fp8fs.audit import check_plan, check_store
from fp8fs.building import build_tree, finished_tree, scan_values
from fp8fs.core.manifest import decode_manifest, encode_manifest, encode_plan
from fp8fs.core.recipe import Recipe
from fp8fs.errors import StoreFullError, UsageError
from fp8fs.store.store import Store, Tree
from fp8fs.tree import TreeKeeper, is_pinned_for_good, origin_of
from tests import oracle
from tests.builders import llama_like, wan_like

DOWN = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    llama_like(tmp_path / "src")
    return tmp_path / "src"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def poison(src: Path, name: str, index: int) -> None:
    """Put a NaN into one BF16 tensor."""
    for path in src.glob("*.safetensors"):
        start, entries, _ = oracle.read_header(path)
        if name in entries:
            with path.open("r+b") as file:
                file.seek(start + entries[name]["data_offsets"][0] + 2 * index)
                file.write(struct.pack("<H", 0x7FC0))


def flip(path: Path, at: int) -> None:
    """Damage one byte of a sealed file behind everybody's back, attributes restored."""
    facts = path.stat()
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(facts.st_mode & 0o7777)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_build_gives_a_finished_tree(src: Path, root: Path) -> None:
    """The tree is complete, described by its manifest, kept from gc, and found again by ``path``."""
    assert finished_tree(src, Recipe(), root) is None
    tree = fp8fs.build(src, store=root)
    assert finished_tree(src, Recipe(), root) == tree
    manifest = decode_manifest((tree / ".fp8fs" / "manifest.json").read_bytes())
    assert {shard.path for shard in manifest.shards} == {p.name for p in tree.glob("*.safetensors")}
    assert all(shard.digest for shard in manifest.shards)
    assert manifest.name == "src"
    assert is_pinned_for_good(tree)
    assert origin_of(tree) == str(src)


def test_the_whole_plan_is_in_a_finished_tree_only(src: Path, root: Path) -> None:
    """It is as long as a large checkpoint's index and nobody waits for it; what ``ls`` needs is there at once."""
    with assemble(src, Recipe(), root, device="cpu") as made:
        assert made.tree is not None
        inside = made.tree.path / ".fp8fs"
        assert decode_manifest((inside / "manifest.json").read_bytes()).name == "src"
        assert not (inside / "plan.json").exists()
    with survey(src, Recipe(), None) as found:
        expected = encode_plan(found.plan)
    assert fp8fs.build(src, store=root) == made.tree.path
    assert (inside / "plan.json").read_bytes() == expected


def test_the_api_takes_paths_as_text_and_a_target(src: Path, root: Path, tmp_path: Path) -> None:
    """``fp8fs.build(to=...)`` returns the copy, which holds the tree's bytes."""
    copy = fp8fs.build(str(src), str(tmp_path / "copy"), store=str(root))
    tree = finished_tree(src, Recipe(), root)
    assert copy == tmp_path / "copy"
    assert tree is not None
    assert oracle.read_folder(copy) == oracle.read_folder(tree)


def test_unchanged_files_are_copied_or_linked_by_size(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files become the tree's own, large ones stay SRC's."""
    monkeypatch.setattr("fp8fs.tree.COPY_MAX_BYTES", 1000)
    wan_like(tmp_path / "wan")
    tree = fp8fs.build(tmp_path / "wan", store=root)
    vae = next((tree / "vae").glob("*.safetensors"))
    assert vae.is_symlink()
    assert vae.resolve() == tmp_path / "wan" / "vae" / vae.name
    assert not (tree / "vae" / "config.json").is_symlink()


def test_build_keeps_what_is_not_finite_and_remembers(src: Path, root: Path) -> None:
    """The weight and its fusion group stay BF16, every other one is FP8, and the next plan knows."""
    poison(src, UP, 5)
    poison(src, DOWN, 9)
    notes: list[str] = []
    tree = fp8fs.build(src, store=root, scheme="per_tensor", note=notes.append)
    view, source = oracle.read_folder(tree), oracle.read_folder(src)
    for name in (UP, GATE, DOWN):
        assert view[name] == source[name]
    assert view[UP.replace("layers.0", "layers.1")].dtype == "F8_E4M3"
    assert any(UP in note and "index 5" in note for note in notes)
    with survey(src, Recipe(scheme="per_tensor"), root) as found:
        assert set(found.recipe.recorded_keep) == {UP, DOWN}


def test_scan_records_before_anything_is_made(src: Path, root: Path) -> None:
    """``plan --scan`` finds the same weights, and a mount afterwards serves the shard."""
    poison(src, DOWN, 3)
    with survey(src, Recipe(), root, create=True) as found:
        seen = scan_values(found, device="cpu")
    assert [(f.tensor, f.index) for f in seen.non_finite] == [(DOWN, 3)]
    with assemble(src, Recipe(), root, device="cpu") as assembled:
        for shard in range(len(assembled.survey.plan.shards)):
            assembled.engine.ensure_sealed(shard, lambda: None)
        assert assembled.tree is not None
        assert assembled.tree.is_complete()


def test_the_last_sealed_shard_completes_the_tree(src: Path, root: Path) -> None:
    """Shards of a mount appear in the tree as they are sealed; COMPLETE comes with the last."""
    with assemble(src, Recipe(), root, device="cpu", workers=1) as assembled:
        tree = assembled.tree
        assert tree is not None
        first = assembled.engine.ensure_sealed(0, lambda: None)
        linked = tree.path / assembled.survey.plan.shards[0].path
        assert linked.samefile(first)
        assembled.engine.ensure_sealed(1, lambda: None)
        assert tree.is_complete()


def test_verify_names_damaged_tensors(src: Path, root: Path) -> None:
    """A flipped byte is found by plan and by store, and named; the rest is not blamed."""
    tree = fp8fs.build(src, store=root)
    with survey(src, Recipe(), root) as found:
        assert check_plan(found).damage == ()
        assert check_plan(found, deep=True).damage == ()
        unit = next(u for s in found.plan.shards for u in s.units if u.name == DOWN)
        home = next(s for s in found.plan.shards if unit in s.units)
        flip(tree / home.path, unit.data.start + 7)
        (damage,) = check_plan(found).damage
        assert (damage.path, damage.tensor) == (home.path, DOWN)
        store = Store.open(root, create=False)
        (damage,) = check_store(store).damage
        assert (damage.object_id, damage.tensor) == (home.object_id, DOWN)


# -- many at one tree -------------------------------------------------------------------------------


def manifest_of(tree: Path) -> Path:
    return tree / ".fp8fs" / "manifest.json"


@pytest.mark.parametrize("moment", ["ensure_dir", "write_manifest"])
def test_who_prepares_a_tree_that_others_finish_takes_nothing_from_it(
    src: Path, root: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the moment between the look for COMPLETE and the last write, the manifest keeps its digests."""
    with survey(src, Recipe(), root, create=True) as found:
        assert found.store is not None
        keeper = TreeKeeper(found.plan, found.source, found.store, found.manifest)
        step, built = getattr(keeper.tree, moment), []

        def overtaken(*args: object, **options: object) -> None:
            if not built and not options.get("name"):
                built.append(fp8fs.build(src, store=root))
            step(*args, **options)

        monkeypatch.setattr(keeper.tree, moment, overtaken)
        keeper.prepare()
        assert built == [keeper.tree.path]
        manifest = decode_manifest(manifest_of(keeper.tree.path).read_bytes())
        assert all(shard.digest for shard in manifest.shards)
        assert check_plan(found).damage == ()


def test_who_finishes_a_tree_that_others_prepare_has_the_last_word(
    src: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest without digests that comes between the right one and COMPLETE does not stay."""
    complete, done = Tree.complete, []

    def overtaken(tree: Tree) -> None:
        if not done:
            with survey(src, Recipe(), root) as found:
                done.append(encode_manifest(found.manifest))
            tree.write_manifest(done[0])
        complete(tree)

    monkeypatch.setattr(Tree, "complete", overtaken)
    tree = fp8fs.build(src, store=root)
    assert done
    assert manifest_of(tree).read_bytes() != done[0]
    with survey(src, Recipe(), root) as found:
        assert check_plan(found).damage == ()


@pytest.mark.parametrize("meanwhile", ["finished", "given up"])
def test_verify_looks_again_before_it_calls_a_document_damaged(
    src: Path, root: Path, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others finish or give up while it waits is sound; what stays as it is, is not."""
    place = manifest_of(fp8fs.build(src, store=root))
    right = place.read_bytes()
    with survey(src, Recipe(), root) as found:
        assert found.tree is not None
        tree, waits = found.tree, []

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                _ = place.write_bytes(right) if meanwhile == "finished" else tree.doubt()

        monkeypatch.setattr("fp8fs.audit.sleep", wait)
        place.write_bytes(encode_manifest(found.manifest))
        assert check_plan(found).damage == ()
        assert len(waits) == 2
        monkeypatch.setattr("fp8fs.audit.sleep", waits.append)
        if meanwhile == "finished":
            place.write_bytes(encode_manifest(found.manifest))
            assert [item.path for item in check_plan(found).damage] == [".fp8fs/manifest.json"]
            assert sum(waits[2:]) < 2


@pytest.mark.parametrize(
    "other",
    [
        Recipe(scheme="per_channel", keep=("model.layers.0.mlp.down_proj.weight",)),
        Recipe(components=(".",), keep=("*layers.0.mlp.down_proj*",)),
        Recipe(keep=("*layers.0.mlp.down_proj*", "*layers.0.mlp.down_proj.weight")),
    ],
)
def test_verify_takes_a_recipe_in_other_words(src: Path, root: Path, other: Recipe) -> None:
    """A default spelled out, or a glob that matches the same: the plan is the same, and nothing is damaged, either way round."""
    first = Recipe(keep=("*layers.0.mlp.down_proj.weight",))
    for built, asked, place in ((first, other, root), (other, first, root.with_name("second"))):
        tree = build_tree(src, built, place, device="cpu")
        with survey(src, asked, place) as found:
            assert found.recipe != built
            assert found.tree is not None
            assert found.tree.path == tree
            assert check_plan(found).damage == ()


@pytest.mark.parametrize("recipe", [{"scheme": "block"}, {"scheme": "x"}, {"components": ["vae"]}])
def test_verify_refuses_a_recipe_that_means_something_else(
    src: Path, root: Path, recipe: dict[str, object]
) -> None:
    """A manifest that names a recipe of another view, or of none, is damaged."""
    place = fp8fs.build(src, store=root) / ".fp8fs" / "manifest.json"
    document = json.loads(place.read_bytes())
    document["recipe"].update(recipe)
    place.write_text(json.dumps(document, indent=2) + "\n")
    with survey(src, Recipe(), root) as found:
        assert [damage.path for damage in check_plan(found).damage] == [".fp8fs/manifest.json"]


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "block", "block_free"])
def test_verify_reads_every_scheme_back(src: Path, root: Path, scheme: str) -> None:
    """Stores of every scheme pass, by plan, by store and against the source."""
    fp8fs.build(src, store=root, scheme=scheme)
    with survey(src, Recipe(scheme=scheme), root) as found:
        audit = check_plan(found, deep=True)
    assert (audit.checked, audit.missing, audit.damage) == (2, 0, ())
    assert check_store(Store.open(root, create=False)).damage == ()


def test_deep_sees_what_digests_cannot(
    src: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed bytes that fit their record but not the source are found by --deep alone, and named."""
    tree = fp8fs.build(src, store=root)
    monkeypatch.setattr(Store, "verify_object", lambda *args, **options: [])
    with survey(src, Recipe(), root) as found:
        unit = next(u for s in found.plan.shards for u in s.units if u.name == DOWN)
        home = next(s for s in found.plan.shards if unit in s.units)
        assert unit.scale is not None
        flip(tree / home.path, unit.scale.start)
        assert check_plan(found).damage == ()
        assert [damage.tensor for damage in check_plan(found, deep=True).damage] == [DOWN]


def test_adoption_needs_equal_bytes(src: Path, root: Path, tmp_path: Path) -> None:
    """A copy with new dates is adopted shard by shard, and plans to the same objects."""
    fp8fs.build(src, store=root)
    copy = tmp_path / "copy"
    shutil.copytree(src, copy, copy_function=shutil.copyfile)
    with survey(src, Recipe(), root) as found:
        wanted = {shard.object_id for shard in found.plan.shards}
    with survey(copy, Recipe(), root) as found:
        assert not wanted & {shard.object_id for shard in found.plan.shards}
        done = adopt(found)
        assert (len(done.adopted), done.refused) == (2, {})
    with survey(copy, Recipe(), root) as found:
        assert {shard.object_id for shard in found.plan.shards} == wanted
        assert adopt(found) == Adoption({}, {})


def test_what_is_not_adopted_is_named(src: Path, root: Path, tmp_path: Path) -> None:
    """The first tensor that differs, by name, whichever tree is compared; the other shard is adopted all the same."""
    fp8fs.build(src, store=root)
    copy = tmp_path / "copy"
    shutil.copytree(src, copy, copy_function=shutil.copyfile)
    changed = next(p for p in copy.glob("*.safetensors") if DOWN in oracle.read_header(p)[1])
    (other,) = (p.name for p in copy.glob("*.safetensors") if p != changed)
    start, entries, _ = oracle.read_header(changed)
    with changed.open("r+b") as file:
        file.seek(start + entries[DOWN]["data_offsets"][0])
        file.write(bytes(2))
    with survey(copy, Recipe(), root) as found:
        done = adopt(found)
    assert done.adopted.keys() == {other}
    assert done.refused == {changed.name: Difference(DOWN, "has other values")}
    fp8fs.build(copy, store=root)
    with survey(copy, Recipe(), root) as found:
        assert adopt(found) == Adoption({}, {})


def test_a_shard_with_another_name_in_it_is_refused(src: Path, root: Path, tmp_path: Path) -> None:
    """Of the same size, dtypes and values: it is another header that is named, and no tensor."""
    fp8fs.build(src, store=root)
    copy = tmp_path / "copy"
    shutil.copytree(src, copy, copy_function=shutil.copyfile)
    changed = next(p for p in copy.glob("*.safetensors") if NORM in oracle.read_header(p)[1])
    for path in (changed, copy / "model.safetensors.index.json"):
        data = path.read_bytes()
        assert data.count(NORM.encode()) == 1
        path.write_bytes(data.replace(NORM.encode(), NORM.replace("norm", "morn").encode()))
    with survey(copy, Recipe(), root) as found:
        done = adopt(found)
    assert done.refused == {changed.name: Difference("", "has other names or shapes")}
    assert changed.name not in done.adopted


def test_what_can_be_compared_with_nothing_is_not_called_different(src: Path, root: Path) -> None:
    """In a store that holds nothing of the kind there is nothing to adopt, and nothing refused."""
    fp8fs.build(src, store=root, scheme="block")
    with survey(src, Recipe(scheme="per_tensor"), root) as found:
        assert adopt(found) == Adoption({}, {})


def test_a_shard_whose_tree_lost_its_objects_is_refused(
    src: Path, root: Path, tmp_path: Path
) -> None:
    """What proves nothing is not adopted, and that is said, without the name of a tensor."""
    with survey(src, Recipe(), root, create=True) as found:
        fp8fs.build(src, store=root)
        assert found.store is not None
        first, second = found.plan.shards
        found.store.object_path(first.object_id).with_suffix(".json").unlink()
        found.store.object_path(second.object_id).unlink()
    copy = tmp_path / "copy"
    shutil.copytree(src, copy, copy_function=shutil.copyfile)
    with survey(copy, Recipe(), root) as found:
        done = adopt(found)
    assert done.adopted == {}
    assert {item.tensor for item in done.refused.values()} == {""}
    assert all("is gone" in item.what for item in done.refused.values())
    assert len(done.refused) == 2


def test_a_store_inside_src_is_refused(src: Path) -> None:
    """Nothing is ever written below SRC, by whatever name."""
    link = src.parent / "link"
    link.symlink_to(src)
    for root in (src, src / "a" / "b", link / "store"):
        with pytest.raises(UsageError, match="inside SRC"):
            survey(src, Recipe(), root, create=True)
    assert not (src / "a").exists()
    assert not (src / "store").exists()


def test_without_a_store_a_view_is_served_all_the_same(src: Path, tmp_path: Path) -> None:
    """A store that cannot be made degrades a mount and stops a build."""
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(StoreFullError):
        fp8fs.build(src, store=blocked / "store")
    with assemble(src, Recipe(), blocked / "store", device="cpu") as assembled:
        assert assembled.tree is None
        assert any("nothing is kept" in line for line in assembled.warnings)
        view = assembled.view(serve="handoff", grain="shard", bound=False)
        assert not view.handoff
        name = assembled.survey.plan.shards[0].path
        handle = view.open(name, lambda: None)
        start = view.pread(handle, 0, 8, lambda: None)
        view.release(handle)
        assert int.from_bytes(start, "little") > 0
