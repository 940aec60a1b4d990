"""Exported weights: plain safetensors that others load, and a hash by which two runs are compared."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import JOB, NUM_PARTS, NUM_SECTIONS, published, section_tensors
from makara.checkpoint import (
    Corrupt,
    Export,
    Incomplete,
    NotFound,
    Store,
    StoreUnavailable,
    assemble,
    export,
    fetch_export,
    open_generation,
    publish,
    weights_sha256,
    write_part,
)
from makara.checkpoint.tensors import pack
from makara.protocol.messages import CheckpointRef
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from weight_hashes import tensors_sha256


def fetched(store: Store, made: Export, folder: Path) -> Path:
    """The exported files, copied from the store to `folder`."""
    prefix = made.uri.removeprefix(store.uri + "/").rpartition("/")[0]
    folder.mkdir()
    for key, _ in store.list(prefix + "/"):
        (folder / key.rpartition("/")[2]).write_bytes(store.get(key))
    return folder


def exported_tensors(step: int) -> dict[str, torch.Tensor]:
    """What the export of `checkpoints.published` must hold."""
    return {
        name.partition("/")[2]: tensor
        for section in range(NUM_SECTIONS)
        for part in range(NUM_PARTS)
        for name, tensor in section_tensors(section, part, step).items()
        if not name.startswith("optimizer/")
    }


def publish_tensors(store: Store, sections: Mapping[int, Mapping[str, torch.Tensor]]) -> CheckpointRef:
    checkpoint = CheckpointRef(step=1, generation=1)
    open_generation(store, JOB, 1)
    receipts = [write_part(store, JOB, checkpoint, k, 0, 1, pack(sections[k])) for k in sections]
    manifest = assemble(
        receipts, job=JOB, checkpoint=checkpoint, num_sections=len(sections), data_position=0, recipe={}
    )
    publish(store, JOB, 1, manifest)
    return checkpoint


def test_weights_and_buffers_load_in_plain_pytorch(store: Store, tmp_path: Path) -> None:
    made = export(store, JOB, published(store, 10, 1).checkpoint)
    assert made.uri == f"{store.uri}/{JOB}/export/10/model.safetensors"
    folder = fetched(store, made, tmp_path / "export")
    loaded = load_file(folder / "model.safetensors")
    expected = exported_tensors(10)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert made.step == 10
    assert made.num_bytes == (folder / "model.safetensors").stat().st_size


def test_the_hash_is_that_of_the_tensors_however_they_are_stored(store: Store, tmp_path: Path) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    whole = export(store, JOB, checkpoint)
    expected = tensors_sha256(exported_tensors(10))
    folder = fetched(store, whole, tmp_path / "whole")
    assert whole.sha256 == weights_sha256(folder / "model.safetensors") == weights_sha256(folder) == expected
    save_file(exported_tensors(10), tmp_path / "reference.safetensors")
    assert weights_sha256(tmp_path / "reference.safetensors") == expected


def test_the_hash_sees_names_types_shapes_and_bytes() -> None:
    base = tensors_sha256({"a": torch.zeros(2, 3), "b": torch.ones(1)})
    others = [
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3).neg(), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3)},
    ]
    assert len({base, *map(tensors_sha256, others)}) == 6
    assert tensors_sha256({"b": torch.ones(1), "a": torch.zeros(2, 3)}) == base


def test_shards_have_an_index_and_the_same_hash(store: Store, tmp_path: Path) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    made = export(store, JOB, checkpoint, max_shard_bytes=100)
    folder = fetched(store, made, tmp_path / "export")
    assert made.uri.endswith("/export/10/model.safetensors.index.json")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected = exported_tensors(10)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert len(names) > 2
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], expected[name])
    assert made.sha256 == weights_sha256(folder) == tensors_sha256(expected)
    assert made.num_bytes == sum((folder / name).stat().st_size for name in names)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def test_a_model_with_tied_weights_loads_and_computes_the_same(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Tied().eval()
    model.norm.running_mean += 1
    state = model.state_dict()
    first = {
        "weights/embedding.weight": state["embedding.weight"],
        "optimizer/embedding.weight/step": torch.ones(()),
    }
    rest = {
        f"weights/{name}" if name in dict(model.named_parameters()) else f"buffers/{name}": state[name]
        for name in state
        if name.startswith("norm.")
    }
    checkpoint = publish_tensors(store, {0: first, 1: rest})
    folder = fetched(store, export(store, JOB, checkpoint), tmp_path / "export")
    loaded = Tied().eval()
    missing, unexpected = load_model(loaded, folder / "model.safetensors")
    assert not missing
    assert not unexpected
    assert loaded.head.weight is loaded.embedding.weight
    tokens = torch.arange(7)
    assert torch.equal(loaded(tokens), model(tokens))


def test_tensors_of_mixed_widths_are_aligned_for_readers_that_map_the_file(
    store: Store, tmp_path: Path
) -> None:
    tensors = {
        "weights/a": torch.ones(3, dtype=torch.uint8),
        "weights/b": torch.ones(5, dtype=torch.float64),
        "weights/c": torch.ones(1, dtype=torch.bfloat16),
        "buffers/d": torch.tensor(True),
        "weights/e": torch.zeros(0, 3),
    }
    made = export(store, JOB, publish_tensors(store, {0: tensors}))
    loaded = load_file(fetched(store, made, tmp_path / "export") / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        name.partition("/")[2]: tensor.dtype for name, tensor in tensors.items()
    }


def test_exporting_again_writes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    made = export(store, JOB, checkpoint)

    def refuse(*_: object) -> None:
        raise AssertionError("written again")

    for method in ("put", "put_file", "delete_many"):
        monkeypatch.setattr(store, method, refuse)
    assert export(store, JOB, checkpoint) == made


def test_an_export_that_was_interrupted_or_damaged_is_done_again(store: Store, tmp_path: Path) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    made = export(store, JOB, checkpoint, max_shard_bytes=100)
    first = next(key for key, _ in store.list(f"{JOB}/export/10/") if key.endswith(".safetensors"))
    store.delete(first)
    again = export(store, JOB, checkpoint)
    assert again.sha256 == made.sha256
    left = [key.rpartition("/")[2] for key, _ in store.list(f"{JOB}/export/10/")]
    assert left == ["export.json", "model.safetensors"]


def test_a_store_that_is_away_for_a_moment_costs_one_call_and_no_export(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    size_bytes = 100  # of a shard: there are several
    made = export(store, JOB, checkpoint, max_shard_bytes=size_bytes)
    store.delete(f"{JOB}/export/10/export.json")
    shards: list[str] = []

    def flaky(method: str, away_at: int) -> None:
        """Fail call number `away_at` of a method."""
        call, count = getattr(store, method), itertools.count(1)

        def sometimes(key: str, *values: Any) -> Any:
            if next(count) == away_at:
                raise StoreUnavailable("timed out")
            if method == "put_file":
                shards.append(key)
            return call(key, *values)

        monkeypatch.setattr(store, method, sometimes)

    for method, away_at in (("get", 5), ("get_range", 3), ("put", 1), ("put", 3), ("put_file", 2)):
        flaky(method, away_at)
    assert export(store, JOB, checkpoint, max_shard_bytes=size_bytes) == made
    assert len(shards) == len(set(shards)) > 2
    flaky("get_range", 2)
    assert fetch_export(store, made, tmp_path / "export").name == "model.safetensors.index.json"


@pytest.mark.parametrize("marker", [b'{"format":1,"written_by":"a later version"}', b"not JSON", b""])
def test_an_export_whose_marker_says_something_else_is_done_again(store: Store, marker: bytes) -> None:
    checkpoint = published(store, 10, 1).checkpoint
    made = export(store, JOB, checkpoint)
    store.put(f"{JOB}/export/10/export.json", marker)
    assert export(store, JOB, checkpoint) == made
    assert store.get(f"{JOB}/export/10/export.json") != marker


def test_another_generation_of_the_same_step_replaces_the_export(store: Store) -> None:
    export(store, JOB, published(store, 10, 1).checkpoint)
    second = export(store, JOB, published(store, 10, 2).checkpoint)
    assert b'"generation":2' in store.get(f"{JOB}/export/10/export.json")
    assert export(store, JOB, CheckpointRef(step=10, generation=2)) == second


def test_a_damaged_checkpoint_is_never_exported(store: Store) -> None:
    manifest = published(store, 10, 1)
    key = manifest.parts[3].key
    data = store.get(key)
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt, match=key):
        export(store, JOB, manifest.checkpoint)
    assert not store.exists(f"{JOB}/export/10/export.json")


def test_a_checkpoint_without_weights_or_not_there_is_not_exported(store: Store) -> None:
    checkpoint = publish_tensors(store, {0: {"optimizer/a/step": torch.ones(1)}})
    with pytest.raises(Incomplete, match="no weights"):
        export(store, JOB, checkpoint)
    with pytest.raises(NotFound):
        export(store, JOB, CheckpointRef(step=99, generation=1))


def test_two_tensors_of_one_exported_name_are_refused(store: Store) -> None:
    checkpoint = publish_tensors(store, {0: {"weights/a": torch.ones(1)}, 1: {"buffers/a": torch.ones(1)}})
    with pytest.raises(Corrupt, match="name of another tensor"):
        export(store, JOB, checkpoint)


def test_an_export_holds_about_one_part_in_memory(store: Store, tmp_path: Path) -> None:
    num_sections, part_bytes = 20, 4 << 20
    sections = {k: {f"weights/{k}": torch.full((part_bytes // 4,), float(k))} for k in range(num_sections)}
    checkpoint = publish_tensors(store, sections)
    del sections
    tracemalloc.start()
    try:
        export(store, JOB, checkpoint, scratch=tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A part, its upload buffers (3 requests of 5 MiB at a time in the S3 client) and a chunk of 8 MiB.
    assert peak_bytes < 0.6 * num_sections * part_bytes
    assert list(tmp_path.glob("makara-export-*")) == []
