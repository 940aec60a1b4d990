"""What the executor costs: figures from operations at known times, and the measurement itself."""

from __future__ import annotations

import threading

import pytest
from makara.pipeline import Dispatcher, Plan
from makara.pipeline.traffic import output_of
from makara.worker.execution.costs import Ran, all_at_once, costs_of, executor_costs, stand_in_plans


def played(plan: Plan, rest_s: float, gap_s: float, way_s: float) -> dict[int, list[Ran]]:
    """Each worker begins an operation `gap_s` after its last one, `way_s` after its input was sent."""
    dispatchers = {worker: Dispatcher(plan, worker) for worker in range(plan.num_workers)}
    ran: dict[int, list[Ran]] = {worker: [] for worker in dispatchers}
    arrivals: list[tuple[float, int, object]] = [(0.0, worker, None) for worker in dispatchers]
    while arrivals:
        arrivals.sort(key=lambda entry: entry[:2])
        at, worker, operation = arrivals.pop(0)
        if operation is not None:
            dispatchers[worker].arrived(operation)
        free_at = ran[worker][-1].ended + gap_s if ran[worker] else 0.0
        if at < free_at:  # it looks again when it is free
            arrivals.append((free_at, worker, None))
            continue
        task = dispatchers[worker].next()
        if task is None:
            continue
        ran[worker].append(Ran(task, at, at + rest_s))
        arrivals.append((at + rest_s + gap_s, worker, None))
        if target := output_of(plan, task):
            arrivals.append((at + rest_s + way_s, *target))
    return ran


def test_ways_and_gaps_are_told_apart() -> None:
    plans = stand_in_plans()
    ran = [played(plan, 0.006, 0.0002, 0.0009) for plan in plans]
    costs = costs_of(plans, ran, 0.0001)
    assert costs.operation_s == pytest.approx(0.0002)
    assert costs.message_s == pytest.approx(0.0007)
    assert costs.collective_s == 0.0001


def test_the_executor_is_measured_on_this_machine() -> None:
    costs = executor_costs()
    assert costs.operation_s > 0
    assert costs.message_s >= 0
    assert costs.collective_s > 0


def test_who_fails_first_is_told_not_who_waited_for_it() -> None:
    """Found: the first call's time-out hid why the call that it waited for had failed."""
    failed = threading.Event()

    def waits() -> None:
        assert failed.wait(30.0)
        raise TimeoutError("nobody came")

    def fails() -> None:
        try:
            raise ValueError("no memory")
        finally:
            threading.Timer(0.1, failed.set).start()

    with pytest.raises(ValueError, match="no memory"):
        all_at_once([waits, fails])
