"""How often a manager's process looks for cycles of references."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from makara.manager.collector import rare_collections


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that are looked at while a test runs."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_reports_that_wait_together_are_not_looked_through_for_cycles(collections: list[int]) -> None:
    gc.collect()
    collections.clear()
    waiting = [[number] for number in range(30_000)]  # objects of a step's reports of 1,000 VMs
    assert collections, "without it they are"
    with rare_collections():
        gc.collect()
        collections.clear()
        more = [[number] for number in range(len(waiting))]
        assert collections == []
    assert len(more) == len(waiting)


def test_cycles_are_found_all_the_same(collections: list[int]) -> None:
    with rare_collections():
        collections.clear()
        kept: list[list[object]] = []
        while not collections:
            kept.append([])
    assert len(kept) < 1_000_000


def test_what_was_set_before_is_set_again() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
