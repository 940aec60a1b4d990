"""Checkpoints behind the training's back: what happens when they cannot be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from makara.checkpoint import (
    NotFound,
    StoreRefused,
    StoreUnavailable,
    open_generation,
    open_store,
    read_head,
)
from makara.checkpoint.layout import head_key
from makara.checkpoint.stores.local import LocalStore
from makara.protocol.messages import CheckpointRef
from makara.worker.execution.commit import Flag
from makara.worker.execution.replicas import Compared, CorruptState, Hashes
from makara.worker.recovery.saver import CheckpointTarget, PartSnapshot, Saver, Snapshot, SnapshotSlot
from makara.worker.trainer.generation import Due
from torch.distributed import DistNetworkError


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

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Gate(Board):
    """Holds up whoever reads, and then gives what cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        self.entered.set()
        self.go_on.wait()
        raise ValueError("a receipt that nobody can read")


class Outcome:
    """What a saver told: checkpoints published, the loss of its board, and that it was fenced off."""

    def __init__(self) -> None:
        self.published: list[CheckpointRef] = []
        self.lost = threading.Event()
        self.fenced = threading.Event()
        self.trouble: list[str] = []


class RefusingStore(LocalStore):
    """Refuses to store parts as long as it is `closed`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder.as_uri())
        self.closed = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if self.closed.is_set() and "/sections/" in key:
            raise StoreRefused("AccessDenied: not with this key")
        super().put(key, data)


class SlowStore(LocalStore):
    """Takes parts, and says after a while that it is away."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder.as_uri())
        self.entered, self.go_on = threading.Event(), threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if "/sections/" in key:
            self.entered.set()
            self.go_on.wait()
            raise StoreUnavailable("timed out")
        super().put(key, data)


class Exhausted(LocalStore):
    """Stores no part: this process lacks something."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder.as_uri())

    def put(self, key: str, data: bytes) -> None:
        if "/sections/" in key:
            raise RuntimeError("can't start new thread")
        super().put(key, data)


def saver(
    folder: Path,
    board: Board,
    outcome: Outcome,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    store: LocalStore | None = None,
    slot: SnapshotSlot | None = None,
    compared: Compared | None = None,
) -> Saver:
    store = store or LocalStore(folder, folder.as_uri())
    open_generation(store, "job", 1)
    anything: Any = board
    return Saver(
        CheckpointTarget(store, "job", 1, num_ranks, 4, {}, ["a", "b"], compared or {}),
        rank,
        num_ranks,
        anything,
        slot or SnapshotSlot(),
        outcome.published.append,
        lambda _error: outcome.lost.set(),
        outcome.trouble.append,
        outcome.fenced.set,
    )


def snapshot(step: int, section: int = 0) -> Snapshot:
    tensors = {f"weights/w{section}": torch.full((3,), float(step))}
    return Snapshot(step, (PartSnapshot(section, 0, 1, tensors, {}),))


def wait_until(made: Saver, predicate: Callable[[], bool]) -> None:
    gives_up_at = time.monotonic() + 30.0
    while not predicate():
        assert time.monotonic() < gives_up_at, "it never comes"
        made.wait(0.05)


def hashed(value: int | None) -> Future[Hashes | None]:
    """Of section 0; None: the generation ended before it was hashed."""
    future: Future[Hashes | None] = Future()
    future.set_result(None if value is None else {0: value})
    return future


def test_a_step_is_published_only_if_hosts_of_each_section_hold_the_same_state(tmp_path: Path) -> None:
    board, outcome = Board(), Outcome()
    first, second = (saver(tmp_path, board, outcome, rank, 2, compared={0: [[0, 1]]}) for rank in range(2))
    for step, theirs in ((2, 7), (4, 8)):
        first.save(snapshot(step), hashed(7))
        second.save(snapshot(step, section=1), hashed(theirs))
        wait_until(second, partial(second.done, step))
        wait_until(second, lambda: not second.slot_taken)
        if step == 2:
            wait_until(first, partial(first.done, step))
    with pytest.raises(CorruptState) as caught:
        wait_until(first, partial(first.done, 4))
    assert caught.value.corruption.suspects == ["a", "b"]
    head = read_head(open_store(f"file://{tmp_path}"), "job")
    assert head is not None
    assert list(head.manifests) == outcome.published == [CheckpointRef(step=2, generation=1)]
    first.close()
    second.close()


def test_a_state_that_was_not_hashed_before_its_generation_ended_is_not_published(tmp_path: Path) -> None:
    board, outcome = Board(), Outcome()
    made = saver(tmp_path, board, outcome)
    made.save(snapshot(2), hashed(None))
    wait_until(made, lambda: not made.slot_taken)
    assert made.behind
    made.close()
    assert board.values == {}
    assert outcome.published == []


def test_a_step_is_published_once_all_ranks_have_stored_their_parts(tmp_path: Path) -> None:
    board, outcome = Board(), Outcome()
    first, second = (saver(tmp_path, board, outcome, rank, 2) for rank in range(2))
    first.save(snapshot(2))
    second.save(snapshot(4, section=1))  # it never had step 2
    wait_until(second, lambda: second.done(4))
    wait_until(first, lambda: not first.slot_taken)
    assert first.behind
    assert outcome.published == []
    first.save(snapshot(4))
    wait_until(first, lambda: first.done(4))
    assert not first.behind
    head = read_head(open_store(f"file://{tmp_path}"), "job")
    assert head is not None
    assert list(head.manifests) == outcome.published == [CheckpointRef(step=4, generation=1)]
    first.close()
    second.close()


def test_an_error_in_the_background_reaches_whoever_waits_for_the_checkpoint(tmp_path: Path) -> None:
    made = saver(tmp_path, Board(ValueError("not a store's error")), Outcome())
    made.save(snapshot(2))
    with pytest.raises(ValueError, match="not a store's error"):
        wait_until(made, lambda: made.done(2))
    for use in (lambda: made.slot_taken, lambda: made.save(snapshot(4))):
        with pytest.raises(ValueError, match="not a store's error"):
            use()
    assert made.behind


def test_an_error_while_a_snapshot_waits_leaves_room_and_reaches_the_next_step(tmp_path: Path) -> None:
    board, slot = Gate(), SnapshotSlot()
    made = saver(tmp_path, board, Outcome(), slot=slot)
    made.save(snapshot(2))
    board.entered.wait()
    made.save(snapshot(4))
    board.go_on.set()
    with pytest.raises(ValueError, match="a receipt that nobody can read"):
        wait_until(made, lambda: not made.slot_taken)
    wait_until(made, lambda: not slot.taken)  # also for the savers of later generations


@pytest.mark.parametrize("lost", [None, DistNetworkError("connection reset")])
def test_what_is_saved_after_the_end_takes_no_room(tmp_path: Path, lost: Exception | None) -> None:
    store, slot, outcome = LocalStore(tmp_path, tmp_path.as_uri()), SnapshotSlot(), Outcome()
    made = saver(tmp_path, Board(lost), outcome, store=store, slot=slot)
    open_generation(store, "job", 2)  # whoever publishes in the first one is fenced
    made.save(snapshot(2))
    wait_until(made, lambda: outcome.lost.is_set() or made.done(2))
    wait_until(made, lambda: not slot.taken)
    made.save(snapshot(4))
    wait_until(made, lambda: not slot.taken)
    assert made.behind


def test_that_the_head_is_open_for_another_generation_is_told(tmp_path: Path) -> None:
    store, outcome = LocalStore(tmp_path, tmp_path.as_uri()), Outcome()
    made = saver(tmp_path, Board(), outcome, store=store)
    open_generation(store, "job", 7)
    made.save(snapshot(2))
    assert outcome.fenced.wait(30.0)
    assert outcome.published == []


def test_the_loss_of_the_rendezvous_store_is_told(tmp_path: Path) -> None:
    outcome = Outcome()
    made = saver(tmp_path, Board(DistNetworkError("connection reset")), outcome)
    made.save(snapshot(2))
    assert outcome.lost.wait(30.0)
    made.close()


def test_an_error_of_this_process_is_told_as_its_own_and_not_as_the_loss_of_a_peer(tmp_path: Path) -> None:
    outcome = Outcome()
    made = saver(tmp_path, Board(), outcome, store=Exhausted(tmp_path))
    made.save(snapshot(2))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        wait_until(made, lambda: outcome.lost.is_set() or made.done(2))
    assert not outcome.lost.is_set()
    made.close()


def test_one_snapshot_is_held_until_it_is_stored_whatever_the_store_says(tmp_path: Path) -> None:
    store, outcome, slot = RefusingStore(tmp_path), Outcome(), SnapshotSlot()
    made = saver(tmp_path, Board(), outcome, store=store, slot=slot)
    store.closed.set()
    assert not made.slot_taken
    made.save(snapshot(2))
    wait_until(made, lambda: bool(outcome.trouble))
    assert made.slot_taken
    assert not made.done(2), "a refusal is no error: somebody may put it right"
    store.closed.clear()
    wait_until(made, lambda: made.done(2))
    assert not made.slot_taken
    assert outcome.trouble == ["AccessDenied: not with this key", ""]
    assert outcome.published == [CheckpointRef(step=2, generation=1)]
    made.close()


def test_a_snapshot_that_is_given_up_counts_until_its_upload_has_ended(tmp_path: Path) -> None:
    store, outcome, slot = RefusingStore(tmp_path), Outcome(), SnapshotSlot()
    store.closed.set()
    made = saver(tmp_path, Board(), outcome, store=store, slot=slot)
    made.save(snapshot(2))
    wait_until(made, lambda: bool(outcome.trouble))
    successor = saver(tmp_path, Board(), outcome, store=store, slot=slot)
    assert successor.slot_taken
    made.close()
    wait_until(made, lambda: not made.slot_taken)
    store.closed.clear()
    successor.save(snapshot(4))
    wait_until(successor, lambda: successor.done(4))
    successor.close()


def test_an_upload_that_fails_after_the_end_tells_nothing(tmp_path: Path) -> None:
    """The next saver believes that all is well, and would never say so."""
    store, outcome, slot = SlowStore(tmp_path), Outcome(), SnapshotSlot()
    made = saver(tmp_path, Board(), outcome, store=store, slot=slot)
    made.save(snapshot(2))
    store.entered.wait()
    made.close()
    store.go_on.set()
    wait_until(made, lambda: not slot.taken)
    assert outcome.trouble == []


@pytest.mark.parametrize(("left", "told"), [(None, "no head.json"), (b'{"format": 1, "jo', "head.json: ")])
def test_a_head_that_is_lost_or_torn_is_waited_for_and_told(
    tmp_path: Path, left: bytes | None, told: str
) -> None:
    store, outcome = LocalStore(tmp_path, tmp_path.as_uri()), Outcome()
    made = saver(tmp_path, Board(), outcome, store=store)
    head = store.get(head_key("job"))
    store.delete(head_key("job"))
    if left is not None:
        store.put(head_key("job"), left)
    made.save(snapshot(2))
    wait_until(made, lambda: bool(outcome.trouble))
    assert told in outcome.trouble[0]
    assert not made.slot_taken, "its parts are stored: there is room for the next"
    store.put(head_key("job"), head)
    wait_until(made, lambda: made.done(2))
    made.close()


def test_a_checkpoint_whose_part_vanished_is_given_up_and_the_next_is_published(tmp_path: Path) -> None:
    store, outcome, board = LocalStore(tmp_path, tmp_path.as_uri()), Outcome(), Board()
    made = saver(tmp_path, board, outcome, 0, 2, store=store)
    other = saver(tmp_path, board, outcome, 1, 2, store=store)
    made.save(snapshot(2))
    wait_until(made, lambda: not made.slot_taken)
    for key, _ in store.list("job/sections/"):
        store.delete(key)
    other.save(snapshot(2, section=1))
    wait_until(made, lambda: any("checkpoint 2 is given up" in text for text in outcome.trouble))
    with pytest.raises(NotFound):
        made.done(2)
    made.save(snapshot(4))
    wait_until(other, lambda: not other.slot_taken)
    other.save(snapshot(4, section=1))
    wait_until(made, lambda: made.done(4))
    assert outcome.published == [CheckpointRef(step=4, generation=1)]
    made.close()
    other.close()


def test_receipts_are_forgotten_once_they_are_of_no_more_use(tmp_path: Path) -> None:
    board, outcome = Board(), Outcome()
    first, second = (saver(tmp_path, board, outcome, rank, 2) for rank in range(2))
    for step in (2, 4, 6):
        first.save(snapshot(step))
        second.save(snapshot(step, section=1))
        wait_until(first, lambda step=step: first.done(step) and not first.slot_taken)
        wait_until(second, lambda step=step: second.done(step) and not second.slot_taken)
    wait_until(first, lambda: not board.values)
    first.close()
    second.close()


def test_a_snapshot_that_finds_no_room_is_taken_when_all_have_room() -> None:
    due = Due(owed=False)
    assert not due.now(False, Flag(0))
    assert due.now(True, Flag(0))
    assert not due.now(True, Flag.BUSY)
    assert not due.now(False, Flag.BUSY | Flag.SAVE)
    assert due.now(False, Flag(0)), "it was owed"
    assert not due.now(False, Flag(0))
    assert due.now(False, Flag.HOLD | Flag.BUSY), "a hold waits for room"
    assert Due(owed=True).now(False, Flag(0))
