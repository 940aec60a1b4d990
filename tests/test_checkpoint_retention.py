"""What may be deleted, and what never."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import JOB, published, write_parts, written
from makara.checkpoint import (
    CheckpointId,
    Retained,
    Store,
    delete_parts,
    load_manifest,
    open_generation,
    open_store,
    publish,
    retire,
    sweep,
)
from makara.checkpoint.layout import head_key, manifest_key


def ids(*pairs: tuple[int, int]) -> tuple[CheckpointId, ...]:
    return tuple(CheckpointId(step, generation) for step, generation in pairs)


def test_the_base_of_the_open_generation_is_never_retired(store: Store) -> None:
    published(store, 10, 1)
    open_generation(store, JOB, 2)
    published(store, 20, 2)
    with pytest.raises(Retained, match="base"):
        retire(store, JOB, CheckpointId(10, 1), now=1.0)


def test_the_only_checkpoint_is_never_retired(store: Store) -> None:
    published(store, 10, 1)
    with pytest.raises(Retained, match="only"):
        retire(store, JOB, CheckpointId(10, 1), now=1.0)


def test_a_listed_checkpoint_is_never_deleted(store: Store) -> None:
    manifest = published(store, 10, 1)
    published(store, 20, 1)
    with pytest.raises(Retained, match="retire it first"):
        delete_parts(store, JOB, manifest.checkpoint)
    assert all(store.exists(part.key) for part in manifest.parts)


def test_retiring_keeps_the_parts_and_deleting_removes_all_of_them_and_nothing_else(store: Store) -> None:
    old, new = published(store, 10, 1), published(store, 20, 1)
    head = retire(store, JOB, old.checkpoint, now=123.5)
    assert head.manifests == ids((20, 1))
    assert [(retired.checkpoint, retired.at) for retired in head.retired] == [(old.checkpoint, 123.5)]
    assert load_manifest(store, JOB, old.checkpoint) == old
    head = delete_parts(store, JOB, old.checkpoint)
    assert head.retired == ()
    left = {key for key, _ in store.list("")}
    assert left == {head_key(JOB), manifest_key(JOB, new.checkpoint), *(part.key for part in new.parts)}


def test_retiring_and_deleting_twice_change_nothing(store: Store) -> None:
    old = published(store, 10, 1)
    published(store, 20, 1)
    first = retire(store, JOB, old.checkpoint, now=1.0)
    assert retire(store, JOB, old.checkpoint, now=2.0) == first
    gone = delete_parts(store, JOB, old.checkpoint)
    assert delete_parts(store, JOB, old.checkpoint) == gone
    assert retire(store, JOB, old.checkpoint, now=3.0) == gone


def test_sweeping_removes_what_fenced_writers_left_and_nothing_else(store: Store) -> None:
    kept = [published(store, 10, 1), published(store, 20, 1)]
    retire(store, JOB, kept[0].checkpoint, now=1.0)
    write_parts(store, CheckpointId(30, 1), sections=[0, 1])  # died before the last section
    open_generation(store, JOB, 2)
    in_flight = written(store, 30, 2)
    store.put(f"{JOB}/sections/readme", b"not ours")
    assert sweep(store, JOB, older_than=1) == ()
    assert sweep(store, JOB) == ids((30, 1))
    assert sweep(store, JOB) == ()
    assert list(store.list(f"{JOB}/sections/30-g1/")) == []
    for manifest in (*kept, in_flight):
        assert all(store.exists(part.key) for part in manifest.parts)
    publish(store, JOB, 2, in_flight)


def test_sweeping_finds_what_a_killed_writer_left_unfinished(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    open_generation(store, JOB, 2)
    folder = tmp_path / "store" / JOB / "sections" / "10-g1"
    folder.mkdir(parents=True)
    (folder / ".tmp-1-abc").write_bytes(b"half a part")
    assert sweep(store, JOB) == ids((10, 1))
    assert not folder.exists()


def test_sweeping_a_job_without_a_head_touches_nothing(store: Store) -> None:
    manifest = written(store, 10, 1)
    assert sweep(store, JOB) == ()
    assert all(store.exists(part.key) for part in manifest.parts)
