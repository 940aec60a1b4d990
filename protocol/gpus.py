"""A machine's GPUs: which a process is shown, and how much of one a plan may fill."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVERS = Path("/proc/driver/nvidia/gpus")
"""The driver's folder: an entry for each GPU."""

# Measured on an H200 with torch 2.11 (docs/decisions/0430): CUDA's context and loaded kernels took 0.8 GB in
# each process, and torch's allocator reserved 6 and 9 % more than the tensors of two trainers had at most.
_OUTSIDE_BYTES = 1 << 30
_GAPS = 0.1


def usable_bytes(gpu_bytes: int) -> int:
    """What tensors may take of a GPU that has so many bytes in all.

    The rest is for CUDA's context and kernels, the workspaces of its libraries, and gaps between tensors.
    """
    return max(0, round((gpu_bytes - _OUTSIDE_BYTES) * (1 - _GAPS)))


def shown_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """The GPUs that a process with this environment finds, as `CUDA_VISIBLE_DEVICES` names them.

    None where they cannot be told apart by name: parts of GPUs (MIG) without names, or names of two kinds.
    `root`: the folder of `dev` and `proc`.
    """
    # In a container the driver may list GPUs of the machine that are not the container's.
    listed, nodes = (root / DRIVERS.relative_to("/")).glob("*"), (root / "dev").glob("nvidia[0-9]*")
    every = [str(number) for number, _ in enumerate(zip(listed, nodes, strict=False))]
    shown = environment.get(VISIBLE)
    if shown is None:
        parts = (root / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*")
        return [] if any(parts) else every
    names: list[str] = []
    for name in map(str.strip, shown.split(",")):
        if not name or name.startswith("-") or (name.isdigit() and name not in every):
            break  # as CUDA reads it
        names.append(name)
    unlike = len({name.isdigit() for name in names}) > 1 or len(set(names)) < len(names)
    return [] if unlike or not every else names
