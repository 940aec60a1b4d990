"""What the fork server of `Fleet` and `Forked` imports: all that is heavy. Managers find the simulation
compiled, and `Fleet`'s trainers the model that most of them train traced."""

import gc

import makara.manager.cli.machines.join
import makara.manager.cli.main
import makara.manager.server
import makara.worker.agent.agent
import makara.worker.trainer.trainer  # noqa: F401
import models
import torch
from forking import fresh_path
from makara.model.tracing.trace import TracedModel, trace
from makara.simulator import warm_up

TRACES: dict[tuple[str, int, int, str], TracedModel] = {}
"""By (entrypoint, micro-batch size, seed, precision)."""

torch.set_num_threads(1)
fresh_path()
warm_up(wait=True)
for precision in ("fp32", "fp16"):
    TRACES["models:tied_gpt", 2, 7, precision] = trace(models.tied_gpt(), 2, 7, precision)
gc.freeze()  # as `makara.worker.start` does
