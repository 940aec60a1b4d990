"""Parts, receipts and manifests: what was written comes back, and anything else is noticed."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import (
    JOB,
    NUM_PARTS,
    NUM_SECTIONS,
    assembled,
    published,
    read_sections,
    section_tensors,
    write_parts,
)
from makara.checkpoint import (
    Cancelled,
    Corrupt,
    Incomplete,
    NotFound,
    Receipt,
    Store,
    StoreUnavailable,
    load_manifest,
    read_part,
    read_parts,
    retrying,
    write_part,
)
from makara.checkpoint.layout import manifest_key, part_key
from makara.checkpoint.tensors import pack, unpack
from makara.protocol.messages import CheckpointRef

CHECKPOINT = CheckpointRef(step=10, generation=1)


def weights(files: dict[tuple[int, int], bytes]) -> dict[str, torch.Tensor]:
    return {name: tensor for data in files.values() for name, tensor in unpack(data)[0].items()}


def test_the_sections_asked_for_come_back_bit_for_bit(store: Store) -> None:
    published(store, 10, 1)
    files = read_sections(store, JOB, CHECKPOINT, {0, 2})
    assert list(files) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    for (section, part), data in files.items():
        expected = section_tensors(section, part, 10)
        tensors, _ = unpack(data)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_parts_can_be_found_by_the_tensors_in_them(store: Store) -> None:
    published(store, 10, 1)
    parts = load_manifest(store, JOB, CHECKPOINT).parts
    found = [part for part in parts if "weights/block1.1.weight" in part.tensors]
    assert list(read_parts(store, found)) == [(1, 1)]
    assert read_parts(store, []) == {}


def test_the_manifest_carries_position_recipe_and_scalars(store: Store) -> None:
    published(store, 10, 1)
    loaded = load_manifest(store, JOB, CHECKPOINT)
    assert (loaded.step, loaded.generation, loaded.data_position) == (10, 1, 640)
    assert loaded.recipe == {"microbatch_size": 2, "cuts": [3, 5], "graph_hash": "abc", "note": None}
    assert loaded.metadata == {section: {"scale": 0.5 * section} for section in range(NUM_SECTIONS)}
    assert loaded.num_parts == (NUM_PARTS,) * NUM_SECTIONS


def flip_a_bit(data: bytes) -> bytes:
    place = random.Random(7).randrange(len(data) // 2, len(data))
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "a bit flipped": flip_a_bit,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_noticed(store: Store, damage: str) -> None:
    published(store, 10, 1)
    newer = published(store, 20, 1)
    key = newer.parts[2].key
    store.put(key, DAMAGES[damage](store.get(key)))
    with pytest.raises(Corrupt, match=key):
        read_sections(store, JOB, newer.checkpoint, {1})
    assert read_sections(store, JOB, newer.checkpoint, {0}).keys() == {(0, 0), (0, 1)}
    assert read_sections(store, JOB, CheckpointRef(step=10, generation=1), {1}).keys() == {(1, 0), (1, 1)}


def test_a_lost_part_or_manifest_is_noticed(store: Store) -> None:
    published(store, 10, 1)
    published(store, 20, 1)
    part, manifest = (
        part_key(JOB, CheckpointRef(step=10, generation=1), 0, 0),
        manifest_key(JOB, CheckpointRef(step=20, generation=1)),
    )
    store.delete(part)
    store.delete(manifest)
    with pytest.raises(NotFound, match=part):
        read_sections(store, JOB, CheckpointRef(step=10, generation=1), {0})
    with pytest.raises(NotFound, match=manifest):
        load_manifest(store, JOB, CheckpointRef(step=20, generation=1))


def test_reading_outlasts_a_store_that_is_away_for_a_while(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = published(store, 10, 1)
    answer, away, lock = store.get_range, 3, threading.Lock()

    def flaky(key: str, start: int, length: int) -> bytes:
        nonlocal away
        with lock:
            away -= 1
            if away >= 0:
                raise StoreUnavailable("away")
        return answer(key, start, length)

    monkeypatch.setattr(store, "get_range", flaky)
    assert len(read_parts(store, manifest.parts)) == 6
    assert away < 0


def test_reading_can_be_cancelled(store: Store) -> None:
    manifest = published(store, 10, 1)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        read_parts(store, manifest.parts, retry=partial(retrying, cancel=cancel))


def test_a_part_of_another_content_under_the_right_key_is_noticed(store: Store) -> None:
    manifest = published(store, 10, 1)
    store.put(manifest.parts[0].key, store.get(manifest.parts[1].key))
    with pytest.raises(Corrupt, match=manifest.parts[0].key):
        read_part(store, manifest.parts[0])


def test_writing_a_part_twice_gives_the_same_receipt(store: Store) -> None:
    assert write_parts(store, CHECKPOINT) == write_parts(store, CHECKPOINT)


def test_receipts_survive_their_json_and_may_come_in_any_order_and_twice(store: Store) -> None:
    receipts = write_parts(store, CHECKPOINT)
    sent = [Receipt.from_bytes(receipt.to_bytes()) for receipt in receipts]
    assert sent == receipts
    assert assembled([*reversed(sent), *sent], CHECKPOINT) == assembled(receipts, CHECKPOINT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "ff"}, "sha256"),
        ({"size_bytes": -1}, "size_bytes"),
        ({"section": "0"}, "section"),
        ({"surprise": 0}, "surprise"),
    ],
)
def test_a_receipt_that_is_not_as_written_is_refused(
    store: Store, change: dict[str, object], message: str
) -> None:
    receipt = json.loads(write_parts(store, CHECKPOINT, sections=[0])[0].to_bytes())
    changed = {**receipt, "part": {**receipt["part"], **change}}
    with pytest.raises(Corrupt, match=message):
        Receipt.from_bytes(json.dumps(changed).encode())


def test_a_set_of_parts_with_a_hole_is_incomplete_and_says_which(store: Store) -> None:
    receipts = write_parts(store, CHECKPOINT)
    for hole in range(len(receipts)):
        place = (receipts[hole].part.section, receipts[hole].part.part)
        with pytest.raises(Incomplete, match=rf"\({place[0]}, {place[1]}\)"):
            assembled(receipts[:hole] + receipts[hole + 1 :], CHECKPOINT)
    with pytest.raises(Incomplete, match=r"sections \[2\]"):
        assembled(receipts[:4], CHECKPOINT)
    with pytest.raises(Incomplete, match="surplus"):
        assembled([*receipts, *write_parts(store, CHECKPOINT, sections=[NUM_SECTIONS])], CHECKPOINT)


def test_receipts_that_contradict_one_another_are_incomplete(store: Store) -> None:
    receipts = write_parts(store, CHECKPOINT)

    def again(tensors: dict[str, torch.Tensor], num_parts: int = NUM_PARTS, scale: float = 0.0) -> Receipt:
        return write_part(store, JOB, CHECKPOINT, 0, 0, num_parts, pack(tensors), metadata={"scale": scale})

    with pytest.raises(Incomplete, match=r"two different receipts for part 0\.0"):
        assembled([*receipts, again({"weights/x": torch.zeros(1)})], CHECKPOINT)
    with pytest.raises(Incomplete, match="disagree on the number of parts"):
        assembled([again(section_tensors(0, 0, 10), num_parts=3), *receipts[1:]], CHECKPOINT)
    with pytest.raises(Incomplete, match="disagree on scale"):
        assembled([again(section_tensors(0, 0, 10), scale=9.0), *receipts[1:]], CHECKPOINT)
    with pytest.raises(Incomplete, match=r"weights/block1\.0\.weight.*is in both"):
        assembled([again({"weights/block1.0.weight": torch.zeros(1)}), *receipts[1:]], CHECKPOINT)
    with pytest.raises(Incomplete, match="20-g1"):
        assembled([*receipts, *write_parts(store, CheckpointRef(step=20, generation=1))], CHECKPOINT)


def test_a_payload_that_is_no_such_file_is_never_stored(store: Store) -> None:
    payload = pack({"weights/a": torch.zeros(2)})
    with pytest.raises(Corrupt, match=r"0\.0\.safetensors"):
        write_part(store, JOB, CHECKPOINT, 0, 0, 1, payload[:-1])
    with pytest.raises(ValueError, match="part 1 of 1"):
        write_part(store, JOB, CHECKPOINT, 0, 1, 1, payload)
    with pytest.raises(ValueError, match="JSON"):
        write_part(store, JOB, CHECKPOINT, 0, 0, 1, payload, metadata={"scale": float("nan")})
    assert list(store.list("")) == []


def test_a_manifest_that_was_altered_is_corrupt(store: Store) -> None:
    manifest = published(store, 10, 1)
    key = manifest_key(JOB, CHECKPOINT)
    data = store.get(key)
    for altered, message in (
        (data.replace(b'"data_position":640', b'"data_position":641'), "checksum"),
        (data[:-10], "JSON"),
        (data.replace(b'"step":10', b'"step":"10"', 1), "step"),
        (data.replace(b'"format":1', b'"format":2'), "checksum"),
        (b"\xff" + data, key),
    ):
        store.put(key, altered)
        with pytest.raises(Corrupt, match=message):
            load_manifest(store, JOB, CHECKPOINT)
    store.put(manifest_key(JOB, CheckpointRef(step=11, generation=1)), manifest.to_bytes())
    with pytest.raises(Corrupt, match="describes checkpoint 10-g1"):
        load_manifest(store, JOB, CheckpointRef(step=11, generation=1))


def test_a_recipe_that_is_not_json_is_refused(store: Store) -> None:
    manifest = assembled(write_parts(store, CHECKPOINT), CHECKPOINT)
    odd: Any = {"device": torch.device("cpu")}
    with pytest.raises(ValueError, match="recipe"):
        replace(manifest, recipe=odd)


@pytest.mark.parametrize("text", ["10", "10-g", "-1-g1", "10-g1/..", "١-g1", "10-g1\n", "010-g1"])
def test_a_malformed_checkpoint_name_is_no_checkpoint(text: str) -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        CheckpointRef.parse(text)


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}])
def test_a_part_may_hold_no_tensor_at_all(store: Store, metadata: dict[str, str] | None) -> None:
    payload = pack({}, metadata)
    assert unpack(payload) == ({}, metadata or {})
    receipt = write_part(store, JOB, CHECKPOINT, 0, 0, 1, payload)
    assert read_part(store, receipt.part) == payload


def test_a_missing_part_is_not_found_when_read(store: Store) -> None:
    manifest = published(store, 10, 1)
    store.delete(manifest.parts[0].key)
    with pytest.raises(NotFound, match=manifest.parts[0].key):
        read_sections(store, JOB, CHECKPOINT, {0})
