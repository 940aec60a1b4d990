"""Throughput against `torch.distributed.pipelining` on an undisturbed network (loopback)."""

from __future__ import annotations

from .ranks import measure
from .report import Row
from .sides import Setting

TITLE = "a step of Makara's against torch.distributed.pipelining, loopback, N=32 (ratio: higher is faster)"
ROUNDS = 11
FORWARD_S = 0.010
NUM_MICRO_BATCHES = 32


def rows() -> list[Row]:
    """A row for each depth and recompute setting; ratios are the best of theirs over ours."""
    return [row(depth, recompute) for depth in (2, 4) for recompute in (False, True)]


def row(depth: int, recompute: bool) -> Row:
    setting = Setting(
        depth=depth,
        num_micro_batches=NUM_MICRO_BATCHES,
        forward_s=FORWARD_S,
        recompute=recompute,
        window=4 * depth,
    )
    seconds = measure(setting, ROUNDS)
    best = min(value for name, value in seconds.items() if name.startswith("torch"))
    found: dict[str, str | int | float | bool] = {"P": depth, "recompute": recompute}
    found |= {f"{name} s": value for name, value in seconds.items()}
    found |= {
        f"{name.removeprefix('makara ')} against best": best / value
        for name, value in seconds.items()
        if name.startswith("makara")
    }
    return found
