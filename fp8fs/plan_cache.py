"""The plan of a large checkpoint, kept in its finished tree, so that a later mount reads it instead of making it.

A plan is a pure function of what was read of SRC, the recipe and the planner itself. All of that is in the key under
which a plan is found again; what is not found, or is not whole, is planned.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from fp8fs import core
from fp8fs.core.attributes import Owner
from fp8fs.core.checkpoint import Checkpoint
from fp8fs.core.digest import bytes_digest
from fp8fs.core.fingerprint import Fingerprint
from fp8fs.core.plan import Plan
from fp8fs.core.quantizer import QUANTIZER_VERSION
from fp8fs.core.recipe import Recipe
from fp8fs.errors import StoreError
from fp8fs.store.store import Store

__all__ = ["keep_plan", "kept_plan", "plan_key"]

log = logging.getLogger(__name__)

MIN_TENSORS = 5000
"""Of fewer the plan is made in less time than a kept one takes to be read."""

_NAME = "plan.bin"
_KEY = re.compile(r"[0-9a-f]{32}")


def plan_key(
    checkpoint: Checkpoint, fingerprints: Mapping[str, Fingerprint], recipe: Recipe, owner: Owner
) -> str:
    """Stands for everything that decides the plan; "" where keeping it is not worth while.

    Headers are in it by their digests, and so is what was concluded from them and from the other texts.
    """
    if sum(len(component.weight_map) for component in checkpoint.components) < MIN_TENSORS:
        return ""
    facts = (
        QUANTIZER_VERSION,
        _planner(),
        recipe,
        (owner.uid, owner.gid, owner.privileged, sorted(owner.groups)),
        checkpoint.entries,
        [
            (path, shard.entry, shard.identity, fingerprints[path])
            for path, shard in checkpoint.shards.items()
        ],
        checkpoint.texts,
        checkpoint.components,
        checkpoint.pipeline,
        checkpoint.warnings,
    )
    try:
        data = msgspec.msgpack.encode(facts)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return ""  # names that are not UTF-8, numbers of any length in a config
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def kept_plan(store: Store, key: str) -> Plan | None:
    """The plan that was kept under *key*, if it is there and whole; none is under ""."""
    if not key:
        return None
    try:
        fact = store.read_plan(key)
        if not isinstance(fact, dict):
            return None
        plan_id, digest = fact.get("plan_id"), fact.get("digest")
        if not isinstance(plan_id, str) or not _KEY.fullmatch(plan_id):
            return None
        data = store.tree(plan_id).read_private(_NAME)
        if data is None or bytes_digest(data) != digest:
            return None
        found = msgspec.msgpack.decode(data, type=Plan)
    except (StoreError, msgspec.MsgspecError) as err:
        log.warning("a kept plan cannot be read, the view is planned again: %s", err)
        return None
    return found if found.plan_id == plan_id else None


def keep_plan(store: Store, key: str, plan: Plan) -> None:
    """*plan*, whose tree is finished, is found under *key* from now on, unless that is "". Kept or not, the view is the same."""
    if not key:
        return
    data = msgspec.msgpack.encode(plan)
    try:
        store.tree(plan.plan_id).write_manifest(data, name=_NAME)
        store.write_plan(key, {"plan_id": plan.plan_id, "digest": bytes_digest(data)})
    except StoreError as err:
        log.warning("the plan is not kept: %s", err)


@cache
def _planner() -> str:
    """A digest of the planner: of every file of ``core``."""
    folder = Path(core.__file__).parent
    state = hashlib.blake2b(digest_size=16)
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
        data = path.read_bytes()
        state.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode() + data)
    return state.hexdigest()
