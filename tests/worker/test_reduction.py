"""The sums of a step: each begins when this worker's share is complete, all in one order, on the courier."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from makara.morphing.in_flight import StepId
from makara.pipeline import Kind, Operation, Plan, Range, grid, orders
from makara.worker.execution.blocking import BlockingThread, Interrupt
from makara.worker.execution.buckets import Bucket
from makara.worker.execution.in_flight import InFlight
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.reduction import Expected, Reduction
from makara.worker.sections.ranges import RangeOutput
from makara.worker.sections.runtime import Piece

SECTIONS = 3


class Peers:
    """A group of two in which the other adds what this one brings; it notes what was summed."""

    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def sum(self, tensor: torch.Tensor) -> None:
        self.seen.append(self.name)
        tensor.mul_(2)

    def max(self, tensor: torch.Tensor) -> None:
        raise AssertionError("`fast` has no maxima")


class Everyone(Peers):
    """The other's micro-batches have the losses of this one's."""

    def sum(self, tensor: torch.Tensor) -> None:
        self.seen.append(self.name)
        own = tensor[tensor[:, 2] == 1.0]
        tensor[tensor[:, 2] == 0.0] = own


def reduction(plan: Plan, seen: list[str]) -> tuple[Reduction, InFlight, Callable[[], None], BlockingThread]:
    """(the sums, the step in flight, what begins a step, the thread for collectives).

    Rank 0 of two replicas that host all sections; `wK` belongs to section K, `tied` to 0 and 2.
    """
    courier = BlockingThread("test", Interrupt())
    names = {(2,): "w2", (1,): "w1", (0, 2): "tied", (0,): "w0"}
    buckets = [Bucket(used, (name,), (0, 1)) for used, name in names.items()]
    session: Any = SimpleNamespace(
        plan=plan,
        rank=0,
        courier=courier,
        everyone=Everyone(seen, "tally"),
        hosts=lambda bucket: Peers(seen, bucket.names[0]),
    )
    shapes = {name: torch.zeros(2) for name in names.values()}
    chain: Any = SimpleNamespace(traced=SimpleNamespace(tensors=shapes), shared={"tied": (0, 2)}, sections=())
    in_flight = InFlight(PartialSums(chain, plan.num_micro_batches, "fast"))
    sums = Reduction(session, buckets, in_flight, plan.num_micro_batches, torch.device("cpu"))

    def begin() -> None:
        in_flight.begin(StepId(0, 0, 0), buckets, 0, plan.num_micro_batches, {}, 1.0)
        sums.begin(Expected.of(plan, orders(plan)[0]))

    return sums, in_flight, begin, courier


def run(sums: Reduction, task: Operation) -> None:
    if task.kind is Kind.FORWARD:
        sums.forwarded(task.micro_batch, RangeOutput({}, Piece(1.0 + task.micro_batch, 1.0), {}))
        return
    for section in reversed(range(SECTIONS)):
        names = [f"w{section}", *(["tied"] if section != 1 else [])]
        for name in names:
            sums.gradient(task.micro_batch, section, name, torch.ones(2))
        sums.section_done(task.micro_batch, section)


def flush(courier: BlockingThread) -> None:
    courier.call(lambda: None)


def test_a_sum_begins_with_the_last_backward_of_its_sections_after_the_tally() -> None:
    plan = grid([Range(0, SECTIONS)], 2, 4)
    seen: list[str] = []
    sums, in_flight, begin, courier = reduction(plan, seen)
    for _ in range(2):
        seen.clear()
        begin()
        order = orders(plan)[0]
        forwards_left = sum(task.kind is Kind.FORWARD for task in order)
        for task in order[:-1]:
            forwards_left -= task.kind is Kind.FORWARD
            run(sums, task)
            flush(courier)
            assert seen == (["tally"] if not forwards_left else [])
        last = order[-1].micro_batch
        began = {2: ["tally", "w2"], 1: ["tally", "w2", "w1"], 0: ["tally", "w2", "w1", "tied", "w0"]}
        for section in (2, 1, 0):  # the last backward
            assert seen == began.get(section + 1, ["tally"])
            sums.gradient(last, section, f"w{section}", torch.ones(2))
            if section != 1:
                sums.gradient(last, section, "tied", torch.ones(2))
            sums.section_done(last, section)
            flush(courier)
        assert seen == began[0]
        step = sums.finish(lambda call: None)
        # Two of the four micro-batches are this worker's; the group doubles what it brings.
        assert step.loss == (1.0 + 1.0 + 3.0 + 3.0) / 4.0
        totals = {total.bucket.names[0]: total.gradients.gradients for total in step.buckets}
        assert {name: total[name].tolist() for name, total in totals.items()} == {
            "tied": [2.0, 2.0],
            "w2": [1.0, 1.0],
            "w1": [1.0, 1.0],
            "w0": [1.0, 1.0],
        }
        own = {used: total.gradients.buffer.tolist() for used, total in in_flight.parcels.sums().items()}
        assert own == {(0, 2): [4.0, 4.0], (2,): [2.0, 2.0], (1,): [2.0, 2.0], (0,): [2.0, 2.0]}


def test_sums_cannot_be_finished_while_operations_are_left() -> None:
    sums, _, begin, _ = reduction(grid([Range(0, SECTIONS)], 2, 2), [])
    begin()
    with pytest.raises(AssertionError, match="operations are left"):
        sums.finish(lambda call: None)
