"""Tensors to safetensors and back, and headers that lie."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from makara.checkpoint import Corrupt
from makara.checkpoint.safetensors_header import build_header, parse_header
from makara.checkpoint.tensors import pack, unpack
from makara.protocol.messages import CheckpointRef
from safetensors.torch import save
from weight_hashes import tensors_sha256

_TYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.uint8,
    torch.bool,
)
CHECKPOINT = CheckpointRef(step=10, generation=1)


def test_tensors_of_every_kind_survive_packing() -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "transposed": base.t(),
        "slice": base[1:, 1:3],
        "alias": base,
        "alias again": base,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "needs gradient": torch.nn.Parameter(torch.ones(2)),
        **{str(dtype): torch.ones(3).to(dtype) for dtype in _TYPES},
    }
    loaded, metadata = unpack(pack(tensors, {"step": "3"}))
    assert metadata == {"step": "3"}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        as_bytes = [
            value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (loaded[name], tensor)
        ]
        assert torch.equal(*as_bytes), name


def test_the_file_is_that_of_the_reference_writer() -> None:
    tensors = {
        "b": torch.ones(2, 3),
        "a": torch.zeros(1),
        "step": torch.tensor(3),
        "seen": torch.ones(3).bool(),
    }
    for metadata in (None, {"step": "3"}):
        assert pack(tensors, metadata) == save(tensors, metadata)


def test_packing_names_a_tensor_that_it_cannot_store() -> None:
    with pytest.raises(ValueError, match="'bad'"):
        pack({"good": torch.zeros(1), "bad": torch.zeros(2, 2).to_sparse()})
    with pytest.raises(ValueError, match="'bad'"):
        pack({"bad": torch.zeros(2, device="meta")})
    with pytest.raises(ValueError, match=r"'bad': .* torch\.complex128"):
        pack({"bad": torch.zeros(2, dtype=torch.complex128)})


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_corrupt_and_never_crash(data: bytes) -> None:
    with pytest.raises(Corrupt, match="payload"):
        unpack(data)


@given(st.data())
def test_a_damaged_file_is_corrupt_or_has_the_same_header(data: st.DataObject) -> None:
    good = pack({"weights/a": torch.ones(2, 3), "weights/b": torch.ones(3, dtype=torch.int64)}, {"a": "b"})
    place = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:place] + bytes([data.draw(st.integers(0, 255))]) + good[place + 1 :]
    try:
        tensors, _ = unpack(damaged)
    except Corrupt:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) == 48


HUGE = json.dumps({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize(
    "header",
    [
        HUGE,
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": 1}',
        b'{"__metadata__": {"a": 1}}',
        b'{"__metadata__": []}',
        b"[]",
        b"[" * 20000,
        b"",
    ],
)
def test_a_header_that_lies_is_corrupt(header: bytes) -> None:
    with pytest.raises(Corrupt, match="key"):
        parse_header(len(header).to_bytes(8, "little") + header + bytes(4), "key")


def test_a_header_longer_than_the_file_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="header of"):
        parse_header((1 << 62).to_bytes(8, "little") + b"{}", "key")


def test_a_built_header_is_what_the_reference_reader_expects() -> None:
    data = pack({"b": torch.ones(1, dtype=torch.uint8), "a": torch.ones(3), "c": torch.zeros(2, 0)})
    old = parse_header(data, "old")
    header, placed = build_header(old.tensors.values(), {"format": "pt"})
    body = b"".join(data[old.tensors[e.name].start : old.tensors[e.name].stop] for e in placed)
    tensors, metadata = unpack(header + body)
    assert metadata == {"format": "pt"}
    assert torch.equal(tensors["a"], torch.ones(3))
    assert len(header) % 8 == 0
    assert tensors_sha256(tensors) == tensors_sha256(unpack(data)[0])
