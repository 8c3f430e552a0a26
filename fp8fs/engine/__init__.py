"""Materialize each unit once: source bytes, then an injected quantizer, then the store.

engine.py       Engine: what the view and the commands call
pool.py         worker threads and the order in which they take work
shard.py        one view shard being made: claims, failures, the way to the sealed object
materialize.py  units of one claim: read, measure, cast, digest, write, commit
matrix.py       bytes of a unit's source matrix and back to the view shard
memory.py       units served from memory while the store cannot be written
reader.py       ShardReader: inline reads by offset
buffers.py      scratch memory under one budget
scan.py         non-finite weights, found before the mount
stats.py        what has been done, as numbers
"""

from fp8fs.engine.engine import Engine
from fp8fs.engine.reader import ShardReader
from fp8fs.engine.scan import NonFinite, scan
from fp8fs.engine.stats import EngineStats, ErrorNote

__all__ = ["Engine", "EngineStats", "ErrorNote", "NonFinite", "ShardReader", "scan"]
