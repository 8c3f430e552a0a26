"""Every decoder of outside bytes, against documents an attacker would write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import LONG
from tests.fuzz.documents import GOOD, documents
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SLOW_S = 1.0
EXAMPLES = {"checkpoint": 3000 if LONG else 60}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_good_documents_are_accepted(target: str) -> None:
    """The documents that the others are made from are good ones, so that a refusal of all would be noticed."""
    for document in GOOD[target]:
        TARGETS[target](document)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_hostile_documents(target: str, record_property: Callable[[str, object], None]) -> None:
    """Nothing but documented errors escapes, no answer takes a second of work, and what is accepted is sound."""
    tried = 0

    @settings(
        max_examples=EXAMPLES.get(target, 20_000 if LONG else 200),
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal tried
        document = data.draw(documents(target))
        tried += 1
        began = time.process_time()
        TARGETS[target](document)
        assert time.process_time() - began < SLOW_S

    check()
    record_property("hostile inputs", tried)


@pytest.mark.parametrize(
    "case", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name[:12]}"
)
def test_kept_corpus(case: Path, record_property: Callable[[str, object], None]) -> None:
    """What coverage-guided fuzzing found worth keeping, and every input that once broke something."""
    began = time.process_time()
    TARGETS[case.parent.name](case.read_bytes())
    assert time.process_time() - began < SLOW_S
    record_property("hostile inputs", 1)
