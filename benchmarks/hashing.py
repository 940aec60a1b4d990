"""What it costs to hash the state while training: CPU seconds, beside those of the steps themselves.

One worker takes all steps of a job, as a trainer does. It believes that another hosts its sections too, so it
hashes what it would compare.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from makara.checkpoint import open_store
from makara.examples.gpt.train import build as gpt
from makara.examples.resnet.train import build as resnet
from makara.model.data import Batches
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.pipeline import Range, grid
from makara.protocol.messages import GenerationOrder, Member
from makara.worker.execution.buckets import buckets
from makara.worker.execution.commit import Flag
from makara.worker.execution.gloo import Listener
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.replicas import ReplicaCheck
from makara.worker.execution.session import Session
from makara.worker.execution.state import ModelState
from makara.worker.execution.stepper import Stepper
from makara.worker.recovery.joining import CheckpointLocation, join_generation
from makara.worker.sections.ranges import RangeRuntime
from makara.worker.sections.state_hash import ROUND
from models import tied_gpt

from .report import Row

TITLE = f"hashing the state, each byte once in {ROUND} steps, and whole at each tenth step"
SEED = 7
ROUNDS = 2
INTERVAL = 10  # steps between checkpoints


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    training: Training
    microbatch_size: int
    num_micro_batches: int


def rows() -> list[Row]:
    jobs = [
        Job("a GPT of width 32", tied_gpt(), 2, 8),
        Job("examples/gpt, a micro-batch a step", gpt(), 4, 1),
        Job("examples/gpt", gpt(), 4, 8),
        Job("examples/resnet", resnet(), 8, 4),
    ]
    return [_row(job) for job in jobs]


class _Unshown(ReplicaCheck):
    """Its hashes are compared with no other's."""

    def terms(self) -> list[int]:
        return [0] * len(super().terms())


def _row(job: Job) -> Row:
    chain = split(traced := trace(job.training, job.microbatch_size, SEED), choose_cuts(traced))
    plan = grid([Range(0, chain.num_sections)], 1, job.num_micro_batches, generation=1)
    listener = Listener("127.0.0.1")
    order = GenerationOrder.of(
        [Member(worker="v.0", address="127.0.0.1")],
        plan.to_json(),
        number=1,
        phase="go",
        endpoint=listener.endpoint,
    )
    session, device = Session(order, "v.0", listener), torch.device("cpu")
    sums = PartialSums(chain, job.num_micro_batches, "exact", device)
    state = ModelState(RangeRuntime(chain, job.training, SEED), job.training.clip_grad_norm, sums)
    batches = Batches(
        job.training.dataset(), SEED, job.microbatch_size * job.num_micro_batches, job.microbatch_size
    )
    parts = buckets(chain, plan)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder).as_uri())
        session.rendezvous()
        join_generation(session, state, CheckpointLocation(store, "job"), parts)
    stepper = Stepper(session, state, batches, parts, device)
    stepper.replicas.close()
    peers = {section: [[0, 1]] for section in range(chain.num_sections)}
    stepper.replicas = check = _Unshown(state.runtime.sections, peers, 0, device)
    for _ in range(2):  # the optimizer makes its state, and hashes are of all of it
        stepper.step(lambda: (1, Flag(0)))
    before_s, began = check.cpu_s, time.process_time()
    for number in range(ROUNDS * ROUND):
        if number % INTERVAL == 0:
            check.begin(number, whole=True)
        stepper.step(lambda: (1, Flag(0)))
    hashing_s = check.cpu_s - before_s
    step_s = time.process_time() - began - hashing_s
    stepper.close()
    session.close()
    tensors = [t for section in state.runtime.sections.values() for t in section.held()[0].values()]
    return {
        "job": job.name,
        "state MB": sum(tensor.nbytes for tensor in tensors) / 1e6,
        "CPU ms a step": 1e3 * step_s / (ROUNDS * ROUND),
        "hashing, CPU ms a step": 1e3 * hashing_s / (ROUNDS * ROUND),
        "hashing %": 100 * hashing_s / step_s,
    }
