"""What may be deleted, and what never."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import JOB, begin_write, published, write_parts, written
from conftest import StoreAddress
from makara.checkpoint import (
    Retained,
    Store,
    Superseded,
    Swept,
    delete_parts,
    export,
    load_manifest,
    open_generation,
    open_store,
    publish,
    retire,
    sweep,
)
from makara.checkpoint.layout import head_key, manifest_key
from makara.protocol.messages import CheckpointRef

LEASE_S = 60.0


def ids(*pairs: tuple[int, int]) -> tuple[CheckpointRef, ...]:
    return tuple(CheckpointRef(step=step, generation=generation) for step, generation in pairs)


def test_the_base_of_the_open_generation_is_never_retired(store: Store) -> None:
    published(store, 10, 1)
    open_generation(store, JOB, 2)
    published(store, 20, 2)
    with pytest.raises(Retained, match="base"):
        retire(store, JOB, CheckpointRef(step=10, generation=1), now=1.0)


def test_the_only_checkpoint_is_never_retired(store: Store) -> None:
    published(store, 10, 1)
    with pytest.raises(Retained, match="only"):
        retire(store, JOB, CheckpointRef(step=10, generation=1), now=1.0)


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


def swept(store: Store, *, later_s: float = 0.0, **options: Any) -> Swept:
    found = sweep(store, JOB, now=time.time() + later_s, lease_s=LEASE_S, **options)
    assert found is not None
    return found


def test_sweeping_removes_what_fenced_writers_left_and_nothing_else(store: Store) -> None:
    kept = published(store, 20, 1)
    retired = published(store, 30, 1)
    published(store, 35, 1)
    retire(store, JOB, retired.checkpoint, now=time.time() + LEASE_S)
    write_parts(store, CheckpointRef(step=40, generation=1), sections=[0, 1])  # died before the last section
    open_generation(store, JOB, 2)
    in_flight = written(store, 40, 2)
    foreign = [f"{JOB}/sections/readme", f"{JOB}/sections/40-g1/mine.txt", f"{JOB}/notes.txt", "other/x"]
    foreign += [f"{JOB}/sections/040-g1/0.0.safetensors", f"{JOB}/export/10/mine.txt"]
    for key in foreign:
        store.put(key, b"not ours")
    assert swept(store).orphans == (), "a lease has not passed"
    assert swept(store, later_s=LEASE_S).orphans == ids((40, 1))
    assert swept(store, later_s=LEASE_S).orphans == ()
    for manifest in (kept, retired, in_flight):
        assert all(store.exists(part.key) for part in manifest.parts)
    assert all(store.exists(key) for key in foreign)
    assert not store.exists(f"{JOB}/sections/40-g1/0.0.safetensors")
    publish(store, JOB, 2, in_flight)


def test_sweeping_removes_what_the_open_generation_can_no_longer_publish(store: Store) -> None:
    given_up = written(store, 10, 1)
    published(store, 20, 1)
    coming = written(store, 30, 1)
    assert swept(store, later_s=LEASE_S).orphans == ids((10, 1))
    with pytest.raises(Superseded):
        publish(store, JOB, 1, given_up)
    publish(store, JOB, 1, coming)


def test_sweeping_deletes_what_left_the_head_a_lease_ago(store: Store) -> None:
    manifests = [published(store, step, 1) for step in (10, 20, 30, 40)]
    now = time.time()
    retire(store, JOB, manifests[0].checkpoint, now=now - LEASE_S)
    retire(store, JOB, manifests[1].checkpoint, now=now)
    found = swept(store, unwanted=lambda checkpoint: checkpoint.step == 30)
    assert found.deleted == ids((10, 1))
    assert found.head.manifests == ids((40, 1))
    assert {retired.checkpoint for retired in found.head.retired} == set(ids((20, 1), (30, 1)))
    assert not store.exists(manifests[0].parts[0].key)
    assert store.exists(manifests[2].parts[0].key)
    swept(store, later_s=LEASE_S)
    assert {key.split("/")[2] for key, _ in store.list(f"{JOB}/sections/")} == {"40-g1"}


def test_sweeping_never_retires_the_base_or_the_only_checkpoint(store: Store) -> None:
    published(store, 10, 1)
    assert swept(store, unwanted=lambda _: True).head.manifests == ids((10, 1))
    open_generation(store, JOB, 2)
    published(store, 20, 2)
    assert swept(store, unwanted=lambda checkpoint: checkpoint.step == 10).head.base == CheckpointRef(
        step=10, generation=1
    )


def test_sweeping_after_the_end_retires_the_base_and_never_the_newest(store: Store) -> None:
    published(store, 10, 1)
    open_generation(store, JOB, 2)
    published(store, 20, 2)
    head = swept(store, unwanted=lambda _: True, ended=True).head
    assert (head.base, head.manifests) == (None, ids((20, 2)))
    assert [retired.checkpoint for retired in head.retired] == list(ids((10, 1)))


def test_sweeping_aborts_writes_that_nobody_will_end(store_address: StoreAddress) -> None:
    store = store_address.open()
    published(store, 10, 1)
    open_generation(store, JOB, 2)
    left = begin_write(store_address, f"{JOB}/sections/20-g1/0.0.safetensors")
    repeated = begin_write(store_address, f"{JOB}/sections/10-g1/0.0.safetensors")  # another try got through
    going = begin_write(store_address, f"{JOB}/sections/20-g2/0.0.safetensors")
    exported = begin_write(store_address, f"{JOB}/export/10/model.safetensors")
    foreign = begin_write(store_address, "other/sections/20-g1/0.0.safetensors")
    assert swept(store).aborted == 0
    assert swept(store, later_s=LEASE_S).aborted == 1
    under_way = {unfinished.key for unfinished in store.unfinished("")}
    # Azure tells of no blocks that wait beside an object, and drops them itself after a week.
    shown = set() if store_address.uri.startswith("az://") else {repeated}
    assert under_way == {going, exported, foreign} | shown, f"{left} is given up"
    assert swept(store, later_s=2 * 3600.0, exporting=True).aborted == len(shown)
    assert swept(store, later_s=2 * 3600.0).aborted == 1
    assert {unfinished.key for unfinished in store.unfinished("")} == {going, foreign}


def test_sweeping_leaves_temporary_files_of_somebody_else(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    published(store, 10, 1)
    of_nobody = f".tmp-1-{'0' * 32}"
    theirs = [
        f"{JOB}/notes/{of_nobody}",
        f"{JOB}/.tmp-mine",
        f"{JOB}/manifests/.tmp-a-b",
        f"{JOB}/export/.tmp-1",
    ]
    ours = [f"{JOB}/{of_nobody}", f"{JOB}/manifests/{of_nobody}"]
    for key in (*theirs, *ours):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text("half of something")
    assert swept(store, later_s=2 * 3600.0).aborted == len(ours)
    assert all((tmp_path / key).exists() for key in theirs)


def test_sweeping_removes_an_export_that_was_never_finished(store: Store) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    export(store, JOB, checkpoint)
    done = {key for key, _ in store.list(f"{JOB}/export/")}
    store.put(f"{JOB}/export/20/model-00001-of-00002.safetensors", b"half")
    assert swept(store, later_s=LEASE_S, exporting=True).exports == ()
    assert swept(store, later_s=LEASE_S).exports == (20,)
    assert {key for key, _ in store.list(f"{JOB}/export/")} == done


def test_sweeping_a_job_without_a_head_touches_nothing(store: Store) -> None:
    manifest = written(store, 10, 1)
    assert sweep(store, JOB, now=time.time() + LEASE_S, lease_s=LEASE_S) is None
    assert all(store.exists(part.key) for part in manifest.parts)
