"""Measures the executor's overhead on the time of sections, through the executor itself.

Three workers, as threads of one process, pass micro-batches over loopback. Instead of running sections each
sleeps as long as a short operation takes: in a real step the executor's code runs after a long operation,
with cold caches, several times slower than in a tight loop.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...model.data import Batches
from ...model.partition.partitioned_model import CutTensor
from ...pipeline import Plan, Range, grid
from ...pipeline.operations import Kind, Operation
from ...pipeline.traffic import output_of, own_part
from ..sections.ranges import RangeOutput, RangeRuntime
from .blocking import BlockingThread, Interrupt
from .executor import Executor, Sink
from .gloo import Listener, ProcessGroup, connect
from .p2p_channels import P2PChannels
from .prefetch import Prefetcher

_DEPTH = 3  # so that one worker has neighbours on both sides
_REST_S = 0.006
_NUM_HANDOVERS = 20
_SERIAL, _STEADY = 6, 12  # micro-batches: one at a time, and unlimited in flight
_VALUE = CutTensor("x", (1024,), "float32", needs_grad=True)
_GROUPS = {Kind.FORWARD: "activations", Kind.BACKWARD: "gradients"}

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ExecutorCosts:
    """Overheads in seconds; see the fields of the same names in `Calibration`."""

    operation_s: float
    message_s: float
    collective_s: float


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation as it ran, by `time.monotonic`."""

    operation: Operation
    began: float
    ended: float


def executor_costs() -> ExecutorCosts:
    """Measure; takes about a second. Loopback's own latency, some 20 us, is part of `message_s`."""
    plans = stand_in_plans()

    def rank_of(rank: int, channels: Mapping[Kind, ProcessGroup]) -> list[list[Ran]]:
        return [run_rank(plan, rank, channels) for plan in plans]

    found = _in_threads(rank_of)
    serial, steady = (dict(enumerate(rows)) for rows in zip(*found, strict=True))
    return costs_of(plans, (serial, steady), handover_s())


def stand_in_plans(replicas: int = 1) -> tuple[Plan, Plan]:
    """For `run_rank`: one micro-batch after the other, and as many as come, on pipelines of three."""
    stages = [Range(stage, stage + 1) for stage in range(_DEPTH)]
    serial = grid(stages, replicas, _SERIAL * replicas, window=1)
    return serial, grid(stages, replicas, _STEADY * replicas)


def run_rank(plan: Plan, rank: int, channels: Mapping[Kind, ProcessGroup]) -> list[Ran]:
    """One worker's step of a stand-in plan: its operations, in their order. `channels` are of all workers."""
    order, traffic = own_part(plan, rank)
    interrupt, resting = Interrupt(), _Resting()
    lanes = P2PChannels(traffic, lambda _: (_VALUE,), channels, interrupt, torch.device("cpu"))
    feed = Prefetcher(Batches([{"x": 0.0}], 0, 1, 1))
    executor = Executor(plan, rank, order, resting, lanes, feed)
    try:
        for step in range(2):  # the first makes connections
            resting.ran.clear()
            executor.run(step, Sink())
    finally:
        executor.close()
    return resting.ran


def costs_of(
    plans: tuple[Plan, Plan], ran: Sequence[Mapping[int, Sequence[Ran]]], handover: float
) -> ExecutorCosts:
    """Compute the costs from each worker's operations in the serial and the steady plan, and `handover_s`."""
    serial, steady = ran
    # The time from an operation's end to its successor's start is a message's, if the successor waited for
    # it; the gap between two operations of a worker is the executor's, if the second did not wait.
    alone, busy = _ways(plans[0], serial), _ways(plans[1], steady)
    ways = [way for way, gap in alone if gap > way]
    gaps = [gap for way, gap in busy if way > gap + _REST_S / 2]
    # On an overloaded machine there may be none of a kind: then the shortest is the best estimate.
    ways, gaps = ways or [min(alone)[0]], gaps or [min(gap for _, gap in busy)]
    operation_s = statistics.mean(gaps)
    return ExecutorCosts(operation_s, max(0.0, statistics.mean(ways) - operation_s), handover)


def handover_s() -> float:
    """Seconds from passing a collective to its thread until the compute thread has the result."""
    courier = BlockingThread("handover", Interrupt())
    times: list[float] = []
    for _ in range(_NUM_HANDOVERS):
        time.sleep(_REST_S)
        began = time.monotonic()
        courier.call(lambda: None)
        times.append(time.monotonic() - began)
    courier.close()
    return statistics.mean(times)


def _ways(plan: Plan, ran: Mapping[int, Sequence[Ran]]) -> list[tuple[float, float]]:
    """(message time, gap) of every operation that a message enables and that is not its worker's first."""
    ended = {entry.operation: entry.ended for entries in ran.values() for entry in entries}
    sent_at = {
        target[1]: ended[operation]
        for worker, entries in ran.items()
        for operation in (entry.operation for entry in entries)
        if (target := output_of(plan, operation)) is not None and target[0] != worker
    }
    return [
        (entry.began - sent_at[entry.operation], entry.began - before.ended)
        for entries in ran.values()
        for before, entry in pairwise(entries)
        if entry.operation in sent_at
    ]


class _Resting(RangeRuntime):
    """Sleeps in place of sections; each stage is one section."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.ran: list[Ran] = []

    def needs_batch(self, start: int, stop: int) -> bool:
        return False

    def forward(self, step: int, micro_batch: int, start: int, *_: Any, **__: Any) -> RangeOutput:
        return RangeOutput(self._rest(Operation(start, Kind.FORWARD, micro_batch)), None, {})

    def recompute(self, micro_batch: int, start: int) -> None:
        self._rest(Operation(start, Kind.RECOMPUTE, micro_batch))

    def backward(self, micro_batch: int, start: int, *_: Any, **__: Any) -> dict[str, Tensor]:
        return self._rest(Operation(start, Kind.BACKWARD, micro_batch))

    def _rest(self, operation: Operation) -> dict[str, Tensor]:
        began = time.monotonic()
        time.sleep(_REST_S)
        output = {_VALUE.name: torch.zeros(_VALUE.shape)}
        self.ran.append(Ran(operation, began, time.monotonic()))
        return output


def _in_threads(rank_of: Callable[[int, Mapping[Kind, ProcessGroup]], R]) -> list[R]:
    """Run `rank_of(rank, channels)` on a thread for each of the three workers; returns the results."""
    listener = Listener("127.0.0.1")
    endpoint = listener.endpoint

    def run(rank: int) -> R:
        store = listener.serve() if rank == 0 else connect(endpoint)
        channels = {
            kind: ProcessGroup(store, name, rank, range(_DEPTH), "127.0.0.1")
            for kind, name in _GROUPS.items()
        }
        found = rank_of(rank, channels)
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(_DEPTH)])  # rank 0 has the store
        return found

    return all_at_once([partial(run, rank) for rank in range(_DEPTH)])


def all_at_once(calls: Sequence[Callable[[], R]]) -> list[R]:
    """Run the first on this thread and the others on daemon threads; returns their results. Raises what the
    first of them to fail raised; the errors of those that waited for it come later."""
    found: dict[int, R] = {}
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(1, len(calls))]
    for thread in threads:
        thread.start()
    try:
        found[0] = calls[0]()
    except Exception as error:
        failed.append(error)
    for thread in threads if not failed else ():  # one of them may wait for the call that failed
        thread.join()
    if failed:
        raise failed[0]
    return [found[number] for number in range(len(calls))]
