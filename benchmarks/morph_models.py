"""The model of the morph benchmark: small, and asleep where it would compute."""

from __future__ import annotations

from makara.worker import Training
from sleepy import training  # both lie in the bundle's folder

NUM_BLOCKS, WIDTH, FORWARD_S, SAMPLES = 12, 512, 0.005, 4096


def chain() -> Training:
    """Twelve equal blocks of 5 ms forwards and 1 MB of weights."""
    return training(NUM_BLOCKS, WIDTH, FORWARD_S, SAMPLES)
