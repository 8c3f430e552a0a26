"""Complete a store without making a byte of it: SRC STORE. For checkpoints that no disk could hold.

Every shard of SRC's view becomes a sealed object through the store's own door (partial, journal, seal): its size,
preamble, attributes and record are right, its data are holes and the digests in its record are invented. So it is
good for measuring what a mount does, and for nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8fs.assembly import recipe_from, survey
from fp8fs.engine.shard import seal_facts, shard_spec, unit_spans
from fp8fs.store.store import UnitRecord

_DIGEST = "0" * 32


def main() -> None:
    src, root = map(Path, sys.argv[1:])
    with survey(src, recipe_from(), root, create=True) as found:
        if found.store is None:
            raise SystemExit(found.why_no_store)
        for shard in found.plan.shards:
            records = [
                UnitRecord(number, 1.0, _DIGEST, _DIGEST, _DIGEST if unit.scale else "")
                for number, unit in enumerate(shard.units)
            ]
            with found.store.partial(shard_spec(shard), unit_spans(shard)) as partial:
                partial.commit(*records)
                partial.seal(seal_facts(found.plan, shard))


if __name__ == "__main__":
    main()
