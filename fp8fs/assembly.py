"""Source, store, plan, engine and tree put together: what every command and the daemon start from.

    survey(src, recipe, store)  -> Survey     headers only: what the view will be (plan, path, verify)
    assemble(src, ...)          -> Assembled  ready to fill: engine running, tree prepared (mount, build)
    Assembled.view(...)         -> View       the tree that the FUSE adapter serves

The daemon calls ``assemble`` and then ``Assembled.view``; nothing else wires these rooms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8fs.core.layout import Plan
from fp8fs.core.recipe import Recipe
from fp8fs.engine import Engine
from fp8fs.source import Source
from fp8fs.store.store import Store, Tree
from fp8fs.view import View

__all__ = ["Assembled", "Survey", "assemble", "survey"]


@dataclass(frozen=True, slots=True)
class Survey:
    """SRC as planned: everything that headers, configs, recipe and recorded facts decide."""

    source: Source
    recipe: Recipe
    plan: Plan
    store: Store | None
    why_no_store: str


@dataclass(frozen=True, slots=True)
class Assembled:
    """A survey with its engine running and its tree prepared. ``tree`` is None where the store cannot be written."""

    survey: Survey
    engine: Engine
    tree: Tree | None

    def view(
        self, *, serve: str, grain: str, bound: bool, status: Callable[[], bytes] | None = None
    ) -> View: ...

    def close(self, timeout_s: float = 10.0) -> None: ...


def survey(src: Path, recipe: Recipe, store_root: Path | None, *, create: bool = True) -> Survey: ...


def assemble(
    src: Path,
    recipe: Recipe,
    store_root: Path | None,
    *,
    device: str = "auto",
    workers: int = 0,
    grain: str = "shard",
    need_store: bool = False,
) -> Assembled: ...
