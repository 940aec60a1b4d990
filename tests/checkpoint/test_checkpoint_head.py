"""Which checkpoints exist, who may publish, and what may be deleted; on both kinds of store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from checkpoints import JOB, assembled, published, write_parts, written
from conftest import StoreAddress
from makara.checkpoint import (
    Conflict,
    Corrupt,
    Fenced,
    HeadAhead,
    Incomplete,
    Manifest,
    NotFound,
    Store,
    StoreUnavailable,
    Superseded,
    candidates,
    delete_parts,
    load_manifest,
    open_generation,
    publish,
    read_head,
    restart_generation,
    retire,
)
from makara.checkpoint.head import Head
from makara.checkpoint.layout import head_key, manifest_key
from makara.checkpoint.records import FORMAT
from makara.protocol.messages import CheckpointRef


def ids(*pairs: tuple[int, int]) -> tuple[CheckpointRef, ...]:
    return tuple(CheckpointRef(step=step, generation=generation) for step, generation in pairs)


def test_a_job_without_a_generation_has_no_head(store: Store) -> None:
    assert read_head(store, JOB) is None


def test_opening_a_generation_takes_the_newest_checkpoint_as_its_base(store: Store) -> None:
    assert open_generation(store, JOB, 1).base is None
    published(store, 10, 1)
    published(store, 20, 1)
    head = open_generation(store, JOB, 3)
    assert head.base == CheckpointRef(step=20, generation=1)
    assert head.manifests == ids((20, 1), (10, 1))
    assert read_head(store, JOB) == head


def test_opening_the_open_generation_again_changes_nothing(store: Store) -> None:
    published(store, 10, 1)
    first = open_generation(store, JOB, 2)
    published(store, 20, 2)
    again = open_generation(store, JOB, 2)
    assert again.base == first.base == CheckpointRef(step=10, generation=1)
    assert again == read_head(store, JOB)


@pytest.mark.parametrize("restart", [False, True])
def test_of_two_that_open_the_same_generation_only_the_first_has_it(store: Store, restart: bool) -> None:
    """Each may try again, since its answer may have been lost."""

    def opened(opener: int) -> Head:
        if restart:
            return restart_generation(store, JOB, 3, now=1.0, opener=opener)
        return open_generation(store, JOB, 3, opener=opener, opened=2, tried=2)

    open_generation(store, JOB, 2, opener=5)
    first = opened(7)
    assert opened(7) == first
    for _ in range(2):
        with pytest.raises(HeadAhead, match="another manager has opened"):
            opened(8)
    published(store, 10, 3)
    head = read_head(store, JOB)
    assert head is not None
    assert head.opener == 7, "changes of the head leave it"


def test_a_head_of_a_generation_that_the_manager_did_not_try_is_somebody_elses(store: Store) -> None:
    open_generation(store, JOB, 3, opener=7)
    with pytest.raises(HeadAhead, match="another manager has opened"):
        open_generation(store, JOB, 4, opener=8, opened=2, tried=2)
    assert open_generation(store, JOB, 4, opener=8, opened=2, tried=3).generation == 4


def test_a_head_of_an_earlier_version_is_known_again_by_its_generation(store: Store) -> None:
    head = {"base": None, "format": 1, "generation": 3, "job": JOB, "manifests": [], "retired": []}
    store.put(head_key(JOB), json.dumps({**head, "version": 12}).encode())
    assert open_generation(store, JOB, 3, opener=7, opened=2, tried=2).version == 12
    assert open_generation(store, JOB, 4, opener=8, opened=3, tried=3).opener == 8


def test_a_generation_never_goes_back(store: Store) -> None:
    open_generation(store, JOB, 5)
    with pytest.raises(Fenced) as fenced:
        open_generation(store, JOB, 4)
    assert (fenced.value.generation, fenced.value.open_generation) == (4, 5)


def test_a_zombie_of_an_old_generation_cannot_publish(store: Store) -> None:
    published(store, 10, 1)
    late = written(store, 20, 1)
    before = open_generation(store, JOB, 2)
    with pytest.raises(Fenced) as fenced:
        publish(store, JOB, 1, late)
    assert fenced.value.open_generation == 2
    assert read_head(store, JOB) == before
    assert not store.exists(manifest_key(JOB, late.checkpoint))


def test_nobody_publishes_before_a_generation_is_open(store: Store) -> None:
    with pytest.raises(Fenced):
        publish(store, JOB, 1, written(store, 10, 1))
    assert read_head(store, JOB) is None


def test_a_generation_cannot_publish_for_another(store: Store) -> None:
    open_generation(store, JOB, 2)
    with pytest.raises(Incomplete, match="generation 2"):
        publish(store, JOB, 2, written(store, 10, 1))


def test_publishing_twice_changes_nothing(store: Store) -> None:
    manifest = published(store, 10, 1)
    before = read_head(store, JOB)
    assert publish(store, JOB, 1, manifest) == before == read_head(store, JOB)


def test_a_published_checkpoint_can_be_loaded_as_it_was_written(store: Store) -> None:
    manifest = published(store, 10, 1)
    assert load_manifest(store, JOB, CheckpointRef(step=10, generation=1)) == manifest


def test_a_checkpoint_with_a_missing_part_is_not_published(store: Store) -> None:
    open_generation(store, JOB, 1)
    manifest = written(store, 10, 1)
    store.delete(manifest.parts[3].key)
    with pytest.raises(NotFound, match=manifest.parts[3].key):
        publish(store, JOB, 1, manifest)
    head = read_head(store, JOB)
    assert head is not None
    assert head.manifests == ()


def test_a_checkpoint_with_a_truncated_part_is_not_published(store: Store) -> None:
    open_generation(store, JOB, 1)
    manifest = written(store, 10, 1)
    store.put(manifest.parts[3].key, store.get(manifest.parts[3].key)[:-1])
    with pytest.raises(Corrupt, match=manifest.parts[3].key):
        publish(store, JOB, 1, manifest)


class SlowStore:
    """A store on which something happens just before the first swap, after all that was read and checked."""

    def __init__(self, store: Store, before_swap: Callable[[], object]) -> None:
        self._store = store
        self._before_swap: Callable[[], object] | None = before_swap

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        happen, self._before_swap = self._before_swap, None
        if happen is not None:
            happen()
        return self._store.swap(key, data, expected_etag)


def test_a_generation_opened_between_check_and_swap_still_fences_the_zombie(store: Store) -> None:
    open_generation(store, JOB, 1)
    manifest = written(store, 10, 1)
    slow = SlowStore(store, lambda: open_generation(store, JOB, 2))
    with pytest.raises(Fenced):
        publish(slow, JOB, 1, manifest)  # type: ignore[arg-type]
    head = read_head(store, JOB)
    assert head is not None
    assert (head.generation, head.manifests) == (2, ())


def test_a_publication_repeated_while_the_checkpoint_is_deleted_does_not_bring_it_back(store: Store) -> None:
    """The head's content without its version would be the same before and after: the swap must still fail."""
    published(store, 5, 1)
    manifest = written(store, 10, 1)

    def meanwhile() -> None:
        publish(store, JOB, 1, manifest)
        retire(store, JOB, manifest.checkpoint, now=1.0)
        delete_parts(store, JOB, manifest.checkpoint)

    with pytest.raises(NotFound):
        publish(SlowStore(store, meanwhile), JOB, 1, manifest)  # type: ignore[arg-type]
    head = read_head(store, JOB)
    assert head is not None
    assert head.manifests == ids((5, 1))


def test_publishing_a_retired_checkpoint_again_changes_nothing(store: Store) -> None:
    manifest = published(store, 10, 1)
    published(store, 20, 1)
    head = retire(store, JOB, manifest.checkpoint, now=1.0)
    assert publish(store, JOB, 1, manifest) == head


def zombie(store: Store, manifest: Manifest, barrier: threading.Barrier, outcome: list[str]) -> None:
    barrier.wait()
    try:
        publish(store, JOB, manifest.generation, manifest)
        outcome.append("published")
    except Fenced:
        outcome.append("fenced")


def test_of_a_zombie_and_an_opening_that_race_the_head_is_always_consistent(
    store_address: StoreAddress,
) -> None:
    """Either the zombie came first, and its checkpoint is the base, or it is fenced. Nothing in between."""
    for generation in range(1, 6):
        store = store_address.open()
        open_generation(store, JOB, generation)
        manifest = written(store, 10 * generation, generation)
        outcome: list[str] = []
        barrier = threading.Barrier(2)

        thread = threading.Thread(target=zombie, args=(store_address.open(), manifest, barrier, outcome))
        thread.start()
        barrier.wait()
        open_generation(store, JOB, generation + 1)
        thread.join()
        head = read_head(store, JOB)
        assert head is not None
        assert head.generation == generation + 1
        assert outcome in (["published"], ["fenced"])
        assert (manifest.checkpoint in head.manifests) == (outcome == ["published"])
        assert head.base == (head.manifests[0] if head.manifests else None)


def test_what_threads_publish_at_once_is_listed_or_refused_as_overtaken(store_address: StoreAddress) -> None:
    store = store_address.open()
    open_generation(store, JOB, 1)
    manifests = [written(store, step, 1) for step in (10, 20, 30)]
    overtaken: list[CheckpointRef] = []

    def try_to_publish(manifest: Manifest) -> None:
        try:
            publish(store_address.open(), JOB, 1, manifest)
        except Superseded:
            overtaken.append(manifest.checkpoint)

    threads = [threading.Thread(target=try_to_publish, args=[manifest]) for manifest in manifests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    head = read_head(store, JOB)
    assert head is not None
    assert head.manifests[0] == CheckpointRef(step=30, generation=1)
    assert {*head.manifests, *overtaken} == set(ids((30, 1), (20, 1), (10, 1)))
    assert not {*head.manifests} & {*overtaken}


def test_a_later_generation_is_newer_even_if_it_had_to_go_back(store: Store) -> None:
    published(store, 30, 1)
    published(store, 20, 2)
    head = open_generation(store, JOB, 3)
    assert head.manifests == ids((20, 2), (30, 1))
    assert head.base == CheckpointRef(step=20, generation=2)


def test_candidates_begin_with_the_base_then_go_from_new_to_old(store: Store) -> None:
    for step in (10, 20):
        published(store, step, 1)
    open_generation(store, JOB, 2)
    published(store, 30, 2)
    head = read_head(store, JOB)
    assert head is not None
    assert candidates(head) == ids((20, 1), (30, 2), (10, 1))


def test_jobs_in_one_store_do_not_meet(store: Store) -> None:
    published(store, 10, 3)
    assert open_generation(store, "other", 1).generation == 1
    assert read_head(store, "other").manifests == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "surprise"),
        ({"generation": "3"}, "generation"),
        ({"generation": -1}, "generation"),
        ({"manifests": [{"step": 1}]}, r"manifests\.0\.generation"),
        ({"format": 99}, "format 99"),
        ({"job": "other"}, "other"),
    ],
)
def test_a_head_that_is_not_as_written_is_corrupt_and_the_field_named(
    tmp_path: object, change: dict[str, object], message: str
) -> None:
    good = json.loads(Head(FORMAT, JOB, 0, 3, None, ids((1, 1)), ()).to_bytes())
    with pytest.raises(Corrupt, match=message):
        Head.from_bytes(json.dumps({**good, **change}).encode(), head_key(JOB))


def test_a_torn_head_is_corrupt_and_is_not_replaced(store: Store) -> None:
    store.put(head_key(JOB), b'{"format": 1, "jo')
    with pytest.raises(Corrupt, match=head_key(JOB)):
        open_generation(store, JOB, 1)
    assert store.get(head_key(JOB)) == b'{"format": 1, "jo'


def test_a_head_survives_its_json() -> None:
    head = Head(FORMAT, JOB, 4, 3, CheckpointRef(step=1, generation=1), ids((2, 2), (1, 1)), ())
    assert Head.from_bytes(head.to_bytes(), head_key(JOB)) == head


def test_a_lost_race_is_tried_again(store: Store) -> None:
    open_generation(store, JOB, 1)
    slow = SlowStore(store, lambda: published(store, 10, 1))
    head = open_generation(slow, JOB, 2)  # type: ignore[arg-type]
    assert head.base == CheckpointRef(step=10, generation=1)


def test_a_race_that_is_never_won_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> str:
        raise Conflict("always")

    monkeypatch.setattr(type(store), "swap", lose)
    with pytest.raises(StoreUnavailable, match="lost 100 swaps"):
        open_generation(store, JOB, 1)


def test_an_incomplete_set_of_receipts_makes_no_manifest(store: Store) -> None:
    receipts = write_parts(store, CheckpointRef(step=10, generation=1))
    with pytest.raises(Incomplete, match=r"\[\(2, 1\)\]"):
        assembled(receipts[:-1], CheckpointRef(step=10, generation=1))
