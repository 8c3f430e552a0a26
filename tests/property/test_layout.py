"""Whatever a checkpoint holds, its view is exact: no gap, no overlap, aligned, readable, the same every time."""

from __future__ import annotations

import json
import struct
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from fp8fs.core.header import parse_header
from fp8fs.core.json_text import set_key
from fp8fs.core.layout import Cutter, Extent, Plan, Tile, Unit, tiles
from fp8fs.core.plan import RowRun
from fp8fs.core.recipe import SCHEMES
from fp8fs.engine.matrix import matrix_runs, write_tile
from tests.planning import ITEM_BYTES, LLM, Shapes, checkpoint, make_plan

DTYPES = ("BF16", "F16", "F32")
OTHERS = ("U8", "BOOL", "I16", "F16", "BF16", "F32", "I32", "I64", "F64")
DIFFUSERS = {"config.json": {"_class_name": "TinyTransformer2DModel"}}
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "w1", "w3", "norm")

# Weights of any size: every remainder of 2, 4, 8 and 16, and blocks that end early.
weights = st.tuples(
    st.sampled_from(DTYPES),
    st.tuples(
        st.one_of(st.integers(1, 20), st.sampled_from((16, 32, 144, 272))),
        st.one_of(st.integers(1, 20), st.sampled_from((16, 64, 144))),
    ),
)
others = st.tuples(st.sampled_from(OTHERS), st.lists(st.integers(0, 5), max_size=3).map(tuple))


@st.composite
def shards(draw: st.DrawFn) -> dict[str, Shapes]:
    """One to three shards of linear weights and of anything else, in any order."""
    count = draw(st.integers(1, 3))
    shapes: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(count)]
    places = st.integers(0, count - 1)
    names = st.builds("layers.{}.{}.weight".format, st.integers(0, 2), st.sampled_from(LEAVES))
    for name, tensor in draw(st.dictionaries(names, weights, min_size=1, max_size=10)).items():
        shapes[draw(places)][name] = tensor
    for i, tensor in enumerate(draw(st.lists(others, max_size=8))):
        shapes[draw(places)][f"t{i}"] = tensor
    return {
        f"model-{i + 1:05d}-of-{count:05d}.safetensors": tensors for i, tensors in enumerate(shapes)
    }


configs = st.sampled_from((LLM, DIFFUSERS))
schemes = st.sampled_from(SCHEMES)


def planned(
    shapes: dict[str, Shapes], texts: dict[str, object], scheme: str, **more: object
) -> Plan:
    """A plan in which every 2-D weight of a block is quantized, whatever its shape."""
    return make_plan(
        checkpoint(shapes, texts, **more),  # type: ignore[arg-type]
        scheme=scheme,
        quantize=("layers.*",),
    )


def wanted_scale(scheme: str, rows: int, cols: int) -> tuple[int, ...]:
    """The scale's shape, as the formats define it."""
    if scheme.startswith("block"):
        return ((rows + 127) // 128, (cols + 127) // 128)
    return (1,) if scheme == "per_tensor" else (rows, 1)


@given(shards(), configs, schemes)
def test_shards_have_no_gap_no_overlap_and_aligned_offsets(
    shapes: dict[str, Shapes], texts: dict[str, object], scheme: str
) -> None:
    """Entries follow one another to the end of the file, each at a multiple of its item's size, from a page boundary on."""
    for shard in planned(shapes, texts, scheme).shards:
        (length,) = struct.unpack("<Q", shard.preamble[:8])
        assert len(shard.preamble) == 8 + length
        assert len(shard.preamble) % 4096 == 0
        header = json.loads(shard.preamble[8:])
        assert header.pop("__metadata__")["format"] == "pt"
        end = 0
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            assert begin == end, name
            assert begin % ITEM_BYTES[entry["dtype"]] == 0, name
            assert stop - begin == ITEM_BYTES[entry["dtype"]] * prod(entry["shape"]), name
            end = stop
        assert shard.size == len(shard.preamble) + end


@given(shards(), configs, schemes)
def test_every_source_tensor_is_there_once(
    shapes: dict[str, Shapes], texts: dict[str, object], scheme: str
) -> None:
    """Each shard shows its tensors: quantized ones as FP8 with a scale of the scheme's shape, others as they are."""
    view = planned(shapes, texts, scheme)
    quantized = {row.name for row in view.rows if row.dtype_out == "F8_E4M3"}
    assert quantized
    for shard in view.shards:
        seen = parse_header(shard.preamble, shard.size, shard.path).tensors
        expected = {}
        for name, (dtype, shape) in shapes[shard.path].items():
            if name not in quantized:
                expected[name] = (dtype, shape)
                continue
            scale = name + ("_scale_inv" if scheme.startswith("block") else "_scale")
            expected[name] = ("F8_E4M3", shape)
            expected[scale] = ("F32", wanted_scale(scheme, *shape))
        assert {name: (t.dtype, t.shape) for name, t in seen.items()} == expected


@given(shards(), configs, schemes)
def test_units_cover_the_data_exactly(
    shapes: dict[str, Shapes], texts: dict[str, object], scheme: str
) -> None:
    """Extents of all units tile the data section, agree with the header, and pieces have the source's bytes."""
    view = planned(shapes, texts, scheme)
    for shard in view.shards:
        header = parse_header(shard.preamble, shard.size, shard.path)
        base = len(shard.preamble)
        runs = []
        for unit in shard.units:
            begin, end = header.tensors[unit.name].data_offsets
            assert (unit.data.start, unit.data.length) == (base + begin, end - begin)
            assert unit.data.length == unit.rows * unit.cols
            runs.append((unit.data.start, unit.data.length))
            if unit.scale is not None:
                runs.append((unit.scale.start, unit.scale.length))
            (piece,) = unit.pieces
            assert piece.nbytes == unit.rows * unit.cols * ITEM_BYTES[unit.dtype]
            assert view.source_shards[piece.shard] == shard.path
        position = base
        for start, length in sorted(runs):
            assert length > 0
            assert start == position
            position += length
        assert position == shard.size
        assert [u.data.start for u in shard.units] == sorted(u.data.start for u in shard.units)


@given(shards(), configs, schemes)
def test_groups_are_whole(shapes: dict[str, Shapes], texts: dict[str, object], scheme: str) -> None:
    """Members of a group are quantized all or none, and with per_tensor every quantized group has one entry."""
    view = planned(shapes, texts, scheme)
    rows: dict[str, set[str]] = {}
    members: dict[str, set[str]] = {}
    for row in view.rows:
        if row.group:
            rows.setdefault(row.group, set()).add(row.dtype_out)
            members.setdefault(row.group, set()).add(row.name)
    assert all("F8_E4M3" not in dtypes or len(dtypes) == 1 for dtypes in rows.values())
    named = {
        group.name: {view.shards[s].units[u].name for s, u in group.members}
        for group in view.groups
    }
    shared = {g: names for g, names in members.items() if rows[g] == {"F8_E4M3"}}
    assert named == (shared if scheme == "per_tensor" else {})
    for i, group in enumerate(view.groups):
        assert all(view.shards[s].units[u].group == i for s, u in group.members)
        holders = {s for s, _ in group.members}
        assert group.crosses == (len(holders) > 1)
        assert all(holders <= set(view.shards[s].sources) for s in holders)


@given(shards(), configs, schemes)
def test_the_order_of_dicts_does_not_matter(
    shapes: dict[str, Shapes], texts: dict[str, object], scheme: str
) -> None:
    """The same checkpoint described in the opposite order gives the same plan."""
    assert planned(shapes, texts, scheme) == planned(shapes, texts, scheme, reverse=True)


@given(shards(), configs, schemes, st.data())
def test_cut_equals_looking_at_every_byte(
    shapes: dict[str, Shapes], texts: dict[str, object], scheme: str, data: st.DataObject
) -> None:
    """A cut names exactly the units that own a byte of the read, and the preamble if it is touched."""
    shard = data.draw(st.sampled_from(planned(shapes, texts, scheme).shards))
    edges = sorted({0, len(shard.preamble), shard.size, *(u.data.start for u in shard.units)})
    edges += [u.scale.start for u in shard.units if u.scale is not None]
    edge = st.builds(lambda at, by: max(0, at + by), st.sampled_from(edges), st.integers(-1, 1))
    offset = data.draw(edge)
    length = max(0, data.draw(edge) - offset)
    touched = set()
    for i, unit in enumerate(shard.units):
        for extent in (unit.data, unit.scale):
            if extent is not None:
                mine = range(extent.start, extent.start + extent.length)
                if max(mine.start, offset) < min(mine.stop, offset + length):
                    touched.add(i)
    cut = Cutter(shard).cut(offset, length)
    assert cut.units == tuple(sorted(touched))
    assert cut.preamble == (length > 0 and offset < len(shard.preamble))


@given(
    st.one_of(st.integers(1, 700), st.just(1)),
    st.one_of(st.integers(1, 700), st.integers(1, 9_000_000)),
    st.sampled_from((1, 2, 4)),
)
def test_tiles_partition_the_matrix(rows: int, cols: int, item_bytes: int) -> None:
    """Tiles hold every element once, start on block boundaries, and are never larger than 16 MiB."""
    area = 0
    row = col = height = 0
    for tile in tiles(rows, cols, item_bytes):
        assert (tile.row, tile.col) == (row, col)
        assert tile.row % 128 == 0
        assert tile.col % 128 == 0
        assert 0 < tile.rows * tile.cols * item_bytes <= 16 << 20
        height = height or tile.rows
        assert tile.rows == height
        area += tile.rows * tile.cols
        col += tile.cols
        if col == cols:
            row, col, height = row + tile.rows, 0, 0
    assert (row, col) == (rows, 0)
    assert area == rows * cols


@st.composite
def reordered(draw: st.DrawFn) -> tuple[Unit, list[int]]:
    """A unit whose rows lie in runs of any length in any order, and the matrix row behind each row of its data."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    cols, item = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    data: list[int] = []
    placed = {}
    for i in order:
        placed[i] = len(data)
        data += range(starts[i], starts[i] + lengths[i])
    runs = tuple(RowRun(starts[i], n, placed[i]) for i, n in enumerate(lengths))
    extent = Extent(100, len(data) * cols * item)
    return Unit("w", "block", "F32", len(data), cols, (), extent, None, -1, runs), data


@given(reordered(), st.data())
def test_rows_go_where_the_runs_say(case: tuple[Unit, list[int]], data: st.DataObject) -> None:
    """Tiles are written to, and bytes are found at, the places that the runs give each row."""
    unit, order = case
    line = unit.data.length // unit.rows
    row = data.draw(st.integers(0, unit.rows - 1))
    tile = Tile(row, data.draw(st.integers(1, unit.rows - row)), 0, unit.cols)
    lines = [bytes([r % 251]) * line for r in range(unit.rows)]
    view = bytearray(unit.data.length)

    def write(part: memoryview, at: int) -> None:
        view[at - 100 : at - 100 + len(part)] = part

    write_tile(write, unit, tile, memoryview(b"".join(lines[row : row + tile.rows])))
    inside = range(row, row + tile.rows)
    assert view == b"".join(lines[r] if r in inside else bytes(line) for r in order)

    start = data.draw(st.integers(0, unit.data.length - 1))
    length = data.draw(st.integers(1, unit.data.length - start))
    matrix, shown = b"".join(lines), b"".join(lines[r] for r in order)
    found = b"".join(matrix[at : at + n] for at, n in matrix_runs(unit, start, length))
    assert found == shown[start : start + length]


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)
styles = st.sampled_from(
    ({}, {"indent": 2}, {"indent": "\t"}, {"indent": 0}, {"separators": (",", ":")})
)


@given(st.dictionaries(st.text(max_size=3), values), styles, st.text(max_size=3), values)
def test_a_set_key_changes_nothing_else(
    config: dict[str, object], style: dict[str, object], key: str, value: object
) -> None:
    """The edited JSON has the new value, every other member in the same order, and nothing more."""
    text = json.dumps(config, **style).encode()  # type: ignore[arg-type]
    made = json.loads(set_key(text, key, value))
    assert list(made.items()) == list({**config, key: value}.items())
