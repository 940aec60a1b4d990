"""Reads and writes safetensors headers: names, types, shapes and offsets of tensors, without their bytes.

(The `safetensors` package reads whole files into a framework's tensors; export streams them, without torch.)
Format: https://huggingface.co/docs/safetensors, checked with safetensors 0.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from .errors import Corrupt

_LENGTH_BYTES = 8
MOST_HEADER_BYTES = 16 << 20  # 100,000 tensors; the reference implementation takes 100 MB
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor; `start`..`stop` are bytes counted from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """`tensors` by name, and `metadata` as the writer gave it."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def parse_header(data: bytes | memoryview, key: str, *, total_bytes: int | None = None) -> Header:
    """Parse the header of a safetensors file of `total_bytes` that begins with `data` (None: `data` is all).

    Raises `Corrupt` naming `key` unless the tensors fill the file exactly, each as long as its shape and type
    say.
    """
    total_bytes = len(data) if total_bytes is None else total_bytes
    try:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        first = _LENGTH_BYTES + length
        if total_bytes < _LENGTH_BYTES or first > min(total_bytes, len(data), MOST_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes does not fit into {total_bytes}")
        value = json.loads(bytes(data[_LENGTH_BYTES:first]))
        if not isinstance(value, dict):
            raise TypeError("the header is not a JSON object")
        fields = cast(dict[str, Any], value)
        metadata = fields.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError("__metadata__ maps to something other than text")
        tensors = {name: _entry(name, fields[name], first) for name in fields}
        _check_tiling(tensors.values(), first, total_bytes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{key}: not a valid safetensors file: {error}") from error
    return Header(tensors, metadata)


def build_header(
    tensors: Iterable[TensorEntry], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """Header bytes for `tensors` laid out one after the other, and the entries with their new offsets.

    Wide types first, then by name, so that every tensor is aligned to its type (as the reference writer
    does).
    """
    ordered = sorted(tensors, key=lambda entry: (-_BITS[entry.dtype], entry.name))
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for entry in ordered:
        offsets = [place, place + entry.num_bytes]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        place += entry.num_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = _LENGTH_BYTES + len(text)
    placed: list[TensorEntry] = []
    for entry in ordered:
        placed.append(TensorEntry(entry.name, entry.dtype, entry.shape, first, first + entry.num_bytes))
        first += entry.num_bytes
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, tuple(placed)


def _entry(name: str, field: Any, first: int) -> TensorEntry:
    if set(field) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r}: unexpected fields {sorted(field)}")
    shape = tuple(field["shape"])
    start, stop = field["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r}: shape and offsets must be integers of at least 0")
    if field["dtype"] not in _BITS:
        raise ValueError(f"tensor {name!r}: unknown type {field['dtype']!r}")
    if (stop - start) * 8 != math.prod(shape) * _BITS[field["dtype"]]:
        raise ValueError(f"tensor {name!r}: {stop - start} bytes do not hold {field['dtype']}{list(shape)}")
    return TensorEntry(name, field["dtype"], shape, first + start, first + stop)


def _check_tiling(entries: Iterable[TensorEntry], first: int, total_bytes: int) -> None:
    place = first
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != place:
            raise ValueError(f"tensor {entry.name!r} begins at byte {entry.start}, expected {place}")
        place = entry.stop
    if place != total_bytes:
        raise ValueError(f"the tensors end at byte {place}, the file at {total_bytes}")
