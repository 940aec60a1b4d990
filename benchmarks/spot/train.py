"""The code of the job: twelve layers that sleep.

With $MAKARA_BENCHMARK_RESTARTS set, trainers do as those of the policy `fixed`: when the plan changes, all
start again. So that the manager need not know, the process goes on as the same worker: it drops what it
holds, and sleeps for as long as a start takes on a machine of its own.
"""

from __future__ import annotations

import os
from threading import Event
from typing import Any

from makara.protocol.messages import Formed
from makara.worker import Training
from makara.worker.execution.session import Session
from makara.worker.execution.state import ModelState
from makara.worker.trainer import generation

from benchmarks.emulated.models import transformer

FORWARD_S, NUM_LAYERS, SAMPLES = 0.020, 12, 4096
_START_S = 4.0
"""From nothing to where a trainer is ready: Python, torch, the trace; 4.3 s were measured, one at a time."""


def build() -> Training:
    return transformer(FORWARD_S, NUM_LAYERS).training(SAMPLES)


_join = generation.join_generation


def _join_anew(session: Session, state: ModelState, *rest: Any) -> Formed:
    if session.number > 1:
        state.forget()
        interrupted = Event()
        session.interrupt.on_trip(interrupted.set)  # the next generation starts again
        interrupted.wait(_START_S)
        session.interrupt.check()
    return _join(session, state, *rest)


if os.environ.get("MAKARA_BENCHMARK_RESTARTS"):
    generation.join_generation = _join_anew
