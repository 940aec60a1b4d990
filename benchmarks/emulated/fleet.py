"""The emulated cluster: processes forked from one that has imported torch and traced the model."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from makara.pipeline import Plan
from makara.protocol.messages import GenerationOrder, Member
from makara.worker.sections.ranges import configure_torch

from .models import MICROBATCH_SIZE, Emulated
from .networks import Network
from .worker import Assignment, Order, Report, WorkerProcess

R = TypeVar("R")

_HANGS_S = 180.0
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan took: seconds of each step that counts, from its predecessor's end to its own."""

    steps_s: tuple[float, ...]
    own_cpu: float
    """The workers' share of all the machine's processors; other programs' is not in it."""
    idle_cpu: float
    """The share that nobody used."""
    bytes_per_s: float
    """That really travelled over loopback, messages and collectives."""
    reports: tuple[Report, ...]
    """By rank."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """From the fastest to the slowest step, relative to the median."""
        return (max(self.steps_s) - min(self.steps_s)) / self.step_s


class Fleet:
    """Worker processes that keep their part of the model from plan to plan, as trainers do in a morph."""

    def __init__(
        self, connections: Sequence[Connection], names: Sequence[str], num_micro_batches: int
    ) -> None:
        self._connections = list(connections)
        self.names = tuple(names)
        self.num_micro_batches = num_micro_batches
        self._generation = 0

    def run(
        self,
        plan: Plan,
        network: Network,
        steps: int,
        *,
        workers: Sequence[str] | None = None,
        record: bool = False,
    ) -> Measured:
        """Form a generation of `plan` and take one step that does not count, then `steps`.

        `workers`: in rank order, left out: the first ones. The others hand over what they hold.
        """
        members = self._members(plan, workers)
        order = self.generation(plan, members)
        vms = tuple(network.vm(self.names.index(name)) for name in members)
        reports = self.tell(members, Assignment(order, vms, network, steps, record))
        return _measured(reports[: plan.num_workers])

    def _members(self, plan: Plan, workers: Sequence[str] | None) -> list[str]:
        """All workers, those that train first, by rank."""
        chosen = list(workers or self.names[: plan.num_workers])
        return chosen + [name for name in self.names if name not in chosen]

    def generation(self, plan: Plan, members: Sequence[str]) -> GenerationOrder:
        """The next generation; its first member is asked to listen."""
        self._generation += 1
        return GenerationOrder.of(
            [Member(worker=name, address="127.0.0.1") for name in members],
            {**plan.to_json(), "generation": self._generation},
            number=self._generation,
            phase="go",
            endpoint=self.tell(members[:1], "listen")[0],
        )

    def tell(self, members: Sequence[str], order: Order) -> list[Any]:
        """Give all members an order; their answers, in the same sequence."""
        indices = [self.names.index(name) for name in members]
        for index in indices:
            self._connections[index].send(order)
        return self._answers(indices)

    def _answers(self, indices: Sequence[int]) -> list[Any]:
        """One from each of these workers, in this order. Raises `RuntimeError` when one failed or hangs."""
        answers: dict[int, Any] = {}
        until = time.monotonic() + _HANGS_S
        while len(answers) < len(indices):
            waiting = {self._connections[index]: index for index in indices if index not in answers}
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                names = [self.names[index] for index in waiting.values()]
                raise RuntimeError(f"no answer within {_HANGS_S:.0f} s from {', '.join(names)}")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answer = connection.recv()
                except EOFError as error:
                    raise RuntimeError(f"{self.names[waiting[connection]]} is gone") from error
                if isinstance(answer, Exception):
                    raise answer
                answers[waiting[connection]] = answer
        return [answers[index] for index in indices]


def in_fresh_process(
    function: Callable[..., R], *arguments: Any, environment: Mapping[str, str] = MappingProxyType({})
) -> R:
    """`function(*arguments)` in a process of its own that has one thread, as forking needs it."""
    before = dict(os.environ)
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})  # else torch starts threads when imported
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            return alone.submit(function, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def fleet(model: Emulated, num_workers: int, num_micro_batches: int) -> Iterator[Fleet]:
    """`num_workers` processes that train `model` with N micro-batches a step; they end with the context."""
    configure_torch(1, "fast")
    chain = model.sections()
    names = [f"w{index}" for index in range(num_workers)]
    processes: list[Any] = []
    ours: list[Connection] = []
    assert len(os.listdir("/proc/self/task")) == 1, "only the calling thread is copied"
    gc.collect()
    gc.freeze()  # a child's collector would copy all pages of what it inherits, and stop it for a second
    try:
        for name in names:
            here, there = _FORK.Pipe()
            samples = MICROBATCH_SIZE * num_micro_batches
            worker = WorkerProcess(name, model, chain, samples)
            process = _FORK.Process(target=_live, args=(worker, there, here, list(ours)), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            ours.append(here)
        yield Fleet(ours, names, num_micro_batches)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _live(worker: WorkerProcess, connection: Connection, *not_ours: Any) -> None:
    torch.set_num_threads(1)
    worker.live(connection)
    os._exit(0)  # helper threads may still wait for messages


def _measured(reports: Sequence[Report]) -> Measured:
    ends = [max(times) for times in zip(*(report.applied_at for report in reports), strict=True)]
    steps_s = tuple(after - before for before, after in pairwise(ends))
    wall_s = ends[-1] - ends[0]
    cores = os.cpu_count() or 1
    return Measured(
        steps_s=steps_s,
        own_cpu=sum(report.cpu_s for report in reports) / wall_s / cores,
        idle_cpu=min(1.0, reports[0].machine_idle_s / wall_s / cores),
        bytes_per_s=sum(report.sent_bytes for report in reports) / wall_s,
        reports=tuple(reports),
    )
