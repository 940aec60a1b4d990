"""One emulated worker: a process that holds its part of a model and trains it, plan after plan.

It does what `worker.trainer.generation` does between two orders: a session, its groups, the sections that it
lacks from peers, a stepper, steps. Orders come through a pipe instead of the agent, and nothing is saved.
"""

from __future__ import annotations

import resource
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from makara.checkpoint import open_store
from makara.model.data import Batches
from makara.model.partition.partition import Sections
from makara.pipeline import Kind, Operation, Plan
from makara.protocol.messages import GenerationOrder
from makara.simulator import Calibration
from makara.worker.execution.buckets import buckets
from makara.worker.execution.commit import Flag
from makara.worker.execution.costs import Ran, handover_s, run_rank
from makara.worker.execution.gloo import Listener, ProcessGroup
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.session import Session
from makara.worker.execution.state import ModelState
from makara.worker.execution.stepper import Stepper
from makara.worker.recovery.joining import CheckpointLocation, join_generation
from makara.worker.sections.ranges import RangeRuntime

from ..calibrate import calibrate
from ..wires import Wires, attach, detach
from .models import MICROBATCH_SIZE, SEED, Emulated
from .networks import Network


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation to form; `vms` by rank."""

    order: GenerationOrder
    vms: tuple[str, ...]
    network: Network


@dataclass(frozen=True, slots=True)
class Assignment(Generation):
    """A plan to run; the first step does not count."""

    steps: int
    record: bool = False


@dataclass(frozen=True, slots=True)
class StandIn(Generation):
    """Stand-in plans to play (see `execution.costs`); the order's plan has the same workers."""

    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Sums(Generation):
    """All-reduces to time, `repeats` of each size in groups of each ring's ranks, all groups at once."""

    rings: tuple[tuple[tuple[int, ...], ...], ...]
    sizes_bytes: tuple[int, ...]
    repeats: int


Order = Assignment | StandIn | Sums | Literal["listen", "calibrate"]


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has to tell of an assignment; times by `time.monotonic`."""

    applied_at: tuple[float, ...]
    """When each step was applied, the first one, which does not count, included."""
    cpu_s: float
    """Of this process, while the steps that count ran; also the machine's idle seconds below."""
    machine_idle_s: float
    sent_bytes: int
    ran: tuple[Ran, ...] = ()
    """The last step's operations, if they were to be recorded; in place of the stage is the first section."""


class WorkerProcess:
    """What a forked process runs."""

    def __init__(self, name: str, model: Emulated, chain: Sections, samples: int) -> None:
        self.name = name
        self._chain = chain
        self._training = model.training(samples)
        self._runtime = Recorded(chain, self._training, SEED)
        self._batches = Batches(self._training.dataset(), SEED, samples, MICROBATCH_SIZE)
        self._state = ModelState(
            self._runtime, None, PartialSums(chain, self._batches.num_micro_batches, "fast")
        )
        self._listener: Listener | None = None
        self._newest: Session | None = None

    def live(self, connection: Connection) -> None:
        """Answer orders until there are no more."""
        try:
            while True:
                order: Order = connection.recv()
                connection.send(self._answer(order))
        except EOFError:
            return
        except BaseException:
            connection.send(RuntimeError(f"{self.name}:\n{traceback.format_exc()}"))

    def _answer(self, order: Order) -> Any:
        if isinstance(order, Assignment):
            return self._run(order)
        if isinstance(order, StandIn):
            return self._stand_in(order)
        if isinstance(order, Sums):
            return self._time_sums(order)
        return self._listen() if order == "listen" else self._calibrate()

    def _calibrate(self) -> Calibration:
        """What `calibrate` finds here while the other workers do the same."""
        return calibrate(
            self._chain,
            self._training,
            seed=SEED,
            numerics="fast",
            num_micro_batches=self._batches.num_micro_batches,
        )

    def _stand_in(self, order: StandIn) -> tuple[list[list[Ran]], float]:
        """What this worker ran of each plan, and `handover_s`."""
        with self._session(order) as session:
            session.rendezvous()
            session.open_groups([])
            ran = [run_rank(plan, session.rank, session.channels) for plan in order.plans]
            handover = handover_s()
            session.gather("done", 0)
            return ran, handover

    def _time_sums(self, order: Sums) -> list[tuple[float, float]]:
        """(begin, end) of this worker's sums: ring by ring, size by size."""
        found: list[tuple[float, float]] = []
        with self._session(order) as session:
            session.rendezvous()
            for number, ring in enumerate(order.rings):
                mine = next(group for group in ring if session.rank in group)
                group = session.group(f"sums/{number}/{mine[0]}", mine)
                for size_bytes in order.sizes_bytes:
                    tensor = torch.zeros(size_bytes // 4)
                    for repeat in range(order.repeats):
                        session.gather(f"{number}/{size_bytes}/{repeat}", 0)
                        time.sleep(
                            0.02
                        )  # as long as an operation takes, and until all have come from the store
                        began = time.monotonic()
                        group.sum(tensor)
                        found.append((began, time.monotonic()))
            session.gather("done", 0)
        return found

    @contextmanager
    def _session(self, order: Generation) -> Iterator[_Session]:
        rank = order.order.ranks[self.name]
        session = _Session(order, self.name, rank, self._listener if rank == 0 else None)
        self._newest = session  # others may need its store until all have come to the next one
        try:
            yield session
        finally:
            session.close()
            session.wires.close()

    def _listen(self) -> str:
        self._listener = Listener("127.0.0.1")
        return self._listener.endpoint

    def _run(self, order: Assignment) -> Report:
        with self._session(order) as session:
            session.rendezvous()
            parts = buckets(self._chain, session.plan)
            with tempfile.TemporaryDirectory() as nowhere:  # there are no checkpoints
                location = CheckpointLocation(open_store(Path(nowhere).as_uri()), "job")
                join_generation(session, self._state, location, parts)
            if not session.trains:
                return Report((), 0.0, 0.0, 0)
            with closing(Stepper(session, self._state, self._batches, parts, torch.device("cpu"))) as stepper:
                return self._steps(order, stepper, session.wires)

    def _steps(self, order: Assignment, stepper: Stepper, wires: Wires) -> Report:
        applied_at: list[float] = []
        cpu_s = idle_s = 0.0
        sent = 0
        for number in range(1 + order.steps):
            if number == 1:
                cpu_s, idle_s, sent = _cpu_s(), _idle_s(), wires.sent_bytes
            self._runtime.ran = [] if order.record else None
            wires.begin_step()
            stepper.step(lambda: (order.order.number, Flag(0)))
            applied_at.append(time.monotonic())
        return Report(
            tuple(applied_at),
            _cpu_s() - cpu_s,
            _idle_s() - idle_s,
            wires.sent_bytes - sent,
            tuple(self._runtime.ran or ()),
        )


class _Session(Session):
    """Its groups have emulated links, but for the one that carries sections when the plan changes."""

    def __init__(self, order: Generation, worker: str, rank: int, listener: Listener | None) -> None:
        super().__init__(order.order, worker, listener)
        self._vms, self._network = order.vms, order.network
        self.wires = Wires(lambda peer: self._network.between([self._vms[rank], self._vms[peer]]), rank)

    def group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        if name == "transfer":
            detach()
        else:
            attach(self.wires, self._network.between([self._vms[rank] for rank in ranks]))
        return super().group(name, ranks)


class Recorded(RangeRuntime):
    """Notes when its operations ran, while `ran` is a list."""

    ran: list[Ran] | None = None

    def forward(self, step: int, micro_batch: int, start: int, *arguments: Any, **named: Any) -> Any:
        with self._noted(Kind.FORWARD, micro_batch, start):
            return super().forward(step, micro_batch, start, *arguments, **named)

    def recompute(self, micro_batch: int, start: int) -> None:
        with self._noted(Kind.RECOMPUTE, micro_batch, start):
            super().recompute(micro_batch, start)

    def backward(self, micro_batch: int, start: int, *arguments: Any, **named: Any) -> Any:
        with self._noted(Kind.BACKWARD, micro_batch, start):
            return super().backward(micro_batch, start, *arguments, **named)

    def input_gradients(self, micro_batch: int, start: int, *arguments: Any) -> Any:
        with self._noted(Kind.INPUT, micro_batch, start):
            return super().input_gradients(micro_batch, start, *arguments)

    def weight_gradients(self, micro_batch: int, start: int, *arguments: Any) -> None:
        with self._noted(Kind.WEIGHT, micro_batch, start):
            super().weight_gradients(micro_batch, start, *arguments)

    @contextmanager
    def _noted(self, kind: Kind, micro_batch: int, start: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        if self.ran is not None:
            self.ran.append(Ran(Operation(start, kind, micro_batch), began, time.monotonic()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _idle_s() -> float:
    return psutil.cpu_times().idle
