"""What the fork server of `Fleet` and `Forked` imports: all that is heavy. One trace loads torch.export, and
managers find the simulation compiled."""

import gc

import makara.manager.cli.machines.join
import makara.manager.cli.main
import makara.manager.server
import makara.worker.trainer  # noqa: F401
import torch
from forking import fresh_path
from makara.model.tracing.trace import trace
from makara.simulator import warm_up
from models import untied_mlp

torch.set_num_threads(1)
fresh_path()
warm_up(wait=True)
trace(untied_mlp(), 1)
gc.freeze()  # as `makara.worker.start` does
