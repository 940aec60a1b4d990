"""What runs on a VM: the agent that answers the manager, and the trainers (one per device) that train.

In: orders from the manager, the user's `Training`, plans, and sections of checkpoints or of peers.
Out: reports, metrics, committed steps, and sections written to the store. `makara.model` partitions a module
into sections; here they get tensors (`sections`) and take steps (`execution`, with the commit in
`execution.commit`). `agent` and `trainer` are the two processes, `agent.notices` hears of preemptions,
`recovery` writes checkpoints and gives a new generation its state, `profiling` measures a model (F_i, B_i),
and `check` compares it with the user's own module. The agent starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..model.training import Training

__all__ = ["Training"]


def __getattr__(name: str) -> object:
    if name == "Training":
        from ..model.training import Training

        return Training
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
