"""The plan: order and offsets in a shard, groups across shards, attributes, keys, index, entries."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from fp8fs.core.attributes import Owner
from fp8fs.core.header import parse_header
from fp8fs.core.identity import group_id
from fp8fs.core.layout import Piece, Plan, ViewShard, plan
from fp8fs.core.placement import ViewTensor
from fp8fs.core.recipe import Recipe
from fp8fs.core.view_names import join_names
from fp8fs.errors import SourceInvalidError, UsageError
from tests.planning import LLM, Shapes, checkpoint, linears, make_plan, profile

ONE = "model.safetensors"
TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Q, K, V = (f"layers.0.attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj"))
DIFFUSERS = {"config.json": {"_class_name": "TinyTransformer2DModel"}}


def placed(shard: ViewShard) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, begin, end) of every header entry, in the order of the offsets."""
    header = parse_header(shard.preamble, shard.size, shard.path)
    return [(n, t.dtype, t.shape, *t.data_offsets) for n, t in header.tensors.items()]


MIXED: Shapes = {
    "layers.0.fc1.weight": ("BF16", (16, 32)),
    "steps": ("I64", (3,)),
    "layers.0.fc1.bias": ("BF16", (16,)),
    "flag": ("BOOL", (3,)),
    "layers.0.fc2.weight": ("F32", (32, 16)),
    "half": ("F16", (3,)),
    "none": ("F32", (0, 5)),
    "scalar": ("F32", ()),
}


@pytest.mark.parametrize(
    ("scheme", "first", "second"),
    [
        ("per_tensor", ("weight_scale", (1,)), ("weight_scale", (1,))),
        ("per_channel", ("weight_scale", (16, 1)), ("weight_scale", (32, 1))),
        ("block", ("weight_scale_inv", (1, 1)), ("weight_scale_inv", (1, 1))),
        ("block_free", ("weight_scale_inv", (1, 1)), ("weight_scale_inv", (1, 1))),
    ],
)
def test_order_and_offsets(
    scheme: str, first: tuple[str, tuple[int, ...]], second: tuple[str, tuple[int, ...]]
) -> None:
    """Kept tensors of whole 8 bytes, then each weight and its scale, then the rest by falling alignment."""
    (shard,) = make_plan(checkpoint({ONE: MIXED}), scheme=scheme).shards
    expected, end = [], 0
    for name, dtype, shape, size in [
        ("steps", "I64", (3,), 24),
        ("layers.0.fc1.bias", "BF16", (16,), 32),
        ("none", "F32", (0, 5), 0),
        ("layers.0.fc1.weight", "F8_E4M3", (16, 32), 512),
        (f"layers.0.fc1.{first[0]}", "F32", first[1], 4 * first[1][0]),
        ("layers.0.fc2.weight", "F8_E4M3", (32, 16), 512),
        (f"layers.0.fc2.{second[0]}", "F32", second[1], 4 * second[1][0]),
        ("scalar", "F32", (), 4),
        ("half", "F16", (3,), 6),
        ("flag", "BOOL", (3,), 3),
    ]:
        expected.append((name, dtype, shape, end, end + size))
        end += size
    assert placed(shard) == expected
    assert len(shard.preamble) == 4096
    assert shard.size == 4096 + end
    assert [unit.name for unit in shard.units] == [
        "steps",
        "layers.0.fc1.bias",
        "layers.0.fc1.weight",
        "layers.0.fc2.weight",
        "scalar",
        "half",
        "flag",
    ]


def test_units_say_where_their_bytes_come_from() -> None:
    """A weight is a matrix of its dtype, a kept tensor a run of bytes; pieces are file offsets."""
    planned = make_plan(checkpoint({ONE: MIXED}), scheme="per_channel")
    units = {unit.name: unit for unit in planned.shards[0].units}
    weight = units["layers.0.fc2.weight"]
    assert (weight.scheme, weight.dtype, weight.rows, weight.cols) == ("per_channel", "F32", 32, 16)
    assert weight.pieces[0].file_offset == 1000 + 1024 + 24 + 32 + 3
    assert weight.pieces[0].nbytes == 2048
    assert weight.scale is not None
    assert weight.scale.start == weight.data.start + weight.data.length
    flag = units["flag"]
    assert (flag.scheme, flag.dtype, flag.rows, flag.cols, flag.scale) == ("", "U8", 1, 3, None)


def test_block_scales_round_up() -> None:
    """A block scale has one number for each started 128x128 block."""
    source = checkpoint({ONE: linears("layers.0.fc", shape=(272, 144))})
    (shard,) = make_plan(source, scheme="block").shards
    assert placed(shard)[1][:3] == ("layers.0.fc.weight_scale_inv", "F32", (3, 2))


def test_odd_weights_end_the_file() -> None:
    """A weight whose bytes are no multiple of 4 goes last, its scale before, so that all is aligned."""
    shapes = {
        "layers.0.a.weight": ("BF16", (3, 3)),
        "x": ("BF16", (1,)),
        "y": ("F32", (1,)),
        **linears("layers.0.b", shape=(16, 16)),
    }
    planned = make_plan(checkpoint({ONE: shapes}), scheme="per_tensor", quantize=("*.a",))
    assert [(name, begin) for name, _, _, begin, _ in placed(planned.shards[0])] == [
        ("layers.0.b.weight", 0),
        ("layers.0.b.weight_scale", 256),
        ("layers.0.a.weight_scale", 260),
        ("y", 264),
        ("x", 268),
        ("layers.0.a.weight", 270),
    ]


def test_metadata_is_kept_and_says_pt() -> None:
    """__metadata__ keeps the source's keys, and "format" is "pt" whatever it was."""
    source = checkpoint({ONE: linears("layers.0.fc")}, metadata={"format": "np", "by": "me"})
    (shard,) = make_plan(source).shards
    assert parse_header(shard.preamble, shard.size, ONE).metadata == {"format": "pt", "by": "me"}


def test_a_taken_scale_name_is_refused() -> None:
    """A source that has a tensor of the scale's name is refused, naming it."""
    shapes = {**linears("layers.0.fc"), "layers.0.fc.weight_scale": ("F32", (1,))}
    source = checkpoint({ONE: shapes})
    with pytest.raises(SourceInvalidError, match=r'"layers\.0\.fc\.weight_scale" exists already'):
        make_plan(source)
    assert make_plan(source, scheme="block").schemes == {"": "block"}


# -- groups ----------------------------------------------------------------------------------------


def split(**changes: str) -> Plan:
    """q and k in the first shard, v in the second, both with another weight."""
    shards = {TWO[0]: linears(Q, K, "layers.0.o"), TWO[1]: linears(V, "layers.1.o")}
    return make_plan(checkpoint(shards, DIFFUSERS, **changes))  # type: ignore[arg-type]


def test_groups_cross_shards() -> None:
    """A group whose members are in two shards names both, and each shard depends on both sources."""
    planned = split()
    (group,) = planned.groups
    assert group.name == "layers.0.attn.qkv_proj"
    assert group.crosses
    members = [planned.shards[s].units[u].name for s, u in group.members]
    assert members == [f"{n}.weight" for n in (Q, K, V)]
    assert [shard.sources for shard in planned.shards] == [(0, 1), (0, 1)]
    assert {u.name: u.group for s in planned.shards for u in s.units} == {
        f"{Q}.weight": 0,
        f"{K}.weight": 0,
        "layers.0.o.weight": -1,
        f"{V}.weight": 0,
        "layers.1.o.weight": -1,
    }


def test_only_per_tensor_shares_scales() -> None:
    """Other schemes have no shared scale, so their shards depend on their own source alone."""
    shards = {TWO[0]: linears(Q, K), TWO[1]: linears(V)}
    planned = make_plan(checkpoint(shards, DIFFUSERS), scheme="block")
    assert planned.groups == ()
    assert [shard.sources for shard in planned.shards] == [(0,), (1,)]
    assert {row.group for row in planned.rows} == {"layers.0.attn.qkv_proj"}


def test_one_source_changes_what_depends_on_it() -> None:
    """Another identity of the second shard changes its object, its partner's and the group, no other."""
    shapes = {
        TWO[0]: linears(Q, K),
        TWO[1]: linears(V),
        "model-3.safetensors": linears("layers.0.o"),
    }
    texts = {**DIFFUSERS, "model.safetensors.index.json": index_of(shapes)}
    before = checkpoint(shapes, texts)
    shard = before.shards[TWO[1]]
    changed = type(shard)(shard.entry, shard.header, "f" * 64)
    after = type(before)(
        before.entries, {**before.shards, TWO[1]: changed}, before.components, before.texts, False
    )
    old, new = make_plan(before), make_plan(after)
    assert old.groups[0].id != new.groups[0].id
    same = [a.object_id == b.object_id for a, b in zip(old.shards, new.shards, strict=True)]
    assert same == [False, False, True]
    assert old.plan_id != new.plan_id


def index_of(shapes: Mapping[str, Shapes]) -> dict[str, object]:
    return {
        "metadata": {"total_size": 1, "note": "kept"},
        "weight_map": {name: file for file, tensors in shapes.items() for name in tensors},
    }


def test_a_group_key_has_no_order() -> None:
    """Members of a group give one key in whatever order and under whatever names they are listed."""
    planned = split()
    units = [planned.shards[s].units[u] for s, u in planned.groups[0].members]
    renamed = [type(u)("x", *(getattr(u, f) for f in u.__struct_fields__[1:])) for u in units]
    keys = {group_id(order, planned.source_identities) for order in (units, renamed[::-1])}
    assert keys == {planned.groups[0].id}
    assert group_id(units[:2], planned.source_identities) not in keys


# -- attributes and keys ---------------------------------------------------------------------------


def attributes(
    facts: Mapping[str, Mapping[str, int]], owner: Owner | None = None
) -> tuple[int, int, int, int]:
    """mode, uid, gid, mtime of the first shard of a plan whose group spans both."""
    source = checkpoint({TWO[0]: linears(Q), TWO[1]: linears(V)}, DIFFUSERS, facts=facts)
    planned = plan(source, Recipe(), quantizer_version="1", owner=owner)
    shard = planned.shards[0]
    entry = planned.entries[TWO[0]]
    made = (shard.mode, shard.uid, shard.gid, shard.mtime_ns)
    assert (entry.mode, entry.uid, entry.gid, entry.mtime_ns) == made
    return made


NOBODY = Owner(uid=99, gid=98, groups=frozenset({7}))


@pytest.mark.parametrize(
    ("one", "two", "owner", "expected"),
    [
        ({"mode": 0o644}, {"mode": 0o755}, None, (0o444, 0, 0)),
        ({"mode": 0o640}, {"mode": 0o604}, None, (0o400, 0, 0)),
        (
            {"mode": 0o644, "uid": 5, "gid": 6},
            {"mode": 0o644, "uid": 5, "gid": 6},
            None,
            (0o444, 5, 6),
        ),
        ({"mode": 0o644, "uid": 5}, {"mode": 0o644, "uid": 6}, None, (0o400, 0, 0)),
        ({"mode": 0o644, "gid": 5}, {"mode": 0o644, "gid": 6}, None, (0o400, 0, 0)),
        ({"mode": 0o644, "uid": 5}, {"mode": 0o644, "uid": 6}, NOBODY, (0o400, 99, 98)),
        ({"mode": 0o644}, {"mode": 0o644}, NOBODY, (0o404, 99, 98)),
        ({"mode": 0o640}, {"mode": 0o640}, NOBODY, (0o400, 99, 98)),
        ({"mode": 0o604}, {"mode": 0o604}, NOBODY, (0o400, 99, 98)),
        ({"mode": 0o640, "gid": 7}, {"mode": 0o640, "gid": 7}, NOBODY, (0o440, 99, 7)),
        (
            {"mode": 0o600, "uid": 99, "gid": 98},
            {"mode": 0o644, "uid": 99, "gid": 98},
            NOBODY,
            (0o400, 99, 98),
        ),
        ({"mode": 0o044}, {"mode": 0o044}, NOBODY, (0o404, 99, 98)),
    ],
)
def test_the_strictest_attributes_win(
    one: dict[str, int], two: dict[str, int], owner: Owner | None, expected: tuple[int, int, int]
) -> None:
    """Nobody reads what is made from two shards unless it could read both."""
    assert attributes({TWO[0]: one, TWO[1]: two}, owner)[:3] == expected


def test_the_latest_mtime_wins() -> None:
    """A made file is as new as the newest source that feeds it."""
    assert attributes({TWO[0]: {"mtime_ns": 5}, TWO[1]: {"mtime_ns": 9}})[3] == 9


def test_keys_do_not_know_where_things_are() -> None:
    """Inodes, devices and ctimes do not change any key; mode and mtime do."""
    shapes = {ONE: linears("layers.0.fc")}
    base = make_plan(checkpoint(shapes))
    moved = make_plan(checkpoint(shapes, facts={ONE: {"ino": 77, "dev": 5, "ctime_ns": 1}}))
    assert (moved.plan_id, moved.shards) == (base.plan_id, base.shards)
    for fact in ({"mode": 0o600}, {"mtime_ns": 11}):
        other = make_plan(checkpoint(shapes, facts={ONE: fact}))
        assert other.shards[0].object_id != base.shards[0].object_id
        assert other.plan_id != base.plan_id


def test_two_revisions_share_what_is_the_same() -> None:
    """An object's key does not contain the shard's name, so a renamed equal shard is the same object."""
    base = checkpoint({ONE: linears("layers.0.fc")})
    shard = base.shards[ONE]
    other = checkpoint({"other.safetensors": linears("layers.0.fc")})
    same = type(shard)(other.shards["other.safetensors"].entry, shard.header, shard.identity)
    moved = type(other)(
        other.entries, {"other.safetensors": same}, other.components, other.texts, False
    )
    one, two = make_plan(base), make_plan(moved)
    assert one.shards[0].object_id == two.shards[0].object_id
    assert one.plan_id != two.plan_id


@pytest.mark.parametrize("scheme", ["per_tensor", "block", "block_free"])
def test_scheme_and_quantizer_are_in_the_key(scheme: str) -> None:
    """Another scheme or another quantizer version is another object."""
    source = checkpoint({ONE: linears("layers.0.fc")})
    base = make_plan(source)
    assert make_plan(source, scheme=scheme).shards[0].object_id != base.shards[0].object_id
    newer = plan(source, Recipe(), quantizer_version="2")
    assert newer.shards[0].object_id != base.shards[0].object_id
    assert newer.plan_id != base.plan_id


def test_the_order_of_components_does_not_matter() -> None:
    """Components listed in another order give the same plan, indices included."""
    folders = ("transformer", "transformer_2", "text_encoder")
    shapes = {f"{folder}/m.safetensors": linears("layers.0.fc") for folder in folders}
    texts = {f"{folder}/config.json": DIFFUSERS["config.json"] for folder in folders}
    plans = [
        make_plan(checkpoint(shapes, texts, reverse=reverse), components=folders)
        for reverse in (False, True)
    ]
    assert plans[0] == plans[1]
    assert len(plans[0].shards) == 3


def test_the_config_is_in_the_plan_id() -> None:
    """A changed passed-through JSON of the same size gives another view."""
    shapes = {ONE: linears("layers.0.fc")}
    one, two = ({**LLM, "sub/config.json": {"a": i}} for i in (1, 2))
    assert make_plan(checkpoint(shapes, one)).plan_id != make_plan(checkpoint(shapes, two)).plan_id


# -- entries ---------------------------------------------------------------------------------------


def test_the_index_names_the_scales() -> None:
    """The index lists each scale beside its weight, counts all bytes, and keeps other metadata."""
    shapes = {TWO[0]: linears("layers.0.fc"), TWO[1]: {"norm.weight": ("BF16", (64,))}}
    texts = {**LLM, "model.safetensors.index.json": index_of(shapes)}
    planned = make_plan(checkpoint(shapes, texts))
    entry = planned.entries["model.safetensors.index.json"]
    assert entry.kind == "text"
    assert entry.size == len(entry.content)
    assert json.loads(entry.content) == {
        "metadata": {"total_size": 32 * 64 + 32 * 4 + 128, "note": "kept"},
        "weight_map": {
            "layers.0.fc.weight": TWO[0],
            "layers.0.fc.weight_scale": TWO[0],
            "norm.weight": TWO[1],
        },
    }
    assert planned.order == {"": (0, 1)}
    assert [planned.entries[path].kind for path in TWO] == ["shard", "shard"]


def test_a_missing_index_is_made() -> None:
    """A sharded set without an index gets one, in its folder, under the shards' stem, readable as they are."""
    texts = {
        "model_index.json": {"_class_name": "P"},
        "transformer/config.json": {"_class_name": "TinyTransformer2DModel"},
    }
    files = [f"transformer/weights-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shapes = {files[0]: linears("layers.0.fc"), files[1]: linears("layers.1.fc")}
    planned = make_plan(checkpoint(shapes, texts, facts={files[0]: {"mode": 0o600}}))
    entry = planned.entries["transformer/weights.safetensors.index.json"]
    assert entry.mode == 0o400
    assert json.loads(entry.content)["weight_map"] == {
        "layers.0.fc.weight": "weights-00001-of-00002.safetensors",
        "layers.0.fc.weight_scale": "weights-00001-of-00002.safetensors",
        "layers.1.fc.weight": "weights-00002-of-00002.safetensors",
        "layers.1.fc.weight_scale": "weights-00002-of-00002.safetensors",
    }
    assert list(planned.entries) == sorted(planned.entries)


def test_a_name_that_no_index_can_hold_is_refused() -> None:
    """Shards whose names are not UTF-8 are one clear error where an index would have to name them."""
    files = [f"m\udcff-0000{i}-of-00002.safetensors" for i in (1, 2)]
    source = checkpoint({files[0]: linears("layers.0.fc"), files[1]: linears("layers.1.fc")})
    with pytest.raises(SourceInvalidError, match="not UTF-8"):
        make_plan(source)


def test_a_single_file_needs_no_index() -> None:
    """One shard without an index stays without one."""
    planned = make_plan(checkpoint({ONE: linears("layers.0.fc")}))
    assert list(planned.entries) == ["config.json", ONE]


def test_other_files_are_as_in_the_source() -> None:
    """Folders, files and links keep their facts; what is no file is left out, with a warning."""
    source = checkpoint(
        {ONE: linears("layers.0.fc")},
        facts={"code/a.py": {"mode": 0o755, "uid": 3, "mtime_ns": 4}, "code": {"mode": 0o700}},
        extra={"code/a.py": "file", "pipe": "other", "old": "link:../gone"},
    )
    planned = plan(source, Recipe(), quantizer_version="1", owner=NOBODY)
    script = planned.entries["code/a.py"]
    assert (script.kind, script.mode, script.uid, script.mtime_ns) == ("source", 0o755, 3, 4)
    assert (planned.entries["code"].kind, planned.entries["code"].mode) == ("dir", 0o700)
    assert (planned.entries["old"].kind, planned.entries["old"].link) == ("link", "../gone")
    assert "pipe" not in planned.entries
    assert planned.warnings[1:] == ("pipe: a FIFO, socket or device, not shown",)


def test_the_reserved_folder_is_not_the_sources() -> None:
    """A .fp8fs folder in SRC is not shown: that name is the view's own."""
    extra = {".fp8fs/manifest.json": "file", ".fp8fs2": "file"}
    planned = make_plan(checkpoint({ONE: linears("layers.0.fc")}, extra=extra))
    assert list(planned.entries) == [".fp8fs2", "config.json", ONE]


@pytest.mark.parametrize(("rows", "warned"), [(128, False), (144, True)])
def test_fused_parts_of_uneven_blocks_are_named(rows: int, warned: bool) -> None:
    """With a block scheme, a fused layer whose parts end within a block is warned about, by name."""
    source = checkpoint({ONE: linears(Q, K, V, "layers.0.o", shape=(rows, 64))})
    more = set(make_plan(source, scheme="block").warnings) - set(make_plan(source).warnings)
    fused = [w for w in more if "fused layers" in w]
    assert ["1 fused" in w and "layers.0.attn.qkv_proj" in w for w in fused] == [True] * warned


@pytest.mark.parametrize(("rows", "warned"), [(80, 0), (128, 0), (144, 1), (256, 0), (10944, 1)])
def test_smaller_blocks_at_the_edge_are_told(rows: int, warned: int) -> None:
    """Where transformers is the reader, weights of several blocks that are not all whole are warned about."""
    source = checkpoint({ONE: linears("layers.0.o", shape=(rows, 64))})
    told = [w for w in make_plan(source, scheme="block").warnings if "smaller block" in w]
    assert len(told) == warned
    assert all('"layers.0.o.weight"' in warning for warning in told)
    assert not any("smaller block" in w for w in make_plan(source, scheme="per_channel").warnings)


@pytest.mark.parametrize(
    ("half", "warned"), [(256, False), (144, True), (192, True), (208, False), (240, False)]
)
def test_halves_of_uneven_blocks_are_named(half: int, warned: bool) -> None:
    """Gate and up in one tensor, as MiniMax-H3's fc1 is: a warning if the halves have more blocks than the whole."""
    name = "blocks.0.mlp.fc1"
    texts = {"config.json": {"_class_name": "MiniMaxH3DiT"}}
    source = checkpoint({ONE: linears(name, shape=(2 * half, 64))}, texts)
    more = set(make_plan(source, scheme="block").warnings) - set(make_plan(source).warnings)
    assert [("1 fused layers" in w and f"({name}" in w) for w in more] == ([True] if warned else [])


def test_competing_weight_sets_are_hidden() -> None:
    """A second weight set is listed as hidden and not shown."""
    shapes = {TWO[0]: linears("layers.0.fc"), TWO[1]: linears("layers.1.fc")}
    texts = {**LLM, "model.safetensors.index.json": index_of(shapes)}
    source = checkpoint(shapes, texts, extra={"consolidated.safetensors": "file"})
    planned = make_plan(source)
    assert planned.hidden == {
        "consolidated.safetensors": "the same weights in Mistral's own format"
    }
    assert "consolidated.safetensors" not in planned.entries


def test_nothing_to_quantize_is_the_source() -> None:
    """A model without quantizable tensors is passed through whole, with a warning."""
    source = checkpoint({ONE: {"norm.weight": ("BF16", (64,))}})
    planned = make_plan(source)
    assert planned.shards == ()
    assert planned.schemes == {}
    assert {entry.kind for entry in planned.entries.values()} == {"source"}
    assert any("nothing is quantized" in warning for warning in planned.warnings)


def test_a_shard_of_kept_tensors_is_a_view_shard() -> None:
    """Inside a quantized component every shard has the view's layout, quantized tensors or not."""
    shapes = {TWO[0]: linears("layers.0.fc"), TWO[1]: {"norm.weight": ("BF16", (64,))}}
    planned = make_plan(checkpoint(shapes))
    assert len(planned.shards[1].preamble) % 4096 == 0
    assert planned.shards[1].size == len(planned.shards[1].preamble) + 128


def test_rewritten_texts_are_read_only_and_new_enough() -> None:
    """config.json keeps its readers, loses write bits, and is as new as the weights that it describes."""
    facts = {"config.json": {"mode": 0o664, "uid": 8, "gid": 8}, ONE: {"mtime_ns": 50}}
    planned = make_plan(checkpoint({ONE: linears("layers.0.fc")}, facts=facts))
    entry = planned.entries["config.json"]
    assert (entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns) == (
        "text",
        0o444,
        8,
        8,
        50,
    )


@pytest.mark.parametrize(
    ("texts", "scheme", "warning"),
    [
        (DIFFUSERS, "per_channel", "vLLM-Omni refuses per_channel"),
        (LLM, "per_tensor", "transformers ignores per_tensor scales"),
        ({}, "block", "no config.json"),
    ],
)
def test_readers_that_misread_are_named(
    texts: Mapping[str, object], scheme: str, warning: str
) -> None:
    """A scheme that a usual reader of the component refuses or misreads is allowed, with a warning."""
    planned = make_plan(checkpoint({ONE: linears("layers.0.fc")}, texts), scheme=scheme)
    assert any(warning in text for text in planned.warnings)


@pytest.mark.parametrize(
    ("config", "name", "scheme"),
    [
        ({"_class_name": "WanTransformer3DModel"}, "blocks.0.ffn.net.2", "per_tensor"),
        ({"architectures": ["LlamaForCausalLM"]}, "model.layers.0.mlp.down_proj", "per_channel"),
    ],
)
def test_defaults_need_no_warning(config: dict[str, object], name: str, scheme: str) -> None:
    """The default scheme of each kind is the one that its readers take; a known class has nothing to warn of."""
    planned = make_plan(checkpoint({ONE: linears(name)}, {"config.json": config}))
    assert planned.schemes == {"": scheme}
    assert planned.warnings == ()


# -- other names -----------------------------------------------------------------------------------

RUNTIME = profile(
    {
        "runtime": "layers.{i}.attn.qkv",
        "fp8": True,
        "shards": 3,
        "sources": [f"layers.{{i}}.attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")],
    },
    {"runtime": "layers.{i}.attn.qkv", "fp8": True, "shards": 3},
    {"runtime": "layers.{i}.o", "fp8": True},
)


def runtime(shapes: Mapping[str, Shapes], **recipe: tuple[str, ...]) -> Plan:
    return make_plan(checkpoint(shapes, DIFFUSERS), profile=RUNTIME, names="runtime", **recipe)


def test_joined_rows_are_one_tensor() -> None:
    """With a table of names, q, k and v of two shards become one weight with one scale, where q was."""
    shapes = {
        TWO[0]: {**linears(Q, shape=(64, 64)), **linears(K)},
        TWO[1]: linears(V, "layers.0.o"),
    }
    planned = runtime(shapes)
    first, second = planned.shards
    (unit,) = first.units
    assert (unit.name, unit.rows, unit.cols, unit.group) == (
        "layers.0.attn.qkv.weight",
        128,
        64,
        -1,
    )
    assert [(p.tensor, p.shard, p.nbytes) for p in unit.pieces] == [
        (f"{Q}.weight", 0, 64 * 64 * 2),
        (f"{K}.weight", 0, 32 * 64 * 2),
        (f"{V}.weight", 1, 32 * 64 * 2),
    ]
    assert [name for name, *_ in placed(second)] == ["layers.0.o.weight", "layers.0.o.weight_scale"]
    assert (first.sources, second.sources) == ((0, 1), (1,))
    index = json.loads(planned.entries["model.safetensors.index.json"].content)
    assert set(index["weight_map"]) == {
        "layers.0.attn.qkv.weight",
        "layers.0.attn.qkv.weight_scale",
        "layers.0.o.weight",
        "layers.0.o.weight_scale",
    }


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        (linears(Q, K), SourceInvalidError),
        ({**linears(Q, K), **linears(V, shape=(32, 32))}, SourceInvalidError),
        ({**linears(Q, K), **linears(V, dtype="F32")}, SourceInvalidError),
        ({**linears(Q, K, V), **linears("layers.0.attn.qkv")}, SourceInvalidError),
    ],
)
def test_rows_that_do_not_join_are_refused(shapes: Shapes, error: type[Exception]) -> None:
    """A missing part, another width, another dtype and a taken name are refused."""
    with pytest.raises(error):
        runtime({ONE: {**shapes, **linears("layers.1.o")}})


def test_parts_are_quantized_all_or_none() -> None:
    """Parts of one tensor stay together even where their widths differ, so that no row is FP8 beside BF16."""
    tensors = [
        ViewTensor(name, name == "a", "BF16", (32, 64), 4096, (Piece(0, 0, 4096, name),), "")
        for name in ("a", "b")
    ]
    with pytest.raises(UsageError, match='joins "a", which is quantized, and "b"'):
        join_names([tensors], {"ab": ("a", "b")})
