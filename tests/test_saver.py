"""Checkpoints behind the training's back: what happens when they cannot be written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from makara.checkpoint import CheckpointId, open_generation, open_store, read_head
from makara.worker.saver import PartSnapshot, Place, Saver, Snapshot


class Board:
    """The part of a rendezvous store that a saver uses."""

    def __init__(self, error: Exception | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.error = error

    def set(self, key: str, value: str) -> None:
        if self.error is not None:
            raise self.error
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Outcome:
    """What a saver told: checkpoints published, and the loss of its board."""

    def __init__(self) -> None:
        self.published: list[CheckpointId] = []
        self.lost = threading.Event()


def saver(folder: Path, board: Board, outcome: Outcome, rank: int = 0, num_ranks: int = 1) -> Saver:
    store = open_store(f"file://{folder}")
    open_generation(store, "job", 1)
    anything: Any = board
    return Saver(
        Place(store, "job", 1, num_ranks, 4, {}),
        rank,
        num_ranks,
        anything,
        outcome.published.append,
        lambda _error: outcome.lost.set(),
    )


def snapshot(step: int, section: int = 0) -> Snapshot:
    tensors = {f"weights/w{section}": torch.full((3,), float(step))}
    return Snapshot(step, (PartSnapshot(section, 0, 1, tensors, {}),))


def wait_until(made: Saver, predicate: Callable[[], bool]) -> None:
    while not predicate():
        made.wait(0.05)


def test_a_step_is_published_once_all_ranks_have_stored_their_parts(tmp_path: Path) -> None:
    board, outcome = Board(), Outcome()
    first, second = (saver(tmp_path, board, outcome, rank, 2) for rank in range(2))
    first.save(snapshot(2))
    second.save(snapshot(4, section=1))  # it never had step 2
    wait_until(second, lambda: second.done(4))
    assert first.behind
    assert outcome.published == []
    first.save(snapshot(4))
    wait_until(first, lambda: first.done(4))
    assert not first.behind
    head = read_head(open_store(f"file://{tmp_path}"), "job")
    assert head is not None
    assert list(head.manifests) == outcome.published == [CheckpointId(4, 1)]
    first.close()
    second.close()


def test_an_error_in_the_background_reaches_whoever_waits_for_the_checkpoint(tmp_path: Path) -> None:
    made = saver(tmp_path, Board(ValueError("not a store's error")), Outcome())
    made.save(snapshot(2))
    with pytest.raises(ValueError, match="not a store's error"):
        wait_until(made, lambda: made.done(2))
    with pytest.raises(ValueError, match="not a store's error"):
        made.save(snapshot(4))
    assert made.behind


def test_the_loss_of_the_rendezvous_store_is_told(tmp_path: Path) -> None:
    outcome = Outcome()
    made = saver(tmp_path, Board(RuntimeError("connection reset")), outcome)
    made.save(snapshot(2))
    assert outcome.lost.wait(30.0)
    made.close()
