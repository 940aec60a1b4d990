"""Checkpoints over long histories: many generations, writers killed at any instant, deletions in between."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
from checkpoints import read_sections
from conftest import StoreAddress
from makara.checkpoint import (
    Fenced,
    Manifest,
    NotFound,
    Retained,
    StoreUnavailable,
    Superseded,
    assemble,
    candidates,
    delete_parts,
    load_manifest,
    open_generation,
    publish,
    read_head,
    read_part,
    retire,
    sweep,
    write_part,
)
from makara.checkpoint.safetensors_header import TensorEntry, build_header
from makara.protocol.messages import CheckpointRef
from memory_store import MemoryStore

JOB = "history"
NUM_HISTORIES = 150
NUM_EVENTS = 40


def payload(step: int, num_bytes: int = 64) -> bytes:
    header, _ = build_header([TensorEntry("weights/a", "U8", (num_bytes,), 0, num_bytes)], {})
    return header + bytes([step % 256]) * num_bytes


def stored(store: MemoryStore, checkpoint: CheckpointRef) -> Manifest:
    receipts = [write_part(store, JOB, checkpoint, 0, 0, 1, payload(checkpoint.step))]
    return assemble(receipts, job=JOB, checkpoint=checkpoint, num_sections=1, data_position=0, recipe={})


class Crash(BaseException):
    """The process that was at work ends here."""


class MortalStore(MemoryStore):
    """A store whose client dies, or loses its answer, after some number of writes."""

    def __init__(self, objects: dict[str, bytes], rng: random.Random) -> None:
        super().__init__()
        self.objects = objects
        self._rng = rng
        self._left = rng.randrange(16)

    def _live(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._rng.choice([Crash(), StoreUnavailable("no answer")])

    def put(self, key: str, data: bytes) -> None:
        self._live()
        super().put(key, data)
        self._live()

    def delete(self, key: str) -> None:
        self._live()
        super().delete(key)

    def swap(self, key: str, data: bytes, expected_etag: str | None) -> str:
        self._live()
        tag = super().swap(key, data, expected_etag)
        self._live()  # the answer may be lost although the swap happened
        return tag


class History:
    """A manager and trainers of several generations at once, each step of which may be cut short."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.objects: dict[str, bytes] = {}
        self.generation = 0
        self.step = 0
        self.acknowledged: set[CheckpointRef] = set()  # publish returned
        self.dismissed: set[CheckpointRef] = set()  # retire was called
        self.pending: list[Manifest] = []

    def event(self) -> None:
        store = MortalStore(self.objects, self.rng)
        often, sometimes = (self.write, self.publish, self.retire, self.delete), (self.open, self.sweep)
        acts = [*often, *often, *often, *sometimes]
        try:
            self.rng.choice(acts)(store)
        except (Crash, Fenced, NotFound, Retained, StoreUnavailable, Superseded):
            return  # NotFound: a publication of what was swept or deleted meanwhile

    def open(self, store: MortalStore) -> None:
        self.generation += 1
        open_generation(store, JOB, self.generation)

    def write(self, store: MortalStore) -> None:
        self.step += 1
        generation = max(1, self.generation - self.rng.choice([0, 0, 0, 1, 2]))
        self.pending.append(stored(store, CheckpointRef(step=self.step, generation=generation)))

    def publish(self, store: MortalStore) -> None:
        if self.pending:
            manifest = self.rng.choice(self.pending[-4:])  # also one that was published, retired or deleted
            head = publish(store, JOB, manifest.generation, manifest)
            assert manifest.generation == head.generation, f"{manifest.checkpoint} published under {head}"
            self.acknowledged.add(manifest.checkpoint)

    def retire(self, store: MortalStore) -> None:
        head = read_head(store, JOB)
        if head is not None and head.manifests:
            checkpoint = self.rng.choice(head.manifests)
            self.dismissed.add(checkpoint)
            retire(store, JOB, checkpoint, now=float(self.step))

    def delete(self, store: MortalStore) -> None:
        head = read_head(store, JOB)
        if head is not None and head.retired:
            delete_parts(store, JOB, self.rng.choice(head.retired).checkpoint)

    def sweep(self, store: MortalStore) -> None:
        lease_s = self.rng.choice([0.0, 3.0])  # the clock of the world is `step`
        sweep(store, JOB, now=float(self.step), lease_s=lease_s)

    def check(self) -> None:
        store = MemoryStore()
        store.objects = self.objects
        head = read_head(store, JOB)
        if head is None:
            assert not self.acknowledged
            return
        assert head.generation <= self.generation
        assert len(set(head.manifests)) == len(head.manifests)
        assert [c.age_rank for c in head.manifests] == sorted(
            (c.age_rank for c in head.manifests), reverse=True
        )
        for checkpoint in head.manifests:
            read_part(store, load_manifest(store, JOB, checkpoint).parts[0])
        assert head.base is None or head.base in head.manifests
        assert self.acknowledged - self.dismissed <= set(head.manifests)
        assert head.manifests or not self.acknowledged


@pytest.mark.parametrize("block", range(3))
def test_after_any_crash_what_is_listed_is_readable_and_what_was_acknowledged_is_listed(block: int) -> None:
    for seed in range(block * NUM_HISTORIES // 3, (block + 1) * NUM_HISTORIES // 3):
        history = History(seed)
        for number in range(NUM_EVENTS):
            try:
                history.event()
                history.check()
            except Exception as error:
                raise AssertionError(f"seed {seed}, event {number}: {error!r}") from error


WRITER = """
import sys
from conftest import StoreAddress
from test_checkpoint_histories import publish_for_ever
publish_for_ever(StoreAddress(*[value or None for value in sys.argv[1:4]]), int(sys.argv[4]))
"""


def publish_for_ever(address: StoreAddress, generation: int) -> None:
    """A trainer's uploads as a process of its own, which prints each checkpoint when it exists."""
    store = address.open()
    head = open_generation(store, JOB, generation)
    step = 0 if head.base is None else head.base.step
    while True:
        step += 1
        checkpoint = CheckpointRef(step=step, generation=generation)
        receipts = [
            write_part(store, JOB, checkpoint, section, 0, 1, named_payload(section, step))
            for section in range(2)
        ]
        manifest = assemble(
            receipts, job=JOB, checkpoint=checkpoint, num_sections=2, data_position=step, recipe={}
        )
        publish(store, JOB, generation, manifest)
        print(step, flush=True)


def named_payload(section: int, step: int) -> bytes:
    size = 300_000
    header, _ = build_header([TensorEntry(f"weights/{section}", "U8", (size,), 0, size)], {})
    return header + bytes([step % 256]) * size


@pytest.mark.slow
def test_a_writer_killed_at_any_instant_loses_no_checkpoint_that_it_reported(
    store_address: StoreAddress,
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    store = store_address.open()
    reported = 0
    for generation in range(1, 4):
        arguments = [
            store_address.uri,
            store_address.endpoint or "",
            store_address.region or "",
            str(generation),
        ]
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(2, 12)):
                reported = int(writer.stdout.readline())
            writer.kill()
        head = read_head(store, JOB)
        assert head is not None
        assert head.generation == generation
        assert head.manifests[0].step >= reported
        reported = head.manifests[0].step
        assert [c.step for c in head.manifests] == list(range(reported, 0, -1))
        for checkpoint in head.manifests:
            assert len(read_sections(store, JOB, checkpoint, {0, 1})) == 2
    head = open_generation(store, JOB, 4)
    assert load_manifest(store, JOB, candidates(head)[0]).data_position == reported
    sweep(store, JOB, now=time.time(), lease_s=0.0)
    left = {key.split("/")[2] for key, _ in store.list(f"{JOB}/sections/")}
    assert left == {str(checkpoint) for checkpoint in head.manifests}
    assert list(store.unfinished(f"{JOB}/")) == []
