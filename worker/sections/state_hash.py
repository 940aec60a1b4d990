"""The raw bits of a section's tensors as one 64-bit number, whole or a portion, where they lie.

Hosts of a section hold the same bits, so hosts whose numbers differ do not. A number is a sum of all 64-bit
words, each times an odd factor that its place decides, modulo 2^64: a change of one word always changes it,
and numpy computes it at about the speed of the memory, without Python's lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...model.seeds import seed64
from .runtime import SectionRuntime

ROUND = 16
"""Steps in which each byte of a state is hashed once. With Adam an update reads and writes each byte of the
state about three times, so that a sixteenth of it costs little beside even the smallest step."""
_LEAST_BYTES = 4 << 20  # of a portion: in smaller ones, finding the tensors would cost more than their bytes
_STATE = 3  # bytes of state for each of parameters, with Adam: only the number of portions depends on it
_OFFSET = 5  # places in the round between the first portions of neighbouring sections
_SMALL_BYTES = 16 << 10  # the copy of a larger tensor's bytes costs more than the calls; chosen, not tuned
_PIECE_BYTES = 16 << 20  # looked at between two looks at `stopped`
_ROW = 1 << 13  # words; their factors fit into a CPU's second-level cache
_MOST_ROWS = _PIECE_BYTES // (8 * _ROW)
_WORD = (1 << 64) - 1
_IN_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
_NEXT = 0x9E3779B97F4A7C15  # the factor between two pieces: 2^64 divided by the golden ratio

Bytes = Callable[[Tensor], Tensor]
"""Gives a device's bytes in host memory."""


class Stopped(Exception):
    """The numbers are not needed any more."""


def section_hash(
    section: SectionRuntime,
    step: int | None,
    to_host: Bytes,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """The hash of the section's portion at `step`, or of all that it holds (None). Raises `Stopped`."""
    portion, portions = (0, 1) if step is None else _portion(section, step)
    if portion >= portions:
        return 0
    tensors, scalars = section.held()
    known = sorted((name, value) for name, value in scalars.items() if value is not None)
    total = 0
    for chunk in _chunks([tensors[name] for name in sorted(tensors)], portion, portions, to_host):
        if stopped():
            raise Stopped
        total = (total * _NEXT + _sum(chunk)) & _WORD
    return seed64("state", "\n".join(sorted(tensors)), json.dumps(known), total)


def changing_hash(section: SectionRuntime) -> int:
    """The hash of the buffers that each step computes from their values before it. They are hashed after each
    step: what is wrong in one of them is wrong on all hosts after the next step."""
    total = 0
    for chunk in _chunks([section.buffers[name] for name in section.info.updates], 0, 1, Tensor.cpu):
        total = (total * _NEXT + _sum(chunk)) & _WORD
    return total


def _portion(section: SectionRuntime, step: int) -> tuple[int, int]:
    """(the portion that is due after `step` steps, the number of portions): none is due if it is beyond."""
    size = _STATE * sum(parameter.nbytes for parameter in section.parameters.values())
    portions = min(ROUND, 1 + size // _LEAST_BYTES)
    return (step + _OFFSET * section.info.index) % ROUND, portions


def _chunks(tensors: Sequence[Tensor], portion: int, portions: int, to_host: Bytes) -> Iterator[np.ndarray]:
    """The bytes of one of so many runs of nearly equal size, each tensor's in logical order.

    Those of small tensors come last and joined: they are many, and calls cost more than their bytes.
    """
    total, before = sum(tensor.nbytes for tensor in tensors), 0
    small: list[bytes] = []
    first, stop = (total * number // portions for number in (portion, portion + 1))
    for tensor in tensors:
        start, end = (_cut(bound - before, tensor.nbytes) for bound in (first, stop))
        before += tensor.nbytes
        if start < end and tensor.nbytes <= _SMALL_BYTES:
            small.append(_copied(tensor, to_host)[start:end])
        elif start < end:
            data = raw_bytes(tensor)
            for at in range(start, end, _PIECE_BYTES):
                yield to_host(data[at : min(at + _PIECE_BYTES, end)]).numpy()
    joined = np.frombuffer(b"".join(small), np.uint8)
    for at in range(0, joined.size, _PIECE_BYTES):
        yield joined[at : at + _PIECE_BYTES]


def _cut(bound: int, size: int) -> int:
    """Where a bound falls in a tensor: between rows, so that words are whole."""
    return size if bound >= size else max(bound, 0) // (8 * _ROW) * (8 * _ROW)


def raw_bytes(tensor: Tensor) -> Tensor:
    """In logical order; of what the tensor stands for, if it is conjugate or negative only by a mark."""
    return _resolved(tensor).contiguous().reshape(-1).view(torch.uint8)


def _resolved(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _copied(tensor: Tensor, to_host: Bytes) -> bytes:
    tensor = _resolved(tensor) if tensor.dtype in _IN_NUMPY else raw_bytes(tensor)
    return to_host(tensor).numpy().tobytes()


def _sum(data: np.ndarray) -> int:
    whole = data.size // 8 * 8
    words = data[:whole].view(np.uint64)
    if whole < data.size:
        words = np.append(words, np.frombuffer(data[whole:].tobytes().ljust(8, b"\0"), np.uint64))
    rows = words.size // _ROW
    total = 0
    if rows:
        total = int((words[: rows * _ROW].reshape(rows, _ROW) @ _COLUMNS[:_ROW]) @ _ROWS[:rows])
    rest = words[rows * _ROW :]
    if rest.size:
        total += int(rest @ _COLUMNS[: rest.size]) * int(_ROWS[rows])
    return total & _WORD


def _factors(name: str, count: int) -> np.ndarray:
    drawn = hashlib.shake_128(f"makara-state-{name}".encode()).digest(8 * count)
    return np.frombuffer(drawn, np.uint64) | np.uint64(1)


_COLUMNS, _ROWS = _factors("columns", _ROW), _factors("rows", _MOST_ROWS + 1)
