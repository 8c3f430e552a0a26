"""Materialize each unit once: source bytes, then an injected quantizer, then the store.

engine.py       Engine: what the view and the commands call
reader.py       ShardReader: inline reads by offset
scan.py         non-finite weights, zeros and odd scales, found before the mount
stats.py        what has been done, as numbers
works.py        what waits for a shard: a fill, or a request for some of its units
fill.py         the steps from a cold shard to a sealed object
shard.py        what this process knows of one shard; how shards are cut into claims
materialize.py  the units of one claim: read, measure, cast, digest, write, commit
amax.py         the largest magnitude behind each per_tensor scale, measured once
memory.py       units served from memory while the store cannot be written
trouble.py      whether the store can be written now
cast.py         one band of a unit, wherever its bytes go
matrix.py       where the bytes of a unit are, in SRC and in the view
pool.py         worker threads and the order in which they take work
once.py         one outcome, many waiters
buffers.py      scratch memory under one budget
"""

from fp8fs.engine.engine import Engine
from fp8fs.engine.reader import ShardReader
from fp8fs.engine.scan import Findings, NonFinite, Zeros, scan
from fp8fs.engine.shard import shard_spec, unit_spans
from fp8fs.engine.stats import EngineStats, ErrorNote

__all__ = [
    "Engine",
    "EngineStats",
    "ErrorNote",
    "Findings",
    "NonFinite",
    "ShardReader",
    "Zeros",
    "scan",
    "shard_spec",
    "unit_spans",
]
