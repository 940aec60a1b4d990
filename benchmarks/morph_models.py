"""The models of trainers that lose one of them: small, and asleep where they would compute."""

from __future__ import annotations

from makara.worker import Training
from sleepy import training  # both lie in the bundle's folder

NUM_BLOCKS, WIDTH, FORWARD_S, SAMPLES = 12, 512, 0.005, 4096


def chain() -> Training:
    """Twelve equal blocks of 5 ms forwards and 1 MB of weights."""
    return training(NUM_BLOCKS, WIDTH, FORWARD_S, SAMPLES)


def slower_chain() -> Training:
    """Twelve equal blocks of 20 ms forwards and 0.3 MB of weights."""
    return training(NUM_BLOCKS, 256, 0.020, SAMPLES)
