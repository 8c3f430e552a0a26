"""Facts and records of the store that say anything at all: each is used if it is sound, and absent if not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8fs.assembly import survey
from fp8fs.building import build_tree
from fp8fs.core.recipe import Recipe
from fp8fs.errors import Fp8fsError, StoreError
from fp8fs.source import Source, hints_key
from fp8fs.store.guard import encode_checked
from fp8fs.store.store import Store
from tests.builders import llama_like
from tests.conftest import LONG
from tests.fuzz.documents import HOSTILE
from tests.fuzz.targets import sound_message
from tests.storing import Toy

EXAMPLES = 2000 if LONG else 60
KINDS = ("scans", "hints", "adopted")

scalars = st.sampled_from([x for x in HOSTILE if not (isinstance(x, float) and x != x)])
names = st.text(max_size=8) | st.sampled_from(
    ["schema", "non_finite", "identity", "mtime_ns", "version", "hints", "model.safetensors"]
)
values = st.recursive(
    scalars | st.integers(-3, 3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=6,
)
LIKELY = {
    "scans": st.fixed_dictionaries({"schema": st.just(1) | scalars, "non_finite": values}),
    "hints": st.fixed_dictionaries({"version": st.just(1), "hints": values}),
    "adopted": st.fixed_dictionaries({"identity": scalars | values, "mtime_ns": scalars}),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Path]]:
    """A checkpoint, a store, and where the store keeps each kind of fact about it."""
    base = tmp_path_factory.mktemp("facts")
    llama_like(base / "src", layers=1, shards=1)
    build_tree(base / "src", Recipe(), base / "store")
    with Source.open(base / "src") as source:
        identity = source.checkpoint.shards["model.safetensors"].identity
    home = base / "store" / "v1"
    places = {
        "scans": home / "scans" / f"{identity}.json",
        "hints": home / "hints" / f"{hints_key(base / 'src')}.json",
        "adopted": home / "adopted" / f"{identity}.json",
    }
    return base / "src", base / "store", places


@pytest.mark.parametrize("kind", KINDS)
def test_any_fact(
    world: tuple[Path, Path, dict[str, Path]],
    kind: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Whatever a fact says, a plan is made or one sentence says why not; and with no fact it is the old plan again."""
    src, store, places = world
    tried = 0

    def planned() -> object:
        with survey(src, Recipe(), store).source as source:
            return source.checkpoint.shards["model.safetensors"].identity

    before = planned()

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(LIKELY[kind] | values)
    def check(value: object) -> None:
        nonlocal tried
        tried += 1
        try:
            content = encode_checked(value)
        except (ValueError, OverflowError):
            return  # nobody could have written it
        places[kind].write_bytes(content)
        try:
            survey(src, Recipe(), store).source.close()
        except Fp8fsError as err:
            sound_message(err)

    try:
        check()
    finally:
        places[kind].unlink(missing_ok=True)
    assert planned() == before
    record_property("hostile inputs", tried)


def test_a_date_that_no_file_can_have(world: tuple[Path, Path, dict[str, Path]]) -> None:
    """An adopted date out of range is no date: the tree is built as if nothing had been adopted."""
    src, store, places = world
    places["adopted"].write_bytes(encode_checked({"identity": "ab" * 16, "mtime_ns": 2**63 - 1}))
    try:
        tree = build_tree(src, Recipe(), store)
    finally:
        places["adopted"].unlink()
    assert (tree / "model.safetensors").stat().st_mtime_ns < 2**62


@st.composite
def damage(draw: st.DrawFn, size: int) -> tuple[int, int, bytes]:
    """Where to cut, where to go on, what to put between."""
    at = draw(st.integers(0, size))
    to = draw(st.integers(at, min(size, at + 80)))
    return at, to, draw(st.binary(max_size=20) | st.sampled_from([b"\n" * 9, b"9" * 300]))


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_a_damaged_journal_loses_units_and_invents_none(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With any bytes of a journal changed the partial opens, believes true records only, and ends in the same object."""
    root = tmp_path_factory.mktemp("journal") / "store"
    toy = Toy(count=4)
    store = Store.open(root)
    toy.finished(store, [0, 1, 2])
    (journal,) = root.glob("v1/partial/*/journal*")
    raw = journal.read_bytes()
    at, to, put = data.draw(damage(len(raw)))
    journal.write_bytes(raw[:at] + put + raw[to:])
    with toy.open(Store.open(root)) as partial:
        for unit, record in partial.records.items():
            assert record == toy.record(unit)
            assert unit in (0, 1, 2)
    path, _ = toy.build(Store.open(root))
    assert path.read_bytes() == toy.whole()


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_a_damaged_record_is_a_miss(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With any bytes of an object's record changed the object is the true one, or is made again."""
    root = tmp_path_factory.mktemp("record") / "store"
    toy = Toy(count=2)
    store = Store.open(root)
    toy.build(store)
    (record,) = root.glob("v1/objects/*/*.json")
    raw = record.read_bytes()
    at, to, put = data.draw(damage(len(raw)))
    record.chmod(0o600)
    record.write_bytes(raw[:at] + put + raw[to:])
    again = Store.open(root)
    found = again.find_object(toy.spec)
    if found is None:
        found, _ = toy.build(again)
    assert found.read_bytes() == toy.whole()
    assert again.record(toy.spec.object_id) is not None


def test_facts_that_are_no_files(world: tuple[Path, Path, dict[str, Path]]) -> None:
    """A symlink, a FIFO, a device or a folder under a fact's name is neither followed nor opened for long."""
    src, store, places = world
    outside = src.parent / "outside.json"
    outside.write_bytes(encode_checked({"schema": 1, "non_finite": {"model.norm.weight": 0}}))
    for kind, place in places.items():
        for make in (os.mkfifo, lambda p: os.symlink(outside, p), os.mkdir):
            place.unlink(missing_ok=True)
            make(place)
            found = survey(src, Recipe(), store)
            assert found.recipe.recorded_keep == (), kind
            found.source.close()
            os.rmdir(place) if place.is_dir() and not place.is_symlink() else place.unlink()


def test_manifests_of_other_trees_do_not_stop_status_or_gc(
    world: tuple[Path, Path, dict[str, Path]],
) -> None:
    """Trees whose manifests say anything are looked over, never believed."""
    _, root, _ = world
    store = Store.open(root)
    tree = root / "v1" / "trees" / "feedface"
    private = tree / ".fp8fs"
    private.mkdir(parents=True)
    for content in (b"", b"[" * 5000, json.dumps({"schema": 10**30}).encode(), b"\xff"):
        (private / "manifest.json").write_bytes(content)
        (private / "objects").write_bytes(content)
        try:
            store.list_trees()
            store.usage()
            store.collect(keep=(), grace_s=1e9)
        except StoreError as err:
            sound_message(err)
