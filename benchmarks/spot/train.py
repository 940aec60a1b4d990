"""The code of the job: twelve layers that sleep.

With $MAKARA_BENCHMARK_RESTARTS set, trainers do as those of the policy `fixed`: when the plan changes, all
start again. So that the manager need not know, the process goes on as the same worker: it drops what it
holds, and waits for as long as another process takes to come to where a new trainer is ready.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from makara.protocol.messages import Formed
from makara.worker import Training
from makara.worker.execution.session import Session
from makara.worker.execution.state import ModelState
from makara.worker.trainer import generation

from benchmarks.emulated.models import MICROBATCH_SIZE, SEED, transformer

FORWARD_S, NUM_LAYERS, SAMPLES = 0.020, 12, 4096
_HERE = Path(__file__).parent
_READY = (
    "import makara.worker.trainer.trainer, train\n"
    "from makara.model.tracing.trace import load_exporter, trace\n"
    "load_exporter()\n"
    f"trace(train.build(), {MICROBATCH_SIZE}, {SEED})\n"
)


def build() -> Training:
    return transformer(FORWARD_S, NUM_LAYERS).training(SAMPLES)


_join = generation.join_generation


def _join_anew(session: Session, state: ModelState, *rest: Any) -> Formed:
    if session.number > 1:
        state.forget()
        environment = {**os.environ, "PYTHONPATH": str(_HERE)}
        environment.pop("MAKARA_BENCHMARK_RESTARTS")
        command = [sys.executable, "-P", "-c", _READY]
        with subprocess.Popen(command, cwd=_HERE, env=environment) as another:
            session.interrupt.on_trip(another.kill)  # the next generation starts again
        session.interrupt.check()
        assert another.returncode == 0, f"{_READY}: exit status {another.returncode}"
    return _join(session, state, *rest)


if os.environ.get("MAKARA_BENCHMARK_RESTARTS"):
    generation.join_generation = _join_anew
