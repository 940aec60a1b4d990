"""Seeds: every random number of a job is derived from one named 64-bit hash."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


def seed64(name: str, *parts: int | str) -> int:
    """A 64-bit unsigned hash of `name` and `parts`, the same in every process and on every machine.

    BLAKE2b-64 over the parts, each written with its type and length, so ("a", "bc") and ("ab", "c") differ.
    """
    written: list[bytes] = []
    for part in (name, *parts):
        data = str(part).encode()
        written.append(b"s" if isinstance(part, str) else b"i")
        written.append(len(data).to_bytes(4, "little"))
        written.append(data)
    digest = hashlib.blake2b(b"".join(written), digest_size=8, person=b"makara-seed-1")
    return int.from_bytes(digest.digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators, which user code may draw from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_randomness() -> Generator[None]:
    """Restore Python's, NumPy's and torch's CPU generators on exit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
