"""A machine's GPUs: which a process is shown, and how much of one a plan may fill."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVERS = Path("/proc/driver/nvidia/gpus")
"""The driver's folder: an entry for each GPU."""

# Measured on an H200 with torch 2.11 (docs/decisions/0430): CUDA's context and loaded kernels took 0.8 GB of
# each process, and torch's allocator reserved 6 and 9 % more than the tensors of two trainers had at most.
_OUTSIDE_BYTES = 1 << 30
_GAPS = 0.05  # it gives back what it has reserved in vain before it raises an error


def usable_bytes(gpu_bytes: int) -> int:
    """What tensors may take of a GPU that has so many bytes in all.

    The rest is for CUDA's context and kernels, the workspaces of its libraries, and gaps between tensors.
    """
    return max(0, round((gpu_bytes - _OUTSIDE_BYTES) * (1 - _GAPS)))


def shown_gpus(environment: Mapping[str, str] = os.environ, drivers: Path = DRIVERS) -> list[str]:
    """The GPUs that a process with this environment finds, as `CUDA_VISIBLE_DEVICES` names them."""
    every = [str(number) for number, _ in enumerate(drivers.glob("*"))]
    shown = environment.get(VISIBLE)
    if shown is None or not every:
        return every
    names = (name.strip() for name in shown.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it
