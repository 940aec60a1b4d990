"""What runs on a VM: the agent that answers the manager, and the trainers (one per device) that train.

In: orders from the manager, the user's `Training`, plans, and sections of checkpoints or of peers.
Out: reports, metrics, committed steps, and sections written to the store. A model goes through `tracing` (one
graph), `cutting` (a chain of sections), `sections` (tensors), `execution` (steps); `trainer` and `generation`
lead it from plan to plan, `dry_run` compares it with the user's own module, `calibrate` measures it.
The agent and the messages start without torch; everything that touches tensors is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .training import Training

__all__ = ["Training"]


def __getattr__(name: str) -> object:
    if name == "Training":
        from .training import Training

        return Training
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
