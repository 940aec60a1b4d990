"""How much of a GPU a plan may fill."""

from __future__ import annotations

# Measured on an H200 with torch 2.11 (docs/decisions/0430): CUDA's context and loaded kernels took 0.8 GB of
# each process, and torch's allocator reserved 6 and 9 % more than the tensors of two trainers had at most.
_OUTSIDE_BYTES = 1 << 30
_GAPS = 0.05  # it gives back what it has reserved in vain before it raises an error


def usable_bytes(gpu_bytes: int) -> int:
    """What tensors may take of a GPU that has so many bytes in all.

    The rest is for CUDA's context and kernels, the workspaces of its libraries, and gaps between tensors.
    """
    return max(0, round((gpu_bytes - _OUTSIDE_BYTES) * (1 - _GAPS)))
