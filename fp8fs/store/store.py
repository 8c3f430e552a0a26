"""The only door to the store: sealed objects, partial shards, trees, recorded facts.

    ROOT/v1/objects/ab/ab12....safetensors   a sealed view shard: mode, owner and mtime of its sources, no write bits
            objects/ab/ab12....json          its record: one line per unit (amax, scale digest, data digest, input digest), shard digest
            partial/ab12..../data            sparse shard in the making; renamed to the object when sealed
            partial/ab12..../journal         one checksummed line per finished unit, barriers between
            partial/ab12..../lock            open-file-description locks: byte u = the lease of unit (claim) u
            amax/<group id>                  largest magnitude of a group that crosses shards
            trees/<plan id>/...              a plain checkpoint directory: hard links to objects, copies of small files, links to large ones
            trees/<plan id>/.fp8fs/          manifest.json, plan.json, COMPLETE
            scans/<key>.json                 keep lists found by plan --scan and build
            hints/<key>.json                 local stat facts (dev, ino, ctime) seen at the last mount
            adopted/<identity>.json          identities that verify --adopt proved equal to older ones
"""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["ShardSpec", "UnitRecord"]


class ShardSpec(msgspec.Struct, frozen=True):
    """What the store must know of a view shard to make it: a key, a size, a preamble, attributes. No meaning.

    ``claims[u]`` is the claim (lease) number that unit u is made under; units of one in-shard group share one.
    ``facts`` goes into the record unread (names and offsets of units, source identities) as JSON-ready data.
    """

    object_id: str
    size: int
    preamble: bytes
    unit_count: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int


class UnitRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The journal's line for one finished unit. Digests are xxh3-128 hex (docs/FORMAT.md); ``amax`` the float32 value
    that the scale came from (per_tensor), else 0.0."""

    unit: int
    amax: float
    input_digest: str
    data_digest: str
    scale_digest: str


# class Store:
#   Store.open(root: Path, *, io=FsIo(), create=True) -> Store
#       0700 root, owned by us (StoreVersionError / StoreError with hint otherwise); .writable: bool, .why_not: str
#   find_object(spec) -> Path | None        published, size and preamble right (cheap check); anything else is a miss (and set aside)
#   record(object_id) -> ObjectRecord        the .json beside it
#   partial(spec) -> Partial                 opens or creates; recovers when nobody else has it open
#   group_amax(group_id) -> AmaxSlot         context: flock'd file; .value | None; .put(float)
#   tree(plan_id) -> Tree                    .path; ensure_dir(path, mode, uid, gid), write_text(path, bytes, ...), copy_file / link_source,
#                                            link_object(path, object_path), write_manifest(bytes), complete(), is_complete()
#   read_scan/write_scan(key) / read_hints/write_hints(key) / read_adopted/write_adopted(identity)
#   free_bytes()
# class Partial:
#   fd                                       the data file, open for reading and writing; stays valid after the rename
#   records: dict[int, UnitRecord]           refreshed from the journal by claim()
#   claim(claim: int, *, poll: Callable[[], None], timeout_s) -> ContextManager   waits (polling) for the lease, then refreshes records; if the
#                                            object was published meanwhile, raises Published (internal) so that the caller looks again
#   pwrite(buffer, file_offset)
#   commit(record: UnitRecord)               after its bytes are written; barrier (fdatasync data, barrier line, fdatasync journal) every 256 MB or second
#   seal(facts: bytes) -> Path               exclusive over all claims; all units made; sync, attributes, record file, rename, sync directory
#   close()
